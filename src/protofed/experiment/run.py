"""One run, from its settings over data, partition and federation to the run folder."""

from __future__ import annotations

import logging
import multiprocessing
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..classifier.shelf import Classifiers
from ..data import Dataset, as_dataset, federate
from ..data.augment import Augmentation, MaskedWindow, RandAugment, augmentation
from ..data.coming import Timetable
from ..data.fingerprint import fingerprint
from ..data.newcomers import held_out
from ..data.poison import relabelled, triggered
from ..data.remarks import say
from ..data.shift import Shift, shifted
from ..data.sources import IN_MEMORY, in_memory
from ..data.types import FederatedData
from ..data.unseen import with_unseen, without_group
from ..errors import ProtofedError, Stopped, unknown
from ..federation import Federation, Record, checkpoint, scale, selection
from ..federation.choose import EngineInputs, make_engine, threads_kept
from ..federation.engine import Engine
from ..outcome import Result
from ..parts.attacks import Attack, Attackers, Backdoor, with_trigger
from ..parts.filters import Filter
from ..privacy.mechanism import Privacy, mechanisms
from ..privacy.protocol import Rules
from ..privacy.protocol import secure as secure_rules
from ..registry import as_text, parse_part
from ..results.folder import History, RunFolder, check_free, check_is_run, read_about, read_settings
from ..results.read import is_run, read_finished
from ..results.rows import LAST, SUMMARY
from ..results.track import Tracker, tracker
from ..version import __version__
from . import stop
from .architectures import architectures, capabilities
from .features import with_features
from .newcomers import newcomer_figures
from .recording import confusions, rows_of, snapshot_of, summarise
from .settings import AutoModel, Settings, combine, read_run, resolve, with_dataset
from .trained import PLAIN, TrainedClients

log = logging.getLogger("protofed")
NOT_HERE = Dataset(torch.empty(0, 1), torch.empty(0, dtype=torch.long), name=IN_MEMORY)  # where a result needs no data
Watcher = Callable[[Record, int], None]


def load_data(settings: Settings) -> Dataset:
    """The data set of a run, before it is divided: `load_data(resolve("local", {"data": "digits"}))`."""
    if isinstance(settings.data, Dataset):
        return settings.data
    with threads_kept():
        torch.set_num_threads(1)  # the sums behind mean and deviation must not depend on the number of cores
        loaded: Dataset = settings.data.load()
    return loaded


def prepare_data(settings: Settings) -> FederatedData:
    """Load the data and divide it among the clients.

    Args:
        settings: The settings of the run.

    Returns:
        The data of all clients, of the server if it has any, and of clients that are held out.

    Example: `prepare_data(resolve("local", {"data": "digits"})).class_counts()`
    """
    g = settings.general
    dataset, unseen = load_data(settings), None
    if g.unseen:
        dataset, unseen = without_group(dataset, g.unseen)
    with threads_kept():
        torch.set_num_threads(1)  # as above: a partition may hold out rows, and then statistics are computed here
        federated = federate(
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
            scope=g.scope,
        )
    if unseen is not None:
        federated = with_unseen(federated, unseen, (dataset.mean, dataset.std))
    if g.shift:
        federated = shifted(federated, parse_part(Shift.registry, g.shift), g.seed)
    return held_out(federated, g.new_clients, g.seed) if g.new_clients else federated


def check_device(name: str) -> None:
    """Raise an error where torch has no such device on this host."""
    kind = name.partition(":")[0]
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if kind not in available:
        raise unknown("device", name, available)
    if not available[kind]:
        raise ProtofedError(f"device={name}: torch finds no such device on this host; use device=cpu")


def build(settings: Settings) -> tuple[Settings, Federation]:
    """Make the federation of a run.

    Args:
        settings: The settings of the run.

    Returns:
        The settings with the model and engine that were chosen, and the federation before its first round.
    """
    settings, federation, _ = _built(settings)
    return settings, federation


def _built(settings: Settings) -> tuple[Settings, Federation, EngineInputs]:
    """What `build` gives, and what its engine was made of."""
    if scale.asked_for():
        scale.begin()
    torch.set_num_threads(settings.general.threads or 1)  # sums depend on it, so it may not depend on the cores
    data = prepare_data(settings)
    if multiprocessing.parent_process() is None and scale.rank() == 0:
        say(data.remarks)
    settings, inputs, names = engine_inputs(settings, data)
    timetable_of(settings, inputs.data).check(inputs.data)
    first = inputs_at(settings, inputs, 1)
    engine, chosen = make_engine(first, settings.engine)
    settings = settings.with_engine(chosen)
    return settings, make_federation(settings, engine, first, names), inputs


def timetable_of(settings: Settings, data: FederatedData) -> Timetable:
    """When classes appear and vanish in a run."""
    g = settings.general
    if not g.classes_appear and not g.classes_vanish:
        return Timetable()
    if scale.asked_for():
        raise ProtofedError("classes_appear, classes_vanish: a run over several processes of torchrun keeps its data")
    return Timetable.of(g.classes_appear, g.classes_vanish, data, g.rounds)


def inputs_at(settings: Settings, inputs: EngineInputs, round: int) -> EngineInputs:
    """What an engine of one round is made of, with the samples of the classes that somebody has in it.

    Args:
        settings: The settings of the run.
        inputs: What an engine with the samples of all classes would be made of.
        round: The round, counted from 1.
    """
    table = timetable_of(settings, inputs.data)
    if not table.absent(round):
        return inputs
    return replace(inputs, data=table.at(inputs.data, round), views=tuple(table.at(v, round) for v in inputs.views))


def change_classes(settings: Settings, federation: Federation, inputs: EngineInputs, before: int, round: int) -> None:
    """Give the federation the samples of a round, where classes appeared or vanished since the round that it has."""
    table = timetable_of(settings, inputs.data)
    if table.absent(before) != table.absent(round):
        current = inputs_at(settings, inputs, round)
        federation.change_data(make_engine(current, settings.engine)[0], current.data)


def mechanism_of(settings: Settings) -> Privacy | None:
    """The differential privacy of a run, where its settings have any."""
    return parse_part(mechanisms, settings.general.privacy) if settings.general.privacy else None


def rules_of(settings: Settings) -> Rules | None:
    """The rules of a run's secure sums, where its settings ask for them."""
    return parse_part(secure_rules, settings.general.secure) if settings.general.secure else None


def filters_of(
    settings: Settings, clients: int, attack: tuple[Filter, ...] = ()
) -> tuple[Settings, tuple[Filter, ...]]:
    """The filters of a run, in the order in which they act at a client.

    Args:
        settings: The settings of the run.
        clients: The number of clients.
        attack: What attackers do, who need not keep to bounds: after privacy, and before compression.

    Returns:
        The settings, with the noise and the number of rounds that a privacy budget allows, and the filters.
    """
    g, method = settings.general, settings.federated
    filters = (*attack, *(parse_part(Filter.registry, text) for text in g.filters))
    asked = mechanism_of(settings)
    if asked is None:
        return settings, filters

    def most_often(rounds: int) -> int:
        if g.choice != "random":
            return rounds
        return selection.most_often(g.seed, clients, g.participation, rounds)

    mechanism, rounds = asked.planned(method.exchange, g.rounds, most_often)
    if rounds < g.rounds:
        log.warning("the privacy budget allows %d of %d rounds", rounds, g.rounds)
    return settings.with_general(privacy=as_text(mechanism), rounds=rounds), (mechanism, *filters)


def engine_inputs(
    settings: Settings, data: FederatedData, secret: bool = False
) -> tuple[Settings, EngineInputs, tuple[str, ...]]:
    """What an engine for this data is made of.

    Args:
        settings: The settings of the run.
        data: The data of all clients, as far as it is here.
        secret: Whether noise comes from the operating system and not from the seed, as it must between real sites.

    Returns:
        The settings with the model and the projection that were chosen, the inputs of the engine, and the name of each
        client's architecture.
    """
    g, method = settings.general, settings.federated
    data, attack = under_attack(settings, data)
    if method.feed.augments or (method.teacher is not None and method.teacher.feed.augments):
        data = replace(data, augmentation=views_of(data, settings))
    if g.device != "cpu":
        check_device(g.device)
        data = data.to(g.device)
    if isinstance(settings.model, AutoModel) and not g.models:
        settings = replace(settings, model=settings.model.for_data(data))
    per_round = selection.participants_per_round(g.participation, len(data.clients))
    mix = architectures(settings, data)
    if mix.frozen and g.ensemble and data.site_mean is not None:
        raise ProtofedError(
            "standardise=site: the ensemble's test set has another scale at each site; use features=each"
        )
    folder = None if g.features == "once" else Path(g.features).expanduser()
    views = tuple(with_features(data, frozen, folder) for frozen in mix.frozen)
    settings, filters = filters_of(settings, len(data.clients), attack)
    inputs = EngineInputs(
        method,
        mix.specs,
        mix.owner,
        data,
        settings.local,
        g.seed,
        g.initial,
        per_round,
        filters,
        secret,
        rules_of(settings),
        views,
    )
    return settings.with_general(projection=mix.projection, dim=mix.dim), inputs, mix.of_clients


def under_attack(settings: Settings, data: FederatedData) -> tuple[FederatedData, tuple[Attackers, ...]]:
    """The data as attackers have changed it, and the filter by which they act; none where there is no attack.

    Args:
        settings: The settings of the run.
        data: The data of all clients.
    """
    g = settings.general
    if not g.attack:
        return data, ()
    attack = parse_part(Attack.registry, g.attack)
    if len(data.clients) < 2:
        raise ProtofedError(f"attack={g.attack}: one client alone cannot be attacked by others")
    clients, owner = attack.attackers(len(data.clients), g.seed), f"attack={g.attack}"
    if attack.labels is not None:
        data = relabelled(data, clients, attack.labels, owner)
    if isinstance(attack, Backdoor):
        data = triggered(data, clients, with_trigger, attack.target, attack.poison, owner)
    return data, (Attackers(attack, clients, g.seed),)


def make_federation(settings: Settings, engine: Engine, inputs: EngineInputs, names: tuple[str, ...]) -> Federation:
    """The federation before its first round, from an engine and what `engine_inputs` gave."""
    g = settings.general
    return Federation(
        inputs.method,
        engine,
        inputs.data,
        rounds=g.rounds,
        seed=g.seed,
        participation=g.participation,
        choice=g.choice,
        capability=capabilities(settings, inputs.data),
        evaluate_every=g.evaluate_every,
        evaluate_last=LAST,
        candidates=g.candidates,
        ensemble=g.ensemble,
        architectures=names,
        silhouette=g.silhouette,
        score_prototypes=g.score_prototypes,
        embedding=g.embedding_measures,
        snapshots=g.snapshots,
        filters=inputs.filters,
        secret=inputs.secret,
        guard=g.guard,
        secure=inputs.sums,
    )


def views_of(data: FederatedData, settings: Settings) -> Augmentation:
    """The augmentation of this data. What the settings leave open (`flip=auto`) follows from the data."""
    chosen = settings.augmentation
    if chosen.flip == "auto" and data.flips is not None:
        chosen = replace(chosen, flip="on" if data.flips else "off")
    tokens = not data.clients[0].labelled.x.is_floating_point()
    views = augmentation(data.kind, data.sample_shape, data.mean, data.std, chosen, tokens=tokens)
    if data.site_mean is not None and isinstance(views.strong, RandAugment | MaskedWindow):
        raise ProtofedError(
            "standardise=site: augmentation changes the levels of images and windows, and needs one scale for all sites; "
            "use standardise=all, or augmentation=none"
        )
    return views


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
            settings, federation, inputs = _built(settings)
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
            settings, federation, inputs = _built(_resolved(path, given, data))
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
    settings, federation, inputs = _built(settings.with_engine(PLAIN))
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
