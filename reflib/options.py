"""One frozen set of options, passed to every stage that needs it. (REFLIB_* in the environment: caches and logs.)"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import OptionError, did_you_mean
from .seams import Seam

# By option: a function that checks a value and makes it plain data. By method: what it returns.
NORMALIZE = Seam("options.NORMALIZE", {"cpp_flags": tuple, "tuning_imports": tuple})
# Modes (as "mode"), and options by other names: (given options) -> the same by the names here.
TRANSLATE = Seam("options.TRANSLATE")
_CHOICES = {
    "wrapper": ("python", "cpp", "auto"), "autotune": ("off", "blocking", "background"), "numerics": ("fast", "eager"),
}  # fmt: skip
_SUMS = ("mix_orders", "attention", "atomics")  # that add in another order
_BITS = ("atomics", "fallback_random")
_LEAST = {"max_fused_ops": 1, "max_fused_buffers": 2, "num_decompose_k_splits": 0, "decompose_k_threshold": 0}
_MAYBE = ("cache_decisions", "fallback_random")
_SECONDS = ("candidate_seconds", "tuning_seconds", "tuning_idle_seconds")
_TARGET = re.compile(r"^(cpu|sm_\d+a?|gfx[0-9a-f]+)$")


@dataclass(frozen=True)
class Options:
    """How to compile. Every field has a default that suits most uses.

    wrapper: host code in ``python``; ``cpp`` (a second to build, less per call); ``auto``: C++ if there is a compiler.
    autotune: ``off`` takes heuristic choices. ``blocking`` measures the candidates for matrix products and registered
        ops before the first call, and the launches of GPU kernels that move many bytes (block sizes and warps).
        ``background`` starts with what ``off`` chooses, measures while the program runs, and swaps winners in at a
        later call (``reflib.wait_for_tuning``, ``reflib.tuning_progress``).
    target: None: the inputs' device. ``cpu``, ``sm_90``, ``gfx942`` ...: stop after generating; needs no such device.
    numerics: ``fast``: as exact as eager, or more. ``eager``: elementwise ops have eager's bits, roundings between them
        too; sums and norms on a GPU are within a few ULP, on a CPU and products are eager's calls. Draws its numbers.
    batch_invariant: a row's result has the same bits however many rows a call has: sums in one order, products by
        kernels of our own (``lower.one_order``). What cannot be made so is named in a warning.
    cuda_graphs: record each graph's launches on a GPU once, and replay them as one (``wrap.cuda_graphs``).
    verify: run the IR verifier after every stage.
    check_nan: look for NaN and infinities in what each kernel and call writes (slow; ReflibError says where first).
    repro: a folder for each graph as a Python file that compiles it again (None: REFLIB_REPRO, or only if that fails).
    trace: a folder for traces of what ran when, for ui.perfetto.dev: stages, launches, kernels (None: REFLIB_TRACE, or
        nothing is recorded).
    fuse: False gives every lowered node its own kernel.
    max_fused_ops: largest number of operations and reductions in one fused kernel.
    max_fused_buffers: largest number of distinct buffers one fused kernel touches.
    persistent_limit: longest row, in elements, that a GPU reduction keeps in registers.
    split_reductions: cut few, long rows into pieces that run in parallel.
    mix_orders: sum the columns of a tensor in the GPU kernel that reduces its rows, where that reads it once less.
    combine_kernels: launch independent small pointwise kernels (an optimizer's parameters) as one.
    attention: call ``scaled_dot_product_attention`` for attention written as two products and a softmax.
    fallback_random: draw eager's random numbers, by ATen calls, and not inside of kernels (None: on a CPU only).
    atomics: on a GPU, sum into places that tensors name (embeddings' gradients, ``index_put``) by atomic additions,
        whose order, and so the last bits of floating-point sums, varies (not under use_deterministic_algorithms).
    assert_indirect_indexing: a GPU's kernels end with an assertion that names the op and the user's line where an index
        read from a tensor is out of range, as a CPU's always do (IndexError). False: 0 is read, nothing is written.
    channels_last: on a GPU, keep what is between convolutions in channels-last order where that saves copies.
    reuse_buffers: give a dead buffer's storage to a new one.
    reorder_for_peak_memory: run steps in the order that needs least memory, of those that were tried (``plan.order``).
    activation_memory_budget: from 0 to 1, how much of what autograd would save for the backward may be saved; the rest
        is computed again there, the cheapest first (None: as ``torch._functorch.config`` has it, which says 1).
    arena: allocate once per call and device for all that only kernels touch (``plan.arena``): less host time per call.
    inplace_buffers: let an elementwise kernel write over an input that dies there (not with check_nan, which reads it).
    cpp_flags: more flags for the C++ compiler.
    num_decompose_k_splits: how many ways of splitting K to try for a matrix product with a long K (0: none).
    decompose_k_threshold: K is long if it is this many times M and N.
        None, for these two: TORCHINDUCTOR_ and their names in capitals, of the environment, else 10 and 32.
    compile_threads: threads that compile kernels at once, and processes that compile candidates (0: one per core).
    isolate: measure candidates in processes of their own, which may crash or hang (False: here, one after another).
    candidate_seconds: for compiling a candidate, and again for checking and timing it; more: it is ``hung``.
    tuning_seconds: for all tuning of one graph; on timeout, choices are made from the results so far.
    tuning_idle_seconds: worker processes without work for this long exit; new work starts them again.
    tuning_imports: files or modules that register ops, for those processes to import.
    cache_decisions: keep decisions on disk and use them again (None: unless REFLIB_CACHE_DECISIONS is 0).
    lookup_table: choices that are not measured: a file that ``reflib tune export`` wrote, or {op: {sizes: winner}}.
        Launches of kernels in it count with ``autotune="off"`` as well.
    c_shims: {op: C prototype}: functions that the C++ wrapper calls instead of the op, without the dispatcher:
        {"mylib::my_op": "int32_t my_op_shim(AtenTensorHandle x, double eps, AtenTensorHandle* out)"}. Parameters: the
        op's arguments (Tensor: AtenTensorHandle, int: int64_t, float: double, bool: int32_t, int[]: const int64_t*,
        int64_t; an optional: a pointer that may be null), then a pointer per result; 0 is success. Load the library.
    """

    wrapper: str = "python"
    autotune: str = "off"
    target: str | None = None
    numerics: str = "fast"
    batch_invariant: bool = False
    cuda_graphs: bool = False
    verify: bool = False
    check_nan: bool = False
    repro: str | None = None
    trace: str | None = None
    fuse: bool = True
    max_fused_ops: int = 400
    max_fused_buffers: int = 48
    persistent_limit: int = 16384
    split_reductions: bool = True
    mix_orders: bool = True
    combine_kernels: bool = True
    attention: bool = True
    fallback_random: bool | None = None
    atomics: bool = True
    assert_indirect_indexing: bool = False
    channels_last: bool = True
    reuse_buffers: bool = True
    reorder_for_peak_memory: bool = True
    activation_memory_budget: float | None = None
    arena: bool = False
    inplace_buffers: bool = True
    cpp_flags: tuple[str, ...] = ()
    num_decompose_k_splits: int | None = None
    decompose_k_threshold: int | None = None
    compile_threads: int = 0
    isolate: bool = True
    candidate_seconds: float = 60.0
    tuning_seconds: float = 900.0
    tuning_idle_seconds: float = 120.0
    tuning_imports: tuple[str, ...] = ()
    cache_decisions: bool | None = None
    lookup_table: Any = None
    c_shims: Any = ()

    def __post_init__(self) -> None:
        now = vars(self)  # (the class is frozen)
        for f in fields(self):
            _check(f.name, now[f.name], f.default)
        off = _BITS if self.numerics == "eager" else _SUMS if self.batch_invariant else ()
        now["_asked"] = {name: now[name] for name in off}
        now |= {name: name == "fallback_random" for name in off}
        for f in fields(self):  # options are compared, hashed and sent to workers
            if f.name in NORMALIZE and now[f.name] != f.default:
                now[f.name] = NORMALIZE[f.name](now[f.name])

    @classmethod
    def make(cls, options: Mapping[str, Any] | None = None, mode: str | None = None, **more: Any) -> Options:
        """From ``torch.compile``'s ``options=`` and ``mode=``. Raises OptionError naming the nearest right name.

        >>> Options.make({"wraper": "python"})
        Traceback (most recent call last):
        ...
        reflib.errors.OptionError: unknown option 'wraper'; did you mean 'wrapper'?
        """
        given = {**(options or {}), **more} | ({} if mode in (None, "default") else {"mode": mode})
        for translate in TRANSLATE.values():
            given = translate(given)
        names = [f.name for f in fields(cls)]
        for name in (n for n in given if n not in names):
            hint = did_you_mean(name, names, 0.5) or f"the options are {', '.join(names)}"
            raise OptionError(f"unknown option {name!r:.200}; {hint}")
        return cls(**given)

    def decompose_k(self) -> tuple[int, int]:
        """(number of splits to try, threshold), from the options or the environment."""
        return tuple(NORMALIZE["decompose_k"](self))

    def but(self, **changes: Any) -> Options:
        """A copy with some fields changed; what only a changed one had switched off is as it was asked for."""
        return replace(self, **{**vars(self)["_asked"], **changes})


def _check(name: str, value: Any, default: Any) -> None:
    ok, must = True, ""
    if choices := _CHOICES.get(name):
        hint = did_you_mean(value, choices, 0.3) if value not in choices else ""
        ok, must = value in choices, f"one of {', '.join(map(repr, choices))}{hint and f' ({hint})'}"
    elif name == "target":
        ok = value is None or isinstance(value, str) and _TARGET.match(value) is not None
        must = "None, 'cpu', 'sm_90', 'gfx942' or the like"
    elif name in ("cpp_flags", "tuning_imports"):
        ok, must = isinstance(value, (tuple, list)) and all(isinstance(v, str) for v in value), "a list of strings"
    elif name in _SECONDS:
        ok, must = isinstance(value, (int, float)) and value is not True and value > 0, "a number of seconds above 0"
    elif isinstance(default, bool) or name in _MAYBE:
        ok, must = isinstance(value, bool) or value is default, f"True or False{' or None' * (name in _MAYBE)}"
    elif isinstance(default, int) or (name in _LEAST and value is not None):
        ok, must = type(value) is int and value >= _LEAST.get(name, 0), f"an integer of at least {_LEAST.get(name, 0)}"
    if not ok:
        raise OptionError(f"option {name}={value!r:.200}: must be {must}")
