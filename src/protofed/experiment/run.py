"""One run: settings → data → partition → federation → run folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..data import Dataset, federate
from ..data.augment import Augmentation, augmentation
from ..data.fingerprint import fingerprint
from ..data.types import FederatedData
from ..errors import ProtofedError, Stopped, unknown
from ..federation import Federation, Record, checkpoint, scale
from ..federation.choose import Plan, make_engine, threads_kept
from ..federation.rounds import participants_per_round
from ..outcome import Result
from ..parts.filters import Filter
from ..registry import parse_part
from ..results.folder import History, RunFolder, check_free, check_is_run, read_settings
from ..results.read import read_finished
from ..results.rows import LAST, SUMMARY
from ..results.track import Tracker, tracker
from ..version import __version__
from . import stop
from .architectures import architectures, capabilities
from .recording import confusions, rows_of, snapshot_of, summarise
from .settings import IN_MEMORY, AutoModel, Settings, combine, read_toml, resolve

log = logging.getLogger("protofed")
Watcher = Callable[[Record, int], None]


def prepare_data(settings: Settings) -> FederatedData:
    """Load and partition, as the settings say."""
    g = settings.general
    with threads_kept():
        torch.set_num_threads(1)  # the sums behind mean and deviation must not depend on the number of cores
        dataset = settings.data if isinstance(settings.data, Dataset) else settings.data.load()
    return federate(
        dataset,
        settings.partition,
        g.clients or None,
        seed=g.seed,
        test=g.test,
        test_share=g.test_share,
        validation_share=g.validation_share,
        labels=g.labels,
        labels_per_class=g.labels_per_class,
        server_labels=g.server_labels,
        server_label_noise=g.server_label_noise,
        unlabelled_limit=g.unlabelled_limit or None,
        unlabelled=g.unlabelled,
        open_share=g.open_share,
    )


def check_device(name: str) -> None:
    kind = name.partition(":")[0]
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if kind not in there:
        raise unknown("device", name, there)
    if not there[kind]:
        raise ProtofedError(f"device={name}: torch finds no such device on this host; use device=cpu")


def build(settings: Settings) -> tuple[Settings, Federation]:
    """The federation before its first round, and the settings with the model and engine that were chosen."""
    g = settings.general
    if scale.asked_for():
        scale.begin()
    torch.set_num_threads(g.threads or 1)  # sums depend on it, so it may not depend on the number of cores
    data = prepare_data(settings)
    method = settings.method
    if method.feed.augments or (method.teacher is not None and method.teacher.feed.augments):
        data = replace(data, augmentation=views_of(data, settings))
    if g.device != "cpu":
        check_device(g.device)
        data = data.to(g.device)
    if isinstance(settings.model, AutoModel) and not g.models:
        settings = replace(settings, model=settings.model.for_data(data))
    per_round = participants_per_round(g.participation, len(data.clients))
    mix = architectures(settings, data)
    filters = tuple(parse_part(Filter.registry, text) for text in g.filters)
    plan = Plan(method, mix.specs, mix.owner, data, settings.local, g.seed, g.initial, per_round, filters)
    engine, chosen = make_engine(plan, settings.engine)
    settings = settings.with_engine(chosen).with_general(projection=mix.projection, dim=mix.dim)
    federation = Federation(
        settings.method,
        engine,
        data,
        rounds=g.rounds,
        seed=g.seed,
        participation=g.participation,
        choice=g.choice,
        capability=capabilities(settings, data),
        evaluate_every=g.evaluate_every,
        evaluate_last=LAST,
        candidates=g.candidates,
        ensemble=g.ensemble,
        architectures=mix.of_clients,
        silhouette=g.silhouette,
        snapshots=g.snapshots,
        filters=filters,
    )
    return settings, federation


def views_of(data: FederatedData, settings: Settings) -> Augmentation:
    """The views of this data, as the settings say; what they leave open the data decides."""
    chosen = settings.augmentation
    if chosen.flip == "auto" and data.flips is not None:
        chosen = replace(chosen, flip="on" if data.flips else "off")
    tokens = not data.clients[0].labelled.x.is_floating_point()
    return augmentation(data.kind, data.sample_shape, data.mean, data.std, chosen, tokens=tokens)


def run(
    method: str | Settings,
    *,
    out: str | Path | None = None,
    watch: Watcher | None = None,
    config: str | Path | None = None,
    **given: Any,
) -> Result:
    """Run one method. Keywords are the command line's keys: `run("fedsap", data="digits", rounds=20, seed=1234)`.

    `out` names a run folder to write (it must not exist yet); without it nothing is written. A dot in a key is written as
    a nested mapping: `alignment={"shape": "cosine"}`.
    """
    if isinstance(method, Settings):
        settings = method
    else:
        settings = resolve(method, combine(read_toml(Path(config)) if config else {}, given))
    place = None if out is None else Path(out)
    try:
        with threads_kept():
            if place is not None:
                check_free(place)
            settings, federation = build(settings)
            if settings.general.start_from:
                begin_from(Path(settings.general.start_from), settings, federation)
            folder = None if place is None else _new_folder(place, settings, federation)
            return _drive(settings, federation, place, folder, History(), watch)
    finally:
        if place is not None and scale.rank() == 0:
            with suppress(OSError):
                place.rmdir()  # nothing was written to it


def _new_folder(place: Path, settings: Settings, federation: Federation) -> RunFolder | None:
    """A new run folder, locked; of several ranks, the first one has it."""
    folders: list[RunFolder] = []

    def create() -> None:
        about = {"data": fingerprint(federation.data), "protofed": __version__}
        folders.append(RunFolder.create(place, settings.to_toml(), about))

    scale.on_first(create)
    return folders[0] if folders else None


def begin_from(folder: Path, settings: Settings, federation: Federation) -> None:
    """Continue from a finished run's last round, with these settings: its server, its clients' models, its count of rounds.

    What decides who holds which data must be the same, or a client would be tested on what another trained on.
    """
    check_is_run(folder)
    before = read_settings(folder)
    now = settings.to_dict()
    for key in ("seed", "clients", "data", "partition", "test", "test_share", "validation_share", "server_labels"):
        if before.get(key) != now.get(key):
            raise ProtofedError(
                f"start_from={folder}: its {key} is {before.get(key)!r}, here it is {now.get(key)!r}; they must be the same"
            )
    method = before.get("method", {}).get("name")
    if method != settings.method.name:
        raise ProtofedError(f"start_from={folder}: a run of {method}; {settings.method.name} cannot go on from it")
    checkpoint.load(federation, folder / "checkpoint")
    if federation.round == 0:
        raise ProtofedError(f"start_from={folder}: it has no checkpoint")
    if federation.round >= federation.rounds:
        raise ProtofedError(
            f"start_from={folder}: it has {federation.round} rounds already; rounds={federation.rounds} leaves none to run"
        )


def resume(folder: str | Path, *, data: Dataset | None = None, watch: Watcher | None = None) -> Result:
    """Continue a run that was stopped, from its last checkpoint; the result is that of a run never stopped.

    Args:
        folder: The run folder. Of a run that has finished already, the result is read.
        data: The data, where it was given in Python; it must be the same.
        watch: Called after every round.

    Example: `pf.resume("runs/20260101-120000-fedsap-digits")`
    """
    if scale.asked_for():
        scale.begin()
    place = Path(folder)
    if finished := scale.on_first(lambda: _finished(place, data)):
        return finished
    folders: list[RunFolder] = []

    def open_folder() -> tuple[dict[str, Any], dict[str, Any]]:
        folders.append(RunFolder.open(place))
        return folders[0].about(), folders[0].settings()

    try:
        about, given = scale.on_first(open_folder)
        with threads_kept():
            settings, federation = build(_resolved(place, given, data))
            return _go_on(settings, federation, place, folders[0] if folders else None, about, watch)
    finally:
        for opened in folders:
            opened.close()


def _finished(place: Path, data: Dataset | None) -> Result | None:
    """The result of a run that has finished; None, with a warning, where its summary is damaged and can be made again."""
    if not (place / SUMMARY).is_file():
        return None
    try:
        found = read_finished(place)
    except ProtofedError as error:
        log.warning("%s; the run is resumed", error)
        return None
    return _result(place, *found, data)


def _go_on(
    settings: Settings,
    federation: Federation,
    place: Path,
    folder: RunFolder | None,
    about: dict[str, Any],
    watch: Watcher | None,
) -> Result:
    """Restore the newest checkpoint that the folder's rows still fit, and run the rounds that are left."""
    if fingerprint(federation.data) != about.get("data"):
        raise ProtofedError(
            f"{place}: the data is not what the run began with (its samples, labels or parts differ); resume it with the "
            "same data, or start a new run"
        )

    def fits(round: int, written: Mapping[str, Any]) -> None:
        if folder is not None:
            folder.check_account(written, finished=round == federation.rounds)

    saved = checkpoint.load(federation, place / "checkpoint", fits)
    if settings.general.start_from and saved is None:  # stopped before its first checkpoint
        begin_from(Path(settings.general.start_from), settings, federation)
    history = History()
    if folder is not None:
        history = folder.rewind(None if saved is None else saved.written)
    return _drive(settings, federation, place, folder, scale.on_first(lambda: history), watch)


def _drive(
    settings: Settings,
    federation: Federation,
    place: Path | None,
    folder: RunFolder | None,
    history: History,
    watch: Watcher | None,
) -> Result:
    """Run the rounds that are left, write what they measure, and sum up.

    Args:
        place: Where the run folder is; None where nothing is written.
        folder: The run folder, where this process is the one that writes it.
    """
    track: Tracker | None = None
    if settings.general.track and folder is not None:
        track = tracker(settings.general.track, folder.path, settings.to_dict())
    summary: dict[str, Any] | None = None
    try:
        with stop.listening():
            _run_rounds(settings, federation, place, folder, history, track, watch)
        summary = summarise(history, settings, federation)
        if folder is not None:
            folder.finish(summary)
    except Stopped:
        raise
    except KeyboardInterrupt:
        if place is None:
            raise
        raise Stopped(f"stopped; {_how_to_go_on(place)}") from None
    except ProtofedError:
        if folder is not None and federation.round == 0:
            shutil.rmtree(folder.path, ignore_errors=True)  # nothing was run: leave nothing behind
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
    return Result(settings, metrics, summary, place)


def _run_rounds(
    settings: Settings,
    federation: Federation,
    place: Path | None,
    folder: RunFolder | None,
    history: History,
    track: Tracker | None,
    watch: Watcher | None,
) -> None:
    """The rounds, each written before the next begins; a checkpoint counts only what is on the disk."""
    every = settings.general.checkpoint_every
    for record in federation:
        rows = rows_of(record, history)
        history.add(*rows)
        if folder is not None:
            folder.append(*rows)
            snapshot = snapshot_of(record)
            if snapshot is not None:
                folder.write_snapshot(record.round, snapshot)
            if track is not None:
                track.round(*rows[:2])
        ends = stop.asked() and not scale.asked_for()
        last = record.round == federation.rounds
        if place is not None and (record.round % every == 0 or last or ends):
            if folder is not None and record.scores is not None:
                folder.write_confusions(confusions(record, federation.data))
            checkpoint.save(federation, place / "checkpoint", None if folder is None else folder.account())
        if watch is not None:
            watch(record, federation.rounds)
        if ends and not last:
            how = "nothing was written" if place is None else _how_to_go_on(place)
            raise Stopped(f"stopped after round {record.round}; {how}", 143)


def _how_to_go_on(place: Path) -> str:
    saved = checkpoint.rounds_in(place / "checkpoint")
    since = f"after round {int(saved[0].name.removeprefix('round-'))}" if saved else "from the first round"
    return f"`protofed resume {place}` goes on {since}"


def load_result(folder: str | Path, data: Dataset | None = None) -> Result:
    """A finished run's result, read from its folder; what is damaged is an error.

    Args:
        folder: The run folder.
        data: The data, where it was given in Python.
    """
    return _result(Path(folder), *read_finished(Path(folder)), data)


def _result(
    place: Path, given: dict[str, Any], metrics: list[dict[str, Any]], summary: dict[str, Any], data: Dataset | None
) -> Result:
    return Result(_resolved(place, given, data), metrics, summary, place)


def _resolved(place: Path, given: dict[str, Any], data: Dataset | None) -> Settings:
    """A run's settings as they stand in its folder, with the data where it was given in Python."""
    if data is not None:
        given = {**given, "data": data}
    elif given.get("data", {}).get("name") == IN_MEMORY:
        raise ProtofedError(f"{place}: this run's data was given in Python; resume it with resume(folder, data=...)")
    return resolve(None, given)
