"""Triton kernel for decode: attention of one query per sequence, read straight from the paged pool.

A program takes one sequence, one key head and one share ("split") of the sequence's keys. The G
query heads that share the key head are the rows of its products, filled up to the 16 that tensor
cores need. It walks along its keys in tiles, finds each key's slot by the block table, and folds
the tile into a running softmax (Milakov & Gimelshein 2018, algorithm 3):

    m' = max(m, s),  l' = l e^(m - m') + sum e^(s - m'),  o' = o e^(m - m') + e^(s - m') v

and at the end o / l is the output of these keys alone, lse = m + log l their weight. Splits of a
sequence are put together by it: output = sum_i softmax(lse)_i o_i. Few long sequences fill the GPU
by many splits, many sequences need one (flash decoding, Dao et al. 2023).

Used by `attention` on CUDA; NANORLHF_TRITON=0 turns it off, for the same tokens a little later. It
has been compiled and interpreted, but has not run on a GPU yet.
Letters: B sequences, W blocks in a table, H heads, K key/value heads, G = H / K, D head size.
"""

import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # not made for this system: SDPA does the same
    triton = None

SHARE = 256  # fewest keys worth a split


def usable(device):
    """From compute capability 8.0 on: below, Triton has no tensor cores."""
    if triton is None or device.type != "cuda" or os.environ.get("NANORLHF_TRITON") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def tile(dtype):
    """Keys that a step of the loop reads. More of fp32 would not fit beside a head size of 256."""
    return 16 if dtype == torch.float32 else 64


def splits_for(programs, length, device):
    """How many shares of at most `length` keys: a power of 2 that gives each processor two."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = min(2 * processors // programs, length // SHARE)
    return 1 << max(0, wanted.bit_length() - 1)


def paged_decode(query, pool, blocks, positions, block_size, scaling, window=None, softcap=None,
                 splits=None):
    """query (B, H, D) at positions (B,) of sequences in blocks (B, W) -> (B, H, D).

    pool (slots, 2, K, D), keys at [:, 0]; a query sees keys 0..position, or the last `window`.
    Only shapes are looked at here, no number on the GPU: nothing waits for it.
    """
    (B, H, D), K, W = query.shape, pool.shape[2], blocks.shape[1]
    if splits is None:
        splits = splits_for(B * K, W * block_size, query.device)
    out = query.new_empty((splits, B, H, D), dtype=query.dtype if splits == 1 else torch.float32)
    lse = query.new_empty((splits, B, H), dtype=torch.float32)
    with torch.cuda.device_of(query):
        decode_kernel[(B, K, splits)](
            query.contiguous(), pool, blocks, positions, out, lse, W, float(scaling),
            window or 2**30, float(softcap or 0.0), block_size, H, K, D, TILE=tile(query.dtype),
            GROUP=max(16, triton.next_power_of_2(H // K)),
            WIDTH=max(16, triton.next_power_of_2(D)), num_warps=4, num_stages=2)
    if splits == 1:
        return out[0]
    return (lse.softmax(0)[..., None] * out).sum(0).to(query.dtype)


if triton is not None:

    @triton.jit
    def decode_kernel(q_ptr, pool_ptr, blocks_ptr, positions_ptr, out_ptr, lse_ptr, W, scaling,
                      window, softcap: tl.constexpr, block_size: tl.constexpr, H: tl.constexpr,
                      K: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
                      TILE: tl.constexpr):
        sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        row, dim, place = tl.arange(0, GROUP), tl.arange(0, WIDTH), tl.arange(0, TILE)
        heads = head * (H // K) + row
        inside = (row < H // K)[:, None] & (dim < D)[None, :]
        at = (sequence * H + heads)[:, None] * D + dim[None, :]
        q = tl.load(q_ptr + at, inside, 0.0)
        end = tl.load(positions_ptr + sequence).to(tl.int32) + 1
        begin = tl.maximum(end - window, 0)
        share = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(2)), TILE) * TILE
        begin += split * share
        end = tl.minimum(end, begin + share)
        m = tl.full((GROUP,), -1e30, tl.float32)  # not -inf: a share may be empty
        l = tl.zeros((GROUP,), tl.float32)
        o = tl.zeros((GROUP, WIDTH), tl.float32)
        for first in range(begin, end, TILE):
            key = first + place
            block = tl.load(blocks_ptr + sequence * W + key // block_size, key < end, 0)
            slot = block.to(tl.int64) * block_size + key % block_size
            there = (key < end)[:, None] & (dim < D)[None, :]
            kv = pool_ptr + (slot * 2 * K + head)[:, None] * D + dim[None, :]
            k = tl.load(kv, there, 0.0)  # (TILE, WIDTH)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            if softcap > 0:
                s = softcap * (2 * tl.sigmoid(2 * s / softcap) - 1)  # tanh
            s = tl.where((key < end)[None, :], s, -1e30)
            peak = tl.maximum(m, tl.max(s, 1))
            p, old = tl.exp(s - peak[:, None]), tl.exp(m - peak)
            v = tl.load(kv + K * D, there, 0.0)
            l = l * old + tl.sum(p, 1)
            o = o * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            m = peak
        filled = l > 0
        o = o / tl.where(filled, l, 1.0)[:, None]
        shift = split * tl.num_programs(0) * H
        tl.store(out_ptr + shift * D + at, o.to(out_ptr.dtype.element_ty), inside)
        tl.store(lse_ptr + shift + sequence * H + heads, m + tl.log(tl.where(filled, l, 1.0)),
                 row < H // K)
