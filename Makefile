.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.PHONY: help serve quick quick-lint quick-tests quick-server test test-modern nightly bench-gpu lint style reference matrix demo-model wheel setup setup-serve setup-modern lock clean

MODEL ?= demo
OPTIONS ?=
LISTEN_ADDRESS ?= 127.0.0.1
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
OPENAI_PORT ?= 8003
ARGS ?=
TEST_TIMEOUT ?= 1200
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 8 ? cores + 1 : 8)))
PYTHON ?=
PIP_ARGS ?=

VENV ?= .venv
MODERN ?= .venv-modern
BIN := $(VENV)/bin
CLIENTS := tests/e2e/clients
LINT := style  # mypy is one of the tests, beside others

# Packages are installed without bytecode, which is written when they are imported.
unexport PYTHONDONTWRITEBYTECODE

# Installs a set of packages in an environment, if it is missing, with the first of some interpreters. That of an
# environment that exists comes before them. Each name is tried, because one that is found may not run (a version
# manager's shim).
define SET_UP
@for python in $(2)/bin/python $(or $(PYTHON),$(3)); do \
  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' \
    2>/dev/null; then \
    exec "$$python" bootstrap.py $(1) --venv '$(2)' -- $(PIP_ARGS); \
  fi; \
done; \
echo "make: none of '$(or $(PYTHON),$(3))' is a CPython 3.10, 3.11 or" \
  "3.12 with venv and ensurepip (Debian and Ubuntu: apt install python3-venv)." \
  "Set PYTHON to one: make PYTHON=/path/to/python3.12" >&2; \
exit 1
endef

help:
	@echo "make serve       serve a model on a Triton server until Ctrl-C"
	@echo "                   MODEL=DIR                  Hugging Face directory or GGUF file (default: the demo model)"
	@echo "                   OPTIONS='key=value ...'    engine options"
	@echo "                   LISTEN_ADDRESS=            default 127.0.0.1; 0.0.0.0 opens the server to other machines"
	@echo "                   HTTP_PORT= GRPC_PORT= METRICS_PORT= OPENAI_PORT=    default 8000 to 8003"
	@echo "make quick       check a change in a minute and a half: lint what changed, run the cheap tests that need no torch,"
	@echo "                 and start a server with the demo model"
	@echo "make test        run lint and all tests except the nightly ones; ARGS='...' goes to pytest"
	@echo "                   WORKERS=N                  processes (default: one more than cores, at most 8)"
	@echo "                   TEST_TIMEOUT=SECONDS       after which a test that hangs is ended (default: 1200)"
	@echo "make test-modern  run the tests that need no tritonserver with the newest packages (numpy 2) on Python 3.12"
	@echo "make nightly     run the long tests, and test-modern; ARGS='...' goes to pytest"
	@echo "                   ARGS='--hours 0.1'         limit of each long test (default: 1)"
	@echo "make bench-gpu   check and time kernels and engine on a GPU, without network; ARGS='--group checks engine --minutes 10'"
	@echo "make lint        run ruff and mypy; make style runs ruff alone"
	@echo "make reference   write docs/reference and the schema of the Helm chart from the code"
	@echo "make matrix      write docs/reference/models.md from the tests of all model families"
	@echo "make demo-model  prepare the demo model"
	@echo "make wheel       write a manylinux wheel with the compiled kernels to dist/"
	@echo "make setup       create .venv with all packages, also those of the tests"
	@echo "make lock        update the constraints files from pyproject.toml, and the clients.txt of the tests (needs uv)"
	@echo "make clean       remove .venv, .venv-modern, .cache and build results"
	@echo "With every target: PYTHON=... interpreter of the environment; PIP_ARGS='...' further arguments for pip"

serve: setup-serve
	@$(BIN)/paged serve '$(MODEL)' $(foreach option,$(OPTIONS),-o '$(option)') \
	  --host '$(LISTEN_ADDRESS)' --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) \
	  --openai-port $(OPENAI_PORT)

# Processes with one thread each, one more than there are cores, because some tests wait. The tests of a file, or of a
# shared server, run in one process, which starts its servers and loads its models once (tests/support/runs.py). A test
# that hangs ends its process, and fails with the tracebacks of all threads.
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(1)/bin/python -m pytest --numprocesses=$(WORKERS) \
  --dist=loadgroup --no-loadscope-reorder --max-worker-restart=0 \
  -o faulthandler_timeout=$(TEST_TIMEOUT) -o faulthandler_exit_on_timeout=true

test: $(LINT) setup demo-model
	$(call PYTEST,$(VENV)) --costs --durations=20 $(ARGS)

# Without a server: what a container gets, whose server is newer than the one in the wheel. 25 minutes of CPU time. The
# environment takes 2 GB with PyTorch's CPU build.
test-modern: setup-modern demo-model
	$(call PYTEST,$(MODERN)) --ignore=tests/e2e $(ARGS)

quick: setup demo-model
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target quick-tests quick-server quick-lint

# What changed since the last commit on BASE: Python files that are committed, not committed, or new.
BASE ?= main
CHANGED = $(shell { git diff --name-only --diff-filter=d $$(git merge-base HEAD $(BASE) 2>/dev/null || echo HEAD) -- '*.py'; \
  git ls-files --others --exclude-standard -- '*.py'; } | sort --unique)
TYPED = $(filter paged_backend/% paged_bench/% client/% kernels/%,$(CHANGED))

quick-lint:
	$(if $(CHANGED),$(BIN)/ruff check $(CHANGED) && $(BIN)/ruff format --check --quiet $(CHANGED))
	$(if $(TYPED),$(BIN)/mypy $(TYPED))

quick-tests:
	$(call PYTEST,$(VENV)) --without-torch --max-cost 3 --quiet $(ARGS)

quick-server:
	$(BIN)/python -m pytest --quiet tests/e2e/test_smoke.py

nightly: setup demo-model
	status=0; $(BIN)/python -m pytest -m nightly $(ARGS) || status=$$?; \
	  $(MAKE) --no-print-directory test-modern ARGS= || status=$$?; exit $$status

# Without .venv it uses the packages of the machine, which may have a GPU and torch, but no network.
bench-gpu:
	@python=$(BIN)/python; [ -x "$$python" ] || python="$(or $(PYTHON),python3)"; \
	  "$$python" -c 'import torch, triton, transformers' || { \
	    echo "make bench-gpu: $$python lacks packages of the engine. Set PYTHON to an interpreter that has torch," \
	      "triton and transformers: make bench-gpu PYTHON=/path/to/python3" >&2; exit 1; }; \
	  PYTHONPATH="$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/client$${PYTHONPATH:+:$$PYTHONPATH}" \
	  "$$python" -m paged_bench.on_gpu $(ARGS)

lint: style
	$(BIN)/mypy

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

reference: setup
	$(BIN)/python -m paged_backend.server.reference --write docs/reference \
	  --schema deploy/kubernetes/chart/values.schema.json

# Runs the tests that are nightly, too, such as those of tensor parallelism.
matrix: setup
	@mkdir -p .cache
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -m 'nightly or not nightly' \
	  --support-matrix .cache/support_matrix.json $(ARGS) \
	  tests/integration/test_families.py tests/integration/test_family_options.py
	$(BIN)/python -m tests.support.support_matrix .cache/support_matrix.json --write docs/reference/models.md

demo-model: setup-serve
	@$(BIN)/python -m paged_client.serving.demo_model

# The kernels do not depend on the version of CPython. auditwheel names the oldest manylinux platform whose libraries
# have all symbols that the kernels use. PyTorch's libraries come with PyTorch.
wheel: setup
	PYTHONPATH=kernels $(BIN)/python -m paged_kernels.cpu.build --all
	rm -rf build
	$(BIN)/python -m build --wheel --outdir build/wheel -C=--build-option=--plat-name=linux_$$(uname -m)
	$(BIN)/python -m auditwheel repair --patcher none --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist \
	  build/wheel/*.whl

# python3 comes first, because distributions are most likely to have its libpython, which the server needs.
setup:
	$(call SET_UP,test,$(VENV),python3 python3.12 python3.11 python3.10)

setup-serve:
	$(call SET_UP,serve,$(VENV),python3 python3.12 python3.11 python3.10)

setup-modern:
	$(call SET_UP,modern,$(MODERN),python3.12 python3 python3.11 python3.10)

# Updates the constraints of a set of packages. The sed removes the markers that hold for every line: the platform of
# [tool.uv] and the upper Python version.
define LOCK
@{ sed -n '/^#/p' $(1); \
  extras=$$(python3 -c 'import bootstrap; print("", *bootstrap.SETS["$(2)"], sep=" --extra ")'); \
  uv pip compile --quiet --universal --python-version 3.10 $$extras $(3) --no-emit-index-url --no-annotate \
    --no-header pyproject.toml \
  | sed -E "s/python_full_version < '3.13' and //; s/ and python_full_version < '3.13'//; \
      s/( and|;)( [a-z_]+ [=!]= '[A-Za-z0-9_]+'( and)?)+\$$//; s/ +\$$//"; } > constraints.new
@mv constraints.new $(1)
endef

lock:
	$(call LOCK,constraints.txt,test,--group server-pins)
	$(call LOCK,constraints-modern.txt,modern)
	@{ sed -n '/^#/p' $(CLIENTS).txt; \
	  uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_34 --no-annotate --no-header \
	    --no-emit-package perf-analyzer $(CLIENTS).in; } > clients.new
	@mv clients.new $(CLIENTS).txt

clean:
	rm -rf $(VENV) $(MODERN) .cache kernels/paged_kernels/cpu/built build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
