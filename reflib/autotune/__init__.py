"""Stage 4, ``autotune``: choices between equivalent implementations are decided, by measuring or from stored ones."""

from ..ir.decision import Candidate, Decision, Key
from .decide import Tuning, decide
from .tuner import Tuner

__all__ = ["Candidate", "Decision", "Key", "Tuner", "Tuning", "decide"]
