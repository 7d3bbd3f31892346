"""The method interface: five parts and a handful of equations.

A method is a frozen dataclass whose fields are its settings. Its parts say what travels (`exchange`), which samples a
training step sees (`feed`), how many uploads become one (`reduce`), how a client predicts (`predict`) and whether the
server trains too (`teacher`); each is fixed by the class, or a field and thereby a setting, or a property that follows
from other settings. What is left are the paper's equations. The defaults are those of a client that learns alone.

`terms` runs for one client and, under `torch.func.vmap`, for a stack of them, so it must not branch on values of
tensors; masks do what branches would. The other functions are called client by client and may do anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..bank import PrototypeBank
from ..parts import Batch, Each, Epochs, Feed, Head, Predict, Received, Reduce, Reduced
from ..registry import Registry
from ..wire import Bundle, Exchange, bank, weights
from .client import Loss, Network, Terms, Trained, Weights
from .server import Measures, Setup, Shared, Teacher

PROTOTYPES = Exchange(down=(bank(),), up=(bank(),))
"""One bank is sent to all, and each client's bank comes back; models stay at the clients."""
MODEL = Exchange(down=(weights(),), up=(weights(),), keeps_model=False)
"""One model is sent to all and comes back."""
MODEL_AND_PROTOTYPES = Exchange(down=(weights(), bank()), up=(weights(), bank()), keeps_model=False)


@dataclass(frozen=True)
class Method:
    """A method: five parts and the equations that are its own."""

    name: ClassVar[str]  # the registry's

    # --- parts --------------------------------------------------------------------------------------------------
    @property
    def exchange(self) -> Exchange:
        """What goes down, what comes up, and who keeps a model."""
        return Exchange()

    @property
    def feed(self) -> Feed:
        """Which samples a training step of a client sees."""
        return Epochs()

    @property
    def reduce(self) -> Reduce:
        """How many uploads become one."""
        return Each()

    @property
    def predict(self) -> Predict:
        """How a client predicts, from what it holds and was sent."""
        return Head()

    @property
    def teacher(self) -> Teacher | None:
        """The server's own training, where it has labels."""
        return None

    # --- client -------------------------------------------------------------------------------------------------
    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms | Loss:
        """The terms of the loss of one training step. It is the only function that runs under `vmap`.

        Args:
            net: the network in training; `net(batch.x)` gives `(embedding, logits)`.
            batch: the step's samples.
            received: what the client was sent, and its memory.
            round: the round, counted from 1.

        Returns:
            the terms by name, whose sum is minimised; with pseudo-labels, a `Loss` that names them.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no terms")

    def begin(self, weights: Weights, received: Received) -> Weights:
        """The model that a client trains from.

        Args:
            weights: the client's own model, where it keeps one.
            received: what the client was sent.

        Returns:
            by default the received weights where there are any, else the client's own.
        """
        return {**weights, **received.weights}

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        """What a client returns after local training.

        Args:
            trained: the client after training.
            received: what it was sent.
            round: the round, counted from 1.

        Returns:
            by default the client's bank, its weights or both, as the exchange says.
        """
        names = {part.name for part in self.exchange.up}
        weights = trained.weights if "weights" in names else {}
        return Bundle(bank=trained.bank() if "bank" in names else None, weights=weights)

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        """What a client keeps for itself until its next round, beside its model.

        Args:
            trained: the client after training.
            received: what it was sent.
            round: the round, counted from 1.

        Returns:
            the memory, which comes back as `received.memory`; by default the one it had.
        """
        return received.memory

    # --- server -------------------------------------------------------------------------------------------------
    def start(self, setup: Setup) -> Any:
        """The server's state before the first round.

        Args:
            setup: what the server knows.

        Returns:
            by default an empty bank, the initial weights or both, as the exchange says.
        """
        names = {part.name for part in self.exchange.down}
        empty = PrototypeBank.empty(setup.num_classes, setup.dim) if "bank" in names else None
        return Shared(empty, setup.weights if "weights" in names else {})

    def update(self, state: Any, reduced: Reduced, round: int, setup: Setup) -> Any:
        """The server's state after a round in which somebody returned something.

        Args:
            state: the state before.
            reduced: the uploads as the reduce gives them.
            round: the round, counted from 1.
            setup: what the server knew before the first round.

        Returns:
            by default the reduced bank and weights. A class that nobody reported keeps its prototype, and a weight that
            nobody sent keeps its value.
        """
        bank = state.bank if reduced.bank is None else reduced.bank.filled_from(state.bank)
        return replace(state, bank=bank, weights={**state.weights, **reduced.weights})

    def describe(self, state: Any, round: int) -> Measures:
        """What the record says about the state.

        Args:
            state: the state after a round.
            round: the round, counted from 1.

        Returns:
            numbers for the record of the round (a threshold, a phase), and a note for the end of a run.
        """
        return Measures()


registry: Registry[Method] = Registry("method")
register = registry.register
