# `make demo` and `make test` set up everything on a fresh machine; the others expect nothing more.
PYTHON ?= python3
VENV ?= .venv
RUNS ?= runs
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: setup demo test test-all lint bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(shell grep '^torch==' requirements.txt)
	$(BIN)/pip install --quiet -r requirements.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable . \
		|| $(BIN)/pip install --quiet --no-deps --editable .
	touch $@

# SFT, then the reward model, then DPO and PPO beside GRPO on two cores, then the table.
demo: setup
	$(BIN)/python train_sft.py --out $(RUNS)/sft --overwrite
