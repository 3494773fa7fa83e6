"""Triton kernels of the user's: captured for a GPU on a machine without one, with what they write, never lost."""

from __future__ import annotations

import pytest
import torch

import reflib
from reflib.autotune.isolation import isolated
from reflib.autotune.request import Request
from reflib.ir.data import encode
from reflib.ir.program import Choice, Extern

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 128),)](x, y, out, x.numel(), BLOCK=128)
    return out + 1


@torch.library.triton_op("user_kernels::add", mutates_args=())
def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.library.wrap_triton(add_kernel)[(8,)](x, y, out, x.numel(), BLOCK=128)
    return out


@torch.library.custom_op("user_kernels::theirs", mutates_args=())
def theirs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


theirs.register_fake(lambda x, y: torch.empty_like(x))


def launches(nodes: object) -> list[Extern]:
    return [n for n in nodes if isinstance(n, Extern) and "triton_kernel" in str(n.target)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("fn", [plain, lambda x, y: added(x * 2, y).relu()], ids=["plain", "triton_op"])
def test_what_a_kernel_writes_is_known(fn: object) -> None:
    x, y = torch.randn(1000), torch.randn(1000)
    driver = triton.runtime.driver._active
    e = reflib.explain(fn, x, y, target="sm_90")
    (launch,) = launches(e.program.nodes)
    assert dict(launch.kwargs)["tensors_to_clone"] in (["out"], ("out",)) and len(launch.outputs) == 1
    assert "copy_" not in str(e.graph), "inputs are not written back"
    assert len(e.kernels) == (2 if fn is not plain else 1)
    assert triton.runtime.driver._active is driver, "put back"


def test_a_candidate_keeps_its_launch() -> None:
    """And is not sent to another process, where its kernel's number is another one's."""

    def launching(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(add_kernel)[(8,)](x, y, out, x.numel(), BLOCK=128)
        return out

    reflib.register_custom_op_autotuning(theirs, configs=[launching])
    x, y = torch.randn(1000), torch.randn(1000)
    e = reflib.explain(lambda x, y: theirs(x, y) + 1, x, y, target="sm_90", autotune="blocking")
    (choice,) = (n for n in e.program.nodes if isinstance(n, Choice))
    (variant,) = (v for v in choice.variants if v.name == "launching")
    (launch,) = launches(variant.nodes)
    assert set(launch.outputs) == set(choice.outputs)
    program = {"constants": [], "nodes": [encode(launch)]}
    why = isolated(Request({"a": program}, "a", "a", ()), {}, reflib.Options())
    assert isinstance(why, str) and "torch.library.triton_op" in why
