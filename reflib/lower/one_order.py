"""``Options.batch_invariant``: a row's result has the same bits however many rows a call has, and in every run.

**Why it has not otherwise.** A sum of floats depends on the order of its additions, and kernels for many rows may add
in another order than kernels for few:

* **Matrix products**: cuBLAS, MKL and oneDNN choose algorithm, tiles and split-K by size, and have a path for vectors;
  so do our tilings, decompose-K and padding, which are ranked or measured. Here: kernels of our own, from tilings that
  add in one order (``autotune.matmul.same_tiling``), K cut by K alone (``depth_in_parts``); on a CPU
  ``cpp_product.h``.
* **Attention**: flash attention splits the keys among idle multiprocessors; on a CPU, packing depends on size. Here,
  on a GPU: the kernels of ``flex_attention``, which walk along all keys in blocks that follow from the heads' size;
  else two products and a softmax, scores in float32 (``capture.attention_apart``).
* **Sums along rows**: Triton's order follows from warps, rows per program, layout and alignment; in C++ it is what the
  compiler makes of a loop. Here: added in pairs, which Triton cannot reorder (``triton_one_order``), lanes of a length
  that no size decides (``schedule.one_order``), a few elements in the same pairs where they are written out
  (``unroll``); in C++ sixteen lanes, written out (``sum_in_order``).
* **Long rows** are cut into pieces for idle multiprocessors or threads, for a softmax in one pass (``split``,
  ``split_online``). Here: by the row's length alone (``fuse.one_order``), and not online.
* **Sums along columns** in the kernel that reduces rows (``mix_order``): here in a kernel of their own.
* **Launches and choices** are measured or ranked at the sizes of one call, or differ by ``dispatch_on`` ranges. Here:
  nothing that changes a sum is measured, and registered implementations are not tried.
* **What is fused**: halves are not rounded between ops that fuse, multiplications contract with additions, functions
  have cheap forms where only halves are stored. Here: rounded after every op, no contraction, one form.
* **Vector functions** in C++: libmvec's in a loop, libm's for the rest of it. Here: libm's.

**The rule behind these.** The order in which a result's elements are added may follow from how many they are, from
their dtype and from the device, never from how many results there are. So work may be shared among multiprocessors
wherever the cuts follow from the reduced length: sums along rows and columns, the statistics of norms, the depth of
products. All that does not change the order is free to follow sizes: rows per program, warps, a product's tile, which
kernels share a launch, whether a maximum is cut. What is reduced over the batch needs no exception: the batch is its
length.

**What is promised.** Let a call's rows be slices of its inputs' leading dimension, laid out in memory in the same way
in each call (a batch may not be the innermost dimension, as in ``x.t()``). Then the bits of a row's result are the same
in all calls on one kind of machine: for one row or many, static sizes, dynamic ones or a package, each wrapper, aligned
or not. That holds for elementwise ops, products (also where the "rows" are those of one matrix), attention, norms over
parts of a row, softmax, losses per row, embeddings, gathers. A long reduction is cut by its length if that is known
when compiling, on a GPU from 513 rows of columns, 16,384 elements of a row or of a product's depth on (on a CPU 2^18
elements): there, static lengths and dynamic ones differ; numbers of rows do not.

Sums over the batch itself (gradients of weights, batch norm in training, the mean of a loss) have no such meaning. They
are the same from run to run: floats are not added by atomic additions (``atomics=False``; rows that an index names are
added in its order, ``segment_sums``), and partial sums have an order.
What remains a call of PyTorch's is so too where ``torch.use_deterministic_algorithms`` makes it so.

Convolutions, FFTs, sums inside of custom ops, scans on a GPU and other calls that may choose by size cannot be made
invariant here. They are computed as ever, and each is named in one warning, with the line that it comes from: make
that an error with ``warnings.filterwarnings("error", category=reflib.BatchVariantWarning)``.

**Others.** Thinking Machines Lab's ``batch_invariant_ops`` (2025; "Defeating Nondeterminism in LLM Inference"), which
vLLM's ``VLLM_BATCH_INVARIANT=1`` builds on, replaces ATen's mm, addmm, log_softmax and mean by kernels with fixed
blocks. TorchInductor's ``deterministic`` (pytorch/pytorch#163589) skips measuring where that changes numbers;
``batch_invariant`` (#180832, torch 2.13) lets a persistent reduction choose its launch as if it had 4096 rows or more.
Products stay ATen's or templates' there, and how a block is summed stays Triton's, by its layout.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..ir.flex import FlexKernel
from ..ir.loops import LoopNest, Scan, Store
from ..ir.program import Extern, Node
from .context import LoweringContext
from .segment_sums import SOURCE

# Calls of ATen that move, select, count, or compute each element by itself (by prefix of their names).
MOVES = (
    "_assert", "_local_scalar", "_softmax_", "_to_copy", "_unsafe", "alias", "any", "all", "arange", "arg",
    "as_strided", "bernoulli", "bincount", "bucketize", "cat", "clone", "col2im_", "constant_pad", "copy", "cummax",
    "cummin", "detach", "diag", "embedding.", "embedding_dense_backward", "empty", "equal", "exponential", "eye",
    "fill", "flip", "full", "gather", "im2col",
    "index.", "index_copy", "index_fill", "index_select", "isin", "kthvalue", "lift", "masked", "max", "median", "min",
    "mode", "multinomial", "nanmedian", "native_dropout", "new_", "nonzero", "normal", "ones", "permute", "pixel_",
    "poisson", "put.", "rand", "reflection_pad", "repeat", "replication_pad", "resize", "roll", "scalar_tensor",
    "scatter.", "searchsorted", "select", "slice", "sort", "split", "stack", "take", "topk", "tril", "triu", "unfold.",
    "uniform", "unique", "view", "where", "zeros",
)  # fmt: skip
IN_ORDER = ("cumsum", "cumprod", "logcumsumexp")  # on a CPU; on a GPU a single row is scanned in another way


class BatchVariantWarning(UserWarning):
    """Under ``Options.batch_invariant``: this op's result for a row may depend on the number of rows."""


def checked(cx: LoweringContext, target: Any, usual: Callable[[], Any]) -> Any:
    """The value of a call, lowered by ``usual``; warns of what may depend on the number of rows."""
    before = len(cx.low.nodes)
    value = usual()
    if why := next(filter(None, (_why(cx, n) for n in cx.low.nodes[before:])), ""):
        where = f", at {cx.origin.source}" if cx.origin.source else ""
        warnings.warn(
            f"batch_invariant: {cx.origin.op}{where}: {why}, so a row's result may depend on the number of rows",
            BatchVariantWarning, 2,
        )  # fmt: skip
    return value


def _why(cx: LoweringContext, n: Node) -> str:
    """Why a node's result for a row may depend on others; "" if it cannot."""
    if isinstance(n, LoopNest):
        if cx.on_gpu and any(isinstance(s, Scan) and s.dtype.is_floating_point for s in n.body):
            return "a GPU scans rows in an order that Triton chooses"
        if any(isinstance(s, Store) and s.reduce for s in n.body) and _floats(cx, n.writes()):
            return "its additions have no order"
        return ""
    own = isinstance(n, Extern) and (isinstance(n.target, FlexKernel) or getattr(n.target, "source", "") == SOURCE)
    if not isinstance(n, Extern) or own or not _floats(cx, (o for o in n.outputs if isinstance(o, str))):
        return ""
    name = str(n.target).removeprefix("aten.")
    ours = isinstance(n.target, torch._ops.OpOverload) and n.target.namespace in ("aten", "prims")
    if ours and (name.startswith(MOVES) or name.startswith(IN_ORDER) and not cx.on_gpu):
        return ""
    return "it is a call of a kernel that may choose by size"


def _floats(cx: LoweringContext, names: Iterable[str]) -> bool:
    dtypes = [cx.low.buffers[name].dtype for name in names]
    return any(d.is_floating_point or d.is_complex for d in dtypes)
