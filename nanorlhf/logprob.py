"""Fused lm head: log-prob of each target token and entropy, without ever storing the logits.

The logits of N tokens over V words are the largest tensor of RLHF by far (4096 x 49152 in fp32:
805 MB, several times over once autograd has kept its copies). Here only one tile of them exists at
a time, some tokens x some words in a reused buffer. The forward pass folds each into running sums
by the online softmax (Milakov & Gimelshein 2018, algorithm 3) and keeps logp, entropy and
log-sum-exp. The backward pass makes each again and turns it, in place, into its gradient:

    logp    = z_y - lse,  lse = log sum_j e^(z_j),  p = softmax(z)    for logits z and target y
    entropy = -sum_j p_j log p_j = lse - sum_j p_j z_j
    d lse / dz_i = p_i,  d p_j / dz_i = p_j ([i = j] - p_i),  so  d logp / dz_i = [i = y] - p_i,
    d entropy / dz_i = p_i - p_i - sum_j z_j p_j ([i = j] - p_i) = -p_i (log p_i + entropy),
    dL/dz_i = g ([i = y] - p_i) - g' p_i (log p_i + entropy)    with g = dL/dlogp, g' = dL/dentropy

and z = x w^T gives dL/dx = dL/dz w, dL/dw = dL/dz^T x. The two row functions exist twice, all else
once: as Triton kernels for CUDA, and in torch for every other machine (or NANORLHF_TRITON=0). Where
g is known beforehand (SFT), the forward pass takes a few rows over the whole vocabulary and makes
their gradient at once: three matrix products instead of four.
Letters: N tokens, H hidden size, V vocabulary; n tokens and v words make up a tile.
"""

import os
from functools import partial

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # not made for this system: the torch form needs none
    triton = None

# n and v. CPU: 8 MB of fp32, which stays near the caches. CUDA: 128 MB of bf16, large products.
TILES = {"cpu": (512, 4096), "cuda": (4096, 16384)}
LOWEST = -1e30  # stands in for -inf where 0 * -inf has to be 0


def token_logprobs(hidden, weight, targets, temperature=1.0, bias=None, softcap=None,
                   upstream=None):
    """Log-prob of the targets, and entropy of the distribution that the lm head makes of `hidden`.

    z = softcap * tanh((hidden @ weight.T + bias) / softcap) / temperature    (tanh if softcap)
    logp = log_softmax(z)[targets],  entropy = -sum(p * log p) in nats
    hidden (N, H), weight (V, H), targets (N,) integers in 0..V-1, bias (V,) or None
    -> logp (N,) <= 0 and entropy (N,), fp32 (fp64 for fp64 inputs), both once differentiable in
    hidden, weight and bias. The head runs in the inputs' type or autocast's, all after it in
    fp32. Words with logit -inf count as impossible. ValueError for arguments that do not fit.

    upstream (N,): what dL/dlogp will be, up to a factor, and L not made of entropy: gradients are
    then ready after the forward pass. A backward with another gradient, or a second one, raises."""
    check(hidden, weight, bias, targets, temperature, upstream)
    dtype, device = torch.promote_types(hidden.dtype, weight.dtype), hidden.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return FusedHead.apply((dtype, temperature, softcap), upstream, hidden, weight, bias, targets)


def logits_logprobs(logits, targets, temperature=1.0):
    """The same for logits (N, V) that lie in memory already; they are read, not overwritten."""
    check(logits, None, None, targets, temperature)
    return FusedHead.apply((logits.dtype, temperature, None), None, logits, None, None, targets)


def token_logprobs_reference(hidden, weight, targets, temperature=1.0, bias=None, softcap=None):
    """The plain form of `token_logprobs`: same arguments, same results, all logits in memory."""
    check(hidden, weight, bias, targets, temperature)
    z = F.linear(hidden, weight, bias)  # (N, V)
    if softcap is not None:
        z = torch.tanh(z / softcap) * softcap
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    logp = torch.log_softmax(z / temperature, dim=-1)
    entropy = -(logp.exp() * logp.clamp(min=LOWEST)).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def check(hidden, weight, bias, targets, temperature, upstream=None):
    shapes = [[*t.shape] for t in (hidden, weight) if t is not None]  # no weight: logits
    if any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise ValueError(f"hidden, weight {shapes}: not [N, H], [V, H] (logits: [N, V])")
    N, V = len(hidden), shapes[0][1] if weight is None else len(weight)
    for name, tensor, size in ("targets", targets, N), ("bias", bias, V), ("upstream", upstream, N):
        if tensor is not None and tensor.shape != (size,):
            raise ValueError(f"{name} must have shape [{size}], not {[*tensor.shape]}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if N and not 0 <= targets.min() <= targets.max() < V:
        raise ValueError(f"targets from {targets.min()} to {targets.max()} are not in 0..{V - 1}")


def add_product(total, a, b):
    """total += a @ b, summed in fp32: rounding every tile's product to bf16 would bias the sum."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


class FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, upstream, *inputs):
        exact, targets = torch.promote_types(options[0], torch.float32), inputs[-1]
        # per token: maximum m of z so far, sum e^(z-m), sum e^(z-m) (z-m), logit of the target
        sums = targets.new_zeros((4, len(targets)), dtype=exact)
        sums[0] = LOWEST
        # of these only the slope of logp is read, and lse, which walk puts into row 0
        stats = None if upstream is None else (upstream / options[1]).to(sums).repeat(4, 1)
        ctx.gradients = walk(inputs, options, sums, stats, ctx.needs_input_grad[2:])
        top, total, moment, hit = sums
        lse, entropy = top + total.log(), total.log() - moment / total
        ctx.save_for_backward(*inputs, upstream, lse, entropy)
        ctx.options = options
        ctx.set_materialize_grads(False)  # an output that no loss uses costs nothing in backward
        return hit - top - total.log(), entropy  # hit <= top and total >= 1: never above 0

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, g_entropy):
        *inputs, upstream, lse, entropy = ctx.saved_tensors
        if upstream is None:
            stats = torch.stack([lse, entropy, *(torch.zeros_like(lse) if d is None else
                                                 d / ctx.options[1] for d in (g, g_entropy))])
            made = walk(inputs, ctx.options, None, stats, ctx.needs_input_grad[2:],
                        g_entropy is not None)
        else:
            made, ctx.gradients = ctx.gradients, None  # given away, so that autograd copies none
            factor = (g @ upstream) / (upstream @ upstream).clamp(min=1e-30)
            kept = torch.allclose(g, factor * upstream, atol=0.0)
            if made is None or g_entropy is not None or not kept:
                raise RuntimeError("not the one gradient that upstream promised; leave it out")
            made = [d if d is None or factor == 1 else d * factor for d in made]
        return None, None, *made, None  # autograd casts to the types of the inputs


def walk(inputs, options, sums, stats, needed, with_entropy=False):
    """Over all tiles of logits: bring sums (4, N) up to date with them; then, with stats (4, N),
    turn them into their gradient and return dL/dhidden, dL/dweight, dL/dbias. With both, tiles are
    whole rows. With no weight, hidden are the logits."""
    (hidden, weight, bias, targets), (dtype, temperature, softcap) = inputs, options
    x, exact = hidden.to(dtype), torch.promote_types(dtype, torch.float32)
    N, V = len(x), x.shape[1] if weight is None else len(weight)
    n, v = TILES["cuda" if x.is_cuda else "cpu"]
    if sums is not None and stats is not None:
        n, v = min(n, max(256, n * v // V)), V
    z_space = x.new_empty(min(n, N), -(-min(v, V) // 16) * 16)  # 16: aligned rows for any V
    kind = dtype if weight is None else exact
    d_hidden, d_weight, d_bias = (
        torch.zeros_like(tensor, dtype=kind) if wanted and stats is not None else None
        for tensor, wanted in zip(inputs[:3], needed))
    fold, to_gradient = row_functions(hidden, dtype)
    for left in range(0, V, v):  # words outermost: each part of the weight is read once
        words = slice(left, min(left + v, V))
        w = None if weight is None else weight[words].to(dtype)  # (v, H)
        for top in range(0, N, n):
            rows = slice(top, min(top + n, N))
            z, column = z_space[:rows.stop - top, :words.stop - left], targets[rows] - left
            z.copy_(x[rows, words]) if w is None else torch.mm(x[rows], w.T, out=z)
            if bias is not None:
                z += bias[words]
            if softcap is not None:
                z.div_(softcap).tanh_().mul_(softcap)
            if sums is not None:
                fold(z, column, sums[:, rows], temperature)
            if stats is None:
                continue
            if sums is not None:
                stats[0, rows] = sums[0, rows] + sums[1, rows].log()
            slope = 1 if softcap is None else 1 - (z / softcap).square_()
            to_gradient(z, column, stats[:, rows], temperature, with_entropy)
            if softcap is not None:
                z *= slope
            if w is None:
                d_hidden[rows, words] = z
            elif d_hidden is not None:
                add_product(d_hidden[rows], z, w)
            if d_bias is not None:
                d_bias[words] += z.sum(0, dtype=exact)
            if d_weight is not None:
                add_product(d_weight[words], z.T, x[rows])
    return d_hidden, d_weight, d_bias


def row_functions(hidden, dtype):
    """Of both passes, in the form that fits. z (n, v): a tile; column (n,): its targets' places."""
    kernels = triton is not None and hidden.is_cuda and dtype != torch.float64
    if not kernels or os.environ.get("NANORLHF_TRITON") == "0":
        return fold, to_gradient
    return partial(launch, fold_kernel), partial(launch, gradient_kernel)


def fold(tile, column, sums, temperature):
    """Bring sums (4, n) up to date with the tile: see FusedHead.forward."""
    top, total, moment, hit = sums  # views: written below
    found = ((column >= 0) & (column < tile.shape[1])).nonzero()[:, 0]
    hit[found] = tile[found, column[found]].to(sums.dtype) / temperature
    for part in tile.split(TILES["cpu"][1], dim=1):  # small enough to stay near the caches
        z = part.to(sums.dtype) if temperature == 1 else part.to(sums.dtype) / temperature
        peak = torch.maximum(top, z.amax(1))
        drop = top - peak  # the sums so far were taken about the old maximum
        z = z - peak[:, None]
        e = z.exp()
        # nansum: an impossible word gives 0 * -inf; a real NaN still shows through `total`
        moment.add_(drop * total).mul_(drop.exp()).add_(z.mul_(e).nansum(1))
        total.mul_(drop.exp()).add_(e.sum(1))
        top.copy_(peak)


def to_gradient(tile, column, stats, temperature, with_entropy):
    """Turn the tile into its gradient. stats (4, n): lse, entropy, g and g' over temperature."""
    lse, entropy, g, g_entropy = stats[:, :, None]  # (n, 1) each
    for left in range(0, tile.shape[1], TILES["cpu"][1]):
        part, at = tile[:, left: left + TILES["cpu"][1]], column - left
        z = part.to(stats.dtype) if temperature == 1 else part.to(stats.dtype) / temperature
        z -= lse  # now the log-probs
        if with_entropy:
            p = z.exp()
            z.clamp_(min=LOWEST).mul_(-g_entropy).sub_(g + g_entropy * entropy).mul_(p)
        else:
            z.exp_().mul_(-g)
        found = ((at >= 0) & (at < part.shape[1])).nonzero()[:, 0]
        z[found, at[found]] += g[found, 0]  # before rounding: 1 - p may be small
        part.copy_(z)


if triton is not None:
    @triton.jit
    def fold_kernel(z_ptr, stride, width, column_ptr, stats_ptr, N, T, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2^31
        z_ptr, stats_ptr = z_ptr + row * stride, stats_ptr + row
        top, total, moment = tl.load(stats_ptr), tl.load(stats_ptr + N), tl.load(stats_ptr + 2 * N)
        for left in range(0, width, BLOCK):
            at = left + tl.arange(0, BLOCK)
            z = tl.load(z_ptr + at, at < width, -float("inf")).to(tl.float32) / T
            peak = tl.maximum(top, tl.max(z))
            drop = top - peak
            e = tl.exp(z - peak)
            shifted = tl.where(e > 0, z - peak, 0.0)  # never 0 * -inf
            moment = tl.exp(drop) * (moment + drop * total) + tl.sum(e * shifted)
            total = tl.exp(drop) * total + tl.sum(e)
            top = peak
        tl.store(stats_ptr, top)
        tl.store(stats_ptr + N, total)
        tl.store(stats_ptr + 2 * N, moment)
        column = tl.load(column_ptr + row)
        if (column >= 0) & (column < width):
            tl.store(stats_ptr + 3 * N, tl.load(z_ptr + column).to(tl.float32) / T)

    @triton.jit
    def gradient_kernel(z_ptr, stride, width, column_ptr, stats_ptr, N, T,
                        with_entropy: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        z_ptr, stats_ptr = z_ptr + row * stride, stats_ptr + row
        lse, entropy = tl.load(stats_ptr), tl.load(stats_ptr + N)
        g, g_entropy = tl.load(stats_ptr + 2 * N), tl.load(stats_ptr + 3 * N)
        column = tl.load(column_ptr + row)
        for left in range(0, width, BLOCK):
            at = left + tl.arange(0, BLOCK)
            z = tl.load(z_ptr + at, at < width, -float("inf")).to(tl.float32) / T
            p = tl.exp(z - lse)
            dz = tl.where(at == column, g, 0.0) - g * p
            if with_entropy:
                dz -= g_entropy * p * (tl.where(p > 0, z - lse, 0.0) + entropy)  # never 0 * -inf
            tl.store(z_ptr + at, dz, mask=at < width)

    def launch(kernel, z, column, stats, temperature, *flags):
        with torch.cuda.device_of(z):
            kernel[(len(z),)](z, z.stride(0), z.shape[1], column, stats, stats.stride(0),
                              float(temperature), *flags, BLOCK=4096, num_warps=8)
