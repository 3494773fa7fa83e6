"""What arithmetic costs on a GPU, in machine instructions.

A multiprocessor of an H100 issues four instructions per cycle, each of 32 lanes: 132 of them 3e13 lanes' per second,
while memory moves 2.7e12 bytes. So a byte takes as long as 12 instructions, where nothing waits for anything else.
Timed on an H100 (2^24 elements, 8 and 16 of each op per element, picoseconds per op and element; a byte takes 0.37):
addition 0.02, division 0.3, exp 0.28, reciprocal square root 0.25, square root 0.55, log 0.9, sigmoid 0.5, tanh 1.0,
erf 1.1, sine 1.2, log1p 1.0, expm1 0.95, pow 5; a load of another row from L2 0.4, of a masked neighbour 0.3, of a
vector 0.12. But a kernel that repeats work also waits: of 6, 8 and 12 per byte 6 is best (training steps of 14
functions in which they differ, kernels' times on an H200: the geometric mean with 12 is 1.05 times that with 6).
"""

from .loops import Indirect, Load, LoopNest, Op, Stmt

PER_BYTE = 6
LAUNCH = 10_000_000  # bytes that are moved while a kernel is started
LOAD, LOAD_VECTOR, POSITION = 8, 2, 4  # of what L2 or L1 has; of the same few elements; of a place that is computed

# Instructions per element in float32, of sm_90's machine code with 8 elements per thread less that with 4.
INSTRUCTIONS = {
    "div": 12, "sqrt": 12, "rsqrt": 26, "exp": 8, "exp2": 6, "expm1": 24, "log": 24, "log2": 26, "log10": 24,
    "log1p": 28,
    "sin": 80, "cos": 82, "tan": 76, "asin": 16, "acos": 16, "atan": 48, "atan2": 54, "hypot": 40,
    "sinh": 32, "cosh": 18, "tanh": 20, "asinh": 58, "acosh": 66, "atanh": 40, "sigmoid": 22, "pow": 102,
    "erf": 26, "erfc": 46, "lgamma": 210, "fmod": 62, "remainder": 66, "floordiv": 86, "truncdiv": 14, "philox": 20,
}  # fmt: skip


def work_of(loops: LoopNest) -> int:
    """Instructions per point."""
    return sum(map(weight, loops.body))


def weight(s: Stmt) -> int:
    if isinstance(s, Op):
        return INSTRUCTIONS.get(s.op, 1)
    if isinstance(s, Load):
        return LOAD if len(s.index.variables()) > 1 else LOAD_VECTOR
    return POSITION if isinstance(s, Indirect) else 0
