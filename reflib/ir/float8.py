"""Casts to 8-bit floats in loop nests: ``%i = op to_e4m3 %x : float8_e4m3fn``, and ``to_e5m2``.

A value of one of these dtypes is only stored, or cast back to float32 (every one of them is a float32): both are an
instruction on GPUs from sm_90 on. What is out of range becomes what eager makes of it (``BEYOND``).
"""

import torch

from .ops import OPS, OpSpec

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASTS = {E4M3: "to_e4m3", E5M2: "to_e5m2"}
# From this magnitude on, halfway to the next number that there would be, a number is out of range: e4m3's is rounded to
# the even one of the two, its largest; e5m2's is not.
LIMITS = {E4M3: 464.0, E5M2: 61440.0}


# The bits that eager stores for what is out of range: e5m2 has an infinity. e4m3 has none: NaN before PyTorch 2.13,
# since then the largest number.
BEYOND = {d: int(torch.tensor([float("inf")]).to(d).view(torch.uint8)) for d in CASTS}

OPS["to_e4m3"] = OpSpec("to_e4m3", 1, "float", "given", lambda x: x.float().to(E4M3))
OPS["to_e5m2"] = OpSpec("to_e5m2", 1, "float", "given", lambda x: x.float().to(E5M2))
