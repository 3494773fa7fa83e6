"""Programs whose choices are decided step by step: what is not decided is left alone, and fusing again is right."""

from dataclasses import replace

import torch
from fuse_cases import GPU, PRODUCTS, as_template, kernels, lowered, templated

from reflib.fuse import fuse
from reflib.fuse.dependencies import dependencies
from reflib.ir.expr import expr
from reflib.ir.program import Assume, Choice, Extern, Ranges, Variant, Variants
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
