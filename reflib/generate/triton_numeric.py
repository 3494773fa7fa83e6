"""Ops in Triton that most models do without: division that rounds, remainders, shifts, rounding, tests of floats,
positions of extremes, random words (``ir/random`` says which; Philox itself is in Triton's library).

Integers divide towards zero in Triton, as in C; division by zero gives 0 here (a masked lane must not trap).
"""

import torch

from .triton_ops import Needs, Printer

_BITS = {torch.float32: "tl.int32", torch.float64: "tl.int64"}
_FROM_BITS = {torch.int32: "tl.float32", torch.int64: "tl.float64"}


def _helper(ints: str, floats: str = "") -> Printer:
    """A helper function per kind of operand."""
    return lambda needs, t, a: f"{needs.helper(floats if t.is_floating_point else ints)}({', '.join(a)})"


def _jumps(printer: Printer) -> Printer:
    """Of what jumps at 0: there subnormal numbers, which Triton's library takes for 0 where it may, are not 0."""

    def of_floats(needs: Needs, t: torch.dtype, a: list[str]) -> str:
        if t.is_floating_point:
            needs.settings["enable_reflect_ftz"] = False
        return printer(needs, t, a)

    return of_floats


PRINTERS: dict[str, Printer] = {
    "floordiv": _jumps(_helper("floordiv_int", "floordiv_float")), "truncdiv": _helper("truncdiv_int"),
    "remainder": _jumps(_helper("remainder_int", "remainder_float")), "fmod": _jumps(_helper("fmod_int", "fmod_float")),
    "shl": lambda needs, t, a: f"{a[0]} << {a[1]}", "shr": lambda needs, t, a: f"{a[0]} >> {a[1]}",
    "isinf": lambda needs, t, a: f"tl.abs({a[0]}) == float('inf')",
    "signbit": lambda needs, t, a: f"{a[0]}.to({_BITS[t]}, bitcast=True) < 0",
    "from_bits": lambda needs, t, a: f"{a[0]}.to({_FROM_BITS[t]}, bitcast=True)",
    "to_bits": lambda needs, t, a: f"{a[0]}.to({_BITS[t]}, bitcast=True)",
    "philox": lambda needs, t, a: f"{needs.helper('philox_word')}({', '.join(a)})",
    "floor": _jumps(lambda needs, t, a: f"tl.floor({a[0]})"), "ceil": _jumps(lambda needs, t, a: f"tl.ceil({a[0]})"),
}  # fmt: skip

# -- helper functions -------------------------------------------------------------------------------
_EXTREME = '''
def {name}_of(a, i, b, j):
    """The {which} value's index; NaN wins, then the smaller index."""
    take = (a {sign} b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(take, a, b), tl.where(take, i, j)
'''
_NEXT = '''
def {name}_next(a, i, b, j):
    """The {which} value's index, where i < j."""
    keep = (a {sign}= b) | (a != a)
    return tl.where(keep, a, b), tl.where(keep, i, j)
'''
_MAX = {"name": "argmax", "which": "greater", "sign": ">"}
_MIN = {"name": "argmin", "which": "smaller", "sign": "<"}
HELPERS: dict[str, str] = {
    "first_of": '''
def first_of(v, best, at, last: tl.constexpr):
    """The least position of each row's extreme; of NaN, if there is one."""
    return tl.min(tl.where((v == best) | (v != v), at, last), 1, keep_dims=True)
''',
    "argmax_of": _EXTREME.format(**_MAX), "argmin_of": _EXTREME.format(**_MIN),
    "argmax_next": _NEXT.format(**_MAX), "argmin_next": _NEXT.format(**_MIN),
    "floordiv_int": '''
def floordiv_int(a, b):
    """Rounds down; 0 where b is 0."""
    d = tl.where(b == 0, 1, b)
    q = a // d
    r = a - q * d
    q = tl.where((r != 0) & ((r < 0) != (d < 0)), q - 1, q)
    return tl.where(b == 0, 0, q)
''',
    "truncdiv_int": '''
def truncdiv_int(a, b):
    """Rounds towards zero; 0 where b is 0."""
    return tl.where(b == 0, 0, a // tl.where(b == 0, 1, b))
''',
    "remainder_int": '''
def remainder_int(a, b):
    """The divisor's sign, as Python's %; 0 where b is 0."""
    d = tl.where(b == 0, 1, b)
    r = a % d
    return tl.where(b == 0, 0, tl.where((r != 0) & ((r < 0) != (d < 0)), r + d, r))
''',
    "fmod_int": '''
def fmod_int(a, b):
    """The dividend's sign, as C's %; 0 where b is 0."""
    return tl.where(b == 0, 0, a % tl.where(b == 0, 1, b))
''',
    "fmod_float": '''
def fmod_float(a, b):
    """The dividend's sign, exact."""
    return libdevice.fmod(a, b)
''',
    "remainder_float": '''
def remainder_float(a, b):
    """The divisor's sign, as Python's %."""
    r = libdevice.fmod(a, b)
    return tl.where((r != 0) & ((b < 0) != (r < 0)), r + b, r)
''',
    "floordiv_float": '''
def floordiv_float(a, b):
    """Python's //: the floor of the exact quotient."""
    r = libdevice.fmod(a, b)
    q = (a - r) / b
    q = tl.where((r != 0) & ((b < 0) != (r < 0)), q - 1.0, q)
    f = tl.floor(q)
    f = tl.where(q - f > 0.5, f + 1.0, f)
    f = tl.where(q == 0, libdevice.copysign(q * 0.0, a / b), f)
    return tl.where(b == 0, a / b, f)
''',
    "philox_row": '''
def philox_row(seed, stream, first, X: tl.constexpr, R: tl.constexpr):
    """The R words from ``first`` on, a multiple of 4, for each of X rows."""
    counter = (first.to(tl.int64) >> 2) + tl.arange(0, R // 4)[None, :]
    a, b, c, d = tl.philox(seed, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), stream.to(tl.uint32), 0)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [X, R]).to(tl.int32, bitcast=True)
''',
    "philox_word": '''
def philox_word(seed, stream, index):
    """Word ``index`` of a stream. Neighbours in a thread share a counter, which the compiler may see."""
    counter = index >> 2
    a, b, c, d = tl.philox(seed, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), stream.to(tl.uint32), 0)
    which = index & 3
    return tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d))).to(tl.int32, bitcast=True)
''',
}
