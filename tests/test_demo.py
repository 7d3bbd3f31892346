"""The first run: the sentences follow from the numbers, and the command runs, goes on and says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

import protofed as pf
from protofed.cli.main import app
from protofed.experiment.demo import MORE, SITUATIONS, Situation, demonstrate
from protofed.results.columns import Row
from protofed.results.lesson import lesson
from protofed.results.read import read_folder
from support.errors import refusal

SMALL = """methods = ["fedavg", "fedproto", "fedproto control=fedproto?control=own"]
data = "digits"
limit_train = 60
limit_test = 20
clients = 2
rounds = 2
partition = "iid"
model = "mlp?hidden=8"
silhouette = false
snapshots = 0
"""


def row(label: str, head: Mapping[int, float], prototype: float = 0.0, sends: str = "", control: str = "") -> Row:
    """A variant with an accuracy by head for each seed, one by prototype for all, and what it sends."""
    runs = [
        {
            "seed": seed,
            "rounds": 10,
            "seconds": 1.0,
            "last_five": {"accuracy_head": value / 100, "accuracy_prototype": prototype / 100},
            **{
                way: {sends: 10_000 if sends == "weights" else 1000} if sends else {}
                for way in ("bytes_up", "bytes_down")
            },
            **({"control": control} if control else {}),
        }
        for seed, value in head.items()
    ]
    return Row(label, label.split()[0], {"control": control} if control else {}, runs)


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


LOCAL = row("local", seeds(70, 71, 72), 60)
CONTROL = row("fedproto control", seeds(70, 71, 72.1), control="own")


def variant(label: str, sends: str, gain: float, wide: bool = False) -> Row:
    """A variant that is so much above Local, the same at every seed or all over the place."""
    spread = (-30, 0, 30) if wide else (-0.1, 0, 0.1)
    return row(label, seeds(*(v + gain + s for v, s in zip((70, 71, 72), spread, strict=True))), sends=sends)


@pytest.mark.parametrize(
    ("averaged", "exchanged", "conclusion"),
    [
        ((20, False), (5, False), "So both help here, and averaging helps more: average where you may."),
        ((5, False), (20, False), "So both help here, and prototypes cost less. They also help more."),
        ((5, False), (5, False), "So both help here, and prototypes cost less."),
        ((-5, False), (5, False), "So prototypes help here, and averaging hurts."),
        ((3, True), (5, False), "So prototypes help here, and averaging brings nothing."),
        ((5, False), (3, True), "So averaging helps here, and prototypes do not."),
        ((-5, False), (-5, False), "So nothing is gained here: a site does as well alone, within a point."),
        ((0.7, False), (0.7, False), "So nothing is gained here: a site does as well alone, within a point."),
    ],
)
def test_the_conclusion_follows_from_the_intervals(averaged, exchanged, conclusion):
    rows = [LOCAL, variant("fedavg", "weights", *averaged), variant("fedproto", "prototypes", *exchanged), CONTROL]
    sentences = lesson(rows)
    assert sentences[-1] == conclusion
    assert sentences[0] == "Alone, a site has 71.0 % (local by head)."
    assert "with 10 times fewer bytes" in sentences[2]
    assert sentences[3].startswith("The same loss with nothing exchanged is not different: ")
    assert len(lesson(rows[:3])) == 4  # without a control, nothing is said of it


def test_each_is_taken_at_its_better_way_of_predicting():
    by_prototype = row("fedproto", seeds(70, 71, 72), 90, "prototypes")
    sentences = lesson([LOCAL, variant("fedavg", "weights", 1), by_prototype])
    assert "fedproto by prototype, 90.0 %" in sentences[2] and "+19.0" in sentences[2]


def test_without_a_kind_there_is_no_lesson_and_with_one_seed_no_verdict():
    one = [
        row("local", {0: 70.0}),
        row("fedavg", {0: 90.0}, sends="weights"),
        row("fedproto", {0: 80.0}, sends="prototypes"),
    ]
    assert lesson(one)[-1] == "One seed decides nothing: `--seeds 3` gives intervals."
    assert lesson(one[:2]) == lesson(one[1:]) == lesson([]) == []


@pytest.mark.parametrize("situation", [*SITUATIONS, *MORE], ids=lambda situation: situation.name)
def test_every_situation_has_local_averaging_prototypes_and_a_control(situation):
    grid = situation.grid(2)
    assert [variant.label for variant in grid.variants] == ["local", "fedavg", "fedproto", "fedproto control", "fedsap"]
    assert len(grid.cells) == 10
    assert [cell.general.control for name, cell in grid.cells.items() if "control" in name] == ["own", "own"]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    monkeypatch.setattr(Situation, "config", property(lambda self: str(file)))
    return tmp_path / "demo"


def test_the_command_shows_each_situation_and_goes_on_where_it_was(small: Path) -> None:
    words = ["demo", "alike", "wired", "--seeds", "2", "--jobs", "1", "--out", str(small)]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    for situation in SITUATIONS[:2]:
        assert situation.title in first.output
    assert first.output.count("Alone, a site has") == 2 and "[16/16]" in first.output
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0
    shown = [result.output.partition("Sites are alike")[2].partition("run folders")[0] for result in (first, again)]
    assert shown[0] and shown[0] == shown[1]
    (shown,) = demonstrate(small, ["alike"])
    assert isinstance(shown.comparison, pf.Comparison) and " ".join(shown.lesson) in first.output


def test_an_unknown_situation_is_one_line(small: Path) -> None:
    line = refusal(lambda: list(demonstrate(small, ["alke"])))
    assert line.startswith("unknown situation 'alke'; did you mean 'alike'?")
    assert not small.exists()


def test_the_readme_has_the_table_of_the_stored_runs():
    root = Path(__file__).parent.parent
    table = (root / "docs" / "results" / "first" / "lesson.md").read_text("utf-8").split("\n\n")[0]
    readme = (root / "README.md").read_text("utf-8")
    assert readme.split("<!-- first run -->\n")[1].split("\n<!-- /first run -->")[0] == table
    for situation in SITUATIONS:
        rows = [variant.row() for variant in read_folder(root / "docs" / "results" / "first" / situation.name).variants]
        assert " ".join(lesson(rows)) in (root / "docs" / "results" / "first" / "lesson.md").read_text("utf-8")
