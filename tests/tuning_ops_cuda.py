"""As tuning_ops.py, for a GPU: what goes wrong there goes wrong on the device."""

import sys

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor


@triton.jit
def stray(x):  # type: ignore[no-untyped-def]
    tl.store(x + (1 << 44), 1.0)


@triton.jit
def spin(x):  # type: ignore[no-untyped-def]
    while tl.load(x, volatile=True) == 0.0:
        pass


def _op(name: str, body):  # type: ignore[no-untyped-def]
    def op(a: Tensor, b: Tensor) -> Tensor:
        return body(a, b)

    made = torch.library.custom_op(f"tuning_faults_cuda::{name}", mutates_args=())(op)
    made.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    return made


def _slow(a: Tensor, b: Tensor) -> Tensor:
    for _ in range(50):
        a = a + 0
    return a @ b


def _illegal(a: Tensor, b: Tensor) -> Tensor:
    if "pytest" not in sys.modules:
        stray[(1,)](torch.zeros(1, device=a.device))
    return a @ b


def _hang(a: Tensor, b: Tensor) -> Tensor:
    if "pytest" not in sys.modules:
        spin[(1,)](torch.zeros(1, device=a.device))
    return a @ b


def _memory(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty(1 << 44, device=a.device)[: a.shape[0], None] + a @ b


product = _op("product", _slow)
illegal, hang, memory = (_op(n, f) for n, f in (("illegal", _illegal), ("hang", _hang), ("memory", _memory)))


def good(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def straying(a: Tensor, b: Tensor) -> Tensor:
    return illegal(a, b)


def hanging(a: Tensor, b: Tensor) -> Tensor:
    return hang(a, b)


def starving(a: Tensor, b: Tensor) -> Tensor:
    return memory(a, b)
