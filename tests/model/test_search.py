"""The search of mixes: what it finds, that it repeats, and that a batch of mixes gives what one at a time does."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dymerge_jax as dm
from dymerge_jax.compose.__main__ import main
from dymerge_jax.compose.batched_loss import BatchedCrossEntropy
from dymerge_jax.compose.examples import Example
from dymerge_jax.compose.search import SearchConfig, search_weights
from dymerge_jax.config import named_config
from dymerge_jax.library import Model, pad_batch
from serving.admin import read_mixes
from tests.support.tiny_checkpoints import write_adapter, write_tiny_llama
from tests.support.tiny_models import random_adapter, tiny_model

NAMES: tuple[str, ...] = ("a", "b", "c", "d")
PLANTED = np.asarray([0.9, -0.6, 0.0, 0.4])


def quadratic(mixes: np.ndarray) -> np.ndarray:
    return ((mixes - PLANTED) ** 2).sum(1)


# The search alone


def test_a_minimum_is_found_and_adapters_that_do_not_help_are_left_out() -> None:
    result = search_weights(NAMES, quadratic, SearchConfig(), progress=False)
    np.testing.assert_allclose(list(result.weights.values()), PLANTED, atol=0.05)
    assert result.weights["c"] == 0
    assert result.loss == pytest.approx(
        result.cross_entropy + 0.05 * np.mean(np.abs(list(result.weights.values()))), abs=1e-9
    )
    assert result.start == "a alone"
    assert result.start_loss == pytest.approx(quadratic(np.asarray([[1, 0, 0, 0]]))[0] + 0.05 / 4)
    assert list(result.losses) == sorted(result.losses, reverse=True)
    assert len(result.losses) == 15


def test_a_seed_repeats_the_search_and_numpys_global_state_is_left_alone() -> None:
    np.random.seed(5)
    first, second = (search_weights(NAMES, quadratic, SearchConfig(iterations=2), progress=False) for _ in range(2))
    assert first.weights == second.weights
    drawn = np.random.random()
    np.random.seed(5)
    assert drawn == np.random.random()
    other = search_weights(NAMES, quadratic, SearchConfig(iterations=2, seed=1), progress=False)
    assert other.weights != first.weights


def test_weights_stay_within_their_bounds() -> None:
    asked = []

    def to_infinity(mixes: np.ndarray) -> np.ndarray:
        asked.append(mixes)
        return -mixes[:, 0] + mixes[:, 1]

    result = search_weights(NAMES, to_infinity, SearchConfig(max_weight=0.8, l1=0), progress=False)
    assert np.abs(np.concatenate(asked)).max() <= 0.8
    assert (result.weights["a"], result.weights["b"]) == pytest.approx((0.8, -0.8), abs=0.02)


def test_a_strong_l1_leaves_the_base_model() -> None:
    result = search_weights(NAMES, quadratic, SearchConfig(l1=100), progress=False)
    assert set(result.weights.values()) == {0}


def test_mixes_whose_loss_is_no_number_are_bad_ones() -> None:
    def broken(mixes: np.ndarray) -> np.ndarray:
        return np.where(mixes[:, 0] > 0.5, np.nan, quadratic(mixes))

    result = search_weights(NAMES, broken, SearchConfig(), progress=False)
    assert result.weights["a"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"population": 2}, "population is 2; expected at least 3"),
        ({"iterations": 0}, "iterations is 0; expected at least 1"),
        ({"max_weight": 0.0}, r"max_weight is 0\.0; expected a finite number above 0"),
        ({"max_weight": float("nan")}, "max_weight is nan"),
        ({"l1": -0.1}, r"l1 is -0\.1; expected a finite number, 0 or more"),
        ({"seed": -1}, "seed is -1; expected 0 or more"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchConfig(**settings)


def test_one_adapter_is_no_mix() -> None:
    with pytest.raises(ValueError, match="a search needs two adapters or more, got 1: a"):
        search_weights(["a"], quadratic, SearchConfig(), progress=False)


# On a model


@pytest.fixture(scope="module")
def model() -> Model:
    """Four adapters of several ranks in a slot array of just their size."""
    result = Model(tiny_model(), None, adapter_slots=5, slot_rank=4)
    for i, (name, rank) in enumerate(zip(NAMES, (4, 2, 8, 3), strict=True)):
        result.add_adapter(name, random_adapter(result.config, rank=rank, seed=i))
    return result


@pytest.fixture(scope="module")
def examples(model: Model) -> list[Example]:
    """Prompts of several lengths, and what the planted mix answers."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, model.config.vocab, length).tolist() for length in (5, 9, 7, 12, 6, 8)]
    mix = model.mix([dict(zip(NAMES, PLANTED.tolist(), strict=True))] * len(prompts))
    out = dm.make_generate(model, max_new_tokens=12, ignore_eos=True)(pad_batch(prompts), mix)
    lengths = (12, 7, 9, 12, 3, 10)
    return [
        Example(tuple(prompt), tuple(np.asarray(row)[:n].tolist()))
        for prompt, row, n in zip(prompts, out.tokens, lengths, strict=True)
    ]


MIXES = np.asarray([PLANTED, [0, 0, 0, 0], [1, 0, 0, 0], [-0.3, 0.2, 1.5, 1], [0, 0, 0, 0.1]])


def by_hand(model: Model, examples: list[Example], mix: np.ndarray) -> float:
    """The mean cross entropy from all logits of each example alone."""
    losses = []
    for example in examples:
        tokens = [*example.prompt, *example.target]
        weights = dict(zip(NAMES, mix.tolist(), strict=True))
        logits = model.logits(pad_batch([tokens]), model.mix([weights]))
        logs = np.asarray(jax.nn.log_softmax(logits[0], axis=-1))
        losses += [-logs[i - 1, tokens[i]] for i in range(len(example.prompt), len(tokens))]
    return float(np.mean(losses))


@pytest.mark.slow
def test_the_loss_of_a_mix_is_the_mean_cross_entropy_of_the_targets(model: Model, examples: list[Example]) -> None:
    cross_entropy = BatchedCrossEntropy(model, examples, batch_mixes=5, max_tokens=10_000)
    expected = [by_hand(model, examples, mix) for mix in MIXES]
    np.testing.assert_allclose(cross_entropy(MIXES), expected, rtol=1e-4)


@pytest.mark.slow
def test_batches_of_any_size_give_the_same_and_only_one_shape(model: Model, examples: list[Example]) -> None:
    at_once = BatchedCrossEntropy(model, examples, batch_mixes=5, max_tokens=10_000)
    # 24 tokens a row: 7 rows a batch, so that mixes are cut in the middle and the last batch is filled up.
    cut = BatchedCrossEntropy(model, examples, batch_mixes=3, max_tokens=7 * 24)
    assert (at_once.num_rows, at_once.row_len, cut.num_rows) == (30, 24, 7)
    expected = at_once(MIXES)
    np.testing.assert_allclose(cut(MIXES), expected, rtol=1e-4)
    np.testing.assert_allclose(at_once(MIXES[3:4]), expected[3:4], rtol=1e-4)
    assert expected[0] < expected[1:].min()


@pytest.mark.slow
def test_one_mix_at_a_time_finds_the_same(model: Model, examples: list[Example]) -> None:
    config = SearchConfig(population=6, iterations=4)
    first, second = (
        search_weights(
            NAMES, BatchedCrossEntropy(model, examples, batch_mixes=n, max_tokens=10_000), config, progress=False
        )
        for n in (6, 1)
    )
    # Batches of another shape round the last bits of a loss otherwise.
    np.testing.assert_allclose(list(first.weights.values()), list(second.weights.values()), atol=1e-2)
    assert first.num_mixes == second.num_mixes


@pytest.mark.slow
def test_a_planted_mix_of_random_adapters_is_found(model: Model, examples: list[Example]) -> None:
    cross_entropy = BatchedCrossEntropy(model, examples, batch_mixes=24, max_tokens=16_384)
    result = search_weights(NAMES, cross_entropy, SearchConfig(l1=0.01), progress=False)
    planted = float(cross_entropy(PLANTED[None])[0])
    assert result.cross_entropy < planted + 0.02
    assert result.cross_entropy < min(result.simple_mixes.values()) - 1.5
    np.testing.assert_allclose(list(result.weights.values()), PLANTED, atol=0.05)


@pytest.mark.slow  # for its fixture
@pytest.mark.parametrize("settings", [{"batch_mixes": 0, "max_tokens": 9}, {"batch_mixes": 1, "max_tokens": 0}])
def test_a_batch_of_nothing_is_refused(model: Model, examples: list[Example], settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        BatchedCrossEntropy(model, examples, **settings)


# The command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, config = tmp_path_factory.mktemp("search"), dataclasses.replace(named_config("tiny"), vocab=300)
    write_tiny_llama(path / "model", config=config)
    for i, name in enumerate(("x", "y")):
        write_adapter(path / "adapters" / name, config, rank=4, alpha=4, seed=i)
    lines = [
        {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]},
        {"prompt": "cd", "completion": "dc"},
    ]
    (path / "examples.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def run(folder: Path, *arguments: str) -> int:
    given = ["--model", f"{folder}/model", "--adapters", f"{folder}/adapters", "--examples", f"{folder}/examples.jsonl"]
    return main(["search", *given, "--quiet", *arguments])


@pytest.mark.slow
def test_the_command_adds_a_mix_that_the_server_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = folder / "mixes.json", folder / "report.json"
    settings = ["--population", "4", "--iterations", "2", "--l1", "0.001"]
    assert run(folder, "--name", "first", "--out", str(out), "--report", str(report), *settings) == 0
    assert run(folder, "--name", "second", "--out", str(out), "--batch-mixes", "1", "--seed", "1", *settings) == 0
    mixes = read_mixes(out, ["x", "y"])
    assert mixes.keys() == {"first", "second"}
    content = json.loads(report.read_text())
    assert {name: w for name, w in content["weights"].items() if w} == mixes["first"]
    assert (content["batch_mixes"], content["batch_rows"], content["num_mixes"]) == (4, 8, 5 + 2 * 4 + 2 + 3)
    assert content["ms_per_mix"] > 0
    printed = capsys.readouterr().out
    assert "the mix that was found" in printed
    assert run(folder, "--name", "first", "--out", str(out)) == 1
    assert f"{out} holds a mix named 'first' already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "x"], "the name 'x' is that of an adapter"),
        (["--name", " "], "the mix's name is ' '"),
        (["--population", "1"], "population is 1"),
        (["--adapters", "nowhere"], "nowhere does not exist"),
        (["--out", "{folder}/examples.jsonl"], "examples.jsonl is not valid JSON"),
    ],
)
def test_the_command_tells_what_is_wrong_before_it_loads_the_model(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(folder=folder) for argument in arguments]
    assert run(folder, "--name", "mix", "--out", f"{folder}/new.json", "--model", "nowhere", *given) == 1
    assert message in capsys.readouterr().err
    assert not (folder / "new.json").exists()


@pytest.mark.parametrize("flag", ["--batch-mixes", "--batch-tokens", "--slot-rank"])
@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_sizes_below_1_are_refused(folder: Path, flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(folder, "--name", "mix", "--out", f"{folder}/new.json", f"{flag}={value}")
    assert f"argument {flag}: '{value}' is given; expected an integer of at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_no_mix_is_written_where_none_is_better_than_the_base_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--name", "mix", "--out", f"{folder}/new.json", "--report", f"{folder}/base.json"]
    assert run(folder, *given, "--population", "3", "--iterations", "1", "--l1", "1000") == 1
    assert "no mix is better than the base model alone on these examples" in capsys.readouterr().err
    assert not (folder / "new.json").exists()
    assert json.loads((folder / "base.json").read_text())["weights"] == {"x": 0.0, "y": 0.0}


@pytest.mark.slow
def test_examples_that_cannot_be_used_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    assert run(folder, "--name", "mix", "--out", f"{folder}/new.json", "--examples", f"{folder}/bad.jsonl") == 1
    assert "line 2: it has the fields 'prompt'; expected" in capsys.readouterr().err
    assert not (folder / "new.json").exists()
