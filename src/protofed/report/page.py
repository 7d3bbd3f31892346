"""One self-contained HTML page of a run or a comparison: no network, no other file."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ..errors import ProtofedError
from .content import content
from .space import PROJECTIONS, Projection

PAGE = "report.html"
SCRIPTS = ("draw", "opening", "sections", "page")


def embedded(value: Any) -> str:
    """Write JSON that cannot end the script element it stands in, whatever a class or a client is called."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def render(parts: dict[str, Any], *, live: bool = False) -> str:
    """Make the text of the page.

    Args:
        parts: What `content` returned.
        live: Whether the page asks for new content by itself.

    Returns:
        The page in HTML.
    """
    files = resources.files(__package__)

    def text(name: str) -> str:
        return files.joinpath(name).read_text(encoding="utf-8")

    return Template(text("templates/page.html")).substitute(
        title=html.escape(f"{parts['title']} – protofed"),
        style=text("static/page.css"),
        script="\n".join(text(f"static/{name}.js") for name in SCRIPTS),
        content=embedded(parts),
        live="true" if live else "false",
    )


def write_page(folder: str | Path, out: str | Path | None = None, projection: Projection = "pca") -> Path:
    """Write the page of a run, a comparison or a sweep.

    Args:
        folder: The folder.
        out: The file to write; None takes `report.html` in the folder.
        projection: How embedding spaces are brought to the plane, `pca` or `tsne`.

    Returns:
        The file.

    Example: `write_page("runs/digits")`
    """
    check_projection(projection)
    file = Path(folder) / PAGE if out is None else Path(out)
    if file.suffix.lower() not in (".html", ".htm"):
        raise ProtofedError(f"{file}: expected a file name ending in .html")
    text = render(content(folder, projection))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ProtofedError(f"{file}: cannot be written ({error.strerror})") from None
    return file


def check_projection(name: str) -> None:
    """Raise an error where there is no projection of that name."""
    if name not in PROJECTIONS:
        raise ProtofedError(f"projection={name!r}: expected one of {', '.join(PROJECTIONS)}")
