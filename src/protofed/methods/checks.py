"""What settings of methods must be, in one line each."""

from __future__ import annotations


def not_negative(method: object, *names: str) -> None:
    """Refuse a setting below 0; a schedule never is."""
    for name in names:
        value = getattr(method, name)
        if isinstance(value, int | float) and not value >= 0:
            raise ValueError(f"{name} must be 0 or more")


def at_least_one(method: object, *names: str) -> None:
    """Refuse a count below 1."""
    for name in names:
        if getattr(method, name) < 1:
            raise ValueError(f"{name} must be 1 or more")


def a_share(method: object, *names: str) -> None:
    """Refuse what is neither a probability nor a share."""
    for name in names:
        if not 0 <= getattr(method, name) <= 1:
            raise ValueError(f"{name} must lie between 0 and 1")
