"""Is the device ours alone? A small reference kernel is timed before, among and after the contenders of a case.

Kernels of other processes make it slower, by time slices of milliseconds where it needs one. A case whose reference
is off is waited with, timed again, and if that does not help labelled in its rows. (On a CPU: only labelled.)
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from reflib.lab.measuring import time_cases
from reflib.lab.timing import Samples, make_sampler, quantile

LIMIT = 1.2  # times the idle device's: clocks alone drift less
ATTEMPTS = 3
SAMPLES = 12
WAIT = 3.0  # seconds for a neighbour to end, before another attempt
PATIENCE = 45.0  # seconds of waiting in all: after that the device is measured as it is
REFERENCE = "reference"


class Reference:
    """``idle``: seconds of the kernel on a device that does nothing else, the least seen so far."""

    def __init__(self, device: torch.device):
        self.device, self.patience = device, PATIENCE if device.type == "cuda" else 0.0
        size = 2**20 if device.type == "cuda" else 2**16
        x = torch.ones(size, device=device)
        y = torch.empty_like(x)
        self.fn: Callable[[], Any] = lambda: torch.mul(x, 1.5, out=y)
        self.sample = make_sampler(self.fn, "auto", "warm", device)[0]
        self.idle = min(self.sample() for _ in range(5 * SAMPLES))  # the first ones raise the clocks

    def off(self, seconds: tuple[float, ...]) -> float:
        """How many times the idle seconds: of the slow quarter, which one neighbour in four rounds reaches."""
        self.idle = min(self.idle, *seconds)
        return quantile(seconds, 0.75) / self.idle

    def read(self) -> float:
        return self.off(tuple(self.sample() for _ in range(SAMPLES)))

    def settle(self) -> float:
        """Wait until the device is idle, or for so long; the last reading. On a CPU it does not wait."""
        start = time.monotonic()
        end = start + min(WAIT, self.patience)
        waited = False
        while (found := self.read()) > LIMIT and time.monotonic() < end:
            waited = True
            time.sleep(0.1)
        if waited:
            self.patience -= time.monotonic() - start
        return found


def time_quietly(
    fns: Mapping[str, Callable[[], Any]], reference: Reference, rounds: int, seconds: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """({who: Samples or a failure}, what rows say of it) of the quietest of up to ATTEMPTS attempts.

    What rows say: reference (before, among, after: times idle), disturbed, attempts.
    """
    device, best, attempts = reference.device, None, 0
    while attempts < ATTEMPTS:
        attempts += 1
        before = reference.settle()
        found = time_cases({**fns, REFERENCE: reference.fn}, "auto", "warm", rounds, seconds, device)
        among = found.pop(REFERENCE)
        readings = [before, reference.off(among.seconds) if isinstance(among, Samples) else 1.0, reference.read()]
        if best is None or max(readings) < max(best[1]):
            best = (found, readings)
        if max(best[1]) <= LIMIT or reference.patience <= 0:
            break
    assert best is not None
    about = {"reference": [round(r, 3) for r in best[1]], "disturbed": max(best[1]) > LIMIT, "attempts": attempts}
    return best[0], about
