"""Command-line flags from declared settings, and the command line of a sweep.

A value of a sweep comes from its flag, else from the file given by --config, else it is the default.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.cli import config_file
from orchestrator.cli.console import Parser
from orchestrator.core.errors import Problems
from orchestrator.planning.fields import OPTIONS, Setting, settings_of
from orchestrator.planning.settings import ALL_SETTINGS, PolicyGrid, SweepCommand, SweepSettings, is_url
from sampler.errors import InputError
from sampler.policy import ReusePolicy

T = TypeVar("T")
EXAMPLES = """examples:
  reuse-sweep sweep --tasks gsm8k,minerva_math --limit 100
      nine configurations: k = 1, 2, 3 with the first, middle and last layers
  reuse-sweep sweep --tasks gsm8k --policies k1,k2_middle,k2_middle.small --threshold 0.9,0.95
  reuse-sweep sweep --tasks gsm8k,mmlu --k 1,2 --reuse residual,output --name reuse-modes --dry-run
  reuse-sweep sweep --config sweep.yaml --limit 500
Run the same command again to continue a sweep. More policies, more tasks or a larger --limit extend it.
"""
NOT_READ = ("not-read",)  # tasks if they could not be read: the other settings are checked nevertheless
EXCLUSIVE = (({"policies"}, {"k", "subsets", "reuse"}), ({"limit"}, {"sample"}))


def add_settings(parser: argparse.ArgumentParser, settings: Mapping[str, Setting]) -> None:
    """Adds a flag for each setting. The values stay text; a flag that is not given is absent from the namespace."""
    groups: dict[str, Any] = {OPTIONS: parser}
    for setting in settings.values():
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        group = groups[setting.group]
        common: dict[str, Any] = {"help": setting.full_help.replace("%", "%%"), "default": argparse.SUPPRESS}
        if setting.positional:
            number = "+" if setting.many else None
            group.add_argument(setting.name, metavar=setting.metavar, nargs=number, help=common["help"])
        elif setting.negatable:
            group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **common)
        elif setting.kind is bool and not setting.many:
            group.add_argument(setting.flag, action="store_true", **common)
        else:
            action = "append" if setting.repeatable else "store"
            group.add_argument(setting.flag, metavar=setting.metavar, action=action, **common)


def normalize(arguments: Sequence[str], settings: Mapping[str, Setting]) -> list[str]:
    """Flags with - for _ and by their main name; lm-eval writes --num_fewshot."""
    names = aliases(settings)
    return [_normalize(argument, names) for argument in arguments]


def _normalize(argument: str, names: Mapping[str, str]) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    key = flag[2:].replace("_", "-")
    return f"--{names.get(key, key)}{equals}{value}"


def aliases(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Keys by their aliases."""
    return {alias: setting.key for setting in settings.values() for alias in setting.aliases}


def parse_values(parser: Parser, settings: Mapping[str, Setting], arguments: Sequence[str]) -> dict[str, Any]:
    """Checked values of all settings; an InputError has every problem."""
    problems = Problems()
    add_settings(parser, settings)
    parser.usage = parser.usage or _usage(parser.prog, settings)
    given = _parse_known(parser, normalize(arguments, settings), problems)
    values: dict[str, Any] = {}
    for name, setting in settings.items():
        if name in given:
            with problems.collect():
                values[name] = setting.read(setting.flag, _joined(setting, given[name]))
                problems.sentences += setting.problems(values[name])
        elif setting.required:
            problems.sentences.append(setting.missing)
        else:
            values[name] = setting.default
    problems.check()
    return values


def _usage(prog: str, settings: Mapping[str, Setting]) -> str:
    required = [setting for setting in settings.values() if setting.required]
    words = [f"{setting.flag} {setting.metavar}" for setting in required if not setting.positional]
    words += [setting.metavar + (" ..." if setting.many else "") for setting in required if setting.positional]
    return " ".join([prog, *words, "[flags]"])


def parse_options(parser: Parser, cls: type[T], arguments: Sequence[str]) -> T:
    """The options of a command, declared by the fields of a dataclass."""
    return cls(**parse_values(parser, settings_of(cls), arguments))


def _parse_known(parser: Parser, arguments: list[str], problems: Problems) -> dict[str, Any]:
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        problems.sentences.append(f"unrecognized arguments: {' '.join(unknown)} (see --help)")
    return vars(found)


def _joined(setting: Setting, raw: Any) -> Any:
    """The values of a repeated flag as one comma-separated list."""
    return ",".join(raw) if setting.repeatable and not setting.verbatim and isinstance(raw, list) else raw


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
        "--config", metavar="FILE.yaml", help="settings by the names of these flags; flags take precedence"
    )
    run.add_argument("--save-config", metavar="FILE.yaml", help="write the settings to a file for --config")
    run.add_argument(
        "--dry-run", action="store_true", help="only print the number of trials, the time and the disk space"
    )
    run.add_argument("--force", nargs="*", metavar="POLICY", help="rerun finished trials, of all policies or of these")
    return parser


def parse_sweep(arguments: Sequence[str]) -> SweepCommand:
    """The command line of a sweep, without the program's name; an InputError has every problem."""
    problems = Problems()
    given = _parse_known(sweep_parser(), normalize(arguments, ALL_SETTINGS), problems)
    config, save_config, dry_run, force = (
        given.pop(name, None) for name in ("config", "save_config", "dry_run", "force")
    )
    typed = {name: _joined(ALL_SETTINGS[name], raw) for name, raw in given.items()}
    filed: Mapping[str, Any] = {}
    if config is not None:
        filed = {"tasks": list(NOT_READ)}  # if the file cannot be read, tasks may be in it
        with problems.collect():
            filed = config_file.read(Path(config), ALL_SETTINGS, aliases(ALL_SETTINGS), problems)
    with problems.collect():
        settings = combine(typed, filed, str(config))
        forced = None if force is None else _forced(force, settings.policies)
    problems.check()
    return SweepCommand(
        settings=settings,
        dry_run=bool(dry_run),
        force=forced,
        save_config=None if save_config is None else Path(save_config),
    )


def combine(typed: Mapping[str, Any], filed: Mapping[str, Any], file: str = "") -> SweepSettings:
    """Settings from raw values by field name; those typed take precedence over those of a file."""
    filed = {name: raw for name, raw in filed.items() if not _overridden(name, typed)}
    values: dict[str, Any] = {}
    problems = Problems()
    for name, raw in {**filed, **typed}.items():
        setting = ALL_SETTINGS[name]
        with problems.collect():
            values[name] = setting.read(setting.flag if name in typed else f"{file}: {setting.key}", raw)
    with problems.collect():
        _replace_grid(values)
    if "tasks" not in filed and "tasks" not in typed:
        problems.sentences.append(ALL_SETTINGS["tasks"].missing)
    out = values.get("out", "")
    if is_url(out):  # SweepSettings accepts it: sweeps of earlier versions stay readable
        got = f"{out.partition('://')[0]}://…"
        problems.sentences.append(f"--out must be a local directory (got {got}); --upload copies results to a URL")
    with problems.collect():
        settings = SweepSettings(**{"tasks": NOT_READ, **values})
    problems.check()
    return settings


def _overridden(name: str, typed: Mapping[str, Any]) -> bool:
    """Whether a flag excludes this setting of a file."""
    return any(name in one and other & typed.keys() for pair in EXCLUSIVE for one, other in (pair, pair[::-1]))


def _replace_grid(values: dict[str, Any]) -> None:
    """Replaces --k, --subsets and --reuse by the policies that they describe."""
    grid = {item.name: values.pop(item.name) for item in fields(PolicyGrid) if item.name in values}
    if grid and "policies" in values:
        raise InputError(f"--policies and --{next(iter(grid))} must not be used together: choose names or a grid")
    if grid:
        values["policies"] = PolicyGrid(**grid).policies


def _forced(words: Sequence[str], policies: Sequence[str]) -> tuple[str, ...]:
    names = [str(ReusePolicy.parse(name)) for word in words for name in word.split(",") if name]
    unknown = [name for name in names if name not in policies]
    if unknown:
        raise InputError(f"--force must name policies of this sweep: {', '.join(policies)} (got {', '.join(unknown)})")
    return tuple(dict.fromkeys(names))


def without_force(arguments: Sequence[str]) -> list[str]:
    """The command line that continues this one: --force would rerun everything again."""
    kept: list[str] = []
    forced = False
    for argument in arguments:
        forced = argument == "--force" or (forced and not argument.startswith("--"))
        if not forced and not argument.startswith("--force="):
            kept.append(argument)
    return kept
