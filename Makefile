# Every target sets up what it needs by itself; the first one takes a minute or two, later ones start at once.

PYTHON ?= python3
OUT ?= out/first-light
WORKERS ?= 2
SAMPLE ?= third

BIN := .venv/bin
STAMP := .venv/.installed
DEPLOY_BIN := .venv-deploy/bin
DEPLOY_STAMP := .venv-deploy/.installed
FLOWER_SWITCHES := FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 RAY_USAGE_STATS_ENABLED=0
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
RIGHT_PYTHON := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
NO_PYTHON = Gradveil needs Python 3.11 or newer, and '$(PYTHON)' is not that; install one and name it, as in: make test PYTHON=python3.12

# One thread per test worker: two workers with two threads each on two cores run many times slower.
# Compiled code is kept, whatever the environment says: hundreds of processes are started and would compile all of it again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

CHECKS := $(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check . && $(BIN)/python -m mypy

.DEFAULT_GOAL := help
.PHONY: help setup audit test test-slow test-deploy test-mutants check index format clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '%-18s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## Create .venv and install Gradveil from the constraints

$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python $(RIGHT_PYTHON) 2>/dev/null || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) $(RIGHT_PYTHON) 2>/dev/null || { echo "$(NO_PYTHON)" >&2; exit 1; }; \
	  echo "Setting up .venv, once; this takes a minute or two."; $(PYTHON) -m venv --clear .venv; \
	fi
	@# torch comes first, alone and pinned, so that nothing else decides which build of it arrives.
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	@touch $@

$(DEPLOY_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) $(RIGHT_PYTHON) 2>/dev/null || { echo "$(NO_PYTHON)" >&2; exit 1; }
	@echo "Setting up .venv-deploy, once; this takes some minutes."; $(PYTHON) -m venv --clear .venv-deploy
	$(DEPLOY_BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt torch
	$(DEPLOY_BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev,flower]'
	@touch $@

audit: $(STAMP) ## Audit a built-in example end to end and write a report
	@$(BIN)/gradveil audit --out '$(OUT)'; status=$$?; \
	if [ -f '$(OUT)/report.html' ]; then echo "The report is in $(OUT)/report.html; open it in a browser."; fi; exit $$status

# Checks run beside the tests, and what they say comes last.
test: $(STAMP) ## Lint, types and all quick tests
	@said=$$(mktemp); { $(CHECKS); } >"$$said" 2>&1 & checks=$$!; \
	$(PYTEST) --numprocesses $(WORKERS) --dist worksteal; tested=$$?; \
	wait $$checks; checked=$$?; cat "$$said"; rm -f "$$said"; exit $$((tested || checked))

test-slow: $(STAMP) ## The tests that take more than five seconds each
	$(PYTEST) -m slow

# Flower brings forty packages that nothing else needs, so these tests have an environment of their own; a skip for want of it fails.
test-deploy: $(DEPLOY_STAMP) ## Real federations: Flower's messages, a simulation, a deployment with TLS and node keys
	@$(DEPLOY_BIN)/python -c 'import flwr, ray' && command -v openssl ssh-keygen >/dev/null || \
	  { echo "test-deploy needs flwr, ray, openssl and ssh-keygen" >&2; exit 1; }
	$(FLOWER_SWITCHES) OMP_NUM_THREADS=1 $(DEPLOY_BIN)/python -m pytest -m 'not slow' tests/unit/flower tests/unit/wire/test_arrays.py tests/deploy

test-mutants: $(STAMP) ## Put small faults into the package and see which no test notices; SAMPLE=practice for another sample
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.mutants --sample $(SAMPLE) --workers $(WORKERS)

check: $(STAMP) ## Lint and types only
	$(CHECKS)

index: $(STAMP) ## Write the index of methods and the tables in the docs, after what they show changed
	$(BIN)/python -m scripts.generate

format: $(STAMP) ## Put the code in shape
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean: ## Remove the environment and all caches; results in out/ stay
	rm -rf .venv .venv-deploy .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
