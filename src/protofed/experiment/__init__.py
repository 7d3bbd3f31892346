"""From settings to results: one run, or a comparison of several."""

from .compare import Comparison, compare, sweep
from .run import Result, load, resume, run
from .settings import Settings, resolve

__all__ = ["Comparison", "Result", "Settings", "compare", "load", "resolve", "resume", "run", "sweep"]
