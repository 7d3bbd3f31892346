"""Tables and pictures, made from what runs wrote."""

from .tables import (
    Row,
    comparison_latex,
    comparison_markdown,
    comparison_table,
    notes,
    parse_column,
    results_csv,
    summary_table,
    written,
)

__all__ = [
    "Row",
    "comparison_latex",
    "comparison_markdown",
    "comparison_table",
    "notes",
    "parse_column",
    "results_csv",
    "summary_table",
    "written",
]
