"""Grouped products: which kernel, the same values in Triton's interpreter, code for each GPU."""

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import interpreted
from torch.nn import functional as F
from user_kernels_interpreting import job

import reflib
from reflib.autotune.inputs import InputSpec, make_inputs
from reflib.autotune.subprogram import splice
from reflib.generate.compile_triton import compile_kernel, resources
from reflib.ir.program import Choice, Extern, Variants
from reflib.lab import told_times
from reflib.lower.custom_ops import input_makers
from reflib.options import Options
from reflib.target import parse_target
from reflib.tuning import generated

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
    pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped_mm"),
]
BF16 = torch.bfloat16


def grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None) -> torch.Tensor:
    return torch._grouped_mm(a, b, offs=offs)


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def some(*shape: int) -> torch.Tensor:
    """Small multiples of 1/2 in bfloat16: products are exact."""
    g = torch.Generator().manual_seed(sum(shape))
    return (torch.randint(-4, 5, shape, generator=g) / 2).to(BF16)


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "rows": lambda: (some(64, 48), some(4, 48, 72), ends(5, 5, 40, 64)),
    "rows, columns of b": lambda: (some(64, 48), some(3, 72, 48).mT, ends(30, 31, 64)),
    "rows, ragged depth": lambda: (some(40, 56), some(2, 56, 40), ends(17, 40)),
    "columns": lambda: (some(4, 40, 48), some(64, 48).t(), ends(8, 8, 40, 64)),
    "depth": lambda: (some(64, 40).t(), some(64, 48), ends(5, 5, 40, 64)),
    "batch": lambda: (some(3, 40, 48), some(3, 48, 56), None),
}


def stages(args: tuple[Any, ...], target: str, fn: Callable[..., Any] = grouped, **options: Any) -> Any:
    given = [x for x in args if x is not None]
    return reflib.explain(fn, *given, target=target, verify=True, **options)


# -- which ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_beside_atens(name: str) -> None:
    """Where ATen would loop over the groups on the host, one kernel is the default; a batch is a batched product."""
    args = CASES[name]()
    for target, ours in (("sm_80", True), ("sm_90", False), ("sm_120", True)):
        e = stages(args, target)
        (choice,) = (n for n in e.program.nodes if isinstance(n, Choice))
        kinds = {v.name.split()[0] for v in choice.variants}
        assert kinds == {"aten", "triton"}, choice.failed
        if name == "batch":
            assert choice.op == "aten.bmm"
        else:
            assert len(choice.variants) > 3 and str(e.decisions[0].winner).startswith("triton") == ours


def test_ends_to_measure_with() -> None:
    e = stages(CASES["rows"](), "sm_90")
    (choice,) = (n for n in e.program.nodes if isinstance(n, Choice))
    ((_, key),) = choice.inputs_from
    spec = InputSpec("ends", "activation", 0, (4,), (1,), "int32", "cpu", key)
    assert make_inputs([spec], 0, input_makers())[0].tolist() == [16, 32, 48, 64]


# -- values -----------------------------------------------------------------------------------------
def relu_of(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return torch.relu(grouped(a, b, offs)) * 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """Every case's results, all run in one child. (The interpreter cuts results off, it does not round.)"""
    jobs = {}
    for name, make in CASES.items():
        if name == "batch":
            continue
        given = make()
        jobs[name] = job(stages(given, "sm_80").stages, given)
    given = CASES["rows"]()
    jobs["epilogue"] = job(stages(given, "sm_80", relu_of).stages, given)
    file = tmp_path_factory.mktemp("grouped") / "jobs.pt"
    torch.save(jobs, file)
    interpreted("user_kernels_interpreting.py", str(file))
    return torch.load(file)


@pytest.mark.parametrize("name", [n for n in CASES if n != "batch"])
def test_as_eager(name: str, found: dict[str, list[torch.Tensor]]) -> None:
    args = CASES[name]()
    torch.testing.assert_close(found[name][0].float(), by_hand(*args), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(grouped(*args).float(), by_hand(*args), rtol=1e-2, atol=1e-2)


def test_with_what_follows(found: dict[str, list[torch.Tensor]]) -> None:
    want = torch.relu(by_hand(*CASES["rows"]())) * 2
    torch.testing.assert_close(found["epilogue"][0].float(), want, rtol=2e-2, atol=1e-2)


def by_hand(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    a, b = a.float(), b.float()
    at = [0, *offs.tolist()]
    groups = [slice(*p) for p in itertools.pairwise(at)]
    if a.dim() == b.dim():
        return torch.stack([a[:, s] @ b[s] for s in groups])
    if a.dim() == 2:
        return torch.cat([a[s] @ b[g] for g, s in enumerate(groups)])
    return torch.cat([a[g] @ b[:, s] for g, s in enumerate(groups)], 1)


FAR = """
import torch
from reflib.lab.triton_child import complete_the_interpreter
complete_the_interpreter()
from reflib.lower.grouped_kernel import grouped_mm
far = 2**26  # most of it is never touched, and takes no memory
a = torch.empty(48 * far, dtype=torch.bfloat16).as_strided((48, 32), (far, 1))
a.copy_(torch.randint(-3, 4, (48, 32)))
b, ends = torch.randint(-3, 4, (2, 32, 16)).bfloat16(), torch.tensor([40, 48], dtype=torch.int32)
c = torch.zeros(48, 16, dtype=torch.bfloat16)
grouped_mm[(3,)](
    a, b, ends, c, 2, 48, 16, 32, 0, far, 1, 512, 16, 1, 0, 16, 1, RAGGED="m", MBLOCK=16, NBLOCK=16, KBLOCK=32
)
assert torch.equal(c.float(), torch.cat([a[:40].float() @ b[0].float(), a[40:].float() @ b[1].float()]))
"""


@pytest.mark.slow
def test_a_group_of_more_than_32_bits() -> None:
    """A group's row may begin 2**31 elements behind its first."""
    interpreted("-c", FAR)


DESCRIBED = """
import random, torch, triton
from reflib.lab.triton_child import complete_the_interpreter
complete_the_interpreter()
triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
from reflib.lower.grouped_kernel import grouped_rows_described
draw = random.Random(0)

def some(*shape):
    return (torch.randint(-4, 5, shape) / 2).bfloat16()

for case in range(8):
    m, n, k = (8 * draw.randrange(1, 9) for _ in range(3))
    groups = draw.randrange(1, 6)
    ends = sorted(draw.randrange(m + 1) for _ in range(groups))
    a = some(m, k)
    b = some(groups, k, n) if case % 2 else some(groups, n, k).mT
    a[ends[-1]:] = float("nan")
    starts = [0, *ends[:-1]]
    want = torch.cat([a[i:j].float() @ b[g].float() for g, (i, j) in enumerate(zip(starts, ends))])
    c = torch.zeros(m, n, dtype=torch.bfloat16)
    grouped_rows_described[(3,)](
        a, b, torch.tensor(ends, dtype=torch.int32), c, groups, m, n, k, k, *b.stride(), n, 1, B_ROWS=bool(case % 2),
        GROUPS=1 << (groups - 1).bit_length(), MBLOCK=16, NBLOCK=32, KBLOCK=16,
    )
    got = c[: len(want)].float()
    assert torch.allclose(got, want, rtol=2e-2, atol=1e-2), (case, ends, (got - want).abs().max())
    assert not c[len(want):].any()
"""


def test_read_through_descriptors() -> None:
    """Rows or columns of b in one piece, groups that are empty, and what lies behind the last group."""
    interpreted("-c", DESCRIBED)


def test_descriptors_are_for_aligned_matrices() -> None:
    """Another address runs the default; columns in one piece and older GPUs have no such candidate."""

    def found(args: tuple[Any, ...], target: str = "sm_90") -> list[Any]:
        (choice,) = (n for n in stages(args, target).program.nodes if isinstance(n, Choice))
        return [v for v in choice.variants if v.name.endswith(" tma")]

    a, b, offs = CASES["rows"]()
    assert not found((a, b, offs), "sm_80") and not found((some(48, 64).t(), b, offs))
    variants = found((a, b, offs))
    assert variants and all({x.what for x in v.predicate} == {"arg0_1", "arg1_1"} for v in variants)
    assert not found(CASES["columns"]()) and not found(CASES["depth"]())
    assert found(CASES["rows, columns of b"]())


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_descriptors_that_are_fastest(wrapper: str) -> None:
    """What is measured is aligned; in a call, the wrapper asks."""
    a, b, offs = CASES["rows"]()
    with told_times(lambda name, sizes: 1.0 if name.endswith(" tma") else 10.0):
        e = stages((a, b, offs), "sm_90", relu_of, wrapper=wrapper, autotune="blocking")
    decision = e.decisions[0]
    assert str(decision.winner).endswith(" tma") and not any(c.status == "guard" for c in decision.candidates)
    (node,) = (n for n in e.scheduled.nodes if isinstance(n, Variants) and not n.of_kernels)
    described, other = node.variants
    assert {(x.kind, x.what) for x in described.predicate} == {("aligned", "arg0_1"), ("aligned", "arg1_1")}
    assert not other.predicate and isinstance(other.nodes[0], Extern) and "_grouped_mm" in str(other.nodes[0].target)
    condition = {"python": "if aligned_arg0_1 and aligned_arg1_1:", "cpp": "if (aligned_arg0_1 && aligned_arg1_1) {"}
    assert condition[wrapper] in e.wrapper


# -- code -------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["rows", "depth"])
def test_every_tiling_compiles(name: str, arch: str) -> None:
    """To the tensor cores, in copies of 16 bytes; nothing spills but for a register or two."""
    large = {
        "rows": (torch.zeros(4096, 1024, dtype=BF16), torch.zeros(8, 1024, 2048, dtype=BF16)),
        "depth": (torch.zeros(4096, 1024, dtype=BF16).t(), torch.zeros(4096, 2048, dtype=BF16)),
    }[name]
    target = parse_target(arch)
    program = stages((*large, ends(*range(512, 4097, 512))), arch).program
    (choice,) = (n for n in program.nodes if isinstance(n, Choice))
    product = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}[arch]
    for v in choice.variants:
        _, kernels = generated(splice(program, choice, v), Options(), lambda d: target)
        for kernel in list(kernels.values())[:1]:  # (the others are its fallbacks)
            binary = compile_kernel(kernel, target)
            assert product in binary.ptx or " 16x" in v.name or " 32x" in v.name, "fewer rows than wgmma has"
            copy = "cp.async.bulk.tensor" if v.name.endswith(" tma") else "cp.async.cg.shared.global"
            assert copy in binary.ptx, v.name
            assert resources(binary)["stack"] <= 16 and binary.shared <= target.shared, v.name


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_wrappers(wrapper: str, dynamic: bool) -> None:
    a, b, offs = CASES["rows"]()
    if dynamic:
        torch._dynamo.mark_dynamic(a, 0)
    fn = (lambda a, b, o: F.grouped_mm(a, b, offs=o)) if hasattr(F, "grouped_mm") else grouped
    e = stages((a, b, offs), "sm_80", fn, wrapper=wrapper)
    assert len(e.kernels) == 1 and "grouped_mm" in e.wrapper
