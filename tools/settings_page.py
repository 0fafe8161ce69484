"""python -m tools.settings_page: prints docs/settings.md, the list of a sweep's settings, from their declarations."""

from collections.abc import Iterator

from orchestrator.planning.fields import Setting, display
from orchestrator.planning.settings import ALL_SETTINGS

HEAD = """# Settings of a sweep

Every setting is a flag of `reuse-sweep sweep` and a key of the YAML file given by `--config`: `--batch-size 4` on the
command line is `batch-size: 4` or `batch_size: 4` in the file. A flag takes precedence over the file, and a key whose
value is `null` has the default. `--save-config FILE` writes the settings of a command to such a file. Lists are
separated by commas on the command line; in a file they can also be YAML lists.

This page is generated from the declarations in `orchestrator/planning/settings.py` (`python -m tools.settings_page`).
"""
KINDS = {int: "whole number", float: "number", str: "text", bool: "on or off"}


def page() -> str:
    return "\n".join(lines())


def lines() -> Iterator[str]:
    yield HEAD
    for group in dict.fromkeys(setting.group for setting in ALL_SETTINGS.values()):
        yield f"## {group}\n"
        yield "| flag | value | default | meaning |"
        yield "|---|---|---|---|"
        for setting in ALL_SETTINGS.values():
            if setting.group == group:
                yield f"| {_flags(setting)} | {_values(setting)} | {_default(setting)} | {setting.help} |"
        yield ""


def _flags(setting: Setting) -> str:
    names = [f"`--{name}`" for name in (setting.key, *setting.aliases)]
    return ", ".join(names + ([f"`--no-{setting.key}`"] if setting.negatable else []))


def _values(setting: Setting) -> str:
    kind = " or ".join(f"`{choice}`" for choice in setting.choices) or KINDS[setting.kind]
    text = f"list: {kind}" if setting.many else kind
    return f"{text}, {setting.bounds}" if setting.bounds else text


def _default(setting: Setting) -> str:
    if setting.required:
        return "required"
    if setting.default_text is not None:
        return setting.default_text or "–"
    return "–" if setting.default in (None, ()) else f"`{display(setting.default)}`"


if __name__ == "__main__":
    print(page(), end="")
