"""The fast path: what ``reflib.compile`` returns for a function or a module skips Dynamo's own wrapper.

On one H200 (torch 2.11) a call of ``relu(x + w)`` takes 13.9 µs instead of 20.0 µs, one of a small MLP without
gradients 37 µs instead of 50 µs. The difference is Python code (``compile_wrapper`` in ``torch/_dynamo/eval_frame.py``:
context managers, thread-local state, a hook on every frame) that runs before Dynamo evaluates its guards, 1 µs, and
runs the bytecode that it compiled. The fast path evaluates the same guards and runs the same bytecode. Whenever the
rest could make a difference, the call goes to what ``torch.compile`` returned: the slow path. The fast path compiles
nothing and adds no guard; it only reads Dynamo's cache entries of the function's code. (``torch.compile(model,
backend="reflib")`` has no fast path.)

Conditions on the thread (``usual`` in ``_with_fast_path``), in which the wrapper does nothing else:

- No Dynamo callback is set: else the caller's frame is being compiled, or runs in parts, and Dynamo must see the call.
- The stance (``torch.compiler.set_stance``) is the default, with no backend and no skipped guards.
- No TracingContext, FX tracing or ``jit.trace``: the wrapper calls the function itself there, or raises.
- No dispatch mode, torch function mode or functorch transform: guards cover only some of these.
- No profiler: its trace must have "TorchDynamo Cache Lookup", "Torch-Compiled Region" and "Pregraph bytecode".
- No process group: ranks may have agreed to compare the results of their guards, which cannot be read.

Conditions on the function: a Python function, or a method of one object, without ``yield`` or ``await``, with the code
and defaults that it had when the entries were read. For a module it is ``forward``, and there are no hooks. Guards read
the frame's locals. ``bind``, a function with the same signature and defaults, returns them as the frame would have them
at its start: arguments (``*args`` as a tuple, ``**kwargs`` as a dict in the call's order), then free variables.

Conditions on a cache entry (``_run``, ``_called``):

- It was compiled by this very backend object, in the common region, and is the first whose guards hold.
- It is alive: Dynamo unlinks the guard manager of entries that are reset or invalidated. The manager is referenced
  weakly, and everything else is dropped with it, so a reset frees graphs while the compiled function lives on.
- Its bytecode has no jump, only loads, builds and stores, and calls only compiled graphs and Dynamo's recorders and
  size helpers. (With a graph break it calls a resume function, whose frame Dynamo must see; side effects call other
  things or store attributes.)

If no entry matches, the call takes the slow path, and the entries are read again. If Dynamo has not compiled it either
(its recompile limit is reached, or it gave up on the function), the fast path is off until the entries change.

NB: known differences. Dynamo's order of entries (most recently used first) is that of the last slow call and the fast
path's own hits since. Under the conditions above the wrappers around graphs (``torch._dynamo.disable``) and the
recorders do nothing, so the bytecode calls the graphs themselves, through globals of its own; the function's globals
take the place of builtins. Tracebacks of Dynamo's own exceptions, raised inside a graph, are not shortened.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import keyword
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .logs import get as logger

_UTILS = "__import_torch_dot__dynamo_dot_utils"
_RECORDERS = ("record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit")
_SIZES = ("call_size", "call_stride", "call_storage_offset")
_HELPERS = {_UTILS: _RECORDERS + _SIZES, "torch": ("_as_tensor_fullprec",)}  # the last makes a tensor of a float
_GRAPH = "__compiled_fn_"


def add_fast_path(compiled: Any, backend: Any) -> Any:
    """``compiled``, made by ``torch.compile`` with ``backend``, with the fast path; unchanged where there is none.

    A function becomes another function with the same attributes; an OptimizedModule remains the same object.
    """
    api = _api()
    if api is None or api.config.compiled_autograd:
        return compiled
    if isinstance(compiled, api.OptimizedModule):
        module, wrapper = compiled._orig_mod, compiled.__dict__.get("forward")
        if _calls_forward(module, wrapper):
            compiled.forward = _with_fast_path(api, wrapper, _Entries(api, module.forward, backend, module))
        return compiled
    fn = getattr(compiled, "_torchdynamo_orig_callable", None)
    if not _is_wrapper(compiled) or not _is_simple(fn):
        return compiled
    return _with_fast_path(api, compiled, _Entries(api, fn, backend))


def _calls_forward(module: Any, wrapper: Any) -> bool:
    """Is ``wrapper`` torch's wrapper around ``module.__call__``, and does that only call hooks and ``forward``?"""
    calls = ("__call__", "_wrapped_call_impl", "_call_impl")
    return (
        _is_wrapper(wrapper)
        and getattr(wrapper, "_torchdynamo_orig_callable", None) == module.__call__
        and all(getattr(type(module), name) is getattr(torch.nn.Module, name) for name in calls)
        and not any(name in module.__dict__ for name in calls)
        and _is_simple(module.forward)
        and getattr(module.forward, "__self__", None) is module
    )


def _is_wrapper(compiled: Any) -> bool:
    return isinstance(compiled, types.FunctionType) and compiled.__dict__.get("_torchdynamo_wrapper_id") == id(compiled)


def _is_simple(fn: Any) -> bool:
    """Can ``bind`` have its signature?"""
    if isinstance(fn, types.MethodType):
        fn = fn.__func__
    if not isinstance(fn, types.FunctionType):
        return False
    code = fn.__code__
    names = [name for kind in _parameters(code) for name in kind] + list(code.co_freevars)
    return not code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR) and all(
        n.isidentifier() and not keyword.iskeyword(n) and n != "__cells__" for n in names
    )


def _parameters(code: types.CodeType) -> tuple[list[str], list[str], list[str], list[str]]:
    """The names of those with a position, of those by keyword only, of ``*args`` and of ``**kwargs`` (one or none)."""
    names = iter(code.co_varnames)  # begins with them, in this order
    counts = (
        code.co_argcount,
        code.co_kwonlyargcount,
        bool(code.co_flags & inspect.CO_VARARGS),
        bool(code.co_flags & inspect.CO_VARKEYWORDS),
    )
    positional, keywords, rest, others = (list(itertools.islice(names, n)) for n in counts)
    return positional, keywords, rest, others


# -- a call -----------------------------------------------------------------------------------------
def _with_fast_path(api: Any, compiled: Callable[..., Any], known: _Entries) -> Callable[..., Any]:
    """A function, not an object: Dynamo, ``functools`` and classes treat it like torch's wrapper. Dynamo never traces
    it: it inlines ``_torchdynamo_inline``, or skips this frame (``skip_code``)."""
    callback, dispatch_modes, function_modes = api.callback, api.dispatch_modes, api.function_modes
    transforms, jit_tracing, profiling = api.transforms, api.jit_tracing, api.profiling
    dynamo, fx, tracing, world = api.dynamo, api.fx, api.tracing, api.world

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        usual = (
            callback() is None
            and (dynamo["_stance"] is known.stance or known.allows(dynamo["_stance"]))
            and not dispatch_modes()
            and not function_modes()
            and not transforms()
            and not jit_tracing()
            and not profiling()
            and not fx["_is_fx_tracing_flag"]
            and world._default_pg is None
            # (in a thread that has not compiled, getattr would raise and catch: 0.4 µs)
            and tracing.__dict__.get("tracing_context") is None
        )
        if not usual:
            return compiled(*args, **kwargs)
        entries, missed = known.entries, False
        if entries and known.unchanged():
            try:
                # (without keywords Python need not copy an empty dict)
                f_locals = known.bind(*args, **kwargs) if kwargs else known.bind(*args)
                for entry in entries:
                    if entry.check(f_locals):
                        break
                else:
                    entry, missed = None, True
            except Exception:  # a wrong call, an empty cell, a guard that raises: the slow path's to report
                return compiled(*args, **kwargs)
            if entry is not None:
                run, manager = entry.run, entry.manager()
                if manager is not None and manager.cache_entry is not None:
                    if run is None:
                        return compiled(*args, **kwargs)
                    if entry is not entries[0]:
                        known.prefer(entry, entries)
                    known.hits += 1
                    return run(*args, **kwargs) if kwargs else run(*args)
        before = known.managers
        result = compiled(*args, **kwargs)
        known.read(before, missed)
        return result

    fast: Any = call
    api.skip_code(fast.__code__)
    fast.__wrapped__ = compiled.__wrapped__  # type: ignore[attr-defined]
    fast._torchdynamo_wrapper_id = id(fast)
    fast._reflib_entries = known
    return fast


class _Entry:
    """One of Dynamo's cache entries. ``check``: its guards. ``run``: its bytecode as a function; None: it takes the
    slow path. ``manager``: its guard manager, whose end empties this."""

    __slots__ = ("__weakref__", "check", "manager", "run")

    def __init__(self, manager: Any, run: Callable[..., Any] | None):
        self.check: Callable[[dict], bool] = manager.root.check
        self.run = run
        itself = weakref.ref(self)

        def ended(_: Any) -> None:
            if (entry := itself()) is not None:
                entry.check, entry.run = lambda f_locals: False, None

        self.manager = weakref.ref(manager, ended)


class _Entries:
    """The known cache entries of one function. Read again after every slow call that no known entry matched."""

    def __init__(self, api: Any, fn: Any, backend: Any, module: torch.nn.Module | None = None):
        self.api, self.backend, self.owner = api, backend, getattr(fn, "__self__", None)
        self.fn: Any = fn.__func__ if isinstance(fn, types.MethodType) else fn
        self.entries: tuple[_Entry, ...] = ()
        self.managers: tuple[weakref.ref, ...] = ()  # of all this backend's entries, when last read
        self.stance: Any = None
        self.off = False
        self.hits = 0  # fast calls; approximate when several threads call
        self.module = module
        self._make_bind()

    def _make_bind(self) -> None:
        self.bind, self.same = self._bound(_bind(self.fn)), _same(self.fn)
        self.unchanged = self.same if self.module is None else functools.partial(_no_hooks, self, self.module)

    def _bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self.owner is None else types.MethodType(function, self.owner)

    def allows(self, stance: Any) -> bool:
        """Is a stance that was not seen before equivalent to the default one?"""
        if stance.stance == "default" and stance.backend is None and not stance.skip_guard_eval_unsafe:
            self.stance = stance
            return True
        return False

    def prefer(self, entry: _Entry, seen: tuple[_Entry, ...]) -> None:
        """Check ``entry`` first from now on, as Dynamo does. (If another thread has read the entries meanwhile, this
        may restore older ones: a call that none of them matches reads them again.)"""
        if self.entries is seen:
            self.entries = (entry, *(e for e in seen if e is not entry))

    def read(self, before: tuple[weakref.ref, ...], missed: bool) -> None:
        """After a slow call. before: the managers known before it; missed: none of their entries matched."""
        try:
            self._read(before, missed)
        except Exception as e:  # this torch differs from the ones that were tested
            self.entries, self.off = (), True
            logger("capture").debug("%s: no fast path: %s: %s", self.fn.__qualname__, type(e).__name__, e)

    def _read(self, before: tuple[weakref.ref, ...], missed: bool) -> None:
        api, code = self.api, self.fn.__code__
        ours = [e for e in api.entries(code) if _is_ours(e, self.backend)]
        managers = [e.guard_manager for e in ours]
        missed = missed and self.same() and all(any(old() is m for old in before) for m in managers)
        known = len(managers) == len(self.managers) and all(old() is m for old, m in zip(self.managers, managers))
        if known and not missed and self.same():
            return
        self.off = missed or not _is_simple(self.fn) or bool(api.precompiled(code))
        if not self.same() and not self.off:
            self._make_bind()
        self.managers = tuple(weakref.ref(m) for m in managers)
        found = () if self.off else tuple(_Entry(m, self._run(e)) for e, m in zip(ours, managers))
        self.entries = found if any(e.run is not None for e in found) else ()

    def _run(self, entry: Any) -> Callable[..., Any] | None:
        code, fn = entry.code, self.fn
        called = _called(code) if code.co_freevars == fn.__code__.co_freevars else None
        if not called or ("torch" in called and fn.__globals__.get("torch") is not torch):
            return None
        graphs = [name for name in called if name.startswith(_GRAPH)]
        scope: dict[str, Any] = {name: _enabled(self.api, fn.__globals__[name]) for name in graphs}
        scope[_UTILS] = self.api.utils
        scope["__builtins__"] = fn.__globals__  # where the names are looked up that are not in scope
        function = types.FunctionType(code, scope, fn.__name__, fn.__defaults__, fn.__closure__)
        function.__kwdefaults__ = fn.__kwdefaults__
        return self._bound(function)


def _same(fn: types.FunctionType) -> Callable[[], bool]:
    """Are its code and defaults still the same?"""
    code, defaults, kwdefaults = fn.__code__, fn.__defaults__, fn.__kwdefaults__

    def same() -> bool:
        return fn.__code__ is code and fn.__defaults__ is defaults and fn.__kwdefaults__ is kwdefaults

    return same


def _no_hooks(known: _Entries, module: Any) -> bool:
    """Would ``module.__call__`` do nothing but call ``forward``, and is that the known function?"""
    nn = torch.nn.modules.module
    forward = module.forward
    return not (
        module._backward_hooks
        or module._backward_pre_hooks
        or module._forward_hooks
        or module._forward_pre_hooks
        or nn._global_backward_pre_hooks
        or nn._global_backward_hooks
        or nn._global_forward_hooks
        or nn._global_forward_pre_hooks
        or module._compiled_call_impl is not None
        or getattr(forward, "__func__", None) is not known.fn
        or forward.__self__ is not module
    ) and known.same()


def _is_ours(entry: Any, backend: Any) -> bool:
    compiler = getattr(entry.backend, "compiler_fn", entry.backend)
    return compiler is backend and getattr(entry, "isolate_recompiles_id", -1) == -1


def _enabled(api: Any, graph: Any) -> Any:
    """What ``torch._dynamo.disable`` wrapped: while no callback is set, the wrapper only calls it."""
    return api.innermost_fn(graph) if getattr(graph, "_torchdynamo_disable", False) else graph


def _bind(fn: types.FunctionType) -> Callable[..., dict]:
    """A function with the signature of ``fn`` that returns the locals of its frame as it starts:

    >>> def scaled(x, y=2, *ws, z, **more): ...
    >>> _bind(scaled)(1, 2, 3, z=4, k=5)
    {'x': 1, 'y': 2, 'z': 4, 'ws': (3,), 'more': {'k': 5}}
    """
    code = fn.__code__
    positional, keywords, rest, others = _parameters(code)
    first = positional[: code.co_posonlyargcount]
    signature = [*first, *["/"][: len(first)], *positional[len(first) :]]
    signature += ["*" + n for n in rest or [""][: len(keywords)]] + keywords + ["**" + n for n in others]
    items = [f"{n!r}: {n}" for n in positional + keywords + rest + others]
    items += [f"{n!r}: __cells__[{i}].cell_contents" for i, n in enumerate(code.co_freevars)]
    scope: dict[str, Any] = {"__cells__": fn.__closure__}
    exec(f"def bind({', '.join(signature)}):\n    return {{{', '.join(items)}}}", scope)
    bind = scope["bind"]
    bind.__defaults__, bind.__kwdefaults__ = fn.__defaults__, fn.__kwdefaults__
    return bind


# -- the bytecode -----------------------------------------------------------------------------------
_PUSH = {"LOAD_CONST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"}
_POP = {"POP_TOP", "STORE_DEREF", "LIST_EXTEND", "RETURN_VALUE"}
_TO_ONE = {"BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "BINARY_SUBSCR"}  # several values
_NOTHING = {"RESUME", "NOP", "CACHE", "PRECALL", "COPY_FREE_VARS", "MAKE_CELL", "DELETE_FAST", "RETURN_CONST"}
_NULL = "null"


def _called(code: types.CodeType) -> set[str] | None:
    """The globals that ``code`` calls, compiled graphs and modules of ``_HELPERS``; None if it may call anything else.
    The stack is simulated with a name per value: of the global that it is, or that it is a helper of, else ''."""
    stack: list[str] = []
    values: dict[str, str] = {}  # of local variables
    called: set[str] = set()
    for i in dis.get_instructions(code):
        op, arg, name = i.opname, i.arg or 0, i.argval
        if op in _PUSH:
            stack.append(values.get(name, "") if op.startswith("LOAD_FAST") else "")
        elif op == "PUSH_NULL":
            stack.append(_NULL)
        elif op == "LOAD_GLOBAL":
            stack += [_NULL] * (arg & 1) + [name if name in _HELPERS or name.startswith(_GRAPH) else ""]
        elif op == "LOAD_ATTR":
            module = stack.pop()
            stack.append(module + "." if name in _HELPERS.get(module, ()) else "")
            stack += [_NULL] * (arg & 1 if sys.version_info >= (3, 12) else 0)  # there, as for a method
        elif op == "STORE_FAST":
            values[name] = stack.pop()
        elif op == "COPY":
            stack.append(stack[-arg])
        elif op == "SWAP":
            stack[-1], stack[-arg] = stack[-arg], stack[-1]
        elif op in _POP:
            stack.pop()
        elif op in _TO_ONE:
            stack[len(stack) - 1 + dis.stack_effect(i.opcode, i.arg) :] = [""]
        elif op == "UNPACK_SEQUENCE":
            stack[-1:] = [""] * arg
        elif op == "CALL":
            callee = [n for n in stack[-arg - 2 : len(stack) - arg] if n != _NULL]
            if len(callee) != 1 or not callee[0].startswith(_GRAPH) and not callee[0].endswith("."):
                return None
            called.add(callee[0].rstrip("."))
            stack[-arg - 2 :] = [""]
        elif op not in _NOTHING:
            return None
    return called


# -- torch's private parts --------------------------------------------------------------------------
@functools.cache
def _api() -> Any:
    """All that the fast path needs of them, looked up once; None if this torch lacks one."""
    try:
        return _found()
    except (ImportError, AttributeError) as e:
        logger("capture").debug("no fast path with torch %s: %s", torch.__version__, e)
        return None


def _found() -> Any:
    import torch._dynamo
    from torch._C._dynamo import eval_frame as c
    from torch._dynamo import eval_frame, utils

    helpers = {name: eval_frame.innermost_fn(getattr(utils, name)) for name in _SIZES}
    # NB: in 3.11's bytecode LOAD_ATTR, so builtins serve; both recorders do nothing while no profiler is on.
    helpers |= dict.fromkeys(_RECORDERS, bool)
    world = types.SimpleNamespace(_default_pg=None)
    if torch.distributed.is_available():
        world = torch.distributed.distributed_c10d._world
    api = types.SimpleNamespace(
        config=torch._dynamo.config,
        OptimizedModule=eval_frame.OptimizedModule,
        innermost_fn=eval_frame.innermost_fn,
        skip_code=eval_frame.skip_code,
        entries=c._debug_get_cache_entry_list,
        precompiled=c._debug_get_precompile_entries,
        utils=types.SimpleNamespace(**helpers),
        # the thread's state
        callback=c.get_eval_frame_callback,
        dispatch_modes=torch._C._len_torch_dispatch_stack,
        function_modes=torch._C._len_torch_function_stack,
        transforms=torch._C._functorch.get_dynamic_layer_stack_depth,
        jit_tracing=torch._C._is_tracing,
        profiling=torch._C._autograd._profiler_enabled,
        dynamo=eval_frame.__dict__,
        fx=torch.fx._symbolic_trace.__dict__,
        tracing=torch._guards._TLS,
        world=world,
    )
    _ = api.dynamo["_stance"].skip_guard_eval_unsafe, api.dynamo["_stance"].backend, api.fx["_is_fx_tracing_flag"]
    _ = world._default_pg, torch.nn.Module._compiled_call_impl
    return api
