"""Loop nests to C++ for a CPU: one function per kernel, OpenMP threads over rows, SIMD within them.

``generate_cpp(name, parts, config, buffers) -> Kernel``. The text is readable: loops are named after the IR's axes,
``v7`` is statement ``%7``. Three shapes (``cpp_nest.py`` chooses)::

    for rows:                    for rows:                       for rows, tiles of columns:
      for column (simd):           v = ...                         for each pass over r:
        v = ...                    for each pass over r (simd):      for r:
        store                        acc += ...                        for column in tile (simd): acc[column] += ...
                                   store                           for column in tile (simd): store
    pointwise                    reduction along memory          reduction across memory

Sums of floats are cut into blocks whose partial sums are added up in double: about as exact as torch's own.

NB: TorchInductor writes explicit vector classes; here the C++ compiler vectorises plain loops.
"""

import re
from collections.abc import Callable, Collection
from pathlib import Path

from ..ir.expr import Sym, expr
from ..ir.loops import LoopNest
from ..ir.program import Buffer, Config, KernelNode
from ..target import Target
from . import cpp_text as text
from .cpp_emit import Emitter, Writer
from .cpp_nest import Nest, arrange
from .kernel import Kernel

_RESERVED = re.compile(r"(v|raw|acc|at|total|kept|tile)\d+|t|row|\w+_(from|to|step)")
HEADER = "".join(Path(__file__).with_name(name).read_text() for name in ("cpp_header.h", "cpp_product.h"))


def print_kernel(node: KernelNode, buffers: dict[str, Buffer], target: Target, aligned: Collection[str]) -> Kernel:
    """Plugs into ``generate.PRINTERS``."""
    return generate_cpp(node.name, tuple(p for p in node.parts if isinstance(p, LoopNest)), node.config, buffers)


def generate_cpp(name: str, parts: tuple[LoopNest, ...], config: Config, buffers: dict[str, Buffer]) -> Kernel:
    """The source of one kernel that computes all ``parts`` (independent of each other), one after another."""
    used = list(dict.fromkeys(b for p in parts for b in (*p.reads(), *p.writes())))
    symbols = tuple(sorted({s for p in parts for s in p.symbols()}))
    written = {b for p in parts for b in p.writes()}
    nests = [arrange(p) for p in parts]
    names = names_of(used, {a.var.name for n in nests for a in n.loops.axes} | {s.name for s in symbols})
    one_order = dict(config.extras).get("one_order", False)

    def body(nest: Nest) -> Callable[[Writer], None]:
        return lambda w: Emitter(w, nest, buffers, names, one_order).emit()

    return function(name, used, written, symbols, buffers, names, [(p, body(n)) for p, n in zip(parts, nests)])


def function(
    name: str, used: list[str], written: set[str], symbols: tuple[Sym, ...], buffers: dict[str, Buffer],
    names: dict[str, str], bodies: list[tuple[LoopNest, Callable[[Writer], None]]],
) -> Kernel:
    """The kernel's function around what ``bodies`` write, each under the ops that it comes from."""
    w = Writer()
    arguments = [_pointer(names[b], buffers[b], b in written) for b in used]
    arguments += [f"int64_t {text.identifier(s.name)}" for s in symbols] + ["int threads"]
    with w.block(f'extern "C" int {name}({", ".join(arguments)})'):
        w.line("int failed = 0;  // which index was found out of range")
        for part, body in bodies:
            for line in _origin_comments(part):
                w.line(line)
            with w.block(""):
                body(w)
        w.line("return failed;")
    types = [f"({text.memory_type(buffers[b].dtype)}*)" for b in used] + [""] * len(symbols) + ["(int)"]
    unpacked = ", ".join(f"{t}a[{i}]" for i, t in enumerate(types))
    w.line(f'extern "C" int {name}_packed(const int64_t* a) {{ return {name}({unpacked}); }}')
    pointers = tuple((b, buffers[b].dtype) for b in used)
    return Kernel(name, "cpp", "\n".join(w.lines) + "\n", pointers, symbols, expr(1))


def _pointer(name: str, b: Buffer, written: bool) -> str:
    return f"{'' if written else 'const '}{text.memory_type(b.dtype)}* {name}"


def names_of(buffers: list[str], taken: set[str]) -> dict[str, str]:
    """C++ names for the buffers: their own, unless it is that of an axis, a symbol or a generated variable."""
    taken = {text.identifier(t) for t in taken}
    names: dict[str, str] = {}
    for b in buffers:
        name = text.identifier(b)
        while name in taken or _RESERVED.fullmatch(name):
            name += "_"
        names[b] = name
        taken.add(name)
    return names


def _origin_comments(part: LoopNest) -> list[str]:
    seen = dict.fromkeys(f"// {o.op}{': ' + o.source if o.source else ''}" for o in part.origins)
    return [line.replace("\n", " ").rstrip("\\") for line in seen] or [f"// {part.name}"]
