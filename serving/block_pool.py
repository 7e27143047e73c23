"""KV blocks: which are free, and how many owners each of the others has. Never chooses who gets one."""

from collections.abc import Iterable


class BlockPool:
    """A fixed number of KV blocks, handed out and taken back by id.

    Ownership: `allocate` and `share` each make the caller one more owner of a block; every owner calls `release` once.
    A block without owners is free. Blocks that a dispatched step still uses may be released: the device runs steps in
    order, so whoever gets them next writes them after that step.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """All blocks are free.

        Args:
          num_blocks: blocks, with ids 0..num_blocks-1.
          block_size: tokens in a block.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks {num_blocks} and block_size {block_size}; expected both >= 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block released last is used first

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes `num_blocks` free blocks, the caller being their only owner; None if there are fewer."""
        assert num_blocks >= 0, f"cannot allocate {num_blocks} blocks"
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_owners[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds an owner to each of these blocks, none of which is free."""
        for block_id in block_ids:
            assert self._num_owners[block_id] > 0, f"block {block_id} is free and cannot be shared"
            self._num_owners[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Takes one owner from each of these blocks; those left without one become free."""
        for block_id in block_ids:
            assert self._num_owners[block_id] > 0, f"block {block_id} is released, but has no owner"
            self._num_owners[block_id] -= 1
            if self._num_owners[block_id] == 0:
                self._free.append(block_id)

    def check_integrity(self) -> None:
        """Checks that owned + free = total and that no block is free twice or free with an owner."""
        owners = self._num_owners  # no loops in Python: there may be 50,000 blocks, and the engine calls this when idle
        assert len(set(self._free)) == len(self._free), f"free twice: {self._free}"
        assert min(owners) >= 0, f"negative owners: {owners}"
        assert not any(map(owners.__getitem__, self._free)), f"free {sorted(self._free)}, but owners are {owners}"
        assert owners.count(0) == len(self._free), f"free {sorted(self._free)}, but owners are {owners}"
