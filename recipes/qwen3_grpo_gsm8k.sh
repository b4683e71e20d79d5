#!/bin/sh
# GRPO of Qwen3-0.6B on GSM8K with the exact-match reward, after a short SFT on GSM8K's own solutions,
# which teaches the "#### 18" by which the reward reads an answer.
#
# Hardware   one GPU of 24 GB with bf16: 9.6 GB for weights, gradients and Adam's moments (computed),
#            the sampler's cache and activations on top.
# Expected   reward_mean (the share of right answers) and eval_accuracy rise. Not yet run.
# Time       not measured.
# Memory     not measured.
#
# `--preset 24gb` stands for the precision and memory flags below.
set -e
python train_sft.py --model Qwen/Qwen3-0.6B --data openai/gsm8k:main --out runs/qwen3-gsm8k-sft \
    --lr 1e-5 --max_steps 60 --batch_size 64 --max_len 1024 \
    --dtype bf16 --gradient_checkpointing true --micro_tokens 8192 --max_new_tokens 384
python train_grpo.py --model runs/qwen3-gsm8k-sft --out runs/qwen3-gsm8k-grpo \
    --data openai/gsm8k:main --eval_data openai/gsm8k:main:test --reward math --kl_coef 0 \
    --lr 1e-6 --max_steps 200 --batch_size 32 --group_size 8 --max_len 1024 --max_new_tokens 384 \
    --dtype bf16 --gradient_checkpointing true --micro_tokens 8192 --eval_every 50 --save_every 50
for name in qwen3-gsm8k-sft qwen3-gsm8k-grpo; do
    python -m nanorlhf.evaluate --model runs/$name --data openai/gsm8k:main:test --limit 500 \
        --temperature 0 --max_new_tokens 384
done
