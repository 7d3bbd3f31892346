"""The one grammar of the words of a command line: values, pairs, lists, and names with settings of their own.

    entry  = [label "="] choice              "upper bound=fedavg?labels=all&lr=0.1"
    choice = name ["?" pair {"&" pair}]      "trimmed?share=0.2"
    pair   = key "=" value                   "rounds=20"
    axis   = key "=" value {"," value}       "lr=0.01,0.05"
    value  = a value of TOML                 0.1, true, "a, b", [64, 32], {name = "dirichlet", alpha = 0.1}
           | "[" value {"," value} "]"       [cnn,mlp]: the items of a list need no quotes
           | value "," value {"," value}     cnn,mlp: a list of several items needs no brackets
           | text                            dirichlet, runs/mine.npz, mlp?hidden=64

`,` and `&` divide only outside of brackets and quotes. A quote opens where a value begins, so `it's` is plain text.
Spaces around a key, a value, a name or a label do not count. A text with commas that is the path of a file is that path.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ProtofedError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PLAIN = re.compile(r"[\w./:?=+~-]+")  # a text of these signs alone needs no quotes inside a list or a choice


class Choice(NamedTuple):
    """A name and the settings that were written after it."""

    name: str
    settings: dict[str, Any]


class Entry(NamedTuple):
    """A choice with a label; `query` is what stands after `?`, as it was written."""

    label: str
    name: str
    query: str

    @property
    def text(self) -> str:
        """The entry without its label."""
        return f"{self.name}?{self.query}" if self.query else self.name

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the query by key."""
        return parse_query(self.query, repr(self.label or self.text)) if self.query else {}


def parse_value(text: str) -> Any:
    """Read a value.

    Args:
        text: The text of the value. Whatever is no value of TOML and no list stays text.

    Returns:
        The value: a number, a truth value, a text, a list or a mapping.

    >>> parse_value("0.1"), parse_value("64,32"), parse_value("iid")
    (0.1, [64, 32], 'iid')
    """
    try:
        return _value(text.strip())
    except RecursionError:
        raise ProtofedError(f"{text.strip()[:20]}…: brackets are nested too deeply") from None


def _value(text: str) -> Any:
    try:
        document = tomllib.loads(f"value = [{text}]")  # in brackets, so that a # cannot make a comment of the rest
    except (tomllib.TOMLDecodeError, RecursionError):
        document = {}
    if len(document) == 1 and len(document["value"]) == 1 and not text.endswith(","):
        [value] = document["value"]
        if isinstance(value, bool | int | float | str | list | dict):  # a date is text
            return value
    parts = _divided(text, ",")
    if parts is None:  # quotes or brackets that do not match have no meaning
        return text
    if len(parts) > 1 and not _is_path(text):
        return [_value(part) for part in _whole(parts, repr(text), ",")]
    if len(parts) == 1 and text.startswith("[") and text.endswith("]"):
        return [_value(part) for part in split(text[1:-1], ",", repr(text))] if text[1:-1].strip() else []
    return text


def _is_path(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # too long for a path
        return False


def parse_list(text: str) -> list[str]:
    """Read the items of a list as texts, for a setting that is known to be a list.

    >>> parse_list("a,b") == parse_list("[a,b]") == parse_list("(a,b)") == ["a", "b"]
    True
    """
    text = text.strip()
    parts = _divided(text, ",")
    if text[:1] + text[-1:] in ("()", "[]") and parts is not None and (len(parts) == 1 or text[0] == "("):
        parts = _divided(text[1:-1], ",")
    return [text] if parts is None else [part for part in parts if part]


def parse_pair(text: str) -> tuple[str, Any]:
    """Read `key=value`.

    >>> parse_pair("rounds=20")
    ('rounds', 20)
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ProtofedError(f"expected key=value, got {text!r}")
    return key.strip(), parse_value(value)


def parse_pairs(words: Iterable[str]) -> dict[str, Any]:
    """Read the `key=value` words of a command line. Where a key is given twice, the last value counts.

    >>> parse_pairs(["rounds=20", "lr=0.05"])
    {'rounds': 20, 'lr': 0.05}
    """
    return dict(parse_pair(word) for word in words)


def parse_query(text: str, where: str) -> dict[str, Any]:
    """Read `key=value&key=value`, in which each key may stand once.

    Args:
        text: The text of the pairs.
        where: What the text belongs to, with which the message of an error begins.

    Returns:
        The values by key.

    >>> parse_query("labels=all&lr=0.1", "fedavg")
    {'labels': 'all', 'lr': 0.1}
    """
    settings: dict[str, Any] = {}
    for part in split(text, "&", where):
        try:
            key, value = parse_pair(part)
        except ProtofedError as error:
            raise ProtofedError(f"{where}: {error}") from None
        if key in settings:
            raise ProtofedError(f"{where}: {key!r} is given twice")
        settings[key] = value
    return settings


def parse_choice(text: str, kind: str) -> Choice:
    """Read `name?key=value&key=value`.

    Args:
        text: The text of the choice.
        kind: What is chosen, for the message of an error: a model, a filter.

    Returns:
        The name and its settings.

    >>> parse_choice("trimmed?share=0.2", "reduce")
    Choice(name='trimmed', settings={'share': 0.2})
    >>> parse_choice("align?weight.start=20&weight.end=40", "term").settings
    {'weight': {'start': 20, 'end': 40}}
    """
    where = f"{kind} {text!r}"
    name, asks, query = text.partition("?")
    if asks and not query.strip():
        raise ProtofedError(f"{where}: expected key=value after '?'")
    return Choice(name.strip(), _nested(parse_query(query, where), where) if asks else {})


def _nested(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings, in which `weight.start=20&weight.end=40` is one mapping, `weight`."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        name, dot, inner = key.partition(".")
        if dot and isinstance(result.setdefault(name, {}), dict):
            result[name][inner] = value
        elif dot or name in result:
            raise ProtofedError(f"{where}: {name!r} is given as a value and by its parts; leave one of them out")
        else:
            result[name] = value
    return result


def parse_entry(text: str) -> Entry:
    """Read `[label=]name[?key=value&…]`. The caller checks whether there is such a name.

    >>> parse_entry("upper bound=fedavg?labels=all")
    Entry(label='upper bound', name='fedavg', query='labels=all')
    """
    before, asks, query = text.partition("?")
    label, equals, name = before.rpartition("=")
    label, query = " ".join(label.split()), query.strip()
    if equals and not label:
        raise ProtofedError(f"{text!r}: expected a label before '='")
    if asks and not query:
        raise ProtofedError(f"{text!r}: expected key=value after '?'")
    return Entry(label, name.strip(), query)


def parse_axes(words: Iterable[str]) -> dict[str, list[Any]]:
    """Read axes `key=value,value` of a command line. A value that has commas of its own stands in brackets.

    >>> parse_axes(["lr=0.01,0.05", "hidden=[64],[128,64]"])
    {'lr': [0.01, 0.05], 'hidden': [[64], [128, 64]]}
    """
    axes: dict[str, list[Any]] = {}
    for word in words:
        where = f"--over {word!r}"
        key, equals, text = (part.strip() for part in word.partition("="))
        if not equals or not key:
            raise ProtofedError(f"{where}: expected key=value,value,…")
        if key in axes:
            raise ProtofedError(f"--over {key!r} is given twice; write all its values in one")
        axes[key] = [parse_value(part) for part in split(text, ",", where)] if text else []
    return axes


def split(text: str, at: str, where: str) -> list[str]:
    """Divide a text at a character outside of brackets and quotes.

    Args:
        text: The text.
        at: The character.
        where: What the text belongs to, with which the message of an error begins.

    Returns:
        The parts, none of which may be empty.

    >>> split("64,[128,64]", ",", "hidden")
    ['64', '[128,64]']
    """
    parts = _divided(text, at)
    if parts is None:
        raise ProtofedError(f"{where}: a bracket or quote is not closed")
    return _whole(parts, where, at)


def _divided(text: str, at: str) -> list[str] | None:
    """The parts of a text, or None where a bracket or quote is not closed."""
    parts, depth, quote, before, escaped = [""], 0, "", "", False
    for sign in text:
        if quote:
            quote = "" if sign == quote and not escaped else quote
            escaped = sign == "\\" and not escaped and quote == '"'
        elif sign in "\"'" and before in ("", *"[{,=&"):
            quote = sign
        else:
            depth += (sign in "[{") - (sign in "]}")
            if depth < 0:
                return None
        if sign == at and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
        before = before if sign.isspace() else sign
    return None if depth or quote else [part.strip() for part in parts]


def _whole(parts: list[str], where: str, at: str) -> list[str]:
    """The parts, after a check that none is empty."""
    if not all(parts):
        raise ProtofedError(f"{where}: there is nothing between two {at!r}, or at an end")
    return parts


def write_value(value: Any) -> str:
    """Write a value so that `parse_value` reads it back.

    >>> write_value(["iid", 0.1, True])
    '[iid,0.1,true]'
    """
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(write_value, value)) + "]"
    if isinstance(value, str) and PLAIN.fullmatch(value) and parse_value(value) == value:
        return value
    return _toml(value)


def _toml(value: Any) -> str:
    """A value of TOML in one line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def write_choice(name: str, settings: Mapping[str, Any]) -> str:
    """Write a name with its settings so that `parse_choice` reads it back.

    >>> write_choice("trimmed", {"share": 0.2})
    'trimmed?share=0.2'
    """
    pairs: list[tuple[str, Any]] = []
    for key, value in settings.items():
        inner = value if isinstance(value, Mapping) and all(str(k).isidentifier() for k in value) else None
        pairs += [(f"{key}.{k}", v) for k, v in inner.items()] if inner else [(key, value)]
    query = "&".join(f"{key}={write_value(value)}" for key, value in pairs)
    return f"{name}?{query}" if query else name
