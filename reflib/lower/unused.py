"""Dropping nodes and buffers that are not read: rules make more results than are used, and traced graphs have unused
ops."""

from collections.abc import Sequence
from typing import Any

from reflib.ir.program import Buffer, Extern, Node, iter_views, node_symbols, symbols_in, walk


def remove_unused(
    nodes: Sequence[Node], buffers: dict[str, Buffer], outputs: tuple[Any, ...]
) -> tuple[tuple[Node, ...], dict[str, Buffer]]:
    """The nodes that ``outputs`` need, and the buffers that these name. Kept as well: what writes into an input or
    has an effect, and calls for numbers or sizes held in tensors' data."""
    live: set[Any] = {v.buffer for v in iter_views(outputs)} | symbols_in(outputs)
    for name in live | {b for b in buffers if buffers[b].kind != "temp"}:
        live |= _buffer_symbols(buffers.get(name))
    kept: list[Node] = []
    for n in reversed(nodes):
        makes = n.writes() + [s for s, _, _ in n.symbols] if isinstance(n, Extern) else n.writes()
        needed = any(m in live or isinstance(m, str) and buffers[m].kind != "temp" for m in makes)
        if needed or isinstance(n, Extern) and (n.effect or n.mutates or n.symbols and n.reads() or not makes):
            kept.append(n)
            live.update(n.reads())
            live |= node_symbols(n)
            for b in [*n.reads(), *n.writes()]:
                live |= _buffer_symbols(buffers[b])
    named = live | {b for n in walk(kept) for b in n.writes()}
    return tuple(reversed(kept)), {k: b for k, b in buffers.items() if k in named or b.kind != "temp"}


def _buffer_symbols(b: Buffer | None) -> set[Any]:
    return set() if b is None else {s for e in (*b.shape, *b.strides) for s in e.symbols()}
