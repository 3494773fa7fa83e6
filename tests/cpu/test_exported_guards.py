"""What torch.export assumed of sizes is checked by the wrapper program itself, in Python and in C++: so programs with
guards take the fast path, and what a package exports to C++ checks them too."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.utils import _pytree as pytree

import reflib
from reflib.errors import ArgumentError
from reflib.fuse.dependencies import dependencies
from reflib.ir.expr import Sym, expr
from reflib.ir.program import Buffer, Program, View
from reflib.wrap.convention import Argument, Convention, Expected, Guard
from reflib.wrap.exported import ExportedCallable
from reflib.wrap.guards import checked
from tests.exporting import Alone


class TakesOneWay(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum(0) + y.sum(0) if x.shape[0] > y.shape[0] else x.sum(0) - y.sum(0)


def exported(model: torch.nn.Module, *args: Any, dims: Any = Dim.DYNAMIC) -> Any:
    shapes = tuple(dims if type(a) is int else {0: dims} for a in args)
    return torch.export.export(model, args, dynamic_shapes=shapes)


def compiled(model: torch.nn.Module, *args: Any, wrapper: str = "cpp", dims: Any = Dim.DYNAMIC) -> Any:
    return reflib.compile(exported(model, *args, dims=dims), wrapper=wrapper)


def ways_of(f: Any) -> list[str]:
    """The calls of ``f``, which is opened, that take the slow path append to this."""
    taken: list[str] = []
    slow = f._slow

    def noted(*args: Any, **kwargs: Any) -> Any:
        taken.append("slow")
        return slow(*args, **kwargs)

    f._slow = noted
    f.open()
    return taken


def test_a_guarded_program_takes_the_fast_path() -> None:
    f = compiled(TakesOneWay(), torch.randn(7, 3), torch.randn(4, 3))
    taken = ways_of(f)
    for a, b in ((7, 4), (9, 8), (100, 2)):
        x, y = torch.randn(a, 3), torch.randn(b, 3)
        torch.testing.assert_close(f(x, y), x.sum(0) + y.sum(0))
    assert not taken
    for a, b in ((4, 4), (3, 70000)):
        says = rf"exported where .*>.* holds .* here s\d+ = ({a}|{b}) \([xy]\.shape\[0\]\), s\d+ = \d+ \([xy]"
        with pytest.raises(reflib.ReflibError, match=says):
            f(torch.randn(a, 3), torch.randn(b, 3))
    assert taken == ["slow", "slow"]


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_the_wrapper_says_it_itself(wrapper: str) -> None:
    f = compiled(TakesOneWay(), torch.randn(7, 3), torch.randn(4, 3), wrapper=wrapper)
    graph = f._call.load()
    x, y = torch.randn(5, 3), torch.randn(4, 3)
    torch.testing.assert_close(graph([x, y])[0], x.sum(0) + y.sum(0))
    says = r"^it was exported where s\d+ > s\d+ holds of the arguments' sizes; here s\d+ = [45], s\d+ = [45]$"
    with pytest.raises(ArgumentError, match=says):
        graph([torch.randn(4, 3), torch.randn(5, 3)])
    with pytest.raises(ArgumentError, match=r"exported where 3 <= s\d+ holds of the arguments' sizes; here s\d+ = 2$"):
        graph([torch.randn(2, 3), torch.randn(2, 3)])


class Remainder(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 2 == 0 and x.shape[0] != 10 else x * 3


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_equal_and_different(wrapper: str) -> None:
    f = compiled(Remainder(), torch.ones(8), wrapper=wrapper)
    assert f(torch.ones(6)).tolist() == [2.0] * 6
    with pytest.raises(reflib.ReflibError, match=r"Eq\(Mod\(s\d+, 2\), 0\) holds .* = 7 \(x\.shape\[0\]\)$"):
        f(torch.ones(7))
    with pytest.raises(reflib.ReflibError, match=r"Ne\(s\d+, 10\) holds .* = 10 \(x\.shape\[0\]\)$"):
        f(torch.ones(10))


# -- ints -----------------------------------------------------------------------------------------------
class Sized(torch.nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return torch.zeros(n * 4) + x.sum()


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_ints_that_are_no_sizes(wrapper: str) -> None:
    x = torch.randn(9)
    f = reflib.compile(torch.export.export(Sized(), (x, 7), dynamic_shapes=(None, Dim.DYNAMIC)), wrapper=wrapper)
    taken = ways_of(f)
    torch.testing.assert_close(f(x, 3), Sized()(x, 3))
    assert taken == ["slow"] * (wrapper == "python")
    for n in (0, -1, -(2**63), 2**62 + 1, 2**63 - 1, 2**63, 2**70):  # 4 * (2^62 + 1) is 4 in 64 bits
        with pytest.raises(reflib.ReflibError, match=r"n: -\d+, which was exported for 0 or more|sizes; here|64 bits"):
            f(x, n)
    for wrong in (2.0, True, None, torch.tensor(3)):
        with pytest.raises(reflib.ReflibError, match="argument n: expected an int"):
            f(x, wrong)


class Flat(torch.nn.Module):
    def forward(self, x: Tensor, n: int, k: int) -> Tensor:
        return x.reshape(n * k) * 2


class Doubled(torch.nn.Module):
    def forward(self, x: Tensor, n: int) -> Any:
        return x + 1, n * 2, n


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_ints_that_are_only_compared_or_returned(wrapper: str) -> None:
    f = compiled(Flat(), torch.randn(12), 3, 4, wrapper=wrapper)
    assert f(torch.ones(10), 2, 5).tolist() == [2.0] * 10
    for n, k in ((2**62 + 1, 4), (2**61 + 1, 8), (-(2**62) - 1, -4)):  # 4, 8 and 4 in 64 bits
        x = torch.ones(n * k % 2**64)
        with pytest.raises(reflib.ReflibError, match=r"exported where .* holds of|[nk]: -\d+, which was exported for"):
            f(x, n, k)
        with pytest.raises(ArgumentError, match=r"so that 64 bits hold what is made of argument [nk], holds|-\d+$"):
            f._call.load()([x, n, k])
    g = compiled(Doubled(), torch.randn(3), 5, wrapper=wrapper)
    for n in (7, 0, 2**61):
        assert g(torch.ones(3), n)[1:] == (2 * n, n)
    for n in (2**62, 2**63 - 1):
        with pytest.raises(reflib.ReflibError, match=r"64 bits hold what is made of argument n, holds"):
            g(torch.ones(3), n)
    for n in (2**63, -(2**63) - 1, 2**4000):
        with pytest.raises(reflib.ReflibError, match=r"argument n: -?0x[0-9a-f]+ does not fit in 64 bits"):
            g(torch.ones(3), n)


def test_where_a_number_is_from() -> None:
    """The message of a guard says so as the caller writes it."""
    f = compiled(OfBoth(), torch.randn(7, 3), 4)
    with pytest.raises(reflib.ReflibError, match=r"here s\d+ = 5 \(x\.shape\[0\]\), s\d+ = 9 \(n\)$"):
        f(torch.randn(5, 3), 9)
    with pytest.raises(reflib.ReflibError, match=r"^argument n: -1, which was exported for 2 or more$"):
        f(torch.randn(5, 3), -1)


class OfBoth(torch.nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return x + torch.ones(n).sum() if x.shape[0] > n else x * 2


def test_an_int_that_two_arguments_tell() -> None:
    class Both(torch.nn.Module):
        def forward(self, n: int, x: Tensor, m: int) -> Tensor:
            torch._check(n == m)
            return x + torch.arange(n) + torch.arange(m)

    f = reflib.compile(
        torch.export.export(Both(), (7, torch.randn(7), 7), dynamic_shapes=(Dim.AUTO, {0: Dim.AUTO}, Dim.AUTO)),
        wrapper="cpp",
    )
    taken = ways_of(f)
    x = torch.randn(5)
    torch.testing.assert_close(f(5, x, 5), Both()(5, x, 5))
    assert not taken
    for wrong in ((5, x, 6), (6, x, 6), (6, x, 5)):
        with pytest.raises(reflib.ReflibError, match=r"the size of another argument|size 5 in dimension 0|holds"):
            f(*wrong)
    with pytest.raises(ArgumentError, match=r"another argument says|expected|holds"):
        f._call.load()([5, x, 6])


# -- symbols that no size gives directly -----------------------------------------------------------------
def by_hand(shape: tuple[Any, ...], *guards: Guard) -> tuple[Program, Convention]:
    """A program of one argument, which it returns."""
    cpu, strides = torch.device("cpu"), (expr(1),) * len(shape)
    x = Buffer("x", torch.float32, cpu, shape, strides, "input")
    program = Program(("x",), {"x": x}, (), (View("x", shape, strides, expr(0), torch.float32),))
    arguments = (Argument("x", Expected(torch.float32, cpu, shape, strides)),)
    return program, Convention(("",), arguments, (), None, None, {}, ("cpu",), guards)


def test_a_symbol_that_no_argument_tells() -> None:
    a, b = expr(Sym("a")), expr(Sym("b"))
    with pytest.raises(reflib.ReflibError, match=r"the size a\*b of argument x cannot be checked .* what a is"):
        checked(*by_hand((a * b,)))
    guarded = by_hand((a,), Guard("at_least", b - a - 1, "b > a"))
    with pytest.raises(reflib.ReflibError, match=r"exported where b > a holds of its sizes, which .* what b is"):
        checked(*guarded)
    made = replace(guarded[1], in_spec=pytree.tree_structure(((0,), {})))  # of a package that makes no sense
    with pytest.raises(reflib.ReflibError, match=r"b > a, which was assumed of its sizes, .* what b is"):
        ExportedCallable(made, {}, lambda args: args)


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_a_size_that_is_known_from_later_arguments(wrapper: str) -> None:
    class Flat(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y.reshape(-1)

    shapes = ({0: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.AUTO})
    f = reflib.compile(
        torch.export.export(Flat(), (torch.randn(12), torch.randn(3, 4)), dynamic_shapes=shapes), wrapper=wrapper
    )
    x, y = torch.randn(10), torch.randn(2, 5)
    torch.testing.assert_close(f(x, y), Flat()(x, y))
    with pytest.raises(reflib.ReflibError, match=r"argument x: size 11 in dimension 0, .* s\d+\*s\d+ = 10"):
        f(torch.randn(11), y)


# -- sizes and ints of 0 and 1, which torch.export promises although it traced with more --------------
DYNAMIC = torch.export.Dim.DYNAMIC


def solved(a: torch.Tensor, b: torch.Tensor) -> Any:
    return torch.linalg.solve(a, b) + 1, torch.linalg.inv(a)


X, A, B = torch.randn(20), torch.randn(4, 4) + 4 * torch.eye(4), torch.randn(4, 2)
ROWS = {0: torch.export.Dim("rows", min=0)}
Some = tuple[Any, ...]
# what it is, example arguments, which sizes and ints may change, calls that are right, calls that are refused, and why
CASES: dict[str, tuple[Callable[..., Any], Some, Some | None, list[Some], list[Some], str]] = {
    "ints": (lambda x, n: (x.sum() * max(n, 2), n // 2), (X[:6], 5), ({0: DYNAMIC}, DYNAMIC),
             [(X[:6], n) for n in (0, 1, 2, 3, 7)], [], ""),
    "sizes": (lambda x: (x.new_ones(max(x.shape[0], 2)), x.sum()), (X[:6],), (ROWS,),
              [(X[:n],) for n in (0, 1, 2, 6)], [], ""),
    "a guard that only small ones break": (
        lambda x, n: x + 1 if max(n, 1) == n else x - 1, (X[:6], 3), ({0: DYNAMIC}, DYNAMIC),
        [(X[:6], 1)], [(X[:6], 0)], r"it was exported where Eq\(Max\(1, \w+\), \w+\) holds"),
    # (torch.export looked whether a size is 1, and checks that too)
    "a guard on a product": (
        lambda x, n, k: x.view(n, k) + n, (X[:12], 3, 4), ({0: DYNAMIC}, DYNAMIC, DYNAMIC),
        [(X, 5, 4), (X, 4, 5), (X, 10, 2)], [(X, 5, 5), (X, 1, 20)], "it was exported where"),
    # torch.export threads a token through them, so that they stay, and in order
    "ops with effects": (solved, (A, B), None, [(A, B)], [(torch.zeros(4, 4), B)], "singular"),
}  # fmt: skip


@pytest.fixture(params=["python", "cpp", "package"])
def ahead(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """(model, args, dynamic_shapes) -> it, ahead ahead of its call."""

    def make(model: torch.nn.Module, args: tuple[Any, ...], dynamic_shapes: Any = None) -> Callable[..., Any]:
        if request.param == "package":
            path = tmp_path / "model.reflib"
            return reflib.load(reflib.aot_compile(model, args, path, "cpu", dynamic_shapes=dynamic_shapes))
        exported = torch.export.export(model, args, dynamic_shapes=dynamic_shapes)
        return reflib.compile(exported, wrapper=request.param)

    return make


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_small_sizes(name: str, ahead: Callable[..., Any]) -> None:
    fn, args, shapes, right, refused, why = CASES[name]
    f = ahead(Alone(fn), args, shapes and (shapes,))
    for call in right:
        torch.testing.assert_close(f(*call), fn(*call))
    for call in refused:
        with pytest.raises(Exception, match=why):
            f(*call)


def test_ops_with_effects_keep_their_order() -> None:
    e = reflib.explain(torch.export.export(Alone(solved), (A, B)))
    checks = [i for i, n in enumerate(e.scheduled.nodes) if "check_errors" in str(getattr(n, "target", ""))]
    assert len(checks) == 2 and checks[0] in dependencies(e.scheduled).before[checks[1]]


def test_compiling_leaves_the_program_as_it_was() -> None:
    fn, args, shapes, *_ = CASES["a guard that only small ones break"]
    exported = torch.export.export(Alone(fn), args, dynamic_shapes=(shapes,))
    for wrapper in ("python", "cpp", "python"):
        torch.testing.assert_close(reflib.compile(exported, wrapper=wrapper)(X[:6], 1), X[:6] + 1)
