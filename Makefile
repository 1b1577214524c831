# SPDX-License-Identifier: Apache-2.0
#
# `make demo` and `make test` each need nothing but Python 3.11 or newer and a C++
# compiler: they create .venv, compile and install the package into it, and run.
#   PYTHON=python3.12    another Python
#   VENV=build/other     another environment than .venv
#   JAX="jax==0.11.*"    another version of jax than the newest for that Python
#   ARGS="-k lengths"    handed to pytest, or to the demo
#   INSTALL="-C cmake.define.CMAKE_CUDA_ARCHITECTURES=90"    handed to pip; this one
#                        compiles for one GPU architecture in place of all

PYTHON ?= python3
VENV ?= .venv
JAX ?= jax
BIN := $(VENV)/bin

# With an NVIDIA GPU at hand, jax comes with its CUDA plugin, to run on that GPU.
GPU := $(shell nvidia-smi -L 2>/dev/null | grep GPU)
EXTRAS := test$(shell echo ,)examples$(if $(GPU),$(shell echo ,)cuda13)
INSTALLED := $(VENV)/installed-$(if $(GPU),gpu,cpu)
GRAPH_MODES := graphs-default graphs-every-call graphs-while graphs-off
CPP := $(wildcard ffi/*.h ffi/*.cuh ffi/*.cc ffi/*.cu benchmarks/*.cu)

.PHONY: help demo example test test-versions test-graphs $(GRAPH_MODES) fuzz \
  mutations sanitize bench lint format clean

help:
	@echo 'make demo    select from real scores, check the answer, time it'
	@echo 'make example train a language model with sparse attention'
	@echo 'make test    run the tests'
	@echo 'make fuzz    random problems against the oracle'
	@echo 'make lint    check format, style and types'
	@echo 'make format  format the sources'
	@echo 'make clean   remove .venv and everything built'
	@echo
	@echo 'docs/testing.md says what these are for:'
	@echo 'make mutations    break the sources in many ways, and see tests turn red'
	@echo 'make test-versions  the tests of transforms with each version of jax'
	@echo 'make test-graphs  on a GPU: under four command-buffer modes'
	@echo 'make sanitize     on a GPU: under compute-sanitizer'
	@echo 'make bench        on a GPU, with nvcc: times kernels and programs'

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py $(ARGS)

example: $(INSTALLED)
	@$(BIN)/python examples/sparse_attention.py $(ARGS)

# Without a GPU, programs are compiled for GPUs all the same, where XLA can do so.
COMPILE_ONLY := $(if $(GPU),,$(if $(filter Linux,$(shell uname -s)),$(VENV)/compile-only))

test: $(INSTALLED) $(COMPILE_ONLY)
	@$(if $(COMPILE_ONLY),JAX_TOPK_REQUIRE_COMPILE_ONLY=1) $(BIN)/python -m pytest $(ARGS)

# The tests of transforms with each minor version of jax for which a Python is found.
# Without a GPU to run on, kernels for one architecture will do.
ONE_GPU := $(if $(GPU),,-C cmake.define.CMAKE_CUDA_ARCHITECTURES=90-real)
test-versions:
	@INSTALL='$(or $(INSTALL),$(ONE_GPU))' $(PYTHON) tests/versions.py $(ARGS)

# What graphs can break, in each of XLA's modes of recording them; -j4 runs all at once.
GRAPH_TESTS := $(patsubst %,tests/test_%.py,row_state geometry jit vmap ad control_flow)
graphs-default: FLAGS :=
graphs-every-call: FLAGS := --xla_gpu_graph_min_graph_size=1
graphs-while: FLAGS := --xla_gpu_enable_command_buffer=+WHILE
graphs-off: FLAGS := --xla_gpu_enable_command_buffer=
test-graphs: $(GRAPH_MODES)

$(GRAPH_MODES): $(INSTALLED)
	@echo '$@: XLA_FLAGS=$(FLAGS)'
	@XLA_FLAGS='$(FLAGS)' JAX_TOPK_REQUIRE_GPU=1 $(BIN)/python -m pytest -q -m gpu \
	  -k 'not ten_thousand and not replays' $(GRAPH_TESTS) $(ARGS)

fuzz: $(INSTALLED)
	@$(BIN)/python tests/fuzz.py $(ARGS)

# With a GPU at hand those of the device code too.
mutations: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet nanobind cmake ninja
	@$(BIN)/python tests/mutations/run.py --cpu $(if $(GPU),--gpu) $(ARGS)

sanitize: $(INSTALLED)
	@$(BIN)/python tests/sanitize.py --tools $(ARGS)

# Kernels, then JAX, then tables and plots. The other names are for machines where
# jax_topk is installed already, and for results to keep:
#   make bench ARGS=--quick BENCH_PYTHON=python3 RESULTS=benchmarks/results/h200.jsonl
BENCH_PYTHON = $(BIN)/python
RESULTS = build/bench.jsonl
bench: build/kernels $(if $(filter $(BIN)/%,$(BENCH_PYTHON)),$(INSTALLED))
	@mkdir -p $(dir $(RESULTS)) && rm -f $(RESULTS)
	@build/kernels --json $(RESULTS) $(ARGS)
	@$(BENCH_PYTHON) benchmarks/jax_times.py --json $(RESULTS) $(ARGS)
	@$(BENCH_PYTHON) -m pip install --quiet matplotlib
	@$(BENCH_PYTHON) benchmarks/report.py $(RESULTS) --plots

build/kernels: benchmarks/kernels.cu $(wildcard ffi/*.h ffi/*.cuh ffi/*.cu)
	@mkdir -p build
	nvcc -std=c++17 -O3 -arch=native -t0 -DJAX_TOPK_CUDA -o $@ $(filter %.cu,$^)

# XLA's CUDA compiler, in the version of jax. In a folder of its own: JAX would take the
# plugin for a GPU.
$(VENV)/compile-only: | $(INSTALLED)
	@echo "installing XLA's CUDA compiler into $@"
	@version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
	rm -rf $@.part && $(BIN)/python -m pip install --quiet --no-deps --target $@.part \
	  jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version && mv $@.part $@

lint: $(VENV)/linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/linters
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Compiles in a build environment of pip's own, which brings the CUDA compiler. The
# build folder is not the one of `pip install --no-build-isolation`, so that the two
# do not undo each other's work.
$(INSTALLED): CMakeLists.txt pyproject.toml $(wildcard ffi/*)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	  "jax_topk needs Python 3.11 or newer and $(PYTHON) is %d.%d: name another " \
	  "one, as in: make PYTHON=python3.12" % sys.version_info[:2])'
	@if [ ! -x $(BIN)/pip ]; then \
	  echo "creating $(VENV)"; \
	  $(PYTHON) -m venv --clear $(VENV) && \
	  $(BIN)/python -m pip install --quiet --upgrade pip; \
	fi
	@echo "installing jax, and compiling jax_topk (a few minutes)"
	@start=$$(date +%s) && \
	$(BIN)/python -m pip install --quiet -C build-dir=$(VENV)/build $(INSTALL) \
	  --editable '.[$(EXTRAS)]' '$(JAX)' && \
	$(BIN)/python -c 'import os, sys; from jax_topk import _ffi; \
	  cuda = _ffi.build_info()["cuda"]; \
	  print("installed in %s s, %s; the extension has %.1f MB" % ( \
	    sys.argv[1], cuda and "with CUDA " + cuda or "for the CPU only", \
	    os.path.getsize(_ffi.__file__) / 1e6))' $$(($$(date +%s) - start))
	@touch $@

$(VENV)/linters: pyproject.toml | $(INSTALLED)
	@echo "installing the linters"
	@$(BIN)/python -m pip install --quiet --group lint
	@touch $@
