"""What each client holds: pools that do not overlap, the right test rows, labels shown and hidden, and the pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from protofed.data import Dataset, FederatedData, counts_table, draw_counts, federate, load
from protofed.data.partitions import IID, Dirichlet, Natural, NWay, Pathological
from protofed.errors import ProtofedError
from support.marks import slow_but


def toy(train: int = 300, test: int = 100, classes: int = 5, groups: int = 0) -> Dataset:
    """Feature 0 of a sample is its row number, so what a client sees can be traced."""
    rng = np.random.default_rng(11)
    y_train = rng.permutation(np.arange(train) % classes)
    y_test = rng.permutation(np.arange(test) % classes)
    ids = {"group_train": np.arange(train) % groups, "group_test": np.arange(test) % groups} if groups else {}
    return Dataset.from_arrays(
        np.stack([np.arange(train), y_train], 1).astype(np.float32),
        y_train,
        None if not test else np.stack([1000 + np.arange(test), y_test], 1).astype(np.float32),
        None if not test else y_test,
        num_classes=classes,
        group_train=ids.get("group_train"),
        group_test=ids.get("group_test") if test else None,
        name="toy",
    )


def pools(data: FederatedData) -> list[np.ndarray]:
    """Rows of the training tensors in every pool but the test rows."""
    found = [] if data.server is None else [data.server.index]
    for client in data.clients:
        found += [p.index for p in (client.labelled, client.unlabelled, client.validation) if p is not None]
    return [f.numpy() for f in found]


def assert_disjoint(*parts: np.ndarray) -> None:
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)


def test_central_test_rows_are_those_of_the_clients_classes() -> None:
    dataset = toy()
    data = federate(dataset, Pathological(classes_per_client=2), 6, seed=1)
    assert data.central_test is not None and len(data.central_test) == 100
    for client in data.clients:
        own = client.labelled.labels.unique()
        assert client.classes.nonzero().flatten().tolist() == own.tolist() and len(own) == 2
        expected = torch.isin(dataset.y_test, own).nonzero().flatten()
        assert torch.equal(client.test.index, expected)
        assert client.test.x is dataset.x_test and client.labelled.x is dataset.x_train, "no copies"
        assert client.unlabelled is None and client.validation is None
    assert torch.equal(data.class_counts().sum(0), torch.bincount(dataset.y_train))
    assert data.held_back == [None] * 6
    assert data.name == "toy" and data.sample_shape == (2,) and data.num_classes == 5


def test_clients_with_the_same_classes_share_one_list_of_test_rows() -> None:
    data = federate(toy(), IID(), 4, seed=1)
    assert len({c.test.index.data_ptr() for c in data.clients}) == 1


def test_a_data_set_without_test_part_gives_one_up_before_it_is_dealt() -> None:
    dataset = toy(test=0)
    data = federate(dataset, "iid", 4, seed=3, test_share=0.25)
    assert data.central_test is not None and len(data.central_test) == 75
    assert torch.bincount(data.central_test.labels).tolist() == [15] * 5, "stratified"
    assert_disjoint(data.central_test.index.numpy(), *pools(data))
    assert sum(len(c.labelled) for c in data.clients) == 225


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 20),
    st.sampled_from(["central", "local"]),
    st.sampled_from(["all", "client", "server"]),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_pools_are_disjoint_and_nothing_is_lost(
    clients: int, test: str, labels: str, has_test: bool, validation: float, limited: bool, seed: int
) -> None:
    dataset = toy(test=80 if has_test else 0)
    data = federate(
        dataset,
        Dirichlet(alpha=0.2, min_size=3),
        clients,
        seed=seed,
        test=test,  # type: ignore[arg-type]
        validation_share=validation,
        labels=labels,  # type: ignore[arg-type]
        labels_per_class=3,
        server_labels=25 if labels == "server" else 0,
        unlabelled_limit=4 if limited else None,
    )
    used = pools(data)
    tested = [c.test.index.numpy() for c in data.clients]
    if test == "local":
        used += tested
    elif not has_test:
        assert data.central_test is not None
        used.append(data.central_test.index.numpy())
    assert_disjoint(*used)
    if not (limited and labels != "all"):
        assert sum(map(len, used)) == 300
    assert data.central_test is not None
    for i, client in enumerate(data.clients):
        assert len(client.test) >= 1
        assert (client.validation is not None and len(client.validation) >= 1) == (validation > 0)
        truth = data.held_back[i]
        if labels == "all":
            assert client.unlabelled is None and truth is None and len(client.labelled) >= 1
            seen = client.labelled.labels
        else:
            assert client.unlabelled is not None and truth is not None
            # feature 1 of a toy sample is its label: what is held back is the truth, in the pool's order
            assert torch.equal(client.unlabelled.take()[:, 1].long(), truth)
            assert not limited or len(client.unlabelled) <= 4
            seen = client.labelled.labels if labels == "client" else truth
        if labels == "client":
            per_class = torch.bincount(client.labelled.labels, minlength=5)
            assert per_class.max() <= 3 and torch.equal(per_class > 0, client.classes)
            assert bool(client.classes[truth].all())
        elif labels == "server":
            assert len(client.labelled) == 0
        if not (limited and labels == "server"):
            assert torch.equal(torch.bincount(seen, minlength=5) > 0, client.classes)
    if labels == "server":
        assert data.server is not None and torch.bincount(data.server.labels).tolist() == [5] * 5


def test_labels_at_the_client_are_fewer_where_it_has_fewer() -> None:
    y = np.repeat([0, 1, 2], [1, 4, 20])
    dataset = Dataset.from_arrays(np.zeros((25, 2), np.float32), y, np.zeros((3, 2), np.float32), np.arange(3))
    data = federate(dataset, IID(), 1, seed=0, labels="client", labels_per_class=5)
    (client,) = data.clients
    assert torch.bincount(client.labelled.labels).tolist() == [1, 4, 5]
    assert client.unlabelled is not None and len(client.unlabelled) == 15
    assert data.class_counts().tolist() == [[1, 4, 5]]
    assert data.class_counts(unlabelled=True).tolist() == [[1, 4, 20]]


def test_local_test_is_stratified_and_keeps_every_class_in_training() -> None:
    data = federate(toy(), IID(), 5, seed=2, test="local", test_share=0.2)
    for client in data.clients:
        assert len(client.test) == 12 and len(client.labelled) == 48
        assert set(client.test.labels.tolist()) <= set(client.labelled.labels.tolist())
    assert data.central_test is not None and len(data.central_test) == 100, "the data set's own test part stays"


def test_without_a_test_part_local_test_rows_together_are_the_central_ones() -> None:
    data = federate(toy(test=0), IID(), 5, seed=2, test="local")
    assert data.central_test is not None
    together = torch.cat([c.test.index for c in data.clients]).sort().values
    assert torch.equal(data.central_test.index, together)


def test_natural_clients_are_tested_on_their_own_rows() -> None:
    dataset = toy(groups=6)
    data = federate(dataset, Natural(), seed=0, test="local")
    assert len(data.clients) == 6, "one client a group id"
    assert dataset.group_train is not None and dataset.group_test is not None
    for i, client in enumerate(data.clients):
        assert set(dataset.group_train[client.labelled.index].tolist()) == {i}
        assert set(dataset.group_test[client.test.index].tolist()) == {i} and client.test.x is dataset.x_test
    fewer = federate(dataset, Natural(), 4, seed=0, test="local")
    assert [set(dataset.group_test[c.test.index].tolist()) for c in fewer.clients] == [{0, 4}, {1, 5}, {2}, {3}]


def test_a_natural_client_without_test_rows_gives_up_some_of_its_own() -> None:
    dataset = toy(groups=6)
    assert dataset.group_test is not None
    dataset.group_test[dataset.group_test == 2] = 77
    data = federate(dataset, Natural(), seed=0, test="local")
    client = data.clients[2]
    assert client.test.x is dataset.x_train and len(client.test) == 10
    assert_disjoint(client.test.index.numpy(), client.labelled.index.numpy())


def test_same_seed_same_data_and_streams_do_not_disturb_each_other() -> None:
    def rows(**options: object) -> list[list[int]]:
        data = federate(toy(), Dirichlet(alpha=0.5, min_size=5), 6, seed=9, **options)  # type: ignore[arg-type]
        return [
            sorted({*c.labelled.index.tolist(), *(c.validation.index.tolist() if c.validation else [])})
            for c in data.clients
        ]

    assert rows() == rows()
    assert rows() == rows(validation_share=0.2), "a validation part changes no partition"
    local = federate(toy(), Dirichlet(alpha=0.5, min_size=5), 6, seed=9, test="local")
    with_validation = federate(
        toy(), Dirichlet(alpha=0.5, min_size=5), 6, seed=9, test="local", validation_share=0.2, labels="client"
    )
    for a, b in zip(local.clients, with_validation.clients, strict=True):
        assert torch.equal(a.test.index, b.test.index)
    other = federate(toy(), Dirichlet(alpha=0.5, min_size=5), 6, seed=10)
    assert other.clients[0].labelled.index.tolist() != rows()[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": "centrall"}, "did you mean 'central'"),
        ({"labels": "some"}, "unknown labels: 'some'"),
        ({"test_share": 1.0}, "test_share=1.0: expected a share between 0 and 1"),
        ({"validation_share": 1.5}, "validation_share=1.5"),
        ({"labels": "client", "labels_per_class": 0}, "labels_per_class=0: expected at least 1"),
        ({"labels": "server"}, "labels='server' needs server_labels"),
        ({"server_labels": 3}, "server_labels=3 is less than one label for each of 5 classes"),
        ({"server_labels": 300}, "server_labels=300 leaves nothing of 300 training samples"),
        ({"server_labels": -1}, "server_labels=-1"),
        ({"unlabelled_limit": -1}, "unlabelled_limit=-1"),
        ({"clients": None}, "partition 'iid' needs a number of clients"),
        ({"partition": "natural", "clients": None}, "needs group ids"),
        ({"partition": NWay(shot=100)}, "shot=100, but class 0 has only 60 training samples"),
        ({"clients": 200, "test": "local"}, "client [0-9]+ has 1 sample left; a test part of its own needs at least 2"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(options: dict[str, object], message: str) -> None:
    given_options = {"partition": "iid", "clients": 4, **options}
    with pytest.raises(ProtofedError, match=message) as caught:
        federate(toy(), seed=0, **given_options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_client_none_of_whose_classes_is_tested_is_named() -> None:
    x = np.zeros((8, 2), np.float32)
    dataset = Dataset.from_arrays(
        x, np.repeat([0, 1], 4), x[:2], np.array([0, 0]), group_train=np.repeat([0, 1], 4), name="half"
    )
    with pytest.raises(ProtofedError, match="half: the test part has no sample of the classes of client 1: 1"):
        federate(dataset, Natural(), seed=0)


def test_n_way_with_labels_at_clients_as_fedsap_has_it() -> None:
    dataset = toy(train=3000)
    data = federate(
        dataset, NWay(way=2, shot=100, spread=0), 6, seed=1, labels="client", labels_per_class=20, unlabelled_limit=50
    )
    for client in data.clients:
        assert len(client.labelled) == 40 and client.unlabelled is not None and len(client.unlabelled) == 50


# --- pictures -----------------------------------------------------------------------------------------------------


def random_counts(clients: int, classes: int) -> torch.Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.poisson(30, (clients, classes)) * (rng.random((clients, classes)) < 0.4))


@pytest.mark.parametrize(("clients", "classes"), slow_but(((5, 3), (1, 1)), [(5, 3), (20, 10), (100, 100), (1, 1)]))
def test_pictures_are_drawn(tmp_path: Path, clients: int, classes: int) -> None:
    from PIL import Image

    file = tmp_path / "deep" / "who.png"
    draw_counts(random_counts(clients, classes), [], file)
    with Image.open(file) as image:
        assert image.width > 600 and image.height > 250
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20


@pytest.mark.slow
def test_the_suffix_chooses_the_format_and_files_repeat(tmp_path: Path) -> None:
    counts = random_counts(4, 3)
    for suffix, magic in (("svg", b"<?xml"), ("pdf", b"%PDF")):
        first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
        draw_counts(counts, ("x", "y", "z"), first)
        draw_counts(counts, ("x", "y", "z"), second)
        assert first.read_bytes().startswith(magic)
        assert first.read_bytes() == second.read_bytes()
    with pytest.raises(ProtofedError, match=r"a\.jpeg: expected a file name ending in \.png"):
        draw_counts(counts, (), tmp_path / "a.jpeg")


def printed(table: object, width: int = 100) -> str:
    console = Console(width=width, record=True, quiet=False, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_table_shows_every_count() -> None:
    counts = random_counts(6, 4)
    text = printed(counts_table(counts, ("cat", "dog", "a very long name", "d"), width=100))
    assert "a very l…" in text and "6 clients, 4 classes" in text and "not shown" not in text
    for client, row in enumerate(counts.tolist()):
        (line,) = [t for t in text.splitlines() if t.split()[:1] == [str(client)]]
        assert line.split()[1:-1] == [str(n) if n else "·" for n in row]
        assert line.split()[-1] == f"{sum(row):,}"


@pytest.mark.parametrize("classes", [10, 14, 20, 30, 60])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_table_fits_the_terminal(classes: int, width: int) -> None:
    names = [f"class number {c}" for c in range(classes)]
    text = printed(counts_table(random_counts(5, classes), names, width=width), width=400)
    lines = [t for t in text.splitlines() if t.split()[:1] and t.split()[0] in "01234"]
    assert len(lines) == 5 and max(len(t.rstrip()) for t in lines) <= max(width, 76)


def test_table_says_what_it_leaves_out() -> None:
    text = printed(counts_table(random_counts(70, 100), (), width=100))
    assert "30 more clients (40 to 69)" in text and "are not shown" in text
    assert "a block is about 2.0 classes" in text
    assert max(map(len, text.splitlines())) <= 100
    assert len([t for t in text.splitlines() if any(b in t for b in "░▒▓█")]) == 40


def test_scope_all_scores_every_client_on_the_whole_test_set():
    data = load("digits")
    options = {"partition": "n-way", "clients": 4, "seed": 1}
    own, whole = (federate(data, **options, scope=scope) for scope in ("own", "all"))
    assert data.y_test is not None
    for client, other in zip(own.clients, whole.clients, strict=True):
        assert torch.equal(client.labelled.index, other.labelled.index)
        assert client.classes[client.test.labels].all() and len(client.test) < len(other.test)
        assert torch.equal(other.test.labels, data.y_test)
    with pytest.raises(ProtofedError, match="scope='all' is for the central test set"):
        federate(data, **options, scope="all", test="local")
    with pytest.raises(ProtofedError, match="scope"):
        federate(data, **options, scope="every")  # type: ignore[arg-type]
