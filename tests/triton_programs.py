"""Whole programs as a GPU would run them, on a CPU: captured, compiled for sm_90, and executed by the printed wrapper,
whose kernels are run by Triton's interpreter. A program of its own, because the interpreter must be chosen before
Triton is imported.

    TRITON_INTERPRET=1 python tests/triton_programs.py [name ...]

Prints one JSON object: for each program, what is wrong with it, or nothing.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from interpreter import answer, told
from narrow_chains import DTYPES, chain, operands
from torch import randn

from reflib.capture import products, random  # noqa: F401  (their ops)
from reflib.generate.kernel import Kernel
from reflib.options import Options
from reflib.pipeline import Backend, run
from reflib.wrap.launch import launcher
from reflib.wrap.python import PythonPrinter
from reflib.wrap.runtime import namespace
from tests.sorts import gate, sparsemax


class Interpreted(Backend):
    """Compiles for a GPU, runs in the interpreter. ``fallback``: every pointer is said to be misaligned."""

    def __init__(self, fallback: bool, **options: Any):
        super().__init__(Options(target="sm_90", verify=True, **options))
        self.fallback, self.launched = fallback, 0
        self.words = torch.zeros(0, dtype=torch.int32)

    def _compile(self, graph: Any, inputs: Any) -> Callable[[list], Any]:
        stages = run(graph, self.options)
        assert stages.scheduled is not None and stages.plan is not None and stages.kernels is not None
        printer = PythonPrinter(stages.scheduled, stages.plan, stages.kernels)
        source = printer.print()
        if self.fallback:
            source = source.replace(".data_ptr() % 16 == 0", ".data_ptr() % 16 == 99")
        scope = namespace() | stages.scheduled.constants | printer.names
        scope |= {
            "alloc_cuda": _poisoned, "device_guard": lambda i: contextlib.nullcontext(), "current_stream": lambda i: 0,
            "zeros": self._zeros,
        }  # fmt: skip
        scope |= {k.name: self._kernel(k) for k in stages.kernels.values() if k.grid != 0}
        exec(compile(source, "<wrapper>", "exec"), scope)
        return scope["call"]

    def _zeros(self, device: int, stream: int, count: int) -> torch.Tensor:
        """The same words at every call, as on a stream: a kernel that does not leave them zero is found out."""
        if self.words.numel() < count:
            self.words = torch.zeros(count, dtype=torch.int32)
        assert not self.words.any(), "a kernel did not leave its counters zero"
        return self.words

    def _kernel(self, kernel: Kernel) -> Callable[..., None]:
        launch = launcher(kernel)

        def counted(*args: int) -> None:
            self.launched += 1
            launch(*args)

        return counted


def tied() -> tuple[torch.Tensor]:
    """Columns of few different values: of infinities alone, with NaN, with either infinity first or last."""
    x = (torch.rand(9001, 24) * 6).round()
    x[:, 0], x[:, 1], x[:, 2] = float("inf"), float("-inf"), float("nan")
    x[7, 3] = x[5000, 3] = float("nan")
    x[0, 4] = x[-1, 5] = float("inf")
    x[0, 6] = x[-1, 7] = float("-inf")
    return (x,)


def _poisoned(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty_strided(size, stride, dtype=dtype)
    return out.fill_(float("nan") if dtype.is_floating_point else 77)


def _trained(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(rows, columns, requires_grad=True), randn(columns, requires_grad=True)


def _block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, (32,), w)
    return (F.gelu(h) * torch.softmax(h, -1)).sum(0) + (x * 2).amax()


def _mutates(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2).add_(y)
    y[1:3] = x[:2]
    return x.sum()


def _pools(x: torch.Tensor) -> Any:
    x = x.view(1, 2, -1, 10) * 2
    pools = [F.avg_pool2d(x, 3, 2, 1), *F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True)]
    return [*pools, F.adaptive_avg_pool2d(x, (2, 3)), F.avg_pool2d(x, (6, 9), 1), F.avg_pool2d(x, 2, 3, 1, True, False)]


def _trained_pools(x: torch.Tensor) -> Any:
    x = x.relu().view(2, 1, -1, 9)
    return F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, (2, 4)), F.max_pool2d(x, 2, 2)


def _scans(x: torch.Tensor, i: torch.Tensor) -> Any:
    x = torch.where(i == 3, float("nan"), x)
    sums = [(x.relu() + 1).cumsum(-1) * 2, x.cumsum(0), x.softmax(-1).cumsum(-1), i.cumsum(-1), x.cumprod(0)]
    sums += [torch.ops.reflib.cumprod_backward(x + 1, x, x.cumprod(d), d) for d in (0, 1)]
    return [*sums, *x.cummax(-1), *i.cummin(-1), *i.cummax(0), x.logcumsumexp(-1), (i + x).cumsum(1).sum(1)]


def _log_sums(x: torch.Tensor) -> Any:
    x = x * 9
    x[0, :3], x[1, 1030:1032], x[1, 1060] = float("-inf"), float("inf"), float("nan")
    return x.logcumsumexp(-1)


def _rotated(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Points by quaternions."""
    q = F.normalize(q, dim=-1)
    t = 2 * torch.linalg.cross(q[:, 1:], v)
    return v + q[:, :1] * t + torch.linalg.cross(q[:, 1:], t)


def _normals(points: torch.Tensor, faces: torch.Tensor) -> torch.Tensor:
    """Of a mesh's points: the sums of their faces'."""
    a, b, c = (points[faces[:, k]] for k in range(3))
    normal, out = torch.linalg.cross(b - a, c - a), torch.zeros_like(points)
    for k in range(3):
        out = out.index_add(0, faces[:, k], normal)
    return F.normalize(out.index_add(0, faces[:, 0], normal), dim=-1)


def _channels(planes: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    """Depthwise convolutions."""
    x = planes.flatten(1)
    wide = F.conv2d(planes[None], w[:, None], b, stride=(2, 1), padding=(2, 1), dilation=(1, 2), groups=len(w))
    causal = F.silu(F.conv1d(F.pad(x, (3, 0)), w[:, 0].repeat(1, 2)[:, None, :4], b, groups=len(w)))
    return wide, causal, F.conv1d(x.double(), w[:, :1].double(), groups=len(w))


def _sorts(x: torch.Tensor, i: torch.Tensor) -> Any:
    """Results that have one right value, of float32, half precision and integers."""
    finite, x = x, torch.where(i == 3, float("nan"), torch.where(i == 0, -0.0, x))
    some = [x.sort(dim=-1, stable=True), i.sort(dim=0, stable=True, descending=True), (x.half() * 2).sort(stable=True)]
    some += [i.to(t).sort(dim=-1, stable=True, descending=True) for t in (torch.bfloat16, torch.int8)]
    rows = [x.median(-1).values, x.nanmedian(0).values, x.kthvalue(2, keepdim=True).values, *x.exp().topk(2, 0)]
    one = [x / x.sort(-1).values[:, -1:], x.cumsum(1).gather(1, i.abs()[:, :1]), sparsemax(finite), *gate(finite)]
    return [t for pair in some for t in pair] + rows + one + [x.argsort(dim=0, stable=True) * 2]


def _ties(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape)


def _embeddings(grad: torch.Tensor, i: torch.Tensor) -> Any:
    backward = torch.ops.aten.embedding_dense_backward
    some = [backward(grad.sin(), i[:, 0].abs(), 5, padding, False) for padding in (-1, 2)]
    many = grad.round()[..., None].expand(-1, -1, 3)
    return [*some, backward(many, i.abs(), 4, 1, False) * 2, backward(many.to(torch.bfloat16), i.abs(), 4, -1, False)]


def _puts(x: torch.Tensor, new: torch.Tensor, i: torch.Tensor) -> Any:
    """At positions with duplicates, negative ones, along several dimensions, of other shapes, and none."""
    rows, columns, one = i[:, 0], i[:, 1].abs() % 2, torch.ones((), device=x.device)
    base, deep, more = x.cos(), x[:, None].expand(-1, 3, -1).exp(), new.sin()
    puts: list[tuple[torch.Tensor, tuple[Any, ...], torch.Tensor]] = [
        (base, (rows,), more),
        (base, (rows, columns), more[:, 0]),
        (base, (rows[:2, None], columns), one),
        (base.t(), (columns, rows[:1]), new[:, 1]),
        (deep, (rows, None, columns), more[:, :3]),
        (deep, (None, i % 3), more[:, None, :4].reshape(-1, 1, 1)[:1]),
        (base, (rows[:0],), more[:0]),
        (torch.zeros_like(i), (rows,), i * 3),
        (base.round().to(torch.bfloat16), (rows,), i.repeat(1, 2).to(torch.bfloat16)),
    ]
    return [torch.ops.aten.index_put(to, where, values, True) * 2 for to, where, values in puts]


def _scatters(x: torch.Tensor, new: torch.Tensor, i: torch.Tensor) -> Any:
    rows, zeros, ones = i.abs().repeat(1, 2), torch.zeros_like(x), torch.ones_like(new)
    added = [x.index_add(0, i[:, 0].abs(), new.sin(), alpha=2), x.index_add(-1, i[0].abs(), new[: len(x), :2])]
    added += [x.scatter_add(0, rows, new), zeros.scatter_add(0, rows[:2], ones), x.scatter_add(1, rows[: len(x)], new)]
    ways: list[tuple[torch.Tensor, str, bool]] = [
        (x, "sum", True), (x, "sum", False), (zeros, "sum", False), (x, "mean", True), (x, "mean", False),
    ]  # fmt: skip
    return added + [to.scatter_reduce(0, rows, new, how, include_self=own).relu() for to, how, own in ways]


def _stores(x: torch.Tensor, new: torch.Tensor, i: torch.Tensor) -> Any:
    """Into an input, in place; into a value; and where the old one is needed as well."""
    rows, columns, kept = torch.arange(0, len(new), 2, device=x.device), i[0] % 2, x.sin()
    x.index_copy_(0, rows[:2] + 1, new[:2].cos())
    x.index_put_((rows[1:2],), new[2:3])
    stored = kept.index_put((rows[:2, None], columns[:1]), new[:2, :1])
    both = kept.scatter(0, torch.stack([rows[:2], rows[:2] + 1], 1), new[:2, :2]) + kept
    wide = new.index_copy(1, columns[:1], x[:, :1].repeat(2, 1)[: len(new)])
    return stored * 2, both, x.sum(0), x.scatter(1, columns[:1].expand(len(x), 2)[:1], 3.0), wide


def _shared_parts(gates: torch.Tensor, c: torch.Tensor, dh: torch.Tensor, dc: torch.Tensor) -> Any:
    """Four parts by one kernel, two by another, and parts that have nothing in common."""
    i, f, g, o = gates.chunk(4, 1)
    dc = dc + dh * o.sigmoid() * (1 - c.tanh().square())
    parts = [dc * g * i, dc * c * f, dc * i * (1 - g * g), dh * c.tanh() * o]
    rows = torch.cat([(gates + 1).exp(), gates.abs()], 0)
    return torch.cat(parts, 1), dc * f, rows, torch.stack([c, dh.sin(), dc], 1)


def _upsamples(x: torch.Tensor) -> Any:
    x = x.sin().view(2, 1, -1, 8)
    ways: list[dict[str, Any]] = [
        {"scale_factor": 2, "mode": "bilinear"},
        {"scale_factor": 3},
        {"size": (9, 13), "mode": "bilinear", "align_corners": True},
        {"size": (3, 5), "mode": "bilinear"},
        {"scale_factor": 2},
    ]
    return [F.interpolate(x, **way) for way in ways]


def _random(x: torch.Tensor, seed: torch.Tensor) -> Any:
    """Uniform numbers bit for bit; the others by arithmetic on the same words."""
    draw, size = torch.ops.reflib.random, list(x.shape)
    halves = [draw(seed, 7, "uniform", size, [1, 0], d) for d in (torch.float16, torch.bfloat16, torch.float64)]
    words = draw(seed, 2**31 + 5, "bits", size, [0, 1], torch.int64)
    normal = [draw(seed, 8, "normal", size, [0, 1], d) for d in (torch.float32, torch.float64)]
    u = draw(seed, 1, "uniform", size, [0, 1], torch.float32)
    return x * (u < 0.5), u, words % 1000, u.softmax(-1), *halves, *normal


def _written_out(x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums of a few elements that other reductions read."""
    points, rows = x.unflatten(-1, (-1, 3)), w[i] + 1
    distances = (points[:, None] - points).square().sum(-1)
    return distances.amin(0), (rows.sum(1) * rows.prod(1) + rows.amax(1)).sum(-1), points.var(-1).sum(0)


def _searches(s: torch.Tensor, x: torch.Tensor) -> Any:
    s = s.sort(-1).values.cumsum(-1)
    ends = torch.stack([torch.searchsorted(s, x, right=True), torch.bucketize(x, s[0])], -1)
    return s.gather(1, ends.sum(-1) % s.shape[1]), torch.searchsorted(s, x, out_int32=True)


def colours(x: torch.Tensor) -> torch.Tensor:
    """Hue, saturation and value of (..., 3, n): the greatest and the least of three, and which one that is."""
    (high, at), low = x.max(-2), x.amin(-2)
    d = torch.where(high == low, 1.0, high - low)
    r, g, b = x.unbind(-2)
    hue = (torch.stack([g - b, b - r + 2 * d, r - g + 4 * d], -2) / d.unsqueeze(-2)).gather(-2, at.unsqueeze(-2))
    return torch.stack([hue.squeeze(-2) / 6 % 1, (high - low) / (high + 1e-3), high], -2)


def _about_three(*shape: int, grad: bool = True) -> torch.Tensor:
    return (randn(*shape) * 2 + 3).requires_grad_(grad)


def _hostile_columns(n: int) -> torch.Tensor:
    """An outlier first, a constant, a constant but for its first row, a large mean, rows that grow."""
    x = _about_three(n, 9, grad=False)
    x[0], x[:, 1], x[1:, 2] = 1e4, 3.3, 7.7
    x[:, 3] += 1e6
    x[:, 4] += torch.arange(n)
    return x


def _batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    mean, var = torch.zeros_like(w.detach()), torch.ones_like(w.detach())
    y = F.batch_norm(x, mean, var, w, b, training=True, momentum=0.1)
    return y + (mean + 3 * var)[:, None, None]


def _cross_entropy(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, torch.arange(len(x)) * 7 % x.shape[1])


def _masked(x: torch.Tensor) -> torch.Tensor:
    far = torch.arange(x.shape[1]) % 5 == 0
    return torch.softmax(x.masked_fill(far, float("-inf")), -1)


SHORT = {"persistent_limit": 16}
Programs = dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], dict[str, Any]]]
# variances and softmax sums; run as fast kernels only (a fallback takes the same passes)
ONE_PASS: Programs = {
    "var, every correction": (
        lambda x: (*(torch.var(x, -1, correction=c) for c in (0, 1, 2.5)), torch.std(x, 0), *torch.var_mean(x)),
        lambda: (_about_three(7, 203, grad=False),), SHORT,
    ),
    "split rows": (lambda x: torch.var_mean(x, -1), lambda: (_about_three(3, 16411, grad=False),), {}),
    "split evenly": (lambda x: torch.std_mean(x, -1), lambda: (_about_three(2, 16384, grad=False),), {}),
    "split columns": (lambda x: torch.var_mean(x, 0), lambda: (_about_three(1031, 9, grad=False),), {}),
    "split columns, hostile": (lambda x: torch.var_mean(x, 0), lambda: (_hostile_columns(1031),), {}),
    "split, two axes": (lambda x: torch.var_mean(x, (0, 2)), lambda: (_about_three(3, 2, 4111, grad=False),), {}),
    "batch norm": (
        _batch_norm, lambda: (_about_three(3, 3, 53, 59), _about_three(3), _about_three(3)), {},
    ),
    "group norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda: (_about_three(2, 6, 19, 23), _about_three(6), _about_three(6)), SHORT,
    ),
    "layer norm": (lambda x, w: F.layer_norm(x, (301,), w), lambda: (_about_three(5, 301), _about_three(301)), SHORT),
    "softmax": (lambda x: torch.softmax(x, -1), lambda: (_about_three(5, 333),), SHORT),
    "masked softmax": (_masked, lambda: (_about_three(5, 333),), SHORT),
    "log softmax": (lambda x: torch.log_softmax(x, -1), lambda: (_about_three(5, 333),), SHORT),
    "softmax of columns": (lambda x: torch.softmax(x, 0), lambda: (_about_three(207, 10),), SHORT),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), lambda: (_about_three(5, 333),), SHORT),
    "cross entropy": (_cross_entropy, lambda: (_about_three(6, 517),), SHORT),
}  # fmt: skip


def _rotated_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A norm, then a rotary embedding."""
    y = F.rms_norm(x, (x.shape[-1],), w, 1e-6)
    a, b = y.chunk(2, -1)
    return y * cos + torch.cat([-b, a], -1) * sin


def _likely(x: torch.Tensor) -> torch.Tensor:
    """The words that are not much less likely than the likeliest."""
    p = x.softmax(-1)
    p = torch.where(p >= 0.05 * p.amax(-1, keepdim=True), p, 0)
    return p / p.sum(-1, keepdim=True)


def _forces(x: torch.Tensor) -> torch.Tensor:
    d, mass = x[None] - x[:, None], x[:, 0].abs()
    return (d * (mass * (d.square().sum(-1) + 0.01) ** -1.5)[..., None]).sum(1)


PROGRAMS: Programs = {
    "siblings": (
        lambda x: (x + 1, x.sum(), x.sum(0), x.sum(-1), torch.cat([x, x]), x.t() * 2, (x > 0).any(), x.prod(0)),
        lambda: (randn(12, 20),), {},
    ),
    "one of each length": (
        lambda x, y, z: (x.sum(-1), y.amax(-1), z.mean(-1), x.exp(), y.softmax(0)),
        lambda: (randn(6, 100), randn(40, 3), randn(5, 33)), {},
    ),
    "written out": (_written_out, lambda: (randn(9, 12), randn(11, 7), torch.arange(30).view(6, 5) % 11), {}),
    "colours": (
        lambda x: colours(x.unflatten(-1, (3, -1))), lambda: (_ties(9, 21).float().requires_grad_(),), {},
    ),
    "searches": (_searches, lambda: (_ties(4, 11).float(), _ties(4, 9).float()), {}),
    "from the end": (
        lambda x: (x.flip(-1).cumsum(-1).flip(-1) * x.exp(), (x * 2).flip(0).cumsum(0).flip(0)),
        lambda: (randn(6, 100),), {},
    ),
    "four bits": (
        lambda x, w, scale: x * (torch.cat([(w << 4) >> 4, w >> 4]).to(x.dtype) * scale),
        lambda: (randn(60, 33), operands(1, torch.int8)[0], randn(33)), {},
    ),
    "block": (_block, lambda: _trained(24, 32), {}),
    "looped": (_block, lambda: _trained(24, 32), SHORT),
    "one op each": (_block, lambda: _trained(24, 32), {"max_fused_ops": 2}),
    "columns": (
        lambda x, w: F.rms_norm(x, (64,), w, 1e-6), lambda: _trained(300, 64), {},
    ),
    "empty": (lambda x: (x + 1, x.sum(), x.sum(0), x.any(), x.all(-1), x.t() * 2), lambda: (randn(0, 5),), {}),
    "empty rows": (lambda x: (x + 1, x.sum(), x.sum(-1), x.any(), x.all(-1)), lambda: (randn(5, 0),), {}),
    "mutates": (_mutates, lambda: (randn(4, 6), randn(4, 6)), {}),
    "views": (
        lambda x: (x.t().reshape(-1) + 1, x[:, ::2].cos(), x.expand(3, *x.shape).sum(0), F.pad(x, (1, 2)) * 2),
        lambda: (randn(12, 20),), {},
    ),
    "positions of columns": (
        lambda x: (x.argmax(0), x.argmin(0), x.amax(0), x.nan_to_num(2, 5, 0).short().argmin(0)), tied, {},
    ),
    "long": (lambda x: (x.sum(), x.amax(), x.argmax(), (x * 2).mean(0)), lambda: (randn(3, 20000),), {}),
    "product and gelu": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda: (randn(2, 5, 64), randn(33, 64), randn(33)), {},
    ),
    "products": (
        lambda x, y: (torch.relu(x @ y) + 1, (y.t() @ x.t()) * 2, (x @ y).softmax(-1)),
        lambda: (randn(20, 48), randn(48, 16)), {},
    ),
    "long product": (lambda x, y: torch.relu(x @ y), lambda: (randn(16, 4096), randn(4096, 16)), {}),
    "batched product": (
        lambda x, y, r: torch.sigmoid(torch.bmm(x, y)) + r, lambda: (randn(3, 20, 48), randn(3, 48, 16), randn(16)), {},
    ),
    "trained product": (
        lambda x, w: F.gelu(x @ w).sum(),
        lambda: (randn(20, 32, requires_grad=True), randn(32, 16, requires_grad=True)), {},
    ),
    "pools": (_pools, lambda: (_ties(14, 10).float(),), {}),
    "trained pools": (_trained_pools, lambda: (_ties(14, 9).float().requires_grad_(),), {}),
    "scans": (_scans, lambda: (randn(3, 7), _ties(3, 7)), {}),
    "looped scans": (_scans, lambda: (randn(2, 37), _ties(2, 37)), SHORT),
    "log sums": (_log_sums, lambda: (randn(2, 1100),), {}),
    "rotated heads": (
        _rotated_heads,
        lambda: tuple(t.requires_grad_() for t in (randn(9, 41, 32), randn(41, 32), randn(41, 32), randn(32))), {},
    ),
    "likely words": (_likely, lambda: (randn(3, 700) * 3,), SHORT),
    "forces": (_forces, lambda: (randn(11, 3),), {}),
    "coordinates": (_rotated, lambda: (randn(1370, 4, requires_grad=True), randn(1370, 3, requires_grad=True)), {}),
    "normals": (_normals, lambda: (randn(300, 3), torch.randint(0, 300, (1400, 3))), {}),
    "channels": (_channels, lambda: (randn(3, 7, 10), randn(3, 3, 2), randn(3)), {}),
    "kept and summed": (lambda x, y: (lambda z: (z, z.sum(0)))((x * y).relu()), lambda: (randn(1694, 65),) * 2, {}),
    "columns behind a copy": (lambda x: x.t().contiguous().log_softmax(-1), lambda: (randn(1300, 70),), {}),
    "sorts": (_sorts, lambda: (randn(3, 7), _ties(3, 7)), {}),
    "sorted columns": (_sorts, lambda: (randn(11, 3).t(), _ties(11, 3).t()), {"max_fused_ops": 40}),
    "trained sorts": (
        lambda x: (sparsemax(x), gate(x)[0], x.sort(-1).values[:, 2], (x * 2).topk(3, 0).values.exp()),
        lambda: (randn(5, 6, requires_grad=True),), {},
    ),
    "embeddings": (_embeddings, lambda: (randn(12, 6), _ties(12, 6)), {}),
    "puts": (_puts, lambda: (randn(5, 4), randn(6, 4), _ties(6, 2)), {}),
    "one put each": (_puts, lambda: (randn(5, 4), randn(6, 4), _ties(6, 2)), {"max_fused_ops": 3}),
    "scatters": (_scatters, lambda: (randn(5, 4), randn(6, 4), _ties(6, 2)), {}),
    "shared parts": (_shared_parts, lambda: tuple(randn(7, n * 37) for n in (4, 1, 1, 1)), {}),
    "stores": (_stores, lambda: (randn(5, 4), randn(6, 4), _ties(6, 2)), {}),
    "upsamples": (_upsamples, lambda: (randn(10, 8, requires_grad=True),), {}),
    "long rows": (
        lambda x: (x.softmax(-1), x.logsumexp(-1), x.log_softmax(-1)), lambda: (randn(2, 40_001),), {},
    ),
    "one order": (
        lambda x: (
            F.layer_norm(x, x.shape[-1:]), x.softmax(-1), x.logsumexp(-1), (1 + x / 30).prod(-1), x.sum(0),
            F.gelu(x @ x.mT),
        ),
        lambda: (randn(5, 300),), {"batch_invariant": True},
    ),
    "one order, looped": (
        lambda x: (F.layer_norm(x, x.shape[-1:]), x.softmax(-1), x.mean(-1)),
        lambda: (randn(3, 20_001),), {"batch_invariant": True},
    ),
    "one order, cut": (
        lambda x, y: (x.sum(0), x.var(0), F.group_norm(y, 1), y.mean((1, 2)), y.reshape(2, -1) @ y.reshape(2, -1).T),
        lambda: (randn(1100, 7), randn(2, 4, 4096)), {"batch_invariant": True},
    ),
    "random": (_random, lambda: (randn(9, 33), torch.randint(-(2**63), 2**63 - 1, (1,))), {}),
    "lists": (
        lambda *xs: torch._foreach_add(torch._foreach_mul(list(xs), 0.5), 1.0),
        lambda: tuple(randn(n) for n in (5, 300, 7, 64)), {},
    ),
    **{f"{t} chain {i}": (chain(i, t), functools.partial(operands, i, t), {}) for t in DTYPES for i in range(6)},
    **ONE_PASS,
}  # fmt: skip


def problem(name: str, fallback: bool, dynamic: bool) -> str:
    fn, make, options = PROGRAMS[name]
    backend = Interpreted(fallback, **options)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    torch.manual_seed(0)
    args = make()
    wrong = differences(fn, compiled, args)
    if not backend.launched:
        return "no kernel was launched"
    if dynamic and not wrong and args[0].dim() == 2 and args[0].numel():  # the same kernels, more rows than were traced
        more = [more_rows(a) for a in args] if "product" not in name else [more_rows(args[0]), *args[1:]]
        wrong = differences(fn, compiled, tuple(more))
    return wrong


def more_rows(a: torch.Tensor) -> torch.Tensor:
    times = 3 if len(a) < 100 else 2  # each row more is a program more, and a program takes a millisecond
    return a.detach().repeat(times, 1).requires_grad_(a.requires_grad) if a.dim() == 2 else a


def differences(fn: Callable[..., Any], compiled: Callable[..., Any], args: tuple[Any, ...]) -> str:
    results = []
    for f in (fn, compiled):
        mine = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        out = f(*mine)
        out = list(out) if isinstance(out, (tuple, list)) else [out]
        if any(a.requires_grad for a in mine):
            torch.manual_seed(1)
            grads = torch.autograd.grad(out, mine, [torch.randn_like(o) for o in out])
            out += grads
        results.append([t.detach() for t in [*out, *mine]])
    wrong = []
    for i, (want, got) in enumerate(zip(*results, strict=True)):
        same = want.shape == got.shape and (want.stride() == got.stride() or not want.numel())
        if not same or not torch.allclose(got.double(), want.double(), rtol=1e-4, atol=1e-5, equal_nan=True):
            wrong.append(f"output {i}: got {got.flatten()[:4].tolist()}, want {want.flatten()[:4].tolist()}")
    return "; ".join(wrong)


def main(wanted: list[str]) -> dict[str, str]:
    ways = [(False, False), (False, True), (True, False), (True, True)]
    runs = [(n, f, d) for n in wanted or PROGRAMS for f, d in ways if not f or n not in ONE_PASS]
    names = {f"{n}, {'fallback' if f else 'fast'}, {'dynamic' if d else 'static'}": (n, f, d) for n, f, d in runs}
    return {name: told(problem, *each) for name, each in names.items()}


if __name__ == "__main__":
    answer(main, sys.argv[1:])
