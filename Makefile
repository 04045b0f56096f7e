# `make train` and `make test` need a Python >= 3.11, pip and nothing else: both build .venv first.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := train,hf,plot,dev,triton,docs

# Overridable: make train ARGS="--max-steps 50", make test PYTEST_ARGS="-k data", PYTHON=/path/to/python3.12
PYTHON      ?=
ARGS        ?=
PYTEST_ARGS ?=

.PHONY: help venv train test test-rest test-all test-processors docs release lint format types clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)  ## build .venv with the package and its extras

# torch goes first and by its exact pin: pip then takes the build that suits this machine (a CPU build
# where one is configured, the CUDA build elsewhere), and the second command finds it in place.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  found=; \
	  for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      found=$$python; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "error: no Python >= 3.11 with the venv module in: $(or $(PYTHON),PATH); install one or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	    exit 1; \
	  fi; \
	  echo "creating $(VENV) with $$($$found --version)"; \
	  $$found -m venv --clear $(VENV); \
	fi
	@echo "installing fla_cp[$(EXTRAS)] into $(VENV)"
	@$(BIN)/python -m pip install -qq "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

train: $(STAMP)  ## train the default model on 4 context-parallel ranks; ARGS="..." adds flags
	$(BIN)/torchrun launch/train.py --cp 4 $(ARGS)

# A worker that has nothing left takes tests from the other: the dear ones stand side by side.
# One thread each: small products of several threads on two cores take a fifth longer.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: lint types  ## lint, type checks, then the fast tests; PYTEST_ARGS="..." selects
	@$(BIN)/python -m tests.gpu --stale
	$(PYTEST) -m "not wide" $(PYTEST_ARGS)

test-rest: $(STAMP)  ## the tests that `make test` leaves out: wide sweeps, all kernels compiled
	$(PYTEST) -m wide $(PYTEST_ARGS)

test-all: lint types  ## `make test` and `make test-rest` in one run
	@$(BIN)/python -m tests.gpu --stale
	$(PYTEST) $(PYTEST_ARGS)

test-processors: $(STAMP)  ## what compares bits or rounding, as other processors would compute it
	$(BIN)/python -m tests.processors $(PYTEST_ARGS)

docs: $(STAMP)  ## the documentation as web pages, in build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release: $(STAMP)  ## sdist, wheel and release note of the version in fla_cp/__init__.py, in dist
	$(BIN)/python tools/release.py --out dist

lint: $(STAMP)  ## ruff: rules and format; import-linter: layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite files as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)  ## mypy on the public package
	$(BIN)/mypy

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find fla_cp launch tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
