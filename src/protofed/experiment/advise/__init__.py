"""Which method for this data: a race within a time budget, by validation rows alone, and an answer in words."""

from .conduct import Advice, advise, read_advice
from .run import Moment

__all__ = ["Advice", "Moment", "advise", "read_advice"]
