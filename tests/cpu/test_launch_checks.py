"""Launches of users' kernels that are refused: those that the exporter drops, and stores to unknown places."""

from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

import reflib  # noqa: E402
from reflib import explain  # noqa: E402
from reflib.errors import CaptureError  # noqa: E402
from tests import user_kernels  # noqa: E402

Tensor = torch.Tensor


@pytest.mark.parametrize("at", ["export", "decompositions"])
def test_a_launch_that_the_exporter_drops_is_refused(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = (torch.export, "export") if at == "export" else (torch.export.ExportedProgram, "run_decompositions")
    whole = getattr(*where)

    def dropping(*how: Any, **more: Any) -> Any:
        made = whole(*how, **more)
        for m in made.graph_module.children():
            for node in [n for n in m.graph.nodes if "triton_kernel" in str(n.target)]:
                for result in [*node.users]:
                    result.replace_all_uses_with(node.kwargs["kwargs"]["out"])
                    m.graph.erase_node(result)
                m.graph.erase_node(node)
        return made

    monkeypatch.setattr(*where, dropping)
    args = torch.randn(100), torch.randn(100)
    with pytest.raises(CaptureError, match=r"drops the launch of the Triton kernel add_kernel.* in a branch"):
        reflib.aot_compile(user_kernels.branching, args, tmp_path / "p.reflib", ["sm_90"], ptx=False)


@triton.jit
def gathered(table, x, out, n, BLOCK: tl.constexpr):
    """Legal: loaded numbers are added to a tensor's place."""
    i = tl.arange(0, BLOCK)
    j = tl.load(table + i, mask=i < n)
    to = out
    for k in range(2):
        tl.store(to + j, tl.load(x + i, mask=i < n), mask=i < n)
        to += k
    tl.atomic_add((out.to(tl.int64) + tl.load(table) * 4).to(tl.pointer_type(tl.float32)), 1.0)


@triton.jit
def addressed(table, x, out, n, BLOCK: tl.constexpr):
    """The tutorial's grouped product has such a table."""
    i = tl.arange(0, BLOCK)
    for g in range(2):
        to = tl.load(table + g).to(tl.pointer_type(tl.float32))
        for _ in range(n):
            tl.store(to + i, tl.load(x + i))
            to += BLOCK
    tl.store(out + i, 1.0)


@triton.jit
def added(table, x, out, n, BLOCK: tl.constexpr):
    tl.store(out, tl.load(x))
    tl.atomic_add((tl.load(table) + n).to(tl.pointer_type(tl.float32)), 1.0)


@pytest.mark.parametrize("kernel", [gathered, addressed, added])
def test_a_place_that_is_read_from_memory(kernel: Any) -> None:
    """Beside stores to tensors too: what it would write is not known."""

    def fn(table: Tensor, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        kernel[(1,)](table, x, out, 7, BLOCK=8)
        return out

    given = torch.zeros(8, dtype=torch.int64), torch.randn(8)
    if kernel is gathered:
        assert explain(fn, *given, target="sm_90").kernels
        return
    says = rf"kernel {kernel.fn.__name__} \(test_launch_checks.py:\d+\) stores to what is none of the tensors"
    with pytest.raises(Exception, match=says):
        explain(fn, *given, target="sm_90")
