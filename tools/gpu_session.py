"""Everything that wants a GPU, once, on a machine that may have no network: tests, benchmark, recordings.

    python3 tools/gpu_session.py OUT [--only STEP,...] [--limit STEP=SECONDS ...] [--commit HASH] [--devices 0,1]

Each step has its own time limit; one that fails or runs out of time is noted, and the next begins. All output
goes under OUT: a log for each step, bench.json, notebooks/ (recorded), summary.json. The summary comes last.
`--commit` names the commit where the checkout has no history. `--devices` names GPUs to record on at once.
Standard library only.

Steps: setup (installs what is missing, from .whl/ if that folder is there), doctor, tests, bench, record.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"setup": 60, "doctor": 20, "tests": 150, "bench": 190, "record": 110}  # under 9 minutes
GRACE = 8  # seconds between asking a step to end and ending it


def commands(python, out, limits, commit, devices=""):
    """{step: command}. The bench stops by itself a little before its limit, so that its JSON is whole."""
    offline = ["--offline"] if any((ROOT / ".whl").glob("*.whl")) else []
    parallel = ["-n", "4", "--dist", "loadfile"] if has(python, "xdist") else []
    return {
        "setup": [sys.executable, "tools/setup.py", "gpu", *offline],
        "doctor": [python, "-m", "reflib.cli", "doctor"],
        "tests": [python, "-m", "pytest", "tests/gpu", "-q", *parallel, f"--junitxml={out / 'tests.xml'}"],
        "bench": [python, "-m", "tests.bench", "gpu", "--out", str(out / "bench.json"),
                  "--budget", str(max(10, limits["bench"] - 10))],
        "record": [python, "-m", "reflib.cli", "record", "--device", "cuda", "--out", str(out / "notebooks"),
                   *(["--commit", commit] if commit else []), *(["--devices", devices] if devices else [])],
    }  # fmt: skip


def has(python, module):
    probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", probe], cwd=ROOT).returncode == 0


def run(command, log, seconds, environment):
    """(exit status, or None when it ran out of time; seconds)."""
    start = time.monotonic()
    with open(log, "w") as file:
        child = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            status = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(child)
    return status, time.monotonic() - start


def end(child):
    """Ask, wait, then insist; a step's own children are in its group."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
            child.wait(timeout=GRACE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def keep_logs_of_notebooks(out, since):
    """What `reflib record` left under runs/ after `since`: the copies of notebooks that failed, and logs.

    Only plain files: a kernel that was killed leaves sockets, which cannot be copied.
    """
    for made in sorted((ROOT / "runs").glob("record-*")):
        if made.stat().st_mtime < since:
            continue
        for path in made.rglob("*"):
            if path.is_file() and not path.is_symlink():
                target = out / "record" / made.name / path.relative_to(made)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)


def tail(log, lines):
    text = log.read_text(errors="replace")
    return [re.sub(r"\x1b\[[\d;]*m", "", line)[:240] for line in text.splitlines()[-lines:]]


def parse(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="steps, with commas between")
    parser.add_argument("--limit", action="append", default=[], metavar="STEP=SECONDS")
    parser.add_argument("--commit", default=os.environ.get("REFLIB_COMMIT", ""))
    parser.add_argument("--devices", default="", help="GPUs on which notebooks are recorded at once: 0,1")
    args = parser.parse_args(words)
    limits = dict(LIMITS)
    for item in args.limit:
        step, _, seconds = item.partition("=")
        if step not in limits or not seconds.isdigit():
            parser.error(f"--limit {item}: it is one of {', '.join(limits)}, =, seconds")
        limits[step] = int(seconds)
    args.limits, args.only = limits, [s for s in args.only.split(",") if s] or list(LIMITS)
    return args


def chosen_python():
    """The Python that the set-up chose, else this one."""
    made = ROOT / "_build" / "python"
    return str(made) if made.exists() else sys.executable


def main(words):
    args = parse(words)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if args.commit:
        environment["REFLIB_COMMIT"] = args.commit
    steps, began = [], time.time()
    for step in LIMITS:
        if step not in args.only:
            continue
        command = commands(chosen_python(), out, args.limits, args.commit, args.devices)[step]
        print(f"{step}: at most {args.limits[step]} s ...", flush=True)
        status, seconds = run(command, out / f"{step}.log", args.limits[step], environment)
        word = "ok" if status == 0 else "out of time" if status is None else f"exit status {status}"
        steps.append({"step": step, "status": word, "seconds": round(seconds, 1)})
        (out / "summary.json").write_text(json.dumps(steps, indent=1) + "\n")
    lines = {"tests": 15, "bench": 90, "record": 12, "setup": 3, "doctor": 3}
    keep_logs_of_notebooks(out, began)
    for entry in steps:
        print(f"\n--- {entry['step']}, the end of its log ---")
        print("\n".join(tail(out / f"{entry['step']}.log", lines[entry["step"]])))
    print()
    for entry in steps:
        print(f"{entry['step']:8} {entry['seconds']:6.1f} s  {entry['status']}")
    return 0 if all(entry["status"] == "ok" for entry in steps) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
