"""Compiles with the weekend core alone. A program of its own: the core lies in FOLDER, where nothing else of reflib is,
and Triton's interpreter must be chosen before Triton is imported.

    TRITON_INTERPRET=1 python tests/weekend_alone.py FOLDER      run every case, compare with eager
    python tests/weekend_alone.py FOLDER cuda                    the same on a GPU, where Triton compiles the kernels
    python tests/weekend_alone.py FOLDER sources                 print the code of some that is generated for sm_90

Prints one JSON object: for each case what is wrong with it, or nothing; or the kernels' sources.
"""

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


def only_the_core(folder: str) -> None:
    """Leaves nothing importable that could bring another reflib."""
    sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", f"{f}")]
    there = [p for p in sys.path if not Path(p, "reflib").exists() and Path(p).resolve() != TESTS]
    sys.path[:] = [folder, *there]


if __name__ == "__main__":
    only_the_core(sys.argv[1])

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

device = "cuda" if __name__ == "__main__" and "cuda" in sys.argv[2:] else "cpu"


def randn(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device=device, requires_grad=grad)


def twenty_ops(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One op each: eighteen with a rule, two that fall back to ATen."""
    return (
        x + y, x - 2, x * y, x / (y.abs() + 1), -x, torch.exp(x), torch.log1p(x.abs()), torch.sqrt(x.abs()),
        torch.tanh(x), torch.sigmoid(x), torch.relu(x), torch.maximum(x, y), torch.where(x > y, x, y), x.clamp(-1, 1),
        x.sum(-1), x.amax(0), x.mean(), x.t() * 3, torch.cumsum(x, -1), x @ y.t(),
    )  # fmt: skip


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


class Block(nn.Module):
    """A transformer block: attention of two heads, and an MLP with GELU."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, rows, 6, width // 2).transpose(1, 2).chunk(3, 1)
        weights = torch.softmax(q @ k.transpose(-2, -1) / (width // 2) ** 0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, rows, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# name: (function, arguments, arguments of another size or None)
CASES: dict[str, tuple[Callable[[], Any], Callable[[], tuple], Callable[[], tuple] | None]] = {
    "twenty ops": (lambda: twenty_ops, lambda: (randn(12, 20), randn(12, 20)), None),
    "softmax": (lambda: softmax, lambda: (randn(12, 100),), None),
    "softmax, any size": (lambda: softmax, lambda: (randn(12, 100),), lambda: (randn(5, 77),)),
    "layer norm": (
        lambda: layer_norm, lambda: (randn(24, 48, grad=True), randn(48, grad=True), randn(48, grad=True)), None,
    ),
    "transformer block": (Block, lambda: (randn(2, 6, 16, grad=True),), None),
    "transformer block, any size": (
        Block, lambda: (randn(2, 6, 16, grad=True),), lambda: (randn(3, 9, 16, grad=True),),
    ),
}  # fmt: skip


def problem(name: str) -> str:
    from reflib.options import Options
    from reflib.pipeline import Backend

    make, args, more = CASES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, graphs = make(), []
    model = model.to(device) if isinstance(model, nn.Module) else model
    compiled = torch.compile(model, backend=Backend(Options(), graphs.append), dynamic=more is not None, fullgraph=True)
    for given in filter(None, (args, more)):
        if wrong := differences(model, compiled, given()):
            return wrong
    kernels = [k for s in graphs for k in s.kernels.values()]
    if name.startswith("softmax") and len(nodes := graphs[0].scheduled.nodes) != 1:
        return f"{len(nodes)} kernels"
    return "" if kernels and all(k.language == "triton" for k in kernels) else "no kernels"


def differences(model: Any, compiled: Any, args: tuple[torch.Tensor, ...]) -> str:
    """Of results and of the gradients of all that have one."""
    weights = list(model.parameters()) if isinstance(model, nn.Module) else []
    results = []
    for f in (model, compiled):
        mine = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        out = f(*mine)
        out = list(out) if isinstance(out, tuple) else [out]
        wanted = [t for t in (*mine, *weights) if t.requires_grad]
        if wanted:
            torch.manual_seed(1)
            out += torch.autograd.grad(out, wanted, [torch.randn_like(o) for o in out])
        results.append([t.detach() for t in out])
    for i, (want, got) in enumerate(zip(*results, strict=True)):
        if want.shape != got.shape or want.stride() != got.stride() or not torch.allclose(got, want, 1e-4, 1e-5):
            return f"output {i}: got {got.flatten()[:4].tolist()}, want {want.flatten()[:4].tolist()}"
    return ""


def sources(name: str) -> list[str]:
    """The kernels that are generated for sm_90."""
    from reflib.options import Options
    from reflib.pipeline import Backend

    make, args, more = CASES[name]
    torch._dynamo.reset()
    graphs: list[Any] = []
    backend = Backend(Options(target="sm_90"), graphs.append)
    torch.compile(make(), backend=backend, dynamic=more is not None, fullgraph=True)(*args())
    return [k.source for s in graphs for k in s.kernels.values()]


def complete_the_interpreter() -> None:
    """Give Triton's interpreter the functions of libdevice: the one thing here that is not the core's."""
    path = TESTS.parent / "reflib" / "lab" / "triton_child.py"
    spec = importlib.util.spec_from_file_location("triton_child", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.complete_the_interpreter()


def main(folder: str, what: str = "run") -> dict[str, Any]:
    found: dict[str, Any] = {}
    if what == "run":
        complete_the_interpreter()
    for name in CASES if what != "sources" else ("softmax", "softmax, any size", "layer norm"):
        try:
            found[name] = sources(name) if what == "sources" else problem(name)
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}\n" + "".join(traceback.format_exc()[-3000:])
    outside = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "reflib" and getattr(m, "__file__", "")]
    found["imported from elsewhere"] = [f for f in outside if not str(f).startswith(folder)]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(*sys.argv[1:])))
