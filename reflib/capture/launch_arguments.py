"""Launches that PyTorch does not capture as they are: with tensors in a tuple, or with ``num_ctas=``.

A kernel that is given a tuple is captured as another one, of the same name, which is given the tuple's parts and calls
it. ``num_ctas`` becomes a configuration, as PyTorch does it with ``num_warps``.
"""

from __future__ import annotations

import copy
import linecache
import re
from collections.abc import Callable, Mapping
from typing import Any

# by kernel and what it is given: the kernel (its identity is the key), and the one that is given parts
_made: dict[Any, tuple[Any, Any]] = {}


def taken(call: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``TritonHOPifier.call_triton_kernel``, which Dynamo calls with its variables, and others with values."""

    def launched(self: Any, variable: Any, args: Any, kwargs: Any, tx: Any) -> Any:
        from triton.runtime import Autotuner, JITFunction

        kernel, kwargs = variable.kernel, dict(kwargs)
        if "num_ctas" in kwargs:
            kernel = _in_clusters(kernel, self.get_value(kwargs.pop("num_ctas")))
        tuned = isinstance(kernel, Autotuner)
        function = kernel.fn if tuned else kernel
        pruned = tuned and (kernel.perf_model or kernel.early_config_prune)
        if isinstance(function, JITFunction) and not pruned:  # else PyTorch takes that off, and calls this again
            given = {**dict(zip(function.arg_names, args)), **kwargs}
            tuples = {n: _parts(n, v) for n, v in given.items() if n in function.arg_names and not _is_constant(v)}
            tuples = {n: found for n, found in tuples.items() if found[0] != n}
            if tuples:
                kernel, args = _of_parts(kernel, function, {n: text for n, (text, _) in tuples.items()}, given), ()
                kwargs = {n: v for n, v in given.items() if n not in tuples}
                kwargs |= {part: v for _, parts in tuples.values() for part, v in parts.items()}
        return call(self, variable if kernel is variable.kernel else _with(variable, kernel), args, kwargs, tx)

    return launched


def _with(variable: Any, kernel: Any) -> Any:
    return type(variable)(kernel=kernel, kernel_idx=None, grid=variable.grid)


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


def _items(x: Any) -> tuple[Any, ...] | None:
    """Of a tuple; None for anything else."""
    x = getattr(x, "realize", lambda: x)()
    return tuple(x.items) if type(x).__name__ == "TupleVariable" else x if type(x) is tuple else None


def _parts(name: str, x: Any) -> tuple[str, dict[str, Any]]:
    """The text of ``x`` in terms of its parts, and these by name: of what is no tuple, itself."""
    if (items := _items(x)) is None:
        return name, {name: x}
    inner = [_parts(f"{name}_{i}", item) for i, item in enumerate(items)]
    return f"({''.join(f'{text}, ' for text, _ in inner)})", {n: v for _, parts in inner for n, v in parts.items()}


def _is_constant(x: Any) -> bool:
    import torch

    if hasattr(x, "is_python_constant"):
        return bool(x.is_python_constant())
    return all(map(_is_constant, x)) if type(x) is tuple else not isinstance(x, (torch.Tensor, torch.SymInt))


def _of_parts(kernel: Any, function: Any, texts: Mapping[str, str], given: Mapping[str, Any]) -> Any:
    """``kernel``, given what is named in ``texts`` instead of tuples. ``function``: what it compiles."""
    from triton import autotune
    from triton.runtime import Autotuner

    configs = kernel.configs if isinstance(kernel, Autotuner) else []
    there = {*given, *(k for c in configs for k in c.all_kwargs())}
    key = (id(function), tuple(texts.items()), tuple(p.name for p in function.params if p.name in there))
    if key not in _made:
        _made[key] = (function, _function(function, texts, there))
    made = _made[key][1]
    return autotune(configs, key=[k for k in kernel.keys if k not in texts])(made) if configs else made


def _function(function: Any, texts: Mapping[str, str], there: set[str]) -> Any:
    import triton
    import triton.language as tl

    own = [p for p in function.params if p.name in there]
    arguments = [n for p in own for n in (re.findall(r"\w+", texts[p.name]) if p.name in texts else [_parameter(p)])]
    name, values = function.__name__, ", ".join(f"{p.name}={texts.get(p.name, p.name)}" for p in own)
    text = f"def {name}({', '.join(arguments)}):\n    launched({values})\n"
    path = f"<{name}, given parts {len(_made)}>"
    linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
    scope: dict[str, Any] = {"launched": function, "tl": tl}
    exec(compile(text, path, "exec", dont_inherit=True), scope)
    return triton.jit(do_not_specialize=[p.name for p in own if p.do_not_specialize])(scope[name])


def _parameter(p: Any) -> str:
    return p.name + (": tl.constexpr" if p.is_constexpr else f": {p.annotation_type!r}" * bool(p.annotation_type))
