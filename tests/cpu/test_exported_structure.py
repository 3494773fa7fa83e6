"""Keywords, containers, constants, ints, results in containers, mutations: on the fast path too."""

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.utils import _pytree as pytree

import reflib
from reflib.wrap import structure


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Record:
    x: Any
    y: Any


pytree.register_dataclass(Record, serialized_type_name="tests.structure.Record")


# -- the printed functions ------------------------------------------------------------------------------
TREES: dict[str, tuple[tuple, dict]] = {
    "nothing": ((), {}),
    "positional": ((1, 2), {}),
    "keywords": ((), {"b": 1, "a": 2}),
    "nested": ((1, {"x": [2, (3,)], "empty": (), 7: {}}, [[], [4]]), {"k": {"z": None, "y": 5}}),
    "named": ((Pair(1, [2]), OrderedDict(q=3, p=(4,))), {}),
    "keys": (({("a", 1): 1, torch.float32: 2, True: 3, "it's": 4},), {}),
    "classes": ((Record(1, [2]), deque([3])), {"r": 4, "q": 5}),
}


@pytest.mark.parametrize("name", TREES)
def test_apart_and_together_as_pytree_does(name: str) -> None:
    args, kwargs = TREES[name]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    apart = structure.takes_apart(spec)
    assert apart(args, kwargs) == tuple(leaves)
    assert apart(args, dict(reversed(kwargs.items()))) == tuple(leaves)
    assert apart((*args, 1), kwargs) is None and apart(args, {**kwargs, "more": 1}) is None
    assert not args or apart(args[1:], kwargs) is None
    assert not kwargs or apart(args, {}) is None
    names: dict[str, Any] = {"leaves": leaves}
    text = structure.built(spec, [f"leaves[{i}]" for i in range(len(leaves))], names)
    again = eval(text, names)
    assert again == (args, kwargs) and pytree.tree_structure(again) == spec
    assert ("tree_unflatten" in text) == (name == "classes")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ([1, 2], (1, 2)), ((1, 2), [1, 2]), ([1, 2], [1]), ({"a": 1}, {"b": 1}), ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, OrderedDict(a=1)), (OrderedDict(a=1), {"a": 1}), (Pair(1, 2), (1, 2)), ((1, 2), Pair(1, 2)),
        ([1], "x"), ({"a": 1}, None), ((), 5), ([], ()), ({}, []), ({"a": [1]}, {"a": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_another_structure(right: Any, wrong: Any) -> None:
    apart = structure.takes_apart(pytree.tree_structure(((right,), {})))
    assert apart((right,), {}) is not None and apart((wrong,), {}) is None
    keyword = structure.takes_apart(pytree.tree_structure(((), {"k": right})))
    assert keyword((), {"k": right}) is not None and keyword((), {"k": wrong}) is None


# -- programs -------------------------------------------------------------------------------------------
class Model(torch.nn.Module):
    def __init__(self, fn: Callable[..., Any]):
        super().__init__()
        self.fn = fn
        self.weight = torch.nn.Parameter(torch.randn(5))
        self.register_buffer("count", torch.zeros(5))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self, *args, **kwargs)


def counts(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.count.add_(y)
    return x * m.weight + m.count


def counts_and_returns(m: Any, x: Tensor, y: Tensor) -> Any:
    m.count.mul_(2).add_(1)
    return m.count, x + m.count, m.count


def writes(m: Any, x: Tensor, y: Tensor) -> Any:
    x.mul_(2).add_(m.weight)
    return {"x": x, "sum": x.sum(0) + y}


def writes_in_a_dict(m: Any, d: dict, y: Tensor) -> Any:
    d["x"].add_(y)
    d["n"][0].zero_()
    return [d["n"][0] + y]


X, Y = torch.randn(8, 5), torch.randn(5)
# (the function, arguments, keywords, sizes that change)
PROGRAMS: dict[str, tuple[Any, tuple, dict, Any]] = {
    "keywords": (lambda m, x, *, y, z: x * m.weight + y - z, (X,), {"y": Y, "z": Y + 1}, None),
    "containers": (
        lambda m, d, p: d["x"] * m.weight + d["ys"][1] - p.b, ({"ys": [X, Y], "x": X}, Pair(Y, Y)), {}, None,
    ),
    "a class": (lambda m, r: r.x * m.weight + r.y, (Record(X, Y),), {}, None),
    "constants": (
        lambda m, x, flag, k, s: x * m.weight + k if flag and s == "up" else x, (X, True, 3, "up"), {}, None,
    ),
    "None": (lambda m, x, none, y: x * m.weight + y, (X, None, Y), {}, None),
    "an int": (lambda m, x, k, y: x * m.weight + k * y, (X, 5, Y), {}, (({0: Dim.DYNAMIC}, Dim.DYNAMIC, None),)),
    "results": (lambda m, x, y: {"b": x * 2, "a": [(x + y, None), Pair(7, y * m.weight)]}, (X, Y), {}, None),
    "a result of a class": (lambda m, x, y: Record(x * 2, [y * m.weight]), (X, Y), {}, None),
    "one in a list": (lambda m, x, y: [x * y], (X, Y), {}, None),
    "no results": (lambda m, x, y: (), (X, Y), {}, None),
    "views": (lambda m, x, y: (x, x.t(), x[1:], y.view(1, 5), x), (X, Y), {}, None),
    "a buffer": (counts, (X, Y), {}, None),
    "a buffer returned": (counts_and_returns, (X, Y), {}, None),
    "an input": (writes, (X, Y), {}, None),
    "an input in a dict": (writes_in_a_dict, ({"x": X, "n": [torch.randn(5)]}, Y), {}, None),
}  # fmt: skip


class Both:
    """The program, and the module itself: each with weights of its own."""

    def __init__(self, name: str, way: str = "cpp"):
        fn, self.args, self.kwargs, shapes = PROGRAMS[name]
        self.model = Model(fn)
        program = torch.export.export(self.model, self.args, self.kwargs, dynamic_shapes=shapes)
        self.f = reflib.compile(program, wrapper=way)
        self.slow = 0
        slow = self.f._slow

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.slow += 1
            return slow(*args, **kwargs)

        self.f._slow = counting
        weights = {n: t.clone() for n, t in self.f._weights.items()}
        self.f._weights = weights
        self.f._state = [weights[n] if n else None for n in self.f.convention.inputs]

    def agree(self, args: tuple, kwargs: dict) -> None:
        """Results, what was written to, and which results are the arguments themselves."""
        mine, theirs = (pytree.tree_map_only(Tensor, torch.clone, (args, kwargs)) for _ in range(2))
        with torch.no_grad():
            got, want = self.f(*mine[0], **mine[1]), self.model(*theirs[0], **theirs[1])
        same(got, want)
        same(mine, theirs)
        same(self.f._weights, {n: t for n, t in self.model.state_dict().items() if n in self.f._weights})
        assert aliases(got, mine) == aliases(want, theirs)


once = functools.cache(Both)


def same(got: Any, want: Any) -> None:
    assert pytree.tree_structure(got) == pytree.tree_structure(want)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want)):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a.detach(), b.detach())
        else:
            assert type(a) is type(b) and a == b


def aliases(results: Any, arguments: Any) -> list[tuple[bool, bool]]:
    """Of every result and every argument: is it the very tensor, does it share its memory?"""
    pairs = [
        (r, a) for r in pytree.tree_leaves(results) for a in pytree.tree_leaves(arguments)
        if isinstance(r, Tensor) and isinstance(a, Tensor)
    ]  # fmt: skip
    return [(r is a, r.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()) for r, a in pairs]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", ["cpp", "python"])
@pytest.mark.sample(4)
def test_they_take_the_fast_path(name: str, way: str) -> None:
    both = Both(name, way)
    for _ in range(3):
        both.agree(both.args, both.kwargs)
    assert both.slow == (0 if way == "cpp" else 3)


def test_other_calls_of_them() -> None:
    keywords = Both("keywords")
    keywords.agree((X,), {"z": Y, "y": X[0]})
    assert keywords.slow == 0
    containers = Both("containers")
    containers.agree(({"x": X, "ys": [X, Y]}, Pair(Y, Y)), {})
    assert containers.slow == 0, "in another order"
    containers.agree(({"x": X.t().contiguous().t(), "ys": [X, Y]}, Pair(Y, Y)), {})
    assert containers.slow == 1, "a copy of it, laid out as it should be"
    number = Both("an int")
    for rows, k in ((3, 2), (20, 2**40), (7, 0)):
        number.agree((torch.randn(rows, 5), k, Y), {})
    assert number.slow == 0
    written = Both("an input")
    written.agree((X.t().contiguous().t(), Y), {})
    assert written.slow == 1, "which is written to itself, not its copy"


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "says"),
    [
        ("keywords", (X,), {"y": Y}, "structure .*: missing a required .*'z'"),
        ("keywords", (X, Y), {"z": Y}, "structure"),
        ("keywords", (X,), {"y": Y, "z": Y, "w": Y}, "structure"),
        ("keywords", (X,), {"y": Y, "z": Y.double()}, "argument z: dtype torch.float64"),
        ("containers", ({"x": X}, Pair(Y, Y)), {}, "structure .*'x'.* not .*'ys'"),
        ("containers", ({"x": X, "ys": (X, Y)}, Pair(Y, Y)), {}, "structure .*tuple.* not .*list"),
        ("containers", ({"x": X, "ys": [X, Y]}, (Y, Y)), {}, "structure .* not .*Pair"),
        ("containers", ({"x": X, "ys": [X[0], Y]}, Pair(Y, Y)), {}, "ndim 1"),
        ("a class", ((X, Y),), {}, "structure .* not .*Record"),
        ("constants", (X, False, 3, "up"), {}, "it was exported with True, got False"),
        ("constants", (X, 1, 3, "up"), {}, "it was exported with True, got 1"),
        ("constants", (X, True, True, "up"), {}, "it was exported with 3, got True"),
        ("constants", (X, True, 3.0, "up"), {}, "it was exported with 3, got 3.0"),
        ("constants", (X, True, 3, "down"), {}, "it was exported with 'up', got 'down'"),
        ("None", (X, Y, Y), {}, r"exported with None, got a tensor, torch.float32 \[5\], strides \[1\], on cpu$"),
        ("an int", (X, 2.0, Y), {}, "expected an int, got float"),
        ("an int", (X, True, Y), {}, "expected an int, got bool"),
        ("an int", (X, 2**63, Y), {}, "argument args_1: 0x8000000000000000 does not fit in 64 bits"),
        ("an int", (X, torch.tensor(2), Y), {}, "expected an int, got Tensor"),
        ("a buffer", (X, 2), {}, "expected a tensor, got int"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
@pytest.mark.sample(3)
def test_what_does_not_fit_is_refused(name: str, args: tuple, kwargs: dict, says: str) -> None:
    both = once(name)
    before = {n: t.clone() for n, t in both.f._weights.items()}
    with pytest.raises(reflib.ReflibError, match=says):
        both.f(*args, **kwargs)
    for n, t in both.f._weights.items():
        assert torch.equal(t, before[n]), "nothing is done before"


def test_a_buffer_counts_on() -> None:
    both = Both("a buffer")
    for _ in range(5):
        both.f(X, torch.ones(5))
    assert both.f._weights["count"].tolist() == [5.0] * 5 and both.slow == 0
    first, _, second = (f := Both("a buffer returned")).f(X, Y)
    kept = first.clone()
    f.f(X, Y)
    assert torch.equal(first, kept) and torch.equal(first, second), "what was returned stays as it was"


def test_gradients_and_inference_mode() -> None:
    both = Both("keywords")
    with torch.enable_grad():
        out = both.f(torch.nn.Parameter(X), y=Y, z=Y)
        assert torch.is_grad_enabled() and not out.requires_grad
    with torch.inference_mode():
        assert both.f(X, y=Y, z=Y).is_inference()
    written = Both("an input").f
    for x in (torch.nn.Parameter(X.clone()), torch.nn.Parameter(X) * 1):
        before = x.detach().clone()
        with pytest.raises(reflib.ReflibError, match=r"args_0 is written to and requires grad.* args_0\.detach\(\)"):
            written(x, Y)
        assert torch.equal(x, before)
        with torch.no_grad():
            assert written(x, Y)["x"] is x
        assert not torch.equal(x, before)


def accumulates(m: Any, x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x * m.weight + y


@pytest.mark.parametrize("way", ["cpp", "python"])
def test_who_shares_memory_with_what_is_written_to(way: str) -> None:
    model = Model(accumulates)
    program = torch.export.export(model, (Y.clone(), Y))
    f = reflib.compile(program, wrapper=way)
    slow_calls, slow = [], f._slow
    f._slow = lambda *args: (slow_calls.append(args), slow(*args))[1]
    z, memory = torch.ones(5), torch.ones(12)
    says = r"argument args_0 is written to and shares memory with {}: pass args_0\.clone\(\)"
    with torch.no_grad():
        for x, y, other in (
            (z, z, "argument args_1"), (z, z.flip(0).flip(0).set_(z), "argument args_1"),
            (memory[:5], memory[4:9], "argument args_1"), (f._weights["weight"], z, "weight weight"),
        ):  # fmt: skip
            before = x.clone()
            with pytest.raises(reflib.ReflibError, match=says.format(other)):
                f(x, y)
            assert torch.equal(x, before)
        mine, theirs = memory.clone(), memory.clone()
        got, want = f(mine[:5], mine[5:10]), model(theirs[:5], theirs[5:10])  # in one storage, but apart
        torch.testing.assert_close((got, mine), (want, theirs))
        assert len(slow_calls) == (4 if way == "cpp" else 5)


def test_a_constant_that_is_no_number() -> None:
    nan = float("nan")
    f = reflib.compile(torch.export.export(Model(lambda m, x, k: x * 2), (X, nan)), wrapper="cpp")
    torch.testing.assert_close(f(X, nan), X * 2)
    torch.testing.assert_close(f(X, -nan), X * 2)
    for wrong in (1.0, 3):
        with pytest.raises(reflib.ReflibError, match=f"it was exported with nan, got {wrong}"):
            f(X, wrong)


def test_an_error_inside_is_raised_once() -> None:
    calls = []

    @torch.library.custom_op("exported_structure::fails", mutates_args=())
    def fails(x: Tensor) -> Tensor:
        calls.append(1)
        raise reflib.errors.ArgumentError("mine")

    fails.register_fake(torch.empty_like)
    model = Model(lambda m, x: {"y": fails(x)})
    f = reflib.compile(torch.export.export(model, (X,)), wrapper="cpp")
    with pytest.raises(reflib.errors.ArgumentError, match="mine"):
        f(X)
    assert len(calls) == 1
