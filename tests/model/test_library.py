"""The library's front: batches, mixes, generate, loading, and what it refuses."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dymerge_jax as dm
from checkpoints.errors import CheckpointError
from dymerge_jax.config import named_config
from dymerge_jax.generate import uniform_sampling
from dymerge_jax.library import Model, pad_batch
from dymerge_jax.sampling import pick_tokens
from tests.support.compiles import recorded_compiles
from tests.support.tiny_checkpoints import write_adapter, write_gated_set, write_tiny_llama
from tests.support.tiny_models import random_adapter, random_gated_set, tiny_model

PROMPTS = [[5, 9, 2, 40], [100, 90, 80, 70, 60, 50], [1]]
MIXES = [{"a": 1.0}, {"a": 0.5, "b": -0.7}, {}]
NUM_NEW = 8  # one number for all tests, as each shape is compiled


@pytest.fixture(scope="module")
def model() -> Model:
    """One layer, which compiles fast and does whatever these tests need."""
    split = tiny_model(num_layers=1)
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


# generate


def test_generate_follows_the_logits_for_every_row_of_a_ragged_batch(model: Model) -> None:
    out = dm.make_generate(model, max_new_tokens=NUM_NEW)(pad_batch(PROMPTS), model.mix(MIXES))
    assert out.tokens.shape == (3, NUM_NEW)
    np.testing.assert_array_equal(np.asarray(out.lengths), [NUM_NEW] * 3)
    for row, (prompt, mix) in enumerate(zip(PROMPTS, MIXES, strict=True)):
        assert np.asarray(out.tokens)[row].tolist() == greedy_by_logits(model, prompt, mix, NUM_NEW, width=16)


def test_generate_stops_at_every_end_token_and_pads_with_zero(model: Model) -> None:
    batch, mix = pad_batch(PROMPTS), model.mix(MIXES)
    free = dm.make_generate(model, max_new_tokens=NUM_NEW, ignore_eos=True)(batch, mix)
    endings = (int(free.tokens[0, 0]), *(int(t) for t in free.tokens[1:, 5]))
    config = dataclasses.replace(model.config, eos_token_ids=endings)
    stopping = Model(dataclasses.replace(model.split, config=config), None)
    stopping.slots = model.slots
    out = dm.make_generate(stopping, max_new_tokens=NUM_NEW)(batch, mix)
    for row in range(3):
        free_row = np.asarray(free.tokens)[row].tolist()
        end = next(i for i, t in enumerate(free_row) if t in endings)
        assert int(out.lengths[row]) == end
        assert np.asarray(out.tokens)[row].tolist() == free_row[:end] + [0] * (NUM_NEW - end)


@pytest.mark.slow
def test_prompts_of_one_token_are_each_continued_as_in_a_longer_batch(model: Model) -> None:
    """As many tokens as rows are read as a decode batch."""
    generate = dm.make_generate(model, max_new_tokens=NUM_NEW)
    mix = model.mix(MIXES)
    one_each = generate(pad_batch([[7], [5], [1]]), mix)
    padded = dm.Batch(jnp.zeros((3, 6), jnp.int32).at[:, 0].set(jnp.asarray([7, 5, 1])), jnp.ones((3,), jnp.int32))
    np.testing.assert_array_equal(np.asarray(one_each.tokens), np.asarray(generate(padded, mix).tokens))


@pytest.fixture
def growing(model: Model) -> Model:
    """A model of its own, to add adapters to."""
    growing = Model(model.split, None, adapter_slots=8, slot_rank=4)
    growing.add_adapter("a", random_adapter(model.config, rank=4, seed=0))
    return growing


def test_a_new_mix_seed_or_adapter_compiles_nothing(growing: Model) -> None:
    generate = dm.make_generate(growing, max_new_tokens=NUM_NEW, temperature=3.0, top_p=0.9)
    batch = pad_batch(PROMPTS)
    generate(batch, growing.mix([{"a": 1.0}] * 3))
    growing.add_adapter("late", random_adapter(growing.config, rank=9, seed=5))
    with recorded_compiles() as compiles:
        generate(batch, growing.mix([{"late": 2.0, "a": 0.1}, {"late": -1.0}, {}]), seed=3)
    assert compiles == []


def test_sampling_depends_on_the_seed_only(model: Model) -> None:
    generate = dm.make_generate(model, max_new_tokens=NUM_NEW, temperature=3.0)
    batch, mix = pad_batch(PROMPTS), model.mix(MIXES)
    first = np.asarray(generate(batch, mix, seed=1).tokens)
    np.testing.assert_array_equal(np.asarray(generate(batch, mix, seed=1).tokens), first)
    for seed in (2, -1, 2**63):
        assert (np.asarray(generate(batch, mix, seed=seed).tokens) != first).any()


def test_row_i_draws_its_tokens_one_by_one_from_seed_plus_i(model: Model) -> None:
    generate = dm.make_generate(model, max_new_tokens=NUM_NEW, temperature=3.0, ignore_eos=True)
    tokens = np.asarray(generate(pad_batch(PROMPTS), model.mix(MIXES), seed=1).tokens)
    width, params = 16, uniform_sampling(NUM_NEW, temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    draw = jax.jit(pick_tokens)
    for row, (prompt, mix) in enumerate(zip(PROMPTS, MIXES, strict=True)):
        sequence = [*prompt, *tokens[row].tolist()]
        batch = dm.Batch(jnp.asarray([sequence + [0] * (width - len(sequence))]), jnp.asarray([len(sequence)]))
        logits = model.logits(batch, model.mix([mix]))[0, len(prompt) - 1 : len(sequence) - 1]
        seeds = jnp.full((NUM_NEW,), 1 + row, jnp.uint32)
        drawn = draw(logits, dataclasses.replace(params, seeds=seeds), jnp.arange(NUM_NEW, dtype=jnp.int32))
        assert np.asarray(drawn).tolist() == tokens[row].tolist()


def test_generate_can_be_called_under_jit_whatever_is_traced(model: Model) -> None:
    generate = dm.make_generate(model, max_new_tokens=NUM_NEW)
    batch = dm.Batch(tokens=jnp.asarray([[5, 9, 2, 40]], jnp.int32), lengths=jnp.asarray([4], jnp.int32))
    mix = model.mix([{"a": 1.0}])
    wanted = greedy_by_logits(model, [5, 9, 2, 40], {"a": 1.0}, NUM_NEW, width=16)
    under_jit = jax.jit(lambda b, m: generate(b, m).tokens)(batch, mix)
    assert np.asarray(under_jit)[0].tolist() == wanted
    shape = jax.eval_shape(lambda t: generate(dm.Batch(tokens=t, lengths=batch.lengths), mix).tokens, batch.tokens)
    assert shape.shape == (1, NUM_NEW)


def test_adding_an_adapter_after_a_jit_of_the_users_own_warns(growing: Model) -> None:
    generate = dm.make_generate(growing, max_new_tokens=NUM_NEW)
    jax.eval_shape(generate, pad_batch(PROMPTS), growing.mix([{}] * 3))
    gated = random_gated_set(growing.config, "g", ["a"], granularity="layer", top_k=None, renormalize=False, seed=0)
    with pytest.warns(UserWarning, match="compiled before adapter 'late' was added and will not see it"):
        growing.add_adapter("late", random_adapter(growing.config, rank=2, seed=5))
    with pytest.warns(UserWarning, match="before gated set 'g' was added"):
        growing.add_gated_sets([gated])


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("max_new_tokens", (0, -1, 2.5), "an integer >= 1"),
        ("temperature", (-0.1, float("nan"), float("inf")), "a finite number >= 0"),
        ("top_k", (-1, 0.5), "an integer >= 0"),
        ("top_p", (0.0, 1.5, float("nan")), r"a number in \(0, 1\]"),
        ("min_p", (-0.1, 1.5, float("nan")), r"a number in \[0, 1\]"),
    ],
)
def test_numbers_out_of_range_are_refused(model: Model, unchecked_annotations: None, field, values, expected) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{field} is {value}; expected {expected}"):
            dm.make_generate(model, **({"max_new_tokens": 4} | {field: value}))


# What is given


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([{"nope": 1.0}], ValueError, r"mix 0 names adapter 'nope'; the loaded adapters are: a, b"),
        ([{}, {"a": "1"}], TypeError, r"weight of adapter 'a' is '1'; expected a number"),
        ([{"a": True}], TypeError, r"weight of adapter 'a' is True; expected a number"),
        ([{"a": float("nan")}], ValueError, r"weight of adapter 'a' is nan; expected a finite number"),
        ([{"a": 1e39}], ValueError, r"weight of adapter 'a' is 1e\+39; expected a finite number of float32"),
        (["set"], ValueError, r"no gated set is named 'set'; the loaded ones are: none"),
        ([None], TypeError, r"mix 0 is None; expected \{adapter: weight\} or the name of a gated set"),
        ({"a": 1.0}, TypeError, r"got one mix, \{'a': 1.0\}; expected .* such as \[\{'a': 1.0\}\]"),
        ("set", TypeError, r"got one mix, 'set'; expected"),
    ],
)
def test_bad_mixes_are_refused(model: Model, unchecked_annotations: None, rows, error, message) -> None:
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


@pytest.mark.parametrize(
    ("tokens", "lengths", "error", "message"),
    [
        ([[1, 2]], [2], TypeError, "batch.tokens is list; expected an int32 array"),
        (np.ones((1, 2)), np.ones((1,), int), TypeError, r"batch.tokens is float64\(1, 2\); expected an int32"),
        (np.ones((2,), int), np.ones((1,), int), ValueError, r"batch.tokens has shape \(2,\); expected \[num_seqs, pr"),
        (np.ones((0, 2), int), np.ones((0,), int), ValueError, r"batch.tokens has shape \(0, 2\)"),
        (np.ones((1, 2), int), np.ones((2,), int), ValueError, r"batch.lengths has shape \(2,\); batch.tokens has 1"),
        (np.ones((1, 2), int), np.asarray([3]), ValueError, "prompt lengths are 3 to 3; expected 1 to 2"),
        (np.ones((1, 2), int), np.asarray([0]), ValueError, "prompt lengths are 0 to 0; expected 1 to 2"),
    ],
)
def test_a_bad_batch_is_refused(model: Model, unchecked_annotations: None, tokens, lengths, error, message) -> None:
    with pytest.raises(error, match=message):
        model.logits(dm.Batch(tokens=tokens, lengths=lengths), model.mix([{}]))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch needs at least one prompt"):
        pad_batch([])
    with pytest.raises(ValueError, match="every prompt needs at least one token"):
        pad_batch([[1], []])


def test_a_name_is_given_once(model: Model) -> None:
    with pytest.raises(ValueError, match="the name 'a' is taken already"):
        model.add_adapter("a", random_adapter(model.config, rank=1, seed=0))


def test_a_gated_set_with_a_name_that_is_taken_or_without_its_experts_changes_nothing(growing: Model) -> None:
    def gated(name: str, *experts: str):
        return random_gated_set(
            growing.config, name, experts, granularity="layer", top_k=None, renormalize=False, seed=0
        )

    with pytest.raises(ValueError, match="2 gated sets are named 'g'"):
        growing.add_gated_sets([gated("g", "a"), gated("g", "a")])
    with pytest.raises(ValueError, match="the name 'a' is taken already"):
        growing.add_gated_sets([gated("a", "a")])
    with pytest.raises(ValueError, match="gated set 'h' needs adapters that are not loaded: x, y"):
        growing.add_gated_sets([gated("g", "a"), gated("h", "x", "a", "y")])
    assert growing.gated_set_names == ()
    assert growing.gates is None


def test_an_adapter_that_does_not_fit_names_both_numbers(model: Model) -> None:
    with pytest.raises(ValueError, match=r"rank 33 needs 9 slots of rank 4, but only \d of 8 are free"):
        model.add_adapter("big", random_adapter(model.config, rank=33, seed=0))


def test_unknown_names_of_the_package_are_listed() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'generat'; it has .*load"):
        _ = dm.generat  # type: ignore[attr-defined]


# load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, adapters a and b, and a gated set of a and of a folder of its own."""
    path, config = tmp_path_factory.mktemp("load"), named_config("tiny")
    write_tiny_llama(path / "tiny")
    for seed, name in enumerate(("adapters/a", "adapters/b", "expert")):
        write_adapter(path / name, config, rank=2 + seed, alpha=8, seed=seed)
    write_gated_set(path / "moe", config, ["a", "../expert"], top_k=1)
    return path


def load(folder: Path, **options) -> Model:
    return dm.load(folder / "tiny", progress=False, adapter_slots=4, **options)


def test_load_takes_adapters_from_relative_paths_once_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    loaded = load(Path(), adapters=["adapters", Path("adapters/a"), "other=adapters/b"], dtype="float32")
    assert loaded.adapter_names == ("a", "b", "other")
    assert load(Path()).adapter_names == ()


def test_load_adds_the_experts_of_a_gated_set_that_are_folders(folder: Path) -> None:
    loaded = load(folder, adapters=[folder / "adapters"], gated_sets=[folder / "moe"])
    assert loaded.adapter_names == ("a", "b", "expert")
    assert loaded.gated_set_names == ("moe",)
    assert loaded.gates is not None
    assert loaded.gates.expert_of_slot.tolist() == [[0, -1, 1, -1]]


def test_load_refuses_two_adapters_of_one_name_before_it_loads_a_model(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"two adapters are named 'a': .*adapters/a and .*expert"):
        dm.load(folder / "nowhere", adapters=[folder / "adapters", f"a={folder / 'expert'}"])


@pytest.mark.parametrize("option", ["adapters", "gated_sets"])
def test_load_wants_lists_of_paths(folder: Path, unchecked_annotations: None, option: str) -> None:
    with pytest.raises(TypeError, match=f"{option} is one path, '.*'; expected a list"):
        load(folder, **{option: str(folder / "adapters")})


def test_load_names_the_flag_that_gives_more_slots(folder: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"adapter 'a' of rank 2 needs 2 slots of rank 1, but only 1 of 1 are free; raise adapter_slots",
    ):
        dm.load(folder / "tiny", adapters=[f"a={folder / 'adapters/a'}"], slot_rank=1, adapter_slots=1, progress=False)


# Text


def test_texts_are_tokenized_with_and_without_the_chat_template(folder: Path) -> None:
    loaded = load(folder)
    batch = loaded.tokenize(["ab", "c"], chat=False)
    assert batch.lengths.tolist() == [2, 1]
    assert batch.tokens.dtype == jnp.int32
    chat = loaded.tokenize(["ab"])
    rendered = loaded.tokenizer.decode(chat.tokens[0].tolist())
    assert rendered.startswith("<|im_start|>user\nab<|im_end|>")
    assert "assistant" in rendered


def test_special_tokens_are_left_out_of_the_text(folder: Path) -> None:
    loaded = load(folder)
    ids = [*loaded.tokenizer.encode("ab"), loaded.tokenizer.convert_tokens_to_ids("<|im_end|>"), 5, 6]
    out = dm.GenerateOutput(tokens=jnp.asarray([ids, ids], jnp.int32), lengths=jnp.asarray([3, 1], jnp.int32))
    assert loaded.detokenize(out) == ["ab", "a"]


def test_a_model_without_a_chat_template_or_tokenizer_says_what_to_do(folder: Path, model: Model) -> None:
    loaded = load(folder)
    loaded.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template; .*chat=False"):
        loaded.tokenize(["a"])
    assert loaded.tokenize(["a"], chat=False).lengths.tolist() == [1]
    with pytest.raises(ValueError, match=r"this model has no tokenizer; make batches by Batch\(tokens=, lengths=\)"):
        model.tokenize(["a"])


def test_one_text_alone_is_refused(folder: Path, unchecked_annotations: None) -> None:
    with pytest.raises(TypeError, match="got one str; expected a sequence of texts"):
        load(folder).tokenize("a")
