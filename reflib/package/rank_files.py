"""The text that names the packages of all ranks (``ranks.packages`` writes it), and which of them is this rank's."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from .. import seams
from ..errors import PackageError
from .manifest import Group

KEY, MOST = "reflib_ranks", 1 << 22
COMPARES = "ranks.packages:agreed"  # by name, as ranks are around the stages


def own_file(path: str | os.PathLike[str], sha256: str | None) -> tuple[str | os.PathLike[str], str | None]:
    """The package that this rank loads, and its digest, where ``path`` names those of all ranks; else both as given."""
    try:
        where = Path(path)
    except TypeError:  # (who opens it says so)
        return path, sha256
    if not where.is_file():
        return path, sha256
    with where.open("rb") as f:
        text = f.read(MOST) if f.peek(1)[:1] == b"{" else b""
    if KEY.encode() not in text:
        return path, sha256
    if sha256 is not None and hashlib.sha256(text).hexdigest() != sha256.lower():
        raise PackageError(f"{path}: this is not the requested file: its SHA-256 is {hashlib.sha256(text).hexdigest()}")
    try:
        files = [(str(f["file"]), str(f["sha256"])) for f in json.loads(text)["files"]]
    except (ValueError, TypeError, KeyError) as e:
        raise PackageError(f"{path}: it does not name the packages of ranks: {e!r}; build it again") from e
    rank, size = _world()
    if len(files) != size:
        here = f"here are {size}" if size else "here is no process group"
        raise PackageError(f"{path}: it is for {len(files)} ranks, and {here}; {_remedy(len(files))}")
    name, digest = files[rank]
    if not re.fullmatch(r"[\w.+-]+", name):
        raise PackageError(f"{path}: {name!r:.80} is no name of a file beside it")
    return where.with_name(name), digest


def check_groups(groups: Mapping[str, Group]) -> None:
    """Raises PackageError where a process group is missing, or this is another of its ranks, RanksError where others
    load something else."""
    import torch.distributed.distributed_c10d as c10d

    for name, g in groups.items():
        found = c10d._world.pg_names.values() if _world()[1] else ()
        here = c10d._resolve_process_group(name) if name in found else None
        if here is None:
            raise PackageError(
                f"the model communicates in process group {name!r}, which is not here; {_remedy(g.size)}"
            )
        if (here.rank(), here.size()) != (g.rank, g.size):
            is_here = f"this is rank {here.rank()} of {here.size()}"
            raise PackageError(f"it is for rank {g.rank} of {g.size} in process group {name!r}; {is_here}")
    if groups:
        seams.load(COMPARES)(groups)


def _world() -> tuple[int, int]:
    """(rank, ranks); without a process group (0, 0)."""
    import torch.distributed as dist

    there = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if there else (0, 0)


def _remedy(size: int) -> str:
    return (
        f"start {size} processes (torchrun --nproc-per-node {size}) and call torch.distributed.init_process_group first"
    )
