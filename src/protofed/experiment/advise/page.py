"""The answer as one self-contained page: sentences, a picture of the sites' gains, tables, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

from ... import markup
from ...version import __version__
from . import words

WIDTH, LINE = 640, 26  # of the pictures, in pixels of their own
LEFT, RIGHT = 150, 70
HEIGHT = 260
MOST_CURVES = 7  # colours there are


def render(record: Mapping[str, Any]) -> str:
    """The page of an answer.

    Args:
        record: The content of `advice.json`.

    Returns:
        The page in HTML. It fetches nothing.
    """
    files = resources.files("protofed")
    body = [
        markup.section("The answer", _answer(record)),
        markup.section(
            "What each site gains over Local", gains_picture(record) + _table(words.site_table(record), _SITES)
        ),
        markup.section(
            "All entries of the race", curves_picture(record) + _table(words.table(record), _ENTRIES), "entries"
        ),
        markup.section("What was not tried", _list(record["not_tried"])),
        markup.section("To go on", _command(record)),
        markup.section("How it was found", markup.paragraphs(_how(record))),
    ]
    about = (
        f"{record['data']}: {len(record['sites'])} sites, {record['rounds']} rounds, "
        f"{len(record['seeds'])} seed{'' if len(record['seeds']) == 1 else 's'}; raced for "
        f"{words.duration(record['elapsed_seconds'])}"
    )
    return Template(files.joinpath("experiment/advise/advice.html").read_text(encoding="utf-8")).substitute(
        title=markup.text(f"Which method for {record['data']}"),
        about=markup.text(about),
        style=files.joinpath("report/static/page.css").read_text(encoding="utf-8"),
        body="\n".join(body),
        version=markup.text(__version__),
    )


def fragment(record: Mapping[str, Any]) -> str:
    """The answer as a part of another page, such as a notebook: sentences and tables."""
    return (
        markup.paragraphs(record["sentences"])
        + _table(words.site_table(record), _SITES)
        + _table(words.table(record), _ENTRIES)
        + _list(record["not_tried"])
    )


_SITES = "Accuracy on each site's own validation rows, means over seeds; a gain is in points, with its 95 % interval."
_ENTRIES = (
    "Validation accuracy as if all had the same seeds, every site counting the same, by the better way of predicting; of an "
    "entry that did not get to the end, where it was then. A gain is in points over the best Local, paired by seed and "
    "site. Bytes are of all sites together."
)


def _answer(record: Mapping[str, Any]) -> str:
    first, *others = record["sentences"]
    return f'<p class="verdict">{markup.text(first)}</p>\n{markup.paragraphs(others)}'


def _table(content: tuple[list[str], list[list[str]]], caption: str) -> str:
    return markup.table(caption, *content)


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{markup.text(item)}</li>" for item in items) + "</ul>"


def _command(record: Mapping[str, Any]) -> str:
    command = record.get("command", "")
    goes_on = "The file has the settings of the advised entry; the test above is of a run with exactly these."
    return f"<pre><code>{markup.text(command)}</code></pre><p>{markup.text(goes_on)}</p>"


def _how(record: Mapping[str, Any]) -> list[str]:
    share = 100 * record["validation_share"]
    return [
        f"Every entry trained on {100 - share:g} % of each site's training rows and was judged on the other {share:g} %; "
        "another seed draws other rows. Test rows were not in the race's data at all.",
        "After a ninth and a third of the rounds an entry was dropped if even where its curve may get to was below where "
        "the leader was, by more than chance. The best entries of Local and of FedAvg were never dropped, because averaging "
        "starts slowly. Entries that could not be told from the leader got further seeds.",
        "An interval over seeds allows for seeds drawing their validation rows from the same samples (Nadeau and Bengio "
        "2003). The best of many entries is flattered by being picked; the test rows were not used to pick it.",
    ]


# --- pictures ---------------------------------------------------------------------------------------------------------
def gains_picture(record: Mapping[str, Any]) -> str:
    """A picture of the gain of each site, with its interval, the largest gain first."""
    sites = sorted(record["site_gains"], key=lambda s: -s["gain"]["mean"])
    ends = [v for s in sites for v in (s["gain"]["mean"], s["gain"]["low"], s["gain"]["high"]) if v is not None]
    low, high = min([0.0, *(max(v, -1.0) for v in ends)]), max([0.01, *(min(v, 1.0) for v in ends)])
    span = WIDTH - LEFT - RIGHT

    def x(value: float) -> float:
        return round(LEFT + span * (min(max(value, low), high) - low) / (high - low), 1)

    bottom = LINE * len(sites) + 4
    parts = [f'<line class="axis" x1="{x(0)}" x2="{x(0)}" y1="0" y2="{bottom}"/>']
    for number, site in enumerate(sites):
        y, gain = number * LINE + LINE / 2, site["gain"]
        colour = "var(--neg)" if gain["mean"] < 0 else "var(--s0)"
        parts.append(f'<text class="name" x="0" y="{y + 4}">{markup.text(_short(site["name"]))}</text>')
        start, end = sorted((x(0), x(gain["mean"])))
        width = round(end - start, 1)
        parts.append(f'<rect x="{start}" y="{y - 7}" width="{width}" height="14" rx="2" fill="{colour}"/>')
        if gain["low"] is not None:
            ends_at = f'x1="{x(gain["low"])}" x2="{x(gain["high"])}" y1="{y}" y2="{y}"'
            parts.append(f'<line {ends_at} stroke="var(--ink)" stroke-width="1.5"/>')
        parts.append(f'<text x="{WIDTH}" y="{y + 4}" text-anchor="end">{words.points(gain["mean"])}</text>')
    label = f"Gain of {record['contender']['label']} over Local, in points of validation accuracy, by site"
    return _figure(parts, bottom, label, "The line is the 95 % interval, where there are enough seeds for one.")


def curves_picture(record: Mapping[str, Any]) -> str:
    """A picture of the validation accuracy by round: the best entry of each method, with the first seed."""
    shown: dict[str, Any] = {}
    methods: set[str] = set()
    for row in record["table"]:
        if row["label"] in record["curves"] and row["method"] not in methods and len(shown) < MOST_CURVES:
            methods.add(row["method"])
            shown[row["label"]] = record["curves"][row["label"]]
    values = [v for curve in shown.values() for v in curve["values"]]
    if not values:
        return ""
    low, high = min(values), max(max(values), min(values) + 0.01)
    left, right, top, bottom = 44, WIDTH - RIGHT - 70, 10, HEIGHT - 26
    last = max(record["rounds"], 2)

    def x(round: int) -> float:
        return left + (right - left) * (round - 1) / (last - 1)

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    parts = []
    for value in (low, (low + high) / 2, high):
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{100 * value:.0f} %</text>')
    for round in (1, last):
        parts.append(f'<text x="{x(round):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{round}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">round</text>')
    ends = sorted((curve["rounds"][-1], y(curve["values"][-1]), label) for label, curve in shown.items())
    places: dict[str, float] = {}
    end_round, before = 0, 0.0
    for round, height, label in ends:
        before = places[label] = max(height, before + 13) if round == end_round else height
        end_round = round
    for number, (label, curve) in enumerate(shown.items()):
        line = " ".join(f"{x(r):.1f},{y(v):.1f}" for r, v in zip(curve["rounds"], curve["values"], strict=True))
        parts.append(f'<polyline class="line" points="{line}" stroke="var(--s{number})"/>')
        name = markup.text(_short(label))
        end = x(curve["rounds"][-1]) + 6
        parts.append(f'<text x="{end:.1f}" y="{places[label] + 4:.1f}" style="fill: var(--s{number})">{name}</text>')
    label = "Validation accuracy by round, the best entry of each method, first seed"
    return _figure(parts, HEIGHT, label, label + ".")


def _short(name: str, most: int = 22) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _figure(parts: Sequence[str], height: float, label: str, caption: str) -> str:
    picture = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{markup.text(label)}">{"".join(parts)}</svg>'
    return f'<figure><div class="plot">{picture}</div><figcaption>{markup.text(caption)}</figcaption></figure>'
