"""Stage 6, ``plan``: order, lifetimes, storage. A Program becomes the steps of a wrapper."""

from .plan import plan
from .steps import Alloc, Branch, Call, Check, Free, Launch, Let, Note, Plan, Return, Step, launches

__all__ = [
    "Alloc", "Branch", "Call", "Check", "Free", "Launch", "Let", "Note", "Plan", "Return", "Step", "launches", "plan",
]  # fmt: skip
