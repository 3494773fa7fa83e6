"""The same nodes with other names for their buffers, or with other values in their size symbols' hints.

``autotune`` compiles one subprogram several times over: each time temporaries need names of their own, and the
heuristics of later stages should see the sizes that this copy is for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from .expr import Atom, Expr, IntLike, Sym, Var, expr
from .loops import Load, LoopNest, Stmt, Store
from .program import Assume, Buffer, Choice, Extern, Node, Program, Template, Variants, View, map_tree
from .regions import Region
from .transforms import substitute

Names = Mapping[str, str]


def with_hints(program: Program, values: Mapping[str, int]) -> Program:
    """``program`` (of LoopNests, Externs, Templates and Variants) as if it had been traced at ``values``."""
    env: dict[Atom, IntLike] = {}
    for s in _symbols(program):
        if s.name in values:
            env[s] = expr(Sym(s.name, s.lo, s.hi, values[s.name]))
    if not env:
        return program
    move = _Renaming({}, env)
    return replace(
        program,
        inputs=tuple(move.leaf(i) for i in program.inputs),
        buffers={n: move.buffer(b) for n, b in program.buffers.items()},
        nodes=tuple(move.node(n) for n in program.nodes),
        outputs=tuple(map_tree(o, move.leaf) for o in program.outputs),
    )


def renamed(nodes: Iterable[Node], buffers: Iterable[Buffer], names: Names) -> tuple[list[Node], list[Buffer]]:
    """Nodes and buffers with the buffers (and nodes) in ``names`` renamed."""
    move = _Renaming(names, {})
    return [move.node(n) for n in nodes], [move.buffer(b) for b in buffers]


def _symbols(program: Program) -> set[Sym]:
    out = {i for i in program.inputs if isinstance(i, Sym)}
    for b in program.buffers.values():
        out |= {s for e in (*b.shape, *b.strides) for s in e.symbols()}
    return out


class _Renaming:
    def __init__(self, names: Names, env: Mapping[Atom, IntLike]):
        self.names, self.env = names, env

    def name(self, name: str) -> str:
        return self.names.get(name, name)

    def expr(self, e: Expr) -> Expr:
        return e.subs(self.env) if self.env else e

    def exprs(self, es: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(self.expr(e) for e in es)

    def buffer(self, b: Buffer) -> Buffer:
        return replace(b, name=self.name(b.name), shape=self.exprs(b.shape), strides=self.exprs(b.strides))

    def leaf(self, x: Any) -> Any:
        if isinstance(x, View):
            shape, strides = self.exprs(x.shape), self.exprs(x.strides)
            return View(self.name(x.buffer), shape, strides, self.expr(x.offset), x.dtype)
        if isinstance(x, Expr):
            return self.expr(x)
        if isinstance(x, Sym):
            found = self.expr(expr(x))
            return next(iter(found.symbols()))
        return x

    def node(self, n: Node) -> Node:
        if isinstance(n, LoopNest):
            return self.loops(n)
        if isinstance(n, Extern):
            outputs = tuple(self.name(o) if isinstance(o, str) else map_tree(o, self.leaf) for o in n.outputs)
            args, kwargs = map_tree((n.args, n.kwargs), self.leaf)
            mutates = tuple(self.name(b) for b in n.mutates)
            return replace(n, name=self.name(n.name), args=args, kwargs=kwargs, outputs=outputs, mutates=mutates)
        if isinstance(n, Template):
            a, b, epilogue = self.leaf(n.a), self.leaf(n.b), self.loops(n.epilogue)
            prologues = tuple(map(self.loops, n.prologues))
            return replace(n, name=self.name(n.name), a=a, b=b, epilogue=epilogue, prologues=prologues)
        assert isinstance(n, (Choice, Variants)), f"{type(n).__name__} cannot be renamed"
        if isinstance(n, Region):
            n = replace(n, carried=tuple((self.name(old), self.name(new)) for old, new in n.carried))
        variants = tuple(
            replace(v, predicate=tuple(map(self.assume, v.predicate)), nodes=tuple(map(self.node, v.nodes)))
            for v in n.variants
        )
        return replace(n, name=self.name(n.name), outputs=tuple(map(self.name, n.outputs)), variants=variants)

    def assume(self, a: Assume) -> Assume:
        return replace(a, what=self.name(a.what) if isinstance(a.what, str) else self.expr(a.what))

    def loops(self, n: LoopNest) -> LoopNest:
        env = dict(self.env)
        axes = []
        for a in n.axes:
            var = Var(a.var.name, self.expr(a.var.size))
            axes.append(replace(a, var=var))
            if self.env:
                env[a.var] = expr(var)
        body = tuple(map(self.stmt, substitute(n.body, env)))
        return replace(n, name=self.name(n.name), axes=tuple(axes), body=body)

    def stmt(self, s: Stmt) -> Stmt:
        return replace(s, buffer=self.name(s.buffer)) if isinstance(s, (Load, Store)) else s
