"""Statistics of a sweep: paired comparisons, validity gates, verdicts. Arrow tables in, frozen values out."""

from orchestrator.analysis.columns import COLUMNS, condense
from orchestrator.analysis.pipeline import analyse
from orchestrator.analysis.results import Analysis, as_json

__all__ = ["COLUMNS", "Analysis", "analyse", "as_json", "condense"]
