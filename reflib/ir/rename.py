"""The same nodes with other names for their buffers, or with other values in their size symbols' hints.

``autotune`` compiles one subprogram several times over: each time temporaries need names of their own, and the
heuristics of later stages should see the sizes that this copy is for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from .expr import Atom, Expr, IntLike, Sym, Var, expr
from .loops import Load, LoopNest, Store
from .program import Assume, Buffer, Choice, Extern, Node, Program, Template, Variant, Variants, View, map_tree
from .transforms import substitute

Names = Mapping[str, str]
_PARTS = (Program, Buffer, View, Assume, Extern, Template, Choice, Variants, Variant)
_NAMED = {"name", "buffer", "outputs", "mutates", "carried", "what"}  # their fields with names of buffers and nodes


def with_hints(program: Program, values: Mapping[str, int]) -> Program:
    """``program`` (of LoopNests, Externs, Templates and Variants) as if it had been traced at ``values``."""
    env: dict[Atom, IntLike] = {}
    for s in _symbols(program):
        if s.name in values:
            env[s] = expr(Sym(s.name, s.lo, s.hi, values[s.name]))
    return _Renaming({}, env).part(program) if env else program  # type: ignore[no-any-return]


def renamed(nodes: Iterable[Node], buffers: Iterable[Buffer], names: Names) -> tuple[list[Node], list[Buffer]]:
    """Nodes and buffers with the buffers (and nodes) in ``names`` renamed."""
    move = _Renaming(names, {})
    return [move.part(n) for n in nodes], [move.part(b) for b in buffers]


def _symbols(program: Program) -> set[Sym]:
    out = {i for i in program.inputs if isinstance(i, Sym)}
    for b in program.buffers.values():
        out |= {s for e in (*b.shape, *b.strides) for s in e.symbols()}
    return out


class _Renaming:
    def __init__(self, names: Names, env: Mapping[Atom, IntLike]):
        self.names, self.env = names, env

    def name(self, x: Any) -> Any:
        return self.names.get(x, x) if isinstance(x, str) else self.part(x)

    def part(self, x: Any) -> Any:
        """A program, or any part of one."""
        if isinstance(x, Expr):
            return x.subs(self.env)
        if isinstance(x, Sym):
            return next(iter(expr(x).subs(self.env).symbols()))
        if isinstance(x, LoopNest):
            return self.loops(x)
        if not isinstance(x, _PARTS):
            return x
        found = ((f.name, getattr(x, f.name)) for f in fields(x))
        return replace(x, **{n: map_tree(tree, self.name if n in _NAMED else self.part) for n, tree in found})

    def loops(self, n: LoopNest) -> LoopNest:
        env = dict(self.env)
        axes = []
        for a in n.axes:
            var = Var(a.var.name, self.part(a.var.size))
            axes.append(replace(a, var=var))
            if self.env:
                env[a.var] = expr(var)
        body = (
            replace(s, buffer=self.name(s.buffer)) if isinstance(s, (Load, Store)) else s
            for s in substitute(n.body, env)
        )
        return replace(n, name=self.name(n.name), axes=tuple(axes), body=tuple(body))
