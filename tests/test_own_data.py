"""The forms in which people have data: each of them right once, and wrong once or more, with the line that says so."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

import protofed as pf
from protofed.data import Columns, Dataset, as_dataset, federate, load
from protofed.data.remarks import _said
from protofed.data.table import read_table
from support.errors import refusal

RNG = np.random.default_rng(0)
N = 60
X = RNG.normal(3, 2, (N, 4)).astype(np.float32)
WORDS = np.array(["ash", "birch", "cedar"])[np.arange(N) % 3]
NUMBERS = np.arange(N) % 3
SITES = np.array(["mill", "farm"])[(np.arange(N) // 5) % 2]
SCALED = (X - X.mean(0)) / X.std(0)


def columns(**more: Any) -> dict[str, Any]:
    return {**{name: X[:, k] for k, name in enumerate("pqrs")}, "label": WORDS, "site": SITES, **more}


def frame(**more: Any) -> Any:
    return pytest.importorskip("pandas").DataFrame(columns(**more))


def polars_frame() -> Any:
    return pytest.importorskip("polars").DataFrame(columns())


def hugging_face() -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({k: v.tolist() for k, v in columns().items()})


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(zip(X, WORDS, strict=True))


class Items(torch.utils.data.Dataset):  # type: ignore[type-arg]
    classes = ["ash", "birch", "cedar"]

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(X[i]), int(NUMBERS[i])


TENSORS = TensorDataset(torch.from_numpy(X), torch.from_numpy(NUMBERS))
FORMS: dict[str, Callable[[], Any]] = {
    "arrays": lambda: (X, WORDS),
    "lists": lambda: (X.tolist(), WORDS.tolist()),
    "tensors": lambda: (torch.from_numpy(X), torch.from_numpy(NUMBERS)),
    "arrays with sites": lambda: (X, WORDS, SITES),
    "named arrays": lambda: {"x_train": X, "y_train": WORDS, "group_train": SITES},
    "pandas": frame,
    "polars": polars_frame,
    "polars, lazy": lambda: polars_frame().lazy(),
    "frame and labels": lambda: (frame()[list("pqrs")], WORDS),
    "frame, labels and sites": lambda: (frame()[list("pqrs")], frame().label, SITES),
    "torch": lambda: TENSORS,
    "torch items": Items,
    "torch stream": Stream,
    "loader": lambda: DataLoader(TENSORS, batch_size=7, shuffle=True),
    "hugging face": hugging_face,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_data_in_every_form(form: str) -> None:
    data = as_dataset(FORMS[form]())
    np.testing.assert_allclose(data.x_train.numpy(), SCALED, atol=1e-5)
    assert data.y_train.tolist() == NUMBERS.tolist() and data.num_classes == 3 and data.x_test is None
    assert data.class_names in ((), ("ash", "birch", "cedar"))
    assert load(FORMS[form](), standardise="none").x_train.numpy() == pytest.approx(X)
    if data.group_train is not None:
        assert data.group_names == ("farm", "mill")
        assert [data.group_names[g] for g in data.group_train] == SITES.tolist()


PARTED: dict[str, Callable[[], Any]] = {
    "arrays": lambda: (X[:48], WORDS[:48], X[48:], WORDS[48:]),
    "frames": lambda: (frame()[:48], frame()[48:]),
    "frames and labels": lambda: (
        *(frame()[list("pqrs")][:48], WORDS[:48]),
        *(frame()[list("pqrs")][48:], WORDS[48:]),
    ),
    "a column": lambda: frame(split=["train"] * 48 + ["Test"] * 12),
    "torch": lambda: (Subset(TENSORS, range(48)), Subset(TENSORS, range(48, N))),
    "hugging face": lambda: pytest.importorskip("datasets").DatasetDict(
        {"train": hugging_face().select(range(48)), "test": hugging_face().select(range(48, N))}
    ),
}


@pytest.mark.parametrize("form", PARTED)
def test_a_test_part_in_every_form(form: str) -> None:
    data = as_dataset(PARTED[form]())
    mean, std = X[:48].mean(0), X[:48].std(0)
    assert data.x_test is not None and data.y_test is not None
    np.testing.assert_allclose(data.x_train.numpy(), (X[:48] - mean) / std, atol=1e-5)
    np.testing.assert_allclose(data.x_test.numpy(), (X[48:] - mean) / std, atol=1e-5)
    assert data.y_test.tolist() == NUMBERS[48:].tolist()


def by_site(form: str) -> dict[str, Any]:
    rows = {"river": range(20), "hill": range(20, N)}
    table = frame().drop(columns="site")
    parts: dict[str, Callable[[Any], Any]] = {
        "arrays": lambda r: (X[list(r)], WORDS[list(r)]),
        "frames": lambda r: table.iloc[list(r)],
        "torch": lambda r: Subset(TENSORS, r),
        "data sets": lambda r: Dataset.from_arrays(X[list(r)], WORDS[list(r)]),
    }
    return {site: parts[form](r) for site, r in rows.items()}


@pytest.mark.parametrize("form", ["arrays", "frames", "torch", "data sets"])
def test_one_data_set_for_each_site(form: str) -> None:
    data = as_dataset(by_site(form))
    np.testing.assert_allclose(data.x_train.numpy(), SCALED, atol=1e-5)
    assert data.group_train is not None and data.y_train.tolist() == NUMBERS.tolist()
    assert [data.group_names[g] for g in data.group_train] == ["river"] * 20 + ["hill"] * 40
    clients = federate(data, "natural", seed=0)
    assert sorted(clients.client_names) == ["hill", "river"] and clients.name_of(5) == "client 5"
    listed = as_dataset(list(by_site(form).values()))
    assert listed.group_names == ("site 0", "site 1")


def test_sites_may_have_other_classes_and_some_may_have_test_rows() -> None:
    data = as_dataset({"a": (X[:6], ["u", "v"] * 3, X[6:8], ["u", "v"]), "b": (X[8:14], ["w", "v"] * 3)})
    assert data.class_names == ("u", "v", "w") and data.y_train.tolist() == [0, 1] * 3 + [2, 1] * 3
    assert data.group_test is not None and data.group_test.tolist() == [0, 0]
    federated = federate(data, "natural", seed=0, test="local", test_share=0.34)
    assert [len(c.test) for c in federated.clients] == [2, 2]
    assert any("a site without test rows" in remark and remark.endswith(": b") for remark in federated.remarks)


BAD: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (lambda: X, {}, "data is ndarray of shape (60, 4) alone, without labels; expected a tuple (x, y)"),
    (lambda: (X, WORDS, X, WORDS, X), {}, "data is a tuple of 5 arrays"),
    (lambda: (X, WORDS[:5]), {}, "a tuple of arrays of shape (60, 4), (5,); expected x [n, ...] and then y [n]"),
    (lambda: (X, NUMBERS + 1), {}, "has the labels 1, 2, 3; expected integers from 0 to 2 without gaps (classes=1,2,3"),
    (lambda: (X, X[:, 0]), {}, "which is no whole number: this looks like regression"),
    (lambda: (X, np.where(NUMBERS, NUMBERS, np.nan)), {}, "y_train: 20 of 60 labels are missing"),
    (lambda: (X, np.array(["a", *range(59)], object)), {}, "mixes words and numbers: 1 of 60"),
    (lambda: (X, WORDS), {"classes": ("ash", "elm")}, "has the label 'birch', 'cedar'; known classes: ash, elm"),
    (lambda: (X, WORDS), {"labell": "x"}, "'labell'; did you mean 'label'?"),
    (lambda: (X, WORDS), {"standardise": "some"}, "standardise='some': Input should be 'all', 'site' or 'none'"),
    (
        frame,
        {"label": "tree"},
        "no column 'tree'; found p, q, r, s, label, site (name the right one with label=COLUMN)",
    ),
    (frame, {"site": "label"}, "label, site and split must be different columns"),
    (
        lambda: frame(p=[None, *X[1:, 0]]),
        {},
        "missing values in column 'p' (1 of 60); fill them in, or choose missing=",
    ),
    (lambda: frame(day=np.datetime64("2020-01-01")), {}, "column 'day' holds dates or times"),
    (lambda: frame(patient=[f"p{i}" for i in range(N)]), {}, "column 'patient' has 60 different words in 60 rows"),
    (lambda: frame(split="valid"), {}, "column 'split' has 'valid'; expected train or test in each row"),
    (lambda: frame(split="test"), {}, "says test in every row"),
    (lambda: frame(q=np.inf), {}, "NaN or infinity"),
    (lambda: TensorDataset(torch.zeros(3, 2)), {}, "a TensorDataset of 1 tensors; expected two, samples and labels"),
    (lambda: DataLoader([(1, 2)]), {}, "sample 0 is"),  # type: ignore[arg-type]
    (lambda: {"a": (X, WORDS), "b": (X[:, :3], WORDS)}, {}, "data of 'b': a sample has shape (3,)"),
    (lambda: {"a": frame(), "b": frame()}, {}, "'a' has a column 'site' already"),
    (
        lambda: {"a": frame()[["p", "label"]], "b": frame()[["q", "label"]]},
        {},
        "'b' has no column p, as 'a' has; all need the same columns",
    ),
    (lambda: {"a": frame(), "b": (X, WORDS)}, {}, "data of 'a' is a table and others are arrays"),
    (lambda: {"a": (X, WORDS), "b": (X, NUMBERS)}, {}, "mixes words and numbers"),
    (lambda: [], {}, "expected a tuple (x, y)"),
    (lambda: hugging_face().rename_column("label", "tree"), {}, "no column 'label'; found p, q, r, s, tree, site"),
    (lambda: pytest.importorskip("datasets").DatasetDict({"dev": hugging_face()}), {}, "no split 'train'; found dev"),
]


@pytest.mark.parametrize(("form", "options", "said"), BAD)
def test_what_is_wrong_is_one_line(form: Callable[[], Any], options: dict[str, Any], said: str) -> None:
    text = refusal(lambda: as_dataset(form(), **options))
    assert said in text and "\n" not in text


def test_labels_are_words_booleans_or_whole_floats() -> None:
    assert as_dataset((X, NUMBERS > 0)).class_names == ("false", "true")
    assert as_dataset((X, NUMBERS.astype(float))).y_train.tolist() == NUMBERS.tolist()
    data = as_dataset((X, NUMBERS + 1), classes=(3, 2, 1))
    assert data.class_names == ("3", "2", "1") and data.y_train.tolist() == (2 - NUMBERS).tolist()
    assert as_dataset((X, np.array(["10", "9"])[NUMBERS % 2])).class_names == ("9", "10"), "in the order of numbers"


def test_a_loaders_sampler_counts_and_its_shuffling_does_not() -> None:
    some = as_dataset(DataLoader(TENSORS, sampler=SubsetRandomSampler([7, 3, 4, 11, 5])), standardise="none")
    np.testing.assert_array_equal(some.x_train.numpy(), X[[3, 4, 5, 7, 11]])
    batches = as_dataset(DataLoader(Stream(), batch_size=None), standardise="none")
    np.testing.assert_array_equal(batches.x_train.numpy(), X)


def test_arrays_in_one_column_are_samples() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"x": datasets.Sequence(datasets.Value("float32")), "label": datasets.ClassLabel(names=["u", "v", "w"])}
    )
    data = as_dataset(datasets.Dataset.from_dict({"x": X.tolist(), "label": NUMBERS.tolist()}, features=features))
    np.testing.assert_allclose(data.x_train.numpy(), SCALED, atol=1e-5)
    assert data.class_names == ("u", "v", "w") and data.columns is None


def test_run_compare_sweep_and_resume_take_them(tmp_path: Path) -> None:
    small = {"rounds": 1, "partition": "natural", "model": "mlp", "hidden": 8, "embedding": 4}
    table = frame().rename(columns={"label": "tree"})
    result = pf.run("fedproto", data=table, label="tree", standardise="site", out=tmp_path / "run", **small)
    assert result.summary["client_names"] == ["farm", "mill"]
    stored = (tmp_path / "run" / "settings.toml").read_text()
    assert 'label = "tree"' in stored and 'standardise = "site"' in stored
    (tmp_path / "run" / "summary.json").unlink()
    assert pf.resume(tmp_path / "run", data=table).summary["last_round"] == result.summary["last_round"]
    assert "data is not what the run began with" in refusal(
        lambda: ((tmp_path / "run" / "summary.json").unlink(), pf.resume(tmp_path / "run", data=table[:50]))
    )
    compared = pf.compare(["fedproto"], data={"a": (X, WORDS), "b": (X + 1, WORDS)}, seeds=1, jobs=1, **small)
    assert compared.results["fedproto"][0].summary["client_names"] == ["a", "b"]
    swept = pf.sweep(["local"], over={"data": [(X, WORDS, SITES)]}, seeds=1, jobs=1, **small)
    assert len(swept.results) == 1


# --- tables -----------------------------------------------------------------------------------------------------------
TABLE = """alcohol,colour,site,label
1.5,red,north,good
2.5,white,north,bad
3.5,red,south,good
4.5,white,south,bad
0.5,rosé,south,good
"""


def write(tmp_path: Path, text: str = TABLE, name: str = "wine.csv") -> Path:
    file = tmp_path / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return file


@pytest.mark.parametrize("name", ["wine.csv", "wine.tsv", "wine.csv.gz", "wine.parquet", "wine.feather"])
def test_a_table_of_features(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if name.endswith((".parquet", ".feather")):
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        table = pandas.read_csv(write(tmp_path))
        (table.to_parquet if name.endswith(".parquet") else table.to_feather)(file)
    else:
        write(tmp_path, TABLE.replace(",", "\t") if name.endswith(".tsv") else TABLE, name)
    data = load(str(file), standardise="none")
    expected = [[1.5, 1, 0, 0], [2.5, 0, 0, 1], [3.5, 1, 0, 0], [4.5, 0, 0, 1], [0.5, 0, 1, 0]]
    assert data.x_train.tolist() == expected and data.y_train.tolist() == [1, 0, 1, 0, 1]
    assert data.class_names == ("bad", "good") and data.group_names == ("north", "south") and data.name == name
    assert data.columns is not None and data.columns.features == (
        "alcohol",
        "colour=red",
        "colour=rosé",
        "colour=white",
    )
    assert data.columns.kinds == ("number", "category")


def test_semicolons_row_numbers_and_other_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = '"";"density";"quality";"ward"\n0; 1.5 ;5;a\n1;2.5;6;b\n2;?;6;b\n'
    data = load(write(tmp_path, text), label="quality", site="ward", classes="5,6", missing="mean", standardise=False)
    assert data.x_train.flatten().tolist() == [1.5, 2.5, 2.0] and data.class_names == ("5", "6")
    assert "a column without a name (row numbers?) is left out" in caplog.text
    dropped = load(write(tmp_path, text), label="quality", site="ward", classes="5,6", missing="drop")
    assert len(dropped.y_train) == 2 and "1 of 3 rows are left out" in caplog.text


def test_parts_of_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path, "f,split,label\n1,train,0\n2,TEST,1\n3,train,1\n")
    data = load(file, standardise="none")
    assert data.x_train.flatten().tolist() == [1, 3] and data.y_test is not None and data.y_test.tolist() == [1]
    other = write(tmp_path, "label,f,colour\n1,9,pink\n", "later.csv")
    first = write(tmp_path, "f,colour,label\n1,red,0\n2,blue,1\n", "first.csv")
    data = load(first, path_test=str(other), standardise="none")
    assert data.x_test is not None and data.x_test.tolist() == [[9, 0, 0]], "a word that training does not have"
    assert "column 'colour' has 'pink', which the training data does not have" in caplog.text
    feature = load(write(tmp_path, "split,label\n1,0\n2,1\n"), split="none", standardise="none")
    assert feature.columns is not None and feature.columns.names == ("split",)
    left = load(write(tmp_path, "f,split,label\n1,dev,0\n2,dev,1\n"), drop="split", standardise="none")
    assert left.columns is not None and left.columns.names == ("f",)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("f,g\n1,2\n", {}, "no column 'label'; found f, g (name the right one with label=COLUMN)"),
        ("f,label\n", {}, "no rows in it; its columns are f, label"),
        ("", {}, "no rows in it; its columns are none"),
        ("f,f,label\n1,2,0\n", {}, "two columns are called 'f'"),
        ("1.5,2.5,0\n1,2,0\n", {}, "its first line has numbers, 1.5, 2.5, 0 …; expected the names of the columns"),
        ("f,label\n1,0\n1,2,3\n", {}, "line 3: 3 fields, but the header has 2"),
        ("f,label\n1,a\n,b\nNA,b\n", {}, "missing values in column 'f' (2 of 3)"),
        ("f,label\n1,a\n2,\n", {}, "column 'label': 1 of 2 labels are missing"),
        ("f,label\n,a\n,b\n", {"missing": "mean"}, "column 'f' has no value in any row; leave it out with drop=f"),
        ("f,label\n1,1.5\n2,0\n", {}, "column 'label' has the label 1.5, which is no whole number"),
        ("f,label\n1,1\n2,3\n", {}, "column 'label' has the labels 1, 3; expected integers from 0 to 1 without gaps"),
        ("label,site\n0,a\n1,b\n", {}, "no column of features beside label, site"),
        ("f,site,label\n1,,0\n2,b,1\n", {}, "column 'site': 1 of 2 are missing"),
        (
            "f,label\n1,0\n2,1\n",
            {"site": "ward"},
            "no column 'ward'; found f, label (name the right one with site=COLUMN)",
        ),
        ("f,label\n1,0\n2,1\n", {"missing": "zero"}, "missing='zero'"),
    ],
)
def test_tables_that_are_not_right(text: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    refused = refusal(lambda: load(write(tmp_path, text), **options))
    assert said in refused and "\n" not in refused


def test_texts_or_features(tmp_path: Path) -> None:
    pages = write(tmp_path, "text,label,words\nsome words,a,2\nmore words,b,2\n")
    assert load(pages, length=4).x_train.dtype == torch.int64
    assert load("table", path=str(pages), drop="text", standardise="none").x_train.tolist() == [[2], [2]]
    notes = write(tmp_path, "note,ward\nsome words,a\nmore words,b\n", "notes.csv")
    assert load(notes, text="note", label="ward", length=4).class_names == ("a", "b"), (
        "a setting of texts says what it is"
    )
    text = refusal(lambda: load(notes, text="note", missing="mean"))
    assert "text is a setting of texts and missing one of tables of features" in text
    assert "no such file" in refusal(lambda: load(tmp_path / "none.csv"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 junk")
    assert "bad.parquet: not a parquet file, or damaged" in refusal(lambda: load(tmp_path / "bad.parquet"))


def test_a_new_table_is_encoded_as_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = load(write(tmp_path), standardise="none")
    assert data.columns is not None
    again = Columns.from_dict(json.loads(json.dumps(data.columns.to_dict())))
    assert again == data.columns
    np.testing.assert_array_equal(again.encode(read_table(tmp_path / "wine.csv")), data.x_train.numpy())
    assert not caplog.records
    new = write(tmp_path, "colour,year,alcohol\ngreen,2020,7\nred,2021,8\n", "new.csv")
    assert again.encode(new).tolist() == [[7, 0, 0, 0], [8, 1, 0, 0]]
    assert "left out: year" in caplog.text and "'green', which the training data does not have" in caplog.text
    assert "no column alcohol; found colour" in refusal(lambda: again.encode({"colour": ["red"]}))
    assert "column 'alcohol' has 'much'; expected numbers" in refusal(
        lambda: again.encode({"colour": ["red"], "alcohol": ["much"]})
    )
    assert "1 of 2 values of column 'alcohol' are missing" in refusal(
        lambda: again.encode({"colour": ["red", "red"], "alcohol": [1.0, None]})
    )
    assert "not an encoding of columns" in refusal(lambda: Columns.from_dict({"columns": [{}]}))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.sampled_from(["x", "y z", "é", "10"])), min_size=1),
    order=st.permutations(["number", "word", "label"]),
)
def test_an_encoding_is_its_own_inverse(rows: list[tuple[float, str]], order: list[str]) -> None:
    numbers, words = (list(column) for column in zip(*rows, strict=True))
    table = {"number": numbers, "word": words, "label": [0] * len(rows)}
    encoding = Columns.of({k: np.asarray(v, object if k == "word" else float) for k, v in table.items()}, ("label",))
    encoding = Columns.from_dict(json.loads(json.dumps(encoding.to_dict())))
    encoded = encoding.encode({name: table[name] for name in order})
    assert encoded[:, 0].tolist() == numbers
    categories = encoding.categories.get("word")
    if categories is None:  # every word was a number
        assert encoded[:, 1].tolist() == [10.0] * len(rows)
    else:
        assert [categories[k] for k in encoded[:, 1:].argmax(1)] == words and (encoded[:, 1:].sum(1) == 1).all()


# --- .npy, folders of sites -------------------------------------------------------------------------------------------
def test_npy(tmp_path: Path) -> None:
    for name, array in (("x", X), ("y", WORDS), ("who", SITES)):
        np.save(tmp_path / f"{name}.npy", array)
    x, y, who = (str(tmp_path / f"{name}.npy") for name in ("x", "y", "who"))
    data = load(x, labels_file=y, sites_file=who)
    np.testing.assert_allclose(data.x_train.numpy(), SCALED, atol=1e-5)
    assert data.class_names == ("ash", "birch", "cedar") and data.group_names == ("farm", "mill")
    assert f"{x}: one array of shape (60, 4), without labels; give labels_file=" in refusal(lambda: load(x))
    assert "y2.npy: no such file; expected an .npy file" in refusal(
        lambda: load(x, labels_file=str(tmp_path / "y2.npy"))
    )
    np.save(tmp_path / "o.npy", np.array([{}], object))
    assert "not an .npy file of plain values" in refusal(lambda: load(tmp_path / "o.npy", labels_file=y))
    assert "60 train samples but group ids of shape (3,)" in refusal(
        lambda: load(x, labels_file=who, sites_file=_short(tmp_path))
    )


def _short(tmp_path: Path) -> str:
    np.save(tmp_path / "short.npy", np.arange(3))
    return str(tmp_path / "short.npy")


def test_a_folder_of_one_file_a_site(tmp_path: Path) -> None:
    folder = tmp_path / "sites"
    folder.mkdir()
    write(folder, "f,colour,label\n1,red,a\n2,blue,b\n", "north.csv")
    write(folder, "label,f,colour\nb,3,red\nc,4,green\n", "south.csv.gz")
    (folder / ".hidden.csv").write_text("junk")
    data = load(folder, standardise="none")
    assert data.x_train.tolist() == [[1, 0, 0, 1], [2, 1, 0, 0], [3, 0, 0, 1], [4, 0, 1, 0]]
    assert data.group_names == ("north", "south") and data.class_names == ("a", "b", "c") and data.name == "sites"
    write(folder, "f,label\n1,a\n", "west.csv")
    assert "'west' has no column colour, as 'north' has" in refusal(lambda: load(folder))
    np.savez(folder / "east.npz", x_train=X, y_train=NUMBERS)
    assert "all tables or all .npz files; found both" in refusal(lambda: load(folder))


def test_a_folder_of_archives(tmp_path: Path) -> None:
    np.savez(tmp_path / "hill.npz", x_train=X[:20], y_train=NUMBERS[:20] % 2, x_test=X[20:22], y_test=[0, 1])
    np.savez(tmp_path / "river.npz", x_train=X[20:40], y_train=NUMBERS[20:40])
    data = load(tmp_path, standardise="none")
    assert data.group_names == ("hill", "river") and len(data.y_train) == 40 and data.num_classes == 3
    np.savez(tmp_path / "sea.npz", x_train=X[:, :2], y_train=NUMBERS)
    assert "data of 'sea': a sample has shape (2,)" in refusal(lambda: load(tmp_path))


def test_images_of_sites(tmp_path: Path) -> None:
    from PIL import Image

    for site, classes in (("clinic", "ab"), ("ward", "bc")):
        for name in classes:
            (tmp_path / site / name).mkdir(parents=True)
            Image.new("L", (4, 4), ord(name)).save(tmp_path / site / name / "0.png")
    data = load(tmp_path, standardise="none")
    assert data.class_names == ("a", "b", "c") and data.y_train.tolist() == [0, 1, 1, 2]
    assert data.group_train is not None and data.group_train.tolist() == [0, 0, 1, 1]
    assert data.group_names == ("clinic", "ward")
    (tmp_path / "empty").mkdir()
    assert "'clinic' has folders in it and 'empty' has none; expected images in" in refusal(lambda: load(tmp_path))


# --- scaling ----------------------------------------------------------------------------------------------------------
def sites_dataset(seed: int = 0, parts: bool = False) -> Dataset:
    rng = np.random.default_rng(seed)
    y, site = rng.integers(0, 2, 90), np.repeat([0, 1, 2], 30)
    x = rng.normal(size=(90, 3)) * (1 + site[:, None]) + 10 * site[:, None] + y[:, None]
    more = {"x_test": x[:6] + 1, "y_test": y[:6]} if parts else {}
    return Dataset.from_arrays(x, y, group_train=site, name="places", **more)


@pytest.mark.parametrize("test", ["central", "local"])
@pytest.mark.parametrize("scaling", ["all", "site"])
def test_test_rows_never_count(test: Any, scaling: Any) -> None:
    raw = sites_dataset()
    plain = federate(raw, "natural", seed=1, test=test, validation_share=0.2)
    tested = torch.cat([c.test.index for c in plain.clients]).unique()
    other = raw.x_train.clone()
    other[tested] = other[tested] * 50 - 7
    first, second = (
        federate(data.standardised(scaling), "natural", seed=1, test=test, validation_share=0.2)
        for data in (raw, Dataset.from_arrays(other, raw.y_train, group_train=raw.group_train))
    )
    for k, (a, b) in enumerate(zip(first.clients, second.clients, strict=True)):
        torch.testing.assert_close(a.labelled.take()[0], b.labelled.take()[0], atol=1e-4, rtol=1e-4)
        for one, two in zip(first.scaling(k), second.scaling(k), strict=True):
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("test", ["central", "local"])
def test_each_site_by_its_own_rows(test: Any, parts: bool) -> None:
    raw = sites_dataset(parts=parts)
    options: dict[str, Any] = {
        "seed": 1,
        "test": test,
        "validation_share": 0.2,
        "labels": "client",
        "labels_per_class": 4,
    }
    plain = federate(raw, "natural", **options)
    scaled = federate(raw.standardised("site"), "natural", **options)
    for k, (before, after) in enumerate(zip(plain.clients, scaled.clients, strict=True)):
        assert before.unlabelled is not None and after.unlabelled is not None
        assert before.validation is not None and after.validation is not None
        rows = torch.cat([before.labelled.take()[0], before.unlabelled.take(), before.validation.take()[0]])
        mean, std = rows.mean(0), rows.std(0, correction=0)
        pairs = [(before.labelled.take()[0], after.labelled.take()[0]), (before.test.take()[0], after.test.take()[0])]
        pairs += [(before.unlabelled.take(), after.unlabelled.take())]
        pairs += [(before.validation.take()[0], after.validation.take()[0])]
        for x, z in pairs:
            torch.testing.assert_close(z, (x - mean) / std, atol=1e-4, rtol=1e-4)
        assert torch.equal(before.test.labels, after.test.labels)
        own_mean, own_std = scaled.scaling(k)
        torch.testing.assert_close(own_mean, mean, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own_std, std, atol=1e-4, rtol=1e-4)
        assert plain.central_test is not None
        central = scaled.central_for(k)
        assert central is not None and plain.central_for(k) is plain.central_test
        torch.testing.assert_close(central.take()[0], (plain.central_test.take()[0] - mean) / std, atol=1e-3, rtol=1e-3)
    assert torch.equal(sites_dataset(parts=parts).x_train, raw.x_train), "the data set itself is left as it is"


def test_a_simulated_site_is_scaled_as_a_real_one() -> None:
    raw = Dataset.from_arrays(X, WORDS, X[::3] + 1, WORDS[::3], group_train=SITES, group_test=SITES[::3])
    simulated = federate(raw.standardised("site"), "natural", seed=0, test="local")
    assert (
        raw.group_train is not None and raw.group_test is not None and raw.x_test is not None and raw.y_test is not None
    )
    for client, here in enumerate(simulated.clients):
        rows, tests = raw.group_train == client, raw.group_test == client
        own = Dataset.from_arrays(
            raw.x_train[rows], raw.y_train[rows], raw.x_test[tests], raw.y_test[tests], class_names=raw.class_names
        )
        there = federate(own.standardised(), "iid", 1, seed=0).clients[0]  # as a site does, in deploy/node.py
        torch.testing.assert_close(here.labelled.take()[0], there.labelled.take()[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(here.test.take()[0], there.test.take()[0], atol=1e-4, rtol=1e-4)


def test_what_comes_with_a_test_part_is_scaled_as_before() -> None:
    data = load("digits")
    federated = federate(data, "iid", 3, seed=0)
    assert federated.clients[0].labelled.x is data.x_train and federated.mean is data.mean
    assert load("digits", standardise="true").scaling == "all" and load("digits", standardise=False).scaling == "none"
    tokens = Dataset(torch.zeros(8, 4, dtype=torch.int64), torch.arange(8) % 2, num_classes=2).standardised("site")
    assert federate(tokens, "iid", 2, seed=0).site_mean is None


def test_a_constant_feature_keeps_its_unit_whatever_the_test_rows_are() -> None:
    raw = sites_dataset()
    tested = federate(raw, "natural", seed=1, test="local")
    rows = torch.cat([c.test.index for c in tested.clients])
    x = raw.x_train.clone()
    x[:, 0] = 5
    x[rows, 0] = 9
    data = federate(
        Dataset.from_arrays(x, raw.y_train, group_train=raw.group_train).standardised(), "natural", seed=1, test="local"
    )
    assert data.clients[0].test.take()[0][:, 0].tolist() == pytest.approx([4.0] * len(data.clients[0].test), abs=1e-4)


def test_a_run_with_sites_own_scaling_and_an_ensemble() -> None:
    result = pf.run(
        "fedproto",
        data=(X, WORDS, SITES),
        standardise="site",
        partition="natural",
        rounds=1,
        ensemble=True,
        hidden=8,
        embedding=4,
    )
    assert 0 <= result.summary["last_round"]["ensemble_head"] <= 1


# --- things that are said ---------------------------------------------------------------------------------------------
def test_test_groups_that_match_no_training_group() -> None:
    data = Dataset.from_arrays(
        X, WORDS, X + 1, WORDS, group_train=SITES, group_test=np.where(SITES == "mill", "Mill", "farm")
    )
    federated = federate(data, "natural", seed=0, test="local")
    text = "\n".join(federated.remarks)
    assert "nobody is tested on the test rows of sites that do not train: Mill (30 rows)" in text
    assert "a site without test rows, for which a share of its own training rows is held out: mill" in text
    none = Dataset.from_arrays(X, WORDS, X, WORDS, group_train=SITES, group_test=np.full(N, "x"), name="mine")
    assert "mine: no test row is of a site that trains; tests have x, training farm, mill" in refusal(
        lambda: federate(none, "natural", seed=0, test="local")
    )


def test_classes_copies_and_columns_are_remarked_on() -> None:
    data = as_dataset(
        frame(fixed=1.0, split=["train"] * 50 + ["test"] * 10, label=["oak"] + ["ash"] * 49 + ["elm"] * 5 + ["ash"] * 5)
    )
    text = "\n".join(federate(data, "natural", seed=0, test="local").remarks)
    assert "test samples of classes that no training sample has: elm (5)" in text
    assert "a class with one training sample: oak" in text
    assert "the same in every training row: fixed" in text
    assert "a site whose training samples are all of one class: farm" in text
    twice = Dataset.from_arrays(X, WORDS, X[:5], WORDS[:5])
    assert federate(twice, "iid", 2, seed=0).remarks == (
        "5 of 5 test samples are equal to a training sample, and easier than new ones",
    )
    assert federate(load("digits"), "iid", 3, seed=0).remarks == ()


def test_remarks_are_said_once_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    _said.cache_clear()
    caplog.set_level(logging.WARNING, "protofed")
    data = Dataset.from_arrays(X, WORDS, X[:5], WORDS[:5])
    compared = pf.compare(["fedavg"], data=data, partition="iid", clients=2, rounds=1, seeds=2, jobs=1, hidden=8)
    assert caplog.text.count("5 of 5 test samples are equal") == 1
    assert compared.results["fedavg"][0].summary["remarks"] == [
        "5 of 5 test samples are equal to a training sample, and easier than new ones"
    ]


def test_errors_name_the_site() -> None:
    data = as_dataset({"inn": (X[:1], WORDS[:1]), "mill": (X[1:], WORDS[1:])})
    text = refusal(lambda: federate(data, "natural", seed=0, test="local"))
    assert text.startswith("inn has 1 sample left; a test part of its own needs at least 2")
    lost = federate(data, "natural", seed=0)
    assert lost.client_names == ("mill",)
    assert "in-memory: a site all of whose rows are held out for tests: inn" in lost.remarks
    two = as_dataset({"inn": (X[:30], WORDS[:30]), "mill": (X[30:], WORDS[30:])})
    assert federate(two, "natural", 1, seed=0).client_names == ("inn + mill",)


# --- in words ---------------------------------------------------------------------------------------------------------
def test_a_data_set_in_a_line_and_in_a_notebook() -> None:
    data = as_dataset(frame(label=np.where(NUMBERS > 0, "<b>", "a")))
    assert repr(data) == (
        "Dataset 'in-memory': 60 training samples of 4 features, 2 classes (<b>, a), 2 sites (farm, mill), "
        "standardised by all"
    )
    federated = federate(data, "natural", seed=0)
    assert repr(federated) == (
        "FederatedData 'in-memory': 2 clients (farm, mill), 24 labelled samples a client, 2 classes (<b>, a)"
    )
    for html in (data._repr_html_(), federated._repr_html_()):
        assert "<th>farm</th>" in html and "&lt;b&gt;" in html and "<b>" not in html
    assert "<td>24</td><td>12</td>" in federated._repr_html_()
    assert repr(load("digits")).startswith(
        "Dataset 'digits': 1,438 training and 359 test samples of shape 1×8×8, 10 classes"
    )
