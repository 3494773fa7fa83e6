"""What costs a third of the time of compiling a small function, or of running Triton's interpreter, and no test and no
chapter is about."""

import functools
import gc
import inspect
import math
from types import SimpleNamespace
from typing import Any


@functools.cache
def without_overheads() -> None:
    """Once per process; those that are forked from it have done without too."""
    import torch
    from torch import cuda, mtia, xpu
    from torch._decomp.decompositions_for_rng import PhiloxState
    from torch._dynamo import guards
    from torch._dynamo import utils as dynamo
    from torch._export import utils
    from torch._functorch._aot_autograd import graph_compile
    from torch._subclasses import fake_tensor

    gc.collect()  # what is imported stays: looking through it again and again took a tenth of the time of tracing
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    torch._dynamo.config.run_gc_after_compile = False
    # every seed, for each device there might be, and every mode of fake tensors keep the stack's text for an error
    no_stack = SimpleNamespace(format_stack=list, extract_stack=list, format_list=list)
    cuda.traceback = mtia.traceback = xpu.traceback = fake_tensor.traceback = no_stack
    # joint, forward and backward graphs are printed for a log
    graph_compile._log_joint_graph = lambda *_: None
    graph_compile._log_fw_bw_graphs = lambda *_: (None, None)
    guards.profile_guard_manager = lambda *_: 0.0  # for a line in a log it flushes all caches, which takes 60 ms
    # every decomposition of an exported program asks for all C++ ops once for each of some thirty namespaces
    utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)
    # every graph is logged with all settings of Dynamo and of TorchInductor, as JSON
    for name in ("get_dynamo_config", "functorch_config", "scrubbed_inductor_config", "compiler_config"):
        setattr(dynamo, f"_{name}_for_logging", lambda: None)
    empty = torch.tensor(())

    def reset(self: Any) -> None:
        """Twelve tensors per graph, under all modes of tracing, for random numbers that reflib has in other ways."""
        self.seed = self.base_offset = empty
        self.relative_offset, self.offset_advanced_at_least_once = 0, False

    PhiloxState.reset = reset


def quick_interpreter() -> None:
    """The interpreter describes each value anew: its dtype in numpy, its shape as constants, its type's name. It
    looks for what it has to replace in the whole language whenever a function is called. And it computes each sum of
    integers again in 64 bits, for an assertion that it leaves out unless it debugs."""
    import numpy as np
    from triton.language import core
    from triton.runtime import interpreter

    address, of_scalar = np.dtype(np.uint64), functools.cache(interpreter._get_np_dtype)

    def np_dtype(t: Any) -> Any:
        t = t.element_ty if isinstance(t, core.block_type) else t
        return address if isinstance(t, core.pointer_type) else of_scalar(t)

    @functools.cache
    def constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(s) for s in shape])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = constants(tuple(type.shape) if type.is_block() else ())

    plain, blocks = core.block_type.__init__, dict[Any, tuple[Any, ...]]()

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(s, "value", s) for s in shape))
        if key not in blocks:
            plain(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    @functools.cache
    def replaced(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch_builtin(package: Any, *more: Any) -> None:
        for name, member in replaced(package):
            if getattr(package, name) is member:  # (not in a function that another one calls)
                interpreter._patch_attr(package, name, member, *more)

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype, interpreter._patch_builtin = np_dtype, patch_builtin
    core.tensor.__init__, core.block_type.__init__ = tensor, block_type
