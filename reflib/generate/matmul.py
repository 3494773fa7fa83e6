"""A Template with its Tiling to Triton: one readable kernel that multiplies and runs the epilogue. (On a CPU it has no
tiling, and is printed by ``cpp_product``.)

Four kinds (``ir.program.Tiling``): ``tiled`` is printed here, ``split`` by ``matmul_split``, ``persistent`` by
``matmul_persistent``, ``row`` by ``matmul_row``, all with the parts in ``matmul_printer``.
"""

from collections.abc import Collection

from ..errors import GenerateError
from ..ir.expr import Expr
from ..ir.program import Buffer, KernelNode
from ..target import Target
from .cpp_product import print_product
from .kernel import Kernel
from .matmul_persistent import print_persistent
from .matmul_printer import MatmulPrinter
from .matmul_row import print_row
from .matmul_split import print_split


def generate_matmul(node: KernelNode, buffers: dict[str, Buffer], target: Target, aligned: Collection[str]) -> Kernel:
    """The kernel of a Template whose tiling is set. Its pointers are the operands, what the epilogue reads and writes,
    and the workspace but for scratch memory, which is an argument of its own.

    ``aligned``: the buffers whose pointers are checked to be 16-byte aligned on entry; temps always are.
    Raises GenerateError for a tiling that this matmul or target does not allow.
    """
    if not target.is_gpu:
        return print_product(node, buffers)
    p = MatmulPrinter(node, buffers, target, aligned)
    kind = p.tiling.kind
    if kind not in KINDS:
        raise GenerateError(f"{p.template.name}: unknown kind of tiling {kind!r}; known: {', '.join(KINDS)}")
    return p.kernel(node.name, KINDS[kind](p))


def print_tiled(p: MatmulPrinter) -> Expr:
    """One program per tile of the output."""
    p.wait()
    p.put(f"tile = {p.pid()}")
    p.tile()
    p.span()
    p.product()
    p.epilogue()
    return p.tiles


KINDS = {"tiled": print_tiled, "persistent": print_persistent, "split": print_split, "row": print_row}
