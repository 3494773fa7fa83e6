"""Ops with several implementations, from registration to the Choice: every alternative is interpreted."""

import logging
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from reflib import CustomOpConfig, register_custom_op_autotuning
from reflib.errors import LoweringError
from reflib.ir.expr import Sym, expr
from reflib.ir.program import Assume, Choice, Extern
from reflib.lower import custom_ops
from reflib.lower.rules import Unsupported
from reflib.lower.subgraph import assumptions, without_implied
from reflib.lower.symbols import Symbols
from tests.choices import Lowered, check_all, choices
from tests.registered_ops import around, double, empty_registry, mm_relu, plain, split, stats, tensors  # noqa: F401


# -- at lowering ------------------------------------------------------------------------------------
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_implementation_is_an_alternative(dynamic: bool) -> None:
    register_custom_op_autotuning(
        mm_relu, configs=[plain, CustomOpConfig(split, k_splits=4), CustomOpConfig(k_splits=2)]
    )
    choice = check_all(around, tensors(), dynamic=dynamic).choice
    assert [a.name for a in choice.variants] == ["eager", "plain", "split(k_splits=4)", "eager(k_splits=2)"]
    assert isinstance(choice.variants[0].nodes[0], Extern)
    assert choice.custom and choice.failed == () and choice.op == "rtest.mm_relu.default"
    assert choice.variants[2].params == (("k_splits", 4),)
    assert "registered_ops.py" in choice.variants[1].nodes[0].origins[0].source


def test_several_results_optional_tensors_lists_and_numbers() -> None:
    def other(xs: Any, shift: Any = None, scale: float = 1.0, *, dim: int = -1) -> Any:
        x = torch.cat([x[None] * scale for x in xs])
        x = x if shift is None else x + shift
        return x.sum(dim), x.amax(dim, keepdim=True).transpose(0, 1).contiguous()

    register_custom_op_autotuning(stats, configs=[other])
    xs = [torch.randn(4, 6) for _ in range(3)]

    def with_shift(a: Tensor, b: Tensor, c: Tensor, s: Tensor) -> Any:
        total, most = stats([a, b, c], s, 0.5, dim=1)
        return total + 1, most * 2

    def without(a: Tensor, b: Tensor) -> Any:
        return stats([a, b])[1]  # one result unused

    for dynamic in (False, True):
        found = check_all(with_shift, (*xs, torch.randn(6)), dynamic).choice
        assert len(found.variants) == 2 and len(found.outputs) == 2
        found = check_all(without, xs[:2], dynamic).choice
        assert [a.name for a in found.variants] == ["eager", "other"]


def test_training_takes_the_registered_backward() -> None:
    @torch.library.custom_op("rtest::square", mutates_args=())
    def square(x: Tensor) -> Tensor:
        return x * x

    square.register_fake(torch.empty_like)
    square.register_autograd(
        lambda ctx, g: 2 * g * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    register_custom_op_autotuning(square, configs=[lambda x: x.pow(2)])
    x = torch.randn(5, 7, requires_grad=True)
    backend = Lowered()
    for pick in ("", "<lambda>"):
        backend.pick = pick
        x.grad = None
        torch.compile(lambda x: square(x.sin()).sum(), backend=backend)(x).backward()
        torch.testing.assert_close(x.grad, 2 * x.sin() * x.cos())
    assert [len(choices(p)) for p in backend.programs] == [1, 0]


def test_conditions_on_sizes_are_the_candidates_own() -> None:
    def four(x: Tensor, w: Tensor) -> Tensor:
        assert x.shape[0] % 4 == 0, "rows in fours"
        return plain(x, w)

    def exactly(x: Tensor, w: Tensor) -> Tensor:
        return plain(x, w) if x.shape[0] == 8 and w.shape[1] > 10 else torch.zeros(1)

    register_custom_op_autotuning(mm_relu, configs=[four, exactly])
    torch._dynamo.reset()
    backend = Lowered()
    compiled = torch.compile(around, backend=backend, dynamic=True)
    for m in (8, 9, 10, 23):
        x, w = tensors(m)
        torch.testing.assert_close(compiled(x, w), around(x, w))
    assert len(backend.programs) == 1, "the user's function was compiled again"
    _, a, b = backend.choice.variants
    assert [(g.kind, g.value) for g in a.predicate] == [("divisible", 4)]
    assert [(g.kind, g.value) for g in b.predicate] == [("equal", 8), ("at_least", 11)]
    m = a.predicate[0].what
    assert b.predicate[0].what == m and backend.programs[0].buffers["mm_relu"].shape[0] == m


def test_a_constant_that_an_implementation_holds() -> None:
    table = torch.arange(6.0)

    def looked_up(x: Tensor) -> Tensor:
        return x * torch.tensor([2.0]) + (table - table)

    register_custom_op_autotuning(double, configs=[looked_up])
    backend = check_all(lambda x: double(x) + 1, (torch.randn(3, 6),))
    assert len(backend.choice.variants) == 2
    assert any(c is not None and c.data_ptr() == table.data_ptr() for c in backend.programs[0].constants.values())


def test_other_strides_are_copied_into_the_ops() -> None:
    register_custom_op_autotuning(double, configs=[lambda x: (x.t() * 2).t(), lambda x: (x.t().contiguous() * 2).t()])
    (choice,) = choices(check_all(lambda x: double(x).sin(), (torch.randn(3, 6),)).programs[0])
    assert [len(a.nodes) for a in choice.variants] == [1, 1, 3]


def test_mutation_of_fresh_tensors_is_made_functional() -> None:
    def in_place(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[0] = x[0]
        return out.add_(x).mul_(1) if x.shape[0] == 1 else x.clone().mul_(2)

    register_custom_op_autotuning(double, configs=[in_place])
    for dynamic in (False, True):
        assert len(check_all(lambda x: double(x) + 1, (torch.randn(3, 6),), dynamic).choice.variants) == 2


def test_what_decompositions_write_in_place_is_made_functional_too() -> None:
    """(torch takes ``rms_norm`` apart with ``add_``.)"""

    def scaled(x: Tensor) -> Tensor:
        ones = torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-9) / x * x.square().mean(-1, True).sqrt()
        return x * (ones + 1)

    register_custom_op_autotuning(double, configs=[scaled])
    assert check_all(lambda x: double(x) + 1, (torch.rand(5, 6) + 1,), dynamic=True).choice.failed == ()


def test_an_implementation_that_torch_compiles_is_traced() -> None:
    """(TorchInductor's code ran with tensors that have no memory: the process died.)"""

    def with_memory(gm: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *xs: gm(*xs) if all(x.untyped_storage().data_ptr() for x in xs) else None

    inner = torch.compile(lambda x: x.sin() * 0 + x * 2, backend=with_memory)
    inner(torch.ones(3))

    def compiled(x: Tensor) -> Tensor:
        return inner(x).relu() - inner(-x).relu()

    register_custom_op_autotuning(double, configs=[compiled, torch.compile(lambda x: x + x, backend=with_memory)])
    choice = check_all(lambda x: double(x) + 1, (torch.randn(5, 6),)).choice
    assert choice.failed == () and len(choice.variants) == 3


class TestCandidatesThatCannotBe:
    """Each is a line in ``failed``; the others go on."""

    def failure(self, fn: Any) -> tuple[str, str]:
        register_custom_op_autotuning(double, configs=[fn, CustomOpConfig(lambda x: x + x)])
        choice = check_all(lambda x: double(x) + 1, (torch.randn(4, 6),)).choice
        assert [a.name for a in choice.variants] == ["eager", "<lambda>"]
        ((name, status, why),) = choice.failed
        assert name == fn.__name__
        return status, why

    def test_raises(self) -> None:
        def bad(x: Tensor) -> Tensor:
            raise KeyError("oh")

        assert self.failure(bad) == ("raised", "KeyError: 'oh'")

    @pytest.mark.parametrize(
        "result, status, why",
        [
            (lambda x: (x * 2)[:2], "wrong shape", "[2, 6]"),
            (lambda x: (x * 2, x * 3), "wrong shape", "returns 1 tensor"),
            (lambda x: None, "wrong shape", "returns None"),
            (lambda x: 3, "wrong shape", "returns 3"),
            (lambda x: (x * 2).double(), "wrong dtype", "float64"),
            (lambda x: torch.empty_like(x, device="meta"), "wrong device", "meta"),
            (lambda x: x, "alias", "argument"),
            (lambda x: x.t().contiguous().t().t().t() if x.dim() == 1 else x.view(4, 6), "alias", "argument"),
            (lambda x: torch.rand_like(x), "unsupported", "random"),
            (lambda x: x.mul_(2) + 0, "unsupported", "writes"),
            (lambda x: torch.cat([x[x > 0], x[x <= 0]]).view(4, 6), "unsupported", "run time"),
        ],
    )
    def test_is_not_the_same_thing(self, result: Any, status: str, why: str) -> None:
        def bad(x: Tensor) -> Tensor:
            return result(x)

        found = self.failure(bad)
        assert found[0] == status and why in found[1], found

    def test_one_memory_for_two_results(self) -> None:
        def shared(xs: Any, shift: Any = None, scale: float = 1.0, *, dim: int = -1) -> Any:
            both = torch.zeros(2 * 4 + 4 * 2)
            return both[:8].view(2, 4), both[8:].view(4, 2, 1)

        register_custom_op_autotuning(stats, configs=[shared])
        choice = check_all(lambda a, b: stats([a, b]), [torch.randn(4, 6) for _ in range(2)]).choice
        assert choice.failed[0][1:] == ("alias", "two results share memory")

    def test_random_state_is_left_alone(self) -> None:
        register_custom_op_autotuning(double, configs=[lambda x: torch.rand_like(x)])
        x = torch.randn(4, 6)
        state = torch.get_rng_state()
        torch.compile(lambda x: double(x), backend=Lowered())(x)
        assert torch.equal(torch.get_rng_state(), state)


class TestWhatWins:
    """A config's parameter and a call's argument of one name."""

    def test_the_configs_parameter(self) -> None:
        seen = []

        def noting(x: Tensor, w: Tensor, k_splits: int = 1) -> Tensor:
            seen.append(k_splits)
            return plain(x, w)

        register_custom_op_autotuning(
            mm_relu, configs=[noting, CustomOpConfig(noting, k_splits=8), CustomOpConfig(k_splits=2)]
        )
        choice = check_all(lambda x, w: mm_relu(x, w, 3) + 1, tensors()).choice
        assert seen == [3, 8]
        calls = [n for i in (0, 3) for n in choice.variants[i].nodes if isinstance(n, Extern)]
        assert [c.args[2:] for c in calls] == [(3,), (2,)]
        register_custom_op_autotuning(mm_relu, configs=[noting])
        check_all(around, tensors())
        assert seen == [3, 8, 1]  # nothing given: the function's own default

    def test_an_argument_that_the_function_lacks(self) -> None:
        register_custom_op_autotuning(mm_relu, configs=[plain])
        choice = check_all(lambda x, w: mm_relu(x, w, 3) + 1, tensors()).choice
        assert choice.failed == (("plain", "unsupported", "got an unexpected keyword argument 'k_splits'"),)


class TestGenerators:
    def test_sees_fake_tensors_with_plain_sizes(self) -> None:
        seen = []

        def generate(fakes: dict[str, Tensor]) -> list[CustomOpConfig]:
            seen.append({k: (tuple(v.shape), v.dtype, v.device.type) for k, v in fakes.items()})
            return [CustomOpConfig(split, k_splits=s) for s in (2, 4) if fakes["x"].shape[1] % s == 0]

        register_custom_op_autotuning(mm_relu, config_generator=generate)
        choice = check_all(around, tensors(), dynamic=True).choice
        assert [a.name for a in choice.variants] == ["eager", "split(k_splits=2)", "split(k_splits=4)"]
        assert seen == [{"x": ((8, 64), torch.float32, "cpu"), "w": ((64, 16), torch.float32, "cpu")}]

    def test_what_it_repeats_is_one_candidate(self) -> None:
        made = [CustomOpConfig(split, k_splits=4), plain, CustomOpConfig(split, k_splits=4), plain]
        register_custom_op_autotuning(mm_relu, config_generator=lambda fakes: made)
        names = [a.name for a in check_all(around, tensors()).choice.variants]
        assert names == ["eager", "split(k_splits=4)", "plain"]

    def test_with_ranges_it_is_asked_for_each(self) -> None:
        rows = []

        def generate(fakes: dict[str, Tensor]) -> list[CustomOpConfig]:
            rows.append(fakes["x"].shape[0])
            return [CustomOpConfig(split, k_splits=2 if rows[-1] < 100 else 4)]

        on = {"tensor_name": "x", "dim": 0, "range_upper_bound": 1000}
        register_custom_op_autotuning(mm_relu, config_generator=generate, dispatch_on=on, split_points=[16, 256])
        choice = check_all(around, tensors(), dynamic=True).choice
        assert rows == [8, 16, 256, 1000] and len(choice.variants) == 3

    @pytest.mark.parametrize(
        "returned, message",
        [
            (7, "config_generator generate of rtest.mm_relu.default must return a list of CustomOpConfig, .* int: 7"),
            ([3], "config_generator generate .* not 3"),
            ([CustomOpConfig(lambda x: x)], "config_generator generate .* unexpected keyword argument 'w'"),
            (ValueError("no"), "config_generator generate .* raised ValueError: no"),
        ],
    )
    def test_mistakes_name_it(self, returned: Any, message: str) -> None:
        def generate(fakes: dict[str, Tensor]) -> Any:
            if isinstance(returned, Exception):
                raise returned
            return returned

        register_custom_op_autotuning(mm_relu, config_generator=generate)
        with pytest.raises(Exception, match=message) as e:
            torch.compile(around, backend=Lowered())(*tensors())
        assert isinstance(e.value.__cause__ or getattr(e.value, "inner_exception", None), LoweringError)

    def test_an_empty_list_leaves_the_op(self) -> None:
        register_custom_op_autotuning(mm_relu, config_generator=lambda fakes: [])
        assert len(check_all(around, tensors()).choice.variants) == 1


class TestRanges:
    on = {"tensor_name": "w", "dim": -1, "range_upper_bound": 4096}

    def test_of_the_named_tensor(self) -> None:
        register_custom_op_autotuning(mm_relu, configs=[plain], dispatch_on=self.on, split_points=[32, 512])
        for dynamic in (False, True):
            backend = check_all(around, tensors(), dynamic)
            r = backend.choice.ranges
            assert r is not None and (r.splits, r.upper, r.what) == ((32, 512), 4096, "w.size(1)")
            columns = next(b for b in backend.programs[0].buffers.values() if b.name == "mm_relu").shape[1]
            assert r.size == (columns if dynamic else expr(16))

    def test_a_dimension_that_is_not_there(self) -> None:
        on = {"tensor_name": "w", "dim": 2}
        register_custom_op_autotuning(mm_relu, configs=[plain], dispatch_on=on, split_points=[32])
        with pytest.raises(Exception, match="dispatch_on names dimension 2 of w, which has 2 dimensions"):
            torch.compile(around, backend=Lowered())(*tensors())


def test_what_is_passed_on() -> None:
    register_custom_op_autotuning(
        mm_relu,
        configs=[CustomOpConfig(plain, config_patches={"fuse": False})],
        name="mine",
        input_gen_fns={"x": torch.ones_like, 1: torch.zeros_like},
        min_speedup_threshold=1.25,
        benchmark_with_cudagraphs=False,
    )
    choice = check_all(lambda x, w: mm_relu(x, w.t()), (torch.randn(8, 64), torch.randn(16, 64))).choice
    assert (choice.op, choice.min_speedup, choice.graph_timing) == ("mine", 1.25, False)
    assert choice.variants[1].patches == (("fuse", False),)
    ((buffer, key),) = choice.inputs_from  # w is a view, which no function can make
    assert buffer in choice.reads() and custom_ops.input_makers()[key] is torch.ones_like


def test_off_says_once_that_nothing_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    register_custom_op_autotuning(mm_relu, configs=[plain])
    for _ in range(2):
        backend = check_all(around, tensors(), autotune="off")
        assert not choices(backend.programs[0])
    (record,) = [r for r in caplog.records if "not tried" in r.message]
    assert record.levelno == logging.WARNING and "blocking" in record.message and "rtest.mm_relu" in record.message


def test_registering_again_replaces(caplog: pytest.LogCaptureFixture) -> None:
    register_custom_op_autotuning(mm_relu, configs=[plain])
    assert not caplog.records
    register_custom_op_autotuning(mm_relu, configs=[CustomOpConfig(split, k_splits=2)])
    (record,) = caplog.records
    assert "rtest.mm_relu.default: registered again" in record.message
    assert [a.name for a in check_all(around, tensors()).choice.variants] == ["eager", "split(k_splits=2)"]


def test_a_cell_that_is_run_again() -> None:
    for constant in (1, 2):

        @torch.library.custom_op("rtest::again", mutates_args=())
        def again(x: Tensor, _c: int = constant) -> Tensor:
            return x + 1

        again.register_fake(lambda x, _c=1: torch.empty_like(x))
        if constant == 1:
            register_custom_op_autotuning(again, configs=[lambda x: 1 + x])
            assert len(check_all(lambda x: again(x) * 2, (torch.randn(3),)).choice.variants) == 2
    with pytest.raises(Exception, match=r"was redefined as .* register its implementations again"):
        check_all(lambda x: again(x) * 2, (torch.randn(3),))
    register_custom_op_autotuning(again, configs=[lambda x: 1 + x])
    assert len(check_all(lambda x: again(x) * 2, (torch.randn(3),)).choice.variants) == 2


def test_an_op_inside_itself_is_called() -> None:
    def two_halves(x: Tensor, w: Tensor) -> Tensor:
        n = w.shape[1] // 2
        return torch.cat([mm_relu(x, w[:, :n]), mm_relu(x, w[:, n:])], 1)

    register_custom_op_autotuning(mm_relu, configs=[two_halves])
    choice = check_all(around, tensors()).choice
    assert len(choice.variants) == 2 and not any(isinstance(n, Choice) for n in choice.variants[1].nodes)


def test_a_registered_op_inside_another_is_a_choice() -> None:
    register_custom_op_autotuning(double, configs=[lambda x: x + x])
    register_custom_op_autotuning(mm_relu, configs=[lambda x, w: plain(double(x), w) / 2])
    backend = check_all(around, tensors())
    (outer,) = choices(backend.programs[0])
    (inner,) = [n for n in outer.variants[1].nodes if isinstance(n, Choice)]
    assert len(inner.variants) == 2


@pytest.mark.parametrize("autotune", ["off", "blocking"])
def test_an_aten_op_that_capture_would_take_apart(autotune: str) -> None:
    op = torch.ops.aten.logaddexp.default
    register_custom_op_autotuning(op, configs=[lambda self, other: (self.exp() + other.exp()).log()])
    args = torch.randn(3), torch.randn(3)
    backend = check_all(lambda x, y: torch.logaddexp(x, y) * 2, args, autotune=autotune)
    assert len(choices(backend.programs[0])) == (autotune == "blocking")


# -- conditions -------------------------------------------------------------------------------------
def test_conditions_as_facts() -> None:
    a, b = sympy.symbols("a b", integer=True)
    m, n = expr(Sym("m", 2, 100)), expr(Sym("n", 2, None))
    convert = Symbols().inside({a: Sym("m", 2, 100), b: Sym("n", 2, None)})

    def facts(condition: Any) -> list[tuple[str, Any, int]]:
        return [(f.kind, f.what, f.value) for f in assumptions(condition, lambda e: convert.from_sympy(e, None))]

    both = facts(sympy.And(a >= 3, sympy.Ne(b, 7)))
    assert sorted(both, key=lambda f: f[0]) == [("at_least", m, 3), ("differs", n, 7)]
    assert facts(a < 64) == [("at_most", m, 63)]
    assert facts(sympy.Gt(64, a)) == [("at_most", m, 63)]
    assert facts(sympy.Eq(a, b)) in ([("equal", m - n, 0)], [("equal", n - m, 0)])
    assert facts(a >= 2) == facts(a <= 100) == facts(sympy.Ne(b, 1)) == facts(sympy.true) == []
    for condition in (sympy.Or(a > 3, b > 3), sympy.Eq(sympy.sin(a), 0)):
        with pytest.raises(Unsupported):
            facts(condition)


def test_what_divisibility_implies_is_dropped() -> None:
    n = expr(Sym("n", 2, None))
    divisible, odd = Assume("divisible", n, 4), Assume("differs", n, 8)
    facts = [Assume("equal", n - n // 4 * 4, 0), divisible, odd, Assume("differs", n - n // 4, 0), divisible]
    assert without_implied(facts) == (divisible, odd)


def test_sizes_and_optional_tensors_as_arguments() -> None:
    @torch.library.custom_op("rtest::repeat", mutates_args=())
    def repeat(x: Tensor, n: int, tail: Tensor | None = None) -> Tensor:
        out = x.repeat(n, 1)
        return out if tail is None else torch.cat([out, tail])

    @repeat.register_fake
    def _(x: Tensor, n: int, tail: Tensor | None = None) -> Tensor:
        return x.new_empty(x.shape[0] * n + (0 if tail is None else tail.shape[0]), x.shape[1])

    def other(x: Tensor, n: int, tail: Tensor | None = None) -> Tensor:
        out = x.expand(n, *x.shape).reshape(n * x.shape[0], x.shape[1])
        return out.clone() if tail is None else torch.cat([out, tail])

    register_custom_op_autotuning(repeat, configs=[other])
    x, tail = torch.randn(3, 6), torch.randn(4, 6)
    for dynamic in (False, True):
        for fn in (lambda x, t: repeat(x, t.shape[0]) * 2, lambda x, t: repeat(x, t.shape[0], t) * 2):
            assert len(check_all(fn, (x, tail), dynamic).choice.variants) == 2
