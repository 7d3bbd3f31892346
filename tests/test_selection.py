"""Who takes part: the random choice is what it was; the diverse one covers rare classes, and starves nobody."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed import seeds
from protofed.bank import PrototypeBank
from protofed.federation.selection import diverse_choice, random_choice


def generator(seed):
    return torch.Generator().manual_seed(seed)


def banks_of(held, dim=8, seed=0, spread=0.1):
    """Clients that hold the classes in `held [N, C]`: around one direction per class, `spread` apart."""
    held = torch.as_tensor(held, dtype=torch.bool)
    g = generator(seed)
    centres = torch.randn(held.shape[1], dim, generator=g)
    means = centres + spread * torch.randn(*held.shape, dim, generator=g)
    return PrototypeBank(means * held[..., None], held.float() * 5)


def chosen_often(banks, capability, k, rounds, seed=0):
    count = Counter()
    for t in range(rounds):
        count.update(diverse_choice(banks, capability, k, generator(1000 * seed + t)))
    return count


def test_the_random_choice_is_a_permutations_head():
    for seed in range(20):
        order = torch.randperm(13, generator=seeds.torch_stream(seed, "participation", 3))
        assert random_choice(13, 5, seeds.torch_stream(seed, "participation", 3)) == sorted(order[:5].tolist())
    assert random_choice(4, 4, generator(0)) == [0, 1, 2, 3]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_exactly_k_different_clients_in_order(data):
    n = data.draw(st.integers(1, 9))
    k = data.draw(st.integers(1, n))
    seed = data.draw(st.integers(0, 2**16))
    held = torch.rand(n, 4, generator=generator(seed)) < data.draw(st.floats(0, 1))
    capability = torch.rand(n, generator=generator(seed + 1)) + 0.01
    banks = banks_of(held, seed=seed)
    chosen = diverse_choice(banks, capability, k, generator(seed))
    assert len(chosen) == k == len(set(chosen)) and chosen == sorted(chosen) and set(chosen) <= set(range(n))
    assert chosen == diverse_choice(banks, capability, k, generator(seed))
    if k == n:
        assert chosen == list(range(n))


RARE = [[1, 1, 1, 1, 0, 0]] * 18 + [[1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 0, 1]]


def test_rare_classes_are_covered_in_far_more_rounds_than_by_random_choice():
    """20 clients, 4 a round; two classes are held by one client each."""
    banks = banks_of(RARE)
    rounds = 400
    covered = {"random": torch.zeros(6), "diverse": torch.zeros(6)}
    for t in range(rounds):
        for name, chosen in (
            ("random", random_choice(20, 4, generator(t))),
            ("diverse", diverse_choice(banks, torch.ones(20), 4, generator(t))),
        ):
            covered[name] += banks.known[chosen].any(0) / rounds
    assert covered["random"][4:].max() < 0.26  # 4 of 20
    assert covered["diverse"][4:].min() > 0.85
    assert (covered["diverse"][:4] > 0.99).all()


def test_nobody_is_left_out_for_ever():
    count = chosen_often(banks_of(RARE), torch.ones(20), 4, 400)
    assert set(count) == set(range(20)) and min(count.values()) > 10


def test_a_different_prototype_is_preferred_to_one_like_those_chosen():
    """All hold the same classes; client 5's prototypes point the other way. After one pick it is nearly certain."""
    means = torch.ones(6, 2, 4) * torch.tensor([1.0] * 5 + [-1.0])[:, None, None]
    banks = PrototypeBank(means, torch.ones(6, 2))
    count = chosen_often(banks, torch.ones(6), 2, 200)
    assert count[5] == 200  # the other way has distance 1, the rest the floor
    assert all(count[c] > 15 for c in range(5))


@pytest.mark.slow
def test_a_rare_classs_holder_is_drawn_by_its_gain():
    """One pick: class 0 is held by all four, class 1 by client 3 alone. Gains 1/4, 1/4, 1/4 and 5/4."""
    banks = banks_of([[1, 0], [1, 0], [1, 0], [1, 1]])
    rounds = 3000
    count = chosen_often(banks, torch.ones(4), 1, rounds)
    assert count[3] / rounds == pytest.approx(5 / 8, abs=0.04)
    assert count[0] / rounds == pytest.approx(1 / 8, abs=0.03)


@pytest.mark.slow
def test_among_equals_the_capable_are_preferred():
    banks = PrototypeBank(torch.ones(6, 3, 4), torch.ones(6, 3))
    capability = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 5.0])
    count = chosen_often(banks, capability, 1, 2000)
    assert count[5] / 2000 == pytest.approx(0.5, abs=0.05)
    count = chosen_often(banks, 1e30 * capability, 2, 500)  # and only the ratio counts
    assert min(count[5] - count[c] for c in range(5)) > 150


@pytest.mark.slow
def test_clients_never_heard_of():
    """All unknown: by capability. Some: each as likely as the most promising, and a silent one does not block the rest."""
    nobody = PrototypeBank(torch.zeros(4, 3, 5), torch.zeros(4, 3))
    count = chosen_often(nobody, torch.tensor([1.0, 1.0, 1.0, 3.0]), 1, 2000)
    assert count[3] / 2000 == pytest.approx(0.5, abs=0.05)
    banks = banks_of([[1, 1], [1, 0], [0, 0]])  # gains 1.5, 0.5 and that of the best
    count = chosen_often(banks, torch.ones(3), 1, 3000)
    assert count[2] / 3000 == pytest.approx(1.5 / 3.5, abs=0.04)
    assert count[1] / 3000 == pytest.approx(0.5 / 3.5, abs=0.04)


def test_what_stands_in_an_unknown_row_is_not_read():
    banks = banks_of(RARE)
    spoilt = PrototypeBank(torch.where(banks.known[..., None], banks.means, float("nan")), banks.counts)
    for t in range(20):
        assert diverse_choice(spoilt, torch.ones(20), 5, generator(t)) == diverse_choice(
            banks, torch.ones(20), 5, generator(t)
        )


@pytest.mark.parametrize(
    ("capability", "k", "message"),
    [
        (torch.ones(3), 2, r"capability \[N\], got \(4, 2, 8\) and \(3,\)"),
        (torch.ones(4), 5, "choose 5 of 4"),
        (torch.ones(4), 0, "choose 0 of 4"),
        (torch.tensor([1.0, 0.0, 1.0, 1.0]), 2, "above 0"),
        (torch.tensor([1.0, float("nan"), 1.0, 1.0]), 2, "above 0"),
    ],
)
def test_bad_input(capability, k, message):
    with pytest.raises(ValueError, match=message):
        diverse_choice(banks_of(torch.ones(4, 2)), capability, k, generator(0))
