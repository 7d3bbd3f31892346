"""A site's side of a federation: its data, its network, its policy, and its folder, which survives restarts.

A node answers five requests: `describe` (what it is), `begin` (a run with its settings), `train`, `evaluate`, and where
only sums leave it `secure` (the steps of a round's sum). No code travels: the server names a method and its settings, and
the node runs what is installed where it is.

| in the folder | what it is |
| --- | --- |
| `card.json` | what the site says of itself |
| `privacy.json` | what its messages have cost in differential privacy, over all runs |
| `runs/RUN/begin.json` | what the server said when the run began |
| `runs/RUN/round-000012.safetensors` | the state of this site after a round: its model, its optimiser, its memory |
| `runs/RUN/model.safetensors`, `prototypes.safetensors`, `README.md` | what the run leaves to the site |
| `runs/RUN/classifier.safetensors` | all of it to predict with |
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import disk, wire
from ..data import Dataset, federate
from ..data.fingerprint import fingerprint
from ..data.types import ClientData, FederatedData, Unlabelled
from ..errors import ProtofedError
from ..experiment.architectures import make as make_model
from ..experiment.build import engine_inputs, mechanism_of, rules_of
from ..experiment.settings import AutoModel, Settings, resolve
from ..federation.checkpoint import StoredStates, write_states
from ..federation.engine import Downloads
from ..federation.local import ClientState
from ..federation.site import Site, opened, sealed
from ..grammar import write_choice
from ..privacy.mechanism import Privacy
from ..privacy.protocol import STEPS
from ..registry import as_options
from ..wire import WireError
from .cards import Card, federation_data, stand_in
from .ledger import PrivacyLedger
from .policy import Policy, Refusal, Thinning, refuse_simulated
from .remains import Remains

if TYPE_CHECKING:
    from ..privacy.party import Party

log = logging.getLogger("protofed")
RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


def network_for(data: Dataset, model: str) -> str:
    """A network as a setting is written; `auto` is what suits the shape of the data."""
    if model != "auto":
        return model
    card = Card("", "", tuple(data.x_train.shape[1:]), data.num_classes, 1, 1, not data.x_train.is_floating_point())
    spec = AutoModel({}).for_data(federation_data([card], (), data.num_classes))
    return write_choice(spec.name, as_options(spec))


class RoundStates(MutableMapping[int, ClientState]):
    """A client's state after each of its last rounds, as files of a folder.

    A server that was stopped may repeat rounds that this site has been through: the state before a round is that of the
    newest round before it. `round` is the round at hand.
    """

    def __init__(self, folder: Path, client: int) -> None:
        self.folder, self.client, self.round = folder, client, 1
        folder.mkdir(parents=True, exist_ok=True)

    def rounds(self) -> list[int]:
        """The rounds after which there is a state, in order."""
        return sorted(int(file.stem.removeprefix("round-")) for file in self.folder.glob("round-*.safetensors"))

    def _file(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"

    def rewind(self, round: int, oldest: int) -> None:
        """Forget the rounds from this one on, which is about to be run, and those that no checkpoint needs any more."""
        self.round = round
        rounds = self.rounds()
        needed = max((r for r in rounds if r <= oldest), default=0)
        for past in rounds:
            if past >= round or past < needed:
                self._file(past).unlink()

    def __getitem__(self, client: int) -> ClientState:
        before = [round for round in self.rounds() if round < self.round]
        if not before or client != self.client:
            raise KeyError(client)
        return StoredStates(self._file(before[-1]))[client]

    def __setitem__(self, client: int, state: ClientState) -> None:
        file = self._file(self.round)
        with disk.writing(file):
            write_states(file.with_suffix(".tmp"), {client: state})
            file.with_suffix(".tmp").replace(file)
            disk.sync_folder(self.folder)

    def __delitem__(self, client: int) -> None:
        raise KeyError(client)

    def __iter__(self) -> Iterator[int]:
        return iter([self.client] if any(round < self.round for round in self.rounds()) else [])

    def __len__(self) -> int:
        return len(list(iter(self)))


class Node:
    """One site. It is a `Service`: a transport gives it messages, and sends back what it answers."""

    def __init__(self, name: str, folder: Path, data: Dataset, model: str, policy: Policy | None = None) -> None:
        """
        Args:
            name: The site's name, by which the server knows it.
            folder: Where the site keeps its states. It may be used again after a restart.
            data: The site's own data.
            model: The site's own network, as a setting is written: `mlp?hidden=64`.
            policy: What may leave; by default everything that methods send.
        """
        make_model(model)  # an unknown model is an error now, and not when the first run begins
        self.name, self.folder, self.data, self.model = name, folder, data, model
        self.policy = policy or Policy()
        self.runs: dict[str, tuple[Site, RoundStates, Remains]] = {}
        self.parties: dict[str, tuple[int, Party]] = {}  # by run: its newest round that is summed securely
        self.ledger = PrivacyLedger(folder / "privacy.json")
        self._heard: dict[str, tuple[Any, int]] = {}  # by run: the server's session, and its newest message's number
        folder.mkdir(parents=True, exist_ok=True)
        disk.write_atomically(folder / "card.json", (json.dumps(self.card().to_json(), indent=1) + "\n").encode())

    def card(self) -> Card:
        """What the site says of itself."""
        data = self.data
        return Card(
            self.name,
            self.model,
            tuple(data.x_train.shape[1:]),
            data.num_classes,
            len(data.y_train),
            0 if data.y_test is None else len(data.y_test),
            not data.x_train.is_floating_point(),
            0 if data.x_unlabelled is None else len(data.x_unlabelled),
            0,
            data.class_names,
            data.kind,
        )

    def handle(self, function: str, message: bytes) -> bytes:
        """Answer a request. An exception's text is the reason that the server is given."""
        answers = {
            "describe": self._describe,
            "begin": self._begin,
            "train": self._train,
            "evaluate": self._evaluate,
            "secure": self._secure,
        }
        if function not in answers:
            raise Refusal(f"unknown request {function!r}")
        return answers[function](message)

    def _describe(self, message: bytes) -> bytes:
        return sealed(self.card().to_json(), b"")

    def _begin(self, message: bytes) -> bytes:
        header, _ = opened(message, "server's message")
        name = header.get("run")
        if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
            raise Refusal("a run needs a name of letters, digits, dots and dashes")
        place = self.folder / "runs" / name
        site, remains = self._build(header, place)
        place.mkdir(parents=True, exist_ok=True)
        disk.write_atomically(place / "begin.json", disk.sealed({**header, "data": fingerprint(site.engine.data)}))
        states = RoundStates(place, site.client)
        site.engine.states = states
        self.runs[name] = site, states, remains
        log.info("%s: run %s begins", self.name, name)
        own = site.engine.data.clients[site.client]
        sizes = {"labelled": len(own.labelled), "test": len(own.test)}
        sizes |= {"validation": len(own.validation or ()), "unlabelled": len(own.unlabelled or ())}
        return sealed({"ready": True, **sizes}, b"")

    def _run(self, header: Mapping[str, Any]) -> tuple[Site, RoundStates, Remains]:
        """The run that a message is about; one that began before this process did is read from the folder."""
        name = header.get("run")
        if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
            raise Refusal("the message names no run")
        if name not in self.runs:
            file = self.folder / "runs" / name / "begin.json"
            if not file.is_file():
                raise Refusal("unknown run")
            begun = disk.opened(file.read_bytes(), file)
            site, remains = self._build(begun, file.parent)
            if fingerprint(site.engine.data) != begun["data"]:
                raise Refusal("this site's data is not what the run began with here")
            states = RoundStates(file.parent, site.client)
            site.engine.states = states
            self.runs[name] = site, states, remains
            log.info("%s: run %s goes on after round %d", self.name, name, max(states.rounds(), default=0))
        self._check_order(name, header)
        return self.runs[name]

    def _check_order(self, run: str, header: Mapping[str, Any]) -> None:
        """Refuse a message that was held up on its way, and that a newer one of the same server has overtaken."""
        session, number = header.get("session"), header.get("number", 0)
        if type(number) is not int:
            raise WireError("server's message: its number is none")
        former, newest = self._heard.get(run, (session, number))
        if session == former and number < newest:
            raise Refusal("a message that is out of date: a newer one has come before it")
        self._heard[run] = session, number

    def _build(self, header: Mapping[str, Any], place: Path) -> tuple[Site, Remains]:
        """The site of a run, after the policy has allowed it, and what the run leaves to it in a folder."""
        try:
            given = {**header["settings"], "data": self.data}
            cards = [Card.from_json(card, "server's message") for card in header["cards"]]
            client, classes = int(header["client"]), tuple(header["classes"])
            number = int(header["num_classes"])
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"server's message: it begins no run ({type(error).__name__}: {error})") from None
        settings = resolve(None, given)
        if settings.general.features != "each":
            settings = settings.with_general(features="once")  # no server names a folder that a site writes to
        general = settings.general
        refuse_simulated(vars(general))
        mechanism = mechanism_of(settings)
        filters = len(general.filters) + (mechanism is not None)
        self.policy.check_run(settings.method, general.rounds, filters, mechanism, rules_of(settings))
        if not 0 <= client < len(cards) or cards[client].name != self.name or cards[client].model != self.model:
            raise Refusal("the server takes this site for another one, or for one with another network")
        data = site_data(self.data, settings, cards, client, classes, number)
        _, inputs, _ = engine_inputs(settings, data, secret=True)
        if inputs.secure is not None and self.policy.min_samples > 1:
            inputs = replace(inputs, filters=(*inputs.filters, Thinning(self.policy)))
        site = Site(inputs.inputs(inputs.owner[client]), client)
        return site, Remains(place, self.name, self.model, inputs, general.candidates)

    def _train(self, message: bytes) -> bytes:
        header, payload = opened(message, "server's message")
        site, states, remains = self._run(header)
        round = header.get("round")
        if type(round) is not int or round < 1:
            raise WireError("server's message: it names no round")
        if round > self.policy.max_rounds:
            raise Refusal(f"this site's policy allows {self.policy.max_rounds} rounds")
        newest = max(states.rounds(), default=0)
        oldest = int(header.get("oldest", 0))
        if round <= oldest and newest > round:
            raise Refusal(f"round {round} is past: the run has been saved after round {oldest}")
        states.rewind(round, oldest)
        reply = site.train(sealed({"round": round}, payload))
        about, upload = opened(reply, "reply")
        if site.engine.task.secure is not None:
            about, upload = self._held(header["run"], round, site, about, upload), b""
        elif about["returned"]:
            upload = self.policy.filtered(upload)
        mechanism = next((f for f in site.engine.task.filters if isinstance(f, Privacy)), None)
        if mechanism is not None:
            about = {**about, "terms": {}, "pseudo": {}, "measures": {}}  # the guarantee would not cover them
            self.ledger.spend(header["run"], mechanism, len(site.engine.method.exchange.up), self.policy)
        received = wire.decode(payload, "server's message")
        remains.write_prototypes(received)
        if not self.policy.measures:  # no evaluation will come, after which the site's model is written otherwise
            states.round = round + 1
            remains.write_model(site, Downloads(round, [payload], {site.client: 0}), received, round)
        return sealed(about, upload)

    def _held(self, run: str, round: int, site: Site, about: dict[str, Any], vector: bytes) -> dict[str, Any]:
        """Hold a round's vector until it is asked for in a secure sum, and return what the server is told instead."""
        self.parties.pop(run, None)
        if about["returned"]:
            assert site.engine.task.secure is not None
            self.parties[run] = round, site.engine.task.secure.party(site.client, run, round, vector)
        return {**about, "terms": {}, "pseudo": {}, "measures": {}} if self.policy.secure else about

    def _secure(self, message: bytes) -> bytes:
        """One step of the secure sum of a round in which this process has trained."""
        header, request = opened(message, "server's message")
        run, step = header.get("run"), header.get("step")
        round, party = self.parties.get(run, (0, None)) if isinstance(run, str) else (0, None)
        if party is None or header.get("round") != round:
            raise Refusal("this site holds nothing of that round: it has not trained in it, or was started anew")
        if step not in STEPS:
            raise WireError("server's message: it names no step of a secure sum")
        return party.answer(step, request)

    def _evaluate(self, message: bytes) -> bytes:
        if not self.policy.measures:
            raise Refusal("this site's policy does not let its accuracies leave")
        header, payload = opened(message, "server's message")
        site, states, remains = self._run(header)
        round = header.get("round")
        if type(round) is not int:
            raise WireError("server's message: it names no round")
        states.round = round
        options = header.get("how")
        if isinstance(options, dict) and not self.policy.embeddings:
            header = {**header, "how": {**options, "snapshot": False, "pool": 0, "drawn": 0}}
        reply = site.evaluate(sealed(header, payload))
        received = wire.decode(payload, "server's message")
        remains.write_prototypes(received)
        downloads = Downloads(round, [payload], {site.client: 0}, "evaluate")
        remains.write_model(site, downloads, received, round - 1)
        return reply


def _without_labels(client: ClientData) -> ClientData:
    """A client whose labels are the server's to have: its training samples are unlabelled."""
    samples = client.labelled
    return replace(client, labelled=samples.subset(samples.index[:0]), unlabelled=Unlabelled(samples.x, samples.index))


def site_data(
    dataset: Dataset, settings: Settings, cards: list[Card], client: int, classes: tuple[str, ...], num_classes: int
) -> FederatedData:
    """The data of a federation as one site knows it: its own samples, and stand-ins for the other sites.

    Args:
        dataset: The site's own data.
        settings: The settings of the run.
        cards: What all sites say of themselves.
        client: Which of them this site is.
        classes: The names of the federation's classes; the site's labels are translated to them by name.
        num_classes: The number of the federation's classes.
    """
    if classes and dataset.class_names != classes:
        missing = set(dataset.class_names) - set(classes)
        if missing:
            raise ProtofedError(f"class {sorted(missing)[0]!r} is none of the federation's classes")
        numbers = torch.tensor([classes.index(name) for name in dataset.class_names])
        y_test = None if dataset.y_test is None else numbers[dataset.y_test]
        dataset = replace(dataset, y_train=numbers[dataset.y_train], y_test=y_test, class_names=classes)
    dataset = replace(dataset, num_classes=num_classes, class_names=classes, group_train=None, group_test=None)
    if dataset.scaling == "site":
        dataset = replace(dataset, scaling="all")  # all rows that are here are the site's
    g = settings.general
    own = federate(
        dataset,
        "iid",
        1,
        seed=g.seed,
        test="local" if dataset.x_test is None else "central",
        test_share=g.test_share,
        validation_share=g.validation_share,
        labels="all" if g.labels == "server" else g.labels,
        labels_per_class=g.labels_per_class,
        unlabelled_limit=g.unlabelled_limit or None,
    )
    clients = [stand_in(card, num_classes) for card in cards]
    clients[client] = _without_labels(own.clients[0]) if g.labels == "server" else own.clients[0]
    held_back: list[Any] = [None] * len(cards)
    if own.held_back:
        held_back[client] = own.held_back[0]
    names = tuple(card.name for card in cards)
    return replace(own, clients=clients, client_names=names, held_back=held_back, central_test=None, server=None)
