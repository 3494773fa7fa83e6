"""Ops that have several implementations: the registry, and ``reflib.register_custom_op_autotuning``.

Names and arguments are TorchInductor's (its kernel/custom_op.py), so that code moves over by changing the import. What
differs: two defaults that DESIGN names, several outputs, and that mistakes are errors when they are made. This module
only stores and checks; :mod:`~reflib.lower.candidates` makes the Choice when the op is lowered.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from reflib import logs
from reflib.errors import OptionError, RegistrationError, did_you_mean
from reflib.options import Options

from .flex_makers import MAKERS

# Options that one implementation can have for itself: how its region is fused and how its kernels are launched. All
# others are the whole program's: a patch would hold where candidates are measured, and nowhere else.
PATCHES = ("fuse", "max_fused_ops", "max_fused_buffers", "split_reductions", "persistent_limit")
DEFAULT_UPPER = 65536  # sizes up to which the last, open range is tuned

Generator = Callable[[dict[str, Any]], Sequence[Any]]
Maker = Callable[[torch.Tensor], torch.Tensor]


class CustomOpConfig:
    """One implementation of an op.

    decomposition: a function of the op's arguments, in their order; None: the op itself, which ``params`` tune.
    config_patches: options to compile it with (:class:`reflib.Options`), by name: those that concern its kernels alone
        (``PATCHES``), so that what is measured is what runs.
    params: keyword arguments for it.

    **What wins** when a parameter here and the call name one argument: the parameter here, as in TorchInductor. It is
    what is being tuned, and the call's own value is what the eager op gets; an implementation whose result is not the
    eager op's for that call is found to be wrong when it is measured, and never wins. (The reverse could not be
    distinguished from a default: torch removes arguments that equal their default from captured calls.) Tensors are
    always the call's.
    """

    def __init__(
        self,
        decomposition: Callable[..., Any] | None = None,
        config_patches: Mapping[str, Any] | None = None,
        **params: Any,
    ):
        if decomposition is not None and not callable(decomposition):
            raise RegistrationError(
                "CustomOpConfig: the decomposition must be a function (or None: the op itself), not "
                f"{decomposition!r:.200}"
            )
        if config_patches is not None and not isinstance(config_patches, Mapping):
            what = "CustomOpConfig: config_patches must be a dict of options"
            raise RegistrationError(f"{what}, not {config_patches!r:.200}")
        self.decomposition = decomposition
        self.config_patches = dict(config_patches or {})
        self.params = params

    @property
    def name(self) -> str:
        """``split(k=4)``."""
        params = ", ".join(f"{k}={v}" for k, v in self.params.items())
        name = "eager" if self.decomposition is None else _name_of(self.decomposition)
        return f"{name}({params})" if params else name

    def key(self) -> tuple[Any, ...]:
        """Equal for equal configs."""
        return self.decomposition, repr(sorted(self.params.items())), repr(sorted(self.config_patches.items()))

    def __repr__(self) -> str:
        return f"CustomOpConfig({self.name})"


@dataclass(frozen=True)
class DispatchOn:
    """``dispatch_on`` and ``split_points``: ranges of ``argument``'s size ``dim`` that are tuned separately."""

    argument: str
    dim: int
    splits: tuple[int, ...]
    upper: int


@dataclass(frozen=True)
class Registration:
    """What was registered for ``op``. ``configs`` or ``generator`` is given. ``schema``: the op's, then."""

    op: str
    schema: str
    configs: tuple[CustomOpConfig, ...] = ()
    generator: Generator | None = None
    name: str = ""
    makers: tuple[tuple[str, Maker], ...] = ()
    dispatch: tuple[DispatchOn, ...] = ()
    min_speedup: float = 1.0
    graph_timing: bool = True


_REGISTERED: dict[str, Registration] = {}  # by str(OpOverload): an op that a re-run cell defines anew has that name
_WARNED: set[str] = set()
_SPEEDUP = "must be a number of at least 1 (1.0: any winner beyond the noise; 1.1: 10 % faster than the eager op)"


def registration(target: Any) -> Registration | None:
    """What is registered for an op."""
    return _REGISTERED.get(str(target)) if isinstance(target, torch._ops.OpOverload) else None


def registered() -> Collection[str]:
    """The names of all ops for which something is registered."""
    return _REGISTERED.keys()


def maker_key(op: str, argument: str) -> str:
    return f"{op}/{argument}"


def input_makers() -> dict[str, Maker]:
    """Every registered input generator by its key in ``Choice.inputs_from``: a tensor -> one like it."""
    return MAKERS | {maker_key(r.op, arg): fn for r in _REGISTERED.values() for arg, fn in r.makers}


def warn_not_tried(r: Registration, why: str) -> None:
    """Once per op: its implementations are not tried."""
    if r.op not in _WARNED:
        _WARNED.add(r.op)
        logs.get("autotune").warning("%s: its registered implementations are not tried, because %s", r.name, why)


def register_custom_op_autotuning(
    custom_op: Any,
    configs: Sequence[CustomOpConfig | Callable[..., Any]] | None = None,
    config_generator: Generator | None = None,
    name: str | None = None,
    input_gen_fns: Mapping[str | int, Maker] | None = None,
    dispatch_on: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    split_points: Sequence[int] | Sequence[Sequence[int]] | None = None,
    min_speedup_threshold: float = 1.0,
    benchmark_with_cudagraphs: bool = True,
) -> None:
    """Give an op other implementations; what is compiled from now on with ``autotune="blocking"`` measures them, each
    fused with its neighbours, and takes the best. The eager op is always among the candidates.

    custom_op: what ``torch.library.custom_op`` returns, or an OpOverload (``torch.ops.aten.mm.default``).
    configs: a list of :class:`CustomOpConfig` and plain functions.
    config_generator: instead of ``configs``, a function that makes the list for given inputs. It is called when the op
        is lowered, with a dict of the call's tensors by argument name: fake tensors whose sizes are plain ints, those
        the graph was traced with. (With ``dispatch_on``, once more for the top size of every range; all that it returns
        is tried in every range.)
    name: shown in logs and tables.
    input_gen_fns: by argument name (or position): a function that makes the tensor to measure with. It is shown one of
        the size, dtype, device and strides wanted (a real one, of random numbers or zeros; TorchInductor shows a fake
        one), and returns another of that size and dtype.
    dispatch_on, split_points: ``{"tensor_name": "x", "dim": 0}`` and ``[512, 2048]``: decide for x.size(0) <= 512,
        <= 2048 and above separately; a branch at run time. ``"range_upper_bound"`` (65536): the last range's top. Two
        such in lists, with a list of split points for each, decide for pairs of ranges. An implementation is traced at
        the size that the graph was traced with, and again at the top of a range that no trace of it so far serves.
    min_speedup_threshold: how many times as fast as the eager op a winner must be.
    benchmark_with_cudagraphs: time by CUDA-graph replay (False: with launches in it).

    A function takes the op's arguments in their order; numbers and the like go by name. Leave out an argument that has
    a default only if no call gives it: else that candidate is not tried. For what wins when a config's parameter and a
    call's argument meet, see :class:`CustomOpConfig`.
    Registering again for an op replaces what was there. Raises RegistrationError.
    """
    op = _overload(custom_op)
    where = f"register_custom_op_autotuning({op})"
    _check_op(op, where)
    _require((configs is None) != (config_generator is None), where, "give either configs or config_generator")
    given = config_generator is None or callable(config_generator)
    _require(given, where, f"config_generator must be a function, not {config_generator!r:.200}")
    enough = _is_number(min_speedup_threshold) and 1 <= min_speedup_threshold < math.inf
    _require(enough, where, f"min_speedup_threshold={min_speedup_threshold!r:.200}: {_SPEEDUP}")
    _require(isinstance(benchmark_with_cudagraphs, bool), where, "benchmark_with_cudagraphs must be True or False")
    _require(name is None or isinstance(name, str), where, f"name must be a string, not {name!r:.200}")
    new = Registration(
        str(op),
        str(op._schema),
        configs=checked_configs(op, configs, where) if configs is not None else (),
        generator=config_generator,
        name=name or str(op),
        makers=_makers(op, input_gen_fns, where),
        dispatch=_dispatch(op, dispatch_on, split_points, where),
        min_speedup=float(min_speedup_threshold),
        graph_timing=benchmark_with_cudagraphs,
    )
    if new.op in _REGISTERED:
        logs.get("autotune").warning("%s: registered again; this replaces what was registered before", new.op)
    _REGISTERED[new.op] = new
    _WARNED.discard(new.op)


def _require(ok: bool, where: str, message: str) -> None:
    if not ok:
        raise RegistrationError(f"{where}: {message}")


# -- the op -----------------------------------------------------------------------------------------
def _overload(custom_op: Any) -> Any:
    from torch._library.custom_ops import CustomOpDef

    if isinstance(custom_op, CustomOpDef):
        return custom_op._opoverload
    if isinstance(custom_op, torch._ops.OpOverload):
        return custom_op
    if isinstance(custom_op, torch._ops.OpOverloadPacket):
        overloads = custom_op.overloads()
        if len(overloads) == 1:
            return getattr(custom_op, overloads[0])
        raise RegistrationError(
            f"register_custom_op_autotuning: {custom_op} has the overloads {', '.join(overloads)}; give one of them, "
            f"such as torch.ops.{custom_op}.{overloads[0]}"
        )
    raise RegistrationError(
        f"register_custom_op_autotuning: {custom_op!r:.200} is no op; give what torch.library.custom_op returned, or "
        "an OpOverload such as torch.ops.aten.mm.default"
    )


def _check_op(op: Any, where: str) -> None:
    schema = op._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    kinds = [str(r.type) for r in schema.returns]
    _require(
        not written,
        where,
        f"the op writes to its argument {', '.join(written)}; an op that mutates cannot be measured or replaced. "
        "Return a new tensor instead (mutates_args=())",
    )
    views = any(r.alias_info is not None for r in schema.returns)
    _require(not views, where, "the op returns a view of its argument, which is not computed at all")
    _require(
        bool(kinds) and set(kinds) <= {"Tensor", "List[Tensor]"},
        where,
        f"the op returns {', '.join(kinds) or 'nothing'}; only ops that return tensors have candidates",
    )
    random = torch.Tag.nondeterministic_seeded in op.tags
    _require(not random, where, "the op is random, so that its candidates cannot be compared")
    _require(
        not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"),
        where,
        "torch takes this op apart before reflib sees it; register for the ops that it is made of "
        "(torch.ops.aten.mm.default and torch.ops.aten.addmm.default for matmul and linear)",
    )


def is_tensor(argument: Any) -> bool:
    """A Tensor, an optional one or a list of them."""
    return str(argument.type) in ("Tensor", "Optional[Tensor]") or is_tensor_list(argument)


def is_tensor_list(argument: Any) -> bool:
    return str(argument.type) in (
        "List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]", "Optional[List[Optional[Tensor]]]",
    )  # fmt: skip


# -- configs ----------------------------------------------------------------------------------------
def checked_configs(op: Any, configs: Any, where: str) -> tuple[CustomOpConfig, ...]:
    """A list of configs and functions as configs that fit the op; of equal ones, one."""
    listed = isinstance(configs, (list, tuple))
    _require(listed, where, f"the configs must be a list of CustomOpConfig or functions, not {configs!r:.80}")
    _require(bool(configs), where, "the list of configs is empty; give at least one implementation")
    out = []
    for c in configs:
        fits = isinstance(c, CustomOpConfig) or callable(c)
        _require(fits, where, f"a config must be a CustomOpConfig or a function, not {c!r:.80}")
        out.append(c if isinstance(c, CustomOpConfig) else CustomOpConfig(c))
        _check_patches(out[-1], where)
        _check_params(op, out[-1], where)
        _check_signature(op, out[-1], where)
    return tuple({c.key(): c for c in out}.values())


def _check_patches(c: CustomOpConfig, where: str) -> None:
    try:
        Options.make(c.config_patches)
    except OptionError as e:
        raise RegistrationError(f"{where}: {c.name:.200}: config_patches: {e}") from None
    for name in c.config_patches:
        _require(
            name in PATCHES,
            where,
            f"{c.name:.200}: config_patches cannot change {name}, which is the program's (give it when "
            f"you compile); one implementation can have its own {', '.join(PATCHES)}",
        )


def _check_params(op: Any, c: CustomOpConfig, where: str) -> None:
    arguments = {a.name: a for a in op._schema.arguments}
    for p in c.params:
        tensor = p in arguments and is_tensor(arguments[p])
        _require(not tensor, where, f"{c.name:.200}: the parameter {p} is a tensor argument of the op")
        _require(
            c.decomposition is not None or p in arguments,
            where,
            f"{c.name:.200}: the op has no argument {p!r:.200} to tune{_near(p, list(arguments))}; give a "
            "decomposition that has, or name one of the op's",
        )


def _check_signature(op: Any, c: CustomOpConfig, where: str) -> None:
    """Can ``c.decomposition`` be called as by :func:`call_of`? It may lack numbers that mostly are defaults."""
    if c.decomposition is None:
        return
    signature = _signature(c.decomposition)
    arguments = op._schema.arguments
    given = [a.name for a in arguments if is_tensor(a) or not a.has_default_value() or a.name in signature.parameters]
    why = call_of(op, c, dict.fromkeys(given))
    takes = f"{_name_of(c.decomposition)}({', '.join(map(str, signature.parameters.values()))})"
    wants = ", ".join(f"{a.name}={a.default_value!r}" if a.has_default_value() else a.name for a in arguments)
    _require(
        not isinstance(why, str),
        where,
        f"{takes}: {why}. It must take the op's arguments, ({wants}), and its own, which CustomOpConfig(...) gives",
    )


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have none: tracing finds out
        return inspect.signature(lambda *args, **kwargs: None)


def call_of(op: Any, c: CustomOpConfig, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | str:
    """(args, kwargs) to call a config's function with, for the call's arguments ``given`` by name; or why that is
    impossible. Tensors go by position, whatever the function calls them, as does what it has by the op's name at the
    op's position; all else goes by name."""
    if c.decomposition is None:
        return (), {**given, **c.params}
    signature, arguments = _signature(c.decomposition), op._schema.arguments
    places: list[str] = []
    for p in signature.parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            places.append(p.name)
        elif p.kind == p.VAR_POSITIONAL:
            places += ["*"] * len(arguments)
    others = {a.name for a in arguments}
    args: list[Any] = []
    kwargs = dict(c.params)
    for i, a in enumerate(arguments):
        if a.name in c.params or a.name not in given:
            continue
        here = places[i] if i < len(places) and not a.kwarg_only else ""
        if is_tensor(a) and here in others - {a.name}:
            return f"it takes {here} where the op takes {a.name}"
        by_position = bool(here) and (is_tensor(a) or here == a.name)
        if by_position and len(args) == i:
            args.append(given[a.name])
        else:
            kwargs[here if by_position else a.name] = given[a.name]
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        return str(e)
    return tuple(args), kwargs


# -- the rest ---------------------------------------------------------------------------------------
def _makers(op: Any, fns: Any, where: str) -> tuple[tuple[str, Maker], ...]:
    if fns is None:
        return ()
    mapping = isinstance(fns, Mapping)
    _require(mapping, where, f"input_gen_fns must be a dict, argument name -> function, not {fns!r:.80}")
    arguments = op._schema.arguments
    out: dict[str, Maker] = {}
    for key, fn in fns.items():
        if _is_int(key) and 0 <= key < len(arguments):
            key = arguments[key].name
        _check_tensor(op, key, f"{where}: input_gen_fns")
        _require(callable(fn), where, f"input_gen_fns[{key!r}] must be a function, not {fn!r:.80}")
        out[key] = fn
    return tuple(out.items())


def _check_tensor(op: Any, name: Any, where: str) -> None:
    tensors = [a.name for a in op._schema.arguments if is_tensor(a) and not is_tensor_list(a)]
    _require(
        name in tensors,
        where,
        f"{name!r} is no tensor argument of the op{_near(name, tensors)}; these are: {', '.join(tensors) or 'none'}",
    )


def _dispatch(op: Any, on: Any, splits: Any, where: str) -> tuple[DispatchOn, ...]:
    if on is None and splits is None:
        return ()
    if not isinstance(on, (list, tuple)) or not all(isinstance(o, Mapping) for o in on):
        return (_dispatch_on(op, on, splits, where),)
    pairs = isinstance(splits, (list, tuple)) and len(on) == len(splits) in (1, 2)
    _require(pairs, where, "dispatch_on lists one or two sizes, and split_points a list for each")
    found = tuple(_dispatch_on(op, o, s, where) for o, s in zip(on, splits))
    _require(len({(d.argument, d.dim) for d in found}) == len(found), where, "dispatch_on: the two sizes are the same")
    return found


def _dispatch_on(op: Any, on: Any, splits: Any, where: str) -> DispatchOn:
    need = 'split_points need dispatch_on={"tensor_name": ..., "dim": ...}, to say what is split'
    _require(on is not None, where, need)
    _require(splits is not None, where, "dispatch_on needs split_points=[...], to say where the ranges end")
    known = ["tensor_name", "dim", "range_upper_bound"]
    complete = isinstance(on, Mapping) and set(known[:2]) <= set(on)
    _require(complete, where, f'dispatch_on must be {{"tensor_name": "x", "dim": 0}}, not {on!r:.80}')
    for key in on:
        _require(key in known, where, f"dispatch_on: unknown key {key!r}{_near(key, known)}")
    tensor, dim, upper = on["tensor_name"], on["dim"], on.get("range_upper_bound", DEFAULT_UPPER)
    _check_tensor(op, tensor, f"{where}: dispatch_on")
    dimension = _is_int(dim) and -64 <= dim < 64
    _require(dimension, where, f"dispatch_on: dim={dim!r:.200} is no dimension; give an int, such as 0 or -1")
    positive = isinstance(splits, (list, tuple)) and bool(splits) and all(_is_int(s) and s > 0 for s in splits)
    _require(positive, where, f"split_points={splits!r:.200}: must be a list of positive ints")
    ascending = all(a < b for a, b in pairwise(splits))
    _require(ascending, where, f"split_points={splits!r:.200}: must ascend, without repetition")
    last = splits[-1]
    beyond = f"dispatch_on: range_upper_bound={upper!r:.200} must be an int above the last split point, {last}"
    _require(_is_int(upper) and upper > last, where, beyond)
    return DispatchOn(tensor, dim, tuple(splits), upper)


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _near(name: Any, names: list[str]) -> str:
    hint = did_you_mean(name, names, 0.5)
    return hint and f" ({hint})"


def _name_of(fn: Any) -> str:
    return str(getattr(fn, "__name__", None) or type(fn).__name__)
