"""Lowering: a rule per op, from a captured graph to a Program; what has no rule becomes a call of ATen."""

from .decompositions import decompositions
from .lower import lower

__all__ = ["decompositions", "lower"]
