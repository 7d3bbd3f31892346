"""Every engine gives the plain loop's numbers, for every method; and a worker's death is survived."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as settings_of_tests
from hypothesis import strategies as st
from torch import nn

import protofed as pf
from protofed import methods, models
from protofed.bank import PrototypeBank
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation.judge import Evaluation
from protofed.methods.server import State, state
from protofed.models import convolution
from protofed.models.convolution import LeanConv2d, UnfoldConv2d, with_convolutions
from protofed.models.skeleton import Skeleton
from protofed.wire import Exchange
from support.engines import ENGINES, LOOP, assert_same, finish, images
from support.marks import slow_but
from support.small import SMALL, blobs, labels_for

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


STACKED = (
    "fedapa",
    "fedavg",
    "fedpagr",
    "fedproto",
    "fedsap",
    "fedtgp",
    "local",
    "protofssl",
)  # of each kind one


@pytest.mark.parametrize("engine", slow_but("stack", ENGINES))
@pytest.mark.parametrize("method", slow_but(STACKED, methods.available()))
def test_every_method_on_every_engine_equals_the_plain_loop(method, engine):
    """Ragged clients, batches that do not divide, partial participation, two epochs."""
    changes = {"rounds": 2, "batch": 5, "shot_spread": 3.0, "participation": 0.8, "epochs": 2, "projection_dropout": 0}
    if method == "fedsap":
        changes["alignment"] = {"start": 0, "end": 2}
    if method == "fedapa":
        changes["warm_up"] = {"start": 0, "end": 2}
    assert_same(resolve(method, {**SMALL, "data": blobs(), **changes, **labels_for(method)}), ENGINES[engine])


IMAGE = {k: v for k, v in SMALL.items() if k != "hidden"} | {
    "embedding": 6,
    "shot_spread": 1.0,
    "clients": 3,
    "rounds": 2,
}


@pytest.mark.parametrize("engine", ENGINES)
def test_convolutions(engine):
    changes = {"model": "cnn", "channels": [2, 3], "shot": 5}
    assert_same(resolve("fedproto", {**IMAGE, **changes, "data": images()}), ENGINES[engine])


@pytest.mark.parametrize("engine", slow_but("stack", ENGINES))
@pytest.mark.slow
def test_batch_norm(engine):
    """No padding enters the statistics: clients with other batch sizes are run apart.

    A ReLU that rounding flips changes single small biases of so deep a network, so the whole model is compared.
    """
    changes = {"model": "resnet18", "width": 0.25, "shot": 6, "batch": 32, "lr": 0.001, "rounds": 2, "shot_spread": 2.0}
    settings = resolve("fedproto", {**IMAGE, **changes, "data": images()})
    _, federation = build(settings.with_engine(LOOP))
    assert len({len(c.labelled) for c in federation.data.clients}) > 1
    _, states, _ = finish(settings, LOOP)
    _, others, _ = finish(settings, ENGINES[engine])
    for client, (weights, *_) in states.items():
        for kind in ("running_mean", "running_var", "weight", "bias"):
            names = [n for n in weights if n.endswith(kind)]
            one, other = (torch.cat([w[n].flatten() for n in names]) for w in (weights, others[client][0]))
            assert float((one - other).norm() / one.norm()) < 1e-4, kind


@pytest.mark.parametrize("engine", slow_but("stack", ["stack", "workers", "workers stack"]))
@pytest.mark.parametrize("optimiser", ["sgd", "adam", "rmsprop"])
def test_kept_optimisers(optimiser, engine):
    changes = {"optimiser": optimiser, "keep_optimiser": True, "lr": 0.003, "weight_decay": 0.01, "rounds": 3}
    assert_same(resolve("fedproto", {**SMALL, "data": blobs(), **changes}), ENGINES[engine])


@pytest.mark.parametrize("engine", slow_but("stack", ["stack", "workers", "workers stack"]))
@pytest.mark.usefixtures("own_names")
def test_client_memory_own_models_and_a_different_download_for_each(engine):
    """What the interface must carry: state a client keeps, and messages that differ from client to client."""

    @state
    class Scaled(State):
        """One bank, which each client is sent scaled by its number."""

        mean: PrototypeBank

        def bank(self, client, round):
            return replace(self.mean, means=self.mean.means * (1 + client / 10))

    @methods.register("personal")
    @dataclass(frozen=True)
    class Personal(methods.fedproto.FedProto):
        """Each client is sent a bank scaled by its number, and counts its rounds."""

        exchange: ClassVar[Exchange] = Exchange((pf.wire.bank(each=True),), (pf.wire.bank(),))

        def terms(self, net, batch, received, round):
            terms = super().terms(net, batch, received, round)
            return {**terms, "memory": 0.01 * received.memory.scalars.get("rounds", 0.0) * terms["ce"]}

        def remember(self, trained, received, round):
            return pf.wire.Bundle(scalars={"rounds": received.memory.scalars.get("rounds", 0.0) + 1})

        def start(self, setup):
            return Scaled(PrototypeBank.empty(setup.num_classes, setup.dim))

        def update(self, state, reduced, round, setup):
            return Scaled(reduced.bank.filled_from(state.mean))

    settings = resolve("personal", {**SMALL, "data": blobs(), "initial": "own"})
    assert_same(settings, ENGINES[engine])
    _, states, _ = finish(settings, ENGINES[engine])
    assert all(memory.scalars == {"rounds": 3.0} for _, _, memory, _ in states.values())


@pytest.mark.parametrize("engine", ["stack", "workers", "workers stack"])
def test_a_client_that_goes_to_nan_is_dropped_on_every_engine(engine):
    _, federation = build(resolve("fedproto", {**SMALL, "data": blobs(), "rounds": 2}).with_engine(ENGINES[engine]))
    data = federation.data.clients[3]
    data.labelled.x[data.labelled.index] *= 1e38  # in place: the shared tensor, whose rows are this client's alone
    records = list(federation)
    assert all(set(r.dropped) == {3} for r in records)
    assert "NaN" in records[0].dropped[3]
    federation.engine.close()


@settings_of_tests(max_examples=150, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 2)),
    st.tuples(st.integers(0, 3), st.integers(0, 2)),
    st.integers(1, 2),
    st.tuples(st.integers(1, 7), st.integers(1, 7)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, convolution.CHANNELS]),
)
@pytest.mark.slow
def test_other_convolutions_equal_torchs(c_in, c_out, size, stride, padding, dilation, extent, biased, last, channels):
    """Outputs and every gradient, whatever the shape; also gradients of gradients."""
    with mock.patch.object(convolution, "CHANNELS", channels):
        convolutions_equal_torchs(c_in, c_out, size, stride, padding, dilation, extent, biased, last)


def convolutions_equal_torchs(c_in, c_out, size, stride, padding, dilation, extent, biased, last):
    assume(all(e + 2 * p > dilation * (k - 1) for e, p, k in zip(extent, padding, size, strict=True)))
    layout = torch.channels_last if last else torch.contiguous_format
    plain = nn.Conv2d(c_in, c_out, size, stride, padding, dilation, bias=biased).double().to(memory_format=layout)
    x = torch.randn(2, c_in, *extent, dtype=torch.float64).contiguous(memory_format=layout)
    found = {}
    for kind in (nn.Conv2d, LeanConv2d, UnfoldConv2d):
        layer = with_convolutions(nn.Sequential(plain), kind)[0]
        assert type(layer) is kind and type(plain) is nn.Conv2d
        own = x.clone(memory_format=torch.preserve_format).requires_grad_()
        inputs = [own, *layer.parameters()]
        y = layer(own)
        first = torch.autograd.grad(
            (y.sin() * torch.arange(y.numel()).reshape(y.shape)).sum(), inputs, create_graph=True
        )
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        found[kind] = [y, *first, *second]
        if kind is LeanConv2d:
            assert first[1].stride() == layer.weight.stride(), "as the fused optimiser wants it"
    for kind in (LeanConv2d, UnfoldConv2d):
        for mine, its in zip(found[kind], found[nn.Conv2d], strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9)


def test_convolutions_with_groups_or_another_padding_stay():
    for layer in (
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding_mode="circular"),
    ):
        assert type(with_convolutions(nn.Sequential(layer), LeanConv2d)[0]) is nn.Conv2d


def test_a_kernel_on_one_pixel_keeps_its_middle():
    layer = with_convolutions(nn.Sequential(nn.Conv2d(6, 5, 3, padding=1)), LeanConv2d)[0]
    layer(torch.randn(2, 6, 1, 1)).square().sum().backward()
    taps = layer.weight.grad.abs().sum((0, 1)) > 0
    assert taps.sum() == 1 and taps[1, 1]


@pytest.mark.parametrize(("engine", "convolution"), [("stack", "lean"), ("loop", "unfold")])
def test_a_convolution_of_another_engine_is_refused(engine, convolution):
    settings = resolve("fedproto", {**SMALL, "data": blobs(), "engine": engine, "convolution": convolution})
    with pytest.raises(pf.ProtofedError, match=f"convolution={convolution}: not for a {engine}"):
        build(settings)


@pytest.mark.slow
def test_large_kept_state_does_not_block_the_pipes():
    """Optimiser states far larger than a pipe holds, in both directions."""
    keys = {**SMALL, "data": blobs(), "hidden": [400, 400], "keep_optimiser": True, "clients": 6, "rounds": 3}
    assert_same(resolve("fedproto", keys), ENGINES["workers"])


@pytest.mark.usefixtures("own_names")
@pytest.mark.slow
def test_memory_that_comes_and_goes():
    @methods.register("forgetful")
    @dataclass(frozen=True)
    class Forgetful(methods.fedproto.FedProto):
        """Remembers weights in odd rounds and nothing in even ones."""

        def terms(self, net, batch, received, round):
            terms = super().terms(net, batch, received, round)
            return {**terms, "memory": 0.1 * len(received.memory.weights) * terms["ce"]}

        def remember(self, trained, received, round):
            return pf.wire.Bundle(weights={"a": torch.ones(2)} if round % 2 else {})

    for engine in ("stack", "workers", "workers stack"):
        assert_same(resolve("forgetful", {**SMALL, "data": blobs(), "rounds": 4}), ENGINES[engine])


@pytest.mark.parametrize("engine", ["stack", "workers stack"])
def test_clients_tested_on_different_tensors(engine):
    """Natural clients without test rows of their own are tested on a part of their training rows."""
    data = blobs(per_class=30)
    rows, tests = torch.arange(len(data.y_train)) % 6, torch.arange(len(data.y_test)) % 3
    natural = replace(data, group_train=rows, group_test=tests)
    keys = {k: v for k, v in SMALL.items() if k not in ("clients", "way", "shot", "partition")}
    assert_same(
        resolve("fedproto", {**keys, "data": natural, "partition": "natural", "test": "local"}), ENGINES[engine]
    )


def workers_of(federation):
    return [w.process.pid for w in federation.engine.workers]


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_the_result_is_the_same(caplog):
    """kill -9 in the middle of training: the run goes on, and ends with the numbers of an undisturbed run."""
    settings = resolve("fedsap", {**SMALL, "data": blobs(per_class=200), "shot": 60, "rounds": 6, "epochs": 3})
    _, _, records = finish(settings, ENGINES["workers"])
    _, federation = build(settings.with_engine(ENGINES["workers"]))
    federation.step()
    first = workers_of(federation)
    script = f"import os, time; time.sleep(0.15); os.kill({first[0]}, {int(signal.SIGKILL)})"
    with caplog.at_level(logging.WARNING, "protofed"):
        subprocess.Popen([sys.executable, "-c", script])
        later = list(federation)
        deadline = time.monotonic() + 10
        while "died" not in caplog.text and time.monotonic() < deadline:  # killed only after the last round: go on
            federation.rounds += 1
            extra = federation.step()
            assert not extra.dropped
    assert "died" in caplog.text and "last state" in caplog.text
    assert first[0] not in workers_of(federation)
    assert not any(r.dropped for r in later)
    assert [r.loss for r in later] == [r.loss for r in records[1:]]
    federation.engine.close()


def test_an_error_while_workers_evaluate_leaves_no_reply_behind():
    """The parent scores clients that share the initial model meanwhile; what workers then reply belongs to no later job."""
    given = {**SMALL, "data": blobs(per_class=100), "clients": 6, "participation": 0.5, "rounds": 3}
    _, federation = build(resolve("fedproto", given).with_engine(ENGINES["workers"]))
    federation.step()
    engine = federation.engine
    downloads, _ = federation.downloads(range(6), 2, federation.method.predict.reads)
    alike, groups = engine.inner.shares(downloads, Evaluation())
    assert alike and groups
    before = engine.evaluate(downloads, Evaluation())
    with (
        mock.patch.object(engine.inner, "evaluate", side_effect=RuntimeError("broken")),
        pytest.raises(RuntimeError, match="broken"),
    ):
        engine.evaluate(downloads, Evaluation())
    assert not any(worker.job is not None for worker in engine.workers)
    after = engine.evaluate(downloads, Evaluation())
    assert [(s.by_head, s.by_prototype) for s in after.values()] == [
        (s.by_head, s.by_prototype) for s in before.values()
    ]
    engine.close()


@pytest.mark.usefixtures("own_names")
@pytest.mark.slow
def test_a_client_that_kills_its_worker_each_time_is_dropped_and_named():
    @methods.register("deadly")
    @dataclass(frozen=True)
    class Deadly(methods.fedproto.FedProto):
        """One client's training ends its process."""

        def returned(self, trained, received, round):
            if int(trained.bank().counts.sum()) == largest:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().returned(trained, received, round)

    settings = resolve("deadly", {**SMALL, "data": blobs(), "rounds": 2, "shot_spread": 4.0})
    _, federation = build(settings.with_engine(ENGINES["workers"]))
    sizes = [len(c.labelled) for c in federation.data.clients]
    largest = max(sizes)
    bad = {i for i, n in enumerate(sizes) if n == largest}
    records = list(federation)
    assert all(set(r.dropped) == bad for r in records)
    assert all("died" in why for r in records for why in r.dropped.values())
    federation.engine.close()


@pytest.mark.slow
def test_workers_end_with_their_parent(tmp_path):
    """kill -9 of the parent leaves no worker behind."""
    words = ["run", "fedproto", "clients=4", "shot=6", "rounds=100000", "engine=workers", "inner=loop", "workers=2"]
    process = subprocess.Popen([sys.executable, "-m", "protofed", *words, "--out", str(tmp_path / "r")], stdout=-3)
    file = tmp_path / "r" / "rounds.jsonl"
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    children = subprocess.run(
        ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True
    ).stdout.split()
    assert len(children) == 2
    process.kill()
    process.wait()
    for _ in range(100):
        alive = [pid for pid in children if os.path.exists(f"/proc/{pid}/stat") and not _zombie(pid)]  # noqa: PTH110
        if not alive:
            break
        time.sleep(0.1)
    assert not alive


def _zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_auto_chooses_logs_and_writes_down_its_choice(caplog, tmp_path):
    changes = {"engine": "auto", "inner": "auto", "layout": "auto", "convolution": "auto", "workers": 0, "threads": 0}
    with caplog.at_level(logging.INFO, "protofed"):
        pf.run("fedproto", out=tmp_path / "r", **{**SMALL, "data": blobs(), **changes})
    assert (
        "engine: mlp: 113 parameters, 824 operations a step, 5 clients a round: stack" in caplog.text
        and "engine: stack" in caplog.text
    )
    chosen = tomllib.loads((tmp_path / "r" / "settings.toml").read_text())
    assert all(chosen[key] not in ("auto", 0) for key in changes)


@pytest.mark.usefixtures("own_names")
def test_auto_trains_a_model_that_cannot_be_stacked(caplog):
    class Branching(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.encoder, self.head = nn.Linear(6, 5), nn.Linear(5, classes)

        def forward(self, x):
            z = self.encoder(x)
            if float(z.detach().sum()) > 1e9:  # a branch on values: vmap refuses it
                z = 2 * z
            return z, self.head(z)

    models.register_module("branching", lambda shape, classes: Branching(classes))
    keys = {k: v for k, v in SMALL.items() if k not in ("embedding", "hidden", "model", "engine", "layout", "workers")}
    with caplog.at_level(logging.INFO, "protofed"):
        result = pf.run("fedproto", model="branching", data=blobs(), **keys)
    assert result.metrics
    assert "cannot be stacked" in caplog.text


def test_an_idle_client_takes_no_memory():
    """States of clients that never took part are not even made."""
    keys = {
        **SMALL,
        "data": blobs(per_class=60),
        "partition": "iid",
        "clients": 100,
        "participation": 0.02,
        "rounds": 3,
    }
    del keys["way"], keys["shot"]
    for engine in (LOOP, ENGINES["stack"], ENGINES["workers"]):
        _, federation = build(resolve("fedproto", {**keys, "evaluate_every": 10}).with_engine(engine))
        seen = {c for r in (federation.step(), federation.step()) for c in r.participants}
        assert set(federation.engine.export()) == seen
        federation.engine.close()


def test_skeleton_in_channels_last_gives_the_same_outputs():
    torch.manual_seed(0)
    module = models.build("cnn", (3, 16, 16), 4)
    x = torch.randn(5, 3, 16, 16)
    plain = Skeleton(module).outputs(x)
    torch.testing.assert_close(Skeleton(module, channels_last=True).outputs(x), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["fedsap", "fedavg"])
@pytest.mark.soak
def test_two_ranks_by_torchrun_give_the_numbers_of_one_process(method, tmp_path):
    keys = [
        "clients=5",
        "shot=6",
        "rounds=3",
        "checkpoint_every=2",
        "engine=loop",
        "layout=contiguous",
        "threads=1",
        "workers=1",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    one, two = tmp_path / "one", tmp_path / "two"
    subprocess.run([sys.executable, "-m", "protofed", "run", method, *keys, "--out", str(one)], check=True, env=env)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = ["--master-port", str(free.getsockname()[1])]
    done = subprocess.run(
        [*launch, *port, "-m", "protofed", "run", method, *keys, "--out", str(two)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("run folder:") == 1  # the first rank speaks, the other is silent
    assert (one / "clients.jsonl").read_text() == (two / "clients.jsonl").read_text()
    latest = "checkpoint/round-000003"
    for name in ("server.safetensors", "clients.safetensors"):
        assert (one / latest / name).read_bytes() == (two / latest / name).read_bytes()
