"""Random words in Triton; ``ir/random`` says which. Philox itself is in Triton's library."""

from .triton_ops import Printer

PRINTERS: dict[str, Printer] = {"philox": lambda needs, t, a: f"{needs.helper('philox_word')}({', '.join(a)})"}

HELPERS: dict[str, str] = {
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
'''
}
