"""How kernels are launched, decided by measuring: on a CPU, compiled as for sm_90, with times that are made up."""

import importlib.util
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import GPU, lowered
from interpreter import results

import reflib
from reflib import tuning
from reflib.autotune import launches, points
from reflib.autotune.known import decided
from reflib.autotune.request import Request, Result
from reflib.autotune.store import Outcome, store
from reflib.autotune.winner import pick_winner
from reflib.background import Background
from reflib.capture import Graph
from reflib.ir.data import from_data
from reflib.ir.decision import Candidate, Key
from reflib.ir.program import Config, KernelNode, kernel_nodes, kernel_variants
from reflib.observe.decisions import Decisions
from reflib.options import Options
from reflib.package import archive, manifest
from reflib.pipeline import Stages, advance, run
from reflib.ranks import share
from reflib.schedule import configs
from reflib.tables import _say_once

Asked = list[list[KernelNode]]
Tensor = torch.Tensor
HALF = torch.bfloat16


def half(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=HALF)


def compiled(fn: Callable[..., Any], *args: Any, **options: Any) -> Stages:
    """As far as the kernels' sources. (Choices on a CPU have one candidate; kernels are a GPU's.)"""
    program = lowered(fn, args)
    o = Options(**{"autotune": "blocking", "isolate": False, "cache_decisions": False, **options})
    return run(Graph(torch.fx.GraphModule({}, torch.fx.Graph())), o, "generate", program, lambda device: GPU)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The kernels of each request that was measured. What has the fewest warps, then the largest block, is fastest."""
    return standing_in(monkeypatch)


def standing_in(monkeypatch: pytest.MonkeyPatch, status: Callable[[Config], str] = lambda c: "ok") -> Asked:
    asked: Asked = []

    def measure(request: Request, build: Any, makers: Any) -> Result:
        kernels = {n: next(kernel_nodes(from_data(p).nodes)) for n, p in request.programs.items()}
        asked.append(list(kernels.values()))
        rows = []
        for n, k in kernels.items():
            how = status(k.config)
            rows.append(Candidate(request.key(n), how, speed(k.config) if how == "ok" else None, spread=0.0))
        return Result(tuple(rows), *pick_winner(rows, request.default))

    monkeypatch.setattr(points, "measure", measure)
    return asked


def speed(c: Config) -> float:
    return 100.0 * c.num_warps - c.xblock / 1000 - c.rblock / 1e6


def softmax(x: Tensor) -> tuple[Tensor]:
    return (torch.softmax(x, -1),)


def kernels(s: Stages) -> list[KernelNode]:
    return [v.variants[0].kernel for v in kernel_variants(s.scheduled.nodes)]


ROWS = half(20000, 1000)


# -- measured -------------------------------------------------------------------------------------------
def test_the_winner_is_launched(measured: Asked) -> None:
    s = compiled(softmax, ROWS)
    ((first, *others),) = measured
    (kernel,) = kernels(s)
    assert first.config == kernels(compiled(softmax, ROWS, autotune="off"))[0].config
    assert 2 <= len(others) < configs.MOST and len({k.config for k in (first, *others)}) == len(others) + 1
    best = min((k.config for k in (first, *others)), key=speed)
    assert kernel.config == best != first.config and s.kernels[kernel.name].num_warps == best.num_warps
    (d,) = s.decisions
    assert d.winner == configs.name_of(best) and d.config == best and len(d.candidates) == len(others) + 1
    assert d.op == "launch of " + kernel.name.partition("_")[2]
    assert d.sizes.startswith("[20000] r[1000] ") and "faster" in d.reason
    assert d.op in repr(Decisions([d])) and configs.name_of(best) in Decisions([d])._repr_html_()


def test_a_launch_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = standing_in(monkeypatch, lambda c: "error" if c.num_warps == 1 else "wrong" if c.xblock == 1 else "ok")
    (d,) = compiled(softmax, ROWS).decisions
    found = {c.status for c in d.candidates}
    assert found == {"ok", "error", "wrong"} and d.config.num_warps > 1 and d.config.xblock > 1
    assert d.config in [k.config for k in asked[0]]


def test_equal_work_is_measured_once(measured: Asked) -> None:
    def layers(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return torch.softmax(x, -1), torch.softmax(y, -1), torch.softmax(z, -1)

    s = compiled(layers, ROWS, half(20000, 1000), half(20000, 999))
    assert len(s.decisions) == 3 and len(measured) == 2
    assert [("equal kernel" in d.reason) for d in s.decisions] == [False, True, False]
    one, two, _ = s.decisions
    assert one.config == two.config and one.op == two.op and one.sizes != two.sizes


def test_a_launch_is_measured_by_one_rank_for_all(measured: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """(The second rank is late: the first has measured both by then.)"""
    here = torch.distributed.HashStore()
    monkeypatch.setattr(share, "store_of", lambda group: here)
    found = []
    for rank in range(2):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2)
        monkeypatch.setattr(share, "sharing", lambda s=share.Sharing(group): s)
        found.append(compiled(lambda x, y: (torch.softmax(x, -1), torch.softmax(y, -1)), ROWS, half(20000, 999)))
        assert len(measured) == 2 and not share.sharing().mine  # type: ignore[union-attr]
    first, second = ([(d.config, "measured by rank 0 for all" in d.reason) for d in s.decisions] for s in found)
    assert [c for c, _ in first] == [c for c, _ in second]
    assert [told for _, told in (*first, *second)] == [False, False, True, True]


@pytest.mark.parametrize("pair", [(torch.exp, torch.log), (torch.sin, torch.cos)])
def test_other_work_of_the_same_form_is_another_question(pair: Any, measured: Asked) -> None:
    """(In the graph a tensor is called as the op that made it.)"""
    compiled(lambda x, y: (pair[0](x), pair[1](y)), half(5000, 5000), half(5000, 5000))
    assert len(measured) == 2


def test_what_takes_little_time_is_not_measured(measured: Asked) -> None:
    us = launches.LEAST_US
    count = int(us * 4800e3 / 2 / 2)  # elements of bfloat16 that are read and written in this time on a Hopper
    for n, times in ((int(count * 0.9), 0), (int(count * 1.1), 1)):
        (d,) = compiled(lambda x: (torch.exp(x),), half(n)).decisions
        assert len(measured) == times
    (d,) = compiled(lambda x: (torch.exp(x),), half(4000)).decisions
    assert d.reason.endswith("which is too little to matter") and d.winner == d.config and d.op == "launch of exp"


def test_what_is_a_small_part_of_the_program_is_not_measured(measured: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "LEAST_SHARE", 0.1)
    few, many = compiled(lambda x, y: (x.sin(), y.cos()), half(9_000_000), half(90_000_000)).decisions
    assert len(measured) == 1 and len(many.candidates) > 1 and "it moves 9.09% of all" in few.reason
    compiled(lambda *xs: tuple(x.sin() for x in xs), *(half(9_000_000) for _ in range(11)))
    assert len(measured) == 2, "a tenth each, all together much"


def test_places_that_a_tensor_names_are_not_measured(measured: Asked) -> None:
    index = torch.empty(60000, dtype=torch.int64)
    (d,) = compiled(lambda w, i: (F.embedding(i, w) * 2,), half(50000, 512), index).decisions
    assert not measured and "values" in d.reason


def test_what_is_written_in_part_is_measured_over_it(measured: Asked) -> None:
    def halves(x: Tensor, y: Tensor) -> tuple[Tensor]:
        y[:, :3000].copy_(x[:, :3000].sin())
        return (x.cos(),)

    s = compiled(halves, half(5000, 5000), half(5000, 6000))
    assert len(measured) == len(s.decisions) >= 1


@pytest.mark.parametrize("seed", range(3))
def test_sums_of_columns_are_added_up_before_they_are_compared(seed: int, measured: Asked) -> None:
    """Which rows are in which partial sum depends on the launch."""
    rng = random.Random(seed)
    m, n = rng.randint(40000, 60000), 8 * rng.randint(30, 60)

    def backward(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.softmax(x, -1)
        return y * (g - (g * y).sum(-1, keepdim=True)), g.sum(0)

    s = compiled(backward, torch.empty(m, n), torch.empty(m, n))
    d = next(d for d in s.decisions if d.config.reduction == "mixed")
    assert len(d.candidates) > 1 and len(d.members) == 1 and d.members[0] in {x.region for x in s.decisions}


# -- known ----------------------------------------------------------------------------------------------
def test_off_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "offered", lambda *args: pytest.fail("the launches of kernels were looked at"))
    (d,) = compiled(softmax, ROWS, autotune="off").decisions
    assert d.op == "" and d.reason == "heuristic for 20000 x 1000 elements: persistent"


def test_a_table_pins_a_launch_with_autotune_off(measured: Asked) -> None:
    (d,) = compiled(softmax, ROWS).decisions
    measured.clear()
    for name, config in ((d.winner, d.config), ("looped 1x512, 8 warps", None)):  # the second is none of the few
        (again,) = compiled(softmax, ROWS, autotune="off", lookup_table={d.op: {d.sizes: name}}).decisions
        assert not measured and again.winner == name and again.reason == "pinned by lookup_table"
        assert config in (None, again.config) and configs.name_of(again.config) == name
    (small,) = compiled(softmax, half(30, 1000), autotune="off", lookup_table={d.op: {d.sizes: d.winner}}).decisions
    assert small.op == "", "other sizes"


def test_what_no_kernel_can_have_does_not_count(measured: Asked, caplog: pytest.LogCaptureFixture) -> None:
    (d,) = compiled(softmax, ROWS).decisions
    own = kernels(compiled(softmax, ROWS, autotune="off"))[0].config
    for name in ("persistent 1x512, 2 warps", "mixed 1x1024, 8 warps", "flat 1024, 4 warps"):
        _say_once.cache_clear()
        s = compiled(softmax, ROWS, autotune="off", lookup_table={d.op: {d.sizes: name}})
        assert kernels(s)[0].config == own and name in caplog.text


def test_sizes_in_tables_are_those_traced(measured: Asked) -> None:
    x = half(20000, 1000)
    program = lowered(softmax, (x,), symbolic=True)
    graph = Graph(torch.fx.GraphModule({}, torch.fx.Graph()))
    o = Options(autotune="blocking", isolate=False, cache_decisions=False)
    (d,) = run(graph, o, "generate", program, lambda device: GPU).decisions
    assert d.sizes == "[20000] r[1000] x_1[20000, 1000] _to_copy_1[20000, 1000]" and len(measured) == 1
    pins = Options(lookup_table={d.op: {d.sizes: d.winner}})
    (again,) = run(graph, pins, "generate", program, lambda device: GPU).decisions
    assert again.winner == d.winner and len(measured) == 1


def test_decisions_are_kept_exported_and_imported(measured: Asked, kept: Any, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    (d,) = compiled(softmax, ROWS, cache_decisions=True).decisions
    (again,) = compiled(softmax, half(20000, 1000), cache_decisions=True).decisions
    assert len(measured) == 1 and again.winner == d.winner and "decided in an earlier run" in again.reason
    table = decided(kept)
    (entry,) = table.entries
    assert (entry.op, entry.sizes, entry.winner) == (d.op, d.sizes, d.winner) and entry.dtypes == "bfloat16"
    assert entry.time_us < entry.default_us
    monkeypatch.setenv("REFLIB_CACHE_DIR", str(tmp_path / "other"))
    store().import_table(table)
    (elsewhere,) = compiled(softmax, ROWS, cache_decisions=True).decisions
    assert len(measured) == 1 and elsewhere.winner == d.winner and elsewhere.reason == "pinned by an imported table"


def test_a_target_uses_what_is_known_of_such_gpus(kept: Any) -> None:
    x, winner = torch.zeros(300, 500, dtype=HALF), "persistent 8x512, 4 warps"
    (d,) = compiled(softmax, x).decisions
    row = Candidate(Key(winner), "ok", 5.0)
    facts = {"device": "NVIDIA H200", "op": d.op, "sizes": d.sizes, "dtypes": "bfloat16", "epilogue": "",
             "default": winner, "date": "2026-07-01T00:00:00+00:00"}  # fmt: skip
    kept.put("one", Outcome((row.key,), (row,), "it was measured"), facts)

    def explained(**options: Any) -> Any:
        torch._dynamo.reset()
        return reflib.explain(lambda x: torch.softmax(x, -1), x, target="sm_90", **options).decisions[0]

    known = explained(autotune="blocking")
    assert (known.winner, known.reason) == (winner, "known of NVIDIA H200") and configs.name_of(known.config) == winner
    assert explained().op == "", "a listing for a target is the same on every machine"
    for device, counts in (("NVIDIA L4", False), ("NVIDIA H100", True)):
        entry = {"device": device, "winner": winner, "op": d.op, "sizes": d.sizes}
        found = explained(lookup_table={"format": 1, "entries": [entry]})
        assert (found.winner == winner) == counts == bool(found.op)


def test_a_package_has_the_launches_of_a_table(tmp_path: Path) -> None:
    x = torch.zeros(300, 500, dtype=HALF)
    (d,) = compiled(softmax, x).decisions
    assert d.config.num_warps != 4
    pins = {d.op: {d.sizes: "persistent 8x512, 4 warps"}}
    path = reflib.aot_compile(
        lambda x: torch.softmax(x, -1), (x,), tmp_path / "m.reflib", ["sm_90"], ptx=False, lookup_table=pins
    )
    file = archive.open(path)
    (variant,) = manifest.read(file.manifest).variants
    file.close()
    assert [k.threads for k in variant.kernels if not k.late] == [128]


# -- in the background ----------------------------------------------------------------------------------
def test_in_the_background_it_starts_as_the_heuristics_say(measured: Asked) -> None:
    s = compiled(softmax, ROWS, autotune="background")
    assert not measured and s.swap is not None
    (d,) = s.decisions
    assert "it will be, in the background" in d.reason
    again = tuning.Again(s.program, Background(s, lambda background: None))
    same = Stages(s.graph, s.options, s.target_of, s.program, s.fused, tuning=again)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(tuning, "_tuner", lambda *args: None)
        m.setattr(points, "_measured_here", lambda point, work: points.measure(point.request, None, None))
        advance(same, ("autotune", "schedule"))
    assert len(measured) == 1 and same.decisions[0].config != d.config
    assert compiled(softmax, half(100, 100), autotune="background").swap is None, "nothing is worth measuring"


# -- the launches that are offered ----------------------------------------------------------------------
def some_kernels() -> list[tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    rng = random.Random(0)

    def size(low: int, high: int) -> int:
        return rng.choice([rng.randint(low, high), 1 << rng.randint(low.bit_length(), high.bit_length() - 1)])

    def one(fn: Callable[..., Any], *args: Tensor) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
        return fn, args

    return [
        one(softmax, half(size(3, 40000), size(3, 30000))),
        one(softmax, half(size(3, 400), size(17000, 90000))),
        one(lambda x: (x.sum(0),), half(size(100, 9000), size(9, 5000))),
        one(lambda x, y: (x.t() + y,), half(2000, 3001), half(3001, 2000)),
        one(lambda x: (torch.relu(x),), half(size(100, 10**8))),
        one(lambda x: (x.cumsum(-1),), half(size(3, 4000), size(3, 4096))),
        one(lambda x: (F.max_pool2d(x, 2),), half(64, 32, 64, 64)),
    ]


@pytest.mark.parametrize("number", range(7))
def test_offers_are_launches_that_triton_takes(number: int) -> None:
    fn, args = some_kernels()[number]
    s = compiled(fn, *args, autotune="off")
    for o in tuning.offered(s, s.scheduled):
        assert next(iter(o.launches)) == configs.name_of(o.node.variants[0].kernel.config)
        assert 1 <= o.few <= configs.MOST and o.bytes > 0
        for name, c in o.launches.items():
            assert configs.name_of(c) == name
            assert 1 <= c.num_warps <= 32 and c.num_warps & c.num_warps - 1 == 0
            sides = [c.xblock, c.rblock, dict(c.extras).get("yblock", 1)]
            assert all(n >= 1 and n & n - 1 == 0 for n in sides) and math.prod(sides) <= 2**20
            if c.reduction == "persistent":
                assert c.rblock >= o.parts[0].rnumel.hint()
            kernel = generate(s, o, c)[o.node.variants[0].kernel.name]
            assert f"XBLOCK: tl.constexpr = {c.xblock}" in kernel.source and kernel.num_warps == c.num_warps


def generate(s: Stages, offer: Any, c: Config) -> Any:
    nodes = tuple(offer.launched(c) if n is offer.node else n for n in s.scheduled.nodes)
    one = Stages(s.graph, s.options, s.target_of, scheduled=replace(s.scheduled, nodes=nodes))
    return advance(one, ("generate",), "").kernels


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_every_launch_gives_the_same_values() -> None:
    found = results("launch_programs.py")
    wrong = {name: text for name, (_, text) in found.items() if text}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
    kinds = {name.split()[0] for names, _ in found.values() for name in names}
    assert kinds == {"flat", "tile", "persistent", "looped", "mixed"}
