"""What costs a third of the time of compiling a small function, and no test and no chapter is about."""

import functools
import gc


@functools.cache
def without_overheads() -> None:
    """Once per process; those that are forked from it have done without too."""
    from torch._dynamo import guards
    from torch._export import utils

    gc.collect()  # what is imported stays: looking through it again and again took a tenth of the time of tracing
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    guards.profile_guard_manager = lambda *_: 0.0  # for a line in a log it flushes all caches, which takes 60 ms
    # every decomposition of an exported program asks for all C++ ops once for each of some thirty namespaces
    utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)
