"""protofed: prototype-based federated learning.

A name is loaded when it is first used: `import protofed` by itself loads neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import ProtofedError
from .version import __version__

if TYPE_CHECKING:
    from . import aggregate, data, evaluate, losses, methods, models, schedules, wire
    from .auditing import audit
    from .bank import PrototypeBank
    from .classifier import Classifier
    from .classifier.estimator import PrototypeClassifier
    from .experiment.advise import Advice, advise
    from .experiment.compare import Comparison, compare, sweep
    from .experiment.run import load, resume, run
    from .outcome import Result


__all__ = [
    "Advice",
    "Classifier",
    "Comparison",
    "ProtofedError",
    "PrototypeBank",
    "PrototypeClassifier",
    "Result",
    "__version__",
    "advise",
    "aggregate",
    "audit",
    "compare",
    "data",
    "evaluate",
    "load",
    "losses",
    "methods",
    "models",
    "resume",
    "run",
    "schedules",
    "sweep",
    "wire",
]

_EXPERIMENT = ("Comparison", "Result", "compare", "load", "resume", "run", "sweep")
_HOMES = {
    "Classifier": "classifier",
    "PrototypeBank": "bank",
    "PrototypeClassifier": "classifier.estimator",
    "audit": "auditing",
    **dict.fromkeys(_EXPERIMENT, "experiment"),
    **dict.fromkeys(("Advice", "advise"), "experiment.advise"),
}
_ROOMS = (
    *("aggregate", "bank", "classifier", "data", "evaluate", "experiment", "federation", "losses", "methods"),
    *("models", "parts", "privacy", "registry", "report", "schedules", "seeds", "wire"),
)


def __getattr__(name: str) -> Any:
    """Load a name when it is first asked for; from then on it is an ordinary attribute of the package."""
    if name in _ROOMS:
        return importlib.import_module(f".{name}", __name__)  # which makes it an attribute
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
