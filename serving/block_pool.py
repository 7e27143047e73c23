"""KV blocks: which are free, how many owners each of the others has, and what those without an owner still hold.

Never chooses who gets a block, nor what is worth keeping: `scheduler.py` and `prefix_cache.py` do.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """A fixed number of KV blocks, handed out and taken back by id.

    Ownership: `allocate` and `share` each make the caller one more owner of a block; every owner calls `release` once.
    A block without owners is free. Blocks that a dispatched step still uses may be released: the device runs steps in
    order, so whoever gets them next writes them after that step.

    Contents: an owner may `register` a block under a key that says what it holds, and must not write it from then on.
    Such a block can be found by its key until it is handed out anew or forgotten, with owners or without. Of the free
    blocks, those without contents are handed out first, then those that have been free for longest. `release` takes
    blocks in order of position and frees the last first, so that a prefix outlives what follows it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """All blocks are free and empty.

        Args:
          num_blocks: blocks, with ids 0..num_blocks-1.
          block_size: tokens in a block.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks {num_blocks} and block_size {block_size}; expected both >= 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_owners = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: the block released last is used first
        # Free blocks with contents, longest free first. An OrderedDict: a dict gets slow when its head is taken often.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._keys: dict[int, bytes] = {}  # by block: free ones and others
        self._blocks: dict[bytes, int] = {}  # by key

    @property
    def num_free(self) -> int:
        """Blocks without an owner, those with contents included."""
        return len(self._empty) + len(self._kept)

    @property
    def num_registered(self) -> int:
        """Blocks that can be found by their contents."""
        return len(self._keys)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_owners(self, block_id: int) -> int:
        """Owners of a block; 0 if it is free."""
        return self._num_owners[block_id]

    def count_owned(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks have an owner."""
        return sum(self._num_owners[block_id] > 0 for block_id in block_ids)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes `num_blocks` free blocks, the caller being their only owner; None if there are fewer."""
        assert num_blocks >= 0, f"cannot allocate {num_blocks} blocks"
        if num_blocks > self.num_free:
            return None
        block_ids = [self._empty.pop() if self._empty else self._evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_owners[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds an owner to each of these blocks, which have owners or contents."""
        for block_id in block_ids:
            if self._num_owners[block_id] == 0:
                assert block_id in self._kept, f"block {block_id} is free and empty and cannot be shared"
                del self._kept[block_id]
            self._num_owners[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes one owner from each of these blocks of one sequence, in order of position."""
        for block_id in reversed(block_ids):
            assert self._num_owners[block_id] > 0, f"block {block_id} is released, but has no owner"
            self._num_owners[block_id] -= 1
            if self._num_owners[block_id] == 0:
                if block_id in self._keys:
                    self._kept[block_id] = None
                else:
                    self._empty.append(block_id)

    def find(self, key: bytes) -> int | None:
        """The block registered under a key."""
        return self._blocks.get(key)

    def register(self, block_id: int, key: bytes) -> None:
        """Says what a block with an owner holds; nothing happens if another block is known to hold the same."""
        assert self._num_owners[block_id] > 0, f"block {block_id} is registered, but has no owner"
        assert block_id not in self._keys or self._keys[block_id] == key, f"block {block_id} was registered otherwise"
        if key not in self._blocks:
            self._blocks[key] = block_id
            self._keys[block_id] = key

    def forget_contents(self) -> None:
        """Takes back every registration: no block is found from now on."""
        self._empty += self._kept
        self._kept.clear()
        self._keys.clear()
        self._blocks.clear()

    def check_integrity(self) -> None:
        """Checks that owned + free = total, that no block is free twice or with an owner, and that keys are unique."""
        owners = self._num_owners  # no loops in Python: there may be 50,000 blocks, and the engine calls this when idle
        free = {*self._empty, *self._kept}
        assert len(free) == self.num_free, f"free twice: {self._empty}, with contents {list(self._kept)}"
        assert min(owners) >= 0, f"negative owners: {owners}"
        assert not any(map(owners.__getitem__, free)), f"free {sorted(free)}, but owners are {owners}"
        assert owners.count(0) == len(free), f"free {sorted(free)}, but owners are {owners}"
        assert self._kept.keys() <= self._keys.keys(), f"kept {list(self._kept)}, registered {list(self._keys)}"
        assert self._keys.keys().isdisjoint(self._empty), f"registered {list(self._keys)}, but empty {self._empty}"
        assert dict(zip(self._keys.values(), self._keys, strict=True)) == self._blocks, "a key has two blocks"

    def _evict(self) -> int:
        """Takes the block that has been free for longest out of those with contents."""
        block_id, _ = self._kept.popitem(last=False)
        del self._blocks[self._keys.pop(block_id)]
        return block_id
