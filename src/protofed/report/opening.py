"""What a report opens with: a title that says what was run, the verdict in words, and the gain over Local site by site."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..evaluate.confusion import PREDICTIONS
from ..results.columns import OWN, Row, parse_column
from ..results.gains import gains_over_local
from ..results.read import Run, StoredResults, VariantRuns
from ..results.tables import setting_text
from ..results.verdict import best_gain, verdict
from .curves import Content, short

MOST_SITES = 200


def about(folder: StoredResults) -> Content:
    """The title, and what the folder holds: a run, a comparison or a sweep.

    Returns:
        `title`, `kind` and `folder`. A title is such as `digits: 20 clients, 100 rounds, 3 seeds`.
    """
    name = folder.path.resolve().name
    axes = swept(folder.variants)
    kind = "Run" if not folder.comparison else f"Sweep over {' and '.join(axes)}" if axes else "Comparison"
    runs = [variant.runs[0] for variant in folder.variants if variant.runs]
    names = list(dict.fromkeys(filter(None, map(_data_name, runs))))
    if not runs or not names:
        return {"title": name, "kind": kind, "folder": name}
    if not folder.comparison:
        names = [f"{runs[0].label} on {names[0]}"]
    seeds = sorted({run.seed for run in folder.runs})
    counts = [
        _count((_clients_of(run) for run in runs), "client"),
        _count((run.planned for run in runs), "round"),
        f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}",
    ]
    return {"title": f"{', '.join(names)}: {', '.join(filter(None, counts))}", "kind": kind, "folder": name}


def _count(values: Iterable[int | None], word: str) -> str:
    known = sorted({value for value in values if value})
    if not known:
        return ""
    return f"{'–'.join(map(str, dict.fromkeys((known[0], known[-1]))))} {word}{'' if known == [1] else 's'}"


def _data_name(run: Run) -> str:
    """The name of the data, which for a person's own file is the file's."""
    data = run.settings.get("data")
    if not isinstance(data, Mapping):
        return ""
    file = next((data[key] for key in ("path", "manifest") if isinstance(data.get(key), str)), None)
    return str(data.get("name", "")) if file is None else Path(file).name or str(file)


def _clients_of(run: Run) -> int | None:
    given = (run.summary or {}).get("clients") or run.settings.get("clients")
    return given if isinstance(given, int) and given > 0 else len(run.clients[-1]["samples"]) if run.clients else None


def swept(variants: Sequence[VariantRuns]) -> list[str]:
    """The settings that a sweep varies: those whose values stand in the variants' labels, such as `fedsap scale=8`."""
    values: dict[str, set[str]] = {}
    for variant in variants:
        words = variant.label.split(" ")
        for key, value in variant.settings.items():
            text, short_key = setting_text(value), key.rpartition(".")[2]
            if key != "control" and any(f"{k}={text}" in words for k in (key, short_key)):
                values.setdefault(short_key, set()).add(text)
    return [key for key, texts in values.items() if len(texts) > 1]


def verdict_of(folder: StoredResults) -> Content:
    """The verdict in words, and by prediction the gain over Local of every variant at every site.

    Returns:
        `sentences`, and `gains` with `sites` and `lines` by prediction; both are empty for a single run.
    """
    if not folder.comparison:
        return {"sentences": [], "gains": {}}
    rows = [variant.row() for variant in folder.variants]
    best = best_gain(rows)
    gains = {
        kind: part for kind in PREDICTIONS if (part := _by_site(rows, kind, best.label if best else "")) is not None
    }
    first = best.column.key.removeprefix("accuracy_") if best else ""
    ordered = {kind: gains[kind] for kind in sorted(gains, key=lambda kind: kind != first)}
    return {"sentences": verdict(rows), "gains": ordered}


def _by_site(rows: Sequence[Row], kind: str, best: str) -> Content | None:
    """The gains of each site; sites are sorted by what the best variant gains there, the largest gain first."""
    found = [gain for gain in gains_over_local(rows, parse_column(kind)) if gain.by_site]
    if not found:
        return None
    first = next((gain for gain in found if gain.label == best), found[0])
    names = dict.fromkeys([*first.by_site, *(site for gain in found for site in gain.by_site)])
    sites = sorted(names, key=lambda site: -first.by_site.get(site, float("-inf")))[:MOST_SITES]
    lines = [
        {
            "label": gain.label,
            "mean": short(gain.mean),
            "half": short(gain.half),
            "verdict": gain.verdict,
            "values": [short(gain.by_site.get(site)) for site in sites],
        }
        for gain in found
    ]
    return {"sites": sites, "of": len(names), "first": first.label, "lines": lines}


def opening_run(folder: StoredResults, runs: Sequence[Run]) -> str:
    """The name of the run whose clients a report shows first: of the best method, and of Local where it stands alone."""
    rows = [variant.row() for variant in folder.variants]
    gain = best_gain(rows)
    if gain is not None:
        wanted = gain.label
    else:
        means = {row.label: _accuracy(row) for row in rows if not row.is_local}
        wanted = max(means, key=lambda label: means[label], default="")
    return next((run.name for run in runs if run.label == wanted), runs[0].name if runs else "")


def _accuracy(row: Row) -> float:
    """The mean accuracy in the way of the method's paper, or by head in early runs; nought where nothing has finished."""
    values: list[Any] = [run["last_five"].get(OWN, run["last_five"].get(f"{OWN}_head")) for run in row.usable]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else 0.0
