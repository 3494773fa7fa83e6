"""What is said when a compiler or an assembler refuses generated code: its message, the source with the line marked,
the command to run by hand, and what to change.

The sources are kept in the cache's folder ``failed/``, the last KEPT failures.
"""

import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import atomic, cache
from .errors import CacheError

KEPT = 20
WHOLE, AROUND = 60, 12  # lines of a source that is shown whole; else so many before and after the marked one
_LINE = re.compile(r"([^\s:]+):(\d+):(?:\d+:)? (?:\w+ )*error")
# In a compiler's message -> what to change. The first that is found.
ADVICE = (
    (r"internal compiler error|SIGSEGV|Segmentation fault",
     "a bug of the compiler: name another, or another version, in CXX (C++) or TRITON_PTXAS_PATH (ptxas)"),
    (r"not defined for option 'gpu-name'|Unsupported \.version|Unsupported \.target|unsupported GPU",
     "this assembler is older than the GPU, or than Triton's PTX: install a newer Triton, or name a newer ptxas in "
     "TRITON_PTXAS_PATH"),
    (r"shared (memory|data)",
     "smaller blocks need less: a lower Options(persistent_limit=...) for reductions; for matrix products "
     "autotune='blocking', which leaves out what does not fit; for a Triton kernel of yours, smaller blocks, or fewer "
     "stages"),
    (r"[Tt]oo many registers|register allocation",
     "fewer values at once: a lower Options(max_fused_ops=...) or persistent_limit"),
    (r"No space left", "make room, or name other folders in TMPDIR and REFLIB_CACHE_DIR"),
    (r"[Kk]illed|virtual memory exhausted|[Cc]annot allocate memory|MemoryError|bad_alloc|out of memory"
     r"|(exit|error code) (-9|137)",
     "memory ran out: compile fewer at once, Options(compile_threads=1)"),
    (r"unrecognized (command[- ]line )?option|unknown argument", "look at Options(cpp_flags=...), CXX and CXXFLAGS"),
    (r"cannot find -l|No such file or directory", "a library or header of the compiler is missing: `reflib doctor`"),
)  # fmt: skip
# Of a compiler that crashed or was killed: memory ran out, as a rule.
_CRASHED = re.compile(
    r"[Kk]illed|virtual memory exhausted|[Cc]annot allocate memory|Resource temporarily unavailable|bad_alloc"
    r"|MemoryError|error code -\d|internal compiler error|SIGSEGV|Segmentation fault"
)
ALONE = threading.Lock()  # held by a compiler's second attempt
os.register_at_fork(after_in_child=ALONE._at_fork_reinit)  # type: ignore[attr-defined]
OTHERWISE = (
    "this code was generated: a bug of reflib, unless it has code of yours (a Triton kernel, a custom op). "
    "`reflib repro` writes it as one file for a report; Options(fuse=False) may avoid it"
)


def advice(message: str) -> str:
    """What to change."""
    return "to change: " + next((what for found, what in ADVICE if re.search(found, message)), OTHERWISE)


def crashed(message: str, exit: int = 0) -> bool:
    """May the same command succeed when it runs alone?"""
    return exit < 0 or exit == 137 or _CRASHED.search(message) is not None


def marked(source: str, line: int) -> str:
    """``source`` with numbered lines, line ``line`` (from 1) marked; a long one around that line. 0: none is marked."""
    lines = source.splitlines()
    first = 0 if len(lines) <= WHOLE else max(0, min(line, len(lines)) - AROUND - 1)
    last = len(lines) if len(lines) <= WHOLE else first + 2 * AROUND + 1
    shown = [f"{'>' if i == line else ' '}{i:5d} | {text}" for i, text in enumerate(lines[:last], 1) if i > first]
    before, after = ["   ..."] * (first > 0), ["   ..."] * (last < len(lines))
    return "\n".join([*before, *shown, *after])


def keep(files: Mapping[str, str]) -> Path | None:
    """A folder with these files; None where they cannot be written. The same files are kept once."""
    try:
        home = cache.root() / "failed"
        folder = home / cache.key("failed", *sorted(files.items()))[:12]
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            atomic.write(folder / name, text)
        others = sorted((f for f in home.iterdir() if f != folder), key=lambda f: f.stat().st_mtime)
        for old in others[: max(0, len(others) + 1 - KEPT)]:
            shutil.rmtree(old, ignore_errors=True)
        return folder
    except (OSError, CacheError):
        return None


def of_command(command: Sequence[str], exit: int, message: str) -> str:
    """Of a C or C++ compiler: ``command`` with files that are about to be removed, and the message about them."""
    sources = [Path(w) for w in command if w.endswith((".cpp", ".c", ".cu")) and Path(w).is_file()]
    folder = sources[0].parent if sources else None
    texts = {p.name: p.read_text() for p in (*sources, *(folder.glob("*.h") if folder else ()))}
    kept = keep(texts) if texts else None
    if folder is not None and kept is not None:
        command = [w.replace(str(folder), str(kept)) for w in command]
        message = message.replace(str(folder), str(kept))
    said = (
        f"the compiler refused generated code (exit {exit}); if that is a bug of the compiler, name another in the "
        f"environment variable CXX\n$ {shlex.join(command)}\n{message}"
    )
    found = _LINE.search(message)
    text = texts.get(Path(found[1]).name) if found else None
    shown = [f"{Path(found[1]).name}:", marked(text, int(found[2]))] if found and text is not None else []
    return "\n".join([said, *shown, advice(f"{message}\nexit {exit}")])


def of_kernel(name: str, source: str, arch: str, error: Exception, by_hand: str = "") -> str:
    """Of Triton or ptxas: ``error``, which it raised. by_hand: a program that compiles the kernel again."""
    message, cause = f"{type(error).__name__}: {error}".rstrip(), error
    while cause.__cause__ is not None:  # (of a function that is called, Triton's error says only where)
        cause = cause.__cause__  # type: ignore[assignment]
    if (reason := str(cause).strip().splitlines()[-1:]) and reason[0] not in message:
        message += f"\n{reason[0]}"
    files, line, shown = {f"{name}.py": by_hand or source}, _line(source, error), source
    run = f"{shlex.quote(sys.executable)} {name}.py"
    words, ptx = _assembler(message)
    if ptx is not None:
        found = re.search(r"line (\d+)", message)
        files[f"{name}.ptx"] = shown = ptx.read_text()
        line = int(found[1]) if found else 0
        run = shlex.join(f"{name}.ptx" if w == str(ptx) else "/dev/null" if w == f"{ptx}.o" else w for w in words)
        message = message.replace(str(ptx), f"{name}.ptx").partition("Repro command: ")[0].rstrip()
        ptx.unlink(missing_ok=True)
    kept = keep(files)
    where = f"$ cd {shlex.quote(str(kept))} && {run}" if kept and (by_hand or ptx) else ""
    used = ", ".join(re.findall(r"Used \d+ registers[^\n]*", message))
    about = re.search(rf"^def {name}\([^#]*#( .* at .*)", source, re.M)  # the ops, and the user's line
    of = f" ({about[1].strip()})" if about else ""
    lines = [
        f"Triton refused kernel {name} for {arch}{of}: {message}", where, f"{name}{'.ptx' if ptx else ''}:",
        marked(shown, line), used, advice(message),
    ]  # fmt: skip
    return "\n".join(x for x in lines if x)


def _assembler(message: str) -> tuple[list[str], Path | None]:
    """ptxas's command in Triton's message, and the file with PTX that Triton leaves behind."""
    found = re.search(r"Repro command: (.*)", message)
    words = shlex.split(found[1]) if found else []
    return words, next((Path(w) for w in words if w.endswith(".ptx") and Path(w).is_file()), None)


def forget(error: Exception) -> None:
    """Of Triton or ptxas, which is run again: remove what it leaves behind."""
    if (ptx := _assembler(str(error))[1]) is not None:
        ptx.unlink()


def _line(source: str, error: BaseException | None) -> int:
    """The line of ``source`` that Triton's CompilationError, or what it comes from, is about; 0: unknown."""
    line = 0
    while error is not None:
        src, number = getattr(error, "src", None), getattr(getattr(error, "node", None), "lineno", 0)
        if isinstance(src, str) and src.strip() and number:
            at = source.find(src.rstrip())  # the function's text, in the kernel's
            line = source[:at].count("\n") + number if at >= 0 else line
        elif isinstance(error, SyntaxError) and error.lineno:
            line = error.lineno
        error = error.__cause__
    return line
