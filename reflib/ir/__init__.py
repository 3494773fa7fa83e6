"""The language of the compiler: index expressions, loop nests, Programs; printer, verifier, interpreter, JSON."""

from . import expr as expr  # before ``bounds`` and ``division``, which import it and which it ends by importing
