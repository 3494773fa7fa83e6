"""Random graphs against eager.

Hypothesis draws a program: typed inputs as hostile as inputs come, then steps that pick their operands among the
values so far. It runs eagerly and compiled, forward and perhaps backward, with static or dynamic sizes, and
``tests.checking`` judges. A failure prints a small program to run by itself.

Of three kinds: any ops; many more of them, class by class (``fuzz_templates``); and updates in place: of inputs,
temporaries and parts of them, which overlap, where inputs may be views of one another (from the first call on, or after
a call with inputs that share nothing), with calls that write where they are told (``out=``, parts of a ``cat``, lists),
in branches and loops too, under either wrapper and with an arena.

    make fuzz N=5000            more of them, N of each kind, on all cores
    REFLIB_FUZZ_SECONDS=60      how long without N
    REFLIB_FUZZ_DEVICE=cuda     the inputs' device
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st

from reflib.observe import repro
from reflib.options import Options
from reflib.pipeline import Backend
from tests import fuzz_updates
from tests.checking import ReadingFirst, call, clone, wrong
from tests.fuzz_templates import CLASSES, WINDOWS
from tests.fuzz_updates import BLOCKS, HOW, JOINED, LISTS, PART, SEEN, UPDATE

COUNT = int(os.environ.get("REFLIB_FUZZ") or 0)
SECONDS = float(os.environ.get("REFLIB_FUZZ_SECONDS") or 20)
DEVICE = os.environ.get("REFLIB_FUZZ_DEVICE") or "cpu"
MOST = 100  # programs of one test
SHRINK = 60  # seconds spent on making a failure smaller
FLOATS = ("float32", "float32", "float32", "float64", "bfloat16", "float16")
OTHERS = ("int64", "int32", "int8", "uint8", "bool")
SIZES = (1, 2, 3, 5, 8, 17, 33)


# -- programs ---------------------------------------------------------------------------------------
@dataclass
class Input:
    """``layout``: how the tensor lies in memory. ``special``: sprinkle NaN, infinities and signed zeros."""

    dtype: str
    shape: tuple[int, ...]
    layout: str
    special: bool
    seed: int
    view: str = ""  # of the inputs before it

    def made(self) -> tuple[str, tuple[int, ...], str, bool, int]:
        return self.dtype, self.shape, self.layout, self.special, self.seed

    def text(self) -> str:
        return self.view or f"make({self.dtype!r}, {self.shape}, {self.layout!r}, {self.special}, {self.seed})"


@dataclass
class Program_:
    inputs: list[Input]
    steps: list[str] = field(default_factory=list)  # python expressions over v0, v1, ...
    outputs: list[int] = field(default_factory=list)
    mutate: str = ""
    apart_first: bool = False  # a call before, with inputs that share no memory
    options: dict[str, Any] = field(default_factory=dict)

    def args(self) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for i in self.inputs:
            now = {f"v{n}": t for n, t in enumerate(made)}
            made.append(eval(i.view, {"torch": torch, **now}) if i.view else make(*i.made()))
        return made

    def source(self) -> str:
        args = ", ".join(f"v{i}" for i in range(len(self.inputs)))
        lines = [f"def f({args}):"]
        lines += [f"    v{len(self.inputs) + i} = {s}" for i, s in enumerate(self.steps)]
        lines += [f"    {self.mutate}"] if self.mutate else []
        lines.append("    return " + "".join(f"v{i}, " for i in self.outputs))
        return "\n".join(lines)

    def function(self) -> Callable[..., Any]:
        scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "U": fuzz_updates}
        exec(self.source(), scope)
        return scope["f"]

    def reproducer(self, dynamic: bool, backward: bool) -> str:
        args = "".join(f"v{n} = {i.text()}\n" for n, i in enumerate(self.inputs))
        names = ", ".join(f"v{n}" for n in range(len(self.inputs)))
        how = f"dynamic={dynamic}, backward={backward}, apart_first={self.apart_first}, **{self.options}"
        return (
            "import torch, torch.nn.functional as F\nimport tests.fuzz_updates as U\n"
            "from tests.cpu.test_fuzz import judge, make\n\n"
            f"{self.source()}\n\n{args}print(judge(f, [{names}], {how}))\n"
        )


def make(dtype: str, shape: tuple[int, ...], layout: str, special: bool, seed: int) -> torch.Tensor:
    """A tensor whose values are all representable in half precision."""
    g = torch.Generator().manual_seed(seed)
    t = getattr(torch, dtype)

    def values(shape: tuple[int, ...]) -> torch.Tensor:
        return on_cpu(shape).to(DEVICE)

    def on_cpu(shape: tuple[int, ...]) -> torch.Tensor:
        if t == torch.bool:
            return torch.randint(0, 2, shape, generator=g).bool()
        if not t.is_floating_point:
            return torch.randint(0 if t == torch.uint8 else -9, 10, shape, generator=g).to(t)
        x = torch.randint(-32, 33, shape, generator=g) / 16
        if special and x.numel():
            odd = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 0.0])
            hit = torch.randint(0, 6, shape, generator=g) == 0
            x = torch.where(hit, odd[torch.randint(0, 5, shape, generator=g)], x)
        return x.to(t)

    if layout == "transposed":
        return values(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
    if layout == "strided":
        return values(tuple(2 * n for n in shape))[tuple(slice(None, None, 2) for _ in shape)]
    if layout == "expanded" and shape:
        return values((1, *shape[1:])).expand(shape)
    if layout == "offset":
        n = 1
        for s in shape:
            n *= s
        return values((n + 3,))[3:].view(shape)
    if layout == "misaligned" and t.itemsize == 4:
        plain = values(shape)
        if plain.is_cuda:
            return torch.empty(plain.numel() + 1, dtype=t, device=DEVICE)[1:].view(shape).copy_(plain)
        if plain.numel():
            memory = bytearray(4 * plain.numel() + 4)
            return torch.frombuffer(memory, dtype=t, offset=4).view(shape).copy_(plain)
        return plain
    return values(shape)


UNARY = (
    "{a}.abs()", "{a}.neg()", "{a}.relu()", "{a}.sign()", "torch.square({a})", "{a}.clamp(-1, 2)", "{a} * 2 + 1",
    "{a} - 3", "torch.isnan({a})", "{a} > 0", "{a}.clone()",
)  # fmt: skip
UNARY_FLOAT = (
    "{a}.exp()", "{a}.sin()", "{a}.tanh()", "{a}.sigmoid()", "F.gelu({a})", "F.silu({a})", "({a}.abs() + 0.5).log()",
    "{a}.abs().sqrt()", "(1 / ({a}.abs() + 0.25))", "{a}.floor()", "{a}.round()", "{a}.to(torch.float32)",
    "{a}.to(torch.bfloat16)", "{a}.erf()", "F.leaky_relu({a}, 0.1)", "F.softplus({a})", "F.hardtanh({a})",
    "{a}.float()", "{a}.trunc()", "({a} * {a} + 1).rsqrt()", "F.elu({a})", "{a}.expm1()", "{a}.atan()",
    "{a}.double()",
)  # fmt: skip
BINARY = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.minimum({a}, {b})", "{a} < {b}",
    "{a} == {b}", "torch.where({a} > {b}, {a}, {b})", "torch.where({b} != 0, {a}, 2)",
)  # fmt: skip
BINARY_FLOAT = (
    "{a} / ({b}.abs() + 0.5)", "torch.lerp({a}, {b}.to({a}.dtype), 0.25)", "torch.hypot({a}, {b}.to({a}.dtype))",
)  # fmt: skip
REDUCE = (
    "{a}.sum({d})", "{a}.amax({d})", "{a}.amin({d})", "({a} != 0).any({d})", "({a} > 0).all({d})",
    "{a}.sum({d}, keepdim=True)", "{a}.argmax({d})", "{a}.argmin({d}, keepdim=True)", "{a}.cumsum({d})",
)  # fmt: skip
REDUCE_FLOAT = (
    "{a}.mean({d})", "torch.softmax({a}, {d})", "F.log_softmax({a}, {d})", "{a}.logsumexp({d})",
    "{a}.var({d}, correction=0)", "{a}.norm(dim={d})", "{a} - {a}.mean({d}, keepdim=True)",
)  # fmt: skip
FULL = ("{a}.sum()", "{a}.max()", "{a}.min()")
VIEW = (
    "{a}.transpose({d}, {e})", "{a}.unsqueeze({d})", "{a}.flip({d})", "{a}.narrow({d}, 0, {k})", "{a}.flatten()",
    "{a}[..., ::2]", "{a}.movedim({d}, {e})", "{a}.roll(1, {d})", "{a}.transpose({d}, {e}).contiguous()",
    "{a}.reshape(-1)", "{a}.unsqueeze(0).expand(3, *{a}.shape)", "{a}.select({d}, 0)", "{a}.chunk(2, {d})[0]",
    "F.pad({a}, (1, 2), value=1)", "{a}.repeat_interleave(2, {d})", "{a}.unfold({d}, 1, 1)",
    "{a}.diagonal(0, {d}, {e})",
)  # fmt: skip
JOIN = (
    "torch.cat([{a}, {a}], {d})", "torch.stack([{a}, {a}], {d})", "{a} @ {a}.transpose(-1, -2)",
    "{a} @ {a}.mT.contiguous()",
)  # fmt: skip
INDEX = (
    "{a}[torch.arange({a}.shape[0], device={a}.device) // 2]",
    "{a}.index_select({d}, torch.arange({a}.shape[{d}], device={a}.device).flip(0))",
    "{a}.gather({d}, torch.zeros_like({a}, dtype=torch.int64))",
    "torch.take_along_dim({a}, torch.zeros_like({a}, dtype=torch.int64), {d})", "{a}.masked_fill({a} > 1, 0)",
    "{a}.tril() if {a}.dim() > 1 else {a}",
    "{a}.index_put((torch.zeros(1, dtype=torch.int64, device={a}.device),), {a}[-1:])",
    "torch.zeros_like({a}).scatter_add({d}, torch.zeros_like({a}, dtype=torch.int64), {a})",
    "{a}.sort(dim={d}, stable=True)[0]",
)  # fmt: skip


@st.composite
def updating(draw: Any) -> tuple[Program_, bool, bool]:
    """A program that updates its inputs and temporaries, and parts of them, in place."""
    one = lambda xs: draw(st.sampled_from(xs))  # noqa: E731
    shape = tuple(one((2, 3, 4, 5, 6, 8)) for _ in range(draw(st.integers(1, 3))))
    inputs = [
        Input(one(("float32", "float32", "float64", "bfloat16", "int64", "int32")), shape, layout, False, n)
        for n, layout in enumerate(
            one(("plain", "plain", "plain", "transposed", "strided", "offset")) for _ in range(draw(st.integers(1, 3)))
        )
    ]
    program = Program_(inputs)
    for _ in range(draw(st.integers(0, 2))):
        values = program.args()
        view = _filled(draw, values, draw(st.integers(0, len(values) - 1)), one(SEEN))
        if view is not None and view[1].dtype == values[0].dtype or view is not None and ".view(torch" in view[0]:
            inputs.append(Input("", tuple(view[1].shape), "", False, 0, view[0]))
    values = program.args()
    backward = draw(st.integers(0, 3)) == 0
    program.options = one(HOW)
    n = len(inputs)
    if backward:  # of leaves that require grad nothing is updated
        program.steps = [one(("v{} * 1", "v{}.clone()")).format(i) for i in range(n)]
        values += [v.clone() for v in values]
    for _ in range(draw(st.integers(2, 7))):
        own = n if backward else 0
        step = _update(draw, one, values, own) if draw(st.integers(0, 2)) else _step(draw, one, values)
        if step is not None:
            program.steps.append(step[0])
            values.append(step[1])
    assume(any("_(" in s for s in program.steps))
    last = len(values) - 1
    program.outputs = sorted({last, *draw(st.lists(st.integers(n, last), max_size=2))})
    program.apart_first = any(i.view for i in inputs) and draw(st.booleans())
    return program, draw(st.integers(0, 2)) == 0, backward


def _update(draw: Any, one: Any, values: list[Any], own: int) -> tuple[str, Any] | None:
    """Of one of the values from number ``own`` on."""
    a, b = draw(st.integers(own, len(values) - 1)), draw(st.integers(0, len(values) - 1))
    parts = [_filled(draw, values, a, one(PART)) for _ in range(2)]
    if parts[0] is None or parts[1] is None:
        return None
    kind = (UPDATE, UPDATE, UPDATE, UPDATE, JOINED, BLOCKS, LISTS)[draw(st.integers(0, 6))]
    text = one(kind).replace("{p}", parts[0][0]).replace("{q}", parts[1][0])
    return _filled(draw, values, a, text, b)


def _filled(draw: Any, values: list[Any], a: int, template: str, b: int = 0) -> tuple[str, Any] | None:
    x = values[a]
    d, e = (draw(st.integers(0, max(x.dim() - 1, 0))) for _ in range(2))
    size = x.shape[d] if x.dim() else 1
    k = draw(st.integers(0, max(size - 1, 0)))
    m = draw(st.integers(1, max(size - k, 1)))
    text = template.format(a=f"v{a}", b=f"v{b}", d=d, e=e, k=k, m=m)
    return _computed(text, values)


def _computed(text: str, values: list[Any]) -> tuple[str, Any] | None:
    """The expression and what eager makes of it; None where that is no tensor, or too large."""
    scope = {"torch": torch, "F": torch.nn.functional, "U": fuzz_updates, **{f"v{i}": v for i, v in enumerate(values)}}
    try:
        value = eval(text, scope)
    except Exception:
        return None
    return (text, value) if isinstance(value, torch.Tensor) and value.numel() <= 20_000 else None


@st.composite
def programs(draw: Any) -> tuple[Program_, bool, bool]:
    """A program that eager accepts, and whether its sizes are dynamic and whether it is differentiated."""
    one = lambda xs: draw(st.sampled_from(xs))  # noqa: E731
    rank = draw(st.integers(0, 3))
    sizes = SIZES if draw(st.integers(0, 9)) else (*SIZES, 0)
    base = tuple(one(sizes) for _ in range(rank))
    inputs = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(
            1 if draw(st.integers(0, 4)) == 0 else n for n in base[draw(st.integers(0, 1)) if rank > 1 else 0 :]
        )
        dtype = one(FLOATS) if draw(st.integers(0, 3)) else one(OTHERS)
        layout = one(("plain", "plain", "transposed", "strided", "expanded", "offset", "misaligned"))
        inputs.append(Input(dtype, shape, layout, draw(st.integers(0, 3)) == 0, draw(st.integers(0, 3))))
    backward = draw(st.booleans()) and any(i.dtype in FLOATS for i in inputs)
    program = Program_(inputs)
    values: list[Any] = [make(i.dtype, i.shape, i.layout, i.special, i.seed) for i in inputs]
    for _ in range(draw(st.integers(1, 7))):
        step = _step(draw, one, values)
        if step is None:
            continue
        text, value = step
        program.steps.append(text)
        values.append(value)
    assume(program.steps)
    last = len(values) - 1
    program.outputs = sorted({last, *draw(st.lists(st.integers(len(inputs), last), max_size=2))})
    if not backward and draw(st.integers(0, 3)) == 0 and inputs[0].layout not in ("expanded",):
        program.mutate = one(
            ("v0.mul_(2)", "v0.copy_(v0.flip(0)) if v0.dim() else v0.zero_()", "v0.fill_(1)", "v0.add_(v0.clone())")
        )
    return program, draw(st.booleans()), backward


def _step(draw: Any, one: Any, values: list[Any]) -> tuple[str, Any] | None:
    """One more expression that eager can compute."""
    n = len(values)
    a = n - 1 - draw(st.integers(0, min(n, 3) - 1))
    b = draw(st.integers(0, n - 1))
    x = values[a]
    real, kind = x.dtype.is_floating_point, draw(st.integers(0, 9))
    unary, binary, reduce = (UNARY_FLOAT, BINARY_FLOAT, REDUCE_FLOAT) if real else (UNARY, BINARY, REDUCE)
    template = one((UNARY, unary, unary, BINARY, BINARY, binary, (*REDUCE, *FULL), reduce, VIEW, INDEX)[kind])
    if draw(st.integers(0, 14)) == 0:
        template = one(JOIN)
    d, e = (draw(st.integers(0, max(x.dim() - 1, 0))) for _ in range(2))
    k = draw(st.integers(0, x.shape[d] if x.dim() else 1))
    text = template.format(a=f"v{a}", b=f"v{b}", d=d, e=e, k=k)
    return _computed(text, values)


@st.composite
def others(draw: Any) -> tuple[Program_, bool, bool]:
    """A program of the ops of ``fuzz_templates``: most steps are of two of its classes."""
    one = lambda xs: draw(st.sampled_from(xs))  # noqa: E731
    classes = [one(CLASSES), one(CLASSES)]
    windows = WINDOWS in classes
    rank = draw(st.integers(2, 5) if windows else st.integers(0, 4))
    sizes = (1, 2, 3, 4, 5, 6, 8) if draw(st.integers(0, 7)) else (0, 1, 3)
    narrow = one((("float32",), FLOATS, ("float16", "bfloat16"), OTHERS))
    inputs = []
    for n in range(draw(st.integers(1, 2))):
        shape = inputs[0].shape if inputs and draw(st.integers(0, 2)) else tuple(one(sizes) for _ in range(rank))
        layout = one(("plain", "plain", "transposed", "strided", "expanded", "offset", "misaligned"))
        inputs.append(Input(one(narrow), shape, layout, draw(st.integers(0, 4)) == 0, n))
    program = Program_(inputs)
    values: list[Any] = program.args()
    for _ in range(draw(st.integers(1, 5))):
        a = max(len(values) - 1 - draw(st.integers(0, 1)), 0)
        b = draw(st.integers(0, len(values) - 1))
        known = draw(st.integers(0, 3)) == 0
        step = _step(draw, one, values) if known else _filled(draw, values, a, one(one(classes)), b)
        if step is not None:
            program.steps.append(step[0])
            values.append(step[1])
    assume(program.steps)
    last = len(values) - 1
    program.outputs = sorted({last, *draw(st.lists(st.integers(len(inputs), last), max_size=2))})
    backward = draw(st.booleans()) and any(i.dtype in FLOATS for i in inputs)
    return program, draw(st.integers(0, 2)) == 0, backward


# -- judging ----------------------------------------------------------------------------------------
def judge(
    fn: Callable[..., Any],
    args: list[torch.Tensor],
    dynamic: bool = False,
    backward: bool = False,
    apart_first: bool = False,
    **options: Any,
) -> list[str] | None:
    """What is wrong with the compiled function; None where eager refuses."""
    torch._dynamo.reset()
    if backward:
        args = [a.detach().requires_grad_() if a.dtype.is_floating_point else a for a in args]
    eager = call(fn, args, backward=backward)
    if eager.error is not None:
        return None
    wide = call(fn, args, backward=backward, wide=True)
    compiled = torch.compile(fn, backend=Backend(Options(verify=True, **options)), dynamic=dynamic)
    if apart_first:
        call(compiled, [clone(a) for a in args], backward=backward)
    actual = call(compiled, args, backward=backward)
    problems = wrong(actual, eager, wide)
    if problems:  # does an update read what it writes, elsewhere?
        with ReadingFirst():
            first, first_wide = (call(fn, args, backward=backward, wide=w) for w in (False, True))
        if first.error is None and not wrong(actual, first, first_wide):
            return []
    if problems:  # are they PyTorch's? (a float64 tensor of no dimensions is not mutated under Dynamo, for one)
        torch._dynamo.reset()
        aot = torch.compile(fn, backend="aot_eager", dynamic=dynamic)
        if apart_first:
            call(aot, [clone(a) for a in args], backward=backward)
        theirs = call(aot, args, backward=backward)
        if theirs.error is not None:
            return [] if actual.error is not None else problems
        if wrong(theirs, eager, wide):  # no more than theirs
            return wrong(actual, theirs) and wrong(actual, theirs, wide)
    return problems


def saved(fn: Callable[..., Any], args: list[Any], dynamic: bool) -> str:
    """A repro of the failure for ``reflib minify``: under REFLIB_REPRO, or runs/repros."""
    folder = Path(os.environ.get("REFLIB_REPRO") or Path(__file__).resolve().parents[2] / "runs" / "repros")
    try:
        torch._dynamo.reset()
        folder.mkdir(parents=True, exist_ok=True)
        written = repro.write(fn, args, {}, folder / f"fuzz_{os.getpid()}.py", True, dynamic, verify=True)
        return "".join(f"\nreflib minify {path}" for path in written)
    except Exception as e:  # the failure is what matters
        return f"no repro: {e}"


def run_fuzz(examples: int, round_seed: int | None, failed: dict[str, str], kind: Any = programs) -> int:
    """So many random programs; how many ran. ``failed``: reproducer -> message, for Hypothesis asks again."""
    ran = 0
    found_at = 0.0

    @settings(
        settings.default,
        max_examples=examples,
        deadline=None,
        derandomize=False,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(kind())
    def test(drawn: tuple[Program_, bool, bool]) -> None:
        nonlocal ran, found_at
        program, dynamic, backward = drawn
        text = program.reproducer(dynamic, backward)
        if text not in failed:
            if failed and time.monotonic() - found_at > SHRINK:
                return  # small enough
            args = program.args()
            problems = judge(program.function(), args, dynamic, backward, program.apart_first, **program.options)
            assume(problems is not None)
            ran += 1
            if not problems:
                return
            found_at = found_at or time.monotonic()
            failed[text] = "\n".join([*problems, saved(program.function(), args, dynamic)])
        pytest.fail(f"{failed[text]}\n\n{text}", pytrace=False)

    (test if round_seed is None else seed(round_seed)(test))()
    return ran


@pytest.mark.parametrize("part", range(-(-COUNT // MOST) or 1))
@pytest.mark.parametrize("kind", [programs, updating, others])
def test_fuzz_random_graphs(kind: Any, part: int) -> None:
    start, ran = time.monotonic(), 0
    if COUNT:
        ran = run_fuzz(min(MOST, COUNT - part * MOST), None, {}, kind)
    else:  # the same programs every time, as many as time allows
        round_seed = 0
        while time.monotonic() - start < SECONDS / 3:
            ran += run_fuzz(10, round_seed, {}, kind)
            round_seed += 1
    print(f"{ran} random graphs in {time.monotonic() - start:.0f} s")


def test_updates_that_read_what_they_write() -> None:
    """Eager's result follows from the order of its loop; another one is wrong unless all is read first."""
    x = make("float32", (4,), "strided", False, 1)
    assert judge(lambda x: (x.mul_(x[:1]), x.view(4)), [x]) == []
    eager, first = call(lambda x: x.mul_(x[:1]), [x]), x.clone() * x[:1]
    with ReadingFirst():
        assert torch.equal(call(lambda x: x.mul_(x[:1]), [x]).leaves[0], first)
        assert torch.equal(call(lambda x: torch.add(x, x[:1], out=x), [x]).leaves[0], x + x[:1])
        assert not wrong(call(lambda x: x.add_(1), [x]), call(lambda x: x.add_(1), [x]))
    assert not torch.equal(eager.leaves[0], first)
