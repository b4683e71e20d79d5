#!/bin/sh
# DPO of Qwen3-0.6B on UltraFeedback's 61,000 preference pairs.
#
# Hardware   one GPU of 24 GB with bf16: 9.6 GB for weights, gradients and Adam's moments (computed),
#            activations on top. The reference's log-probs are computed first, then it needs nothing.
# Expected   the first loss is 0.6931; eval_accuracy (of the implicit rewards) rises from one half.
#            Not yet run.
# Time       not measured.
# Memory     not measured.
#
# `--preset 24gb` stands for the precision and memory flags below.
set -e
python train_dpo.py --model Qwen/Qwen3-0.6B --out runs/qwen3-dpo \
    --data HuggingFaceH4/ultrafeedback_binarized::train_prefs \
    --eval_data HuggingFaceH4/ultrafeedback_binarized::test_prefs \
    --lr 5e-7 --beta 0.1 --nll_coef 0 --epochs 1 --batch_size 32 --max_len 1024 \
    --dtype bf16 --gradient_checkpointing true --micro_tokens 8192 \
    --eval_every 200 --save_every 200 --eval_prompts 32 --max_new_tokens 256
