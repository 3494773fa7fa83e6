"""Stage 2, ``lower``: a rule per op, from a captured graph to a Program; other ops become calls of ATen."""

from .decompositions import decompositions
from .lower import lower
from .rules import MODULES

__all__ = ["decompositions", "lower"]

tuple(MODULES.values())  # imported, they register their rules
