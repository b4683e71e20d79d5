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

What to expect on the embedded world: EXPECTED
"""

import copy
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from nanorlhf import data, evaluate, toy
from nanorlhf.losses import (
    adaptive_kl, explained_variance, gae, importance_weights, kl_estimate, ppo_policy_loss,
    ppo_stats, token_weights, value_loss, whiten,
)
from nanorlhf.model import (
    DTYPES, autocast, frozen_copy, load_policy, load_reward_model, load_scorer, save_model,
    token_logprobs, token_values,
)
from nanorlhf.rewards import load_reward, readable
from nanorlhf.rollout import (
    check_rl_flags, judge, lay_out, rollout_metrics, score_tokens, warn_if_hopeless,
)
from nanorlhf.sampler import Sampler, SamplingParams
from nanorlhf.utils import (
    Common, Run, add_stats, adamw, derive_seed, flag, fp16_scaler, lr_at, main, optimizer_step,
    seed_everything,
)


@dataclass
class Config(Common):
    model: str = flag("runs/sft", "start model")
    ref_model: str = flag("", "frozen reference; empty: the start model")
    reward_model: str = flag("runs/rm", "reward model; the critic starts from it too")
    reward: str = flag("", "a function instead of the reward model: toy, math, file.py:name")
    out: str = flag("runs/ppo", "run folder that is written")
    lr: float = flag(3e-4, "peak learning rate of the policy; 1e-6 for a real model")
    critic_lr: float = flag(5e-4, "peak learning rate of the critic; 1e-5 for a real model")
    critic_warmup: int = flag(3, "first iterations in which only the critic learns")
    batch_size: int = flag(128, "prompts of one iteration")
    group_size: int = flag(1, "answers to each prompt")
    inner_epochs: int = flag(2, "passes over the answers of one iteration")
    mini_batches: int = flag(2, "optimiser steps of one pass over the answers")
    kl_coef: float = flag(0.05, "weight of the KL penalty in the reward")
    kl_estimator: str = flag("k1", "k1, k2 or k3 (Schulman 2020)")
    kl_target: float = flag(0.0, "KL per answer that an adaptive kl_coef aims at; 0: fixed kl_coef")
    kl_horizon: int = flag(10000, "answers over which the adaptive kl_coef moves")
    gamma: float = flag(1.0, "discount of later rewards")
    gae_lambda: float = flag(0.95, "GAE: 0 trusts the critic, 1 trusts the sampled return")
    clip_eps_low: float = flag(0.2, "the ratio is clipped at 1 - this")
    clip_eps_high: float = flag(0.2, "the ratio is clipped at 1 + this")
    dual_clip: float = flag(0.0, "lower bound of the loss for negative advantages; 0: none")
    value_clip: float = flag(0.2, "values move at most this far in an iteration; 0: no clipping")
    reward_clip: float = flag(10.0, "scores are cut to +- this")
    missing_eos_penalty: float = flag(1.0, "taken off the score of an answer that did not stop")
    tis_cap: float = flag(2.0, "cap of the sampler/trainer importance weight; 0: none")
    temperature: float = flag(1.0, "sampling temperature, also in every log-prob")
    top_k: int = flag(0, "refused in RL unless 0: see --help of nanorlhf.generate")
    top_p: float = flag(1.0, "refused in RL unless 1")
    min_p: float = flag(0.0, "refused in RL unless 0")
    repetition_penalty: float = flag(1.0, "refused in RL unless 1")
    max_new_tokens: int = flag(96, "longest answer")
    toy_rows: int = flag(5120, "prompts drawn from the embedded world")
    eval_prompts: int = flag(256, "held-out prompts answered at each evaluation")
    eval_every: int = flag(10, "steps between evaluations; 0: only at the end")
    save_every: int = flag(20, "steps between checkpoints; 0: none")


def train(cfg):
    check_rl_flags(cfg)
    run = Run(cfg)
    seed_everything(cfg.seed)

    # --- data and reward ---
    embedded = cfg.data == "toy"
    model, tokenizer = load_policy(cfg.model, cfg.device)
    reward = load_reward(cfg.reward) if cfg.reward else None
    train_rows, eval_rows = data.train_and_eval_rows(
        cfg, partial(toy.prompts, cfg.toy_rows), partial(toy.prompts, cfg.eval_prompts))
    room = cfg.max_len - cfg.max_new_tokens  # for the prompt
    prompts = data.encode_prompts(train_rows, tokenizer, room, readable(reward))
    held_out = data.encode_prompts(eval_rows[: cfg.eval_prompts], tokenizer, room)
    data.show_masks([(prompts[0][0], [0] * len(prompts[0][0]))], tokenizer)

    # --- the four models, and the sampler over the policy's own tensors ---
    reference = (load_policy(cfg.ref_model, cfg.device)[0].requires_grad_(False)
                 if cfg.ref_model else frozen_copy(model))
    if reward is None:
        reward = load_reward_model(cfg.reward_model, tokenizer, cfg.device)
        critic = copy.deepcopy(reward).requires_grad_(True)
    else:
        critic, _ = load_scorer(cfg.model, cfg.device)  # the policy's trunk under a head of zeros
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        critic.gradient_checkpointing_enable()
    model.train(), critic.train()
    sampler = Sampler(model, tokenizer, dtype=DTYPES[cfg.dtype])
    optimizer = adamw(model, cfg.lr, cfg.weight_decay)
    critic_optimizer = adamw(critic, cfg.critic_lr, cfg.weight_decay)
    scaler, critic_scaler = fp16_scaler(cfg), fp16_scaler(cfg)
    state = dict(model=model, critic=critic, optimizer=optimizer, scaler=scaler,
                 critic_optimizer=critic_optimizer, critic_scaler=critic_scaler)
    steps_per_epoch = -(-len(prompts) // cfg.batch_size)
    total = cfg.max_steps or cfg.epochs * steps_per_epoch
    kl_coef = cfg.kl_coef
    run.start()
    start = 0
    if cfg.resume:
        start, extra = run.restore(**state)
        kl_coef = extra["kl_coef"]

    # --- training ---
    bar = tqdm(range(start, total), initial=start, total=total, desc="ppo")
    for step in bar:
        # 1. Answer the prompts of this iteration and score the answers.
        epoch, i = divmod(step, steps_per_epoch)
        order = data.epoch_order(len(prompts), cfg.seed, epoch)
        asked = [prompts[j] for j in order[i * cfg.batch_size: (i + 1) * cfg.batch_size]]
        sampling = [SamplingParams(n=cfg.group_size, temperature=cfg.temperature,
                                   max_new_tokens=cfg.max_new_tokens,
                                   seed=derive_seed(cfg.seed, step, j)) for j in range(len(asked))]
        sampler.sync()
        completions = sampler.generate([ids for ids, _ in asked], sampling)
        rollout = lay_out(completions, cfg.device)
        with torch.no_grad(), autocast(cfg.device, cfg.dtype):
            rollout.scores = judge(rollout, completions, asked, reward, cfg.micro_tokens)  # (B,)
            rollout.old_logp, entropy = score_tokens(model, rollout, cfg.temperature,
                                                     cfg.micro_tokens)
            rollout.ref_logp, _ = score_tokens(reference, rollout, cfg.temperature,
                                               cfg.micro_tokens)
            rollout.values = torch.cat([token_values(critic, part)
                                        for part in rollout.split(cfg.micro_tokens)])
        metrics = rollout_metrics(rollout, entropy)
        if step == start:
            warn_if_hopeless(completions, cfg.max_new_tokens, reward)
        for name, values in evaluate.right_answers(asked, completions, embedded).items():
            metrics[name] = evaluate.mean([v for v in values if v is not None])
        judged = ~rollout.scores.isnan()
        rollout.loss_mask = rollout.loss_mask * judged[rollout.row]  # abstained: not trained on
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
        metrics["kl_coef"] = kl_coef
        metrics["kl_penalty"] = float(-kl_coef * (kl * mask).sum() / mask.sum())
        metrics["explained_variance"] = float(explained_variance(rollout.values, rollout.returns,
                                                                 mask))

        # 3. Improve policy and critic on them, each with its own optimiser.
        lr = lr_at(step, total, cfg.lr, cfg.warmup_ratio)
        critic_lr = lr_at(step, total, cfg.critic_lr, cfg.warmup_ratio)
        train_policy, updates = step >= cfg.critic_warmup, 0
        for inner in range(cfg.inner_epochs):
            shuffled = data.epoch_order(len(rollout), derive_seed(cfg.seed, step), inner)
            size = -(-len(rollout) // cfg.mini_batches)
            for at in range(0, len(shuffled), size):
                mini = rollout.select(shuffled[at: at + size])
                mini.loss_mask = token_weights(mini.loss_mask, mini.cu_seqlens, "token")
                stats = {}
                for part in mini.split(cfg.micro_tokens):
                    with autocast(cfg.device, cfg.dtype):
                        logp, _ = token_logprobs(model, part, cfg.temperature)
                        values = token_values(critic, part)
                    weight = part.loss_mask
                    if cfg.tis_cap:
                        weight = weight * importance_weights(part.old_logp, part.sampler_logp,
                                                             part.loss_mask, cfg.tis_cap)
                    loss = ppo_policy_loss(logp, part.old_logp, part.advantages, weight,
                                           cfg.clip_eps_low, cfg.clip_eps_high,
                                           cfg.dual_clip or None)
                    critic_loss = value_loss(values, part.values, part.returns, part.loss_mask,
                                             cfg.value_clip or None)
                    if train_policy:
                        scaler.scale(loss).backward()
                    critic_scaler.scale(critic_loss).backward()
                    found = ppo_stats(logp.detach(), part.old_logp, part.advantages,
                                      part.loss_mask, cfg.clip_eps_low, cfg.clip_eps_high)
                    found |= {"loss": loss.item(), "value_loss": critic_loss.item()}
                    stats = add_stats(stats, found)
                stats["grad_norm"] = float("nan")
                if train_policy:
                    stats["grad_norm"] = optimizer_step(optimizer, lr, cfg.grad_clip, scaler)
                stats["critic_grad_norm"] = optimizer_step(critic_optimizer, critic_lr,
                                                           cfg.grad_clip, critic_scaler)
                if updates == 0:  # before any update the ratio must be 1
                    metrics["ratio_max"] = float(stats["ratio_max"])
                updates += 1
                for name in ("loss", "value_loss", "grad_norm", "critic_grad_norm", "approx_kl",
                             "clip_frac", "ratio_mean"):
                    mean = metrics.get(name, 0.0)
                    metrics[name] = mean + (float(stats[name]) - mean) / updates
        if cfg.kl_target:
            kl_coef = adaptive_kl(kl_coef, metrics["kl_sequence"], cfg.kl_target, cfg.kl_horizon,
                                  len(rollout))
        metrics |= {"lr": lr, "tokens_per_s": run.speed(len(rollout.input_ids))}

        # 4. Evaluate on held-out prompts, and keep a resume point.
        last = step + 1 == total
        if last or (cfg.eval_every and (step + 1) % cfg.eval_every == 0):
            found, answers = evaluate.answer(
                sampler, held_out,
                SamplingParams(max_new_tokens=cfg.max_new_tokens, seed=cfg.seed), embedded)
            metrics |= {f"eval_{name}": value for name, value in found.items()}
            run.samples(step + 1, evaluate.sample_rows(held_out, answers))
        bar.set_postfix(run.log(step + 1, metrics), refresh=False)
        if last or (cfg.save_every and (step + 1) % cfg.save_every == 0):
            run.save(step + 1, {"kl_coef": kl_coef}, **state)

    run.finish(lambda folder: save_model(model, tokenizer, folder))


if __name__ == "__main__":
    main(train, Config, __doc__)
