"""Ranges of two sizes that are decided separately."""

from dataclasses import dataclass

from .program import Ranges


@dataclass(frozen=True, slots=True)
class Grid(Ranges):
    """``inner``: the ranges of another size, into which each range of the first is divided."""

    inner: Ranges
