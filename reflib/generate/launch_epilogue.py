"""What is appended to the stores of a Triton kernel of the user's, in its text: a ``tl.store`` becomes a call of a
function that is printed here, and the kernel gets parameters for what that reads and writes. (When, and why so:
``fuse.launch_epilogues``.)"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ..fuse.launch_stores import the_store
from ..ir.expr import Sym
from ..ir.loops import Load, Store, stmt_exprs
from ..ir.program import Buffer, Extern, KernelNode, View
from ..ir.transforms import divisions
from ..ir.user_kernel import Appended
from ..lower.kernel_text import replaced
from ..schedule.axes import Space
from .triton import LIBDEVICE
from .triton_facts import HALF, pointer_name
from .triton_ops import TL, Needs, helper_text
from .triton_statements import Dims, StatementPrinter


def with_appended(x: Extern, node: KernelNode, buffers: dict[str, Buffer]) -> tuple[str, list[tuple[str, str]]]:
    """The module's text, and what the kernel is given besides: (parameter, buffer's or symbol's name)."""
    kernel, views = x.target, dict(x.kwargs).get("appended", ())
    source, changes, needs = kernel.source, list[Any](), Needs()
    parameters: dict[str, str] = {}  # by what they are given
    functions = []
    for a, given in zip(kernel.appended, views, strict=True):
        name = _unused(f"{kernel.function}_epilogue_{a.argument}", source)
        store = the_store(x, a.argument)
        printer = _EpiloguePrinter(a, given, node, buffers, needs, store.masked)
        named = ["mask"] * (len(store.call.args) > 2) + [str(k.arg) for k in store.call.keywords]
        functions.append(printer.function(name, a.dtype, named))
        more = [*map(pointer_name, printer.pointers), *(s.name for s in printer.sizes())]
        for given_name in more:
            parameters.setdefault(given_name, _unused(f"appended_{given_name}", source))
        changes += [(e, TL[a.dtype]) for e in store.types]
        called: Any = store.call.func
        more_text = "".join(f"{parameters[m]}, " for m in more)
        changes += [(called, name), (_after(source, called.end_lineno, called.end_col_offset), more_text)]
    if not functions:
        return source, []
    (definition,) = (f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.name == kernel.function)
    changes.append((_after(source, definition.lineno, 0), "".join(f"{p}, " for p in parameters.values())))
    helpers = helper_text(needs)
    ours = (f"{helpers}\n\n" if helpers else "") + "\n\n".join(functions)
    names = {n: _unused(n, source) for n in needs.helpers}
    imports = ""
    if needs.libdevice and LIBDEVICE not in source:
        names["libdevice"] = _unused("libdevice", source)
        imports = LIBDEVICE.replace("import libdevice", f"import libdevice as {names['libdevice']}")
    ours = re.sub(r"\b\w+\b", lambda m: names.get(m[0], m[0]), ours)
    text = replaced(source, changes).rstrip()
    return f"{text}\n\n\n{imports}{ours}", [(p, given_name) for given_name, p in parameters.items()]


class _EpiloguePrinter(StatementPrinter):
    """Prints a function of the elements of a block, of whatever shape: ``pointer`` is what the kernel adds up."""

    def __init__(
        self, a: Appended, views: tuple[View, ...], node: KernelNode, buffers: dict[str, Buffer], needs: Needs,
        masked: bool,
    ):  # fmt: skip
        self.loops = a.loops
        (axis,) = a.loops.axes
        names = [v.buffer for v in views]
        body = tuple(
            replace(s, buffer=names[int(s.buffer)]) if isinstance(s, (Load, Store)) else s for s in a.loops.body
        )
        super().__init__(Space("1d", body, axis.var), node.config, buffers, needs, {"x": masked})

    def _shape(self, dims: Dims) -> str:
        return "x.shape"

    def sizes(self) -> list[Sym]:
        return sorted(self.symbols)

    def function(self, name: str, dtype: torch.dtype, named: list[str]) -> str:
        """``value`` is rounded as ``tl.store`` does it, then used as if it had been read. ``named``: what the call
        gives besides. (Triton 3.6 takes no default that is a string.)"""
        divided = any(divisions(e) for s in self.space.body for e in stmt_exprs(s))
        self.put("x = pointer" + (".to(tl.int32)" if divided and not self.wide else ""))
        if self.masks["x"]:
            self.put("xmask = mask")
        stored = f"tl.cast(value, {TL[torch.int8 if dtype == torch.bool else dtype]})"
        if dtype in HALF:  # where() is always true: or LLVM joins a product before the rounding with a sum behind it
            stored = f"tl.where(x >= 0, {stored}.to(tl.float32), 0.0)"
        self.put(f"acc = {stored}" + (" != 0" if dtype == torch.bool else ""))
        self.statements()
        given = [*map(pointer_name, self.pointers), *(s.name for s in self.sizes()), "pointer", "value"]
        own = [n if n == "mask" else f"{n}: tl.constexpr" for n in named if n not in given]
        ops = ", ".join(dict.fromkeys(o.op.removeprefix("aten.") for o in self.loops.origins))
        listed = f"\n    {', '.join([*given, *own])},\n"
        head = f"@triton.jit\ndef {name}({listed}):\n    # {ops}, on what is stored\n"
        return head + "".join(f"    {line}\n" for line in self.lines)


def _unused(wanted: str, source: str) -> str:
    words, name, n = set(re.findall(r"\w+", source)), wanted, 1
    while name in words:
        n += 1
        name = f"{wanted}_{n}"
    return name


def _after(source: str, line: int, column: int) -> Any:
    """The place behind the first parenthesis from there on, for ``replaced``."""
    text = source.encode().splitlines(keepends=True)
    while (at := text[line - 1].find(b"(", column)) < 0:
        line, column = line + 1, 0
    return SimpleNamespace(lineno=line, col_offset=at + 1, end_lineno=line, end_col_offset=at + 1)
