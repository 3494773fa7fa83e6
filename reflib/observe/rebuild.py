"""What a repro file runs: its graph again, in a process of its own, compiled as before and compared with eager."""

import argparse
import contextlib
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._dynamo.source import ConstantSource, LocalSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_leaves

from ..autotune import correct
from ..capture.export import with_fakes
from ..capture.triton_there import triton_of_gpu
from ..errors import ReflibError
from ..options import Options
from ..pipeline import Backend, Stages
from ..target import parse_target
from .given import Symbol, Tensor, evaluate, make
from .read_graph import read_graph

KERNEL_CALLS = ("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional")


@dataclass
class Subject:
    """A graph that can be compiled: Dynamo's, before autograd. ``inputs``: what ``given.describe`` returned.
    ``exported``: of torch.export's, the names of its weights and the ranges of its symbols."""

    module: torch.fx.GraphModule
    inputs: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    symbols: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    kernels: dict[str, dict[str, str]] = field(default_factory=dict)
    exported: dict[str, Any] = field(default_factory=dict)

    def values(self) -> list[Any]:
        return make(self.inputs, self.symbols)


def load(scope: Mapping[str, Any]) -> Subject:
    """The subject of a repro file, whose names ``scope`` has."""
    with open(scope["__file__"], encoding="utf-8") as f:
        text = f.read()
    module = read_graph(scope["Graph"](), text, scope)
    _renumber(module, scope.get("TRITON_KERNELS", {}))
    names = ("OPTIONS", "STATE", "SYMBOLS", "KERNELS", "EXPORTED")
    return Subject(module, list(scope["INPUTS"]), *(dict(scope.get(n, {})) for n in names))


def _renumber(module: torch.fx.GraphModule, kernels: Mapping[int, tuple[Any, Mapping[int, Any]]]) -> None:
    """Calls of Triton kernels name them by number, in a table of the process."""
    if not kernels:
        return
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table

    numbers = {old: table.add_kernel(kernel) for old, (kernel, _) in kernels.items()}
    constants = {old: table.add_constant_args(dict(c)) for _, more in kernels.values() for old, c in more.items()}
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, torch.fx.GraphModule) else ():
            if getattr(node.target, "__name__", "") in KERNEL_CALLS:
                was = node.kwargs
                node.kwargs = {
                    **was, "kernel_idx": numbers[was["kernel_idx"]],
                    "constant_args_idx": constants[was["constant_args_idx"]],
                }  # fmt: skip


# -- compiling --------------------------------------------------------------------------------------
class _Named(ShapeEnv):
    """Symbols keep their names."""

    def _generate_unique_id(self, source_name: str) -> int:
        return int("".join(c for c in source_name if c.isdigit()) or 0)


@contextlib.contextmanager
def as_captured(state: Mapping[str, Any]) -> Iterator[None]:
    """The switches of PyTorch that a graph was compiled under."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_autocast_kept())
        stack.enter_context(torch.set_grad_enabled(state.get("grad", True)))
        for device, dtype in state.get("autocast", {}).items():
            stack.enter_context(torch.autocast(device, dtype))
        for get, put, name in (
            (torch.get_default_dtype, torch.set_default_dtype, "default_dtype"),
            (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "matmul_precision"),
            (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, "deterministic"),
        ):
            if name in state and state[name] != get():
                stack.callback(put, get())
                put(state[name])
        yield


def compile_again(subject: Subject, stages: list[Stages]) -> Callable[..., Any]:
    """The graph through AOTAutograd and reflib, as Dynamo would give it: with its symbols, and knowing which inputs are
    parameters. ``stages``: filled with what was compiled. For a target what is returned computes nothing."""
    options = Options.make(subject.options)
    mode = FakeTensorMode(shape_env=_Named(), allow_non_fake_inputs=True)
    values = subject.values()
    gpu = parse_target(options.target) if options.target and parse_target(options.target).is_gpu else None
    if subject.exported:
        from .exported import compile_exported

        with triton_of_gpu() if gpu else contextlib.nullcontext():
            return compile_exported(subject, _fakes(subject, values, mode), mode, stages)
    if not subject.state.get("fakes"):
        with triton_of_gpu() if gpu else contextlib.nullcontext():
            return _through(Backend(options, stages.append), subject, values, mode)
    there = any(isinstance(x, Tensor) and x.device != "cpu" for x in subject.inputs)
    with with_fakes(subject.module, values, gpu, there) as (around, module, values):
        backend = Backend(options, stages.append)
        backend.around = lambda call, what, inputs: around(call)  # type: ignore[method-assign]
        return _through(backend, replace(subject, module=module), values, mode)


def _through(backend: Backend, subject: Subject, values: Sequence[Any], mode: FakeTensorMode) -> Callable[..., Any]:
    """``backend``'s callable; a target's has been called, for its backward may be compiled then."""
    module, fakes = subject.module, _fakes(subject, values, mode)
    _note_values(module, fakes, mode)
    module.meta["dynamo_compile_id"] = None
    module._param_name_to_source = {
        n: LocalSource(f"self_{n}") for n, _ in (*module.named_parameters(), *module.named_buffers())
    }  # type: ignore[assignment]
    given = [v if isinstance(v, torch.Tensor) else f for v, f in zip(values, fakes)]
    with tracing(TracingContext(mode)):
        call = backend(module, given)
    if backend.options.target and "backward" in subject.kernels:
        _gradients(tree_leaves(call(*values)), values)
    return call


def _fakes(subject: Subject, values: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """A fake for every value; the mode knows the fake of each tensor."""
    env: Any = mode.shape_env
    symbols = {}
    for name, (value, low, high) in subject.symbols.items():
        source = ConstantSource(name)
        e = env.create_symbol(value, source, DimDynamic.DYNAMIC, None, low is not None and low >= 0, True)
        symbols[name] = env.create_symintnode(e, hint=value, source=source)
        torch._check(symbols[name] >= (low or 0))
        if high is not None:
            torch._check(symbols[name] <= high)
    nodes = [n for n in subject.module.graph.nodes if n.op == "placeholder"]
    out = []
    for node, x, v in zip(nodes, subject.inputs, values, strict=True):
        source = LocalSource(node.name)
        node._dynamo_source = source
        if isinstance(x, Symbol):
            out.append(evaluate(x.expr, symbols))
        elif isinstance(v, torch.Tensor):
            if x.static:
                node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
            out.append(_fake(x, v, mode, symbols, source))
        else:
            out.append(v)
    return out


def _fake(x: Tensor, v: torch.Tensor, mode: FakeTensorMode, symbols: Mapping[str, Any], source: Any) -> torch.Tensor:
    if not any(x.symbolic):
        return mode.from_tensor(v, static_shapes=True, source=source)
    size, stride = ([evaluate(e, symbols) for e in text.split(", ") if e] for text in x.symbolic)
    with mode, torch.no_grad():
        fake = torch.empty_strided(size, stride, dtype=x.dtype, device=x.device)
    fake = torch.nn.Parameter(fake, x.grad) if x.parameter else fake.requires_grad_(x.grad)
    mode.fake_tensor_converter.set_tensor_memo(v, fake)
    return fake


def note_values(subject: Subject) -> None:
    """Put what capture would know of each node's value into its ``meta["example_value"]``."""
    mode = FakeTensorMode(shape_env=_Named(), allow_non_fake_inputs=True)
    with as_captured(subject.state):
        _note_values(subject.module, _fakes(subject, subject.values(), mode), mode)


class Watched(torch.fx.Interpreter):
    """``saw``: called with each node and its value, when that was computed."""

    def __init__(self, module: torch.fx.GraphModule, saw: Callable[[torch.fx.Node, Any], Any]):
        super().__init__(module)
        self.saw = saw

    def run_node(self, n: torch.fx.Node) -> Any:
        out = super().run_node(n)
        self.saw(n, out)
        return out


def _note_values(module: torch.fx.GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> None:
    """What Dynamo knows of each node's value, which some rewrites ask for."""
    for node, fake in zip((n for n in module.graph.nodes if n.op == "placeholder"), fakes):
        node.meta["example_value"] = fake
    env: Any = mode.shape_env
    copies = [_apart(f) for f in fakes]
    with _autocast_kept(), mode, env.ignore_fresh_unbacked_symbols(), contextlib.suppress(Exception):
        Watched(module, lambda n, value: n.meta.update(example_value=value)).run(*copies)
    for node, fake in zip((n for n in module.graph.nodes if n.op == "placeholder"), fakes):
        node.meta["example_value"] = fake


@contextlib.contextmanager
def _autocast_kept() -> Iterator[None]:
    """A graph that fails between entering autocast and leaving it would leave it on."""
    devices = "cpu", "cuda"
    kept = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    try:
        yield
    finally:
        for d, (on, dtype) in zip(devices, kept):
            torch.set_autocast_enabled(d, on)
            torch.set_autocast_dtype(d, dtype)


def _apart(fake: Any) -> Any:
    """Updates in place are not for the inputs that are compiled."""
    if not isinstance(fake, torch.Tensor):
        return fake
    return fake.detach().requires_grad_(fake.requires_grad)


def digests(stages: Sequence[Stages]) -> dict[str, dict[str, str]]:
    """{graph: {kernel: hash of its source}}."""
    return {
        s.graph.name: {k.name: hashlib.sha256(k.source.encode()).hexdigest()[:16] for k in s.kernels.values()}
        for s in stages if s.kernels is not None
    }  # fmt: skip


# -- running ----------------------------------------------------------------------------------------
def outcome(call: Callable[..., Any], subject: Subject, wide: bool = False) -> tuple[list[Any], list[str]]:
    """(what a call returned, the inputs afterwards, gradients; a name for each). ``wide``: in float64."""
    args = subject.values()
    if wide:
        args = [_wide(a) for a in args]
    torch.manual_seed(0)
    with as_captured(subject.state):
        result = call(*args)
    results = [t for t in tree_leaves(result) if t is not None]
    grads = _gradients(results, args)
    given = [a for a in args if isinstance(a, torch.Tensor)]
    names = [*(f"output {i}" for i in range(len(results))), *(f"input {i}, afterwards" for i in range(len(given)))]
    names += [f"gradient {i}" for i in range(len(grads))]
    return [t.detach() if isinstance(t, torch.Tensor) else t for t in (*results, *given, *grads)], names


def _gradients(results: Sequence[Any], args: Sequence[Any]) -> list[torch.Tensor]:
    outputs = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    if not outputs or not leaves:
        return []
    g = torch.Generator().manual_seed(7)
    weights = [(torch.randint(-8, 9, t.shape, generator=g) / 8 + 0.0625).to(t.device, t.dtype) for t in outputs]
    found = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
    return [torch.zeros(()) if t is None else t.contiguous() for t in found]


def _wide(t: Any) -> Any:
    if not isinstance(t, torch.Tensor) or not t.dtype.is_floating_point:
        return t
    return t.detach().to(torch.float64).requires_grad_(t.requires_grad)


def differences(got: Sequence[Any], want: Sequence[Any], wide: Sequence[Any] | None, names: Sequence[str]) -> list[str]:
    """What is wrong with ``got``, by the rule of ``autotune.correct``: eager's results are ``want``, and in float64
    ``wide`` (None: not to be had)."""
    if len(got) != len(want):
        return [f"{len(got)} results, eager has {len(want)}"]
    found = [correct.beside_eager(g, w, x)[0] for g, w, x in zip(got, want, wide or [None] * len(want))]
    return [f"{name}: {problem}" for name, problem in zip(names, found) if problem]


def reference(subject: Subject) -> list[Any] | None:
    """Eager's results in float64; None where something refuses it."""
    try:
        return outcome(torch.fx.Interpreter(subject.module).run, subject, wide=True)[0]
    except Exception:
        return None


# -- the file as a program --------------------------------------------------------------------------
def main(scope: Mapping[str, Any], argv: Sequence[str] | None = None) -> int:
    """Run a repro file. 0: compiled, right, and the kernels are those recorded; 1: wrong or other kernels. An error of
    compiling or running is raised as it is."""
    parser = argparse.ArgumentParser(description=inspect.cleandoc(scope.get("__doc__") or ""))
    parser.add_argument("--show", action="store_true", help="print the kernels")
    parser.add_argument("--sanitize", action="store_true", help="run them under compute-sanitizer too")
    shown = parser.parse_args(argv)
    subject, stages = load(scope), []  # type: ignore[var-annotated]
    with as_captured(subject.state):
        call = compile_again(subject, stages)
    bad: list[str] = []
    if not Options.make(subject.options).target:
        want, names = outcome(subject.module, subject)
        got = outcome(call, subject)[0]
        bad = differences(got, want, reference(subject), names)
        print(f"compared with eager: {'right' if not bad else 'WRONG'} ({len(want)} values)")
    bad += other_kernels(digests(stages), subject.kernels)
    if shown.sanitize:
        from .sanitize import sanitized

        bad += sanitized(scope["__file__"], stages)
    if shown.show:
        print("\n".join(k.source for s in stages for k in (s.kernels or {}).values()))
    print("\n".join(bad) if bad else "nothing is wrong")
    return 1 if bad else 0


def other_kernels(now: dict[str, dict[str, str]], then: dict[str, dict[str, str]]) -> list[str]:
    """Kernels that are not bit-equal to those recorded. Says how many are."""
    if not then:
        print("no kernels were recorded: compiling had failed")
        return []
    same = sum(now.get(g, {}).get(k) == h for g, kernels in then.items() for k, h in kernels.items())
    print(f"kernels: {same} of {sum(map(len, then.values()))} are bit-equal to those recorded")
    out = [
        f"kernel {k} of the {g} graph {'differs' if k in now.get(g, {}) else 'is not made'}"
        for g, kernels in then.items() for k, h in kernels.items() if now.get(g, {}).get(k) != h
    ]  # fmt: skip
    return out + [f"a new kernel {k} ({g})" for g in then for k in now.get(g, {}) if k not in then[g]]


def run_file(path: str) -> Mapping[str, Any]:
    """The names of a repro file. Raises ReflibError if it is none."""
    import runpy

    scope = runpy.run_path(path, run_name="repro")
    if "Graph" not in scope or "INPUTS" not in scope:
        raise ReflibError(f"{path} is no repro: it has no Graph and INPUTS")
    return {**scope, "__file__": path}


if __name__ == "__main__":
    sys.exit(main(run_file(sys.argv[1]), sys.argv[2:]))
