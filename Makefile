# `make quickstart` and `make test` need Python 3.11 or newer and make; everything else is set up on first use.
PYTHON ?= python3
VENV ?= .venv
# More arguments for pip, such as the index of torch's CPU builds (see README.md).
PIP_ARGS ?=

BIN := $(VENV)/bin
PINS := requirements.lock pyproject.toml
READY := $(VENV)/.ready-$(shell cat $(PINS) | cksum | tr -d ' ')

# One thread a process: ranks and engines share the cores.
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED = 0

.PHONY: setup quickstart test lint prove diagram clean

setup: $(READY)

$(READY): $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit("Slotwise needs Python 3.11 or newer; set PYTHON=…" if sys.version_info < (3, 11) else 0)'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

quickstart: $(READY)
	$(BIN)/slotwise train examples/quickstart.yaml

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -m "not prove"

# Longer proofs: the quickstart on two more seeds, and whatever else is marked `prove`.
prove: $(READY)
	$(BIN)/pytest -m prove

diagram: $(READY)
	$(BIN)/slotwise diagram > docs/state.mmd

clean:
	rm -rf $(VENV) build *.egg-info
