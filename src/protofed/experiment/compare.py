"""A comparison: methods × seeds, each cell a run of its own with its own folder, as many at a time as there are cores."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import methods
from ..errors import ProtofedError
from ..federation import Record, scale
from ..federation.choose import cores
from .folder import RunFolder, make_folder
from .run import Result, load_result, resume, run
from .settings import Settings, combine, read_toml, resolve

FILE = "comparison.json"


@dataclass(frozen=True)
class Progress:
    """How far one cell is: sent to whoever watches after every round."""

    cell: str
    round: int
    rounds: int
    loss: float | None
    accuracy: float | None


Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class Comparison:
    """Results by method, one per seed."""

    results: dict[str, list[Result]]
    folder: Path | None = None

    def summaries(self) -> dict[str, list[dict[str, Any]]]:
        return {method: [r.summary for r in runs] for method, runs in self.results.items()}


def with_local(names: Iterable[str]) -> list[str]:
    """The methods by their registered names, each once, and Local always beside them."""
    chosen = dict.fromkeys(methods.registry[name].name for name in names)
    return list(dict.fromkeys(["local", *chosen]))


def compare(
    names: Sequence[str],
    *,
    seeds: Sequence[int] | int = 3,
    out: str | Path | None = None,
    jobs: int | None = None,
    watch: Watch | None = None,
    config: str | Path | None = None,
    **given: Any,
) -> Comparison:
    """Run every method with every seed under the same settings. `seeds=3` means three from `seed` on."""
    if scale.asked_for():
        raise ProtofedError("a comparison spreads its runs over this host itself; start single runs with torchrun")
    given = combine(read_toml(Path(config)) if config else {}, given)
    chosen = with_local(names)
    first = resolve(chosen[0], given, also=chosen).general.seed
    numbers = list(range(first, first + seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ProtofedError(f"a comparison needs at least one seed, each once; got {numbers}")
    cells = {
        f"{name}-seed{seed}": resolve(name, {**given, "seed": seed}, also=chosen) for name in chosen for seed in numbers
    }
    folder = None
    if out is not None:
        folder = Path(out)
        record = {"methods": chosen, "seeds": numbers, "settings": {k: s.to_dict() for k, s in cells.items()}}
        make_folder(folder, {FILE: json.dumps(record, indent=1)})
    return _run_cells(chosen, numbers, cells, folder, jobs, watch)


def is_comparison(folder: Path) -> bool:
    return (folder / FILE).is_file()


def resume_comparison(folder: Path, *, jobs: int | None = None, watch: Watch | None = None) -> Comparison:
    """Finish a comparison that was stopped: finished runs are kept, begun ones resumed, the rest run."""
    chosen, numbers, cells = read_comparison(folder)
    return _run_cells(chosen, numbers, cells, folder, jobs, watch)


def read_comparison(folder: Path) -> tuple[list[str], list[int], dict[str, Settings]]:
    """Methods, seeds, and each cell's settings."""
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
        cells = {name: resolve(None, given) for name, given in record["settings"].items()}
        return list(record["methods"]), list(record["seeds"]), cells
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtofedError(f"{folder / FILE}: not readable ({type(error).__name__}: {error})") from None


def _run_cells(
    chosen: Sequence[str],
    numbers: Sequence[int],
    cells: dict[str, Settings],
    folder: Path | None,
    jobs: int | None,
    watch: Watch | None,
) -> Comparison:
    first = next(iter(cells.values())).general
    jobs = min(len(cells), jobs or max(1, cores() // max(1, first.threads, first.workers)))
    share = max(1, cores() // jobs)  # each run gets its share of the cores, unless the settings say how many
    cells = {c: _within(settings, share) for c, settings in cells.items()}
    places = {cell: None if folder is None else folder / cell for cell in cells}
    done: dict[str, Result] = {}
    if jobs == 1:
        for cell, settings in cells.items():
            done[cell] = _run_cell(cell, settings, places[cell], watch)
    else:
        # forked where possible: quick to start, and a person's own methods and data are there
        context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
        queue = context.Queue()
        begin = (queue, cells, places)  # inherited by forking: only names and results are pickled
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin_worker, initargs=begin) as pool:
            waiting = {pool.submit(_run_cell_in_worker, cell): cell for cell in cells}
            listener = threading.Thread(target=_listen, args=(queue, watch), daemon=True)
            listener.start()
            try:
                for future in as_completed(waiting):
                    done[waiting[future]] = Result(cells[waiting[future]], *future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in multiprocessing.active_children():  # the runs under way: nobody will see their results
                    child.terminate()
                raise
        queue.put(None)
        listener.join()
    return Comparison({m: [done[f"{m}-seed{s}"] for s in numbers] for m in chosen}, folder)


def _within(settings: Settings, share: int) -> Settings:
    engine = settings.engine
    return settings.with_engine(replace(engine, workers=engine.workers or share, threads=engine.threads or share))


def _run_cell(cell: str, settings: Settings, place: Path | None, watch: Watch | None) -> Result:
    def report(record: Record, rounds: int) -> None:
        if watch is not None:
            watch(Progress(cell, record.round, rounds, record.loss, record.metrics.get("accuracy_head")))

    if place is not None and (place / "summary.json").is_file():
        result = load_result(place)
        if watch is not None:
            rounds = settings.general.rounds
            watch(Progress(cell, rounds, rounds, None, result.summary["last_round"]["accuracy_head"]))
        return result
    if place is not None and (place / "settings.toml").is_file():
        return resume(RunFolder.open(place).path, watch=report)
    return run(settings, out=place, watch=report)


_given: tuple[Any, dict[str, Settings], dict[str, Path | None]]


def _begin_worker(*given: Any) -> None:
    global _given
    _given = given


def _run_cell_in_worker(cell: str) -> tuple[list[dict[str, Any]], dict[str, Any], Path | None]:
    queue, cells, places = _given
    result = _run_cell(cell, cells[cell], places[cell], queue.put)
    return result.metrics, result.summary, result.folder


def _listen(queue: Any, watch: Watch | None) -> None:
    while (progress := queue.get()) is not None:
        if watch is not None:
            watch(progress)
