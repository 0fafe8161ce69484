"""`python -m orchestrator.export --lm-eval DIR`: writes a sweep's rows as the files that lm-eval writes."""

from collections.abc import Sequence
from pathlib import Path

from orchestrator.report.lm_eval_export import export_lm_eval
from sampler.cli import Parser, run_command

EXAMPLES = """examples:
  python -m orchestrator.export --lm-eval results/my-sweep
  python -m orchestrator.export --lm-eval results/my-sweep --out exported
"""


def parser() -> Parser:
    result = Parser(
        prog="python -m orchestrator.export",
        description="Writes a sweep's rows as the results_*.json and samples_*.jsonl that lm-eval writes.",
        examples=EXAMPLES,
    )
    result.add_argument("--lm-eval", type=Path, required=True, metavar="DIR", help="the folder of a sweep")
    result.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: DIR/lm-eval)")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    for folder in export_lm_eval(given.lm_eval, given.out):
        print(folder)


if __name__ == "__main__":
    run_command(main)
