"""What a classifier is made of: what all classifiers of a run have in common, and what one client has learnt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..bank import PrototypeBank
from ..errors import ProtofedError
from ..models.base import PSI, ModelSpec
from ..models.decomposed import Halved
from ..models.frozen import Frozen, values_of
from ..models.guided import GuidedModel
from ..models.projection import Projected
from ..models.published import Rescaled, unpublished
from ..models.skeleton import Skeleton
from ..parts import Head, Helpers, Mix, Nearest, Predict
from ..registry import as_options, coerce

PREDICTIONS: dict[str, type[Predict]] = {"head": Head, "nearest": Nearest, "helpers": Helpers, "mix": Mix}


@dataclass(frozen=True)
class Design:
    """What all classifiers of a run have in common: what they classify, and how their method predicts.

    `kind` says what a sample is, `tokens` whether it is text as token ids. `columns` describes the columns of a table
    that samples are made of, where the data was one.
    """

    method: str
    data: str
    classes: tuple[str, ...]
    sample_shape: tuple[int, ...]
    predict: Predict
    tokens: bool = False
    kind: str = "auto"
    columns: Any = None

    def to_json(self) -> dict[str, Any] | None:
        """The design as plain values; None where a prediction of a person's own has no name to read it back by."""
        name = next((name for name, kind in PREDICTIONS.items() if type(self.predict) is kind), None)
        if name is None:
            return None
        return {
            "method": self.method,
            "data": self.data,
            "classes": list(self.classes),
            "sample_shape": list(self.sample_shape),
            "predict": {"name": name, **asdict(self.predict)},
            "tokens": self.tokens,
            "kind": self.kind,
            "columns": None if self.columns is None else self.columns.to_dict(),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], source: str) -> Design:
        """The design that `to_json` wrote; `source` names the file in errors."""
        try:
            options = dict(stored["predict"])
            predict = coerce(PREDICTIONS[options.pop("name")], options, source)
            return cls(
                str(stored["method"]),
                str(stored["data"]),
                tuple(map(str, stored["classes"])),
                tuple(map(int, stored["sample_shape"])),
                predict,
                bool(stored["tokens"]),
                str(stored["kind"]),
                _columns(stored.get("columns")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtofedError(f"{source}: not a classifier ({type(error).__name__}: {error})") from None


def _columns(stored: Mapping[str, Any] | None) -> Any:
    """The columns of the training table, where it was one."""
    if stored is None:
        return None
    from ..data.table import Columns

    return Columns.from_dict(stored)


@dataclass(frozen=True)
class Learnt:
    """What one client has learnt: its network with weights, its prototypes, and the scaling of its samples.

    Attributes:
        name: The client's name.
        model: The settings of its network.
        weights: The trained parameters and floating buffers of the network.
        body: The rest of the network, which does not train and which all clients of its architecture share.
        bank: The prototypes that its embeddings are compared with: one bank, or several helpers' stacked.
        candidates: `[C]`, the classes that the nearest prototype is chosen among.
        radii: `[C]`, the distance to a class's prototype beyond which a sample is unlike the class.
        mean: What is subtracted of a sample, one number a channel or feature; None without scaling.
        std: What it is divided by then.
        added: The names of classes that were added after training, which the head does not have.
        share: The head's share in a mixed prediction; None where the method does not mix.
        trained: `[C]`, the classes that the head was trained on then.
    """

    name: str
    model: ModelSpec
    weights: Mapping[str, Tensor]
    body: Mapping[str, Tensor]
    bank: PrototypeBank
    candidates: Tensor
    radii: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None
    added: tuple[str, ...] = ()
    share: Tensor | None = None
    trained: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the network, by name."""
        found = {"means": self.bank.means, "counts": self.bank.counts, "candidates": self.candidates}
        found |= {"radii": self.radii, "mean": self.mean, "std": self.std}  # type: ignore[dict-item]
        found |= {"share": self.share, "trained": self.trained}  # type: ignore[dict-item]
        return {name: value.detach().cpu().contiguous() for name, value in found.items() if value is not None}

    @classmethod
    def of(
        cls,
        name: str,
        model: ModelSpec,
        weights: Mapping[str, Tensor],
        body: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        added: tuple[str, ...] = (),
    ) -> Learnt:
        """The inverse of `tensors`."""
        bank = PrototypeBank(tensors["means"], tensors["counts"])
        scaling = tensors.get("mean"), tensors.get("std")
        mixing = tensors.get("share"), tensors.get("trained")
        return cls(name, model, weights, body, bank, tensors["candidates"], tensors["radii"], *scaling, added, *mixing)


@dataclass(frozen=True)
class Whole:
    """How the weights that train become those of a whole network: one that is no sum and has its body in it.

    Attributes:
        model: The settings of the whole network, which name no file of weights.
        halved: Whether a weight that trains is a sum σ + ψ.
        names: The name in the whole network of each weight that trains.
        body: What does not train, by its name there.
    """

    model: ModelSpec
    halved: bool
    names: Mapping[str, str]
    body: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: ModelSpec, network: torch.nn.Module, num_classes: int) -> Whole:
        """What is known of an architecture before any client's weights.

        Args:
            model: The settings of the network that trains.
            network: That network.
            num_classes: The number of classes.
        """
        values = {name: value.detach() for name, value in values_of(network) if not name.startswith(PSI)}
        trained, halved = set(Skeleton(network).slots), isinstance(model, Halved)
        model = model.model if isinstance(model, Halved) else model
        names: Mapping[str, str] = {name: name for name in values}
        body: dict[str, Tensor] = {}
        if isinstance(model, Frozen):
            with torch.random.fork_rng(devices=[]):
                names, body = replace(model, model=unpublished(model.model)).joined(num_classes)
            model = model.model
        body |= {names[name]: value for name, value in values.items() if name not in trained}
        body = {name: value.cpu().clone() for name, value in body.items()}
        return cls(unpublished(model), halved, {name: names[name] for name in values if name in trained}, body)

    def weights(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights that train, by their names in the whole network."""
        if not self.halved:
            return {there: trained[name] for name, there in self.names.items()}
        sums = {name: trained[PSI + name] for name in self.names if PSI + name in trained}
        return {there: trained[name] + sums.get(name, 0) for name, there in self.names.items()}


def model_to_json(model: ModelSpec) -> dict[str, Any] | None:
    """A network's settings as plain values; None where it is not registered under its name."""
    if isinstance(model, Projected):
        inner = model_to_json(model.model)
        projection = {"kind": model.kind, "dim": model.dim, "dropout": model.dropout}
        return None if inner is None else {**inner, "projection": projection}
    if isinstance(model, Rescaled):
        inner = model_to_json(model.model)
        return None if inner is None else {**inner, "rescaled": {"gain": model.gain, "offset": model.offset}}
    if isinstance(model, GuidedModel):
        inner = model_to_json(model.model)
        common = {"width": model.width, "pretrained": model.pretrained}
        return None if inner is None else {**inner, "common": common}
    if model.name not in models.registry or models.registry[model.name] is not type(model):
        return None
    return {"name": model.name, "options": as_options(model)}


def model_from_json(stored: Mapping[str, Any], source: str) -> ModelSpec:
    """The settings that `model_to_json` wrote; `source` names the file in errors."""
    try:
        name, options, projection = str(stored["name"]), dict(stored["options"]), stored.get("projection")
        if name not in models.registry:
            raise ProtofedError(
                f"{source}: its network is {name!r}, which is not registered here; --load the file of it"
            )
        model = models.registry.make(name, options)
        if "rescaled" in stored:
            model = Rescaled(model, *(tuple(map(float, stored["rescaled"][key])) for key in ("gain", "offset")))
        model = model if projection is None else Projected(model, **projection)
        return GuidedModel(model, **stored["common"]) if "common" in stored else model
    except (KeyError, TypeError, ValueError) as error:
        raise ProtofedError(f"{source}: not a network ({type(error).__name__}: {error})") from None


def network_of(learnt: Learnt, design: Design, source: str) -> torch.nn.Module:
    """A client's network with its weights, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        network = learnt.model.build(design.sample_shape, len(design.classes))
    slots, values = dict(values_of(network)), {**learnt.body, **learnt.weights}
    if {name: slot.shape for name, slot in slots.items()} != {name: value.shape for name, value in values.items()}:
        raise ProtofedError(f"{source}: the weights do not fit the network {learnt.model.name!r}")
    with torch.no_grad():
        for name, slot in slots.items():
            slot.copy_(values[name])
    return network.eval()
