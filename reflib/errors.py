"""Every error reflib raises on purpose. Each message says what was wrong, where, and what to do."""

import difflib
import re
from collections.abc import Iterable


class ReflibError(Exception):
    """Base class of every error reflib raises on purpose. Lines that a value makes long lose their middle, but
    for commands to run by hand."""

    def __init__(self, *args: object):
        long = r"(?m)^(?!\s*\$ )(.{999}).{500,}(.{500})$"
        super().__init__(*(re.sub(long, r"\1 ... \2", a) if type(a) is str else a for a in args))


class OptionError(ReflibError, ValueError):
    """A bad option name or value."""


class RegistrationError(ReflibError, ValueError):
    """An op's implementations cannot be registered as asked."""


class CaptureError(ReflibError):
    """The model could not be captured as a graph."""


class VerifyError(ReflibError):
    """The IR broke one of its own rules: a bug in a stage, never in the user's model."""


class LoweringError(ReflibError):
    """A lowering rule failed. The message names the op and the user's source line."""


class GenerateError(ReflibError):
    """A kernel's source could not be generated."""


class ToolchainError(ReflibError):
    """A compiler (C++, Triton) is missing, or it refused a generated source."""


class DeviceError(ReflibError):
    """A device is missing, or its driver reported an error."""


class CacheError(ReflibError):
    """The on-disk cache cannot be used (wrong owner, not writable)."""


class ArgumentError(ReflibError):
    """A compiled graph was called with something else than it was compiled for."""


class IndexOutOfRange(ReflibError, IndexError):
    """A gather, index or embedding met an index outside the tensor."""


class MeasureError(ReflibError):
    """Candidates cannot be measured, or a function that makes data to measure with failed."""


class PackageError(ReflibError):
    """A package file cannot be written, read or used here."""


class LabError(ReflibError):
    """A notebook's parameter or measurement is not usable."""


def did_you_mean(word: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """A question with the most similar of ``names``, for a message; "" where none is similar."""
    near = difflib.get_close_matches(f"{word!s:.400}", list(names), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else ""
