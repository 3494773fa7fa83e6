"""What follows a Triton kernel of the user's is computed where it stores, or it is said why not. On a machine without
a GPU: numbers in Triton's interpreter, bit for bit those of kernels apart; code by Triton's compiler."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.fuse import driver
from reflib.generate import launch_epilogue
from reflib.generate.compile_triton import compile_kernel
from reflib.ir.data import decode, encode
from reflib.ir.expr import Sym, expr
from reflib.package import archive, manifest
from reflib.pipeline import run
from reflib.target import parse_target
from tests.interpreter import interpreted

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
if not torch.cuda.is_available():
    from tests.user_kernel_stores import NOT, WHOLE
    from tests.user_kernels import add_kernel, explain, grid
    from tests.user_kernels_interpreting import job

Tensor = torch.Tensor
PASS = "fuse.launch_epilogues:launch_epilogues"


def appended(e: Any) -> list[Any]:
    """The launches with something at their stores."""
    parts = [p for n in e.scheduled.nodes for p in getattr(n, "variants", ())[:1] for p in p.kernel.parts]
    return [p for p in parts if getattr(getattr(p, "target", None), "appended", ())]


def follows(r: random.Random) -> Callable[..., tuple[Tensor, ...]]:
    """Up to four elementwise ops, other tensors in them; sometimes the plain result is returned too, or the last
    result is added to an input."""
    ways: list[Callable[..., Tensor]] = [
        lambda v, row, column, y: v.relu() * 2,
        lambda v, row, column, y: v + row,
        lambda v, row, column, y: torch.where(v > 0, v, column),
        lambda v, row, column, y: v - y * 0.5,
        lambda v, row, column, y: v.sigmoid().float(),
    ]
    chosen, end = r.sample(ways, r.randint(1, 4)), r.randrange(3)

    def fn(v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        result = v
        for way in chosen:
            result = way(result, *others)
        if end == 2:
            others[2].add_(result)
        return (result, v) if end == 1 else (result,)

    return fn


def test_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r = random.Random(2)
    jobs = {}
    for name, launch in WHOLE.items():
        M, N = r.choice([5, 17]), r.choice([3, 40, 64])
        dtype, then = r.choice([torch.float16, torch.float32]), follows(r)
        dynamic = name not in ("persistent", "grouped")  # (is a block of 64 a row? are the programs a grid?)
        shapes = (M, N), (N,), (M, 1), (M, N)
        args = [torch.randn(s, dtype=dtype) for s in shapes]

        def fn(x: Tensor, row: Tensor, column: Tensor, y: Tensor) -> Any:
            used = x[:1] * 1, row[:1] * 1, column[:1] * 1, y[:1] * 1  # (arguments keep their order)
            return *then(launch(x), row, column, y), *used  # noqa: B023

        torch._dynamo.reset()
        e = explain(fn, *args, dynamic=dynamic)
        assert appended(e), (name, [str(x.reason) for x in e.refusals])
        with monkeypatch.context() as m:
            m.setitem(driver.AFTER._found, PASS, lambda fused, options, target: fused)
            apart = run(e.graph, e.stages.options, "generate", e.stages.program)
        for s in (e.stages, apart):
            copies = dict(zip([i for i in s.scheduled.inputs if isinstance(i, str)], [x.clone() for x in args]))
            sizes = {
                size.atom.name: n for b, x in copies.items()
                for size, n in zip(s.scheduled.buffers[b].shape, x.shape) if isinstance(size.atom, Sym)
            }  # fmt: skip
            given = [copies[i] if isinstance(i, str) else int(expr(i).evaluate(sizes)) for i in s.scheduled.inputs]
            jobs[f"{name}, {s is apart}"] = job(s, tuple(given))
    torch.save(jobs, tmp_path / "job")
    interpreted("user_kernels_interpreting.py", str(tmp_path / "job"))
    found = torch.load(tmp_path / "job")
    for name in WHOLE:
        for a, b in zip(found[f"{name}, False"], found[f"{name}, True"], strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("name", [*NOT] if not torch.cuda.is_available() else [])
def test_why_not(name: str) -> None:
    launch, why = NOT[name]
    e = explain(lambda x: launch(x).relu() + 1, torch.randn(9, 20))
    assert not appended(e)
    (said,) = {str(r.reason) for r in e.refusals if "Triton kernel" in str(r.reason)}
    assert re.fullmatch(rf"the Triton kernel \w+: {re.escape(why)}", said)


def test_what_triton_refuses_is_a_kernel_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of two launches, whatever is wrong with its text: the other keeps what follows it."""
    flat, x = WHOLE["advanced"], torch.randn(12, 20)
    printed = launch_epilogue._EpiloguePrinter.function
    monkeypatch.setattr(
        launch_epilogue._EpiloguePrinter, "function",
        lambda self, *how: printed(self, *how).replace("sin(", "no_such_function("),
    )  # fmt: skip
    e = explain(lambda x, y: (flat(x).relu() + 1, flat(y).sin() * 2), x, x + 1)
    assert len(appended(e)) == 1 and sum("sin_mul" in k.name for k in e.kernels) == 1 and len(e.kernels) == 3
    (said,) = [r.getMessage() for r in caplog.records if "is refused by Triton" in r.getMessage()]
    assert "aten.sin.default, aten.mul.Tensor at its store" in said and "no_such_function" in said
    assert any("Triton refuses it with what follows" in str(r.reason) for r in e.refusals)
    monkeypatch.undo()


def test_no_circle_of_launches() -> None:
    """What the first launch took may read the second's result, which then takes nothing that waits for the first."""
    flat = WHOLE["advanced"]

    def fn(x, y):
        a = flat(x)
        ordered = torch.sort(a.flatten())[0]
        c = flat(y)
        return a + c, c * ordered[: c.numel()].view_as(c)

    e = explain(fn, torch.randn(12, 20), torch.randn(12, 20))
    assert len(appended(e)) == 1


def test_what_may_not_follow() -> None:
    """Other elements, another order, a reduction; what it reads, or writes besides; and eager's bits."""
    flat, x = WHOLE["advanced"], torch.randn(12, 20)

    for fn, says, options in (
        (lambda x: flat(x)[1:] * 2, "runs over other elements than those of advanced_out", {}),
        (lambda x: flat(x).sum(0), "reduces", {}),
        (lambda x: flat(x) + x.t().reshape(12, 20), "has arg0_1 in another order in memory", {}),
        (lambda x: x.add_(flat(x)), "stores to arg0_1, which it is given", {}),
        (lambda x: flat(x) + 1, 'under numerics="eager"', {"numerics": "eager"}),
    ):  # fmt: skip
        torch._dynamo.reset()
        e = explain(fn, x, **options)
        assert not appended(e) and any(says in str(r.reason) for r in e.refusals), (says, e.refusals)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_code(dtype: torch.dtype) -> None:
    """16 bytes per access, as before; the result is rounded as it would be in memory."""

    def fn(x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        out = torch.empty_like(x)
        add_kernel[grid(x.numel())](x, y, out, x.numel(), BLOCK=1024)
        return (out + row).relu() * y

    args = torch.randn(64, 512, dtype=dtype), torch.randn(64, 512, dtype=dtype), torch.randn(512, dtype=dtype)
    e = explain(fn, *args)
    (k,) = e.kernels
    ptx = compile_kernel(k, parse_target("sm_90")).ptx
    wide = re.findall(r"(ld|st)\.global(?:\.L1::\w+)?\.v4", ptx)
    assert set(wide) == {"ld", "st"} and not re.findall(r"st\.global\.b(8|16|32) ", ptx), ptx
    assert ("tl.cast(value, tl.bfloat16).to(tl.float32)" in k.source) == (dtype == torch.bfloat16)
    (launch,) = appended(e)
    assert decode(encode(launch)) == launch and "mul.Tensor at its store" in str(e.decisions)


def test_in_a_package_and_tuned(tmp_path: Path) -> None:
    """Each configuration is as it was; one is chosen with what follows in it."""
    configs = [triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128}, num_warps=8)]
    tuned = triton.autotune(configs, key=["n"])(add_kernel)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        tuned[grid(x.numel())](x, y, out, x.numel())
        return out.relu() + y

    args = torch.randn(1000), torch.randn(1000)
    e = explain(fn, *args)
    assert [(k.name, k.num_warps) for k in e.kernels] == [("k0_add_kernel_relu_add", 2)]
    path = reflib.aot_compile(fn, args, tmp_path / "p.reflib", ["sm_80", "sm_90"], ptx=False)
    for v in manifest.read(archive.open(path).manifest).variants:
        assert not v.python and not v.needs
        assert {k.name for k in v.kernels if "fallback" not in k.name} == {"k0_add_kernel_relu_add"}
