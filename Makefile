# make demo, test, test-full, lint, bench, docs: nothing else to remember.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
export OMP_NUM_THREADS := 1

.PHONY: demo test test-full lint bench docs

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-installed: pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[apply]'
	@touch $@

$(VENV)/.test-installed: pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[apply,test]'
	@touch $@ $(VENV)/.demo-installed

demo: $(VENV)/.demo-installed
	mkdir -p build
	$(BIN)/tap-plan tests/data/gpt2_tiny.onnx --cluster plans/demo-cluster.yaml --batch 8 --dim seq=16 \
	    --precision fp32 --mesh dp=2,tp=2 --constraint 'batch!=tp' -o build/demo-plan.json
	$(BIN)/tap-apply build/demo-plan.json --model tests/data/gpt2_tiny.onnx --nproc 4 --init random --verify
	$(BIN)/tap-show build/demo-plan.json

lint: $(VENV)/.test-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -m 'not full' -n $(JOBS)

test-full: $(VENV)/.test-installed
	$(BIN)/python -m pytest -m full -n $(JOBS)

bench: $(VENV)/.test-installed
	$(BIN)/python -m pytest tests/bench -o python_files='bench_*.py' -s

docs: $(VENV)/.test-installed
	$(BIN)/python -m pytest --doctest-glob='*.md' README.md docs
