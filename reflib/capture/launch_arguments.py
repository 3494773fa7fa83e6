"""Launches that PyTorch does not capture as they are: with tensors in a tuple, with ``num_ctas=``, with arguments left
to their defaults, with a tensor descriptor (outside of Dynamo), and (Dynamo) with a function among the arguments.

A kernel that is given a tuple is captured as another one, of the same name, which is given the tuple's parts and calls
it; functions are among its globals, and a descriptor it makes of a tensor, sizes and strides. ``num_ctas`` becomes a
configuration, as PyTorch does it with ``num_warps``. Defaults are given, as Triton does it before it asks for the grid.
"""

import copy
import functools
import importlib
import linecache
import os
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from ..errors import CaptureError

DESCRIPTOR = "TensorDescriptor"  # of Triton's
_made: dict[Any, tuple[Any, ...]] = {}  # the last one is the kernel; the others' identities are in its key
_here = threading.local()  # ``seen``: names of kernels that Dynamo saw launched, if asked for


@contextmanager
def launches_seen() -> Iterator[set[str]]:
    """Fills with the names of the kernels that Dynamo sees launched inside."""
    before, _here.seen = getattr(_here, "seen", None), set[str]()
    try:
        yield _here.seen
    finally:
        _here.seen = before


def taken(call: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``TritonHOPifier.call_triton_kernel``, which Dynamo calls with its variables, and others with values."""

    def launched(self: Any, variable: Any, args: Any, kwargs: Any, tx: Any) -> Any:
        from triton.runtime import Autotuner, JITFunction

        kernel, kwargs = variable.kernel, dict(kwargs)
        if not (again := getattr(_here, "again", False)):
            _check_names(kernel, args, kwargs, tx)
        if "num_ctas" in kwargs:
            kernel = _in_clusters(kernel, self.get_value(kwargs.pop("num_ctas")))
        tuned = isinstance(kernel, Autotuner)
        function = kernel.fn if tuned else kernel
        pruned = tuned and (kernel.perf_model or kernel.early_config_prune)
        if isinstance(function, JITFunction) and not pruned:  # else PyTorch takes that off, and calls this again
            given = {**dict(zip(function.arg_names, args)), **kwargs}
            kwargs |= _defaults(function, {*given}, kernel.configs if tuned else [], tx)
            given = {**given, **kwargs}
            if tx is None:  # (Dynamo refuses them)
                _check(function, given)
            elif (seen := getattr(_here, "seen", None)) is not None:
                seen.add(function.__name__)
            parts = _Parts({*function.arg_names})
            texts = {n: parts.text(n, v) for n, v in given.items() if n in function.arg_names and not _is_constant(v)}
            if parts.functions or any(n != text for n, text in texts.items()):
                kernel, args = _of_parts(kernel, function, texts, parts, set(given)), ()
                kwargs = {n: v for n, v in given.items() if n not in texts} | parts.values
        if kernel is not variable.kernel:
            variable = type(variable)(kernel=kernel, kernel_idx=None, grid=variable.grid)
        _here.again = True  # PyTorch takes off a decorator, and calls this with what is in it
        try:
            return call(self, variable, args, kwargs, tx)
        finally:
            _here.again = again

    return launched


def _check(function: Any, given: dict[str, Any]) -> None:
    """Raises CaptureError for a tensor that PyTorch would not see: what the kernel writes to it would be lost."""
    for name, x in given.items():
        if (found := _hiding(x)) is not None:
            raise CaptureError(
                f"the Triton kernel {function.__name__}{users_line()} is given {name}, a {type(found).__name__} with a "
                f"tensor in it, which is not captured: give it tensors, plain tuples of them, or a {DESCRIPTOR}"
            )


def _check_names(kernel: Any, args: Any, kwargs: dict[str, Any], tx: Any) -> None:
    """Raises CaptureError for what Triton would refuse at the call, and PyTorch captures all the same: too many
    arguments, one that is given twice, one that the kernel does not have, or one that is missing."""
    tuned, given = set[str](), set[str]()
    while hasattr(kernel, "fn") and hasattr(kernel.fn, "fn"):  # decorators
        tuned |= {n for c in getattr(kernel, "configs", ()) for n in c.kwargs}
        given |= {*getattr(kernel, "values", ())}
        kernel = kernel.fn
    if not hasattr(kernel, "params"):
        return
    names, first = list(kernel.arg_names), {*kernel.arg_names[: len(args)]}
    given |= {*kwargs, *first, *tuned, *(p.name for p in kernel.params if p.has_default)}
    named = f"the Triton kernel {kernel.__name__}{users_line(tx)}"
    if len(args) > len(names):
        raise CaptureError(f"{named} takes {len(names)} arguments ({', '.join(names)}), and is given {len(args)}")
    if twice := sorted(first & {*kwargs, *tuned} | tuned & {*kwargs}):
        how = "a configuration of @triton.autotune has it too" if twice[0] in tuned else "by its place and by its name"
        raise CaptureError(f"{named} is given {twice[0]} twice: {how}")
    if unknown := sorted({*kwargs}.difference(names, _settings())):
        raise CaptureError(f"{named} has no argument {unknown[0]}; its arguments are {', '.join(names)}")
    if missing := [n for n in names if n not in given]:
        raise CaptureError(f"{named} is not given {', '.join(missing)}")


@functools.cache
def _settings() -> frozenset[str]:
    """What a launch may be given beside the kernel's arguments, on any GPU."""
    from triton import Config
    from triton.backends import backends

    found = {"warmup", "grid", "ir_override", *Config({}).all_kwargs()}
    for name in backends:
        module = importlib.import_module(f"triton.backends.{name}.compiler")
        options = [x for n, x in vars(module).items() if n.endswith("Options") and is_dataclass(x)]
        found.update(f.name for x in options for f in fields(x))
    return frozenset(found)


def users_line(tx: Any = None) -> str:
    """`` (FILE:LINE)`` of the user's call that led here, "" if it is not known. tx: what Dynamo runs it by."""
    if tx is not None:
        return f" ({os.path.basename(tx.f_code.co_filename)}:{tx.lineno})"
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    users = [f for f in frames if not f.f_globals.get("__name__", "").startswith(("triton.", "torch.", "reflib."))]
    users = [f for f in users if os.path.isfile(f.f_code.co_filename)]  # (there is code that PyTorch generates)
    return f" ({os.path.basename(users[0].f_code.co_filename)}:{users[0].f_lineno})" if users else ""


def _hiding(x: Any) -> Any:
    """What has a tensor in it, in ``x`` or a plain tuple in it, and is not taken apart; None: nothing."""
    import torch

    if type(x) is tuple:
        return next(filter(lambda found: found is not None, map(_hiding, x)), None)
    if isinstance(x, torch.Tensor) or type(x).__name__ == DESCRIPTOR or callable(x):
        return None
    parts = x if isinstance(x, (tuple, list)) else (x if isinstance(x, dict) else getattr(x, "__dict__", {})).values()
    return x if any(isinstance(v, torch.Tensor) for v in parts) else None


def _defaults(function: Any, given: set[str], configs: list[Any], tx: Any) -> dict[str, Any]:
    """Of the arguments that neither the call nor a configuration gives. (Of those in Dynamo, ``tx``, constants.)"""
    from torch._dynamo.variables import ConstantVariable
    from triton import Config

    values = defaults(function, given.union(Config({}).all_kwargs(), *(c.all_kwargs() for c in configs)))
    if tx is None:
        return values
    return {n: ConstantVariable.create(v) for n, v in values.items() if ConstantVariable.is_base_literal(v)}


def defaults(function: Any, given: Collection[str]) -> dict[str, Any]:
    values = {p.name: p.default for p in function.params if p.has_default and p.name not in given}
    return {n: v.value if type(v).__name__ == "constexpr" else v for n, v in values.items()}


def _in_clusters(kernel: Any, blocks: int) -> Any:
    from triton import Config, autotune
    from triton.runtime import Autotuner

    if not isinstance(kernel, Autotuner):
        return autotune([Config({}, num_ctas=blocks)], key=[])(kernel)
    made = copy.copy(kernel)
    made.configs = [copy.copy(c) for c in kernel.configs]
    for config in made.configs:
        config.num_ctas = blocks
    return made


def _is_constant(x: Any) -> bool:
    import torch

    if hasattr(x, "is_python_constant"):
        return bool(x.is_python_constant())
    if type(x).__name__ == DESCRIPTOR:
        return False
    return all(map(_is_constant, x)) if type(x) is tuple else not isinstance(x, (torch.Tensor, torch.SymInt))


@dataclass
class _Parts:
    """``values``: what is given instead of tuples, by argument. ``functions``: Triton functions, by argument.
    ``names``: of the kernel's arguments, and of the parts that there are."""

    names: set[str]
    values: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, Any] = field(default_factory=dict)

    def text(self, name: str, x: Any) -> str:
        """The argument ``x`` in terms of its parts."""
        x = getattr(x, "realize", lambda: x)()
        if type(x) is tuple or type(x).__name__ == "TupleVariable":
            items = x if type(x) is tuple else x.items
            return "(" + "".join(f"{self.part(f'{name}_{i}', item)}, " for i, item in enumerate(items)) + ")"
        if type(x).__name__ == DESCRIPTOR:
            return self._descriptor(name, x)
        if type(x).__name__ == "TritonKernelVariable":
            self.functions[name] = x.kernel
        else:
            self.values[name] = x
        return name

    def part(self, name: str, x: Any) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return self.text(name, x)

    def _descriptor(self, name: str, x: Any) -> str:
        sizes = ", ".join(self.part(f"{name}_size{i}", n) for i, n in enumerate(x.shape))
        strides = "".join(f"{self.part(f'{name}_stride{i}', n)}, " for i, n in enumerate(x.strides[:-1]))
        block = [int(n) for n in x.block_shape]
        padding = "" if getattr(x, "padding", "zero") == "zero" else f", padding_option={x.padding!r}"
        return f"tl.make_tensor_descriptor({self.text(name, x.base)}, [{sizes}], [{strides}1], {block}{padding})"


def _of_parts(kernel: Any, function: Any, texts: dict[str, str], parts: _Parts, given: set[str]) -> Any:
    """``kernel``, which compiles ``function``, given ``parts`` instead of the arguments in ``texts``."""
    from triton import autotune
    from triton.runtime import Autotuner

    configs = kernel.configs if isinstance(kernel, Autotuner) else []
    given = given.union(*(c.all_kwargs() for c in configs))
    own = [p for p in function.params if p.name in given]
    functions = [function, *parts.functions.values()]
    key = (*map(id, functions), *texts.items(), *(p.name for p in own))
    if key not in _made:
        _made[key] = (*functions, _function(function, own, texts, parts))
    made = _made[key][-1]
    keys = [k for k in getattr(kernel, "keys", ()) if k not in texts or k in parts.values]
    return autotune(configs, key=keys)(made) if configs else made


def _function(function: Any, own: list[Any], texts: dict[str, str], parts: _Parts) -> Any:
    import triton
    import triton.language as tl

    annotated = {p.name: f"{p.annotation_type!r}" for p in own if p.annotation_type}
    annotated |= {p.name: "tl.constexpr" for p in own if p.is_constexpr}
    arguments = [*parts.values, *(p.name for p in own if p.name not in texts)]
    head = ", ".join(f"{n}: {annotated[n]}" if n in annotated else n for n in arguments)
    name, values = function.__name__, ", ".join(f"{p.name}={texts.get(p.name, p.name)}" for p in own)
    text = f"def {name}({head}):\n    launched({values})\n"
    path = f"<{name}, given parts {len(_made)}>"
    linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
    scope: dict[str, Any] = {"launched": function, "tl": tl, **parts.functions}
    exec(compile(text, path, "exec", dont_inherit=True), scope)
    return triton.jit(do_not_specialize=[p.name for p in own if p.do_not_specialize])(scope[name])
