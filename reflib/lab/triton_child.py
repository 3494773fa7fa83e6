"""Child process of `lab.run_triton`: `TRITON_INTERPRET=1 python -m reflib.lab.triton_child JOB`.

Adds what the interpreter lacks: libdevice (as torch functions), reductions with a custom combine function (as a tree
of whole-array operations), products of bfloat16, and for split-K waiting on memory words and early kernel starts.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch


def main(job: Path) -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    torch.set_num_threads(1)
    complete_the_interpreter()
    flat, launches = torch.load(job)
    for number, (name, source, programs, args, constants) in enumerate(launches):
        values = [_argument(flat, a) for a in args]
        path = job.with_name(f"kernel_{number}.py")
        path.write_text(source, encoding="utf-8")
        names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
        exec(compile(source, str(path), "exec"), names)
        with np.errstate(all="ignore"):
            names[name][(programs,)](*values, **constants)
    torch.save(flat, job)


def _argument(flat: dict[int, torch.Tensor], plain: Any) -> Any:
    """A number, a tensor, or a tensor with the shape of a block: a descriptor."""
    if not isinstance(plain, tuple):
        return plain
    (storage, *place), *block = plain
    tensor = _tensor(flat[storage].untyped_storage(), *place)
    if not block:
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, *block)


def _tensor(storage: Any, dtype: str, shape: Any, stride: Any, offset: int) -> torch.Tensor:
    return torch.empty(0, dtype=getattr(torch, dtype)).set_(storage, offset, shape, stride)


_EXTRA = {"rint": torch.round, "fmod": torch.fmod, "fast_dividef": torch.div, "fast_log2f": torch.log2}


def complete_the_interpreter() -> None:
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    from reflib.ir.ops import OPS

    functions = {n: s.meaning for n, s in OPS.items() if s.kind == "float"}
    for name, fn in (functions | _EXTRA).items():
        if hasattr(libdevice, name):
            setattr(libdevice, name, _as_libdevice(fn))
    interpreter.ReduceOps.generic_reduce = _tree_reduce
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.create_fma = _fma
    interpreter.InterpreterBuilder.create_si_to_fp = _from_integer
    tl.inline_asm_elementwise = _assembly
    cuda: Any = importlib.import_module("triton.language.extra.cuda")
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """Rounded once; NumPy has none, but float64 has room for a product of two float32."""
    from triton.runtime import interpreter

    with np.errstate(all="ignore"):
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)


def _from_integer(self: Any, x: Any, to: Any) -> Any:
    """To bfloat16 by way of float32: the interpreter would take the number for its bits."""
    import triton.language as tl

    return self.cast_impl(self.cast_impl(x, tl.float32) if to.scalar == tl.bfloat16 else x, to)


def _as_libdevice(fn: Any) -> Any:
    import triton.language as tl
    from triton.runtime import interpreter

    def call(*args: Any) -> Any:
        first = next(a for a in args if hasattr(a, "handle"))  # other arguments may be numbers
        arrays = [torch.from_numpy(np.array(a.handle.data if hasattr(a, "handle") else a)) for a in args]
        return tl.core.tensor(interpreter.TensorHandle(fn(*arrays).numpy(), first.handle.dtype), first.type)

    return call


def _dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """A product for bfloat16 and 8-bit floats: the interpreter stores their raw bits and would multiply those."""
    import triton.language as tl
    from triton.runtime import interpreter

    stored_as = {
        tl.bfloat16: (np.int16, torch.bfloat16), tl.float8e4nv: (np.uint8, torch.float8_e4m3fn),
        tl.float8e5: (np.uint8, torch.float8_e5m2),
    }  # fmt: skip

    def numbers(x: Any) -> Any:
        if x.dtype.scalar not in stored_as:
            return x.data
        bits, dtype = stored_as[x.dtype.scalar]
        return torch.from_numpy(np.array(x.data).view(bits)).view(dtype).float().numpy()

    left, right = map(numbers, (a, b))
    return interpreter.TensorHandle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _assembly(asm: str, constraints: str, args: list[Any], dtype: Any, **_: Any) -> Any:
    """Replaces inline assembly: of packed bytes, and what waits for memory words. The interpreter runs programs
    sequentially in order of their ids, and the waiting ones come last."""
    import triton.language as tl
    from triton.runtime import interpreter

    from reflib.generate.packed_bytes import MEANING

    if asm in MEANING:
        values = [a.to(tl.float32) if a.dtype == tl.bfloat16 else a for a in args]
        made = MEANING[asm](*(torch.from_numpy(np.array(v.handle.data)) for v in values))
        if dtype == tl.bfloat16:  # of which the interpreter stores the bits
            made = made.bfloat16().view(torch.uint16)
        return tl.core.tensor(interpreter.TensorHandle(made.numpy(), dtype), tl.block_type(dtype, list(made.shape)))
    assert "ld.relaxed" in asm, "unknown assembly"
    words = tl.load(args[0])
    assert (words.handle.data != 0).all(), "a part is missing"
    return words


def _tree_reduce(self: Any, inputs: Any) -> Any:
    arrays = [x.handle.data for x in inputs]
    axis, types = self.axis, [x.dtype for x in inputs]
    while arrays[0].shape[axis] > 1:
        half = arrays[0].shape[axis] // 2
        left = [self.to_tensor(np.take(a, range(half), axis), t) for a, t in zip(arrays, types, strict=True)]
        right = [self.to_tensor(np.take(a, range(half, 2 * half), axis), t) for a, t in zip(arrays, types, strict=True)]
        out = self.combine_fn.fn(*left, *right)
        arrays = [o.handle.data for o in (out if isinstance(out, tuple) else (out,))]
    if not self.keep_dims:
        arrays = [np.squeeze(a, axis) for a in arrays]
    return [self.to_tensor(a, t) for a, t in zip(arrays, types, strict=True)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
