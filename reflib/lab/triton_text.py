"""`lab.run_triton`: runs Triton source on tensors, on a GPU or in Triton's interpreter; `lab.gpu_call` for measuring.

The interpreter must be selected before Triton is imported, so it runs in a separate process, which several launches
share because it takes longer to start than they take.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from reflib.errors import LabError
from reflib.lab.machine import ROOT

if TYPE_CHECKING:
    import torch


class Launch(NamedTuple):
    """`programs` programs of the `@triton.jit` function `name` in `source`, its arguments in order: tensors, numbers,
    Triton's TensorDescriptors. `constants`: by name."""

    name: str
    source: str
    programs: int
    tensors: Sequence[Any]
    num_warps: int = 4
    constants: Mapping[str, Any] = MappingProxyType({})


class Plan(NamedTuple):
    """A launch of a `@triton.jit` function that a notebook defines; calling the plan launches it, on a GPU."""

    kernel: Any
    programs: int
    args: Sequence[Any]
    constants: Mapping[str, Any]

    def __call__(self) -> None:
        self.kernel[(self.programs,)](*self.args, **self.constants)


def run_plans(plans: Sequence[Plan]) -> None:
    """Run the plans in order; they modify their tensors in place. On a CPU they run in Triton's interpreter."""
    if all(t.device.type == "cpu" for p in plans for t in _tensors(p.args)):
        run_triton([
            Launch(p.kernel.__name__, source_of(p.kernel), p.programs, p.args, constants=p.constants) for p in plans
        ])  # fmt: skip
        return
    for plan in plans:
        plan()


class Compiled(NamedTuple):
    """Machine code that was made ahead of time. `texts`: Triton's stages by name ("ttgir", "ptx"); `shared`: bytes."""

    texts: Mapping[str, Any]
    shared: int


def compile_plan(plan: Plan, capability: int = 90) -> Compiled:
    """Compile the plan's launch for an NVIDIA GPU that need not be here. Its pointers and numbers are taken for
    multiples of 16, as those of a launch usually are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {k: v for k, v in plan.constants.items() if k in plan.kernel.arg_names}
    options = {k: v for k, v in plan.constants.items() if k not in constants}
    kinds = [_kind(a) for a in plan.args]
    signature = dict(zip(plan.kernel.arg_names, kinds, strict=False)) | dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds) if not kind.startswith("tensordesc")}
    source = ASTSource(plan.kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(made.asm, made.metadata.shared)


def _kind(value: Any) -> str:
    """Triton's name for an argument's type."""
    if isinstance(value, int):
        return "i32"
    tensor = getattr(value, "base", value)
    name = _KINDS[str(tensor.dtype)]
    block = getattr(value, "block_shape", None)
    return f"*{name}" if block is None else f"tensordesc<{name}[{', '.join(map(str, block))}]>"


_KINDS = {
    "torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.int8": "i8",
}  # fmt: skip


def source_of(kernel: Any) -> str:
    """A module with the kernel and the `@triton.jit` functions that it calls."""
    found: dict[str, str] = {}

    def add(jit: Any) -> None:
        for name in jit.fn.__code__.co_names:
            other = jit.fn.__globals__.get(name)
            if hasattr(other, "fn") and hasattr(other, "arg_names") and name not in found:
                add(other)
        found[jit.__name__] = textwrap.dedent(inspect.getsource(jit.fn))

    add(kernel)
    return "\n\n".join(["import triton\nimport triton.language as tl\n", *found.values()])


def run_triton(launches: Sequence[Launch], timeout_s: float = 300.0) -> None:
    """Run the launches in order; they modify their tensors in place.

    All tensors are on one device. On a CPU, bfloat16 raises LabError (the interpreter has no such type), and each
    program takes at least about a millisecond, so few programs are advisable.
    """
    import torch

    tensors = [t for one in launches for t in _tensors(one.tensors)]
    if not tensors:
        return
    if tensors[0].device.type != "cpu":
        for one in launches:
            gpu_call(one)()
        torch.cuda.synchronize()
        return
    if any(t.dtype == torch.bfloat16 for t in tensors):
        raise LabError("Triton's interpreter has no bfloat16; use float16 or float32")
    _interpret(launches, timeout_s)


def gpu_call(one: Launch) -> Callable[[], None]:
    """A function of no arguments that launches it on the GPU of its tensors, as a case for `lab.measure`."""
    import torch

    kernel = load(one.source, one.name)
    device = _tensors(one.tensors)[0].device
    constants = {"num_warps": one.num_warps, **one.constants}

    def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    def run() -> None:
        if "make_tensor_descriptor" in one.source:  # descriptors are in memory, which Triton asks its caller for
            import triton

            triton.set_allocator(scratch)
        kernel[(one.programs,)](*one.tensors, **constants)

    return run


def load(source: str, name: str) -> Any:
    """The function, imported from a file because Triton reads its source."""
    from reflib import cache

    path = cache.put("kernels", cache.key("lab", source), source.encode(), ".py")
    names: dict[str, Any] = {"__name__": f"reflib_lab_{name}", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), names)
    return names[name]


def _interpret(launches: Sequence[Launch], timeout_s: float) -> None:
    import torch

    tensors = [t for one in launches for t in _tensors(one.tensors)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    flat = {p: torch.empty(0, dtype=torch.uint8).set_(s, 0, (s.nbytes(),), (1,)) for p, s in storages.items()}  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(prefix="reflib-triton-") as folder:
        job = Path(folder) / "job.pt"
        plain = [
            (one.name, one.source, one.programs, [_plain(a) for a in one.tensors], dict(one.constants))
            for one in launches
        ]
        torch.save((flat, plain), job)  # keeps shared storages shared
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        done = subprocess.run(
            [sys.executable, "-m", "reflib.lab.triton_child", str(job)],
            env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
            capture_output=True, text=True, timeout=timeout_s, cwd=folder,
        )  # fmt: skip
        if done.returncode:
            last = "\n".join(done.stderr.strip().splitlines()[-8:])
            raise LabError(f"Triton's interpreter stopped:\n{last}")
        for pointer, after in torch.load(job).items():
            flat[pointer].copy_(after)


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    return [getattr(a, "base", a) for a in args if not isinstance(a, int | float)]


def _plain(value: Any) -> Any:
    """An argument as data: a number, (place,) of a tensor, (place, block) of a descriptor."""
    if isinstance(value, int | float):
        return value
    block = getattr(value, "block_shape", None)
    return (_place(value),) if block is None else (_place(value.base), list(block))


def _place(t: torch.Tensor) -> tuple[int, str, tuple[int, ...], tuple[int, ...], int]:
    dtype = str(t.dtype).removeprefix("torch.")
    return t.untyped_storage().data_ptr(), dtype, tuple(t.shape), tuple(t.stride()), t.storage_offset()
