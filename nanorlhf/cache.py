"""The paged cache: which block of memory holds which tokens, and the keys and values themselves.

Keys and values lie in *blocks* of `block_size` tokens. A sequence owns a *block table*, a list of
block numbers: its token at position p lies in block `table[p // block_size]`, at place
`p % block_size`. Samples of one prompt share the prompt's blocks; a block is copied only when a
sample is about to write into one that others also read (Kwon et al. 2023, "PagedAttention").
"""

import torch


class OutOfBlocks(RuntimeError):
    """Every block is in use. The scheduler asks for `free` first, so this is a bug, not a state."""


class BlockManager:
    """Hands out block numbers and counts who uses them. It touches no tensor.

    Two samples fork a prompt of six tokens, block size 4:

    >>> blocks = BlockManager(num_blocks=6, block_size=4)
    >>> a = blocks.allocate(6)  # positions 0-3 lie in block 0, 4-5 in block 1, which is half full
    >>> b = blocks.fork(a)  # the second sample reads the same blocks
    >>> a, b, blocks.references
    ([0, 1], [0, 1], [2, 2, 0, 0, 0, 0])
    >>> blocks.reserve(b, 6)  # b wants to write position 6, in a block that a also reads: copy it
    (1, 2)
    >>> blocks.reserve(a, 6)  # a is alone in block 1 now and writes in place: nothing to copy
    >>> blocks.reserve(a, 7), blocks.reserve(a, 8)  # position 8 is the first of a new block
    (None, None)
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

    def _take(self):
        if not self.free:
            raise OutOfBlocks(f"all {self.num_blocks} cache blocks are in use")
        block = self.free.pop()
        self.references[block] = 1
        self.peak = max(self.peak, self.used)
        return block

    def allocate(self, tokens):
        """A new table that holds `tokens` tokens."""
        if self.blocks_for(tokens) > len(self.free):
            raise OutOfBlocks(f"{tokens} tokens need {self.blocks_for(tokens)} cache blocks, "
                              f"{len(self.free)} of {self.num_blocks} are free")
        return [self._take() for _ in range(self.blocks_for(tokens))]

    def fork(self, table):
        """A second table over the same blocks."""
        for block in table:
            self.references[block] += 1
        return list(table)

    def reserve(self, table, position):
        """Make `position` safe to write; it takes one free block at most.

        Appends a block where the table ends just before `position`; puts a new block in place of
        one that other tables also name, and then returns (source, target): the caller must copy
        the contents. Otherwise there is nothing to do.
        """
        place = position // self.block_size
        if place == len(table):
            table.append(self._take())
        elif self.references[table[place]] > 1:
            source, table[place] = table[place], self._take()
            self.references[source] -= 1
            return source, table[place]

    def release(self, table):
        """Give the blocks back; one is free again when no table names it. Empties the table."""
        for block in reversed(table):
            if self.references[block] == 0:
                raise RuntimeError(f"cache block {block} was released twice")
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)
        table.clear()


class PagedKVCache:
    """Keys and values of all layers: per layer one pool (slots, 2, K, D), keys at [:, 0].

    Slot = block * block_size + place within the block. A layer's pool is made when the layer first
    writes, from the shape and dtype of its keys. It starts as zeros: a masked key must be finite.
    """

    def __init__(self, num_blocks, block_size, device):
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, device
        self.pools = {}  # layer -> (slots, 2, K, D)

    def write(self, layer, slots, key, value):
        """Put key and value (N, K, D) into slots (N,); returns the layer's pool."""
        if layer not in self.pools:
            slot_count = self.num_blocks * self.block_size
            self.pools[layer] = key.new_zeros(slot_count, 2, *key.shape[1:])
        return self.pools[layer].index_copy_(0, slots, torch.stack([key, value], dim=1))

    def copy_blocks(self, copies):
        """copies: list of (source, target) block numbers, no target being a source as well."""
        if not copies:
            return
        source, target = torch.tensor(copies, device=self.device).unbind(1)
        for pool in self.pools.values():
            blocks = pool.view(self.num_blocks, self.block_size, *pool.shape[1:])
            blocks.index_copy_(0, target, blocks.index_select(0, source))
