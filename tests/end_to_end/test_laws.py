"""The laws of the design, each by a test that fails if it is broken. (What is refused at load: tests/loading.)"""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dymerge_jax.library import Model, pad_batch
from dymerge_jax.lora import AdapterWeights
from dymerge_jax.model import SplitModel, params_of
from serving.engine import Engine
from tests.support import numpy_llama
from tests.support.compiles import recorded_compiles
from tests.support.engines import (
    generate,
    make_request,
    make_tight_engine,
    run_to_end,
    token_ids,
)
from tests.support.tiny_models import random_adapter, tiny_model

PROMPTS = [[5, 9, 2, 40, 7, 33], [100, 90, 80, 70, 60, 50]]
RANKS = {"a": 4, "b": 8, "c": 3, "d": 9}


@pytest.fixture(scope="module")
def split() -> SplitModel:
    return tiny_model(vocab=257)


@pytest.fixture(scope="module")
def adapters(split: SplitModel) -> dict[str, AdapterWeights]:
    subset = {"c": ("q_proj", "v_proj"), "d": ("o_proj", "down_proj", "up_proj")}
    return {
        name: random_adapter(
            split.config, rank=rank, seed=i, **({"projections": subset[name]} if name in subset else {})
        )
        for i, (name, rank) in enumerate(RANKS.items())
    }


@pytest.fixture(scope="module")
def model(split: SplitModel, adapters: dict[str, AdapterWeights]) -> Model:
    return library_model(split, adapters)


@pytest.fixture(scope="module")
def engine(split: SplitModel, adapters: dict[str, AdapterWeights]) -> Engine:
    """Few slots and few blocks: requests evict each other's adapters and preempt each other."""
    return make_tight_engine(split, adapters)


@pytest.fixture(scope="module")
def whole_engine(split: SplitModel, adapters: dict[str, AdapterWeights]) -> Engine:
    """The same with a budget that takes any prompt in one chunk, and with one adapter more."""
    new = random_adapter(split.config, rank=13, seed=99)
    return make_tight_engine(split, adapters | {"new": new}, max_num_batched_tokens=64)


def library_model(split: SplitModel, adapters: dict[str, AdapterWeights]) -> Model:
    model = Model(split, None, adapter_slots=8, slot_rank=4)
    for name, adapter in adapters.items():
        model.add_adapter(name, adapter)
    return model


def logits(model: Model, *rows: Any) -> np.ndarray:
    """[rows, t, vocab] of the first prompt, one row a mix; the batch has five rows always, so that one compile does."""
    mixes = [*rows, *({} for _ in range(5 - len(rows)))]
    return np.asarray(model.logits(pad_batch([PROMPTS[0]] * 5), model.mix(mixes)))[: len(rows)]


# Law 1

dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


@dtypes
def test_law_1_a_one_hot_mix_equals_the_adapter_served_alone_bit_for_bit(adapters, dtype) -> None:
    split = tiny_model(dtype, vocab=257)
    model = library_model(split, adapters)
    for name in RANKS:
        others = {other: 0.0 for other in RANKS if other != name}
        alone = logits(library_model(split, {name: adapters[name]}), {name: 1.0})
        np.testing.assert_array_equal(logits(model, {name: 1.0} | others), alone)


@dtypes
def test_law_1_an_empty_mix_and_weight_zero_equal_the_base_bit_for_bit(adapters, dtype) -> None:
    split = tiny_model(dtype, vocab=257)
    model = library_model(split, adapters)
    base = logits(library_model(split, {}), {})
    np.testing.assert_array_equal(logits(model, {}), base)
    np.testing.assert_array_equal(logits(model, dict.fromkeys(RANKS, 0.0)), base)
    beside_adapters = logits(model, {"a": 1.0}, {}, {"b": 2.0}, dict.fromkeys(RANKS, 0.0))
    np.testing.assert_array_equal(beside_adapters[[1, 3]], base[[0, 0]])


@dtypes
def test_law_1_adapters_change_the_output(adapters, dtype) -> None:
    """Otherwise the two tests above would prove nothing."""
    rows = logits(library_model(tiny_model(dtype, vocab=257), adapters), {}, *({name: 1.0} for name in RANKS))
    assert (np.abs(rows[1:] - rows[0]).max(axis=(1, 2)) > 0.05).all()


# Law 2


def test_law_2_the_order_of_a_mix_does_not_matter(model) -> None:
    mix = {"a": 0.7, "b": -0.5, "c": 1.5}
    np.testing.assert_array_equal(logits(model, mix), logits(model, dict(reversed(mix.items()))))


def test_law_2_weights_are_not_normalised_and_may_be_negative_or_large(split, adapters, model) -> None:
    for mix in ({"a": 2.0, "b": 1.5}, {"a": -1.0}, {"a": 0.5}, {"b": 3.0, "d": -0.25}):
        want = numpy_llama.logits(split.config, params_of(split), PROMPTS[0], numpy_llama.static_delta(mix, adapters))
        np.testing.assert_allclose(logits(model, mix)[0], want, atol=2e-4)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -float("inf")])
def test_law_2_weights_that_are_not_finite_are_refused(model, weight) -> None:
    with pytest.raises(ValueError, match=r"'a' is .*expected a finite number"):
        model.mix([{"a": weight}])


# Law 3


def test_law_3_a_mix_is_the_exact_sum_of_deltas_for_ranks_and_projections_of_every_kind(split, adapters, model) -> None:
    mix = {"a": 1.0, "b": 0.7, "c": -0.5, "d": 0.9}
    want = numpy_llama.logits(split.config, params_of(split), PROMPTS[0], numpy_llama.static_delta(mix, adapters))
    np.testing.assert_allclose(logits(model, mix)[0], want, atol=2e-4)


# Law 4

MIXES = [{}, {"a": 1.0}, {"b": 0.7}, {"a": 0.5, "c": -1.0}, {"d": 0.8}, {"a": 0.3, "b": 0.4}, "gated"]
COMMON = [(11 * i) % 128 for i in range(16)]
request_lists = st.lists(
    st.tuples(
        st.integers(0, len(MIXES) - 1),
        # The first tokens are often those of another request, whose blocks are shared then.
        st.builds(
            lambda n, rest: COMMON[:n] + rest, st.integers(0, 16), st.lists(st.integers(0, 127), min_size=1, max_size=6)
        ),
        st.integers(1, 12),
        st.integers(0, 6),  # steps before it arrives
    ),
    min_size=2,
    max_size=7,
)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(requests=request_lists)
def test_law_4_a_batch_gives_each_request_the_tokens_it_gets_alone(engine: Engine, requests) -> None:
    outputs: dict[str, list] = {}
    waiting = sorted(enumerate(requests), key=lambda r: r[1][3])
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][1][3] <= step:
            i, (mix, prompt, max_tokens, _) = waiting.pop(0)
            engine.add_request(make_request(engine, f"r{i}", prompt, MIXES[mix], max_tokens=max_tokens))
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        step += 1
    engine.check_integrity()
    for i, (mix, prompt, max_tokens, _) in enumerate(requests):
        engine.forget_prefixes()
        assert token_ids(outputs[f"r{i}"]) == generate(engine, prompt, MIXES[mix], max_tokens=max_tokens), (
            f"request {i}"
        )


def test_law_4_the_engine_of_the_test_preempts_evicts_and_shares(engine: Engine) -> None:
    """Otherwise the test above would not cover them."""
    preemptions = engine.scheduler.num_preemptions
    for i in range(4):
        engine.add_request(make_request(engine, f"r{i}", range(20), MIXES[i + 1], max_tokens=20))
    run_to_end(engine)
    assert engine.scheduler.num_preemptions > preemptions
    assert not engine.slot_cache.resident >= set(RANKS)
    generate(engine, COMMON, {})
    engine.add_request(request := make_request(engine, "shares", COMMON, {}))
    run_to_end(engine)
    assert request.num_cached_tokens == 12


def test_law_4_chunked_prefill_equals_one_prefill(engine: Engine, whole_engine: Engine) -> None:
    prompt = [(7 * i) % 128 for i in range(40)]  # three chunks of at most 16 tokens in `engine`
    for mix in ({}, {"a": 0.5, "c": -1.0}):
        assert generate(engine, prompt, mix) == generate(whole_engine, prompt, mix)


def test_law_4_the_same_batch_twice_is_bit_equal(engine: Engine) -> None:
    def run() -> list:
        for name in tuple(engine.slot_cache.resident):  # the same batch has its adapters in the same slots
            engine.slot_cache.remove(name)
        engine.forget_prefixes()  # and computes its prompts in the same chunks
        for i, mix in enumerate(MIXES):
            request = make_request(engine, f"r{i}", PROMPTS[i % 2], mix, logprobs=5, temperature=0.8, seed=i)
            engine.add_request(request)
        outputs = run_to_end(engine)
        return [[(o.token_ids, o.logprobs) for o in outputs[f"r{i}"]] for i in range(len(MIXES))]

    assert run() == run()


def test_law_4_one_mix_gives_the_same_bits_whatever_ran_between(engine: Engine) -> None:
    """Case B12: nothing is merged, so nothing adds up."""

    def base() -> list:
        engine.forget_prefixes()  # a prompt in other chunks is rounded otherwise
        engine.add_request(make_request(engine, "base", PROMPTS[0], {}, logprobs=20))
        return [o.logprobs for o in run_to_end(engine)["base"]]

    first = base()
    for _ in range(3):
        for mix in MIXES[1:]:
            generate(engine, PROMPTS[1], mix)
        assert base() == first


# Law 5


def test_law_5_no_request_sees_the_cache_of_another_mix(whole_engine: Engine) -> None:
    mixes: list[dict[str, float]] = [{}, {"a": 1.0}, {"b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 0.5}, {}]
    prompt = [(3 * i) % 128 for i in range(30)]
    answers = [generate(whole_engine, prompt, mix) for mix in mixes]
    for mix, answer in zip(mixes, answers, strict=True):
        assert generate(make_cold(whole_engine), prompt, mix) == answer
    assert answers[0] == answers[-1]
    assert len({tuple(a) for a in answers}) == 5


def make_cold(engine: Engine) -> Engine:
    """The same engine with its KV cache wiped by NaN: whatever is read before it is written shows."""
    engine.forget_prefixes()
    engine._cache = jax.tree.map(lambda kv: kv * float("nan"), engine._cache)
    return engine


def test_law_5_running_requests_share_blocks_of_one_mix_only_and_write_none_of_them(engine: Engine) -> None:
    num_shared = 0
    for i in range(4):
        engine.add_request(make_request(engine, f"r{i}", PROMPTS[0], MIXES[i % 2], max_tokens=4))
    while engine.has_work:
        engine.step()
        users: dict[int, list] = {}
        for request in engine.scheduler.running:
            for i, block_id in enumerate(request.block_table):
                is_full = (i + 1) * 4 <= request.num_computed_tokens
                users.setdefault(block_id, []).append((request.mix, is_full))
        shared = [users for users in users.values() if len(users) > 1]
        num_shared += len(shared)
        assert all(is_full and mix == users[0][0] for users in shared for mix, is_full in users)
        engine.check_integrity()
    assert num_shared > 0


# Law 6


def test_law_6_nothing_compiles_after_the_start(engine: Engine, whole_engine: Engine) -> None:
    """`run_to_end` checks the same in every test of an engine."""
    mixes = [{}, {"a": 1.0}, {"a": 0.1, "b": 0.2, "c": 0.3}, {"new": 1.0}, {"d": 2.0}, "gated"]
    with recorded_compiles() as compiles:
        for i, mix in enumerate(mixes):
            add_greedy_and_sampled(whole_engine, i, mix)
        run_to_end(whole_engine)
        for i, mix in enumerate(MIXES):
            add_greedy_and_sampled(engine, i, mix)
        run_to_end(engine)
        assert compiles == []
        (other := threading.Thread(target=lambda: jax.jit(lambda x: x - len(compiles))(np.float32(1)))).start()
        other.join()
        assert compiles == [], "another thread's doing"
        jax.jit(lambda x: x + len(compiles))(np.float32(1))
        assert compiles, "the listener hears nothing"


def add_greedy_and_sampled(engine: Engine, index: int, mix: dict[str, float] | str) -> None:
    """Two requests: one of a prompt whose length grows with `index`, and a short one with log probabilities."""
    prompt = range(1, min(3 + 9 * index, engine.max_model_len - 7))
    engine.add_request(make_request(engine, f"g{index}", prompt, mix, max_tokens=7))
    sampling = {"temperature": 0.5, "top_p": 0.9, "seed": index, "logprobs": index}
    engine.add_request(make_request(engine, f"s{index}", range(2), mix, **sampling))
