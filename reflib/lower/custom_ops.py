"""Ops that have several implementations: the registry, and ``reflib.register_custom_op_autotuning``.

Names and arguments are TorchInductor's (its kernel/custom_op.py), so that code moves over by changing the import. What
differs: two defaults that DESIGN names, several outputs, and that mistakes are errors when they are made. This module
only stores and checks; :mod:`~reflib.lower.candidates` makes the Choice when the op is lowered.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from reflib import logs
from reflib.errors import OptionError, RegistrationError
from reflib.options import Options

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
    eager op's for that call is found to be wrong when it is measured, and never wins. (The reverse could not be told
    apart from a default: torch removes arguments that equal their default from captured calls.) Tensors are always the
    call's.
    """

    def __init__(
        self,
        decomposition: Callable[..., Any] | None = None,
        config_patches: Mapping[str, Any] | None = None,
        **params: Any,
    ):
        if decomposition is not None and not callable(decomposition):
            raise RegistrationError(
                f"CustomOpConfig: the decomposition must be a function (or None: the op itself), not {decomposition!r}"
            )
        if config_patches is not None and not isinstance(config_patches, Mapping):
            raise RegistrationError(f"CustomOpConfig: config_patches must be a dict of options, not {config_patches!r}")
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
    dispatch: DispatchOn | None = None
    min_speedup: float = 1.0
    graph_timing: bool = True


_REGISTERED: dict[str, Registration] = {}  # by str(OpOverload): an op that a re-run cell defines anew has that name
_WARNED: set[str] = set()


def registration(target: Any) -> Registration | None:
    """What is registered for an op."""
    return _REGISTERED.get(str(target)) if isinstance(target, torch._ops.OpOverload) else None


def is_registered(target: Any) -> bool:
    return bool(_REGISTERED) and registration(target) is not None


def registered_ops() -> frozenset[str]:
    """Their names."""
    return frozenset(_REGISTERED)


def maker_key(op: str, argument: str) -> str:
    return f"{op}/{argument}"


def input_makers() -> dict[str, Maker]:
    """Every registered input generator by its key in ``Choice.inputs_from``: a tensor -> one like it."""
    return {maker_key(r.op, arg): fn for r in _REGISTERED.values() for arg, fn in r.makers}


def warn_not_tried(r: Registration) -> None:
    """Once an op: its implementations are registered in vain."""
    if r.op not in _WARNED:
        _WARNED.add(r.op)
        logs.get("choose").warning(
            '%s: its registered implementations are not tried, because autotune is "off"; compile with '
            'options={"autotune": "blocking"} or mode="max-autotune"',
            r.name,
        )


def register_custom_op_autotuning(
    custom_op: Any,
    configs: Sequence[CustomOpConfig | Callable[..., Any]] | None = None,
    config_generator: Generator | None = None,
    name: str | None = None,
    input_gen_fns: Mapping[str | int, Maker] | None = None,
    dispatch_on: Mapping[str, Any] | None = None,
    split_points: Sequence[int] | None = None,
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
    name: for people, in logs and tables.
    input_gen_fns: by argument name (or position): a function that makes the tensor to measure with. It is shown one of
        the size, dtype, device and strides wanted (a real one, of random numbers or zeros; TorchInductor shows a fake
        one), and returns another of that size and dtype.
    dispatch_on, split_points: ``{"tensor_name": "x", "dim": 0}`` and ``[512, 2048]``: decide for x.size(0) <= 512,
        <= 2048 and above separately; a branch at run time. ``"range_upper_bound"`` (65536): the last range's top.
        An implementation is traced at the size that the graph was traced with, and again at the top of a range that no
        trace of it so far serves.
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
    if (configs is None) == (config_generator is None):
        raise RegistrationError(f"{where}: give either configs or config_generator")
    if config_generator is not None and not callable(config_generator):
        raise RegistrationError(f"{where}: config_generator must be a function, not {config_generator!r}")
    if not _is_number(min_speedup_threshold) or not 1 <= min_speedup_threshold < math.inf:
        raise RegistrationError(
            f"{where}: min_speedup_threshold={min_speedup_threshold!r}: must be a number of at least 1 "
            "(1.0: any winner beyond the noise; 1.1: 10 % faster than the eager op)"
        )
    if not isinstance(benchmark_with_cudagraphs, bool):
        raise RegistrationError(f"{where}: benchmark_with_cudagraphs must be True or False")
    if name is not None and not isinstance(name, str):
        raise RegistrationError(f"{where}: name must be a string, not {name!r}")
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
        logs.get("choose").warning("%s: registered again; this replaces what was registered before", new.op)
    _REGISTERED[new.op] = new
    _WARNED.discard(new.op)


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
        f"register_custom_op_autotuning: {custom_op!r} is no op; give what torch.library.custom_op returned, or an "
        "OpOverload such as torch.ops.aten.mm.default"
    )


def _check_op(op: Any, where: str) -> None:
    schema = op._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if written:
        raise RegistrationError(
            f"{where}: the op writes to its argument {written[0]}; an op that mutates cannot be measured or replaced. "
            "Return a new tensor instead (mutates_args=())"
        )
    if any(r.alias_info is not None for r in schema.returns):
        raise RegistrationError(f"{where}: the op returns a view of its argument, which is not computed at all")
    if not schema.returns or not all(str(r.type) in ("Tensor", "List[Tensor]") for r in schema.returns):
        kinds = ", ".join(str(r.type) for r in schema.returns) or "nothing"
        raise RegistrationError(f"{where}: the op returns {kinds}; only ops that return tensors have candidates")
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise RegistrationError(f"{where}: the op is random, so that its candidates cannot be compared")
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        raise RegistrationError(
            f"{where}: torch takes this op apart before reflib sees it; register for the ops that it is made of "
            "(torch.ops.aten.mm.default and torch.ops.aten.addmm.default for matmul and linear)"
        )


def is_tensor(argument: Any) -> bool:
    """A Tensor, an optional one or a list of them."""
    return str(argument.type) in ("Tensor", "Optional[Tensor]") or is_tensor_list(argument)


def is_tensor_list(argument: Any) -> bool:
    return str(argument.type) in (
        "List[Tensor]",
        "List[Optional[Tensor]]",
        "Optional[List[Tensor]]",
        "Optional[List[Optional[Tensor]]]",
    )


# -- configs ----------------------------------------------------------------------------------------
def checked_configs(op: Any, configs: Any, where: str) -> tuple[CustomOpConfig, ...]:
    """A list of configs and functions as configs that fit the op."""
    if not isinstance(configs, (list, tuple)):
        raise RegistrationError(
            f"{where}: the configs must be a list of CustomOpConfig or functions, not {configs!r:.80}"
        )
    if not configs:
        raise RegistrationError(f"{where}: the list of configs is empty; give at least one implementation")
    out = []
    for c in configs:
        if not isinstance(c, CustomOpConfig):
            if not callable(c):
                raise RegistrationError(f"{where}: a config must be a CustomOpConfig or a function, not {c!r:.80}")
            c = CustomOpConfig(c)
        _check_patches(c, where)
        _check_params(op, c, where)
        if c.decomposition is not None:
            _check_signature(op, c, where)
        out.append(c)
    return tuple(out)


def _check_patches(c: CustomOpConfig, where: str) -> None:
    try:
        Options.make(c.config_patches)
    except OptionError as e:
        raise RegistrationError(f"{where}: {c.name}: config_patches: {e}") from None
    for name in c.config_patches:
        if name not in PATCHES:
            raise RegistrationError(
                f"{where}: {c.name}: config_patches cannot change {name}, which is the program's (give it when "
                f"you compile); one implementation can have its own {', '.join(PATCHES)}"
            )


def _check_params(op: Any, c: CustomOpConfig, where: str) -> None:
    arguments = {a.name: a for a in op._schema.arguments}
    for p in c.params:
        if p in arguments and is_tensor(arguments[p]):
            raise RegistrationError(f"{where}: {c.name}: the parameter {p} is a tensor argument of the op")
        if c.decomposition is None and p not in arguments:
            raise RegistrationError(
                f"{where}: {c.name}: the op has no argument {p!r} to tune{_near(p, list(arguments))}; give a "
                "decomposition that has, or name one of the op's"
            )


def _check_signature(op: Any, c: CustomOpConfig, where: str) -> None:
    """Can ``c.decomposition`` be called as :func:`call_of` calls it?"""
    try:
        parameters = list(inspect.signature(c.decomposition).parameters.values())  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return  # a builtin: tracing will tell

    def wrong(why: str) -> RegistrationError:
        takes = f"{_name_of(c.decomposition)}({', '.join(map(str, parameters))})"
        wants = ", ".join(_argument(a) for a in op._schema.arguments)
        return RegistrationError(f"{where}: {takes} {why}. It must take the op's arguments: ({wants})")

    names = [p.name for p in parameters]
    where_to = _binding(op, parameters)
    for a, to in zip(op._schema.arguments, where_to):
        if to is None and not _omissible(a):
            raise wrong(f"does not take the op's argument {a.name}" + (", at that place" if a.name in names else ""))
    for name in c.params:
        if name not in names and not any(p.kind == p.VAR_KEYWORD for p in parameters):
            raise wrong(f"does not take the parameter {name}{_near(name, names)}")
    for p in parameters:
        required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if required and p.name not in where_to and p.name not in c.params:
            raise wrong(f"needs {p.name}, which is no argument of the op; give it in CustomOpConfig({p.name}=...)")


def _binding(op: Any, parameters: list[inspect.Parameter]) -> list[str | None]:
    """For each argument of the op, the name of the parameter that takes it: its own, where the function has that at
    the same place; a tensor, whatever is at its place; ``*`` or ``**``; None if nothing does."""
    arguments = op._schema.arguments
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]
    kinds = {p.kind for p in parameters}
    own = {a.name for a in arguments}
    out: list[str | None] = []
    for i, a in enumerate(arguments):
        here = positional[i] if i < len(positional) and not a.kwarg_only else None
        if here == a.name or a.name in keywords or a.kwarg_only and a.name in positional:
            out.append(a.name)
        elif a.name in positional and (is_tensor(a) or here in own):
            out.append(None)  # another order than the op's
        elif a.name in positional:
            out.append(a.name)
        elif is_tensor(a) and here is not None and here not in own:
            out.append(here)
        elif is_tensor(a) and here is None and inspect.Parameter.VAR_POSITIONAL in kinds:
            out.append("*")
        else:
            out.append("**" if inspect.Parameter.VAR_KEYWORD in kinds else None)
    return out


def _omissible(argument: Any) -> bool:
    """May an implementation lack it? A number that calls mostly leave at its default."""
    return argument.has_default_value() and not is_tensor(argument)


def call_of(op: Any, c: CustomOpConfig, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | str:
    """(args, kwargs) to call a config's function with, for the call's arguments ``given`` by name; or why not."""
    if c.decomposition is None:
        return (), {**given, **c.params}
    try:
        parameters = list(inspect.signature(c.decomposition).parameters.values())
    except (TypeError, ValueError):  # a builtin that does not say
        parameters = list(inspect.signature(lambda *args, **kwargs: None).parameters.values())
    only_by_place = {p.name for p in parameters if p.kind == p.POSITIONAL_ONLY} | {"*"}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for i, (a, to) in enumerate(zip(op._schema.arguments, _binding(op, parameters))):
        if a.name in c.params or a.name not in given:
            continue
        if to is None or to in only_by_place and len(args) != i:
            return f"the call gives {a.name}, which {_name_of(c.decomposition)} does not take"
        if is_tensor(a) and not a.kwarg_only and len(args) == i or to in only_by_place:
            args.append(given[a.name])
        else:
            kwargs[a.name if to == "**" else to] = given[a.name]
    return tuple(args), {**kwargs, **c.params}


# -- the rest ---------------------------------------------------------------------------------------
def _makers(op: Any, fns: Any, where: str) -> tuple[tuple[str, Maker], ...]:
    if fns is None:
        return ()
    if not isinstance(fns, Mapping):
        raise RegistrationError(f"{where}: input_gen_fns must be a dict, argument name -> function, not {fns!r:.80}")
    arguments = op._schema.arguments
    out: dict[str, Maker] = {}
    for key, fn in fns.items():
        named = {a.name: a for a in arguments}
        if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < len(arguments):
            key = arguments[key].name
        if key not in named or not is_tensor(named[key]) or is_tensor_list(named[key]):
            tensors = [a.name for a in arguments if is_tensor(a) and not is_tensor_list(a)]
            raise RegistrationError(
                f"{where}: input_gen_fns: {key!r} is no tensor argument of the op{_near(key, tensors)}; these are: "
                f"{', '.join(tensors) or 'none'}"
            )
        if not callable(fn):
            raise RegistrationError(f"{where}: input_gen_fns[{key!r}] must be a function, not {fn!r:.80}")
        out[key] = fn
    return tuple(out.items())


def _dispatch(op: Any, on: Any, splits: Any, where: str) -> DispatchOn | None:
    if on is None and splits is None:
        return None
    if on is None:
        raise RegistrationError(
            f'{where}: split_points need dispatch_on={{"tensor_name": ..., "dim": ...}}, to say what is split'
        )
    if splits is None:
        raise RegistrationError(f"{where}: dispatch_on needs split_points=[...], to say where the ranges end")
    known = ("tensor_name", "dim", "range_upper_bound")
    if not isinstance(on, Mapping) or not {"tensor_name", "dim"} <= set(on):
        raise RegistrationError(f'{where}: dispatch_on must be {{"tensor_name": "x", "dim": 0}}, not {on!r:.80}')
    for key in on:
        if key not in known:
            raise RegistrationError(f"{where}: dispatch_on: unknown key {key!r}{_near(key, list(known))}")
    tensor, dim, upper = on["tensor_name"], on["dim"], on.get("range_upper_bound", DEFAULT_UPPER)
    tensors = [a.name for a in op._schema.arguments if is_tensor(a) and not is_tensor_list(a)]
    if tensor not in tensors:
        raise RegistrationError(
            f"{where}: dispatch_on: {tensor!r} is no tensor argument of the op{_near(tensor, tensors)}; these are: "
            f"{', '.join(tensors) or 'none'}"
        )
    if not _is_int(dim) or not -64 <= dim < 64:
        raise RegistrationError(f"{where}: dispatch_on: dim={dim!r} is no dimension; give an int, such as 0 or -1")
    if not isinstance(splits, (list, tuple)) or not splits or not all(_is_int(s) and s > 0 for s in splits):
        raise RegistrationError(f"{where}: split_points={splits!r}: must be a list of positive ints")
    if any(a >= b for a, b in pairwise(splits)):
        raise RegistrationError(f"{where}: split_points={splits!r}: must ascend, without repetition")
    if not _is_int(upper) or upper <= splits[-1]:
        raise RegistrationError(
            f"{where}: dispatch_on: range_upper_bound={upper!r} must be an int above the last split point, {splits[-1]}"
        )
    return DispatchOn(tensor, dim, tuple(splits), upper)


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _near(name: Any, names: list[str]) -> str:
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _argument(a: Any) -> str:
    return f"{a.name}={a.default_value!r}" if a.has_default_value() else a.name


def _name_of(fn: Any) -> str:
    return str(getattr(fn, "__name__", None) or type(fn).__name__)
