"""Rows of the composition table: choices, and how they are tuned."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._higher_order_ops import scan, while_loop

import reflib
from reflib.background import Background, tunings
from reflib.ir.program import Variants, kernel_variants
from reflib.lab import told_times
from tests.checking import check
from tests.composition.ops import SHIMS, product_in_c
from tests.composition.packaged import Packaged
from tests.composition.table import (
    IN_A_FILE,
    OPS,
    Tensor,
    compiled,
    feature,
    is_in,
    preferring,
    product_op,
    same,
    split_k,
)
from tests.loading import load_file
from tests.semantics import randn


@feature
def inline_fusion(device: str, wrapper: str) -> None:
    """A registered op's winner is inlined, and fused with what is around it."""
    op = product_op()
    reflib.register_custom_op_autotuning(op, configs=[reflib.CustomOpConfig(split_k, splits=8)])
    with preferring("split_k"):
        c = same(
            lambda a, b: torch.relu(op(a * 2, b)) + 1, wrapper,
            randn(16, 256, device=device), randn(256, 8, device=device), autotune="blocking",
        )  # fmt: skip
    assert not any("product" in str(x.target) for x in c.externs)
    parts = [n.variants[-1].kernel.parts for n in kernel_variants(c.stages[0].scheduled.nodes)]  # type: ignore[union-attr]
    fused = [{o.op.split(".")[1] for p in ps for o in getattr(p, "origins", ())} for ps in parts]
    assert any({"sum", "relu", "add"} <= ops for ops in fused), fused


@feature
def choices_in_branches_and_loops(device: str, wrapper: str) -> None:
    """They are measured too, and the winner is fused with its neighbours in the block."""
    op = product_op()
    reflib.register_custom_op_autotuning(op, configs=[reflib.CustomOpConfig(split_k, splits=8)])

    def f(x: Tensor, w: Tensor) -> Any:
        y = torch.cond(x.sum() > 0, lambda x, w: torch.relu(op(x * 2, w)) + 1, lambda x, w: x - 1, (x, w))
        first = torch.zeros((), dtype=torch.int64, device=x.device)
        z = while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, op(z, w) / 64 + i), (first, y))[1]
        last, seen = scan(lambda s, v: (s + v, op(s + v, w)), z[:8] * 0, z.view(2, 8, 64))
        return y, z, last, seen

    def plainly(x: Tensor, w: Tensor) -> Any:
        y = torch.relu(x * 2 @ w) + 1 if x.sum() > 0 else x - 1
        z = y
        for i in range(3):
            z = z @ w / 64 + i
        sums = z.view(2, 8, 64).cumsum(0)
        return y, z, sums[1], sums @ w

    with preferring("split_k"):
        c = compiled(f, wrapper, autotune="blocking")
        x, w = randn(16, 64, device=device), randn(64, 64, device=device)
        for signed in (x.abs(), -x.abs()):
            for got, wanted in zip(c(signed, w), plainly(signed, w), strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    won = [str(d.winner) for d in c.stages[0].decisions if "product" in d.op]
    assert won == ["split_k(splits=8)"] * 3, won
    assert not any("product" in str(x.target) for x in c.externs)


def called_op(wrapper: str) -> tuple[Any, dict[str, Any]]:
    """A product that is called itself too, and options: exported C++ calls its function in C."""
    return (product_in_c(), {"c_shims": SHIMS}) if wrapper == "exported" else (product_op(), {})


@feature
def a_registered_op_without_tuning(device: str, wrapper: str) -> None:
    op, shims = called_op(wrapper)
    reflib.register_custom_op_autotuning(op, configs=[split_k])
    args = randn(16, 64, device=device), randn(64, 8, device=device)
    c = same(lambda a, b: torch.relu(op(a, b)), wrapper, *args, **shims)
    assert len(c.externs) == 1


@feature
def decompose_k(device: str, wrapper: str) -> None:
    a, b = randn(8, 2048, device=device), randn(2048, 8, device=device) / 32
    fn = lambda a, b: torch.relu(a @ b) * 2  # noqa: E731
    same(fn, wrapper, a, b)
    with preferring("decompose_k"):
        for dynamic in (False, True):
            torch._dynamo.reset()
            c = same(fn, wrapper, a, b, autotune="blocking", dynamic=dynamic)
            assert any("decompose_k" in str(d.winner) for d in c.stages[0].decisions if hasattr(d, "winner"))
            if dynamic:  # what does not divide takes the other variant
                check(fn, c, randn(8, 1999, device=device), randn(1999, 8, device=device) / 32)


@feature
def input_ranges(device: str, wrapper: str) -> None:
    op, shims = called_op(wrapper)

    def few(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def many(a: Tensor, b: Tensor) -> Tensor:
        return (b.t() @ a.t()).t().contiguous()

    reflib.register_custom_op_autotuning(
        op, configs=[few, many], split_points=[16],
        dispatch_on={"tensor_name": "b", "dim": 1, "range_upper_bound": 4096},
    )  # fmt: skip
    fn = lambda a, b: torch.relu(op(a, b)) + 1  # noqa: E731
    a = randn(32, 8, device=device)
    with told_times(lambda name, sizes: {"few": 1.0 + max(sizes.values()), "many": 100.0}.get(name, 1e6)):
        c = compiled(fn, wrapper, autotune="blocking", dynamic=True, **shims)
        for n in (100, 3, 16, 17, 5000):
            check(fn, c, a, randn(8, n, device=device))
    # (where nothing says that the operands' depths agree, as in what torch.export captures, each has a fallback)
    count = 4 if wrapper in IN_A_FILE else 2
    by_size = [n for s in c.stages for n in s.scheduled.nodes if isinstance(n, Variants) and not n.of_kernels]
    assert any(len(n.variants) == count for n in by_size)


@feature
def lookup_table(device: str, wrapper: str) -> None:
    op = product_op()
    reflib.register_custom_op_autotuning(op, configs=[split_k])
    table = {str(op._opoverload).removesuffix(".default"): {"[8, 64] [64, 8]": "split_k"}}
    c = same(
        lambda a, b: op(a, b) - 1, wrapper, randn(8, 64, device=device), randn(64, 8, device=device),
        autotune="blocking", lookup_table=table,
    )  # fmt: skip
    assert c.stages[0].decisions[0].winner == "split_k"


@feature
def tuning_in_workers(device: str, wrapper: str) -> None:
    ops = load_file(OPS)
    reflib.register_custom_op_autotuning(ops.product, configs=[ops.good, ops.wrong])
    c = same(
        lambda a, b: torch.relu(ops.product(a, b)) + 1, wrapper,
        randn(8, 64, device=device), randn(64, 8, device=device) / 8,
        autotune="blocking", tuning_imports=(str(OPS),), candidate_seconds=60.0,
    )  # fmt: skip
    rows = {c.name: c.status for c in c.stages[0].decisions[0].candidates}
    assert rows == {"eager": "ok", "good": "ok", "wrong": "wrong"}, c.stages[0].decisions


@feature
def tuning_in_the_background(device: str, wrapper: str) -> None:
    if wrapper in IN_A_FILE:
        return tuning_of_a_file(device, wrapper)
    ops = load_file(OPS)
    reflib.register_custom_op_autotuning(ops.product, configs=[ops.good])
    fn = lambda a, b: torch.relu(ops.product(a, b))  # noqa: E731
    f = reflib.compile(
        fn, autotune="background", tuning_imports=(str(OPS),), candidate_seconds=60.0, wrapper=wrapper
    )  # fmt: skip
    a, b = randn(8, 64, device=device), randn(64, 8, device=device) / 8
    check(fn, f, a, b)
    (tuning,) = tunings[f]
    progress = reflib.wait_for_tuning(f)
    assert progress.finished and not progress.failed, progress
    check(fn, f, a, b, times=2)
    assert is_in(wrapper, tuning.stages.wrapper)
    assert tuning.state == "swapped" or (device == "cuda" and tuning.state == "unchanged")  # there a guess may be best


@contextmanager
def tuning_waits() -> Iterator[None]:
    """What is to be tuned in the background begins when the block has ended."""
    ended, work = threading.Event(), Background._work
    with mock.patch.object(Background, "_work", lambda b: ended.wait() and work(b)):
        try:
            yield
        finally:
            ended.set()


def tuning_of_a_file(device: str, wrapper: str) -> None:
    """A package is there at once, and is replaced by a tuned one, which is what is loaded or exported from then on."""
    fn = lambda a, b: torch.relu(a @ b) * 2  # noqa: E731
    args = randn(16, 2048, device=device), randn(2048, 16, device=device) / 32
    c = compiled(fn, wrapper, autotune="background", candidate_seconds=60.0)
    assert isinstance(c, Packaged)
    with tuning_waits():
        check(fn, c, *args)
        options = c.options_in_file()
    progress = reflib.wait_for_tuning(c.path)
    assert progress.finished and not progress.failed and progress.decisions, progress
    assert "autotune" not in options and c.options_in_file()["autotune"] == "blocking"
    check(fn, c, *args)
    c.again()
    check(fn, c, *args, times=2)
