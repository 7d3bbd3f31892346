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


def embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever a person called a class or a client."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def render(shown: dict[str, Any], *, live: bool = False) -> str:
    """The page of what `content` found. A live one asks for new content by itself."""
    files = resources.files(__package__)

    def text(name: str) -> str:
        return files.joinpath(name).read_text(encoding="utf-8")

    return Template(text("templates/page.html")).substitute(
        title=html.escape(f"{shown['title']} – protofed"),
        style=text("static/page.css"),
        script=text("static/page.js"),
        content=embedded(shown),
        live="true" if live else "false",
    )


def write_page(folder: str | Path, out: str | Path | None = None, projection: Projection = "pca") -> Path:
    """Write the page into the folder, or as `out`; gives where it is."""
    check_projection(projection)
    place = Path(folder) / PAGE if out is None else Path(out)
    if place.suffix.lower() not in (".html", ".htm"):
        raise ProtofedError(f"{place}: expected a file name ending in .html")
    text = render(content(folder, projection))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ProtofedError(f"{place}: cannot be written ({error.strerror})") from None
    return place


def check_projection(name: str) -> None:
    if name not in PROJECTIONS:
        raise ProtofedError(f"projection={name!r}: expected one of {', '.join(PROJECTIONS)}")
