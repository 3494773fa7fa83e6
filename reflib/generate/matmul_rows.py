"""Products of at most four rows with an operand that is computed: multiplied and added in registers.

``tl.dot`` takes 16 rows at least, and stores what is computed to shared memory first, to read it in the layout that
tensor cores want. With one row each weight is used once: that exchange takes longer than the multiplication. Here a
block of KBLOCK x NBLOCK weights stays in the registers where it was computed, each is multiplied with its row's
element of ``a``, and added, in float32, to a sum of its own. After the last step the sums of a column are added up.

Triton copies ahead only what a ``tl.dot`` reads, unless the loop itself says how many steps: so this one does.
"""

from dataclasses import replace

from ..errors import GenerateError
from ..ir.expr import Expr
from .matmul_printer import MatmulPrinter, load
from .triton_facts import blocks, paren


def print_rows(p: MatmulPrinter) -> Expr:
    """One program per NBLOCK columns of all rows."""
    rows = p.m.constant
    if rows is None or not 1 <= rows <= p.tiling.m or p.k == 0 or ("a" in p.computed and rows > 1):
        raise GenerateError(f"{p.template.name}: a tiling of {p.tiling} for {p.m} rows, depth {p.k}")
    p.wait()
    p.put(f"tile = {p.pid()}")
    p.tile()
    p.span()
    p.put(f"k = tl.arange(0, KBLOCK){p.wide}")
    loop, ragged = blocks(p.k, p.tiling.k) != 1, p.k.constant is None or p.k.constant % p.tiling.k != 0
    for computed in p.computed.values():
        computed.before(ragged)
    a = _pointers(p, rows)
    for i in range(rows):
        p.put(f"acc{i} = tl.zeros([KBLOCK, NBLOCK], tl.float32)")
    if loop:
        p.put(f"for k0 in tl.range(0, {p.size(p.k)}, KBLOCK, num_stages={p.tiling.num_stages}):")
        p.indent(1)
    limit = f"{p.size(p.k)} - k0" if loop else p.size(p.k)
    p.put(f"b = {_operand(p, 'b', loop, limit, ragged)}.to(tl.float32)")
    for i in range(rows):
        if "a" in p.computed:
            text = f"{p.computed['a'].inside(loop)}.T"
        else:
            v, masks = p.views["a"], [f"k[:, None] < {limit}"] if ragged else []
            text = p.cast(v, load(a[i], masks, v.dtype))
        p.put(f"acc{i} += {text}.to(tl.float32) * b")
    if loop:
        for name, view in p.views.items():
            stride = view.strides[2 if name == "a" else 1]
            by = "KBLOCK" if stride == 1 else f"KBLOCK * {paren(p.size(stride))}"
            for at in [] if name in p.computed else a if name == "a" else ["b_at"]:
                p.put(f"{at} += {by}")
        p.indent(-1)
    sums = [f"tl.sum(acc{i}, axis=0)[None, :]" for i in range(rows)]
    text = sums.pop()
    while sums:
        text = f"tl.where(m[:, None] == {len(sums) - 1}, {sums.pop()}, {text})"
    p.put(f"acc = tl.broadcast_to({text}, [MBLOCK, NBLOCK])" if rows == 1 else f"acc = {text}")
    p.epilogue()
    return p.tiles


def _pointers(p: MatmulPrinter, rows: int) -> list[str]:
    """The names of the pointers to each row of ``a``, and to ``b``, where these are in memory."""
    names = [f"a{i}_at" for i in range(rows)]
    if "a" not in p.computed:
        v = p.views["a"]
        for i, name in enumerate(names):
            row = replace(v, offset=v.offset + i * v.strides[1], strides=(v.strides[0], v.strides[2]))
            p.put(f"{name} = {p.pointers['a']} + {p.offset(row, ('k[:, None]',))}")
    if "b" not in p.computed:
        p.put(f"b_at = {p.pointers['b']} + {p.offset(p.views['b'], ('k[:, None]', 'n[None, :]'))}")
    return names


def _operand(p: MatmulPrinter, name: str, loop: bool, limit: str, ragged: bool) -> str:
    if name in p.computed:
        return p.computed[name].inside(loop)
    masks = [f"k[:, None] < {limit}"] if ragged else []
    masks += [f"n[None, :] < {p.size(p.n)}"] if p.body.masks["x"] else []
    return p.cast(p.views[name], load(f"{name}_at", masks, p.views[name].dtype))
