"""The clients of a federation after its last round, as classifiers: written to the run folder, or made when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..classifier.core import Classifier
from ..classifier.design import Design, Learnt
from ..classifier.gather import design_of, gather
from ..classifier.shelf import Classifiers
from ..classifier.store import write_models
from ..errors import ProtofedError
from ..federation import Federation
from ..federation.choose import EngineInputs, EngineSettings, threads_kept
from ..federation.engine import PlainEngine
from ..federation.local import ClientState
from ..federation.mixed import MixedEngine

PLAIN = EngineSettings("loop", "loop", "contiguous", "grouped", workers=1, threads=1)


@dataclass(frozen=True)
class TrainedClients:
    """A federation after its last round, what its engine was made of, and the states of its clients."""

    federation: Federation
    inputs: EngineInputs
    states: Mapping[int, ClientState]

    @cached_property
    def engine(self) -> PlainEngine | MixedEngine:
        """A plain engine with the clients' states, whatever engine has trained them."""
        engine, states = self.inputs.engine(PLAIN), self.states
        engine.states = states  # type: ignore[assignment]  # nothing is trained, so none is replaced
        return engine

    @property
    def clients(self) -> list[str]:
        """The names of all clients."""
        return [self.federation.name_of(client) for client in range(len(self.federation.data.clients))]

    def write(self, run: Path, most: int) -> None:
        """Write the classifiers of the first so many clients into a run folder; attackers have none."""
        chosen = [client for client in range(len(self.clients[:most])) if client not in self.federation.attackers]
        if chosen:
            write_models(run, self._design, self.clients, self._learnt(chosen))

    def classifiers(self) -> Classifiers:
        """The classifiers, each made when it is asked for."""
        return Classifiers(self.clients, self._classifier)

    def _classifier(self, client: int) -> Classifier:
        if client in self.federation.attackers:
            raise ProtofedError(f"{self.federation.name_of(client)} attacks in this run, so it has no classifier")
        with threads_kept():
            _, found = next(self._learnt([client]))
        return Classifier(self._design, found)

    @property
    def _design(self) -> Design:
        return design_of(self.federation.method, self.federation.data)

    def _learnt(self, clients: Sequence[int]) -> Iterator[tuple[int, Learnt]]:
        """What some clients have learnt, as the judge would meet them after this round."""
        federation = self.federation
        downloads, _ = federation.downloads(clients, federation.round + 1, federation.method.predict.reads)
        candidates = federation.evaluations.options.candidates
        return gather(self.engine, downloads, self.inputs.models, federation.data, candidates)
