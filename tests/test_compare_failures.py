"""Cells that fail, and processes that are killed: the rest of a comparison runs, and nothing is silent."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import protofed as pf
from protofed.errors import ProtofedError, Stopped
from protofed.experiment import cells
from protofed.experiment.compare import (
    ComparisonFolder,
    compare,
    make_grid,
    read_comparison,
    resume_comparison,
    run_grid,
    sweep,
)
from protofed.results.read import read_rows
from protofed.results.tables import Row, notes
from support.small import SMALL, blobs

pytestmark = pytest.mark.slow

QUICK = {"clients": 3, "rounds": 2, "shot": 4, "way": 2, "hidden": [8]}
FIXED = {"engine": "loop", "layout": "contiguous", "workers": 1, "threads": 1}
PAIRS = [f"{key}={value}" for key, value in {**QUICK, **FIXED}.items()]


@pytest.fixture
def fails(monkeypatch):
    """A method whose training fails as a bug would, from a round on, while the file `broken` is there."""
    monkeypatch.setattr(pf.methods.registry, "_entries", dict(pf.methods.registry._entries))

    @dataclass(frozen=True)
    class Fails(pf.methods.get("fedproto").__class__):
        file: str = "broken"
        since: int = 1
        how: str = "error"

        def update(self, state, reduced, round, setup):
            if round >= self.since and Path(self.file).exists():
                if self.how == "kill":
                    Path(self.file).unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.how == "always":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ZeroDivisionError("by\nnought")
            return super().update(state, reduced, round, setup)

    pf.methods.register("fails")(Fails)
    return Fails


def files(folder):
    return {p.name for p in folder.iterdir()}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_cell_that_fails_is_recorded_and_the_rest_runs(jobs, fails, tmp_path, caplog):
    broken = tmp_path / "broken"
    broken.touch()
    seen = []
    made = compare(
        ["fails", "fedproto", "fine=fails?since=99"],
        local=False,
        seeds=2,
        jobs=jobs,
        out=tmp_path / "c",
        watch=seen.append,
        file=str(broken),
        **QUICK,
        **FIXED,
    )
    reason = "ZeroDivisionError: by nought"
    assert made.failures == {f"fails-seed{s}": reason for s in (1234, 1235)}
    assert [len(made.results[label]) for label in ("fails", "fedproto", "fine")] == [0, 2, 2]
    assert json.loads((tmp_path / "c/failed.json").read_text()) == made.failures
    assert {p.cell for p in seen if p.failed == reason} == set(made.failures)
    assert "fails-seed1234 failed: ZeroDivisionError" in caplog.text
    line = f"failed: fails, seeds 1234, 1235: {reason}"
    for text in ("table.md", "table.tex"):
        assert line in (tmp_path / "c" / text).read_text()
    rows, _ = read_rows(tmp_path / "c")
    assert (
        [dict(row.failures) for row in rows]
        == [{1234: reason, 1235: reason}, {}, {}]
        == [dict(row.failures) for row in made.rows()]
    )
    again = resume_comparison(tmp_path / "c", jobs=jobs)  # it is tried again, and fails again
    assert again.failures == made.failures

    broken.unlink()
    healed = resume_comparison(tmp_path / "c", jobs=jobs)
    assert healed.failures == {} and not (tmp_path / "c/failed.json").exists()
    assert [len(runs) for runs in healed.results.values()] == [2, 2, 2]
    assert "failed" not in (tmp_path / "c/table.md").read_text()
    alike = [[run.summary["last_five"] for run in healed.results[label]] for label in ("fails", "fedproto")]
    assert alike[0] == alike[1]  # it is FedProto, but for its fault


def test_some_failures_are_healed_and_others_stay(fails, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).touch()
    entries = [f"{name}=fails?file={tmp_path / name}" for name in ("one", "two")]
    compare([*entries, "fedproto"], local=False, seeds=1, jobs=1, out=tmp_path / "c", **QUICK, **FIXED)
    assert ComparisonFolder(tmp_path / "c").failures().keys() == {"one-seed1234", "two-seed1234"}
    (tmp_path / "one").unlink()
    made = resume_comparison(tmp_path / "c", jobs=1)
    assert made.failures.keys() == ComparisonFolder(tmp_path / "c").failures().keys() == {"two-seed1234"}


@pytest.mark.parametrize("jobs", [1, 2])
def test_where_all_cells_fail_the_first_reason_is_raised(jobs, tmp_path):
    with pytest.raises(ProtofedError, match=r"^local-shot=(5|6)000-seed1234: .*(5|6)000.* \(all 2 runs failed\)$"):
        sweep(["local"], over={"shot": [5000, 6000]}, seeds=1, jobs=jobs, out=tmp_path / "s", clients=3, **FIXED)
    assert len(json.loads((tmp_path / "s/failed.json").read_text())) == 2
    assert not (tmp_path / "s/table.md").exists()


def test_bad_settings_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(ProtofedError, match="rounds"):
        sweep(["local"], over={"rounds": [1, 0]}, seeds=1, jobs=1, out=tmp_path / "s", **FIXED)
    assert not (tmp_path / "s").exists()


def test_what_goes_wrong_in_watch_is_the_callers(tmp_path):
    class Enough(Exception):
        pass

    def watch(progress):
        raise Enough

    for jobs in (1, 2):
        with pytest.raises(Enough):
            compare(["fedavg"], seeds=1, jobs=jobs, watch=watch, out=tmp_path / str(jobs), **QUICK, **FIXED)
        assert not (tmp_path / str(jobs) / "failed.json").exists()
    assert not multiprocessing.active_children()


# --- killed processes -------------------------------------------------------------------------------------------------
def test_a_killed_cell_goes_on_from_its_checkpoint(fails, tmp_path, caplog):
    """Killed once in its second round: the results are those of a run never killed, and no other cell is disturbed."""
    (tmp_path / "broken").touch()
    settings = {**QUICK, **FIXED, "rounds": 4, "checkpoint_every": 1, "file": str(tmp_path / "broken")}
    entries = ["fails?how=kill&since=3", "fedproto"]
    made = compare(entries, local=False, seeds=1, jobs=2, out=tmp_path / "c", **settings)
    assert not made.failures and not (tmp_path / "c/failed.json").exists()
    assert "fails-seed1234: its process was killed by SIGKILL; it is started again" in caplog.text
    rounds = [
        json.loads(line)["round"] for line in (tmp_path / "c/fails-seed1234/rounds.jsonl").read_text().splitlines()
    ]
    assert rounds == [1, 2, 3, 4]
    one, other = ([run.summary["last_five"] for run in made.results[label]] for label in ("fails", "fedproto"))
    assert one == other


def test_a_cell_that_is_always_killed_fails_after_three_times(fails, tmp_path, caplog):
    (tmp_path / "broken").touch()
    settings = {**QUICK, **FIXED, "file": str(tmp_path / "broken")}
    entries = ["fails?how=always", "fedproto"]
    seen = []
    made = compare(entries, local=False, seeds=1, jobs=2, out=tmp_path / "c", watch=seen.append, **settings)
    assert made.failures == {"fails-seed1234": "its process was killed by SIGKILL, 3 times"}
    assert caplog.text.count("it is started again") == 2 and len(made.results["fedproto"]) == 1
    assert [p.cell for p in seen if p.failed] == ["fails-seed1234"]
    (tmp_path / "broken").unlink()
    assert not resume_comparison(tmp_path / "c", jobs=2).failures


def test_kill_9_of_one_process_of_a_real_command(tmp_path):
    settings = {**QUICK, **FIXED, "rounds": 60, "checkpoint_every": 5, "evaluate_every": 20, "limit_test": 40}
    words = [*(f"{key}={value}" for key, value in settings.items()), "--no-local", "--seeds", "1", "--jobs", "2"]
    command = [sys.executable, "-m", "protofed", "compare", "fedavg", "fedproto", *words, "--out", str(tmp_path / "c")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        pytest.skip("the children of a process are not listed here")
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "c").glob("*/rounds.jsonl"))) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "killed by SIGKILL; it is started again" in err and "Traceback" not in err
    whole = compare(["fedavg", "fedproto"], local=False, seeds=1, jobs=1, out=tmp_path / "w", **settings)
    assert (tmp_path / "c/results.csv").read_bytes() == (tmp_path / "w/results.csv").read_bytes()
    assert not whole.failures and "[2/2]" in out


def test_a_stopped_comparison_leaves_no_process(tmp_path):
    """Ctrl-C reaches every process of a terminal; the runs end with their parent, and resume gives the same bytes."""
    settings = {**QUICK, **FIXED, "rounds": 20_000, "checkpoint_every": 5, "evaluate_every": 5000, "limit_test": 40}
    words = [*(f"{key}={value}" for key, value in settings.items()), "--no-local", "--seeds", "2", "--jobs", "2"]
    command = [sys.executable, "-m", "protofed", "compare", "fedavg", *words, "--out", str(tmp_path / "c")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "c").glob("*/rounds.jsonl"))) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not (tmp_path / "c/failed.json").exists()


# --- the command line -------------------------------------------------------------------------------------------------
def test_the_command_says_which_failed_and_exits_with_1(call, fails, tmp_path):
    (tmp_path / "broken").touch()
    words = ["fails", "fedproto", *PAIRS, "--no-local", "--seeds", "1", "--jobs", "1"]
    code, out, err = call("compare", *words, "--out", "c")
    assert code == 1 and "│ fedproto" in out and "[2/2]" in out
    assert "failed: fails, seed 1234: ZeroDivisionError: by nought" in out
    assert (
        err.splitlines()[-1] == "failed: fails-seed1234; `protofed resume c` tries them again"
        and "Traceback" not in err
    )
    code, out, _ = call("table", "c", "--format", "markdown")
    assert code == 0 and "failed: fails, seed 1234" in out
    assert call("resume", "c", "--jobs", "1")[0] == 1
    (tmp_path / "broken").unlink()
    code, out, err = call("resume", "c", "--jobs", "1")
    assert code == 0 and "failed" not in out + err


def test_the_command_where_all_fail_is_one_line(call, tmp_path):
    code, _, err = call("compare", "local", "shot=5000", "clients=3", "--seeds", "1", "--jobs", "1", "--out", "c")
    assert code == 2 and err.splitlines()[-1].startswith("error: local-seed1234: ") and "Traceback" not in err


# --- the files --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["", "[1]", "3", "{"])
def test_a_broken_list_of_failures_is_one_line(text, tmp_path):
    compare(["fedavg"], local=False, seeds=1, jobs=1, out=tmp_path / "c", **QUICK, **FIXED)
    (tmp_path / "c/failed.json").write_text(text)
    for read in (read_rows, resume_comparison):
        with pytest.raises(ProtofedError, match=r"failed\.json: not readable"):
            read(tmp_path / "c")


def test_a_record_is_read_as_it_was_written(tmp_path):
    grid = make_grid(["fedavg", "x=fedavg?lr=0.5"], seeds=2, given=QUICK, columns=["head"])
    folder = ComparisonFolder.create(tmp_path / "c", grid.record())
    assert folder.exists() and json.loads(folder.read().to_json()) == json.loads(grid.record().to_json())
    read = read_comparison(tmp_path / "c")
    assert (read.variants, read.seeds, read.columns) == (grid.variants, grid.seeds, grid.columns)
    assert {cell: s.to_dict() for cell, s in read.cells.items()} == {
        cell: s.to_dict() for cell, s in grid.cells.items()
    }


def test_notes_list_equal_reasons_together():
    row = Row("a", "fedavg", {}, [], {1: "x", 2: "y", 3: "x"})
    lines = [line for line in notes([row], ["seconds"]) if line.startswith("failed")]
    assert lines == ["failed: a, seeds 1, 3: x", "failed: a, seed 2: y"]


# --- where processes cannot be had ------------------------------------------------------------------------------------
def _compare_in_a_pool(folder):
    made = compare(["fedavg"], local=False, seeds=2, jobs=2, out=folder, **QUICK, **FIXED)
    return len(made.results["fedavg"]), multiprocessing.current_process().daemon


def test_in_a_daemonic_process_runs_go_one_after_another(tmp_path):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_compare_in_a_pool, (str(tmp_path / "c"),)) == (2, True)


@pytest.mark.parametrize("from_process", [0, 1])
def test_where_no_further_process_can_be_started(from_process, monkeypatch, tmp_path, caplog):
    started = []
    begin = cells._begin

    def refused(cell):
        if len(started) >= from_process:
            raise OSError(28, "No space left on device")
        started.append(cell)
        return begin(cell)

    monkeypatch.setattr(cells, "_begin", refused)
    made = compare(["fedavg"], seeds=2, jobs=2, out=tmp_path / "c", **QUICK, **FIXED)
    assert [len(runs) for runs in made.results.values()] == [2, 2] and not made.failures
    assert "no further process could be started" in caplog.text and "No space left on device" in caplog.text


def test_no_semaphore_is_needed(monkeypatch, tmp_path):
    """Queues and locks of multiprocessing live in /dev/shm, which may be tiny."""
    import _multiprocessing

    class Full:
        def __init__(self, *args):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(_multiprocessing, "SemLock", Full)
    with pytest.raises(OSError, match="No space"):
        multiprocessing.get_context("fork").Queue()
    made = compare(["fedavg"], local=False, seeds=2, jobs=2, out=tmp_path / "c", **QUICK, **FIXED)
    assert len(made.results["fedavg"]) == 2


# --- the share of the cores -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("jobs", "workers"), [(1, 8), (2, 4), (3, 2)])
def test_threads_do_not_depend_on_jobs(jobs, workers, monkeypatch):
    seen = {}

    def instead(chosen, *rest):
        chosen = getattr(chosen, "waiting", chosen)
        seen.update({cell.name: cell.settings.engine for cell in chosen})
        return iter(())

    monkeypatch.setattr(cells, "cores", lambda: 8)
    monkeypatch.setattr(cells, "_one_by_one", instead)
    monkeypatch.setattr(cells, "_side_by_side", instead)
    grid = make_grid(["fedavg", "x=fedavg?workers=3", "y=fedavg?threads=2"], seeds=1, given={})
    list(cells.run_cells(grid.cells, None, jobs))
    assert {name: (e.workers, e.threads) for name, e in seen.items()} == {
        "fedavg-seed1234": (workers, 0),
        "x-seed1234": (3, 0),
        "y-seed1234": (workers, 2),
    }


def test_jobs_1_and_2_give_the_same_bytes(tmp_path):
    for jobs in (1, 2):
        compare(["fedproto"], seeds=1, jobs=jobs, out=tmp_path / str(jobs), **QUICK, **{**FIXED, "workers": 0})
    assert (tmp_path / "1/results.csv").read_bytes() == (tmp_path / "2/results.csv").read_bytes()


def test_in_a_thread_and_with_data_in_memory(tmp_path):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(compare(["fedavg"], seeds=1, jobs=2, data=blobs(), **SMALL))
    )
    thread.start()
    thread.join()
    assert [len(runs) for runs in results[0].results.values()] == [1, 1]
    assert run_grid(
        make_grid(["local"], seeds=1, given={"data": blobs(), **SMALL}), out=None, jobs=1, watch=None
    ).results


def test_a_request_in_the_last_round_of_a_run_stops_the_comparison(tmp_path):
    """Where runs go one after another in this process."""
    seen = []

    def ask(progress):
        seen.append(progress.cell)
        if progress.round == progress.rounds:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="protofed resume") as caught:
        compare(["fedavg"], seeds=1, jobs=1, out=tmp_path / "c", watch=ask, **QUICK, **FIXED)
    assert caught.value.code == 143 and len(set(seen)) == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
