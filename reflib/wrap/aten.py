"""ATen calls from C++ without Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir.program import Extern

if TYPE_CHECKING:
    from .cpp import CppPrinter


def direct_call(printer: CppPrinter, x: Extern, again: str) -> list[str] | None:
    """Lines that make the call, or None: Python has to. ``again``: the same call in Python, for its error."""
    return None
