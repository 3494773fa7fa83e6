"""Bind: compiled kernels under the names that the printed wrapper calls them by.

Where kernels are built in the background (the compiler ring does so), the first call waits for them, and an error of a
compiler appears there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from threading import Lock
from typing import Any

from ..errors import GenerateError
from ..generate.kernel import Kernel
from ..ir.program import Program
from ..logs import get as logger
from ..options import Options
from ..plan import Plan
from ..seams import Seam
from . import launch
from .python import Kernels, PythonPrinter
from .runtime import namespace

Built = Mapping[Kernel, Future]  # kernels that are being built already
Bound = tuple[dict[str, Callable[[], Any]], list[Future]]  # per kernel name, what returns its launcher; to wait for

# How kernels of a language are built and called: (program, kernels, options, built) -> Bound.
BINDERS = Seam("wrap.BINDERS", {"triton": launch.bind})
# Other wrappers than the one in Python, by ``Options.wrapper``: (program, plan, kernels, options, built) -> (text,
# Wrapped), or None: the one in Python serves.
WRAPPERS = Seam("wrap.WRAPPERS")


def wrap(
    program: Program, plan: Plan, kernels: Kernels, options: Options, built: Built | None = None
) -> tuple[str, Wrapped]:
    """The wrapper's text, and the callable (a list of inputs, which it empties, to a tuple of outputs).

    Raises GenerateError where nothing prints such a wrapper.
    """
    if options.wrapper != "python":
        if options.wrapper not in WRAPPERS:
            raise GenerateError(f'the core prints wrappers in Python only: wrapper={options.wrapper!r} needs more')
        made = WRAPPERS[options.wrapper](program, plan, kernels, options, built or {})
        if made is not None:
            return made
    printer = PythonPrinter(program, plan, kernels, options.check_nan)
    source = printer.print()
    logger("wrapper").info("%s", source)
    bound: dict[str, Callable[[], Any]] = {}
    waiting: list[Future] = []
    for language in dict.fromkeys(k.language for k in kernels.values()):
        mine = {name: k for name, k in kernels.items() if k.language == language}
        more, futures = BINDERS[language](program, mine, options, built or {})
        bound |= more
        waiting += futures
    names = namespace() | program.constants | printer.names

    def first_call() -> Callable[[list], Any]:
        scope = names | {name: get() for name, get in bound.items()}
        exec(compile(source, "<reflib wrapper>", "exec"), scope)
        return scope["call"]

    return source, Wrapped(first_call, waiting)


class Wrapped:
    """A compiled graph. The first call waits for the kernels and loads them; ``wait`` and ``load`` do so earlier
    (``wait`` in any thread, raising a compiler's error; ``load`` in the thread that will call).
    ``checks_inputs``: a call raises ArgumentError for inputs that it was not compiled for, before it does anything."""

    def __init__(
        self, make: Callable[[], Callable[[list], Any]], waiting: Iterable[Future] = (), checks_inputs: bool = False
    ):
        self._make, self._waiting, self._lock, self.checks_inputs = make, tuple(waiting), Lock(), checks_inputs
        self._call: Callable[[list], Any] | None = None

    def __call__(self, args: list) -> Any:
        return (self._call or self.load())(args)

    def wait(self) -> None:
        """Until all kernels that the first call needs are built."""
        for future in self._waiting:
            future.result()

    def load(self) -> Callable[[list], Any]:
        """Load the kernels, into the current context."""
        with self._lock:
            if self._call is None:
                self._call = self._make()
        return self._call
