"""The process that forks notebooks' kernels (tests/kernels.py) imports this when it starts. It only imports: no thread
is started that a fork would lose."""

import contextlib
import importlib
import os
import sys
from multiprocessing import Pipe

from tests.forking import child_of, serve
from tests.overheads import without_overheads

PATH = list(sys.path)  # multiprocessing gives forked processes pytest's
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what they print is not pytest's
os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # as ipykernel does
for name in (
    "ipykernel.kernelapp", "ipykernel.ipkernel", "matplotlib.pyplot", "matplotlib.backends.backend_svg", "networkx",
    "matplotlib_inline.backend_inline", "torch._dynamo.repro.after_dynamo", "torch._inductor.decomposition",
    "torch.export._trace", "triton.compiler", "reflib.api", "reflib.generate.cpp", "reflib.generate.triton",
    "reflib.lab.measuring", "reflib.lab.package_ways", "reflib.lab.pictures", "reflib.lab.rank_group",
    "reflib.lab.session", "reflib.observe.explain", "reflib.tuning", "reflib.wrap.build", "reflib.wrap.cpp",
):  # fmt: skip
    with contextlib.suppress(ImportError):  # the notebook will say so
        importlib.import_module(name)
without_overheads()


def fork_children() -> None:
    """What a chapter runs in a Python of its own is forked from a process that is forked here, which has no threads."""
    ours, theirs = Pipe()
    if os.fork() == 0:
        ours.close()
        serve(theirs)
    theirs.close()
    from reflib.lab import children

    children._run_child = child_of(ours)
    children.cores = lambda: 1  # one at a time
