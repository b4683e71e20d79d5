"""How tokens see each other: one attention function for training, scoring, prefill and decode.

Tokens of all sequences lie on one axis of length N, laid end to end, with no padding. A `Layout`
says which keys each query, at position p of its sequence, may look at:

    packed   keys 0..p of the sequence, from this very forward pass (training, scoring)
    paged    keys 0..p, read from the paged cache through the block table after the new ones were
             written to it (prefill, chunked prefill and decode differ in lengths only)

Registered with transformers' `AttentionInterface` as "nanorlhf", it serves every HF model class
that honours the interface; the layout travels as a keyword through the model's own forward.

SDPA wants a rectangle. Sequences of similar length are laid into one, padded on the right; a causal
mask keeps the padding out of every real query, and it never leaves this file. A decode on CUDA
needs neither: the kernel of decode_kernel.py reads the cache where it lies.

Letters: N tokens, B sequences, T queries, S keys, H heads, K key/value heads, D head size.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from nanorlhf import decode_kernel

# Keywords that models pass along and that change nothing for us.
HARMLESS = {"position_ids", "use_cache", "dropout", "is_causal", "output_attentions", "cache",
            "cache_position", "past_key_values", "return_dict", "logits_to_keep", "labels",
            "attention_mask", "token_type_ids", "output_router_logits", "output_hidden_states"}


@dataclass
class Rectangle:
    """B sequences of similar length, padded to T queries and S keys."""

    queries: torch.Tensor | slice  # (B * T,) which of the N tokens
    positions: torch.Tensor  # (B, T) position of each query within its sequence
    blocks: torch.Tensor | None  # (B, W) blocks of the cache with the keys; None: as queries
    length: int  # S
    full: bool  # a query's keys end at its own place of S: all S if T == 1, else T == S and causal
    masks: dict = field(default_factory=dict)  # shared by all layers

    def mask(self, window, dtype):
        """(B, 1, T, S), 0 where a query may look, else -inf; None: causal flag or nothing."""
        if window is None or window >= self.length:
            if self.full:
                return None
            window = self.length
        if (window, dtype) not in self.masks:
            keys = torch.arange(self.length, device=self.positions.device)
            distance = self.positions[:, None, :, None] - keys  # (B, 1, T, S)
            self.masks[window, dtype] = torch.zeros_like(distance, dtype=dtype).masked_fill_(
                (distance < 0) | (distance >= window), float("-inf"))
        return self.masks[window, dtype]


@dataclass
class Layout:
    rectangles: list[Rectangle]
    back: torch.Tensor | None  # (N,) where each token lies in the rectangles laid end to end
    cache: object | None = None  # PagedKVCache, for the paged layout
    slots: torch.Tensor | None = None  # (N,) cache slot that each new token is written to
    positions: torch.Tensor | None = None  # (N,) position of each new token


def on(device, array):
    return torch.from_numpy(array).to(device)


def similar_lengths(counts, ends):
    """Group sequence numbers by size: in a group, the first is at most twice as long as any."""
    groups, first = [], None
    for i in sorted(range(len(counts)), key=lambda i: (-counts[i], -ends[i])):
        if not groups or counts[i] * 2 < counts[first] or ends[i] * 2 < ends[first]:
            groups.append([])
            first = i
        groups[-1].append(i)
    return [sorted(group) for group in groups]


def lay(counts, starts, device, tables=None, block_size=1):
    """Rectangles of sequences that bring counts[i] new tokens, from position starts[i] on; `back`.

    counts, starts (B,) and tables (B, W) are numpy, quick on the small arrays of a decode step.
    """
    ends, offsets = starts + counts, counts.cumsum() - counts
    rectangles, back, laid = [], np.empty(counts.sum(), dtype=np.int64), 0
    sizes = ends
    if tables is not None and decode_kernel.usable(device):
        sizes = np.where(counts == 1, 0, ends)  # one launch takes all lengths
    for group in similar_lengths(counts.tolist(), sizes.tolist()):
        count, start, offset = (x[group, None] for x in (counts, starts, offsets))  # (B, 1)
        S, steps = int(ends[group].max()), np.arange(count.max())  # steps (T,)
        inside = np.minimum(steps, count - 1)  # (B, T), padding repeats the last token
        queries, real = (offset + inside).ravel(), (steps < count).ravel()
        back[queries[real]] = laid + real.nonzero()[0]
        laid += len(real)
        # A slice is taken without a copy.
        queries = (slice(int(queries[0]), int(queries[-1]) + 1) if (np.diff(queries) == 1).all()
                   else on(device, queries))
        blocks = None if tables is None else on(device, tables[group, :-(-S // block_size)])
        full = len(steps) in (1, S) and bool((start == S - len(steps)).all())
        rectangles.append(Rectangle(queries, on(device, start + inside), blocks, S, full))
    in_order = laid == len(back) and (np.diff(back) == 1).all()  # the rectangles are the N tokens
    return rectangles, None if in_order else on(device, back)


def packed_layout(cu_seqlens):
    """cu_seqlens (B+1,): borders of the sequences on the token axis, first 0, last N."""
    counts = np.diff(cu_seqlens.cpu().numpy())
    return Layout(*lay(counts, np.zeros_like(counts), cu_seqlens.device))


def paged_layout(cache, tables, starts, ends):
    """New tokens at positions starts[i]..ends[i]-1 of sequence i, whose blocks are tables[i].

    tables (B, W), starts (B,), ends (B,): numpy arrays of integers; a row of `tables` is filled up
    with any block number. Example, block size 4, tables [[5, 2]], starts [6], ends [7]: one token,
    at place 2 of block 2, that is slot 10; its keys: slots 20-23 (block 5) and 8-10 (block 2).
    """
    size, counts = cache.block_size, ends - starts
    row = np.arange(len(counts)).repeat(counts)  # (N,) sequence of each token
    positions = np.arange(len(row)) - (counts.cumsum() - ends)[row]
    slots = tables[row, positions // size] * size + positions % size
    return Layout(*lay(counts, starts, cache.device, tables, size), cache,
                  on(cache.device, slots), on(cache.device, positions))


def decode_layout(cache, tables, positions):
    """One new token at positions (R,) of each of R sequences in blocks (R, W), all on the device:
    nothing is looked at, so that a CUDA graph can record it."""
    (R, W), size = tables.shape, cache.block_size
    slots = tables.gather(1, positions[:, None] // size)[:, 0] * size + positions % size
    part = Rectangle(slice(0, R), positions[:, None], tables, W * size, False)
    return Layout([part], None, cache, slots, positions)


def pick(x, rows):
    return x.index_select(0, rows) if isinstance(rows, torch.Tensor) else x[rows]


def rectangle_attention(query, key, value, mask, causal, scaling, softcap):
    """query (B, H, T, D), key and value (B, K, S, D), mask (B, 1, T, S) or None."""
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1])
    # Gemma-2 squeezes the scores through tanh before the softmax, which SDPA cannot do.
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = scores.new_full(scores.shape[-2:], float("-inf")).triu(1)
    return (scores if mask is None else scores + mask).softmax(-1).to(value.dtype) @ value


def attention(module, query, key, value, attention_mask=None, scaling=None, layout=None,
              sliding_window=None, softcap=None, **other):
    """The function that transformers calls in every layer.

    query (1, H, N, D), key and value (1, K, N, D), already rotated -> (1, N, H, D), None (weights).
    """
    name = type(module).__name__
    if unknown := [k for k, v in other.items() if v is not None and k not in HARMLESS]:
        raise ValueError(f"{name} asks for {', '.join(unknown)} in its attention, which nanorlhf "
                         "does not compute: this model family is not supported")
    if layout is None:
        raise ValueError(f"{name} was called without a layout: it drops keywords on the way to its "
                         "attention, so this model family is not supported")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast the rotation leaves fp32, but values, and so all, are in the lower precision.
    query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    if layout.cache is not None:
        layout.cache.write(module.layer_idx, layout.slots, key, value)
    outputs = []
    for part in layout.rectangles:
        (B, T), (H, D), K = part.positions.shape, query.shape[1:], key.shape[1]
        q = pick(query, part.queries)
        if T == 1 and part.blocks is not None and decode_kernel.usable(q.device):
            outputs.append(decode_kernel.paged_decode(
                q, layout.cache.pools[module.layer_idx], part.blocks, part.positions[:, 0],
                layout.cache.block_size, scaling, sliding_window, softcap))
            continue
        # In a decode, the heads that share a key head stand as queries of one head.
        q = q.view(B, K, H // K, D) if T == 1 else q.view(B, T, H, D).transpose(1, 2)
        if part.blocks is None:
            k, v = (pick(x, part.queries).view(B, T, K, D).transpose(1, 2) for x in (key, value))
        else:
            kv = layout.cache.read(module.layer_idx, part.blocks.view(-1)).view(B, -1, 2, K, D)
            k, v = kv[:, :part.length].permute(2, 0, 3, 1, 4)  # (B, K, S, D)
        mask = part.mask(sliding_window, q.dtype)
        out = rectangle_attention(q, k, v, mask, mask is None and T > 1, scaling, softcap)
        outputs.append((out if T == 1 else out.transpose(1, 2)).reshape(B * T, H, D))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (output if layout.back is None else pick(output, layout.back))[None], None


AttentionInterface.register("nanorlhf", attention)
