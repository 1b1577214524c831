# SPDX-License-Identifier: Apache-2.0
#
# `make demo` and `make test` each need nothing but Python 3.11 or newer and a C++
# compiler: they create .venv, compile and install the package into it, and run.
#   PYTHON=python3.12    another Python
#   ARGS="-k lengths"    handed to pytest, or to the demo
#   INSTALL="-C cmake.define.CMAKE_CUDA_ARCHITECTURES=90"    handed to pip; this one
#                        compiles for one GPU architecture in place of all

PYTHON ?= python3
BIN := .venv/bin

# With an NVIDIA GPU at hand, jax comes with its CUDA plugin, to run on that GPU.
GPU := $(shell nvidia-smi -L 2>/dev/null | grep GPU)
EXTRAS := test$(if $(GPU),$(shell echo ,)cuda13)
INSTALLED := .venv/installed-$(if $(GPU),gpu,cpu)
CPP := $(wildcard ffi/*.h ffi/*.cuh ffi/*.cc ffi/*.cu)

.PHONY: help demo test lint format clean

help:
	@echo 'make demo    select from real scores, check the answer, time it'
	@echo 'make test    run the tests'
	@echo 'make lint    check format, style and types'
	@echo 'make format  format the sources'
	@echo 'make clean   remove .venv and everything built'

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py $(ARGS)

test: $(INSTALLED)
	@$(BIN)/python -m pytest $(ARGS)

lint: .venv/linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/linters
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Compiles in a build environment of pip's own, which brings the CUDA compiler. The
# build folder is not the one of `pip install --no-build-isolation`, so that the two
# do not undo each other's work.
$(INSTALLED): CMakeLists.txt pyproject.toml $(wildcard ffi/*)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	  "jax_topk needs Python 3.11 or newer and $(PYTHON) is %d.%d: name another " \
	  "one, as in: make PYTHON=python3.12" % sys.version_info[:2])'
	@if [ ! -x $(BIN)/pip ]; then \
	  echo "creating .venv"; \
	  $(PYTHON) -m venv --clear .venv && \
	  $(BIN)/python -m pip install --quiet --upgrade pip; \
	fi
	@echo "installing jax, and compiling jax_topk for CPU and CUDA (a few minutes)"
	@start=$$(date +%s) && \
	$(BIN)/python -m pip install --quiet -C build-dir=build/venv $(INSTALL) \
	  --editable '.[$(EXTRAS)]' && \
	$(BIN)/python -c 'import os, sys; from jax_topk import _ffi; \
	  cuda = _ffi.build_info()["cuda"]; \
	  print("installed in %s s, %s; the extension has %.1f MB" % ( \
	    sys.argv[1], cuda and "with CUDA " + cuda or "for the CPU only", \
	    os.path.getsize(_ffi.__file__) / 1e6))' $$(($$(date +%s) - start))
	@touch $@

.venv/linters: pyproject.toml | $(INSTALLED)
	@echo "installing the linters"
	@$(BIN)/python -m pip install --quiet --group lint
	@touch $@
