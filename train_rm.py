"""Pairwise reward model (RM): learn to score answers from which of two people prefer.

The loss is that of Bradley and Terry, -log sigmoid(r_chosen - r_rejected - margin), averaged over
the pairs (Stiennon et al. 2020, "Learning to summarize from human feedback", section 3.4; the
margin is Llama 2's, equation 2). The score is read at the last token, the end of the turn.

Where we differ from OpenRLHF: the saved folder opens in plain transformers as
`AutoModelForSequenceClassification` and scores identically, in a padded batch too; the head starts
at zero, so that the first loss is exactly ln 2; both answers of a pair lie in one packed forward
pass; pairs that truncation makes equal are dropped and counted.

    python train_rm.py                                      # pairs sampled from runs/sft -> runs/rm
    python train_rm.py --model HuggingFaceTB/SmolLM2-135M-Instruct --data pairs.jsonl --lr 1e-5

What to expect on the embedded world, in a minute: the first loss is 0.6931; at the end the model
ranks 90 to 99 % of noise-free held-out pairs right, though 5 % of its training labels were wrong.
"""

from dataclasses import dataclass

import torch

from nanorlhf import data, evaluate, lora, toy
from nanorlhf.losses import bradley_terry_loss
from nanorlhf.model import (autocast, eos_ids, load_policy, load_scorer, longest, save_model,
                            sequence_scores)
from nanorlhf.sampler import Sampler
from nanorlhf.utils import Common, Run, add_stats, flag, lr_at, main, optimizer_step, trainable


@dataclass
class Config(Common):
    out: str = flag("runs/rm", "run folder that is written")
    lr: float = flag(5e-4, "peak learning rate; 1e-5 for a real model")
    batch_size: int = flag(32, "pairs of one optimiser step")
    centre_coef: float = flag(0.01, "weight of (r_chosen + r_rejected)^2, to keep scores near 0")
    toy_rows: int = flag(2000, "pairs that the embedded world's annotator judges")


def train(cfg):
    run = Run(cfg)

    # --- data: on the embedded world both answers are the start model's own (on-policy) ---
    scorer, tokenizer = load_scorer(cfg.model)
    lora.adapt(scorer, cfg)  # --lora_rank, --device
    data.set_template(tokenizer, cfg.chat_template)
    sampler = Sampler(*load_policy(cfg.model, cfg.device)) if cfg.data == "toy" else None
    train_rows, eval_rows = data.train_and_eval_rows(cfg, toy.pairs, sampler=sampler)
    max_len, ends = longest(scorer, cfg.max_len), eos_ids(scorer, tokenizer)
    pairs, margins = data.encode_pairs(train_rows, tokenizer, max_len, ends)
    held_out, _ = data.encode_pairs(eval_rows[: cfg.eval_rows], tokenizer, max_len, ends)
    data.show_data(cfg, pairs, tokenizer)

    # --- optimiser ---
    optimizer, scaler = trainable(scorer, cfg.lr, cfg)
    start = run.start(model=scorer, optimizer=optimizer, scaler=scaler)

    # --- training ---
    for step, picked in run.steps(list(zip(pairs, margins)), start):
        batch = data.Batch.from_rows([row for i in picked for row in pairs[i]]).to(cfg.device)
        margin = torch.tensor([margins[i] for i in picked], device=cfg.device)  # (P,)
        metrics, done = {}, 0
        for part in batch.split(cfg.micro_tokens, unit=2):  # a pair stays together
            with autocast(cfg.device, cfg.dtype):
                chosen, rejected = sequence_scores(scorer, part).view(-1, 2).unbind(1)  # (P,) each
                loss = bradley_terry_loss(chosen, rejected, margin[done: done + len(chosen)],
                                          cfg.centre_coef) / len(picked)
            scaler.scale(loss).backward()
            done += len(chosen)
            stats = {"accuracy": (chosen > rejected).sum(), "reward_chosen": chosen.sum(),
                     "reward_rejected": rejected.sum(), "margin": (chosen - rejected).sum()}
            stats = {name: value.item() / len(picked) for name, value in stats.items()}
            metrics = add_stats(metrics, {"loss": loss.item()} | stats)
        metrics["lr"] = lr_at(step, run.total, cfg.lr, cfg.warmup_ratio)
        metrics["grad_norm"] = optimizer_step(optimizer, metrics["lr"], cfg.grad_clip, scaler)
        metrics["tokens_per_s"] = run.speed(batch)

        # --- evaluation on held-out pairs, and a resume point ---
        if run.due(step, cfg.eval_every):
            with autocast(cfg.device, cfg.dtype):
                found, scores = evaluate.rank(scorer, held_out, cfg.micro_tokens, cfg.device)
            metrics |= {f"eval_{name}": value for name, value in found.items()}
            run.samples(step + 1, [
                {"response": tokenizer.decode(row[0]), "score": float(score), "preferred": side}
                for pair, pair_scores in zip(held_out[:3], scores)
                for row, score, side in zip(pair, pair_scores, ("chosen", "rejected"))])
        run.end_step(step, metrics)

    # Mean and spread of the held-out scores travel in config.json: PPO rewards are normalised by
    # them, plain transformers ignores them.
    with autocast(cfg.device, cfg.dtype):
        scores = evaluate.pair_scores(scorer, held_out, cfg.micro_tokens, cfg.device)
    scorer.config.reward_mean = scores.mean().item()
    scorer.config.reward_std = max(scores.std().item(), 1e-3)
    run.finish(lambda folder: save_model(scorer, tokenizer, folder))


if __name__ == "__main__":
    main(train, Config, __doc__)
