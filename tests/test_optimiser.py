"""Our optimisers against torch's, for one client and for clients of a stack at different steps."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from protofed.errors import ProtofedError
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation import checkpoint
from protofed.federation import optimiser as module
from protofed.federation.optimiser import LocalSettings, Optimiser
from protofed.federation.site import Site
from protofed.schedules import cosine_decay
from support.engines import ENGINES, LOOP, assert_same, finish
from support.small import SMALL, blobs


def torchs(local, parameters):
    if local.optimiser == "sgd":
        given = {"momentum": local.momentum, "weight_decay": local.weight_decay, "nesterov": local.nesterov}
        return torch.optim.SGD(parameters, local.lr, **given)
    if local.optimiser == "adam":
        return torch.optim.Adam(parameters, local.lr, weight_decay=local.weight_decay)
    given = {"momentum": local.momentum, "weight_decay": local.weight_decay, "alpha": local.smoothing}
    return torch.optim.RMSprop(parameters, local.lr, **given)


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
        if local.clip:
            torch.nn.utils.clip_grad_norm_(params.values(), local.clip)
        optimiser.step()
    return params


CASES = [
    LocalSettings(optimiser=kind, lr=0.05, momentum=momentum, weight_decay=decay)
    for kind in ("sgd", "adam", "rmsprop")
    for momentum in (0.0, 0.7)
    for decay in (0.0, 0.1)
]
# the gradients' norms are about 4: some are clipped by 4, all by 0.5
CASES += [replace(case, clip=clip) for case in CASES if case.weight_decay for clip in (0.5, 4.0)]
CASES += [replace(case, smoothing=0.9) for case in CASES if case.optimiser == "rmsprop" and not case.clip]
CASES += [replace(case, nesterov=True) for case in CASES if case.optimiser == "sgd" and case.momentum]


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


@pytest.mark.parametrize("local", [c for c in CASES if c.optimiser == "sgd" and c.momentum], ids=str)
def test_without_the_fused_update_the_result_is_the_same(local, monkeypatch):
    monkeypatch.setattr(module, "_same_memory_order", lambda *lists: False)
    params = start(1)
    optimiser = Optimiser(local, params, {})
    for grads in gradients(1, 4):
        optimiser.step(grads)
    for name, expected in by_torch(local, 1, 4).items():
        torch.testing.assert_close(params[name], expected.detach())


@pytest.mark.parametrize("nesterov", [False, True])
def test_parameters_may_lie_in_memory_in_any_order(nesterov):
    """Channels last, transposed, with axes of one entry, and gradients that lie otherwise: the fused update is for those
    that lie alike, and makes no copies."""
    local = LocalSettings(lr=0.05, momentum=0.7, nesterov=nesterov)
    laid = {
        "last": lambda v: v.contiguous(memory_format=torch.channels_last),
        "one channel": lambda v: v[:, :1].contiguous(memory_format=torch.channels_last),
        "transposed": lambda v: v.flatten(1).mT.contiguous().mT,
        "gaps": lambda v: v.flatten(1).repeat_interleave(2, 1)[:, ::2],
    }
    g = torch.Generator().manual_seed(3)
    first = {name: change(torch.randn(4, 6, 3, 3, generator=g)) for name, change in laid.items()}
    grads = [[change(torch.randn(4, 6, 3, 3, generator=g)) for change in laid.values()] for _ in range(3)]
    for turned in (False, True):  # then gradients lie as they do not
        mine = {n: v.clone() for n, v in first.items()}
        its = [v.clone().requires_grad_() for v in first.values()]
        optimiser, torchs_own = Optimiser(local, mine), torchs(local, its)
        for step in grads:
            optimiser.step([v.contiguous() if turned else v for v in step])
            for p, own in zip(its, step, strict=True):
                p.grad = own.clone()
            torchs_own.step()
        for name, p in zip(mine, its, strict=True):
            torch.testing.assert_close(mine[name], p.detach(), rtol=1e-6, atol=1e-6, msg=name)


def test_clients_of_a_stack_are_clipped_each_by_its_own_norm():
    local = LocalSettings(lr=1.0, momentum=0.0, clip=1.0)
    params = {"a": torch.zeros(3, 2), "b": torch.zeros(3)}
    grads = [torch.tensor([[3.0, 0.0], [0.1, 0.2], [0.0, 0.0]]), torch.tensor([4.0, 0.2, 0.0])]
    Optimiser(local, params, [{}, {}, {}]).step(grads, slice(0, 3))
    expected = torch.tensor([[0.6, 0.0], [0.1, 0.2], [0.0, 0.0]])  # norms 5, 0.3 and 0
    torch.testing.assert_close(-params["a"], expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(-params["b"], torch.tensor([0.8, 0.2, 0.0]), rtol=1e-5, atol=1e-7)
    assert float(grads[0][0, 0]) == 3.0, "what was given stays as it was"


# --- the learning rate of a round -------------------------------------------------------------------------------------
def test_cosine_is_torchs_annealing():
    parameter = torch.zeros((), requires_grad=True)
    plain = torch.optim.SGD([parameter], 0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(plain, T_max=20)
    local = LocalSettings(lr=0.03, lr_schedule="cosine", rounds=20)
    for t in range(1, 21):
        assert local.lr_at(t) == pytest.approx(schedule.get_last_lr()[0], rel=1e-6)
        assert local.lr_at(t) == pytest.approx(0.03 * 0.5 * (1 + math.cos(math.pi * (t - 1) / 20)))
        plain.step()
        schedule.step()
    assert cosine_decay(1, 20) == 1.0 and cosine_decay(11, 20) == pytest.approx(0.5) and cosine_decay(20, 20) > 0
    assert local.lr_at(0) == 0.03, "tuning before an evaluation"
    assert replace(local, lr_schedule="constant").lr_at(17) == 0.03


@pytest.mark.parametrize("kind", ["sgd", "adam", "rmsprop"])
def test_every_optimiser_takes_the_rounds_learning_rate(kind):
    local = LocalSettings(optimiser=kind, lr=0.05, momentum=0.7, lr_schedule="cosine", rounds=4)
    one, other = start(1), start(1)
    for params, optimiser in (
        (one, Optimiser(local, one, {}, round=3)),
        (other, Optimiser(replace(local, lr=0.025, lr_schedule="constant"), other, {}, round=3)),
    ):
        for grads in gradients(1, 3):
            optimiser.step(grads)
        assert not torch.equal(params["a"], start(1)["a"])
    for name, value in one.items():
        torch.testing.assert_close(value, other[name])


TRAINING = {"lr_schedule": "cosine", "nesterov": True, "clip": 0.5, "momentum": 0.9, "weight_decay": 5e-4}


@pytest.mark.parametrize("engine", ["stack", "workers", "workers stack"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.slow
def test_every_engine_equals_the_plain_loop(engine, keep):
    keys = {**SMALL, "data": blobs(), "shot_spread": 3.0, "participation": 0.8, "keep_optimiser": keep, **TRAINING}
    assert_same(resolve("fedavg", keys), ENGINES[engine])


def test_each_key_changes_what_is_trained_and_defaults_do_not():
    def head(**changes):
        return finish(resolve("fedavg", {**SMALL, "data": blobs(), "rounds": 2, **changes}), LOOP)[0].weights[
            "head.weight"
        ]

    plain = head()
    assert torch.equal(plain, head(lr_schedule="constant", nesterov=False, clip=0.0))
    for key in ("lr_schedule", "nesterov", "clip"):
        assert not torch.allclose(plain, head(**{key: TRAINING[key]})), key


def test_the_settings_reach_the_server_and_tuning():
    keys = {**SMALL, "data": blobs(), "labels": "server", "server_labels": 12, "rounds": 7, **TRAINING}
    _, federation = build(resolve("fedarpl", keys))
    local = federation.engine.task.local
    assert (local.lr_schedule, local.nesterov, local.clip, local.rounds) == ("cosine", True, 0.5, 7)
    _, tuned = build(resolve("wifederated", {**SMALL, "data": blobs(), **TRAINING}))
    assert replace(tuned.engine.tuning.local, epochs=1) == replace(tuned.engine.task.local, keep_optimiser=False)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nesterov": True, "momentum": 0}, "nesterov=true needs optimiser=sgd and momentum above 0, got .*momentum=0"),
        ({"nesterov": True, "optimiser": "adam"}, "got optimiser=adam"),
        ({"lr_schedule": "linear"}, "lr_schedule='linear'"),
        ({"clip": -1}, "clip=-1"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(wrong, said):
    with pytest.raises(ProtofedError, match=said):
        resolve("fedavg", {**SMALL, "data": blobs(), **wrong})


# --- one optimiser for all clients ------------------------------------------------------------------------------------
SHARED = {"shared_optimiser": True, "optimiser": "rmsprop", "momentum": 0.0, "smoothing": 0.9, "lr": 0.01, "epochs": 2}


def test_a_shared_optimiser_is_one_torch_optimiser_for_all_clients():
    """Against one torch optimiser over one module, into which each client's model is loaded."""
    settings = resolve("fedavg", {**SMALL, "data": blobs(), "batch": 64, "participation": 0.6, **SHARED})
    _, federation = build(settings)
    module, data = copy.deepcopy(federation.engine.skeleton.module), federation.data
    weights = {name: value.clone() for name, value in federation.state.weights.items()}
    optimiser = torch.optim.RMSprop(module.parameters(), 0.01, alpha=0.9)
    for record in federation:
        sums, total = {name: torch.zeros_like(value) for name, value in weights.items()}, 0
        for client in record.participants:
            x, y = data.clients[client].labelled.take()
            module.load_state_dict(weights)
            for _ in range(2):
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(module(x).logits, y).backward()
                optimiser.step()
            total += len(y)
            for name, value in module.state_dict().items():
                sums[name] += len(y) * value
        weights = {name: value / total for name, value in sums.items()}
        for name, value in federation.state.weights.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)
        holders = [c for c, s in federation.engine.export().items() if s.optimiser]
        assert holders == [record.participants[-1]]


def test_a_shared_optimiser_survives_a_checkpoint(tmp_path):
    settings = resolve("fedavg", {**SMALL, "data": blobs(), "rounds": 4, **SHARED})
    whole, _, _ = finish(settings, LOOP)
    _, first = build(settings)
    for _ in range(2):
        first.step()
    checkpoint.save(first, tmp_path)
    _, second = build(settings)
    checkpoint.load(second, tmp_path)
    for _ in range(2):
        second.step()
    assert all(torch.equal(value, whole.weights[name]) for name, value in second.state.weights.items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": "stack"}, "it needs engine=loop with one worker"),
        ({"engine": "workers", "workers": 2}, "it needs engine=loop with one worker"),
        ({"model": None, "models": ["mlp?hidden=[7]", "mlp?hidden=[8]"], "dim": 5}, "it needs one architecture"),
        ({"keep_optimiser": True}, "clients have their own, or share one"),
    ],
)
def test_what_a_shared_optimiser_cannot_be_with(changes, said):
    keys = {**SMALL, "data": blobs(), **SHARED, **changes}
    if keys["model"] is None:
        keys = {key: value for key, value in keys.items() if key not in ("model", "embedding", "hidden")}
        changes = {**changes, "method": "fedproto"}
    with pytest.raises(ProtofedError, match=said):
        build(resolve(changes.get("method", "fedavg"), keys))


def test_sites_share_no_optimiser():
    _, federation = build(resolve("fedavg", {**SMALL, "data": blobs(), **SHARED}))
    with pytest.raises(ProtofedError, match="sites train at the same time"):
        Site(federation.engine.inputs, client=0)
