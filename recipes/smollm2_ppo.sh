#!/bin/sh
# PPO of SmolLM2-135M-Instruct on the reward model that recipes/smollm2_rm.sh made. The prompts are
# those of its pairs.
#
# Hardware   one GPU of 16 GB (T4: fp16). Policy and critic train, 2.2 GB each; reference and reward
#            model only answer, 0.5 GB each (computed).
# Expected   kl_k1 0 and ratio_max 1 in the first iteration, then reward_mean rises while
#            kl_sequence stays in the single digits. Not yet run.
# Time       not measured.
# Memory     not measured.
#
# A reward model of 400 pairs is weak: read samples.jsonl, for a rising reward_mean alone may be
# over-optimisation (README, "PPO kept improving its reward and got worse").
set -e
python train_ppo.py --model HuggingFaceTB/SmolLM2-135M-Instruct --reward_model runs/smollm2-rm \
    --data runs/pairs_train.jsonl --eval_data runs/pairs_eval.jsonl --out runs/smollm2-ppo \
    --lr 1e-6 --critic_lr 1e-5 --critic_warmup 2 --epochs 4 --batch_size 32 --kl_coef 0.05 \
    --max_len 1024 --max_new_tokens 128 --eval_prompts 16 --eval_every 10 \
    --dtype fp16
