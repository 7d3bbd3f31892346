"""Lists and other libraries' messages as part of a message of one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST = 6  # items that a message lists


def listed(items: Iterable[object]) -> str:
    """The items in one line, separated by commas."""
    return ", ".join(map(str, items))


def some(items: Sequence[object], most: int = MOST) -> str:
    """The first items in one line, and how many more there are.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    return listed(items) if len(items) <= most else f"{listed(items[:most])} and {len(items) - most} more"


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, for our message of one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
