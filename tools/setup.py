"""Set-up for `make`: find or make a Python that can run reflib, install what is missing, say so first.

    python3 tools/setup.py run|test|lab|book|gpu|sweep [--venv] [--offline]

Standard library only, and readable by old Pythons, because its first duty is to say "Python too old".
It leaves `_build/python`, a two-line script that starts the Python it chose; the Makefile calls that.

Which Python: the active environment if it has torch 2.11 or newer (then only light packages are added, and
nothing already there changes version); else `.venv`, made here, with the versions in constraints.txt.
A second run finds its stamp and does nothing. `--venv` (or REFLIB_VENV=1) insists on `.venv`.
`--offline` (or REFLIB_OFFLINE=1) installs from the wheels that `make wheels` put into `.whl`.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(ROOT, "_build")
VENV = os.path.join(ROOT, ".venv")
WHEELS = os.path.join(ROOT, ".whl")
TORCH, OLDEST_TORCH = "2.13.0", (2, 11)
OLDEST_PYTHON = (3, 11)

# What each use needs, as extras of pyproject.toml.
USES = {
    "run": ["triton", "batch", "book"],
    "test": ["triton", "batch", "book", "test"],
    "lab": ["triton", "notebooks"],
    "book": ["book"],
    "gpu": ["batch", "gpu-test"],
    "sweep": ["triton"],
}

# Asked of a candidate Python: its version, whether we may install there, and what it has.
PROBE = r"""
import importlib.metadata as m, importlib.util as u, json, os, re, sys, sysconfig
have = {}
for d in m.distributions():
    name = d.metadata["Name"]
    if name: have.setdefault(re.sub(r"[-_.]+", "-", name).lower(), d.version)
managed = os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
venv = sys.prefix != sys.base_prefix
where = sysconfig.get_path("purelib")
print(json.dumps({"version": sys.version_info[:3], "have": have, "executable": sys.executable,
    "prefix": sys.prefix, "triton": u.find_spec("triton") is not None, "platform": sys.platform,
    "writable": os.access(where, os.W_OK) and (venv or not managed)}))
"""


class SetUpError(Exception):
    """Something is missing; the message is the one line that says what, and what to do."""


def say(text):
    print("set-up: " + text, flush=True)


def run(command, **more):
    done = subprocess.run(command, **more)
    if done.returncode:
        raise SetUpError("this failed, its output is above: " + " ".join(command))


def probe(python):
    """What `python` is and has, or None where it does not run."""
    try:
        out = subprocess.run(
            [python, "-c", PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60
        )
        return json.loads(out.stdout.decode()) if out.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def release(version):
    """(2, 13) of "2.13.0+cu130"."""
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2])


def has_torch(facts):
    return facts is not None and release(facts["have"].get("torch", "0.0")) >= OLDEST_TORCH


def active_python():
    """The active environment's Python: `python` in a virtual or conda environment, else `python3`."""
    named = os.environ.get("PYTHON")
    if named:
        return shutil.which(named) or named
    inside = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    return (shutil.which("python") if inside else None) or shutil.which("python3") or sys.executable


def new_enough_python():
    """A Python that may make `.venv`; it must have the venv module."""
    tried = [active_python(), sys.executable] + ["python3.%d" % minor for minor in (13, 12, 11)]
    for name in tried:
        path = shutil.which(name) or (name if os.path.exists(name) else None)
        facts = probe(path) if path else None
        if facts and tuple(facts["version"]) >= OLDEST_PYTHON:
            return path
    raise SetUpError(
        "Python too old: reflib needs Python %d.%d or newer, and python3 is %d.%d (install one, or name "
        "one: make PYTHON=python3.12 ...)" % (OLDEST_PYTHON + sys.version_info[:2])
    )


def need_compiler(use):
    """CPU kernels are C++: say so now rather than in the middle of the first notebook."""
    if use == "book":
        return
    named = os.environ.get("CXX")
    if any(shutil.which(c) for c in ([named] if named else []) + ["g++", "clang++", "c++"]):
        return
    how = (
        "xcode-select --install"
        if sys.platform == "darwin"
        else "apt-get install g++, or your system's package"
    )
    raise SetUpError("no C++ compiler: install g++ or clang++ (%s), or set CXX" % how)


def project():
    """(dependencies, extras) of pyproject.toml; a few lines of it, read without tomllib (new in 3.11)."""
    with open(os.path.join(ROOT, "pyproject.toml")) as f:
        text = f.read()

    def strings(listing):
        return re.findall(r'"([^"]+)"', listing)

    extras = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    base = re.search(r"^dependencies = \[(.*?)\]", text, re.S | re.M).group(1)
    lists = re.findall(r"^([\w-]+) = \[(.*?)\]$", extras, re.S | re.M)
    return strings(base), {name: strings(listing) for name, listing in lists}


def name_of(requirement):
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group(0)).lower()


def enough(requirement, version):
    """Whether `version` meets the >= and < of `requirement` (all that pyproject.toml uses)."""

    def numbers(v):
        return [int(x) for x in re.findall(r"\d+", v.split("+")[0])[:3]]

    for sign, bound in re.findall(r"(>=|<)([\d.]+)", requirement.split(";")[0]):
        if (numbers(version) >= numbers(bound)) != (sign == ">="):
            return False
    return True


def missing(use, facts):
    """The requirements of `use` that the Python of `facts` lacks."""
    base, extras = project()
    wanted = list(base)
    for extra in USES[use]:
        wanted += extras[extra]
    lacking = []
    for requirement in dict.fromkeys(wanted):
        name = name_of(requirement)
        if name == "triton" and (facts["triton"] or facts["platform"] != "linux"):
            continue  # ROCm builds of torch bring it under another name; macOS has none
        if name not in facts["have"] or not enough(requirement, facts["have"][name]):
            lacking.append(requirement)
    return lacking


def pip(python, offline, *args):
    # compiling all that is installed takes half of the time; what is imported is compiled then
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-compile"]
    if offline:
        command += ["--no-index", "--find-links", WHEELS]
    environ = dict(os.environ, PIP_ROOT_USER_ACTION="ignore")
    run(command + list(args), env=environ)


def keep_what_is_there(facts, path):
    """Constraints for an environment that is not ours: what it has stays, the rest is as tested."""
    lines = [
        "%s==%s" % (n, v)
        for n, v in sorted(facts["have"].items())
        if "+" not in v and n not in ("pip", "reflib")
    ]
    with open(os.path.join(ROOT, "constraints.txt")) as f:
        lines += [s.strip() for s in f if "==" in s and s.split("==")[0] not in facts["have"]]
    with open(path, "w") as f:
        f.write("\n".join(lines) + "\n")
    return path


def install(python, use, ours, offline):
    """Install what `use` lacks into `python`; `ours` means `.venv`, where constraints.txt decides."""
    facts = probe(python)
    lacking = missing(use, facts)
    constraints = os.path.join(ROOT, "constraints.txt")
    if not ours:
        constraints = keep_what_is_there(facts, os.path.join(BUILD, "constraints-here.txt"))
    if any(name_of(r) == "torch" for r in lacking):
        say(
            "downloading torch %s (200 MB for CPU-only builds, 2 GB and more with CUDA), this takes minutes"
            % TORCH
        )
        pip(python, offline, "-c", constraints, "torch==" + TORCH)
        lacking = missing(use, probe(python))
    if lacking:
        source = "from .whl" if offline else "downloading"
        names = ", ".join(sorted(name_of(r) for r in lacking))
        say("%s, with what they need: %s" % (source, names))
        light = [r.split(";")[0].strip() for r in lacking]
        try:
            pip(python, offline, "-c", constraints, *light)
        except SetUpError as error:
            if ours:
                raise
            raise SetUpError(
                "%s\nset-up: the active environment stays as it was; `REFLIB_VENV=1 make %s` makes a "
                ".venv instead" % (error, use)
            ) from None
    link = link_of(python)
    if "reflib" not in facts["have"] or not os.path.exists(link):
        say("linking reflib itself into the environment (pip install -e .)")
        pip(python, offline, "--no-deps", "-e", ROOT)
        open(link, "w").close()


def link_of(python):
    """A file that says this pyproject.toml (its entry points, say) is the one linked into `python`."""
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as f:
        digest = hashlib.sha256(python.encode() + f.read()).hexdigest()
    return os.path.join(BUILD, "set-up", "linked-" + digest[:12])


def stamp_of(python, use):
    """Changes when the project's needs or the chosen Python change."""
    digest = hashlib.sha256(use.encode() + python.encode())
    for name in ("pyproject.toml", "constraints.txt", "tools/setup.py"):
        with open(os.path.join(ROOT, name), "rb") as f:
            digest.update(f.read())
    return digest.hexdigest()


def choose_python(force_venv):
    """(python, whether it is our own .venv). Makes `.venv` when there is no better choice."""
    active = active_python()
    facts = None if force_venv else probe(active)
    inside_ours = facts is not None and os.path.realpath(facts["prefix"]) == os.path.realpath(VENV)
    if has_torch(facts) and not inside_ours:
        if tuple(facts["version"]) < OLDEST_PYTHON:
            say(
                "the active environment has torch but Python %d.%d; reflib needs 3.11"
                % tuple(facts["version"][:2])
            )
        elif not facts["writable"]:
            say("the active environment has torch but may not be written to")
        else:
            say("using the active environment, which has torch %s" % facts["have"]["torch"])
            return facts["executable"], False
    python = os.path.join(VENV, "bin", "python")
    if probe(python) is None:
        maker = new_enough_python()
        say("making .venv, an environment for this project alone")
        shutil.rmtree(VENV, ignore_errors=True)
        run([maker, "-m", "venv", VENV])
    return python, True


def main(arguments):
    flags = {a for a in arguments if a.startswith("--")}
    uses = [a for a in arguments if not a.startswith("--")]
    if len(uses) != 1 or uses[0] not in USES or flags - {"--venv", "--offline"}:
        print(__doc__)
        return 2
    use = uses[0]
    offline = "--offline" in flags or os.environ.get("REFLIB_OFFLINE") == "1"
    force_venv = "--venv" in flags or os.environ.get("REFLIB_VENV") == "1"
    launcher, stamps = os.path.join(BUILD, "python"), os.path.join(BUILD, "set-up")
    try:
        os.makedirs(stamps, exist_ok=True)
        need_compiler(use)
        stamp = os.path.join(stamps, use)
        signature = "%s venv=%s" % (active_python(), force_venv)
        if os.path.exists(stamp):
            with open(stamp) as f:
                kept = json.load(f)
            same = kept["signature"] == signature and os.path.exists(kept["python"])
            if same and kept["stamp"] == stamp_of(kept["python"], use):
                write_launcher(launcher, kept["python"])
                return 0
        python, ours = choose_python(force_venv)
        install(python, use, ours, offline)
        write_launcher(launcher, python)
        with open(stamp, "w") as f:
            json.dump({"signature": signature, "python": python, "stamp": stamp_of(python, use)}, f)
        return 0
    except SetUpError as error:
        print("set-up: " + str(error), file=sys.stderr)
        return 1


def write_launcher(path, python):
    """`_build/python`: the chosen Python with its own tools (jupyter-book, ruff) first on PATH."""
    text = '#!/bin/sh\nPATH="%s:$PATH" exec "%s" "$@"\n' % (os.path.dirname(python), python)
    new = "%s.%d" % (path, os.getpid())  # two of make's targets may be set up at once
    with open(new, "w") as f:
        f.write(text)
    os.chmod(new, 0o755)
    os.replace(new, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
