# `make demo` and `make test` are all that a fresh machine needs; each sets up what it lacks.
PYTHON ?= python3
VENV ?= .venv
RUNS ?= runs
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: setup demo test test-all lint bench

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.txt
	@echo "installing into $(VENV), two to five minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $$(grep '^torch==' requirements.txt)
	$(BIN)/pip install --quiet -r requirements.txt
	touch $@

# The chain on the embedded world, two runs at a time, then one table and two pictures. A stage
# that is finished (its curves are drawn) is not run again.
demo: setup
	$(MAKE) --no-print-directory -j2 $(RUNS)/report/report.md
	@cat $(RUNS)/report/report.md
	@echo "pictures: $(RUNS)/report/curves.png $(RUNS)/report/gold_vs_kl.png"

$(RUNS)/sft/curves.png:
	$(BIN)/python train_sft.py --out $(RUNS)/sft --overwrite
$(RUNS)/rm/curves.png: $(RUNS)/sft/curves.png
	$(BIN)/python train_rm.py --model $(RUNS)/sft --out $(RUNS)/rm --overwrite
$(RUNS)/dpo/curves.png: $(RUNS)/sft/curves.png
	TQDM_POSITION=1 $(BIN)/python train_dpo.py --model $(RUNS)/sft --out $(RUNS)/dpo --overwrite
$(RUNS)/grpo/curves.png: $(RUNS)/sft/curves.png
	TQDM_POSITION=1 $(BIN)/python train_grpo.py --model $(RUNS)/sft --out $(RUNS)/grpo --overwrite
$(RUNS)/ppo/curves.png: $(RUNS)/rm/curves.png
	$(BIN)/python train_ppo.py --model $(RUNS)/sft --reward_model $(RUNS)/rm --out $(RUNS)/ppo \
		--overwrite
$(RUNS)/report/report.md: $(foreach run,sft rm dpo ppo grpo,$(RUNS)/$(run)/curves.png)
	$(BIN)/python -m nanorlhf.report $(foreach run,sft rm dpo ppo grpo,$(RUNS)/$(run)) \
		--base $(RUNS)/sft --reward_model $(RUNS)/rm --out $(RUNS)/report >/dev/null

test: setup
	$(BIN)/python -m pytest

test-all: setup
	$(BIN)/python -m pytest -m ""

lint: setup
	$(BIN)/ruff check .

bench: setup
	$(BIN)/python benchmarks/chain.py
