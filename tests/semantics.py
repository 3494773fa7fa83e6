"""What a compiled function must do beyond computing the right numbers. Shared by tests/cpu and tests/gpu, which give
the fixture ``device``. (What holds under every wrapper is in tests/composition.)"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import reflib
from reflib.ir.program import Extern
from reflib.options import Options
from reflib.pipeline import Backend, Stages
from tests.checking import check, clone


class Compiled:
    """A function compiled by reflib that remembers the stages of every graph it gave."""

    def __init__(self, fn: Callable[..., Any], dynamic: bool | None = None, **options: Any):
        self.stages: list[Stages] = []
        backend = Backend(Options(**{"verify": True, **options}), self.stages.append)
        self.fn = torch.compile(fn, backend=backend, dynamic=dynamic)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    @property
    def externs(self) -> list[Any]:
        return [n for s in self.stages for n in s.scheduled.nodes if isinstance(n, Extern)]  # type: ignore[union-attr]

    @property
    def kernels(self) -> int:
        return sum(len(s.scheduled.nodes) for s in self.stages) - len(self.externs)  # type: ignore[union-attr]


def compare(fn: Callable[..., Any], *args: Any, backward: bool = False, **more: Any) -> Compiled:
    """Compile, call twice, compare; returns the compiled function."""
    compiled = Compiled(fn, **more)
    check(fn, compiled, *args, backward=backward, times=2)
    assert compiled.stages, "it ran eagerly"
    return compiled


def randn(*shape: int, device: str, grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=g).to(dtype).to(device).requires_grad_(grad)


# -- mutation and aliases ---------------------------------------------------------------------------
def test_two_inputs_share_a_storage(device: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    base = randn(10, device=device)
    compare(f, base[:6], base[4:])


def test_mutation_read_before_and_after(device: str) -> None:
    def f(x: torch.Tensor) -> Any:
        before = x.exp()
        x.copy_(x.flip(0))
        return before, x.sin()

    compare(f, randn(6, 3, device=device))


def test_swap_of_two_inputs(device: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> None:
        t = x.clone()
        x.copy_(y)
        y.copy_(t)

    compare(f, randn(33, device=device), randn(33, device=device) + 1)


def test_one_element_read_in_a_reduction_and_mutated(device: str) -> None:
    def f(x: torch.Tensor) -> Any:
        y = torch.stack([x, x], 0)
        z = (y - 3).amax(0)
        x.add_(x.clone())
        return y, z

    compare(f, torch.full((1, 1), 6, device=device))


def test_transposed_input_mutated(device: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.copy_(torch.softmax(x, -1))
        return x + 1

    compare(f, randn(8, 9, device=device).t())


def test_buffer_mutated(device: str) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.mean.lerp_(x.mean(0), 0.1)
            return x - self.mean

    eager, model = Counter().to(device), Counter().to(device)
    compiled = Compiled(model)
    for i in range(3):
        x = randn(3 + i, 4, device=device)
        torch.testing.assert_close(compiled(x), eager(x))
    assert int(model.count) == 3
    torch.testing.assert_close(model.mean, eager.mean)


def test_output_is_an_input(device: str) -> None:
    x = randn(3, device=device)
    compiled = Compiled(lambda x, y: (x, y + 1, x))
    a, b, c = compiled(x, x)
    assert a is x and c is x
    torch.testing.assert_close(b, x + 1)


def test_a_result_is_not_overwritten_by_the_next_call(device: str) -> None:
    compiled = Compiled(lambda x: torch.softmax(x * 2, -1) + 1)
    x, y = randn(8, 8, device=device), randn(8, 8, device=device) * 3
    first = compiled(x)
    kept = first.clone()
    compiled(y)
    assert torch.equal(first, kept)


# -- inputs as they come ----------------------------------------------------------------------------
def _everything(x: torch.Tensor) -> Any:
    return x * 2 + 1, x.sum(0), x.sum(-1), x.mean(), torch.softmax(x, -1), x.t().contiguous(), torch.cat([x, x + 1], 1)


def hostile(device: str) -> dict[str, torch.Tensor]:
    base = randn(12, 20, device=device)
    out = {
        "plain": base,
        "transposed": randn(20, 12, device=device).t(),
        "strided": randn(24, 60, device=device)[::2, ::3],
        "expanded": randn(12, 1, device=device).expand(12, 20),
        "expanded scalar": torch.tensor(0.5, device=device).expand(12, 20),
        "offset": randn(12 * 20 + 3, device=device)[3:].view(12, 20),
        "overlapping": randn(31, device=device).as_strided((12, 20), (1, 1)),
        "one row": randn(1, 20, device=device),
        "one": randn(1, 1, device=device),
        "zero rows": randn(0, 20, device=device),
        "nan": base.where(base < 1, float("nan")),
        "inf": base.where(base < 1, float("inf")),
    }
    if device == "cpu":
        out["misaligned"] = torch.frombuffer(bytearray(4 + 12 * 20 * 4), dtype=torch.float32, offset=4).view(12, 20)
        out["misaligned"].copy_(base)
    return out


NAMES = [*hostile("cpu")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.sample(4)
def test_hostile_input(device: str, name: str, dynamic: bool) -> None:
    x = hostile(device).get(name)
    if x is not None:
        compare(_everything, x, dynamic=dynamic)


DTYPES = "float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=DTYPES)
def test_dtypes(device: str, dtype: torch.dtype) -> None:
    def f(x: torch.Tensor) -> Any:
        return x + x, x.sum(0), x.amax(1), x.to(torch.float32) * 0.5, x != 0, torch.where(x > 0, x, x * 0)

    x = torch.randint(0, 2 if dtype == torch.bool else 100, (9, 33), generator=torch.Generator().manual_seed(1))
    compare(f, x.to(dtype).to(device))


def test_expanded_tensors_seen_as_another_dtype(device: str) -> None:
    """They are copied, and a copy is no view of one row."""

    def f(x: torch.Tensor, z: torch.Tensor) -> Any:
        x, z = x.expand(-1, 4), z.expand(-1, 4)
        seen = x.view(torch.int32), z.conj(), z.conj().imag, torch.view_as_real(z)
        return *(t[:, 1:] + t[:, :-1] for t in seen), x.view(torch.int32).t().contiguous(), torch.linalg.vander(z[:, 0])

    for dynamic in (False, True):
        x, z = randn(3, 1, device=device), randn(3, 2, device=device).view(torch.complex64)
        compare(f, x, z, dynamic=dynamic)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-40])
def test_special_values(device: str, value: float) -> None:
    def f(x: torch.Tensor) -> Any:
        rows = [x.amax(-1), x.amin(-1), x.argmax(-1), x.argmin(-1), x.var(-1), x.prod(-1), x.any(-1), x.all(-1)]
        rows += [torch.softmax(x, -1), torch.logsumexp(x, -1)]
        each = [x.relu(), x.clamp(-1, 1), x.sign(), torch.maximum(x, -x), x.isnan(), x.round(), x.abs(), x > 0]
        each += [x.sigmoid(), x.tanh(), x.exp(), x.rsqrt(), x.log1p(), F.gelu(x)]
        return *rows, *each

    x = randn(4, 19, device=device)
    x[0, 3], x[1], x[2, -1] = value, value, value
    compare(f, x)


def test_integers_wrap_and_divide_as_eager_does(device: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * x * x, x // y, x % y, torch.div(x, y, rounding_mode="trunc"), torch.fmod(x, y), x >> 1, x / y, x << 2

    x = torch.tensor([-(2**31), 2**31 - 1, -7, 7, 0, 5], dtype=torch.int32, device=device)
    y = torch.tensor([3, -3, 2, -2, 5, 7], dtype=torch.int32, device=device)
    compare(f, x, y)


# -- what was wrong once ------------------------------------------------------------------------------
class Squeezed(nn.Module):
    """Batch norm, SiLU, then scales that are made of means: twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))
        self.scales = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, scale in zip(self.norms, self.scales):
            y = F.silu(norm(x))
            x = x + y * F.silu(scale(y.mean((2, 3), keepdim=True))).sigmoid()
        return x


def _recurrence(x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros_like(x[:, 0])
    out = []
    for i in range(24):
        h = torch.tanh(h * 0.9 + x[:, i])
        out.append(h)
    return torch.stack(out, 1)


def _autocast_put(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = x[:, :4] @ x[:4]
        return x.index_put((torch.arange(2, device=x.device),), y[:2].float()) + y


WRONG_ONCE: dict[str, Callable[..., Any]] = {
    "a number that a half rounds": lambda x: [x == 0.3, x > 0.7, x.eq(0.1), x + 0.3],
    "angle": lambda x: [x.angle(), (-x).angle()],
    "pools of size 0": lambda x: [F.adaptive_avg_pool2d(x[None], n) for n in ((0, 3), (2, 0), 0)],
    "average pools": lambda x: F.avg_pool2d(x[None], 3, 2, 1) * 3,
    "gelu of the extremes": lambda x: [F.gelu(x / 0), F.gelu(x * 1e4), F.gelu(x / 0 * 0)],
    "functions of the extremes": lambda x: [(x * 1e3).exp(), (x * 100).sigmoid(), (x * 1e3).tanh()],
    "scans": lambda x: [x.cumsum(1), x.cumprod(1), x.logcumsumexp(0)],
    "rounding": lambda x: [(x * 10).round(), x.round(decimals=1), x.div(0), x.div(0.3, rounding_mode="floor")],
    "softmax's gradient": lambda x: torch.ops.aten._softmax_backward_data(x, x.softmax(-1), -1, x.dtype),
    "a recurrence": _recurrence, "index_put in autocast": _autocast_put,
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WRONG_ONCE)
def test_what_was_wrong_once(device: str, name: str, dtype: torch.dtype) -> None:
    x = randn(6, 24, 24, device=device, dtype=dtype)[0].clone()
    x.view(-1)[:3] = torch.tensor([0.3, 0.1, 0.7], dtype=dtype)
    fn = WRONG_ONCE[name]
    if name == "index_put in autocast" and dtype != torch.float32:
        x = x.float()
    compare(fn, x)
    if name not in ("a number that a half rounds", "softmax's gradient", "gelu of the extremes", "pools of size 0"):
        compare(fn, x.requires_grad_(), backward=True)


def test_scales_of_means_after_a_batch_norm_in_training(device: str) -> None:
    """(As in EfficientNet: kernels depended on each other in a circle.)"""
    eager = Squeezed().to(device)
    compiled, x = Compiled(copy.deepcopy(eager)), randn(3, 4, 5, 6, device=device)
    for module in (eager, compiled):
        module(x).square().sum().backward()
    for a, b in zip(eager.parameters(), compiled.fn.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)



# -- sizes ------------------------------------------------------------------------------------------
def test_automatic_dynamic_compiles_twice(device: str) -> None:
    compiled = Compiled(lambda x: torch.softmax(x + 1, -1).sum(0))
    for n in (4, 5, 6, 70):
        check(lambda x: torch.softmax(x + 1, -1).sum(0), compiled, randn(n, 12, device=device))
    assert len(compiled.stages) == 2


def test_dynamic_backward(device: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], w).relu().mean()

    compiled = Compiled(f, dynamic=True)
    for n in (5, 9, 16):
        check(f, compiled, randn(n, 24, device=device, grad=True), randn(24, device=device, grad=True), backward=True)
    assert len(compiled.stages) == 2  # forward and backward, once


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_zero_size(device: str, shape: tuple[int, ...]) -> None:
    def f(x: torch.Tensor) -> Any:
        return x + 1, x.sum(), x.sum(0), x.sum(-1), torch.cat([x, x]), x.flatten(), x.any(), x.prod(0)

    compare(f, torch.zeros(shape, device=device))


def test_scalars_and_sizes_as_values(device: str) -> None:
    def f(x: torch.Tensor, k: int, s: float) -> Any:
        return (
            x * x.shape[0] + k,
            x / s,
            torch.full((x.shape[1], k), s, device=x.device),
            torch.arange(k, device=x.device),
        )

    compiled = Compiled(f, dynamic=True)
    for n, k, s in ((3, 4, 0.5), (5, 6, 1.25), (7, 6, 2.5)):
        check(f, compiled, randn(n, 4, device=device), k, s)


# -- calls of ATen ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.dropout(x, 0.4),
        lambda x: torch.rand_like(x) + x,
        lambda x: torch.randn(x.shape, device=x.device).relu(),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: torch.multinomial(x.abs() + 1, 3),
        lambda x: (torch.randint(0, 10, (7,), device=x.device), torch.randperm(9, device=x.device), torch.rand_like(x)),
        lambda x: x.clone().uniform_() + x.clone().normal_(),
        lambda x: F.dropout(x, 0.2) + F.dropout(x.sin(), 0.3) + torch.rand_like(x),
    ],
    ids=["dropout", "rand_like", "randn", "bernoulli", "multinomial", "ints", "in place", "order"],
)
def test_random_numbers_are_eagers(device: str, fn: Callable[..., Any]) -> None:
    compiled = Compiled(fn, fallback_random=True)
    check(fn, compiled, randn(6, 7, device=device), reference=False, times=2)


# -- errors -----------------------------------------------------------------------------------------


def test_bad_options_name_the_right_one() -> None:
    for options, near in (({"wraper": "python"}, "wrapper"), ({"autotune": "of"}, "off"), ({"verify": 1}, "True")):
        with pytest.raises(reflib.OptionError, match=near):
            reflib.compile(lambda x: x, **options)
    with pytest.raises(reflib.ReflibError):
        reflib.compile(lambda x: x, max_fused_ops=-1)


@pytest.mark.parametrize(
    "options",
    [
        {"fuse": False},
        {"max_fused_ops": 2},
        {"max_fused_buffers": 2},
        {"reuse_buffers": False, "inplace_buffers": False},
        {"combine_kernels": False, "split_reductions": False},
        {"persistent_limit": 16},
        {"compile_threads": 1},
    ],
    ids=str,
)
def test_every_option_computes_the_same(device: str, options: dict[str, Any]) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(x, (32,), w)
        return (F.gelu(h) * torch.softmax(h, -1)).sum(0) + (x * 2).amax()

    compare(f, randn(24, 32, device=device, grad=True), randn(32, device=device, grad=True), backward=True, **options)


# -- other entry points ----------------------------------------------------------------------------
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, torch.Tensor]:
        self.steps.add_(1)
        return {"y": F.gelu(self.fc(x)) * scale, "s": x.sum(0)}


def test_entry_point_by_name(device: str) -> None:
    f = torch.compile(lambda x: x.relu() + 1, backend="reflib", options={"verify": True})
    x = randn(4, device=device)
    torch.testing.assert_close(f(x), x.relu() + 1)


def test_module_through_compile(device: str) -> None:
    model = Net().to(device)
    f = reflib.compile(model, verify=True)
    x = randn(3, 6, device=device)
    torch.testing.assert_close(f(x)["y"], model(x)["y"])
    assert int(model.steps) == 2


def test_compilations_in_threads(device: str) -> None:
    def work(k: int) -> None:
        f = Compiled(lambda x: (x * k).sum(-1) + k)
        x = randn(5, 8, device=device)
        torch.testing.assert_close(f(x), (x * k).sum(-1) + k)

    # Where one thread traces, torch 2.11 refuses another's call of a compiled function, which it need not compile then.
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


# -- training ---------------------------------------------------------------------------------------
def test_adam_steps(device: str) -> None:
    torch.manual_seed(0)
    shapes = [(8, 8), (8,), (16, 8), (1,), (3, 5, 2), (8, 8)]
    ours = [nn.Parameter(torch.randn(s, device=device)) for s in shapes]
    theirs = clone(ours)
    make = lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True, capturable=False)  # noqa: E731
    a, b = make(ours), make(theirs)
    compiled = Compiled(lambda: a.step())
    for i in range(3):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(device)
            q.grad = p.grad.clone()
        compiled()
        b.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q)
    last = compiled.stages[-1]
    kernels = sum(not isinstance(n, Extern) for n in last.scheduled.nodes)  # type: ignore[union-attr]
    # on a GPU independent kernels are launched as one; on a CPU a launch costs nothing
    assert kernels <= (4 if device == "cuda" else 2 * len(shapes)), f"{kernels} kernels for {len(shapes)} parameters"


def test_training_loop(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)
    twin = copy.deepcopy(model)

    def losses(net: Callable[..., Any], parameters: Any) -> list[float]:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        out = []
        for i in range(5):
            x, y = randn(12, 8, device=device) + i * 0.1, torch.arange(12, device=device) % 4
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    got, want = losses(Compiled(model), model.parameters()), losses(twin, twin.parameters())
    assert got == pytest.approx(want, rel=1e-4) and got[-1] < got[0]
