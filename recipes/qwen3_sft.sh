#!/bin/sh
# Supervised fine-tuning of Qwen3-0.6B on Alpaca's 52,000 instructions.
#
# Hardware   one GPU of 16 GB with bf16. Weights, gradients and Adam's moments in fp32 are 16 bytes
#            a weight, 9.6 GB (computed); activations come on top.
# Expected   the loss on held-out rows falls (eval_loss in metrics.jsonl). Not yet run.
# Time       not measured.
# Memory     not measured.
#
# With less memory: --micro_tokens 2048, or --preset 16gb in place of the precision and memory flags.
set -e
python train_sft.py --model Qwen/Qwen3-0.6B --data tatsu-lab/alpaca --out runs/qwen3-sft \
    --lr 1e-5 --epochs 1 --batch_size 64 --max_len 1024 \
    --dtype bf16 --gradient_checkpointing true --micro_tokens 8192 \
    --eval_every 100 --save_every 200 --max_new_tokens 256
python -m nanorlhf.generate --model runs/qwen3-sft --prompt "Name three primary colours."
