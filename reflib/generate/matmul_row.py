"""Products of one row with an operand that is computed: multiplied and added in registers.

``tl.dot`` takes 16 rows at least, and stores what is computed to shared memory first, to read it in the layout that
tensor cores want. With one row each weight is used once: that exchange takes longer than the multiplication. Here a
block of KBLOCK x NBLOCK weights stays in the registers where it was computed, is multiplied with KBLOCK elements of
``a``, and added, in float32, to sums of its own. After the last step the sums of a column are added up.

Triton copies ahead only what a ``tl.dot`` reads, unless the loop itself says how many steps: so this one does.
"""

from dataclasses import replace

from ..errors import GenerateError
from ..ir.expr import Expr
from .matmul_printer import MatmulPrinter, load
from .triton_facts import blocks, paren


def print_row(p: MatmulPrinter) -> Expr:
    """One program per NBLOCK columns."""
    if p.m.constant != 1 or p.k == 0:
        raise GenerateError(f"{p.template.name}: a tiling of {p.tiling} for {p.m} rows, depth {p.k}")
    p.wait()
    p.put(f"tile = {p.pid()}")
    p.tile()
    p.span()
    p.put(f"k = tl.arange(0, KBLOCK){p.wide}")
    loop, ragged = blocks(p.k, p.tiling.k) != 1, p.k.constant is None or p.k.constant % p.tiling.k != 0
    for computed in p.computed.values():
        computed.before(ragged)
    if "a" not in p.computed:
        v = p.views["a"]
        row = replace(v, strides=(v.strides[0], v.strides[2]))
        p.put(f"a_at = {p.pointers['a']} + {p.offset(row, ('k[:, None]',))}")
    if "b" not in p.computed:
        p.put(f"b_at = {p.pointers['b']} + {p.offset(p.views['b'], ('k[:, None]', 'n[None, :]'))}")
    p.put("sums = tl.zeros([KBLOCK, NBLOCK], tl.float32)")
    if loop:
        p.put(f"for k0 in tl.range(0, {p.size(p.k)}, KBLOCK, num_stages={p.tiling.num_stages}):")
        p.indent(1)
    limit = f"{p.size(p.k)} - k0" if loop else p.size(p.k)
    p.put(f"b = {_operand(p, 'b', loop, limit, ragged)}.to(tl.float32)")
    a = _operand(p, "a", loop, limit, ragged) + (".T" if "a" in p.computed else "")
    p.put(f"sums += {a}.to(tl.float32) * b")
    if loop:
        for name, view in p.views.items():
            stride = view.strides[2 if name == "a" else 1]
            by = "KBLOCK" if stride == 1 else f"KBLOCK * {paren(p.size(stride))}"
            if name not in p.computed:
                p.put(f"{name}_at += {by}")
        p.indent(-1)
    p.put("acc = tl.broadcast_to(tl.sum(sums, axis=0)[None, :], [MBLOCK, NBLOCK])")
    p.epilogue()
    return p.tiles


def _operand(p: MatmulPrinter, name: str, loop: bool, limit: str, ragged: bool) -> str:
    if name in p.computed:
        return p.computed[name].inside(loop)
    masks = [f"k[:, None] < {limit}"] if ragged else []
    masks += [f"n[None, :] < {p.size(p.n)}"] if name == "b" and p.body.masks["x"] else []
    return p.cast(p.views[name], load(f"{name}_at", masks, p.views[name].dtype))
