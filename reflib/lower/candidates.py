"""Making the Choice of an op that has registered implementations (:mod:`~reflib.lower.custom_ops`).

The first variant is the op itself, called (or taken apart). Every implementation is traced and lowered over the same
buffers (:mod:`~reflib.lower.subgraph`); one that cannot be used is a line in ``Choice.failed``; the others are not
affected.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from reflib import logs
from reflib.errors import LoweringError, RegistrationError
from reflib.ir.expr import Expr, Sym
from reflib.ir.program import Assume, Choice, Extern, Ranges, Variant, View, full_view, holds, map_tree

from . import custom_ops, one_order
from .context import LoweringContext
from .custom_ops import CustomOpConfig, DispatchOn, Registration
from .extern import extern
from .subgraph import Refused, variant

aten = torch.ops.aten
_OFF = 'autotune is "off"; compile with options={"autotune": "blocking"} or mode="max-autotune"'
_PLAIN = (bool, int, float, str, type(None))  # what a program as data can hold
Failed = tuple[tuple[str, str, str], ...]

# Ops whose own rule makes a Choice (of ATen and templates) that registered implementations join.
JOINED = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
# Our own ops, by name, whose rule makes calls that do what the op does: these are the first variant.
TAKEN_APART: set[str] = set()


def call(cx: LoweringContext, target: Any, args: Any, kwargs: dict[str, Any], usual: Callable[[], Any]) -> Any:
    """Lower a call of any op; returns its value (plugs into ``lower.CALLS``). ``usual``: lowers it as if the op were
    not registered, as is done inside an implementation of the op."""
    if cx.low.options.batch_invariant:
        return one_order.checked(cx, target, usual)
    r = custom_ops.registration(target) if cx.low.choices and str(target) not in cx.low.within else None
    if r is None:
        return usual()
    if cx.low.options.numerics == "eager":
        custom_ops.warn_not_tried(r, 'numerics is "eager"')
        return usual()
    if cx.low.options.autotune == "off":
        custom_ops.warn_not_tried(r, _OFF)
        return usual()
    before, apart = len(cx.low.nodes), str(target) in TAKEN_APART
    value = usual() if apart or target in JOINED else extern(cx, target, args, kwargs, "the eager op")
    parts = cx.low.nodes[before:] if apart else cx.low.nodes[-1:]
    node = parts[0]
    why_not = "" if apart else _not_a_choice(node)
    if why_not:
        logs.get("autotune").info("%s: its implementations are not tried: %s", r.name, why_not)
        return value
    given = arguments(target, args, kwargs, r)
    ranges = _ranges(cx, r, given)
    tops = _tops(ranges)
    configs = _configs(cx, target, r, given, tops)
    assert isinstance(node, (Choice, Extern))
    outputs = [full_view(cx.low.buffers[o]) if isinstance(o, str) else None for o in node.outputs]
    del cx.low.nodes[-len(parts) :]
    taken = {a.name for a in node.variants} if isinstance(node, Choice) else {"eager"}
    more, failed = variants(cx, target, configs, given, outputs, taken, points=tops)
    if isinstance(node, Extern):
        first = (Variant("eager", tuple(parts)),)
        node = Choice(node.name, r.name, tuple(o for o in node.outputs if o), first, origins=node.origins)
    cx.low.nodes.append(
        replace(
            node, variants=(*node.variants, *more), failed=(*node.failed, *failed), min_speedup=r.min_speedup,
            graph_timing=r.graph_timing, ranges=ranges, inputs_from=_inputs_from(cx, r, given), custom=True,
        )
    )  # fmt: skip
    return value


def variants(
    cx: LoweringContext,
    target: Any,
    configs: Iterable[CustomOpConfig],
    given: Mapping[str, Any],
    outputs: Sequence[View | None],
    taken: Iterable[str] = (),
    choices: bool = True,
    points: Sequence[Mapping[str, int]] = (),
) -> tuple[list[Variant], Failed]:
    """Each config as a variant of a call of ``target`` with the arguments ``given`` by name, writing ``outputs``;
    and (name, status, why) of those that cannot be one. ``taken``: names in use. ``choices``: may their matrix products
    and registered ops become Choices in turn? ``points``: see :func:`_traces`."""
    made: list[Variant] = []
    failed: list[tuple[str, str, str]] = []
    names = set(taken)
    for c in configs:
        if c.decomposition is None and not c.params:
            continue  # the eager op, which is there already
        name = _unique(c.name, names)
        names.add(name)
        call = custom_ops.call_of(target, c, given)
        try:
            if isinstance(call, str):
                raise Refused("unsupported", call)
            fn = target if c.decomposition is None else c.decomposition
            trace = partial(
                variant, cx, str(target), fn=fn, args=call[0], kwargs=call[1], outputs=outputs, choices=choices
            )
            traced = _traces(trace, name, points)
        except Refused as e:
            failed.append((name, e.status, e.why))
            logs.get("autotune").info("%s: %s cannot be tried: %s", target, name, e)
        else:
            params = sorted((k, v if isinstance(v, _PLAIN) else repr(v)) for k, v in c.params.items())
            patches = tuple(sorted(c.config_patches.items()))
            names |= {a.name for a in traced}
            made += [replace(a, patches=patches, params=tuple(params)) for a in traced]
    return made, tuple(failed)


def _traces(trace: Callable[..., Variant], name: str, points: Sequence[Mapping[str, int]]) -> list[Variant]:
    """An implementation, traced at the program's sizes, and again at each of ``points`` (the tops of the ranges that
    are decided separately) for which no trace so far holds: what it may be tried at does not hang on the size that the
    program was first called with. Raises Refused, the first reason, if there is none."""
    made: list[Variant] = []
    refused: Refused | None = None
    for point in ({}, *points):
        if any(all(_may_hold(g, point) for g in a.predicate) for a in made):
            continue
        at = ", ".join(map(str, point.values()))
        try:
            made.append(trace(name=f"{name} (traced at {at})" if made else name, sizes=point))
        except Refused as e:
            if refused is None and not made:
                refused = e
            if e.status not in ("raised", "wrong shape"):  # those depend on sizes
                break
    if not made:
        assert refused is not None
        raise refused
    return made


def _may_hold(guard: Assume, point: Mapping[str, int]) -> bool:
    """Does a guard hold at these sizes? (One about other sizes may.)"""
    return not {s.name for s in guard.what.symbols()} <= set(point) or holds(guard, point)


def arguments(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], r: Registration | None = None
) -> dict[str, Any]:
    """The call's arguments by name. Raises LoweringError if the op has been redefined since it was registered."""
    if r is not None and r.schema != str(target._schema):
        raise LoweringError(
            f"{target} was redefined as {target._schema} after register_custom_op_autotuning saw it as {r.schema}; "
            "register its implementations again"
        )
    return {**dict(zip((a.name for a in target._schema.arguments), args)), **kwargs}


def _unique(name: str, taken: set[str]) -> str:
    n, out = 1, name
    while out in taken:
        n += 1
        out = f"{name} #{n}"
    return out


def _not_a_choice(node: Any) -> str:
    """Why a lowered call must stay what it is; empty if it may become a Choice."""
    if isinstance(node, Choice):
        return ""
    if not isinstance(node, Extern) or node.mutates or node.effect:
        return "the op has effects"
    if node.symbols:
        return "its results' sizes are known only when it has run"
    if not any(node.outputs) or not all(o is None or isinstance(o, str) for o in node.outputs):
        return "its results are not new tensors"
    return ""


# -- what the configs and the ranges are for this call -----------------------------------------------
def _tops(ranges: Ranges | None) -> list[dict[str, int]]:
    """The size symbol's value at the top of each range; of two sizes, at all pairs of these."""
    if ranges is not None and ranges.inner is not None:
        first = replace(ranges, inner=None)
        return [{**a, **b} for a, b in product(_tops(first) or [{}], _tops(ranges.inner) or [{}]) if a or b]
    symbol = ranges.size.atom if ranges else None
    if ranges is None or not isinstance(symbol, Sym):
        return []
    tops, most = (*ranges.splits, ranges.upper), symbol.hi
    return [{symbol.name: v} for v in tops if symbol.lo <= v and (most is None or v <= most)]


def _configs(
    cx: LoweringContext, target: Any, r: Registration, given: Mapping[str, Any], tops: Sequence[Mapping[str, int]]
) -> list[CustomOpConfig]:
    """The static list; or what the generator makes of the sizes as traced, then as the top of each range has them."""
    if r.generator is None:
        return list(r.configs)
    found: dict[Any, CustomOpConfig] = {}
    for p in ({}, *tops):
        for c in _generated(cx, target, r, given, p):
            found.setdefault(c.key(), c)
    return list(found.values())


def _generated(
    cx: LoweringContext, target: Any, r: Registration, given: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[CustomOpConfig, ...]:
    """Call the generator. Errors name it, and what it returned."""
    assert r.generator is not None
    name = getattr(r.generator, "__name__", None) or repr(r.generator)
    where = f"config_generator {name} of {target}"
    try:
        with unset_fake_temporarily():  # AOTAutograd's mode
            made = r.generator(fake_tensors(cx, target, given, sizes))
    except Exception as e:
        raise LoweringError(f"{where} raised {type(e).__name__}: {e}") from e
    if not isinstance(made, (list, tuple)):
        raise LoweringError(
            f"{where} must return a list of CustomOpConfig, it returned {type(made).__name__}: {made!r:.80}"
        )
    try:
        return custom_ops.checked_configs(target, made, where) if made else ()
    except RegistrationError as e:
        raise LoweringError(str(e)) from None


def fake_tensors(
    cx: LoweringContext, target: Any, given: Mapping[str, Any], sizes: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The call's tensors (lists of tensors too) by argument name, as fake tensors with plain ints for sizes: those the
    graph was traced with, symbols named in ``sizes`` aside."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def at(e: Expr) -> int:
        known = {s: 1024 if s.hint is None else s.hint for s in e.symbols()}
        return int(e.evaluate({s: (sizes or {}).get(s.name, n) for s, n in known.items()}))

    def fake(x: Any) -> Any:
        if not isinstance(x, View):
            return x
        with unset_fake_temporarily(), mode, torch.no_grad():
            device = cx.low.buffers[x.buffer].device
            return torch.empty_strided(
                [at(e) for e in x.shape], [at(e) for e in x.strides], dtype=x.dtype, device=device
            )

    tensors = {a.name for a in target._schema.arguments if custom_ops.is_tensor(a)}
    return {name: map_tree(x, fake) for name, x in given.items() if name in tensors and x is not None}


def _ranges(cx: LoweringContext, r: Registration, given: Mapping[str, Any]) -> Ranges | None:
    found = [ranges for d in r.dispatch if (ranges := _ranges_on(cx, r, given, d)) is not None]
    if len(found) < 2:
        return found[0] if found else None
    first, second = found
    return replace(first, inner=second)


def _ranges_on(cx: LoweringContext, r: Registration, given: Mapping[str, Any], d: DispatchOn) -> Ranges | None:
    tensor = given.get(d.argument)
    if not isinstance(tensor, View):
        logs.get("autotune").info("%s: the call gives no %s: one decision for all sizes", r.name, d.argument)
        return None
    rank = len(tensor.shape)
    if not -rank <= d.dim < rank:
        at = f" at {cx.origin.source}" if cx.origin.source else ""
        raise LoweringError(
            f"{r.op}{at}: dispatch_on names dimension {d.dim} of {d.argument}, which has {rank} dimensions; register "
            "it again with one that there is"
        )
    dim = d.dim % rank
    return Ranges(tensor.shape[dim], d.splits, d.upper, f"{d.argument}.size({dim})")


def _inputs_from(cx: LoweringContext, r: Registration, given: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Buffers that a registered function fills for measuring: arguments that are a whole buffer."""
    out: dict[str, str] = {}
    for argument, _ in r.makers:
        v = given.get(argument)
        if not isinstance(v, View):
            continue
        if v == full_view(cx.low.buffers[v.buffer]):
            out.setdefault(v.buffer, custom_ops.maker_key(r.op, argument))
        else:
            logs.get("autotune").info("%s: %s is a view: input_gen_fns cannot make it", r.name, argument)
    return tuple(out.items())
