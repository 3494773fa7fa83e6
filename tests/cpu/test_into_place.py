"""Calls write their results into storage that the plan chose: into parts of larger tensors too, with no copy."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.capture.graph import Graph
from reflib.fuse.places import apart
from reflib.ir.expr import Ref, Var, expr
from reflib.ir.interpret import interpret
from reflib.ir.program import Buffer, Extern, walk
from reflib.lower.decompositions import decompositions
from reflib.options import Options
from reflib.pipeline import run
from tests.semantics import Compiled

RANDOM = random.Random(31)
N, K, A, B = RANDOM.randrange(40, 70), RANDOM.randrange(20, 40), RANDOM.randrange(9, 20), RANDOM.randrange(9, 20)
torch.manual_seed(RANDOM.randrange(1000))
X, W, V, Y = torch.randn(N, K), torch.randn(K, A), torch.randn(K, B), torch.randn(N, B)
X5 = X[:, :5].contiguous()
NA, NB, NK = 4 * N * A, 4 * N * B, 4 * N * K  # bytes


def read_elsewhere(x: Tensor, w: Tensor, v: Tensor, y: Tensor) -> Any:
    a = x @ w
    return torch.cat([a, x @ v], 1), a.exp().sum(1), (a + 1).relu().amax(0)


def values_and_positions(x: Tensor, w: Tensor, v: Tensor, y: Tensor) -> Any:
    values, positions = x.topk(4, 1)
    return torch.cat([y, values], 1), torch.stack([positions, positions + 1])


def written_slice(x: Tensor, w: Tensor, v: Tensor, y: Tensor) -> Tensor:
    z = torch.zeros(N, A + 3)
    z[:, 3:] = x @ w
    return z


def onto_an_argument(x: Tensor, w: Tensor, v: Tensor, y: Tensor) -> Tensor:
    y.copy_(x @ v)
    return y.sum(0)


def twice(x: Tensor, w: Tensor, v: Tensor, y: Tensor) -> Tensor:
    a = x @ w
    return torch.cat([a, a], 1)


def in_two(x: Tensor, w: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = x @ w
    return torch.cat([a, y], 1), torch.cat([y, a], 1), F.pad(a, (2, 0))


def reduced(x: Tensor, w: Tensor, v: Tensor, y: Tensor) -> Any:
    a, columns = y.softmax(1), y.split(4, 1)
    return (
        torch.cat([x.softmax(1), a], 1),  # two kernels, two parts
        torch.cat([a, (y + 1).softmax(1)]),  # one kernel, two parts
        torch.cat([a, x, a], 1),
        torch.cat([c.softmax(1) for c in columns], 1),
        torch.cat(columns[::-1], 1),
    )


def padded_and_read(x: Tensor, w: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = x * x.sin() + 1
    p = F.pad(a, (0, 3))
    q = p @ p.t()
    return q, a.softmax(1), a @ w, a * q.sum(1, keepdim=True)


def gathered(x: Tensor, w: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a = y.exp()
    whole = torch.cat([a, x.gather(1, x.argsort(1))], 1)
    return whole @ whole.t(), a.softmax(1)


# what is computed, and the bytes of all temporaries: of results and of what must be stored, nothing twice
CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "of products": (lambda x, w, v, y: torch.cat([x @ w, x @ v], 1), NA + NB),
    "of a product and a kernel": (lambda x, w, v, y: torch.cat([x @ w, y + 1], 1), NA + NB),
    "of a product and a softmax": (lambda x, w, v, y: torch.cat([y.softmax(1), x @ w], 1), NA + NB),
    "of rows": (lambda x, w, v, y: torch.cat([x @ v, y.exp()]), 2 * NB),
    "of kernels": (lambda x, w, v, y: torch.cat([x.relu(), y.exp()], 1), NK + NB),
    "nested": (lambda x, w, v, y: torch.cat([torch.cat([x @ w, x @ v], 1), x @ v], 1), NA + 2 * NB),
    "stacked": (lambda x, w, v, y: torch.stack([x @ v, x @ v + y], 1), 3 * NB),
    "padded": (lambda x, w, v, y: F.pad(x @ w, (1, 2, 3, 0), value=2.5), 4 * (N + 3) * (A + 3) + 4 * N * (A + 3)),
    "padded on one side": (lambda x, w, v, y: F.pad(x @ w, (0, 2)), 4 * N * (A + 2)),
    "a part that is also read": (read_elsewhere, NA + NB + 4 * (N + A)),
    "several results": (values_and_positions, NB + 4 * N * 4 + 3 * 8 * N * 4),
    "padded and read": (padded_and_read, 4 * N * (K + 3) + 2 * NK + NA + 4 * N * N + 4 * N),
    "of a gather": (gathered, 2 * NB + 2 * NK + 4 * N * N + 2 * 8 * N * K),
    "a slice that is written": (written_slice, 4 * N * (A + 3)),
    "onto an argument": (onto_an_argument, 4 * B),
    "then a product": (lambda x, w, v, y: torch.cat([x @ w, x @ v], 1).t() @ x, NA + NB + 4 * (A + B) * K),
    "twice": (twice, 2 * NA),
    "in two tensors": (in_two, 2 * (NA + NB) + NA + 8 * N),
    "by kernels that reduce": (reduced, 2 * NK + 7 * NB),
    "by a special function": (lambda x, w, v, y: torch.cat([torch.special.i0(x), y], 1), NK + NB),
    "of halves": (
        lambda x, w, v, y: torch.cat([x.half() @ w.half(), y.half()], 1),
        NK // 2 + 2 * K * A + (NA + NB) // 2,
    ),
}


MORE = ("in two tensors", "nested", "several results", "by a special function", "by kernels that reduce")


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_stored_twice(case: str) -> None:
    """As eager, with sizes that are numbers and that are symbols; then what is stored."""
    fn, most = CASES[case]
    more = [(True, "python"), (False, "cpp")] if case in MORE else []
    for dynamic, wrapper in ((False, "python"), *more):
        torch._dynamo.reset()
        mine, theirs = [t.clone() for t in (X, W, V, Y)], [t.clone() for t in (X, W, V, Y)]
        compiled = Compiled(fn, dynamic, wrapper=wrapper)
        with torch.no_grad():
            got, want = compiled(*mine), fn(*theirs)
        torch.testing.assert_close((got, mine), (want, theirs), atol=1e-2 if case == "of halves" else 1e-4, rtol=1e-3)
        assert strides(got) == strides(want)
        program = compiled.stages[0].scheduled
        made = {b for n in walk(program.nodes) for b in n.writes() if program.buffers[b].kind == "temp"}
        stored = sum(program.buffers[b].nbytes.hint() for b in made)
        assert stored <= most or dynamic, {b: program.buffers[b].nbytes.hint() for b in made}


def returned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a = x * y
    return F.pad(a, (0, 64)) @ F.pad(y, (0, 64)).t(), a


def summed_rows(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = x * y
    p = F.pad(a, (0, 64))
    return p @ p.t(), p.exp().sum(1), a.cumsum(0)


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_a_padded_tensor_serves_who_reads_no_padding(target: str) -> None:
    """What is padded is computed once, where it is stored: not where another kernel would read the padded one again."""
    x, y = torch.randn(128, 256), torch.randn(128, 256)

    def reads(fn: Callable[..., Any], *args: Tensor) -> int:
        return sum("arg0_1" in n.reads() for n in reflib.explain(fn, *args, target=target).scheduled.nodes)

    assert reads(padded_and_read, x, torch.randn(256, 8), y, y) == reads(returned, x, y) == 1
    assert reads(summed_rows, x, y) <= 2


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_rows_are_read_once_by_what_normalizes_them_and_stores_its_part(target: str) -> None:
    """In half precision too, where a norm's result is some steps away from its sums."""
    x, y = torch.randn(2, RANDOM.randrange(60, 90), 256, dtype=torch.bfloat16)
    w = torch.randn(256, dtype=torch.bfloat16)
    norms = [lambda t: t.softmax(1), lambda t: F.layer_norm(t, (256,), w, w), lambda t: F.rms_norm(t, (256,), w).relu()]
    for norm in norms:
        for joined in (torch.cat, lambda ts: torch.cat(ts, 1), lambda ts: torch.stack(ts, 1)):
            e = reflib.explain(lambda x, y: joined([norm(x), norm(y)]), x, y, target=target)  # noqa: B023
            large = [b.name for b in e.scheduled.buffers.values() if b.nbytes.hint() >= x.nbytes]
            reads = [b for n in e.scheduled.nodes for b in n.reads() if b in large]
            assert len(reads) == len(set(reads)) == 2 and e.memory.peak_bytes == 2 * x.nbytes


def test_sums_and_products_in_short_rows() -> None:
    """Loops of known length, which a C++ compiler unrolls: g++ 12 with AVX-512 contracted one part with another."""
    r = random.Random(2)
    sums: list[Callable[[Tensor, Tensor], Tensor]]
    sums = [lambda t, m: t - m, lambda t, m: t + m, lambda t, m: t * m + 1, lambda t, m: m - t]
    makers = [lambda t, m: t, lambda t, m: t * 2, lambda t, m: t * m, lambda t, m: -(t * m), *sums]
    plans = [[r.choice(sums), r.choice(makers), r.choice(makers)] for _ in range(12)]
    plans = [p if r.random() < 0.5 else p[::-1] for p in plans]
    inputs = [torch.randn(7, r.randint(12, 40)) for _ in range(4)], torch.randn(7, 1)

    def fn(xs: list[Tensor], m: Tensor) -> list[Tensor]:
        return [torch.cat([f(xs[(i + k) % 4], m) for k, f in enumerate(plan)], 1) for i, plan in enumerate(plans)]

    got = reflib.compile(fn, dynamic=False)(*inputs)
    torch.testing.assert_close(got, fn(*inputs), atol=1e-5, rtol=1e-5)


def strides(tree: Any) -> list[Any]:
    return [t.stride() for t in torch.utils._pytree.tree_leaves(tree)]


def placed(e: Any) -> list[Extern]:
    return [n for n in walk(e.scheduled.nodes) if isinstance(n, Extern) and n.out is not None and n.mutates]


def test_on_a_gpu_parts_are_aligned_and_worth_a_kernel() -> None:
    def joined(x: Tensor, w: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.cat([y.exp(), x @ w, z + 1], 1)

    for rows, before, width, expected in (
        (50_000, 32, 64, 1), (50_000, 31, 64, 0), (50_000, 32, 63, 0), (64, 32, 64, 0),
    ):  # fmt: skip
        x, w, y, z = torch.empty(rows, 128), torch.empty(128, width), *torch.empty(2, rows, before)
        torch._dynamo.reset()
        with torch.no_grad():
            assert len(placed(reflib.explain(joined, x, w, y, z, target="sm_90"))) == expected


def test_arguments_in_one_memory() -> None:
    """What is written to may be, or be a part of, what the call reads: eager's results."""

    def fn(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        y.copy_(x @ w)
        return x + 1

    def reads_itself(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        y.copy_(y @ w)
        return y.sum()

    square = torch.randn(K, K)
    for f in (fn, reads_itself):
        compiled = reflib.compile(f)
        for share in (lambda t: (t[:N], t[N:]), lambda t: (t[:N], t[:N]), lambda t: (t[:N], t[1 : N + 1])):
            memory, other = (torch.arange(2.0 * N * K).view(2 * N, K).sin() for _ in range(2))
            (x, y), (theirs, written) = share(memory), share(other)
            torch.testing.assert_close(compiled(x, square, y), f(theirs, square, written), atol=1e-2, rtol=1e-3)
            torch.testing.assert_close(memory, other)
    with pytest.raises(RuntimeError, match=r"more than one element|single memory location"):
        reflib.compile(fn)(X, square, torch.zeros(1, 1).expand(N, K))


# -- ops of the user's ------------------------------------------------------------------------------------
LIB = torch.library.Library("into_place_test", "FRAGMENT")
BEHAVES = {"mode": "well"}


def _out(x: Tensor, *, out: Tensor) -> Tensor:
    if BEHAVES["mode"] == "another":
        return x * 3
    if BEHAVES["mode"] == "resizes":
        return out.resize_(x.shape[0] + 1, x.shape[1]).zero_()
    return out.copy_(x * 3)


LIB.define("thrice(Tensor x) -> Tensor")
LIB.define("thrice.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=(torch.Tag.out,))
LIB.impl("thrice", lambda x: x * 3, "CPU")
LIB.impl("thrice.out", _out, "CPU")
LIB.impl("thrice", lambda x: torch.empty_like(x), "Meta")
LIB.impl("thrice.out", lambda x, *, out: out, "Meta")


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_an_op_with_memory_for_its_result(wrapper: str) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([y[:, :5] + 1, torch.ops.into_place_test.thrice(x)])

    with torch.no_grad():
        (call,) = placed(reflib.explain(fn, X5, Y, target="cpu"))
        assert call.out[0] is torch.ops.into_place_test.thrice.out  # type: ignore[index]
        compiled = reflib.compile(fn, wrapper=wrapper)
        torch.testing.assert_close(compiled(X5, Y), fn(X5, Y))
        for mode in ("another", "resizes"):
            BEHAVES["mode"] = mode
            try:
                with pytest.raises(reflib.ReflibError, match=r"thrice\.out: its result 0 is not the tensor that"):
                    compiled(X5, Y)
            finally:
                BEHAVES["mode"] = "well"
        torch.testing.assert_close(compiled(X5, Y), fn(X5, Y))


def test_an_out_variant_defined_after_the_ops_first_use() -> None:
    LIB.define("late(Tensor x) -> Tensor")
    LIB.impl("late", lambda x: x + 3, "CPU")
    LIB.impl("late", lambda x: torch.empty_like(x), "Meta")
    op = torch.ops.into_place_test.late

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([y[:, :5] + 1, op(x)])

    with torch.no_grad():
        torch.testing.assert_close(reflib.compile(fn)(X5, Y), fn(X5, Y))
        LIB.define("late.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=(torch.Tag.out,))
        LIB.impl("late.out", lambda x, *, out: out.copy_(x + 3), "CPU")
        LIB.impl("late.out", lambda x, *, out: out, "Meta")
        (call,) = placed(reflib.explain(fn, X5, Y, target="cpu"))
        assert call.out[0] is op.out  # type: ignore[index]
        torch.testing.assert_close(reflib.compile(fn)(X5, Y), fn(X5, Y))


@torch.library.custom_op("into_place_test::tripled", mutates_args=("out",), tags=torch.Tag.out)
def tripled(x: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(x * 3)


tripled.register_fake(lambda x, *, out: out)


@torch.library.custom_op("into_place_test::add_to", mutates_args=("xs",))
def add_to(xs: list[Tensor], y: Tensor) -> None:
    for x in xs:
        x.add_(y)


def test_ops_that_write_to_given_tensors_and_to_lists() -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> Any:
        t = torch.empty_like(x)
        tripled(x, out=t)
        tripled(y, out=z)
        add_to([x[0], x[2:], t], x[1].clone())
        return t + 1, z.sum()

    mine, theirs = ([t.clone() for t in (X, Y, torch.zeros_like(Y))] for _ in range(2))
    with torch.no_grad():
        torch.testing.assert_close(reflib.compile(fn, verify=True)(*mine), fn(*theirs))
        torch.testing.assert_close(mine, theirs)
        e = reflib.explain(fn, *mine, target="cpu")
    assert {n.target for n in walk(e.scheduled.nodes) if isinstance(n, Extern)} == {
        torch.ops.into_place_test.tripled.default, torch.ops.into_place_test.add_to.default,
    }  # fmt: skip
    assert not [str(u) for u in e.updates if u.why], "none updates a copy"
    large = [b for b in e.scheduled.buffers.values() if b.kind == "temp" and b.nbytes.hint() >= NB]
    assert len(large) <= 3, "what is tripled, and a result"


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_a_result_smaller_than_promised(wrapper: str) -> None:
    """The error names the op."""
    lib = torch.library.Library(f"into_place_bad_{wrapper}", "FRAGMENT")
    lib.define("fewer(Tensor x) -> Tensor")
    lib.impl("fewer", lambda x: x[:1] * 2, "CPU")
    torch.library.register_fake(f"{lib.ns}::fewer", torch.empty_like, lib=lib)
    compiled = reflib.compile(lambda x: getattr(torch.ops, lib.ns).fewer(x) + 1, wrapper=wrapper)
    with pytest.raises(reflib.ReflibError, match=r"fewer\.default returned shape"):
        compiled(torch.ones(3))


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_a_result_in_too_small_a_storage_or_of_another_dtype(wrapper: str) -> None:
    """Before anything is read or stored beyond it."""
    lib = torch.library.Library(f"into_place_short_{wrapper}", "FRAGMENT")

    def short(x: Tensor) -> Tensor:
        y = (x * 2).clone()
        y.untyped_storage().resize_(16)
        return y

    said = {"short": "in a storage of 16 bytes, too few for it", "doubled": "not of dtype float32, which its meta"}
    for name, impl in {"short": short, "doubled": lambda x: x.double()}.items():
        lib.define(f"{name}(Tensor x) -> Tensor")
        lib.impl(name, impl, "CPU")
        torch.library.register_fake(f"{lib.ns}::{name}", torch.empty_like, lib=lib)
        compiled = reflib.compile(lambda x, n=name: getattr(getattr(torch.ops, lib.ns), n)(x) + 1, wrapper=wrapper)
        with pytest.raises(reflib.ReflibError, match=rf"{name}\.default: its result 0 is {said[name]}"):
            compiled(torch.ones(8, 16))


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_results_in_memory_that_the_schema_does_not_name(wrapper: str) -> None:
    """An argument, a part of one, one tensor twice: the error comes before anything is stored over it."""
    lib = torch.library.Library(f"into_place_alias_{wrapper}", "FRAGMENT")
    made = {"same": lambda x: x, "part": lambda x: x[1:], "twice": lambda x: [x * 2] * 2}
    made |= {"own": lambda x: [x * 2, x + 1]}
    compiled, x = {}, torch.randn(8, 8)
    for name, impl in made.items():
        several = isinstance(impl(x), list)
        lib.define(f"{name}(Tensor x) -> {'(Tensor, Tensor)' if several else 'Tensor'}")
        lib.impl(name, lambda x, impl=impl, several=several: tuple(impl(x)) if several else impl(x), "CPU")
        fake = (lambda x: (x + 1, x + 2)) if several else lambda x, impl=impl: impl(x).clone()
        torch.library.register_fake(f"{lib.ns}::{name}", fake, lib=lib)
        op = getattr(getattr(torch.ops, lib.ns), name)

        def fn(x: Tensor, op: Any = op) -> Any:
            first, second, *_ = op(x.softmax(0))
            return first * 2 + second, x.cumsum(0)

        compiled[name] = reflib.compile(fn, wrapper=wrapper)
    for name in ("same", "part", "twice"):
        with pytest.raises(reflib.ReflibError, match=rf"{name}\.default: its result {name == 'twice':d} shares memory"):
            compiled[name](x)
    torch.testing.assert_close(compiled["own"](x)[0], x.softmax(0) * 5 + 1)


def test_an_out_schema_that_fits_nothing() -> None:
    lib = torch.library.Library("into_place_schema", "FRAGMENT")
    lib.define("scaled(Tensor x, int k) -> Tensor")
    lib.define("scaled.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=(torch.Tag.out,))
    lib.impl("scaled", lambda x, k: x * k, "CPU")
    torch.library.register_fake("into_place_schema::scaled", lambda x, k: torch.empty_like(x), lib=lib)
    with pytest.raises(Exception, match=r"scaled\.out: it is tagged torch\.Tag\.out and fits no other overload"):
        reflib.compile(lambda x: torch.ops.into_place_schema.scaled(x, 2) + 1)(torch.ones(3))


# -- random programs ----------------------------------------------------------------------------------------
def grown(rng: random.Random) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """A program of products, sorted rows and elementwise steps, put together in nested and overlapping ways."""
    steps = [(rng.randrange(9), rng.random(), rng.random(), rng.random()) for _ in range(rng.randrange(4, 9))]

    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        have = [x, w @ x]
        for kind, p, q, r in steps:
            a, b = have[int(p * len(have))], have[int(q * len(have))]
            d = int(r * 2)
            n = min(a.shape[1 - d], b.shape[1 - d])
            a, b = a.narrow(1 - d, 0, n), b.narrow(1 - d, int(r * (b.shape[1 - d] - n)), n)
            if kind < 3:
                made = torch.cat([a, b, a][: 2 + (kind == 2)], d)
            elif kind == 3:
                made = F.pad(a, (0, 2) if d else (1, 0, 0, 1), value=r)
            elif kind == 4:
                made = a @ b.t() if d == 0 else a.t() @ b
            elif kind == 5:
                made = a.sin() if r < 0.5 else a.softmax(d)
            elif kind == 6:
                made = a.topk(min(3, a.shape[1]), 1)[0]
            elif kind == 7:
                made = torch.stack([a, a.cos() if r < 0.3 else a], d).flatten(0, 1)
            else:
                half = max(1, a.shape[0] // 2)
                made = torch.cat([(a * 2)[:half], a[half:]])
            have.append(made[:12, :12])
        return have[-3:]

    return program


def test_random_programs() -> None:
    taken = 0
    for seed in range(25):
        program = grown(random.Random(seed))
        x, w = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
        want = program(x, w)
        graph = Graph(make_fx(program, tracing_mode="fake")(x, w), "inference", frozenset())
        s = run(graph, Options(verify=True), until="fuse")
        taken += sum(isinstance(n, Extern) and bool(n.out and n.mutates) for n in s.fused.program.nodes)
        torch.testing.assert_close(list(interpret(s.fused.program, [x, w])), want)
        if seed % 8 == 0:
            torch.testing.assert_close(list(run(graph, Options()).call([x, w])), want)
    assert taken > 5


# each differs in one thing from a part that is stored in its place
SMALL: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "added to afterwards": lambda x, w: torch.cat([w @ x, x]).index_add(0, torch.arange(1, 4), x[:3]),
    "a row for all rows": lambda x, w: torch.cat([(w[:1] @ x).expand(5, 6), x]),
    "of another dtype": lambda x, w: torch.cat([w.half() @ x.half(), x], 1),
}


@pytest.mark.parametrize("case", SMALL)
def test_what_is_not_just_a_part(case: str) -> None:
    x, w = torch.randn(5, 6), torch.randn(5, 5)
    traced = make_fx(SMALL[case], decompositions(), "fake")(x, w)
    program = run(Graph(traced, "inference", frozenset()), Options(verify=True), until="fuse").fused.program
    torch.testing.assert_close(interpret(program, [x, w]), [SMALL[case](x, w)], atol=1e-3, rtol=1e-3)


def test_parts_without_elements() -> None:
    def f(x: Tensor) -> Any:
        return x + 1, x.sum(0), x.sum(-1), torch.cat([x, x]), x.flatten(), x.any(), x.prod(0)

    for shape in ((3, 0), (2, 0, 3)):
        reflib.explain(f, torch.zeros(shape), target="sm_90")


def test_indices_of_two_loops_are_independent_whatever_their_variables_are_called() -> None:
    root = Buffer("b", torch.float32, torch.device("cpu"), (expr(16),), (expr(1),))
    for i in (Var("i", expr(8)), Ref(3, expr(8))):
        assert not apart(root, expr(i), expr(i) + 4) and apart(root, expr(i), expr(i) + 8)


def test_distances_need_one_kernel_before_the_product() -> None:
    """Rows that are divided by their norms, and of which squares are summed, are stored to both factors by the kernel
    that reduces them; the ones beside them are numbers, which no kernel reads."""

    def distances(x: Tensor) -> Tensor:
        x = F.normalize(x, dim=-1)
        return torch.cdist(x, x)

    e = reflib.explain(distances, torch.randn(512, 256, requires_grad=True), target="sm_90")
    position = next(i for i, n in enumerate(e.fused.nodes) if isinstance(n, Extern))
    before = e.fused.nodes[:position]
    assert [bool(n.reduced) for n in before] == [True, False] and not before[1].reads()
