"""Launches of users' kernels that are refused: those that the exporter drops, stores to unknown places, and what
Triton would refuse at the call."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

import reflib  # noqa: E402
from reflib import explain  # noqa: E402
from reflib.capture.triton_there import triton_of_gpu  # noqa: E402
from reflib.errors import CaptureError, ToolchainError  # noqa: E402
from tests import user_kernels  # noqa: E402
from tests.exporting import Alone  # noqa: E402

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


@triton.jit
def both(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))
    tl.store(x + i, 0.0)


def test_a_triton_op_that_writes_to_all_of_its_tensors() -> None:
    def made(name: str, said: set[str]) -> Any:
        def op(x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            torch.library.wrap_triton(both)[(1,)](x, out, BLOCK=8)
            return out

        return torch.library.triton_op(f"launch_checks::{name}", op, mutates_args=said)

    x, said, unsaid = torch.randn(8), made("said", {"x"}), made("unsaid", set())
    assert explain(said, x, target="sm_90").kernels
    with pytest.raises(Exception, match=r"kernel both \(test_launch_checks.py:\d+\) writes to x, which the triton_op"):
        explain(lambda x: unsaid(x), x, target="sm_90")


# -- calls that Triton would refuse -----------------------------------------------------------------------
@triton.jit
def plain(x, out, n, BLOCK: tl.constexpr = 64, DTYPE: tl.constexpr = None):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


tuned = triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=[])(plain)


def of(kernel: Any, *args: Any, grid: Any = (1,), **kwargs: Any) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[grid](x, out, *args, **kwargs)
        return out

    return fn


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("fn, says", [
    (of(plain, 8, 128, tl.float32, 7), r"takes 5 arguments \(x, out, n, BLOCK, DTYPE\), and is given 6"),
    (of(plain, 8, n=8), "is given n twice: by its place and by its name"),
    (of(tuned, 8, BLOCK=64), "is given BLOCK twice: a configuration of @triton.autotune has it too"),
    (of(tuned, 8, 64), "is given BLOCK twice: a configuration of @triton.autotune has it too"),
    (of(plain, 8, M=4), "has no argument M; its arguments are x, out, n, BLOCK"),
    (of(plain), "is not given n"),
    (of(plain, 8, grid=(1.5,)), "a grid of 1.5 programs in axis 0, a float: give it an int"),
    (of(plain, 8, grid=lambda meta: (1, meta["BLOCK"] / 64)), "a grid of 1.0 programs in axis 1, a float: give it an"),
    (of(plain, 8, grid=("1",)), "a grid of 1 programs in axis 0, a str: give it an int"),
])  # fmt: skip
def test_a_call_that_triton_would_refuse(exported: bool, fn: Any, says: str, tmp_path: Path) -> None:
    """PyTorch captures all of these: it drops what is too many, and takes the last of two."""
    torch._dynamo.reset()
    with pytest.raises(Exception, match=rf"kernel plain.* {says}") as e:
        if exported:
            reflib.aot_compile(fn, (torch.randn(8),), tmp_path / "p.reflib", ["sm_90"], ptx=False)
        else:
            explain(fn, torch.randn(8), target="sm_90")
    assert re.search(r"\(test_launch_checks.py:\d+", str(e.value))


def test_a_grid_of_a_size_divided() -> None:
    """A float, whatever the size is."""

    def fn(x: Tensor) -> Tensor:
        return of(plain, 8, grid=(x.shape[0] / 8,))(x)

    with pytest.raises(Exception, match=r"kernel plain has a grid of .* programs in axis 0, a float"):
        explain(fn, torch.randn(24), target="sm_90", dynamic=True)


def test_settings_and_values_of_heuristics_are_no_arguments() -> None:
    by_size = triton.heuristics({"BLOCK": lambda args: 64})(plain)
    both = triton.autotune([triton.Config({"DTYPE": None})], key=[])(by_size)
    below = triton.heuristics({"DTYPE": lambda args: None})(tuned)
    for fn in (of(plain, 8, num_warps=2, num_stages=1), of(by_size, 8), of(both, 8), of(both, 8, num_warps=2),
               of(both, 8, BLOCK=32), of(below, 8), of(plain, n=8, BLOCK=32)):  # fmt: skip
        torch._dynamo.reset()
        assert any(k.name.endswith("plain") for k in explain(fn, torch.randn(8), target="sm_90").kernels)


# -- kernels that Triton refuses, where nothing is compiled -----------------------------------------------
@triton.jit
def misspelt(x, out):
    tl.store(out, tl.lod(x))


@triton.jit
def uneven(x, out, N: tl.constexpr = 100):
    tl.store(out + tl.arange(0, N), 1.0)


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
@pytest.mark.parametrize("kernel, why", [(misspelt, "no attribute 'lod'"), (uneven, "range must be a power of 2")])
def test_explain_shows_no_kernel_that_triton_refuses(kernel: Any, why: str, target: str) -> None:
    name = kernel.fn.__name__
    says = rf"(?s)refused kernel \w+_{name} for {target} \({name} at test_launch_checks.py:\d+ in fn: kernel.*{why}"
    for fn in (of(kernel), lambda x: torch.cond(x.sum() > 4, of(kernel), lambda x: x + 1, (x,))):
        torch._dynamo.reset()
        with pytest.raises(ToolchainError, match=says):
            explain(fn, torch.randn(8), target=target)
    if target == "sm_80":
        with triton_of_gpu():
            exported = torch.export.export(Alone(of(kernel)), (torch.randn(8),), strict=True)
        with pytest.raises(ToolchainError, match=says):
            explain(exported, target=target)
