"""Stage 4, ``choose``: choices are decided; every group becomes a Region, with the arms that can compute it."""

from .choose import choose
from .decide import decide
from .decision import Candidate, Decision

__all__ = ["Candidate", "Decision", "choose", "decide"]
