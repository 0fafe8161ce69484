"""Writes the report of a sweep from the rows in its folder: page, Markdown, figures, summaries, exports."""

from orchestrator.report.write import write_report

__all__ = ["write_report"]
