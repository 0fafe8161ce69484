"""From a sweep's rows to verdicts. Pure: Arrow tables in, frozen values out; knows no files and no Ray."""

from orchestrator.analysis.columns import COLUMNS, condense
from orchestrator.analysis.pipeline import analyse
from orchestrator.analysis.results import Analysis, as_json

__all__ = ["COLUMNS", "Analysis", "analyse", "as_json", "condense"]
