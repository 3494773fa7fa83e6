"""The compiler ring plugs into the core here: every seam, and what the full package puts in it.

``reflib/seams.py`` says how; each seam's meaning is documented where it is declared (``git grep 'Seam('``).
"""

from __future__ import annotations

from .seams import plug

PLUGS: dict[str, dict[str, str]] = {
    "pipeline.COMPILE": {"begin": "api:begun", "repro": "observed:observed"},
    "pipeline.CHOOSE": {"choose": "tuning:choose", "launches": "tuning:launches"},
    "pipeline.CAPTURED": {
        "attention": "capture.attention:attention",
        "apart": "capture.attention_apart:attention_apart",
        "grids": "capture.triton_there:check_grids",
    },
    "pipeline.REWRITES": {
        "data_sizes": "capture.data_sizes:check_sizes",
        "random": "capture.random:own_numbers",
        "literals": "capture.literals:literals",
        "channels_last": "capture.layouts:channels_last",
        "positions": "capture.positions:recompute_positions",
        "returned": "capture.returned:views_of_inputs",
        "written": "capture.written_inputs:save_before_written",
    },
    "pipeline.AROUND": {
        "graphs": "wrap.cuda_graphs:cuda_graphs",
        "bad_values": "wrap.bad_values:named",
        "unusual": "wrap.unusual:eager_for_unusual",
    },
    "pipeline.OBSERVE": {"repro": "observe.repro:observed", "failed": "observe.repro:failed"},
    "pipeline.VERIFY": {"verify": "ir.verify:verify"},
    "options.NORMALIZE": {
        "repro": "observed:folder",
        "lookup_table": "tables:normalize_lookup",
        "c_shims": "c_shims:normalize",
        "decompose_k": "lower.decompose_k:limits",
    },
    "options.TRANSLATE": {"inductor": "inductor_options:translate"},
    "lower.MODULES": {
        "accumulate": "lower.accumulate",
        "activations": "lower.activations",
        "checkpoint": "lower.checkpoint",
        "control_flow": "lower.control_flow",
        "convolution": "lower.convolution",
        "creation": "lower.creation",
        "index_put": "lower.index_put",
        "flex_attention": "lower.flex_attention",
        "indexing": "lower.indexing",
        "lists": "lower.lists",
        "matmul": "lower.matmul",
        "mutating": "lower.mutating",
        "pooling": "lower.pooling",
        "random": "lower.random",
        "sampling": "lower.sampling",
        "scatter": "lower.scatter",
        "scans": "lower.scans",
        "user_kernels": "lower.user_kernels",
        "more_pointwise": "lower.more_pointwise",
        "more_reductions": "lower.more_reductions",
    },
    "lower.OUT": {"schema": "lower.out_variants:out_variant"},
    "lower.CALLS": {"registered": "lower.candidates:call"},
    "lower.WHOLE": {"registered": "lower.custom_ops:is_registered"},
    "lower.NUMBER": {"argument": "lower.numbers:number"},
    "lower.LIKE_EAGER": {"check": "lower.like_eager:check", "table": "lower.like_eager:TABLE"},
    "fuse.BEFORE": {
        "regions": "fuse.regions:fuse_blocks",
        "slices": "fuse.slices:slices",
        "in_place": "fuse.in_place:in_place",
        "slice_stores": "fuse.slice_stores:slice_stores",
        "into_place": "fuse.into_place:into_place",
        "mix_order": "fuse.mix_order:mix_orders",
        "split_online": "fuse.split_online:split_online",
        "split": "fuse.split:split_reductions",
        "split_scans": "fuse.split_scans:split_scans",
        "inline": "fuse.inline_loads:inline_loads",
        "widen": "fuse.casts:widen_late",
        "prologues": "fuse.casts:prologues",
    },
    "fuse.RULES": {
        "template": "fuse.templates:template_rule",
        "mix_order": "fuse.mix_order:sums_rule",
        "scatters": "fuse.scatters:scatter_rule",
        "seeds": "fuse.seeds:seed_rule",
    },
    "fuse.EMIT": {"template": "fuse.templates:emit_template"},
    "fuse.AFTER": {
        "recompute": "fuse.recompute:recompute",
        "narrow": "fuse.narrow:narrow",
        "combine": "fuse.combine:combine",
    },
    "schedule.SCHEDULERS": {
        "Template": "autotune.matmul:template_variants",
        "UserKernel": "schedule.user_kernels:variants",
    },
    "schedule.SHAPES": {"one_order": "schedule.one_order:one_order", "mixed": "schedule.mixed:mixed"},
    "schedule.ADJUST": {"uneven": "schedule.uneven:adjust"},
    "generate.PARTS": {
        "looped": "generate.triton_one_pass:OnePassPrinter",
        "mixed": "generate.triton_mixed:MixedPrinter",
        "one_order": "generate.triton_one_order:OneOrderPrinter",
    },
    "generate.PRINTERS": {
        "cpu": "generate.cpp:print_kernel",
        "template": "generate.matmul:generate_matmul",
        "user": "generate.user_kernel:print_user_kernel",
    },
    "generate.MORE": {
        "half": "generate.triton_half",
        "numeric": "generate.triton_numeric",
        "one_pass": "generate.triton_one_pass",
        "one_order": "generate.triton_one_order",
        "random": "generate.triton_random",
        "scans": "generate.triton_scans",
    },
    "generate.SCANS": {"declare": "generate.triton_scans:declare", "scan": "generate.triton_scans:scan"},
    "generate.CHEAP": {"forms": "generate.triton_half:cheap_forms"},
    "plan.STEPS": {"Region": "plan.regions:region_steps"},
    "wrap.STEPS": {"Repeat": "wrap.regions:repeat_in_python"},
    "wrap.BINDERS": {"triton": "wrap.build:bind_triton", "cpp": "wrap.build:bind_cpp"},
    "wrap.WRAPPERS": {"cpp": "wrap.build:wrap_cpp", "auto": "wrap.build:wrap_cpp"},
    "wrap.NAMES": {
        "zeros": "wrap.zeros:zeros", "given_back": "wrap.given_back:given_back",
        "outside": "wrap.sizes:outside", "expect_sizes": "wrap.sizes:expect_sizes",
        "check_nan": "wrap.bad_values:check_nan",
    },
}

plug(PLUGS)
