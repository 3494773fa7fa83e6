"""One sample through ``torch.compile``, judged beside eager."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reflib.ir.program import Extern
from tests import checking
from tests.checking import Outcome
from tests.stopping import Until

from .samples import Case

# what these return has a shape, strides and a dtype, but no values
UNDEFINED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
# without a dropout its seed and offset are memory that is not filled
DROPOUTS = {"torch.ops.aten._efficient_attention_forward": (2, 3)}
# which one of equal numbers these find is left open; with the position of ``dim`` among their arguments
TIES = {"topk": 2, "kthvalue": 2, "median": 1, "nanmedian": 1, "mode": 1}
REMAINDERS = {"__rmod__": 0, "remainder": 1, "fmod": 1, "floor_divide": 1}  # with the position of the divisor


@dataclass
class Result:
    """``status``: ok, wrong, error (something raised), excluded (aot_eager fails as well, and what it gives is what
    reflib gives), skip (eager itself raises); and from outside: crash, timeout."""

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
        actual = checking.call(compiled(case, backend), case.args, backward=case.backward)
        result.status, result.why = judge(case, actual, eager, wide)
        for s in stages:
            _count(s, result)
    if case.device == "cuda":
        torch.cuda.synchronize()  # where a kernel has spoiled the context, nothing more can run in this process
    if result.status in ("wrong", "error"):
        say(at=case.key, phase="aot_eager")
        theirs = checking.call(compiled(case, "aot_eager"), case.args, backward=case.backward)
        status, why = judge(case, theirs, eager, wide)
        if status == "ok" or (theirs.error is None) != (actual.error is None):
            pass
        elif theirs.error is not None or judge(case, actual, theirs, wide)[0] == "ok":
            result.status, result.why = "excluded", f"{result.why} || aot_eager: {why}"
    result.seconds = round(time.perf_counter() - start, 3)
    return result


def compiled(case: Case, backend: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(case.fn, backend=backend, dynamic=False)


def judge(case: Case, actual: Outcome, eager: Outcome, wide: Outcome) -> tuple[str, str]:
    """(status, why) of one sample."""
    if actual.error is not None:
        return "error", checking.wrong(actual, eager)[0]
    if (open_ := undefined(case)) is not False:
        actual.leaves, eager.leaves = ([_filled(t, open_) for t in o.leaves] for o in (actual, eager))
    for i in () if case.named.get("dropout_p") else DROPOUTS.get(case.key.split("|")[0], ()):
        actual.leaves[i], eager.leaves[i] = _filled(actual.leaves[i], True), _filled(eager.leaves[i], True)
    reference = _usable(case, eager, wide)
    problems = checking.wrong(actual, eager, reference)
    if problems and reference is None:
        problems = checking.wrong(actual, eager, checking.call(case.fn, _nudged(case.args), backward=case.backward))
    if problems and case.key.split("|")[0] in TIES and len(actual.leaves) == 2 == len(eager.leaves):
        instead = found_instead(case, actual.leaves[1], eager)
        problems = problems if instead is eager else checking.wrong(actual, instead, reference)
    return ("wrong", "; ".join(problems)) if problems else ("ok", "")


def undefined(case: Case) -> Any:
    """Which values of the results no op promises: all of them, those where this mask is set, or none (False). On a GPU
    integers divided by zero are no error, and may be anything."""
    op, operands = case.key.split("|")[0], case.operands
    if op in UNDEFINED or op not in REMAINDERS or case.device != "cuda":
        return op in UNDEFINED
    floats = any(isinstance(x, float) or isinstance(x, torch.Tensor) and x.is_floating_point() for x in operands)
    return not floats and torch.as_tensor(operands[REMAINDERS[op]], device=case.device) == 0


def found_instead(case: Case, found: Any, eager: Outcome) -> Outcome:
    """What eager returns if it finds the numbers at ``found``: ``eager``, unless they equal those that it found."""
    x, values, position = case.operands[0], eager.leaves[0], TIES[case.key.split("|")[0]]
    dim = case.operands[position] if len(case.operands) > position else case.named.get("dim", -1)
    if found.shape != eager.leaves[1].shape or found.dtype != torch.int64 or not x.numel():
        return eager
    n = x.shape[dim] if x.dim() else 1
    ordered = found.sort(dim)[0] if found.dim() == x.dim() and x.dim() else found
    twice = ordered.dim() == x.dim() > 0 and bool((ordered.diff(dim=dim) == 0).any())
    if twice or not bool(((found >= 0) & (found < n)).all()):
        return eager

    def at(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        where = found if found.dim() == x.dim() else found.unsqueeze(dim)
        return x.gather(dim, where).reshape(found.shape), found

    theirs = checking.call(at, case.args, backward=case.backward)
    if theirs.error is not None or not torch.equal(theirs.leaves[0].nan_to_num(), values.nan_to_num()):
        return eager
    return replace(eager, leaves=[values, found], grads=theirs.grads)


def _nudged(args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Other last bits: how far results of a random op move with them is what can be asked of them."""
    generator = torch.Generator().manual_seed(1)

    def one(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point() or t.layout != torch.strided:
            return t
        sign = torch.randint(0, 2, t.shape, generator=generator).to(t) * 2 - 1
        return (t.detach() * (1 + 2 * torch.finfo(t.dtype).eps * sign)).requires_grad_(t.requires_grad)

    return [one(t) for t in args]


def _filled(t: Any, where: Any) -> Any:
    return t.masked_fill_(torch.as_tensor(where, device=t.device), 1) if isinstance(t, torch.Tensor) else t


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
