"""input-ranges: the chapter's layer in four ways, over all sizes: with ranges, and with each implementation alone.

The same source for both compilers. TorchInductor's winners, branches and outer kernels go to the file `facts`, and what
both have generated for each way: {"programs": {compiler: {way: [text, ...]}}}.
"""

import importlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from reflib.lab.wins import after_imports

SETTINGS: dict[str, Any] = {}  # peer_text writes them: compiler, facts, columns, outputs, top, splits, points


@torch.library.custom_op("ranges_peer::linear", mutates_args=())
def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


@linear.register_fake
def _(x, w):
    return x.new_empty(x.shape[0], w.shape[0])


def product(x, w):
    return x @ w.t()


def dot_products(x, w):
    return (x[:, None, :].float() * w.float()).sum(-1).to(x.dtype)


def split_k(x, w):
    splits = SETTINGS["splits"]
    k = x.shape[1] // splits
    a = x.reshape(x.shape[0], splits, k).transpose(0, 1)
    b = w.reshape(w.shape[0], splits, k).permute(1, 2, 0)
    return torch.bmm(a, b).float().sum(0).to(x.dtype)


WAYS = {
    "ranges": lambda x, w, bias: torch.relu(linear(x, w) + bias),
    "product": lambda x, w, bias: torch.relu(product(x, w) + bias),
    "dot_products": lambda x, w, bias: torch.relu(dot_products(x, w) + bias),
    "split_k": lambda x, w, bias: torch.relu(split_k(x, w) + bias),
}
made: dict[str, Any] = {}
kept: list[str] = []


def register():
    home = "reflib" if SETTINGS["compiler"] == "reflib" else "torch._inductor.kernel.custom_op"
    library = importlib.import_module(home)
    library.register_custom_op_autotuning(
        linear,
        configs=[library.CustomOpConfig(f) for f in (dot_products, split_k)],
        dispatch_on={"tensor_name": "x", "dim": 0, "range_upper_bound": SETTINGS["top"]},
        split_points=SETTINGS["points"],
    )


class Keep(logging.Handler):
    def emit(self, record):
        kept.append(record.getMessage().strip())


def keep(way, texts, **more):
    """Adds the texts of one way, and `more`, to the file."""
    path = Path(SETTINGS["facts"])
    facts = json.loads(path.read_text()) if path.exists() else {"programs": {}}
    facts["programs"].setdefault(SETTINGS["compiler"], {})[way] = texts
    path.write_text(json.dumps({**facts, **more}))


def compiled(way, first, w, bias):
    if not made:
        register()
    torch._dynamo.mark_dynamic(first, 0)
    if SETTINGS["compiler"] == "reflib":
        options = {"autotune": "blocking" if way == "ranges" else "off"}
        f = torch.compile(WAYS[way], backend="reflib", options=options)
        f(first, w, bias)
        explain = importlib.import_module("reflib").explain  # the decisions are stored: nothing is measured again
        keep(way, [k.source for k in explain(WAYS[way], first, w, bias, **options).kernels])
        return f
    log = logging.getLogger("torch._inductor.kernel.custom_op")
    log.setLevel(logging.INFO)
    log.addHandler(Keep())
    f = torch.compile(WAYS[way])
    with config.patch(fx_graph_cache=False, max_autotune=way == "ranges"):
        _, texts = run_and_get_code(f, first, w, bias)
    found = {}
    if way == "ranges":
        last = texts[-1][texts[-1].rfind("def call") :]
        kernels = re.findall(r"(?:cpp|triton_[a-z]+)_fused_[A-Za-z_0-9]+", last)
        found = {
            "winners": [k for k in kept if k.startswith("Range [") and "->" in k],
            "branches": re.findall(r"if (s[0-9]+ [<>=]+ [0-9]+):", last),
            "after the branch": sorted(set(kernels)),
        }
    keep(way, [after_imports(texts[-1])], **found)
    return f


def make(device, dtype, way, batch):
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    outputs, columns = SETTINGS["outputs"], SETTINGS["columns"]
    w = torch.randn(outputs, columns, device=device, dtype=dtype) / columns**0.5
    bias = torch.randn(outputs, device=device, dtype=dtype)
    first, x = (torch.randn(n, columns, device=device, dtype=dtype) for n in (64, batch))
    if way not in made:
        made[way] = compiled(way, first, w, bias)
    if batch > 1:
        torch._dynamo.mark_dynamic(x, 0)
    got, want = made[way](x, w, bias), torch.relu(x @ w.t() + bias)
    assert torch.allclose(got, want, rtol=5e-2, atol=5e-2), "not the layer's result"
    return lambda: made[way](x, w, bias)
