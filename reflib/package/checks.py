"""What a manifest says must fit together, and fit its file: checked when a package is read, and before it is written.

The digests prove that a manifest is unchanged, not that reflib wrote it. So each value has its declared type, names
that become parts of paths, of C and of CMake are plain words (both by ``manifest.read``), and ``check`` holds the rest:
references lead somewhere, weights lie within their member, and nothing is so long that work which is not linear in it
takes minutes.
"""

from collections.abc import Mapping, Sized

from ..errors import PackageError
from .archive import is_member
from .manifest import Manifest, PackagedVariant, Signature
from .weights import BY_NAME, Weight

WEIGHTS = "weights.safetensors"
MANY = 10_000  # arguments, guards, ranges; kernels may be more


def check(m: Manifest, members: Mapping[str, int]) -> None:
    """Raises PackageError for a manifest that contradicts itself or the members (name -> bytes of contents)."""
    _few("variants", m.variants, 100)
    _few("programs", m.programs, 100)
    _few("libraries", m.libraries)
    if not m.variants or len(set(m.archs)) != len(m.archs):
        raise _wrong(f"it has {len(m.archs)} variants, of {len(set(m.archs))} architectures")
    for p in m.programs.values():
        _program(p)
    for v in m.variants:
        _variant(m, v, members)
    _weights(m, members.get(WEIGHTS, 0))


def _wrong(what: str) -> PackageError:
    return PackageError(f"its manifest is none of reflib's: {what}; build the package again")


def _few(what: str, items: Sized, most: int = MANY) -> None:
    if len(items) > most:
        raise _wrong(f"it has {len(items):,} {what}, and {most:,} at most are possible")


def _program(p: Signature) -> None:
    for what in ("arguments", "outputs", "written", "ranges", "guards", "conditions", "names", "results"):
        _few(what, getattr(p, what))
    if len(p.inputs) != len(p.devices) or p.inputs.count("") != len(p.arguments):
        raise _wrong(f"{len(p.inputs)} inputs, {len(p.devices)} devices of inputs and {len(p.arguments)} arguments")
    names = {"argument": {a.name for a in p.arguments if a.tensor}, "weight": {n for n in p.inputs if n}}
    if wrong := [o for o in p.written if o.target not in names.get(o.kind, ())]:
        raise _wrong(f"it writes to {wrong[0].kind!r:.80} {wrong[0].target!r:.80}, which it does not have")
    for a in p.arguments:
        if a.tensor is not None:
            _few("dimensions", a.tensor.shape, 64)
    for what in (set(p.devices) | {a.tensor.device.type for a in p.arguments if a.tensor}) - {"", "cpu", "cuda"}:
        raise _wrong(f"a tensor on the device {what!r:.80}")


def _variant(m: Manifest, v: PackagedVariant, members: Mapping[str, int]) -> None:
    named = [v.wrapper, v.text, v.fallback, *([v.python] if v.python else []), *{k.image: None for k in v.kernels}]
    if missing := [n for n in named if not is_member(n) or n not in members]:
        raise _wrong(f"the variant {v.arch} names the member {missing[0]!r:.80}, which the file does not have")
    kernels = [k.name for k in v.kernels]
    if len(set(kernels)) < len(kernels) or not set(kernels) <= set(v.table):
        raise _wrong(f"the kernels of the variant {v.arch} are not those of its table")
    if wrong := [k.name for k in v.kernels if k.image.endswith(".so") and k.symbol != k.name]:
        raise _wrong(f"the kernel {wrong[0]} is not the function of this name in its library")
    if v.program not in m.programs:
        raise _wrong(f"the variant {v.arch} is of the program {v.program!r:.80}, which it does not have")
    known = {w.name for w in m.weights}
    needed = [*(n for n in m.programs[v.program].inputs if n), *(n for n, _ in v.constants)]
    if absent := [n for n in needed if n not in known]:
        raise _wrong(f"the weight {absent[0]!r:.80} is not in the file")


def _weights(m: Manifest, size: int) -> None:
    """Spans lie within the member and do not overlap, and weights lie within their span."""
    end = 0
    for s in sorted(m.spans, key=lambda s: s.start):
        if s.start < end or s.size < 0 or s.start + s.size > size:
            raise _wrong(f"the span of {s.size:,} bytes from {s.start:,} on is not within the weights")
        end = s.start + s.size
    for w in m.weights:
        if w.dtype not in BY_NAME or not 0 <= w.span < len(m.spans) or not _fits(w, m.spans[w.span].size):
            raise _wrong(f"the weight {w.name!r:.80} is not within its span")


def _fits(w: Weight, size: int) -> bool:
    if len(w.shape) != len(w.strides) or len(w.shape) > 64 or min((w.offset, *w.shape, *w.strides)) < 0:
        return False
    width = BY_NAME[w.dtype].itemsize
    last = sum((n - 1) * s for n, s in zip(w.shape, w.strides)) if 0 not in w.shape else -1
    return w.offset % width == 0 and w.offset + (last + 1) * width <= size
