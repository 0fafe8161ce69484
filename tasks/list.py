"""python -m tasks.list: the benchmarks, what they need, and whether they can be run here or why not."""

import json
from dataclasses import dataclass

from sampler import InputError
from sampler.cli import Parser, run_command
from tasks.catalog import CATALOG, TaskSpec, check_requirements
from tasks.documents import TaskOptions
from tasks.run import add_task_flags
from tasks.sources import Source, choose_source, resolve_data


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    task: str
    documents: int
    kind: str
    primary: str
    needs: str
    problem: str | None


def main() -> None:
    parser = Parser(
        prog="python -m tasks.list",
        description="Lists the benchmarks and whether they can be run here.",
        examples="examples:\n  python -m tasks.list\n  python -m tasks.list --data FOLDER --json\n",
    )
    add_task_flags(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object for each")
    arguments = parser.parse_args()
    options = TaskOptions(
        data=resolve_data(arguments.data, ""),
        allow_code_execution=arguments.allow_code_execution,
        unsafe_code_execution=arguments.unsafe_code_execution,
    )
    listed = list_tasks(options)
    if arguments.json:
        for entry in listed:
            print(json.dumps({name: getattr(entry, name) for name in Listed.__dataclass_fields__}))
    else:
        _print_table(listed)


def list_tasks(options: TaskOptions) -> list[Listed]:
    source = choose_source(options.data)
    return [
        Listed(
            task=entry.name,
            documents=entry.document_count,
            kind=entry.kind,
            primary=entry.primary,
            needs=_needs(entry),
            problem=_problem(entry, options, source),
        )
        for entry in CATALOG.values()
    ]


def _needs(entry: TaskSpec) -> str:
    needs = [entry.install_command.removeprefix("pip install ").strip('"')] if entry.install_command else []
    needs += ["punkt_tab"] if entry.needs_punkt else []
    needs += ["Hub token"] if entry.gated else []
    needs += ["--allow-code-execution"] if entry.runs_code else []
    return ", ".join(needs)


def _problem(entry: TaskSpec, options: TaskOptions, source: Source) -> str | None:
    try:
        check_requirements(entry, options)
        source.check(entry.dataset, gated=entry.gated)
    except InputError as error:
        return str(error)
    return None


def _print_table(listed: list[Listed]) -> None:
    rows = [("task", "documents", "kind", "primary metric", "needs", "here")]
    for entry in listed:
        here = "yes" if entry.problem is None else "no"
        rows.append((entry.task, str(entry.documents), entry.kind, entry.primary, entry.needs, here))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for entry in listed:
        if entry.problem:
            print(f"\n{entry.task}: {entry.problem}")
    print("\nAny other task of lm-eval can be given by its name.")


if __name__ == "__main__":
    run_command(main)
