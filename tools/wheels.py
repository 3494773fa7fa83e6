"""Pack into `.whl` what a GPU host without a network needs, beside its own torch, pytest and matplotlib.

    python3 tools/wheels.py [python version, default 3.12]

There, `REFLIB_OFFLINE=1 make record` (or test-gpu) installs from this folder and reaches for nothing else.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = ROOT / ".whl"
NEEDED = """
    aiohappyeyeballs aiohttp aiosignal asttokens attrs certifi charset-normalizer click comm
    coverage debugpy entrypoints execnet executing expecttest fastjsonschema frozenlist hypothesis
    idna iniconfig ipykernel ipython ipython-pygments-lexers ipywidgets jedi jsonschema
    jsonschema-specifications jupyter-client jupyter-core jupyterlab-widgets matplotlib-inline
    multidict nbclient nbformat nbval nest-asyncio2 packaging papermill parso pexpect platformdirs
    pluggy prompt-toolkit propcache psutil ptyprocess pure-eval pygments pytest pytest-xdist
    python-dateutil pyyaml pyzmq referencing requests rpds-py setuptools six sortedcontainers
    stack-data tenacity tornado tqdm traitlets typing-extensions urllib3 wcwidth widgetsnbextension
    yarl
""".split()
# Newest first: a host runs every one of these whose glibc is not newer than its own.
PLATFORMS = [f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_17", "2014", "_2_12")]


def pins() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.M))


def main() -> int:
    version = sys.argv[1] if len(sys.argv) > 1 else "3.12"
    TARGET.mkdir(exist_ok=True)
    known = pins()
    wanted = [f"{name}=={known[name]}" if name in known else name for name in NEEDED]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        version,
        "--implementation",
        "cp",
        "--dest",
        str(TARGET),
    ]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    done = subprocess.run([*command, *wanted])
    if done.returncode == 0:
        wheels = list(TARGET.glob("*.whl"))
        size = sum(w.stat().st_size for w in wheels) / 2**20
        print(f"{len(wheels)} wheels for Python {version} in .whl, {size:.0f} MiB")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
