"""Cases of the field on the real engine; the letters are those of the trial list. (Laws: test_laws.py.)"""

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax

# Interpreted kernels import it when the first one runs; it adds an option of JAX's, and every jitted function compiles
# again, those of engines that are there already too.
import jax.experimental.pallas.fuser
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

import dymerge_jax as dm
from dymerge_jax.gating import GatedSetWeights
from dymerge_jax.library import Model, pad_batch
from dymerge_jax.lora import AdapterWeights, ProjectionWeights, empty_slots, slot_contents, write_slot
from dymerge_jax.model import Implementations, SplitModel, model_from_params, params_of
from pallas_kernels.lora_linear import Implementation as LinearImplementation
from pallas_kernels.lora_linear import lora_linear, lora_swiglu
from pallas_kernels.maf_mvm import maf_mvm
from pallas_kernels.segments import build_segments
from serving.adapter_store import AdapterStore
from serving.config import EngineConfig, SchedulerName
from serving.engine import Engine
from serving.errors import InvalidRequestError, UnknownModelError
from serving.request import RequestOutput
from tests.support import numpy_llama
from tests.support.engines import (
    generate,
    make_engine,
    make_request,
    make_tight_engine,
    run_to_end,
    token_ids,
)
from tests.support.tiny_models import random_adapter, random_gated_set, tiny_model

PROMPT = [5, 9, 2, 40, 7, 33]
BASE: dict[str, float] = {}
SPLIT = {"a": 0.7, "b": 0.3}


@pytest.fixture(scope="module")
def split() -> SplitModel:
    """A vocabulary that is no multiple of anything (case C1)."""
    return tiny_model(vocab=257)


@pytest.fixture(scope="module")
def adapters(split: SplitModel) -> dict[str, AdapterWeights]:
    """Of slots of rank 4, a, b and c fill two each, big four, small a part of one."""
    whole = {
        name: random_adapter(split.config, rank=rank, seed=seed)
        for seed, (name, rank) in enumerate({"a": 8, "b": 8, "c": 7, "big": 16}.items())
    }
    return whole | {"small": random_adapter(split.config, rank=2, seed=9, projections=("q_proj", "v_proj"))}


@pytest.fixture(scope="module")
def engine(split: SplitModel, adapters: dict[str, AdapterWeights]) -> Engine:
    """Four slots for five adapters."""
    gated = random_gated_set(
        split.config, "gated", ["a", "c"], granularity="layer", top_k=None, renormalize=False, seed=3
    )  # fmt: skip
    return make_tight_engine(split, adapters, gated)


def first_token(engine: Engine, mix: Mapping[str, float] | str, prompt: list[int] = PROMPT) -> dict[int, float]:
    """The 20 likeliest first tokens of an answer with their log probabilities."""
    engine.add_request(make_request(engine, "first", prompt, mix, max_tokens=1, logprobs=20))
    (output,) = run_to_end(engine)["first"]
    return dict(output.logprobs[0].top)


def expected_first_token(
    split: SplitModel, adapters: Mapping[str, AdapterWeights], mix: Mapping[str, float], prompt: list[int] = PROMPT
) -> np.ndarray:
    """[vocab] log probabilities by plain float64: W x + sum of w s B (A x)."""
    delta = numpy_llama.static_delta(mix, adapters) if mix else None
    logits = numpy_llama.logits(split.config, params_of(split), prompt, delta)[-1]
    return logits - np.logaddexp.reduce(logits)


def assert_equals_reference(actual: dict[int, float], expected: np.ndarray) -> None:
    assert set(actual) == set(np.argsort(-expected)[:20].tolist())
    np.testing.assert_allclose(list(actual.values()), expected[list(actual)], atol=1e-4)


def trace(outputs: list[RequestOutput]) -> list[object]:
    return [(o.token_ids, o.logprobs) for o in outputs]


def test_b11_a_mix_is_the_sum_of_deltas_and_not_the_product_of_sums(split: SplitModel) -> None:
    """The sum of two rank-one adapters is 0.5 * 1 * 2 + 0.3 * 1 * 3 = 1.9; PEFT's "linear" would give 3.836."""
    config, width = split.config, split.config.hidden
    slots = empty_slots(config, num_slots=2, slot_rank=1, dtype=jnp.float32)
    unit = np.eye(1, width, dtype=np.float32)
    for slot_id, b in enumerate((2.0, 3.0)):
        weights = AdapterWeights({(0, "o_proj"): ProjectionWeights(a=unit, b=b * unit.T, scale=1.0)}, "")
        (content,) = slot_contents(config, weights, slot_rank=1, dtype=jnp.float32)
        slots = write_slot(slots, slot_id, content)
    segments = build_segments(jnp.asarray([[[0.5, 0.3]]], jnp.float32), tile_size=1)
    y = maf_mvm(jnp.asarray(unit), slots.groups["o"], segments, jnp.zeros((1, width)), layer=0)
    np.testing.assert_allclose(np.asarray(y), 1.9 * unit, rtol=1e-6)


def test_b12_one_mix_gives_the_same_bits_five_times_with_others_between(engine: Engine) -> None:
    def run(mix: Mapping[str, float]) -> list[object]:
        engine.add_request(make_request(engine, "r", PROMPT, mix, logprobs=20))
        return trace(run_to_end(engine)["r"])

    base, first = run(BASE), run(SPLIT)
    for other in (BASE, {"big": 1.0}, {"b": 1.0, "c": -0.5}, {"a": 2.0}, {"small": 1.0}):
        assert run(other) != first
        assert run(SPLIT) == first
    assert run(BASE) == base


def test_c1_an_id_outside_the_vocabulary_is_never_sampled(engine: Engine) -> None:
    for i in range(3):
        engine.add_request(make_request(engine, f"r{i}", PROMPT, SPLIT, max_tokens=50, temperature=50.0, seed=i))
    drawn = [t for outputs in run_to_end(engine).values() for t in token_ids(outputs)]
    assert all(0 <= t < 257 for t in drawn)
    assert max(drawn) > 240  # nearly uniform: a row of padding would have been drawn too


@pytest.mark.slow
def test_c5_a_vocabulary_of_128256_works_with_adapters() -> None:
    split = tiny_model(vocab=128_256)
    adapters = {"a": random_adapter(split.config, rank=4, seed=0)}
    model = Model(split, None, adapter_slots=1, slot_rank=4)
    model.add_adapter("a", adapters["a"])
    prompt = [128_255, 5, 70_000]
    logits = np.asarray(model.logits(pad_batch([prompt]), model.mix([{"a": 0.5}])))[0]
    delta = numpy_llama.static_delta({"a": 0.5}, adapters)
    np.testing.assert_allclose(logits, numpy_llama.logits(split.config, params_of(split), prompt, delta), atol=2e-4)


@pytest.mark.parametrize("scheduler", get_args(SchedulerName))
def test_d6_an_adapter_that_does_not_exist_is_an_error_under_every_policy(
    split: SplitModel, adapters: dict[str, AdapterWeights], scheduler: SchedulerName
) -> None:
    store = AdapterStore(split.config, slot_rank=4, dtype=split.dtype)
    config = EngineConfig(adapter_slots=2, slot_rank=4, max_num_seqs=2, num_blocks=4, scheduler=scheduler)
    engine = Engine(split, None, store, (), config)
    with pytest.raises(UnknownModelError, match="'nobody' is not loaded"):
        engine.add_request(make_request(engine, "r", PROMPT, {"nobody": 1.0}))
    assert not engine.has_work


def test_f1_a_small_adapter_in_the_slots_of_a_big_one_has_nothing_of_it(
    split: SplitModel, adapters: dict[str, AdapterWeights], engine: Engine
) -> None:
    for mix in ({"big": 1.0}, {"small": 1.0}, {"small": 1.0, "c": 1.0}, {"big": 1.0}):
        assert_equals_reference(first_token(engine, mix), expected_first_token(split, adapters, mix))


def test_f3_more_mixes_than_slots_with_random_cancels_are_all_answered_right(engine: Engine) -> None:
    mixes = [{"a": 1.0}, {"b": 1.0}, BASE, {"a": 0.5, "b": 0.5}, {"b": 1.0, "c": -0.5}, {"big": 1.0}]
    alone = [generate(engine, PROMPT, mix, max_tokens=9) for mix in mixes]
    assert len({tuple(tokens) for tokens in alone}) == len(mixes)
    draw = random.Random(0)
    outputs: dict[str, list[RequestOutput]] = {}
    cancelled = set()
    for i in range(150):
        mix = mixes[i % len(mixes)]
        engine.add_request(make_request(engine, f"r{i}", PROMPT, mix, max_tokens=draw.randrange(1, 10)))
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        if draw.random() < 0.4:
            cancelled.add(gone := f"r{draw.randrange(max(0, i - 12), i + 1)}")
            engine.abort(gone)
            engine.scheduler.check_integrity()
    for request_id, rest in run_to_end(engine).items():
        outputs.setdefault(request_id, []).extend(rest)
    ended = {request_id for request_id, parts in outputs.items() if parts[-1].finish_reason is not None}
    assert ended | cancelled == {f"r{i}" for i in range(150)}
    for request_id, parts in outputs.items():
        tokens = [t for part in parts for t in part.token_ids]
        assert tokens == alone[int(request_id[1:]) % len(mixes)][: len(tokens)], request_id
    assert generate(engine, PROMPT, BASE, max_tokens=9) == alone[2]


def test_f1_a_gated_set_finds_its_experts_wherever_they_were_loaded(
    split: SplitModel, adapters: dict[str, AdapterWeights], engine: Engine
) -> None:
    (gated_set,) = engine.gated_sets
    assert isinstance(gated_set, GatedSetWeights)
    logits = numpy_llama.logits(
        split.config, params_of(split), PROMPT, numpy_llama.gated_delta(gated_set, adapters)
    )[-1]  # fmt: skip
    places = set()
    for first in ("a", "c"):
        first_token(engine, {"big": 1.0})  # fills all slots
        first_token(engine, {first: 1.0})
        assert_equals_reference(first_token(engine, "gated"), logits - np.logaddexp.reduce(logits))
        places.add(tuple(engine.slot_cache.lookup(name) for name in gated_set.experts))
    assert places == {((0, 1), (2, 3)), ((2, 3), (0, 1))}


def test_g4_a_prompt_seen_before_is_answered_anew_for_every_mix(
    split: SplitModel, adapters: dict[str, AdapterWeights], engine: Engine
) -> None:
    """Case G1 too: base, a, b, base."""
    prompt = [(3 * i) % 257 for i in range(45)]
    for mix in (BASE, {"a": 1.0}, {"b": 1.0}, BASE, {"a": 1.0, "b": 1.0}, {"a": 1.0}, BASE):
        actual = first_token(engine, mix, prompt)
        assert_equals_reference(actual, expected_first_token(split, adapters, mix, prompt))


def test_i3_switching_adapters_takes_no_more_device_memory(engine: Engine) -> None:
    def live() -> tuple[int, int]:
        arrays = jax.live_arrays()
        return len(arrays), sum(a.nbytes for a in arrays)

    def switch(times: int) -> None:
        for i in range(times):
            generate(engine, PROMPT[:2], {"abc"[i % 3]: 1.0}, max_tokens=2)

    switch(6)
    before = live()
    switch(60)
    assert live() == before


@pytest.mark.slow  # fast: the laws, on the library
def test_k1_slots_that_nobody_uses_leave_the_base_alone_bit_for_bit(
    split: SplitModel, adapters: dict[str, AdapterWeights], engine: Engine
) -> None:
    def base(engine: Engine) -> list[object]:
        engine.forget_prefixes()  # another cut of a prompt rounds its last bits otherwise
        for i, prompt in enumerate((PROMPT, PROMPT[:1], [(3 * i) % 257 for i in range(20)])):
            engine.add_request(make_request(engine, f"r{i}", prompt, BASE, logprobs=20))
        outputs = run_to_end(engine)
        return [trace(outputs[f"r{i}"]) for i in range(3)]

    generate(engine, PROMPT, {"big": 1.0})  # every slot holds something
    without_slots = make_engine(split, adapters, adapter_slots=0, num_blocks=24, max_model_len=48)
    assert base(engine) == base(without_slots)
    with pytest.raises(InvalidRequestError, match=r"needs 2 slots .* has 0; .*--adapter-slots"):
        without_slots.add_request(make_request(without_slots, "r", PROMPT, {"a": 1.0}))


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [
        pytest.param(jnp.float32, None, id="float32"),
        pytest.param(jnp.bfloat16, "pallas_triton", id="bfloat16-kernel", marks=pytest.mark.slow),
    ],
)
def test_k1_the_adapter_op_adds_nothing_to_the_base(
    monkeypatch: pytest.MonkeyPatch, dtype: DTypeLike, implementation: LinearImplementation | None
) -> None:
    split = tiny_model(dtype, num_layers=1)

    def logits(num_slots: int) -> np.ndarray:
        model = Model(
            split,
            None,
            adapter_slots=num_slots,
            slot_rank=4,
            implementations=Implementations(lora_linear=implementation),
        )
        model.add_adapter("a", random_adapter(split.config, rank=8, seed=0))
        mixes = ([BASE, BASE], [BASE, {"a": 1.0}])
        return np.concatenate([model.logits(pad_batch([PROMPT, PROMPT]), model.mix(rows)) for rows in mixes])

    actual = logits(3)
    with monkeypatch.context() as patch:
        for op in (lora_linear, lora_swiglu):
            patch.setattr(f"dymerge_jax.model.{op.__name__}", functools.partial(without_adapters, op))
        plain = logits(2)  # another shape, so that the step is traced anew
    np.testing.assert_array_equal(actual[:3], plain[:3])
    assert np.abs(actual[3] - plain[3]).max() > 0.05


def without_adapters(
    op: Callable[..., Any], x: Any, w: Any, slots: Any, segments: Any, *args: Any, **kwargs: Any
) -> Any:
    """The op in a form that has no adapters at all."""
    assert segments is not None
    return op(x, w, slots, None, *args, **kwargs)


def test_k2_greedy_text_is_that_of_merged_weights(split: SplitModel, adapters: dict[str, AdapterWeights]) -> None:
    mixes = [{"a": 1.0}, {"a": 0.7, "big": 0.3}, {"b": 1.0, "c": -0.5, "small": 2.0}]
    batch = pad_batch([PROMPT])
    for mix in mixes:
        served = Model(split, None, adapter_slots=16, slot_rank=4)
        for name, weights in adapters.items():
            served.add_adapter(name, weights)
        merged = Model(merge(split, adapters, mix), None, adapter_slots=16, slot_rank=4)
        tokens = [
            dm.make_generate(model, max_new_tokens=32, ignore_eos=True)(batch, model.mix([row])).tokens
            for model, row in ((served, mix), (merged, BASE))
        ]
        np.testing.assert_array_equal(np.asarray(tokens[0]), np.asarray(tokens[1]))


def merge(split: SplitModel, adapters: Mapping[str, AdapterWeights], mix: Mapping[str, float]) -> SplitModel:
    """The model with the deltas added to its matrices, by float64."""
    params = jax.tree.map(lambda x: np.array(x, np.float64), params_of(split))
    for name, weight in mix.items():
        for (layer, projection), w in adapters[name].projections.items():
            group, g = next((k, g) for k, g in split.config.groups.items() if projection in g.projections)
            index = g.projections.index(projection)
            columns = slice(sum(g.widths[:index]), sum(g.widths[: index + 1]))
            delta = weight * w.scale * (w.b.astype(np.float64) @ w.a.astype(np.float64)).T
            params["layers"][layer][group][:, columns] += delta
    return model_from_params(split.config, jax.tree.map(lambda x: x.astype(np.float32), params))


def test_k4_another_weight_of_an_adapter_that_runs_or_just_ran_counts(
    split: SplitModel, adapters: dict[str, AdapterWeights], engine: Engine
) -> None:
    """Case B10 too: the weight of a single adapter is not ignored."""
    for weight in (1.0, 0.25, -1.0, 0.5):
        expected = expected_first_token(split, adapters, {"a": weight})
        assert_equals_reference(first_token(engine, {"a": weight}), expected)
    engine.add_request(make_request(engine, "full", PROMPT, {"a": 1.0}, max_tokens=9))
    engine.step()
    engine.step()
    engine.add_request(make_request(engine, "quarter", PROMPT, {"a": 0.25}, max_tokens=1, logprobs=20))
    (output,) = run_to_end(engine)["quarter"]
    assert_equals_reference(dict(output.logprobs[0].top), expected_first_token(split, adapters, {"a": 0.25}))


def test_m1_each_adapter_counts_where_its_requests_are(engine: Engine) -> None:
    def queues() -> set[str]:
        prefixes = ("dymerge_adapter_requests_running", "dymerge_adapter_requests_waiting", "dymerge_requests_running")
        return {line for line in engine.metrics.render().decode().splitlines() if line.startswith(prefixes)}

    for i in range(4):
        engine.add_request(make_request(engine, f"r{i}", PROMPT[:4], {"a": 1.0} if i else {"a": 1.0, "c": 0.5}))
    engine.add_request(make_request(engine, "queued", PROMPT, {"b": 1.0}))
    engine.step()
    assert queues() == {
        'dymerge_adapter_requests_running{adapter="a"} 4.0',
        'dymerge_adapter_requests_running{adapter="c"} 1.0',
        'dymerge_adapter_requests_waiting{adapter="b"} 1.0',
        "dymerge_requests_running 4.0",
    }
    run_to_end(engine)
    assert queues() == {"dymerge_requests_running 0.0"}
