"""Tables and pictures, made from what runs wrote."""

from .confusion import Confusions, confusion_table, draw_confusions, read_confusions, shown_of
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
    "Confusions",
    "Row",
    "comparison_latex",
    "comparison_markdown",
    "comparison_table",
    "confusion_table",
    "draw_confusions",
    "notes",
    "parse_column",
    "read_confusions",
    "results_csv",
    "shown_of",
    "summary_table",
    "written",
]
