"""How tokens see each other: one attention function for training, scoring, prefill and decode.

Tokens of all sequences lie on one axis of length N, laid end to end, with no padding. A `Layout`
says which keys each query may look at:

    packed   a query at position p of a sequence sees keys 0..p of the same sequence, taken from
             the tokens of this very forward pass (training, scoring)
    paged    the new keys and values are first written into the paged cache, then a query sees
             keys 0..p of its sequence, read back from the cache through the block table
             (prefill, chunked prefill and decode are the same thing with other lengths)

The function is registered with transformers' `AttentionInterface` under the name "nanorlhf", so
every HF model class that honours the interface runs on it; the layout travels as the keyword
`layout=` through the model's own forward. No attention mask is built by transformers, no Cache
class is used.

SDPA wants a rectangle. Sequences of similar length are laid into one rectangle, padded on the
right; a causal mask keeps the padding out of every real query, and it never leaves this file.

Letters: N tokens, B sequences of a rectangle, T queries, S keys, H heads, K key/value heads,
D head size.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

# Keywords that models pass along and that change nothing for us.
HARMLESS = {
    "position_ids", "use_cache", "dropout", "is_causal", "output_attentions", "output_hidden_states",
    "cache_position", "cache", "past_key_values", "return_dict", "logits_to_keep", "labels",
    "attention_mask", "token_type_ids", "output_router_logits",
}


@dataclass
class Rectangle:
    """B sequences of similar length, padded to T queries and S keys."""

    queries: torch.Tensor  # (B, T) index into the N tokens; padding repeats the last token
    keys: torch.Tensor  # (B, S) index into the N tokens, or into the cache's slots
    positions: torch.Tensor  # (B, T) position of each query within its sequence
    causal: bool  # T == S and queries start at 0: SDPA's own causal flag is enough
    masks: dict = field(default_factory=dict)  # window -> (B, 1, T, S), shared by all layers

    def mask(self, window):
        """(B, 1, T, S), true where the query may look; None if the causal flag says it all."""
        if window is not None and window >= self.keys.shape[1]:
            window = None
        if window is None and self.causal:
            return None
        if window not in self.masks:
            keys = torch.arange(self.keys.shape[1], device=self.keys.device)
            distance = self.positions[:, :, None] - keys  # (B, T, S)
            mask = distance >= 0
            if window is not None:
                mask &= distance < window
            self.masks[window] = mask[:, None]
        return self.masks[window]


@dataclass
class Layout:
    rectangles: list[Rectangle]
    back: torch.Tensor  # (N,) where each token's query lies in the rectangles laid end to end
    cache: object | None = None  # PagedKVCache, for the paged layout
    slots: torch.Tensor | None = None  # (N,) cache slot that each new token is written to


def similar_lengths(lengths):
    """Group sequence numbers so that the longest of a group is at most twice the shortest."""
    groups = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[i] * 2 >= lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def lay(counts, starts, keys_of, device):
    """Rectangles over sequences that bring counts[i] new tokens, the first at position starts[i].

    `keys_of(group, queries, longest)` gives the (B, S) keys of a group of sequences.
    """
    counts, starts = torch.as_tensor(counts), torch.as_tensor(starts)  # (B,), on the CPU
    ends, offsets = starts + counts, counts.cumsum(0) - counts
    rectangles, back, laid = [], torch.empty(int(counts.sum()), dtype=torch.long), 0
    for group in similar_lengths(counts.tolist()):
        count, start, offset = counts[group][:, None], starts[group][:, None], offsets[group]
        steps = torch.arange(int(count.max()))  # (T,)
        inside = torch.minimum(steps, count - 1)  # (B, T)
        queries = offset[:, None] + inside
        real = (steps < count).flatten()
        back[queries.flatten()[real]] = laid + real.nonzero()[:, 0]
        laid += len(real)
        longest = int(ends[group].max())
        keys = keys_of(group, queries, longest)
        causal = longest == len(steps) and not start.any()
        rectangles.append(Rectangle(*(x.to(device) for x in (queries, keys, start + inside)),
                                    bool(causal)))
    return Layout(rectangles, back.to(device))


def packed_layout(cu_seqlens):
    """cu_seqlens (B+1,): borders of the sequences on the token axis, first 0, last N."""
    counts = cu_seqlens.cpu().diff()
    return lay(counts, torch.zeros_like(counts), lambda group, queries, longest: queries,
               cu_seqlens.device)


def paged_layout(cache, tables, starts, ends):
    """New tokens at positions starts[i]..ends[i]-1 of sequence i, whose blocks are tables[i].

    tables (B, W), starts (B,), ends (B,): integer tensors on the CPU; a row of `tables` is filled
    up with any block number. The token axis holds the new tokens of sequence 0, then those of
    sequence 1, ... Worked example, block size 4: tables [[5, 2]], starts [6], ends [7]: one new
    token at position 6, that is slot 6 % 4 = 2 of block 2, so slot 2 * 4 + 2 = 10 of the pool;
    its keys are slots 20 21 22 23 (block 5) and 8 9 10 (block 2).
    """
    tables, starts, ends = (torch.as_tensor(x) for x in (tables, starts, ends))
    within = torch.arange(cache.block_size)

    def keys_of(group, queries, longest):
        width = -(-longest // cache.block_size)
        return (tables[group][:, :width, None] * cache.block_size + within).flatten(1)[:, :longest]

    layout = lay(ends - starts, starts, keys_of, cache.device)
    row = torch.repeat_interleave(torch.arange(len(starts)), ends - starts)  # (N,) sequence
    step = torch.arange(len(row)) - torch.repeat_interleave((ends - starts).cumsum(0) - ends,
                                                            ends - starts)  # (N,) position
    block = tables[row, step // cache.block_size]
    layout.cache = cache
    layout.slots = (block * cache.block_size + step % cache.block_size).to(cache.device)
    return layout


def rectangle_attention(query, key, value, mask, scaling, softcap):
    """query (B, H, T, D), key/value (B, K, S, D), mask (B, 1, T, S) or None for causal."""
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None and query.shape[2] > 1,
            scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
        )
    # Gemma-2 squeezes the scores through tanh before the softmax, which SDPA cannot do.
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(value.dtype) @ value


def attention(module, query, key, value, attention_mask=None, scaling=None, layout=None,
              sliding_window=None, softcap=None, **other):
    """The function that transformers calls in every layer.

    query (1, H, N, D), key and value (1, K, N, D), rotary positions already applied.
    Returns (1, N, H, D) and None (no attention weights).
    """
    unknown = [k for k, v in other.items() if v is not None and k not in HARMLESS]
    if unknown:
        raise ValueError(f"{type(module).__name__} asks for {', '.join(unknown)} in its attention, "
                         "which nanorlhf does not compute: this model family is not supported")
    if layout is None:
        raise ValueError(f"{type(module).__name__} was called without a layout: it drops keywords "
                         "on the way to its attention, so this model family is not supported")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, D)
    if layout.cache is not None:
        pool = layout.cache.write(module.layer_idx, layout.slots, key, value)  # (slots, 2, K, D)
    outputs = []
    for part in layout.rectangles:
        (B, T), S = part.queries.shape, part.keys.shape[1]
        rows = part.queries.flatten()
        q = query.index_select(0, rows).view(B, T, *query.shape[1:]).transpose(1, 2)
        if layout.cache is None:
            k, v = (x.index_select(0, rows).view(B, S, *x.shape[1:]) for x in (key, value))
        else:
            kv = pool.index_select(0, part.keys.flatten()).view(B, S, *pool.shape[1:])
            k, v = kv.unbind(2)  # (B, S, K, D)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        out = rectangle_attention(q, k, v, part.mask(sliding_window), scaling, softcap)
        outputs.append(out.transpose(1, 2).reshape(B * T, *out.shape[1::2]))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.index_select(0, layout.back)[None], None


AttentionInterface.register("nanorlhf", attention)
