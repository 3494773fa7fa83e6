"""Capture of a whole model by ``torch.export``, for the device it lies on or for a GPU that this machine may not have.

For CUDA the model is copied with a fake tensor in the place of each of its tensors (its weights are not copied, it is
not touched), the fakes lie on cuda:0, and the copy is exported: ``x.device``, ``x.is_cuda``, factory functions and
autocast do what they would do after ``model.to("cuda")``. A GPU is always captured as cuda:0, whatever index is asked
for or the tensors have: a package is moved to the GPU that it is loaded for. A machine with a GPU captures the same.

Where torch looks for the real device during a capture, it is told otherwise (``_as_if_there``; all of it is put back):

- C++ asks for CUDA's device guard: a build without CUDA has none and raises, or aborts where C++ may not raise
  (autograd, for a fake that requires grad). torch's own FakeGuardImpl, which FakeTensorMode sets only in CUDA builds
  without a GPU, is put there.
- Autocast for cuda switches itself off, with a warning, in its constructor (``amp_definitely_not_available``), and
  refuses bfloat16 if the GPU does (``is_bf16_supported``).
- ``scaled_dot_product_attention`` asks the GPU which kernel it will be, to know how its result is laid out; without one
  it takes the math path, laid out in another way than the fused kernels do it. Here it is as those have it. The call
  stays whole in the graph (``decompositions`` leaves it so): the GPU picks the kernel when it runs.
- Constants of one element are computed with, ``torch.tensor(2.0, device=x.device)`` too, which needs the GPU: by
  FakeTensorMode and by the tracer. (So ``item()`` of it is a number read when the graph runs, not a constant.)

NB: An autocast object made before the capture (a decorator on ``forward``) has switched itself off already, and
``torch.cuda.is_available()`` in the model still says what is true here.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import CaptureError
from ..target import Target
from .advice import explained, first_lines, users_frames
from .attention_there import attention_of_gpu
from .copies import deep_copied
from .exported import Rewrite, exported_graph, in_training, retargeted
from .graph import Graph
from .launch_checks import exported_with_launches
from .sharded import layouts_are_constants, plain_name
from .triton_there import triton_of_gpu

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
_STATE = ("PARAMETER", "BUFFER", "CONSTANT_TENSOR")


@dataclass(frozen=True)
class Exported:
    """A whole model, captured.

    graph: ATen calls, after reflib's decompositions; its inputs are the state, then the arguments.
    program: the ExportedProgram it belongs to, for its signature, call_spec and range_constraints. Captured for another
        device, what its state_dict and constants hold are fakes.
    state: by ``target`` of the signature's input specs, in their order: the tensor for each input that is a parameter,
        buffer or constant. (What nothing reads or writes is no input.) They are the model's own tensors, on
        their devices; the graph's placeholder says on which device the graph needs them. A weight of two names is
        listed twice, the same object.
    training: ops that do something else than in inference, because the model was in training mode, and what.
    """

    graph: Graph
    program: Any
    state: dict[str, torch.Tensor]
    training: tuple[str, ...] = ()


@config.patch(functionalize_rng_ops=False)  # it needs CUDA, and torch.export has no place for its states
def export_for(
    model: Any,
    args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    device: torch.device | str | None = None,
    *,
    decompositions: dict,
    rewrite: Rewrite = lambda module: module,
) -> Exported:
    """Capture ``model`` for inference with ``torch.export`` (non-strict), as it would be on ``device``.

    model: a module, a callable (its own tensors, other than those of a module it is a method of, stay where they are),
        or an ExportedProgram, which has its args, kwargs and dynamic_shapes; of a CPU, it is captured for a GPU too.
    args, kwargs: examples. Tensors among them may lie anywhere, on ``meta`` too: what is in them does not matter.
    device: ``cpu``, ``cuda``, or None for where the model and its arguments lie.
    decompositions: ``lower.decompositions()``.   rewrite: of the graph, before it is decomposed.

    Raises CaptureError for what cannot be captured; torch.export's own error is its ``__cause__``.
    """
    device = None if device is None else torch.device(device)
    if device is not None and device.type not in ("cpu", "cuda"):
        raise CaptureError(f"cannot capture for {device}: reflib compiles for cpu and cuda")
    args, kwargs = _examples(args, kwargs)
    if isinstance(model, torch.export.ExportedProgram):
        if args or kwargs or dynamic_shapes:
            raise CaptureError("an ExportedProgram has its arguments and shapes already: pass it without any")
        return _of_program(model, device, decompositions, rewrite)
    module = _as_module(model)
    there, fakes = _fakes_for(module, (args, kwargs), device)
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    name = getattr(model, "__name__", type(model).__name__)
    lines = _replaced(torch.fx.proxy.TracerBase, "_filter_traceback_frames", _users)
    guard = _as_if_there() if there == "cuda" else nullcontext()
    with _LOCK, lines, torch.no_grad(), guard, layouts_are_constants(module, fakes is not None), explained(name):
        if fakes is not None:
            module = fakes.copied(module, name)
            args, kwargs = pytree.tree_map_only(torch.Tensor, fakes.fake, (args, kwargs))
        program = exported_with_launches(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        training = not isinstance(model, torch.nn.Module) or any(m.training for m in model.modules())
        return _exported(program, decompositions, rewrite, own, {} if fakes is None else fakes.real, training)


def _users(tracer: Any, stack: traceback.StackSummary) -> traceback.StackSummary:
    """A node's lines. (torch.export keeps the functions alone that are named ``forward``: of a function, ours.)"""
    return traceback.StackSummary.from_list(users_frames(stack))


@contextmanager
def with_fakes(fn: Any, call: Any, gpu: Target | None, there: bool) -> Iterator[tuple[Any, Any, Any]]:
    """A decorator for what runs such graphs; ``fn`` (if it is a module, a copy) and ``call``, a nest of arguments, with
    a fake tensor for each tensor: on its own device, or on a GPU (``there``). ``gpu``: whose kernels attention
    takes.

    Raises CaptureError for what cannot be copied.
    """
    fakes = _Fakes(CUDA if there else None)

    def fake(t: torch.Tensor) -> torch.Tensor:
        return fakes.fake(t).requires_grad_(t.requires_grad)

    on_gpu = (attention_of_gpu(gpu), triton_of_gpu()) if gpu else (nullcontext(), nullcontext())
    with _LOCK, _as_if_there(dynamo=True) if there else nullcontext(), on_gpu[0], on_gpu[1]:
        if isinstance(fn, torch.nn.Module):
            copy = fakes.copied(fn, type(fn).__name__)
            for p, new in zip(fn.parameters(), copy.parameters(), strict=True):
                new.requires_grad_(p.requires_grad)
            fn = copy
        yield _under(fakes.mode), fn, pytree.tree_map_only(torch.Tensor, fake, call)


def _under(mode: FakeTensorMode) -> Callable[[Any], Any]:
    env = ShapeEnv(allow_dynamic_output_shape_ops=False)  # while_loop looks for one

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with mode, _replaced(mode, "shape_env", env):
                result = call(*args)
            if any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in pytree.tree_leaves(result)):
                raise CaptureError("what follows a graph needs a number that is read from a tensor")
            return result

        return run

    return around


def _examples(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs``, if they are what their names say."""
    if args is not None and not isinstance(args, (tuple, list)):
        raise CaptureError(f"args are the example arguments in a tuple, (x,) for one: got a {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError(f"kwargs are the example arguments by name in a dict: got a {type(kwargs).__name__}")
    return tuple(args or ()), dict(kwargs or {})


def _exported(
    program: Any,
    decompositions: dict,
    rewrite: Rewrite,
    own: dict[str, torch.Tensor],
    real: dict[int, torch.Tensor],
    training: bool,
) -> Exported:
    differs = in_training(program) if training else ()
    graph, program = exported_graph(program, decompositions, rewrite)
    _tidy(graph.module, program.graph_signature)
    if getattr(program, "example_inputs", None) is not None:
        program.example_inputs = None  # they would live as long as this does
    state = {}
    for spec in (s for s in program.graph_signature.input_specs if s.kind.name in _STATE):
        held = own.get(spec.target)
        if held is None or spec.kind.name == "CONSTANT_TENSOR":
            held = (program.state_dict if spec.target in program.state_dict else program.constants)[spec.target]
            held = real.get(_storage(held), held)
        spec.target = plain_name(spec.target, own)
        state[spec.target] = held
    _drop_unused(graph.module, program.graph_signature, state)
    return Exported(graph, program, {name: _with_data(name, t) for name, t in state.items()}, differs)


def _with_data(name: str, t: torch.Tensor) -> torch.Tensor:
    if is_fake(t) or t.is_meta:
        kind = "fake" if is_fake(t) else "meta"
        remedy = "model.to_empty(device='cpu'), then model.load_state_dict(...)"
        raise CaptureError(f"{name} has no data (it is a {kind} tensor): give the model its weights first ({remedy})")
    return t


def _of_program(program: Any, device: torch.device | None, decompositions: dict, rewrite: Rewrite) -> Exported:
    for name, t in (*program.state_dict.items(), *program.constants.items()):
        if isinstance(t, torch.Tensor):
            _with_data(name, t)
    vals = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
    devices = {v.device for v in vals if isinstance(v, torch.Tensor)}
    gpus = {d for d in devices if d.type == "cuda"}
    if device is not None and device.type == "cpu" and gpus:
        raise CaptureError(f"the program was exported for cuda, not for {device}: pass the module it was made of")
    if any(d.index for d in gpus):
        where = ", ".join(sorted(map(str, gpus)))
        raise CaptureError(f"the program was exported for {where}, not cuda:0: pass the module it was made of")
    there = bool(gpus) or device is not None and device.type == "cuda"
    with _LOCK, torch.no_grad(), _as_if_there() if there else nullcontext(), explained("the program"):
        fakes, own = _Fakes(CUDA), {}
        if there and not gpus:
            own, program = program.state_dict, retargeted(program, CUDA, fakes.fake)
        return _exported(program, decompositions, rewrite, own, fakes.real, True)


# -- what is exported -------------------------------------------------------------------------------
def _as_module(model: Any) -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
        return getattr(model, "_orig_mod", model)  # torch.compile's
    if isinstance(model, type):
        raise CaptureError(f"{model.__name__} is a class: pass a model, such as {model.__name__}(...)")
    if not callable(model):
        raise CaptureError(f"expected a module, a callable or an ExportedProgram, got {type(model).__name__}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    try:  # dynamic_shapes go by the names of its arguments
        parameters = inspect.signature(model).parameters.values()
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = inspect.Signature([me, *parameters])  # type: ignore[attr-defined]
    except ValueError:
        pass
    module = type("Function", (torch.nn.Module,), {"forward": forward})()
    owner = getattr(model, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        module.owner = owner  # its weights get their names
    module.function = model
    return module


def _fakes_for(module: torch.nn.Module, call: Any, device: torch.device | None) -> tuple[str, _Fakes | None]:
    """The type of device to capture for, and the fakes to do it with, if any tensor is to seem to lie elsewhere."""
    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves(call)]
    devices = {t.device for t in tensors if isinstance(t, torch.Tensor)}
    gpus = {d for d in devices if d.type == "cuda"}
    if device is None and len(gpus) > 1:
        where = ", ".join(sorted(map(str, gpus)))
        raise CaptureError(f"the model and its arguments lie on {where}: pass device='cuda' to have them on one GPU")
    there = device.type if device is not None else "cuda" if gpus else "cpu"
    if there == "cpu" and not gpus and (device is None or devices <= {torch.device("cpu")}):
        return there, None
    return there, _Fakes(None if device is None else CUDA if there == "cuda" else device)


class _Fakes(TorchFunctionMode):
    """One fake tensor for each real one. As a mode: what ``deep_copied`` makes of tensors.

    device: where all fakes lie; None: on cuda:0 what is on a GPU, on the CPU what is on meta, else on its own device.
    real: by a fake's storage (torch.export may detach it), what it stands for.
    """

    def __init__(self, device: torch.device | None):
        super().__init__()
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.memo: dict[int, Any] = {}
        self.real: dict[int, torch.Tensor] = {}

    def fake(self, t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, FakeTensor) and t.fake_mode is self.mode:
            return t
        if id(t) not in self.memo:
            fake = self._made(t)
            self.memo[id(t)], self.real[_storage(fake)] = fake, t
        return self.memo[id(t)]

    def _made(self, t: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if torch.nn.parameter.is_lazy(t):
                raise CaptureError("a parameter has no shape yet (it is a lazy module's): call the model once first")
            if is_traceable_wrapper_subclass(t) or t.layout is not torch.strided:
                what = type(t).__name__ if t.layout is torch.strided else f"tensor of layout {t.layout}"
                raise CaptureError(f"cannot capture a {what} for another device; for its own, pass device=None")
            device = self.device or (CUDA if t.is_cuda else torch.device("cpu") if t.is_meta else t.device)
            with self.mode:
                fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
            if isinstance(t, torch.nn.Parameter):  # never one that requires grad
                fake = torch.nn.Parameter(fake, requires_grad=False)
            for name, value in vars(t).items():
                if not hasattr(fake, name):
                    setattr(fake, name, value)
            return fake

    def copied(self, module: torch.nn.Module, name: str) -> torch.nn.Module:
        for t in (*module.parameters(), *module.buffers()):
            self.fake(t)
        try:
            with self:
                return deep_copied(module, self.memo)
        except CaptureError:
            raise
        except Exception as e:
            raise CaptureError(
                f"{name} cannot be copied ({first_lines(e)}). To capture it for another device reflib needs a copy: "
                f"give what cannot be copied a __deepcopy__, or keep it out of the module"
            ) from e

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COPYING:
            return self.fake(args[0])
        if func == torch.Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_COPYING = (  # what torch.Tensor's and torch.nn.Parameter's __deepcopy__ go through
    torch.Tensor.__deepcopy__,
    torch.Tensor.clone,
    torch.Tensor.detach,
    torch.Tensor.requires_grad_,
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
)


def _storage(t: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return t.untyped_storage()._cdata if t.layout is torch.strided else 0


# -- the graph --------------------------------------------------------------------------------------
_SAME = (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
_ASSERT = aten._assert_tensor_metadata.default


def _tidy(module: torch.fx.GraphModule, signature: Any) -> None:
    """``cuda`` becomes cuda:0 everywhere, and constants that are only ever copied to a GPU lie there."""
    for node in module.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, _indexed)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, _indexed)
    constants = {s.arg.name for s in signature.input_specs if s.kind.name == "CONSTANT_TENSOR"}
    for node in module.graph.nodes:
        if node.op == "placeholder" and node.name in constants and node.meta["val"].device.type == "cpu":
            _move(module.graph, node)
    module.recompile()


def _drop_unused(module: torch.fx.GraphModule, signature: Any, state: dict[str, torch.Tensor]) -> None:
    """A weight that no call reads or writes is no input, and need not be stored. (One read by another name stays.)"""
    nodes = {n.name: n for n in module.graph.nodes if n.op == "placeholder"}
    weights = [s for s in signature.input_specs if s.target in state]
    used = {id(state[s.target]) for s in weights if nodes[s.arg.name].users}
    for spec in weights:
        if id(state[spec.target]) not in used:
            module.graph.erase_node(nodes[spec.arg.name])
            del state[spec.target]
    signature.input_specs = [s for s in signature.input_specs if s not in weights or s.target in state]
    module.recompile()


def _indexed(a: Any) -> Any:
    return CUDA if isinstance(a, torch.device) and a.type == "cuda" and a.index is None else a


def _move(graph: torch.fx.Graph, constant: torch.fx.Node) -> None:
    """``torch.tensor([1.0, 2.0], device="cuda")`` is captured as a constant of the CPU that every call copies over."""
    same, copies, checks = [constant], [], []
    for node in same:
        for user in node.users:
            if user.target in _SAME:
                same.append(user)
            elif user.target is aten._to_copy.default and user.kwargs.get("device") == CUDA:
                copies.append(user)
            elif user.target is _ASSERT:
                checks.append(user)
            else:
                return
    if not copies:
        return
    val = constant.meta["val"]
    with val.fake_mode:
        constant.meta["val"] = moved = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=CUDA)
    if "tensor_meta" in constant.meta:
        del constant.meta["tensor_meta"]
    for node in copies:
        keep = ["memory_format"] + ["dtype"] * (node.meta["val"].dtype != moved.dtype)
        node.args, node.kwargs = (constant,), {k: v for k, v in node.kwargs.items() if k in keep}
        node.target = aten._to_copy.default if "dtype" in keep else aten.clone.default
    for node in (*checks, *reversed(same[1:])):
        graph.erase_node(node)


# -- torch without a GPU ----------------------------------------------------------------------------
_LOCK = threading.RLock()  # what is replaced below is the whole process's


@contextmanager
def _as_if_there(dynamo: bool = False) -> Iterator[None]:
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_guard())
        enter(triton_of_gpu(recorded=not dynamo))
        enter(attention_of_gpu())
        enter(_replaced(FakeTensorMode, "avoid_device_init", True))
        enter(_replaced(proxy_tensor, "CONSTANT_NUMEL_LIMIT", 0))
        enter(_replaced(FakeTensorMode, "_dispatch_impl", _dispatched(FakeTensorMode._dispatch_impl)))
        common = getattr(torch.cuda.amp, "common", None)
        enter(_replaced(common, "amp_definitely_not_available", lambda: False))
        enter(_replaced(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True))
        if torch.cuda.is_available():
            enter(torch.cuda.device(0))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Like ``unittest.mock.patch.object``. Nothing where this torch has no such attribute."""
    if name not in getattr(owner, "__dict__", {}):
        yield
        return
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _dispatched(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """FakeTensorMode does not compute ``_to_copy`` of a constant to a GPU that is not there, but it does ``to``. And it
    takes our fakes, where the model has them in a list, for constants to compute with; so they become its own first."""

    @functools.wraps(dispatch)
    def wrapped(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        def own(t: Any) -> Any:
            t = t if t.fake_mode is self else self.from_tensor(t, static_shapes=True)
            if isinstance(t.constant, FakeTensor):
                t.constant = None
            return t

        args, kwargs = pytree.tree_map_only(FakeTensor, own, (args, kwargs))
        if getattr(func, "overloadpacket", None) is aten.to and getattr(args[0], "constant", None) is not None:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return dispatch(self, func, types, args, kwargs)

    return wrapped


_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry, by type of device


@contextmanager
def _guard() -> Iterator[None]:
    """A device guard for CUDA where the build has none: FakeGuardImpl<CUDA>, which reports and switches among devices
    that do nothing. ``_ensureCUDADeviceGuardSet`` puts it in the place of a guard that counts no devices; it is given
    one, of which it calls nothing else: an object whose virtual functions all return 0."""
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    cuda = 1
    try:
        slots = (ctypes.c_void_p * (cuda + 1)).in_dll(ctypes.CDLL(torch._C.__file__), _REGISTRY)
    except (ValueError, OSError, AttributeError):  # another ABI: the errors are torch's own
        slots = None
    if ensure is None or slots is None or slots[cuda] is not None:
        yield
        return
    zero = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda _: 0)
    table = (ctypes.c_void_p * 64)(*[ctypes.cast(zero, ctypes.c_void_p).value] * 64)
    counts_none = ctypes.c_void_p(ctypes.addressof(table))
    slots[cuda] = ctypes.addressof(counts_none)
    try:
        ensure()
        if slots[cuda] == ctypes.addressof(counts_none):
            slots[cuda] = None
        yield
    finally:
        slots[cuda] = None
