"""TorchInductor's modes and option names in ``torch.compile(backend="reflib", mode=..., options=...)``, so that code
moves over by changing the backend.

A name that has a counterpart sets it; other names of ``torch._inductor.config`` are ignored, which one warning says.
Names of :class:`reflib.Options` come first: where both have a name (``fallback_random``), it means the same.
"""

import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from .errors import OptionError
from .options import Options

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"autotune": "blocking"},  # NB: TorchInductor's records CUDA graphs too
    "max-autotune-no-cudagraphs": {"autotune": "blocking"},
}


def _same(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: value}


def _blocking(value: Any) -> dict[str, Any]:
    return {"autotune": "blocking"} if value else {}


COUNTERPARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "max_autotune": _blocking,
    "max_autotune_gemm": _blocking,
    "max_autotune_pointwise": _blocking,
    "triton.cudagraphs": _same("cuda_graphs"),
    "cpp_wrapper": lambda value: {"wrapper": "cpp" if value else "python"},
    "emulate_precision_casts": lambda value: {"numerics": "eager"} if value else {},
    "deterministic": lambda value: {"atomics": False} if value else {},
    "nan_asserts": _same("check_nan"),
    "allow_buffer_reuse": _same("reuse_buffers"),
    "combo_kernels": _same("combine_kernels"),
    "layout_optimization": _same("channels_last"),
    "triton.mix_order_reduction": _same("mix_orders"),
    "max_fusion_size": _same("max_fused_ops"),
    "max_fusion_unique_io_buffers": lambda value: {} if value is None else {"max_fused_buffers": value},
    "triton.num_decompose_k_splits": _same("num_decompose_k_splits"),
    "triton.decompose_k_threshold": _same("decompose_k_threshold"),
    "autotune_in_subproc": _same("isolate"),
    "max_autotune_subproc_result_timeout_seconds": _same("candidate_seconds"),
    "autotune_local_cache": _same("cache_decisions"),
}
_said: set[str] = set()


def translate(given: dict[str, Any]) -> dict[str, Any]:
    """Plugs into ``options.TRANSLATE``. Raises OptionError for an unknown mode; names that neither knows are left."""
    own = {f.name for f in fields(Options)}
    mode = "default" if given.get("mode") in (None, "") else given["mode"]
    if not isinstance(mode, str) or mode not in MODES:
        raise OptionError(f"unknown mode {mode!r:.200}; the modes are {', '.join(map(repr, MODES))}")
    meant, left = dict(MODES[mode]), {name: value for name, value in given.items() if name in own}
    ignored = set()
    for name in given.keys() - own - {"mode"}:
        if name in COUNTERPARTS:
            meant |= COUNTERPARTS[name](given[name])
        elif _inductor_has(name):
            ignored.add(name)
        else:
            left[name] = given[name]
    if news := sorted(ignored - _said):
        _said.update(news)
        text = f"options of TorchInductor that mean nothing to reflib are ignored: {', '.join(news)}"
        warnings.warn(text, stacklevel=4)
    return meant | left


def _inductor_has(name: Any) -> bool:
    import torch._inductor.config as config

    return name in config._config  # type: ignore[attr-defined]
