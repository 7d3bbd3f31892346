"""Tables and pictures, made from what runs wrote."""

from .tables import comparison_markdown, comparison_table, summary_table

__all__ = ["comparison_markdown", "comparison_table", "summary_table"]
