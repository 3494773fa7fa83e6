"""``aot_compile``: a model as one file for many machines. The later stages run once per architecture.

    export -> lower -> (per architecture: fuse -> autotune -> schedule -> plan -> generate) -> package

Architectures differ in the stages after ``lower``: which matmuls get a generated kernel, which tilings fit, how a
reduction is split. Nothing is measured for a GPU that is not in this machine; decisions for its architecture are taken
from a lookup table or the store of decisions. With ``autotune="blocking"`` this machine's own GPU, and its CPU, are
measured. With "background" the file is there at once, of guesses and of what is known, and a tuned one takes its place
when all is measured (``reflib.wait_for_tuning(path)``): what loads it then, or is exported of it, is tuned.
"""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from .errors import OptionError, PackageError
from .logs import get as logger
from .options import Options
from .target import Target, device_target


def aot_compile(
    model: Any,
    args: Sequence[Any] = (),
    path: str | os.PathLike[str] = "model.reflib",
    archs: Iterable[str] | str = ("native",),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    ptx: bool = True,
    metadata: Mapping[str, str] | None = None,
    **options: Any,
) -> Path:
    """Compile ``model`` for every architecture in ``archs`` and write it, with its weights, to ``path``.

    model: a module, a function, or a ``torch.export.ExportedProgram`` (then without args); for inference. It is
        captured as it is: in training mode, dropout and updates of statistics stay in it (with a UserWarning). Weights
        that are not read are left out.
    args, kwargs: example arguments, a tuple and a dict; of tensors only dtype, shape and strides matter.
    path: of the file; if it is a symbolic link, the link's target is replaced. dynamic_shapes: which sizes may change,
        as ``torch.export.export`` takes it.
    archs: "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120" (all of these: "all"), "native" (the GPU of
        this machine, else its CPU with all its instructions), "cpu" (any x86-64 with AVX2, or any 64-bit ARM),
        "gfx90a", "gfx942" (compiled; not run yet). In any order: the same set gives the same bytes. Neither the GPUs
        nor a model on a GPU are needed.
    ptx: add PTX, which the drivers of later NVIDIA GPUs compile.
    metadata: your own text, by name: ``reflib inspect`` shows it, and ``get_metadata`` of what ``load`` returns.
    options: fields of :class:`reflib.Options`; the wrapper is C++.

    A model that communicates (tensor parallel, say) is compiled by all ranks at once. Each writes a file of its own,
    such as model.rank0.reflib, and the first rank writes ``path``, which names them all: ranks load that.

    Returns the path. Raises OptionError, CaptureError (the model cannot be exported), PackageError (it cannot be
    packaged, or the file cannot be written: an old file is kept), ToolchainError, DeviceError.
    """
    from .package.architectures import wanted
    from .package.build import ptx_target
    from .ranks.packages import one_per_rank

    opts = _options(options)
    want = wanted(archs, ptx)
    path, about = _writable(path), _metadata(metadata)
    captured, programs, exported = {}, {}, {}
    for kind in dict.fromkeys("cuda" if t.is_gpu else "cpu" for t in want.targets):
        device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
        captured[kind], exported[kind], programs[kind] = _capture(model, args, kwargs, dynamic_shapes, device, opts)
    _warn_of_training(model, next(iter(exported.values())).training)
    grouped = bool(next(iter(captured.values())).groups)
    if grouped and opts.autotune == "background":
        what = "would be measured later by each rank for itself"
        raise OptionError(f'aot_compile: autotune="background": a model that communicates {what}; use "blocking"')
    named = [*((t.arch, t) for t in want.targets), *([("ptx", ptx_target())] if want.ptx else [])]
    variants = [(arch, t, "cuda" if t.is_gpu else "cpu") for arch, t in named]
    stages = [_stages(exported[kind].graph, programs[kind], opts, t) for _, t, kind in variants]
    write = partial(_write, captured, variants, want.here, about)
    if grouped:
        return one_per_rank(path, lambda own: write(stages, opts, own))
    if opts.autotune != "background":
        return write(stages, opts, path)
    write(stages, opts.but(autotune="off"), path)
    _tune_later(path, stages, partial(write, options=opts.but(autotune="blocking")))
    return path


def _write(
    captured: Mapping[str, Any], variants: Iterable[tuple[str, Target, str]], here: bool, about: Mapping[str, str],
    stages: Sequence[Any], options: Options, path: Path, instead_of: Any = None,
) -> Path:  # fmt: skip
    """The file, of the stages of each variant. ``instead_of``: as for ``build``."""
    from .package.build import Planned, build
    from .wrap.aten import declared

    planned = [
        Planned(arch, t, kind, s.scheduled, s.plan, s.kernels, here and not t.is_gpu)
        for (arch, t, kind), s in zip(variants, stages)
    ]
    return build(path, captured, planned, options, declared(options.c_shims), about, instead_of)


def _warn_of_training(model: Any, training: Sequence[str]) -> None:
    if training:
        what = f"{getattr(model, '__name__', type(model).__name__)} is captured as it is in training"
        warnings.warn(f"{what}: {', '.join(training)}. For inference call model.eval() first", UserWarning, 3)


def _tune_later(path: Path, stages: Sequence[Any], write: Callable[..., Path]) -> None:
    """Measure what is not known while the program goes on, then replace the file, unless another was written there."""
    from .background import Background, files
    from .package.archive import Replaced, stamp
    from .tuning import Again, asked, tuned

    if not any(s.swap for s in stages):
        return
    begun = [(s, asked(s)) if s.swap else (s, None) for s in stages]
    key, first, there = os.path.realpath(path), stamp(path), path.absolute()  # the program may go to another folder

    def tune(background: Background) -> Any:
        made = [s if a is None else tuned(s, Again(a, background), "generate") for s, a in begun]
        try:
            write(made, path=there, instead_of=first)
        except Replaced as e:
            logger("autotune").info("%s", e)
        return _all(made)

    files[key] = Background(_all(stages), tune)
    files[key].start()


def _all(stages: Sequence[Any]) -> Any:
    """What ``Background`` reads of a graph's stages: here of all variants'."""
    decisions, name = [d for s in stages for d in s.decisions], SimpleNamespace(name=stages[0].graph.name)
    return SimpleNamespace(graph=name, decisions=decisions, call=SimpleNamespace(wait=lambda: None))


def _options(given: Mapping[str, Any]) -> Options:
    from .wrap.aten import declared

    options = Options.make(given)
    if options.target is not None:
        raise OptionError("aot_compile takes archs=, not target=")
    if given.get("wrapper") == "python":
        raise OptionError('aot_compile: wrapper="python": a package\'s wrapper is C++; leave it out')
    declared(options.c_shims)  # an error now, not when all is compiled
    return options.but(wrapper="cpp")


def _metadata(given: Any) -> dict[str, str]:
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise OptionError(f"aot_compile: metadata= takes a dict of text by name: got a {type(given).__name__}")
    for x in (x for item in given.items() for x in item):
        if not (isinstance(x, str) and x.isprintable()):
            raise OptionError(f"aot_compile: metadata= takes printable text by name: {x!r:.80} is none")
    return dict(given)


def _writable(given: Any) -> Path:
    from .package.archive import as_path

    path = as_path(given)
    if path.is_dir():
        raise PackageError(f"{path} is a folder; name a file, such as {path / 'model.reflib'}")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise PackageError(f"there is no folder {folder} to write {path.name} into")
    return path


def _capture(
    model: Any, args: Any, kwargs: Any, dynamic_shapes: Any, device: torch.device, options: Options
) -> tuple[Any, Any, Any]:
    """(what the package needs of it, the model exported, its program)."""
    from .capture.export import export_for
    from .capture.random import own_numbers
    from .lower import decompositions, lower
    from .package.build import Captured
    from .pipeline import before_autograd
    from .ranks.packages import groups_of
    from .wrap.convention import of_exported, without_tokens
    from .wrap.exported import expect_apart, names_of
    from .wrap.guards import checked

    rewrite = partial(before_autograd, options=options)
    exported = export_for(
        model, args, kwargs, dynamic_shapes, device, decompositions=decompositions(options), rewrite=rewrite
    )
    module = own_numbers(exported.graph.module, options, device.type == "cuda")
    program = without_tokens(exported.program, lower(replace(exported.graph, module=module), options))
    specs = exported.program.graph_signature.input_specs
    kinds = {s.target: _KINDS.get(s.kind.name, "constant") for s in specs if s.target in exported.state}
    ops = str(exported.graph.module.graph)  # (a Graph's own text names files and lines)
    digest = hashlib.sha256(ops.encode()).hexdigest()
    convention = of_exported(exported.program, program)
    expect_apart(convention, program, exported.state)
    captured = Captured(convention, exported.state, kinds, digest, names_of(exported.program), groups_of(program))
    return captured, exported, checked(program, convention)


_KINDS = {"PARAMETER": "parameter", "BUFFER": "buffer"}


def _stages(graph: Any, program: Any, options: Options, target: Target) -> Any:
    from .pipeline import run

    cuda = target.kind == "cuda" and torch.cuda.is_available() and device_target("cuda").arch == target.arch
    measures = (cuda or not target.is_gpu) and options.autotune != "off"
    return run(
        graph, options if measures else options.but(target=target.arch), until="generate", program=program,
        target_of=lambda device: target if device.type == "cuda" else Target("cpu"),
    )  # fmt: skip
