"""The Triton kernels over symmetric storage: interpreted, and compiled ahead of time."""

from typing import Any

import pytest

from tests.interpreter import interpreted

pytest.importorskip("triton")


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_they_compute_sums_and_notice_what_is_different(size: int) -> None:
    assert interpreted("symmetric_interpreting.py", "0", str(size)).strip() == ""


MEETINGS = {"pull": 2, "two_shot": 2, "landed": 1, "meet_alone": 1}
VALUES = {"fp32": (4, "fp32"), "bf16": (2, "fp32"), "i64": (8, "int64")}  # bytes, and in what they are added


def ptx_of(name: str, arch: int, of: str, size: int = 2, **more: Any) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from reflib.ranks import kernels

    kernel, (nbytes, wide) = getattr(kernels, name), VALUES[of]
    names, slot = kernel.arg_names, kernels.AREA // (2 * size)
    types = {"memory": "*u8", "table": "*i64", "said": "i64"} | dict.fromkeys(("x", "out"), f"*{of}")
    types |= dict.fromkeys(("n", "share", "part", "total", "stride", "apart"), "i32")
    constants: dict[str, Any] = {
        "COPY": True, "RANK": 1, "WORLD": size, "FRONT": kernels.front(size), "BLOCK": kernels.BYTES // nbytes,
        "POLLS": 1 << 30, "WIDE": getattr(kernels.tl, wide.replace("fp", "float")), "SUMS": 88 << 20, "HALF": 12 << 20,
        "LANDING": 64 << 20, "NUMBER": 2,
    } | more  # fmt: skip
    if name == "flagged":
        constants |= {"SLOT": slot, "TAKE": kernels.take(size, slot), "FIRST": 4096, "AREA": kernels.AREA}
        constants |= {"BLOCK": kernels.WORDS}
    source = ASTSource(
        kernel,
        {n: types.get(n, "constexpr") for n in names},
        {(i,): constants[n] for i, n in enumerate(names) if n in constants},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in types and n != "said"},
    )
    options = {"num_warps": 16, "debug": True, "sanitize_overflow": False}
    asm = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm
    assert asm["cubin"] and "multimem" not in asm["ptx"]
    return asm["ptx"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", MEETINGS)
def test_they_compile_ahead_of_time(arch: int, name: str) -> None:
    """Whole vectors are moved; a flag is released and acquired by all GPUs."""
    for of in VALUES:
        ptx = ptx_of(name, arch, of)
        assert name == "meet_alone" or "ld.global.v4.b32" in ptx or "ld.global.v2.b64" in ptx
        assert ptx.count("st.release.sys") == ptx.count("ld.acquire.sys") == MEETINGS[name]


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("two", [False, True])
def test_words_with_flags_need_no_meeting(size: int, two: bool) -> None:
    """Nothing is fenced; all ranks' words are asked for before one is looked at."""
    for of in ("fp32", "bf16"):
        ptx = ptx_of("flagged", 90, of, size, TWO=two)
        assert "atom." not in ptx and "fence" not in ptx and "membar" not in ptx
        assert ptx.count("st.relaxed.sys.global.b64") == size * (3 if two else 2)
        for loop in ptx.split("next:")[1:]:
            first = loop.partition("setp")[0]
            assert first.count("ld.relaxed.sys.global.b64") == size
