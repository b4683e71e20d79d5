"""Direct preference optimisation (DPO): learn from pairs without a reward model or sampling.

The policy is its own reward model: beta * (log-prob under the policy - log-prob under the frozen
reference), summed over the answer, and the loss is Bradley-Terry's on these rewards (Rafailov et
al. 2023, "Direct Preference Optimization", equation 7). `--loss_type` also knows ipo (Azar et al.
2023), hinge (Zhao et al. 2023, SLiC-HF) and simpo (Meng et al. 2024); `--label_smoothing` gives
cDPO; `--nll_coef` adds the likelihood of the chosen answer (Pang et al. 2024).

Where we differ from OpenRLHF: the reference's log-probs are computed once, before the first step,
and the reference leaves memory; --nll_coef is 0.5 unless told otherwise (the logged loss leaves
this term out); ipo averages over tokens, as its authors and TRL do; no EOS is written over a
truncated answer.

    python train_dpo.py                                    # pairs sampled from runs/sft -> runs/dpo
    python train_dpo.py --model my-sft --data pairs.jsonl --lr 5e-7 --beta 0.1

What to expect on the embedded world, in a minute: the first loss is 0.6931; guesses go from half
of the answers to 4 to 15 %, and the gold score from 0.5 to between 0.8 and 0.92.
"""

from dataclasses import dataclass

import torch

from nanorlhf import data, evaluate, lora, toy
from nanorlhf.losses import DPO_TYPES, dpo_loss
from nanorlhf.model import (DTYPES, autocast, eos_ids, load_policy, load_reference, longest,
                            save_model, token_logprobs)
from nanorlhf.rollout import score_tokens
from nanorlhf.sampler import Sampler
from nanorlhf.utils import Common, Run, add_stats, flag, lr_at, main, optimizer_step, trainable


@dataclass
class Config(Common):
    ref_model: str = flag("", "frozen reference; empty: the start model")
    out: str = flag("runs/dpo", "run folder that is written")
    lr: float = flag(1.5e-4, "peak learning rate; 5e-7 to 5e-6 for a real model")
    batch_size: int = flag(32, "pairs of one optimiser step")
    beta: float = flag(0.3, "strength of the pull towards the reference; 0.1 is usual")
    loss_type: str = flag("sigmoid", "loss of a pair", choices=DPO_TYPES)
    label_smoothing: float = flag(0.0, "assumed share of wrong labels (cDPO)")
    simpo_gamma: float = flag(0.5, "simpo: target margin")
    nll_coef: float = flag(0.5, "weight of the chosen answer's negative log-likelihood per token")
    toy_rows: int = flag(2000, "pairs that the embedded world's annotator judges")
    eval_prompts: int = flag(128, "held-out prompts answered at each evaluation")
    max_new_tokens: int = flag(96, "longest answer in an evaluation")


def response_logps(logp, batch):
    """Sum each response's log-probs: (N,) -> chosen (P,), rejected (P,)."""
    return torch.zeros(len(batch), device=logp.device).index_add(0, batch.row, logp).view(-1, 2).T


def train(cfg):
    dpo_loss(*torch.zeros(4, 1), cfg.beta, cfg.loss_type, cfg.label_smoothing,
             torch.ones(2, 1))  # a dry call: options that do not go together are refused here
    run = Run(cfg)

    # --- data: on the embedded world both answers are the start model's own (on-policy) ---
    model, tokenizer = load_policy(cfg.model)
    lora.adapt(model, cfg)  # --lora_rank, --device
    data.set_template(tokenizer, cfg.chat_template)
    sampler = Sampler(model, tokenizer, dtype=DTYPES[cfg.dtype])
    train_rows, eval_rows = data.train_and_eval_rows(cfg, toy.pairs, sampler=sampler)
    max_len, ends = longest(model, cfg.max_len), eos_ids(model, tokenizer)
    pairs, _ = data.encode_pairs(train_rows, tokenizer, max_len, ends)
    held_out, _ = data.encode_pairs(eval_rows[: cfg.eval_rows], tokenizer, max_len, ends)
    prompts = data.encode_prompts(eval_rows[: cfg.eval_prompts], tokenizer, max_len)
    data.show_data(cfg, pairs, tokenizer)

    # --- reference log-probs of every pair, once: (P, 2) ---
    def reference(judge, rows):
        batch = data.Batch.from_rows([row for pair in rows for row in pair]).to(cfg.device)
        with autocast(cfg.device, cfg.dtype):
            logp, _ = score_tokens(judge, batch, 1.0, cfg.micro_tokens)
        return response_logps(logp, batch).T

    judge = (load_reference(cfg.ref_model, model, tokenizer, cfg.device) if cfg.ref_model
             else model)
    ref, held_out_ref = reference(judge, pairs), reference(judge, held_out)

    # --- optimiser ---
    optimizer, scaler = trainable(model, cfg.lr, cfg)
    start = run.start(judge, model=model, optimizer=optimizer, scaler=scaler)
    del judge  # its memory, when it is a model of its own

    def over(rows, rows_ref, learn):
        """(mean stats, batch) of pairs with (P, 2) reference log-probs; gradients if `learn`."""
        batch = data.Batch.from_rows([row for pair in rows for row in pair]).to(cfg.device)
        means, done = {}, 0
        for part in batch.split(cfg.micro_tokens, unit=2):  # a pair stays together
            part_ref = rows_ref[done: done + len(part) // 2].T  # (2, P)
            done += len(part) // 2
            with torch.set_grad_enabled(learn), autocast(cfg.device, cfg.dtype):
                logp, _ = token_logprobs(model, part)
                policy = response_logps(logp, part)  # (2, P)
                lengths = response_logps(part.loss_mask, part)
                loss = dpo_loss(*policy, *part_ref, cfg.beta, cfg.loss_type, cfg.label_smoothing,
                                lengths, cfg.simpo_gamma)
                nll = -(policy[0] / lengths[0]).sum()  # of the chosen answers, per token
            if learn:
                scaler.scale((loss + cfg.nll_coef * nll) / len(rows)).backward()
            policy, simpo = policy.detach(), cfg.loss_type == "simpo"  # SimPO has no reference
            chosen, rejected = cfg.beta * (policy / lengths if simpo else policy - part_ref)
            stats = {"loss": loss, "nll_loss": nll, "accuracy": (chosen > rejected).sum(),
                     "rewards_chosen": chosen.sum(), "rewards_rejected": rejected.sum(),
                     "margin": (chosen - rejected).sum()}
            means = add_stats(means, {k: v.item() / len(rows) for k, v in stats.items()})
        return means, batch

    # --- training ---
    for step, picked in run.steps(pairs, start):
        metrics, batch = over([pairs[i] for i in picked], ref[list(picked)], learn=True)
        metrics["lr"] = lr_at(step, run.total, cfg.lr, cfg.warmup_ratio)
        metrics["grad_norm"] = optimizer_step(optimizer, metrics["lr"], cfg.grad_clip, scaler)
        metrics["tokens_per_s"] = run.speed(batch)

        # --- evaluation on held-out pairs and prompts, and a resume point ---
        if run.due(step, cfg.eval_every):
            found, _ = over(held_out, held_out_ref, learn=False)
            metrics |= {f"eval_{name}": value for name, value in found.items()}
            answers = evaluate.held_out_answers(run, step, sampler, prompts)
            metrics = answers | metrics  # `accuracy` is that of the pairs
        run.end_step(step, metrics)

    run.finish(lambda folder: save_model(model, tokenizer, folder))


if __name__ == "__main__":
    main(train, Config, __doc__)
