"""A compilation as a file that a fresh process runs: the same kernels, and the same results."""

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.scan import scan

import reflib
from reflib.errors import LoweringError, OptionError
from reflib.lower.rules import RULES
from reflib.observe import given, repro
from reflib.observe.foreign import Foreign
from reflib.observe.given import describe, make
from reflib.observe.read_graph import read_graph
from reflib.observe.rebuild import Subject, main, run_file
from reflib.pipeline import OBSERVE
from reflib.sweep.model import models
from tests import sweep_repros
from tests.cpu.test_fuzz import make as make_tensor
from tests.forking import printed
from tests.models import MLP, Block

RUN = """
import sys
from reflib.observe.rebuild import main, run_file
print("status", main(run_file(sys.argv[1]), []))
"""


def run_repro(path: Path) -> str:
    """What the file says in another process."""
    return printed("-c", RUN, str(path))


@torch.library.custom_op("repro_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@scaled.register_fake
def _(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.empty_like(x)


def batch_norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    y = F.batch_norm(x, mean, var, training=True)
    with torch.autocast("cpu", torch.bfloat16):
        z = y.flatten(1) @ torch.ones(12, 3)
    return torch.arange(3) + z[index] + F.dropout(z[index], 0.5)


def shared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y.flip(0)


def branches(x: torch.Tensor) -> torch.Tensor:
    y = torch.cond(x.sum() > 0, lambda a: a.sin() + 1, lambda a: a.cos() * 2, (x,))
    i, y = torch._higher_order_ops.while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, a * 1.5 + i), (torch.zeros((), dtype=torch.int64), y)
    )
    return y + i


def nested(x: torch.Tensor) -> torch.Tensor:
    def true(a: torch.Tensor) -> torch.Tensor:
        return torch.cond(a.sum() > 1, lambda a: a.sin(), lambda a: a.cos() * 2, (a,))

    def step(c: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(c * 0.5 + v), (c * v).sin()

    last, each = scan(step, torch.zeros(x.shape[1]), torch.cond(x.sum() > 0, true, torch.exp, (x,)))
    return last + each


class Counts(torch.nn.Module):
    """With a buffer that is written to, subgraphs, and a size that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor, by: float = 2.0) -> dict[str, torch.Tensor]:
        self.seen.add_(x.mean(0))
        y = torch.cond(x.sum() > 0, torch.sin, lambda a: a.cos() * 2, (self.linear(x),))
        each = scan(lambda c, v: (c + v, c * v), torch.zeros(4), y)[1]
        i, y = torch._higher_order_ops.while_loop(
            lambda i, a: i < 3, lambda i, a: (i + 1, a.tanh() + i), (torch.zeros((), dtype=torch.int64), y)
        )
        return {"y": y * by + i, "where": (x > 0).nonzero() + 1, "each": each}


def make_op() -> Callable[..., Any]:
    @torch.library.custom_op("repro_tests::inner", mutates_args=("out",))
    def inner(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.sin(x) + OFFSET)

    return lambda x: (out := torch.zeros_like(x), torch.ops.repro_tests.inner(x, out), out + 1)[2]


OFFSET = 0.5
torch.manual_seed(3)
BASE = torch.randn(40)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "static": (MLP(8), (torch.randn(5, 8),), {}),
    "dynamic": (Block(8, 2, dropout=0.1), (torch.randn(3, 7, 8).requires_grad_(),), {"dynamic": True}),
    "norm": (
        batch_norm,
        (torch.randn(4, 3, 2, 2).requires_grad_(), torch.zeros(3), torch.ones(3), torch.tensor([3, 0, 1])),
        {"verify": True},
    ),
    "shared": (shared, (BASE[3:13].view(5, 2), BASE[3:13].view(2, 5).t()), {}),
    "branches": (branches, (torch.randn(4).expand(6, 4),), {}),
    "nested": (nested, (torch.randn(6, 4).requires_grad_(),), {"dynamic": True}),
    "op": (lambda x: scaled(x * 2, 0.25).relu(), (torch.randn(9, 4).t(),), {"fuse": False}),
    "inner": (make_op(), (torch.randn(3, 3),), {}),
}


ROWS = torch.export.Dim("rows", min=2, max=64)
EXPORTED: dict[str, tuple[torch.nn.Module, tuple[Any, ...], Any, dict[str, Any]]] = {
    "exported": (Counts(), (torch.randn(5, 4),), {"x": {0: ROWS}}, {"verify": True}),
    "exported gpu": (Block(8, 2), (torch.randn(3, 7, 8),), ({0: ROWS},), {"target": "sm_90"}),
}


def asks(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x + torch.arange(8, device="cuda"), -1) @ torch.ones(8, 3, device="cuda")


EXPLAINED: dict[str, tuple[Callable[..., Any], torch.Tensor, dict[str, Any]]] = {
    "target": (Block(8, 2), torch.randn(3, 7, 8).requires_grad_(), {}),
    "dynamic target": (MLP(8), torch.randn(5, 8).requires_grad_(), {"dynamic": True}),
    "asks": (asks, torch.randn(3, 7, 8), {}),
}


# what some of the files must contain
TEXT = {
    "dynamic": ["SYMBOLS = {'s", "'backward'"], "shared": ["storage=(0, 160)"],
    "inner": ["def inner(", "OFFSET = 0.5"],
}  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [*CASES, *EXPORTED, *EXPLAINED])
def test_another_process_makes_the_same_kernels(name: str, tmp_path: Path) -> None:
    if name in EXPLAINED:
        model, x, how = EXPLAINED[name]
        reflib.explain(model, x, target="sm_90", repro=str(tmp_path), **how)
    elif name in EXPORTED:
        model, inputs, shapes, options = EXPORTED[name]
        program = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes)
        reflib.compile(program, repro=str(tmp_path), **options)
    else:
        f, args, options = CASES[name]
        result = reflib.compile(f, repro=str(tmp_path), **options)(*args)
        if result.requires_grad:
            result.sum().backward()
    [path] = tmp_path.glob("repro_*.py")
    said = run_repro(path)
    assert "status 0" in said and "nothing is wrong" in said and "bit-equal" in said, said
    assert all(words in path.read_text() for words in TEXT.get(name, ()))


@pytest.mark.sample(180)
@pytest.mark.parametrize("target", ["", "sm_90"])
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", [m.name for m in models()])
def test_so_it_does_of_the_sweeps_models(name: str, mode: str, target: str, tmp_path: Path) -> None:
    try:
        paths = sweep_repros.written(name, mode, target, tmp_path)
    except ImportError as e:
        pytest.skip(str(e))
    assert not [*filter(None, map(sweep_repros.verdict, paths))]


# -- reading a graph back ----------------------------------------------------------------------------
def test_a_graph_is_read_back_as_it_was() -> None:
    g = torch.fx.Graph()
    x, n = g.placeholder("X"), g.placeholder("n")
    x.name = "x_"
    call = g.call_function
    a = call(operator.iadd, (call(operator.getitem, (x, (slice(None, None, 2), ..., slice(n, None)))), 1))
    b = g.call_method("view", (a, -1, n), {})
    c = call(torch.cat, ([a, call(operator.neg, (b,))],), {"dim": -1})
    d = call(torch.full, ((2, n), float("inf")), {"dtype": torch.float16, "device": torch.device("cpu")})
    e = call(operator.pow, (call(getattr, (d, "T")), 2.0))
    call(operator.setitem, (c, (slice(0, 1), ..., n), d))
    call(operator.setitem, (c, call(operator.ge, (c, 0.5)), 2))
    call(torch._C._set_grad_enabled, (False,))
    g.output(({"c": c, "e": (e, None)}, call(operator.le, (n, 3))))
    module = torch.fx.GraphModule(torch.nn.Module(), g, "Graph")
    printed = g.python_code("self", verbose=True)
    text = "class Graph(torch.nn.Module):\n" + "\n".join("    " + s for s in printed.src.splitlines())
    again = read_graph(module, text, printed.globals)
    shown = lambda graph: [(n.op, n.name, n.target, repr(n.args), repr(n.kwargs)) for n in graph.nodes]  # noqa: E731
    assert shown(again.graph) == shown(g)


@pytest.mark.each
@pytest.mark.parametrize("layout", ["plain", "transposed", "expanded", "offset", "misaligned", "strided"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_inputs_are_made_again(layout: str, dtype: str) -> None:
    t = make_tensor(dtype, (6, 7), layout, False, 3)
    for whole in (True, False):
        described = describe([t, t[1:], 3, None], [t, t[1:], 3, None], [False] * 4, whole)
        again, view, *rest = make(eval(repr(described), vars(given) | {"inf": float("inf")}), {})
        assert (again.dtype, again.shape, again.stride()) == (t.dtype, t.shape, t.stride())
        assert again.storage_offset() == t.storage_offset() and rest == [3, None]
        assert (again.data_ptr() - t.data_ptr()) % 16 == 0
        assert again.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        if whole:
            assert torch.equal(again, t) and torch.equal(view, t[1:])
        elif t.dtype.is_floating_point:
            assert t.min() <= again.min() and again.max() <= t.max()


# -- the user's own code -----------------------------------------------------------------------------
def test_triton_kernels_are_written_out() -> None:
    triton = pytest.importorskip("triton")
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table

    BIAS = triton.language.constexpr(2)

    @triton.jit
    def more(v):  # type: ignore[no-untyped-def]
        return v + BIAS

    @triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=2)], key=["n"])
    @triton.jit
    def kernel(x, out, n, BLOCK: triton.language.constexpr):  # type: ignore[no-untyped-def]
        i = triton.language.program_id(0) * BLOCK + triton.language.arange(0, BLOCK)
        triton.language.store(out + i, more(triton.language.load(x + i, i < n)), i < n)

    g = torch.fx.Graph()
    x = g.placeholder("x")
    wrapped = torch.ops.higher_order.triton_kernel_wrapper_functional
    kwargs = {"kernel_idx": table.add_kernel(kernel), "constant_args_idx": table.add_constant_args({"n": 8}),
              "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}, "kwargs": {"x": x, "out": x},
              "tensors_to_clone": ["out"]}  # fmt: skip
    g.output((g.call_function(wrapped, (), kwargs),))
    subject = Subject(torch.fx.GraphModule(torch.nn.Module(), g), [3])
    text, missing = repro.text(subject)
    assert not missing and "triton.Config({'BLOCK': 64}, num_warps=2" in text and "def more(v):" in text
    assert text.index("def more") < text.index("def kernel(") and "more = " not in text
    scope: dict[str, Any] = {"__name__": "x", "__file__": "<text>"}
    exec(compile(text.replace("@triton.jit", "@str").replace("@triton.autotune", "#"), "<text>", "exec"), scope)
    assert next(iter(scope["TRITON_KERNELS"].values()))[1] == {kwargs["constant_args_idx"]: {"n": 8}}


USER = """
import torch, triton, triton.language as tl

@triton.jit
def helper(v, MODE: tl.constexpr):
    return tl.where(v > 0, v, 0.0) if MODE == "relu" else v

@triton.autotune([triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 256}, num_stages=2)], key=["n"])
@triton.jit
def tuned(x, out, n, MODE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, helper(tl.load(x + i, i < n), MODE), i < n)

@triton.heuristics({"BLOCK": lambda a: triton.next_power_of_2(a["n"])})
@triton.jit
def whole(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) + 1, i < n)

def launched(x, mode):
    out = torch.empty_like(x)
    tuned[lambda m: (triton.cdiv(x.numel(), m["BLOCK"]),)](x, out, x.numel(), MODE=mode)
    return out

def f(x):
    y, out = launched(x.sin(), "relu") + 1, torch.empty_like(x)
    whole[(1,)](y, out, x.numel())
    return torch.cond(x.sum() > 0, lambda a: launched(a, "id"), torch.cos, (out,))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_launches_of_tuned_kernels_are_compiled_again_without_a_gpu(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    (tmp_path / "user_kernels_of_a_repro.py").write_text(USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    import user_kernels_of_a_repro as user  # type: ignore[import-not-found]

    reflib.explain(user.f, torch.randn(1000), target="sm_90", repro=str(tmp_path / "user"))
    [path] = (tmp_path / "user").glob("repro_*.py")
    said = run_repro(path)
    assert "status 0" in said and "bit-equal" in said, said
    assert "import user_kernels_of_a_repro" not in path.read_text()


# -- failures ----------------------------------------------------------------------------------------
def test_two_things_of_one_name_are_told() -> None:
    foreign = Foreign()
    for k in (2, 2, 3):
        foreign.name("k", k)
    assert foreign.lines == ["k = 2"] and foreign.missing == ["another k, a int"]


def test_an_internal_error_leaves_a_repro(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a bug in this rule")

    monkeypatch.setenv("REFLIB_REPRO", str(tmp_path))
    monkeypatch.setitem(RULES, torch.ops.aten.tanh.default, broken)
    with pytest.raises(Exception, match="a bug in this rule"):
        reflib.compile(lambda x: (x + 1).tanh())(torch.randn(5, 3))
    [path] = tmp_path.glob("repro_*.py")
    assert f"reflib minify {path}" in caplog.text and "failed with LoweringError" in path.read_text()
    with pytest.raises(LoweringError, match="a bug in this rule"):
        main(run_file(str(path)), [])
    for other in tmp_path.glob("repro_*.py"):
        other.unlink()
    program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()), (torch.randn(5, 3),))
    with pytest.raises(LoweringError, match="a bug in this rule"):
        reflib.compile(program)
    [path] = tmp_path.glob("repro_*.py")
    assert f"reflib minify {path}" in caplog.text and "(from torch.export), which failed" in path.read_text()
    with pytest.raises(LoweringError, match="a bug in this rule"):
        main(run_file(str(path)), [])


def op_without_source() -> Callable[..., Any]:
    scope: dict[str, Any] = {"torch": torch}
    exec("def gone(x: torch.Tensor) -> torch.Tensor:\n    return x * 3", scope)
    torch.library.custom_op("repro_tests::gone", scope["gone"], mutates_args=()).register_fake(torch.empty_like)
    return lambda x: torch.ops.repro_tests.gone(x.neg())


def test_observation_never_fails_a_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(3, 4)
    folder = tmp_path / "file"
    folder.write_text("not a folder")
    f = lambda x: x * 2  # noqa: E731
    assert torch.equal(reflib.compile(f, repro=str(folder))(x), x * 2)
    assert caplog.text.count("no repro was written") == 1
    torch._dynamo.reset()
    negated = torch._neg_view(x)
    assert torch.equal(reflib.compile(f, repro=str(tmp_path))(negated), x * -2)
    assert "input 0 is conjugated or negated in passing" in caplog.text
    torch._dynamo.reset()
    assert torch.equal(reflib.compile(op_without_source(), repro=str(tmp_path / "gone"))(x), x * -3)
    [path] = (tmp_path / "gone").glob("repro_*.py")
    assert "MISSING" in path.read_text() and f"{path} lacks the function op_repro_tests_gone, whose" in caplog.text
    torch._dynamo.reset()
    monkeypatch.setattr(repro, "_classes", lambda *a: 1 / 0)
    assert torch.equal(reflib.compile(f, repro=str(tmp_path))(x), x * 2)
    assert "ZeroDivisionError" in caplog.text and not list(tmp_path.glob("*.py"))
    with pytest.raises(OptionError, match="repro=3: must be None or the name of a folder"):
        reflib.Options(repro=3)  # type: ignore[arg-type]


def test_nothing_is_loaded_when_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFLIB_REPRO", raising=False)
    monkeypatch.setattr(OBSERVE, "_found", {})
    reflib.compile(lambda x: x + 1)(torch.ones(3))
    assert not OBSERVE._found
