"""Variances and softmax sums in one pass, in Triton's interpreter: a program of its own, because the interpreter must
be chosen before Triton is imported.

    TRITON_INTERPRET=1 python tests/one_pass_interpreting.py [KIND [name ...]]

Prints one JSON object: by kind, for each case, what is wrong with it, or nothing.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton_programs
from interpreter import answer, told
from one_pass_cases import sum_cases, variance_cases
from triton_cases import Case
from triton_interpreting import run


def outputs(name: str, case: Case) -> dict[str, torch.Tensor]:
    return run(re.sub(r"\W+", "_", name), case)


def variance_problem(name: str, case: Case) -> str:
    """Wrong: off by more than twice what Welford's recurrence along the rows is off by, in the kernel's dtype, and a
    rounding error of the input."""
    outs = outputs(name, case)
    got = outs["out"].double()
    x = case.tensors["x"] if "across=False" in name or "length" in name else case.tensors["x"].t()
    n = (x.shape[1] + 1) // 2 if "masked=True" in name else x.shape[1]
    x = x[:, :n].double()
    exact = (x - x.mean(1, keepdim=True)).square().sum(1) if n else torch.zeros(len(x))
    dtype = case.tensors["out"].dtype
    theirs = _welford(x.to(dtype)).double()
    floor = torch.finfo(dtype).eps * (4 * exact + (exact * x.square().sum(1)).sqrt())  # of a constant row 0
    bad = (got - exact).abs() > 2 * (theirs - exact).abs().max() + floor
    if "constant" in name and "persistent" in name:  # the mean's rounding error, squared
        bad = got > n * (2 * torch.finfo(dtype).eps * x[:, 0]) ** 2
    bad = torch.where(exact.isfinite(), bad, got.isfinite())
    if "sum" in outs and not torch.allclose(outs["sum"], case.expected()["sum"], rtol=1e-4, atol=1e-3, equal_nan=True):
        return f"sums {outs['sum'].tolist()}, want {case.expected()['sum'].tolist()}"
    return f"got {got.tolist()}, want {exact.tolist()}, Welford has {theirs.tolist()}" if bool(bad.any()) else ""


def _welford(x: torch.Tensor) -> torch.Tensor:
    mean, m2 = torch.zeros_like(x[:, 0] if x.shape[1] else x.sum(1)), torch.zeros_like(x.sum(1))
    for k in range(x.shape[1]):
        d = x[:, k] - mean
        mean = mean + d / (k + 1)
        m2 = m2 + d * (x[:, k] - mean)
    return m2


def sum_problem(name: str, case: Case) -> str:
    """Against the definition, as the IR's interpreter has it; not finite where that is not."""
    got, want = outputs(name, case), case.expected()
    wrong = []
    for b, w in want.items():
        g, w = got[b].double(), w.double()
        rtol = 1e-12 if case.tensors["x"].dtype == torch.float64 else 2e-5
        if not torch.allclose(g, w, rtol=rtol, atol=1e-30, equal_nan=True):
            wrong.append(f"{b}: got {g.tolist()}, want {w.tolist()}")
    return "; ".join(wrong)


# -- whole programs ---------------------------------------------------------------------------------
def rand(*shape: int, grad: bool = True, **kw: Any) -> torch.Tensor:
    return (torch.randn(*shape, **kw) * 2 + 3).requires_grad_(grad)


def _hostile_columns(n: int) -> torch.Tensor:
    """An outlier first, a constant, a constant but for its first row, a large mean, rows that grow."""
    x = rand(n, 9, grad=False)
    x[0], x[:, 1], x[1:, 2] = 1e4, 3.3, 7.7
    x[:, 3] += 1e6
    x[:, 4] += torch.arange(n)
    return x


def batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    mean, var = torch.zeros_like(w.detach()), torch.ones_like(w.detach())
    y = F.batch_norm(x, mean, var, w, b, training=True, momentum=0.1)
    return y + (mean + 3 * var)[:, None, None]


def _cross_entropy(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, torch.arange(len(x)) * 7 % x.shape[1])


def _masked(x: torch.Tensor) -> torch.Tensor:
    far = torch.arange(x.shape[1]) % 5 == 0
    return torch.softmax(x.masked_fill(far, float("-inf")), -1)


SHORT = {"persistent_limit": 16}
# name: (function, arguments, options)
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "var, every correction": (
        lambda x: (*(torch.var(x, -1, correction=c) for c in (0, 1, 2.5)), torch.std(x, 0), *torch.var_mean(x)),
        lambda: (rand(7, 203, grad=False),), SHORT,
    ),
    "split rows": (lambda x: torch.var_mean(x, -1), lambda: (rand(3, 16411, grad=False),), {}),
    "split evenly": (lambda x: torch.std_mean(x, -1), lambda: (rand(2, 16384, grad=False),), {}),
    "split columns": (lambda x: torch.var_mean(x, 0), lambda: (rand(1031, 9, grad=False),), {}),
    "split columns, hostile": (lambda x: torch.var_mean(x, 0), lambda: (_hostile_columns(1031),), {}),
    "split, two axes": (lambda x: torch.var_mean(x, (0, 2)), lambda: (rand(3, 2, 4111, grad=False),), {}),
    "batch norm": (batch_norm, lambda: (rand(3, 3, 53, 59), rand(3), rand(3)), {}),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), lambda: (rand(2, 6, 19, 23), rand(6), rand(6)), SHORT),
    "layer norm": (lambda x, w: F.layer_norm(x, (301,), w), lambda: (rand(5, 301), rand(301)), SHORT),
    "softmax": (lambda x: torch.softmax(x, -1), lambda: (rand(5, 333),), SHORT),
    "masked softmax": (_masked, lambda: (rand(5, 333),), SHORT),
    "log softmax": (lambda x: torch.log_softmax(x, -1), lambda: (rand(5, 333),), SHORT),
    "softmax of columns": (lambda x: torch.softmax(x, 0), lambda: (rand(207, 10),), SHORT),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), lambda: (rand(5, 333),), SHORT),
    "cross entropy": (_cross_entropy, lambda: (rand(6, 517),), SHORT),
}  # fmt: skip


def program_problem(name: str, _: Any) -> str:
    name, dynamic = name.rsplit(", ", 1)
    fn, make, options = PROGRAMS[name]
    backend = triton_programs.Interpreted(False, **options)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, dynamic=dynamic == "dynamic")
    torch.manual_seed(0)
    return triton_programs.differences(fn, compiled, make())


def programs() -> dict[str, Callable[[], None]]:
    return {f"{name}, {how}": lambda: None for name in PROGRAMS for how in ("static", "dynamic")}


KINDS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[..., str]]] = {
    "variances": (variance_cases, variance_problem),
    "sums": (sum_cases, sum_problem),
    "programs": (programs, program_problem),
}


def main(kinds: list[str], wanted: list[str]) -> dict[str, dict[str, str]]:
    return {
        kind: {
            name: told(lambda name, make, problem=problem: problem(name, make()), name, make)
            for name, make in cases().items()
            if not wanted or any(w in name for w in wanted)
        }
        for kind, (cases, problem) in KINDS.items()
        if kind in kinds
    }


if __name__ == "__main__":
    answer(main, sys.argv[1:2] or [*KINDS], sys.argv[2:])
