"""Stage 4, ``autotune``: choices between equivalent implementations are decided, by measuring or from stored ones."""

from ..ir.decision import Candidate, Decision, Key
from .decide import Tuning, decide, new_work
from .launches import Offer, decide_launches
from .tuner import Tuner

__all__ = [
    "Candidate", "Decision", "Key", "Offer", "Tuner", "Tuning", "decide", "decide_launches", "new_work",
]  # fmt: skip
