"""Updates at positions held in tensors (a key-value cache and its new row) are stored in place: no copies."""

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.capture.graph import Graph
from reflib.ir.program import Extern, walk
from reflib.observe.explain import Explanation
from reflib.options import Options
from reflib.pipeline import run
from tests.checking import check

aten = torch.ops.aten
RANDOM = random.Random(7)
B, H, S, D = RANDOM.randrange(1, 4), RANDOM.randrange(2, 5), RANDOM.randrange(20, 40), 2 * RANDOM.randrange(4, 9)


def index_copy(cache: torch.Tensor, position: torch.Tensor, new: torch.Tensor) -> None:
    cache.index_copy_(2, position, new)


def index_put(cache: torch.Tensor, position: torch.Tensor, new: torch.Tensor) -> None:
    cache[:, :, position] = new


def both_positions(cache: torch.Tensor, position: torch.Tensor, new: torch.Tensor) -> None:
    cache[torch.arange(B)[:, None], :, position] = new.transpose(1, 2)


def scatter(cache: torch.Tensor, position: torch.Tensor, new: torch.Tensor) -> None:
    cache.scatter_(2, position.view(1, 1, -1, 1).expand(new.shape), new)


def sliced(cache: torch.Tensor, position: torch.Tensor, new: torch.Tensor) -> None:
    cache[:, :, 5 : 5 + new.shape[2]] = new


def copied_back(cache: torch.Tensor, position: torch.Tensor, new: torch.Tensor) -> None:
    """As functions that return a new cache do it; twice, and read in between."""
    first = cache.copy_(torch.slice_scatter(cache, new, 2, 5, 5 + new.shape[2]))[:, :, 5:6] * 2
    cache.copy_(torch.select_scatter(cache, first[:, :, 0], 2, 3))


ALL = (index_copy, index_put, both_positions, scatter, sliced, copied_back)
WAYS: dict[str, Callable[..., None]] = {f.__name__: f for f in ALL}


class Step(nn.Module):
    """Attention of the last ``n`` tokens to all so far. ``rows`` turns keys, as a rotary embedding does."""

    def __init__(self, update: Callable[..., None], dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.update = update
        self.qkv, self.out = nn.Linear(H * D, 3 * H * D, dtype=dtype), nn.Linear(H * D, H * D, dtype=dtype)
        self.register_buffer("k", torch.randn(B, H, S, D, dtype=dtype))
        self.register_buffer("v", torch.randn(B, H, S, D, dtype=dtype))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(B, -1, H, D).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k = torch.cat([-k[..., D // 2 :], k[..., : D // 2]], -1) * position[:, None].cos() + k
        self.update(self.k, position, k.to(x.dtype))
        self.update(self.v, position, v)
        mask = torch.arange(S) <= position[:, None]
        y = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def explained(fn: Any, *args: Any, **options: Any) -> Explanation:
    with torch.no_grad():
        return reflib.explain(fn, *args, target="sm_90", **options)


def kernels(e: Explanation) -> list[str]:
    return [k.source for k in e.kernels if not k.name.endswith("fallback")]


def whole_buffers(e: Explanation, size: int) -> list[str]:
    """Temporaries of as many elements as the tensor that is updated."""
    made = {b for n in walk(e.scheduled.nodes) for b in n.writes()}
    return [b for b in made if e.scheduled.buffers[b].kind == "temp" and e.scheduled.buffers[b].numel.hint() >= size]


def calls(e: Explanation, name: str) -> list[Extern]:
    return [n for n in walk(e.scheduled.nodes) if isinstance(n, Extern) and name in str(n.target)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_cache_is_written_in_place(way: str) -> None:
    e = explained(Step(WAYS[way]), torch.randn(B, 1, H * D), torch.tensor([3]))
    assert not whole_buffers(e, B * H * S * D)
    for name in ("index_copy", "index_put", "scatter", "clone", "copy"):
        assert not calls(e, name)
    assert e.memory.peak_bytes < 4 * B * H * S * D
    storing = [k for k in kernels(e) if "cos(" in k or "neg" in k]
    assert storing, "what makes the new keys is in the kernel that stores them"


@pytest.mark.sample(4)
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("way", WAYS)
def test_several_steps_as_eager(way: str, wrapper: str) -> None:
    mine, eager = Step(WAYS[way]), Step(WAYS[way])
    compiled = reflib.compile(mine, wrapper=wrapper)
    with torch.no_grad():
        for i in range(5):
            x = torch.randn(B, 1, H * D)
            position = torch.tensor([2 * i + (S - 10)])
            torch.testing.assert_close(compiled(x, position), eager(x, position))
            torch.testing.assert_close(mine.k, eager.k)
            torch.testing.assert_close(mine.v, eager.v)


@pytest.mark.parametrize("way", ["index_copy", "index_put", "scatter"])
def test_several_positions_at_once_and_half_precision(way: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        mine, eager = Step(WAYS[way], dtype), Step(WAYS[way], dtype)
        compiled = reflib.compile(mine, verify=True)
        with torch.no_grad():
            x, position = torch.randn(B, 4, H * D, dtype=dtype), torch.tensor([7, 0, S - 1, 5])
            torch.testing.assert_close(compiled(x, position), eager(x, position), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(mine.k, eager.k, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(mine.v, eager.v)


def compare(fn: Callable[..., Any], *args: torch.Tensor, **options: Any) -> Explanation:
    """Results and what was written to the arguments, as in eager; then what the code for a GPU is."""
    ours, theirs = [a.clone() for a in args], [a.clone() for a in args]
    with torch.no_grad():
        got, want = reflib.compile(fn, verify=True, **options)(*ours), fn(*theirs)
    torch.testing.assert_close((got, ours), (want, theirs))
    torch._dynamo.reset()
    return explained(fn, *args)


torch.manual_seed(RANDOM.randrange(1000))
X, I, V = torch.randn(50, 6), torch.tensor([3, 40, 7]), torch.randn(3, 6)


def test_two_updates_of_one_tensor() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x[i] = v
        y = x[0] * 2
        x.index_copy_(0, i + 1, y + v)
        return x.sum(0)

    e = compare(fn, X, I, V)
    assert not whole_buffers(e, X.numel())


def test_a_temporary_that_dies() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y[i] = v * 2
        z = torch.zeros_like(x)
        z[i] = v
        return (y * z).cumsum(0), y

    e = compare(fn, X, I, V)
    assert not calls(e, "index_put") and len(whole_buffers(e, X.numel())) <= 4  # y, z, their product, the sums


def test_numbers_masks_and_types_that_are_cast() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, n: torch.Tensor) -> Any:
        x[i] = 2.5
        x.index_copy_(1, torch.tensor([4]), n[:, None].to(x.dtype))
        x.scatter_(0, i[:, None].expand(3, 6) - 1, -1.0)
        return x[:, 0] > n

    e = compare(fn, X.half(), I, torch.arange(50))
    assert not whole_buffers(e, X.numel())


def test_a_value_is_read_before_it_is_overwritten() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Any:
        old = x.sum(1)  # of the old values: before the update
        x[i] = v
        return old, x.sum(1)

    e = compare(fn, X, I, V)
    assert not whole_buffers(e, X.numel())


def from_itself(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Any:
    x.copy_(aten.index_copy(x, 0, i - 1, x[2:5]))  # reads rows 2, 3, 4 and writes row 2


def old_read_later(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Any:
    y = aten.index_put(x, [i], v)
    old = x * 2
    x.copy_(y)
    return old


def both_are_results(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Any:
    y = aten.scatter(x, 0, i[:, None].expand(3, 6), v)
    x.copy_(y)
    return y


def another_in_the_end(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Any:
    y = aten.index_copy(x, 0, i, v)
    z = aten.index_put(y, [i + 1], v)
    w = z + y
    x.copy_(z)
    return w


@pytest.mark.parametrize(
    "fn, why",
    [
        (from_itself, "as it was before"),
        (old_read_later, "as it was before"),
        (both_are_results, "both results"),
        (another_in_the_end, "read afterwards"),
    ],
)
def test_refused(
    fn: Callable[..., Any], why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFLIB_LOGS", "fallback")
    graph = Graph(make_fx(fn, tracing_mode="fake")(X.clone(), I, V), "inference", frozenset())
    with caplog.at_level(logging.INFO, "reflib.fallback"):
        s = run(graph, Options(verify=True))
    ours, theirs = X.clone(), X.clone()
    got, want = s.call([ours, I, V]), fn(theirs, I, V)
    torch.testing.assert_close(ours, theirs)
    if want is not None:
        torch.testing.assert_close(got[0], want)
    assert [r for r in s.fused.refusals if r.reason.code == "in-place" and why in r.reason.text]
    assert "updates a copy" in caplog.text and why in caplog.text


def test_dynamic_sizes_and_gradients() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x[i] = v
        return x.sin()

    compiled = reflib.compile(fn, dynamic=True)
    for rows in (50, 37):
        x, v = X[:rows].clone().requires_grad_(), V.clone().requires_grad_()
        i = I % rows
        compiled(x, i, v).sum().backward()
        got = x.grad, v.grad
        x, v = x.detach().requires_grad_(), v.detach().requires_grad_()
        fn(x, i, v).sum().backward()
        torch.testing.assert_close(got, (x.grad, v.grad))


def a_call_reads_it(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    x.mul_(0.9).add_(v.sum(0))
    return v @ x.t()


def a_call_reads_lists(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    torch._foreach_mul_([x, v], 0.5)
    torch._foreach_add_([x, v], 1)
    return list(torch._foreach_norm([x, v]))


def a_product_is_added(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    x[:6].add_(v.t() @ v)
    x.addmm_(x[:, :3].sin(), v)
    return x.norm()


def calls_read_it_made_twice(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Any:
    y, z = x * 2, x * 2
    x.copy_(y)
    return v @ y.t(), v @ z.t(), v @ x.t()


@pytest.mark.parametrize("fn", [a_call_reads_it, a_call_reads_lists, a_product_is_added, calls_read_it_made_twice])
def test_an_updated_input_is_stored_once(fn: Callable[..., Any]) -> None:
    assert not whole_buffers(compare(fn, X, I, V), X.numel())


def test_what_is_read_after_the_next_update_is_kept() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Any:
        y = x * 2
        x.copy_(y)
        z = aten.mm(v, x.t())
        x.copy_(x * z.sum())
        return aten.mm(v, y.t())

    s = run(Graph(make_fx(fn, tracing_mode="fake")(X.clone(), I, V), "inference", frozenset()), Options(verify=True))
    ours, theirs = X.clone(), X.clone()
    torch.testing.assert_close((s.call([ours, I, V])[0], ours), (fn(theirs, I, V), theirs))


def test_two_cats_that_share_a_part_are_both_stored() -> None:
    """The second, which a call reads, is not the first: one of its two parts is another."""

    def fn(p: torch.Tensor, d: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        g = p * d
        return torch.cat([g, d * 2], -1), torch.cat([g, d * r], -1) @ w

    check(fn, *(torch.randn(9, 16) for _ in range(3)), torch.randn(32, 16))


# -- inputs that are views of one another ---------------------------------------------------------------------
BASE = torch.arange(24.0)


def second_half(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(2)[-1].mul_(2)


def spread(x: torch.Tensor) -> torch.Tensor:
    x.copy_(x.clone().relu() + 1)
    return x.view(2, -1).unbind(1)[1]


@pytest.mark.each
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [second_half, spread])
@pytest.mark.parametrize("at", [slice(0, 8), slice(6, 14), slice(5, None, 2)], ids=str)
def test_a_view_of_an_updated_input_that_begins_anywhere(fn: Any, at: slice, dynamic: bool) -> None:
    n = len(BASE[at]) // 2 * 2
    check(fn, reflib.compile(fn, dynamic=dynamic, verify=True), BASE.clone()[at][:n])


def overlapping(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    x.copy_(x.flip(0))
    y.mul_(2)
    z.add_(y[: len(z)].sum())
    return x + 1


@pytest.mark.parametrize("apart_first", [False, True])
def test_views_of_one_tensor_as_arguments(apart_first: bool) -> None:
    def views(base: torch.Tensor) -> list[torch.Tensor]:
        return [base[2:9:2], base[1:13], base[4:8]]

    compiled = reflib.compile(overlapping, verify=True)
    if apart_first:
        compiled(*(v.clone() for v in views(BASE)))
    check(overlapping, compiled, *views(BASE.clone()))
    if not apart_first:
        (graph,) = reflib.explain(overlapping, *views(BASE.clone()), target="cpu").graphs
        assert not [n for n in walk(graph.scheduled.nodes) if isinstance(n, Extern)]


def test_strided_places_of_an_input() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.as_strided((3, 2), (8, 1), 1).add_(1)
        x.as_strided((5,), (5,)).mul_(2)
        return x.sum()

    check(fn, reflib.compile(fn, verify=True), BASE.clone())
    e = explained(fn, BASE.clone())
    assert not whole_buffers(e, BASE.numel()) and not calls(e, "as_strided")
    assert [u.why for u in e.updates] == ["", ""]


def test_places_that_overlap_are_left_to_torch() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided_scatter(x, torch.ones(2, 3), (2, 3), (2, 1)) + 1

    check(fn, reflib.compile(fn, verify=True), BASE.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_many_positions_of_a_dimension_of_one(dtype: torch.dtype) -> None:
    """All of them name one place: which of the values is there is not known, as on eager's GPU."""
    i = torch.tensor([0, -1, 0])

    def fn(x: torch.Tensor) -> Any:
        ways = [x.index_copy(1, i.abs() * 0, x.expand(-1, 3)), x.index_fill(1, i, 3)]
        ways += [torch.ops.aten.index_put(x, [None, i], x[:, :1] * 2, accumulate) for accumulate in (False, True)]
        return [*ways, x.t().scatter(0, i[:1, None].expand(1, 2).abs(), 4)]

    x = torch.arange(5)[:, None].to(dtype)
    check(fn, reflib.compile(fn, verify=True), x)
    assert not calls(explained(fn, x, verify=True), "index_put")


def reversed_at_last(x: torch.Tensor) -> torch.Tensor:
    """What is copied onto the input in the end are other elements of what was updated in place before."""
    x[:-1].index_copy_(0, torch.arange(len(x) - 1).flip(0), x[:-1].clone())
    x.copy_(x.flip(0))
    return x.sum()


def last_rows_added(x: torch.Tensor) -> torch.Tensor:
    """Of three rows the second half is one, which is added to all; its size is no number where sizes are symbols."""
    return x.t() + x.chunk(2)[-1]


@pytest.mark.parametrize("fn", [reversed_at_last, last_rows_added])
def test_symbolic_sizes(fn: Any) -> None:
    check(fn, reflib.compile(fn, dynamic=True, verify=True), torch.randn(3, 3))
