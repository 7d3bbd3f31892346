"""protofed: prototype-based federated learning."""

from . import aggregate, data, evaluate, losses, methods, models, schedules, wire
from .bank import PrototypeBank
from .errors import ProtofedError
from .experiment import Comparison, Result, compare, resume, run, sweep
from .version import __version__

__all__ = [
    "Comparison",
    "ProtofedError",
    "PrototypeBank",
    "Result",
    "__version__",
    "aggregate",
    "compare",
    "data",
    "evaluate",
    "losses",
    "methods",
    "models",
    "resume",
    "run",
    "schedules",
    "sweep",
    "wire",
]
