# vitmods: `make demo` and `make test` do everything from a fresh clone. `make` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
UV ?= uv
WORKERS ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests start commands and workers: each would compile the package again. Installed packages are compiled when they are
# first imported: compiling all of their 28,000 files takes pip two minutes.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help venv demo test test-long lint docs browser pytest soak gpu-check format lock clean test-minimum fuzz minimum-lock

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(READY)  ## make .venv with the locked dependencies and vitmods itself

$(READY): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON). Install Python 3.11 to 3.14, or name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || { echo "vitmods needs Python 3.11 to 3.14; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make environments. Install its venv module (Debian, Ubuntu: apt-get install python3-venv)." >&2; exit 1; }
	@echo "Making $(VENV): the first time this downloads PyTorch and takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(READY)  ## compare three changes of a small ViT on photos of clothes, which come along; a few minutes
	$(BIN)/vitmods compare --data clothes --base mu2/8 --arms levit dpn rms --epochs 20 --lr 4e-3 --batch-size 64 \
		--test-fraction 0.4 --seeds 5 --cost-seconds 10 --out runs/demo

test: $(READY)  ## lint, types, import contract, the site and all tests
	@$(MAKE) --no-print-directory --jobs 2 lint docs
	@$(MAKE) --no-print-directory pytest

lint: $(READY)  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)  ## the documentation as a site without outside parts, in build/site; every warning is an error
	OMP_NUM_THREADS=1 $(BIN)/python docs/site/build.py build/site

browser: docs  ## check every page of the site in Chromium: desktop, phone, light, dark and print; four minutes
	$(BIN)/python docs/site/browser.py build/site

# One thread in each of the test processes: more than one process on all cores is slower and not repeatable.
pytest: $(READY)  ## all tests, in WORKERS processes; PYTEST_ARGS="tests/train -x" for some
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-long: $(READY)  ## simulations and repetitions that are too long for every run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m long $(PYTEST_ARGS)

soak: $(READY)  ## 200 tiny trials with memory and descriptors watched, then 20 kills of a whole study; under 40 minutes
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --out benchmarks/results

# Without a GPU nothing is downloaded first.
gpu-check:  ## on a machine with a GPU, ten minutes: its tests, tables and goals, in one file to send back, and a page
	@command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null || { echo "There is no NVIDIA GPU here: nvidia-smi lists none." >&2; exit 1; }
	@$(MAKE) --no-print-directory $(READY)
	$(BIN)/python benchmarks/gpu_check.py

# The lowest versions that pyproject.toml allows, in an environment of their own.
MINIMUM := .venv-minimum
MINIMUM_TESTS := tests/security tests/fuzz tests/adapters/test_untrusted_weights.py tests/adapters/test_saved_folders.py \
	tests/adapters/test_timm_equal.py tests/adapters/test_huggingface_equal.py \
	tests/changes/test_apply.py tests/model/test_config.py tests/data/test_read.py tests/data/sources \
	tests/study/test_predict.py tests/study/test_store.py tests/report/test_report.py tests/finetune/test_delta.py \
	$(addprefix tests/changes/test_all_changes.py::test_,it_is_one_graph one_change_of_each_kind_compiles_together inductor it_exports)

$(MINIMUM)/.ready: requirements-minimum.txt
	$(PYTHON) -m venv $(MINIMUM)
	$(MINIMUM)/bin/python -m pip install --quiet --requirement requirements-minimum.txt \
		pytest pytest-xdist hypothesis webdataset hatchling editables
	$(MINIMUM)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

test-minimum: $(MINIMUM)/.ready  ## files from outside, adapters, sources and a small study, with the lowest versions allowed
	OMP_NUM_THREADS=1 $(MINIMUM)/bin/python -m pytest --numprocesses $(WORKERS) -p no:cacheprovider \
		$(MINIMUM_TESTS)
	out=$$(mktemp -d) && $(MINIMUM)/bin/vitmods compare --data digits --base mu1/2 --arms dpn rms --epochs 1 --seeds 2 \
		--cost-seconds 0 --device cpu --out "$$out/study" && rm -r "$$out"

FUZZ_SECONDS ?= 600
fuzz: $(READY)  ## hostile input for all readers, FUZZ_SECONDS of CPU time for each of five kinds (finds more with atheris)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz.py --seconds $(FUZZ_SECONDS)

format: $(READY)  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Exact versions with hashes for Python 3.11 to 3.14, and no index address.
lock:  ## rebuild requirements.lock from pyproject.toml (needs uv)
	@command -v $(UV) >/dev/null || { echo "make lock needs uv: python3 -m pip install uv" >&2; exit 1; }
	$(UV) pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
		--quiet --no-emit-index-url --no-annotate --no-header --output-file requirements.lock

minimum-lock:  ## write requirements-minimum.txt from pyproject.toml
	$(PYTHON) benchmarks/minimum.py > requirements-minimum.txt

clean:  ## remove the environment and what tools have cached; runs/ stays
	rm -rf $(VENV) $(MINIMUM) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
