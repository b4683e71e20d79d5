"""Fused lm head: log-prob of each target token and entropy, without ever storing the logits.

The logits of N tokens over V words are the largest tensor of RLHF by far (4096 x 49152 in fp32:
805 MB, several times over once autograd has kept its copies). Here they only ever exist as tiles
of CHUNK tokens x TILE words. The forward pass folds the tiles into running sums by the online
softmax (Milakov & Gimelshein 2018, algorithm 3); only logp, entropy and log-sum-exp outlive it.
The backward pass makes every tile again and turns it, in place, into the gradient of its logits.

Letters: N tokens, H hidden size, V vocabulary; n <= CHUNK and v <= TILE are the sizes of a tile.
"""

import torch
import torch.nn.functional as F

CHUNK, TILE = 512, 4096  # an fp32 tile is 8 MB: stays near the caches, still a fast matrix product
LOWEST = -1e30  # stands in for -inf where 0 * -inf has to be 0


def token_logprobs(hidden, weight, targets, temperature=1.0, bias=None, softcap=None):
    """Log-prob of the targets, and entropy of the distribution that the lm head makes of `hidden`.

    z = softcap * tanh((hidden @ weight.T + bias) / softcap) / temperature    (tanh if softcap)
    logp = log_softmax(z)[targets],  entropy = -sum(p * log p) in nats

    hidden (N, H), weight (V, H), targets (N,) integers in 0..V-1, bias (V,) or None
    -> logp (N,) <= 0 and entropy (N,), fp32 (fp64 for fp64 inputs), both once differentiable in
    hidden, weight and bias. Matrix products run in the inputs' type or autocast's, all else in
    fp32. Words with logit -inf count as impossible. ValueError for arguments that do not fit.
    """
    check(hidden, weight, targets, temperature, bias)
    dtype, device = torch.promote_types(hidden.dtype, weight.dtype), hidden.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return FusedLogprobs.apply(hidden, weight, bias, targets, temperature, softcap, dtype)


def token_logprobs_reference(hidden, weight, targets, temperature=1.0, bias=None, softcap=None):
    """The plain form of `token_logprobs`: same arguments, same results, all logits in memory."""
    check(hidden, weight, targets, temperature, bias)
    z = F.linear(hidden, weight, bias)  # (N, V)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if softcap is not None:
        z = torch.tanh(z / softcap) * softcap
    logp = torch.log_softmax(z / temperature, dim=-1)
    entropy = -(logp.exp() * logp.clamp(min=LOWEST)).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def check(hidden, weight, targets, temperature, bias):
    N, V = len(hidden), len(weight)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {[*hidden.shape]}, weight {[*weight.shape]}: not [N, H], [V, H]")
    for name, tensor, size in (("targets", targets, N), ("bias", bias, V)):
        if tensor is not None and tensor.shape != (size,):
            raise ValueError(f"{name} must have shape [{size}], not {[*tensor.shape]}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if N and not 0 <= targets.min() <= targets.max() < V:
        raise ValueError(f"targets reach from {targets.min()} to {targets.max()}, outside of "
                         f"0..{V - 1}; drop the positions that have no target before the head")


def tiles(hidden, weight, bias, targets, temperature, softcap, dtype):
    """For every tile: slices, x (n, H), w (v, H), fresh logits (n, v), where its targets lie."""
    for first in range(0, len(weight), TILE):
        words = slice(first, first + TILE)
        w = weight[words].to(dtype)
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            x = hidden[rows].to(dtype)
            z = (x @ w.T).to(torch.promote_types(dtype, torch.float32))
            if bias is not None:
                z += bias[words]
            if softcap is not None:
                z.div_(softcap).tanh_().mul_(softcap)
            if temperature != 1:
                z /= temperature
            column = targets[rows, None] - first  # (n, 1)
            inside = (column >= 0) & (column < len(w))
            yield words, rows, x, w, z, column.clamp(0, len(w) - 1), inside


def add_product(total, a, b):
    """total += a @ b, summed in the type of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, *settings):
        stats = torch.promote_types(settings[-1], torch.float32)
        # per token: maximum m of z so far, sum e^(z-m), sum e^(z-m) (z-m), logit of the target
        top, total, moment, hit = hidden.new_zeros((4, len(hidden)), dtype=stats)
        top.fill_(LOWEST)
        for _, rows, _, _, z, column, inside in tiles(hidden, weight, bias, targets, *settings):
            hit[rows] = torch.where(inside, z.gather(1, column), hit[rows, None])[:, 0]
            peak = torch.maximum(top[rows], z.amax(1))
            drop = top[rows] - peak  # the sums so far were taken about the old maximum
            e = z.sub_(peak[:, None]).exp()
            # nansum: an impossible word gives 0 * -inf; a real NaN still shows through `total`
            moment[rows] = drop.exp() * (moment[rows] + drop * total[rows]) + (z * e).nansum(1)
            total[rows] = drop.exp() * total[rows] + e.sum(1)
            top[rows] = peak
        lse, entropy = top + total.log(), total.log() - moment / total
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.settings = settings
        ctx.set_materialize_grads(False)  # an output that no loss uses costs nothing in backward
        return hit - top - total.log(), entropy  # hit <= top and total >= 1: never above 0

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, g_entropy):
        """dz = (g (onehot - p) - g_entropy p (log p + entropy)) / temperature, tile by tile."""
        *inputs, targets, lse, entropy = ctx.saved_tensors
        temperature, softcap, dtype = ctx.settings
        grads = [torch.zeros_like(t, dtype=lse.dtype) if needed else None
                 for t, needed in zip(inputs, ctx.needs_input_grad)]
        d_hidden, d_weight, d_bias = grads
        g = (torch.zeros_like(lse) if g is None else g / temperature)[:, None]  # (N, 1)
        if g_entropy is not None:
            g_entropy = (g_entropy / temperature)[:, None]
            constant = -g - g_entropy * entropy[:, None]
        for words, rows, x, w, z, column, inside in tiles(*inputs, targets, *ctx.settings):
            slope = None if softcap is None else 1 - (z * (temperature / softcap)).square_()
            z -= lse[rows, None]  # now the log-probs
            if g_entropy is None:
                dz = z.exp_().mul_(-g[rows])
            else:
                p = z.exp()
                dz = z.clamp_(min=LOWEST).mul_(-g_entropy[rows]).add_(constant[rows]).mul_(p)
            dz.scatter_add_(1, column, g[rows] * inside)
            if slope is not None:
                dz *= slope
            if d_bias is not None:
                d_bias[words] += dz.sum(0)
            dz = dz.to(dtype)
            if d_hidden is not None:
                add_product(d_hidden[rows], dz, w)
            if d_weight is not None:
                add_product(d_weight[words], dz.T, x)
        return *(d if d is None else d.to(t.dtype) for d, t in zip(grads, inputs)), *[None] * 4
