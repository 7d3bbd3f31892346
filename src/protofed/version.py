"""The version, written here alone: the package, the wheel and the run folders read it from here."""

__version__ = "0.1.0"
