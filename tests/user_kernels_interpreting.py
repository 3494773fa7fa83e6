"""Runs compiled programs with Triton kernels of the user's in Triton's interpreter: a program of its own, because the
interpreter must be chosen before Triton is imported. It has the kernels' text only, not the module they are from.

    TRITON_INTERPRET=1 python tests/user_kernels_interpreting.py JOB

JOB, a file: by case, what ``job`` makes of a compiled program. Its results are written over it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch


def job(s: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """The Stages ``s`` of a function, called with ``args``: every launch in order, each as its last variant (which
    assumes nothing)."""
    from reflib.ir.interpret import bind_symbols
    from reflib.ir.program import View, kernel_variants

    program, sizes = s.scheduled, bind_symbols(s.scheduled, args)

    def tensor(b: Any) -> tuple[Any, ...]:
        return tuple(int(e.evaluate(sizes)) for e in b.shape), tuple(int(e.evaluate(sizes)) for e in b.strides), b.dtype

    launches = []
    for node in kernel_variants(program.nodes):
        k = s.kernels[node.variants[-1].kernel.name]
        launches.append((
            k.name, k.source, int(k.grid.evaluate(sizes)), [b for b, _ in k.buffers], [sizes[v.name] for v in k.symbols]
        ))  # fmt: skip
    assert len(launches) == len(program.nodes), [str(n) for n in program.nodes]
    outputs = [(v.buffer, *tensor(v), int(v.offset.evaluate(sizes))) for v in program.outputs if isinstance(v, View)]
    inputs = {n: a for n, a in zip(program.inputs, args) if isinstance(n, str)}
    temps = {n: tensor(b) for n, b in program.buffers.items() if n not in inputs}
    return {"launches": launches, "inputs": inputs, "temps": temps, "outputs": outputs}


def run(case: dict[str, Any], folder: Path) -> list[torch.Tensor]:
    """The results, then the inputs as they are in the end."""
    memory = dict(case["inputs"])
    for name, (shape, strides, dtype) in case["temps"].items():
        memory[name] = torch.empty_strided(shape, strides, dtype=dtype).fill_(77)
    for name, source, grid, buffers, sizes in case["launches"]:
        path = folder / f"{name}.py"
        path.write_text(source)
        names: dict[str, Any] = {"__name__": name}
        exec(compile(source, str(path), "exec"), names)
        xyz = (grid & (2**31 - 1), 1 + (grid >> 31 & 0xFFFF), 1 + (grid >> 47 & 0x7FFF)) if grid >> 62 else (grid,)
        names[name][xyz](*(memory[b] for b in buffers), *sizes)
    return [memory[b].as_strided(*at[:2], at[3]) for b, *at in case["outputs"]] + list(case["inputs"].values())


if __name__ == "__main__":
    from reflib.lab.triton_child import complete_the_interpreter

    complete_the_interpreter()
    torch.set_num_threads(1)
    file = Path(sys.argv[1])
    torch.save({name: run(case, file.parent) for name, case in torch.load(file).items()}, file)
