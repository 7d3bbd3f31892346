"""On which samples clients are scored, and among which prototypes the nearest is sought: every table says it.

| setting | what it decides |
| --- | --- |
| `test` | the central test set, or a part of each client's own data |
| `scope` | with the central test set: the classes that a client holds, or all of them |
| `candidates` | the nearest prototype is one of the client's own classes, or of all |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .columns import Row

KEY = "protocol"
# Settings are stored whole, so a key that is absent was not there yet. Before there was `scope`, the test samples of a
# client were those of the classes it trains on; before there was `candidates`, prototypes of other classes were left out.
DEFAULTS = {"test": "central", "scope": "own", "candidates": "own"}


def protocol_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The protocol in the settings of a run.

    >>> protocol_of({"rounds": 5, "scope": "all"})
    {'test': 'central', 'scope': 'all', 'candidates': 'own'}
    """
    return {key: str(settings.get(key, default)) for key, default in DEFAULTS.items()}


def with_protocol(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A summary with the protocol of its run, which early ones lack and the settings have; without settings it has none."""
    return {**summary, KEY: summary.get(KEY) or (protocol_of(settings) if settings else None)}


def protocol_text(protocol: Mapping[str, str]) -> str:
    """The protocol in words, with the settings that say it.

    >>> protocol_text({"test": "local", "scope": "own", "candidates": "all"})
    "scored on a part of each client's own data (test=local), nearest prototype among all classes (candidates=all)"
    """
    if protocol["test"] == "local":
        scored = "a part of each client's own data (test=local)"
    elif protocol["scope"] == "all":
        scored = "the whole test set, by every client (scope=all)"
    else:
        scored = "the test samples of the classes that each client holds (scope=own)"
    among = "all classes (candidates=all)" if protocol["candidates"] == "all" else "its own classes (candidates=own)"
    return f"scored on {scored}, nearest prototype among {among}"


def protocol_notes(rows: Sequence[Row]) -> list[str]:
    """The line under a table that says its protocol; a line for each where variants have several."""
    labels: dict[str, list[str]] = {}
    for row in rows:
        for text in dict.fromkeys(protocol_text(run[KEY]) for run in row.usable if run.get(KEY)):
            labels.setdefault(text, []).append(row.label)
    if len(labels) == 1:
        return [f"protocol: {text}" for text in labels]
    return [f"protocol of {', '.join(names)}: {text}" for text, names in labels.items()]
