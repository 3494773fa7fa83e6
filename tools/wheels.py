"""Pack into `.whl` what a GPU host without a network needs, beside its own torch, pytest and matplotlib.

    python3 tools/wheels.py [python version, default 3.12] [--no-book]

There, `REFLIB_OFFLINE=1 make record` (or run, or test-gpu) installs from this folder and reaches for nothing else.
--no-book leaves out half, which only `make run` there would need.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = ROOT / ".whl"
NEEDED = """
    aiohappyeyeballs aiohttp aiosignal asttokens attrs certifi charset-normalizer click cloudpickle
    comm coverage dask debugpy distributed entrypoints execnet executing expecttest fastjsonschema
    frozenlist fsspec hypothesis idna iniconfig ipykernel ipython ipython-pygments-lexers
    ipywidgets jedi jinja2 jsonschema jsonschema-specifications jupyter-client jupyter-core
    jupyterlab-widgets locket markupsafe matplotlib-inline msgpack multidict nbclient nbformat
    nbval nest-asyncio2 packaging papermill parso partd pexpect platformdirs pluggy prompt-toolkit
    propcache psutil ptyprocess pure-eval pygments pytest pytest-xdist python-dateutil pyyaml pyzmq
    referencing requests rpds-py setuptools six sortedcontainers stack-data tblib tenacity toolz
    tornado tqdm traitlets typing-extensions urllib3 wcwidth widgetsnbextension yarl zict
""".split()
# What `make run` needs besides, to build the book of a run.
BOOK = """
    accessible-pygments alabaster babel beautifulsoup4 docutils imagesize importlib-metadata
    jupyter-book jupyter-cache latexcodec lazy-importer linkify-it-py markdown-it-py mdit-py-plugins
    mdurl myst-nb myst-parser pybtex pybtex-docutils pydata-sphinx-theme snowballstemmer soupsieve
    sphinx sphinx-book-theme sphinx-comments sphinx-copybutton sphinx-design sphinx-external-toc
    sphinx-jupyterbook-latex sphinx-multitoc-numbering sphinx-thebe sphinx-togglebutton
    sphinxcontrib-applehelp sphinxcontrib-bibtex sphinxcontrib-devhelp sphinxcontrib-htmlhelp
    sphinxcontrib-jsmath sphinxcontrib-qthelp sphinxcontrib-serializinghtml sqlalchemy tabulate
    wheel zipp
""".split()
# Newest first: a host runs every one of these whose glibc is not newer than its own.
PLATFORMS = [f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_17", "2014", "_2_12")]


def pins() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.M))


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--no-book"]
    version = words[0] if words else "3.12"
    names = NEEDED if "--no-book" in sys.argv else NEEDED + BOOK
    TARGET.mkdir(exist_ok=True)
    known = pins()
    wanted = [f"{name}=={known[name]}" if name in known else name for name in names]
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
