"""Hostile arguments, checkpoints with random ops, and numbers read from tensors, on CUDA."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import reflib
from reflib.errors import ArgumentError

BOTH = pytest.mark.parametrize("wrapper", ["python", "cpp"])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoints_draw_the_same_numbers_again(dtype: torch.dtype, wrapper: str) -> None:
    def attended(q: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.scaled_dot_product_attention(q, q, q, dropout_p=0.25), 0.5)

    def fn(q: torch.Tensor) -> torch.Tensor:
        return checkpoint(attended, q * 2, use_reentrant=False).cos()

    f, results = reflib.compile(fn, wrapper=wrapper, fallback_random=True), []
    q = torch.randn(2, 4, 64, 32, device="cuda", dtype=dtype, requires_grad=True)
    for g in (fn, f, f):
        torch.manual_seed(7)
        out = g(q)
        results.append((out, torch.autograd.grad(out.sum(), q), torch.rand(3, device="cuda")))
    for got in results[1:]:
        torch.testing.assert_close(got, results[0], rtol=2e-2, atol=2e-2)


@BOTH
def test_storages_that_shrink(wrapper: str) -> None:
    f = reflib.compile(lambda x, y: (x * y).sin(), wrapper=wrapper)
    x, y = torch.randn(100, device="cuda", requires_grad=True), torch.randn(100, device="cuda")
    out = f(x, y)
    for held in (399, 4, 0):
        y.untyped_storage().resize_(held)
        with pytest.raises(ArgumentError, match=f"resized to {held}"):
            f(x, y)
        with pytest.raises(ArgumentError, match=f"resized to {held}"):
            out.sum().backward(retain_graph=True)


@BOTH
@pytest.mark.parametrize("n", [True, 2.5, -7], ids=str)
def test_numbers_read_from_tensors(n: float, wrapper: str) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        f = reflib.compile(lambda x, n: (x * n.item(), torch.full((3,), n.item())), fullgraph=True, wrapper=wrapper)
        x, t = torch.randn(5, device="cuda"), torch.tensor(n, device="cuda")
        torch.testing.assert_close(f(x, t), (x * n, torch.full((3,), n)))


def test_explain_shows_the_attention_that_is_taken() -> None:
    def fn(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q) * 2

    q = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.float16)
    calls = [str(n.target) for n in reflib.explain(fn, q).graph.nodes if "attention" in str(n.target)]
    shown = reflib.explain(fn, q.cpu(), target="sm_90").graph.nodes
    assert [str(n.target) for n in shown if "attention" in str(n.target)] == calls


INDEXED = """
import sys, torch, reflib
fn = lambda w, i: torch.nn.functional.embedding(i, w) * 2
f = reflib.compile(fn, wrapper=sys.argv[1], assert_indirect_indexing=True)
w = torch.randn(10, 3, device="cuda")
good = torch.tensor([1, 9, 0], device="cuda")
torch.testing.assert_close(f(w, good), fn(w, good))
print("fine so far", flush=True)
f(w, good + 1).cpu()
"""


@BOTH
def test_an_assertion_ends_the_process(wrapper: str) -> None:
    """As eager's: the context is lost, and standard error says why."""
    done = subprocess.run([sys.executable, "-c", INDEXED, wrapper], capture_output=True, text=True)
    assert done.returncode != 0 and "fine so far" in done.stdout
    assert "index out of range: aten.embedding.default" in done.stderr and "device-side assert" in done.stderr
