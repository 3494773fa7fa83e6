"""What all matmul kernels share: operands, tiles, the product, the epilogue, the header.

In the text ``m``, ``n``, ``k`` are a program's rows, columns and depths, ``y`` and ``x`` the first two as a column and
a row, so that the epilogue is printed like a pointwise tile (``triton_statements``), with ``acc`` the float32 product.

* Operands may have any strides: a pointer is the sum of index times stride. Where a stride is 1 and the others are
  known to be multiples of 16 bytes, Triton copies 16 bytes at a time.
* A dimension that its block divides needs no mask; beyond the end of a ragged depth, zeros are read.
* Tiles are walked in columns of ``group`` rows, so that programs that run together share operands in L2 (Triton's
  tutorial on matrix multiplication; tritonlang/triton, "L2 Cache Optimizations").
"""

from collections.abc import Collection

import torch

from ..autotune.roofline import FP8
from ..errors import GenerateError
from ..ir.expr import Expr, IntLike, expr
from ..ir.program import Buffer, KernelNode, Template, Tiling, View
from ..target import Target
from .kernel import Kernel
from .matmul_prologue import OperandPrinter, tile_space
from .packed_bytes import HELPERS as PACKED
from .triton import HEADER, LIBDEVICE, known_multiples
from .triton_facts import HALF, blocks, paren, pointer_name
from .triton_ops import TL, Needs, helper_text, print_cast
from .triton_statements import StatementPrinter


class MatmulPrinter:
    """The lines of one kernel, and what its header must contain."""

    def __init__(self, node: KernelNode, buffers: dict[str, Buffer], target: Target, aligned: Collection[str]):
        (template,) = node.parts
        assert isinstance(template, Template)
        if template.tiling is None:
            raise GenerateError(f"{template.name}: no tiling was chosen")
        if template.dtype not in (torch.float32, *HALF, *FP8):
            raise GenerateError(
                f"{template.name}: no Triton kernel for a product of {template.dtype}; leave it to ATen"
            )
        self.template, self.tiling, self.target, self.config = template, template.tiling, target, node.config
        _check(template.name, self.tiling)
        self.batch, self.m, self.n, self.k = template.sizes
        self.buffers = {**buffers, **{b.name: b for b in node.workspace}}
        self.aligned = aligned
        self.workspace = {b.kind: b for b in node.workspace}
        self.needs = Needs()
        masks = {"y": _ragged(self.m, self.tiling.m), "x": _ragged(self.n, self.tiling.n)}
        self.body = StatementPrinter(tile_space(template.epilogue), node.config, self.buffers, self.needs, masks)
        self.views = {"a": template.a, "b": template.b}
        self.computed = {n: OperandPrinter(self, n, v) for n, v in self.views.items() if template.prologue(v)}
        self.pointers = {n: self.pointer(v) for n, v in self.views.items() if n not in self.computed}
        self.first = ""  # where a program's depth begins
        self.constants = {"MBLOCK": self.tiling.m, "NBLOCK": self.tiling.n, "KBLOCK": self.tiling.k}
        self.helpers: list[str] = []
        self.imports: list[str] = []
        self.points = (self.tiling.m, self.tiling.n)  # what the epilogue computes at once
        self.scratch = 0
        self.pdl = False

    # -- the kernel's text ----------------------------------------------------------------------
    def kernel(self, name: str, programs: Expr) -> Kernel:
        t, p = self.tiling, self.body
        p.symbols |= programs.symbols()
        symbols = tuple(sorted(p.symbols))
        pointers = list(p.pointers)
        lines = [*known_multiples(self.config, symbols), *p.lines]
        params = ", ".join([pointer_name(b) for b in pointers] + [s.name for s in symbols])
        for letter, block in zip("YX", self.points):
            if any(f"{letter}BLOCK" in line for line in lines):
                self.constants[f"{letter}BLOCK"] = block
        constants = ", ".join(f"{k}: tl.constexpr = {v}" for k, v in self.constants.items())
        head = f"def {name}(\n    {params},\n    {constants},\n):"
        helpers = [h for h in (helper_text(self.needs), *self.helpers) if h]  # they may need libdevice
        imports = [HEADER, *([LIBDEVICE] if self.needs.libdevice else []), *self.imports]
        source = "".join(imports) + "\n\n" + "".join(f"{h}\n\n" for h in helpers) + f"@triton.jit\n{head}\n"
        source += "".join(f"    {line}\n" for line in [*self._about(), *lines])
        sure = tuple(i for i, b in enumerate(pointers) if self.sure(b))
        return Kernel(
            name, "triton", source, tuple((b, self.buffers[b].dtype) for b in pointers), symbols, programs,
            t.num_warps, t.num_stages, self.config.index, sure, self.scratch, self.pdl,
            exact="exact" in dict(self.config.extras), keep_loops=True, settings=tuple(self.needs.settings.items()),
        )  # fmt: skip

    def _about(self) -> list[str]:
        ops = ", ".join(dict.fromkeys(o.op.removeprefix("aten.") for o in self.template.origins)) or self.template.name
        batch = f"{self.batch} of " if self.batch != 1 else ""
        dtype = str(self.template.dtype).removeprefix("torch.")
        return [f"# {ops}: {batch}{self.m} x {self.n}, depth {self.k}, {dtype}; {self.tiling}"]

    def sure(self, buffer: str) -> bool:
        """Is its pointer known to be a multiple of 16?"""
        return self.buffers[buffer].kind in ("temp", "zeros") or buffer in self.aligned

    def helper(self, name: str) -> str:
        """Of ``packed_bytes``."""
        if (text := PACKED[name].strip() + "\n") not in self.helpers:
            self.helpers.append(text)
        return name

    def put(self, line: str) -> None:
        self.body.put(line)

    def size(self, e: IntLike) -> str:
        return self.body.size(expr(e))

    def indent(self, by: int) -> None:
        self.body.indent = " " * (len(self.body.indent) + 4 * by)

    @property
    def wide(self) -> str:
        return ".to(tl.int64)" if self.config.index == "int64" else ""

    def pid(self) -> str:
        return f"tl.program_id(0){self.wide}"

    def wait(self, also: str = "") -> None:
        """Wait for the previous kernel. A kernel that does may be launched while that one still runs (programmatic
        dependent launch), which saves 0.2 us between the two on an H200. Starting the next one before this one's
        epilogue gains as much again for a few results, but costs up to 5 us where programs are distributed unevenly.
        ``also``: what else to import."""
        self.pdl = self.target.kind == "cuda" and self.target.capability >= 90
        if self.pdl:
            self.imports.append(f"from triton.language.extra.cuda import {also}gdc_wait\n")
            self.put("gdc_wait()  # for the kernel before: this one may be launched early")

    # -- where a program is ---------------------------------------------------------------------
    @property
    def tiles(self) -> Expr:
        """How many tiles the output has."""
        return blocks(self.m, self.tiling.m) * blocks(self.n, self.tiling.n) * self.batch

    def tile(self) -> None:
        """``tile`` (a number) to tile_m, tile_n (and z, the batch)."""
        t = self.tiling
        # an empty output has no program; 1 keeps the text free of divisions by 0
        rows, columns = (expr(1) if e == 0 else e for e in (blocks(self.m, t.m), blocks(self.n, t.n)))
        at = "tile"
        if self.batch != 1:
            each = self.count("each", rows * columns)
            self.put(f"z = tile // {each}")
            self.put(f"inside = tile % {each}")
            at = "inside"
        self._row_and_column(at, rows, columns)

    def span(self) -> None:
        """The tile's rows and columns."""
        self.put(f"m = tile_m * MBLOCK + tl.arange(0, MBLOCK){self.wide}")
        self.put(f"n = tile_n * NBLOCK + tl.arange(0, NBLOCK){self.wide}")

    def _row_and_column(self, at: str, rows: Expr, columns: Expr) -> None:
        group = self.tiling.group
        r, c = self.count("rows", rows), self.count("columns", columns)
        if rows == 1 or columns == 1:
            m, n = ("0", at) if rows == 1 else (at, "0")
        elif group <= 1:
            m, n = f"{at} // {c}", f"{at} % {c}"
        elif rows.constant is not None and rows.constant <= group:
            m, n = f"{at} % {r}", f"{at} // {r}"
        else:
            self.constants["GROUP"] = group
            inside = f"{at} % (GROUP * {c})"
            height = "GROUP"
            self.put(f"top = {at} // (GROUP * {c}) * GROUP  # a column of GROUP tiles at a time: they share n")
            if rows.constant is None or rows.constant % group:
                height = "height"
                self.put(f"height = tl.minimum({r} - top, GROUP)")
            m, n = f"top + {inside} % {height}", f"{inside} // {height}"
        self.put(f"tile_m = {m}")
        self.put(f"tile_n = {n}")

    def count(self, name: str, e: Expr) -> str:
        """``e`` as a number, or bound to ``name``."""
        if e.constant is not None:
            return str(e.constant)
        self.put(f"{name} = {self.size(e)}")
        return name

    # -- the product ----------------------------------------------------------------------------
    def product(self, split: str = "", splits: int = 1, ways: int = 1) -> None:
        """``acc`` of m, n over the part of k of split number ``split``: k steps of KBLOCK. ``ways`` > 1: ``acc`` has
        one more dimension, of that many parts, each over its share of a KBLOCK."""
        shape = "[NBLOCK, MBLOCK]" if self.turned else "[MBLOCK, NBLOCK]"
        if ways > 1:
            self.constants["WAYS"] = ways
            shape = "[WAYS, MBLOCK, NBLOCK]"
        self.put(f"acc = tl.zeros({shape}, tl.float32)")
        if self.k == 0:
            return
        steps = blocks(self.k, self.tiling.k * splits)
        depth = self.size(steps * self.tiling.k) if splits > 1 else self.size(self.k)
        self._depths(split, depth, ways)
        a, b = (("m[:, None]", "k[None, :]"), ("k[:, None]", "n[None, :]"))
        if ways > 1:
            a, b = (("m[None, :, None]", "k[:, None, :]"), ("k[:, :, None]", "n[None, None, :]"))
        loop, ragged = steps != 1, steps * (self.tiling.k * splits) != self.k
        for name, at in (("a", a), ("b", b)):
            if name in self.computed:
                self.computed[name].before(ragged)
            else:
                self.put(f"{name}_at = {self.pointers[name]} + {self.offset(self.views[name], at)}")
        if loop:
            self.put(f"for k0 in tl.range(0, {depth}, KBLOCK):")
            self.indent(1)
        limit = f"{self.size(self.k)} - k0" if loop else self.size(self.k)
        masks = {
            "a": ([f"{a[0]} < {self.size(self.m)}"] if self.body.masks["y"] else [])
            + ([f"{a[1]} < {limit}"] if ragged else []),
            "b": ([f"{b[0]} < {limit}"] if ragged else [])
            + ([f"{b[1]} < {self.size(self.n)}"] if self.body.masks["x"] else []),
        }
        for name, v in self.views.items():
            computed = self.computed.get(name)
            text = computed.inside(loop) if computed else self.cast(v, load(f"{name}_at", masks[name], v.dtype))
            self.put(f"{name} = {text}")
        self.put(self.dot())
        if loop:
            for name in self.pointers:
                stride = self.views[name].strides[2 if name == "a" else 1]
                self.put(f"{name}_at += KBLOCK" + ("" if stride == 1 else f" * {paren(self.size(stride))}"))
            self.indent(-1)
        if self.turned:
            self.put("acc = acc.T")

    def _depths(self, split: str, depth: str, ways: int) -> None:
        text = "tl.arange(0, KBLOCK)"
        if ways > 1:
            text = "(KBLOCK // WAYS) * tl.arange(0, WAYS)[:, None] + tl.arange(0, KBLOCK // WAYS)[None, :]"
        self.first = f"{split} * {paren(depth)}" if split else ""
        start = f"{self.first} + " if split else ""
        self.put(f"k = {start}{paren(text) if self.wide and ways > 1 else text}{self.wide}")

    def dot(self) -> str:
        """One step. Products of halves are exact in float32; one of float32 states its precision."""
        precision = ""
        if self.template.dtype == torch.float32:
            tf32 = self.template.precision == "tf32" and (self.target.kind != "hip" or self.target.arch == "gfx942")
            precision = f', input_precision="{"tf32" if tf32 else "ieee"}"'
        if self.template.dtype in FP8 and self.template.precision == "ieee" and self.target.capability == 90:
            precision = f", max_num_imprecise_acc={min(128, self.tiling.k)}"  # else sums have 14 bits
        # Hopper's wgmma takes at least 64 rows, and both operands from shared memory; mma.sync's come through
        # registers: where there are fewer rows, rows and columns can be exchanged (16 x 64 x 128: 3% faster).
        operands = "b.T, a.T" if self.turned else "a, b"
        return f"acc = tl.dot({operands}, acc{precision})"

    @property
    def turned(self) -> bool:
        return self.tiling.turned and self.k != 0

    # -- operands -------------------------------------------------------------------------------
    def pointer(self, v: View) -> str:
        text = self.body.pointer(v.buffer)
        if v.dtype != self.buffers[v.buffer].dtype:
            if v.dtype == torch.bool:
                raise GenerateError(f"{self.template.name}: {v.buffer} cannot be read as bool")
            return f"{text}.to(tl.pointer_type({TL[v.dtype]}), bitcast=True)"
        return text

    def offset(self, v: View, names: tuple[str, ...]) -> str:
        """The elements' offsets; a stride of 0 is written too, for the shape of the block."""
        parts = [self.size(v.offset)] if v.offset != 0 else []
        if self.batch != 1 and v.strides[0] != 0:
            parts.append(f"z * {paren(self.size(v.strides[0]))}" if v.strides[0] != 1 else "z")
        for name, stride in zip(names, v.strides[1:]):
            parts.append(name if stride == 1 else f"{name} * {paren(self.size(stride))}")
        return f"({' + '.join(parts)})"

    def cast(self, v: View, text: str) -> str:
        """The prologue: from the dtype that is read to the one that is multiplied; between halves through float32."""
        return self.convert(text, v.dtype, self.template.dtype)

    def convert(self, text: str, source: torch.dtype, dtype: torch.dtype) -> str:
        if source in FP8 and dtype in FP8:  # products of both kinds are exact
            return text
        if source == torch.bool:
            text = f"({text} != 0)"
        elif source in HALF and dtype in HALF and source != dtype:
            text = f"{text}.to(tl.float32)"
        return print_cast(text, source, dtype)

    # -- after it -------------------------------------------------------------------------------
    def epilogue(self, y: str = "m[:, None]", x: str = "n[None, :]") -> None:
        """What is done with ``acc``, at the rows ``y`` and the columns ``x``."""
        for d, text, size in (("y", y, self.m), ("x", x, self.n)):
            self.put(f"{d} = {text}")
            if self.body.masks[d]:
                self.put(f"{d}mask = {d} < {self.size(size)}")
        self.body.statements()


def _ragged(size: Expr, block: int) -> bool:
    return size.constant is None or size.constant % block != 0 or size == 0


def _check(name: str, t: Tiling) -> None:
    powers = {"m": t.m, "n": t.n, "k": t.k, "warps_k": t.warps_k, "num_warps": t.num_warps, "reducers": t.reducers}
    for what, value in powers.items():
        if value & (value - 1) or value < (what != "reducers"):
            raise GenerateError(f"{name}: the tiling's {what} is {value}; it must be a power of two")
    if t.kind != "row" and min(t.m, t.n, t.k // t.warps_k) < 16:
        raise GenerateError(f"{name}: a tiling of {t}; blocks must be at least 16 (per share of k as well)")
    if t.turned and (t.kind == "persistent" or t.warps_k != 1):
        raise GenerateError(f"{name}: a tiling of {t}; only tiled and split ones that share no k can be turned")
    if t.kind != "split" and (t.splits != 1 or t.warps_k != 1 or t.reducers):
        raise GenerateError(f"{name}: a tiling of kind {t.kind} cannot split k")


def load(at: str, masks: list[str], dtype: torch.dtype) -> str:
    if not masks:
        return f"tl.load({at})"
    mask = " & ".join(f"({m})" for m in masks) if len(masks) > 1 else masks[0]
    return f"tl.load({at}, mask={mask}, other={'0.0' if dtype in FP8 else '0'})"
