# Every target sets itself up in .venv from nothing: a fresh clone needs no step before "make demo" or "make test".

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test check format faults bench clean

help:  ## say what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */make \1\t/' | expand -t 14

demo: $(READY)  ## train a digit classifier on two replicas and load its checkpoint on one device
	CUDA_VISIBLE_DEVICES= $(BIN)/lockstep run -n 2 -m lockstep.recipes.digits  # on the CPU: runs on any machine

test: $(READY)  ## all tests
	$(BIN)/python -m pytest

check: $(READY)  ## ruff, mypy strict, import-linter
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports --no-cache

format: $(READY)  ## let ruff format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

faults: $(READY)  ## the longer campaigns of killed and stuck processes; the other tests hold a selection of them
	$(BIN)/python -m pytest -m campaign

bench: $(READY)  ## measure launch and step times against torch (some minutes; nothing else should run meanwhile)
	$(BIN)/python -m benchmarks.launch
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.collectives
	$(BIN)/python -m benchmarks.data_parallel
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.recorder
	PYTHONPATH=tests/site $(BIN)/python -m benchmarks.imagenet_input

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build src/*.egg-info

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchvision  # else it may replace torch
	touch $(READY)
