"""``numerics="eager"``: the bits are eager's, on ops, random chains and models, forward and backward."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import reflib
from reflib.errors import OptionError
from reflib.generate.compile_triton import compile_kernel
from reflib.ir.loops import LoopNest, Op
from reflib.ir.program import Extern
from reflib.lab.pictures import moved_bytes
from reflib.target import parse_target
from tests.interpreter import results
from tests.like_eager_cases import BINARY, DTYPES, MODELS, UNARY, chain, different, equal_bits, model_in, numbers, step

EAGER: dict[str, Any] = {"numerics": "eager"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_op(dtype: torch.dtype) -> None:
    """All in one program, where they would be fused."""
    rng = random.Random(0)
    x, y = (numbers(rng, "cpu", dtype, 61, 37) for _ in range(2))

    def program(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [f(x * y) * 0.9 for f in UNARY.values()] + [f(x, y * 1.1) - x for f in BINARY.values()]

    names = [*UNARY, *BINARY]
    assert [names[i] for i in different(program, (x, y), **EAGER)] == []
    torch._dynamo.reset()
    few = [*UNARY.values()][:12]
    assert different(lambda x, y: [f(x * y) * 0.9 for f in few], (x, y))  # otherwise this would prove nothing


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrapper", ("python", "cpp"))
@pytest.mark.parametrize("seed", range(4))
def test_random_chains(seed: int, wrapper: str) -> None:
    rng = random.Random(seed)
    dtype, shape = DTYPES[seed % 3], (rng.randrange(1, 70), rng.randrange(1, 90))
    args = tuple(numbers(rng, "cpu", dtype, *shape) for _ in range(3))
    assert different(chain(rng), args, wrapper=wrapper, **EAGER) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, dtype: torch.dtype) -> None:
    model, shape = model_in(name, dtype)
    x = numbers(random.Random(1), "cpu", torch.float32, *shape).nan_to_num(0, 1, -1).clamp(-3, 3).to(dtype)
    want = step(model, model, x)
    got = step(model, reflib.compile(model, dynamic=False, **EAGER), x)
    assert [i for i, (a, b) in enumerate(zip(want, got, strict=True)) if not equal_bits(a, b)] == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_eager_rounds_first(dtype: torch.dtype) -> None:
    """Python's numbers that change, tensors of one number, integers, sizes."""
    rng = random.Random(2)
    x = numbers(rng, "cpu", dtype, 50, 3)
    whole = torch.randint(1, 2**26, (50, 1))

    def program(x: Any, p: Any) -> Any:
        one = torch.tensor(0.1)
        return x + p, p - x, x * p, x / p, x + one, one - x, x / one, x * whole, x / whole, x + whole, x / x.shape[0]

    run = reflib.compile(program, **EAGER)
    for p in (0.1, 0.2, 0.3, 3, 257):
        assert [i for i, (a, b) in enumerate(zip(run(x, p), program(x, p))) if not equal_bits(a, b)] == [], p


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_are_factors(dtype: torch.dtype) -> None:
    x, mask = numbers(random.Random(4), "cpu", dtype, 50, 3), torch.rand(50, 1) < 0.5

    def program(x: Any, mask: Any) -> Any:
        return x * mask, mask * x - 1, x + mask

    assert different(program, (x, mask), **EAGER) == []
    for target in ("cpu", "sm_90"):
        e = reflib.explain(program, x, mask, target=target, **EAGER)
        assert not any(isinstance(n, Extern) for n in e.program.nodes)


def test_on_a_gpu_a_size_is_inverted_first() -> None:
    e = reflib.explain(lambda x: x / x.shape[0], torch.rand(9, 3), target="sm_90", dynamic=True, **EAGER)
    (nest,) = e.stages.fused.program.nodes
    assert [s.op for s in nest.body if isinstance(s, Op) and s.op != "cast"] == ["div", "mul"]
    e = reflib.explain(lambda x: x / torch.full((3,), 0.7), torch.rand(9, 3), target="sm_90", **EAGER)
    assert "tl.div_rn(" in e.kernels[0].source  # no number, though it is known


def test_registered_implementations_are_not_asked() -> None:
    @torch.library.custom_op("like_eager::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    reflib.register_custom_op_autotuning(twice, configs=[lambda x: x * 2.0001])
    e = reflib.explain(lambda x: twice(x), torch.ones(5), autotune="blocking", **EAGER)
    assert not e.decisions or all(not d.op for d in e.decisions)


def test_a_package(tmp_path: Path) -> None:
    model, shape = MODELS["block"]()
    x = torch.randn(shape)
    path = reflib.aot_compile(model.eval(), (x,), tmp_path / "m.reflib", "cpu", **EAGER)
    with torch.no_grad():
        assert equal_bits(reflib.load(path)(x), model(x))


def test_what_is_fused_and_what_is_called() -> None:
    def f(x: Any, w: Any) -> Any:
        return F.relu(x + 0.1) * w, (x * w).softmax(-1), x.amax(-1), torch.ops.aten.logit_backward(x, x)

    e = reflib.explain(f, torch.randn(8, 16), torch.randn(16), target="sm_90", **EAGER)
    nodes = e.stages.fused.program.nodes
    called = {n.origins[0].op: n.reason for n in nodes if isinstance(n, Extern)}
    assert set(called) == {"aten.logit_backward.default"}
    assert called["aten.logit_backward.default"] == "numerics: an op that rounds more than once"
    assert [len(n.origins) for n in nodes if isinstance(n, LoopNest)] == [8]  # with the softmax
    source = "".join(k.source for k in e.stages.kernels.values())
    assert all(k.exact for k in e.stages.kernels.values()) and "exp2" not in source


def test_what_only_moves_is_fused() -> None:
    """Parts of one projection, rotated, padded: forward and backward without a call but the product's."""

    def f(x: Any, w: Any) -> Any:
        q, k = (x @ w).unflatten(-1, (2, -1)).unbind(-2)
        q = torch.stack([q[..., ::2] * 0.3, q[..., 1::2] - 1], -1).flatten(-2)
        padded = F.pad(x[None] * 2, (1, 2), mode="reflect").unflatten(1, (4, -1))
        return q * 3, F.pixel_shuffle(padded, 2) + 1, k * 2

    x, w = torch.randn(8, 6), torch.randn(6, 16)
    for target, product in (("sm_90", "mm"), ("cpu", "mm")):
        e = reflib.explain(f, x, w.requires_grad_(), target=target, **EAGER)
        called = [n.origins[0].op for s in e.graphs for n in s.scheduled.nodes if isinstance(n, Extern)]
        assert len(e.graphs) == 2 and set(called) == {f"aten.{product}.default"}, called
    want, got = [], []
    for run, out in ((f, want), (reflib.compile(f, **EAGER), got)):
        leaf = w.detach().clone().requires_grad_()
        results = run(x, leaf)
        torch.autograd.backward([sum((t * torch.sin(t.detach() * 9)).sum() for t in results)])
        out += [*results, leaf.grad]
    assert all(map(equal_bits, want, got))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_what_only_moves(dtype: torch.dtype) -> None:
    x = numbers(random.Random(5), "cpu", dtype, 2, 4, 6, 8)

    def moved(x: torch.Tensor) -> list[torch.Tensor]:
        pads = [F.pad(x, (2, 1, 1, 2), mode=m) for m in ("reflect", "replicate")]
        line = [F.pad(x[0], (2, 1), mode=m) for m in ("reflect", "replicate")]
        sizes = [F.interpolate(x, scale_factor=s, mode=m) for s in (2, 1.7, 0.4) for m in ("nearest", "nearest-exact")]
        rest = [
            torch.stack([x, -x], 1), F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 2),
            torch.diag_embed(x[0, 0]), torch.block_diag(x[0, 0], x[0, 1]), x.rot90(), x[0, 0].unfold(1, 3, 2) * 1,
            x.take(torch.tensor([3, 77, 5])), F.threshold(x, 0.3, 7.0), F.hardshrink(x), x.nan_to_num(1.5, 2.5, 3.5),
            x.isposinf(), x.isneginf(), torch.heaviside(x, x[0]),
        ]  # fmt: skip
        return [*pads, *line, *sizes, *rest]

    assert different(moved, (x,), **EAGER) == []


def test_functions_of_cuda_are_its_librarys() -> None:
    e = reflib.explain(
        lambda x: (torch.exp(x) / x.sqrt(), x / 3, x / 4), torch.rand(64).bfloat16(), target="sm_90", **EAGER
    )
    source = "".join(k.source for k in e.stages.kernels.values())
    assert all(name in source for name in ("libdevice.exp(", "tl.div_rn(", "sqrt_rn(")) and "exp2" not in source
    assert f"* {float(1 / torch.tensor(3.0))}" in source and "* 0.25" in source  # a number's reciprocal is taken first
    assert not any(isinstance(n, Extern) for n in e.stages.fused.program.nodes)


def test_the_option() -> None:
    options = reflib.Options(numerics="eager")
    assert options.fallback_random and not options.atomics
    assert options.but(numerics="fast") == reflib.Options()  # what it switched off is as it was asked for
    assert options.but(atomics=False, numerics="fast") == reflib.Options(atomics=False)
    with pytest.raises(OptionError, match="numerics='eagre': must be one of 'fast', 'eager' \\(did you mean 'eager'"):
        reflib.Options(numerics="eagre")


def test_undeclared_views_are_not_written_over() -> None:
    """``unsafe_split`` returns views, and its schema does not say so."""
    x = torch.randn(7, 6)
    y = x.clone()
    run = reflib.compile(lambda x: [t * 2 for t in (*x.unsafe_split(3), *x.unsafe_split_with_sizes([2, 5]))], **EAGER)
    assert all(map(torch.equal, run(x), [t * 2 for t in (y[:3], y[3:6], y[6:], y[:2], y[2:])])) and torch.equal(x, y)


def test_half_statistics_of_a_batch_norm() -> None:
    """torch says that its functional form makes them float32, and it makes halves."""
    model, other = (torch.nn.BatchNorm2d(5).bfloat16() for _ in range(2))
    x = torch.randn(3, 5, 9, 7).bfloat16()
    model(x)
    reflib.compile(other, **EAGER)(x)
    assert torch.allclose(model.running_var.float(), other.running_var.float(), atol=1e-2)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_machine_code_contracts_and_flushes_nothing() -> None:
    x = torch.rand(4096)
    e = reflib.explain(lambda x, y: (x * y + x, torch.sqrt(x) - x * 3), x, x, target="sm_90", **EAGER)
    text = "".join(compile_kernel(k, parse_target("sm_90")).ptx for k in e.stages.kernels.values())
    assert ".ftz" not in text and "fma.rn.f32" not in text and "mul.rn.f32" in text


SUMS: dict[str, Callable[..., Any]] = {
    "layer norm": lambda x, w: F.layer_norm(x, (16,), w, w.abs()), "batch norm": lambda x, w: _batch_normed(x),
    "group norm": lambda x, w: F.group_norm(x, 2), "rms norm": lambda x, w: F.rms_norm(x, (16,), w),
    "softmax": lambda x, w: (x * w).softmax(-1), "log softmax": lambda x, w: (x + w).log_softmax(1),
    "sums": lambda x, w: (x.sum(0) * x.mean(0)) / x.var(0) + x.norm(dim=0), "pools": lambda x, w: F.avg_pool2d(x, 2),
    "running sum": lambda x, w: x.cumsum(-1) * w, "bias": lambda x, w: x + w,
}  # fmt: skip


def _batch_normed(x: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True))


@pytest.mark.each
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", SUMS)
def test_on_a_gpu_sums_are_kernels_as_those_of_fast(name: str, dtype: torch.dtype) -> None:
    """Forward and backward: no call, no kernel more, no byte more."""
    x, w = torch.randn(3, 4, 8, 16, dtype=dtype), torch.randn(16, dtype=dtype)

    def shown(numerics: str) -> list[tuple[int, int]]:
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        e = reflib.explain(SUMS[name], *leaves, target="sm_90", numerics=numerics)
        calls = [n.target for s in e.graphs for n in s.scheduled.nodes if isinstance(n, Extern)]
        assert calls == [] and len(e.graphs) == 2
        return [(len(s.kernels), moved_bytes(s.fused.program)) for s in e.graphs]

    assert shown("fast") == shown("eager")


@pytest.mark.parametrize("seed", range(0, 6, 2))
def test_sums_are_within_their_bounds(seed: int) -> None:
    """Of float32, and of float16."""
    found = results("sum_bounds_interpreting.py", str(seed), str(seed + 1))
    assert len(found) == 2 and not any(found.values()), found


def test_what_eager_adds_in_any_order_is_added_here() -> None:
    """Atomically, with what makes it; not where eager sorts, nor where the user forbids it."""
    x, i, y = torch.empty(90, 8), torch.zeros(500, dtype=torch.int64), torch.empty(500, 8)

    def calls(fn: Any, **options: Any) -> list[str]:
        program = reflib.explain(fn, x, i, y, target="sm_90", **EAGER, **options).program
        return [str(n.target) for n in program.nodes if isinstance(n, Extern)]

    def adds(x: Tensor, i: Tensor, y: Tensor) -> list[Tensor]:
        wide = i[:, None].expand_as(y)
        return [x.index_add(0, i, y * 2), x.scatter_add(0, wide, y), x.scatter_reduce(0, wide, y, "sum")]

    assert calls(adds) == []
    assert len(calls(adds, atomics=False)) == 3
    puts = str(calls(lambda x, i, y: x.index_put((i,), y, True)))  # ATen's call sorts 64-bit numbers
    assert "aten.sort.stable" in puts and "index_put" not in puts
