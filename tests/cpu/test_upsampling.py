"""Interpolation is one kernel; its backward gathers, and calls nothing of ATen."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import reflib
from reflib.fuse import fuse
from reflib.ir.loops import Indirect, LoopNest
from reflib.observe.explain import Explanation
from reflib.options import Options
from reflib.target import parse_target
from tests.semantics import compare

WAYS: dict[str, dict[str, Any]] = {
    "nearest": {"scale_factor": 2, "mode": "nearest"},
    "three times": {"scale_factor": 3, "mode": "nearest"},
    "exact": {"size": (7, 11), "mode": "nearest-exact"},
    "smaller": {"size": (3, 4), "mode": "nearest"},
    "bilinear": {"scale_factor": 2, "mode": "bilinear"},
    "corners": {"size": (9, 13), "mode": "bilinear", "align_corners": True},
    "odd": {"scale_factor": 1.7, "mode": "bilinear"},
    "smaller bilinear": {"size": (3, 4), "mode": "bilinear"},
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.sample(3)
def test_forward_and_backward(name: str) -> None:
    x = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    compiled = compare(lambda x: F.interpolate(x.sin(), **WAYS[name]), x, backward=True)
    assert not compiled.externs


def test_programs_are_exported_after_a_compilation() -> None:
    """torch's list of composite ops, and the table made with it, are those of a process that has compiled nothing."""
    from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace as composite_ops

    from reflib.lower.decompositions import _table

    class Larger(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.interpolate(x.sin(), scale_factor=2.0)

    x = torch.randn(1, 2, 3, 4)
    composite_ops.cache_clear()
    _table.cache_clear()
    reflib.explain(Larger(), x)
    torch.testing.assert_close(reflib.compile(torch.export.export(Larger(), (x,)))(x), Larger()(x))


def test_one_dimension_and_three() -> None:
    for shape in ((2, 3, 9), (1, 2, 3, 4, 3)):
        x = torch.randn(shape).requires_grad_()
        compiled = compare(lambda x: F.interpolate(x, **WAYS["nearest"]), x, backward=True, dynamic=False)
        assert not compiled.externs


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("channels", [3, 5])
def test_whole_factors_compute_no_position(mode: str, channels: int) -> None:
    """Of any order of dimensions in memory; a third is rounded in float32, which no position shows."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x.sin(), scale_factor=(4, 3), mode=mode)

    x = torch.randn(2, channels, 5, 6)
    for order in (torch.contiguous_format, torch.channels_last):
        given = x.to(memory_format=order)
        assert not compare(f, given, dynamic=False).externs
        (node,) = on_gpu(f, given).fused.nodes
        assert not any(isinstance(s, Indirect) or getattr(s, "op", "") == "cast" for s in node.body)
    volume = torch.randn(2, 5, 2, 3, 4).to(memory_format=torch.channels_last_3d)
    compare(lambda x: F.interpolate(x, scale_factor=2, mode=mode), volume, dynamic=False)
    for sizes in ((1,), (1, 1), (1, 1, 1), (1, 3)):  # of which one element is repeated: not as a view
        compare(lambda x: F.interpolate(x, scale_factor=2, mode=mode), torch.randn(2, 3, *sizes), dynamic=False)
    row = torch.randn(2, 4, 3).transpose(0, 1)
    compare(lambda x: F.interpolate(x, scale_factor=2.5, mode=mode), row, dynamic=False)


def test_sizes_known_at_run_time() -> None:
    grow = torch.randn(2, 3, 5, 6).requires_grad_()
    compare(lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), grow, backward=True, dynamic=True)


@pytest.mark.parametrize("factors", [{"scales_h": 1.3}, {"scales_w": 2.1}, {"scales_h": 1.3, "scales_w": 2.1}])
@pytest.mark.parametrize("op", ["upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"])
@pytest.mark.sample(3)
def test_factors_along_some_dimensions(op: str, factors: dict[str, float]) -> None:
    how = {} if "nearest" in op else {"align_corners": False}
    x = torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(5)).requires_grad_()
    compare(lambda x: getattr(torch.ops.aten, op)(x.sin(), [7, 11], **how, **factors), x, backward=True, dynamic=False)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
def test_no_image(mode: str) -> None:
    x = torch.randn(0, 2, 3, 4).requires_grad_()
    compare(lambda x: F.interpolate(x.sin(), scale_factor=2, mode=mode), x, backward=True, dynamic=False)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
def test_as_many_images_as_a_mask_keeps(mode: str) -> None:
    def f(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x[keep], scale_factor=2, mode=mode)

    x = torch.randn(4, 2, 3, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(f, backend="reflib", fullgraph=True)
        for keep in ([True, False, True, True], [False] * 4):
            y, expected = (g(x, torch.tensor(keep)) for g in (compiled, f))
            torch.testing.assert_close(y, expected)
            gradients = [torch.autograd.grad(t.square().sum(), x)[0] for t in (y, expected)]
            torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shape", [(4, 3), (4, 1), (3,), (1,)])
def test_known_positions_in_inference(shape: tuple[int, ...]) -> None:
    def f(x: Any, v: Any) -> Any:
        return x.index_put((torch.arange(4)[:, None] % 3, torch.arange(3)), v, accumulate=True)

    compare(f, torch.randn(3, 3), torch.randn(shape))


# -- gathers are computed where they are read, under the masks of cat as well -----------------------------
RANDOM = random.Random(3)


def on_gpu(fn: Any, *args: torch.Tensor) -> Explanation:
    with torch.no_grad():
        return reflib.explain(fn, *args, target="sm_90")


def head(mode: str, **how: Any) -> Any:
    """A decoder's: maps of several sizes brought to the largest, one after another along the channels."""
    size, c = 4 * RANDOM.randrange(3, 6), RANDOM.randrange(2, 5)
    random = torch.Generator().manual_seed(1)
    xs = [torch.randn(2, c + i, size >> i, size >> i, generator=random) for i in range(3)]
    return lambda *xs: torch.cat([F.interpolate(x, size=(size, size), mode=mode, **how) for x in xs], 1), xs


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_upsamplings_side_by_side_are_one_kernel(mode: str) -> None:
    fn, xs = head(mode)
    assert not compare(fn, *xs).externs
    e = on_gpu(fn, *xs)
    assert len(e.kernels) == 1 or {k.name.removesuffix("_fallback") for k in e.kernels} == {e.kernels[0].name}
    assert e.memory.peak_bytes == fn(*xs).numel() * 4  # nothing but the result
    (node,) = fuse(e.program, Options(), parse_target("sm_90")).program.nodes
    selects = [s for s in node.body if getattr(s, "op", "") == "where"]  # type: ignore[union-attr]
    assert len(selects) <= 2 * len(xs)  # each mask selects once


def test_positions_out_of_range_under_a_mask_are_not_read() -> None:
    n = RANDOM.randrange(5, 9)

    def fn(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        twice = torch.arange(n) * 2  # beyond x's end, at the places that are y's
        return torch.cat([y, x[twice], y.exp(), x[i + 1], x[twice + i - i]]).sin()

    x, y = torch.randn(2 * n - 1, 3), torch.randn(n, 3)
    compare(fn, x, torch.arange(n), y)
    assert len(on_gpu(fn, x, torch.arange(n), y).groups) == 1


def test_gathers_stay_within_the_limit_of_a_body() -> None:
    fn, (x, *_) = head("bilinear")
    e = on_gpu(lambda x: fn(*(x[..., : 4 + i, : 5 + i] for i in range(6))), x)
    assert 1 < len(e.groups) < 40
    bodies = [n.body for n in e.fused.nodes if isinstance(n, LoopNest)]
    assert max(map(len, bodies)) <= 260 and any(isinstance(s, Indirect) for b in bodies for s in b)
