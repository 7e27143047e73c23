"""BlockPool next to a tally of owners."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.block_pool import BlockPool

NUM_BLOCKS = 8


class BlockPoolMachine(RuleBasedStateMachine):
    """Allocates, shares, registers and releases at random; the model is how many owners and which key each block has,
    and in which order the free ones with a key were released."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, block_size=4)
        self.num_owners: Counter[int] = Counter()
        self.keys: dict[int, bytes] = {}
        self.kept: list[int] = []

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num_blocks: int) -> None:
        num_empty = NUM_BLOCKS - len(self.num_owners) - len(self.kept)
        block_ids = self.pool.allocate(num_blocks)
        assert (block_ids is None) == (num_blocks > NUM_BLOCKS - len(self.num_owners))
        if block_ids is not None:
            assert len(set(block_ids)) == num_blocks
            assert not self.num_owners.keys() & set(block_ids)
            num_evicted = max(0, num_blocks - num_empty)
            assert block_ids[num_blocks - num_evicted :] == self.kept[:num_evicted]
            for block_id in self.kept[:num_evicted]:
                del self.keys[block_id]
            del self.kept[:num_evicted]
            self.num_owners.update(block_ids)

    @precondition(lambda self: self.num_owners or self.kept)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted({*self.num_owners, *self.kept}))))
        self.pool.share(block_ids)
        self.num_owners.update(block_ids)
        self.kept = [block_id for block_id in self.kept if block_id not in block_ids]

    @precondition(lambda self: self.num_owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.num_owners)), unique=True))
        self.pool.release(block_ids)
        self.num_owners = +(self.num_owners - Counter(block_ids))
        self.kept += [b for b in reversed(block_ids) if b in self.keys and b not in self.num_owners]

    @precondition(lambda self: self.num_owners.keys() - self.keys.keys())
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d", b"e"]))
    def register(self, data: st.DataObject, key: bytes) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.num_owners.keys() - self.keys.keys())))
        self.pool.register(block_id, key)
        if key not in self.keys.values():
            self.keys[block_id] = key

    @rule()
    def forget(self) -> None:
        self.pool.forget_contents()
        self.keys.clear()
        self.kept.clear()

    @invariant()
    def free_and_owned_blocks_are_all_blocks(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == NUM_BLOCKS - len(self.num_owners)
        assert self.pool.count_owned(range(NUM_BLOCKS)) == len(self.num_owners)
        assert all(self.pool.num_owners(block_id) == self.num_owners[block_id] for block_id in range(NUM_BLOCKS))

    @invariant()
    def blocks_are_found_by_what_they_hold(self) -> None:
        assert self.pool.num_registered == len(self.keys)
        for block_id, key in self.keys.items():
            assert self.pool.find(key) == block_id
        assert self.pool.find(b"never registered") is None


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
    with pytest.raises(AssertionError, match="block 1 is free and empty and cannot be shared"):
        BlockPool(2, block_size=4).share([1])


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2)])
def test_tokens_need_whole_blocks(num_tokens: int, num_blocks: int):
    assert BlockPool(1, block_size=16).blocks_for(num_tokens) == num_blocks


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks 0"):
        BlockPool(0, block_size=16)


def test_a_damaged_pool_fails_its_integrity_check():
    pool = BlockPool(2, block_size=4)
    pool._empty.append(0)
    with pytest.raises(AssertionError, match="free twice"):
        pool.check_integrity()


def test_a_key_that_leads_to_a_block_of_other_contents_fails_the_integrity_check():
    pool = BlockPool(2, block_size=4)
    block_ids = pool.allocate(2)
    assert block_ids is not None
    pool.register(block_ids[0], b"a")
    pool._blocks[b"a"] = block_ids[1]
    with pytest.raises(AssertionError, match="a key has two blocks"):
        pool.check_integrity()


def test_contents_outlive_their_owner_until_their_block_is_needed_the_end_of_a_sequence_first():
    pool = BlockPool(4, block_size=4)
    block_ids = pool.allocate(3)
    assert block_ids is not None
    for block_id, key in zip(block_ids, [b"1", b"12", b"123"], strict=True):
        pool.register(block_id, key)
    pool.release(block_ids)
    assert pool.num_free == 4
    pool.allocate(1)  # the one that is empty
    assert pool.num_registered == 3
    pool.allocate(2)
    assert [pool.find(key) for key in (b"1", b"12", b"123")] == [block_ids[0], None, None]


def test_of_two_blocks_with_the_same_contents_the_first_is_kept():
    pool = BlockPool(3, block_size=4)
    block_ids = pool.allocate(2)
    assert block_ids is not None
    for block_id in block_ids:
        pool.register(block_id, b"a")
    assert pool.find(b"a") == block_ids[0]
    pool.release(block_ids)
    pool.allocate(2)
    assert pool.find(b"a") == block_ids[0], "the other one is empty, so it goes first"


def test_a_free_block_cannot_be_registered():
    with pytest.raises(AssertionError, match="is registered, but has no owner"):
        BlockPool(2, block_size=4).register(0, b"a")
