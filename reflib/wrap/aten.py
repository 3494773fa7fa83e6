"""ATen calls from C++ without Python, and so without the GIL.

Three interfaces, of which the first applicable one is used: a C function that the user declared for the op
(``Options.c_shims``); a function of PyTorch's C interface, for matmuls; PyTorch's dispatcher, which calls any op by
name, with each argument in 64 bits. Arguments that it does not support (a ``Scalar``, a generator, a view as another
dtype), ops whose results are lists and ops implemented in Python are called in Python: ``direct_call`` returns None.

C reports only that a call failed. The call is then repeated in Python, which raises the exception, unless that could
repeat a side effect (write to an argument, print): then a ReflibError has PyTorch's message.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..c_shims import Shim, check, op_of, parse
from ..capture.spectra import SPECTRA
from ..errors import OptionError
from ..ir.expr import Expr, Sym
from ..ir.out_lists import out_arguments
from ..ir.printer import dtype_name
from ..ir.program import Buffer, Extern, View, full_view, symbols_in
from ..lower.extern import OUT_VARIANTS
from ..lower.views import REINTERPRET
from .checks import own_results
from .host import address
from .python import py

if TYPE_CHECKING:
    from .cpp import CppPrinter

aten = torch.ops.aten

# Ops with a function aoti_torch_{cpu,cuda}_NAME, and its parameters by the names of the schema. Numbers are doubles.
SHIMS = {
    aten.mm.out: ("mm_out", ("out", "self", "mat2")),
    aten.bmm.out: ("bmm_out", ("out", "self", "mat2")),
    aten.addmm.out: ("addmm_out", ("out", "self", "mat1", "mat2", "beta", "alpha")),
    aten.baddbmm.out: ("baddbmm_out", ("out", "self", "batch1", "batch2", "beta", "alpha")),
}
MEMORY_FORMATS = {  # numbers of c10::MemoryFormat
    torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3,
}  # fmt: skip


class _Cannot(Exception):
    """The call must be made in Python."""


def direct_call(printer: CppPrinter, x: Extern, again: list[str]) -> list[str] | None:
    """Lines that make the call, or None: Python must. ``again``: the same call in Python, with its results."""
    op = x.target if x.out is None else x.out[0]
    if not isinstance(op, torch._ops.OpOverload):
        return None
    writer = _Writer(printer)
    try:
        if op is aten._local_scalar_dense.default:
            return _number(writer, x, again)
        return writer.call(x, op, again)
    except _Cannot:
        return None


def _number(writer: _Writer, x: Extern, again: list[str]) -> list[str]:
    """An integer in a CPU's memory is read where it is, another number by PyTorch."""
    printer, (v,), ((sym, _, _),) = writer.printer, x.args, x.symbols
    n = printer.name(sym.name)
    if integer_read(x) and printer.program.buffers[v.buffer].device.type == "cpu":
        held, at = printer.name(v.buffer), printer.size(v.offset * v.dtype.itemsize)
        read = f"{n} = *(const {_INTEGERS[v.dtype]}*)({held}.ptr + {at});"
        return [f"if ({held}.opaque) {{", *_more(again), "} else {", f"  {read}", "}"]
    real = v.dtype.is_floating_point
    ctype, name = ("double", "aoti_torch_item_float64") if real else ("int64_t", "aoti_torch_item_int64")
    if not (real or v.dtype in _INTEGERS) or not _there(name):
        raise _Cannot
    kind = "VALUE_FLOAT" if real else "VALUE_BOOL" if v.dtype == torch.bool else "VALUE_INT"
    called = f"call(run, {printer.function(name)}, {writer._tensor(v)}, &read)"
    lines = [*writer.before, f"{ctype} read;", f"if ({called}) {{  // again, for its error", *_more(again), "} else {"]
    lines.append(f"  __builtin_memcpy(&{n}, &read, sizeof read);")
    lines += [f"  {printer.name(f'{sym.name} kind')} = {kind};"] if sym.name in printer.numbers else []
    return ["{", *_more([*lines, "}"]), "}"]


def integer_read(x: Extern) -> bool:
    """Is the number an int? (A bool that is 0 or 1 by its symbol is read as one, for a condition.)"""
    if x.target is not aten._local_scalar_dense.default:
        return False
    return x.args[0].dtype in _INTEGERS and (x.args[0].dtype != torch.bool or x.symbols[0][0].hi == 1)


_INTEGERS = {
    torch.bool: "bool", torch.uint8: "uint8_t", torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t",
    torch.int64: "int64_t",
}  # fmt: skip


def in_python(op: torch._ops.OpOverload) -> bool:
    """Is a kernel of the op a Python function? (Called from C++, its exceptions would be lost.)"""
    name = op._schema.name
    if name in torch._library.custom_ops.OPDEFS:
        return True
    base = name.replace("::", "/")
    full = f"{base}.{op._schema.overload_name}" if op._schema.overload_name else base
    return any(key.rpartition("/")[0] in (full, base) and not key.endswith("/Meta") for key in torch.library._impls)


class _Writer:
    """One call's lines."""

    def __init__(self, printer: CppPrinter):
        self.printer = printer
        self.before: list[str] = []  # other views of arguments
        self.views = 0

    def call(self, x: Extern, op: torch._ops.OpOverload, again: list[str]) -> list[str]:
        results = self._results(x, op)
        given = _arguments(x, op, self.printer.program.buffers)
        shim, known = self.printer.shims.get(str(op)), SHIMS.get(op)
        if shim is not None:
            lines, called, results = self._declared(shim, given, results)
        elif known is not None and self._suits(given):
            name = f"aoti_torch_{self.printer.program.buffers[x.writes()[0]].device.type}_{known[0]}"
            if not _there(name):
                raise _Cannot
            values = {a.name: v for a, v in given}
            args = [self._in_shim(values[n]) for n in known[1]]
            lines, called, results = [], f"call(run, {', '.join([self.printer.function(name), *args])})", []
        else:
            lines, called = self._dispatched(op, given, len(results))
        lines = [*self.before, *lines]
        if not repeatable(x, op):
            lines += [f"run.check({called});", *results]
        else:
            lines += [f"if ({called}) {{  // again, for its error", *_more(again)]
            lines += ["} else {", *_more(results), "}"] if any(results) else ["}"]
        lines += self._sizes(x)
        block = lines if lines[0].startswith(("if", "run.")) else ["{", *_more(lines), "}"]
        return [*block, *self._layouts(x)]

    # -- results --------------------------------------------------------------------------------
    def _results(self, x: Extern, op: torch._ops.OpOverload) -> list[str]:
        """A line per result in ``stack``; "" for one that is no tensor."""
        returns = op._schema.returns
        if not returns:
            if x.out is not None or any(o is not None for o in x.outputs):
                raise _Cannot  # (an out variant that returns nothing: whether it resized what it was given)
            return []
        if len(returns) != len(x.outputs):
            raise _Cannot
        out = []
        for i, (r, o) in enumerate(zip(returns, x.outputs)):
            kind, written = r.type.kind(), r.alias_info is not None and r.alias_info.is_write
            if r.alias_info is not None and not written and op not in REINTERPRET:
                raise _Cannot  # a view of an argument
            if x.out is not None and op not in OUT_VARIANTS.values() and kind == "TensorType":
                out.append(self._same(_results_of(x, self.printer.program.buffers)[i], i, op))
            elif kind in ("IntType", "FloatType", "BoolType") and o is None:
                out.append("")
            elif kind != "TensorType" or isinstance(o, str) and written and x.out is None:
                raise _Cannot
            elif isinstance(o, str) and not written:
                made = f"stack[{i}]"
                if op in SPECTRA.values() and op.name() != "reflib::fft_c2r":
                    made = f'seen(run, "aten::view_as_real", {made})'
                out.append(f"take(run, {self.printer.name(o)}, {made});{self._own(x, o, i)}")
            elif o is None or written:
                out.append(f"ignore(run, stack[{i}]);")
            else:
                raise _Cannot
        return out

    def _same(self, v: View, i: int, op: Any) -> str:
        """Check that result ``i`` is the memory that the op was given for it."""
        p = self.printer
        at = f"{p.name(v.buffer)}.ptr + {p.size(v.offset * v.dtype.itemsize)}"
        layout = f"{p.ints(v.shape)}, {p.ints(v.strides)}"
        return f"given_back<{len(v.shape)}>(run, stack[{i}], {at}, {layout}, {quoted(str(op))}, {i});"

    def _own(self, x: Extern, o: str, i: int) -> str:
        """Check that the result, of an op of the user's, is as promised, and in memory of its own."""
        p, made = self.printer, own_results(x)
        if o not in made:
            return ""
        b, op = p.program.buffers[o], quoted(str(x.target))
        held = f'{p.dtype(b.dtype)}, "{dtype_name(b.dtype)}", {b.dtype.itemsize}, {op}, {i}'
        others = dict.fromkeys((*x.reads(), *x.mutates, *made[: made.index(o)]))
        text = (f"{p.name(b)}, {p.size(p.program.buffers[b].nbytes)}, {op}, {i}" for b in others)
        return f" expect_all(run, {p.name(o)}, {held});" + "".join(f" expect_own(run, {p.name(o)}, {t});" for t in text)

    def _sizes(self, x: Extern) -> list[str]:
        """Sizes that the call determines."""
        lines = []
        for sym, i, dim in x.symbols:
            if dim is None or not isinstance(x.outputs[i], str):
                raise _Cannot
            read = f"size(run, {dim})" if dim >= 0 else f"stride(run, {~dim})"
            lines.append(f"{self.printer.name(sym.name)} = {self.printer.name(x.outputs[i])}.{read};")
        return lines

    def _layouts(self, x: Extern) -> list[str]:
        """Check results whose meta function may promise another layout: ``expect`` copies, or raises. What is passed on
        is as it is."""
        p = self.printer
        lines = []
        for o in x.outputs if x.out is None else ():
            if not isinstance(o, str) or o in p.inner.passed_on:
                continue
            b = p.program.buffers[o]
            sizes = sorted(s.name for s in symbols_in((b.shape, b.strides)))
            promised = f"({_python_ints(b.shape)}), ({_python_ints(b.strides)})"
            line = f"{o} = expect({o}, {promised}, op={str(x.target)!r})"
            which = p._function(f"expect_{o}", [o, *sizes], [line], [o])
            args = [f"tensor({p.name(o)})", *(f"integer({p.name(s)})" for s in sizes)]
            shape = f"{p.ints(b.shape)}, {p.ints(b.strides)}"
            lines.append(f"if (!laid_out<{len(b.shape)}>(run, {p.name(o)}, {shape})) {{")
            lines += ["  " + p._python_call(which, args, 1), f"  take(run, {p.name(o)}, results[0]);", "}"]
        return lines

    # -- by PyTorch's C interface -----------------------------------------------------------------
    def _suits(self, given: list[tuple[Any, Any]]) -> bool:
        """Is the C function equivalent? It does not check devices, and takes numbers as doubles."""
        buffers = self.printer.program.buffers
        tensors = [buffers[v.buffer] for _, v in given if isinstance(v, View)]
        numbers = [v for a, v in given if a.type.kind() == "NumberType"]
        floats = all(t.dtype.is_floating_point or t.dtype.is_complex for t in tensors)
        plain = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers)
        return len({t.device for t in tensors}) == 1 and plain and (floats or not numbers)

    def _in_shim(self, v: Any) -> str:
        return self._tensor(v) if isinstance(v, View) else number(float(v))

    def _tensor(self, v: View) -> str:
        """The name of a tensor with the argument's layout."""
        p = self.printer
        self._check_dtype(v)
        if v == full_view(p.program.buffers[v.buffer]):
            return p.name(v.buffer)
        n = p.name(f"{v.buffer} as {self.views}")
        self.views += 1
        args = f"{p.name(v.buffer)}, {p.ints(v.shape)}, {p.ints(v.strides)}, {p.size(v.offset)}"
        self.before.append(f"Tensor {n}; view<{len(v.shape)}>(run, {n}, {args});")
        return n

    def _check_dtype(self, v: View) -> None:
        if v.dtype != self.printer.program.buffers[v.buffer].dtype:
            raise _Cannot

    # -- by the user's C function ---------------------------------------------------------------
    def _declared(
        self, shim: Shim, given: list[tuple[Any, Any]], results: list[str]
    ) -> tuple[list[str], str, list[str]]:
        args = [c for a, v in given for c in self._in_c(a.real_type, v)]
        args += [f"&made[{i}]" for i in range(len(results))]
        lines = [f"Handle made[{len(results)}] = {{}};"] if results else []
        called = f"call(run, {', '.join([self.printer.function(shim.symbol), *args])})"
        return lines, called, [r.replace("stack[", "(uint64_t)made[") for r in results]

    def _in_c(self, kind: Any, v: Any) -> list[str]:
        """An argument as C parameters (``c_shims.c_types``)."""
        name = kind.kind()
        if name == "OptionalType":
            if v is None:
                return ["nullptr"]
            inner = kind.getElementType()
            if inner.kind() == "TensorType":
                return [f"&{self._tensor(v)}.handle" if isinstance(v, View) else _no()]
            c = {"FloatType": "double", "IntType": "int64_t", "SymIntType": "int64_t"}.get(inner.kind(), "int32_t")
            return [f"Just<{c}>{{{{{self._in_c(inner, v)[0]}}}}}.at"]
        if name == "ListType":
            items = [self._in_c(kind.getElementType(), i)[0] for i in _items(v, None)]
            if not items:
                return ["nullptr", "int64_t(0)"]
            if kind.getElementType().kind() == "TensorType":
                return [f"Many<Handle, {len(items)}>{{{{{', '.join(f'{i}.handle' for i in items)}}}}}.at",
                        f"int64_t({len(items)})"]  # fmt: skip
            return [f"Ints<{len(items)}>{{{{{', '.join(items)}}}}}.at", f"int64_t({len(items)})"]
        if name == "TensorType":
            return [self._tensor(v) if isinstance(v, View) else _no()]
        if name in ("IntType", "SymIntType"):
            return [f"int64_t({self._int(v)})"]
        if name == "FloatType":
            return [number(_float(v))]
        if name == "BoolType":
            return [f"int32_t({int(v)})" if isinstance(v, bool) else _no()]
        if name == "ScalarTypeType":
            return [self._dtype(v)]
        if name == "StringType":
            return [quoted(v)]
        raise _Cannot

    # -- by the dispatcher ------------------------------------------------------------------------
    def _dispatched(
        self, op: torch._ops.OpOverload, given: list[tuple[Any, Any]], results: int
    ) -> tuple[list[str], str]:
        known = op in SPECTRA.values()
        if op.namespace == "prims" or in_python(op) and not known:
            raise _Cannot
        values = [self.value(a.real_type, v, a.N) for a, v in given]
        name = op._schema.name.replace("reflib::", "aten::_") if known else op._schema.name
        if known and name != "aten::_fft_r2c":
            values[0] = f'seen(run, "aten::view_as_complex", {values[0]})'
        lines = [f"uint64_t stack[{max(len(values), results, 1)}] = {{{', '.join(values)}}};"]
        return lines, f'dispatch(run, "{name}", "{op._schema.overload_name}", stack)'

    def value(self, kind: Any, v: Any, n: int | None = None) -> str:
        """An argument in 64 bits. ``n``: the length of the list that one int stands for in the schema."""
        name = kind.kind()
        if name == "OptionalType":
            return "0" if v is None else f"some({self.value(kind.getElementType(), v, n)})"
        if name == "ListType":
            element, items = kind.getElementType(), _items(v, n)
            if element.kind() in ("IntType", "SymIntType") and items:
                return f"ints(run, {{{', '.join(map(self._int, items))}}})"
            values = [self.value(element, i) for i in items]
            return f"list(run, {{{', '.join(values)}}})" if values else "list(run)"
        if name == "TensorType" and isinstance(v, View):
            return self._owned(v)
        if name in ("IntType", "SymIntType"):
            return f"value({self._int(v)})"
        if name == "BoolType" and isinstance(v, bool):
            return f"value({str(v).lower()})"
        if name == "FloatType":
            return f"value({number(_float(v))})"
        if name == "ScalarTypeType":
            return f"value({self._dtype(v)})"
        if name == "LayoutType" and v is torch.strided:
            return "value(0)"
        if name == "MemoryFormatType" and v in MEMORY_FORMATS:
            return f"value({MEMORY_FORMATS[v]})"
        if name == "DeviceObjType" and v is not None:
            return f"value(placed(run, {_device(v)}))"
        if name == "StringType" and isinstance(v, str):
            return f"text(run, {quoted(v)})"
        raise _Cannot  # a Scalar, a generator, a tensor that is a Python number ...

    def _owned(self, v: View) -> str:
        p = self.printer
        self._check_dtype(v)
        if v == full_view(p.program.buffers[v.buffer]):
            return f"own(run, {p.name(v.buffer)})"
        args = f"{p.name(v.buffer)}, {p.ints(v.shape)}, {p.ints(v.strides)}, {p.size(v.offset)}"
        return f"own<{len(v.shape)}>(run, {args})"

    def _int(self, v: Any) -> str:
        if isinstance(v, (Expr, Sym)):
            return self.printer.size(v)
        if not isinstance(v, int) or not -(2**63) <= v < 2**63:
            raise _Cannot
        return str(int(v)) if v > -(2**63) else "INT64_MIN"

    def _dtype(self, v: Any) -> str:
        return self.printer.dtype(v) if v in self.printer.dtype_numbers else _no()


def _there(name: str) -> bool:
    """Does torch have this function? In a build without CUDA, CUDA's are assumed (2.11 and later have them all): the
    text may be for a package."""
    return bool(address(name)) or name.startswith("aoti_torch_cuda_") and not torch.backends.cuda.is_built()


def repeatable(x: Extern, op: torch._ops.OpOverload) -> bool:
    """May the call be repeated after it failed? (Drawing random numbers again is harmless.)"""
    writes = x.out is None and (bool(x.mutates) or op._schema.is_mutable)
    return not writes and (not x.effect or op.namespace == "aten")


def _arguments(x: Extern, op: torch._ops.OpOverload, buffers: Mapping[str, Buffer]) -> list[tuple[Any, Any]]:
    """Each argument of the schema, in order, with its value or default."""
    kwargs = dict(x.kwargs)
    outs = out_arguments(x.out[1], _results_of(x, buffers)) if x.out is not None else {}
    given = []
    for i, a in enumerate(op._schema.arguments):
        if a.name in outs:
            given.append((a, outs[a.name]))
        elif i < len(x.args):
            given.append((a, x.args[i]))
        elif a.name in kwargs:
            given.append((a, kwargs[a.name]))
        elif a.has_default_value():
            given.append((a, a.default_value))
        else:
            raise _Cannot
    return given


def _results_of(x: Extern, buffers: Mapping[str, Buffer]) -> list[View]:
    """The memory that a call is given for its results: buffers, or views of larger ones, among ``kwargs``."""
    assert x.out is not None
    views = dict(x.kwargs)
    return [views[k] if o is None else full_view(buffers[o]) for k, o in zip(x.out[1], x.outputs)]


def _items(v: Any, n: int | None) -> list[Any]:
    if isinstance(v, (list, tuple)):
        return list(v)
    if isinstance(v, (int, Expr, Sym)) and not isinstance(v, bool) and n:
        return [v] * n
    raise _Cannot


def _float(v: Any) -> float:
    if isinstance(v, bool) or not isinstance(v, (int, float)):
        raise _Cannot
    return float(v)


def number(v: float) -> str:
    """A double in C++."""
    if v != v:
        return '__builtin_nan("")'
    if v in (float("inf"), float("-inf")):
        return ("-" if v < 0 else "") + "__builtin_inf()"
    return repr(v)


def quoted(v: Any) -> str:
    if not isinstance(v, str) or not v.isascii() or not v.isprintable():
        raise _Cannot
    return '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _device(v: Any) -> str:
    d = torch.device(v)
    if d.type == "cpu":
        return "cpu"
    if d.type != "cuda":
        raise _Cannot
    return f"cuda({-1 if d.index is None else d.index})"


def _python_ints(items: tuple[Expr, ...]) -> str:
    return "".join(f"{py(i)}, " for i in items)


def _more(lines: list[str]) -> list[str]:
    return ["  " + line for line in lines if line]


def _no() -> str:
    raise _Cannot


# -- the user's C functions -----------------------------------------------------------------------------
def declared(option: tuple[tuple[str, str], ...]) -> dict[str, Shim]:
    """The C function per op. Raises OptionError for an op or a function that does not exist or does not fit."""
    out = {}
    for name, text in option:
        op, shim = op_of(name), parse(text, name)
        if op is None:
            raise OptionError(f"option c_shims: there is no op {name!r}; import, or load, what registers it")
        check(name, op, shim)
        _find(name, shim)
        out[str(op)] = shim
    return out


def _find(name: str, shim: Shim) -> None:
    """Raises OptionError unless the function exists and was built for this torch."""
    if not address(shim.symbol):
        raise OptionError(
            f"option c_shims[{name!r}]: there is no function {shim.symbol} in this process; load the library that "
            "has it with torch.ops.load_library(path) or ctypes.CDLL(path, ctypes.RTLD_GLOBAL)"
        )
    version, mine = address(f"{shim.symbol}_version"), address("aoti_torch_abi_version")
    if version and mine:
        wants, has = (ctypes.CFUNCTYPE(ctypes.c_uint64)(f)() for f in (version, mine))
        if wants > has:
            raise OptionError(
                f"option c_shims[{name!r}]: {shim.symbol} was built for torch {_version(wants)}, and this is torch "
                f"{_version(has)}; build it with an older TORCH_TARGET_VERSION"
            )


def _version(v: int) -> str:
    return f"{v >> 56}.{v >> 48 & 255}"
