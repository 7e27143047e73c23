"""Requests with two KV caches, as an X-LoRA set needs them, in the scheduler and in the rows' tables."""

import numpy as np
import pytest

from serving.batch import Bucket, Buckets, RowTables, make_buckets
from serving.errors import InvalidRequestError
from serving.plan import Chunk, StepPlan
from serving.request import Request
from tests.support.host import FakeEngine, admit, make_request, make_scheduler, with_two_caches


def two_caches(name: str, *adapters: str, **sizes: int) -> Request:
    return with_two_caches(make_request(name, *adapters, **sizes))


def test_a_request_owns_a_block_in_each_cache_for_the_same_positions() -> None:
    scheduler = make_scheduler(num_blocks=12, block_size=4)
    scheduler.add(request := two_caches("r", "a", num_prompt=9))
    assert admit(scheduler) == ["r"]
    assert len(request.block_table) == 6
    assert scheduler.block_pool.num_free == 6
    scheduler.check_integrity()
    scheduler.abort("r")
    assert scheduler.block_pool.num_free == 12
    scheduler.check_integrity()


def test_admission_promises_blocks_in_both_caches() -> None:
    """Twelve tokens and one block more are four blocks, or eight in two caches: fifteen are enough for one request."""
    for make, num_admitted in ((two_caches, 1), (make_request, 3)):
        scheduler = make_scheduler(num_blocks=15, block_size=4, max_num_batched_tokens=64)
        for i in range(3):
            scheduler.add(make(f"r{i}", num_prompt=12, max_tokens=12))
        assert len(admit(scheduler)) == num_admitted


def test_a_request_that_fits_into_one_cache_only_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(num_blocks=10, block_size=4)
    scheduler.add(make_request("fits", num_prompt=20, max_tokens=20))
    with pytest.raises(InvalidRequestError, match=r"needs 20 KV blocks of 4 tokens \(2 KV caches\), but there are 10"):
        scheduler.add(two_caches("r", num_prompt=20, max_tokens=20))


def test_a_running_request_lets_others_find_both_caches_at_once() -> None:
    scheduler = make_scheduler(num_blocks=64, block_size=4)
    scheduler.add(one := two_caches("f/1", "a", num_prompt=9, max_tokens=8))
    assert admit(scheduler) == ["f/1"]
    scheduler.add(two := two_caches("f/2", "a", num_prompt=9, max_tokens=8))
    scheduler.add(plain := make_request("f/3", "a", num_prompt=9, max_tokens=8))
    scheduler.add(other := two_caches("f/4", "b", num_prompt=9, max_tokens=8))
    assert admit(scheduler) == ["f/2", "f/3", "f/4"]
    assert two.block_table[:4] == one.block_table[:4]
    assert len(set(one.block_table)) == len(one.block_table)
    assert [r.num_cached_tokens for r in (one, two, plain, other)] == [0, 8, 0, 0]


def test_blocks_of_both_caches_are_found_after_each_chunk() -> None:
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_num_batched_tokens=8)
    scheduler.add(one := two_caches("one", num_prompt=30))
    scheduler.on_dispatched(scheduler.plan(0.0))
    scheduler.on_dispatched(scheduler.plan(0.0))
    two = two_caches("two", num_prompt=30)
    two.prompt_token_ids, two.num_caches = one.prompt_token_ids, 2
    assert scheduler.prefix_cache is not None
    assert scheduler.prefix_cache.find(two) == one.block_table[:8]


def test_requests_of_both_kinds_run_to_their_end_short_of_blocks() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=2, max_model_len=16)
    requests = [(two_caches if i % 2 else make_request)(f"r{i}", num_prompt=3, max_tokens=5) for i in range(6)]
    for request in requests:
        scheduler.add(request)
    FakeEngine(scheduler).run()
    assert all(request.num_output_tokens == 5 for request in requests)
    assert scheduler.num_preemptions > 0
    assert scheduler.block_pool.num_free == 9


def test_each_cache_has_its_own_block_table_on_the_device() -> None:
    tables = RowTables(2, 4, 3, has_two_caches=True)
    request = two_caches("r", "a")
    request.num_caches = 2
    plain = make_request("p")
    plain.block_table = [3]
    for block_table in ([7, 8], [7, 8, 2, 9, 5, 1]):
        request.block_table = block_table
        chunks = [Chunk(request, 1, 1, 0, 1, False), Chunk(plain, 0, 1, 0, 1, False)]
        tables.update(chunks, lambda _: (0,), {"xlora": -2})
        for table, first in ((tables.block_tables, 0), (tables.scaling_tables, 1)):
            assert np.asarray(table)[1, : len(block_table) // 2].tolist() == block_table[first::2]
    assert np.asarray(tables.block_tables)[0, 0] == 3
    assert np.asarray(tables.rows)[1, 0] == -2
    assert RowTables(2, 4, 3).scaling_tables is None


def test_only_steps_with_such_a_request_take_the_programs_of_two_passes() -> None:
    buckets = make_buckets(4, 16, decode_sizes=[2], mixed_sizes=[8], decode_slots=lambda _: (0, None))
    both = buckets.with_two_passes()
    assert both.decode == buckets.decode
    assert both.mixed == buckets.mixed
    assert [(b.num_tokens, b.max_slots) for b in both.two_pass] == [(2, None), (4, None), (8, None), (16, None)]
    request, plain = two_caches("r"), make_request("p")
    request.num_caches = 2
    decode = [Chunk(r, i, 1, 4, 1, True) for i, r in enumerate((plain, request))]
    prefill = Chunk(plain, 2, 1, 0, 5, False)
    for bucket_set in (buckets, both):
        assert bucket_set.of(StepPlan((decode[0],)), 0) == Bucket(2, 2, 0)
        assert bucket_set.of(StepPlan((decode[0], prefill)), 0) == Bucket(8, 4)
    assert both.of(StepPlan(tuple(decode)), 0) == Bucket(2, 2, None, has_scaling_pass=True)
    assert both.of(StepPlan((decode[1], prefill)), 1) == Bucket(8, 4, None, has_scaling_pass=True)
    assert isinstance(both, Buckets)
