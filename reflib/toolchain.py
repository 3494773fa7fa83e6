"""The C++ compiler: find it, probe which flags it accepts, and compile generated source to a shared library.

The results of probing are cached, so a warm start runs no compiler at all.

OpenMP. torch brings its own OpenMP runtime; a second one in the process would mean two thread pools competing for the
cores. The library is therefore linked to the very file that torch loaded, where there is one.

NB: never link with -ffast-math: it makes gcc add start-up code that flushes denormals to zero in the whole
process. The flags here change no result except by fusing a multiply with an add.
"""

import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from . import cache, failures
from .errors import ToolchainError
from .options import Options
from .worker import cores

REMEDY = (
    "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install; "
    "conda: conda install -c conda-forge cxx-compiler) or name yours in the environment variable CXX"
)
# -fwrapv: integers wrap, as in torch. -fno-trapping-math, -fno-math-errno: floating-point flags and errno are not read,
# so branches around arithmetic may become selects, which vectorization needs.
_BASE = (
    "-std=c++17", "-O3", "-fPIC", "-fwrapv", "-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast",
)  # fmt: skip
_OPTIONAL = (
    "-fno-exceptions", "-fno-rtti", "-fno-semantic-interposition", "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables", "-Wno-psabi", "-Wno-unknown-pragmas",
)  # fmt: skip
_PROBE = """
#include <stdint.h>
extern "C" float probe(const float* x, int64_t n, int threads) {
  float sum = 0;
  #pragma omp parallel for num_threads(threads) reduction(+:sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}
"""
# glibc's vector functions. All that cpp_header.h uses came in glibc 2.35; linking shows whether they are there.
_PROBE_VECTOR = """
extern "C" __attribute__((simd("notinbranch"), const, nothrow)) float sinhf(float);
extern "C" void probe(float* x) {
  #pragma omp simd
  for (int i = 0; i < 1024; ++i) x[i] = sinhf(x[i]);
}
"""
# no symbols and no build id: equal input, equal bytes; and no copy of the compiler's runtime, which is tens of KB
REPRODUCIBLE = ("-s", "-Wl,--build-id=none", "-shared-libgcc")
_OURS = ("-march=", "-mcpu=", "-mprefer-vector-width=")  # flags for this machine
_UNIT_CHARS = 24_000  # characters of generated text per compiler process


@dataclass(frozen=True)
class Compiler:
    """``command`` starts the compiler (``CXX`` may hold several words). ``flags`` compile, ``link`` links.
    ``openmp``: the source of threads, in words; empty when kernels are single-threaded."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    link: tuple[str, ...]
    openmp: str


def find_compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: ``$CXX``, else g++, clang++ or c++. Raises ToolchainError without one."""
    named = os.environ.get("CXX")
    if named and not shutil.which((shlex.split(named) or [""])[0]):
        raise ToolchainError(f"the C++ compiler CXX={named!r} was not found; {REMEDY}")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        words = shlex.split(name)
        path = shutil.which(words[0])
        if path:
            return (path, *words[1:])
    raise ToolchainError(f"no C++ compiler found (looked for g++, clang++, c++); {REMEDY}")


def compiler() -> Compiler:
    """The compiler and the flags it accepts; probed once per compiler, CPU and OpenMP runtime, then cached."""
    return _compiler(find_compiler(), str(cache.root()))


@functools.cache
def _compiler(command: tuple[str, ...], root: str) -> Compiler:
    stats = [os.stat(p) for p in (shutil.which(w) for w in command) if p]
    identity = [(s.st_size, int(s.st_mtime)) for s in stats]
    runtimes = tuple(map(str, torch_openmp()))
    programs, names = (_PROBE, _PROBE_VECTOR), [f.name for f in fields(Compiler)]
    k = cache.key("compiler", command, identity, runtimes, cache.cpu_features(), _BASE, _OPTIONAL, programs, names)
    known = cache.read("toolchain", k)
    if known is not None:
        data = json.loads(known)
        return Compiler(**(data | {n: tuple(data[n]) for n in ("command", "flags", "link")}))
    found = _probe(command, runtimes)
    cache.put("toolchain", k, json.dumps(asdict(found)).encode())
    return found


def torch_openmp() -> list[Path]:
    """The OpenMP runtimes that torch's wheel brings."""
    import torch

    home = Path(torch.__file__).parent
    names = ("libomp.dylib", "libiomp5.dylib") if sys.platform == "darwin" else ("libgomp*.so*",)
    folders = (home / "lib", home.parent / "torch.libs")
    return sorted(p for folder in folders for name in names for p in folder.glob(name))


def _probe(command: tuple[str, ...], runtimes: tuple[str, ...]) -> Compiler:
    """Try the best set of flags first; only if it fails, flag by flag."""
    version = _run([*command, "--version"]).stdout.splitlines()[0]
    clang = "clang" in version
    native = "-mcpu=native" if sys.platform == "darwin" else "-march=native"
    wide = "-mprefer-vector-width=512"
    optional: tuple[str, ...] = (native, wide, *_OPTIONAL)
    threads: list[tuple[tuple[str, ...], tuple[str, ...], str]] = []
    if sys.platform == "darwin":
        threads += [(("-Xpreprocessor", "-fopenmp"), (r,), "torch's own runtime") for r in runtimes]
    elif not clang:
        threads += [(("-fopenmp",), (r,), "torch's own runtime") for r in runtimes]
    threads += [(("-fopenmp",), ("-fopenmp",), "the compiler's runtime"), (("-fopenmp-simd",), (), ""), ((), (), "")]
    if not _accepts(command, (*_BASE, *optional, *threads[0][0]), threads[0][1]):
        if not _accepts(command, _BASE, ()):
            _compile_failed([*command, *_BASE], _run([*command, *_BASE, "-x", "c++", "-", "-c", "-o", os.devnull]))
        optional = tuple(f for f in optional if _accepts(command, (*_BASE, f), ()))
        threads = [t for t in threads if _accepts(command, (*_BASE, *t[0]), t[1])]
    for_threads, runtime, openmp = threads[0]
    flags: tuple[str, ...] = (*_BASE, *optional, *for_threads)
    link: tuple[str, ...] = (*runtime, "-lm")
    vector = ("-lmvec", "-Wl,--no-undefined")
    if _accepts(command, flags, (*link, *vector), _PROBE_VECTOR):
        flags, link = (*flags, "-DREFLIB_LIBMVEC"), (*link, "-lmvec")
    return Compiler(command, version, flags, link, openmp)


def _accepts(command: tuple[str, ...], flags: Sequence[str], link: Sequence[str], program: str = _PROBE) -> bool:
    with tempfile.TemporaryDirectory(prefix="reflib-") as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(program)
        made = str(Path(folder, "probe.so"))
        return _run([*command, *flags, "-shared", str(source), "-o", made, *link]).returncode == 0


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        # A copy of the environment: another thread (Triton's) may be changing the real one while it is read.
        env = dict(os.environ)
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env)
    except OSError as e:
        raise ToolchainError(f"cannot run the compiler {command[0]!r}: {e}; {REMEDY}") from e


def _compile_failed(command: Sequence[str], done: subprocess.CompletedProcess[str]) -> None:
    raise ToolchainError(failures.of_command(command, done.returncode, "\n".join(_message(done))))


def _message(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The first error that a compiler printed, in lines."""
    lines = (done.stderr or done.stdout).splitlines() or [f"exit {done.returncode}, and no message"]
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    return lines[first : first + 12]


# -- building ---------------------------------------------------------------------------------------
def for_others(found: Compiler, instructions: Sequence[str]) -> Compiler:
    """The same compiler with flags for other machines: the named instruction sets only, and no link to an OpenMP
    runtime (the loading process has one). Its output contains nothing of this machine."""
    flags = tuple(f for f in found.flags if not f.startswith(_OURS))
    link = tuple(f for f in found.link if f.startswith("-l"))
    return replace(found, flags=(*flags, *(f"-m{i}" for i in instructions)), link=(*link, *REPRODUCIBLE))


def build_library(
    source: str | Sequence[str], options: Options | None = None, header: str = "", found: Compiler | None = None
) -> Path:
    """A shared library of ``source``, from the cache or freshly compiled.

    ``source`` is one text, or the texts of independent functions, which are spread over several compiler processes when
    they are large. ``header`` is prepended to each.
    """
    options = options or Options()
    texts = [source] if isinstance(source, str) else list(source)
    found = found or compiler()
    # one order: libmvec has other last bits than libm, which computes the end of a loop
    one_order = ("-ffp-contract=off", "-UREFLIB_LIBMVEC") if options.batch_invariant else ()
    exact = one_order or (("-ffp-contract=off",) if options.numerics == "eager" else ())
    flags = (*found.flags, *exact, *options.cpp_flags)
    plain = [_without_comments(t) for t in (header, *texts)]
    k = cache.key("kernels", plain, found.version, found.command, flags, found.link, cache.cpu_features())
    path = cache.get("kernels", k)
    if path is not None:
        return path
    units = ["\n".join((header, *unit)) for unit in _units(texts, options)]
    with tempfile.TemporaryDirectory(prefix="reflib-") as folder:
        return cache.put("kernels", k, _build(found, flags, units, Path(folder)), ".so")


def shared_library(
    kind: str, files: Mapping[str, str], flags: Sequence[str], link: Sequence[str] = (), about: str = ""
) -> Path:
    """The first of ``files`` compiled, from the cache or freshly. ``files``: texts by name; the others are what it
    includes. ``about``: what else the result depends on. Raises ToolchainError."""
    found = compiler()
    plain = {name: _without_comments(text) for name, text in files.items()}
    k = cache.key(kind, plain, found.version, found.command, tuple(flags), tuple(link), about)
    path = cache.get(kind, k)
    if path is not None:
        return path
    with tempfile.TemporaryDirectory(prefix="reflib-") as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text)
        source, made = Path(folder, next(iter(files))), Path(folder, "made.so")
        must_run([*found.command, *flags, str(source), "-o", str(made), *link])
        return cache.put(kind, k, made, ".so")


def _without_comments(text: str) -> str:
    """For cache keys: comments name the user's files and lines, which do not change the library."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("//"))


def _units(texts: list[str], options: Options) -> list[list[str]]:
    """Spread ``texts`` over translation units of about equal length."""
    most = options.compile_threads or cores()
    count = max(1, min(most, len(texts), sum(map(len, texts)) // _UNIT_CHARS))
    units: list[list[str]] = [[] for _ in range(count)]
    for text in sorted(texts, key=len, reverse=True):
        min(units, key=lambda u: sum(map(len, u))).append(text)
    return units


def _build(found: Compiler, flags: Sequence[str], units: list[str], folder: Path) -> Path:
    made = folder / "made.so"
    sources = [folder / f"unit{i}.cpp" for i in range(len(units))]
    for path, text in zip(sources, units):
        path.write_text(text)
    if len(sources) == 1:
        must_compile(found.command, flags, ["-shared", str(sources[0]), "-o", str(made), *found.link])
        return made
    objects = [str(s.with_suffix(".o")) for s in sources]
    rests = [["-c", str(s), "-o", o] for s, o in zip(sources, objects)]
    with ThreadPoolExecutor(len(rests)) as pool:
        list(pool.map(functools.partial(must_compile, found.command, flags), rests))
    must_run([*found.command, "-shared", *objects, "-o", str(made), *found.link])
    return made


def must_compile(command: Sequence[str], flags: Sequence[str], rest: Sequence[str]) -> None:
    """Run a compiler, with plainer flags if it fails: a compiler may have a bug, such as g++ 12, which crashes on some
    loops when it vectorizes them. ToolchainError, of the first command, if it always fails."""
    failed: list[tuple[list[str], subprocess.CompletedProcess[str]]] = []
    for some in dict.fromkeys(_plainer(tuple(flags))):
        words = [*command, *some, *rest]
        done = _run_again(words)
        if not done.returncode:
            if failed:
                _say_plainer(command[0], "\n".join(_message(failed[0][1])[:1]))
            return
        failed.append((words, done))
    _compile_failed(*failed[0])


def _plainer(flags: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """``flags``, and such that fewer passes of the compiler run. All mean the same."""
    yield flags
    exact = tuple("-ffp-contract=off" if f == "-ffp-contract=fast" else f for f in flags)
    yield tuple("-O2" if f == "-O3" else f for f in exact)
    yield tuple("-O1" if f in ("-O2", "-O3") else f for f in exact if not f.startswith(_OURS))


@functools.cache
def _say_plainer(command: str, message: str) -> None:
    """Once per message: it names the compiler's own bug."""
    warnings.warn(
        f"{command} failed on generated code ({message}) and did not with plainer flags: that code may be slower; "
        f"name another compiler, or another version, in the environment variable CXX", stacklevel=2,
    )  # fmt: skip


def must_run(command: Sequence[str]) -> None:
    """Run a compiler command; ToolchainError, with the command and its first messages, if it fails."""
    done = _run_again(command)
    if done.returncode:
        _compile_failed(command, done)


def _run_again(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A compiler's command; if it crashes or is killed, once more, one such command at a time."""
    done = _run(command)
    if done.returncode and failures.crashed(f"{done.stderr}\n{done.stdout}", done.returncode):
        with failures.ALONE:
            done = _run(command)
    return done
