"""What has changed in a run's settings since they were stored, perhaps by an earlier version that had fewer of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...results.tables import flat
from ..settings import Settings, resolve

SCALING, RENAMED = "data.standardise", {"true": "all", "false": "none"}  # what its values were called before 0.2


def changed_settings(settings: Settings, stored: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The settings of a run that differ from stored ones.

    A setting that was not there then had the default that it has now.

    Args:
        settings: The settings of today.
        stored: The settings as a folder has them.

    Returns:
        By the whole key the text of the value then, and of the value now.

    >>> changed_settings(resolve("fedproto", {"rounds": 5}), {**resolve("fedproto", {}).to_dict(), "rounds": 4})
    {'rounds': ('4', '5')}
    """
    default = flat(resolve(settings.method.name, {}).to_dict())
    now, then = flat(settings.to_dict()), flat(stored)
    if then.get(SCALING) in RENAMED:
        then[SCALING] = RENAMED[then[SCALING]]
    before = {key: then.get(key, default.get(key, value)) for key, value in now.items()}
    return {key: (before[key], value) for key, value in now.items() if before[key] != value}
