"""Group relative policy optimisation (GRPO): reinforcement learning without a critic.

Every prompt is answered `--group_size` times; the advantage of an answer is its reward measured
against the other answers to the same prompt (Shao et al. 2024, "DeepSeekMath", section 4.1). The
policy loss is PPO's clipped surrogate. Variants by flag: Dr. GRPO (Liu et al. 2025) with
`--advantage dr_grpo --loss_type dr_grpo`, RLOO (Ahmadian et al. 2024) with `--advantage rloo`,
clip-higher and token-level loss (Yu et al. 2025, DAPO) with `--clip_eps_high 0.28` and
`--loss_type dapo`, the default.

Where we differ from OpenRLHF: advantages carry no KL-to-go, a KL term is in the loss (`--kl_coef`,
DeepSeekMath equation 4; 0, as in DAPO and Dr. GRPO, saves the reference); no EOS is written over a
truncated answer; rewards that abstain are masked and counted. With one update per rollout the ratio
is 1 and clipping never acts: that is on-policy gradient ascent, and the printed loss would be 0,
though not its gradient, if all answers had one length.

    python train_grpo.py                                        # from runs/sft -> runs/grpo
    python train_grpo.py --model my-sft --data gsm8k.jsonl --reward math --lr 1e-6

What to expect on the embedded world, in four minutes: guesses vanish within 15 iterations, then
the working itself gets better: gold score from 0.5 to 0.99.
"""

from dataclasses import dataclass

from nanorlhf import evaluate, lora
from nanorlhf.losses import group_advantages, kl_estimate, ppo_policy_loss, ppo_stats
from nanorlhf.model import (DTYPES, autocast, load_policy, load_reference, load_reward_model,
                            save_model, token_logprobs)
from nanorlhf.rewards import load_reward
from nanorlhf.rollout import mini_batches, rl_prompts, roll_out
from nanorlhf.sampler import Sampler
from nanorlhf.utils import (Common, Run, UserError, add_stats, flag, lr_at, main, mean_stats,
                            optimizer_step, trainable, warn)

AGGREGATION = {"grpo": "sequence", "dapo": "token", "dr_grpo": "constant"}


@dataclass
class Config(Common):
    ref_model: str = flag("", "frozen reference for the KL; empty: the start model")
    offload: bool = flag(False, "frozen models wait on the CPU while they are not asked (not LoRA)")
    out: str = flag("runs/grpo", "run folder that is written")
    lr: float = flag(5e-4, "peak learning rate; 1e-6 for a real model")
    batch_size: int = flag(32, "prompts of one iteration")
    group_size: int = flag(8, "answers to each prompt")
    inner_epochs: int = flag(1, "passes over the answers of one iteration")
    mini_batches: int = flag(1, "optimiser steps of one pass over the answers")
    reward: str = flag("", "toy, math, format, or file.py:function; empty: toy or math by --data")
    reward_model: str = flag("", "a reward model of train_rm.py instead of a reward function")
    advantage: str = flag("grpo", "of an answer; dr_grpo: not divided by the group's spread",
                          choices=("grpo", "dr_grpo", "rloo"))
    loss_type: str = flag("dapo", "mean over tokens (dapo), answers (grpo), or constant (dr_grpo)",
                          choices=AGGREGATION)
    clip_eps_low: float = flag(0.2, "the ratio is clipped at 1 - this")
    clip_eps_high: float = flag(0.28, "the ratio is clipped at 1 + this")
    kl_coef: float = flag(0.001, "weight of the KL term in the loss; 0: no reference, no KL known")
    kl_estimator: str = flag("k3", "of Schulman (2020); the gradient of k1 averages to 0",
                             choices=("k1", "k2", "k3"))
    tis_cap: float = flag(2.0, "cap of the sampler/trainer importance weight; 0: none")
    temperature: float = flag(1.0, "sampling temperature, also in every log-prob")
    max_new_tokens: int = flag(96, "longest answer")
    toy_rows: int = flag(3200, "prompts drawn from the embedded world")
    eval_prompts: int = flag(256, "held-out prompts answered at each evaluation")
    eval_every: int = flag(20, "steps between evaluations; 0: only at the end")
    save_every: int = flag(20, "steps between checkpoints; 0: none")


def train(cfg):
    if cfg.group_size < 2:
        raise UserError("--group_size must be at least 2: answers are measured against each other")
    if cfg.ref_model and not cfg.kl_coef:
        raise UserError("--ref_model is used by the KL term only; give a --kl_coef above 0")
    if cfg.reward and cfg.reward_model:
        raise UserError("give --reward or --reward_model, not both")
    run = Run(cfg)

    # --- data and reward ---
    model, tokenizer = load_policy(cfg.model)
    lora.adapt(model, cfg)  # --lora_rank, --device
    idle = "cpu" if cfg.offload and not cfg.lora_rank else cfg.device  # of the frozen models
    reward = (load_reward_model(cfg.reward_model, tokenizer, idle) if cfg.reward_model
              else load_reward(cfg.reward or ("toy" if cfg.data == "toy" else "math")))
    prompts, held_out = rl_prompts(cfg, model, tokenizer, reward)

    # --- models: the policy, its sampler over the same tensors, the frozen reference ---
    reference = (load_reference(cfg.ref_model, model, tokenizer, idle) if cfg.kl_coef
                 else None)
    optimizer, scaler = trainable(model, cfg.lr, cfg)
    sampler = Sampler(model, tokenizer, dtype=DTYPES[cfg.dtype])
    start = run.start(reference, reward, model=model, optimizer=optimizer, scaler=scaler)
    clip = cfg.clip_eps_low, cfg.clip_eps_high

    # --- training ---
    for step, picked in run.steps(prompts, start):
        # 1. Answer the prompts of this iteration, group_size times each, and score the answers.
        rollout, metrics = roll_out(cfg, step, [prompts[i] for i in picked], sampler, reward,
                                    model, reference)

        # 2. Measure each answer against its group.
        advantages = group_advantages(rollout.scores, cfg.group_size, cfg.advantage)  # (B,)
        rollout.advantages = advantages[rollout.row]  # (N,)
        flat = (advantages.view(-1, cfg.group_size) == 0).all(1)  # groups that teach nothing
        metrics["zero_spread_groups"] = float(flat.float().mean())
        if flat.all() and step < start + 10:  # later it may mean that all is solved
            warn("in each group all answers earned the same, so nothing is learned from this "
                 "iteration; check --reward, or ask easier prompts")

        # 3. Improve the policy on them: clipped surrogate, every token or answer weighs the same.
        lr, updates = lr_at(step, run.total, cfg.lr, cfg.warmup_ratio), []
        for mini in mini_batches(rollout, cfg, step, AGGREGATION[cfg.loss_type]):
            stats, total = {}, mini.loss_mask.sum().clamp(min=1e-9)
            for part in mini.split(cfg.micro_tokens):
                with autocast(cfg.device, cfg.dtype):
                    logp, _ = token_logprobs(model, part, cfg.temperature)
                loss = ppo_policy_loss(logp, part.old_logp, part.advantages,
                                       part.loss_mask * part.trust, *clip)
                if reference is not None:
                    kl = kl_estimate(logp, part.ref_logp, cfg.kl_estimator)
                    loss = loss + cfg.kl_coef * (kl * part.loss_mask).sum()
                scaler.scale(loss).backward()
                stats = add_stats(stats, {"loss": loss.item()} | ppo_stats(
                    logp, part.old_logp, part.advantages, part.loss_mask / total, *clip))
            stats["grad_norm"] = optimizer_step(optimizer, lr, cfg.grad_clip, scaler)
            updates.append(stats)
        metrics |= mean_stats(updates) | {"lr": lr, "tokens_per_s": run.speed(rollout)}

        # 4. Evaluate on held-out prompts, and keep a resume point.
        if run.due(step, cfg.eval_every):
            metrics |= evaluate.held_out_answers(run, step, sampler, held_out, "eval_")
        run.end_step(step, metrics)

    run.finish(lambda folder: save_model(model, tokenizer, folder))


if __name__ == "__main__":
    main(train, Config, __doc__)
