"""One run: settings → data → partition → federation → run folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..data import Dataset, federate
from ..data.augment import Augmentation, augmentation
from ..data.types import FederatedData
from ..errors import ProtofedError, unknown
from ..federation import Federation, Record, checkpoint, scale
from ..federation.choose import Plan, make_engine, threads_kept
from ..federation.rounds import participants_per_round
from ..parts.filters import Filter
from ..registry import parse_part
from ..report.track import Tracker, tracker
from .architectures import architectures, capabilities
from .folder import History, RunFolder, summarise
from .settings import IN_MEMORY, AutoModel, Settings, combine, read_toml, resolve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("protofed")
Watcher = Callable[[Record, int], None]


@dataclass(frozen=True)
class Result:
    """What a run measured. `metrics` has one row per evaluated round; `folder` is where it is on disk, if anywhere."""

    settings: Settings
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    folder: Path | None = None

    @property
    def accuracy(self) -> float:
        """By the method's own way to predict, mean over clients, mean of the last five evaluations."""
        five = self.summary["last_five"]
        return float(five["accuracy"] if "accuracy" in five else five["accuracy_head"])

    @property
    def accuracy_head(self) -> float | None:
        """By classifier head; none for a method that trains no head."""
        value = self.summary["last_five"].get("accuracy_head")
        return None if value is None else float(value)

    @property
    def accuracy_prototype(self) -> float | None:
        """By nearest prototype; none where there are no prototypes."""
        value = self.summary["last_five"].get("accuracy_prototype")
        return None if value is None else float(value)

    def _source(self) -> Any:
        from ..report.figures import in_memory

        return self.folder or in_memory(self.settings.method.name, self.metrics, self.summary)

    def plot_accuracy(self, **how: Any) -> Figure:
        """Accuracy by round. `width="column"` or `"page"`, `by="head"` or `"prototype"`."""
        from ..report.figures import plot_accuracy

        return plot_accuracy(self._source(), **how)

    def plot_loss(self, **how: Any) -> Figure:
        """Loss terms by round."""
        from ..report.figures import plot_loss

        return plot_loss(self._source(), **how)

    def plot_clients(self, **how: Any) -> Figure:
        """Each client's accuracy by round; needs a run folder, as the next two do."""
        from ..report.figures import plot_clients

        return plot_clients(self._source(), **how)

    def plot_confusion(self, **how: Any) -> Figure:
        """Which class was taken for which."""
        from ..report.figures import plot_confusion

        return plot_confusion(self._source(), **how)

    def plot_embedding(self, **how: Any) -> Figure:
        """Test embeddings with prototypes as stars. `projection="pca"` or `"tsne"`."""
        from ..report.figures import plot_embedding

        return plot_embedding(self._source(), **how)

    def __repr__(self) -> str:
        where = f", folder={str(self.folder)!r}" if self.folder else ""
        ways = {"head": self.accuracy_head, "prototype": self.accuracy_prototype}
        said = ", ".join(f"{kind} {value:.2%}" for kind, value in ways.items() if value is not None)
        return f"Result({self.settings.method.name}: {said}{where})"


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
    with threads_kept():
        if out is not None:
            RunFolder.check_free(Path(out))
        settings, federation = build(settings)
        if settings.general.start_from:
            begin_from(Path(settings.general.start_from), settings, federation)
        folder = None if out is None else scale.on_first(lambda: RunFolder.create(Path(out), settings))
        try:
            return _drive(settings, federation, folder, History(), watch)
        except ProtofedError:
            if folder is not None and federation.round == 0 and scale.rank() == 0:
                shutil.rmtree(folder.path)  # nothing was run: leave nothing behind
            raise


def begin_from(folder: Path, settings: Settings, federation: Federation) -> None:
    """Continue from a finished run's last round, with these settings: its server, its clients' models, its count of rounds.

    What decides who holds which data must be the same, or a client would be tested on what another trained on.
    """
    before = RunFolder.open(folder).settings()
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
    """Continue a run that was stopped, from its last checkpoint; the result is that of a run never stopped."""
    if scale.asked_for():
        scale.begin()
    place, given = scale.on_first(lambda: _opened(Path(folder)))
    name = given.get("data", {}).get("name")
    if data is not None:
        given["data"] = data
    elif name == IN_MEMORY:
        raise ProtofedError(f"{folder}: this run's data was given in Python; resume it with resume(folder, data=...)")
    settings = resolve(None, given)
    with threads_kept():
        settings, federation = build(settings)
        checkpoint.load(federation, place.checkpoint)
        if settings.general.start_from and federation.round == 0:  # stopped before its first checkpoint
            begin_from(Path(settings.general.start_from), settings, federation)
        history = scale.on_first(lambda: place.rewind(federation.round))
        return _drive(settings, federation, place, history, watch)


def _opened(folder: Path) -> tuple[RunFolder, dict[str, Any]]:
    place = RunFolder.open(folder)
    return place, place.settings()


def _drive(
    settings: Settings,
    federation: Federation,
    folder: RunFolder | None,
    history: History,
    watch: Watcher | None,
) -> Result:
    every = settings.general.checkpoint_every
    writes = scale.rank() == 0
    told: Tracker | None = None
    if settings.general.track and folder is not None and writes:
        told = tracker(settings.general.track, folder.path, settings.to_dict())
    summary: dict[str, Any] | None = None
    try:
        for record in federation:
            history.take(record)
            if folder is not None:
                if writes:
                    folder.append(history, record)
                if told is not None:
                    told.round(history.rounds[-1], history.metrics[-1] if record.scores is not None else None)
                if record.round % every == 0 or record.round == federation.rounds:
                    checkpoint.save(federation, folder.checkpoint)
                    if writes and record.scores is not None:
                        folder.write_confusions(record, federation.data)
            if watch is not None:
                watch(record, federation.rounds)
        summary = summarise(history, settings, federation)
    finally:
        federation.engine.close()
        if told is not None:
            told.finish(summary)
    for note in summary.get("notes", ()) if writes else ():
        log.warning("%s", note)
    if folder is not None and writes:
        folder.finish(summary)
    return Result(settings, history.metrics, summary, None if folder is None else folder.path)


def load_result(folder: str | Path) -> Result:
    """A finished run's result, read from its folder."""
    place = RunFolder.open(Path(folder))
    given: Mapping[str, Any] = place.settings()
    return Result(resolve(None, given), place.rows(), place.summary(), place.path)
