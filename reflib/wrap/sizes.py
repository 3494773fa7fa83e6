"""What printed wrappers say about sizes: of exported programs, that they are not for them; of tuned ones, that they are
outside the tuned ranges."""

from __future__ import annotations

from ..errors import ArgumentError
from ..logs import get as logger
from .runtime import _said


def expect_sizes(holds: bool, what: str, **sizes: int) -> None:
    """What must hold of the sizes of the arguments, or the graph is not for them."""
    if not holds:
        here = ", ".join(f"{name} = {n}" for name, n in sizes.items())
        raise ArgumentError(f"it was exported where {what} holds of the arguments' sizes; here {here}")


def outside(what: str, size: int, least: int, most: int, op: str) -> None:
    """Log, once for each thing and op, that a size is outside the tuned ranges."""
    if (op, what) not in _said:
        _said.add((op, what))
        message = "%s = %d is outside the sizes that were tuned, %d to %d: the nearest range serves"
        logger("autotune").warning(message, what, size, least, most)
