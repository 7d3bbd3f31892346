"""Results as tables: for the terminal, and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from . import around, evaluation, servers

MIB = 2**20


@dataclass(frozen=True)
class Page:
    """One workload's table and the lines below it."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def pages(results: Mapping[str, Any]) -> list[Page]:
    """A page for each workload. At quick sizes goals are left out, as they are for the full sizes."""
    makers = {
        "training": _training,
        "server": _server,
        "servers": _servers,
        "many": _many,
        "startup": _startup,
        "evaluation": _evaluation,
        "around": _around,
    }
    pages = []
    for name, result in results["workloads"].items():
        page = makers[result["kind"]](name, result)
        pages.append(page if results["quick"] else replace(page, notes=page.notes + _goals(result)))
    return pages


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """Print the tables of all workloads."""
    for page in pages(results):
        table = Table(title=page.title, title_justify="left")
        for i, name in enumerate(page.header):
            table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0)
        for row in page.rows:
            table.add_row(*row)
        console.print()
        console.print(table)
        for note in page.notes:
            console.print(f"  {note}", markup=False, soft_wrap=True)


def markdown(results: Mapping[str, Any]) -> str:
    """The tables of all workloads as Markdown."""
    machine = results["machine"]
    lines = [
        f"Measured with protofed {machine['protofed']}, torch {machine['torch']}, Python {machine['python']} on "
        f"{machine['cores']} cores ({machine['processor'] or machine['system']}); {results['repeats']} turns"
        f"{', quick sizes: the figures mean nothing' if results['quick'] else ''}.",
    ]
    for page in pages(results):
        lines += ["", f"### {page.title}", ""]
        lines += ["| " + " | ".join(page.header) + " |", "| --- |" + " ---: |" * (len(page.header) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in page.rows]
        lines += [""] + [f"- {note}" for note in page.notes] if page.notes else []
    return "\n".join(lines) + "\n"


def _training(name: str, result: Mapping[str, Any]) -> Page:
    header = ["contender", "s / round", "median", "samples / s", "clients / s", "× plain", "of limit", "(training)"]
    rows = []
    for label, c in result["contenders"].items():
        ratios = result["ratios"].get(label, {})
        rows.append(
            [
                label,
                f"{c['best']:.3f}",
                f"{c['median']:.3f}",
                f"{c['samples_per_second']:,.0f}",
                f"{c['clients_per_second']:,.1f}",
                _or_dash(ratios.get("over_plain"), "{:.2f}"),
                _or_dash(ratios.get("of_limit"), "{:.0%}"),
                _or_dash(ratios.get("of_training_limit"), "{:.0%}"),
            ]
        )
    notes = [f"{label}: {_settings_text(c)}" for label, c in result["contenders"].items() if c["about"]]
    if "limit" in result:
        training = min(min(c["training_seconds"]) for c in result["contenders"].values() if c["kind"] == "limit")
        notes.append(f"the limit's training steps alone: {training:.3f} s")
    for label, c in result["contenders"].items():
        share = result["ratios"].get("auto", {}).get("of_own_batch")
        if c["kind"] == "own-batch" and share is not None:
            notes.append(f"auto: {share:.0%} of {label}, the same arithmetic in steps as small as the clients'")
    notes += [f"overhead of {label}: {share:.1%} of the round" for label, share in result.get("overhead", {}).items()]
    notes += [f"skipped {label}: {why}" for label, why in result["skipped"].items()]
    return Page(f"{name}: {result['description']}", header, rows, notes)


def _server(name: str, result: Mapping[str, Any]) -> Page:
    counts = list(result["rows"][0]["best"])
    header = ["rule", *(f"s, {n} thread{'s' if n != '1' else ''}" for n in counts), "MiB before", "MiB peak"]
    rows = [
        [
            row["label"],
            *(f"{row['best'][n]:.3f}" for n in counts),
            f"{row['inputs_bytes'] / MIB:,.0f}",
            f"{row['peak_bytes'] / MIB:,.0f}",
        ]
        for row in result["rows"]
    ]
    return Page(f"{name}: aggregation and refinement, whole process", header, rows)


def _servers(name: str, result: Mapping[str, Any]) -> Page:
    header, rows, notes = servers.table(result)
    return Page(f"{name}: servers and messages, best of all rounds", header, rows, notes)


def _many(name: str, result: Mapping[str, Any]) -> Page:
    header = ["federation", "s / round", "median", "MiB built", "after", "samples", "models", "peak"]
    rows = [
        [
            label,
            f"{row['best']:.3f}",
            f"{row['median']:.3f}",
            *(f"{row[f'{key}_bytes'] / MIB:,.0f}" for key in ("built", "now", "data", "saved", "peak")),
        ]
        for label, row in result["rows"].items()
    ]
    notes = [f"{label}: {_settings_text(row)}" for label, row in result["rows"].items()]
    if "bytes_per_idle_client" in result:
        notes.append(f"each idle client: {result['bytes_per_idle_client']:,.0f} bytes beyond its samples")
    notes += [f"skipped {label}: {why}" for label, why in result["skipped"].items()]
    return Page(f"{name}: {result['rounds']} rounds", header, rows, notes)


def _startup(name: str, result: Mapping[str, Any]) -> Page:
    rows = [["import torch", f"{min(result['import_torch_seconds']):.2f}", ""]]
    rows += [
        [label, f"{min(row['seconds']):.2f}", f"{row['beyond_import']:.2f}"] for label, row in result["rows"].items()
    ]
    title = f"{name}: from `protofed run` to the first round"
    return Page(title, ["what", "s", "s beyond import"], rows)


def _evaluation(name: str, result: Mapping[str, Any]) -> Page:
    return Page(f"{name}: all clients after a round", *evaluation.table(result))


def _around(name: str, result: Mapping[str, Any]) -> Page:
    return Page(f"{name}: a checkpoint after every round, and the start of a run", *around.table(dict(result)))


def _settings_text(contender: Mapping[str, Any]) -> str:
    """The settings that name an engine exactly, or a contender's description where it has none."""
    return " ".join(f"{key}={value}" for key, value in contender["settings"].items()) or contender["about"]


def _goals(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for goal in result["goals"]:
        sign, target = ("at least", goal["at_least"]) if "at_least" in goal else ("at most", goal["at_most"])
        value = "not measured" if goal["value"] is None else f"{goal['value']:.3g}"
        verdict = {True: "holds", False: "DOES NOT HOLD", None: "open"}[goal["met"]]
        lines.append(f"goal, {goal['what']}: {value}, wanted {sign} {target:g}: {verdict}")
    return lines


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
