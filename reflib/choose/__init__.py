"""Stage 4, ``choose``: every group becomes a Region, with the arms that can compute it."""

from .choose import Decision, choose

__all__ = ["Decision", "choose"]
