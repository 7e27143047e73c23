"""From a plan to a step's arrays, and what belongs to an engine row on the device."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dymerge_jax.sampling import SampleTargets
from dymerge_jax.step_batch import StepBatch, unpack_batch, unpack_rows
from serving.batch import Bucket, RowTables, build_batch, make_buckets
from serving.plan import Chunk, StepPlan
from serving.programs import decode_programs, mixed_programs, pick_buckets
from serving.request import Request, SamplingParams
from tests.support.host import make_request


def chunk_of(request: Request, *, row: int = 1, epoch: int = 1) -> Chunk:
    return Chunk(request=request, row=row, epoch=epoch, start=0, num_tokens=1, samples=True)


def no_slots(name: str) -> None:
    raise AssertionError(f"asked for the slots of {name}")


def mix_weights(tables: RowTables) -> list[list[float]]:
    return np.asarray(unpack_rows(tables.rows)[0].weights).tolist()


def unpacked(plan: StepPlan, bucket: Bucket) -> tuple[StepBatch, SampleTargets]:
    """As a program sees the batch."""
    batch, targets = unpack_batch(jnp.asarray(build_batch(plan, bucket).array), bucket.num_seqs)
    np.testing.assert_array_equal(np.asarray(targets.rows), np.asarray(batch.rows))
    return batch, targets


def test_blocks_are_added_to_a_rows_table_as_its_request_grows():
    tables, request = RowTables(2, 4, 3), make_request("r")
    for block_table in ([7], [7, 2], [7, 2, 5, 1]):
        request.block_table = block_table
        tables.update([chunk_of(request)], no_slots, {})
        assert np.asarray(tables.block_tables)[1, : len(block_table)].tolist() == block_table
    assert not np.asarray(tables.block_tables)[0].any()


def test_a_request_that_comes_back_to_its_row_has_its_new_blocks_and_slots():
    tables, request = RowTables(2, 4, 3), make_request("r", "a")
    request.block_table = [0, 1]
    tables.update([chunk_of(request)], {"a": (0, 1)}.get, {})
    request.block_table = [3, 2]  # preempted; its adapter was evicted meanwhile
    tables.update([chunk_of(request, epoch=2)], {"a": (1, 2)}.get, {})
    assert np.asarray(tables.block_tables)[1, :2].tolist() == [3, 2]
    assert mix_weights(tables)[1] == [0, 1, 1]


def test_the_next_owner_of_a_row_has_nothing_of_the_last():
    tables = RowTables(2, 4, 3)
    for name, block_table in (("a", [3, 2, 1]), ("b", [0])):
        request = make_request(name, name)
        request.block_table = block_table
        tables.update([chunk_of(request)], {"a": (0, 2), "b": (1,)}.get, {})
    assert np.asarray(tables.block_tables)[1, 0] == 0
    assert mix_weights(tables)[1] == [0, 1, 0]


def test_a_step_that_is_running_keeps_the_tables_it_was_given():
    tables, request = RowTables(1, 2, 1), make_request("r", "a")
    request.block_table = [5]
    tables.update([chunk_of(request, row=0)], {"a": (0,)}.get, {})
    given = tables.block_tables, unpack_rows(tables.rows)[0].weights
    other = make_request("other")
    other.block_table = [9]
    tables.update([chunk_of(other, row=0)], no_slots, {})
    assert [np.asarray(array).ravel()[0] for array in given] == [5, 1]


def test_a_batch_holds_its_chunks_one_after_another_and_then_padding():
    decoding, beginning, going_on = (make_request(name, num_prompt=5) for name in ("d", "b", "g"))
    decoding.output_token_ids += [11, 12]  # 12 is known, the token after it is still on the device
    plan = StepPlan(
        (
            Chunk(request=decoding, row=2, epoch=1, start=7, num_tokens=1, samples=True),
            Chunk(request=beginning, row=0, epoch=1, start=0, num_tokens=5, samples=True),
            Chunk(request=going_on, row=3, epoch=1, start=1, num_tokens=2, samples=False),
        )
    )
    batch, targets = unpacked(plan, Bucket(num_tokens=10, num_seqs=4))
    assert np.asarray(batch.tokens).tolist() == [
        0, *beginning.prompt_token_ids, *going_on.prompt_token_ids[1:3], 0, 0,
    ]  # fmt: skip
    assert np.asarray(batch.rows)[:3].tolist() == [2, 0, 3]
    assert np.asarray(batch.seq_starts)[:3].tolist() == [0, 1, 6]
    assert np.asarray(batch.seq_lens).tolist() == [1, 5, 2, 0]
    assert np.asarray(batch.context_lens)[:3].tolist() == [7, 0, 1]
    assert np.asarray(batch.use_last_token).tolist() == [True, False, False, False]
    assert np.asarray(targets.is_sampled).tolist() == [True, True, False, False]
    assert np.asarray(targets.steps)[:2].tolist() == [3, 0]  # output tokens before the one that is sampled


def test_a_known_token_is_taken_from_the_host():
    request = make_request("r", num_prompt=5)
    request.output_token_ids += [11, 12]
    plan = StepPlan((Chunk(request=request, row=0, epoch=2, start=6, num_tokens=1, samples=True),))
    batch, _ = unpacked(plan, Bucket(num_tokens=2, num_seqs=2))
    assert np.asarray(batch.tokens).tolist() == [12, 0]
    assert not np.asarray(batch.use_last_token).any()
    assert np.asarray(batch.seq_starts).tolist() == [0, 1]  # a decode batch: token i belongs to sequence i


def test_a_bucket_without_work_has_neither_lengths_nor_samples():
    batch, targets = unpacked(StepPlan(), Bucket(num_tokens=4, num_seqs=4))
    assert not np.asarray(batch.seq_lens).any()
    assert not np.asarray(targets.is_sampled).any()


def test_a_row_has_its_requests_sampling_to_the_bit_and_others_are_greedy_on_the_base():
    tables = RowTables(3, 4, 2)
    request = make_request("r", "a")
    request.sampling = SamplingParams(temperature=0.7, top_k=2**40, top_p=0.9, min_p=0.1, seed=2**32 - 1)
    tables.update([chunk_of(request)], {"a": (1,)}.get, {})
    mix, sampling = unpack_rows(tables.rows)
    assert np.asarray(mix.gated_set_ids).tolist() == [-1, -1, -1]
    for values, other, expected in (
        (sampling.temperature, 0, np.float32(0.7)),
        (sampling.top_k, 0, 2**31 - 1),
        (sampling.top_p, 1, np.float32(0.9)),
        (sampling.min_p, 0, np.float32(0.1)),
        (sampling.seeds, 0, 2**32 - 1),
    ):
        assert np.asarray(values).tolist() == [other, expected, other]


def test_slots_are_looked_up_only_when_a_row_gets_a_new_owner():
    tables, request, asked = RowTables(2, 4, 3), make_request("r", "a"), []

    def slots_of(name: str) -> tuple[int, ...]:
        asked.append(name)
        return (0,)

    for _ in range(3):
        tables.update([chunk_of(request)], slots_of, {})
    assert asked == ["a"]
    uploaded = tables.rows
    request.block_table = [1]
    tables.update([chunk_of(request)], slots_of, {})
    assert tables.rows is uploaded


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_every_plan_within_the_limits_has_a_bucket_and_only_decode_steps_read_as_such(
    backend: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for max_num_seqs in (1, 2, 3, 5, 32, 63, 64, 65, 256, 300):
        for budget in (max_num_seqs, max_num_seqs + 1, 2 * max_num_seqs, 512, 1000):
            if budget < max_num_seqs:
                continue
            buckets = pick_buckets(max_num_seqs, budget, num_slots=64, slot_rank=8)
            assert all(b.num_tokens == b.num_seqs <= max_num_seqs for b in buckets.decode)
            assert all(max_num_seqs >= b.num_seqs < b.num_tokens for b in buckets.mixed)
            assert max(b.num_seqs for b in buckets.decode if b.max_slots is None) == max_num_seqs
            assert max((b.num_tokens, b.num_seqs) for b in buckets.mixed) >= (budget, max_num_seqs)
            assert len(set(buckets.all)) == len(buckets.all)
            for num_seqs in {1, (max_num_seqs + 1) // 2, max(1, max_num_seqs - 1), max_num_seqs}:
                for num_tokens in {num_seqs, num_seqs + 1, num_seqs + 20, budget}:
                    if num_seqs <= num_tokens <= budget:
                        bucket = buckets.of(plan_of(num_seqs, num_tokens), num_slots=64)
                        assert bucket.num_seqs >= num_seqs
                        assert bucket.num_tokens >= num_tokens
                        assert bucket.is_decode == (num_tokens == num_seqs)


def plan_of(num_seqs: int, num_tokens: int) -> StepPlan:
    """Decode rows, and a last chunk of the rest."""
    chunk = chunk_of(make_request("r"))
    last = chunk._replace(num_tokens=num_tokens - num_seqs + 1)
    return StepPlan((*itertools.repeat(chunk, num_seqs - 1), last))


def test_on_a_gpu_few_programs_are_compiled_and_a_prompt_beside_decode_rows_is_padded_little(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    buckets = pick_buckets(32, 512, num_slots=64, slot_rank=8)
    assert (len(buckets.decode), len(buckets.mixed)) == (8, 5)
    assert buckets.of(plan_of(25, 25 + 220), num_slots=9) == Bucket(256, 32)
    many = pick_buckets(256, 2048, num_slots=64, slot_rank=8)
    assert (len(many.decode), len(many.mixed)) == (15, 10)
    assert many.of(plan_of(25, 60), num_slots=0) == Bucket(64, 32)
    assert many.of(plan_of(200, 210), num_slots=0) == Bucket(384, 256)
    padded = [many.of(plan_of(8, n), num_slots=0).num_tokens / n for n in range(150, 2049)]
    assert max(padded) < 1.71
    assert sum(padded) / len(padded) < 1.25


def test_a_large_slot_array_has_programs_for_as_many_slots_as_one_launch_takes_for_few(
    monkeypatch: pytest.MonkeyPatch,
):
    assert decode_programs(32, 1000, 8) == (None,)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert decode_programs(32, 128, 8) == (0, None)
    assert decode_programs(32, 129, 8) == (0, 128, None)
    assert decode_programs(1, 512, 16) == (0, 64, None)
    assert decode_programs(64, 512, 16) == (0, 8, 64, None)
    assert decode_programs(64, 64, 128) == (0, 8, None)
    assert decode_programs(128, 512, 8) == (0, None)
    assert decode_programs(1, 0, 8) == (0, None)
    assert decode_programs(1, 4, 2048) == (0, None)


def test_the_largest_step_of_long_prompts_has_a_program_for_nobody_with_an_adapter(monkeypatch: pytest.MonkeyPatch):
    assert mixed_programs(8192, largest=8192) == (None,)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert mixed_programs(8192, largest=8192) == (0, None)
    assert mixed_programs(6144, largest=8192) == mixed_programs(512, largest=512) == (None,)
    buckets = pick_buckets(32, 8192, num_slots=64, slot_rank=8)
    assert buckets.of(plan_of(5, 8000), num_slots=0) == Bucket(8192, 32, 0)
    assert buckets.of(plan_of(5, 8000), num_slots=1) == Bucket(8192, 32)
    as_many_rows = pick_buckets(4096, 4096, num_slots=64, slot_rank=8)
    assert [b.num_tokens for b in as_many_rows.mixed if b.max_slots == 0] == [4097]


def test_a_step_takes_the_program_made_for_the_fewest_slots_that_suffice():
    plan = StepPlan((chunk_of(make_request("r")), chunk_of(make_request("s"), row=0)))
    sizes = {"decode_sizes": (1, 2), "mixed_sizes": ()}
    buckets = make_buckets(4, 64, decode_slots=lambda _: (0, 8, None), **sizes)
    for num_slots, max_slots in ((0, 0), (1, 8), (8, 8), (9, None), (1000, None)):
        assert buckets.of(plan, num_slots) == Bucket(2, 2, max_slots)
    prompt = plan_of(2, 50)
    assert buckets.of(prompt, 0) == buckets.of(prompt, 9) == Bucket(64, 4)
    both = make_buckets(4, 64, mixed_slots=lambda _: (0, None), **sizes)
    assert (both.of(prompt, 0), both.of(prompt, 1)) == (Bucket(64, 4, 0), Bucket(64, 4))
    anything = make_buckets(4, 64, **sizes)
    assert anything.of(plan, 0) == anything.of(plan, 9) == Bucket(2, 2)
