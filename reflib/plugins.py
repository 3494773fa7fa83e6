"""The compiler ring plugs into the core here: every seam, and what the full package puts in it.

``reflib/seams.py`` says how; each seam's meaning is documented where it is declared (``git grep 'Seam('``).
"""

from __future__ import annotations

from .seams import plug

PLUGS: dict[str, dict[str, str]] = {
    "pipeline.START": {"begin": "api:begin"},
    "pipeline.CHOOSE": {"choose": "tuning:choose"},
    "pipeline.VERIFY": {"verify": "ir.verify:verify"},
    "options.NORMALIZE": {"lookup_table": "tables:normalize_lookup", "c_shims": "c_shims:normalize"},
    "lower.MODULES": {
        "activations": "lower.activations",
        "creation": "lower.creation",
        "indexing": "lower.indexing",
        "lists": "lower.lists",
        "matmul": "lower.matmul",
        "more_pointwise": "lower.more_pointwise",
        "more_reductions": "lower.more_reductions",
    },
    "lower.CALLS": {"registered": "lower.candidates:call"},
    "lower.WHOLE": {"registered": "lower.custom_ops:is_registered"},
    "fuse.BEFORE": {
        "slices": "fuse.slices:slices",
        "slice_stores": "fuse.slice_stores:slice_stores",
        "split": "fuse.split:split_reductions",
        "inline": "fuse.inline_loads:inline_loads",
        "widen": "fuse.casts:widen_late",
        "prologues": "fuse.casts:prologues",
    },
    "fuse.RULES": {"template": "fuse.templates:template_rule"},
    "fuse.AFTER": {"recompute": "fuse.recompute:recompute", "combine": "fuse.combine:combine"},
    "schedule.SCHEDULERS": {"Template": "autotune.matmul:template_variants"},
    "generate.PRINTERS": {"cpu": "generate.cpp:print_kernel", "template": "generate.matmul:generate_matmul"},
    "generate.MORE": {"half": "generate.triton_half", "numeric": "generate.triton_numeric"},
    "generate.CHEAP": {"forms": "generate.triton_half:cheap_forms"},
    "wrap.BINDERS": {"triton": "wrap.build:bind_triton", "cpp": "wrap.build:bind_cpp"},
    "wrap.WRAPPERS": {"cpp": "wrap.build:wrap_cpp", "auto": "wrap.build:wrap_cpp"},
    "wrap.NAMES": {"zeros": "wrap.zeros:zeros"},
}

plug(PLUGS)
