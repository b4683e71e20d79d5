"""The formulas: SFT, Bradley-Terry, the DPO family, PPO, GAE, GRPO, KL. Pure functions of tensors.

Every loss returns a *sum*, so the gradients of micro-batches add up to that of the whole batch.
`mask` is any non-negative weight per token: 0/1 gives the plain sum, `token_weights` of a whole
optimiser window any of the usual means. What stands where the mask is 0, even NaN, has no effect.

Letters: N tokens (any shape, if all arguments share it), P pairs, B sequences, T time.
"""

import torch
import torch.nn.functional as F

from nanorlhf.utils import UserError

BOUND = 20.0  # on log-ratios: exp(20) = 5e8 is far outside of every clip range, far from overflow
DPO_TYPES = ("sigmoid", "ipo", "hinge", "simpo")


def check_shapes(**tensors):
    """Broadcasting (P, 1) against (P,) would make a (P, P) loss without a word (ms-swift #9927)."""
    if len({x.shape for x in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"shapes differ: {shapes}")


def masked(mask, **tensors):
    """The tensors with 0 where mask is 0: 0 * NaN would be NaN, in the value and the gradient."""
    check_shapes(mask=mask, **tensors)
    return [x.masked_fill(mask == 0, 0) for x in tensors.values()]


def token_weights(mask, cu_seqlens, kind, max_tokens=None):
    """Weights (N,) that turn a masked sum into a mean. mask (N,) 0/1, cu_seqlens (B+1,).

    token     1 / tokens of the batch: every token counts alike (DAPO eq. 8, OpenRLHF, SFT)
    sequence  1 / (tokens of the sequence * non-empty sequences): GRPO eq. 3, mean of means
    constant  1 / (B * max_tokens), max_tokens the longest answer allowed: Dr. GRPO"""
    mask, B = mask.float(), len(cu_seqlens) - 1
    if kind == "token":
        return mask / mask.sum().clamp(min=1)
    if kind == "sequence":
        row = torch.repeat_interleave(torch.arange(B, device=mask.device), cu_seqlens.diff())
        lengths = mask.new_zeros(B).index_add(0, row, mask)
        return mask / (lengths.clamp(min=1)[row] * (lengths > 0).sum().clamp(min=1))
    if kind == "constant":
        return mask / (B * max_tokens)
    raise UserError(f"unknown token weights {kind!r}; choose one of token, sequence, constant")


def sft_loss(logp, mask):
    """-sum(mask * logp): negative log-likelihood in nats. logp, mask (N,)."""
    (logp,) = masked(mask, logp=logp)
    return -(mask * logp).sum()


def bradley_terry_loss(chosen, rejected, margin=None, centre_coef=0.0):
    """-sum(log sigmoid(chosen - rejected - margin) - centre_coef * (chosen + rejected)^2).

    chosen, rejected (P,) scores; margin (P,) or None (Llama 2 eq. 2). Bradley-Terry: InstructGPT
    eq. 1. The centring term holds the mean score near 0 (Eisenstein et al. 2023, TRL)."""
    margin = torch.zeros_like(chosen) if margin is None else margin
    check_shapes(chosen=chosen, rejected=rejected, margin=margin)
    if chosen.dim() != 1:
        raise ValueError(f"scores must be (P,), one a reply, not {tuple(chosen.shape)}")
    loss = -F.logsigmoid(chosen - rejected - margin)
    return (loss + centre_coef * (chosen + rejected).square()).sum()


def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1,
             loss_type="sigmoid", label_smoothing=0.0, lengths=None, gamma=0.5):
    """DPO and kin on (P,) summed log-probs of the replies; h = policy - ref, d = h_c - h_r.

    sigmoid  -(1-s) log sigmoid(beta d) - s log sigmoid(-beta d): DPO eq. 7 for s = 0; conservative
             DPO if label_smoothing s > 0 is the share of labels thought to be flipped
    ipo      (d - 1/(2 beta))^2: IPO eq. 17; per-token means if lengths are given (TRL), else sums
    hinge    relu(1 - beta d): SLiC on log-ratios
    simpo    as sigmoid on beta d - gamma, d of per-token means, ref_* ignored: SimPO eq. 6
    lengths: (tokens of chosen (P,), tokens of rejected (P,)), read by ipo and simpo only."""
    if loss_type not in DPO_TYPES:
        raise UserError(f"unknown loss_type {loss_type!r}; choose one of {', '.join(DPO_TYPES)}")
    if label_smoothing and loss_type in ("ipo", "hinge"):
        raise UserError(f"loss_type {loss_type} has no label_smoothing; use sigmoid or set it to 0")
    if loss_type == "simpo" and lengths is None:
        raise UserError("loss_type simpo averages over tokens: it needs lengths")
    if loss_type == "simpo":
        ref_chosen = ref_rejected = torch.zeros_like(policy_chosen)
    if lengths is None or loss_type in ("sigmoid", "hinge"):
        lengths = [torch.ones_like(policy_chosen)] * 2
    check_shapes(policy_chosen=policy_chosen, policy_rejected=policy_rejected,
                 ref_chosen=ref_chosen, ref_rejected=ref_rejected,
                 chosen_length=lengths[0], rejected_length=lengths[1])
    d = ((policy_chosen - ref_chosen) / lengths[0].clamp(min=1)
         - (policy_rejected - ref_rejected) / lengths[1].clamp(min=1))
    if loss_type == "ipo":
        return (d - 1 / (2 * beta)).square().sum()
    if loss_type == "hinge":
        return F.relu(1 - beta * d).sum()
    z = beta * d - gamma if loss_type == "simpo" else beta * d
    return -((1 - label_smoothing) * F.logsigmoid(z) + label_smoothing * F.logsigmoid(-z)).sum()


def ppo_policy_loss(logp, old_logp, advantages, mask, clip_eps_low=0.2, clip_eps_high=0.2,
                    dual_clip=None):
    """-sum(mask * min(r A, clip(r, 1 - low, 1 + high) A)), r = exp(logp - old_logp); all (N,).

    PPO eq. 7; low < high is DAPO's clip-higher; dual_clip c > 1 bounds the objective below by c A
    where A < 0 (Ye et al. 2020). old_logp is a constant. A clipped token has gradient exactly 0."""
    logp, old_logp, A = masked(mask, logp=logp, old_logp=old_logp, advantages=advantages)
    ratio = (logp - old_logp.detach()).clamp(-BOUND, BOUND).exp()
    objective = torch.minimum(ratio * A, ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * A)
    if dual_clip is not None:
        objective = torch.where(A < 0, torch.maximum(objective, dual_clip * A), objective)
    return -(mask * objective).sum()


def value_loss(values, old_values, returns, mask, value_clip=None):
    """1/2 sum(mask * max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)); all (N,). The
    clipped half (c = value_clip) is OpenAI baselines' and absent if value_clip is None."""
    V, V_old, R = masked(mask, values=values, old_values=old_values.detach(), returns=returns)
    error = (V - R).square()
    if value_clip is not None:
        near = V_old + (V - V_old).clamp(-value_clip, value_clip)
        error = torch.maximum(error, (near - R).square())
    return 0.5 * (mask * error).sum()


@torch.no_grad()
def gae(rewards, values, mask, gamma, lam, cu_seqlens=None):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) -> (advantages, returns).

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  returns = A + V
    rewards, values, mask: (B, T), or (N,) packed with borders cu_seqlens (B+1,). "t+1" is the next
    *unmasked* position, so that holes (tool tokens) are skipped, as in verl; OpenRLHF has V = 0
    there. V past the end is 0. Both results are 0 where mask is 0."""
    check_shapes(rewards=rewards, values=values, mask=mask)
    keep, dtype = mask.flatten() > 0, torch.promote_types(values.dtype, torch.float32)
    if cu_seqlens is None:
        cu_seqlens = torch.arange(mask.shape[:-1].numel() + 1, device=mask.device) * mask.shape[-1]
    counts = F.pad(keep.cumsum(0), (1, 0))[cu_seqlens].diff()  # (B,) unmasked tokens of each
    places = torch.arange(int(counts.max()) + 1, device=counts.device)  # (T + 1,)
    real = places < counts[:, None]  # (B, T + 1): left-aligned, without holes
    r, V, A = values.new_zeros((3, *real.shape), dtype=dtype)
    r[real], V[real] = (x.flatten()[keep].to(dtype) for x in (rewards, values))
    for t in reversed(range(len(places) - 1)):
        A[:, t] = r[:, t] + gamma * V[:, t + 1] - V[:, t] + gamma * lam * A[:, t + 1]
    out = values.new_zeros((2, values.numel()), dtype=dtype)
    out[0, keep], out[1, keep] = A[real], (A + V)[real]
    return out.view(2, *values.shape).unbind()


def masked_moments(x, mask):
    """Weighted mean and biased variance; 0 and 0 if nothing is unmasked."""
    (x,) = masked(mask, x=x)
    total = mask.sum().clamp(min=torch.finfo(x.dtype).tiny)
    mean = (mask * x).sum() / total
    return mean, (mask * (x - mean).square()).sum() / total


def whiten(x, mask):
    """(x - mean) rsqrt(max(var, 1e-8)), 0 where mask is 0; all (N,). Biased var, as in OpenRLHF."""
    mean, var = masked_moments(x, mask)
    return ((x - mean) * var.clamp(min=1e-8).rsqrt()).masked_fill(mask == 0, 0)


def kl_estimate(logp, ref_logp, kind):
    """Per-token estimate (N,) of KL(policy || ref) on tokens sampled from the *policy*.

    With l = logp - ref_logp: k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l, l >= -20 (Schulman 2020).
    k1 and k3 are unbiased, k3 is never negative. As a loss, k2 alone has the KL's mean gradient."""
    check_shapes(logp=logp, ref_logp=ref_logp)
    log_ratio = logp - ref_logp
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    if kind == "k3":
        log_ratio = log_ratio.clamp(min=-BOUND)
        return torch.expm1(-log_ratio) + log_ratio
    raise UserError(f"unknown KL estimator {kind!r}; choose one of k1, k2, k3")


def adaptive_kl(coef, kl, target, horizon, n):
    """The KL coefficient after n more samples (Ziegler et al. 2019, section 2.2)."""
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * min(n / horizon, 1))


def group_advantages(rewards, group_size, kind):
    """rewards (B,), neighbours of one prompt -> advantages (B,).

    grpo     (R - mean) / (std + 1e-6), std unbiased: DeepSeekMath section 4.1.2
    dr_grpo  R - mean: Liu et al. 2025, no upweighting of easy and hard prompts
    rloo     R - mean of the others: Ahmadian et al. 2024
    A NaN reward (the reward function abstained) stays out of the statistics and gets 0; so does a
    group without spread or with fewer than two rewards."""
    if kind not in ("grpo", "dr_grpo", "rloo"):
        raise UserError(f"unknown kind of advantage {kind!r}; choose one of grpo, dr_grpo, rloo")
    if group_size < 2:
        raise UserError("group_size must be at least 2: an answer is judged against the others")
    if rewards.dim() != 1 or len(rewards) % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)} are not whole groups of {group_size}")
    R = rewards.reshape(-1, group_size).double()  # squares of large rewards leave fp32
    n = (~R.isnan()).sum(1, keepdim=True).clamp(min=2)
    # Against the best first: equal rewards become exact zeros, which their mean need not be.
    R = R - R.masked_fill(R.isnan(), -torch.inf).amax(1, keepdim=True)
    centred = R - R.nansum(1, keepdim=True) / n
    if kind == "grpo":
        centred = centred / ((centred.square().nansum(1, keepdim=True) / (n - 1)).sqrt() + 1e-6)
    elif kind == "rloo":
        centred = centred * n / (n - 1)
    return centred.nan_to_num(0).view(-1).to(torch.promote_types(rewards.dtype, torch.float32))


@torch.no_grad()
def importance_weights(old_logp, sampler_logp, mask, cap=2.0):
    """min(exp(old_logp - sampler_logp), cap) (N,), 0 if masked: truncated importance sampling (Yao
    et al. 2025), a factor on the loss's mask for a sampler not quite equal to the trainer. Without
    a cap (0) all weights are 1."""
    if not cap:
        return mask
    old_logp, sampler_logp = masked(mask, old_logp=old_logp, sampler_logp=sampler_logp)
    weights = (old_logp - sampler_logp).clamp(-BOUND, BOUND).exp().clamp(max=cap)
    return weights.masked_fill(mask == 0, 0)


@torch.no_grad()
def ppo_stats(logp, old_logp, advantages, mask, clip_eps_low, clip_eps_high):
    """Sums weighted by mask: approx_kl, clip_frac, ratio_mean. Maxima: ratio_max, log_ratio_max.

    approx_kl is k3 of KL(old || new): the samples are the old policy's. clip_frac counts tokens
    whose gradient the clip stops, not all that are out of range. log_ratio_max is of |log r|."""
    logp, old_logp, A = masked(mask, logp=logp, old_logp=old_logp, advantages=advantages)
    log_ratio = (logp - old_logp).clamp(-BOUND, BOUND)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high)
    return {
        "approx_kl": (mask * kl_estimate(old_logp, logp, "k3")).sum(),
        "clip_frac": (mask * (clipped * A < ratio * A)).sum(),
        "ratio_mean": (mask * ratio).sum(),
        "ratio_max": ratio.masked_fill(mask == 0, 0).max(),
        "log_ratio_max": log_ratio.abs().max(),
    }


@torch.no_grad()
def explained_variance(values, returns, mask):
    """1 - Var(returns - values) / Var(returns), a scalar; 0 if the returns do not vary."""
    _, left = masked_moments(returns - values, mask)
    mean, total = masked_moments(returns, mask)
    return torch.where(total > 1e-12 * mean.square(), 1 - left / total, 0)  # beyond rounding
