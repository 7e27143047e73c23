"""X-LoRA in the engine: beside all other kinds of rows, chunked, preempted, cancelled, and with a prefix cache."""

import numpy as np
import pytest

from dymerge_jax.gating import GatedSetWeights
from dymerge_jax.lora import AdapterWeights
from dymerge_jax.model import SplitModel
from dymerge_jax.xlora import GatedSet
from serving.batch import Bucket, Buckets
from serving.engine import Engine
from serving.errors import InvalidRequestError
from tests.support.engines import generate, make_engine, make_request, run_to_end, token_ids
from tests.support.tiny_models import random_adapter, random_gated_set, random_xlora_set, tiny_model

pytestmark = pytest.mark.slow

RANKS = {"a": 4, "b": 6, "c": 3}
PROMPT = [(3 * i) % 251 for i in range(60)]
X_ROWS: tuple[str, ...] = ("xlora", "layerwise")
BUCKETS = Buckets((Bucket(6, 6),), (Bucket(16, 6),))


@pytest.fixture(scope="module")
def split() -> SplitModel:
    return tiny_model(vocab=257)


@pytest.fixture(scope="module")
def adapters(split: SplitModel) -> dict[str, AdapterWeights]:
    return {name: random_adapter(split.config, rank=rank, seed=i) for i, (name, rank) in enumerate(RANKS.items())}


@pytest.fixture(scope="module")
def sets(split: SplitModel) -> list[GatedSet]:
    """X-LoRA with experts in both passes and in the second only; Arrow's and MoLA's kinds of gates."""
    config = split.config
    arrow = random_gated_set(config, "arrow", "abc", granularity="projection", top_k=2, renormalize=True, seed=3)
    return [
        random_xlora_set(config, "xlora", "abc", seed=1, depth=2, softmax=False, global_weight=0.6, pass_value=0.5),
        GatedSetWeights("arrow", arrow.experts, "projection", 2, True, arrow.gates, is_absolute=True),
        random_xlora_set(config, "layerwise", "ca", seed=2, is_layerwise=True, top_k=1),
        random_gated_set(config, "mola", "ab", granularity="projection", top_k=1, renormalize=True, seed=4),
    ]


@pytest.fixture(scope="module")
def engine(split: SplitModel, adapters: dict[str, AdapterWeights], sets: list[GatedSet]) -> Engine:
    """Room for three X-LoRA requests of 40 tokens, or six others."""
    return make_engine(
        split, adapters, sets, buckets=BUCKETS, max_num_seqs=6, num_blocks=60, max_model_len=64, adapter_slots=4
    )


def rows(engine: Engine) -> dict[str, dict[str, float] | str]:
    static = {str(engine.store.id_of(name)): weight for name, weight in (("a", 0.7), ("c", -0.5))}
    return {"xlora": "xlora", "arrow": "arrow", "layerwise": "layerwise", "mola": "mola", "static": static, "base": {}}


def cold(engine: Engine, prompt: list[int], mix: dict[str, float] | str, **sampling: int) -> list[int]:
    engine.forget_prefixes()
    return generate(engine, prompt, mix, **sampling)


def check_all_is_free(engine: Engine) -> None:
    engine.check_integrity()
    pool = engine.scheduler.block_pool
    assert pool.num_free == pool.num_blocks


def test_a_batch_of_all_kinds_of_rows_gives_each_what_it_gets_alone(engine: Engine) -> None:
    prompts = {name: PROMPT[i : i + 14 + i] for i, name in enumerate(rows(engine))}
    alone = {name: cold(engine, prompts[name], mix) for name, mix in rows(engine).items()}
    same = {tuple(cold(engine, prompts["base"], mix)) for mix in rows(engine).values()}
    assert len(same) == len(rows(engine)), "rows of different kinds must differ, or this test proves nothing"
    engine.forget_prefixes()
    for name, mix in rows(engine).items():
        engine.add_request(make_request(engine, name, prompts[name], mix))
    together = run_to_end(engine)
    assert {name: token_ids(outputs) for name, outputs in together.items()} == alone
    check_all_is_free(engine)


def test_rows_that_are_beside_x_lora_or_not_get_the_same_logits(engine: Engine) -> None:
    options = {"logprobs": 5, "max_tokens": 4}

    def logprobs(names: list[str]) -> dict[str, np.ndarray]:
        engine.forget_prefixes()
        for name in names:
            engine.add_request(make_request(engine, name, PROMPT[:9], rows(engine)[name], **options))
        outputs = run_to_end(engine)
        return {
            name: np.asarray([[x for _, x in entry.top] for o in outputs[name] for entry in o.logprobs])
            for name in names
        }

    together = logprobs(list(rows(engine)))
    for name, values in together.items():
        np.testing.assert_allclose(values, logprobs([name])[name], atol=2e-5, err_msg=name)


def test_steps_without_such_a_row_run_the_programs_of_an_engine_without_such_sets(engine: Engine) -> None:
    used: list[Bucket] = []
    programs = engine._programs
    forward = programs.forward

    def recorded(bucket: Bucket, *arguments: object) -> object:
        used.append(bucket)
        return forward(bucket, *arguments)  # pyright: ignore[reportArgumentType]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "forward", recorded)
        for name in ("arrow", "static", "base"):
            cold(engine, PROMPT[:20], rows(engine)[name])
        assert used
        assert not any(bucket.has_scaling_pass for bucket in used)
        used.clear()
        cold(engine, PROMPT[:20], "xlora")
        assert all(bucket.has_scaling_pass for bucket in used)


def test_an_engine_without_such_sets_has_neither_their_programs_nor_their_blocks(split, adapters, sets) -> None:
    plain = [s for s in sets if s.name not in X_ROWS]
    sizes = {"buckets": BUCKETS, "max_num_seqs": 6, "max_model_len": 64}
    without, with_them = (make_engine(split, adapters, some, **sizes) for some in (plain, sets))
    assert without.buckets.two_pass == ()
    assert without.num_programs == with_them.num_programs - 2
    assert without.scheduler.block_pool.num_blocks * 2 == with_them.scheduler.block_pool.num_blocks
    assert without._rows.scaling_tables is None


@pytest.mark.parametrize("num_steps", range(8))
def test_a_cancelled_request_leaves_no_block_of_either_cache(engine: Engine, num_steps: int) -> None:
    """Queued, in prefill, in decode, with a token in flight."""
    answer = cold(engine, PROMPT[:40], "layerwise")
    engine.forget_prefixes()
    engine.add_request(make_request(engine, "cancelled", PROMPT[:40], "xlora"))
    engine.add_request(make_request(engine, "other", PROMPT[:40], "layerwise"))
    outputs = []
    for _ in range(num_steps):
        outputs += engine.step()
        engine.scheduler.check_integrity()
    engine.abort("cancelled")
    engine.scheduler.check_integrity()
    outputs = [output for output in outputs if output.request_id == "other"] + run_to_end(engine)["other"]
    assert token_ids(outputs) == answer
    check_all_is_free(engine)


def test_preempted_requests_give_the_same_answers(engine: Engine) -> None:
    names = ["xlora", "layerwise", "static", "xlora"]
    prompts = [PROMPT[i : i + 30] for i in range(4)]
    alone = [cold(engine, p, rows(engine)[n], max_tokens=30) for p, n in zip(prompts, names, strict=True)]
    engine.forget_prefixes()
    num_preemptions = engine.scheduler.num_preemptions
    for i, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        engine.add_request(make_request(engine, f"r{i}", prompt, rows(engine)[name], max_tokens=30))
    together = run_to_end(engine)
    assert engine.scheduler.num_preemptions > num_preemptions
    assert [token_ids(together[f"r{i}"]) for i in range(4)] == alone
    check_all_is_free(engine)


def test_the_same_prompt_is_answered_for_each_kind_of_row_as_if_it_were_the_first(engine: Engine) -> None:
    mixes = rows(engine)
    answers = {name: cold(engine, PROMPT[:21], mix) for name, mix in mixes.items()}
    engine.forget_prefixes()
    for num_cached in (0, 20):
        for name in ("base", *X_ROWS, "arrow"):
            engine.add_request(request := make_request(engine, "warm", PROMPT[:21], mixes[name]))
            assert token_ids(run_to_end(engine)["warm"]) == answers[name], name
            assert request.num_cached_tokens == num_cached, name


def test_the_next_turn_of_a_conversation_shares_both_caches_of_the_turn_before(engine: Engine) -> None:
    first = cold(engine, PROMPT[:21], "layerwise", max_tokens=11)
    turn = PROMPT[:21] + first + [3, 1, 4]
    answer = cold(engine, turn, "layerwise")
    cold(engine, PROMPT[:21], "layerwise", max_tokens=11)
    engine.add_request(request := make_request(engine, "turn", turn, "layerwise"))
    assert token_ids(run_to_end(engine)["turn"]) == answer
    assert request.num_cached_tokens == 28


def test_a_request_of_the_greatest_length_fits_into_both_caches(split, adapters, sets) -> None:
    engine = make_engine(split, adapters, sets, buckets=BUCKETS, num_blocks=17, max_model_len=None, max_num_seqs=6)
    assert engine.max_model_len == 32
    answer = generate(engine, PROMPT[:20], "xlora", max_tokens=100)
    assert len(answer) == 12
    with pytest.raises(InvalidRequestError, match="share the limit of 32 tokens"):
        engine.add_request(make_request(engine, "long", PROMPT[:32], "xlora"))
    with pytest.raises(ValueError, match=r"holds 32 tokens .17 blocks of 4, in two caches for X-LoRA"):
        make_engine(split, adapters, sets, buckets=BUCKETS, num_blocks=17, max_model_len=33, max_num_seqs=6)
    with pytest.raises(ValueError, match="X-LoRA needs one in each of 2 caches; raise --num-blocks"):
        make_engine(split, adapters, sets, buckets=BUCKETS, num_blocks=1, max_model_len=None, max_num_seqs=6)
