"""fuse.computed_twice: over long rows, what takes much arithmetic is stored, and not computed again."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import CPU, GPU, check_same, fused, kernels, lowered, refused

import reflib
from reflib.fuse import fuse
from reflib.fuse.computed_twice import twice_rule
from reflib.fuse.dependencies import dependencies
from reflib.fuse.legality import FusionContext, can_fuse, merge, single
from reflib.fuse.result import Reason
from reflib.ir.program import KernelNode
from reflib.options import Options

LIMIT = 64  # long rows: longer than this
BF16 = torch.bfloat16


@pytest.fixture
def free_launches(monkeypatch):
    """A test's tensors are small: without what a launch costs they are judged as large ones."""
    monkeypatch.setattr("reflib.fuse.computed_twice.LAUNCH", 0)


def R(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def sampled(x, theta, hole):
    grid = F.affine_grid(theta, x.shape, align_corners=False)
    y = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    y = torch.where(hole, y.mean((2, 3), keepdim=True), y)
    return ((y * 255).round().clamp(0, 255).to(torch.uint8),)


def images(n, h, w):
    return R(n, 3, h, w).abs(), R(n, 2, 3) / 2, R(n, 1, h, w) > 0


def centred(f, *rest):
    """``f`` of the rows, less its mean."""
    return lambda *args: ((y := f(*args)) - y.mean(-1, keepdim=True),)


def kinds(f):
    return [bool(n.reduced) for n in kernels(f)]


# -- two kernels ------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(2))
def test_sampled_images_are_stored(seed, free_launches):
    rng = random.Random(seed)
    args = images(rng.randrange(50, 60), rng.randrange(9, 12), rng.randrange(9, 12))
    f = fused(sampled, args, persistent_limit=LIMIT)
    assert kinds(f) == [False, True, False] and "rows" in refused(f)
    (why,) = {r.reason.text for r in f.refusals if r.reason.code == "rows"}
    assert "grid_sampler_2d would be computed twice" in why
    assert kinds(fused(sampled, args)) == [False, True]  # registers hold such rows


def test_at_full_size():
    def launched(h, w):
        args = torch.empty(96, 3, h, w), torch.empty(96, 2, 3), torch.empty(96, 1, h, w, dtype=torch.bool)
        nodes = reflib.explain(sampled, *args, target="sm_90", dynamic=False).scheduled.nodes
        return sum(bool(getattr(n, "variants", ())) or isinstance(n, KernelNode) for n in nodes)

    assert (launched(192, 192), launched(96, 96)) == (3, 2)


SLOW = {
    "gamma": (torch.lgamma, lambda *s: (R(*s),)),
    "power": (lambda x, g: (x.abs() + 1) ** g, lambda *s: (R(*s), R(*s))),
    "waves": (lambda x: x.sin() * x.cos(), lambda *s: (R(*s),)),
}


@pytest.mark.parametrize("name", SLOW)
def test_few_slow_operations_are_stored_too(name, free_launches):
    """... and ``recompute`` leaves that as it is, as does fusing again."""
    rng = random.Random(name)
    fn, make = SLOW[name]
    args = make(rng.randrange(140, 200), rng.randrange(70, 120))
    f = fused(centred(fn), args, persistent_limit=LIMIT)
    assert kinds(f) == [True, False]
    first, second = f.program.nodes
    assert set(first.writes()) == set(second.reads()) and len(first.writes()) == 2
    assert str(fuse(f.program, Options(persistent_limit=LIMIT), GPU).program) == str(f.program)


def test_a_second_reduction_is_a_pass_too(free_launches):
    fn = centred(torch.lgamma)
    f = fused(lambda x: (fn(x)[0].square().mean(-1),), (R(150, 90),), persistent_limit=LIMIT)
    assert kinds(f) == [True, True]


def test_of_unknown_length(free_launches):
    f = fused(centred(torch.lgamma), (R(150, 90),), symbolic=True, run_on=[(R(33, 70),)], persistent_limit=LIMIT)
    assert kinds(f) == [True, False]


# -- one kernel -------------------------------------------------------------------------------------
CHEAP = {
    "softmax": lambda x: (F.gelu(x).softmax(-1),),
    "capped": lambda x: ((30 * torch.tanh(x / 30)).softmax(-1),),
    "layer norm": lambda x: (F.layer_norm(F.gelu(x) + x, x.shape[-1:]),),
    "rms norm": lambda x: ((y := F.silu(x) * x) * (y * y).mean(-1, keepdim=True).rsqrt(),),
    "centred": centred(F.silu),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", CHEAP)
def test_cheap_producers_are_computed_again(name, dtype, free_launches):
    rng = random.Random(name)
    f = fused(CHEAP[name], (R(rng.randrange(140, 200), rng.randrange(70, 120), dtype=dtype),), persistent_limit=LIMIT)
    assert kinds(f) == [True]


def test_small_tensors_are_one_launch():
    assert kinds(fused(centred(torch.lgamma), (R(150, 90),), persistent_limit=LIMIT)) == [True]


def test_short_rows_and_other_readers_stay(free_launches):
    assert kinds(fused(centred(torch.lgamma), (R(150, 60),), persistent_limit=LIMIT)) == [True]
    fn = lambda x, z: (z - torch.lgamma(x).mean(-1, keepdim=True),)  # noqa: E731
    assert kinds(fused(fn, (R(150, 90), R(150, 90)), persistent_limit=LIMIT)) == [True]


def test_not_on_a_cpu(free_launches):
    o, args = Options(persistent_limit=LIMIT), (R(150, 90),)
    program = lowered(centred(torch.lgamma), args, options=o)
    f = fuse(program, o, CPU)
    check_same(program, f, centred(torch.lgamma), args)
    assert not any("twice" in r.reason.text for r in f.refusals)


# -- in any order -----------------------------------------------------------------------------------
def test_whoever_joins_first(free_launches):
    """Of producer, reduction and consumer, two are joined, and the third is kept out: unless it is the reduction's
    consumer that is missing. In either order of the arguments."""
    program = lowered(centred(torch.lgamma), (R(150, 90),))
    depends = dependencies(program)
    c = FusionContext(program, depends, Options(persistent_limit=LIMIT), GPU, lambda p: None)

    def clusters():
        return [single(i, n, depends) for i, n in enumerate(program.nodes)]

    def joined(a, b):
        twice = twice_rule(a, b, c), twice_rule(b, a, c)
        assert (twice[0] is None) == (twice[1] is None) and {r.code for r in twice if r} <= {"rows"}
        return twice[0]

    assert len(program.nodes) == 3
    for a, b in itertools.combinations(clusters(), 2):
        assert joined(a, b) is None
    for first, second, third in ((0, 1, 2), (1, 2, 0)):
        x = clusters()
        answer = can_fuse(x[first], x[second], c)
        assert not isinstance(answer, Reason)
        assert joined(merge(x[first], x[second], answer, c), x[third]) is not None
