"""A client as the judge meets it in a process of one model at a time: the model that is loaded, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ..bank import PrototypeBank
from ..data.types import FederatedData, Samples
from ..models.base import Output
from ..models.skeleton import Skeleton
from ..wire import Bundle
from .judge import SampleSet, samples_of


def no_bank(client: int) -> None:
    """No prototypes, for a client whose training has kept none under the model that is loaded."""


@dataclass
class TakenSamples:
    """The inputs of the last two sets of samples that models were run on: clients often have the same test samples."""

    sets: list[tuple[Samples, Tensor]] = field(default_factory=list)

    def of(self, samples: Samples) -> Tensor:
        """The inputs of a set of samples."""
        known = [entry for entry in self.sets if entry[0].x is samples.x and entry[0].index is samples.index]
        if not known:
            known = [(samples, samples.x[samples.index])]
        self.sets = [*(entry for entry in self.sets if entry is not known[0]), known[0]][-2:]
        return known[0][1]


@dataclass
class LoadedModel:
    """The model in a skeleton, as a function of sets of samples.

    With `whole`, the central test set is run once for all clients that need rows of it.
    """

    skeleton: Skeleton
    data: FederatedData
    whole: bool
    taken: TakenSamples = field(default_factory=TakenSamples)
    central: Output | None = field(default=None)
    last: tuple[Samples, Output] | None = field(default=None)

    def outputs(self, samples: Samples) -> Output:
        """Embeddings and logits of samples. The last ones are kept, for another client with the same samples."""
        if self.last is None or self.last[0].x is not samples.x or self.last[0].index is not samples.index:
            self.last = samples, self._run(samples)
        return self.last[1]

    def _run(self, samples: Samples) -> Output:
        test = self.data.central_test
        if not self.whole or test is None or samples.x is not test.x:
            return self.skeleton.outputs(self.taken.of(samples))
        if self.central is None:
            self.central = self.skeleton.outputs(samples.x)
        return Output(*(t[samples.index] for t in self.central))


@dataclass
class PlainVisit:
    """One client whose model is loaded. `kept_bank` gives its prototypes where training has computed them under this
    model."""

    client: int
    received: Bundle
    model: LoadedModel
    kept_bank: Callable[[int], PrototypeBank | None] = no_bank

    def outputs(self, samples: SampleSet) -> Output:
        """Embeddings and logits of one of the client's sets of samples."""
        return self.model.outputs(samples_of(self.model.data, self.client, samples))

    @cached_property
    def _own_bank(self) -> PrototypeBank:
        bank = self.kept_bank(self.client)
        if bank is not None:
            return bank
        z, y = self.outputs("labelled").embedding, samples_of(self.model.data, self.client, "labelled").labels
        return PrototypeBank.from_embeddings(z, y, self.model.data.num_classes)

    def own_bank(self) -> PrototypeBank:
        """The prototypes of the client's labelled samples, computed at most once."""
        return self._own_bank
