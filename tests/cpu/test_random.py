"""Random numbers inside kernels: the published cipher, the same bits everywhere, distributions, what fuses and what the
backward saves. (``reflib::random`` in Triton's interpreter: test_triton_programs; both wrappers: test_composition.)"""

import functools
import math
import random
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._functorch import config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import reflib
from reflib import OptionError, Options, explain
from reflib.capture.export import export_for
from reflib.capture.random import RANDOM, own_numbers
from reflib.ir.interpret import interpret
from reflib.ir.loops import Op
from reflib.ir.program import Extern, kernel_nodes
from reflib.ir.random import philox
from reflib.lower import decompositions
from tests.semantics import Compiled

aten = torch.ops.aten
SIZES = random.Random(16)
OWN: dict[str, Any] = {"fallback_random": False}


def draw(seed: int, stream: int, kind: str, size: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return RANDOM(torch.tensor([seed]), stream, kind, size, list(range(len(size))), dtype)


def calls(stages: Any) -> list[str]:
    return [str(n.target) for n in stages.scheduled.nodes if isinstance(n, Extern)]


def drawing(stages: Any) -> int:
    """Kernels in which numbers are drawn."""
    bodies = [getattr(p, "epilogue", p).body for n in kernel_nodes(stages.scheduled.nodes) for p in n.parts]
    return sum(any(isinstance(s, Op) and s.op == "philox" for s in body) for body in bodies)


# -- the cipher -------------------------------------------------------------------------------------
def test_the_cipher_is_the_papers() -> None:
    """The known answers of Random123 for a counter and a key of zeros; and by hand for others, in Python's integers."""
    zero = torch.zeros(4, dtype=torch.int64)
    known = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [w & 0xFFFFFFFF for w in philox(zero, zero, torch.arange(4)).tolist()] == known
    for _ in range(20):
        seed, stream, counter = SIZES.getrandbits(63), SIZES.getrandbits(31), SIZES.getrandbits(60)
        args = (torch.tensor(v) for v in (seed - 2**62, stream, counter * 4 + 1))
        a, b, c, d = counter & 0xFFFFFFFF, counter >> 32, stream, 0
        k, m = (seed - 2**62) & 0xFFFFFFFF, ((seed - 2**62) >> 32) & 0xFFFFFFFF
        for _ in range(10):
            p, q = a * 0xD2511F53, c * 0xCD9E8D57
            a, b, c, d = (q >> 32) ^ b ^ k, q & 0xFFFFFFFF, (p >> 32) ^ d ^ m, p & 0xFFFFFFFF
            k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
        assert philox(*args).item() & 0xFFFFFFFF == b


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cpp_and_the_interpreter_give_the_same_bits(dtype: torch.dtype) -> None:
    size = [SIZES.randint(2, 40), SIZES.randint(2, 40)]

    def f(seed: torch.Tensor) -> Any:
        return tuple(RANDOM(seed, i, kind, size, [1, 0], dtype) for i, kind in enumerate(["uniform", "normal"]))

    compiled = Compiled(f)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,))
    got, want = compiled(seed), f(seed)
    again = interpret(compiled.stages[0].fused.program, [seed])
    assert got[0].dtype == dtype and got[0].stride() == (1, size[0])
    assert torch.equal(got[0], want[0]) and torch.equal(again[0], want[0])
    tolerance = 1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps + 1e-5
    assert torch.allclose(got[1], want[1], rtol=tolerance, atol=tolerance)


# -- distributions, with a fixed seed ----------------------------------------------------------------
def kolmogorov(x: torch.Tensor, cdf: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """sqrt(n) * the greatest distance of the distributions: above 1.95 once in a thousand."""
    n = x.numel()
    at = cdf(x.double().flatten().sort().values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return math.sqrt(n) * max((at - steps[:-1]).max().item(), (steps[1:] - at).max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distributions(dtype: torch.dtype) -> None:
    n = 200_000
    u, z = (draw(12345, 3, kind, [n], dtype) for kind in ("uniform", "normal"))
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 0.001 and kolmogorov(u, lambda x: x) < 1.95
    assert abs(z.mean()) < 4 / math.sqrt(n) and abs(z.var() - 1) < 4 * math.sqrt(2 / n) and z.abs().max() < 7
    assert kolmogorov(z, lambda x: (1 + torch.erf(x / math.sqrt(2))) / 2) < 1.95
    assert abs(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]) < 4 / math.sqrt(n)  # neighbours
    other = draw(12345, 4, "uniform", [n], dtype)  # another op of the graph
    assert abs(torch.corrcoef(torch.stack([u, other]))[0, 1]) < 4 / math.sqrt(n)


def test_normal_float64_numbers_have_64_random_bits_each() -> None:
    words = [w & 0xFFFFFFFF for w in philox(torch.tensor(7), torch.tensor(3), torch.arange(32)).tolist()]
    for i, z in enumerate(draw(7, 3, "normal", [8], torch.float64).tolist()):
        a, b, c, d = words[4 * i : 4 * i + 4]
        radius, angle = (a * 2**32 + c + 1) / 2**64, (b * 2**32 + d) / 2**64
        assert math.isclose(z, math.sqrt(-2 * math.log(radius)) * math.cos(math.tau * angle), rel_tol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_stay_below_one(dtype: torch.dtype) -> None:
    u = draw(5, 0, "uniform", [50_000], dtype)
    assert u.max() < 1 and u.min() == 0 and abs(u.float().mean() - 0.5) < 0.01


def test_every_op_has_its_distribution() -> None:
    n = 100_000

    def f(x: torch.Tensor) -> Any:
        return {
            "rand": torch.rand(n), "rand_like": torch.rand_like(x), "randn": torch.randn(n),
            "randn_like": torch.randn_like(x) * 2 + 1, "uniform": x.clone().uniform_(-3, 5),
            "normal": x.clone().normal_(2, 0.5), "exponential": x.clone().exponential_(4.0),
            "bernoulli": torch.bernoulli(x), "p": torch.empty_like(x).bernoulli_(0.8),
            "dropout": F.dropout(torch.ones_like(x), 0.3), "low": torch.randint(-3, 5, (n,)),
            "high": torch.randint(10, (n,)), "like": torch.randint_like(x, 2, 9), "of": torch.normal(x, x * 2),
            "wide": torch.randint(0, 2**40, (n,)),
        }  # fmt: skip

    compiled = Compiled(f, **OWN)
    torch.manual_seed(0)
    x = torch.full((n,), 0.25)
    out = compiled(x)
    assert [str(e.target) for e in compiled.externs] == ["aten.randint.low"]
    want = {
        "rand": (0.5, 1 / 12), "rand_like": (0.5, 1 / 12), "randn": (0, 1), "randn_like": (1, 4),
        "uniform": (1, 64 / 12), "normal": (2, 0.25), "exponential": (0.25, 1 / 16), "bernoulli": (0.25, 0.1875),
        "p": (0.8, 0.16), "dropout": (1, 0.3 / 0.7), "low": (0.5, 63 / 12), "high": (4.5, 99 / 12),
        "like": (5, 48 / 12), "of": (0.25, 0.25), "wide": (2**39, 2**80 / 12),
    }  # fmt: skip
    eager = f(x)
    for name, (mean, variance) in want.items():
        got = out[name]
        assert got.dtype == eager[name].dtype and got.shape == eager[name].shape, name
        assert abs(got.double().mean() - mean) < 5 * math.sqrt(variance / n), name
        assert abs(got.double().var() / variance - 1) < 0.1, name
    assert out["low"].min() == -3 and out["low"].max() == 4 and set(out["high"].tolist()) == set(range(10))
    assert out["exponential"].min() > 0 and len(set(out["bernoulli"].tolist())) == 2


# -- calls and seeds ----------------------------------------------------------------------------------
@pytest.mark.sample(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_forward_and_backward_agree(dynamic: bool) -> None:
    """At new sizes too; and so they do under checkpoint, whose backward draws again."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.sin(), 0.5) + 2 * F.dropout(x.cos(), 0.25)

    for fn in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        torch._dynamo.reset()
        compiled = Compiled(fn, dynamic=dynamic, **OWN)
        for _ in range(2):
            x = torch.randn(SIZES.randint(20, 40), SIZES.randint(20, 40), requires_grad=True)
            y = compiled(x)
            y.sum().backward()
            parts = torch.stack([a * x.sin() + b * x.cos() for a in (0, 2) for b in (0, 2 / 0.75)])
            which = (parts - y).abs().argmin(0)
            slopes = torch.stack([a * x.cos() - b * x.sin() for a in (0, 2) for b in (0, 2 / 0.75)])
            assert torch.allclose(slopes.gather(0, which[None])[0], x.grad, atol=1e-4)
            assert len(which.unique()) == 4


def test_the_default_is_eagers_numbers_on_a_cpu_alone() -> None:
    fn = lambda x: F.dropout(x, 0.5)  # noqa: E731
    x = torch.randn(300)
    compiled = Compiled(fn)
    torch.manual_seed(1)
    want = fn(x)
    torch.manual_seed(1)
    assert torch.equal(compiled(x), want)
    assert "aten.native_dropout.default" in calls(explain(fn, x).stages)
    assert calls(explain(fn, x, target="sm_90").stages) == ["aten.randint.low"]
    assert "aten.native_dropout.default" in calls(explain(fn, x, target="sm_90", fallback_random=True).stages)
    with pytest.raises(OptionError, match="fallback_random"):
        Options(fallback_random="yes")  # type: ignore[arg-type]


def test_generators_edges_and_the_rest_are_left_to_aten() -> None:
    g = torch.Generator()

    def fn(x: torch.Tensor) -> Any:
        return F.dropout(x, 1.0), F.dropout(x, 0.0), torch.multinomial(x.abs() + 1, 3), torch.randperm(7)

    compiled = Compiled(fn, **OWN)
    out = compiled(torch.randn(5, 6))
    assert not out[0].any() and not any("reflib" in str(e.target) for e in compiled.externs)
    assert {"aten.multinomial.default", "aten.randperm.default"} <= {str(e.target) for e in compiled.externs}
    for generator in (g, None):
        fn = functools.partial(aten.bernoulli.default, generator=generator)
        traced = make_fx(fn, tracing_mode="fake")(torch.rand(3))
        made = own_numbers(traced, Options(**OWN), True)
        assert any(n.target is aten.bernoulli.default for n in made.graph.nodes) == (generator is g)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bounds_and_zeros_that_eager_never_returns(dtype: torch.dtype) -> None:
    run = reflib.compile(lambda x: (x.uniform_(1000, 1001), x.clone().exponential_()), **OWN)
    for _ in range(8):
        u, e = run(torch.empty(100_000, dtype=dtype))
        assert float(u.min()) >= 1000 and float(u.max()) < 1001 and float(e.min()) > 0


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g + torch.randn_like(g)


def test_a_backward_that_is_run_twice_draws_other_noise() -> None:
    x = torch.ones(50, requires_grad=True)
    y = reflib.compile(lambda x: F.dropout(Noisy.apply(x), 0.5), **OWN)(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_sizes_that_depend_on_data() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = reflib.compile(lambda x: F.dropout(x.nonzero().float().t() * 1.0, 0.5), **OWN)
        assert run(torch.tensor([0.0, 1, 2])).shape == (1, 2)


def test_broadcast_and_strided_results() -> None:
    def fn(x: torch.Tensor, m: torch.Tensor) -> Any:
        path = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.5)  # stochastic depth
        return torch.rand_like(x), x * path, torch.normal(m, x.abs())

    compiled = Compiled(fn, **OWN)
    x = torch.ones(64, 3, 5, 4).contiguous(memory_format=torch.channels_last)
    u, dropped, _ = compiled(x, torch.zeros(4))
    assert u.stride() == x.stride() and u.unique().numel() > 3000
    assert {0.0, 1.0} == set(dropped.unique().tolist()) and all(len(row.unique()) == 1 for row in dropped)


def test_an_exported_program_and_a_package(tmp_path: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Dropout(0.5))
    x = torch.randn(40, 20)
    with pytest.warns(UserWarning, match="dropout"):
        path = reflib.aot_compile(model, (x,), str(tmp_path / "m.reflib"), archs=["cpu"], **OWN)
    with zipfile.ZipFile(path) as z:
        assert not any(b"native_dropout" in z.read(name) for name in z.namelist())
    loaded = reflib.load(path)
    torch.manual_seed(4)
    first, second = loaded(x), loaded(x)
    torch.manual_seed(4)
    assert torch.equal(loaded(x), first) and not torch.equal(second, first)
    assert 0.4 < (first == 0).float().mean() < 0.6


# -- what fuses ---------------------------------------------------------------------------------------
class Residual(torch.nn.Module):
    def __init__(self, d: int, p: float):
        super().__init__()
        self.up, self.down, self.norm = torch.nn.Linear(d, 2 * d), torch.nn.Linear(2 * d, d), torch.nn.LayerNorm(d)
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x + F.dropout(self.down(F.gelu(self.up(x))), self.p))
        return y + F.dropout(self.down(F.gelu(self.up(y))), self.p)


def nbytes(stages: Any) -> int:
    p = stages.scheduled
    return sum(p.buffers[b].nbytes.hint() for n in p.nodes for b in {*n.reads(), *n.writes()} if b in p.buffers)


def test_dropout_joins_its_neighbours_in_both_directions() -> None:
    """Per dropout the forward moves a read, a write and a mask less, and the backward a mask."""
    rows, d = 64, 96
    x = torch.randn(rows, d, requires_grad=True)
    model = Residual(d, 0.1)
    before = explain(model, x, target="sm_90", fallback_random=True)
    torch._dynamo.reset()
    after = explain(model, x, target="sm_90")
    size = rows * d * 4
    assert calls(before.stages).count("aten.native_dropout.default") == 2
    assert calls(after.stages).count("aten.randint.low") == 1
    assert "aten.native_dropout.default" not in calls(after.stages)
    assert len(after.stages.scheduled.nodes) < len(before.stages.scheduled.nodes)  # 2 calls less; the seed's
    assert len(after.backward.stages.scheduled.nodes) == len(before.backward.stages.scheduled.nodes)
    assert drawing(after.stages) >= 2 and drawing(after.backward.stages) >= 2  # (variants count)
    assert nbytes(before.stages) - nbytes(after.stages) >= 2 * (2 * size + size // 4) - 100
    assert nbytes(before.backward.stages) - nbytes(after.backward.stages) >= 2 * size // 4 - 100
    assert not any(b.dtype == torch.bool for b in after.stages.scheduled.buffers.values())  # no mask is stored


def test_functionalized_random_numbers() -> None:
    """PyTorch's setting, which needs CUDA, changes nothing: on a CPU eager's numbers, for a GPU numbers of a seed."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(checkpoint(lambda x: F.dropout(x.sin(), 0.5).cos(), x, use_reentrant=False), 0.5)

    x = torch.randn(4, 33, requires_grad=True)
    with config.patch(functionalize_rng_ops=True):
        results = []
        for f in (fn, reflib.compile(fn)):
            torch.manual_seed(7)
            out = f(x)
            results.append((out, torch.autograd.grad(out.sum(), x), torch.rand(3)))
        sources = [k.source for k in reflib.explain(lambda x: F.dropout(x, 0.5), x.detach(), target="sm_90").kernels]
        exported = export_for(lambda x: F.dropout(x, 0.5), (x.detach(),), decompositions=decompositions())
    torch.testing.assert_close(*results)
    assert any("philox" in s for s in sources) and len(exported.graph.placeholders()) == 1
