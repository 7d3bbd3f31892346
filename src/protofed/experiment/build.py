"""From the settings of a run to its federation: data, partition, architectures, filters and engine."""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import replace
from pathlib import Path

import torch

from ..data import Dataset, federate
from ..data.augment import Augmentation, MaskedWindow, augmentation
from ..data.coming import Timetable
from ..data.newcomers import held_out
from ..data.poison import relabelled, triggered
from ..data.randaugment import RandAugment
from ..data.remarks import say
from ..data.shift import Shift, shifted
from ..data.types import FederatedData
from ..data.unseen import with_unseen, without_group
from ..errors import ProtofedError, unknown
from ..federation import Federation, scale, selection
from ..federation.choose import EngineInputs, make_engine, threads_kept
from ..federation.engine import Engine
from ..parts.attacks import Attack, Attackers, Backdoor, with_trigger
from ..parts.filters import Filter
from ..privacy.mechanism import Privacy, mechanisms
from ..privacy.protocol import Rules
from ..privacy.protocol import secure as secure_rules
from ..registry import as_text, parse_part
from ..results.rows import LAST
from .architectures import architectures, capabilities
from .features import with_features
from .settings import AutoModel, Settings

log = logging.getLogger("protofed")


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
    settings, federation, _ = built(settings)
    return settings, federation


def built(settings: Settings) -> tuple[Settings, Federation, EngineInputs]:
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
