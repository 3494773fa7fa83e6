"""Symmetric storage: memory of each rank that all ranks of its process group can read, and a barrier between them.

A collective of the process group copies: its library takes a tensor, moves it through memory of its own, and writes a
tensor. Where a rank can read another's memory, a kernel reads the others' values where they are, and the copies go.

* **One allocation** per process group and device, of ``BYTES``, the same on all ranks; never more, never moved. Where
  it is, ranks tell each other once (``storage``); it ends with its group or its process. It has three parts, in
  quarters of it::

      0          2             3         4
      | planned  | copied in   | sums    |
                 | landing               |

  *planned*: buffers of compiled programs, at offsets that ``place`` assigned. What lies there is read in place; other
  tensors are copied in, in pieces if need be. *sums*: what a rank has added up for the others (two-shot). *landing*:
  the same bytes, where others write what a product needs, or has made for this rank (``products``).
* **An exchange** (``exchange``) is all that ranks do together: each says where its values lie; a barrier; all read; a
  barrier, after which no rank reads another's memory any more. So a buffer there lives as long as any other: the plan
  may reuse it once the call has returned, and needs to know nothing of other ranks. As offsets are said in each
  exchange, ranks need not have compiled the same: one may read where it is planned, and another have it copied in.
* **Faults.** What ranks say is compared: another op, size or dtype is an error on all. A rank that fails in an exchange
  says so (on a GPU it does not: the others' calls end at the limit), a process that has ended loses its lock on the
  file, and one that does not come within the process group's time limit is named. After any of these the storage is not
  used again: every exchange is the same error.

On a CPU it is a file in memory that the ranks of one host map (``_Mapped``); it has no name as soon as all have it. On
a GPU it is PyTorch's symmetric memory (``_Device``), without multicast; an exchange is one kernel there (``kernels``),
which compares what ranks say and ends with an assertion where they differ, or do not come in time. What small sums
write to each other lies in front of it.

NB: TorchInductor lowers single collectives to ``symm_mem`` ops, and lets their arguments be allocated there.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .meeting import Meeting, RanksError, store_of

BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}  # per rank; a multiple of 65536
ALIGN = 256
PAGE, SLOT = 4096, 512  # bytes; a rank's slot: what it says in numbers, then in words
NUMBERS = 8
COUNT, FAILED, OFFSET, SAID = 0, 1, 2, 3  # places of numbers in a slot; SAID: ``how``, bytes, dtype
HOW = ("one_shot", "two_shot")
SENT = {"one_shot": 256 << 10, "two_shot": 2 << 20, "reduce-scatter": 256 << 10}  # bytes: on a GPU, no more are sent
KINDS = (*HOW, "reduce-scatter", "gather and product", "product and scatter")  # of exchanges
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
YIELD, PAUSE, LOOK = 1e-3, 50e-6, 0.2  # seconds of polls, then between polls, and between looks at who has ended

_storages: WeakKeyDictionary[Any, dict[torch.device, Storage]] = WeakKeyDictionary()  # by process group
_LOCK = threading.Lock()


def storage(group_name: str, device: torch.device) -> Storage:
    """The storage of a process group; the first call makes it, on all ranks together. Raises RanksError."""
    import torch.distributed.distributed_c10d as c10d

    group = c10d._resolve_process_group(group_name)
    known = _storages.setdefault(group, {})
    if device not in known:
        known[device] = _Device(group, device) if device.type == "cuda" else _Mapped(group, device)
    return known[device]


class Storage:
    """``peers``: each rank's memory, as bytes, its own among them."""

    peers: list[torch.Tensor]

    def __init__(self, group: Any, device: torch.device):
        self.name, self.rank, self.size = group.group_name, group.rank(), group.size()
        self.device, self.bytes = device, BYTES[device.type]
        self.limit = store_of(group).timeout.total_seconds()
        self.planned, self.copied, self.sums = 0, self.bytes // 2, self.bytes // 4 * 3
        self.broken = ""

    def part(self, rank: int, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in the memory of ``rank``."""
        n = dtype.itemsize
        for s in shape:
            n *= s
        return self.peers[rank][at : at + n].view(dtype).view(shape)

    def offset(self, x: torch.Tensor) -> int | None:
        """Where ``x``, contiguous, lies in this rank's memory."""
        own = self.peers[self.rank]
        at = x.data_ptr() - own.data_ptr()
        inside = x.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        return at if inside and at >= 0 and at % 16 == 0 else None

    @contextlib.contextmanager
    def exchange(self, x: torch.Tensor, how: str) -> Iterator[list[int]]:
        """Inside, all ranks' ``x`` may be read, at the offsets that it yields, by rank. ``x``: contiguous; if it does
        not lie here, at most as large as the space for copies."""
        with self.together():
            at = self.offset(x)
            if at is None:
                at = self.copied
                self.part(self.rank, at, x.shape, x.dtype).copy_(x)
            yield self.begin(at, (KINDS.index(how), x.nbytes, DTYPES.index(x.dtype)))
            self.barrier()

    def together(self) -> contextlib.AbstractContextManager[None]:
        """What ranks do inside fails on all."""
        return self._together()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        if self.broken:
            raise RanksError(self.broken)
        try:
            yield
        except BaseException as e:
            why = str(e) if isinstance(e, RanksError) else f"rank {self.rank} failed: {type(e).__name__}: {e}"
            here = f"symmetric storage of process group {self.name!r}: "
            self.broken = here + why.removeprefix(here)
            self.fail()
            if isinstance(e, RanksError):
                raise RanksError(self.broken) from e
            raise

    def most(self, x: torch.Tensor, parts: int = 1) -> int:
        """How many elements of flat ``x``, or of each of ``parts``, an exchange takes: the same on all ranks."""
        return (self.sums - self.copied) // parts // ALIGN * ALIGN // x.element_size()

    def begin(self, at: int, said: tuple[int, ...]) -> list[int]:
        """Say where this rank's values lie; when all have said it: where theirs do."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Returns when all ranks have come."""
        raise NotImplementedError

    def fail(self) -> None:
        """Tell the others that this rank has given up."""


class _Mapped(Storage):
    """In a file that all ranks map: a slot per rank, then each rank's memory."""

    def __init__(self, group: Any, device: torch.device):
        super().__init__(group, device)
        first = -(-self.size * SLOT // PAGE) * PAGE
        self.file = _shared_file(group, first + self.size * self.bytes)
        self.map = mmap.mmap(self.file, first + self.size * self.bytes)
        self.numbers = memoryview(self.map)[:first].cast("q")
        whole = torch.frombuffer(self.map, dtype=torch.uint8)
        self.peers = [whole[first + r * self.bytes :][: self.bytes] for r in range(self.size)]
        self.count = 0

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.file)

    def begin(self, at: int, said: tuple[int, ...]) -> list[int]:
        own = self._slot(self.rank)
        self.numbers[own + OFFSET] = at
        for i, n in enumerate(said):
            self.numbers[own + SAID + i] = n
        self.barrier()
        slots = [self._slot(r) for r in range(self.size)]
        for rank, slot in enumerate(slots):
            theirs = tuple(self.numbers[slot + SAID : slot + SAID + len(said)])
            if theirs != said:
                words = [f"{_words(s)} on rank {r}" for r, s in ((self.rank, said), (rank, theirs))]
                raise RanksError(f"ranks exchange different things: {', '.join(words)}")
        return [self.numbers[slot + OFFSET] for slot in slots]

    def barrier(self) -> None:
        self.count += 1
        _fence()
        self.numbers[self._slot(self.rank) + COUNT] = self.count
        for rank in range(self.size):
            self._await(rank, self._slot(rank))
        _fence()

    def _await(self, rank: int, slot: int) -> None:
        started, looked = time.monotonic(), 0.0
        while self.numbers[slot + COUNT] < self.count:
            if self.numbers[slot + FAILED]:
                raise RanksError(self._text(rank))
            now = time.monotonic()
            if now - started < YIELD:  # (others may run for long then: it is not the number of polls that counts)
                os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
                continue
            if now - looked > LOOK:
                looked = now
                if self._ended(rank) and self.numbers[slot + COUNT] < self.count and not self.numbers[slot + FAILED]:
                    raise RanksError(f"rank {rank} has left: its process has ended, or its process group")
            if now - started > self.limit:
                raise RanksError(f"rank {rank} did not come within {self.limit:.0f} s: it is late, or runs other code")
            time.sleep(PAUSE)

    def _slot(self, rank: int) -> int:
        return rank * (SLOT // 8)

    def _words_of(self, rank: int) -> slice:
        start = rank * SLOT + 8 * NUMBERS
        return slice(start, start + SLOT - 8 * NUMBERS)

    def _text(self, rank: int) -> str:
        return bytes(self.map[self._words_of(rank)]).rstrip(b"\0").decode(errors="replace")

    def fail(self) -> None:
        space = self._words_of(self.rank)
        self.map[space] = self.broken.encode()[: space.stop - space.start].ljust(space.stop - space.start, b"\0")
        _fence()
        self.numbers[self._slot(self.rank) + FAILED] = 1

    def _ended(self, rank: int) -> bool:
        """Is the lock free that a rank's process holds while it lives?"""
        if rank == self.rank:
            return False
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
        return True


def _fence() -> None:
    """A process that sees what is stored after it sees what was stored before: two locks, as one lets both move in."""
    for _ in range(2):
        with _LOCK:
            pass


def share_of(x: torch.Tensor, size: int) -> int:
    """How many elements of ``x`` one rank of ``size`` adds up; a multiple of ALIGN bytes."""
    n = x.element_size()
    return -(-x.numel() * n // (size * ALIGN)) * ALIGN // n


def _words(said: Sequence[int]) -> str:
    return f"{KINDS[said[0]]} of {said[1]} bytes of {str(DTYPES[said[2]]).removeprefix('torch.')}"


def _shared_file(group: Any, nbytes: int) -> int:
    """A file descriptor of a file of zeros that all ranks have open; each has locked its own byte."""
    about = f"symmetric storage of process group {group.group_name!r}"
    meeting = Meeting(group, "symmetric", about)
    meeting.tell(nbytes)
    path = meeting.hear(lambda said: _created(said, nbytes))
    fd, why = -1, ""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.lockf(fd, fcntl.LOCK_EX, 1, group.rank())
    except OSError as e:
        why = f"rank {group.rank()} cannot open the first rank's shared memory, as if it ran on another host: {e}"
    meeting = Meeting(group, "mapped", about)
    try:
        meeting.tell(why)
        meeting.hear(_all_right)
    finally:
        if group.rank() == 0:
            os.unlink(path)
    return fd


def _created(said: list[int], nbytes: int) -> str:
    if any(n != nbytes for n in said):
        raise RanksError(f"ranks would map symmetric storage of different sizes: {said}")
    why: OSError | None = None
    for folder in ("/dev/shm", tempfile.gettempdir()):
        try:
            fd, path = tempfile.mkstemp(prefix="reflib-", dir=folder)
        except OSError as e:
            why = e
            continue
        try:
            _reserve(fd, nbytes)
            return path
        except OSError as e:
            why = e
            os.unlink(path)
        finally:
            os.close(fd)
    raise RanksError(f"no room for symmetric storage of {nbytes >> 20} MiB: {why}")


def _reserve(fd: int, nbytes: int) -> None:
    """Now, as a page that is missing later ends the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.ftruncate(fd, nbytes)


def _all_right(said: list[str]) -> None:
    if why := next(filter(None, said), ""):
        raise RanksError(why)


class _Device(Storage):
    """PyTorch's symmetric memory; ``kernels`` has what ranks exchange there, in front of each rank's memory."""

    def __init__(self, group: Any, device: torch.device):
        from torch.distributed import _symmetric_memory as symmetric

        from . import kernels

        super().__init__(group, device)
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self.front = kernels.front(self.size)
        nbytes = self.front + self.bytes

        def allocated() -> torch.Tensor:
            own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
            own[: self.front] = 0
            torch.cuda.synchronize(device)  # before any other rank writes there
            return own

        own = _together(group, "allocate", allocated)
        self.handle = _together(group, "rendezvous", lambda: symmetric.rendezvous(own, self.name))
        whole = [self.handle.get_buffer(r, (nbytes,), torch.uint8) for r in range(self.size)]
        self.peers, self.memory = [w[self.front :] for w in whole], whole[self.rank]
        self.table = torch.tensor([w.data_ptr() for w in whole], dtype=torch.int64, device=device)
        self.stream: Any = None
        # for products (``products``): what is computed first, and what is copied meanwhile, come before the rest
        self.ahead, self.side = (torch.cuda.Stream(device, priority=p) for p in (-1, -2))

    def together(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.device(self.device)  # (kernels say what is wrong)

    def in_order(self) -> None:
        """Calls on another stream than the last one's come after it. (Replays of a CUDA graph are not seen here.)"""
        stream = torch.cuda.current_stream(self.device)
        if self.stream not in (None, stream) and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self.stream)
        self.stream = stream


def _together(group: Any, what: str, do: Callable[[], Any]) -> Any:
    """On all ranks, or an error on all."""
    made, why = None, ""
    try:
        made = do()
    except RuntimeError as e:
        why = f"rank {group.rank()} cannot {what}: {e}"
    meeting = Meeting(group, what, f"symmetric storage of process group {group.group_name!r}: {what}")
    meeting.tell(why)
    meeting.hear(_all_right)
    return made
