"""protofed: prototype-based federated learning."""

from . import aggregate, data, evaluate, losses, methods, models, schedules, wire
from .bank import PrototypeBank
from .errors import ProtofedError

__version__ = "0.1.0"

from .experiment import Comparison, Result, compare, resume, run, sweep

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
