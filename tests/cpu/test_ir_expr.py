"""Index expressions against plain integers: whatever is simplified or proved must hold for every value."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflib.ir.expr import (
    Sym,
    Var,
    ceildiv,
    divide_exact,
    expr,
    floordiv,
    in_range,
    max_value,
    maximum,
    minimum,
    mod,
    nonneg,
    product,
    upper_bound,
)  # fmt: skip

SYMS = [Sym("s0", 2), Sym("s1", 0), Sym("s2", 1, hi=9)]
VARS = [Var("i", expr(8)), Var("j", expr(6)), Var("k", expr(SYMS[0])), Var("l", expr(SYMS[0]) * SYMS[2])]
ATOMS = [expr(a) for a in SYMS + VARS]
DIVISORS = [expr(n) for n in (1, 2, 3, 4, 6, 8, 12)] + [expr(SYMS[0]), expr(SYMS[2]) * 4, expr(SYMS[0]) * SYMS[2]]
VALUES = st.fixed_dictionaries({"s0": st.integers(2, 7), "s1": st.integers(0, 5), "s2": st.integers(1, 9)})


class Pair:
    """An Expr and the function of an environment that it must equal."""

    def __init__(self, e, fn):
        self.e, self.fn = e, fn


def combine(children):
    ops = {
        "+": (lambda a, b: a + b, lambda x, y: x + y),
        "-": (lambda a, b: a - b, lambda x, y: x - y),
        "*": (lambda a, b: a * b, lambda x, y: x * y),
        "max": (maximum, max),
        "min": (minimum, min),
    }

    def binary(name, a, b):
        fe, fv = ops[name]
        return Pair(fe(a.e, b.e), lambda env: fv(a.fn(env), b.fn(env)))

    def divide(fn, a, d):
        make = floordiv if fn == "//" else mod
        value = (lambda x, y: x // y) if fn == "//" else (lambda x, y: x % y)
        return Pair(make(a.e, d), lambda env: value(a.fn(env), d.evaluate(env)))

    return st.one_of(
        st.builds(binary, st.sampled_from(["+", "+", "-", "*", "max", "min"]), children, children),
        st.builds(divide, st.sampled_from(["//", "%"]), children, st.sampled_from(DIVISORS)),
    )


LEAVES = st.one_of(
    st.sampled_from(ATOMS).map(lambda e: Pair(e, e.evaluate)),
    st.integers(-9, 9).map(lambda n: Pair(expr(n), lambda env, n=n: n)),
)
PAIRS = st.recursive(LEAVES, combine, max_leaves=7)


def environment(data, values):
    env = dict(values)
    for v in VARS:
        env[v.name] = data.draw(st.integers(0, max(0, v.size.evaluate(values) - 1)))
    return env


@settings(max_examples=400, deadline=None)
@given(PAIRS, VALUES, st.data())
def test_simplified_equals_plain(pair, values, data):
    env = environment(data, values)
    assert pair.e.evaluate(env) == pair.fn(env)


@settings(max_examples=400, deadline=None)
@given(PAIRS, VALUES, st.data())
def test_proofs_are_sound(pair, values, data):
    env = environment(data, values)
    value = pair.fn(env)
    if nonneg(pair.e):
        assert value >= 0
    top = upper_bound(pair.e)
    if top is not None:
        assert value <= top.evaluate(env)
    if max_value(pair.e) is not None:
        assert value <= max_value(pair.e)


@settings(max_examples=200, deadline=None)
@given(PAIRS, PAIRS, VALUES, st.data())
def test_substitution(pair, new, values, data):
    env = environment(data, values)
    replaced = pair.e.subs({VARS[0]: new.e % 8})
    assert replaced.evaluate(env) == pair.fn({**env, "i": new.fn(env) % 8})


@settings(max_examples=200, deadline=None)
@given(PAIRS, st.sampled_from(DIVISORS), VALUES, st.data())
def test_divide_exact(pair, d, values, data):
    env = environment(data, values)
    q = divide_exact(pair.e, d)
    if q is not None:
        assert q.evaluate(env) * d.evaluate(env) == pair.fn(env)
    assert divide_exact(pair.e * d, d) is not None


@settings(max_examples=200, deadline=None)
@given(PAIRS)
def test_text_is_python(pair):
    env = {"s0": 3, "s1": 2, "s2": 4, "i": 5, "j": 4, "k": 1, "l": 7}
    assert eval(str(pair.e), {"max": max, "min": min}, env) == pair.e.evaluate(env)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ((ATOMS[3] * 8 + ATOMS[3]) // 8, ATOMS[3] + ATOMS[3] // 8),
        ((ATOMS[4] * 8 + ATOMS[3]) // 8, ATOMS[4]),
        ((ATOMS[4] * 8 + 7 - ATOMS[3]) // 8, ATOMS[4]),
        ((ATOMS[4] * 8 + 7 - ATOMS[3]) % 8, 7 - ATOMS[3]),
        ((ATOMS[4] * 8 + ATOMS[3]) % 8, ATOMS[3]),
        ((ATOMS[3] * ATOMS[0] + ATOMS[5]) // ATOMS[0], ATOMS[3]),
        ((ATOMS[3] * ATOMS[0] + ATOMS[5]) % ATOMS[0], ATOMS[5]),
        ((ATOMS[3] // 4) * 4 + ATOMS[3] % 4, ATOMS[3]),
        ((ATOMS[0] * ATOMS[2]) // ATOMS[0], ATOMS[2]),
        (ceildiv(ATOMS[0] * 16, 16), ATOMS[0]),
        (ATOMS[3] % 6 % 3, ATOMS[3] % 3),
    ],
)
def test_simplifies(got, want):
    assert got == want


def test_digits_of_a_cut_index_join() -> None:
    """A row is cut into pieces that are no multiple of an image: what a sum in parts reads is still one run."""
    r, x = expr(Var("r", expr(4416))), expr(Var("x", expr(1013)))
    n, size = r + 4416 * x, [expr(s) for s in (15, 405, 24300)]
    places = 405 * floordiv(mod(n, size[2]), size[1]) + 24300 * floordiv(n, size[2])
    assert mod(n, size[0]) + 15 * floordiv(mod(n, size[1]), size[0]) + places == n
    assert floordiv(mod(n, size[2]), size[1]) + 60 * floordiv(n, size[2]) == floordiv(n, size[1])


RADICES = [expr(n) for n in (2, 3, 4, 5, 8, 64)] + [expr(SYMS[0]), expr(SYMS[2]), expr(SYMS[2]) * 4]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(RADICES), min_size=2, max_size=5), st.permutations(range(5)), st.data())
def test_neighbouring_digits_join(radices, order, data):
    """Digits of a number in mixed radices, one above another, weighed as in the number: one digit of a larger radix, in
    whatever order they are added."""
    x, first = expr(Sym("x", 0)), data.draw(st.integers(0, len(radices) - 2))
    digits, below, weight = [], product(radices[:first]), expr(1)
    for radix in radices[first:]:
        digits.append(mod(floordiv(x, below * weight), radix) * weight)
        weight = weight * radix
    total = sum((digits[i] for i in order if i < len(digits)), expr(3))
    assert total == mod(floordiv(x, below), weight) + 3


def test_range():
    i, j = VARS[:2]
    assert in_range(expr(i) * 6 + j, expr(48))
    assert not in_range(expr(i) * 6 + j, expr(47))
    assert nonneg(expr(SYMS[0]) - 2) and not nonneg(expr(SYMS[0]) - 3)


def test_truth_value_is_refused():
    with pytest.raises(TypeError):
        bool(expr(SYMS[0]))


def test_linear():
    """A quotient is not, and need not be defined at 0: half of a size, and a size over half of it."""
    s = SYMS[0]
    assert (3 * expr(s) + 2).linear() == (s, 3, 2)
    assert (expr(s) // (expr(s) // 2)).linear() is None and (expr(s) // 2).linear() is None
