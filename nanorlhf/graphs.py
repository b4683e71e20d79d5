"""CUDA graphs for decode: the kernels of a pass, recorded once, launched together ever after.

A pass that takes one token of each sample is short work for a GPU; what takes long is Python, which
launches some forty kernels a layer. A graph launches them all by one call, but it always reads and
writes the same memory. So there is one for each power of 2 of samples and of blocks in a table, and
each has one input, which every step fills anew: a row (token, position, block table) a sample. The
rows of nobody write to a block that no table names, the last of the cache.

NANORLHF_GRAPHS=1 turns them on, where the kernel of decode_kernel.py runs. Off until then: all but
the recording is tested, on a CPU, but no graph has run on a GPU yet.
Letters: R samples, W blocks in a table, V vocabulary.
"""

import os

import numpy as np
import torch

from nanorlhf import decode_kernel
from nanorlhf.attention import decode_layout


def usable(device):
    return os.environ.get("NANORLHF_GRAPHS") == "1" and decode_kernel.usable(device)


class DecodeGraphs:
    """For one model and one PagedKVCache, whose last block is left to it."""

    def __init__(self, model, cache):
        self.model, self.cache, self.graphs, self.pool = model, cache, {}, None

    def __call__(self, ids, tables, positions):
        """Logits (R, V) after one more token of R samples; valid until the next call.

        ids (R,), tables (R, W), positions (R,): numpy arrays of integers."""
        (R, W), spare = tables.shape, self.cache.num_blocks - 1
        rows, width = (1 << (n - 1).bit_length() for n in (R, W))
        step = np.full((rows, 2 + width), spare)
        step[:, :2] = 0
        step[:R, 0], step[:R, 1], step[:R, 2:2 + W] = ids, positions, tables
        if (rows, width) not in self.graphs:
            inputs = torch.from_numpy(step).to(self.cache.device, copy=True)
            self.graphs[rows, width] = inputs, self.record(lambda: self.decode(inputs))
        inputs, replay = self.graphs[rows, width]
        inputs.copy_(torch.from_numpy(step))
        return replay()[:R]

    def decode(self, inputs):
        """inputs (R, 2 + W) on the device -> logits (R, V)."""
        ids, positions, tables = inputs[:, 0], inputs[:, 1].contiguous(), inputs[:, 2:].contiguous()
        return self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False,
                          layout=decode_layout(self.cache, tables, positions)).logits[0]

    def record(self, decode):
        """A function that does what `decode` does, on the memory that it has now."""
        decode()  # compiles kernels and makes the cache's pools, which no graph may do
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = decode()
        self.pool = graph.pool()  # one memory for the inner tensors of all graphs

        def replay():
            graph.replay()
            return logits
        return replay
