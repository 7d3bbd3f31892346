"""One run, from its settings to the run folder and back: it is begun, stopped, resumed and read."""

from __future__ import annotations

import logging
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..classifier.shelf import Classifiers
from ..data import Dataset, as_dataset
from ..data.fingerprint import fingerprint
from ..data.sources import IN_MEMORY, in_memory
from ..errors import ProtofedError, Stopped
from ..federation import Federation, Record, checkpoint, scale
from ..federation.choose import EngineInputs, threads_kept
from ..outcome import Result
from ..results.folder import History, RunFolder, check_free, check_is_run, read_about, read_settings
from ..results.read import is_run, read_finished
from ..results.rows import SUMMARY
from ..results.track import Tracker, tracker
from ..version import __version__
from . import stop
from .build import build as build  # programs that measure older checkouts know it by this place
from .build import built, change_classes, engine_inputs, inputs_at
from .newcomers import newcomer_figures
from .recording import confusions, rows_of, snapshot_of, summarise
from .settings import Settings, combine, read_run, resolve, with_dataset
from .trained import PLAIN, TrainedClients

log = logging.getLogger("protofed")
NOT_HERE = Dataset(torch.empty(0, 1), torch.empty(0, dtype=torch.long), name=IN_MEMORY)  # where a result needs no data
Watcher = Callable[[Record, int], None]


def run(
    method: str | Settings | None = None,
    *,
    out: str | Path | None = None,
    watch: Watcher | None = None,
    config: str | Path | None = None,
    until: int | None = None,
    **given: Any,
) -> Result:
    """Run one method.

    Args:
        method: The method's name, or complete settings; it may be left out where `config` names one.
        out: The run folder to write, which must not exist yet; None writes nothing.
        watch: A function that is called with the record of each round and the number of rounds.
        config: A file of settings, which keywords override.
        until: The round after which the run pauses, with a checkpoint from which `resume` goes on; None runs all rounds.
        **given: Settings, as on the command line. A key with a dot is written as a nested mapping:
            `alignment={"shape": "cosine"}`.

    Returns:
        The result: the figures, and the run folder.

    Example: `run("fedsap", data="digits", rounds=20, seed=1234).accuracy`
    """
    if isinstance(method, Settings):
        settings = method
    else:
        settings = resolve(method, combine(read_run(Path(config)) if config else {}, with_dataset(given)))
    path = None if out is None else Path(out)
    try:
        with threads_kept():
            if path is not None:
                check_free(path)
            settings, federation, inputs = built(settings)
            if settings.general.start_from:
                begin_from(Path(settings.general.start_from), settings, federation)
            folder = None if path is None else _new_folder(path, settings, {"data": fingerprint(federation.data)})
            return _drive(settings, federation, path, folder, History(), watch, inputs, until)
    finally:
        if path is not None and scale.rank() == 0:
            with suppress(OSError):
                path.rmdir()  # nothing was written to it


def run_federation(
    settings: Settings, federation: Federation, path: Path, about: Mapping[str, Any], watch: Watcher | None = None
) -> Result:
    """Run a federation that was made elsewhere, or go on with it, in a run folder.

    Args:
        settings: The settings of the run.
        federation: The federation before its first round. Where the folder has a checkpoint, it goes on from that.
        path: The run folder: a new one, or that of a run that was stopped.
        about: What `run.json` is to hold of the run. A folder that was begun with other `data` in it is refused.
        watch: A function that is called with the record of each round and the number of rounds.

    Returns:
        The result.
    """
    if not is_run(path):
        return _drive(settings, federation, path, _new_folder(path, settings, about), History(), watch)
    folder = RunFolder.open(path)
    try:
        return _go_on(settings, federation, path, folder, folder.about(), about["data"], watch)
    finally:
        folder.close()


def _new_folder(path: Path, settings: Settings, about: Mapping[str, Any]) -> RunFolder | None:
    """Make a new run folder and lock it. Among several ranks the first one does; the others get None."""
    folders: list[RunFolder] = []

    def create() -> None:
        folders.append(RunFolder.create(path, settings.to_toml(), {**about, "protofed": __version__}))

    scale.on_first(create)
    return folders[0] if folders else None


def begin_from(folder: Path, settings: Settings, federation: Federation) -> None:
    """Load the last checkpoint of a finished run: the server's state, the clients' models and the number of the round.

    The settings that decide which client holds which data must be the same, or a client would be tested on samples that
    another has trained on.

    Args:
        folder: The folder of the finished run.
        settings: The settings of the new run.
        federation: The federation that gets the state.
    """
    check_is_run(folder)
    stored = read_settings(folder)
    current = settings.to_dict()
    parts = ("data", "partition", "test", "test_share", "validation_share", "server_labels")
    for key in ("seed", "clients", *parts, "new_clients", "control", "shift", "unseen"):
        if (stored.get(key) or None) != (current.get(key) or None):  # an early run has not every key
            raise ProtofedError(
                f"start_from={folder}: its {key} is {stored.get(key)!r}, here it is {current.get(key)!r}; "
                "they must be the same"
            )
    method = stored.get("method", {}).get("name")
    if method != settings.method.name:
        raise ProtofedError(f"start_from={folder}: a run of {method}; {settings.method.name} cannot go on from it")
    checkpoint.load(federation, folder / "checkpoint")
    if federation.round == 0:
        raise ProtofedError(f"start_from={folder}: it has no checkpoint")
    if federation.round >= federation.rounds:
        raise ProtofedError(
            f"start_from={folder}: it has {federation.round} rounds already; rounds={federation.rounds} leaves none to run"
        )


def resume(folder: str | Path, *, data: Any = None, watch: Watcher | None = None, until: int | None = None) -> Result:
    """Continue a run that was stopped from its last checkpoint. The result is that of a run that was never stopped.

    Args:
        folder: The run folder. Where the run has finished already, its result is read.
        data: The data, where it was given in Python; it must be the same.
        watch: A function that is called with the record of each round and the number of rounds.
        until: The round after which the run pauses again; None runs all rounds that are left.

    Returns:
        The result.

    Example: `pf.resume("runs/20260101-120000-fedsap-digits")`
    """
    if scale.asked_for():
        scale.begin()
    path = Path(folder)
    if finished := scale.on_first(lambda: _finished(path, data)):
        return finished
    folders: list[RunFolder] = []

    def open_folder() -> tuple[dict[str, Any], dict[str, Any]]:
        folders.append(RunFolder.open(path))
        return folders[0].about(), folders[0].settings()

    try:
        about, given = scale.on_first(open_folder)
        with threads_kept():
            settings, federation, inputs = built(_resolved(path, given, data))
            identity = fingerprint(federation.data)
            run_folder = folders[0] if folders else None
            return _go_on(settings, federation, path, run_folder, about, identity, watch, inputs, until)
    finally:
        for run_folder in folders:
            run_folder.close()


def reopen(folder: str | Path, *, data: Any = None) -> tuple[Settings, Federation]:
    """Make the federation of a run again as its last checkpoint left it, to look at. The folder is only read.

    Args:
        folder: The run folder, of a run that has finished or was stopped.
        data: The data, where it was given in Python; it must be the same.

    Returns:
        The settings, and the federation on the CPU, with the plain engine.

    Example: `settings, federation = reopen("runs/digits-fedproto")`
    """
    settings, federation, _ = _reopened(Path(folder), data)
    return settings, federation


def _reopened(path: Path, data: Dataset | None) -> tuple[Settings, Federation, EngineInputs]:
    """What `reopen` gives, and what its engine was made of."""
    check_is_run(path)
    about, given = read_about(path), read_settings(path)
    if "sites" in about:
        raise ProtofedError(
            f"{path}: a run between sites, whose data and models are not here; look at a simulation of it, or at what the "
            "run left at a site"
        )
    if not checkpoint.rounds_in(path / "checkpoint"):
        raise ProtofedError(f"{path}: it has no checkpoint, so there is no state to look at; resume the run first")
    settings = _resolved(path, given, data, "give it there again, as data=...").with_general(device="cpu")
    if settings.general.train == "head":
        settings = settings.with_general(features="each")  # whole networks, and samples as they are
    settings, federation, inputs = built(settings.with_engine(PLAIN))
    _check_data(path, fingerprint(federation.data), about)
    checkpoint.load(federation, path / "checkpoint")
    change_classes(settings, federation, inputs, 1, federation.round)
    return settings, federation, inputs_at(settings, inputs, federation.round)


def _remade(path: Path, data: Dataset | None) -> Classifiers:
    """The classifiers of a run whose folder holds none, from its last checkpoint and its data."""
    with threads_kept():
        _, federation, inputs = _reopened(path, data)
    return TrainedClients(federation, inputs, federation.engine.export()).classifiers()


def _check_data(path: Path, identity: str, about: Mapping[str, Any]) -> None:
    """Raise an error where the data is not that of the run folder."""
    if identity != about.get("data"):
        raise ProtofedError(
            f"{path}: the data is not what the run began with (its samples, labels or parts differ); resume it with the "
            "same data, or start a new run"
        )


def _finished(path: Path, data: Any) -> Result | None:
    """The result of a run that has finished; None, with a warning, where its summary is damaged and can be made again."""
    if not (path / SUMMARY).is_file():
        return None
    try:
        content = read_finished(path)
    except ProtofedError as error:
        log.warning("%s; the run is resumed", error)
        return None
    return _result(path, *content, data)


def _go_on(
    settings: Settings,
    federation: Federation,
    path: Path,
    folder: RunFolder | None,
    about: dict[str, Any],
    identity: str,
    watch: Watcher | None,
    inputs: EngineInputs | None = None,
    until: int | None = None,
) -> Result:
    """Restore the newest checkpoint that the folder's rows still fit, and run the rounds that are left."""
    _check_data(path, identity, about)

    def check_rows(round: int, account: Mapping[str, Any]) -> None:
        if folder is not None:
            folder.check_account(account, finished=round == federation.rounds)

    saved = checkpoint.load(federation, path / "checkpoint", check_rows)
    if settings.general.start_from and saved is None:  # stopped before its first checkpoint
        begin_from(Path(settings.general.start_from), settings, federation)
    history = History()
    if folder is not None:
        history = folder.rewind(None if saved is None else saved.written)
    return _drive(settings, federation, path, folder, scale.on_first(lambda: history), watch, inputs, until)


def _drive(
    settings: Settings,
    federation: Federation,
    path: Path | None,
    folder: RunFolder | None,
    history: History,
    watch: Watcher | None,
    inputs: EngineInputs | None = None,
    until: int | None = None,
) -> Result:
    """Run the rounds that are left, write their rows, and write the summary, which a run that pauses has not yet.

    Args:
        path: The path of the run folder; None where nothing is written.
        folder: The run folder, where this process is the one that writes it.
        inputs: What the engine was made of; None where clients are elsewhere, so that their models are not here.
    """
    track: Tracker | None = None
    if settings.general.track and folder is not None:
        track = tracker(settings.general.track, folder.path, settings.to_dict())
    summary: dict[str, Any] | None = None
    try:
        with stop.listening():
            inputs = _run_rounds(settings, federation, path, folder, history, track, watch, until, inputs)
        summary = summarise(history, settings, federation)
        trained = None if inputs is None else TrainedClients(federation, inputs, federation.engine.export())
        finished = federation.round == federation.rounds
        if finished and federation.data.newcomers:
            summary["new_clients"] = newcomer_figures(settings, federation, engine_inputs)
        if finished and folder is not None:
            if trained is not None and not summary["failure"]:
                trained.write(folder.path, settings.general.keep_models)
            folder.finish(summary)
    except Stopped:
        raise
    except KeyboardInterrupt:
        if path is None:
            raise
        raise Stopped(f"stopped; {_resume_advice(path)}") from None
    except ProtofedError:
        if folder is not None and federation.round == 0:
            shutil.rmtree(folder.path, ignore_errors=True)  # no round was run, so no folder is left behind
        raise
    finally:
        federation.engine.close()
        if track is not None:
            track.finish(summary)
        if folder is not None:
            folder.close()
    if scale.rank() == 0:
        for note in summary.get("notes", ()):
            log.warning("%s", note)
    metrics: list[Any] = list(history.evaluations)
    remake = None if trained is None else trained.classifiers
    if path is not None:
        remake = partial(_remade, path, settings.data if isinstance(settings.data, Dataset) else None)
    return Result(settings, metrics, summary, path, remake)


def _run_rounds(
    settings: Settings,
    federation: Federation,
    path: Path | None,
    folder: RunFolder | None,
    history: History,
    track: Tracker | None,
    watch: Watcher | None,
    until: int | None,
    inputs: EngineInputs | None,
) -> EngineInputs | None:
    """Run the rounds. Each is written before the next begins, and a checkpoint refers only to rows that are durable.

    A checkpoint is written while the next round trains.

    Returns:
        What the engine of the last round was made of, where that is known here.
    """
    every = settings.general.checkpoint_every
    pause = federation.rounds if until is None else min(max(until, 0), federation.rounds)
    with nullcontext() if path is None else checkpoint.Checkpoints(path / "checkpoint") as checkpoints:
        at = 1  # the round whose samples the federation has
        while federation.round < pause:
            if inputs is not None:
                change_classes(settings, federation, inputs, at, federation.round + 1)
                at = federation.round + 1
            record = federation.step()
            if checkpoints is not None:
                checkpoints.wait()
            rows = rows_of(record, history)
            history.add(*rows)
            if folder is not None:
                folder.append(*rows)
                snapshot = snapshot_of(record)
                if snapshot is not None:
                    folder.write_snapshot(record.round, snapshot)
                if track is not None:
                    track.round(*rows[:2])
            stops = stop.requested() and not scale.asked_for()
            last = record.round == pause
            if checkpoints is not None and (record.round % every == 0 or last or stops):
                if folder is not None and record.board is not None:
                    folder.write_confusions(confusions(record, federation.data))
                account, sync = (None, None) if folder is None else (folder.account(), folder.sync)
                checkpoints.begin(federation, account, sync, whole=last or stops)
            if watch is not None:
                watch(record, federation.rounds)
            if stops and not last:
                if checkpoints is not None:
                    checkpoints.wait()
                advice = "nothing was written" if path is None else _resume_advice(path)
                raise Stopped(f"stopped after round {record.round}; {advice}", 143)
    return None if inputs is None else inputs_at(settings, inputs, max(federation.round, 1))


def _resume_advice(path: Path) -> str:
    saved = checkpoint.rounds_in(path / "checkpoint")
    start = f"after round {int(saved[0].name.removeprefix('round-'))}" if saved else "from the first round"
    return f"`protofed resume {shlex.quote(str(path))}` goes on {start}"


def load(folder: str | Path, *, data: Any = None) -> Result:
    """Read the result of a finished run from its folder. A damaged file is an error.

    Args:
        folder: The run folder.
        data: The data, where it was given in Python. It is needed only for models that the folder does not hold.

    Returns:
        The result: the figures, and the classifiers of the clients.

    Example: `pf.load("runs/digits").predict(x, client=0).classes`
    """
    path = Path(folder)
    given, metrics, summary = read_finished(path)
    if data is None and given.get("data", {}).get("name") == IN_MEMORY:
        return _result(path, given, metrics, summary, NOT_HERE)
    return _result(path, given, metrics, summary, data)


def _result(
    path: Path, given: dict[str, Any], metrics: list[dict[str, Any]], summary: dict[str, Any], data: Any
) -> Result:
    remake = partial(_remade, path, None if data is NOT_HERE else data)
    return Result(_resolved(path, given, data), metrics, summary, path, remake)


def _resolved(
    path: Path,
    given: dict[str, Any],
    data: Any,
    advice: str = "resume it with resume(folder, data=...)",
) -> Settings:
    """The settings that a run folder holds, with the data where it was given in Python."""
    if data is NOT_HERE:
        given = {**given, "data": data}
    elif data is not None:
        stored = given.get("data", {})
        options = {key: value for key, value in stored.items() if key != "name"} if in_memory(data) else {}
        given = {**given, "data": as_dataset(data, **options)}
    elif given.get("data", {}).get("name") == IN_MEMORY:
        raise ProtofedError(f"{path}: this run's data was given in Python; {advice}")
    return resolve(None, given)
