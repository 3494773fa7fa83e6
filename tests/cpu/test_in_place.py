"""What is updated in place beyond one row of a cache: parts, calls, several forms in a row. (Random programs of
updates: test_fuzz.py; what is refused, and why: test_updates.py.)"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import reflib
from reflib.ir.program import Extern, walk
from tests.checking import check

R = random.Random(20)
L, B, S, D = R.randrange(3, 5), R.randrange(2, 4), R.randrange(20, 30), R.randrange(4, 9)
torch.manual_seed(R.randrange(1000))
C, V, I = torch.randn(L, B, S, D), torch.randn(B, 1, D), torch.tensor([R.randrange(S)])


def layers_sliced(c: Any, v: Any, i: Any) -> Any:
    out = 0
    for n in range(L):
        c[n, :, 7:8] = v + out
        out = c[n].sum(1, keepdim=True)
    return out


def layers_copied(c: Any, v: Any, i: Any) -> Any:
    out = 0
    for n in range(L):
        c[n].index_copy_(1, i, v + out)
        out = c[n].sum(1, keepdim=True)
    return out


def of_all_forms(c: Any, v: Any, i: Any) -> Any:
    c[1].index_copy_(1, i, v)
    c[:, :, 3] = v[:, 0]
    c.mul_(2)
    c[2].index_add_(1, i, v, alpha=2)
    c[0, 1:, 2:9:3] = c[1, 1:, 2:9:3]
    return c


def calls(c: Any, v: Any, i: Any) -> Any:
    c[c > 1] = c[c > 1] * 0.5
    c.masked_scatter_(c < -1, c.new_zeros(c.numel()))
    c.index_put_((i % L,), v, accumulate=True)
    y = torch.zeros(S, D)
    return y.index_add_(0, i, v[0])


def turned(c: Any, v: Any, i: Any) -> Any:
    c.transpose(1, 2)[:, 4] = v[:, 0]
    c.scatter_add_(2, i.expand(L, B, 1, D), v.expand(L, B, 1, D))
    return c[0]


PLACES = [layers_sliced, layers_copied, of_all_forms, calls, turned]


@pytest.mark.parametrize("fn, wrapper", [(f, ("python", "cpp")[n % 2]) for n, f in enumerate(PLACES)])
def test_in_place(fn: Callable[..., Any], wrapper: str) -> None:
    check(fn, reflib.compile(fn, wrapper=wrapper, verify=True), C, V, I)
    torch._dynamo.reset()
    with torch.no_grad():
        e = reflib.explain(fn, C, V, I, target="sm_90")
    assert e.updates and not [u for u in e.updates if u.why]
    assert all("test_in_place.py" in u.source and str(u).endswith(")") for u in e.updates)
    if fn is not calls:
        assert e.memory.peak_bytes < C.nbytes / 2, e.memory.peak_bytes
    made = {b for n in walk(e.scheduled.nodes) if isinstance(n, Extern) for b in n.outputs if isinstance(b, str)}
    assert all(e.scheduled.buffers[b].numel.hint() < C.numel() for b in made)


@torch.library.custom_op("reflib_in_place::rows", mutates_args=("cache",))
def rows(cache: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(1, i, v)
    return v.sum(-1)


@rows.register_fake
def _(cache: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return v.sum(-1)


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_a_custom_op_writes_to_what_it_is_given(wrapper: str) -> None:
    def fn(c: Any, v: Any, i: Any) -> Any:
        a = rows(c[1], i, v)
        b = rows(c[0], i, v + a[..., None])
        return a + b, c[1].sum(1)

    ours, theirs = C.clone(), C.clone()
    with torch.no_grad():
        torch.testing.assert_close(reflib.compile(fn, wrapper=wrapper, verify=True)(ours, V, I), fn(theirs, V, I))
        torch.testing.assert_close(ours, theirs)
        torch._dynamo.reset()
        e = reflib.explain(fn, C, V, I)
    assert len(e.updates) >= 2 and not [u for u in e.updates if u.why]
    assert e.memory.peak_bytes < C.nbytes / L


def test_sizes_that_are_symbols() -> None:
    def fn(c: Any, v: Any, p: int) -> Any:
        c[1, :, p : p + 1] = v
        return c[1, :, : p + 1].sum(1)

    compiled = reflib.compile(fn, dynamic=True)
    for p in (5, 9, 2):
        check(fn, compiled, C, V, p)


def before_and_after(c: Any, v: Any, i: Any) -> Any:
    t = c[1].exp()
    return t, t.index_copy(1, i, v)


def adds_what_was_there(c: Any, v: Any, i: Any) -> Any:
    """The call's other argument is the old value, in the memory that it would add to."""
    n = c.select_scatter(v.expand(B, S, D), 0, 0)
    c.copy_(n.index_put((torch.full((2,), 2),), c[2].expand(2, B, S, D), accumulate=True))


@pytest.mark.parametrize("fn, wrapper", [(before_and_after, "python"), (adds_what_was_there, "cpp")])
def test_what_may_not_be_in_place(fn: Callable[..., Any], wrapper: str) -> None:
    check(fn, reflib.compile(fn, wrapper=wrapper, verify=True), C, V, I)


def halves(c: Any) -> Any:
    a, b = c.chunk(2, 1)
    a.copy_(b * 3)
    b.mul_(2)


def swapped(c: Any) -> Any:
    first = c[0].clone()
    c[0] = c[1]
    c[1] = first


def recurrence(c: Any) -> Any:
    for k in range(1, c.shape[1]):
        c[:, k] = c[:, k - 1] * 0.5 + c[:, k]


@pytest.mark.parametrize(
    "fn, wrapper, kernels, kept", [(halves, "cpp", 1, 0), (swapped, "python", 1, 0), (recurrence, "cpp", None, None)]
)
def test_slices_of_which_others_are_read(fn: Any, wrapper: str, kernels: Any, kept: Any) -> None:
    """In place where that costs no more than a copy of the whole, in one kernel if the slices are apart; where it is a
    copy, the report says so, once."""
    ours = torch.randn(32, 64 if fn is not recurrence else 32)
    check(fn, reflib.compile(fn, wrapper=wrapper, verify=True), ours)
    torch._dynamo.reset()
    e = reflib.explain(fn, ours, target="cpu")
    if kernels is None:
        (u,) = e.updates
        assert "older slices of" in u.why and u.copied == ours.nbytes
    else:
        assert not [u for u in e.updates if u.why] and len(e.kernels) == kernels and e.memory.peak_bytes == kept


def test_slices_that_overlap_earlier_ones() -> None:
    """Rows read across the end of what was stored before, and stored over afterwards."""
    rng = random.Random(7)
    steps = [[(10, None), (0, 11), (12, None)]]
    steps += [[(rng.randrange(14), rng.choice([None, rng.randrange(14)])) for _ in range(5)] for _ in range(5)]
    for program in steps:

        def fn(x: torch.Tensor, y: torch.Tensor, program: Any = program) -> None:
            for to, of in program:
                x[to : to + 3] = y * 2 if of is None else x[of : of + 3].clone()

        torch._dynamo.reset()
        want, got, y = *[torch.arange(17.0 * 16).view(17, 16).clone() for _ in range(2)], torch.randn(3, 16)
        fn(want, y)
        with torch.no_grad():
            reflib.compile(fn, wrapper=rng.choice(("python", "cpp")), dynamic=False)(got, y)
        torch.testing.assert_close(got, want, msg=str(program))


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_one_place_is_filled_again_after_a_sum(wrapper: str) -> None:
    """In one kernel the last store comes after the loop, as what it replaces did."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.gather(1, torch.zeros_like(x, dtype=torch.int64))
        part = torch.as_strided(y, (1,), (1,)).fill_(1)
        less = part.sub_(x.sum()) * 2
        return part.fill_(1), less

    x = torch.randn(5, 6)
    got = reflib.compile(fn, verify=True, wrapper=wrapper)(x)
    torch.testing.assert_close(got, fn(x))


def turned_back(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A copy that lives in the input backwards is no tensor that a call could be given."""
    x.masked_scatter_(x > 0, x.flip(1).contiguous())
    return x[None].masked_scatter_(x[None] > 0, x[None].flip(1).contiguous())


def expanded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A copy of an expanded part has elements of its own."""
    x.masked_scatter_(x > 0, y)
    rows = x[:1].expand(3, 6).clone().masked_scatter_(y[:3] > 0, y)
    return x[:1].copy_(rows[:1])


@pytest.mark.parametrize("fn", [turned_back, expanded])
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_calls_update_what_has_a_place_of_its_own(fn: Callable[..., Any], wrapper: str) -> None:
    torch.manual_seed(4)
    check(fn, reflib.compile(fn, wrapper=wrapper, verify=True), torch.randn(4, 6), torch.randn(4, 6))


def test_what_is_written_is_not_computed_from_what_was_written() -> None:
    """The input's new value is computed again where it is read, but not from itself. (Inputs in one storage: what
    AOTAutograd passes is the base, which is updated by ``as_strided_scatter``.)"""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 0).copy_(torch.slice_scatter(x, x[:1] + 1, 0, 0, 1))
        y.sum()
        return torch.cat([x.double().softmax(0), x.double()], 0)

    base = torch.randn(4, generator=torch.Generator().manual_seed(5))
    args = [torch.empty(0).set_(base.untyped_storage(), 0, (1,), (1,)) for _ in range(2)]
    check(fn, reflib.compile(fn, verify=True), *args)


def counted(x: torch.Tensor) -> torch.Tensor:
    """The copy begins at the begin of a storage; what was copied does not."""
    y = x.clone()
    torch.as_strided(y, (3, 2), (2, 1), 0).mul_(3)
    return y


def from_its_first(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x, (1,), (1,)).mul_(2).abs()


@pytest.mark.parametrize("fn", [counted, from_its_first])
@pytest.mark.parametrize("grad", [False, True])
def test_elements_counted_in_a_storage(fn: Callable[..., Any], grad: bool) -> None:
    base = torch.arange(15.0)
    for x in (base[3:].view(4, 3), base[3:].view(4, 3).t(), base[3:].view(4, 3)[:, ::2]):
        if fn is from_its_first and grad:
            continue  # (a leaf)
        torch._dynamo.reset()
        compiled = reflib.compile(fn, verify=True, dynamic=not grad)
        check(fn, compiled, x.detach().requires_grad_(grad), backward=grad)


def test_no_elements_have_no_place() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([(x * 2).narrow(1, 1, 1)[..., 1:]]).reshape(-1)
        return y.index_put_((torch.arange(0),), y[:1] + 1, accumulate=True)

    check(fn, reflib.compile(fn, verify=True), torch.randn(2, 2))


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_two_results_are_two_tensors(wrapper: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y.transpose(0, 0), y.transpose(0, 0)

    a, b = reflib.compile(fn, wrapper=wrapper, verify=True)(torch.ones(1, 3))
    assert a is not b and a.data_ptr() == b.data_ptr()
    assert a.resize_(3).shape != b.shape
