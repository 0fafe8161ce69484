"""The sweep's command line: flags, lm-eval's spellings of them, and which values win. Runs nothing.

A value comes from the defaults, else the file given by --config, else the flags, the last one wins. Flags and file go
through the same readers, so a value means the same in both.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.core.errors import Problems
from orchestrator.planning import config_file, values
from orchestrator.planning.settings import LISTS, SweepSettings, is_url, policies_of
from sampler.cli import Parser
from sampler.errors import InputError
from sampler.policy import ReusePolicy

EXAMPLES = """examples:
  python -m orchestrator.sweep --tasks gsm8k,minerva_math --limit 100
      nine configurations: k = 1, 2, 3 with first, middle and last layers
  python -m orchestrator.sweep --tasks gsm8k --policies k1,k2_middle,k2_middle.small --threshold 0.9,0.95
  python -m orchestrator.sweep --tasks gsm8k,mmlu --k 1,2 --reuse residual,output --name reuse-modes --dry-run
  python -m orchestrator.sweep --config sweep.yaml --limit 500
The same command again continues; more policies, tasks or a larger --limit extend a sweep.
"""

# What lm-eval calls a flag that has another name here; _ and - are the same in all of them.
ELSEWHERE = {
    "--num-fewshot": "--fewshot",
    "--output-path": "--out",
    "--max-gen-toks": "--max-new-tokens",
    "--apply-chat-template": "--chat-template",
    "--confirm-run-unsafe-code": "--allow-code-execution",
}
UNREAD = ("unread",)  # tasks, where those given are wrong: the other settings are checked all the same
RIVALS = (({"policies"}, {"k", "subsets", "reuse"}), ({"limit"}, {"sample"}))  # of two, the one on the command line


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """A setting that flags and configuration files can give. `shown` is None for a switch."""

    group: str
    read: values.Reader
    shown: str | None
    help: str
    negatable: bool = False
    repeatable: bool = False


_names, _wholes, _numbers = values.many(values.text), values.many(values.whole), values.many(values.number)
GRID, MODEL, MACHINE, RUN = "Grid", "Model and data", "Machine", "Run"
FLAGS: Mapping[str, Flag] = {
    name: Flag(
        group=group,
        read=read,
        shown=shown,
        help=text,
        negatable=name in ("chat-template", "dashboard"),
        repeatable=name in ("resources", "callback"),
    )
    for group, rows in {
        GRID: (
            ("tasks", _names, "A,B", "benchmarks, as python -m tasks.list shows them, or any of lm-eval's"),
            ("k", _wholes, "N,N", "recompute on each N-th pass of a block (default: 1,2,3)"),
            (
                "subsets",
                _names,
                "S,S",
                "layers that are replayed: first, middle, last, all (default: first,middle,last)",
            ),
            ("reuse", _names, "M,M", "residual or output: what is replayed (default: residual)"),
            ("policies", _names, "P,P", "instead of the three above, by name: k1,k2_middle,k3_last.output"),
            ("threshold", _numbers, "T,T", "reveal what is surer than this; 1: one by one (default: 0.95)"),
            ("small-block", _wholes, "N,N", "positions denoised at a time (default: 8)"),
            ("block-cache", values.many(values.switch), "on,off", "small passes where possible (default: on)"),
        ),
        MODEL: (
            ("model", values.text, "M", "a folder or Hub id[@revision]; auto: the 7B where there are GPUs, else tiny"),
            ("data", values.text, "D", "hub, bundled or a folder laid out like the Hub (default: to fit the model)"),
            ("limit", values.whole, "N", "the first N documents, of each subject in a group (default: all)"),
            ("sample", values.whole, "N", "a random N instead, spread over the subjects"),
            ("fewshot", values.whole, "N", "worked examples in the prompt (default: as the task says)"),
            ("chat-template", values.switch, None, "ask as the model's chat template says (default) or in plain text"),
            ("subset-size", values.whole, "N", "layers in first, middle, last (default: 12, or a third)"),
            ("dtype", values.text, "T", "auto, float32, bfloat16 or float16 (default: auto)"),
            ("batch-size", values.whole, "N", "documents decoded together (default: 1)"),
            ("max-new-tokens", values.whole, "N", "most tokens of an answer (default: as the task says)"),
            ("repeats", values.whole, "N", "how often each trial is run (default: 1)"),
            ("seed", values.whole, "N", "of the random sample and the order of trials (default: 0)"),
            ("shard-size", values.whole, "N", "documents of a task in one trial (default: 50)"),
        ),
        MACHINE: (
            ("actors", values.whole, "N", "models loaded at a time (default: as many as there is room for)"),
            ("gpus-per-actor", values.number, "X", "0.5 packs two on a GPU (default: 1, or 0 without GPUs)"),
            ("cpus-per-actor", values.number, "X", "cores reserved for each (default: 1)"),
            ("threads-per-actor", values.whole, "N", "threads each computes with (default: 1 on a CPU)"),
            ("accelerator-type", values.text, "T", "GPU model that actors need, as Ray names it: A100, H100, T4"),
            ("resources", _names, "NAME=X,…", "custom Ray resources that each actor needs (repeatable)"),
            ("address", values.text, "A", "of a running Ray cluster (default: start one here)"),
            ("wait-for-nodes", values.number, "S", "seconds to wait for an autoscaler's first node (default: 1800)"),
            ("dashboard", values.switch, None, "Ray's dashboard, on this machine only (default: yes)"),
            ("worker-timeout", values.number, "S", "seconds until an actor that hangs is replaced (default: 600)"),
            ("callback", _names, "MODULE:CLASS", "a Ray Tune callback to add (repeatable)"),
        ),
        RUN: (
            ("out", values.text, "DIR", "folder of sweeps (default: results)"),
            ("name", values.text, "NAME", "folder of this one in it (default: as the model is called)"),
            ("upload", values.text, "URL", "copy the sweep there as it grows: s3://, gs:// or file://"),
            ("skip-unavailable", values.switch, None, "leave out tasks that cannot be had, instead of an error"),
            ("allow-code-execution", values.switch, None, "run generated programs, in a cage"),
            ("unsafe-code-execution", values.switch, None, "run them even where there is no cage"),
            ("margin", values.number, "X", "points accuracy may drop, declared in advance (default: 5)"),
            ("speedup", values.number, "X", "factor that counts as faster, declared in advance (default: 1.2)"),
            ("quiet", values.switch, None, "no view while it runs"),
        ),
    }.items()
    for name, read, shown, text in rows
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What was asked for: a sweep, and what to do about it."""

    settings: SweepSettings
    dry_run: bool = False
    force: tuple[str, ...] | None = None  # policies to run again; (): all of them, None: none
    save_config: Path | None = None


def parse(arguments: Sequence[str]) -> Command:
    """The command line without the program's name. Whatever is wrong with it is told at once."""
    problems = Problems()
    found, unknown = parser().parse_known_args([_spelled(argument) for argument in arguments])
    if unknown:
        problems.sentences.append(f"unrecognized arguments: {' '.join(unknown)} (see --help)")
    given = vars(found)
    actions = {name: given.pop(name, None) for name in ("config", "save_config", "dry_run", "force")}
    typed = {name.replace("_", "-"): raw for name, raw in given.items()}
    filed: Mapping[str, Any] = {}
    if actions["config"] is not None:
        filed = {"tasks": list(UNREAD)}  # for all that is known, if it cannot be read
        with problems.collect():
            filed = config_file.read(Path(actions["config"]), FLAGS, ELSEWHERE, problems)
    with problems.collect():
        settings = settings_of(typed, filed, str(actions["config"]))
        force = None if actions["force"] is None else _forced(actions["force"], settings.policies)
    problems.check()
    return Command(
        settings=settings,
        dry_run=bool(actions["dry_run"]),
        force=force,
        save_config=None if actions["save_config"] is None else Path(actions["save_config"]),
    )


def without_force(arguments: Sequence[str]) -> list[str]:
    """The command line that goes on where this one was interrupted: --force would begin once more."""
    kept: list[str] = []
    forced = False
    for argument in arguments:
        forced = argument == "--force" or (forced and not argument.startswith("--"))
        if not forced and not argument.startswith("--force="):
            kept.append(argument)
    return kept


def settings_of(typed: Mapping[str, Any], filed: Mapping[str, Any], file: str = "") -> SweepSettings:
    """Settings from raw values by flag name, those typed before those of a file."""
    filed = {name: raw for name, raw in filed.items() if not _beaten(name, typed)}
    read: dict[str, Any] = {}
    problems = Problems()
    for name, raw in {**filed, **typed}.items():
        label = f"--{name}" if name in typed else f"{file}: {name}"
        with problems.collect():
            read[name.replace("-", "_")] = FLAGS[name].read(label, raw)
    with problems.collect():
        _combine(read)
    if "tasks" not in filed and "tasks" not in typed:
        problems.sentences.append(f"--tasks is missing: {LISTS['tasks']}")
    out = read.get("out", "")
    if is_url(out):  # not a check of the settings: folders of earlier versions stay readable
        got = f"{out.partition('://')[0]}://…"
        problems.sentences.append(f"--out must be a local directory (got {got}); --upload copies results to a URL")
    with problems.collect():
        settings = SweepSettings(**{"tasks": UNREAD, **read})
    problems.check()
    return settings


def _beaten(name: str, typed: Mapping[str, Any]) -> bool:
    """Whether a flag excludes what a file says."""
    return any(name in one and other & typed.keys() for pair in RIVALS for one, other in (pair, pair[::-1]))


def _combine(read: dict[str, Any]) -> None:
    """--k × --subsets × --reuse become policies."""
    grid = {name: read.pop(name) for name in ("k", "subsets", "reuse") if name in read}
    if grid and "policies" in read:
        raise InputError(f"--policies and --{next(iter(grid))} exclude each other: names of policies or a grid of them")
    if grid:
        renamed = {"k": "periods", "subsets": "subsets", "reuse": "modes"}
        read["policies"] = policies_of(**{renamed[name]: value for name, value in grid.items()})


def _forced(words: Sequence[str], policies: Sequence[str]) -> tuple[str, ...]:
    names = [str(ReusePolicy.parse(name)) for word in words for name in word.split(",") if name]
    unknown = [name for name in names if name not in policies]
    if unknown:
        raise InputError(f"--force {', '.join(unknown)}: this sweep has {', '.join(policies)}")
    return tuple(dict.fromkeys(names))


def _spelled(argument: str) -> str:
    """A flag as it is written here."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    flag = flag.replace("_", "-")
    return f"{ELSEWHERE.get(flag, flag)}{equals}{value}"


class _Repeatable(argparse.Action):
    """Joins the values of a repeated flag into one comma-separated list."""

    def __call__(self, _: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        del option
        earlier = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if earlier is None else f"{earlier},{values}")


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="python -m orchestrator.sweep",
        description="Runs reuse policies over benchmarks on Ray, with warm models, and keeps a row for each document.",
        examples=EXAMPLES,
    )
    made.usage = f"{made.prog} --tasks A,B [flags]"
    groups = {title: made.add_argument_group(title) for title in (GRID, MODEL, MACHINE, RUN)}
    for name, flag in FLAGS.items():
        group, common = groups[flag.group], {"help": flag.help, "default": argparse.SUPPRESS}
        if flag.repeatable:
            group.add_argument(f"--{name}", metavar=flag.shown, action=_Repeatable, **common)  # type: ignore[arg-type]
        elif flag.shown is not None:
            group.add_argument(f"--{name}", metavar=flag.shown, **common)  # type: ignore[arg-type]
        elif flag.negatable:
            group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, **common)  # type: ignore[arg-type]
        else:
            group.add_argument(f"--{name}", action="store_true", **common)  # type: ignore[arg-type]
    run = groups[RUN]
    run.add_argument("--config", metavar="FILE.yaml", help="settings by the names of these flags; flags win")
    run.add_argument("--save-config", metavar="FILE.yaml", help="write the settings there, for --config")
    run.add_argument("--dry-run", action="store_true", help="only say how many trials, how long, how much disk")
    run.add_argument("--force", nargs="*", metavar="POLICY", help="run again what is done, of all or these policies")
    return made
