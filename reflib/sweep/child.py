"""One step of a model by one compiler, and by eager, in a process of its own: ``python -m reflib.sweep.child FOLDER``.

FOLDER has ``job.json`` (written by ``run.py``) and empty caches; a line per backend is appended to ``results.jsonl``: a
status, and one number per metric. In order: a reference in float64, eager's results and their error; then per backend
its first step, whose seconds are the cold compile (with what it imports); its error; peak memory and kernels; then,
alone on the device, the times. After a backend that failed the process ends, for it may leave anything behind:
``run.py`` starts another one for what is left.

**Step.** Inference: ``model(*inputs)``. Training: that, and the gradients of every parameter, from fixed random
gradients of the results. Neither optimizer nor loss: they would be the same for every model.

**Error.** A tensor's is |got - exact| / |exact|, in root mean squares; where |exact| is under a thousandth of the
median of the step's results (of its gradients, for a gradient), that counts instead: a gradient that is zero in exact
arithmetic has no relative error. Weights and inputs are rounded to the dtype before the reference is computed; tf32 is
off. Reported is the median tensor's. A step is **inaccurate**, and says so, if a tensor's error is over twice eager's
(or twice the median of eager's tensors, if that is more) plus a floor. It is **wrong**, and not timed, if an error is
over four times that plus 0.1, or if a result has another number of tensors, shape or dtype.

**Times.** ``wall`` or ``events``: calls as a user makes them, launches included. ``graph``: the step captured as a CUDA
graph, forward and backward on one stream, and replayed: the device's time alone. Others compile meanwhile, but all that
keeps the device busy (the reference, and times) waits for the lock of the sweep; all but the first step, in which a
compiler may measure too. It made one in six of a sweep's times up to three times as long. So each clock has three
windows, and the one with the least median counts. A graph's replays vary by under 1% when nothing else runs, and take
no longer than calls do: it has more windows until both hold and the two least medians agree, and a note if they never
did. (Two processes that keep the device busy in turns make replays three times as long, all by the same factor.)
"""

import contextlib
import copy
import fcntl
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reflib.lab.children import own_caches

Job = dict[str, Any]
WINDOWS, ROUNDS, SECONDS = 3, 5, 0.15  # per clock
MOST, STEADY = 12, 0.02  # windows of graph replays; of a median: within one (interquartile range), from one to the next
KEPT = 2 << 30  # bytes of exact tensors that stay on the device, per process


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    own_caches(folder / "caches")
    with open(folder / "results.jsonl", "a", encoding="utf-8") as file:
        for result in results(job):
            file.write(json.dumps(result) + "\n")
            file.flush()
    sys.stdout.flush()
    os._exit(0)  # a compiler's own pool of processes is ended by our parent, at once


def results(job: Job) -> Iterator[dict[str, Any]]:
    """{status, note, values: {metric: ...}} per backend, to the first that is not ok. Errors become a status."""
    from reflib.lab.timing import is_out_of_memory
    from reflib.sweep.model import models

    model = {m.name: m for m in models(job["models"])}[job["model"]]
    task: Task | None = None
    for backend in job["backends"]:
        values: dict[str, Any] = {}
        try:
            try:
                task = task or Task(job, *build(model, job))
            except (ImportError, AttributeError) as error:
                if not model.needs:
                    raise
                yield {"status": "not installed", "note": brief(error), "values": {}}
                return
            status, note = measure(task, backend, values)
        except Exception as error:
            status, note = "out of memory" if is_out_of_memory(error) else "failed", brief(error)
        yield {"status": status, "note": note, "values": values}
        if status != "ok":
            return


def brief(error: BaseException) -> str:
    """One line; what a backend raised is inside what Dynamo raises."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0][:160] if lines else ''}".removesuffix(": ")


def build(model: Any, job: Job) -> tuple[Any, list[Any]]:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    module, inputs = model.build(job["real"])
    dtype = getattr(torch, job["dtype"])
    module.to(device=job["device"], dtype=dtype).train(job["mode"] == "training")
    return module, [converted(x.to(job["device"]), dtype) for x in inputs]


def converted(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if x.is_floating_point() else x


Step = Callable[[], tuple[list[Any], list[Any]]]


def stepper(call: Callable[..., Any], module: Any, inputs: Sequence[Any], training: bool) -> Step:
    """A function that returns the results, and the gradients (None for a parameter without one)."""
    import torch
    from torch.utils._pytree import tree_leaves

    weights = [p for p in module.parameters() if p.requires_grad]
    given: list[Any] = []

    def forward() -> list[Any]:
        return [x for x in tree_leaves(call(*inputs)) if isinstance(x, torch.Tensor)]

    def inference() -> tuple[list[Any], list[Any]]:
        with torch.no_grad():
            return forward(), []

    def train() -> tuple[list[Any], list[Any]]:
        results = forward()
        ends = [x for x in results if x.requires_grad]
        if not given:  # drawn where they are used: 64 million numbers take a CPU 0.6 s, and all others wait
            random = torch.Generator(ends[0].device).manual_seed(1)
            given.extend(torch.randn(x.shape, generator=random, device=x.device).bfloat16().to(x) for x in ends)
        return [x.detach() for x in results], list(torch.autograd.grad(ends, weights, given, allow_unused=True))

    return train if training else inference


class Task:
    """A model's step, and what all backends are compared with. More than ``KEPT`` of exact tensors wait on the host."""

    def __init__(self, job: Job, module: Any, inputs: list[Any]) -> None:
        import torch

        from reflib.timing import synchronize

        self.job, self.module, self.inputs = job, module, inputs
        self.device, self.training = torch.device(job["device"]), job["mode"] == "training"
        with alone(job):
            exact, self.wide = reference(module, inputs, self.training)
            want = stepper(module, module, inputs, self.training)()
            self.own, self.facts = errors(want, exact), facts(want)
            size = sum(x.numel() * x.itemsize for part in exact for x in part if x is not None)
            place = self.device if size <= KEPT else torch.device("cpu")
            self.exact = tuple([x if x is None else x.to(place) for x in part] for part in exact)
            synchronize(self.device)
            del exact, want
            torch.cuda.empty_cache()  # other processes' references need that memory too


def measure(task: Task, backend: str, values: dict[str, Any]) -> tuple[str, str]:
    """Fills ``values``; returns (status, note)."""
    import torch

    from reflib.timing import synchronize

    job, device = task.job, task.device
    values["eager's error"] = statistics.median(task.own) if task.own else 0.0
    call, kernels = COMPILERS[backend](task.module)
    step = stepper(call, task.module, task.inputs, task.training)
    synchronize(device)
    start = time.perf_counter()
    got = step()
    synchronize(device)
    if backend != "eager":
        values["cold compile"] = time.perf_counter() - start
        values["graph breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
    if facts(got) != task.facts:
        return "wrong", "the results differ from eager's in number, shape or dtype"
    with alone(job):
        off = errors(got, task.exact)
    values["error"] = statistics.median(off) if off else 0.0
    del got
    verdict, why = judged(off, task.own, job["dtype"], task.wide)
    if verdict == "wrong":
        return verdict, why
    values["peak memory"], values["kernels"] = on_gpu(job, step, device) if device.type == "cuda" else (None, kernels())
    notes = [f"inaccurate: {why}" if why else "", "" if task.wide else "reference in float32"]
    return timed(job, step, device, values, [note for note in notes if note])


def reference(module: Any, inputs: Sequence[Any], training: bool) -> tuple[Any, bool]:
    """(the step's tensors, whether in float64). In float32 where an op refuses float64, as grouped products do."""
    import torch

    def exact(dtype: Any) -> Any:
        wide = copy.deepcopy(module).to(dtype)
        return stepper(wide, wide, [converted(x, dtype) for x in inputs], training)()

    try:
        return exact(torch.float64), True
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return exact(torch.float32), False


# -- errors -----------------------------------------------------------------------------------------
def facts(tensors: tuple[list[Any], list[Any]]) -> list[Any]:
    return [[x if x is None else (tuple(x.shape), x.dtype) for x in part] for part in tensors]


def errors(got: Sequence[list[Any]], exact: Sequence[list[Any]]) -> list[float]:
    """One per tensor, see the module. Of integers: the share that differs."""
    found = []
    for part, right in zip(got, exact):
        pairs = [(g, e.to(g.device)) for g, e in zip(part, right) if e is not None and e.numel()]
        norms = [float(e.double().square().mean().sqrt()) for _, e in pairs]
        typical = statistics.median(norms) if norms else 0.0
        for (g, e), norm in zip(pairs, norms):
            if e.is_floating_point():
                scale = max(norm, 1e-3 * typical) or 1.0
                found.append(float((g.double() - e.double()).square().mean().sqrt()) / scale)
            else:
                found.append(float((g != e).double().mean()))
    return found


def judged(off: Sequence[float], own: Sequence[float], dtype: str, wide: bool = True) -> tuple[str, str]:
    """("ok", ""), ("inaccurate", the worst tensor) or ("wrong", the first such tensor). ``wide``: the reference is in
    float64; else eager's own error may be zero."""
    import torch

    from reflib.autotune.correct import BROKEN, FLOOR

    floor, usual = FLOOR[getattr(torch, dtype)] * (1 if wide else 4), statistics.median(own) if own else 0.0
    worst, found = 1.0, ("ok", "")
    for number, (mine, eager) in enumerate(zip(off, own)):
        what, typical = f"tensor {number} of {len(off)}: error {mine:.2g}, eager's {eager:.2g}", max(eager, usual)
        if not mine <= 4 * typical + BROKEN:  # NaN never passes
            return "wrong", what
        if mine / (2 * typical + floor) > worst:
            worst, found = mine / (2 * typical + floor), ("inaccurate", what)
    return found


# -- compilers: module -> (callable, number of generated kernels) -------------------------------------
Compiled = tuple[Callable[..., Any], Callable[[], int | None]]


def eager(module: Any) -> Compiled:
    return module, lambda: None


def by_reflib(module: Any, **options: Any) -> Compiled:
    """``reflib.compile``; its stages are kept."""
    import torch

    from reflib.fast_path import add_fast_path
    from reflib.options import Options
    from reflib.pipeline import Backend, Stages

    seen: list[Stages] = []
    backend = Backend(Options(**options), seen.append)
    call = add_fast_path(torch.compile(module, backend=backend, dynamic=False), backend)
    return call, lambda: sum(len(stages.kernels or ()) for stages in seen)


def inductor(module: Any, **options: Any) -> Compiled:
    import torch

    def kernels() -> int:
        from torch._inductor import metrics

        return metrics.generated_kernel_count

    return torch.compile(module, dynamic=False, **options), kernels


COMPILERS: dict[str, Callable[[Any], Compiled]] = {
    "eager": eager, "TorchInductor": inductor, "reflib": by_reflib,
    "max-autotune": partial(inductor, mode="max-autotune-no-cudagraphs"),
    "numerics=eager": partial(by_reflib, numerics="eager"), "batch_invariant": partial(by_reflib, batch_invariant=True),
    "autotune=blocking": partial(by_reflib, autotune="blocking"),
}  # fmt: skip


# -- the device -------------------------------------------------------------------------------------
@contextlib.contextmanager
def alone(job: Job) -> Iterator[None]:
    """Hold the sweep's lock, as all that works on the device does but for compiling: nothing runs beside what is timed.
    The system releases it when this process dies."""
    with open(job["lock"], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def on_gpu(job: Job, step: Step, device: Any) -> tuple[float, int]:
    """(peak MiB of a step beyond what was there before it, kernels that a step launches)."""
    import tempfile

    import torch
    from torch.profiler import ProfilerActivity, profile

    from reflib.lab.peak_memory import peak_bytes

    with profile(activities=[ProfilerActivity.CUDA]):
        pass  # (a first one takes a second, for which nobody needs to wait)
    with alone(job):
        peak = peak_bytes(step, device) / 2**20
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return peak, sum(event.get("cat") == "kernel" for event in events)


def timed(job: Job, step: Step, device: Any, values: dict[str, Any], notes: list[str]) -> tuple[str, str]:
    from reflib.lab.measuring import time_cases
    from reflib.lab.timing import Samples

    values["times"] = {}
    with alone(job):
        # graphs last: a capture that fails can leave the random generator unusable
        for clock in ("events", "graph") if device.type == "cuda" else ("wall",):
            windows, calls = list[Samples](), values["times"].get("events", (math.inf,))[0] * 1e-6
            gc.collect()  # autograd's nodes of earlier steps, in cycles, would tie a capture to the default stream
            while len(windows) < WINDOWS or clock == "graph" and unsteady(windows, calls) and len(windows) < MOST:
                found = time_cases({"step": step}, clock, "warm", ROUNDS, SECONDS, device)["step"]
                if not isinstance(found, Samples):
                    return found.status, found.note
                windows.append(found)
            found = min(windows, key=lambda samples: samples.median)
            if clock == "graph" and unsteady(windows, calls) and not found.note:
                notes.append(f"unsteady: the device was busy with something else during {len(windows)} windows")
            if found.note:
                notes.append(found.note)
            else:
                values["times"][clock] = (found.median * 1e6, found.spread * 1e6)
    return "ok", "; ".join(notes)


def unsteady(windows: Sequence[Any], calls: float = math.inf) -> bool:
    """``calls``: the least median of plain calls, in seconds."""
    first, second = sorted(windows, key=lambda samples: samples.median)[:2]
    off = max(first.spread, second.median - first.median, first.median - calls)  # seconds
    return off > STEADY * first.median


if __name__ == "__main__":
    main(Path(sys.argv[1]))
