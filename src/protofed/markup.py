"""Parts of the pages that are written without a script: paragraphs, tables and sections, from plain text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def text(value: object) -> str:
    """A value as text of a page, in which nothing is markup.

    >>> text("a < b")
    'a &lt; b'
    """
    return html.escape(str(value))


def paragraphs(sentences: Iterable[str]) -> str:
    """A paragraph for each text."""
    return "\n".join(f"<p>{text(sentence)}</p>" for sentence in sentences)


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that can be scrolled sideways on a phone. The cells are texts, not HTML.

    Args:
        caption: What stands below it.
        head: The names of the columns.
        rows: The cells of each line; the first is its heading.

    Returns:
        The table in HTML.
    """
    top = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{text(row[0])}</th>{"".join(f"<td>{text(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{text(caption)}" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f'<tbody>{lines}</tbody></table></div><p class="small">{text(caption)}</p>'
    )


def section(title: str, content: str, kind: str = "run") -> str:
    """A section with a heading. The title is text, the content HTML."""
    return f'<section class="{kind}"><h2>{text(title)}</h2>\n{content}\n</section>'
