"""From a federation to what each client has learnt: the model, prototypes and scaling that the judge would use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..bank import PrototypeBank
from ..data.types import FederatedData
from ..federation.engine import Downloads, PlainEngine
from ..federation.judge import Evaluation, Mixture
from ..federation.mixed import MixedEngine
from ..federation.visits import PlainVisit
from ..methods.base import Method
from ..models.base import ModelSpec
from ..parts import Mix, Predict
from .core import radii_of
from .design import Design, Learnt, Whole

SAMPLES = 2000  # the most samples of a client by which its radii are measured


def design_of(method: Method, data: FederatedData) -> Design:
    """What all classifiers of a federation have in common."""
    return Design(
        method.name,
        data.name,
        data.class_names or tuple(map(str, range(data.num_classes))),
        tuple(data.sample_shape),
        method.predict,
        not data.clients[0].labelled.x.is_floating_point(),
        data.kind,
        data.columns,
    )


def gather(
    engine: PlainEngine | MixedEngine,
    downloads: Downloads,
    models: Sequence[ModelSpec],
    data: FederatedData,
    candidates: str,
) -> Iterator[tuple[int, Learnt]]:
    """What clients have learnt, one after another, as the judge would meet them.

    Args:
        engine: A plain engine with the clients' states.
        downloads: What each client is sent to be evaluated.
        models: The settings of each of the engine's architectures.
        data: The data of all clients, as it is before any features are computed of it.
        candidates: The classes that the nearest prototype is chosen among: the client's `own`, or `all`.

    Returns:
        Each client with what it has learnt. Clients that share a model are given the same tensors.
    """
    predict = engine.method.predict
    wholes: dict[int, Whole] = {}
    loaded, weights = None, {}
    for visit in engine.visits(downloads, Evaluation("test", candidates)):  # type: ignore[arg-type]
        assert isinstance(visit, PlainVisit)
        skeleton, architecture = visit.model.skeleton, engine.owner[visit.client]
        if architecture not in wholes:
            wholes[architecture] = Whole.of(models[architecture], skeleton.module, data.num_classes)
        whole = wholes[architecture]
        if loaded is not visit.model:
            loaded = visit.model
            weights = whole.weights({name: value.cpu() for name, value in skeleton.weights().items()})
        classes = data.clients[visit.client].classes
        bank = predict.bank(visit.received, visit.own_bank, classes)
        allowed = classes if candidates == "own" else torch.ones_like(classes)
        radii = _radii(visit, predict, bank.restricted(allowed))
        name, scaling = data.name_of(visit.client), data.scaling(visit.client)
        learnt = Learnt(name, whole.model, weights, whole.body, bank, allowed, radii, *scaling)
        if isinstance(predict, Mix):
            mixture = Mixture.of(visit, predict, visit.model.data, bank.restricted(allowed), allowed)
            learnt = replace(learnt, share=torch.tensor(mixture.share), trained=mixture.trained)
        yield visit.client, learnt


def _radii(visit: PlainVisit, predict: Predict, bank: PrototypeBank) -> Tensor:
    """The radii of a client's classes: by its validation samples, on which it has not trained, or by its labelled ones."""
    known = bank.known.any(0) if bank.known.ndim > 1 else bank.known
    own = visit.model.data.clients[visit.client]
    samples = own.validation if len(own.validation or ()) else own.labelled
    assert samples is not None
    if not len(samples) or not bool(known.any()):
        return torch.full(known.shape, float("inf"))
    # evenly spread, because samples may be sorted by class
    rows = torch.linspace(0, len(samples) - 1, min(len(samples), SAMPLES), device=samples.index.device).round().long()
    x, y = samples.take(rows)
    distances = predict.distances(visit.model.skeleton.outputs(x).embedding, bank)
    return radii_of((distances.amin(0) if distances.ndim > 2 else distances).cpu(), y.cpu(), known)
