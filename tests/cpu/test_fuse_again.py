"""Programs whose choices are decided step by step: what is not decided is left alone, and fusing again is right."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from fuse_cases import GPU, PRODUCTS, as_template, check_same, kernels, lowered, templated

from reflib.fuse import fuse
from reflib.fuse.dependencies import dependencies
from reflib.ir.expr import expr
from reflib.ir.loops import BodyBuilder, LoopNest, Store
from reflib.ir.program import Assume, Choice, Extern, Ranges, Variant, Variants
from reflib.ir.verify import verify
from reflib.options import Options

R = torch.randn
X, W = R(4, 6), R(6, 8)


def undecided(program):
    """Every product as a Choice between the call and a Template."""
    nodes = []
    for n in program.nodes:
        if isinstance(n, Extern) and n.target in PRODUCTS:
            ways = (Variant("aten", (n,)), Variant("triton", (as_template(program, n),)))
            n = Choice(n.name, "aten.mm", n.writes(), ways, origins=n.origins)
        nodes.append(n)
    return replace(program, nodes=tuple(nodes))


def by_size(program, size, at=3):
    """Every product as Variants by ``size``, with a temporary in the first one."""
    nodes, buffers = [], dict(program.buffers)
    for n in program.nodes:
        if isinstance(n, Extern):
            t = as_template(program, n)
            (out,) = n.writes()
            inner = f"{n.name}_inner"
            buffers[inner] = replace(buffers[out], name=inner)
            copy = BodyBuilder()
            (store,) = t.epilogue.stores()
            copy.store(out, store.index, copy.load(inner, store.index, torch.float32))
            body = tuple(replace(s, buffer=inner) if isinstance(s, Store) else s for s in t.epilogue.body)
            first = replace(t, name=f"{n.name}_t", epilogue=replace(t.epilogue, body=body))
            then = LoopNest(f"{n.name}_copy", t.epilogue.axes, tuple(copy.body))
            variants = (
                Variant("small", (first, then), (Assume("at_most", expr(size), at),)),
                Variant("large", (replace(n, name=f"{n.name}_call"),)),
            )
            n = Variants(n.name, (out,), variants, n.origins)
        nodes.append(n)
    program = replace(program, nodes=tuple(nodes), buffers=buffers)
    verify(program)
    return program


def layer(x, w, b, r):
    return (F.gelu(x.sin() @ w + b) + r,)


LAYER = [X, W, R(8), R(4, 8)]


def again(f):
    """Fusing once more changes nothing."""
    second = fuse(f.program, Options(), GPU)
    assert str(second.program) == str(f.program)
    return second


def test_dispatches_are_left_alone():
    program = lowered(layer, LAYER, symbolic=True)
    program = by_size(program, next(s for s in program.buffers[program.inputs[0]].shape[0].symbols()))
    f = fuse(program, Options(), GPU)
    for rows in (2, 3, 4, 7):
        check_same(program, f, layer, [R(rows, 6), W, R(8), R(rows, 8)])
    assert sorted(g.kind for g in f.groups) == ["pointwise", "pointwise", "variants"]
    assert any(b.endswith("_inner") for b in f.program.buffers)  # only a variant uses it
    again(f)


def test_no_two_nodes_have_one_name():
    program = lowered(lambda x, y: (x.sin() * 2, y.sin() * 2), [R(4), R(5)])
    before = fuse(program, Options(), GPU).program.nodes[0]
    second = fuse(replace(program, nodes=(*program.nodes[2:], before)), Options(), GPU)
    assert len(second.program.nodes) == len({n.name for n in second.program.nodes}) == 2


def test_what_nobody_needs_goes():
    """Products in every form, unless a call in them has an effect."""

    def left(program, change=lambda n: n):
        program = replace(program, outputs=program.outputs[:1], nodes=tuple(change(n) for n in program.nodes))
        return [g.kind for g in fuse(program, Options(), GPU).groups]

    plain = lowered(lambda x, w: (x.sin(), (x @ w).relu()), [X, W])
    assert left(templated(plain)) == left(undecided(plain)) == ["pointwise"]

    def louder(n):
        if not isinstance(n, Choice):
            return n
        first, *others = n.variants
        return replace(n, variants=(replace(first, nodes=(replace(first.nodes[0], effect=True),)), *others))

    assert "choice" in left(undecided(plain), louder)


def test_sizes_inside_a_choice_count():
    """A choice that uses a size runs after the call that finds it out."""

    program = undecided(lowered(lambda x, w, m: (m.nonzero().float() + 1, x @ w), [X, W, R(5) > 0]))
    nodes = program.nodes
    found = next(i for i, n in enumerate(nodes) if isinstance(n, Extern))
    ((size, _, _),) = nodes[found].symbols
    product = next(i for i, n in enumerate(nodes) if isinstance(n, Choice))
    ranges = Ranges(expr(size), (2,), 9, "m")
    guards = (Assume("at_most", expr(size), 7),)
    for change in (
        lambda c: replace(c, ranges=ranges),
        lambda c: replace(c, variants=(replace(c.variants[0], predicate=guards), *c.variants[1:])),
        lambda c: Variants(c.name, c.outputs, (replace(c.variants[0], predicate=guards),)),
    ):
        changed = [change(n) if i == product else n for i, n in enumerate(nodes)]
        assert found in dependencies(replace(program, nodes=tuple(changed))).before[product]
    assert found not in dependencies(program).before[product]


def test_a_split_reduction_is_not_split_again():
    args = [torch.randn(100003, 3)]
    f = fuse(lowered(lambda x: (x.sum(0),), args), Options(), GPU)
    assert len(kernels(f)) == 2
    assert str(fuse(f.program, Options(), GPU).program) == str(f.program)
