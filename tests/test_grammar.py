"""The grammar: values, lists, pairs and choices, and that what is written is read back."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.errors import ProtofedError
from protofed.grammar import (
    Choice,
    Entry,
    parse_axes,
    parse_choice,
    parse_entry,
    parse_list,
    parse_pairs,
    parse_value,
    split,
    write_choice,
    write_value,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        (" 0.5 ", 0.5),
        ("1e-3", 0.001),
        ("true", True),
        ("True", "True"),
        ("none", "none"),
        ("iid", "iid"),
        ("", ""),
        ('"3"', "3"),
        ("'a, b'", "a, b"),
        ("[64, 32]", [64, 32]),
        ("64,32", [64, 32]),
        ("[]", []),
        ("[ ]", []),
        ("[cnn,mlp]", ["cnn", "mlp"]),
        ("cnn,mlp?embedding=32", ["cnn", "mlp?embedding=32"]),
        ("mlp?hidden=[64,32],cnn", ["mlp?hidden=[64,32]", "cnn"]),
        ("[64],[128,64]", [[64], [128, 64]]),
        ('"a,b",c', ["a,b", "c"]),
        ('{name="dirichlet", alpha=0.1}', {"name": "dirichlet", "alpha": 0.1}),
        ("a/b.npz", "a/b.npz"),
        ("hub:x=y", "hub:x=y"),
        ("it's", "it's"),
        ("it's,fine", ["it's", "fine"]),
        ("2020-01-01", "2020-01-01"),  # a folder, not a date
        ("12:30:00", "12:30:00"),
        ("5#a", "5#a"),  # no comment
        ("5 # a", "5 # a"),
        ("[1", "[1"),
        ("1]", "1]"),
        ("x]\nother = [1", "x]\nother = [1"),
        ("1]\nother = [1", "1]\nother = [1"),
    ],
)
def test_values(text, value):
    read = parse_value(text)
    assert read == value and type(read) is type(value)


def test_a_file_with_a_comma_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_value("a,b.npz") == ["a", "b.npz"]
    (tmp_path / "a,b.npz").touch()
    assert parse_value("a,b.npz") == "a,b.npz"
    assert parse_value(",".join(["0.25"] * 3000)) == [0.25] * 3000  # too long for a path


@pytest.mark.parametrize("text", ["a,", ",a", "a,,b", "[a,,b]"])
def test_nothing_between_two_commas(text):
    with pytest.raises(ProtofedError, match="nothing between two ','"):
        parse_value(text)


@pytest.mark.slow
def test_brackets_without_end_do_not_break_it():
    for text in ("[" * 3000, "{" * 500, '"' * 3):
        assert parse_value(text) == text
    with pytest.raises(ProtofedError, match="nested too deeply"):
        parse_value("[" * 3000 + "]" * 3000)


plain_values = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(blacklist_categories=("Cs",)), max_size=12),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc-_ .", min_size=1, max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(plain_values)
def test_a_written_value_is_read_back(value):
    read = parse_value(write_value(value))
    assert read == value and type(read) is type(value)


@settings(deadline=None)
@given(st.dictionaries(st.text("abcdefg_", min_size=1, max_size=5), plain_values, max_size=4))
def test_a_written_choice_is_read_back(options):
    assert parse_choice(write_choice("name", options), "thing") == Choice("name", options)


@settings(deadline=None)
@given(st.lists(plain_values, min_size=1, max_size=4))
def test_a_written_axis_is_read_back(values):
    assert parse_axes(["key=" + ",".join(map(write_value, values))]) == {"key": values}


@settings(deadline=None)
@given(st.text(st.characters(blacklist_categories=("Cs",)), max_size=30))
def test_any_text_is_a_value_or_one_line(text):
    try:
        value = parse_value(text)
    except ProtofedError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(value, bool | int | float | str | list | dict)
        assert not isinstance(value, float) or not math.isnan(value) or "nan" in text


def naive_split(text, at):
    """Divide letter by letter, where there are no quotes."""
    parts, depth = [""], 0
    for sign in text:
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(sign, 0)
        if sign == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


@settings(deadline=None)
@given(st.text("ab,&[]{} ", max_size=14))
def test_split_is_a_plain_loop_over_signs(text):
    depths = [sum({"[": 1, "{": 1, "]": -1, "}": -1}.get(s, 0) for s in text[: i + 1]) for i in range(len(text))]
    whole = all(depth >= 0 for depth in depths) and (not depths or depths[-1] == 0)
    expected = naive_split(text, ",")
    if whole and all(expected):
        assert split(text, ",", "here") == expected
    else:
        with pytest.raises(ProtofedError, match=r"^here: "):
            split(text, ",", "here")


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("a,b", ["a", "b"]),
        ("[a, b]", ["a", "b"]),
        ("(64, 32)", ["64", "32"]),
        ("64", ["64"]),
        ("", []),
        ("a,", ["a"]),
        ("cnn,mlp?hidden=[64,32]", ["cnn", "mlp?hidden=[64,32]"]),
        ("mlp?hidden=[64,32]", ["mlp?hidden=[64,32]"]),
        ("[x],[y]", ["[x]", "[y]"]),
    ],
)
def test_the_items_of_a_list_as_text(text, items):
    assert parse_list(text) == items


def test_pairs_and_entries():
    assert parse_pairs(["a=1", " b = x ", "a=2", "c=x=y", "d="]) == {"a": 2, "b": "x", "c": "x=y", "d": ""}
    entry = parse_entry(" upper  bound = fedavg ? labels = all & lr=0.1 ")
    assert entry == Entry("upper bound", "fedavg", "labels = all & lr=0.1")
    assert entry.settings == {"labels": "all", "lr": 0.1} and entry.text == "fedavg?labels = all & lr=0.1"
    assert parse_entry("a=b=c") == Entry("a=b", "c", "")
    assert parse_choice("clip?norm=1", "filter") == ("clip", {"norm": 1})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x?", "expected key=value after '?'"),
        ("x?a", "expected key=value, got 'a'"),
        ("x?=1", "expected key=value, got '=1'"),
        ("x?a=1&", "nothing between two '&'"),
        ("x?a=1&a=2", "'a' is given twice"),
        ("x?a=[1&b=2", "a bracket or quote is not closed"),
        ('x?a="1&b=2', "a bracket or quote is not closed"),
    ],
)
def test_wrong_choices_are_one_line(text, said):
    for parse in (lambda: parse_choice(text, "thing"), lambda: parse_entry(text).settings):
        with pytest.raises(ProtofedError) as error:
            parse()
        assert said in str(error.value) and "\n" not in str(error.value) and "x?" in str(error.value)
