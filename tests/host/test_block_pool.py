"""BlockPool next to a tally of owners."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.block_pool import BlockPool

NUM_BLOCKS = 8


class BlockPoolMachine(RuleBasedStateMachine):
    """Allocates, shares and releases at random; the model is how many owners each block has."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, block_size=4)
        self.num_owners: Counter[int] = Counter()

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num_blocks: int) -> None:
        block_ids = self.pool.allocate(num_blocks)
        assert (block_ids is None) == (num_blocks > NUM_BLOCKS - len(self.num_owners))
        if block_ids is not None:
            assert len(set(block_ids)) == num_blocks
            assert not self.num_owners.keys() & set(block_ids)
            self.num_owners.update(block_ids)

    @precondition(lambda self: self.num_owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.num_owners))))
        self.pool.share(block_ids)
        self.num_owners.update(block_ids)

    @precondition(lambda self: self.num_owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.num_owners)), unique=True))
        self.pool.release(block_ids)
        self.num_owners = +(self.num_owners - Counter(block_ids))

    @invariant()
    def free_and_owned_blocks_are_all_blocks(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == NUM_BLOCKS - len(self.num_owners)


BlockPoolMachine.TestCase.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=60, stateful_step_count=30
)
TestBlockPoolAgainstATally = BlockPoolMachine.TestCase


def test_releasing_a_free_block_is_refused():
    pool = BlockPool(2, block_size=4)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="released, but has no owner"):
        pool.release(block_ids)


def test_sharing_a_free_block_is_refused():
    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        BlockPool(2, block_size=4).share([1])


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2)])
def test_tokens_need_whole_blocks(num_tokens: int, num_blocks: int):
    assert BlockPool(1, block_size=16).blocks_for(num_tokens) == num_blocks


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks 0"):
        BlockPool(0, block_size=16)


def test_a_damaged_pool_fails_its_integrity_check():
    pool = BlockPool(2, block_size=4)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="free twice"):
        pool.check_integrity()
