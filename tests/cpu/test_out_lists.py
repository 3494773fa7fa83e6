"""Out variants that fill lists of tensors, or are known by their schema alone, write where the plan says."""

from typing import Any

import pytest
import torch
from torch import Tensor

import reflib
from reflib.ir.program import Extern, walk

LIB = torch.library.Library("out_lists_test", "FRAGMENT")
OPS = torch.ops.out_lists_test
BEHAVES = {"mode": "well"}


def parts(x: Tensor, n: int) -> list[Tensor]:
    return [x * (i + 1) for i in range(n)]


def parts_out(x: Tensor, n: int, *, out: list[Tensor]) -> None:
    for t, v in zip(out, parts(x, n), strict=True):
        if BEHAVES["mode"] == "resizes":
            t.resize_(t.numel() + 1)
        t.copy_(v) if BEHAVES["mode"] == "well" else None


def mixed(x: Tensor) -> tuple[list[Tensor], Tensor]:
    return [x + 1, x + 2], x.sum(1)


def mixed_out(x: Tensor, *, out: list[Tensor], sums: Tensor) -> tuple[list[Tensor], Tensor]:
    for t, v in zip((*out, sums), (*mixed(x)[0], mixed(x)[1]), strict=True):
        t.copy_(v)
    returned = {"another": [out[0], out[0]], "fewer": out[:1], "nothing": None, "half": [out[0], None]}
    return returned.get(BEHAVES["mode"], out), sums


def define(name: str, schema: str, fn: Any, fake: Any, **more: Any) -> None:
    LIB.define(name + schema, **more)
    LIB.impl(name, fn, "CPU")
    LIB.impl(name, fake, "Meta")


define("parts", "(Tensor x, int n) -> Tensor[]", parts, parts)
define("parts.out", "(Tensor x, int n, *, Tensor(a!)[] out) -> ()", parts_out, lambda *_, out: None)
define("mixed", "(Tensor x) -> (Tensor[], Tensor)", mixed, mixed)
define(
    "mixed.many_out", "(Tensor x, *, Tensor(a!)[] out, Tensor(b!) sums) -> (Tensor(a!)[], Tensor(b!))", mixed_out,
    lambda x, *, out, sums: (out, sums),
)  # fmt: skip
define("half", "(Tensor x) -> Tensor", lambda x: x / 2, torch.empty_like)
define(
    "half.out", "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", lambda x, *, out: out.copy_(x / 2), lambda x, *, out: out
)
define("sums", "(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like)
# it adds to what is there: no name of an out variant
define("sums.onto", "(Tensor x, *, Tensor(a!) to) -> Tensor(a!)", lambda x, *, to: to.add_(x), lambda x, *, to: to)
define("other", "(Tensor x, int n) -> Tensor", lambda x, n: x * n, lambda x, n: torch.empty_like(x))
define("other.out", "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", lambda x, *, out: out, lambda x, *, out: out)


def joined(x: Tensor) -> Tensor:
    a, b, c = OPS.parts(x + 1, 3)
    return torch.cat([a, x, b, c], 0)


def apart(x: Tensor) -> Any:
    a, b = OPS.parts(x + 1, 2)
    return a, b.exp()


def of_both(x: Tensor) -> Any:
    (a, b), sums = OPS.mixed(x)
    return torch.cat([b, a], 0), sums


def of_both_added(x: Tensor, to: Tensor) -> Any:
    joined, sums = of_both(x)
    to.add_(sums.sum())
    return joined, sums


def one(x: Tensor) -> Tensor:
    return torch.cat([OPS.half(x), x.exp()], 0)


X = torch.randn(6, 16)
EACH = X.numel() * 4
# function, the call's overload, bytes of all temporaries at most: nothing is stored twice
CASES = {
    "joined": (joined, "parts.out", 5 * EACH),
    "apart": (apart, "parts.out", 4 * EACH),
    "of both": (of_both, "mixed.many_out", 2 * EACH + 24),
    "one": (one, "half.out", 2 * EACH),
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_written_where_they_are_wanted(case: str) -> None:
    fn, overload, most = CASES[case]
    with torch.no_grad():
        e = reflib.explain(fn, X)
        calls = [n for n in walk(e.scheduled.nodes) if isinstance(n, Extern)]
        assert [str(n.out[0]).partition(".")[2] for n in calls if n.out is not None] == [overload]
        made = {b for n in walk(e.scheduled.nodes) for b in n.writes() if e.scheduled.buffers[b].kind == "temp"}
        assert sum(e.scheduled.buffers[b].nbytes.hint() for b in made) <= most


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"wrapper": "cpp"}, {"wrapper": "cpp", "arena": True}])
def test_as_eager(options: dict[str, Any]) -> None:
    def fn(x: Tensor) -> Any:
        return [f(x) for f, *_ in CASES.values()]

    with torch.no_grad():
        torch.testing.assert_close(reflib.compile(fn, verify=True, **options)(X), fn(X))


def test_in_a_package(tmp_path: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return joined(x), of_both(x)

    with torch.no_grad():
        path = reflib.aot_compile(Model(), (X,), tmp_path / "lists.reflib", archs=["cpu"])
        torch.testing.assert_close(reflib.load(path)(X), Model()(X))


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("fn, mode, op", [(apart, "resizes", "parts.out"), (of_both, "another", "mixed.many_out")])
def test_a_list_that_is_not_what_was_given(fn: Any, mode: str, op: str, wrapper: str) -> None:
    compiled = reflib.compile(fn, wrapper=wrapper)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), fn(X))
        BEHAVES["mode"] = mode
        try:
            with pytest.raises(reflib.ReflibError, match=rf"{op}: its result \d is not the tensor that it was given"):
                compiled(X)
        finally:
            BEHAVES["mode"] = "well"
        torch.testing.assert_close(compiled(X), fn(X))


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_an_out_variant_that_returns_no_such_list(wrapper: str) -> None:
    compiled, held = reflib.compile(of_both_added, wrapper=wrapper), torch.zeros(())
    said = {"fewer": "returned 2 tensors where it was given 3 to write to"}
    with torch.no_grad():
        compiled(X, held.clone())
        for mode in ("fewer", "nothing", "half"):
            BEHAVES["mode"] = mode
            schema = r"returned something else where its schema promised \(List\[Tensor\], Tensor\): Unable to cast"
            try:
                with pytest.raises(reflib.ReflibError, match=rf"mixed\.many_out {said.get(mode, schema)}"):
                    compiled(X, held)
            finally:
                BEHAVES["mode"] = "well"
            assert held == 0  # nothing is overwritten
        torch.testing.assert_close(compiled(X, held), of_both(X))


def test_what_is_no_out_variant() -> None:
    """One that reads what it writes to, and one that takes other arguments, without the tag."""

    def fn(x: Tensor) -> Any:
        return OPS.sums(x) * 2, OPS.other(x, 3)

    with torch.no_grad():
        calls = [n for n in walk(reflib.explain(fn, X).scheduled.nodes) if isinstance(n, Extern)]
        assert len(calls) == 2 and all(n.out is None for n in calls)
        torch.testing.assert_close(reflib.compile(fn)(X), fn(X))


@pytest.mark.parametrize("dynamic", [False, True])
def test_lists_of_copies_and_norms_are_kernels(dynamic: bool) -> None:
    def fn(x: Tensor) -> Any:
        y = x * 2
        norms = [torch._foreach_norm([x, y], n) for n in (1, 2, float("inf"))]
        return torch.split_copy(y, 5, -1), torch.unbind_copy(y.t(), -1), norms, torch._foreach_norm([x.half()])

    with torch.no_grad():
        assert not [n for n in walk(reflib.explain(fn, X).scheduled.nodes) if isinstance(n, Extern)]
        got, want = reflib.compile(fn, dynamic=dynamic)(X), fn(X)
    torch.testing.assert_close(got, want)
    assert [t.stride() for t in got[0] + got[1]] == [t.stride() for t in want[0] + want[1]]


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_results_that_are_not_there(wrapper: str) -> None:
    """The error names the op."""
    lib = torch.library.Library(f"out_lists_none_{wrapper}", "FRAGMENT")
    made = {"nothing": lambda x: None, "half": lambda x: (x + 1, None), "fewer": lambda x: [x + 1]}
    for name, results in {"nothing": "Tensor", "half": "(Tensor, Tensor)", "fewer": "Tensor[]"}.items():
        lib.define(f"{name}(Tensor x) -> {results}")
        lib.impl(name, made[name], "CPU")
        fake = torch.empty_like if name == "nothing" else lambda x: [torch.empty_like(x), torch.empty_like(x)]
        torch.library.register_fake(f"{lib.ns}::{name}", fake, lib=lib)

        def fn(x: Tensor, op: Any = getattr(getattr(torch.ops, lib.ns), name)) -> Any:
            made = op(x)
            return made + 1 if isinstance(made, Tensor) else made[0] + made[1]

        with pytest.raises(reflib.ReflibError, match=rf"{name}\.default returned .* where its meta function promised"):
            reflib.compile(fn, wrapper=wrapper)(X)


NO_LIST = {
    "none": None, "a tensor": X + 1, "a number": 3, "text": "ab", "none in it": [X + 1, None],
    "a list in it": [[X + 1]], "a number in it": [X + 1, 3], "nothing in it": [], "one": [X + 1],
    "three": [X + 1, X + 2, X + 3],
}  # fmt: skip


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_what_is_no_such_list(wrapper: str) -> None:
    """The error names the op and what was promised."""
    given: list[Any] = [[X + 1, X + 2]]
    name = f"out_lists_of_{wrapper}::two"

    @torch.library.custom_op(name, mutates_args=())
    def two(x: Tensor) -> list[Tensor]:
        return given[0]

    two.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x)])

    def fn(x: Tensor, to: Tensor) -> Tensor:
        a, b = two(x)
        to.add_(a)
        return a * b

    compiled, held = reflib.compile(fn, wrapper=wrapper), torch.zeros_like(X)
    with torch.no_grad():
        compiled(X, X.clone())
        for what, given[0] in NO_LIST.items():
            count = what in ("nothing in it", "one", "three")
            said = r"\d tensors where its meta function promised 2"
            unlike = r"something else where its schema promised \(List\[Tensor\]\): Unable to cast"
            with pytest.raises(reflib.ReflibError, match=rf"two\.default returned {said if count else unlike}"):
                compiled(X, held)
            assert not held.any()  # nothing is overwritten


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_what_is_no_pair(wrapper: str) -> None:
    given: list[Any] = [(X + 1, X + 2)]
    lib = torch.library.Library(f"out_lists_pair_{wrapper}", "FRAGMENT")
    lib.define("pair(Tensor x) -> (Tensor, Tensor)")
    lib.impl("pair", lambda x: given[0], "CPU")
    torch.library.register_fake(f"{lib.ns}::pair", lambda x: (torch.empty_like(x), torch.empty_like(x)), lib=lib)
    op = getattr(torch.ops, lib.ns).pair

    def fn(x: Tensor) -> Tensor:
        a, b = op(x)
        return a * b

    compiled = reflib.compile(fn, wrapper=wrapper)
    with torch.no_grad():
        compiled(X)
        for given[0] in (None, 3, "ab", (X.clone(), 3)):
            unlike = r"pair\.default returned something else where its schema promised \(Tensor, Tensor\): "
            with pytest.raises(reflib.ReflibError, match=unlike):
                compiled(X)
        given[0] = [X.clone()]
        with pytest.raises(reflib.ReflibError, match=r"pair\.default returned 1 tensors where its meta .* promised 2"):
            compiled(X)


def test_an_error_of_the_op_itself_is_passed_on() -> None:
    """With the same words."""
    lib = torch.library.Library("out_lists_own_error", "FRAGMENT")
    lib.define("fails(Tensor x) -> Tensor[]")

    def fails(x: Tensor) -> Any:
        raise RuntimeError("Unable to cast a spell")

    lib.impl("fails", fails, "CPU")
    torch.library.register_fake(f"{lib.ns}::fails", lambda x: [torch.empty_like(x)], lib=lib)
    with pytest.raises(RuntimeError, match=r"^Unable to cast a spell"):
        reflib.compile(lambda x: torch.ops.out_lists_own_error.fails(x)[0] * 2)(X)
