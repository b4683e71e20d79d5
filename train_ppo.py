"""Proximal policy optimisation (PPO) on a learned reward model: the RLHF of InstructGPT.

Four models (Ouyang et al. 2022, section 3.5): the policy that is trained, the frozen reference it
must stay near, the reward model that scores whole answers, and the critic that says at every token
which score to expect. An iteration: answer prompts; reward = -kl_coef * KL per token, plus the
score at the last token; advantages by GAE (Schulman et al. 2016, equation 16); then a few passes of
the clipped surrogate (Schulman et al. 2017, equation 7) for the policy and a clipped squared error
for the critic.

Where we differ from OpenRLHF: the KL estimate in the reward is k1, the unbiased one, unless told
otherwise; the critic starts as the reward model and is normalised like it; its values never see
padding; unfinished answers keep the tokens that were sampled, are scored at their last token, and
`--missing_eos_penalty` is taken off.

    python train_ppo.py                               # runs/sft and runs/rm -> runs/ppo
    python train_ppo.py --model my-sft --reward_model my-rm --data prompts.jsonl --lr 1e-6

What to expect on the embedded world, in two minutes: `ratio_max` 1 and `kl_k1` 0 in the first
iteration; the critic learns alone for three, then guesses vanish within ten: gold score 0.98.
"""

import copy
from dataclasses import dataclass

import torch

from nanorlhf import evaluate, lora
from nanorlhf.losses import (adaptive_kl, explained_variance, gae, kl_estimate, ppo_policy_loss,
                             ppo_stats, value_loss, whiten)
from nanorlhf.model import (DTYPES, autocast, load_policy, load_reference, load_reward_model,
                            load_scorer, save_model, token_logprobs, token_values)
from nanorlhf.rewards import load_reward
from nanorlhf.rollout import mini_batches, rl_prompts, roll_out
from nanorlhf.sampler import Sampler
from nanorlhf.utils import (Common, Run, UserError, add_stats, flag, lr_at, main, mean_stats,
                            optimizer_step, trainable, warn)


@dataclass
class Config(Common):
    ref_model: str = flag("", "frozen reference; empty: the start model")
    reward_model: str = flag("runs/rm", "reward model; the critic starts from it too")
    reward: str = flag("", "a function instead: toy, math, format, or file.py:function")
    offload: bool = flag(False, "frozen models wait on the CPU while they are not asked (not LoRA)")
    out: str = flag("runs/ppo", "run folder that is written")
    lr: float = flag(3e-4, "peak learning rate of the policy; 1e-6 for a real model")
    critic_lr: float = flag(5e-4, "peak learning rate of the critic; 1e-5 for a real model")
    critic_warmup: int = flag(3, "first iterations in which only the critic learns")
    batch_size: int = flag(128, "prompts of one iteration")
    group_size: int = flag(1, "answers to each prompt")
    inner_epochs: int = flag(2, "passes over the answers of one iteration")
    mini_batches: int = flag(2, "optimiser steps of one pass over the answers")
    kl_coef: float = flag(0.05, "weight of the KL penalty in the reward")
    kl_estimator: str = flag("k1", "of Schulman (2020)", choices=("k1", "k2", "k3"))
    kl_target: float = flag(0.0, "KL per answer that an adaptive kl_coef aims at; 0: fixed kl_coef")
    kl_horizon: int = flag(10000, "answers over which the adaptive kl_coef moves")
    gamma: float = flag(1.0, "discount of later rewards")
    gae_lambda: float = flag(0.95, "GAE: 0 trusts the critic, 1 trusts the sampled return")
    clip_eps_low: float = flag(0.2, "the ratio is clipped at 1 - this")
    clip_eps_high: float = flag(0.2, "the ratio is clipped at 1 + this")
    dual_clip: float = flag(0.0, "least objective, times a negative advantage; above 1; 0: none")
    value_clip: float = flag(0.2, "values move at most this far in an iteration; 0: no clipping")
    reward_clip: float = flag(10.0, "scores are cut to +- this")
    missing_eos_penalty: float = flag(1.0, "taken off the score of an answer that did not stop")
    tis_cap: float = flag(2.0, "cap of the sampler/trainer importance weight; 0: none")
    temperature: float = flag(1.0, "sampling temperature, also in every log-prob")
    max_new_tokens: int = flag(96, "longest answer")
    toy_rows: int = flag(5120, "prompts drawn from the embedded world")
    eval_prompts: int = flag(256, "held-out prompts answered at each evaluation")
    eval_every: int = flag(10, "steps between evaluations; 0: only at the end")
    save_every: int = flag(20, "steps between checkpoints; 0: none")


def train(cfg):
    if 0 < cfg.dual_clip <= 1:
        raise UserError(f"--dual_clip {cfg.dual_clip}: the bound must be above 1 (0: none)")
    run = Run(cfg)

    # --- data and reward ---
    model, tokenizer = load_policy(cfg.model)
    lora.adapt(model, cfg)  # --lora_rank, --device
    idle = "cpu" if cfg.offload and not cfg.lora_rank else cfg.device  # of the frozen models
    reward = load_reward(cfg.reward) if cfg.reward else None
    prompts, held_out = rl_prompts(cfg, model, tokenizer, reward)

    # --- the four models, and the sampler over the policy's own tensors ---
    reference = load_reference(cfg.ref_model, model, tokenizer, idle)
    if reward is None:
        reward = load_reward_model(cfg.reward_model, tokenizer, idle)
        critic = lora.twin(reward) if cfg.lora_rank else copy.deepcopy(reward)
    else:
        critic, _ = load_scorer(cfg.model)  # the policy's trunk under a head of zeros
    lora.adapt(critic, cfg)
    optimizer, scaler = trainable(model, cfg.lr, cfg)
    critic_optimizer, critic_scaler = trainable(critic, cfg.critic_lr, cfg)
    sampler = Sampler(model, tokenizer, dtype=DTYPES[cfg.dtype])
    start = run.start(reference, reward, model=model, optimizer=optimizer, scaler=scaler,
                      critic=critic, critic_optimizer=critic_optimizer, critic_scaler=critic_scaler)
    kl_coef, clip = run.kept.get("kl_coef", cfg.kl_coef), (cfg.clip_eps_low, cfg.clip_eps_high)

    # --- training ---
    for step, picked in run.steps(prompts, start):
        if cfg.critic_warmup >= run.total:
            warn(f"--critic_warmup {cfg.critic_warmup} takes all {run.total} iterations, so the "
                 "policy is not trained; lower it or raise --epochs")

        # 1. Answer the prompts of this iteration, score the answers, and ask the critic.
        rollout, metrics = roll_out(cfg, step, [prompts[i] for i in picked], sampler, reward,
                                    model, reference)
        with torch.no_grad(), autocast(cfg.device, cfg.dtype):
            rollout.values = torch.cat([token_values(critic, part)
                                        for part in rollout.split(cfg.micro_tokens)])  # (N,)
        mask = rollout.loss_mask

        # 2. Rewards per token: the KL penalty everywhere, the score where the answer ends.
        score = rollout.scores.nan_to_num().clamp(-cfg.reward_clip, cfg.reward_clip)
        score = score - cfg.missing_eos_penalty * ~rollout.stopped
        kl = kl_estimate(rollout.old_logp, rollout.ref_logp, cfg.kl_estimator)  # (N,)
        rollout.rewards = -kl_coef * kl * mask
        rollout.rewards[rollout.last - 1] += score  # position t stands for token t+1
        rollout.advantages, rollout.returns = gae(rollout.rewards, rollout.values, mask, cfg.gamma,
                                                  cfg.gae_lambda, rollout.cu_seqlens)
        rollout.advantages = whiten(rollout.advantages, mask)
        metrics |= {"kl_coef": kl_coef, "kl_penalty": -kl_coef * (kl * mask).sum() / mask.sum(),
                    "explained_variance": explained_variance(rollout.values, rollout.returns, mask)}

        # 3. Improve policy and critic on them, each with its own optimiser.
        lr = lr_at(step, run.total, cfg.lr, cfg.warmup_ratio)
        critic_lr = lr_at(step, run.total, cfg.critic_lr, cfg.warmup_ratio)
        train_policy, updates = step >= cfg.critic_warmup, []
        for mini in mini_batches(rollout, cfg, step, "token"):
            stats = {}
            for part in mini.split(cfg.micro_tokens):
                with autocast(cfg.device, cfg.dtype):
                    values = token_values(critic, part)
                    with torch.set_grad_enabled(train_policy):
                        logp, _ = token_logprobs(model, part, cfg.temperature)
                loss = ppo_policy_loss(logp, part.old_logp, part.advantages,
                                       part.loss_mask * part.trust, *clip, cfg.dual_clip or None)
                critic_loss = value_loss(values, part.values, part.returns, part.loss_mask,
                                         cfg.value_clip or None)
                if train_policy:
                    scaler.scale(loss).backward()
                critic_scaler.scale(critic_loss).backward()
                stats = add_stats(stats, {"loss": loss.item(), "value_loss": critic_loss.item()}
                                  | ppo_stats(logp, part.old_logp, part.advantages, part.loss_mask,
                                              *clip))
            stats["grad_norm"] = (optimizer_step(optimizer, lr, cfg.grad_clip, scaler)
                                  if train_policy else float("nan"))
            stats["critic_grad_norm"] = optimizer_step(critic_optimizer, critic_lr, cfg.grad_clip,
                                                       critic_scaler)
            updates.append(stats)
        metrics |= mean_stats(updates) | {"lr": lr, "tokens_per_s": run.speed(rollout)}
        if cfg.kl_target:
            kl_coef = adaptive_kl(kl_coef, metrics["kl_sequence"], cfg.kl_target, cfg.kl_horizon,
                                  len(rollout))
            run.kept["kl_coef"] = kl_coef

        # 4. Evaluate on held-out prompts, and keep a resume point.
        if run.due(step, cfg.eval_every):
            metrics |= evaluate.held_out_answers(run, step, sampler, held_out, "eval_")
        run.end_step(step, metrics)

    run.finish(lambda folder: save_model(model, tokenizer, folder))


if __name__ == "__main__":
    main(train, Config, __doc__)
