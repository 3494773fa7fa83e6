"""Stage 4, ``autotune``: choices between equivalent implementations are decided, by measuring or from stored ones."""

from ..ir.decision import Candidate, Decision, Key
from .decide import decide, new_work
from .launches import Offer, decide_launches
from .points import Work
from .tuner import Tuner

__all__ = [
    "Candidate", "Decision", "Key", "Offer", "Tuner", "Work", "decide", "decide_launches", "new_work",
]  # fmt: skip
