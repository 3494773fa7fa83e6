"""Words of memory that kernels find at zero and leave at zero (plugs into ``wrap.NAMES``)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Zeros:
    """int32 words (counters, parts of split-K) that kernels find at zero and leave at zero, so that no call has to
    clear them.

    Calls on one stream run one after another and may share them; calls captured in a CUDA graph may run whenever the
    graph is replayed, so each capture has words of its own, never given to another.
    """

    CAPTURED = 1 << 20  # words set aside for captures, or these many calls' worth:
    CALLS = 8
    WHOLE = 1024  # what is given out is a multiple of this, so that all of it is aligned

    def __init__(self) -> None:
        self.of: dict[tuple[int, int, int], torch.Tensor] = {}
        self.reserve: dict[int, torch.Tensor] = {}

    def __call__(self, device: int, stream: int, count: int) -> torch.Tensor:
        capture = capture_id(stream) if torch._C._cuda_isCurrentStreamCapturing() else 0
        have = self.of.get((device, stream, capture))
        if have is not None and have.numel() >= count and (capture or self.reserve[device].numel() >= 2 * count):
            return have
        return self._more(device, stream, capture, max(1, -(-count // self.WHOLE)) * self.WHOLE)

    def _more(self, device: int, stream: int, capture: int, count: int) -> torch.Tensor:
        """A capture cannot clear memory once and for all, so a call before it reserves what captures will need."""
        where = torch.device("cuda", device)
        reserve, out = self.reserve.get(device), self.of.get((device, stream, capture))
        if not capture:
            if reserve is None or reserve.numel() < 2 * count:
                most = max(self.CAPTURED, self.CALLS * count)
                self.reserve[device] = torch.zeros(most, dtype=torch.int32, device=where)
            if out is None or out.numel() < count:
                out = torch.zeros(count, dtype=torch.int32, device=where)
            torch.cuda.current_stream(where).synchronize()  # another stream may take from the reserve
        else:
            if reserve is None or reserve.numel() < count:  # no call before the capture: cleared at every replay
                return torch.zeros(count, dtype=torch.int32, device=where)
            out, self.reserve[device] = reserve[:count], reserve[count:]
        self.of[device, stream, capture] = out
        return out

    @contextmanager
    def for_a_while(self) -> Iterator[None]:
        """Graphs captured inside are gone at its end, and their words with them."""
        before = set(self.of)
        try:
            yield
        finally:
            for key in [k for k in self.of if k not in before and k[2]]:
                del self.of[key]


zeros = Zeros()


def capture_id(stream: int) -> int:
    """A number for the capture that ``stream`` is part of."""
    import ctypes

    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    driver = ctypes.CDLL("libcuda.so.1")
    found = driver.cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    return -1 if found else number.value
