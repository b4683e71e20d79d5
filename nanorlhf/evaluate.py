"""Measure a policy or a reward model on held-out rows.

    python -m nanorlhf.evaluate --model runs/grpo --data toy --n 8
    python -m nanorlhf.evaluate --model runs/rm --data toy --pairs_from runs/sft
    python -m nanorlhf.evaluate --model runs/rm --prompt "1234+5678=" --response "#### 6912"

A policy answers prompts: share of right answers (gold score on the embedded world), pass@k,
best-of-n under a reward model, length, share of answers that stop by themselves, KL from a base. A
reward model ranks pairs: accuracy, histogram of margins, how much of its preference is mere length.
"""

import json
import math
from dataclasses import dataclass

import numpy as np
import torch

from nanorlhf import data, toy
from nanorlhf.losses import bradley_terry_loss
from nanorlhf.model import (eos_ids, is_scorer, load_policy, load_reference, load_reward_model,
                            load_scorer, longest, sequence_scores)
from nanorlhf.rollout import answers, lay_out, mean, model_scores, right_answers, score_tokens
from nanorlhf.sampler import Sampler, SamplingParams
from nanorlhf.utils import DTYPES, UserError, clean, flag, main, writable


def pass_at_k(n, right, k):
    """Chance that one of k out of n answers, `right` of them right, is right (Chen et al. 2021)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def doublings(n):
    """1, 2, 4, ... up to n."""
    return [2**i for i in range(n.bit_length())]


def answer(sampler, prompts, params, embedded=False):
    """(metrics, completions, 0/1/None for each) of held-out prompts, a list of (ids, columns). The
    last list says which answers are right; it is empty if nothing can tell."""
    sampler.sync()
    completions = answers(sampler, prompts, params)
    found = right_answers(prompts, completions, embedded)
    right = next(iter(found.values()), [])
    metrics = {"response_length": mean([len(c.token_ids) for c in completions]),
               "eos_rate": mean([c.finish_reason == "stop" for c in completions])}
    metrics |= {name: mean(values) for name, values in found.items()}
    if params.n > 1 and right:
        groups = [right[i: i + params.n] for i in range(0, len(right), params.n)]
        counts = [int(sum(group)) for group in groups if None not in group]
        metrics |= {f"pass@{k}": mean([pass_at_k(params.n, count, k) for count in counts])
                    for k in doublings(params.n)}
    return metrics, completions, right


def held_out_answers(run, step, sampler, prompts, prefix=""):
    """Metrics by which training scripts evaluate a policy; four answers go to samples.jsonl."""
    params = SamplingParams(max_new_tokens=run.config.max_new_tokens, seed=run.config.seed)
    metrics, completions, right = answer(sampler, prompts, params, run.config.data == "toy")
    run.samples(step + 1, [{"prompt": prompts[c.prompt_index][1]["prompt"], "response": c.text,
                            "score": score, "finish": c.finish_reason}
                           for c, score in zip(completions, right[:4] or [None] * 4)])
    return {prefix + name: value for name, value in metrics.items()}


@torch.no_grad()
def pair_scores(scorer, pairs, micro_tokens, device):
    """(P, 2) scores of encoded (chosen, rejected) rows; or (P, n) of any n rows."""
    batch = data.Batch.from_rows([row for pair in pairs for row in pair]).to(device)
    parts = [sequence_scores(scorer, part) for part in batch.split(micro_tokens)]
    return torch.cat(parts).view(-1, len(pairs[0]))


def rank(scorer, pairs, micro_tokens=4096, device="cpu"):
    """(metrics, (P, 2) scores) of a reward model on encoded pairs. `length_bias`: how much oftener
    the longer answer is scored higher than it was chosen by the annotator."""
    scores = pair_scores(scorer, pairs, micro_tokens, device)
    chosen, rejected = scores.cpu().unbind(1)
    right = chosen > rejected
    longer = torch.tensor([len(c[0]) - len(r[0]) for c, r in pairs])  # chosen - rejected
    likes_longer = (right == (longer > 0)).float() - (longer > 0).float()
    return {
        "accuracy": float(right.float().mean()),
        "loss": float(bradley_terry_loss(chosen, rejected)) / len(pairs),
        "margin": float((chosen - rejected).mean()),
        "reward_chosen": float(chosen.mean()), "reward_rejected": float(rejected.mean()),
        "length_bias": float(likes_longer[longer != 0].mean()),
    }, scores


def histogram(margins):
    """Lines of text that show how chosen - rejected, (P,), spreads; 0 is the border in the middle,
    so the upper half holds the pairs that are ranked wrong."""
    edge = margins.abs().max().item()
    counts, edges = np.histogram(margins.cpu(), bins=10, range=(-edge, edge))
    return [f"{low:8.3f} to {high:7.3f} {count:6} " + "#" * (40 * count // counts.max())
            for low, high, count in zip(edges, edges[1:], counts)]


def best_of(values, scores, n):
    """{best_of@k: mean value} when of k answers the one with the highest score is given."""
    groups = [list(zip(scores[i: i + n], values[i: i + n])) for i in range(0, len(values), n)]
    return {f"best_of@{k}": mean([max(group[:k], key=lambda pair: pair[0])[1]
                                   for group in groups])
            for k in doublings(n)}


@dataclass
class Config:
    model: str = flag("runs/grpo", "policy or reward model: a folder or hub name")
    data: str = flag("toy", "rows: toy, a file, a folder saved by datasets, a hub name, a mixture")
    columns: str = flag("", "rename columns: field=column,... such as prompt=question")
    toy_grade: str = flag("4x2", "sums of the embedded world: digits x terms")
    limit: int = flag(200, "rows to measure on")
    n: int = flag(1, "answers for each prompt; above 1 also pass@k")
    temperature: float = flag(1.0, "sampling temperature; 0: greedy")
    max_new_tokens: int = flag(96, "longest answer")
    max_len: int = flag(1024, "longest row in tokens")
    micro_tokens: int = flag(4096, "tokens of one forward pass")
    base: str = flag("", "with a policy: also its KL per answer from this start model")
    reward_model: str = flag("", "with a policy and --n: best-of-n under this reward model")
    pairs_from: str = flag("", "with a reward model on toy: sample pairs from this; empty: made up")
    prompt: str = flag("", "with a reward model: score one --response to this prompt")
    response: str = flag("", "the response that belongs to --prompt")
    seed: int = flag(0, "seed of sampling")
    dtype: str = flag("fp32", "precision of sampling; auto: the best of the device",
                      choices=(*DTYPES, "auto"))
    device: str = flag("auto", "cuda or cpu")
    out: str = flag("-", "also write the numbers into this JSON file; -: only print")


def evaluate(cfg):
    out = None if cfg.out == "-" else writable(cfg.out)
    scorer = is_scorer(cfg.model)
    for name in ("base", "reward_model") if scorer else ("prompt", "response", "pairs_from"):
        if getattr(cfg, name):
            raise UserError(f"--{name} does not go with {cfg.model}, which is a "
                            f"{'reward model' if scorer else 'policy'}")
    if cfg.response and not cfg.prompt or cfg.base and not cfg.temperature:
        raise UserError("--response needs its --prompt, and --base a --temperature above 0")
    metrics = evaluate_scorer(cfg) if scorer else evaluate_policy(cfg)
    for name, value in metrics.items():
        print(f"{name:<16}{value:.4f}")
    if out:
        numbers = {name: clean(value) for name, value in metrics.items()}
        out.write_text(json.dumps({"model": cfg.model, "data": cfg.data} | numbers, indent=2))


def evaluate_policy(cfg):
    model, tokenizer = load_policy(cfg.model, cfg.device)
    if cfg.reward_model:
        scorer = load_reward_model(cfg.reward_model, tokenizer, cfg.device)
    embedded = cfg.data == "toy"
    rows = (toy.prompts(cfg.limit, split="eval", grade=cfg.toy_grade)
            if embedded else data.load_rows(cfg.data, columns=cfg.columns, seed=cfg.seed))
    prompts = data.encode_prompts(rows[: cfg.limit], tokenizer, longest(model, cfg.max_len))
    params = SamplingParams(n=cfg.n, temperature=cfg.temperature, seed=cfg.seed,
                            max_new_tokens=cfg.max_new_tokens)
    sampler = Sampler(model, tokenizer, dtype=DTYPES[cfg.dtype])
    metrics, completions, right = answer(sampler, prompts, params, embedded)
    batch = lay_out(completions, cfg.device)
    if cfg.base:
        base = load_reference(cfg.base, model, tokenizer, cfg.device)
        logp, base_logp = (score_tokens(m, batch, cfg.temperature, cfg.micro_tokens)[0]
                           for m in (model, base))
        metrics["kl"] = float((logp - base_logp).sum()) / len(batch)
    if cfg.reward_model:
        scores = model_scores(scorer, batch, cfg.micro_tokens).tolist()
        metrics["score"] = mean(scores)
        metrics |= best_of(right, scores, cfg.n) if right else {}
    return metrics


def evaluate_scorer(cfg):
    scorer, tokenizer = load_scorer(cfg.model, cfg.device)
    max_len, ends = longest(scorer, cfg.max_len), eos_ids(scorer, tokenizer)
    if cfg.prompt:
        row = {"prompt": cfg.prompt, "completion": cfg.response}
        rows = data.encode_sft([row], tokenizer, max_len, ends)
        return {"score": float(pair_scores(scorer, [rows], cfg.micro_tokens, cfg.device))}
    if cfg.data == "toy":
        sampler = Sampler(*load_policy(cfg.pairs_from, cfg.device)) if cfg.pairs_from else None
        rows = toy.pairs(cfg.limit, split="eval", sampler=sampler, grade=cfg.toy_grade)
    else:
        rows = data.load_rows(cfg.data, columns=cfg.columns, seed=cfg.seed)[: cfg.limit]
    pairs, _ = data.encode_pairs(rows, tokenizer, max_len, ends)
    metrics, scores = rank(scorer, pairs, cfg.micro_tokens, cfg.device)
    print("chosen - rejected: pairs", *histogram(scores[:, 0] - scores[:, 1]), sep="\n")
    return metrics


if __name__ == "__main__":
    main(evaluate, Config, __doc__)
