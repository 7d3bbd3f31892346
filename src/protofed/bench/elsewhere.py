"""A contender that runs another checkout's code: `python elsewhere.py SPEC`, with that checkout first on Python's path.

The other code may be older than the workload and its model, so both are handed in: the workload by its sizes, and a
model it lacks by the file that defines it here. This file imports nothing of this checkout.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import fields
from typing import Any


def hand_in(workload: dict[str, Any], model_file: str) -> None:
    """Add a workload, and its model where it is missing, to the protofed that is imported."""
    from protofed import models
    from protofed.bench.workloads import TRAINING, Training

    if workload["model"] not in models.registry.names():
        spec = importlib.util.spec_from_file_location("protofed.models.handed_in", model_file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    known = {field.name for field in fields(Training)}
    sizes: dict[str, Any] = {
        key: tuple(value) if key == "shape" else value for key, value in workload.items() if key in known
    }
    TRAINING[workload["name"]] = Training(**sizes)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, whose modules are not the other checkout's
    given = json.loads(sys.argv[1])
    hand_in(given.pop("handed_in"), given.pop("model_file"))
    from protofed.bench import contender

    sys.argv[1] = json.dumps(given)
    contender.main()
