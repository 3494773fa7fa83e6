"""Calling a compiled ExportedProgram: flatten the arguments, add parameters, run, build results. The graph itself
writes to the buffers and arguments that the model mutates.

The fast path is for a graph that checks its arguments itself, as a C++ wrapper does (sizes, and what was assumed of
them, included), and needs the C extension. Its ``entry`` calls it from C; where arguments are not all positional, or
results are not simply returned, a printed Python function (``structure.py``) runs before and after. A call that either
of them rejects falls back to the slow path, which revalidates every argument in Python: it raises a precise error, or
copies tensors that only have other strides.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ReflibError
from ..ir.expr import Expr, Sym, expr
from ..ir.program import Program
from . import host, structure
from .convention import WEIGHTS, Argument, Convention, Expected, Source, expect_told, sources


class ExportedCallable:
    """A graph, ``call(list) -> outputs``, as a callable with its calling convention. Inference only: runs without
    gradients and autocast, as it was compiled.

    ``weights``: the tensors that the convention names. ``call`` may be a ``wrap.Wrapped``, loaded at the first call.
    ``names``: of the positional arguments, for ``inspect.signature``. ``recorded``: returns the
    ``cuda_graphs.Recorded`` of ``call``, once there is one: the fast path then replays; the slow path, which calls
    ``records``, makes recordings."""

    # A slot: Python calls its value with no function in between.
    __slots__ = ("__call__", "__dict__", "__weakref__")
    __call__: Callable[..., Any]

    def __init__(
        self, convention: Convention, weights: Mapping[str, Any], call: Callable[[list], Any],
        names: Sequence[str] = (), recorded: Callable[[], Any] | None = None, records: Any = None,
    ):  # fmt: skip
        self.convention, self._weights = convention, weights
        self._call: Any = call
        self._recorded, self._records = recorded, records
        self._state = [weights[name] if name else None for name in convention.inputs]
        self._given = [i for i, name in enumerate(convention.inputs) if not name]
        self._at = {a.name: i for i, a in enumerate(convention.arguments)}
        self._apart = structure.takes_apart(convention.in_spec)
        self._sources = sources(convention.arguments)
        self._written = tuple(self._at[o.target] for o in convention.written if o.kind == "argument")
        self._tensors = [i for i, a in enumerate(convention.arguments) if a.tensor is not None]
        writes = {o.target for o in convention.written if o.kind == "weight"}
        self._held: dict[int, list[tuple[str, torch.Tensor, bool]]] = {}  # by storage: weights; are they written to?
        for name, w in weights.items() if self._written else [(n, weights[n]) for n in writes]:
            if isinstance(w, torch.Tensor) and w.layout is torch.strided and structure.has_memory(w):
                about = (f"weight {name}", w, name in writes)
                self._held.setdefault(w.untyped_storage().data_ptr(), []).append(about)
        told = {s.symbol for s in self._sources}
        for g in convention.guards:
            expect_told(g.what, told, f"{g.text}, which was assumed of its sizes,")
        self.__call__ = self._first
        self.__signature__ = structure.signature(convention.in_spec, names)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        return self.open()(*args, **kwargs)

    def open(self) -> Callable[..., Any]:
        """Load the graph, and choose the path that calls take from now on."""
        c = self.convention
        now: Callable[..., Any] = self._slow
        after = self._given == list(range(len(c.inputs) - len(self._given), len(c.inputs)))  # the weights
        checks = getattr(self._call, "checks_inputs", False)
        anywhere = all(a.tensor is None or a.tensor.begins is None for a in c.arguments)
        if after and anywhere and (checks or self._recorded) and host.has_entries():
            now = self._fast(self._call.load() if checks else None)
        self._call = self._records or self._call
        self.__call__ = now
        return now

    def close(self) -> None:
        if self._recorded is not None and (recorded := self._recorded()) is not None:
            recorded.close()

    # -- the fast path ------------------------------------------------------------------------------
    def _fast(self, graph: Callable[[list], tuple] | None) -> Callable[..., Any]:
        c, entry = self.convention, host.extension().entry
        head = tuple(self._weights[name] for name in c.inputs if name)
        kinds = "".join(map(_kind, c.arguments)).encode()
        names: dict[str, Any] = {"apart": self._apart, "slow": self._slow, "refused": _refused}
        names |= {"may_write": self._may_write, "written": torch.autograd.graph.increment_version}
        positional = c.in_spec == pytree.tree_structure((tuple(kinds), {})) and b"-" not in kinds
        returned = all(o.kind == "result" for o in c.outputs)
        if graph is not None and positional and returned and not c.written and self._recorded is None:
            if c.out_spec.is_leaf():
                return entry(graph, head, kinds, True, self._slow)
            if c.out_spec == pytree.tree_structure(tuple(c.outputs)):
                return entry(graph, head, kinds, False, self._slow)
        run = entry(graph, head, kinds, False, _refuse) if graph is not None else _refuse
        names["run"] = run if self._recorded is None else _replaying(self._recorded, head, run)
        exec(compile(self._printed(names), "<reflib call>", "exec"), names)
        return names.pop("call")  # (else it would be in a cycle with its names)

    def _printed(self, names: dict[str, Any]) -> str:
        """``call``: flattens the arguments, runs the graph, and builds the results."""
        c = self.convention
        fits = [_is(f"args[{i}]", a.value, names) for i, a in enumerate(c.arguments) if _kind(a) == "-"]
        fits += ["may_write(args)"] if c.written else []
        writes = [f"args[{i}]" for i in self._written]
        writes += [structure.bound(self._weights[o.target], names) for o in c.written if o.kind == "weight"]
        same = [f"args[{self._at[o.target]}]" if o.kind == "same" else f"results[{i}]" for i, o in enumerate(c.outputs)]
        return "\n".join([
            "def call(*args_, **kwargs):",
            "    args = apart(args_, kwargs)",
            f"    if {' and '.join(['args is not None', *fits])}:",
            "        results = run(*args)",
            "        if results is not refused:",
            *([f"            written(({', '.join(writes)},))"] if writes else []),
            f"            return {structure.built(c.out_spec, same, names)}",
            "    return slow(*args_, **kwargs)",
        ]) + "\n"  # fmt: skip

    # -- the slow path ------------------------------------------------------------------------------
    def _slow(self, *args: Any, **kwargs: Any) -> Any:
        c = self.convention
        flat = self._apart(args, kwargs)
        if flat is None:
            differs = structure.difference(c.in_spec, self.__signature__, args, kwargs)
            raise ReflibError(f"called with arguments of another structure than it was exported with: {differs}")
        given = [_fitting(a, x) for a, x in zip(c.arguments, flat)]
        sizes = self._sizes(given)
        for guard in c.guards:
            if not guard.holds(sizes):
                here = ", ".join(
                    f"{s.symbol} = {sizes[s.symbol.name]} ({self._place(s)})"
                    for s in sorted(self._sources, key=lambda s: str(s.symbol)) if s.symbol in guard.what.symbols()
                )  # fmt: skip
                raise ReflibError(f"it was exported where {guard.text} holds of the arguments' sizes; here {here}")
        if reason := self._cannot_write(flat):
            raise ReflibError(reason)
        values = list(self._state)
        for i, x, argument in zip(self._given, given, c.arguments):
            values[i] = _of_sizes(argument, x, sizes)
        copies = [(flat[i], values[self._given[i]]) for i in self._written if values[self._given[i]] is not flat[i]]
        if any(torch._debug_has_internal_overlap(x) for x, _ in copies):
            raise ReflibError("an argument that is written to has several elements in one place: pass a clone()")
        with torch.no_grad():
            with torch._C._DisableAutocast():
                results = self._call(list(values))
            for x, copy in copies:  # laid out as it was exported
                x.copy_(copy)
            weights = (self._weights[o.target] for o in c.written if o.kind == "weight")
            torch.autograd.graph.increment_version([*(flat[i] for i in self._written), *weights])
            same = [flat[self._at[o.target]] if o.kind == "same" else x for o, x in zip(c.outputs, results)]
            return pytree.tree_unflatten(same, c.out_spec)

    def _sizes(self, given: list[Any]) -> dict[str, int]:
        """The value of every symbol, within its range."""
        sizes: dict[str, int] = {}
        for s in self._sources:
            x, name = given[s.argument], s.symbol.name
            have = x if s.what == "value" else x.shape[s.dim] if s.what == "size" else x.stride(s.dim)
            n = sizes[name] = (have - s.plus) // s.times
            least, most = self.convention.ranges.get(name, (None, None))
            if least is not None and n < least or most is not None and n > most:
                argument = self.convention.arguments[s.argument].name
                what = "" if s.what == "value" else f"{s.what} "
                where = "" if s.what == "value" else f" in dimension {s.dim}"
                limits = _limits(s, least, most)
                raise ReflibError(f"argument {argument}: {what}{have}{where}, which was exported for {limits}")
        return sizes

    def _place(self, s: Source) -> str:
        """The expression of the caller's that determines a symbol's value."""
        text = s.place(self.convention.arguments)
        return text if (s.times, s.plus) == (1, 0) else f"{text} is {expr(s.symbol) * s.times + s.plus}"

    # -- what is written to -------------------------------------------------------------------------
    def _may_write(self, args: Sequence[Any]) -> bool:
        try:
            return not self._cannot_write(args)
        except (AttributeError, RuntimeError):  # no tensor, or one without memory: the slow path raises
            return False

    def _cannot_write(self, args: Sequence[Any]) -> str:
        """Why the graph cannot write to its arguments and weights; "" if it can. No argument may share the memory of
        one that is written to."""
        if not self.convention.written:
            return ""
        names = [a.name for a in self.convention.arguments]
        if torch.is_grad_enabled():
            for name in (names[i] for i in self._written if args[i].requires_grad):
                return f"argument {name} is written to and requires grad; this is inference only: pass {name}.detach()"
        places = [args[i].untyped_storage().data_ptr() for i in self._tensors]
        if len(set(places)) == len(places) and self._held.keys().isdisjoint(places):
            return ""
        for i, at in zip(self._tensors, places):
            others = [(f"argument {names[j]}", args[j], False) for j in self._tensors if j != i and i in self._written]
            for other, t, written in (*others, *self._held.get(at, ())):
                if (written or i in self._written) and _overlap(args[i], t):
                    mine = f"argument {names[i]}"
                    what = (other, mine) if written else (mine, other)
                    return f"{what[0]} is written to and shares memory with {what[1]}: pass {names[i]}.clone()"
        return ""


def _limits(s: Source, least: int | None, most: int | None) -> str:
    """The range of the argument's size, stride or value, in words."""
    ends = [None if e is None or e <= -(2**63) else e * s.times + s.plus for e in (least, most)]
    low, high = ends if s.times > 0 else reversed(ends)
    return f"{high} or less" if low is None else f"{low} or more" if high is None else f"{low} to {high}"


_refused = object()  # returned by a call that must take the slow path


def _refuse(*args: Any) -> Any:
    return _refused


def _replaying(of: Callable[[], Any], head: Sequence[Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, but what was recorded is replayed. Else the slow path checks the arguments before recording."""

    def run(*args: Any) -> Any:
        recorded = of()
        if recorded is None:
            return _refused
        inputs = [*head, *args]
        outputs = recorded.quick.run(inputs)
        if outputs is None:
            outputs = recorded.again(inputs)
        if outputs is None:
            return plain(*args) if recorded.settled(inputs) else _refused
        return outputs

    return run


def _kind(a: Argument) -> str:
    """The argument's letter: t, a plain tensor; i, an int; -, one that the graph does not read."""
    return "t" if a.tensor is not None else "i" if isinstance(a.value, Sym) else "-"


def _is(at: str, value: Any, names: dict[str, Any]) -> str:
    """The condition that ``at`` is ``value``, which is no tensor."""
    if value is None or isinstance(value, bool):
        return f"{at} is {value}"
    same = f"{at} == {structure.bound(value, names)}" if value == value else f"{at} != {at}"  # NaN
    return f"type({at}) is {structure.bound(type(value), names)} and {same}"


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do their byte ranges overlap?"""
    (a_first, a_end), (b_first, b_end) = structure.extent(a), structure.extent(b)
    return a_first < b_end and b_first < a_end


# -- checks of the slow path ------------------------------------------------------------------------------
def _fitting(argument: Argument, got: Any) -> Any:
    """``got``, if it is what the program was exported for, whatever its size."""
    name, want = f"argument {argument.name}", argument.tensor
    if want is None and isinstance(argument.value, Sym):
        if type(got) is not int:
            raise ReflibError(f"{name}: expected an int, got {type(got).__name__}")
        if not -(2**63) <= got < 2**63:
            raise ReflibError(f"{name}: {hex(got):.40} does not fit in 64 bits")
        return got
    if want is None:
        value = argument.value
        nan = value != value and got != got
        if type(got) is not type(value) or not (nan or got == value):
            came = f"a tensor, {host.described(got)}" if isinstance(got, torch.Tensor) else f"{got!r:.80}"
            raise ReflibError(f"{name}: it was exported with {value!r:.200}, got {came}")
        return got
    if not isinstance(got, torch.Tensor):
        raise ReflibError(f"{name}: expected a tensor, got {type(got).__name__}")
    if not structure.has_memory(got):
        raise ReflibError(
            f"{name}: a tensor with memory of its own is needed, got {type(got).__name__}; torch.vmap, torch.func and "
            f"fake tensors go through the model itself, not through what was compiled of it"
        )
    if got.layout is not torch.strided:
        raise ReflibError(f"{name}: layout {got.layout}, but it was exported with torch.strided")
    for what, have, asked in (
        ("dtype", got.dtype, want.dtype), ("device", got.device, want.device), ("ndim", got.ndim, len(want.shape)),
    ):  # fmt: skip
        if have != asked:
            raise ReflibError(f"{name}: {what} {have}, but it was exported with {asked}")
    if not structure.allocated(got):
        raise ReflibError(f"{name}: {structure.why_not_allocated(got)}")
    if want.begins not in (None, at := got.storage_offset()):
        instead = f"{argument.name}.clone()" if want.begins == 0 else "one that begins there"
        raise ReflibError(
            f"{name} begins at element {at} of its storage, at element {want.begins} when it was exported, and the "
            f"model's as_strided counts from the storage's first: pass {instead}"
        )
    return got.resolve_neg()


def _of_sizes(argument: Argument, got: Any, sizes: Mapping[str, int]) -> Any:
    """``got``, if it has the required sizes; a copy if only its strides differ. (Dynamo does not guard this call, and
    kernels are valid only for what they were compiled for.)"""
    name, want = f"argument {argument.name}", argument.tensor
    if want is None:
        if isinstance(argument.value, Sym) and got != (known := sizes[argument.value.name]):
            raise ReflibError(f"{name}: {got}, but {argument.value.name} is {known}, the size of another argument")
        return got
    for d, (n, e) in enumerate(zip(got.shape, want.shape)):
        if n != (wanted := _value(e, n, sizes)):
            text = f"{e} = {wanted}" if e.constant is None else str(e)
            raise ReflibError(f"{name}: size {n} in dimension {d}, but it was exported with {text}")
    return _laid_out(got, want, sizes)


def _laid_out(got: torch.Tensor, want: Expected, sizes: Mapping[str, int]) -> torch.Tensor:
    strides = tuple(_value(e, n, sizes) for e, n in zip(want.strides, got.stride()))
    if got.stride() == strides or all(n == 1 or s == h for n, s, h in zip(got.shape, strides, got.stride())):
        return got
    return torch.empty_strided(got.shape, strides, dtype=got.dtype, device=got.device).copy_(got)


def _value(want: Expr, have: int, sizes: Mapping[str, int]) -> int:
    """The required size; ``have`` if no argument determines it."""
    return int(want.evaluate(sizes)) if all(s.name in sizes for s in want.symbols()) else have


def expect_apart(convention: Convention, program: Program, weights: Mapping[str, Any]) -> None:
    """Raises ReflibError where ``program`` writes to a weight in memory that another one that it uses lies in: neither
    it nor torch.export knows that one changes with the other."""
    used = {b for n in program.nodes for b in (*n.reads(), *n.writes())} | program.output_buffers()
    names = [name for name, b in zip(convention.inputs, program.inputs) if name and b in used]
    tensors = {n: t for n in names if isinstance(t := weights[n], torch.Tensor) and structure.has_memory(t)}
    for name in (o.target for o in convention.written if o.target in tensors and o.kind == "weight"):
        for other, t in tensors.items():
            if other != name and t.layout is torch.strided and _overlap(tensors[name], t):
                raise ReflibError(f"{name} is written to and shares memory with {other}: give each memory of its own")


def names_of(exported: Any) -> tuple[str, ...]:
    """The model's names of the positional arguments."""
    signature = next((c.signature for c in exported.module_call_graph if not c.fqn), None)
    count = len(structure.children(structure.children(exported.call_spec.in_spec)[0]))
    return tuple(getattr(signature, "forward_arg_names", None) or ())[:count]


def weights_of(exported: Any) -> dict[str, Any]:
    """An ExportedProgram's own tensors, by the names of its inputs."""
    out = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind.name in WEIGHTS:
            held = exported.state_dict if spec.target in exported.state_dict else exported.constants
            out[spec.target] = held[spec.target]
    return out
