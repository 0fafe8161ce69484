"""From a sweep's rows to a verdict a reviewer would accept. Pure: Arrow tables in, frozen values out; no files, no Ray."""

from orchestrator.analysis.analyse import analyse
from orchestrator.analysis.columns import COLUMNS
from orchestrator.analysis.results import Analysis, as_json

__all__ = ["COLUMNS", "Analysis", "analyse", "as_json"]
