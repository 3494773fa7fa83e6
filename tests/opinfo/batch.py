"""Many samples, one compiled library.

Each sample is captured by AOTAutograd (the part of ``torch.compile`` behind Dynamo) and taken through reflib's stages;
the C++ kernels of all of them are compiled together, equal ones once (a GPU's graph by graph); then every sample runs
and is judged. What AOTAutograd cannot capture alone (sizes that depend on data, say) goes through ``torch.compile``.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function

from tests import checking
from tests.checking import Outcome
from tests.stopping import stopped

from .samples import Case

Say = Callable[..., None]
# what these return has a shape, strides and a dtype, but no values
UNDEFINED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
TIES = {"topk", "kthvalue", "median", "nanmedian", "mode"}
REMAINDERS = {"__rmod__", "remainder", "fmod", "floor_divide"}


@dataclass
class Result:
    """``status``: ok, wrong, error (something raised), excluded (aot_eager fails as well), skip (eager itself raises);
    and from outside: crash, timeout."""

    key: str
    status: str
    why: str = ""
    entry: str = "aot"
    kernels: int = 0
    calls: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class Library:
    """Kernels of many graphs. ``add`` promises a graph's kernels to ``wrap``; ``build`` compiles them all."""

    def __init__(self, options: Any):
        self.options = options
        self.names: dict[str, str] = {}  # text with the name taken out -> unique name
        self.built: Any = None

    def add(self, kernels: Any) -> dict[Any, Future]:
        alias = {}
        part: Future = Future()
        part.set_result(_Part(self, alias))
        for k in kernels.values():
            text = re.sub(rf"\b{re.escape(k.name)}", "KERNEL", k.source)
            text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("//"))
            alias[k.name] = self.names.setdefault(text, f"s{len(self.names)}")
        return dict.fromkeys(kernels.values(), part)

    def sources(self) -> list[str]:
        return [text.replace("KERNEL", name) for text, name in self.names.items()]

    def build(self) -> None:
        from reflib.generate.cpp import HEADER
        from reflib.toolchain import build_library
        from reflib.wrap.native import load_library

        if self.names:
            self.built = load_library(build_library(self.sources(), self.options, header=HEADER))


@dataclass
class _Part:
    library: Library
    alias: dict[str, str]

    def function(self, name: str, nargs: int) -> Any:
        return self.library.built.function(self.alias[name], nargs)

    def address(self, name: str) -> int:
        return self.library.built.address(self.alias[name])


@dataclass
class Captured:
    """One sample's graphs, each with the callable that AOTAutograd holds and that is filled in later."""

    case: Case
    compiled: Callable[..., Any] | None = None
    graphs: list[Any] = field(default_factory=list)
    calls: list[_Slot] = field(default_factory=list)
    error: Exception | None = None


class _Slot:
    """Runs the captured graph itself until something better is put in."""

    def __init__(self, graph: Any):
        self.fn = self.eager
        self.graph = graph

    def eager(self, args: list) -> Any:
        values = list(args)
        args.clear()
        return torch.fx.Interpreter(self.graph.module).boxed_run(values)

    def call(self, args: list) -> Any:
        return self.fn(args)


def capture(case: Case) -> Captured:
    """Trace (and run once, by the captured graphs themselves)."""
    from reflib.capture import Graph
    from reflib.capture.capture import partitioner
    from reflib.lower import decompositions
    from reflib.options import Options
    from reflib.pipeline import rewritten, targets

    made = Captured(case)

    def compiler(name: str) -> Callable[..., Any]:
        def one(gm: torch.fx.GraphModule, inputs: Any) -> Callable[[list], Any]:
            slot = _Slot(Graph(gm, name))
            made.graphs.append(slot.graph)
            made.calls.append(slot)

            def fn(args: list) -> Any:
                return slot.call(args)

            fn._boxed_call = True  # type: ignore[attr-defined]
            return fn

        return one

    made.compiled = aot_function(
        case.fn,
        compiler("forward"),
        compiler("backward"),
        partitioner(partial(rewritten, options=Options(fallback_random=True), target_of=targets(Options()))),
        decompositions(),
        keep_inference_input_mutations=True,
        inference_compiler=compiler("inference"),
    )
    result = checking.call(made.compiled, case.args, backward=case.backward)
    made.error = result.error
    vals = [n.meta.get("val") for g in made.graphs for n in g.nodes]
    if any(isinstance(t, torch.Tensor) and t.layout != torch.strided for t in (*vals, *result.inputs)):
        made.error = TypeError("sparse tensors: Dynamo runs these eagerly")
    return made


def judge(case: Case, compiled: Callable[..., Any], eager: Outcome, wide: Outcome) -> tuple[str, str]:
    """(status, why) of one sample."""
    actual = checking.call(compiled, case.args, backward=case.backward)
    if case.key.split("|")[0] in UNDEFINED:
        eager.leaves, actual.leaves = [_filled(t) for t in eager.leaves], [_filled(t) for t in actual.leaves]
    if actual.error is not None:
        return "error", checking.wrong(actual, eager)[0]
    reference = _usable(case, eager, wide)
    problems = checking.wrong(actual, eager, reference)
    if problems and reference is None:
        problems = checking.wrong(actual, eager, checking.call(case.fn, _nudged(case.args), backward=case.backward))
    if problems and (why := left_open(case, problems)):
        return "excluded", "; ".join([why, *problems])
    return ("wrong", "; ".join(problems)) if problems else ("ok", "")


def left_open(case: Case, problems: list[str]) -> str:
    """Why eager's result is not the only right one, or not the one that PyTorch promises; "" if it is."""
    op, x = case.key.split("|")[0], case.args[0] if case.args else None
    if all(": strides " in p for p in problems) and op.startswith("fft.") and case.device == "cpu":
        return "the meta function of a CPU's Fourier transforms promises other strides than MKL gives"
    if case.device == "cuda" and x is not None:
        if op in TIES and not any(p.startswith("output 0") for p in problems) and x.unique().numel() < x.numel():
            return "which one of equal numbers is found is left open"
        integers = [t for t in case.args if not t.is_floating_point() and not t.is_complex()]
        if op in REMAINDERS and any(bool((t == 0).any()) for t in integers):
            return "on a GPU a remainder by zero is not defined"
    return ""


def _nudged(args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Other last bits: how far results of a random op move with them is what can be asked of them."""
    generator = torch.Generator().manual_seed(1)

    def one(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point() or t.layout != torch.strided:
            return t
        sign = torch.randint(0, 2, t.shape, generator=generator).to(t) * 2 - 1
        return (t.detach() * (1 + 2 * torch.finfo(t.dtype).eps * sign)).requires_grad_(t.requires_grad)

    return [one(t) for t in args]


def _filled(t: Any) -> Any:
    return t.fill_(1) if isinstance(t, torch.Tensor) else t


def _usable(case: Case, eager: Outcome, wide: Outcome) -> Outcome | None:
    """The float64 reference, unless the op is random: then other dtypes draw other numbers."""
    again = checking.call(case.fn, case.args, backward=case.backward, seed=1)
    if again.error is None and len(again.leaves) == len(eager.leaves):
        for a, b in zip(again.leaves, eager.leaves):
            plain = isinstance(a, torch.Tensor) and a.layout == torch.strided and a.is_floating_point()
            if plain and a.shape == b.shape and not torch.equal(a.nan_to_num(), b.nan_to_num()):
                return None
    return wide


def tupled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """AOTAutograd alone makes lists of tuples; Dynamo puts that right."""

    def call(*args: Any) -> Any:
        result = fn(*args)
        return tuple(result) if type(result) is list else result

    return call


def through_dynamo(case: Case, backend: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(case.fn, backend=backend, dynamic=False)


def run_batch(cases: list[Case], say: Say, verify: bool = True, entry: str = "aot", until: str = "wrap") -> None:
    """Judge every case; ``say(at=key, phase=...)`` before each risky step, ``say(result=Result)`` for each result.
    ``until``: ``lower``, ``fuse`` or ``schedule`` judge what the interpreter makes of the program after that stage."""
    from reflib.options import Options
    from reflib.pipeline import Backend

    options = Options(verify=verify, compile_threads=1, fallback_random=True)
    library = Library(options)
    gpu = cases[0].device == "cuda"
    ready: list[tuple[Captured | None, Case, Result, float]] = []
    for case in cases:
        start = time.perf_counter()
        say(at=case.key, phase="capture")
        result = Result(case.key, "ok", entry=entry)
        made = capture(case) if entry == "aot" else None
        if made is not None and made.error is None:
            say(at=case.key, phase="compile")
            error = _compile(made, options, None if gpu else library, result, until)
            if error is not None:
                made.error = error
                result.status, result.why = "error", f"compile: {type(error).__name__}: {_brief(error)}"
        elif made is not None:
            made, result.entry = None, "dynamo"
        ready.append((made, case, result, time.perf_counter() - start))
    say(at=cases[0].key if len(cases) == 1 else "", phase="build")
    library.build()
    for made, case, result, spent in ready:
        start = time.perf_counter()
        say(at=case.key, phase="run")
        eager = checking.call(case.fn, case.args, backward=case.backward)
        if eager.error is not None:
            result.status, result.why = "skip", f"eager: {_brief(eager.error)}"
        elif result.status == "ok":
            wide = checking.call(case.fn, case.args, backward=case.backward, wide=True)
            stages: list[Any] = []
            if made is not None and made.compiled is not None:
                compiled = tupled(made.compiled)
            elif until != "wrap":
                compiled = case.fn
            else:
                compiled = through_dynamo(case, Backend(options, stages.append))
            result.status, result.why = judge(case, compiled, eager, wide)
            for s in stages:
                _count(s, result)
        if gpu:
            torch.cuda.synchronize()  # where a kernel has spoiled the context, nothing more can run in this process
        if result.status in ("wrong", "error"):
            say(at=case.key, phase="aot_eager")
            status, why = fails_in_aot_eager(case, eager)
            if status:
                result.status, result.why = "excluded", f"{result.why} || aot_eager: {why}"
        result.seconds = round(time.perf_counter() - start + spent, 3)
        say(result=result)


def fails_in_aot_eager(case: Case, eager: Outcome) -> tuple[str, str]:
    wide = checking.call(case.fn, case.args, backward=case.backward, wide=True)
    status, why = judge(case, through_dynamo(case, "aot_eager"), eager, wide)
    return ("", "") if status == "ok" else (status, why)


def _compile(made: Captured, options: Any, library: Library | None, result: Result, until: str) -> Exception | None:
    """Fills ``made``'s calls. Without ``library`` each graph's kernels are built at once."""
    from reflib.pipeline import run
    from reflib.wrap import wrap

    for graph, slot in zip(made.graphs, made.calls):
        try:
            if until != "wrap":
                slot.fn = stopped(run(graph, options, until))
                continue
            s = run(graph, options, "generate")
            assert s.scheduled is not None and s.plan is not None and s.kernels is not None
            _, slot.fn = wrap(s.scheduled, s.plan, s.kernels, options, library and library.add(s.kernels))
        except Exception as e:
            return e
        _count(s, result)
    return None


def _count(stages: Any, result: Result) -> None:
    from reflib.ir.program import Extern

    if stages.scheduled is None:
        return
    externs = [n for n in stages.scheduled.nodes if isinstance(n, Extern)]
    result.kernels += len(stages.scheduled.nodes) - len(externs)
    names = Counter({str(getattr(n.target, "__name__", n.target)): n.reason for n in externs})
    result.calls.update({k: str(v) for k, v in names.items()})


def _brief(e: BaseException) -> str:
    text = str(e)
    if "error: " in text:  # a C++ compiler's
        text = text[text.index("error: ") :]
    return " ".join(text.split())[:400]
