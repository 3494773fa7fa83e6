"""The model of memory traffic against sectors counted one by one, and what is chosen by it."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

import reflib
from reflib.ir.expr import Expr, Var, expr
from reflib.ir.loops import Axis
from reflib.ir.program import Buffer, kernel_variants
from reflib.ir.traffic import LANES, LOAD, PARTIAL, SECTOR, STORE, WARP, Access, accesses, cheapest_last
from reflib.schedule.axes import Space, layout


def counted(a: Access, tile: dict[Var, int], corner: dict[Var, int]) -> int:
    """The sectors of a tile at ``corner``, each looked up."""
    grids = torch.meshgrid(*(torch.arange(n) + corner[v] for v, n in tile.items()), indexing="ij")
    at = torch.as_tensor(a.index.evaluate(dict(zip(tile, grids))))
    return len(torch.unique(at * a.itemsize // SECTOR))


def random_index(rng: random.Random, variables: list[Var]) -> Expr:
    """Strided, broadcast, divided and wrapped, as views and their flattening make them."""
    e, step = expr(0), 1
    for v in rng.sample(variables, len(variables)):
        kind = rng.choice(["dense", "dense", "padded", "none", "halved", "wrapped"])
        if kind == "none":
            continue
        part = {"halved": expr(v) // 2, "wrapped": expr(v) % rng.choice([3, 8, 24])}.get(kind, expr(v))
        step *= rng.choice([2, 3, 7]) if kind == "padded" else 1
        e = e + part * step
        step *= int(v.size)
    return e


def test_sectors_are_close_to_what_is_counted() -> None:
    rng = random.Random(0)
    for _ in range(400):
        variables = [Var(name, expr(rng.choice([3, 8, 17, 64, 200]))) for name in "abc"]
        a = Access(random_index(rng, variables), rng.choice([1, 2, 4, 8]), False)
        tile = {v: min(int(v.size), rng.choice([1, 4, 16, 64])) for v in variables}
        corners = [{v: rng.randrange(int(v.size) - n + 1) for v, n in tile.items()} for _ in range(8)]
        mean = sum(counted(a, tile, c) for c in corners) / len(corners)
        assert 0.45 < a.sectors(tile) / mean < 2.2, (a, tile, mean)


def exact(moved: list[Access], order: list[Axis]) -> float:
    """What ``cost_of_order`` estimates, counted at random places."""
    rng = random.Random(1)
    sizes = [int(a.size) for a in order]
    total = int(torch.tensor(sizes).prod())
    out = 0.0
    for a in moved:
        points = LANES if a.store else WARP
        for _ in range(6):
            at = torch.arange(points) + rng.randrange(max(1, total - points))
            env, rest = {}, at
            for axis, n in zip(reversed(order), reversed(sizes)):
                env[axis.var] = rest % n
                rest = rest // n
            where = torch.as_tensor(a.index.evaluate(env)).expand(points)
            touched = len(torch.unique(where * a.itemsize // SECTOR))
            partial = max(0, touched - points * a.itemsize / SECTOR)
            out += (STORE * touched + PARTIAL * partial if a.store else LOAD * touched) / points / 6
    return out


def test_the_order_taken_is_nearly_the_best() -> None:
    rng = random.Random(2)
    for _ in range(60):
        axes = [
            Axis(Var(name, expr(rng.choice([3, 12, 56, 64, 197, 512]))), "p")
            for name in "abcd"[: rng.choice([2, 3, 4])]
        ]
        variables = [a.var for a in axes]
        moved = []
        for k in range(rng.choice([2, 3, 6])):
            inside = variables if k < 2 else rng.sample(variables, rng.randrange(1, len(variables)))
            e, step = expr(0), 1
            for v in rng.sample(inside, len(inside)):
                e, step = e + expr(v) * step, step * int(v.size)
            moved.append(Access(e, rng.choice([2, 4]), k == 0))
        taken = exact(moved, cheapest_last(axes, moved))
        best = min(exact(moved, list(order)) for order in itertools.permutations(axes))
        assert taken <= 1.35 * best, (moved, taken, best)


def test_an_index_that_is_loaded_is_far_from_its_neighbours() -> None:
    e = reflib.explain(
        lambda w, n: torch.nn.functional.embedding(n, w) + 1,
        torch.empty(5000, 768), torch.zeros(1000, dtype=torch.int64), target="sm_90",
    )  # fmt: skip
    nest = next(n for n in e.fused.nodes if hasattr(n, "body"))
    gathered = next(a for a in accesses(nest.body, e.fused.buffers) if a.loaded)
    assert [str(x) for x in gathered.loaded] == [str(nest.axes[0].var)]
    along = {nest.axes[0].var: 1, nest.axes[1].var: 128}, {nest.axes[0].var: 128, nest.axes[1].var: 1}
    assert gathered.sectors(along[0]) < 17 and gathered.sectors(along[1]) == 128


# -- whole kernels ------------------------------------------------------------------------------------
def spaces(fn, *args: torch.Tensor) -> list[tuple[Space, object, dict[str, Buffer]]]:
    """The kernels for sm_90 of ``fn`` and of its backward: grid, configuration, buffers."""
    torch._dynamo.reset()
    e = reflib.explain(fn, *args, target="sm_90")
    out = []
    for graph in (e, e.backward):
        if graph is not None:
            for v in kernel_variants(graph.scheduled.nodes):
                kernel, buffers = v.variants[0].kernel, graph.scheduled.buffers
                tile = "yblock" in dict(kernel.config.extras)
                out += [(layout(p, buffers, tile), kernel.config, buffers) for p in kernel.parts]  # type: ignore[arg-type]
    return out


def large_sectors(space: Space, buffers: dict[str, Buffer], least: int) -> list[float]:
    """Sectors per point, of a warp along x, of the accesses to buffers of ``least`` elements."""
    found = []
    for s in [*space.loads, *space.stores]:
        if buffers[s.buffer].numel.hint() >= least:
            found.append(Access(s.index, buffers[s.buffer].dtype.itemsize, False).sectors({space.x: WARP}) / WARP)
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("last", [False, True])
def test_channels_do_not_outvote_the_activation(seed: int, last: bool) -> None:
    """Batch norm in evaluation: two accesses to the activation, four to vectors of a channel each."""
    rng = random.Random(seed)
    n, c, h = rng.choice([3, 16, 32]), rng.choice([24, 64, 130, 512]), rng.choice([7, 14, 28, 57])
    x = torch.empty(n, c, h, h, dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last) if last else x
    vectors = [torch.empty(c) for _ in range(4)]
    f = lambda x, w, b, m, v: torch.relu(torch.nn.functional.batch_norm(x, m, v, w, b, False))  # noqa: E731
    seen = [s for space, _, buffers in spaces(f, x, *vectors) for s in large_sectors(space, buffers, n * c * h * h)]
    assert len(seen) == 2 and max(seen) < 0.15, seen  # dense: 2 bytes of 32, and the edges


@pytest.mark.parametrize("seed", range(2))
def test_a_vocabulary_is_reduced_in_rows(seed: int) -> None:
    rng = random.Random(seed)
    rows, words = rng.choice([512, 2048, 4096]), rng.randrange(9000, 130000)
    logits = torch.empty(rows, words, dtype=torch.bfloat16)
    found = spaces(torch.nn.functional.cross_entropy, logits, torch.zeros(rows, dtype=torch.int64))
    long = [config for space, config, _ in found if space.r is not None and space.r.size == words]
    assert long and all(config.xblock == 1 for config in long), long


@pytest.mark.parametrize("seed", range(2))
def test_columns_are_reduced_in_columns(seed: int) -> None:
    rng = random.Random(seed)
    rows, columns = rng.randrange(1000, 9000), rng.randrange(20000, 40000)
    found = spaces(lambda x: (x.amax(0), (x * x).sum(0)), torch.empty(rows, columns))
    space, config, _ = next(x for x in found if x[0].r is not None)
    assert config.xblock >= 32 and space.x.size.hint() >= columns  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_one_tensor_that_are_columns_of_another_are_read_in_squares(seed: int) -> None:
    rng = random.Random(seed)
    n, rows, columns = rng.randrange(100, 150), rng.randrange(300, 900), rng.randrange(300, 900)
    x, y = torch.empty(n, rows, columns, dtype=torch.float16), torch.empty(n, columns, rows, dtype=torch.float16)
    space, config, _ = spaces(lambda x, y: (x - y.transpose(1, 2)).sum(1), x, y)[0]
    assert space.r is not None and min(config.xblock, config.rblock) >= 32  # type: ignore[attr-defined]
    square = torch.empty(4096, 4096)  # 128 programs for 132 multiprocessors
    _, config, _ = spaces(lambda x: (x - x.T).abs().sum(1), square)[0]
    assert min(config.xblock, config.rblock) >= 32  # type: ignore[attr-defined]
    _, alone, _ = spaces(lambda x: x.sum(-1), x)[0]
    assert alone.xblock * 16 < alone.rblock  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_of_narrow_elements_have_long_runs_on_both_sides(dtype: torch.dtype) -> None:
    large, small = torch.empty(4096, 2048, dtype=dtype), torch.empty(512, 256, dtype=dtype)
    for x, square in (large, dtype.itemsize == 2), (small, False):
        _, config, _ = spaces(lambda x: x.T.clone(memory_format=torch.contiguous_format), x)[0]
        sides = config.xblock, dict(config.extras)["yblock"]  # type: ignore[attr-defined]
        assert sides == ((64, 64) if square else (64, 32))


def test_a_tile_with_a_short_side_is_long() -> None:
    """Programs of 256 points leave most of a multiprocessor's threads without work."""
    packed, table = torch.empty(512, 640, dtype=torch.int32), torch.arange(8) * 4
    found = spaces(lambda x, t: ((x[:, :, None] >> t) & 15).to(torch.bfloat16).flatten(1), packed, table)
    assert [c.xblock * dict(c.extras).get("yblock", 1) for _, c, _ in found] == [2048]  # type: ignore[attr-defined]


def test_what_is_read_again_stays_in_cache() -> None:
    """Windows and tables: their lines are read by the next loads too. A row that is summed once streams through."""
    x, at = torch.empty(32, 96, 128, 128), torch.empty(64, 100000, dtype=torch.int64)
    functions = {
        lambda x, at: F.avg_pool2d(x, 5, 1).mean(): False, lambda x, at: x.flatten()[at].sum(1): False,
        lambda x, at: x.flatten(1).sum(1): True,
    }  # fmt: skip
    for fn, streams in functions.items():
        sources = [k.source for k in reflib.explain(fn, x, at, target="sm_90").kernels]
        assert any("range(" in s for s in sources) and streams == any("evict_first" in s for s in sources[:1])


@pytest.mark.parametrize("seed", range(2))
def test_small_tables_are_looked_up_in_the_order_of_what_is_stored(seed: int) -> None:
    """A map whose features lie together, made larger, and stored by feature."""
    rng = random.Random(seed)
    n, c, size = rng.randrange(4, 9), rng.randrange(17, 24), rng.randrange(13, 19)
    x = torch.empty(n, size, size, c).permute(0, 3, 1, 2)
    *_, (space, _, _) = spaces(lambda x: F.interpolate(x, (256, 256), mode="bilinear").contiguous(), x)
    assert all(s.index.coefficient(space.x) == 1 for s in space.stores)


@pytest.mark.parametrize("seed", range(3))
def test_short_axes_are_a_tiles_side_together(seed: int) -> None:
    """Pixels that become channels, windows of an image, heads: read along one long axis, stored along short ones."""
    rng = random.Random(seed)
    n, p, c = rng.randrange(20, 40), rng.choice([6, 7]), rng.choice([64, 96, 128])
    image = torch.empty(n, 8 * p, 8 * p, c, dtype=torch.bfloat16)
    (space, _, _), *_ = spaces(
        lambda x: x.view(n, 8, p, 8, p, c).permute(0, 1, 3, 5, 2, 4).reshape(-1, c, p * p), image
    )
    assert space.mode == "tile" and {space.x.size.hint(), space.y.size.hint()} == {p * p, c}  # type: ignore[union-attr]
    pixels = torch.empty(n, c, 64, 48, dtype=torch.bfloat16)
    unshuffled = lambda x: F.pixel_unshuffle(x, 2).contiguous(memory_format=torch.channels_last)  # noqa: E731
    (space, _, _), *_ = spaces(unshuffled, pixels)
    assert space.mode == "tile" and space.x.size == 4 * c


@pytest.mark.parametrize(
    ("columns", "dtype", "side"),
    [(72, torch.bfloat16, 128), (200, torch.bfloat16, 256), (96, torch.float32, 32), (768, torch.bfloat16, 64)],
)
def test_a_tiles_side_leaves_few_columns_masked_off(columns: int, dtype: torch.dtype, side: int) -> None:
    table, index = torch.empty(40_000, columns, dtype=dtype), torch.zeros(200_000, dtype=torch.int64)
    (space, config, _), *_ = spaces(lambda t, i: t[i] * 2, table, index)
    assert space.mode == "tile" and config.xblock == side  # type: ignore[attr-defined]
