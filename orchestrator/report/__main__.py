"""`python -m orchestrator.report DIR…`: writes the report of a sweep, at any time during or after it."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from orchestrator.report.write import write_report
from sampler.cli import Parser, run_command

EXAMPLES = """examples:
  python -m orchestrator.report results/my-sweep --open
  python -m orchestrator.report results/monday results/tuesday --out reports/both
  python -m orchestrator.report results/my-sweep --compare examples/seed-results
  python -m orchestrator.report results/my-sweep --margin 3      exploratory: not what was declared before the run
Runs of the same model and settings are merged; different ones get parts of their own and are never paired.
"""


def parser() -> Parser:
    result = Parser(
        prog="python -m orchestrator.report",
        description="Writes report.html, results.md, figures/ and summaries/ from the rows of a sweep.",
        examples=EXAMPLES,
    )
    result.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="the folder of a sweep")
    result.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: DIR; of several, the first's merged/)"
    )
    result.add_argument(
        "--compare", type=Path, metavar="OLD", help="a folder of an earlier experiment's summary.json files"
    )
    result.add_argument(
        "--margin", type=float, metavar="POINTS", help="another margin than declared: exploratory verdicts"
    )
    result.add_argument(
        "--speedup", type=float, metavar="RATIO", help="another speed-up than declared: exploratory verdicts"
    )
    result.add_argument("--no-figures", action="store_true", help="leave the figures out, for a quick look")
    result.add_argument("--open", action="store_true", help="open the page in a browser")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    written = write_report(
        given.folders,
        out=given.out,
        compare=given.compare,
        margin=given.margin,
        speedup=given.speedup,
        figures=not given.no_figures,
    )
    print(*written.verdicts, written.page, sep="\n")
    if given.open:
        webbrowser.open(written.page.resolve().as_uri())


if __name__ == "__main__":
    run_command(main)
