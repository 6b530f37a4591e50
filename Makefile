# The whole project in a handful of targets. `make repro` on a fresh machine needs Python ≥ 3.11, pip and git.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export MLFLOW_DISABLE_TELEMETRY := true
INSTALLED := $(VENV)/installed

.PHONY: help setup repro check test test-slow test-dag test-gpu bench ui clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(INSTALLED) ## create .venv with the pinned packages

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0] + "; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

repro: setup ## rebuild every table and figure that params.yaml asks for
	@mdn check
	@status=0; dvc repro --keep-going || { status=$$?; dvc repro --single-item --force render; }; \
	echo; echo "report  file://$(CURDIR)/reports/index.html"; echo "runs    source .venv/bin/activate && $$(mdn ui --print)"; exit $$status

check: setup ## lint, types and import contracts
	ruff check . && ruff format --check . && mypy && lint-imports

test: setup ## the fast tests
	python -m pytest

test-slow: setup ## the slow tests as well
	python -m pytest -m 'not gpu'

test-dag: setup ## the smoke DAG on cut-down parameters, with the edits of a newcomer
	python -m pytest -m slow tests/pipeline

test-gpu: setup ## the tests that need a CUDA device
	python -m pytest -m gpu

bench: setup ## tokenization against the tokenizer's own speed; a report of a hundred runs
	python benchmarks/tokenization.py
	python benchmarks/render.py

ui: setup ## browse the runs in MLflow
	mdn ui

clean: ## remove the virtual environment (never data, runs or reports)
	rm -rf $(VENV)
