.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.PHONY: help serve test nightly bench-gpu lint demo-model setup lock clean

MODEL ?= demo
OPTIONS ?=
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
ARGS ?=
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 8 ? cores : 8)))
PYTHON ?=
PIP_ARGS ?=

VENV ?= .venv
BIN := $(VENV)/bin
# Named after what was installed: a change of either file asks for a new installation, a touch does not.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c -16)
COMPILED := kernels/paged_kernels/cpu/built/.made
CLIENTS := tests/e2e/clients

help:
	@echo "make serve       serve a model on a real Triton server; Ctrl-C stops it"
	@echo "                   MODEL=DIR                  a Hugging Face directory (the demo model if not given)"
	@echo "                   OPTIONS='key=value ...'    engine options"
	@echo "                   HTTP_PORT= GRPC_PORT= METRICS_PORT=    8000, 8001 and 8002 if not given"
	@echo "make test        lint, then every test but the nightly ones; ARGS='...' goes to pytest"
	@echo "                   WORKERS=N                  processes; one a core, up to 8, if not given"
	@echo "make nightly     the long tests, a night of ten hours, and a table of what they came to; ARGS='...' goes to pytest"
	@echo "                   ARGS='--hours 0.1'         that each long test may take; 1 if not given"
	@echo "make bench-gpu   on a machine with a GPU: checks and times the kernels and the engine, half an hour"
	@echo "make lint        ruff and mypy"
	@echo "make demo-model  only prepare the demo model"
	@echo "make setup       only make .venv"
	@echo "make lock        make constraints.txt again from pyproject.toml, and the tests' clients.txt (needs uv)"
	@echo "make clean       remove .venv, .cache and what the tools left"
	@echo "Any of them: PYTHON=... another interpreter for .venv; PIP_ARGS='...' more arguments for pip"

serve: setup
	@$(BIN)/paged serve '$(MODEL)' $(foreach option,$(OPTIONS),-o '$(option)') \
	  --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT)

# A process a core, of one thread each; a test goes to the one that is free, as some take a second and some a minute.
test: lint demo-model
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=load --maxschedchunk=1 $(ARGS)

nightly: setup demo-model
	$(BIN)/python -m pytest -m nightly $(ARGS)

bench-gpu: setup
	$(BIN)/python -m paged_bench.on_gpu $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

demo-model: setup
	@$(BIN)/python -m client.serving.demo_model

setup: $(STAMP) $(COMPILED)

# Without a compiler all works, only slower: no reason to stop.
$(COMPILED): $(STAMP) $(wildcard kernels/paged_kernels/cpu/csrc/*) kernels/paged_kernels/cpu/build.py
	@if $(BIN)/python -m paged_kernels.cpu.build; then touch $@; fi

$(STAMP): | $(BIN)/python
	@echo "Installing the packages into $(VENV): some minutes the first time"
	@$(BIN)/python -m pip install --disable-pip-version-check --upgrade -c constraints.txt $(PIP_ARGS) \
	  -e '.[client,server,test,bench]'
	@$(BIN)/python -m client.serving.server_files
	@rm -f $(VENV)/.installed-* && touch $@

# The plain python3 comes first: it is the one whose libpython a distribution is most likely to have. A name
# that is found may still not run (a version manager's shim), so each is tried.
$(BIN)/python:
	@for python in $(or $(PYTHON),python3 python3.12 python3.11 python3.10); do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' \
	    2>/dev/null; then \
	    echo "Making $(VENV) with $$("$$python" --version)"; \
	    exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo "make: none of '$(or $(PYTHON),python3 python3.12 python3.11 python3.10)' is a CPython 3.10, 3.11 or" \
	  "3.12 with venv and ensurepip (Debian and Ubuntu: apt install python3-venv)." \
	  "Name one: make PYTHON=/path/to/python3.12" >&2; \
	exit 1

# The sed drops what is true of every line: the platform that [tool.uv] names, and the upper bound.
lock:
	@{ sed -n '/^#/p' constraints.txt; \
	  uv pip compile --quiet --universal --python-version 3.10 --all-extras --no-emit-index-url --no-annotate \
	    --no-header pyproject.toml \
	  | sed -E "s/python_full_version < '3.13' and //; s/ and python_full_version < '3.13'//; \
	      s/( and|;)( [a-z_]+ [=!]= '[A-Za-z0-9_]+'( and)?)+\$$//; s/ +\$$//"; } > constraints.new
	@mv constraints.new constraints.txt
	@{ sed -n '/^#/p' $(CLIENTS).txt; \
	  uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_34 --no-annotate --no-header \
	    --no-emit-package perf-analyzer $(CLIENTS).in; } > clients.new
	@mv clients.new $(CLIENTS).txt

clean:
	rm -rf $(VENV) .cache kernels/paged_kernels/cpu/built build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
