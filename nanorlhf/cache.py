"""The paged cache: which block of memory holds which tokens, and the keys and values themselves.

A sequence owns a *block table*, a list of block numbers: its token at position p lies in block
`table[p // block_size]`, at place `p % block_size`. Samples of one prompt share its blocks; one is
copied only when a sample is about to write where others read (Kwon et al. 2023, PagedAttention).
"""

import torch


class BlockManager:
    """Hands out block numbers and counts who uses them. Two samples of a six-token prompt:

    >>> blocks = BlockManager(num_blocks=6, block_size=4)
    >>> a = blocks.allocate(6)  # positions 0-3 lie in block 0, 4-5 in block 1
    >>> b = blocks.fork(a)  # the second sample reads the same blocks
    >>> blocks.writable(a, 6)  # position 6 lies in a block that b reads, too
    False
    >>> blocks.reserve(a, 6)  # a wants to write there: it gets a copy, block 2
    [(1, 2)]
    >>> blocks.writable(b, 6)  # b is alone in block 1 now
    True
    >>> blocks.reserve(b, 8)  # position 8 is the first of a new block: nothing to copy
    []
    >>> a, b, blocks.references
    ([0, 2], [0, 1, 3], [2, 1, 1, 1, 0, 0])
    >>> blocks.release(b)  # block 0 stays: a still reads it
    >>> a, b, blocks.references, blocks.used
    ([0, 2], [], [1, 0, 1, 0, 0, 0], 2)
    """

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.references = [0] * num_blocks  # how many tables name each block
        self.free = list(range(num_blocks))[::-1]  # a stack, lowest number on top

    @property
    def used(self):
        return self.num_blocks - len(self.free)

    def blocks_for(self, tokens):
        return -(-tokens // self.block_size)

    def allocate(self, tokens):
        """A new table that holds `tokens` tokens."""
        return self.fork([self.free.pop() for _ in range(self.blocks_for(tokens))])

    def fork(self, table):
        """A table over the same blocks."""
        for block in table:
            self.references[block] += 1
        return list(table)

    def writable(self, table, position):
        """Whether `position`, at most one past the table's end, lies in a block of its own."""
        place = position // self.block_size
        return place < len(table) and self.references[table[place]] == 1

    def reserve(self, table, position):
        """Make `position` writable, in the last block of the table, by taking a free block.

        Returns the copy to be made, [(source, target)] if it replaces one that others read, or [].
        """
        place = position // self.block_size
        shared, table[place:] = table[place:], self.allocate(1)
        copies = [(block, table[place]) for block in shared]
        self.release(shared)
        return copies

    def release(self, table):
        """Give the blocks back; one is free again when no table names it. Empties the table."""
        for block in reversed(table):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)
        table.clear()


class PagedKVCache:
    """Keys and values of all layers: per layer one pool (slots, 2, K, D), keys at [:, 0].

    Slot = block * block_size + place. A layer's pool is made at its first write, from the shape and
    dtype of its keys, and starts as zeros: a masked key must be finite.
    """

    def __init__(self, num_blocks, block_size, device):
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, device
        self.pools = {}  # layer -> (slots, 2, K, D)

    def write(self, layer, slots, key, value):
        """Put key and value (N, K, D) into slots (N,)."""
        if layer not in self.pools:
            self.pools[layer] = key.new_zeros(self.num_blocks * self.block_size, 2, *key.shape[1:])
        self.pools[layer].index_copy_(0, slots, torch.stack([key, value], dim=1))

    def read(self, layer, blocks):
        """A copy of blocks (M,): (M, block_size * 2 * K * D). Quicker than by many short slots."""
        return self.pools[layer].view(self.num_blocks, -1).index_select(0, blocks)

    def copy_blocks(self, copies):
        """copies: (source, target) block numbers; all are read before any is written."""
        if copies:
            source, target = torch.tensor(copies, device=self.device).unbind(1)
            for layer, pool in self.pools.items():
                pool.view(self.num_blocks, -1).index_copy_(0, target, self.read(layer, source))
