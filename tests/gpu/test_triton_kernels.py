"""Generated Triton on a real GPU: every op and reduction beside eager, every shape of kernel, every variant."""

import functools
from dataclasses import replace

import pytest
import torch
from checking import wrong_values
from triton_cases import (
    BF16,
    F32,
    Case,
    compile_all,
    kernel_cases,
    norm,
    op_cases,
    pointwise,
    rand,
    reduce_cases,
    shifted_windows,
)
from triton_half_cases import HALF, half_case, half_problem

import reflib
from reflib.generate.compile_triton import compile_kernel
from reflib.ir.ops import OPS
from reflib.target import device_target
from reflib.wrap.cuda_launch import load

# Worst error in units in the last place, beside twice eager's own, where it is more than 3.
ULPS = {"pow": 4, "lgamma": 64, "erfc": 16, "tan": 4, "hypot": 4, "sigmoid": 4}


def launch(binary, kernel, tensors: dict[str, torch.Tensor], sizes: dict[str, int]) -> None:
    args = [tensors[b].data_ptr() for b, _ in kernel.buffers] + [sizes[s.name] for s in kernel.symbols]
    load(binary)(torch.cuda.current_stream().cuda_stream, int(kernel.grid.evaluate(sizes)), *args)


def on_gpu(case: Case) -> dict[str, torch.Tensor]:
    """The case's tensors on the GPU, strides kept."""
    out = {}
    for n, t in case.tensors.items():
        count = t.untyped_storage().nbytes() // t.itemsize
        out[n] = t.as_strided((count,), (1,), 0).cuda().as_strided(t.shape, t.stride())
    return out


@functools.cache
def built(kind: str):
    """All cases of a kind, compiled together."""
    makers = {"ops": op_cases, "reductions": reduce_cases, "kernels": kernel_cases}[kind]()
    target = device_target("cuda")
    cases = {n: make() for n, make in makers.items()}
    kernels = {n: c.kernel(f"k_{n}", target.arch) for n, c in cases.items()}
    binaries = compile_all(kernels.values(), target)
    return {n: (cases[n], kernels[n], binaries[f"k_{n}"]) for n in cases}


def run(kind: str, name: str) -> tuple[Case, dict[str, torch.Tensor]]:
    case, kernel, binary = built(kind)[name]
    tensors = on_gpu(case)
    launch(binary, kernel, tensors, case.sizes)
    torch.cuda.synchronize()
    return case, tensors


# -- ops --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", op_cases())
def test_op(name: str) -> None:
    _, after = run("ops", name)
    op = next(o for o in sorted(OPS, key=len, reverse=True) if name.startswith(f"{o}_"))
    got = after["out"]
    args = [after[f"x{k}"] for k in range(OPS[op].arity)]
    if op == "cast":
        want = exact = args[0].to(got.dtype)
    else:
        want = OPS[op].meaning(*args)
        exact = OPS[op].meaning(
            *[a if a.dtype == torch.bool or not a.dtype.is_floating_point else a.double() for a in args]
        )
    ok = got == want
    if op in ("shl", "shr"):  # left open: by a negative number of bits, or all and more
        ok |= (args[1] < 0) | (args[1] >= torch.iinfo(got.dtype).bits)
    if got.dtype.is_floating_point:
        ulp = torch.finfo(got.dtype).eps * want.abs().double()
        rounding = op in ("nextafter", "to_f16", "to_bf16", "cast")
        truth = want.double() if rounding else exact.double()
        near = (got.double() - truth).abs() <= ULPS.get(op, 3) * ulp + 2 * (want.double() - truth).abs()
        tiny = (got.double() - want.double()).abs() <= torch.finfo(got.dtype).tiny
        ok |= (got.isnan() & want.isnan()) | near | tiny
    if op == "cast" and args[0].dtype.is_floating_point and not got.dtype.is_floating_point and got.dtype != torch.bool:
        i = torch.iinfo(got.dtype)
        ok |= ~((args[0] > max(i.min, -(2**31))) & (args[0] < min(i.max, 2**31 - 256)))  # left open
    bad = (~ok).nonzero().flatten()[:5].tolist()
    shown = [([a[i].item() for a in args], got[i].item(), want[i].item()) for i in bad]
    assert not bad, f"{int((~ok).sum())} of {ok.numel()} wrong: (operands, got, eager) {shown}"


# -- reductions and kernels -------------------------------------------------------------------------
def compare(case: Case, after: dict[str, torch.Tensor]) -> None:
    want = case.expected()
    for n, w in want.items():
        problem = wrong_values(after[n].cpu(), w, None)
        assert not problem, f"{n}: {problem}"


@pytest.mark.parametrize("name", reduce_cases())
def test_reduction(name: str) -> None:
    compare(*run("reductions", name))


@pytest.mark.parametrize("name", kernel_cases())
def test_kernel(name: str) -> None:
    compare(*run("kernels", name))


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", HALF)
def test_cheap_form_for_half_precision(name: str, dtype: torch.dtype) -> None:
    case = half_case(name, dtype)
    kernel = case.kernel("k", device_target("cuda").arch)
    tensors = on_gpu(case)
    launch(compile_kernel(kernel, device_target("cuda")), kernel, tensors, {})
    problem = half_problem(name, tensors["x"].cpu(), tensors["out"].cpu())
    assert not problem, problem


@pytest.mark.parametrize("kind", ["softmax", "layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    "rows,cols", [(300, 512), (64, 4096), (7, 16384), (5, 16385), (3, 100003), (1000, 33), (1, 50000)]
)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_rows_of_real_sizes(kind: str, rows: int, cols: int, dtype: torch.dtype) -> None:
    case = norm(kind, rows, cols, dtype)
    kernel = case.kernel("k", device_target("cuda").arch)
    tensors = on_gpu(case)
    launch(compile_kernel(kernel, device_target("cuda")), kernel, tensors, {})
    x, wide = tensors["x"], tensors["x"].double()
    w, b = (tensors.get(n) for n in ("w", "b"))

    def reference(v: torch.Tensor) -> torch.Tensor:
        f = torch.nn.functional
        if kind == "softmax":
            return f.softmax(v, -1)
        if kind == "layer_norm":
            return f.layer_norm(v, (cols,), w.to(v.dtype), b.to(v.dtype))  # type: ignore[union-attr]
        return f.rms_norm(v, (cols,), w.to(v.dtype), 1e-5)  # type: ignore[union-attr]

    problem = wrong_values(tensors["out"], reference(x), reference(wide))
    assert not problem, problem


# -- variants ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("skew", [1, 3])
def test_fallback_reads_misaligned_pointers(skew: int) -> None:
    n = 4096
    base = rand(n + 8, dtype=BF16).cuda()
    x = base[skew : skew + n]
    assert x.data_ptr() % 16
    case = pointwise((n,), {"x": (rand(n, dtype=BF16), lambda i: i)}, lambda b, v: b.op("neg", v), BF16)
    kernel = replace(case, fallback=True).kernel("fallback", device_target("cuda").arch)
    out = torch.zeros(n, dtype=BF16, device="cuda")
    launch(compile_kernel(kernel, device_target("cuda")), kernel, {"x": x, "out": out}, {})
    assert torch.equal(out, -x)


# -- the launcher -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shift,window,sides,channels", [(3, 7, 4, 192), (3, 7, 8, 96), (2, 5, 4, 96), (5, 12, 4, 48)])
def test_shifted_windows(shift: int, window: int, sides: int, channels: int) -> None:
    """Numbers that LLVM packs into 16 bits, which ptxas adds wrongly (``compile_triton.without_packed_adds``)."""
    f = shifted_windows(shift, window)
    x = torch.randn(32, sides * window, sides * window, channels, device="cuda").bfloat16()
    windows, sums = reflib.compile(f)(x)
    assert torch.equal(windows, f(x)[0])
    assert not wrong_values(sums, f(x)[1], x.double().sum((0, 1, 2)))
