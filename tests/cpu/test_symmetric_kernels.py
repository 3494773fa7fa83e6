"""The Triton kernels over symmetric storage: interpreted, and compiled ahead of time."""

from typing import Any

import pytest

from tests.interpreter import interpreted

pytest.importorskip("triton")


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_they_compute_sums_and_notice_what_is_different(size: int) -> None:
    assert interpreted("symmetric_interpreting.py", "0", str(size)).strip() == ""


MEETINGS = {"push": 1, "two_shot": 2, "landed": 1, "meet_alone": 1}


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", MEETINGS)
def test_they_compile_ahead_of_time(arch: int, name: str) -> None:
    """Whole vectors are moved; a flag is released and acquired by all GPUs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from reflib.ranks import kernels

    kernel, target = getattr(kernels, name), GPUTarget("cuda", arch, 32)
    names = kernel.arg_names
    for of, size, wide in (
        ("fp32", 4, kernels.tl.float32),
        ("bf16", 2, kernels.tl.float32),
        ("i64", 8, kernels.tl.int64),
    ):
        types = {"table": "*i64", "x": f"*{of}", "out": f"*{of}", "said": "i64"}
        types |= dict.fromkeys(("n", "share", "part", "stride"), "i32")
        constants: dict[str, Any] = {
            "COPY": True, "RANK": 1, "WORLD": 2, "FRONT": kernels.front(2), "BLOCK": kernels.BYTES // size,
            "POLLS": 1 << 30, "WIDE": wide, "SUMS": 88 << 20, "HALF": 12 << 20, "TURNS": 112 << 20, "SLOT": 8 << 20,
            "LANDING": 64 << 20, "NUMBER": 2,
        }  # fmt: skip
        source = ASTSource(
            kernel,
            {n: types.get(n, "constexpr") for n in names},
            {(i,): constants[n] for i, n in enumerate(names) if n in constants},
            {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in types and n != "said"},
        )
        asm = triton.compile(source, target=target, options={"num_warps": 16, "debug": True}).asm
        ptx = asm["ptx"]
        assert asm["cubin"] and "multimem" not in ptx
        assert name == "meet_alone" or "ld.global.v4.b32" in ptx or "ld.global.v2.b64" in ptx
        assert ptx.count("atom.global.sys.release.exch") == MEETINGS[name]
        assert ptx.count("atom.global.sys.acquire.exch") == 2 * MEETINGS[name]
