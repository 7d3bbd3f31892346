"""Data sets in one line, and in a notebook as a small table of who holds what."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

from .words import some

MOST_ROWS, MOST_CLASSES = 30, 12  # of a table in a notebook


def _shape(shape: Sequence[int], floating: bool) -> str:
    size = "×".join(map(str, shape))
    return f"of {size} {'features' if floating else 'tokens'}" if len(shape) == 1 else f"of shape {size}"


def _counted(number: int, what: str, names: Sequence[str] = ()) -> str:
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}" + (f" ({some(names, 5)})" if names else "")


def dataset_line(data: Any) -> str:
    """A `Dataset` in one line: its samples, their shape, classes and sites."""
    parts = [f"{len(data.y_train):,} training"]
    if data.y_test is not None:
        parts.append(f"{len(data.y_test):,} test")
    if data.x_unlabelled is not None:
        parts.append(f"{len(data.x_unlabelled):,} unlabelled")
    samples = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    line = f"Dataset {data.name!r}: {samples} samples {_shape(data.sample_shape, data.x_train.is_floating_point())}"
    line += f", {_counted(data.num_classes, 'class', data.class_names)}"
    if data.group_train is not None:
        line += f", {_counted(len(data.group_train.unique()), 'site', data.group_names)}"
    return line + ("" if data.scaling == "none" else f", standardised by {data.scaling}")


def federated_line(data: Any) -> str:
    """A `FederatedData` in one line: its clients, how many samples they hold, and the classes."""
    sizes = [len(client.labelled) for client in data.clients]
    low, high = min(sizes, default=0), max(sizes, default=0)
    each = f"{low:,}" if low == high else f"{low:,}–{high:,}"
    clients = _counted(len(data.clients), "client", data.client_names)
    line = f"FederatedData {data.name!r}: {clients}, {each} labelled samples a client"
    if any(client.unlabelled is not None for client in data.clients):
        line += f", {sum(len(client.unlabelled or ()) for client in data.clients):,} unlabelled ones in all"
    if data.server is not None:
        line += f", {len(data.server):,} at the server"
    return line + f", {_counted(data.num_classes, 'class', data.class_names)}"


def dataset_html(data: Any) -> str:
    """A `Dataset` for a notebook: its line, and the number of training samples by site and class."""
    rows = {"all": torch.bincount(data.y_train, minlength=data.num_classes)}
    if data.group_train is not None:
        rows = {
            data.group_name(group): torch.bincount(data.y_train[data.group_train == group], minlength=data.num_classes)
            for group in data.group_train.unique().tolist()
        }
    return _html(
        dataset_line(data), [data.class_name(c) for c in range(data.num_classes)], list(rows), list(rows.values())
    )


def federated_html(data: Any) -> str:
    """A `FederatedData` for a notebook: its line, and the number of labelled samples by client and class."""
    classes = list(data.class_names) or [str(c) for c in range(data.num_classes)]
    return _html(
        federated_line(data), classes, data.names, list(data.class_counts()), [len(c.test) for c in data.clients]
    )


def _html(
    line: str, classes: Sequence[str], names: Sequence[str], counts: Sequence[Tensor], tests: Sequence[int] = ()
) -> str:
    many = len(classes) > MOST_CLASSES
    head = ["", *(["classes"] if many else classes), "total", *(["test"] if tests else [])]
    body = []
    for k, row in enumerate(counts[:MOST_ROWS]):
        numbers = [int((row > 0).sum())] if many else row.tolist()
        cells = [
            *(f"{n:,}" if n else "·" for n in numbers),
            f"{int(row.sum()):,}",
            *([f"{tests[k]:,}"] if tests else []),
        ]
        body.append(f"<tr><th>{escape(names[k])}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    more = f"<p>{len(counts) - MOST_ROWS} more are not shown</p>" if len(counts) > MOST_ROWS else ""
    header = "".join(f"<th>{escape(str(cell))}</th>" for cell in head)
    return f"<p>{escape(line)}</p><table><thead><tr>{header}</tr></thead><tbody>{''.join(body)}</tbody></table>{more}"
