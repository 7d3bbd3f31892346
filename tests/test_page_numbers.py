"""Numbers on pages are those of files: tables are what their commands write, and quoted intervals stand in results."""

from __future__ import annotations

import itertools
import re
import runpy
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

from protofed.results.columns import parse_column
from protofed.results.gains import gain_over
from protofed.results.read import read_rows

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "methods").glob("*.md"))]
WRITING = (
    r"^(?:\$ )?((?:protofed table|python benchmarks/(?:curve|rounds_to|situations)\.py) .*docs/results/\S+\.md.*)$"
)
COMMANDS = [line for page in PAGES for line in re.findall(WRITING, page.read_text(encoding="utf-8"), flags=re.M)]
NUMBER = r"[+−-]?\d+(?:,\d{3})*(?:\.\d+)?"
PAIR = re.compile(rf"({NUMBER}) ± ({NUMBER})")
OTHERS = ("claims.md", "reproduce.md", "privacy.md")
"""Pages that are not held against tables: a source, one with an example, and one whose table test_compression.py holds."""


def included(page: Path) -> list[str]:
    return re.findall(r'^--8<-- "(docs/results/.+?)"$', page.read_text(encoding="utf-8"), flags=re.M)


def test_commands_that_write_tables_were_found():
    assert len(COMMANDS) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_a_table_is_what_its_command_writes(line, tmp_path, monkeypatch, call):
    program, *words = shlex.split(line)
    (out,) = (word for word in words if re.fullmatch(r"docs/results/\S+\.md", word))
    assert any(out in included(page) for page in PAGES), f"no page shows {out}"
    monkeypatch.chdir(ROOT)
    words = [str(tmp_path / "out.md") if word == out else word for word in words]
    if program == "protofed":
        assert call(*words)[0] == 0
    else:
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")
    assert (tmp_path / "out.md").read_text(encoding="utf-8") == (ROOT / out).read_text(encoding="utf-8")


def test_the_table_of_privacy_is_that_of_its_runs():
    script = runpy.run_path(str(ROOT / "benchmarks" / "privacy.py"))
    table = script["table"](script["read"](RESULTS / "privacy.jsonl"))
    assert (RESULTS / "privacy.md").read_text(encoding="utf-8") == f"{table}\n"


def test_quoted_intervals_stand_in_results():
    """Every `a ± b` of a page is one of a stored table or of the claims, or the difference of two rows of a comparison that
    the page names, rounded; a sign may be turned with its words."""
    files = [*RESULTS.rglob("*.md"), *RESULTS.rglob("*.txt"), ROOT / "docs" / "claims.md"]
    stored = {pair for file in files for pair in PAIR.findall(file.read_text(encoding="utf-8"))}
    texts = {
        (page.name, pair) for page in PAGES if page.name not in OTHERS for pair in PAIR.findall(page.read_text("utf-8"))
    }
    assert len(texts) >= 20
    unknown = [found for found in texts if not any(_rounds_to(pair, found[1]) for pair in stored)]
    pages = {page.name: page.read_text("utf-8") for page in PAGES}
    wrong = [(page, pair) for page, pair in unknown if not any(_rounds_to(d, pair) for d in differences(pages[page]))]
    assert wrong == []


MEASURES = ("accuracy", "accuracy_head", "accuracy_prototype", "whole_head", "best_accuracy", "f1_head", "mae_head")
POOLED = ("weighted_head", "weighted_prototype", "ensemble_head", "ensemble_prototype")
SHAPES = ("silhouette", "pooled_silhouette")


@cache
def differences(text: str) -> set[tuple[str, str]]:
    """Mean and half of the interval of all differences of two rows of the comparisons that a page names."""
    names = set(re.findall(r"[a-z0-9-]+-laptop\b", text))
    found = set()
    for folder in (path.parent for name in names for path in (RESULTS / name).glob("*/comparison.json")):
        rows, _ = read_rows(folder)
        for one, other in itertools.combinations([row for row in rows if row.usable], 2):
            for measure in map(parse_column, (*MEASURES, *POOLED, *SHAPES)):
                gain = gain_over(one, other, measure)
                if gain is not None and gain.half is not None:
                    found.add((f"{gain.mean:.4f}", f"{gain.half:.4f}"))
    return found


def _rounds_to(stored: tuple[str, str], quoted: tuple[str, str]) -> bool:
    return all(
        _places(s) >= _places(q) and abs(_size(s) - _size(q)) <= 0.5 * 10 ** -_places(q) + 1e-9
        for s, q in zip(stored, quoted, strict=True)
    )


def _places(number: str) -> int:
    return len(number.partition(".")[2])


def _size(number: str) -> float:
    return float(number.lstrip("+−-").replace(",", ""))
