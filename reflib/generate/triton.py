"""Loop nests to Triton: one readable module of text with one kernel in it.

The function's parameters are the pointers, then the size symbols, then the block sizes as constants with their values
as defaults; so the text alone determines how it is launched. Sizes known when compiling are numbers in the text.
"""

from collections.abc import Collection

from ..ir.expr import Expr, Sym, expr
from ..ir.loops import LoopNest
from ..ir.program import Buffer, Config
from ..ir.transforms import two_passes
from ..schedule.axes import layout
from ..seams import Seam
from ..target import Target
from .kernel import Kernel
from .triton_body import PartPrinter
from .triton_facts import pointer_name
from .triton_ops import Needs, helper_text

# By ``Config.reduction``: a PartPrinter that knows more, and prints ``m2``. None: PartPrinter, which does not.
PARTS = Seam("generate.PARTS")

HEADER = "import triton\nimport triton.language as tl\n"
LIBDEVICE = "from triton.language.extra import libdevice\n"


def generate_triton(
    name: str,
    parts: tuple[LoopNest, ...],
    config: Config,
    buffers: dict[str, Buffer],
    target: Target,
    aligned: bool | Collection[str] = (),
) -> Kernel:
    """The kernel ``name`` that computes ``parts``, independent of each other, in one launch.

    ``aligned``: the buffers whose pointers are checked to be 16-byte aligned on entry (True: all); temps always are.
    """
    needs = Needs()
    used = {b for p in parts for b in (*p.reads(), *p.writes())}
    sure = {b for b in used if aligned is True or buffers[b].kind == "temp" or b in (aligned or ())}
    tile = "yblock" in dict(config.extras)
    part_printer = PARTS.get(config.reduction, PartPrinter)
    spaces = [layout(p if part_printer.one_pass else two_passes(p), buffers, tile) for p in parts]
    printers = [
        part_printer(s, config, buffers, needs, f"_{k}" if len(parts) > 1 else "", sure) for k, s in enumerate(spaces)
    ]
    bodies = [p.print() for p in printers]
    ends: list[Expr] = []
    for p in printers:
        ends.append((ends[-1] if ends else expr(0)) + p.programs())
    body = bodies[0] if len(parts) == 1 else _dispatch(printers, bodies, ends)
    symbols = tuple(sorted({s for p in printers for s in p.symbols} | {s for e in ends for s in e.symbols()}))
    pointers = list(dict.fromkeys(b for p in printers for b in p.pointers))
    lines = [*known_multiples(config, symbols), *body]
    helpers = helper_text(needs)
    source = HEADER + (LIBDEVICE if needs.libdevice else "") + "\n\n"
    source += helpers + "\n\n" if helpers else ""
    source += _function(name, parts, config, pointers, symbols, lines)
    return Kernel(
        name, "triton", source, tuple((b, buffers[b].dtype) for b in pointers), symbols, ends[-1],
        config.num_warps, config.num_stages, config.index, tuple(i for i, b in enumerate(pointers) if b in sure),
        exact="exact" in dict(config.extras),
        settings=(*needs.settings.items(), *(("maxnreg", min(255, n // 32 // config.num_warps))
                                             for e, n in config.extras if e == "registers")),
    )  # fmt: skip


def _dispatch(printers: list[PartPrinter], bodies: list[list[str]], ends: list[Expr]) -> list[str]:
    """``pid`` ranges choose the part."""
    wide = ".to(tl.int64)" if printers[0].wide else ""
    lines = [f"pid = tl.program_id(0){wide}"]
    for k, (p, body, end) in enumerate(zip(printers, bodies, ends)):
        last = k == len(bodies) - 1
        lines.append("else:" if last else f"{'if' if k == 0 else 'elif'} pid < {p.size(end)}:")
        start = p.size(ends[k - 1]) if k else "0"
        start = start if start.isalnum() else f"({start})"
        lines.append(f"    pid{p.tag} = pid - {start}" if k else f"    pid{p.tag} = pid")
        lines += ["    " + line for line in body]
    return lines


def known_multiples(config: Config, symbols: tuple[Sym, ...]) -> list[str]:
    """Sizes that were checked to be multiples of 16, written so that Triton can use it and reads 16 bytes at a time."""
    known = dict(config.extras).get("divisible", ())
    return [
        f"{s.name} = ({s.name} // 16) * 16  # a multiple of 16, checked before the launch"
        for s in symbols
        if s.name in known
    ]


def _function(
    name: str,
    parts: tuple[LoopNest, ...],
    config: Config,
    pointers: list[str],
    symbols: tuple[Sym, ...],
    lines: list[str],
) -> str:
    blocks = [f"XBLOCK: tl.constexpr = {config.xblock}"]
    extras = dict(config.extras)
    if "yblock" in extras:
        blocks.append(f"YBLOCK: tl.constexpr = {extras['yblock']}")
    if any("RBLOCK" in line for line in lines):
        blocks.append(f"RBLOCK: tl.constexpr = {config.rblock}")
    params = [pointer_name(b) for b in pointers] + [s.name for s in symbols] + blocks
    one_line = f"def {name}({', '.join(params)}):"
    if len(one_line) > 110:
        one_line = f"def {name}(\n    {', '.join(params)},\n):"
    text = f"@triton.jit\n{one_line}\n"
    for line in _about(parts):
        text += f"    # {line}\n"
    return text + "".join(f"    {line}\n" for line in lines)


def _about(parts: tuple[LoopNest, ...]) -> list[str]:
    """What the kernel computes, from where."""
    out = []
    for k, p in enumerate(parts[:8]):
        shape = " x ".join(str(a.size) for a in p.parallel) or "1"
        rows = " x ".join(str(a.size) for a in p.reduced)
        ops = ", ".join(dict.fromkeys(o.op.removeprefix("aten.") for o in p.origins)) or p.name
        out.append(
            f"{f'part {k}: ' if len(parts) > 1 else ''}{ops} over {shape}" + (f", reducing {rows}" if rows else "")
        )
    return out + ([f"... and {len(parts) - 8} more parts"] if len(parts) > 8 else [])
