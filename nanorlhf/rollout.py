"""Prompts -> samples -> scores -> one packed batch that knows what RL needs. PPO and GRPO share it.

Sampled ids go to the loss unchanged: no padding, no second tokenisation, no EOS written over an
answer that was cut off. Text is made for reward functions and people only.

Letters: N tokens of the batch (action frame, see model.py), B responses.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nanorlhf import data, toy
from nanorlhf.losses import importance_weights, kl_estimate, token_weights
from nanorlhf.model import (autocast, longest, normalised, sequence_scores, token_logprobs,
                            visiting)
from nanorlhf.rewards import call_reward, extract_answer, math_reward, readable
from nanorlhf.sampler import SamplingParams
from nanorlhf.utils import UserError, derive_seed, warn


SAMPLER_STATS = ("tokens_per_s", "mean_batch", "kv_waste", "preemptions", "prefix_blocks_saved")


@dataclass
class Rollout(data.Batch):
    """Responses of one iteration with everything that the losses ask for."""

    sampler_logp: torch.Tensor = None  # (N,) as the sampler returned them
    old_logp: torch.Tensor = None  # (N,) the policy before this iteration's updates
    ref_logp: torch.Tensor = None  # (N,) the frozen reference
    values: torch.Tensor = None  # (N,) the critic before this iteration's updates
    rewards: torch.Tensor = None  # (N,) per token: KL penalty, and the score at the last
    advantages: torch.Tensor = None  # (N,)
    returns: torch.Tensor = None  # (N,)
    scores: torch.Tensor = None  # (B,) reward of the whole response; NaN: could not be judged
    group: torch.Tensor = None  # (B,) number of the prompt in this iteration
    stopped: torch.Tensor = None  # (B,) true if the response ended by itself
    trust: torch.Tensor = None  # (N,) importance weight: the sampler is not quite the trainer

    PER_SEQUENCE: ClassVar[tuple[str, ...]] = ("scores", "group", "stopped")


def rl_prompts(config, model, tokenizer, reward):
    """(training prompts, held-out prompts), lists of (ids, columns); the first one is printed."""
    if not 0 < config.temperature < float("inf"):
        raise UserError(f"--temperature {config.temperature}: RL needs samples that differ")
    most = longest(model, config.max_len)
    room = most - config.max_new_tokens  # for the prompt
    if room < 1:
        raise UserError(f"--max_new_tokens {config.max_new_tokens} leaves no room for a prompt "
                        f"within the {most} tokens that --max_len and the model allow; lower it")
    data.set_template(tokenizer, config.chat_template)
    train_rows, eval_rows = data.train_and_eval_rows(config, toy.prompts)
    prompts = data.encode_prompts(train_rows, tokenizer, room, readable(reward))
    held_out = data.encode_prompts(eval_rows[: config.eval_prompts], tokenizer, room)
    data.show_data(config, prompts, tokenizer)
    return prompts, held_out


def roll_out(config, step, prompts, sampler, reward, policy, reference=None):
    """Answer the prompts of one iteration, score the answers -> (Rollout, metrics).
    old_logp is the trainer's, not the sampler's. Answers that cannot be judged get loss_mask 0."""
    params = [SamplingParams(n=config.group_size, temperature=config.temperature,
                             max_new_tokens=config.max_new_tokens,
                             seed=derive_seed(config.seed, step, i)) for i in range(len(prompts))]
    sampler.sync()
    completions = answers(sampler, prompts, params)
    rollout = lay_out(completions, config.device)
    how = config.temperature, config.micro_tokens
    with torch.no_grad(), autocast(config.device, config.dtype):
        rollout.scores = judge(rollout, completions, prompts, reward, config.micro_tokens)  # (B,)
        rollout.old_logp, entropy = score_tokens(policy, rollout, *how)  # (N,) each
        if reference is not None:
            rollout.ref_logp, _ = score_tokens(reference, rollout, *how)
    found = right_answers(prompts, completions, config.data == "toy")
    metrics = rollout_metrics(rollout, entropy) | {name: mean(x) for name, x in found.items()}
    metrics |= {f"sampler_{name}": sampler.stats[name] for name in SAMPLER_STATS}
    unjudged = rollout.scores.isnan()
    rollout.loss_mask = rollout.loss_mask * ~unjudged[rollout.row]
    rollout.trust = importance_weights(rollout.old_logp, rollout.sampler_logp, rollout.loss_mask,
                                       config.tis_cap)
    if unjudged.all():
        warn(f"the reward judged no answer of step {step + 1}, so nothing is learned from it")
    if step == 0:
        warn_if_hopeless(completions, config.max_new_tokens, reward)
    return rollout, metrics


def answers(sampler, prompts, params):
    """Completions of prompts, a list of (ids, columns); one that is refused is an error."""
    completions = sampler.generate([ids for ids, _ in prompts], params)
    if refused := [c.text for c in completions if c.finish_reason == "refused"]:
        raise UserError(f"a prompt cannot be answered: {refused[0]}")
    return completions


def mini_batches(rollout, config, step, aggregation):
    """The share of the rollout that each optimiser step of the iteration learns from:
    --inner_epochs passes over the answers, each in an order of its own, in --mini_batches parts.
    Their loss_mask is divided, once, into the weights of a mean over tokens or answers."""
    size = -(-len(rollout) // config.mini_batches)
    for inner in range(config.inner_epochs):
        shuffled = data.epoch_order(len(rollout), derive_seed(config.seed, step), inner)
        for at in range(0, len(shuffled), size):
            mini = rollout.select(shuffled[at: at + size])
            mini.loss_mask = token_weights(mini.loss_mask, mini.cu_seqlens, aggregation,
                                           config.max_new_tokens)
            yield mini


def lay_out(completions, device="cpu"):
    """Completions of the sampler -> Rollout without scores."""
    rows = [(c.prompt_ids + c.token_ids, [0] * len(c.prompt_ids) + [1] * len(c.token_ids))
            for c in completions]
    rollout = Rollout.from_rows(rows)
    rollout.sampler_logp = torch.zeros(len(rollout.input_ids)).masked_scatter(
        rollout.loss_mask > 0, torch.tensor([logp for c in completions for logp in c.logprobs]))
    rollout.group = torch.tensor([c.prompt_index for c in completions])
    rollout.stopped = torch.tensor([c.finish_reason == "stop" for c in completions])
    return rollout.to(device)


def judge(rollout, completions, prompts, reward, micro_tokens):
    """(B,) scores by a reward model, which reads ids, or by a function over texts; NaN for None."""
    if isinstance(reward, torch.nn.Module):
        return model_scores(reward, rollout, micro_tokens)
    scores = by_function(reward, prompts, completions)
    return torch.tensor([float("nan") if score is None else score for score in scores],
                        device=rollout.input_ids.device)


def by_function(reward, prompts, completions):
    """What a reward function says of each answer; it also gets the columns of the prompts."""
    rows = [prompts[c.prompt_index][1] for c in completions]
    names = sorted(rows[0].keys() - {"prompt", "prompts", "completions", "finish_reasons"})
    return call_reward(reward, [row["prompt"] for row in rows], [c.text for c in completions],
                       finish_reasons=[c.finish_reason for c in completions],
                       **{name: [row[name] for row in rows] for name in names})


@torch.no_grad()
def model_scores(scorer, rollout, micro_tokens):
    """(B,) normalised scores by a reward model, at the last sampled token, whatever that is."""
    with visiting(scorer, rollout.input_ids.device):
        parts = [sequence_scores(scorer, part) for part in rollout.split(micro_tokens)]
    return normalised(scorer, torch.cat(parts))


@torch.no_grad()
def score_tokens(model, batch, temperature, micro_tokens):
    """(N,) log-probs and (N,) entropies of a batch under a model, micro-batch by micro-batch."""
    with visiting(model, batch.input_ids.device):
        parts = [token_logprobs(model, part, temperature) for part in batch.split(micro_tokens)]
    return tuple(torch.cat(column) for column in zip(*parts))


def right_answers(prompts, completions, embedded):
    """{name: list of 0/1/None}: what can be said about each answer without a model."""
    if embedded:
        return {"gold_score": by_function(toy.gold_reward, prompts, completions),
                "worked_share": [float(toy.is_worked(c.text)) for c in completions]}
    if "answer" in prompts[0][1]:
        return {"accuracy": by_function(math_reward, prompts, completions)}
    return {}


def mean(values):
    """Of those that are not None; NaN if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def warn_if_hopeless(completions, max_new_tokens, reward):
    """One line when the answers of a run's first iteration show that nothing can be learned."""
    cut = sum(c.finish_reason == "length" for c in completions) / len(completions)
    if cut >= 0.95:
        warn(f"{cut:.0%} of the answers were cut off at --max_new_tokens {max_new_tokens}; raise "
             "it, or check that prompts end in the generation prompt of the chat template")
    if readable(reward) and not any(extract_answer(c.text) for c in completions):
        warn("no answer holds a result that the math reward can read (#### x, \\boxed{x} or "
             f"<answer>x</answer>); the first was {completions[0].text!r}")


def rollout_metrics(rollout, entropy):
    """What every RL script logs of an iteration (field's names, means over tokens or responses)."""
    mask = rollout.loss_mask > 0
    tokens, reward_mean = mask.sum(), rollout.scores.nanmean()
    metrics = {
        "reward_mean": reward_mean,
        "reward_std": (rollout.scores - reward_mean).square().nanmean().sqrt(),
        "unjudged": int(rollout.scores.isnan().sum()),
        "entropy": (entropy * mask).sum() / tokens,
        "sampler_gap": (rollout.old_logp - rollout.sampler_logp)[mask].abs().max(),
        "response_length": tokens / len(rollout),
        "eos_rate": rollout.stopped.float().mean(),
    }
    if rollout.ref_logp is not None:
        log_ratio = (rollout.old_logp - rollout.ref_logp)[mask]
        metrics["kl_k1"] = log_ratio.mean()
        metrics["kl_sequence"] = log_ratio.sum() / len(rollout)
        metrics["kl_k3"] = kl_estimate(rollout.old_logp, rollout.ref_logp, "k3")[mask].mean()
    return {name: float(value) for name, value in metrics.items()}
