"""Parts of comparisons on several hosts, array jobs, and the order in which cells are taken."""

import importlib.util
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.errors import ProtofedError
from protofed.experiment import cells, shares
from protofed.experiment.compare import ComparisonFolder, compare, make_grid, resume_comparison, run_grid
from protofed.experiment.launch import Launcher, PartTask, Slurm
from protofed.experiment.reproduce import parts_of_columns, plan, run_plan
from protofed.experiment.settings import resolve
from protofed.experiment.shares import Pace, Part, work

QUICK = {"data": "digits", "clients": 3, "rounds": 2, "shot": 4, "way": 2, "hidden": [8]}
FIXED = {"engine": "loop", "layout": "contiguous", "workers": 1, "threads": 1}
GIVEN = {**QUICK, **FIXED}


# --- which cells a part has -------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 9))
def test_parts_have_every_cell_once_and_about_the_same_work(works, parts):
    cells = {f"cell{i}": w for i, w in enumerate(works)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "work", lambda w: w)
        divided = [Part(number, parts).of_cells(cells) for number in range(1, parts + 1)]
    assert sorted(name for part in divided for name in part) == sorted(cells)
    loads = [sum(cells[name] for name in part) for part in divided]
    assert max(loads) - min(loads) <= max(works)  # what the greedy rule promises


def test_work_grows_with_what_takes_time():
    def of(method="fedavg", **given):
        return work(resolve(method, {"data": "digits", **given}))

    assert of(rounds=20) == pytest.approx(2 * of(rounds=10))
    assert of(clients=10, participation=0.5) == pytest.approx(of(clients=5))
    assert of(model="resnet18") > 10 * of(model="cnn") > 0
    assert of("fixmatch-fedavg", labels="client") > 2 * of()
    assert of(models=["cnn", "resnet18"]) == pytest.approx((of(model="cnn") + of(model="resnet18")) / 2)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3"])
def test_a_part_that_is_none(text):
    with pytest.raises(ProtofedError, match="expected NUMBER/PARTS"):
        Part.parse(text)


def test_columns_of_a_plan_are_shared_out_in_a_circle():
    made = plan("fedpagr/table2", seeds=1)
    parts = 4
    divided = [parts_of_columns(made, Part(number, parts)) for number in range(1, parts + 1)]
    sizes = [sum(len(own[c].of_cells(made.grids[c].cells)) for c in made.columns) for own in divided]
    assert sum(sizes) == made.cells
    for column in made.columns:
        assert sorted(own[column].number for own in divided) == [1, 2, 3, 4]


# --- the order of cells -----------------------------------------------------------------------------------------------
def cell(name, rounds, **given):
    return cells.Cell(name, resolve("fedavg", {**GIVEN, "rounds": rounds, **given}), None)


def test_the_longest_cell_is_taken_first_and_measured_times_count(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(cells.time, "monotonic", lambda: clock[0])
    queue = cells.Queue([cell("a", 2), cell("b", 9), cell("c", 5), cell("a2", 2, seed=7)])
    first, second = queue.take(), queue.take()
    assert [first.name, second.name] == ["b", "c"]
    clock[0] = 9.0
    queue.ended(first, None)
    assert queue.expected(queue.waiting[0]) == pytest.approx(2.0)  # one second a round
    queue.give_back(second)
    assert queue.take().name == "c"
    taken = queue.take()
    assert taken.name == "a"
    clock[0] = 59.0
    queue.ended(taken, None)  # slower than its settings say: so is the same run with another seed
    assert queue.expected(queue.waiting[0]) == pytest.approx(50.0)


def test_the_last_cell_gets_all_cores_where_others_soon_end(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(cells, "cores", lambda: 4)
    monkeypatch.setattr(cells.time, "monotonic", lambda: clock[0])
    three = [cell(name, 10, seed=k) for k, name in enumerate("abc")]
    queue = cells.Queue(three, {"a", "b", "c"})
    first, second = queue.take(), queue.take()
    assert [c.settings.engine.workers for c in (first, second)] == [1, 1]
    clock[0] = 10.0
    queue.ended(first, None)
    assert queue.take().settings.engine.workers == 4  # the second is about to end

    queue = cells.Queue(three, set())  # their workers were asked for by name
    first, _ = queue.take(), queue.take()
    clock[0] += 10.0
    queue.ended(first, None)
    assert queue.take().settings.engine.workers == 1


def test_a_failure_says_nothing_about_the_pace():
    queue = cells.Queue([cell("a", 2), cell("b", 2, seed=2)])
    queue.ended(queue.take(), cells.Failure("bug"))
    assert not queue.pace.seconds and not queue.begun
    pace = Pace()
    pace.add(cell("a", 2).settings, 3.0, share=0.5)
    assert pace.expected(cell("b", 2, seed=9).settings) == pytest.approx(6.0)


# --- parts of a comparison --------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_parts_one_after_another_give_the_comparison_of_one_command(tmp_path):
    def made(out, **more):
        return compare(["fedavg", "fedproto"], seeds=2, jobs=1, out=tmp_path / out, **more, **GIVEN)

    whole = made("whole")
    first = made("parts", part="1/3")
    assert len(first.left) == 4 and not (tmp_path / "parts/results.csv").exists()
    resume_comparison(tmp_path / "parts", jobs=1, part=Part(3, 3))
    last = made("parts", part="2/3")
    assert not last.left and last.rows() != []
    for name in ("results.csv", "comparison.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert [r.accuracy_prototype for r in last.results["fedproto"]] == [
        r.accuracy_prototype for r in whole.results["fedproto"]
    ]
    with pytest.raises(ProtofedError, match="another comparison"):
        compare(["fedavg"], seeds=2, jobs=1, out=tmp_path / "parts", part="1/3", **GIVEN)
    with pytest.raises(ProtofedError, match="--out"):
        compare(["fedavg"], part="1/3", **GIVEN)


def test_more_parts_than_cells_and_failures_of_several_parts(tmp_path, monkeypatch):
    grid = make_grid(["fedavg", "fedproto"], local=True, seeds=1, given=GIVEN)
    broken = {"fedavg-seed1234", "fedproto-seed1234"}
    honest = cells._run_cell

    def run_cell(cell, tell):
        if cell.name in broken:
            raise ZeroDivisionError("by nought")
        return honest(cell, tell)

    monkeypatch.setattr(cells, "_run_cell", run_cell)
    made = [run_grid(grid, out=tmp_path / "c", jobs=1, watch=None, part=Part(number, 4)) for number in range(1, 5)]
    assert sum(len(m.failures) for m in made[:2]) == 1  # Local is in one of them, and each says its own
    stored = json.loads((tmp_path / "c/failed.json").read_text())
    assert set(stored) == broken == set(made[-1].failures) and not made[-1].left
    broken.clear()
    for number in range(1, 5):
        healed = run_grid(grid, out=tmp_path / "c", jobs=1, watch=None, part=Part(number, 4))
    assert not healed.failed() and not (tmp_path / "c/failed.json").exists()


def test_a_part_is_locked_and_so_is_the_whole_while_one_runs(tmp_path):
    grid = make_grid(["local"], seeds=2, given=GIVEN)
    path, record = tmp_path / "c", grid.record()
    running = ComparisonFolder.open_part(path, record, 1, 2)
    code = (
        "import sys; from pathlib import Path; from protofed.results.comparison import *;"
        "folder = Path(sys.argv[1]); FolderLock.acquire.__defaults__ = (0.0,);"
        "record = ComparisonFolder(folder).read()\n"
        "for ask in (lambda: ComparisonFolder.open_part(folder, record, 2, 2).close(),"
        " lambda: ComparisonFolder.open_part(folder, record, 1, 2), lambda: ComparisonFolder.open(folder),"
        " lambda: ComparisonFolder.open_part(folder, record, 1, 3)):\n"
        "    try: ask(); print('open')\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[0] == "open" and len(lines) == 4
    assert all(line.startswith("ProtofedError") for line in lines[1:])
    assert "part 1/2 is being run" in lines[2] and "part 1/2 is being run" in lines[3]
    running.close()
    ComparisonFolder.open(path).close()


@pytest.mark.slow
def test_parts_of_a_reproduction(tmp_path):
    tiny = {"data": "digits", "data.limit_train": 200, "partition": "iid", "model": "mlp", "hidden": 8}
    only = plan("fedsap/table1").columns[:2]
    made = plan("fedsap/table1", seeds=1, only=only, given={**tiny, "clients": 3, "rounds": 1, "snapshots": 0, **FIXED})
    whole = run_plan(made, out=tmp_path / "whole", jobs=1)
    for number in (2, 1, 3):
        parts = run_plan(made, out=tmp_path / "parts", jobs=1, part=Part(number, 3))
    assert parts.markdown() == whole.markdown()
    name = "reproduction.md"
    assert (tmp_path / "parts" / name).read_text() == (tmp_path / "whole" / name).read_text()


# --- array jobs -------------------------------------------------------------------------------------------------------
def test_without_submitit_it_is_one_line(monkeypatch, tmp_path, call):
    monkeypatch.setattr("protofed.experiment.launch.importlib.util.find_spec", lambda name: None)
    code, _, error = call("compare", "fedavg", "--launcher", "slurm", "--out", tmp_path / "c")
    assert code == 2 and "needs the package submitit" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "c").exists()


def test_launcher_and_part_are_one_too_many(tmp_path, call):
    code, _, error = call("compare", "fedavg", "--launcher", "slurm", "--part", "1/2", "--out", tmp_path / "c")
    assert code == 2 and "use one of them" in error
    code, _, error = call("compare", "fedavg", "--launcher", "lsf", "--out", tmp_path / "c")
    assert code == 2 and "unknown launcher 'lsf'" in error
    code, _, error = call("compare", "fedavg", "--part", "1/2")
    assert code == 2 and "--out" in error


needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="needs submitit")


@needs_submitit
def test_slurm_gets_one_array_job(tmp_path, monkeypatch):
    """A stand-in for `sbatch` keeps the script that it is given."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("sbatch", "srun"):
        script = tools / tool
        script.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/script.sh\necho Submitted batch job 4711\n')
        script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    launcher = Launcher.registry.make("slurm", {"parts": 3, "minutes": 30, "cpus": 4, "partition": "cpu"})
    assert isinstance(launcher, Slurm)
    jobs = launcher.submit(tmp_path / "c", cells=7, words=["--jobs", "2"])
    assert [job.job_id for job in jobs] == ["4711_0", "4711_1", "4711_2"]
    script = (tmp_path / "script.sh").read_text()
    for line in ("--array=0-2", "--cpus-per-task=4", "--time=30", "--partition=cpu"):
        assert line in script
    assert jobs[1].submission().function == PartTask((str(tmp_path / "c"), "--part", "2/3", "--jobs", "2"))


@needs_submitit
@pytest.mark.slow
@pytest.mark.soak
def test_array_tasks_in_processes_of_this_host(tmp_path, call):
    words = ["fedavg", "--seeds", "1", *(f"{key}={value}" for key, value in GIVEN.items()), "--jobs", "1"]
    code, out, error = call("compare", *words, "--out", tmp_path / "c", "--launcher", "local?parts=2")
    assert code == 0 and "2 tasks" in out, error
    compare(["fedavg"], seeds=1, jobs=1, out=tmp_path / "whole", **GIVEN)
    assert (tmp_path / "c/results.csv").read_bytes() == (tmp_path / "whole/results.csv").read_bytes()
    assert len(list((tmp_path / "c/jobs").glob("*_result.pkl"))) == 2


@pytest.mark.slow
def test_a_task_that_fails_says_so(tmp_path):
    with pytest.raises(RuntimeError, match="ended with code 2"):
        PartTask((str(Path(tmp_path) / "nothing"), "--part", "1/2"))()
