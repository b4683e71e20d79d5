"""Group relative policy optimisation (GRPO): reinforcement learning without a critic.

Every prompt is answered `--group_size` times; the advantage of an answer is its reward measured
against the other answers to the same prompt (Shao et al. 2024, "DeepSeekMath", section 4.1). The
policy loss is PPO's clipped surrogate. Variants by flag: Dr. GRPO (Liu et al. 2025) with
`--advantage dr_grpo --loss_type dr_grpo`, RLOO (Ahmadian et al. 2024) with `--advantage rloo`,
clip-higher and token-level loss (Yu et al. 2025, DAPO) with `--clip_eps_high 0.28` and
`--loss_type dapo`, the default.

Where we differ from OpenRLHF: advantages carry no KL-to-go, an optional KL term sits in the loss
(`--kl_coef`, DeepSeekMath equation 4); no EOS is written over a truncated answer; rewards that
abstain are masked and counted. With one update per rollout the ratio is 1 and clipping never acts:
that is on-policy gradient ascent, and the printed loss is near 0 although its gradient is not.

    python train_grpo.py                                        # from runs/sft -> runs/grpo
    python train_grpo.py --model my-sft --data gsm8k.jsonl --reward math --lr 1e-6

What to expect on the embedded world: EXPECTED
"""

from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from nanorlhf import data, evaluate, toy
from nanorlhf.losses import (
    group_advantages, importance_weights, kl_estimate, ppo_policy_loss, ppo_stats, token_weights,
)
from nanorlhf.model import (
    DTYPES, autocast, frozen_copy, load_policy, load_reward_model, save_model, token_logprobs,
)
from nanorlhf.rewards import load_reward, readable
from nanorlhf.rollout import (
    check_rl_flags, judge, lay_out, rollout_metrics, score_tokens, warn_if_hopeless,
)
from nanorlhf.sampler import Sampler, SamplingParams
from nanorlhf.utils import (
    Common, Run, UserError, add_stats, adamw, derive_seed, flag, fp16_scaler, lr_at, main,
    optimizer_step, seed_everything,
)

AGGREGATION = {"grpo": "sequence", "dapo": "token", "dr_grpo": "constant"}


@dataclass
class Config(Common):
    model: str = flag("runs/sft", "start model")
    ref_model: str = flag("", "frozen reference for the KL; empty: the start model")
    out: str = flag("runs/grpo", "run folder that is written")
    lr: float = flag(3e-4, "peak learning rate; 1e-6 for a real model")
    batch_size: int = flag(32, "prompts of one iteration")
    group_size: int = flag(8, "answers to each prompt")
    epochs: int = flag(1, "passes over the prompts")
    inner_epochs: int = flag(1, "passes over the answers of one iteration")
    mini_batches: int = flag(1, "optimiser steps of one pass over the answers")
    reward: str = flag("", "toy, math, format, or file.py:function; empty: toy or math by --data")
    reward_model: str = flag("", "a reward model of train_rm.py instead of a reward function")
    advantage: str = flag("grpo", "grpo, dr_grpo (no division by the spread) or rloo")
    loss_type: str = flag("dapo", "mean over tokens (dapo), answers (grpo), or constant (dr_grpo)")
    clip_eps_low: float = flag(0.2, "the ratio is clipped at 1 - this")
    clip_eps_high: float = flag(0.28, "the ratio is clipped at 1 + this")
    kl_coef: float = flag(0.0, "weight of the KL term in the loss; 0: no reference is kept")
    kl_estimator: str = flag("k3", "k1, k2 or k3 (Schulman 2020)")
    tis_cap: float = flag(2.0, "cap of the sampler/trainer importance weight; 0: none")
    temperature: float = flag(1.0, "sampling temperature, also in every log-prob")
    top_k: int = flag(0, "refused in RL unless 0: see --help of nanorlhf.generate")
    top_p: float = flag(1.0, "refused in RL unless 1")
    min_p: float = flag(0.0, "refused in RL unless 0")
    repetition_penalty: float = flag(1.0, "refused in RL unless 1")
    max_new_tokens: int = flag(96, "longest answer")
    toy_rows: int = flag(2560, "prompts drawn from the embedded world")
    eval_prompts: int = flag(256, "held-out prompts answered at each evaluation")
    eval_every: int = flag(20, "steps between evaluations; 0: only at the end")
    save_every: int = flag(20, "steps between checkpoints; 0: none")


def train(cfg):
    check_rl_flags(cfg)
    if cfg.group_size < 2:
        raise UserError("--group_size 1: an advantage measured against the group needs at least 2 "
                        "answers to a prompt; use train_ppo.py for one")
    if cfg.loss_type not in AGGREGATION:
        raise UserError(f"--loss_type {cfg.loss_type} must be one of {', '.join(AGGREGATION)}")
    run = Run(cfg)
    seed_everything(cfg.seed)

    # --- data and reward ---
    embedded = cfg.data == "toy"
    model, tokenizer = load_policy(cfg.model, cfg.device)
    if cfg.reward_model:
        reward = load_reward_model(cfg.reward_model, tokenizer, cfg.device)
    else:
        reward = load_reward(cfg.reward or ("toy" if embedded else "math"))
    train_rows, eval_rows = data.train_and_eval_rows(
        cfg, partial(toy.prompts, cfg.toy_rows), partial(toy.prompts, cfg.eval_prompts))
    room = cfg.max_len - cfg.max_new_tokens  # for the prompt
    prompts = data.encode_prompts(train_rows, tokenizer, room, readable(reward))
    held_out = data.encode_prompts(eval_rows[: cfg.eval_prompts], tokenizer, room)
    data.show_masks([(prompts[0][0], [0] * len(prompts[0][0]))], tokenizer)

    # --- models: the policy, its sampler over the same tensors, the frozen reference ---
    reference = None
    if cfg.kl_coef:
        reference = (load_policy(cfg.ref_model, cfg.device)[0].requires_grad_(False)
                     if cfg.ref_model else frozen_copy(model))
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    sampler = Sampler(model, tokenizer, dtype=DTYPES[cfg.dtype])
    optimizer, scaler = adamw(model, cfg.lr, cfg.weight_decay), fp16_scaler(cfg)
    steps_per_epoch = -(-len(prompts) // cfg.batch_size)
    total = cfg.max_steps or cfg.epochs * steps_per_epoch
    run.start()
    start, _ = (run.restore(model=model, optimizer=optimizer, scaler=scaler)
                if cfg.resume else (0, None))

    # --- training ---
    bar = tqdm(range(start, total), initial=start, total=total, desc="grpo")
    for step in bar:
        # 1. Answer the prompts of this iteration, group_size times each.
        epoch, i = divmod(step, steps_per_epoch)
        order = data.epoch_order(len(prompts), cfg.seed, epoch)
        asked = [prompts[j] for j in order[i * cfg.batch_size: (i + 1) * cfg.batch_size]]
        sampling = [SamplingParams(n=cfg.group_size, temperature=cfg.temperature,
                                   max_new_tokens=cfg.max_new_tokens,
                                   seed=derive_seed(cfg.seed, step, j)) for j in range(len(asked))]
        sampler.sync()
        completions = sampler.generate([ids for ids, _ in asked], sampling)

        # 2. Score them and measure each answer against its group.
        rollout = lay_out(completions, cfg.device)
        with torch.no_grad(), autocast(cfg.device, cfg.dtype):
            rollout.scores = judge(rollout, completions, asked, reward, cfg.micro_tokens)  # (B,)
            rollout.old_logp, entropy = score_tokens(model, rollout, cfg.temperature,
                                                     cfg.micro_tokens)
            if reference is not None:
                rollout.ref_logp, _ = score_tokens(reference, rollout, cfg.temperature,
                                                   cfg.micro_tokens)
        advantages = group_advantages(rollout.scores, cfg.group_size, cfg.advantage)  # (B,)
        rollout.advantages = advantages[rollout.row]  # (N,)
        metrics = rollout_metrics(rollout, entropy)
        if step == start:
            warn_if_hopeless(completions, cfg.max_new_tokens, reward)
        groups = rollout.scores.view(-1, cfg.group_size)
        metrics["zero_spread_groups"] = float((advantages.view_as(groups) == 0).all(1).float()
                                              .mean())
        for name, values in evaluate.right_answers(asked, completions, embedded).items():
            metrics[name] = evaluate.mean([v for v in values if v is not None])
        judged = ~rollout.scores.isnan()
        rollout.loss_mask = rollout.loss_mask * judged[rollout.row]  # abstained: not trained on

        # 3. Improve the policy on them: clipped surrogate, every token or answer weighs the same.
        lr, updates = lr_at(step, total, cfg.lr, cfg.warmup_ratio), 0
        for inner in range(cfg.inner_epochs):
            shuffled = data.epoch_order(len(rollout), derive_seed(cfg.seed, step), inner)
            size = -(-len(rollout) // cfg.mini_batches)
            for at in range(0, len(shuffled), size):
                mini = rollout.select(shuffled[at: at + size])
                weights = token_weights(mini.loss_mask, mini.cu_seqlens,
                                        AGGREGATION[cfg.loss_type], cfg.max_new_tokens)
                mini.loss_mask = weights  # divided once, before the micro-batches are cut
                stats = {}
                for part in mini.split(cfg.micro_tokens):
                    with autocast(cfg.device, cfg.dtype):
                        logp, _ = token_logprobs(model, part, cfg.temperature)
                    weight = part.loss_mask
                    if cfg.tis_cap:
                        weight = weight * importance_weights(part.old_logp, part.sampler_logp,
                                                             part.loss_mask, cfg.tis_cap)
                    loss = ppo_policy_loss(logp, part.old_logp, part.advantages, weight,
                                           cfg.clip_eps_low, cfg.clip_eps_high)
                    if reference is not None:
                        kl = kl_estimate(logp, part.ref_logp, cfg.kl_estimator)
                        loss = loss + cfg.kl_coef * (kl * part.loss_mask).sum()
                    scaler.scale(loss).backward()
                    found = ppo_stats(logp.detach(), part.old_logp, part.advantages,
                                      part.loss_mask, cfg.clip_eps_low, cfg.clip_eps_high)
                    found["loss"] = loss.item()
                    stats = add_stats(stats, found)
                stats["grad_norm"] = optimizer_step(optimizer, lr, cfg.grad_clip, scaler)
                if updates == 0:  # before any update the ratio must be 1
                    metrics["ratio_max"] = float(stats["ratio_max"])
                updates += 1
                for name in ("loss", "grad_norm", "approx_kl", "clip_frac", "ratio_mean"):
                    mean = metrics.get(name, 0.0)
                    metrics[name] = mean + (float(stats[name]) - mean) / updates
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
            run.save(step + 1, model=model, optimizer=optimizer, scaler=scaler)

    run.finish(lambda folder: save_model(model, tokenizer, folder))


if __name__ == "__main__":
    main(train, Config, __doc__)
