"""PEFT adapters: cases A, B and C of the trial list; what is accepted is exact, what is not is refused by name."""

import dataclasses
import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.errors import CheckpointError, MissingFileError
from checkpoints.peft_adapter import (
    adapter_sources,
    collect_adapters,
    inspect_adapter,
    load_adapter,
    load_again,
)
from dymerge_jax.config import PROJECTIONS, named_config
from dymerge_jax.lora import AdapterWeights, ProjectionWeights
from tests.support.tiny_checkpoints import (
    adapter_tensors,
    projection_path,
    write_adapter,
    write_json,
    write_tiny_llama,
)

TINY = named_config("tiny")
KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"

WriteAdapter = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteAdapter:
    """Writes an adapter of rank 4 and alpha 8, unless told otherwise."""

    def write_one(**kwargs: Any) -> Path:
        settings: dict[str, Any] = {"rank": 4, "alpha": 8, "seed": 1} | kwargs
        return write_adapter(tmp_path / "a", TINY, **settings)

    return write_one


def refusal(path: Path, **kwargs: Any) -> str:
    """The message with which an adapter is refused, by the header check alone as well as by the load."""
    with pytest.raises(CheckpointError) as inspected:
        inspect_adapter(path, TINY, **kwargs)
    with pytest.raises(CheckpointError) as loaded:
        load_adapter(path, TINY, **kwargs)
    assert str(inspected.value) == str(loaded.value)
    return str(loaded.value)


def delta(weights: ProjectionWeights) -> np.ndarray:
    """What the projection adds to the base matrix, [out_features, in_features]."""
    return weights.scale * (weights.b.astype(np.float32) @ weights.a.astype(np.float32))


# What is accepted.


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_seven_projections_are_read_as_stored(write: WriteAdapter, dtype: Any) -> None:
    adapter = load_adapter(write(dtype=dtype), TINY)
    tensors = adapter_tensors(TINY, rank=4, seed=1)
    assert list(adapter.projections) == sorted((layer, p) for layer in range(2) for p in PROJECTIONS)
    for (layer, projection), weights in adapter.projections.items():
        key = f"base_model.model.{projection_path(layer, projection)}"
        np.testing.assert_array_equal(weights.a, tensors[f"{key}.lora_A.weight"].astype(weights.a.dtype))
        np.testing.assert_array_equal(weights.b, tensors[f"{key}.lora_B.weight"].astype(weights.b.dtype))
        assert (str(weights.a.dtype), weights.scale) == (dtype, 2.0)


@pytest.mark.parametrize("prefix", ["base_model.model.", "", "base_model.model.-"])
@pytest.mark.parametrize("infix", ["", ".default", ".sql-v2"])
def test_every_key_prefix_and_infix_names_the_same_adapter(write: WriteAdapter, prefix: str, infix: str) -> None:
    path = write(prefix=prefix.rstrip("-"), infix=infix)
    if prefix.endswith("-"):  # an adapter of the bare LlamaModel: no ".model" after the prefix
        rename(path, lambda key: key.replace("base_model.model.model.", "base_model.model."))
    plain = load_adapter(write_adapter(path.parent / "plain", TINY, rank=4, alpha=8, seed=1), TINY)
    assert_same_weights(load_adapter(path, TINY), plain)


def test_files_that_have_not_changed_are_read_again_without_a_look_at_the_weights_and_others_are_refused(
    write: WriteAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(dtype="bfloat16")
    first = load_adapter(path, TINY)
    with monkeypatch.context() as patch:
        patch.setattr("checkpoints.peft_adapter._is_finite", lambda _: 1 / 0)
        again = load_again(path, TINY, first.content_hash)
    assert_same_weights(again, first)
    assert again.content_hash == first.content_hash
    write(dtype="bfloat16", alpha=9)
    with pytest.raises(CheckpointError, match=r"a has changed on disk since it was loaded; load it anew"):
        load_again(path, TINY, first.content_hash)
    (path / "adapter_config.json").unlink()
    with pytest.raises(MissingFileError, match=r"holds no adapter_config\.json"):
        load_again(path, TINY, first.content_hash)


def assert_same_weights(actual: AdapterWeights, expected: AdapterWeights) -> None:
    assert list(actual.projections) == list(expected.projections)
    for site, weights in expected.projections.items():
        np.testing.assert_array_equal(actual.projections[site].a, weights.a)
        np.testing.assert_array_equal(actual.projections[site].b, weights.b)
        assert actual.projections[site].scale == weights.scale


def rename(path: Path, new_key: Callable[[str], str]) -> None:
    file = path / "adapter_model.safetensors"
    save_file({new_key(key): tensor for key, tensor in load_file(file).items()}, file)


def test_a6_a_subset_of_projections_adapts_only_these(write: WriteAdapter) -> None:
    path = write(modules=["o_proj", "down_proj"])
    assert set(load_adapter(path, TINY).projections) == {(i, p) for i in range(2) for p in ("o_proj", "down_proj")}
    assert inspect_adapter(path, TINY).projections == ("o_proj", "down_proj")


@pytest.mark.parametrize("layers", [[1], [0, 1], 1])
def test_layers_to_transform_limits_the_layers(write: WriteAdapter, layers: Any) -> None:
    chosen = layers if isinstance(layers, list) else [layers]
    overrides = {"layers_to_transform": layers, "layers_pattern": "layers"}
    path = write(layers=chosen, config_overrides=overrides)
    assert {layer for layer, _ in load_adapter(path, TINY).projections} == set(chosen)


def test_a9_rank_and_alpha_come_from_the_adapter(write: WriteAdapter) -> None:
    assert load_adapter(write(alpha=64), TINY).projections[0, "q_proj"].scale == 16


def test_b1_rslora_divides_by_the_root_of_the_rank(write: WriteAdapter) -> None:
    assert load_adapter(write(rank=16, alpha=16, use_rslora=True), TINY).projections[0, "q_proj"].scale == 4


def test_b3_patterns_change_rank_and_scale_where_they_match(write: WriteAdapter) -> None:
    pattern = r".*\.layers\.1\..*q_proj"
    path = write(
        rank=8, alpha=16, rank_pattern={pattern: 32, "no_such_proj": 3}, alpha_pattern={pattern: 128, "x.y": 1}
    )
    projections = load_adapter(path, TINY).projections
    assert {site: (w.rank, w.scale) for site, w in projections.items() if w.rank != 8} == {(1, "q_proj"): (32, 4.0)}
    assert {w.scale for site, w in projections.items() if site != (1, "q_proj")} == {2.0}
    assert inspect_adapter(path, TINY).rank == 32


@pytest.mark.parametrize(
    ("pattern", "sites"),
    [
        ("q_proj", {(0, "q_proj"), (1, "q_proj")}),
        ("self_attn.q_proj", {(0, "q_proj"), (1, "q_proj")}),
        ("layers.0.self_attn.q_proj", {(0, "q_proj")}),
        ("^model.layers.0.self_attn.q_proj", {(0, "q_proj")}),
        (r"layers\.[01]\.mlp\.(up|gate)_proj", {(i, p) for i in (0, 1) for p in ("up_proj", "gate_proj")}),
        ("proj", set()),  # no whole name
        ("_proj", set()),
        ("q_proj.weight", set()),
    ],
)
def test_b3_a_pattern_matches_the_end_of_the_module_path(
    write: WriteAdapter, pattern: str, sites: set[tuple[int, str]]
) -> None:
    projections = load_adapter(write(alpha_pattern={pattern: 100}), TINY).projections
    assert {site for site, weights in projections.items() if weights.scale == 25} == sites


def test_b3_the_first_matching_pattern_counts(write: WriteAdapter) -> None:
    path = write(alpha_pattern={"q_proj": 4, "layers.0.self_attn.q_proj": 400})
    assert load_adapter(path, TINY).projections[0, "q_proj"].scale == 1


def test_b3_rslora_takes_the_rank_of_the_pattern(write: WriteAdapter) -> None:
    path = write(use_rslora=True, rank_pattern={"v_proj": 16})
    projections = load_adapter(path, TINY).projections
    assert (projections[0, "v_proj"].scale, projections[0, "k_proj"].scale) == (2.0, 4.0)


def test_b8_the_scale_is_alpha_over_rank(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, hidden=4, num_q_heads=1, num_kv_heads=1, head_dim=4, num_layers=1)
    key = KEY.replace("q_proj", "o_proj")
    ones = {key.format("A"): np.ones((8, 4), np.float32), key.format("B"): np.ones((4, 8), np.float32)}
    path = write_adapter(tmp_path, config, rank=8, alpha=16, seed=0, modules=["o_proj"], extra_tensors=ones)
    weights = load_adapter(path, config).projections[0, "o_proj"]
    np.testing.assert_array_equal(delta(weights) @ np.ones(4), np.full(4, 64.0))


@pytest.mark.parametrize(
    "target_modules",
    [r".*layers\.0.*(q|v)_proj", "all-linear", ["q_proj"], ["no_such"], None, {"q_proj": True}],
)
def test_a16_target_modules_is_informative_only(write: WriteAdapter, target_modules: object) -> None:
    path = write(config_overrides={"target_modules": target_modules, "exclude_modules": ["q_proj"]})
    assert len(load_adapter(path, TINY).projections) == 14


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_initialisations_that_keep_the_base_weights_are_accepted(write: WriteAdapter, init: object) -> None:
    fields = {
        "init_lora_weights": init,
        "eva_config": {"rho": 2.0},
        "loftq_config": {},
        "megatron_core": "megatron.core",
    }
    assert load_adapter(write(config_overrides=fields), TINY).rank == 4


def test_c2_a_tokenizer_in_the_folder_is_not_used_and_the_log_says_so(
    write: WriteAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    path = write()
    write_json(path / "tokenizer.json", {})
    assert inspect_adapter(path, TINY).has_tokenizer
    with caplog.at_level("INFO"):
        load_adapter(path, TINY)
    assert "brings a tokenizer; the base model's is used instead" in caplog.text


def test_inspecting_tells_rank_and_bytes_without_reading_tensors(write: WriteAdapter) -> None:
    path = write(dtype="float16", extra_tensors={KEY.format("A"): np.full((4, 64), np.nan, np.float16)})
    info = inspect_adapter(path, TINY)
    widths = sum(len(g.projections) * g.in_features + g.out_features for g in TINY.groups.values())
    assert (info.rank, info.num_bytes, info.has_tokenizer) == (4, 2 * 2 * 4 * widths, False)


def test_equal_files_hash_alike_and_any_change_tells(tmp_path: Path) -> None:
    def hash_of(name: str, **kwargs: Any) -> str:
        settings: dict[str, Any] = {"rank": 4, "alpha": 8, "seed": 1} | kwargs
        return load_adapter(write_adapter(tmp_path / name, TINY, **settings), TINY).content_hash

    assert hash_of("a") == hash_of("b")
    others = [hash_of("seed", seed=2), hash_of("alpha", alpha=9), hash_of("modules", modules=["q_proj"])]
    assert len({hash_of("a"), *others}) == 4


def test_each_file_is_opened_once(write: WriteAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case E3: the hash is of the bytes that are used."""
    path, opened, open_path = write(), [], Path.open

    def count(self: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(self.name)
        return open_path(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", count)
    load_adapter(path, TINY)
    assert sorted(opened) == ["adapter_config.json", "adapter_model.safetensors"]


# What is refused.


def test_a1_modules_to_save_is_refused_by_field_and_tensor(write: WriteAdapter) -> None:
    key = "base_model.model.lm_head.weight"
    path = write(
        config_overrides={"modules_to_save": ["lm_head"]}, extra_tensors={key: np.zeros((128, 64), np.float32)}
    )
    message = refusal(path)
    assert "modules_to_save is ['lm_head']" in message
    assert key in message


def test_a3_unknown_projections_are_listed_with_the_expected_ones(write: WriteAdapter) -> None:
    path = write()
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

    def new_key(key: str) -> str:
        for old, new in names.items():
            key = key.replace(old, new)
        return key

    rename(path, new_key)
    message = refusal(path)
    for name in names.values():
        assert f"base_model.model.model.layers.1.mlp.{name}.lora_B.weight" in message
    assert "mlp.{gate_proj, up_proj, down_proj}" in message


def test_a5_missing_files_are_named(tmp_path: Path, write: WriteAdapter) -> None:
    with pytest.raises(MissingFileError, match=r"nowhere' does not exist; expected a folder with adapter_config\.json"):
        load_adapter(tmp_path / "nowhere", TINY)
    path = write()
    with pytest.raises(MissingFileError, match=r"adapter_config\.json' is a file; expected a folder"):
        load_adapter(path / "adapter_config.json", TINY)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"/a' holds no adapter_model\.safetensors"):
        load_adapter(path, TINY)
    base = write_tiny_llama(tmp_path / "base")
    with pytest.raises(MissingFileError, match=r"holds no adapter_config\.json; it is a base model directory"):
        inspect_adapter(base, TINY)
    assert issubclass(MissingFileError, FileNotFoundError)


def test_a6_a_tensor_that_nothing_consumes_is_refused(write: WriteAdapter) -> None:
    junk = "base_model.model.model.layers.0.foo.lora_A.weight"
    assert junk in refusal(write(modules=["o_proj", "down_proj"], extra_tensors={junk: np.zeros((4, 64), np.float32)}))


def test_a12_a_rank_above_the_limit_names_both_and_the_flag(write: WriteAdapter) -> None:
    path = write(rank=32)
    assert "rank 32 is above the limit of 16; raise --adapter-slots or --slot-rank" in refusal(path, max_rank=16)
    assert load_adapter(path, TINY, max_rank=32).rank == 32
    path = write(rank_pattern={"layers.1.mlp.up_proj": 17})
    assert "rank 17 is above the limit of 16" in refusal(path, max_rank=16)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a14_saved_embeddings_of_another_size_are_refused_with_both_shapes(write: WriteAdapter, name: str) -> None:
    block = "model.embed_tokens" if name == "embed_tokens" else "lm_head"
    key = f"base_model.model.{block}.weight"
    message = refusal(write(extra_tensors={key: np.zeros((128 + 64, 64), np.float32)}))
    assert f"saved {name} of shape (192, 64) (the base model's is (128, 64))" in message
    assert key in message


def test_a15_saved_embeddings_are_refused_even_if_they_would_fit(write: WriteAdapter) -> None:
    key = "base_model.model.model.embed_tokens.weight"
    assert key in refusal(write(extra_tensors={key: np.zeros((128, 64), np.float32)}))


def test_c4_lora_on_embedding_or_head_is_refused(write: WriteAdapter) -> None:
    keys = [
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.embed_tokens.lora_embedding_B.default",
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.lora_B.default.weight",
    ]
    message = refusal(write(extra_tensors={key: np.zeros((4, 128), np.float32) for key in keys}))
    assert all(key in message for key in keys)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"), ("peft_type", None), ("use_dora", True), ("modules_to_save", ["norm"]),
        ("trainable_token_indices", [1]), ("bias", "all"), ("bias", "lora_only"), ("lora_bias", True),
        ("fan_in_fan_out", True), ("layer_replication", [[0, 2]]), ("use_qalora", True),
        ("alora_invocation_tokens", [5]), ("megatron_config", {"x": 1}), ("target_parameters", ["w"]),
        ("use_bdlora", {"nblocks": 2}), ("arrow_config", {"top_k": 3}), ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"x": 1}), ("velora_config", {"x": 1}),
        ("use_new_idea", True), ("new_idea_config", {"x": 1}),
        ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_4"), ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"), ("init_lora_weights", "loftq"), ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "brand_new"),
        ("r", None), ("r", 0), ("r", "8"), ("r", True), ("lora_alpha", None), ("lora_alpha", float("nan")),
        ("lora_alpha", 10**400),
        ("lora_alpha", "16"), ("use_rslora", "yes"), ("rank_pattern", [8]), ("rank_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": "x"}), ("alpha_pattern", {"q_proj(": 3}), ("layers_to_transform", "0"),
    ],
)  # fmt: skip
def test_an_unsupported_or_wrong_field_is_refused_by_name(write: WriteAdapter, field: str, value: object) -> None:
    assert f"- {field} " in refusal(write(config_overrides={field: value}))


def test_every_reason_is_named_in_one_message(write: WriteAdapter) -> None:
    path = write(
        config_overrides={"use_dora": True, "bias": "all", "modules_to_save": ["embed_tokens"]},
        extra_tensors={
            KEY.format("A"): np.zeros((64, 4), np.float32),
            "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": np.zeros(64, np.float32),
            "base_model.model.model.layers.0.self_attn.o_proj.lora_B.bias": np.zeros(64, np.float32),
            "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": np.zeros((4, 64), np.float32),
            "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight": np.zeros((4, 64), np.int8),
            "base_model.model.model.norm.weight": np.zeros(64, np.float32),
        },
        without_tensors=[KEY.format("B").replace("q_proj", "k_proj")],
    )
    message = refusal(path)
    for part in (
        "use_dora is True", "bias is 'all'", "modules_to_save is ['embed_tokens']", "lora_magnitude_vector",
        "self_attn.o_proj.lora_B.bias", "layers outside the model, which has 2", "layers.7.self_attn.q_proj",
        "dtype I8", "model.norm.weight", "k_proj.lora_A.weight has no lora_B",
        "model.layers.0.self_attn.q_proj has lora_A (64, 4) and lora_B (64, 4), expected (4, 64) and (64, 4)",
    ):  # fmt: skip
        assert part in message


def test_d8_swapped_a_and_b_are_refused_with_the_expected_shapes(write: WriteAdapter) -> None:
    path = write(modules=["k_proj"])
    rename(path, lambda key: key.replace("lora_A", "x").replace("lora_B", "lora_A").replace("x", "lora_B"))
    message = refusal(path)
    assert "has lora_A (32, 4) and lora_B (4, 64), expected (4, 64) and (32, 4)" in message


def test_a_rank_other_than_the_configs_is_refused_with_both(write: WriteAdapter) -> None:
    message = refusal(write(config_overrides={"r": 8}))
    assert "model.layers.0.self_attn.q_proj has rank 4 in its tensors but 8 by the config" in message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("side", ["A", "B"])
def test_d8_nan_and_infinite_weights_are_refused_by_name(
    write: WriteAdapter, value: float, dtype: Any, side: str
) -> None:
    tensor = np.zeros((4, 64) if side == "A" else (64, 4), dtype)
    tensor[-1, -1] = value
    path = write(extra_tensors={KEY.format(side): tensor})
    with pytest.raises(CheckpointError, match=rf"NaN or infinite weights: .*layers\.0\.self_attn\.q_proj\.lora_{side}"):
        load_adapter(path, TINY)


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, (2**60).to_bytes(8, "little") + b"{}", b"PK\x03\x04" * 9])
def test_d8_a_file_that_is_no_safetensors_file_is_refused(write: WriteAdapter, content: bytes) -> None:
    path = write()
    (path / "adapter_model.safetensors").write_bytes(content)
    assert "adapter_model.safetensors is no whole safetensors file" in refusal(path)


def test_d8_a_truncated_file_is_refused(write: WriteAdapter) -> None:
    file = write() / "adapter_model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert "may be truncated" in refusal(file.parent)


@pytest.mark.parametrize(
    "offsets", [[0, 9], [8, 16], [0, 2**70], [-8, 0], [0], "ab", [0, True]], ids=lambda offsets: str(offsets)
)
def test_d8_a_header_whose_tensors_do_not_cover_the_data_is_refused(write: WriteAdapter, offsets: object) -> None:
    path = write()
    header = json.dumps({KEY.format("A"): {"dtype": "F32", "shape": [2], "data_offsets": offsets}}).encode()
    (path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert "adapter_model.safetensors is no whole safetensors file" in refusal(path)


def test_a_pickle_is_refused_with_the_command_that_converts_it(write: WriteAdapter) -> None:
    path = write()
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    message = refusal(path)
    assert "as a pickle (adapter_model.bin)" in message
    assert "torch.load(" in message
    assert "save_file(" in message


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    large = dataclasses.replace(TINY, hidden=128, num_layers=3, head_dim=32)
    message = refusal(write_adapter(tmp_path, large, rank=4, alpha=8, seed=0))
    assert "layers outside the model, which has 2" in message
    assert "model.layers.1.self_attn.q_proj has lora_A (4, 128)" in message


def test_a_file_without_lora_tensors_is_refused(write: WriteAdapter) -> None:
    assert "no LoRA tensor for this model" in refusal(write(modules=[]))


def test_tensors_of_two_adapters_in_one_file_are_refused(write: WriteAdapter) -> None:
    other = adapter_tensors(TINY, rank=4, seed=2, modules=["q_proj"], layers=[0], infix=".other")
    message = refusal(write(infix=".default", extra_tensors=other))
    assert "several adapters in one file: default, other" in message
    assert "another key names already" in message


def test_layers_that_the_config_leaves_out_are_refused(write: WriteAdapter) -> None:
    message = refusal(write(config_overrides={"layers_to_transform": [1]}))
    assert "layers_to_transform [1] leaves out" in message
    assert KEY.format("A") in message


def test_a_damaged_config_is_refused(write: WriteAdapter) -> None:
    path = write()
    (path / "adapter_config.json").write_text("{'r': 8}")
    assert "adapter_config.json is not valid JSON" in refusal(path)


# Finding adapters by what a user types.


def test_an_adapter_is_named_by_its_folder_or_explicitly(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "sql", TINY, rank=2, alpha=2, seed=0)
    assert adapter_sources(str(path)) == [("sql", path)]
    assert adapter_sources(f"{path}/") == [("sql", path)]
    assert adapter_sources(f"my sql={path}") == [("my sql", path)]


def test_a_folder_of_adapters_gives_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [write_adapter(tmp_path / name, TINY, rank=2, alpha=2, seed=0) for name in ("b", "a")]
    (tmp_path / "notes").mkdir()
    with caplog.at_level("INFO"):
        assert adapter_sources(str(tmp_path)) == [("a", paths[1]), ("b", paths[0])]
    assert "no adapters, left out: notes" in caplog.text


@pytest.mark.parametrize("name", ["with space", "a,b", "a=b", "=", "ünï", "a:b", "-dash"])
def test_a8_any_folder_name_works_and_no_connection_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = write_adapter(tmp_path / name, TINY, rank=2, alpha=2, seed=0)

    def refuse(*args: object) -> None:
        raise AssertionError(f"connects to {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert adapter_sources(str(path)) == [(name, path)]
    assert adapter_sources(f"x={path}") == [("x", path)]
    assert load_adapter(path, TINY).rank == 2
    monkeypatch.chdir(tmp_path)
    assert adapter_sources(f"./{name}") == [(name, Path(name))]


@pytest.mark.parametrize("spec", ["/nope", "a=/nope", "org/some-lora"])
def test_a11_a_path_that_does_not_exist_is_an_error(spec: str) -> None:
    with pytest.raises(MissingFileError, match="does not exist; expected a folder or name=folder"):
        adapter_sources(spec)


@pytest.mark.parametrize("spec", ["=x", "x="])
def test_a_spec_without_name_or_folder_is_refused(spec: str) -> None:
    with pytest.raises(CheckpointError, match="neither an existing folder nor name=folder"):
        adapter_sources(spec)


def test_folders_without_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"holds no adapter_config\.json, neither itself nor in a folder"):
        adapter_sources(str(tmp_path))
    with pytest.raises(MissingFileError, match="it is a base model directory"):
        adapter_sources(str(write_tiny_llama(tmp_path / "base")))
    with pytest.raises(MissingFileError, match=r"config\.json is a file"):
        adapter_sources(str(tmp_path / "base" / "config.json"))


def test_the_scale_is_a_plain_float(write: WriteAdapter) -> None:
    path = write(rank=3, alpha=8)
    config = json.loads((path / "adapter_config.json").read_text())
    assert math.isclose(load_adapter(path, TINY).projections[0, "q_proj"].scale, config["lora_alpha"] / 3)


def test_adapters_of_all_sources_are_collected_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        write_adapter(tmp_path / "all" / name, TINY, rank=2, alpha=2, seed=0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "all" / "b")
    specs = ["all", Path("all/a"), f"b={tmp_path}/link", "twice=all/a"]
    assert collect_adapters(specs) == [
        ("a", Path("all/a")), ("b", Path("all/b")), ("twice", Path("all/a"))
    ]  # fmt: skip
    assert collect_adapters([]) == []


def test_two_folders_of_one_name_are_refused_with_both(tmp_path: Path) -> None:
    first, second = (write_adapter(tmp_path / x / "a", TINY, rank=2, alpha=2, seed=0) for x in "xy")
    with pytest.raises(CheckpointError, match=rf"two adapters are named 'a': {first} and {second}"):
        collect_adapters([first, second])
