"""Stage 4, ``choose``: choices are decided; every group becomes a Region, with the arms that can compute it."""

from .choose import choose
from .decide import Tuning, decide
from .decision import Candidate, Decision
from .tuner import Tuner

__all__ = ["Candidate", "Decision", "Tuner", "Tuning", "choose", "decide"]
