"""One sample through ``torch.compile``, judged beside eager."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from reflib.ir.program import Extern
from tests import checking
from tests.checking import Outcome
from tests.stopping import Until

from .samples import Case

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
    kernels: int = 0
    calls: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def run_case(case: Case, say: Callable[..., None], until: str = "wrap") -> Result:
    """``say(at=key, phase=...)`` comes before each risky step. ``until``: ``lower``, ``fuse`` or ``schedule`` judge
    what the interpreter makes of the program after that stage."""
    start, result = time.perf_counter(), Result(case.key, "ok")
    say(at=case.key, phase="run")
    eager = checking.call(case.fn, case.args, backward=case.backward)
    if eager.error is not None:
        result.status, result.why = "skip", f"eager: {brief(eager.error)}"
    else:
        wide = checking.call(case.fn, case.args, backward=case.backward, wide=True)
        stages: list[Any] = []
        backend = Until(until, stages.append, compile_threads=1, fallback_random=True)
        result.status, result.why = judge(case, compiled(case, backend), eager, wide)
        for s in stages:
            _count(s, result)
    if case.device == "cuda":
        torch.cuda.synchronize()  # where a kernel has spoiled the context, nothing more can run in this process
    if result.status in ("wrong", "error"):
        say(at=case.key, phase="aot_eager")
        wide = checking.call(case.fn, case.args, backward=case.backward, wide=True)
        status, why = judge(case, compiled(case, "aot_eager"), eager, wide)
        if status != "ok":
            result.status, result.why = "excluded", f"{result.why} || aot_eager: {why}"
    result.seconds = round(time.perf_counter() - start, 3)
    return result


def compiled(case: Case, backend: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(case.fn, backend=backend, dynamic=False)


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


def _count(stages: Any, result: Result) -> None:
    if stages.scheduled is None:
        return
    externs = [n for n in stages.scheduled.nodes if isinstance(n, Extern)]
    result.kernels += len(stages.scheduled.nodes) - len(externs)
    names = Counter({str(getattr(n.target, "__name__", n.target)): n.reason for n in externs})
    result.calls.update({k: str(v) for k, v in names.items()})


def brief(e: BaseException) -> str:
    text = str(e)
    if "error: " in text:  # a C++ compiler's
        text = text[text.index("error: ") :]
    return " ".join(text.split())[:400]
