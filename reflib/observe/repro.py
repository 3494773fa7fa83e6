"""A compilation as one Python file, which a fresh process runs: the graph as code, its inputs, options, versions and
the user's own kernels and operators (``rebuild.py`` runs it, ``minify.py`` makes it smaller).

Written on request (``Options(repro="folder")``, ``REFLIB_REPRO=folder``, ``reflib repro``), and into the cache's folder
where compiling fails. Writing never makes a compilation fail: one warning says what is missing.

NB: in TorchInductor this is ``fx_graph_runnable`` and ``TORCHDYNAMO_REPRO_AFTER``.
"""

import ast
import contextlib
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from .. import atomic, cache
from ..capture import Graph
from ..errors import ArgumentError, CaptureError, DeviceError, OptionError, ReflibError, RegistrationError
from ..logs import get as logger
from ..lower.lower import FRAME
from ..options import Options
from ..pipeline import Backend, Stages
from .foreign import Foreign
from .given import Symbol, Tensor, Unprintable, describe
from .rebuild import KERNEL_CALLS, Subject, digests

NOT_OURS = (ArgumentError, CaptureError, DeviceError, OptionError, RegistrationError)  # mistakes to be put right there
HEAD = '''"""A graph that reflib compiled{why}. Run it: ``python FILE``. It compiles the same graph, says whether the
kernels are bit-equal to those recorded here and whether the results are eager's; ``reflib minify FILE`` looks for the
smallest part that still fails, ``python FILE --sanitize`` for accesses out of bounds and races on a GPU.{missing}
"""'''
Compile = Callable[[Backend, torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


# -- when -------------------------------------------------------------------------------------------
def observed(
    compile: Compile, backend: Backend, module: torch.fx.GraphModule, inputs: Sequence[Any], folder: str
) -> Callable[..., Any]:
    """``compile``, and a repro of it into ``folder``; again if its backward graph is compiled later."""
    seen: list[Stages] = []
    written = False
    before = described(module, inputs, backend.options)

    def on_stages(s: Stages) -> None:
        backend.on_stages(s)
        seen.append(s)
        if written:
            store(before, seen, folder)

    other = copy(backend)
    other.on_stages = on_stages
    call = compile(other, module, inputs)
    store(before, seen, folder)
    written = True
    return call


def failed(module: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, error: Exception) -> None:
    """Write a repro of a compilation that raised ``error``, and note in the error where it is."""
    if isinstance(error, NOT_OURS) or type(error).__module__.startswith("torch._dynamo"):
        return  # the user's mistake; Dynamo's way to begin again
    if any(isinstance(x, torch._subclasses.FakeTensor) for x in inputs):
        return  # ``explain`` tries, and does it again with numbers
    why = f", which failed with {type(error).__name__}"
    path = store(described(module, inputs, options), [], options.repro or str(default_folder()), why)
    if path is not None:
        _advise(path, error)


def exported(graph: Graph, program: Any, options: Options, seen: Sequence[Stages], error: Exception | None) -> None:
    """The same of an exported program's ``graph``, when it was compiled to ``seen``, or failed with ``error``."""
    if isinstance(error, NOT_OURS):
        return
    folder = options.repro or os.environ.get("REFLIB_REPRO") or str(default_folder())
    why = f", which failed with {type(error).__name__}" if error else ""
    subject = described_exported(graph, program, options)
    path = store(subject, seen, folder, f" (from torch.export){why}")
    if path is not None and error is not None:
        _advise(path, error)


def described_exported(graph: Graph, program: Any, options: Options) -> Subject | str:
    """What a repro needs to know of an exported program."""
    from .exported import inputs_of, unbacked

    try:
        nodes = [n for n in graph.nodes if n.op == "placeholder"]
        fakes = [n.meta.get("val") for n in nodes]
        given = describe(inputs_of(program, graph), fakes, [False] * len(nodes))
        plain, _ = _plain_options(options)
        about = {"weights": sorted(graph.weights), "ranges": dict(graph.ranges), "unbacked": unbacked(graph)}
        return Subject(_copied(graph.module), given, plain, _state() | {"grad": False}, _symbols(fakes), exported=about)
    except Exception as e:
        return f"{type(e).__name__}: {e}".partition("\n")[0]


def _advise(path: Path, error: Exception) -> None:
    advice = f"to reproduce this: python {path}; to make it smaller: reflib minify {path}"
    error.add_note(advice)
    logger("repro").warning("compiling failed with %s; %s", type(error).__name__, advice)


def default_folder() -> Path:
    return Path(os.environ.get("REFLIB_REPRO") or cache.root() / "repros")


# -- what -------------------------------------------------------------------------------------------
def described(
    module: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, whole: bool = False
) -> Subject | str:
    """What a repro needs to know, before the compilation changes ``module``; or why it cannot be said."""
    try:
        nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
        fakes = [n.meta.get("example_value") for n in nodes]
        static = [bool((n.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")) for n in nodes]
        given = describe(inputs, fakes, static, whole)
        plain, _ = _plain_options(options)
        fake = any(isinstance(x, torch._subclasses.FakeTensor) for x in inputs)
        return Subject(_copied(module), given, plain, _state() | ({"fakes": True} if fake else {}), _symbols(fakes))
    except Unprintable as e:
        return str(e)
    except Exception as e:
        return f"{type(e).__name__}: {e}".partition("\n")[0]


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Another graph of the same nodes; parameters and submodules are shared."""
    graph = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, values))
    return torch.fx.GraphModule(module, graph)


def _plain_options(options: Options) -> tuple[dict[str, Any], list[str]]:
    """Those that are not the defaults; and names of those that have no text."""
    changed = {f.name: v for f in fields(options) if (v := getattr(options, f.name)) != f.default}
    for name in ("repro", "trace"):
        changed.pop(name, None)
    lost = []
    for name, value in list(changed.items()):
        try:
            ast.literal_eval(repr(value))
        except (ValueError, SyntaxError):
            lost.append(f"option {name}")
            del changed[name]
    return changed, lost


def _state() -> dict[str, Any]:
    autocast = {d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
    return {
        "grad": torch.is_grad_enabled(), **({"autocast": autocast} if autocast else {}),
        "default_dtype": torch.get_default_dtype(), "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip


def _symbols(fakes: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """(value when captured, least, most) of each symbol in sizes and strides."""
    out: dict[str, tuple[Any, ...]] = {}
    for fake in fakes:
        strided = isinstance(fake, torch.Tensor) and fake.layout == torch.strided
        numbers = [*fake.shape, *fake.stride()] if strided else [fake]
        for n in numbers:
            if isinstance(n, (torch.SymInt, torch.SymFloat)):
                env = n.node.shape_env
                for s in sorted(n.node.expr.free_symbols, key=str):
                    hint = env.backed_var_to_val.get(s)
                    if hint is None:
                        raise Unprintable(f"{s} has no value before run time")
                    out[str(s)] = (int(hint), *_limits(env.var_to_range[s]))
    return out


def _limits(r: Any) -> tuple[int | None, int | None]:
    return tuple(int(b) if b.is_finite and abs(b) < 2**62 else None for b in (r.lower, r.upper))  # type: ignore[return-value]


# -- the text ---------------------------------------------------------------------------------------
def text(subject: Subject, seen: Sequence[Stages] = (), why: str = "") -> tuple[str, list[str]]:
    """The file, and what is missing in it."""
    foreign = Foreign()
    printed: list[str] = []
    classes = _classes(subject.module, "Graph", foreign, printed)
    tables = _kernel_tables(subject.module, foreign)
    shown = [f"{name} = {_pretty(value)}" for name, value in (
        ("VERSIONS", _versions()), ("OPTIONS", subject.options), ("STATE", subject.state),
        ("SYMBOLS", subject.symbols), *([("EXPORTED", subject.exported)] if subject.exported else []),
    )]  # fmt: skip
    inputs = "".join(f"    {x!r},  # {n}\n" for x, n in zip(subject.inputs, _placeholders(subject.module)))
    where = [f"sys.path[:0] = {foreign.folders!r}"] if foreign.folders else []
    lost = foreign.missing
    missing = f"\n\nMISSING, to be added by hand: {'; '.join(lost)}." if lost else ""
    kernels = digests(seen) or subject.kernels
    parts = [
        HEAD.format(why=why, missing=missing), "import sys\n\nimport torch\nfrom torch import device, inf, nan",
        "\n".join([*where, *foreign.lines]),
        "from reflib.observe.given import Symbol, Tensor\nfrom reflib.observe.rebuild import main",
        *shown, f"INPUTS = [\n{inputs}]", *tables, *classes,
        f"# graph -> kernel -> hash of its source, when this was written\nKERNELS = {_pretty(kernels)}",
        'if __name__ == "__main__":\n    raise SystemExit(main(globals()))',
    ]  # fmt: skip
    return "\n\n".join(p for p in parts if p) + "\n", lost


def _placeholders(module: torch.fx.GraphModule) -> list[str]:
    return [n.name for n in module.graph.nodes if n.op == "placeholder"]


def _pretty(value: Any) -> str:
    import pprint

    return pprint.pformat(value, width=110, sort_dicts=False)


@functools.cache
def _versions() -> dict[str, str]:
    import importlib.metadata as metadata

    out = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "reflib"):
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def _classes(module: torch.nn.Module, name: str, foreign: Foreign, out: list[str]) -> list[str]:
    """The text of ``module`` as class ``name``, after those of its submodules."""
    assert isinstance(module, torch.fx.GraphModule)
    init = []
    for child_name, child in module.named_children():
        if isinstance(child, torch.fx.GraphModule):
            child_class = f"{name}_{child_name}"
            _classes(child, child_class, foreign, out)
            init.append(f"self.{child_name} = {child_class}()")
        elif any(n.op == "call_module" and str(n.target).split(".")[0] == child_name for n in module.graph.nodes):
            foreign.missing.append(f"self.{child_name}, a {type(child).__name__}")
    for n in module.graph.nodes:
        if n.op == "get_attr":
            init += _attribute(module, str(n.target), foreign)
    with _lines_of_origins(module.graph):
        code = module.graph.python_code("self", verbose=True, include_stride=True)
    for global_name, thing in code.globals.items():
        if global_name not in ("inf", "nan", "NoneType", "torch", "device", "fx_pytree", "pytree"):
            foreign.name(global_name, thing)
    _operators(module, foreign)
    body = [f"class {name}(torch.nn.Module):"]
    if init:
        body += ["    def __init__(self):", "        super().__init__()"]
        body += [*(f"        {x}" for x in dict.fromkeys(init)), ""]
    body += ["    " + line if line.strip() else "" for line in code.src.strip().splitlines()]
    out.append("\n".join(body).rstrip())
    return out


@contextlib.contextmanager
def _lines_of_origins(graph: torch.fx.Graph) -> Iterator[None]:
    """fx prints the innermost line that a node is from: meanwhile that is the one in its origin, and so in kernels."""
    from ..lower.user_kernels import without_launcher

    kept = [(n, n.meta["stack_trace"]) for n in graph.nodes if n.meta.get("stack_trace")]
    try:
        for n, _ in kept:
            if getattr(n.target, "__name__", "") in KERNEL_CALLS:
                without_launcher(n)
            frames = FRAME.findall(n.meta["stack_trace"])
            n.meta["stack_trace"] = '  File "{}", line {}, in {}\n    {}\n'.format(*frames[-1]) if frames else ""
        yield
    finally:
        for n, trace in kept:
            n.meta["stack_trace"] = trace


def _operators(module: torch.fx.GraphModule, foreign: Foreign) -> None:
    """What registers the operators that the graph calls, and the modules of PyTorch that its functions are in."""
    for n in module.graph.nodes:
        if isinstance(n.target, torch._ops.OpOverload):
            foreign.op(n.target)
        elif isinstance(n.target, torch._ops.OpOverloadPacket):
            foreign.op(getattr(n.target, n.target.overloads()[0]))
        owner = str(getattr(n.target, "__module__", None)) if n.op == "call_function" else ""
        own = owner.startswith("torch.") and not owner.startswith(("torch._C", "torch._ops"))
        if own and getattr(sys.modules.get(owner), "__spec__", None):
            foreign.imported(owner, f"import {owner}")


def _attribute(module: torch.nn.Module, path: str, foreign: Foreign) -> list[str]:
    """Statements that make a parameter, buffer or constant of ``module``."""
    try:
        value: Any = module
        for part in path.split("."):
            value = getattr(value, part)
    except AttributeError:
        return []
    if isinstance(value, torch.nn.Module) or isinstance(_holder(module, path), torch.fx.GraphModule):
        return []  # a class of its own
    if not isinstance(value, torch.Tensor):
        foreign.missing.append(f"self.{path}, a {type(value).__name__}")
        return []
    try:
        [made] = describe([value], [None], [False], whole=value.numel() <= 4096)
    except Unprintable as e:
        foreign.missing.append(f"self.{path}: {e}")
        return []
    foreign.imported("reflib", "from reflib.observe.given import hold")
    return [f"hold(self, {path!r}, {made!r})"]


def _holder(module: torch.nn.Module, path: str) -> torch.nn.Module | None:
    """The submodule that has the attribute; None for ``module`` itself."""
    return module.get_submodule(path.rpartition(".")[0]) if "." in path else None


def _kernel_tables(module: torch.fx.GraphModule, foreign: Foreign) -> list[str]:
    """TRITON_KERNELS: number -> (kernel, {number: constant arguments}), of all that the graph launches."""
    used: dict[int, dict[int, Any]] = {}
    names: dict[int, str] = {}
    for inner in module.modules():
        for n in inner.graph.nodes if isinstance(inner, torch.fx.GraphModule) else ():
            if getattr(n.target, "__name__", "") in KERNEL_CALLS:
                from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table

                k, c = n.kwargs["kernel_idx"], n.kwargs["constant_args_idx"]
                kernel = table.get_kernel(k)
                names[k] = str(getattr(kernel, "__name__", None) or getattr(kernel.fn, "__name__", f"kernel_{k}"))
                foreign.name(names[k], kernel)
                used.setdefault(k, {})[c] = table.get_constant_args(c)
    rows = "".join(f"    {k}: ({names[k]}, {constants!r}),\n" for k, constants in used.items())
    return [f"TRITON_KERNELS = {{\n{rows}}}"] if used else []


# -- to disk ----------------------------------------------------------------------------------------
def store(subject: Subject | str, seen: Sequence[Stages], folder: str, why: str = "") -> Path | None:
    """Write the file; the path, or None with a warning that says why not. The same graph has the same name."""
    try:
        if isinstance(subject, str):
            raise Unprintable(subject)
        made, missing = text(subject, seen, why)
        name = hashlib.sha256(repr((str(subject.module.graph), subject.inputs, subject.options)).encode()).hexdigest()
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"repro_{name[:12]}.py"
        atomic.write(path, made)
        if missing:
            logger("repro").warning("%s lacks %s", path, "; ".join(missing))
        return path
    except Exception as e:
        logger("repro").warning("no repro was written: %s", f"{type(e).__name__}: {e}".partition("\n")[0])
        return None


def write(
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    path: Path,
    whole: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> list[Path]:
    """Repros of every graph of ``f(*args, **kwargs)``, gradients included: at ``path``, and beside it with a number. A
    graph that fails to compile is written too, then its error is raised. Raises ReflibError if nothing was captured."""
    from .explain import _graphs, original

    opts = Options.make(options).but(repro=None)
    found: list[tuple[Subject | str, list[Stages]]] = []

    class Writing(Backend):
        def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            seen: list[Stages] = []
            found.append((described(module, inputs, self.options, whole), seen))
            other = copy(self)
            other.on_stages = lambda s: [told(s) for told in (seen.append, self.on_stages)]
            try:
                return super(Writing, other).__call__(module, inputs)
            except Exception as e:
                if type(e).__module__.startswith("torch._dynamo"):  # Dynamo begins again, with other inputs
                    found.pop()
                raise

    try:
        _graphs(functools.partial(Writing), original(f), args, kwargs or {}, opts, dynamic)  # type: ignore[arg-type]
    finally:
        if not found:
            raise ReflibError("no tensor operation was captured")
        paths = []
        for i, (subject, seen) in enumerate(found):
            if isinstance(subject, str):
                raise ReflibError(f"graph {i} cannot be written: {subject}")
            at = path if i == 0 else path.with_stem(f"{path.stem}_{i}")
            atomic.write(at, text(subject, seen)[0])
            paths.append(at)
    return paths


__all__ = ["Symbol", "Tensor", "described", "failed", "observed", "store", "text", "write"]
