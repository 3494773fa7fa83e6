"""Logging, switched on by the environment: ``REFLIB_LOGS=fallback,compile`` or ``REFLIB_LOGS=all``.

Each name is a logger ``reflib.<name>``; a name that is not listed logs only warnings.
"""

from __future__ import annotations

import logging
import os
import sys


def get(name: str) -> logging.Logger:
    """The logger ``reflib.<name>``, at INFO when ``REFLIB_LOGS`` asks for it (read at every call)."""
    logger = logging.getLogger(f"reflib.{name}")
    wanted = {part.strip() for part in os.environ.get("REFLIB_LOGS", "").split(",")}
    on = bool(wanted & {name, "all"})
    logger.setLevel(logging.INFO if on else logging.WARNING)
    root = logging.getLogger("reflib")
    if on and not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("reflib[%(name)s] %(message)s"))
        root.addHandler(handler)
    return logger
