"""Merging adapters: the numbers of the fixture, what the files say, what is refused."""

import dataclasses
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import dymerge_jax as dm
from checkpoints.errors import CheckpointError
from checkpoints.files import read_json
from checkpoints.peft_adapter import load_adapter
from dymerge_jax.compose.__main__ import main
from dymerge_jax.compose.merge import MergedAdapter, merge_adapters
from dymerge_jax.compose.merge_maths import METHODS, MergeConfig, WeightedLora, merge_projection
from dymerge_jax.config import named_config
from dymerge_jax.library import pad_batch
from tests.support.tiny_checkpoints import projection_path, write_adapter, write_tiny_llama

TINY = named_config("tiny")
DENSITY: dict[str, Any] = {m: {"density": 0.5} for m in ("ties", "dare_linear", "dare_ties", "magnitude_prune")}


def config(method: Any, **settings: Any) -> MergeConfig:
    return MergeConfig(method, **{**DENSITY.get(method, {}), **settings})


def lora(a: Any, b: Any, factor: float, index: int = 0) -> WeightedLora:
    return WeightedLora(np.asarray(a, np.float32), np.asarray(b, np.float32), factor, index)


def product(config: MergeConfig, loras: list[WeightedLora], rank: int) -> np.ndarray:
    a, b = merge_projection(config, loras, rank=rank)
    assert (a.shape[0], b.shape[1]) == (rank, rank)
    return b @ a


# The maths: A = (1, 2), B = (1, 3), s = (2, 0.5), w = (0.5, 0.3), all of rank 1 and one number


@pytest.mark.parametrize(("method", "rank", "expected"), [("cat", 2, 1.9), ("svd", 1, 1.9), ("linear", 1, 3.83649)])
def test_the_scaling_and_the_weight_count_once(method: str, rank: int, expected: float) -> None:
    loras = [lora([[1]], [[1]], 0.5 * 2), lora([[2]], [[3]], 0.3 * 0.5)]
    assert product(config(method), loras, rank)[0, 0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("method", "rank", "expected"), [("cat", 2, [[0.5, 0], [0, 0.5]]), ("linear", 1, [[0.5, 0.5], [0.5, 0.5]])]
)
def test_linear_has_products_of_one_adapter_with_another(method: str, rank: int, expected: list[list[float]]) -> None:
    loras = [lora([[1, 0]], [[1], [0]], 0.5), lora([[0, 1]], [[0], [1]], 0.5)]
    np.testing.assert_allclose(product(config(method), loras, rank), expected, atol=1e-6)


def test_ties_elects_by_what_is_left_and_divides_by_the_number_of_votes() -> None:
    # Factors of 4 and 0.09 are 2 and 0.3 on either side; A and B are alike, so that both sides are checked.
    first, second = np.asarray([[3, -1, 0.5, -2]]), np.asarray([[1, 2, -0.6, -3]])
    a, b = merge_projection(config("ties"), [lora(first, first.T, 4), lora(second, second.T, 0.09)], rank=1)
    np.testing.assert_allclose(a, [[6, 0.6, 0, -2.45]], rtol=1e-6)
    np.testing.assert_allclose(b, a.T, rtol=1e-6)


def test_ties_by_frequency_elects_what_most_adapters_have() -> None:
    tensors = [[[5.0, 1.0]], [[-1.0, 1.0]], [[-2.0, 1.0]]]
    loras = [lora(t, np.transpose(t), 1.0) for t in tensors]
    by_sum, _ = merge_projection(config("ties", density=1), loras, rank=1)
    by_count, _ = merge_projection(config("ties", density=1, majority_sign="frequency"), loras, rank=1)
    np.testing.assert_allclose(by_sum, [[5, 1]])
    np.testing.assert_allclose(by_count, [[-1.5, 1]])


@pytest.mark.parametrize("method", METHODS)
def test_a_negative_weight_subtracts(method: str, rng: np.random.Generator) -> None:
    a, b = rng.normal(size=(2, 6)), rng.normal(size=(5, 2))
    added, taken = (product(config(method), [lora(a, b, f)], 2) for f in (0.7, -0.7))
    np.testing.assert_allclose(added, -taken, rtol=1e-5, atol=1e-6)
    assert np.abs(added).max() > 0.1


def test_magnitude_prune_keeps_the_largest_numbers_of_each_side_as_they_are(rng: np.random.Generator) -> None:
    tensor = rng.normal(size=(3, 10))
    a, _ = merge_projection(config("magnitude_prune", density=0.29), [lora(tensor, tensor.T, 1.0)], rank=3)
    assert np.count_nonzero(a) == int(0.29 * 30)
    assert np.abs(a[a != 0]).min() >= np.sort(np.abs(tensor).reshape(-1))[-8]
    np.testing.assert_array_equal(a[a != 0], tensor.astype(np.float32)[a != 0])


def test_dare_keeps_a_share_and_the_expectation_on_both_sides_apart() -> None:
    ones = np.ones((40, 500))
    a, b = merge_projection(config("dare_linear", density=0.3), [lora(ones, ones.T, 1.0)], rank=40)
    for side in (a, b):
        assert set(np.unique(side)) == {np.float32(0), np.float32(1) / np.float32(0.3)}
        # 20,000 draws: the share's standard deviation is 0.0033.
        assert side.astype(bool).mean() == pytest.approx(0.3, abs=0.015)
        assert side.mean() == pytest.approx(1, abs=0.05)
    assert (a.astype(bool) == b.T.astype(bool)).mean() == pytest.approx(0.3**2 + 0.7**2, abs=0.03)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_repeats_with_its_seed_and_draws_anew_for_every_adapter_place_and_seed(
    method: str, rng: np.random.Generator
) -> None:
    tensor = rng.normal(size=(4, 50))
    chosen = config(method)

    def kept(settings: MergeConfig, index: int, place: tuple[int, int]) -> np.ndarray:
        return merge_projection(settings, [lora(tensor, tensor.T, 1.0, index)], rank=4, place=place)[0] != 0

    first = kept(chosen, 0, (0, 0))
    np.testing.assert_array_equal(first, kept(chosen, 0, (0, 0)))
    others = [
        kept(dataclasses.replace(chosen, seed=1), 0, (0, 0)),
        kept(chosen, 1, (0, 0)),
        kept(chosen, 0, (1, 0)),
        kept(chosen, 0, (0, 1)),
    ]
    assert all((first != other).mean() > 0.3 for other in others)


def test_the_svd_is_that_of_the_full_matrix_for_adapters_wider_and_narrower_than_it(rng: np.random.Generator) -> None:
    for ranks in ((2, 3), (9, 8)):
        loras = [
            lora(rng.normal(size=(r, 7)), rng.normal(size=(12, r)), f) for r, f in zip(ranks, (0.5, -2), strict=True)
        ]
        full = sum(x.factor * x.b.astype(float) @ x.a.astype(float) for x in loras)
        u, values, v = np.linalg.svd(full)
        a, b = merge_projection(config("svd", rank=4), loras, rank=4)
        np.testing.assert_allclose(b @ a, (u[:, :4] * values[:4]) @ v[:4], atol=1e-4)
        np.testing.assert_allclose(a @ a.T, np.eye(4), atol=1e-5)  # A has singular vectors, B their values


@pytest.mark.parametrize("method", ["ties", "magnitude_prune"])
def test_a_density_that_keeps_nothing_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match=r"density 0\.01 keeps none of the 8 numbers"):
        merge_projection(config(method, density=0.01), [lora(np.ones((2, 4)), np.ones((9, 2)), 1.0)], rank=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "soup"}, "method is 'soup'; expected one of cat, linear"),
        ({"method": "cat", "rank": 4}, "rank 4 is given, but only svd"),
        ({"method": "svd", "rank": 0}, "rank is 0; expected at least 1"),
        ({"method": "ties"}, "ties needs a density"),
        ({"method": "cat", "density": 0.5}, r"density 0\.5 is given, but cat prunes nothing"),
        ({"method": "ties", "density": 0.0}, r"density is 0\.0; expected a number above 0 and at most 1"),
        ({"method": "dare_ties", "density": 1.5}, r"density is 1\.5"),
        ({"method": "dare_ties", "density": float("nan")}, "density is nan"),
        ({"method": "dare_linear", "density": 0.5, "majority_sign": "total"}, "dare_linear elects no sign"),
        ({"method": "ties", "density": 0.5, "majority_sign": "most"}, "majority_sign is 'most'; expected 'total'"),
        ({"method": "dare_ties", "density": 0.5, "seed": -1}, "seed is -1"),
    ],
)
def test_settings_that_do_not_fit_the_method_are_refused(
    settings: dict[str, Any], message: str, unchecked_annotations: None
) -> None:
    with pytest.raises(ValueError, match=message):
        MergeConfig(**settings)


# Files


def write(path: Path, name: str, **settings: Any) -> tuple[str, Path]:
    chosen: dict[str, Any] = {"rank": 4, "alpha": 8, "seed": sum(name.encode())} | settings
    return name, write_adapter(path / name, TINY, **chosen)


def merge(
    path: Path, adapters: list[tuple[str, Path]], weights: list[float], method: str, **settings: Any
) -> MergedAdapter:
    return merge_adapters(adapters, weights, path / "out", config(method, **settings), progress=False)


def delta(folder: Path, layer: int, projection: str) -> np.ndarray:
    """scale B A of one projection as the server would read it; zeros where it is not adapted."""
    weights = load_adapter(folder, TINY).projections.get((layer, projection))
    return np.zeros(()) if weights is None else weights.scale * weights.b.astype(float) @ weights.a.astype(float)


def test_cat_is_the_sum_for_every_kind_of_scaling_mixed_ranks_and_missing_layers(tmp_path: Path) -> None:
    adapters = [
        write(tmp_path, "a", use_rslora=True),
        write(tmp_path, "b", rank=3, layers=[1], alpha_pattern={"q_proj": 5}),
        write(tmp_path, "c", rank=2, modules=("q_proj", "down_proj"), rank_pattern={"down_proj": 5}, dtype="float16"),
    ]
    merged = merge(tmp_path, adapters, [0.5, -1.2, 0.7], "cat")
    for layer in range(2):
        for projection in ("q_proj", "up_proj", "down_proj"):
            parts = [w * delta(f, layer, projection) for (_, f), w in zip(adapters, [0.5, -1.2, 0.7], strict=True)]
            np.testing.assert_allclose(delta(merged.path, layer, projection), sum(parts), atol=1e-5)
    assert merged.rank == 4 + 3 + 5  # of down_proj in layer 1
    assert {w.scale for w in load_adapter(merged.path, TINY).projections.values()} == {1.0}


def test_only_what_some_adapter_has_is_in_the_result_and_its_names_say_so(tmp_path: Path) -> None:
    some = [
        write(tmp_path, "a", modules=("q_proj",), layers=[1]),
        write(tmp_path, "b", modules=("o_proj",), layers=[0]),
    ]
    merged = merge(tmp_path, some, [1, 1], "linear")
    expected = {(1, "q_proj"), (0, "o_proj")}
    assert load_adapter(merged.path, TINY).projections.keys() == expected
    targets = read_json(merged.path / "adapter_config.json")["target_modules"]
    assert set(targets) == {projection_path(*site) for site in expected}


def test_plain_names_are_targets_where_all_layers_have_them(tmp_path: Path) -> None:
    merged = merge(
        tmp_path, [write(tmp_path, "a", modules=("o_proj",)), write(tmp_path, "b", modules=("q_proj",))], [1, 1], "ties"
    )
    written = read_json(merged.path / "adapter_config.json")
    assert written["target_modules"] == ["q_proj", "o_proj"]
    assert written["base_model_name_or_path"] == "tiny"


def test_the_file_is_one_of_safetensors_and_remembers_the_recipe(tmp_path: Path) -> None:
    merged = merge(tmp_path, [write(tmp_path, "a"), write(tmp_path, "b")], [0.5, -2], "dare_ties", seed=3)
    content = (merged.path / "adapter_model.safetensors").read_bytes()
    header_len = int.from_bytes(content[:8], "little")
    assert header_len % 8 == 0
    metadata = json.loads(content[8 : 8 + header_len])["__metadata__"]
    recipe = {"method": "dare_ties", "density": 0.5, "seed": 3, "weights": {"a": 0.5, "b": -2}}
    assert (metadata["format"], json.loads(metadata["merged_from"])) == ("pt", recipe)
    assert len(load_file(merged.path / "adapter_model.safetensors")) == 2 * merged.num_projections == 28


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_stored_in_the_dtype_asked_for(dtype: Any, tmp_path: Path) -> None:
    adapters = [write(tmp_path, "a", dtype="bfloat16"), write(tmp_path, "b", dtype="float16")]
    out = tmp_path / "out"
    merge_adapters(adapters, [1, 0.3], out, config("cat"), dtype=dtype, progress=False)
    assert {w.a.dtype.name for w in load_adapter(out, TINY).projections.values()} == {dtype}
    expected = delta(adapters[0][1], 1, "up_proj") + 0.3 * delta(adapters[1][1], 1, "up_proj")
    np.testing.assert_allclose(delta(out, 1, "up_proj"), expected, atol=0.02)


@pytest.mark.parametrize("method", ["linear", "ties", "dare_linear", "dare_ties", "magnitude_prune"])
def test_different_ranks_are_refused_with_both_numbers_where_numbers_are_added(method: str, tmp_path: Path) -> None:
    adapters = [write(tmp_path, "a"), write(tmp_path, "b", rank_pattern={"layers.1.mlp.up_proj": 6})]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj: 'a' has rank 4, 'b' has rank 6") as refused:
        merge(tmp_path, adapters, [1, 1], method)
    assert str(refused.value).count("has rank 4") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_equal_rank_patterns_are_filled_up_to_one_rank(tmp_path: Path) -> None:
    adapters = [write(tmp_path, name, rank_pattern={"up_proj": 6}) for name in ("a", "b")]
    merged = merge(tmp_path, adapters, [1, 1], "linear")
    assert merged.rank == 6
    assert load_adapter(merged.path, TINY).projections[0, "q_proj"].a.shape == (6, 64)


def test_adapters_of_different_base_models_are_refused(tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "b", dataclasses.replace(TINY, hidden=32), rank=4, alpha=8, seed=1)
    with pytest.raises(CheckpointError, match=r"(?s)b' is refused.*q_proj has lora_A \(4, 32\).*expected \(4, 64\)"):
        merge(tmp_path, [write(tmp_path, "a"), ("b", other)], [1, 1], "cat")


def test_another_base_models_name_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = write(tmp_path, "b", config_overrides={"base_model_name_or_path": "other"})
    merge(tmp_path, [write(tmp_path, "a"), other], [1, 1], "cat")
    assert "'b' is of the base model 'other', but 'a' of 'tiny'" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config_overrides": {"use_dora": True}}, "use_dora is True"),
        ({"config_overrides": {"modules_to_save": ["lm_head"]}}, "modules_to_save"),
        ({"extra_tensors": {"base_model.model.model.embed_tokens.weight": np.ones((2, 2), np.float32)}}, "saved embed"),
        ({"without_tensors": [f"base_model.model.{projection_path(0, 'q_proj')}.lora_B.weight"]}, "has no lora_B"),
    ],
)
def test_what_the_loader_refuses_is_not_merged(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"(?s)b' is refused.*{message}"):
        merge(tmp_path, [write(tmp_path, "a"), write(tmp_path, "b", **settings)], [1, 1], "cat")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_nan_in_the_last_projection_leaves_nothing_behind(tmp_path: Path) -> None:
    key = f"base_model.model.{projection_path(1, 'down_proj')}.lora_A.weight"
    broken = write(tmp_path, "b", extra_tensors={key: np.full((4, 128), np.nan, np.float32)})
    with pytest.raises(CheckpointError, match=r"b' is refused:\n- NaN or infinite weights: .*down_proj.lora_A"):
        merge(tmp_path, [write(tmp_path, "a"), broken], [1, 1], "cat")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_weights_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lora_A.weight has weights up to .*, which float16 cannot hold"):
        merge_adapters([write(tmp_path, "a")], [1e6], tmp_path / "out", config("cat"), dtype="float16", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_rank_above_a_projections_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rank 33 is above what model\.layers\.0\.self_attn\.k_proj of 32 x 64 can"):
        merge(tmp_path, [write(tmp_path, "a")], [1], "svd", rank=33)


def test_memory_is_that_of_a_projection_not_of_the_adapters(tmp_path: Path) -> None:
    deep = dataclasses.replace(TINY, num_layers=40, hidden=256, ffn=512)
    adapters = [(n, write_adapter(tmp_path / n, deep, rank=16, alpha=8, seed=i)) for i, n in enumerate("ab")]
    tracemalloc.start()
    merged = merge(tmp_path, adapters, [1, 1], "cat")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert merged.num_bytes > 15e6
    assert peak < 2e6


@pytest.mark.slow
def test_an_adapter_merged_by_cat_or_a_large_svd_gives_the_logits_of_the_mix(tmp_path: Path) -> None:
    weights = {"a": 0.8, "b": -0.5}
    adapters = [write(tmp_path, "a"), write(tmp_path, "b", rank=3, use_rslora=True, modules=("q_proj", "up_proj"))]
    for name, chosen in (("cat", config("cat")), ("svd", config("svd", rank=7))):
        merge_adapters(adapters, list(weights.values()), tmp_path / name, chosen, progress=False)
    folders = [tmp_path / name for name in ("a", "b", "cat", "svd")]
    model = dm.load(write_tiny_llama(tmp_path / "base"), adapters=folders, progress=False)
    batch = pad_batch([[5, 9, 70, 33, 2, 61]] * 4)
    mix, cat, svd, base = np.asarray(model.logits(batch, model.mix([weights, {"cat": 1}, {"svd": 1}, {}])))
    np.testing.assert_allclose(cat, mix, atol=1e-3)
    np.testing.assert_allclose(svd, mix, atol=1e-3)
    assert np.abs(mix - base).max() > 0.5


# The command line


def run(*arguments: str) -> int:
    return main(["merge", "--quiet", *arguments])


def test_the_command_writes_an_adapter_that_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, a = write(tmp_path, "a")
    _, b = write(tmp_path, "b")
    out = tmp_path / "new" / "out"
    assert run("--method", "svd", "--adapters", str(a), f"x={b}", "--weights", "-0.5", "1", "--out", str(out)) == 0
    assert f"{out}: svd of 2 adapters, rank 4, 14 projections, float32" in capsys.readouterr().out
    assert load_adapter(out, TINY).rank == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "cat", "--weights", "1"], "2 adapters (a, b) but 1 weights; give one weight each"),
        (["--method", "cat", "--weights", "1", "nan"], "the weight of adapter 'b' is nan"),
        (["--method", "ties", "--weights", "1", "1"], "ties needs a density"),
        (["--method", "cat", "--weights", "1", "1", "--out", "{path}/a"], "a exists; give a folder"),
        (["--method", "cat", "--weights", "1", "1", "--adapters", "a=nowhere"], "nowhere does not exist"),
    ],
)
def test_the_command_tells_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(write(tmp_path, name)[1]) for name in ("a", "b")]
    given = [argument.format(path=tmp_path) for argument in arguments]
    assert run("--adapters", *folders, "--out", str(tmp_path / "out"), *given) == 1
    assert message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
