"""The first run: situations in which sites are alike or differ, and what each teaches about averaging and prototypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..disk import write_atomically
from ..errors import Stopped, unknown
from ..results.lesson import OVERVIEW, figures_of, lesson
from ..results.tables import comparison_markdown
from .compare import Comparison, Grid, Watch, is_comparison, make_grid, read_comparison, resume_comparison, run_grid

LESSON = "lesson.md"
COLUMNS = ["accuracy_head", "accuracy_prototype", "gain_head", "gain_prototype", "total_bytes_up", "total_bytes_down"]


@dataclass(frozen=True)
class Situation:
    """A situation: the settings of a comparison, and a title that says how its sites differ."""

    name: str
    title: str

    @property
    def config(self) -> str:
        """The name of the example with its settings."""
        return f"situations/{self.name}"

    def grid(self, seeds: Sequence[int] | int) -> Grid:
        """The comparison: Local, and the methods of the example."""
        return make_grid(local=True, seeds=seeds, config=self.config, columns=COLUMNS)


SITUATIONS = (
    Situation("alike", "Sites are alike and have little: 20 sites, two images of each digit, one kind of sensor"),
    Situation("wired", "Sensors differ: the same, but every site's pixels are wired in an order of its own"),
    Situation("enough", "Sites have enough: 20 sites, three digits each, twenty images of each digit"),
)
MORE = (Situation("networks", "Networks differ: as the first, but with networks of ten sizes, each at two sites"),)


@dataclass(frozen=True)
class Shown:
    """A situation after its runs, and the sentences that follow from them."""

    situation: Situation
    comparison: Comparison
    lesson: list[str]

    def markdown(self) -> str:
        """The title, the table and the sentences in Markdown."""
        table = comparison_markdown(self.comparison.rows(), self.comparison.columns, noted=False)
        return f"**{self.situation.title}**\n\n{table}\n{' '.join(self.lesson)}\n"


def overview(shown: Sequence[Shown]) -> str:
    """A table in Markdown with a line for each situation: accuracies in % and gains over Local in points."""
    lines = [["situation", *OVERVIEW], ["---", *["---:"] * len(OVERVIEW)]]
    for each in shown:
        figures = figures_of(each.comparison.rows())
        if figures is not None:
            lines.append([each.situation.title.partition(":")[0].lower(), *figures.cells()])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def chosen(names: Sequence[str] = ()) -> list[Situation]:
    """The situations of some names; those of the first run where none is given."""
    known = {situation.name: situation for situation in (*SITUATIONS, *MORE)}
    for name in names:
        if name not in known:
            raise unknown("situation", name, known)
    return [known[name] for name in names] if names else list(SITUATIONS)


def cells(situations: Sequence[Situation], folder: Path, seeds: Sequence[int] | int) -> int:
    """The number of runs of some situations, of which a folder may hold some already."""
    return sum(
        len(read_comparison(folder / s.name).cells if is_comparison(folder / s.name) else s.grid(seeds).cells)
        for s in situations
    )


def demonstrate(
    folder: str | Path,
    names: Sequence[str] = (),
    *,
    seeds: Sequence[int] | int = 3,
    jobs: int | None = None,
    watch: Watch | None = None,
) -> Iterator[Shown]:
    """Run the situations one after another.

    Args:
        folder: The folder to write, with the folder of a comparison for each situation, and `lesson.md`, all of them in
            words and tables. What it has already is kept.
        names: The situations; those of the first run where none is given.
        seeds: The number of seeds, or a list of seeds.
        jobs: The number of runs at a time; None takes as many as there are cores.
        watch: A function that is called with the progress of a run after each of its rounds.

    Returns:
        Each situation when its runs have finished, with what it teaches.

    Example: `for shown in demonstrate("runs/demo"): print(shown.lesson[-1])`
    """
    folder, finished = Path(folder), list[Shown]()
    for situation in chosen(names):
        place = folder / situation.name
        try:
            if is_comparison(place):
                result = resume_comparison(place, jobs=jobs, watch=watch)
            else:
                result = run_grid(situation.grid(seeds), out=place, jobs=jobs, watch=watch)
        except Stopped as stopped:
            raise Stopped(f"stopped; `protofed demo --out {folder}` goes on", stopped.code) from None
        shown = Shown(situation, result, lesson(result.rows()))
        finished.append(shown)
        texts = [overview(finished), *(each.markdown() for each in finished)]
        write_atomically(folder / LESSON, "\n".join(texts).encode())
        yield shown
