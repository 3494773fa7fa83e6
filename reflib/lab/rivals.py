"""`lab.contenders`: a function run by eager and by each available compiler, as cases for `lab.measure`."""

import types
from collections.abc import Callable, Iterable
from typing import Any

from reflib.lab.capability import has

ORDER = ("eager", "TorchInductor", "reflib")


def contenders(
    fn: Callable[..., Any],
    *args: Any,
    only: Iterable[str] = ORDER,
    dynamic: bool | None = False,
    mode: str | None = None,
    **options: Any,
) -> dict[str, Callable[[], Any]]:
    """Functions of no arguments that call `fn(*args)`: eager, TorchInductor and reflib.

    Compilers that cannot run here are omitted. Each has its own copy of `fn`, so that Dynamo's caches and recompile
    limit are not shared, and is called once to compile. `mode` is passed to TorchInductor, `options` to reflib.

    dynamic: False compiles for the sizes of `args`. With None, Dynamo leaves a size open that it has seen to change; it
    remembers sizes by file, line and name, which the copies share, so the second call of this function for another size
    would compare kernels for any size.
    """
    import torch

    made: dict[str, Callable[..., Any]] = {}
    if "eager" in only:
        made["eager"] = fn
    if "TorchInductor" in only and has("inductor"):
        made["TorchInductor"] = torch.compile(own_copy(fn), dynamic=dynamic, mode=mode)
    if "reflib" in only and has("reflib"):
        import reflib

        made["reflib"] = reflib.compile(own_copy(fn), dynamic=dynamic, **options)  # type: ignore[attr-defined]
    for compiled in made.values():
        compiled(*args)
    return {name: _bind(f, args) for name, f in made.items()}


def _bind(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: fn(*args)


def own_copy(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of the function with a separate code object; modules are returned unchanged."""
    if not isinstance(fn, types.FunctionType):
        return fn
    copy = types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
