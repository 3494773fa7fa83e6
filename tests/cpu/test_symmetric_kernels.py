"""The Triton kernels over symmetric storage: interpreted, and compiled ahead of time. They have not run on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.interpreter import interpreted

pytest.importorskip("triton")


def test_they_compute_sums() -> None:
    assert interpreted("symmetric_interpreting.py", "0").strip() == ""


@pytest.mark.parametrize("arch", [80, 90])
def test_they_compile_ahead_of_time(arch: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from reflib.ranks import kernels

    target = GPUTarget("cuda", arch, 32)
    for of, wide in (("fp32", kernels.tl.float32), ("bf16", kernels.tl.float32), ("i64", kernels.tl.int64)):
        signature = {"table": "*i64", "out": f"*{of}", "start": "i64", "n": "i64", "at": "i64", "part": "i64"}
        constants: dict[str, Any] = {"front": 4096, "WORLD": 4, "WIDE": wide, "BLOCK": kernels.BLOCK}
        for kernel in (kernels.add_parts, kernels.gather_parts):
            names = kernel.arg_names
            source = ASTSource(
                kernel,
                {n: signature.get(n, "constexpr") for n in names},
                {(i,): constants[n] for i, n in enumerate(names) if n in constants},
            )
            asm = triton.compile(source, target=target).asm
            assert asm["cubin"] and "multimem" not in asm["ptx"]
