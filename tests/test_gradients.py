"""The norms of gradients that `gradients=true` records: of each term of the loss, against autograd in plain loops."""

import pytest
import torch
import torch.nn.functional as F

from protofed import seeds
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from support.reference import epoch, naive
from support.small import SMALL, blobs

GIVEN = {**SMALL, "lr": 0.05, "alignment": {"start": 1, "end": 3}, "gradients": True}


def finish(method, **changes):
    settings, federation = build(resolve(method, {**GIVEN, "data": blobs(), **changes}))
    return settings, federation, list(federation)


def sampled_terms(model, x, y, protos):
    """FedSAP's three terms of a batch in round 3 (Eq. 4, 5 and 9), sample by sample."""
    z, logits = model(x)
    n, names = len(y), sorted(protos)
    cosines = [torch.stack([32 * F.cosine_similarity(z[i], protos[c], dim=0) for c in names]) for i in range(n)]
    return {
        "ce": sum(F.cross_entropy(logits[i], y[i]) for i in range(n)) / n,
        "align": 0.7 * sum(((z[i] - protos[int(y[i])]) ** 2).mean() for i in range(n)) / n,
        "proxy": -sum(F.log_softmax(cosines[i], 0)[names.index(int(y[i]))] for i in range(n)) / n,
    }


def naive_norms(settings):
    """By term, the root mean square over the steps of round 3 of the gradient's norm, and its mean over clients."""
    models, _, protos = naive("fedsap", settings, 2)
    built, federation = build(settings)
    general, clients = built.general, federation.data.clients
    found = {}
    for i, (model, client) in enumerate(zip(models, clients, strict=True)):
        x, y = client.labelled.take()
        params = list(model.parameters())
        optimiser = torch.optim.SGD(params, general.lr, momentum=general.momentum)
        model.train()
        steps = epoch(len(y), general.batch, torch.Generator().manual_seed(seeds.derive(general.seed, "batches", i, 3)))
        squares = {}
        for rows in steps:
            terms = sampled_terms(model, x[rows], y[rows], protos)
            for name, loss in {**{f"_{k}": v for k, v in terms.items()}, "": sum(terms.values())}.items():
                grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
                square = sum(float((g**2).sum()) for g in grads if g is not None)
                squares[name] = squares.get(name, 0.0) + square / len(steps)
            optimiser.zero_grad()
            sum(terms.values()).backward()
            optimiser.step()
        for name, square in squares.items():
            found.setdefault(f"gradient_norm{name}", []).append(square**0.5)
    return {name: sum(values) / len(values) for name, values in found.items()}


@pytest.mark.parametrize("engine", ["loop", "stack", "workers"])
def test_each_terms_norm_is_that_of_plain_loops(engine):
    settings, _, records = finish("fedsap", engine=engine)
    assert len(next(iter(build(settings)[1].data.clients)).labelled) > settings.general.batch  # several steps
    expected = naive_norms(settings)
    assert set(expected) == {"gradient_norm", "gradient_norm_ce", "gradient_norm_align", "gradient_norm_proxy"}
    measured = {name: value for name, value in records[2].measures.items() if name in expected}
    assert measured == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_recording_changes_nothing_else(engine):
    """Neither models nor what else is recorded; before anyone has sent a prototype, only cross-entropy has a gradient."""
    _, measured, records = finish("fedsap", engine=engine)
    _, plain, others = finish("fedsap", engine=engine, gradients=False)
    assert all("gradient_norm" not in name for record in others for name in record.measures)
    for one, other in zip(records, others, strict=True):
        assert (one.terms, one.metrics) == (other.terms, other.metrics)
    for i, state in plain.engine.export().items():
        for name, value in state.weights.items():
            assert torch.equal(value, measured.engine.export()[i].weights[name])
    first = records[0].measures
    assert first["gradient_norm_align"] == first["gradient_norm_proxy"] == 0
    assert first["gradient_norm_ce"] == pytest.approx(first["gradient_norm"]) and first["gradient_norm"] > 0
