"""The library's front: batches, mixes, generate, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dymerge_jax as dm
from dymerge_jax.library import Model, pad_batch
from tests.support.compiles import recorded_compiles
from tests.support.tiny_models import random_adapter, tiny_model

PROMPTS = [[5, 9, 2, 40], [100, 90, 80, 70, 60, 50], [1]]
MIXES = [{"a": 1.0}, {"a": 0.5, "b": -0.7}, {}]


@pytest.fixture(scope="module")
def model() -> Model:
    split = tiny_model(eos_token_ids=(3, 77))
    model = Model(split, None, adapter_slots=8, slot_rank=4)
    model.add_adapter("a", random_adapter(split.config, rank=4, seed=0))
    model.add_adapter("b", random_adapter(split.config, rank=9, seed=1))
    return model


def greedy_by_logits(model: Model, prompt: list[int], mix: dict[str, float], count: int, width: int) -> list[int]:
    """Token after token from the logits of the whole sequence: no cache, no loop on the device."""
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(tokens)] = tokens
        batch = dm.Batch(tokens=jnp.asarray(padded), lengths=jnp.asarray([len(tokens)], jnp.int32))
        tokens.append(int(np.asarray(model.logits(batch, model.mix([mix])))[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def test_generate_follows_the_logits_for_every_row_of_a_ragged_batch(model: Model) -> None:
    out = dm.make_generate(model, max_new_tokens=8, ignore_eos=True)(pad_batch(PROMPTS), model.mix(MIXES))
    assert out.tokens.shape == (3, 8)
    np.testing.assert_array_equal(np.asarray(out.lengths), [8, 8, 8])
    for row, (prompt, mix) in enumerate(zip(PROMPTS, MIXES, strict=True)):
        assert np.asarray(out.tokens)[row].tolist() == greedy_by_logits(model, prompt, mix, 8, width=16)


def test_generate_stops_at_every_end_token_and_pads_with_zero(model: Model) -> None:
    free = dm.make_generate(model, max_new_tokens=12, ignore_eos=True)(pad_batch(PROMPTS), model.mix(MIXES))
    endings = [int(t) for t in np.asarray(free.tokens)[:, 5]]
    stopping = Model(tiny_model(eos_token_ids=tuple(endings)), None, adapter_slots=8, slot_rank=4)
    stopping.slots, stopping._slots_of_adapter = model.slots, model._slots_of_adapter
    out = dm.make_generate(stopping, max_new_tokens=12)(pad_batch(PROMPTS), stopping.mix(MIXES))
    for row in range(3):
        free_row = np.asarray(free.tokens)[row].tolist()
        end = next(i for i, t in enumerate(free_row) if t in endings)
        assert int(out.lengths[row]) == end
        assert np.asarray(out.tokens)[row].tolist() == free_row[:end] + [0] * (12 - end)


def test_a_new_mix_seed_or_adapter_compiles_nothing(model: Model) -> None:
    generate = dm.make_generate(model, max_new_tokens=4, temperature=0.9, top_p=0.9)
    batch = pad_batch(PROMPTS)
    generate(batch, model.mix(MIXES))
    model.add_adapter("late", random_adapter(model.config, rank=2, seed=5))
    with recorded_compiles() as compiles:
        generate(batch, model.mix([{"late": 2.0, "a": 0.1, "b": 0.1}, {"b": 1.0}, {"late": -1.0}]), seed=3)
    assert compiles == []


def test_sampling_depends_on_the_seed_only(model: Model) -> None:
    generate = dm.make_generate(model, max_new_tokens=8, temperature=3.0, ignore_eos=True)
    batch, mix = pad_batch(PROMPTS), model.mix(MIXES)
    first = np.asarray(generate(batch, mix, seed=1).tokens)
    np.testing.assert_array_equal(np.asarray(generate(batch, mix, seed=1).tokens), first)
    assert (np.asarray(generate(batch, mix, seed=2).tokens) != first).any()


def test_generate_can_be_called_under_jit_with_batches_made_by_hand(model: Model) -> None:
    generate = dm.make_generate(model, max_new_tokens=4, ignore_eos=True)
    batch = dm.Batch(tokens=jnp.asarray([[5, 9, 2, 40]], jnp.int32), lengths=jnp.asarray([4], jnp.int32))
    mix = model.mix([{"a": 1.0}])
    under_jit = jax.jit(lambda b, m: generate(b, m))(batch, mix)
    np.testing.assert_array_equal(np.asarray(under_jit.tokens), np.asarray(generate(batch, mix).tokens))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([{"nope": 1.0}], ValueError, r"mix 0 names adapter 'nope'; the loaded adapters are: a, b"),
        ([{}, {"a": "1"}], TypeError, r"weight of adapter 'a' is '1'; expected a number"),
        ([{"a": True}], TypeError, r"weight of adapter 'a' is True; expected a number"),
        (["set"], ValueError, r"no gated set is named 'set'; the loaded ones are: none"),
    ],
)
def test_bad_mixes_are_refused(model: Model, rows, error, message) -> None:
    with pytest.raises(error, match=message):
        model.mix(rows)


def test_a_mix_of_another_number_of_rows_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match=r"the mix has shape \(1, 8\); expected \(3 rows"):
        model.logits(pad_batch(PROMPTS), model.mix([{}]))


def test_token_ids_outside_the_vocabulary_are_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="token ids are 1 to 128; the vocabulary has 128"):
        model.logits(pad_batch([[1, 128]]), model.mix([{}]))


def test_more_tokens_than_the_context_are_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="510 tokens and 3 are to be generated, but the model's context is 512"):
        dm.make_generate(model, max_new_tokens=3)(pad_batch([[1] * 510]), model.mix([{}]))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="every prompt needs at least one token"):
        pad_batch([[1], []])


def test_a_name_is_given_once(model: Model) -> None:
    with pytest.raises(ValueError, match="the name 'a' is taken already"):
        model.add_adapter("a", random_adapter(model.config, rank=1, seed=0))


def test_an_adapter_that_does_not_fit_names_both_numbers(model: Model) -> None:
    with pytest.raises(ValueError, match=r"rank 33 needs 9 slots of rank 4, but only \d of 8 are free"):
        model.add_adapter("big", random_adapter(model.config, rank=33, seed=0))


def test_unknown_names_of_the_package_are_listed() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'generat'; it has .*load"):
        _ = dm.generat  # type: ignore[attr-defined]
