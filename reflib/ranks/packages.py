"""Packages of models that communicate: a file per rank, and a text that names them all, which every rank loads.

    model.reflib            {"reflib_ranks": 1, "files": [{"file": "model.rank0.reflib", "sha256": ...}, ...]}
    model.rank0.reflib      a package as any other; its manifest says which rank it is for, and what ranks start
    ...

What ranks start is compared as for a compiled graph (``agree``), when they compile and when they load: they do both at
the same time. The text has the files' digests, so what is loaded is what was compiled together.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..atomic import write
from ..ir.program import Program
from ..package.manifest import Group
from ..package.rank_files import KEY
from .agree import by_group, check
from .meeting import Meeting, RanksError


def groups_of(program: Program) -> dict[str, Group]:
    """The process groups that it communicates in. Raises RanksError where ranks would start different things."""
    import torch.distributed.distributed_c10d as c10d

    lists = by_group(program)
    check(lists)
    groups = {name: c10d._resolve_process_group(name) for name in lists}
    return {name: Group(g.rank(), g.size(), tuple(lists[name])) for name, g in groups.items()}


def one_per_rank(path: Path, build: Callable[[Path], Path]) -> Path:
    """Build this rank's package beside ``path``, which the first rank writes when all are there. Raises what ``build``
    raises, and RanksError on the other ranks then."""
    import torch.distributed as dist

    meeting = Meeting(dist.group.WORLD, "package", f"the package {path.name}")
    own = path.with_name(f"{path.stem}.rank{dist.get_rank()}{path.suffix}")
    try:
        build(own)
    except BaseException:
        with contextlib.suppress(RanksError):  # (what the others get)
            meeting.tell(["", ""])
            meeting.hear(partial(_write, path))
        raise
    with own.open("rb") as f:
        meeting.tell([own.name, hashlib.file_digest(f, "sha256").hexdigest()])
    meeting.hear(partial(_write, path))
    return path


def agreed(groups: Mapping[str, Group]) -> None:
    """``package.rank_files`` calls it: ranks that load start the same. Raises RanksError."""
    check({name: [*g.starts] for name, g in groups.items()})


def _write(path: Path, said: list[Any]) -> None:
    if failed := [rank for rank, (name, _) in enumerate(said) if not name]:
        raise RanksError(f"{path.name} is not written: its package could not be built on rank {failed[0]}")
    data = {KEY: 1, "files": [{"file": name, "sha256": digest} for name, digest in said]}
    write(path, json.dumps(data, indent=1))
