"""The paged cache: which block of memory holds which tokens, and the keys and values themselves.

A sequence owns a *block table*, a list of block numbers: its token at position p lies in block
`table[p // block_size]`, at place `p % block_size`. Samples of one prompt share its blocks; one is
copied only when a sample is about to write where others read (Kwon et al. 2023, PagedAttention).
"""

import torch


class OutOfBlocks(RuntimeError):
    """Every block is in use. The scheduler asks for `free` first, so this is a bug."""


class BlockManager:
    """Hands out block numbers and counts who uses them. Two samples of a six-token prompt:

    >>> blocks = BlockManager(num_blocks=6, block_size=4)
    >>> a = blocks.allocate(6)  # positions 0-3 lie in block 0, 4-5 in block 1
    >>> b = blocks.fork(a)  # the second sample reads the same blocks
    >>> blocks.reserve(b, 6)  # b wants to write position 6, in a block that a also reads: copy it
    (1, 2)
    >>> blocks.reserve(a, 6)  # a is alone in block 1 now: nothing to copy
    >>> blocks.reserve(a, 8)  # position 8 is the first of a new block
    >>> a, b, blocks.references
    ([0, 1, 3], [0, 2], [2, 1, 1, 1, 0, 0])
    >>> blocks.release(a)  # block 0 stays: b still reads it
    >>> a, b, blocks.references, blocks.used
    ([], [0, 2], [1, 0, 1, 0, 0, 0], 2)
    """

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.references = [0] * num_blocks  # how many tables name each block
        self.free = list(range(num_blocks))[::-1]  # a stack, lowest number on top
        self.peak = 0  # most blocks ever in use

    @property
    def used(self):
        return self.num_blocks - len(self.free)

    def blocks_for(self, tokens):
        return -(-tokens // self.block_size)

    def allocate(self, tokens):
        """A new table that holds `tokens` tokens."""
        count, free = self.blocks_for(tokens), len(self.free)
        if count > free:
            raise OutOfBlocks(
                f"{tokens} tokens need {count} cache blocks, {free} of {self.num_blocks} are free")
        self.peak = max(self.peak, self.used + count)
        return self.fork([self.free.pop() for _ in range(count)])

    def fork(self, table):
        """A table over the same blocks."""
        for block in table:
            self.references[block] += 1
        return list(table)

    def reserve(self, table, position):
        """Make `position`, at most one past the table's end, safe to write; takes a block at most.

        Replaces a block that others read too, and returns (source, target) to copy its contents.
        """
        place = position // self.block_size
        if place == len(table):
            table += self.allocate(1)
        elif self.references[table[place]] > 1:
            source, [table[place]] = table[place], self.allocate(1)
            self.references[source] -= 1
            return source, table[place]

    def release(self, table):
        """Give the blocks back; one is free again when no table names it. Empties the table."""
        for block in reversed(table):
            self.references[block] -= 1
            if self.references[block] < 0:
                raise RuntimeError(f"cache block {block} was released twice")
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
        """Put key and value (N, K, D) into slots (N,); returns the layer's pool."""
        if layer not in self.pools:
            self.pools[layer] = key.new_zeros(self.num_blocks * self.block_size, 2, *key.shape[1:])
        return self.pools[layer].index_copy_(0, slots, torch.stack([key, value], dim=1))

    def read(self, layer, blocks):
        """A copy of blocks (M,): (M, block_size * 2 * K * D). Quicker than by many short slots."""
        return self.pools[layer].view(self.num_blocks, -1).index_select(0, blocks)

    def copy_blocks(self, copies):
        """copies: list of (source, target) block numbers, no target being a source."""
        if copies:
            source, target = torch.tensor(copies, device=self.device).unbind(1)
            for layer, pool in self.pools.items():
                pool.view(self.num_blocks, -1).index_copy_(0, target, self.read(layer, source))
