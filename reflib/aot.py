"""``aot_compile``: a model as one file for many machines. The stages, once for each architecture.

    export -> lower -> (for each architecture: fuse -> choose -> plan -> generate) -> package

What differs between architectures comes after ``lower``: which products are worth a kernel of their own, which tilings
fit, how a reduction is cut. Nothing is measured for a GPU that is not here; what a lookup table or the store of
decisions knows about a GPU of that architecture is used. With ``autotune="blocking"`` what is for this machine's own
GPU, and for CPUs, is measured here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .errors import OptionError, PackageError
from .options import Options
from .target import Target, device_target


def aot_compile(
    model: Any,
    args: Sequence[Any] = (),
    path: str | Path = "model.reflib",
    archs: Sequence[str] | str = ("native",),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    ptx: bool = True,
    **options: Any,
) -> Path:
    """Compile ``model`` for every architecture in ``archs`` and write it, with its weights, to ``path``.

    model: a module, a function, or a ``torch.export.ExportedProgram`` (then without args); for inference.
    args, kwargs: example arguments. dynamic_shapes: which sizes may change, as ``torch.export.export`` takes it.
    archs: "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120" (all of these: "all"), "native" (the GPU of
        this machine, else its CPU, all of it), "cpu" (any x86-64 with AVX2, or any 64-bit ARM), "gfx90a", "gfx942"
        (compiled; not run yet). The GPUs need not be in this machine, nor need the model lie on one.
    ptx: add assembly text, which the drivers of later NVIDIA GPUs compile themselves.
    options: fields of :class:`reflib.Options`.

    Returns the path. Raises OptionError, CaptureError (the model cannot be exported), PackageError (it cannot be in a
    package, or the file cannot be written: what was there before is still there), ToolchainError, DeviceError.
    """
    from .package.architectures import targets
    from .package.build import Planned, build, ptx_target
    from .wrap.aten import declared

    opts = _options(options)
    wanted, with_ptx = targets(archs, ptx)
    native = "native" in ([archs] if isinstance(archs, str) else archs)
    path = _writable(Path(path))
    gpu = any(t.is_gpu for t in wanted)
    kinds = [k for k, there in (("cuda", gpu), ("cpu", any(not t.is_gpu for t in wanted))) if there]
    captured, programs, graphs = {}, {}, {}
    for kind in kinds:
        captured[kind], graphs[kind], programs[kind] = _capture(
            model, args, kwargs, dynamic_shapes, torch.device(kind, 0) if kind == "cuda" else torch.device("cpu"), opts
        )
    arms = []
    for arch, target in [*((t.arch, t) for t in wanted), *([("ptx", ptx_target())] if with_ptx else [])]:
        kind = "cuda" if target.is_gpu else "cpu"
        s = _stages(graphs[kind], programs[kind], opts, target)
        arms.append(Planned(arch, target, kind, s.chosen, s.plan, s.kernels, native and not target.is_gpu))
    return build(path, captured, arms, opts, declared(opts.c_shims))


def _options(given: Mapping[str, Any]) -> Options:
    options = Options.make(given)
    if options.target is not None:
        raise OptionError("aot_compile takes archs=, not target=")
    if options.autotune == "background":
        raise OptionError('aot_compile: autotune="background" goes on after a first call; "blocking" measures now')
    return options.but(wrapper="cpp")


def _writable(path: Path) -> Path:
    if path.is_dir():
        raise PackageError(f"{path} is a folder; name a file, such as {path / 'model.reflib'}")
    if not path.absolute().parent.is_dir():
        raise PackageError(f"there is no folder {path.absolute().parent} to write {path.name} into")
    return path


def _capture(
    model: Any, args: Any, kwargs: Any, dynamic_shapes: Any, device: torch.device, options: Options
) -> tuple[Any, Any, Any]:
    """(what the package needs of it, the graph, the program)."""
    from .capture.export import export_for
    from .lower import decompositions, lower
    from .package.build import Captured
    from .wrap.convention import of_exported

    exported = export_for(model, args, kwargs, dynamic_shapes, device, decompositions=decompositions())
    program = lower(exported.graph, options)
    specs = exported.program.graph_signature.input_specs
    kinds = {s.target: _KINDS.get(s.kind.name, "constant") for s in specs if s.target in exported.state}
    ops = str(exported.graph.module.graph)  # (a Graph's own text names files and lines)
    digest = hashlib.sha256(ops.encode()).hexdigest()
    captured = Captured(of_exported(exported.program, program), exported.state, kinds, digest)
    return captured, exported.graph, program


_KINDS = {"PARAMETER": "parameter", "BUFFER": "buffer"}


def _stages(graph: Any, program: Any, options: Options, target: Target) -> Any:
    from .pipeline import run

    cuda = target.kind == "cuda" and torch.cuda.is_available() and device_target("cuda").arch == target.arch
    measures = (cuda or not target.is_gpu) and options.autotune == "blocking"
    return run(
        graph, options if measures else options.but(target=target.arch), until="generate", program=program,
        target_of=lambda device: target if device.type == "cuda" else Target("cpu"),
    )  # fmt: skip
