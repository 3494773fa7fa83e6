"""Runs eager, compiles, runs, compares and times: all parts of the report that execute code.

Each call has copies of the arguments, the same random seed and the original buffers of the module, so that mutations of
inputs or running means do not affect other calls. Mutated tensors are compared like results.

Results are **right** by the rule of `autotune.correct`: their error relative to eager in float64 is at most twice that
of eager, plus a floor. Without a float64 version (a function that holds tensors) eager's results are the reference.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from reflib.autotune import correct
from reflib.autotune.inputs import copy_of, free_bytes
from reflib.errors import LabError, ReflibError
from reflib.lab.report.subject import Subject, located
from reflib.observe.ranking import Ranking, data_sheet, product_dtype, ranking
from reflib.observe.trace import recorded_calls
from reflib.options import Options

if TYPE_CHECKING:
    from reflib.lab.report import ReportRequest
    from reflib.pipeline import Stages

ROUNDS, BUDGET_S = 30, 2.0
KERNEL_ROUNDS = 7  # calls in which each kernel is timed
PEER_S = 300.0
_WIDER = {torch.float16, torch.bfloat16, torch.float32}


@dataclass
class CallOutcome:
    """All values after a call: results, then gradients, arguments, buffers. `names`: one per value."""

    values: list[Any]
    names: list[str]
    structure: Any


@dataclass
class Trial:
    """`seconds`: the first call, compiling included. If nothing was run, `comparison` is None and `times` empty.
    `frames`: what Dynamo compiled, in order: a function, its continuation after a graph break, or one of them again,
    with the guard that failed. `graph_breaks`: reasons. `ranking`: kernels and calls; without times if none was run."""

    graphs: list[Stages]
    seconds: float
    device: torch.device
    comparison: dict[str, Any] | None = None
    times: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    frames: list[dict[str, Any]] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    ranking: Ranking = field(default_factory=Ranking)


def run(subject: Subject, request: ReportRequest, options: Options, say: Callable[[str], Any]) -> Trial:
    """Raises LabError if the model itself fails or nothing can be compiled; a ReflibError of a stage unchanged."""
    caller = Caller(subject, request.backward, request.seed)
    printed = subject.repro is not None and options.target is not None  # (may have inputs of a device that is not here)
    say(f"{subject.spec}: eager")
    try:
        eager = CallOutcome([], [], None) if printed else caller(subject.model)
    except ReflibError:
        raise
    except Exception as error:
        raise LabError(f"{subject.spec} fails without reflib: {located(error, subject.path)}") from error
    say(f"{subject.spec}: compiling")
    with _captured() as (frames, breaks):
        compiled, graphs, actual, seconds = _compiled(subject, caller, request.dynamic, options)
    trial = Trial(graphs, seconds, caller.device, frames=frames, graph_breaks=breaks)
    if options.target is not None:
        trial.notes.append(
            f"The code is for {options.target}: it was generated, not built, and nothing was run or timed. The graph "
            f"was captured on {caller.device}: where PyTorch picks an operator by device, it is that device's."
        )
        trial.ranking = ranking(graphs, roof=data_sheet(graphs))
        return trial
    trial.comparison = _compare(subject, caller, eager, actual, graphs)
    if not request.measure:
        trial.notes.append("Nothing was timed: --no-measure.")
        trial.ranking = ranking(graphs, roof=data_sheet(graphs))
        return trial
    say(f"{subject.spec}: measuring")
    trial.times = _times(caller, compiled, trial.notes)
    trial.ranking = _ranking(caller, compiled, trial)
    for peer in request.compare:
        say(f"{subject.spec}: {peer}, in a separate process")
        trial.times.append(_peer(peer, request, caller.device))
    return trial


# -- calls ------------------------------------------------------------------------------------------
class Caller:
    """Calls the model or its compiled form under the same conditions."""

    def __init__(self, subject: Subject, backward: bool, seed: int):
        self.subject, self.backward, self.seed = subject, backward, seed
        model = subject.model
        self.module = model if isinstance(model, torch.nn.Module) else None
        self.buffers = {n: b.detach().clone() for n, b in self.module.named_buffers()} if self.module else {}
        held = [*tree_leaves((subject.args, subject.kwargs)), *(self.module.parameters() if self.module else ())]
        devices = [t.device for t in held if isinstance(t, torch.Tensor)]
        self.device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))

    def __call__(
        self, fn: Callable[..., Any], module: torch.nn.Module | None = None, wide: bool = False, seed: int | None = None
    ) -> CallOutcome:
        """`module`: has the parameters and buffers of `fn`, if not the subject. `wide`: floats as float64."""
        module = module or self.module
        with self.restored():
            args, kwargs = self.arguments(wide)
            torch.manual_seed(self.seed if seed is None else seed)
            result, gradients = self.step(fn, args, kwargs, module)
            wanted = [name for name, _ in self.wanting(args, kwargs, module)]
            leaves, structure = tree_flatten(result)
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            state = dict(module.named_buffers()) if module else {}
            values = [*map(_plain, leaves), *gradients, *given, *(b.detach().clone() for b in state.values())]
        names = [
            *(f"output {i}" if len(leaves) > 1 else "output" for i in range(len(leaves))),
            *(f"gradient of {name}" for name in wanted[: len(gradients)]),
            *(f"argument {i}, afterwards" for i in range(len(given))),
            *(f"buffer {name}, afterwards" for name in state),
        ]
        return CallOutcome([v.detach() if isinstance(v, torch.Tensor) else v for v in values], names, structure)

    def step(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, module: torch.nn.Module | None
    ) -> tuple[Any, list[Any]]:
        """The result, and with `backward` the gradients of its sum by all tensors that require grad."""
        with torch.set_grad_enabled(self.backward):
            result = fn(*args, **kwargs)
        if not self.backward:
            return result, []
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        wanted = [t for _, t in self.wanting(args, kwargs, module)]
        if not outputs or not wanted:
            raise LabError("--backward: no result depends on an argument or parameter with requires_grad=True")
        found = torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs], allow_unused=True)
        return result, [None if g is None else g.contiguous() for g in found]  # strides of gradients do not matter

    def wanting(self, args: Any, kwargs: Any, module: torch.nn.Module | None) -> list[tuple[str, torch.Tensor]]:
        """The arguments and parameters that require a gradient, with their names."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        named = [(f"argument {i}", t) for i, t in enumerate(tensors)]
        named += list(module.named_parameters()) if module else []
        return [(name, t) for name, t in named if t.requires_grad]

    def arguments(self, wide: bool = False) -> tuple[Any, Any]:
        """Copies with the same strides; they require gradients as the originals do, if `backward` is set. A repro's are
        made anew: some may share memory."""
        if self.subject.repro and not wide:
            return tuple(self.subject.repro.values()), {}

        def one(t: Any) -> Any:
            if not isinstance(t, torch.Tensor):
                return t
            dtype = torch.float64 if wide and t.dtype in _WIDER else t.dtype
            plain = t.layout == torch.strided and type(t) in (torch.Tensor, torch.nn.Parameter)
            made = copy_of(t.detach(), dtype) if plain else t.detach().clone()
            return made.requires_grad_(t.requires_grad and self.backward)

        return tree_map(one, (self.subject.args, self.subject.kwargs))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context that restores the module's buffers."""
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in self.module.named_buffers() if self.module else ():
                    if name in self.buffers and buffer.shape == self.buffers[name].shape:
                        buffer.copy_(self.buffers[name])


def _plain(leaf: Any) -> Any:
    """A comparable form of a non-tensor result: a number as a tensor, an object by its type."""
    if isinstance(leaf, float):
        return torch.tensor(leaf)
    return leaf if leaf is None or isinstance(leaf, torch.Tensor | int | str) else type(leaf).__qualname__


def _compiled(
    subject: Subject, caller: Caller, dynamic: bool | None, options: Options
) -> tuple[Any, list[Stages], CallOutcome, float]:
    """The result of `reflib.compile` after its first call, with the outcome, the graphs and the seconds."""
    import torch._dynamo  # imported here, so that the time excludes it

    from reflib.fast_path import add_fast_path
    from reflib.observe.rebuild import compile_again
    from reflib.pipeline import Backend
    from reflib.target import parse_target

    if options.target is not None:
        parse_target(options.target)
    torch._dynamo.reset()  # drop what the file itself compiled
    graphs: list[Stages] = []
    backend = Backend(options, graphs.append)
    compiled: Any = torch.compile(subject.model, backend=backend, dynamic=dynamic)
    compiled = add_fast_path(compiled, backend) if options.target is None else compiled
    start = time.perf_counter()
    try:
        if subject.repro is not None:
            compiled = compile_again(subject.repro, graphs)
        outcome = CallOutcome([], [], None) if subject.repro and options.target else caller(compiled)
    except Exception as error:
        raise _refusal(subject, error) from error
    seconds = time.perf_counter() - start
    if not graphs:
        raise LabError(f"{subject.spec}: no tensor operation was captured, so there is nothing to report")
    return compiled, graphs, outcome, seconds


@contextmanager
def _captured() -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
    """What Dynamo does meanwhile, filled in at the end: (frames, reasons of graph breaks)."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    frames: list[dict[str, Any]] = []
    breaks: list[str] = []
    known, before = {id(m) for m in get_compilation_metrics()}, counters["graph_break"].copy()
    yield frames, breaks
    for m in get_compilation_metrics():
        if id(m) not in known and m.co_name:
            place = f"{os.path.basename(m.co_filename or '')}:{m.co_firstlineno}"
            frames.append({"name": m.co_name, "place": place, "again": (m.recompile_reason or "").strip()})
    for text, n in (counters["graph_break"] - before).items():
        what, more = text.strip().splitlines()[:2], f" ({n} times)" if n > 1 else ""
        breaks.append(" ".join(line.strip() for line in what) + more)


def _refusal(subject: Subject, error: BaseException) -> ReflibError:
    """The ReflibError inside Dynamo's exception, else a LabError with the exception."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ReflibError):
            return seen
        seen = getattr(seen, "inner_exception", None) or seen.__cause__
    return LabError(f"{subject.spec} cannot be compiled: {located(error, subject.path)}")


# -- is it right? -----------------------------------------------------------------------------------
def _compare(
    subject: Subject, caller: Caller, eager: CallOutcome, actual: CallOutcome, graphs: list[Stages]
) -> dict[str, Any]:
    """`verdict`: `right`, `wrong` or `unknown`; `why`; `rows`: one per tensor that is a result or was mutated."""
    if actual.structure != eager.structure and subject.repro is None:  # (a captured graph's is a list, or a tuple)
        return {"verdict": "wrong", "why": f"returned {actual.structure}, eager {eager.structure}", "rows": []}
    keep = [i for i, v in enumerate(eager.values) if isinstance(v, torch.Tensor)]
    got, want = ([o.values[i] for i in keep] for o in (actual, eager))
    if why := correct.mismatch(actual.values, _reference(eager.values, eager.values, "default", 1)):
        return {"verdict": "wrong", "why": why, "rows": []}
    wide = _float64(subject, caller, want, keep)
    values = [wide.values[i] for i in keep] if wide is not None else want
    held = tree_leaves((subject.args, subject.kwargs, list(caller.module.parameters()) if caller.module else []))
    lengths = [max(t.shape, default=1) for t in held if isinstance(t, torch.Tensor)]
    source = "float64" if wide is not None else "default"
    ref = _reference(values, want, source, max(lengths, default=1))
    found, own = correct.errors(got, ref, want), correct.errors(want, ref, want)
    tf32 = any(correct.uses_tf32(s.scheduled) for s in graphs if s.scheduled is not None)
    why = correct.judge(found, own if wide is not None else None, correct.floors(ref, tf32))
    if why and (random := _random_ops(graphs)) and _differ(want, caller(subject.model, seed=caller.seed + 1), keep):
        why = f"it draws random numbers ({', '.join(random)}), and eager's are others"
        return {"verdict": "unknown", "why": why, "rows": []}
    names = [eager.names[i] for i in keep]
    rows = [
        {"name": n, "dtype": str(w.dtype).removeprefix("torch."), "shape": list(w.shape), "largest": _largest(g, w),
         "error": f.relative, "eager_error": o.relative if wide is not None else None}
        for n, g, w, f, o in zip(names, got, want, found, own)
        if not n.endswith("afterwards") or f.relative or _largest(g, w)
    ]  # fmt: skip
    return {"verdict": "wrong" if why else "right", "why": why, "reference": source, "rows": rows}


def _reference(values: list[Any], eager: list[Any], source: str, length: int) -> correct.Reference:
    dtypes = tuple(v.dtype if isinstance(v, torch.Tensor) else None for v in eager)
    return correct.Reference(tuple(values), dtypes, source, length)


def _random_ops(graphs: list[Stages]) -> list[str]:
    targets = [n.target for s in graphs for n in s.graph.nodes if n.op == "call_function"]
    tag = torch.Tag.nondeterministic_seeded
    return list(dict.fromkeys(str(t) for t in targets if isinstance(t, torch._ops.OpOverload) and tag in t.tags))


def _differ(values: list[Any], other: CallOutcome, keep: list[int]) -> bool:
    """Whether another seed changes the results."""
    return not all(torch.equal(v, other.values[i]) for v, i in zip(values, keep))


def _float64(subject: Subject, caller: Caller, want: list[Any], keep: list[int]) -> CallOutcome | None:
    """The call in float64; None if that is impossible, exceeds the memory, or has results of other shapes."""
    model, module = subject.model, None
    held = tree_leaves((subject.args, subject.kwargs, list(caller.module.parameters()) if caller.module else []))
    needed = 16 * sum(t.numel() for t in held if isinstance(t, torch.Tensor))
    if needed > free_bytes(caller.device):
        return None
    try:
        if caller.module is not None:
            model = module = copy.deepcopy(caller.module).double()
        found = caller(model, module, wide=True)
        same = all(found.values[i].shape == w.shape for i, w in zip(keep, want, strict=True))
    except Exception:  # it casts explicitly, holds tensors, cannot be copied ...
        return None
    return found if same else None


def _largest(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest absolute difference of finite values."""
    if not got.numel():
        return 0.0
    if got.is_complex():
        got, want = torch.view_as_real(got.resolve_conj()), torch.view_as_real(want.resolve_conj())
    difference = (got.double() - want.double()).abs()
    return float(difference[difference.isfinite()].max()) if bool(difference.isfinite().any()) else 0.0


# -- how long does a call take? ---------------------------------------------------------------------
def _times(caller: Caller, compiled: Any, notes: list[str]) -> list[dict[str, Any]]:
    """Eager and reflib, interleaved: by the host's clock, and on a GPU also without host time."""
    from reflib.lab.machine import busy
    from reflib.lab.measuring import time_cases
    from reflib.lab.timing import Samples

    cases = {"eager": stepper(caller, caller.subject.model), "reflib": stepper(caller, compiled)}
    rows: list[dict[str, Any]] = []
    for clock in ("wall", "graph") if caller.device.type == "cuda" and not caller.backward else ("wall",):
        try:
            with caller.restored():
                found = time_cases(cases, clock, "warm", ROUNDS, BUDGET_S, caller.device)
        except Exception as error:
            notes.append(f"Not timed by {clock}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        for case, result in found.items():
            if isinstance(result, Samples):
                rows.append(_row(case, result))
            else:
                rows.append({"case": case, "clock": clock, "status": result.status, "note": result.note})
    if rows and (warning := busy()):
        notes.append(f"While this was timed {warning}.")
    return rows


def _ranking(caller: Caller, compiled: Any, trial: Trial) -> Ranking:
    """Each kernel beside its floor, by the limits of this device."""
    from reflib.lab import ceilings

    graphs, seen = trial.graphs, []
    try:
        with caller.restored():
            seen = recorded_calls(stepper(caller, compiled), graphs, KERNEL_ROUNDS)
        return ranking(graphs, seen, ceilings.measured(caller.device, product_dtype(graphs)))
    except Exception as error:
        trial.notes.append(f"Kernels were not timed: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        return ranking(graphs, seen, data_sheet(graphs))


def stepper(caller: Caller, fn: Callable[..., Any]) -> Callable[[], Any]:
    """A function to time, which uses the same arguments for each call."""
    args, kwargs = caller.arguments()
    return lambda: caller.step(fn, args, kwargs, caller.module)


def _row(case: str, samples: Any) -> dict[str, Any]:
    return {"case": case, "clock": samples.clock, "status": "ok", "note": samples.note,
            "us": samples.median * 1e6, "spread_us": samples.spread * 1e6}  # fmt: skip


_PEER = """
import torch
from reflib.lab.report.subject import load
from reflib.lab.report.trial import Caller, stepper

def make(device, dtype, load_args, backward, seed, mode, dynamic):
    subject = load(*load_args)
    compiled = torch.compile(subject.model, backend="inductor", mode=mode, dynamic=dynamic)
    return stepper(Caller(subject, backward, seed), compiled)
"""


def _peer(name: str, request: ReportRequest, device: torch.device) -> dict[str, Any]:
    """Time TorchInductor on the same file, in a separate process because it may crash."""
    from reflib.lab.measuring import time_cases
    from reflib.lab.peers import peer
    from reflib.lab.timing import Samples

    mode = "max-autotune" if name == "max-autotune" else None
    loaded = [request.spec, request.inputs, list(request.shapes), request.device, request.seed]
    case = peer(_PEER, timeout_s=PEER_S, load_args=loaded, backward=request.backward, seed=request.seed, mode=mode,
                dynamic=request.dynamic)  # fmt: skip
    label = "inductor" if name == "inductor" else "inductor, max-autotune"
    found = time_cases({label: case}, "wall", "warm", ROUNDS, BUDGET_S, device)[label]
    if isinstance(found, Samples):
        return _row(label, found)
    return {"case": label, "clock": "wall", "status": found.status, "note": found.note}
