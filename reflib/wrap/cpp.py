"""The C++ printer: the steps that ``python.py`` prints, as one C++ function.

The text uses ``wrapper.h``: an owning Tensor, and one function per kind of step. Sizes are int64_t; buffers and symbols
keep their names. Kernels, Python functions, constants and C functions are numbered; the process fills in the tables
(``host.py``), so the same text serves any torch, and a package.

An ATen call uses the fastest interface that supports it (``aten.py``): a function of PyTorch's C interface, else its
dispatcher, else Python, which can call anything (a custom op, a higher-order op, an argument with no C form). When a
call from C fails, which reports no reason, it is repeated in Python for the exception.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..c_shims import Shim
from ..errors import GenerateError
from ..generate.cpp_text import identifier
from ..ir.expr import Atom, BinOp, Expr, Sym, expr, format_expr
from ..ir.printer import dtype_name, format_node
from ..ir.program import (
    Assume,
    Buffer,
    Extern,
    KernelNode,
    Node,
    Program,
    View,
    full_view,
    iter_views,
    kernel_nodes,
    node_symbols,
    symbols_in,
    walk,
)
from ..plan import Alloc, Branch, Call, Check, Free, Launch, Let, Note, Plan, Return, Step
from ..plan.arena import Arena
from ..plan.regions import Repeat
from .aten import direct_call, integer_read, quoted
from .bad_values import check_in_cpp
from .checks import call_in_python
from .indices import has_indirect, where_indexed
from .numbers_in_cpp import compared, put_size
from .python import SIGNS, Kernels, PythonPrinter, checked_symbols
from .steps import arena_in_cpp, repeat_in_cpp

DEVICES = ("cpu", "cuda")
# numbers of c10::ScalarType, as in the C interface
DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.complex64: 9, torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15,
    torch.float8_e5m2: 23, torch.float8_e4m3fn: 24, torch.float8_e5m2fnuz: 25, torch.float8_e4m3fnuz: 26,
    torch.uint16: 27, torch.uint32: 28, torch.uint64: 29,
}  # fmt: skip
# names that the text itself uses
TAKEN = frozenset(
    "Device Expected Failed Frame Guard Handle Host Ints Just Kernel Many Named Range Run Tensor Text Torch Value "
    "aligned anywhere args argument argument_said call cpu cuda differs dispatch drop empty entry escaped expect_all "
    "expect_own expect_range expect_size expect_sizes expect_stride expect_value floor_div floor_mod frame give guard "
    "host ignore in input int16_t int32_t int64_t int8_t integer ints laid_out launch launch_with list made max min "
    "none number object out own placed plain python reflib reflib_call refuse results run run_indexing run_kernel "
    "run_with seen some stack stream stream_of symbol take tensor text there uint16_t uint32_t uint64_t uint8_t value "
    "view within write_ints zeros".split()
)
MOST_PARTS = 6  # parts of a fused kernel whose IR is shown in a comment
LONGEST = 140  # characters of such a line


class CppPrinter:
    """Prints a Plan. The tables that its text's numbers index: ``kernels`` (names), ``functions`` (names in the Python
    text ``python``, which runs with ``names``), ``objects``, ``constants`` (names of tensors), ``symbols`` (C
    functions). ``needs``: Python functions that calls require, and their purpose; the others serve errors and logs."""

    dtype_numbers = DTYPES

    def __init__(
        self, program: Program, plan: Plan, kernels: Kernels, check_nan: bool = False,
        shims: Mapping[str, Shim] | None = None,
    ):  # fmt: skip
        self.program, self.plan, self.by_name, self.check_nan = program, plan, kernels, check_nan
        self.shims = shims or {}  # the user's C functions, by op
        self.kernels: list[str] = list(dict.fromkeys(k.name for k in kernels.values()))
        self.functions: list[str] = []
        self.needs: dict[str, str] = {}
        self.objects: list[object] = []
        self.symbols: list[str] = []
        self.constants = [b.name for b in program.buffers.values() if b.kind == "const"]
        self.inner = PythonPrinter(program, plan, kernels)
        self.pieces: list[str] = []
        self.named: dict[str, str] = {}
        self.dtypes: set[torch.dtype] = set()
        self.tables: list[str] = []
        self.lines: list[str] = []
        self.pad = "  "
        self.at = {name: i for i, name in enumerate(program.inputs) if isinstance(name, str)}
        self.gpu = sorted({b.device.index or 0 for b in program.buffers.values() if b.device.type == "cuda"})
        self.lasting: set[str] = set()  # declared at the top of the function
        self.strict = laid_out(program)
        self.numbers = _numbers(program)

    @property
    def names(self) -> dict[str, object]:
        return self.inner.names

    @property
    def python(self) -> str:
        """The text of the Python functions."""
        return "\n\n".join(["\n".join(self.inner.header), *self.pieces]).strip() + "\n" if self.pieces else ""

    def print(self) -> str:
        for b in self.program.buffers.values():
            if b.device.type not in DEVICES:
                raise GenerateError(f'wrapper="cpp" knows cpu and cuda; {b.name} is on {b.device}: use "python"')
        self._entry()
        lets = [s for s in self.plan.steps if isinstance(s, Let)]
        for let in lets:
            self._step(let)
        self._sizes(lets)
        for step in self.plan.steps:
            if not isinstance(step, Let):
                self._step(step)
        head = ["// Printed by reflib. Steps in the order of the plan, each below the IR that it comes from.",
                '#include "wrapper.h"', "", "using namespace reflib;", ""]  # fmt: skip
        if self.kernels:
            head += ["enum {  // kernels", *(f"  {self.name(k)}," for k in self.kernels), "};"]
        if self.symbols:
            head += ["enum {  // functions in C", *(f"  {self.name(s)}," for s in self.symbols), "};"]
        if self.functions:
            head += ["enum {  // functions in Python, below", *(f"  {f}," for f in self.functions), "};"]
        head += [f"constexpr int32_t {_constant(d)} = {scalar_type(d)};" for d in sorted(self.dtypes, key=str)]
        head += self.tables
        start = 'extern "C" int32_t reflib_call(Host* host, Frame* frame, const Value* in, Value* out) try {'
        temps = [self.name(b) for b in self.program.buffers if b in self.lasting]
        space = [b for k in kernel_nodes(self.program.nodes) for b in k.workspace]
        temps += sorted({self.name(b.name) for b in space if b.kind != "zeros"})
        body = ["  Run run(host, frame);"]
        body += [f"  Tensor {', '.join(temps[i : i + 8])};" for i in range(0, len(temps), 8)]
        end = ["  return 0;", "} catch (const Failed&) {", "  return -1;", "} catch (...) {",
               "  return escaped(frame);", "}"]  # fmt: skip
        text = "\n".join([*head, "", start, *body, *self.lines, *end]) + "\n"
        if self.pieces:
            text += "\n/* Called from above, in Python:\n\n" + self.python.replace("*/", "* /") + "*/\n"
        return text

    # -- names and numbers --------------------------------------------------------------------------
    def name(self, name: str) -> str:
        """``name`` as a unique C++ identifier."""
        if name not in self.named:
            text = identifier(name)
            taken = TAKEN.union(map(_constant, DTYPES), (f"stream{d}" for d in self.gpu))
            while text in taken or text in self.named.values():
                text += "_"
            self.named[name] = text
        return self.named[name]

    def dtype(self, d: torch.dtype) -> str:
        self.dtypes.add(d)
        return _constant(d)

    def function(self, symbol: str) -> str:
        """The name of a C function's number."""
        if symbol not in self.symbols:
            self.symbols.append(symbol)
        return self.name(symbol)

    def size(self, e: Expr | int | Sym) -> str:
        """An index expression in C++, whose / and % round toward zero."""

        def atom(a: Atom) -> str:
            if isinstance(a, BinOp):
                fn = {"//": "floor_div", "%": "floor_mod"}.get(a.fn, a.fn)
                return f"{fn}({self.size(a.a)}, {self.size(a.b)})"
            return self.name(a.key)

        return format_expr(expr(e), atom)

    def ints(self, items: tuple[Expr, ...]) -> str:
        return "{" + ", ".join(map(self.size, items)) + "}"

    def device(self, d: torch.device) -> str:
        return "cpu" if d.type == "cpu" else f"cuda({d.index or 0})"

    def put(self, line: str) -> None:
        self.lines.append(self.pad + line)

    def about(self, node: Node) -> None:
        """A comment with the IR of the next step."""
        parts: tuple[Any, ...] = node.parts if isinstance(node, KernelNode) else (node,)
        for p in parts[:MOST_PARTS]:
            line = format_node(p).splitlines()[0].rstrip(" {")
            where = next((f"  ({o.source.split(' in ')[0]})" for o in getattr(p, "origins", ()) if o.source), "")
            line = line if len(line) <= LONGEST else line[:LONGEST] + " ..."
            self.put(f"// {comment(line + where)}")
        if len(parts) > MOST_PARTS:
            self.put(f"// ... and {len(parts) - MOST_PARTS} more")

    # -- entry --------------------------------------------------------------------------------------
    def _entry(self) -> None:
        for i, x in enumerate(self.program.inputs):
            if isinstance(x, Sym):
                value = f'symbol(run, {i}, "{x.name}", in[{i}])'
                again = x in self.program.inputs[:i]
                n = self.name(x.name)
                self.put(f'expect_value(run, {i}, "{x.name}", {value}, {n});' if again else f"int64_t {n} = {value};")
            elif isinstance(x, str):
                self.lasting.add(x)
                expected = self._expected(self.program.buffers[x], x in self.strict)
                self.put(f"input(run, {self.name(x)}, {i}, in[{i}], {expected});")
        for i, c in enumerate(self.constants):
            self.lasting.add(c)
            self.put(f"{self.name(c)}.borrow(run, host->constants[{i}]);")
        for s in sorted({s.name for n in walk(self.program.nodes) if isinstance(n, Extern) for s, _, _ in n.symbols}):
            kind = f", {self.name(f'{s} kind')} = VALUE_INT" if s in self.numbers else ""
            self.put(f"int64_t {self.name(s)} = 0{kind};")
        for name in sorted(self.inner._assumed_aligned()):
            self.put(f"const bool {self.name('aligned_' + name)} = {self.name(name)}.aligned(16);")
        if self.gpu:
            self.put(f"Guard guard(run, {self.gpu[0]});")
            for d in self.gpu:
                self.put(f"void* stream{d} = stream_of(run, {d});")

    def _sizes(self, lets: list[Let]) -> None:
        """Check sizes and strides that depend on symbols, and the symbols' ranges."""
        bound = {(let.buffer, let.dim): let for let in lets if let.what == "size"}
        checked = {a.what for facts, _ in self.program.checks for a in facts}
        for name, i in self.at.items():
            n = self.name(name)
            for d, e in enumerate(self.program.buffers[name].shape):
                let = bound.get((name, d))
                if let is not None:
                    s = let.sym
                    least = s.lo if s.lo > 2 else 0  # every dynamic size has lo=2; 0 and 1 are accepted, as in eager
                    if expr(s) not in checked and (s.hi is not None or least):
                        limits = f"{least}, {s.hi if s.hi is not None else 'INT64_MAX'}"
                        self.put(f'expect_range(run, {i}, "{name}", "{s.name}", {self.name(s.name)}, {limits});')
                if e.symbols() and (let is None or (let.times, let.plus) != (1, 0)):
                    self.put(f'expect_size(run, {i}, "{name}", {n}, {d}, {self.size(e)}, "{e}");')
        known = {(let.buffer, let.dim) for let in lets if let.what == "stride"}
        for name, i in self.at.items():
            for d, e in enumerate(self.program.buffers[name].strides if name in self.strict else ()):
                if e.symbols() and (name, d) not in known:
                    self.put(f'expect_stride(run, {i}, "{name}", {self.name(name)}, {d}, {self.size(e)}, "{e}");')

    def _expected(self, b: Buffer, strict: bool) -> str:
        """The name of a constant that describes the required input."""
        known = [["-1" if e.symbols() else str(e) for e in es] for es in (b.shape, b.strides)]
        tables: list[str] = []
        for what, values in zip(("sizes", "strides"), known):
            if values and (what == "sizes" or strict):
                tables.append(self.name(f"{b.name} {what}"))
                self.tables.append(f"constexpr int64_t {tables[-1]}[] = {{{', '.join(values)}}};")
            else:
                tables.append("nullptr")
        # attention saves its seed for backward on the CPU, although its meta function says otherwise
        device = self.device(b.device) if b.shape or strict else "anywhere"
        fields = f'"{b.name}", "{dtype_name(b.dtype)}", {self.dtype(b.dtype)}, {device}, {len(b.shape)}'
        self.tables.append(f"constexpr Expected {self.name(f'{b.name} is')}{{{fields}, {', '.join(tables)}}};")
        return self.name(f"{b.name} is")

    # -- steps --------------------------------------------------------------------------------------
    def _step(self, step: Step) -> None:
        if isinstance(step, Let):
            b = self.name(step.buffer)
            value = f"{b}.{step.what}(run, {step.dim})"
            if (step.times, step.plus) != (1, 0):
                value = f"floor_div({value} - {step.plus}, {step.times})"
            self.put(f"int64_t {self.name(step.sym.name)} = {value};")
        elif isinstance(step, Check):
            holds = " && ".join(map(self._condition, step.facts))
            sizes = ", ".join(f'{{"{s}", {self.name(s)}}}' for s in checked_symbols(step))
            self.put(f"expect_sizes(run, {holds}, {quoted(step.text)}, {{{sizes}}});")
        elif isinstance(step, Arena):
            arena_in_cpp(self, step)
        elif isinstance(step, Alloc):
            self._alloc(step)
        elif isinstance(step, Launch):
            self._launch(step)
        elif isinstance(step, Repeat):
            repeat_in_cpp(self, step)
        elif isinstance(step, Branch):
            self._branch(step)
        elif isinstance(step, Note):
            said = f"outside({step.what!r}, size, {step.least}, {step.most}, {step.op!r})"
            which = self._function("note", ["size"], [said], [])
            size = self.size(step.size)
            call = self._python_call(which, [f"integer({size})"], 0)
            self.put(f"if ({size} < {step.least} || {size} > {step.most}) {{ {call} }}")
        elif isinstance(step, Call):
            self._call(step.extern)
        elif isinstance(step, Free):
            n = self.name(step.buffer)
            self.put(f"drop(run, {n}, {self.at[step.buffer]});" if step.buffer in self.at else f"{n}.reset();")
        elif isinstance(step, Return):
            self._return(step)
        if self.check_nan and isinstance(step, (Launch, Call)):
            check_in_cpp(self, step)

    def _alloc(self, step: Alloc) -> None:
        b = self.program.buffers[step.buffer]
        self.lasting.add(b.name)
        n, rank = self.name(b.name), len(b.shape)
        if step.reuse is None:
            self._empty(b)
            return
        old = self.program.buffers[step.reuse]
        if (old.shape, old.strides) == (b.shape, b.strides):
            self.put(f"{self.name(old.name)}.pass_to({n});  // takes over its storage")
        else:
            self.put(f"view<{rank}>(run, {n}, {self.name(old.name)}, {self.ints(b.shape)}, {self.ints(b.strides)}, 0);")

    def _empty(self, b: Buffer) -> None:
        args = f"{self.ints(b.shape)}, {self.ints(b.strides)}, {self.dtype(b.dtype)}, {self.device(b.device)}"
        self.put(f'empty<{len(b.shape)}>(run.at("empty {b.name}"), {self.name(b.name)}, {args});')

    def _branch(self, step: Branch) -> None:
        self.put(f"if ({' && '.join(self._condition(a) for a in step.predicate)}) {{")
        self._block(step.then)
        self.put("} else {")
        self._block(step.otherwise)
        self.put("}")

    def _block(self, steps: tuple[Step, ...]) -> None:
        self.pad += "  "
        for s in steps:
            self._step(s)
        self.pad = self.pad[:-2]

    def _condition(self, a: Assume) -> str:
        if a.kind == "aligned":
            return self.name(f"aligned_{a.what}")
        if a.kind == "divisible":
            return f"floor_mod({self.size(a.what)}, {a.value}) == 0"
        return f"{self.size(a.what)} {SIGNS[a.kind]} {a.value}"

    def _launch(self, step: Launch) -> None:
        kernel = self.by_name[step.kernel.name]
        device = self.program.buffers[step.kernel.writes()[0]].device
        self.about(step.kernel)
        args = [self.name(b) for b, _ in kernel.buffers] + [self.name(s.name) for s in kernel.symbols]
        if kernel.grid == 0:
            self.put(f"// {kernel.name}: nothing to do for an empty tensor")
        elif device.type == "cpu":
            where = [quoted(where_indexed(step.kernel))] if has_indirect(step.kernel) else []
            call = "run_indexing" if where else "run_kernel"
            self.put(f"{call}(run, {', '.join([self.name(kernel.name), *where, *args])});")
        else:
            stream = f"stream{device.index or 0}"
            places: dict[str, str] = {}
            elsewhere = (device.index or 0) != self.gpu[0]
            scoped = elsewhere or any(b.kind == "zeros" for b in step.kernel.workspace)
            if scoped:
                self.put("{")
                self.pad += "  "
            if elsewhere:  # streams belong to the current device
                self.put(f"Guard there(run, {device.index});")
            for b in step.kernel.workspace:
                n = self.name(b.name)
                if b.kind == "zeros":
                    places[n] = self.name(f"{b.name} words")
                    words = f"zeros(run, {device.index or 0}, {stream}, {self.size(b.numel)})"
                    self.put(f"char* {places[n]} = {words};")
                else:
                    self.lasting.discard(b.name)
                    self._empty(b)
            args += [self.name(b.name) for b in step.kernel.workspace if b.kind == "scratch"]
            args = [places.get(a, a) for a in args]
            self.put(f"launch(run, {', '.join([self.name(kernel.name), stream, self.size(kernel.grid), *args])});")
            for b in step.kernel.workspace:
                if b.kind != "zeros":
                    self.put(f"{self.name(b.name)}.reset();")
            if scoped:
                self.pad = self.pad[:-2]
                self.put("}")

    # -- calls --------------------------------------------------------------------------------------
    def _call(self, x: Extern) -> None:
        self.about(x)
        made = [o for o in x.outputs if isinstance(o, str)]
        if x.out is None:
            self.lasting.update(made)
        known = {s for s, _, _ in x.symbols}
        shapes = [e for o in made for b in [self.program.buffers[o]] for e in (*b.shape, *b.strides)]
        sizes = sorted({s.name for s in (node_symbols(x) | symbols_in(shapes)) - known})
        takes = list(dict.fromkeys([*x.reads(), *(made if x.out is not None else ())]))
        gives = [] if x.out is not None else [*made, *(s.name for s, _, _ in x.symbols)]
        p = self.inner
        p.lines, p.pad = [], ""
        call_in_python(p, Call(x))
        which = self._function(x.name, [*takes, *sizes], p.lines, gives)
        args = [f"tensor({self.name(b)})" for b in takes] + [self._number(s) for s in sizes]
        self.put(f"run.step({quoted(_called(x.target))});")
        lines = [self._python_call(which, args, len(gives))]
        for i, g in enumerate(gives):
            n = self.name(g)
            kind = f", {self.name(f'{g} kind')} = results[{i}].kind" if g in self.numbers else ""
            lines.append(f"take(run, {n}, results[{i}]);" if i < len(made) else f"{n} = results[{i}].integer{kind};")
        direct = compared(self, x, lines) or direct_call(self, x, lines)
        if direct is not None:
            lines = direct
        else:
            self.needs[self.functions[which]] = _called(x.target)
            lines = ["{", *("  " + line for line in lines), "}"] if gives else lines
        for line in lines:
            self.put(line)

    def _number(self, symbol: str) -> str:
        """Its value, as it is in Python."""
        n = self.name(symbol)
        return f"as_kind({self.name(f'{symbol} kind')}, {n})" if symbol in self.numbers else f"integer({n})"

    def _function(self, name: str, parameters: list[str], lines: list[str], gives: list[str]) -> int:
        """Add a Python function; its number."""
        n = len(self.functions)
        self.functions.append(self.name(f"python {n} {name}"))
        result = f"    return ({', '.join(gives)}{',' if len(gives) == 1 else ''})"
        head = f"def {self.functions[-1]}({', '.join(parameters)}):"
        self.pieces.append("\n".join([head, *("    " + line for line in lines), result]))
        return n

    def _python_call(self, which: int, args: list[str], results: int) -> str:
        given = f", {{{', '.join(args)}}}" if args else ""
        call = f"python(run, {self.functions[which]}{given}"
        return f"Value results[{results}]; {call}, results);" if results else f"{call});"

    # -- the end ------------------------------------------------------------------------------------
    def _return(self, step: Return) -> None:
        for i, o in enumerate(step.outputs):
            if isinstance(o, View) and o == full_view(self.program.buffers[o.buffer]):
                self.put(f"out[{i}] = give(run, {self.name(o.buffer)});")
            elif isinstance(o, View):
                b = self.program.buffers[o.buffer]
                if o.dtype != b.dtype:
                    self.result_in_python(i, o, [o.buffer], "a result seen as another dtype")
                    continue
                args = f"{self.name(b.name)}, {self.ints(o.shape)}, {self.ints(o.strides)}, {self.size(o.offset)}"
                self.put(f"{{ Tensor made; view<{len(o.shape)}>(run, made, {args}); out[{i}] = give(run, made); }}")
            elif isinstance(o, Expr) and o.symbols() and not any(o == expr(s) for s in o.symbols()):
                put_size(self, i, o)
            elif isinstance(o, Expr) and str(o) in self.numbers:
                self.put(f"out[{i}] = {self._number(str(o))};")
            elif isinstance(o, (Expr, Sym)) or isinstance(o, int) and not isinstance(o, bool):
                self.put(f"out[{i}] = integer({self.size(o)});")
            elif o is None:
                self.put(f"out[{i}] = none();")
            else:
                self.objects.append(o)
                self.put(f"out[{i}] = object({len(self.objects) - 1});")

    def result_in_python(self, i: int, value: Expr | View, buffers: list[str], purpose: str) -> None:
        """``purpose``: for which every call needs Python, or ""."""
        sizes = sorted(s.name for s in symbols_in(value))
        name = "view" if buffers else "size"
        which = self._function(name, [*buffers, *sizes], [f"result = {self.inner.value(value)}"], ["result"])
        self.needs |= {self.functions[which]: purpose} if purpose else {}
        args = [f"tensor({self.name(b)})" for b in buffers] + [self._number(s) for s in sizes]
        self.put(f"{{ {self._python_call(which, args, 1)} out[{i}] = results[0]; }}")


def _numbers(program: Program) -> set[str]:
    """Symbols that calls return and that may be floats or bools: those that are no sizes of their results."""
    calls = [n for n in walk(program.nodes) if isinstance(n, Extern)]
    return {s.name for n in calls if not integer_read(n) for s, _, dim in n.symbols if dim is None}


def _called(target: Any) -> str:
    """The target's name in messages."""
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", "a function")


def comment(text: str) -> str:
    """``text`` on one line, without backslashes (which would continue a C++ comment on the next line)."""
    return " ".join(text.replace("\\", "/").split())


def scalar_type(d: torch.dtype) -> int:
    try:
        return DTYPES[d]
    except KeyError:
        raise GenerateError(f'wrapper="cpp" does not know {d}: use wrapper="python"') from None


def _constant(d: torch.dtype) -> str:
    """The name of a dtype's number in the text. (``bool`` is a C++ keyword.)"""
    return identifier(dtype_name(d))


def laid_out(program: Program) -> set[str]:
    """Inputs whose strides matter: kernels read them, or a number in them, or a view other than the whole is taken."""
    calls = [n for n in walk(program.nodes) if isinstance(n, Extern)]
    views = list(iter_views(([(n.args, n.kwargs, n.outputs) for n in calls], program.outputs)))
    cut = {v.buffer for v in views if v != full_view(program.buffers[v.buffer])}
    cut |= {b for n in calls if n.target is torch.ops.aten._local_scalar_dense.default for b in n.reads()}
    return cut | {b for n in kernel_nodes(program.nodes) for b in n.reads()}
