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
        """The terms of the loss by name; their sum is minimised. With pseudo-labels, a `Loss` that names them."""
        raise NotImplementedError(f"{type(self).__name__} defines no terms")

    def begin(self, weights: Weights, received: Received) -> Weights:
        """The model a client trains from: received weights where there are any, else its own."""
        return {**weights, **received.weights}

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        """What a client returns after local training: by default its bank, its weights or both, as the exchange says."""
        names = {part.name for part in self.exchange.up}
        weights = trained.weights if "weights" in names else {}
        return Bundle(bank=trained.bank() if "bank" in names else None, weights=weights)

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        """What a client keeps for itself until its next round, beside its model."""
        return received.memory

    # --- server -------------------------------------------------------------------------------------------------
    def start(self, setup: Setup) -> Any:
        """The server's state before the first round: by default an empty bank, the initial weights or both."""
        names = {part.name for part in self.exchange.down}
        empty = PrototypeBank.empty(setup.num_classes, setup.dim) if "bank" in names else None
        return Shared(empty, setup.weights if "weights" in names else {})

    def update(self, state: Any, reduced: Reduced, round: int, setup: Setup) -> Any:
        """The state after a round in which somebody returned something. A class that nobody reported keeps its prototype,
        a weight that nobody has its value."""
        bank = state.bank if reduced.bank is None else reduced.bank.filled_from(state.bank)
        return replace(state, bank=bank, weights={**state.weights, **reduced.weights})

    def describe(self, state: Any, round: int) -> Measures:
        """Numbers about the state for the record of a round (a threshold, a phase), and a note for the end of a run."""
        return Measures()


registry: Registry[Method] = Registry("method")
register = registry.register
