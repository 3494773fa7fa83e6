# What a reader types. Each target sets itself up first (tools/setup.py says what it downloads).
# Settings: DEVICE=cpu|cuda  ONLY=fusion[,measuring]  P="-p name=value"  RUN="--sweep sweep.yaml"  N=5000
#           SWEEP="--only gpt2,unet --workers 4"  J=4 (test processes; all cores without it)  REPOSITORY=https://github.com/OWNER/NAME (of the book's links)
SHELL := /bin/bash
PYTHON ?= python3
SETUP = @$(PYTHON) tools/setup.py
unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes would compile the sources again
PY = _build/python
DEVICE ?= auto
ONLY ?=
P ?=
N ?= 1000
J ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() or 1)")
NBVAL = --nbval-lax --nbval-current-env --nbval-cell-timeout 600
# files stay whole, for what their tests share; those that take longest begin first (tests/conftest.py)
SPREAD = --dist loadfile --no-loadscope-reorder
# (tests/child has what makes a Python start sooner, this one too)
TESTS = PYTHONPATH=$(CURDIR)/tests/child:$$PYTHONPATH $(PY) -m pytest tests/cpu tests/book $(wildcard notebooks/*.ipynb) $(NBVAL) -n $(J) $(SPREAD)

.PHONY: help run test test-all test-opinfo fuzz test-gpu lab book record bench bench-gpu sweep wheels lint format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

run:  ## execute every notebook on this machine and build a book of it (DEVICE=, ONLY=, P=, RUN=)
	$(SETUP) run
	@$(PY) -m reflib.cli run --device $(DEVICE) $(if $(ONLY),--only $(ONLY)) $(P) $(RUN)

test:  ## what needs no GPU, of long sweeps a sample (15 minutes on 2 cores)
	$(SETUP) test
	$(TESTS) --quick $(PYTEST)

test-all:  ## what needs no GPU, all of it (45 minutes on 2 cores)
	$(SETUP) test
	$(TESTS) $(PYTEST)

test-opinfo:  ## PyTorch's own samples of every op, sharded and resumable (hours)
	$(SETUP) test
	$(PY) -m tests.opinfo $(OPINFO)

fuzz:  ## N random graphs against eager, and N damaged packages
	$(SETUP) test
	REFLIB_FUZZ=$(N) $(PY) -m pytest tests/cpu -k fuzz -n $(J) -q

test-gpu:  ## the ops, models and notebooks on a CUDA GPU
	$(SETUP) gpu
	$(PY) -m pytest tests/gpu $(wildcard notebooks/*.ipynb) $(NBVAL) -n 4 --dist loadfile -m "not alone" $(PYTEST); \
	beside=$$?; $(PY) -m pytest tests/gpu -m alone $(PYTEST) && exit $$beside

lab:  ## JupyterLab on the notebooks
	$(SETUP) lab
	$(PY) -m jupyter lab --notebook-dir notebooks

book:  ## the published book, from the committed notebooks, into _build/html
	$(SETUP) book
	@$(PY) -m reflib.cli book $(if $(REPOSITORY),--repository $(REPOSITORY))

record:  ## execute the notebooks here and write their outputs back (on a GPU, before a commit)
	$(SETUP) gpu
	@$(PY) -m reflib.cli record --device $(DEVICE) $(if $(ONLY),--only $(ONLY)) $(P) $(RECORD)

bench:  ## speed on the CPU, TorchInductor beside
	$(SETUP) test
	$(PY) -m tests.bench --device cpu
	$(PY) -m reflib.cli sweep --models tests/bench/functions.py --device cpu --size real

bench-gpu:  ## speed on a CUDA GPU, TorchInductor beside
	$(SETUP) gpu
	$(PY) -m tests.bench --device cuda
	$(PY) -m reflib.cli sweep --models tests/bench/functions.py --device cuda

sweep:  ## many models, inference and training, eager and TorchInductor beside (DEVICE=, ONLY=, SWEEP=); resumable
	$(SETUP) sweep
	@$(PY) -m reflib.cli sweep --device $(DEVICE) $(if $(ONLY),--only $(ONLY)) $(SWEEP)

wheels:  ## pack into .whl what an offline Python 3.12 host with torch needs
	@$(PYTHON) tools/wheels.py

lint:  ## ruff and mypy
	$(SETUP) test
	$(PY) -m ruff check .
	$(PY) -m mypy

format:  ## what ruff can put right by itself
	$(SETUP) test
	$(PY) -m ruff check --fix .

clean:  ## remove what these targets made (not .venv, not runs/)
	rm -rf _build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
