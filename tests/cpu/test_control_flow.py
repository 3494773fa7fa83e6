"""Branches and loops (``ir.regions``): compared with the same in plain Python under every wrapper; what they cost."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as each
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.capture.graph import Graph
from reflib.errors import LoweringError, PackageError
from reflib.ir.data import from_data, to_data
from reflib.ir.interpret import interpret
from reflib.options import Options
from reflib.pipeline import run
from reflib.plan import Alloc, Branch, Step
from reflib.plan.regions import Repeat
from tests.semantics import Compiled, randn

Tensor = torch.Tensor
close = torch.testing.assert_close
W = torch.tensor([0.5, -1.0, 1.5, 0.25])


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


# -- the ops, and the same without them -----------------------------------------------------------------------
def every(x: Tensor, w: Tensor = W) -> tuple[Any, ...]:
    """Each op once: a branch with two results, one by sizes, ints and tensors carried (two of which change places),
    a scan with a carried value and a stacked one, a map."""
    n = x.shape[0]
    a, b = torch.cond(x.sum() > 0, lambda x: ((x.sin() * w).cos(), x.sum(0)), lambda x: (x * 2 + n, x.amax(0)), (x,))
    c = torch.cond(n > 4, lambda x: x.sin() * w, lambda x: x - 1, (x,))
    i, y, z = while_loop(lambda i, y, z: i < 3, lambda i, y, z: (i + 1, z.clone(), y * w + i), (0, x, a))
    last, seen = scan(lambda s, v: (s + v, (s * v).t()), torch.zeros_like(w), x)
    m = each(lambda v, w: torch.softmax(v * w, -1), x, w)
    return a, b, c, i, y, z, last, seen, m


def every_plainly(x: Tensor, w: Tensor = W) -> tuple[Any, ...]:
    n = x.shape[0]
    a, b = ((x.sin() * w).cos(), x.sum(0)) if x.sum() > 0 else (x * 2 + n, x.amax(0))
    c = x.sin() * w if n > 4 else x - 1
    y, z = x, a
    for i in range(3):
        y, z = z, y * w + i
    s, seen = torch.zeros_like(w), []
    for v in x:
        seen.append(s * v)
        s = s + v
    return a, b, c, 3, y, z, s, torch.stack(seen), torch.softmax(x * w, -1)


def nested(x: Tensor, w: Tensor = W) -> tuple[Tensor, Tensor]:
    """Loops in branches in loops, which update their results."""

    def inner(i: Tensor, x: Tensor) -> Tensor:
        return while_loop(lambda j, x: j < i, lambda j, x: (j + 1, x + w), (torch.zeros_like(i), x))[1]

    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.cond(x.sum() > 0, lambda i, x: inner(i, x) * -0.5, lambda i, x: x.exp(), (i, x))

    return while_loop(lambda i, x: i < 4, body, (x.new_zeros((), dtype=torch.int64), x))


def nested_plainly(x: Tensor, w: Tensor = W) -> tuple[Tensor, Tensor]:
    for i in range(4):
        x = (x + i * w) * -0.5 if x.sum() > 0 else x.exp()
    return torch.tensor(4), x


def inputs() -> list[Tensor]:
    at = random.Random(0)
    return [randn(at.randint(5, 9), 4, device="cpu").abs() * s for s in (1, -1)] + [randn(3, 4, device="cpu")]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_like_plain_python(wrapper: str, dynamic: bool) -> None:
    for fn, plainly in ((every, every_plainly), (nested, nested_plainly)):
        c = Compiled(fn, dynamic=dynamic, wrapper=wrapper)
        for x in inputs() if dynamic else inputs()[:2]:
            close(c(x), plainly(x))
        assert not [e for s in c.stages for e in c.externs if "higher_order" in str(e.target)]
        assert len(c.stages) == 1 or not dynamic


def test_stages_agree_and_are_data() -> None:
    x = inputs()[0]
    for fn, plainly in ((every, every_plainly), (nested, nested_plainly)):
        e = reflib.explain(fn, x, target="cpu", verify=True)
        args = [W if tuple(i.shape) == (4,) else x for i in e.graph.placeholders()]
        for program in (e.program, e.scheduled):
            close(interpret(program, args), list(plainly(x)))
            assert from_data(json.loads(json.dumps(to_data(program))), program.constants) == program


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_gradients(wrapper: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        a = torch.cond(x.sum() > 0, lambda x: (x.sin() * w).cos(), lambda x: x * x, (x,))
        last, seen = scan(lambda s, v: (s * v, s + v), torch.ones_like(w), x)
        b = each(lambda v, w: torch.softmax(v * w, -1), x, w)
        total = associative_scan(lambda a, b: a * b, x, dim=0, combine_mode="generic")
        return (a * b * total * seen * last).sum()

    def plainly(x: Tensor, w: Tensor) -> Tensor:
        a = (x.sin() * w).cos() if x.sum() > 0 else x * x
        last, seen = torch.ones_like(w), []
        for v in x:
            seen.append(last + v)
            last = last * v
        return (a * torch.softmax(x * w, -1) * x.cumprod(0) * torch.stack(seen) * last).sum()

    c = Compiled(f, wrapper=wrapper)
    for x in (inputs()[2], -inputs()[2]):
        leaves = [x.requires_grad_(), W.clone().requires_grad_()]
        close(torch.autograd.grad(c(*leaves), leaves), torch.autograd.grad(plainly(*leaves), leaves))
    assert not [e for e in c.externs if "higher_order" in str(e.target)]


@pytest.mark.slow
def test_gradients_of_while_loop() -> None:
    """PyTorch stacks as many values as there are iterations: that loop is PyTorch's own."""
    f = lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * W), (zero(), x))[1]  # noqa: E731
    x = randn(2, 4, device="cpu", grad=True)
    c = torch.compile(f, backend="reflib", fullgraph=True)
    close(torch.autograd.grad(c(x).sum(), x)[0], (W**3).expand(2, 4))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_associative_scan_as_an_op(dynamic: bool) -> None:
    """Capture leaves it whole for a GPU only. Of a known length: in pairs, level by level, a few levels per kernel."""

    def f(x: Tensor, y: Tensor) -> Any:
        return associative_scan_op(lambda a, b, c, d: (a * c, b * c + d), [x, y], ())

    x, y = randn(5, 3, device="cpu"), randn(5, 3, device="cpu") + 1
    gm = make_fx(f, tracing_mode="symbolic" if dynamic else "fake")(x, y)
    s = run(Graph(gm), Options(verify=True))
    got = s.call([x, y])  # type: ignore[misc]
    close(got[0], x.cumprod(0))
    close(got, tuple(f(x, y)))
    assert len(s.kernels or ()) == 3


@pytest.mark.parametrize("mode", ["pointwise", "generic"])
def test_associative_scan_of_any_length_in_a_package(mode: str, tmp_path: Path) -> None:
    """PyTorch takes a generic one apart for the length that it captures: which there is, instead, is said."""

    def f(x: Tensor) -> Tensor:
        return associative_scan(lambda a, b: a * b + a, x, 0, combine_mode=mode)

    def package(**how: Any) -> str:
        at = tmp_path / "scan.reflib"
        return reflib.aot_compile(f, (torch.rand(8, 5),), at, archs=["sm_90"], ptx=False, **how)

    lengths = ({0: torch.export.Dim("n", min=2, max=64)},)
    if mode == "pointwise":
        assert package(dynamic_shapes=lengths)
    else:
        with pytest.raises(reflib.ReflibError, match=r"(?s)Constraints violated.*combine_mode='pointwise' on a GPU"):
            package(dynamic_shapes=lengths)
        assert package()


# -- what it costs --------------------------------------------------------------------------------------------
def repeats(steps: tuple[Step, ...]) -> Iterator[Repeat]:
    for s in steps:
        if isinstance(s, Branch):
            yield from repeats(s.then + s.otherwise)
        if isinstance(s, Repeat):
            yield s


def test_branches_are_fused_and_carried_tensors_stay_where_they_are() -> None:
    x = inputs()[0]
    f = lambda x: torch.cond(x.sum() > 0, lambda x: (x.sin() * W).cos(), lambda x: torch.softmax(x, -1), (x,)) + 1  # noqa: E731
    e = reflib.explain(f, x, target="sm_90")
    assert [k.language for k in e.kernels] == ["triton"] * 4, "sum and compare, a kernel per branch, what follows"
    assert "variant differs(cond_holds, 0):  # true" in str(e.program) and "aten.sin" in str(e.program)
    assert e.wrapper.count("= (aten__local_scalar_dense") == 1, "one copy to the host"

    def g(x: Tensor, cache: Tensor) -> Any:
        def body(i: Tensor, x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
            return i + 1, x * W + 1, torch.index_put(cache, (i,), W)

        return while_loop(lambda i, x, cache: i < 3, body, (zero(), x, cache))

    e = reflib.explain(g, x, torch.zeros(99, 4), target="cpu")
    (loop,) = repeats(e.memory.steps)
    made = [s.buffer for s in loop.then if isinstance(s, Alloc) and s.reuse is None]
    assert all(int(e.scheduled.buffers[b].numel.evaluate({})) <= 4 for b in made), f"{made} are made in each iteration"
    assert "aten.index_put_.default(while_loop_2" in str(e.scheduled), "a row is stored in place"
    assert [u.why for u in e.updates] == [""]


# -- bad input ------------------------------------------------------------------------------------------------
def test_a_predicate_of_several_elements() -> None:
    f = lambda x: torch.cond(x[0] > 0, lambda x: x + 1, lambda x: x * 2, (x,))  # noqa: E731
    with pytest.raises(Exception, match=r"cond at test_control_flow\.py:\d+.* is bool \[4\], not one") as e:
        torch.compile(f, backend="reflib")(inputs()[0])
    assert LoweringError.__name__ in str(e.value)


def test_branches_that_return_other_sizes() -> None:
    """A kernel after them is launched for the size that the branch taken returns; they may have dynamic sizes."""
    f = lambda x: torch.cond(x.sum() > 0, lambda x: x[1:] + 1, lambda x: torch.cat([x, x]), (x,)) * 2  # noqa: E731
    c = Compiled(f, dynamic=True)
    for x in inputs():
        for x in (x.abs(), -x.abs()):  # noqa: B020
            close(c(x), (x[1:] + 1) * 2 if x.sum() > 0 else torch.cat([x, x]) * 2)
    assert len(c.stages) == 1 and not [e for e in c.externs if "higher_order" in str(e.target)]


@pytest.mark.parametrize(
    ("fn", "plainly", "branch"),
    [
        (lambda x: x[x[:, 0] > 0] + 1, lambda x: x[x[:, 0] > 0] + 1, "true"),
        (
            lambda x: torch.cond(x.max() > 1, lambda x: x[:1] + 1, lambda x: x[:2] + 1, (x,)),
            lambda x: x[: 1 if x.max() > 1 else 2] + 1, "true",
        ),
    ],
    ids=["read from a tensor", "a branch in it"],
)  # fmt: skip
def test_a_size_that_a_branch_computes(fn: Any, plainly: Any, branch: str, tmp_path: Path) -> None:
    """The branches are PyTorch's; in a file they cannot be."""
    f = lambda x: torch.cond(x.sum() > 0, fn, lambda x: x[:3] * 2, (x,)) * 2  # noqa: E731
    x = inputs()[0]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        c = Compiled(f)
        for x in (x, -x, x * 10):  # noqa: B020
            close(c(x), (plainly(x) if x.sum() > 0 else x[:3] * 2) * 2)
    why = f"it calls cond at .*: the size of result 0 is known only when the {branch} branch has run"
    with pytest.raises(PackageError, match=why):
        reflib.aot_compile(f, (x,), tmp_path / "m.reflib", "cpu")


def decoded(cache: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A body may not update what it carries: it clones it first."""

    def body(i: Tensor, cache: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cache = cache.clone()
        cache.index_copy_(0, i.reshape(1), x)
        return i + 1, cache, torch.softmax(x @ cache.t(), -1) @ cache

    return while_loop(lambda i, cache, x: i < 5, body, (zero(), cache, x))[1:]


def test_a_cache_is_carried_without_a_copy() -> None:
    args = torch.randn(64, 8), torch.randn(1, 8)
    close(reflib.compile(decoded, verify=True)(*args), decoded(*args))
    e = reflib.explain(decoded, *args, target="cpu")
    (loop,) = (s for s in e.stages.plan.steps if isinstance(s, Repeat))
    table = e.scheduled.buffers
    assert all(table[s.buffer].numel.hint() < 512 or s.reuse for s in loop.then if isinstance(s, Alloc))
    (body,) = (v for n in e.scheduled.nodes for v in getattr(n, "variants", ()) if v.name == "body")
    stored = [n for n in body.nodes for b in n.writes() if table[b].numel.hint() == 512]
    assert len(stored) == 1, "the row alone"


def test_a_loop_updates_the_callers_cache_in_place() -> None:
    """``copy_`` of what a loop carried onto where it began: neither copy is made, unless what was there is read."""

    def written(cache: Tensor, x: Tensor, read: Tensor) -> Tensor:
        def body(i: Tensor, carried: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            carried = carried.index_copy(0, i.reshape(1), x)
            return i + 1, carried, torch.softmax(x @ read.t(), -1) @ carried

        _, carried, x = while_loop(lambda i, cache, x: i < 5, body, (zero(), cache.clone(), x))
        cache.copy_(carried)
        return x

    def summed(cache: Tensor, x: Tensor) -> Tensor:
        carried, out = scan(lambda c, x: (c.index_add(0, torch.tensor([1]), x[None]), x + 1), cache, x.repeat(3, 1))
        cache.copy_(carried)
        return out

    cases = {
        "in place": (lambda c, x, other: written(c, x, other), 0),
        "as it was": (lambda c, x, other: written(c, x, c), 64 * 8 * 4),
        "scan": (lambda c, x, other: summed(c, x), 0),
    }
    for n, (name, (fn, copied)) in enumerate(cases.items()):
        mine = [torch.randn(64, 8), torch.randn(1, 8), torch.ones(64, 8)]
        theirs = [t.clone() for t in mine]
        close(reflib.compile(fn, wrapper=("python", "cpp")[n % 2], verify=True)(*mine), fn(*theirs))
        close(mine, theirs)
        e = reflib.explain(fn, *mine, target="cpu")
        temps = [b.nbytes.hint() for b in e.scheduled.buffers.values() if b.kind == "temp"]
        assert sum(b for b in temps if b >= 64 * 8 * 4) == copied, name
        assert sum(u.copied for u in e.updates) == copied, name
