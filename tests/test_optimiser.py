"""Our optimisers against torch's, for one client and for clients of a stack at different steps."""

import pytest
import torch

from protofed.federation.optimiser import LocalSettings, Optimiser


def torchs(local, parameters):
    if local.optimiser == "sgd":
        return torch.optim.SGD(parameters, local.lr, momentum=local.momentum, weight_decay=local.weight_decay)
    if local.optimiser == "adam":
        return torch.optim.Adam(parameters, local.lr, weight_decay=local.weight_decay)
    return torch.optim.RMSprop(parameters, local.lr, momentum=local.momentum, weight_decay=local.weight_decay)


def start(seed):
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(4, 3, generator=g), "b": torch.randn(3, generator=g), "c": torch.randn((), generator=g)}


def gradients(seed, steps):
    g = torch.Generator().manual_seed(100 + seed)
    return [[torch.randn(v.shape, generator=g) for v in start(0).values()] for _ in range(steps)]


def by_torch(local, seed, steps):
    params = {n: v.clone().requires_grad_() for n, v in start(seed).items()}
    optimiser = torchs(local, list(params.values()))
    for grads in gradients(seed, steps):
        for p, g in zip(params.values(), grads, strict=True):
            p.grad = g.clone()
        optimiser.step()
    return params


CASES = [
    LocalSettings(optimiser=kind, lr=0.05, momentum=momentum, weight_decay=decay)
    for kind in ("sgd", "adam", "rmsprop")
    for momentum in (0.0, 0.7)
    for decay in (0.0, 0.1)
]


@pytest.mark.parametrize("local", CASES, ids=str)
def test_one_client_equals_torch_also_when_kept_between_rounds(local):
    params = start(1)
    kept = {}
    steps = gradients(1, 6)
    for part in (steps[:2], steps[2:]):
        optimiser = Optimiser(local, params, kept)
        for grads in part:
            optimiser.step(grads)
        kept = optimiser.export()
    for name, expected in by_torch(local, 1, 6).items():
        torch.testing.assert_close(params[name], expected.detach())


@pytest.mark.parametrize("local", CASES, ids=str)
@pytest.mark.parametrize("indexed", [False, True])
def test_a_stack_equals_its_clients_one_by_one(local, indexed):
    counts = [5, 3, 2]
    stacked = {n: torch.stack([start(k)[n] for k in range(3)]) for n in start(0)}
    optimiser = Optimiser(local, stacked, [{}, {}, {}])
    grads = [gradients(k, counts[k]) for k in range(3)]
    for s in range(5):
        active = sum(c > s for c in counts)
        rows = torch.arange(active) if indexed else slice(0, active)
        optimiser.step([torch.stack([grads[k][s][i] for k in range(active)]) for i in range(3)], rows)
    for k in range(3):
        for name, expected in by_torch(local, k, counts[k]).items():
            torch.testing.assert_close(stacked[name][k], expected.detach())
        alone = Optimiser(local, start(k), {})
        for g in grads[k]:
            alone.step(g)
        kept = optimiser.export(k)
        assert kept.keys() == alone.export().keys()
        for key, value in alone.export().items():
            torch.testing.assert_close(kept[key], value)
