"""The engine beyond the laws: ends, aborts, failures, limits."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from dymerge_jax.kv_cache import KVCache
from dymerge_jax.lora import SlotArray
from dymerge_jax.step import StepTables
from dymerge_jax.step_batch import PackedBatch
from serving.adapter_store import AdapterStore, KnownAdapter
from serving.batch import Bucket, Buckets, make_buckets
from serving.config import EngineConfig
from serving.engine import Engine
from serving.request import FinishReason, RequestOutput
from tests.support.engines import generate, make_engine, make_request, make_tight_engine, run_to_end, token_ids
from tests.support.tiny_checkpoints import write_tokenizer
from tests.support.tiny_models import random_adapter, random_gated_set, tiny_model

PROMPT = [5, 9, 2, 40, 7]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Room for two of the three adapters."""
    split = tiny_model(vocab=257)
    adapters = {name: random_adapter(split.config, rank=8, seed=i) for i, name in enumerate("abc")}
    return make_tight_engine(split, adapters)


def test_a_request_ends_at_max_tokens_with_reason_length(engine: Engine) -> None:
    engine.add_request(make_request(engine, "r", PROMPT, {}, max_tokens=5))
    last = run_to_end(engine)["r"][-1]
    assert (last.finish_reason, last.num_output_tokens, last.num_prompt_tokens) == (FinishReason.LENGTH, 5, 5)


def test_a_request_ends_at_the_context_with_reason_length(engine: Engine) -> None:
    engine.add_request(make_request(engine, "r", range(engine.max_model_len - 3), {}, max_tokens=50))
    last = run_to_end(engine)["r"][-1]
    assert (last.finish_reason, last.num_output_tokens) == (FinishReason.LENGTH, 3)


def test_a_stop_token_ends_a_request_and_the_late_token_is_dropped(engine: Engine) -> None:
    free = generate(engine, PROMPT, {"a": 1.0}, max_tokens=8)
    stop = free[3]
    first = free.index(stop)
    engine.add_request(make_request(engine, "r", PROMPT, {"a": 1.0}, max_tokens=8, stop_token_ids=(stop,)))
    outputs = run_to_end(engine)["r"]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert token_ids(outputs) == free[: first + 1]


def test_every_end_token_of_the_model_ends_a_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case P2: a list of end tokens."""
    tokens = generate(engine, PROMPT, {}, max_tokens=10)
    for end in dict.fromkeys((tokens[2], tokens[5])):
        config = dataclasses.replace(engine.model.config, eos_token_ids=(1, end))
        monkeypatch.setattr(engine, "model", dataclasses.replace(engine.model, config=config))
        engine.add_request(make_request(engine, "r", PROMPT, {}, max_tokens=10, ignore_eos=False))
        outputs = run_to_end(engine)["r"]
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert token_ids(outputs) == tokens[: tokens.index(end) + 1]
        assert generate(engine, PROMPT, {}, max_tokens=10, ignore_eos=True) == tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, 257)
    return PreTrainedTokenizerFast.from_pretrained(path)


def test_text_that_might_begin_a_stop_string_comes_out_when_the_request_ends(
    engine: Engine, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "tokenizer", tokenizer)
    tokens = generate(engine, PROMPT, {"a": 1.0}, max_tokens=12)
    cut = next(i for i in range(4, 12) if tokens[i] not in tokens[:i])

    def ask(**sampling: Any) -> tuple[str, FinishReason | None]:
        engine.add_request(make_request(engine, "r", PROMPT, {"a": 1.0}, max_tokens=12, **sampling))
        outputs = run_to_end(engine)["r"]
        return "".join(o.text for o in outputs), outputs[-1].finish_reason

    def decoded(num_tokens: int) -> str:
        return str(tokenizer.decode(PROMPT + tokens[:num_tokens]))[len(tokenizer.decode(PROMPT)) :]

    whole = decoded(12)
    assert ask() == (whole, FinishReason.LENGTH)
    assert ask(stop=(whole[-1] + "~",)) == (whole, FinishReason.LENGTH)
    before = decoded(cut)
    assert ask(stop=(before[-1] + "~",), stop_token_ids=(tokens[cut],)) == (before, FinishReason.STOP)
    assert ask(stop=(whole[4:6],)) == (whole[: whole.index(whole[4:6])], FinishReason.STOP)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
def test_an_abort_in_any_state_frees_everything_and_leaves_the_others_alone(engine: Engine, num_steps: int) -> None:
    """Case J3: queued, after one and both prefill chunks, in decode."""
    other = generate(engine, PROMPT, {"b": 1.0}, max_tokens=10)
    engine.add_request(gone := make_request(engine, "gone", range(30), {"a": 1.0}, max_tokens=20))
    engine.add_request(make_request(engine, "other", PROMPT, {"b": 1.0}, max_tokens=10))
    outputs = []
    for _ in range(num_steps):
        outputs += engine.step()
    engine.abort("gone")
    engine.check_integrity()
    assert not engine.slot_cache.is_pinned("a")
    rest = run_to_end(engine)
    assert gone.finish_reason is FinishReason.ABORT
    assert set(rest) <= {"other"}
    outputs += rest.get("other", [])
    assert token_ids([o for o in outputs if o.request_id == "other"]) == other


def test_aborting_what_is_unknown_or_finished_does_nothing(engine: Engine) -> None:
    engine.abort("never seen")
    generate(engine, PROMPT, {})
    engine.abort("alone")
    assert not engine.has_work


def test_an_adapter_that_cannot_be_loaded_fails_its_requests_alone_and_may_be_tried_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {name: generate(engine, PROMPT, {name: 1.0}) for name in "cab"}  # room for two: c is out
    with monkeypatch.context() as patch:

        def fail(adapter: KnownAdapter) -> None:
            raise OSError(f"{adapter.name} is unreadable")

        engine.store.host.remove("c")
        patch.setattr(engine.store, "read_again", fail)
        for name in "acb":
            engine.add_request(make_request(engine, name, PROMPT, {name: 1.0}))
        engine.add_request(make_request(engine, "ac", PROMPT, {"a": 1.0, "c": 1.0}))
        outputs = run_to_end(engine)
    for name in ("c", "ac"):
        (output,) = outputs[name]
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == "adapter 'c' could not be read: c is unreadable"
    assert {name: token_ids(outputs[name]) for name in "ab"} == {name: wanted[name] for name in "ab"}
    assert "c" not in engine.slot_cache.resident
    assert generate(engine, PROMPT, {"c": 1.0}) == wanted["c"]


def test_a_failed_step_ends_what_ran_and_the_next_request_is_right(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = generate(engine, PROMPT, {"a": 1.0})
    requests = [make_request(engine, f"r{i}", PROMPT, {"a": 1.0}) for i in range(2)]
    for request in requests:
        engine.add_request(request)
    engine.step()

    def fail(*args: object) -> None:
        args[1].layers[0].delete()  # type: ignore[attr-defined]  # as a failed program with donated inputs does
        raise RuntimeError("the device is unwell")

    with monkeypatch.context() as patch:
        patch.setattr(engine._programs, "_forward", dict.fromkeys(engine.buckets.all, fail))
        with pytest.raises(RuntimeError, match="unwell"):
            engine.step()
    assert [r.finish_reason for r in requests] == [FinishReason.ERROR] * 2
    assert not engine.has_work
    engine.check_integrity()
    assert generate(engine, PROMPT, {"a": 1.0}) == wanted


def test_slots_that_a_failed_copy_lost_are_made_anew(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    mixes: list[dict[str, float]] = [{"c": 1.0}, {"a": 1.0}, {"b": 1.0}]  # room for two: c is out
    wanted = [generate(engine, PROMPT, mix) for mix in mixes]

    def fail(slots: SlotArray, *_: object) -> None:
        jax.tree.map(lambda array: array.delete(), slots)  # donated
        raise RuntimeError("the device is unwell")

    with monkeypatch.context() as patch:
        patch.setattr("serving.engine.write_slot", fail)
        engine.add_request(make_request(engine, "r", PROMPT, {"c": 1.0}))
        with pytest.raises(RuntimeError, match="unwell"):
            engine.step()
    assert not engine.slot_cache.resident
    assert [generate(engine, PROMPT, mix) for mix in mixes] == wanted


class Poisoned:
    """A result of a program that failed on the device after it was dispatched: alive, but without a value."""

    def __init__(self) -> None:
        self.is_freed = False

    def block_until_ready(self) -> None:
        raise RuntimeError("the program failed")

    def delete(self) -> None:
        self.is_freed = True


def test_results_of_a_program_that_failed_on_the_device_are_freed_and_made_anew(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, unchecked_annotations: None
) -> None:
    wanted = generate(engine, PROMPT, {"a": 1.0})
    poisoned = [Poisoned() for _ in engine._cache.layers]
    engine.add_request(make_request(engine, "r", PROMPT, {"a": 1.0}))

    def fail(*args: object) -> None:
        engine._cache = KVCache(layers=tuple(poisoned))  # type: ignore[arg-type]
        raise RuntimeError("the device is unwell")

    with monkeypatch.context() as patch:
        patch.setattr(engine._programs, "_forward", dict.fromkeys(engine.buckets.all, fail))
        with pytest.raises(RuntimeError, match="unwell"):
            engine.step()
    assert all(array.is_freed for array in poisoned)
    assert generate(engine, PROMPT, {"a": 1.0}) == wanted


def test_a_failure_of_the_planning_leaves_no_adapter_taken_for_loaded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(engine, PROMPT, {"a": 1.0})
    generate(engine, PROMPT, {"b": 1.0})
    engine.add_request(make_request(engine, "r", PROMPT, {"c": 1.0}))
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "_plan_chunk", lambda *_: 1 / 0)  # c has its slots by now, but no copy
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert not engine.slot_cache.resident
    engine.check_integrity()


def test_a_request_that_cannot_be_detokenized_is_not_taken_in(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "tokenizer", object())
    with pytest.raises(AttributeError):
        engine.add_request(make_request(engine, "r", PROMPT, {}))
    assert not engine.has_work


def test_the_same_seed_gives_the_same_tokens_whatever_shares_the_batch(engine: Engine) -> None:
    sampling = {"temperature": 2.0, "top_k": 40, "seed": 11, "max_tokens": 8}
    alone = generate(engine, PROMPT, {"a": 0.5}, **sampling)
    for i in range(3):  # greedy, and two that draw
        engine.add_request(make_request(engine, f"x{i}", range(1 + i), {"b": 1.0}, temperature=float(i), seed=i))
    engine.add_request(make_request(engine, "r", PROMPT, {"a": 0.5}, **sampling))
    assert token_ids(run_to_end(engine)["r"]) == alone
    assert generate(engine, PROMPT, {"a": 0.5}, **(sampling | {"seed": 12})) != alone


def test_logits_that_overflow_are_the_trouble_of_their_request_alone(engine: Engine) -> None:
    """A weight of 1e38 is legal; what it makes of its own row, and leaves in KV blocks, must touch nobody else."""
    alone = generate(engine, PROMPT, {"b": 1.0}, max_tokens=10)
    engine.add_request(make_request(engine, "wild", PROMPT, {"a": 1e38}, max_tokens=6, logprobs=1))
    engine.add_request(make_request(engine, "other", PROMPT, {"b": 1.0}, max_tokens=10))
    outputs = run_to_end(engine)
    wild = outputs["wild"]
    assert not any(np.isfinite(output.logprobs[0].logprob) for output in wild), "the weight is not wild enough"
    assert all(0 <= token < engine.model.config.vocab for token in token_ids(wild))
    assert token_ids(outputs["other"]) == alone
    for _ in range(3):  # in the blocks that the wild one has left
        assert generate(engine, PROMPT, {"b": 1.0}, max_tokens=10) == alone


def test_logprobs_sum_to_at_most_one_and_lead_with_the_greedy_token(engine: Engine) -> None:
    engine.add_request(make_request(engine, "r", PROMPT, {"a": 1.0}, logprobs=5))
    for output in run_to_end(engine)["r"]:
        (logprob,) = output.logprobs
        assert len(logprob.top) == 5
        assert logprob.top[0] == (logprob.token_id, logprob.logprob)
        assert [p for _, p in logprob.top] == sorted((p for _, p in logprob.top), reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 3, "block_size": 1},
        {"max_num_seqs": 4, "max_num_batched_tokens": 5, "num_blocks": 12},
        {"max_num_seqs": 2, "slot_rank": 1, "adapter_slots": 9, "block_size": 64},
        {"max_num_seqs": 2, "adapter_slots": 0},
    ],
    ids=lambda sizes: "-".join(f"{name}={value}" for name, value in sizes.items()),
)
def test_sizes_at_their_limits_give_the_same_tokens(engine: Engine, sizes: dict[str, int]) -> None:
    """No ties: the two likeliest of any of these tokens are 1.5e-3 apart in log probability or more, and the programs
    of different sizes 1.4e-6."""
    adapters = {adapter.name: adapter.weights for adapter in engine.store.adapters if adapter.weights is not None}
    settings: dict[str, Any] = {"max_model_len": 48} | sizes
    other = make_engine(engine.model, adapters, **settings)
    mixes = [{}] if sizes.get("adapter_slots") == 0 else [{}, {"a": 1.0}, {"b": -0.5}]
    prompts = ([7], PROMPT, range(20), [1, 2])
    cases = [(list(prompt), mix) for prompt in prompts for mix in mixes]
    for i, (prompt, mix) in enumerate(cases):
        other.add_request(make_request(other, f"r{i}", prompt, mix, max_tokens=20))
    outputs = run_to_end(other)
    for i, (prompt, mix) in enumerate(cases):
        assert token_ids(outputs[f"r{i}"]) == generate(engine, prompt, mix, max_tokens=20), (prompt, mix)


@pytest.mark.slow
def test_256_rows_get_what_each_gets_alone(engine: Engine) -> None:
    adapters = {adapter.name: adapter.weights for adapter in engine.store.adapters if adapter.weights is not None}
    buckets = Buckets((Bucket(256, 256),), (Bucket(512, 256),))
    sizes: dict[str, Any] = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 512,
        "max_model_len": 48,
        "num_blocks": 3072,
    }
    many = make_engine(engine.model, adapters, buckets=buckets, **sizes)
    mixes: list[dict[str, float]] = [{}, {"a": 1.0}, {"a": 0.5, "b": -1.0}]
    cases = [([1 + i % 7] * (1 + i % 9), mixes[i % 3]) for i in range(300)]
    for i, (prompt, mix) in enumerate(cases):
        many.add_request(make_request(many, str(i), prompt, mix, max_tokens=24))
    outputs: dict[str, list[RequestOutput]] = {}
    most_running = 0
    while many.has_work:
        for output in many.step():
            outputs.setdefault(output.request_id, []).append(output)
        most_running = max(most_running, many.scheduler.num_running)
    many.check_integrity()
    assert most_running == 256
    alone = {}
    for i, (prompt, mix) in enumerate(cases):
        key = (len(prompt), prompt[0], str(mix))
        if key not in alone:
            alone[key] = generate(engine, prompt, mix, max_tokens=24)
        assert token_ids(outputs[str(i)]) == alone[key], (prompt, mix)


def test_log_probabilities_in_a_batch_are_those_of_a_request_alone(engine: Engine) -> None:
    mixes: list[dict[str, float]] = [{}, {"a": 1.0}, {"a": 0.5, "b": -1.0}]

    def ask(indices: list[int]) -> list[list[float]]:
        for i in indices:
            engine.add_request(make_request(engine, f"r{i}", PROMPT, mixes[i], logprobs=2))
        outputs = run_to_end(engine)
        return [[o.logprobs[0].logprob for o in outputs[f"r{i}"]] for i in indices]

    alone = [ask([i])[0] for i in range(3)]
    np.testing.assert_allclose(ask([0, 1, 2]), alone, atol=1e-4)
    assert np.abs(np.diff(alone, axis=0)).max(axis=1).min() > 1e-2


def test_what_the_engine_does_is_counted(engine: Engine) -> None:
    def counts() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in engine.metrics.render().decode().splitlines() if line[0] != "#"]
        return {name.removeprefix("dymerge_"): float(value) for name, value in lines}

    generate(engine, PROMPT, {"a": 1.0, "b": 1.0})
    engine.forget_prefixes()
    before = counts()
    for mix in ({}, {"c": 1.0}, {"c": 1.0}):
        generate(engine, PROMPT, mix, max_tokens=4)
    after = counts()
    rise = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    for name, expected in {
        "prompt_tokens_total": 15,
        "prefix_cache_queries_total": 15,
        "prefix_cache_hits_total": 4,
        "generated_tokens_total": 12,
        'requests_finished_total{finish_reason="length"}': 3,
        "time_to_first_token_seconds_count": 3,
        "time_per_output_token_seconds_count": 3,
        "step_duration_seconds_count": 12,
        "step_tokens_total": 20,
        "adapter_loads_total": 1,
        'adapter_requests_total{adapter="c"}': 2,
    }.items():
        assert rise[name] == expected, name
    assert (after["adapters_resident"], after["kv_blocks_free"]) == (2, 24)


def test_what_is_free_can_be_seen_before_the_first_step() -> None:
    split = tiny_model(num_layers=1)
    store = AdapterStore(split.config, slot_rank=4, dtype=split.dtype)
    engine = Engine(split, None, store, (), EngineConfig(max_num_seqs=2, max_model_len=48, num_blocks=5))
    assert "dymerge_kv_blocks_free 5.0" in engine.metrics.render().decode().splitlines()


@pytest.mark.slow
def test_a_program_made_for_few_slots_never_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    split = tiny_model(vocab=257)
    adapters = {name: random_adapter(split.config, rank=8, seed=i) for i, name in enumerate("abc")}  # two slots each
    gated_set = random_gated_set(split.config, "g", "bc", granularity="layer", top_k=1, renormalize=True, seed=3)
    buckets = make_buckets(
        4,
        16,
        decode_sizes=(1, 2),
        mixed_sizes=(),
        decode_slots=lambda _: (0, 2, None),
        mixed_slots=lambda _: (0, None),
    )
    engine = make_engine(split, adapters, [gated_set], buckets=buckets)
    made_for = []
    forward = engine._programs.forward

    def checked(bucket: Bucket, cache: Any, last_tokens: Any, tables: StepTables, batch: PackedBatch) -> Any:
        rows = np.asarray(tables.rows)[batch.seqs[0, batch.seqs[2] > 0]]  # of the sequences with work
        used = (rows[:, 6:].view(np.float32) != 0).any(0)
        if (rows[:, 0] >= 0).any():
            used[[slot for name in gated_set.experts for slot in engine.slot_cache.lookup(name) or ()]] = True
        assert bucket.max_slots is None or used.sum() <= bucket.max_slots
        made_for.append((bucket.is_decode, bucket.max_slots))
        return forward(bucket, cache, last_tokens, tables, batch)

    monkeypatch.setattr(engine._programs, "forward", checked)
    generate(engine, PROMPT, {}, max_tokens=2)  # a prompt that is read while nobody has an adapter
    mixes: list[Any] = [{}, {"a": 1.0}, {"a": 0.5, "b": 0.5}, "g"]
    for i, mix in enumerate(mixes):
        engine.add_request(make_request(engine, str(i), PROMPT, mix, max_tokens=3 + 4 * (3 - i)))
    outputs = run_to_end(engine)
    assert set(made_for) == {(True, 0), (True, 2), (True, None), (False, 0), (False, None)}
    alone = make_engine(split, adapters, [gated_set])
    for i, mix in enumerate(mixes):
        assert token_ids(outputs[str(i)]) == generate(alone, PROMPT, mix, max_tokens=3 + 4 * (3 - i))
