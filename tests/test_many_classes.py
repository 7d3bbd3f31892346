"""Many classes of which a client holds few: banks stay sparse, and rules in pieces do not depend on the number of cores."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protofed import aggregate, wire
from protofed.bank import LARGE, PrototypeBank, SparseBank
from protofed.data import Dataset
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation.guard import norms_of
from protofed.federation.local import ClientState
from protofed.federation.shared import SharedStates
from protofed.parts import Mean, Running, Upload
from protofed.pieces import in_pieces, on_cores
from protofed.wire import Bundle, WireError

C, D = 700, 200  # above LARGE


def bank(seed, held=5, classes=C, dim=D):
    g = torch.Generator().manual_seed(seed)
    counts = torch.zeros(classes)
    counts[torch.randperm(classes, generator=g)[:held]] = torch.randint(1, 9, (held,), generator=g).float()
    return PrototypeBank(torch.randn(classes, dim, generator=g) * (counts > 0)[:, None], counts)


def message(b, samples=50.0):
    return wire.encode(Bundle(bank=b, scalars={"samples": samples}))


EXPECTED = wire.Exchange(up=(wire.bank(),)).expected("up", {"classes": C, "dim": D}, {})


@pytest.mark.parametrize("weighted", [False, True])
def test_class_means_of_many_classes_equal_a_loop(weighted):
    g = torch.Generator().manual_seed(0)
    z, y = torch.randn(30, 4, generator=g, dtype=torch.float64), torch.randint(900, (30,), generator=g)
    y[:6] = y[0]
    weight = torch.rand(30, generator=g, dtype=torch.float64) if weighted else None
    w = torch.ones(30, dtype=torch.float64) if weight is None else weight
    found = PrototypeBank.from_embeddings(z, y, 900, weight)
    assert set(found.known.nonzero().flatten().tolist()) == set(y.tolist())
    for c in set(y.tolist()):
        of_class = [i for i in range(30) if int(y[i]) == c]
        torch.testing.assert_close(found.counts[c], sum(w[i] for i in of_class))
        torch.testing.assert_close(found.means[c], sum(w[i] * z[i] for i in of_class) / sum(w[i] for i in of_class))
    assert torch.autograd.gradcheck(
        lambda z: PrototypeBank.from_embeddings(z, y, 900, weight).means[y[:3]], z.requires_grad_()
    )
    stacked = torch.func.vmap(lambda z: PrototypeBank.from_embeddings(z, y, 900, weight).means)(torch.stack([z, -z]))
    assert torch.equal(stacked[0], found.means) and torch.equal(stacked[1], -found.means)


def test_a_large_upload_stays_the_rows_that_were_sent():
    banks = [bank(k, held=5 + k % 2) for k in range(4)]
    decoded = wire.decode_each([message(b) for b in banks], list("abcd"), EXPECTED, {"bank"})
    for b, bundle in zip(banks, decoded, strict=True):
        sparse = bundle.bank
        assert isinstance(sparse, SparseBank) and sparse.row_means.numel() == D * int(b.known.sum())
        assert (sparse.shape, sparse.num_classes, sparse.dim) == ((C, D), C, D)
        assert torch.equal(sparse.means, b.means) and torch.equal(sparse.counts, b.counts)
        assert torch.equal(sparse.known_means, b.known_means)
        assert norms_of(bundle) == norms_of(Bundle(bank=b))
        assert torch.equal(sparse.normalised().means, b.normalised().means)
        assert wire.encode(bundle) == message(b)
        assert isinstance(b.compact(), SparseBank) and torch.equal(b.compact().means, b.means)
    small = bank(0, classes=10, dim=4)
    assert small.compact() is small and C * D >= LARGE
    assert not isinstance(wire.decode(message(banks[0])).bank, SparseBank)  # as a client decodes it


@pytest.mark.parametrize(("spoil", "words"), [("nan", "NaN"), ("negative", "negative|not a protofed")])
def test_a_large_upload_is_checked(spoil, words):
    wrong = bank(1)
    row = int(wrong.known.nonzero()[0])
    if spoil == "nan":
        wrong.means[row, 3] = torch.nan
        text = message(wrong)
    else:
        text = bytearray(message(wrong))
        place = bytes(text).index(wrong.counts[wrong.known].numpy().tobytes())
        text[place : place + 4] = torch.tensor([-1.0]).numpy().tobytes()
    for others in ([], [message(bank(2))]):
        decoded = wire.decode_each([bytes(text), *others], ["bad", "good"][: 1 + len(others)], EXPECTED, {"bank"})
        assert isinstance(decoded[0], WireError) and decoded[0].args[0].startswith("bad")
        with pytest.raises(WireError, match=words):
            raise decoded[0]
        assert all(isinstance(bundle, Bundle) for bundle in decoded[1:])


@pytest.mark.parametrize("by", ["size", "holders", "directions"])
def test_sparse_rows_are_reduced_as_whole_banks_are(by):
    banks = [bank(k, held=300) for k in range(20)] + [bank(20, held=C)]
    whole, rows = Running(Mean(by)), Running(Mean(by))
    whole.add([Upload(k, 50.0, Bundle(bank=b)) for k, b in enumerate(banks)])
    sparse = [b.compact() for b in banks]
    assert [isinstance(b, SparseBank) for b in sparse] == [True] * 20 + [False]
    for part in (slice(0, 7), slice(7, None)):
        rows.add([Upload(k, 50.0, Bundle(bank=b)) for k, b in enumerate(sparse)][part])
    a, b = whole.result(), rows.result()
    assert torch.equal(a.bank.counts, b.bank.counts)
    torch.testing.assert_close(a.bank.means, b.bank.means, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.sums[""].means, b.sums[""].means, rtol=1e-5, atol=1e-5)


def test_a_large_bank_in_shared_memory_changes_its_classes():
    """Rows that a client no longer knows are not read, though they are still there."""
    states = SharedStates([{"w": torch.zeros(3)}], [0], True, (C, D))
    for seed in range(4):  # both slots are used twice
        b = bank(seed)
        states[0] = ClientState({"w": torch.full((3,), float(seed))}, bank=b)
        states.commit(0, states.pending[0], b"")
        found = states[0]
        assert torch.equal(found.bank.means, b.means) and torch.equal(found.bank.counts, b.counts)
        assert found.weights["w"].tolist() == [seed] * 3


def test_a_run_with_many_classes_is_the_same_in_workers_and_in_a_loop():
    g = torch.Generator().manual_seed(0)
    n, clients = 24, 3
    y = torch.randint(C, (n * clients,), generator=g)
    x = torch.randn(len(y), 6, generator=g)
    data = Dataset.from_arrays(x, y, x + 0.01, y, num_classes=C, group_train=torch.arange(clients).repeat_interleave(n))
    options = {"data": data, "partition": "natural", "rounds": 2, "batch": 8, "lr": 0.1}
    model = {"model": {"name": "mlp", "hidden": (), "embedding": D}}
    runs = []
    for engine in ({"engine": "loop"}, {"engine": "workers", "inner": "loop", "workers": 2}):
        _, federation = build(resolve("fedproto", options | model | engine))
        records = list(federation)
        runs.append((records, federation.state.bank, {c: s.bank for c, s in federation.engine.export().items()}))
        federation.engine.close()
    (one, first, own), (two, second, others) = runs
    assert torch.equal(first.means, second.means) and torch.equal(first.known, torch.bincount(y, minlength=C) > 0)
    assert [r.metrics for r in one] == [r.metrics for r in two] and one[-1].loss == two[-1].loss
    assert all(isinstance(b, SparseBank) and torch.equal(b.means, others[c].means) for c, b in own.items())


@pytest.mark.parametrize("cores", [2, 5])
def test_rules_in_pieces_do_not_depend_on_the_number_of_cores(cores):
    banks = PrototypeBank.stack([bank(k, held=60, classes=90, dim=8) for k in range(7)])
    start = aggregate.normalised_mean(banks)

    def results():
        refined = aggregate.refine(banks, start, steps=3, margin=-0.2, block=16)
        return aggregate.personalised(banks, block=2).means, refined.means

    alone = results()
    with on_cores(cores):
        assert in_pieces(lambda k: k * k, range(9)) == [k * k for k in range(9)]
        assert all(torch.equal(a, b) for a, b in zip(alone, results(), strict=True))


THREADS = """
import os, threading, torch
from protofed.pieces import in_pieces, on_cores
torch.set_num_threads(1)
x, together = torch.randn(600, 600), threading.Barrier(2)
def product(piece):
    together.wait(); x @ x; together.wait()
    return len(os.listdir("/proc/self/task"))
x @ x
before = len(os.listdir("/proc/self/task"))
with on_cores(2):
    print(*(now - before for now in in_pieces(product, range(2))))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts the threads of a process in /proc")
def test_a_helper_computes_with_one_thread():
    """Torch lets a new thread take as many of its own as there are cores, which then wait for each other."""
    assert subprocess.check_output([sys.executable, "-c", THREADS], text=True).split() == ["1", "1"]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_models_in_shared_memory_are_stacked_in_any_order_of_slots(taken, random):
    """A stack has each client's current model, or the initial one, wherever the models lie."""
    start = {"a": torch.full((2, 3), -1.0), "b": torch.full((1,), -2.0)}
    states = SharedStates([start], [0] * len(taken), True, (2, 4))
    expected = {}
    for client, times in enumerate(taken):
        expected[client] = start
        for time in range(times):
            expected[client] = {n: torch.full_like(v, 10.0 * client + time) for n, v in start.items()}
            states[client] = ClientState(expected[client], bank=PrototypeBank.empty(2, 4))
            states.commit(client, states.pending.pop(client), b"")
    clients = random.sample(range(len(taken)), random.randint(1, len(taken)))
    for order in (clients, sorted(clients), list(range(len(taken)))):
        stacked = states.stacked(order, start)
        for name in start:
            assert torch.equal(stacked[name], torch.stack([expected[c][name] for c in order]))
            assert stacked[name].is_contiguous()
        for client, state in states.for_training(order).items():
            assert all(torch.equal(state.weights[name], expected[client][name]) for name in start)
            assert state.bank is None and states[client].bank is not None
        assert list(states.for_training(order)) == [c for c in order if taken[c]]
    assert states.holders(clients) == {c for c in clients if taken[c]}


def test_models_of_several_architectures_in_shared_memory_are_stacked():
    """Clients of another architecture lie between those of a stack."""
    starts = [{"a": torch.zeros(2, 3)}, {"a": torch.zeros(5)}]
    owner = [0, 1, 0, 0, 1]
    states = SharedStates(starts, owner, True, (2, 4))
    for client in (0, 1, 2, 4):
        states[client] = ClientState({"a": torch.full_like(starts[owner[client]]["a"], 1.0 + client)})
        states.commit(client, states.pending.pop(client), b"")
    first = states.stacked([2, 3, 0], {"a": torch.full((2, 3), -1.0)})["a"]
    assert first[:, 1, 2].tolist() == [3.0, -1.0, 1.0] and first.shape == (3, 2, 3)
    assert states.stacked([1, 4], starts[1])["a"].tolist() == [[2.0] * 5, [5.0] * 5]


def test_an_error_in_a_piece_is_that_of_the_whole():
    def divide(piece):
        return 1 / piece

    for cores in (1, 2, 4):
        with on_cores(cores), pytest.raises(ZeroDivisionError):
            in_pieces(divide, [1, 2, 0, 4])
        with on_cores(cores):
            assert in_pieces(divide, [1, 2, 4]) == [1, 0.5, 0.25]
