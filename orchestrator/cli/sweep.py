"""`reuse-sweep sweep`: its command line and --config file, and the start of the sweep.

A value comes from its flag, else from the file given by --config, else it is the default.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from orchestrator.cli.console import Parser, add_settings, aliases, announce, as_typed, parse_flags, say
from orchestrator.core.system import GPU_PROFILES, DeviceProfile
from orchestrator.planning.fields import Setting, as_flags, display, is_url, read_bool
from orchestrator.planning.settings import ALL_SETTINGS, PolicyGrid, SweepSettings
from sampler.errors import InputError, InputErrors, Problems, counted, did_you_mean
from sampler.policy import ReusePolicy

if TYPE_CHECKING:
    from orchestrator.progress.status import SweepStatus

EXAMPLES = """examples:
  reuse-sweep sweep --tasks gsm8k,minerva_math --limit 100
      nine configurations: k = 1, 2, 3 with the first, middle and last layers
  reuse-sweep sweep --tasks gsm8k --policies k1,k2_middle,k2_middle.small --threshold 0.9,0.95
  reuse-sweep sweep --tasks gsm8k,mmlu --k 1,2 --reuse residual,output --name reuse-modes --dry-run
  reuse-sweep sweep --config sweep.yaml --limit 500
Run the same command again to continue a sweep. More policies, more tasks or a larger --limit extend it.
"""
SEARCHED_RULES = {"adaptive": (0.1, 0.2, 0.4), "trim": (0.1, 0.25, 0.5), "mlp": (2, 3), "attn": (2, 3)}
NOT_READ = ("not-read",)  # stands for tasks that could not be read, so that the other settings are still checked
EXCLUSIVE = (({"policies"}, {"k", "subsets", "reuse"}), ({"limit"}, {"sample"}))
ONLY_FLAGS = ("config", "save-config", "dry-run", "device-profile", "force", "help")  # not allowed in a file


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCommand:
    """A parsed command line. Created by `parse_sweep`; read by `sweep`, `run_sweep.run` and the Slurm command."""

    settings: SweepSettings
    dry_run: bool = False
    device_profile: DeviceProfile | None = None  # plan for this GPU instead of running the sweep
    force: tuple[str, ...] | None = None  # policies to rerun; () is all of them, None is none
    save_config: Path | None = None


def sweep(arguments: Sequence[str]) -> None:
    command = parse_sweep(arguments)
    if command.save_config is not None:
        save_config(command.save_config, command.settings)
    if command.device_profile is not None:
        announce("planning")
        print_plan(command.settings, command.device_profile)
        return
    from orchestrator.running import environment
    from orchestrator.running.environment import check_listening, is_this_machine, only_on_loopback
    from orchestrator.running.stop import Aborted, StopSignals
    from orchestrator.store import StoreError

    program = sys.orig_argv[: len(sys.orig_argv) - len(arguments)]  # as it was called, without the flags
    rerun = shlex.join([*program, *without_force(arguments)])
    stop = StopSignals(exit_message=f"stopped; continue with: {rerun}")
    announce("checking the model, the benchmarks and this machine")
    try:
        stop.install()
        address = environment.cluster_address(command.settings.address)
        if address is not None and command.settings.address is None:
            print(f"joining the Ray cluster at {address} (RAY_ADDRESS)", flush=True)
        command = replace(command, settings=replace(command.settings, address=address))
        if address is None:
            environment.prepare(local=True)
        else:
            check_listening(address)
            environment.prepare(local=only_on_loopback(address), token=is_this_machine(address))
        if command.settings.search is None:  # these import torch and Ray: not before the flags are checked
            from orchestrator.cli.run_sweep import run
        else:
            from orchestrator.cli.search import search as run
        failed = run(command, list(arguments), stop)
    except KeyboardInterrupt:  # Interrupted, or what Ray turns it into
        stop.exit_now()
    except (Aborted, StoreError) as error:
        *others, last = error.sentences if isinstance(error, Aborted) else (str(error),)
        for sentence in (*others, f"{last}; continue with: {rerun}"):
            say(f"error: {sentence}", error=True)
        sys.exit(1)
    if failed:
        print(f"{counted(failed, 'trial')} failed; retry with: {rerun}", file=sys.stderr)
        sys.exit(1)


def print_plan(settings: SweepSettings, device: DeviceProfile) -> None:
    """Prints the plan of a sweep for a GPU that this machine does not have."""
    from orchestrator.planning.forecast import describe_plan
    from orchestrator.planning.machine import Machine
    from orchestrator.planning.preflight import prepare

    prepared = prepare(settings, Machine.planned(device, settings))
    title = f"plan for a GPU that this project has never been run on: {device.label}"
    say(title, *describe_plan(prepared), sep="\n")


def sweep_parser() -> Parser:
    parser = Parser(
        prog="reuse-sweep sweep",
        description="Runs layer-reuse policies over benchmarks on Ray and stores one row per document.",
        examples=EXAMPLES,
    )
    parser.usage = f"{parser.prog} --tasks A,B [flags]"
    add_settings(parser, ALL_SETTINGS)
    run = next(group for group in parser._action_groups if group.title == ALL_SETTINGS["quiet"].group)
    run.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="read settings, named like these flags, from a file; flags take precedence",
    )
    run.add_argument("--save-config", metavar="FILE.yaml", help="write the settings to a file for --config")
    run.add_argument("--dry-run", action="store_true", help="only print the plan: trials, time, memory and disk space")
    run.add_argument(
        "--device-profile",
        metavar="GPU",
        help=f"with --dry-run: plan for a GPU that is not here, without the model's files: {', '.join(GPU_PROFILES)}",
    )
    run.add_argument(
        "--force",
        nargs="*",
        metavar="POLICY",
        help="rerun the finished trials of these policies (default: of all)",
    )
    return parser


def parse_sweep(arguments: Sequence[str]) -> SweepCommand:
    """Parses the command line of a sweep, without the program's name; raises an InputError with all problems."""
    problems = Problems()
    typed = parse_flags(sweep_parser(), ALL_SETTINGS, arguments, problems)
    config, save_to, dry_run, force, device = (
        typed.pop(name, None) for name in ("config", "save_config", "dry_run", "force", "device_profile")
    )
    from_file: Mapping[str, Any] = {}
    if config is not None:
        from_file = {"tasks": list(NOT_READ)}  # if the file cannot be read, tasks may be in it
        with problems.collect():
            from_file = read_config(Path(config), problems)
    with problems.collect():
        settings = merge_settings(typed, from_file, str(config), as_typed(ALL_SETTINGS, arguments))
        forced = None if force is None else _forced(force, settings.all_policies)
        profile = None if device is None else _device_profile(device, settings, dry_run=bool(dry_run))
    problems.check()
    return SweepCommand(
        settings=settings,
        dry_run=bool(dry_run),
        device_profile=profile,
        force=forced,
        save_config=None if save_to is None else Path(save_to),
    )


def merge_settings(
    typed: Mapping[str, Any],
    from_file: Mapping[str, Any],
    file: str = "",
    settings_typed: Mapping[str, Setting] = ALL_SETTINGS,
) -> SweepSettings:
    """Settings from raw values by field name. Typed values take precedence over those of a file."""
    from_file = {name: raw for name, raw in from_file.items() if not _overridden(name, typed)}
    values: dict[str, Any] = {}
    problems = Problems()
    for name, raw in {**from_file, **typed}.items():
        setting = settings_typed[name]
        with problems.collect():
            values[name] = setting.read(setting.flag if name in typed else f"{file}: {setting.key}", raw)
            if setting.typed_as and (wrong := list(setting.problems(values[name]))):  # SweepSettings has other names
                del values[name]
                raise InputErrors(wrong)
    with problems.collect():
        _replace_grid(values)
    if "search" in values:
        values.setdefault("policies", searched_policies())
    if "tasks" not in from_file and "tasks" not in typed:
        problems.sentences.append(ALL_SETTINGS["tasks"].missing)
    out = values.get("out", "")
    if is_url(out):  # SweepSettings accepts it: sweeps of earlier versions stay readable
        got = f"{out.partition('://')[0]}://…"
        problems.sentences.append(f"--out must be a local directory (got {got}); --upload copies results to a URL")
    with problems.collect():
        settings = SweepSettings(**{"tasks": NOT_READ, **values})
    problems.check()
    return settings


def searched_policies() -> tuple[str, ...]:
    """The policies that --search chooses from if none are listed."""
    rules = [f"k{k}_{{}}{option}" for k in (2, 3, 4) for option in ("", ".small")]
    rules += [f"{rule}={value}_{{}}" for rule, values in SEARCHED_RULES.items() for value in values]
    return tuple(rule.format(subset) for rule in (*rules, "skip_{}") for subset in ("first", "middle", "last", "all"))


def _overridden(name: str, typed: Mapping[str, Any]) -> bool:
    """Whether a flag that was typed excludes this setting of a file."""
    pairs = (*EXCLUSIVE, *((second, first) for first, second in EXCLUSIVE))
    return any(name in excluded and flags & typed.keys() for excluded, flags in pairs)


def _replace_grid(values: dict[str, Any]) -> None:
    """Replaces --k, --subsets and --reuse by the policies that they describe."""
    grid = {item.name: values.pop(item.name) for item in fields(PolicyGrid) if item.name in values}
    if grid and "policies" in values:
        raise InputError(f"--policies and --{next(iter(grid))} must not be used together: choose names or a grid")
    if grid:
        values["policies"] = PolicyGrid(**grid).policies


def _forced(words: Sequence[str], policies: Sequence[str]) -> tuple[str, ...]:
    """The policies named by --force, which must be among those of the sweep."""
    try:
        names = [str(ReusePolicy.parse(name)) for word in words for name in word.split(",") if name]
    except InputError as error:
        raise InputError(f"--force: {error}") from None
    unknown = [name for name in names if name not in policies]
    if unknown:
        raise InputError(f"--force must name policies of this sweep: {', '.join(policies)} (got {', '.join(unknown)})")
    return tuple(dict.fromkeys(names))


def _device_profile(name: str, settings: SweepSettings, *, dry_run: bool) -> DeviceProfile:
    profile = GPU_PROFILES.get(name.lower())
    if profile is None:
        raise InputError(f"--device-profile must be one of {', '.join(GPU_PROFILES)} (got {name!r})")
    if not dry_run:
        raise InputError(f"--device-profile {name} only plans a sweep, for a GPU that is not here: add --dry-run")
    if settings.address is not None:
        raise InputError(f"--device-profile {name} and --address must not be used together: choose what to plan for")
    if settings.gpus_per_actor == 0:
        raise InputError(f"--device-profile {name} is a GPU: omit --gpus-per-actor 0")
    return profile


def without_force(arguments: Sequence[str]) -> list[str]:
    """The command line that continues this one: --force would rerun everything again."""
    kept: list[str] = []
    forced = False
    for argument in arguments:
        forced = argument == "--force" or (forced and not argument.startswith("--"))
        if not forced and not argument.startswith("--force="):
            kept.append(argument)
    return kept


def continue_line(status: "SweepStatus") -> str:
    """How to run everything that is missing: a line with the command."""
    from orchestrator.store.reader import SLURM_FOLDER

    if (status.folder / SLURM_FOLDER).is_dir():
        return "submit the job again to continue"
    location = {"out": str(status.folder.resolve().parent), "name": status.folder.resolve().name}
    try:
        flags = as_flags(SweepSettings.from_dict({**status.record["settings"], **location}))
    except (InputError, TypeError):  # written by another version
        return "to continue, run the same command with every task and policy above"
    return f"continue with: {shlex.join(['reuse-sweep', 'sweep', *flags])}"


# The settings in a YAML file, by the names of the flags with - or _


class _UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses duplicate keys, of which PyYAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise InputError(f"{key!r} occurs twice, in line {node.value[index][0].start_mark.line + 1}")
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]


def read_config(path: Path, problems: Problems) -> dict[str, Any]:
    """Raw values by field name. A key whose value is null is left out: it means the default.

    Wrong keys are added to `problems`; a file that cannot be read at all is an InputError.
    """
    try:
        content = yaml.load(path.read_bytes(), _UniqueKeyLoader)  # a SafeLoader: plain values only
    except OSError as error:
        raise InputError(f"--config {path} cannot be read ({error.strerror})") from None
    except InputError as error:
        raise InputError(f"--config {path}: {error}") from None
    except RecursionError:
        raise InputError(f"--config {path} is not valid YAML (it is nested too deeply)") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise InputError(f"--config {path} is not valid YAML (line {line}: {error.problem})") from None
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        line = path.read_bytes()[: getattr(error, "position", 0)].count(b"\n") + 1
        raise InputError(f"--config {path} is not valid YAML (line {line}: {reason})") from None
    if not isinstance(content, dict | None):
        raise InputError(f"--config {path} must contain keys and values such as limit: 100, not a list or a text")
    names = {setting.key: name for name, setting in ALL_SETTINGS.items()}
    negated = {f"no-{setting.key}": setting.key for setting in ALL_SETTINGS.values() if setting.negatable}
    known_aliases = aliases(ALL_SETTINGS)
    values: dict[str, Any] = {}
    for key, value in (content or {}).items():
        written = str(key).replace("_", "-")
        written = known_aliases.get(written, written)
        with problems.collect():
            name = names.get(negated.get(written, written))
            if name is None:
                raise InputError(f"--config {path}: {_unknown(str(key), written, list(names))}")
            if name in values:
                raise InputError(f"--config {path}: {key!r} occurs twice")
            values[name] = value if written not in negated or value is None else not read_bool(f"{path}: {key}", value)
    return {name: value for name, value in values.items() if value is not None}


def _unknown(key: str, written: str, known: list[str]) -> str:
    if written in ONLY_FLAGS:
        return f"{key!r} must be given on the command line, not in a file"
    return f"unknown setting {key!r}; " + did_you_mean(written, known, otherwise=f"known: {', '.join(known)}")


def save_config(path: Path, settings: SweepSettings) -> None:
    """Writes the settings for --config, the whole file or nothing. Those that are None are left to the defaults."""
    values = {ALL_SETTINGS[name].key: value for name, value in settings.as_dict().items() if value is not None}
    values |= {
        key: [display(item) if isinstance(item, bool) else item for item in value]
        for key, value in values.items()
        if isinstance(value, list)
    }
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"--save-config {path} cannot be written ({error.strerror})") from None
