"""Triton kernels of the user's as candidates: configurations of ``triton.autotune``, and implementations of an op that
launch one. On a machine without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.autotune import points
from reflib.autotune.isolation import isolated
from reflib.autotune.measure import pick_winner
from reflib.autotune.request import Request, Result
from reflib.ir.data import encode
from reflib.ir.decision import Candidate
from reflib.ir.program import Choice
from reflib.options import Options
from reflib.package import archive, manifest
from reflib.pipeline import _retarget, run
from reflib.target import parse_target

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
if not torch.cuda.is_available():
    from tests import user_kernels
    from tests.user_kernels import add_kernel, explain, kernel

Tensor = torch.Tensor
GPU = parse_target("sm_90")


def test_configurations_are_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuned (by what stands in for a GPU), pinned by a table; each candidate is given what it writes to afresh."""
    y = torch.randn(256)
    e = explain(user_kernels.summed, y)
    (choice,) = (n for n in e.program.nodes if isinstance(n, Choice))
    first, second = (v.name for v in choice.variants)
    assert (first, second) == ("BLOCK=64, EVEN=True, num_warps=2, num_stages=3",
                               "BLOCK=128, EVEN=True, num_warps=4, num_stages=2")  # fmt: skip
    assert [len(v.nodes) for v in choice.variants] == [3, 3] and e.decisions[0].winner == first
    assert kernel(e, "sums_kernel").buffers[0][0] == "arg0_1", "once decided, y is written in place"
    asked = []

    def measure(request: Request, build: Any, makers: Any) -> Result:
        asked.append(list(request.programs))
        assert not isinstance(isolated(request, {}, Options()), str), "another process can measure it"
        rows = [Candidate(request.key(n), "ok", 9.0 - i, spread=0.0) for i, n in enumerate(request.programs)]
        return Result(tuple(rows), *pick_winner(rows, request.default))

    monkeypatch.setattr(points, "measure", measure)
    options = Options(autotune="blocking", isolate=False, cache_decisions=False)
    s = run(e.graph, options, "generate", _retarget(e.program, parse_target("cpu")), lambda device: GPU)
    d = next(d for d in s.decisions if d.op == "sums_kernel")
    assert asked and d.winner == second and s.kernels[s.scheduled.nodes[1].name].num_stages == 2
    entry = {"device": "*", "op": "sums_kernel", "sizes": "x[256]", "winner": second}
    torch._dynamo.reset()
    e = explain(user_kernels.summed, y, lookup_table={"format": 1, "entries": [entry]})
    assert e.decisions[0].winner == second and kernel(e, "sums_kernel").num_warps == 4


def test_heuristics_set_warps_and_stages() -> None:
    """Of each configuration, or of a launch: as Triton has it, before what the configuration says."""
    import triton

    ways = {"num_warps": lambda args: args["BLOCK"] // 32, "num_stages": lambda args: 1 + args["n"] % 5}
    alone = triton.heuristics(ways)(add_kernel)
    configs = [triton.Config({"BLOCK": 256}, num_stages=7), triton.Config({"BLOCK": 64}, num_warps=8)]
    tuned = triton.autotune(configs, key=["n"])(alone)

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out, more = torch.empty_like(x), torch.empty_like(x)
        alone[(2,)](x, y, out, x.numel(), BLOCK=512)
        tuned[user_kernels.grid(x.numel())](x, y, more, x.numel())
        return out, more

    e = explain(fn, torch.randn(1001), torch.randn(1001))
    assert [(k.num_warps, k.num_stages) for k in e.kernels] == [(16, 2), (8, 2)]
    (choice,) = (n for n in e.program.nodes if isinstance(n, Choice))
    of = {v.name: v.nodes[-1].target for v in choice.variants}
    assert {n: (t.num_warps, t.num_stages) for n, t in of.items()} == {
        "BLOCK=256, num_warps=8, num_stages=2": (8, 2), "BLOCK=64, num_warps=2, num_stages=2": (2, 2)
    }  # fmt: skip


@torch.library.custom_op("user_kernels::theirs", mutates_args=())
def theirs(x: Tensor, y: Tensor) -> Tensor:
    return x + y


theirs.register_fake(lambda x, y: torch.empty_like(x))


def launching(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add_kernel[(8,)](x, y, out, x.numel(), BLOCK=128)
    return out


def test_candidates_that_launch() -> None:
    """Of a registered op: their neighbours are planned around them, nothing is lost; one that writes to an argument is
    refused, with the kernel's name."""

    def launching(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(add_kernel)[(8,)](x, y, out, x.numel(), BLOCK=128)
        return out

    def writing(x: Tensor, y: Tensor) -> Tensor:
        torch.library.wrap_triton(add_kernel)[(8,)](x, y, x, x.numel(), BLOCK=128)
        return x + 0

    reflib.register_custom_op_autotuning(theirs, configs=[launching, writing])
    x, y = torch.randn(1000), torch.randn(1000)
    pins = {"user_kernels::theirs": {"x[1000] y[1000]": "launching"}}
    e = explain(lambda x, y: theirs(x * 2, y) + 1, x, y, autotune="blocking", lookup_table=pins)
    (choice,) = (n for n in e.program.nodes if isinstance(n, Choice))
    (variant,) = (v for v in choice.variants if v.name == "launching")
    (launch,) = variant.nodes
    assert set(launch.mutates) == set(choice.outputs)
    assert [k.name for k in e.kernels] == ["k0_mul", "k1_add_kernel_add"]
    ((name, status, why),) = choice.failed
    assert (name, status) == ("writing", "unsupported") and "the Triton kernel add_kernel writes to it" in why
    request = Request({"a": {"constants": [], "nodes": [encode(launch)]}}, "a", "a", ())
    assert not isinstance(isolated(request, {}, reflib.Options()), str)


def test_a_candidate_in_a_package(tmp_path: Path) -> None:
    """It is traced when the program is lowered, long after the capture; a plain launch in it is recorded too."""

    reflib.register_custom_op_autotuning(theirs, configs=[launching])
    pins = {"user_kernels::theirs": {"x[1000] y[1000]": "launching"}}
    args = torch.randn(1000), torch.randn(1000)
    path = reflib.aot_compile(
        lambda x, y: theirs(x * 2, y) + 1, args, tmp_path / "p.reflib", ["sm_80"], ptx=False, autotune="blocking",
        lookup_table=pins,
    )  # fmt: skip
    (v,) = manifest.read(archive.open(path).manifest).variants
    assert not v.python and not v.needs
    assert [k.name for k in v.kernels if not k.name.endswith("_fallback")] == ["k0_mul", "k1_add_kernel_add"]


def test_a_candidate_that_cannot_be_compiled_is_out_alone() -> None:
    """Here for a CPU: the others are measured."""

    reflib.register_custom_op_autotuning(theirs, configs=[launching, lambda x, y: y + x])
    x, y = torch.randn(1000), torch.randn(1000)
    e = reflib.explain(lambda x, y: theirs(x * 2, y) + 1, x, y, autotune="blocking", isolate=False)
    decision = e.decisions[0]
    status = {c.name: (c.status, c.why) for c in decision.candidates}
    assert status["launching"][0] == "unsupported" and "add_kernel: there is no code of it for a CPU" in str(status)
    assert [c.name for c in decision.candidates if c.time_us is not None] == ["eager", "<lambda>"]
