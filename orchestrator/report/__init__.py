"""A sweep's report: page, tables, figures and summaries, from the rows in its folder. Knows no Ray and no model."""

from orchestrator.report.write import write_report

__all__ = ["write_report"]
