"""Hugging Face Llama directories: every tensor lands in its place, or the load fails with every name."""

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.errors import CheckpointError, MissingFileError
from checkpoints.formats import load_model
from checkpoints.loaded_model import model_dtype
from dymerge_jax.config import named_config
from tests.support.tiny_checkpoints import tiny_llama_tensors, write_json, write_tiny_llama

TINY = named_config("tiny")


def expected_params(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The nested parameters of the tiny model, written out by hand."""

    def layer(i: int) -> dict[str, np.ndarray]:
        def fused(*names: str) -> np.ndarray:
            return np.concatenate([tensors[f"model.layers.{i}.{name}.weight"].T for name in names], axis=1)

        return {
            "input_norm": tensors[f"model.layers.{i}.input_layernorm.weight"],
            "qkv": fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": fused("self_attn.o_proj"),
            "post_attention_norm": tensors[f"model.layers.{i}.post_attention_layernorm.weight"],
            "gate_up": fused("mlp.gate_proj", "mlp.up_proj"),
            "down": fused("mlp.down_proj"),
        }

    params = {
        "embed": tensors["model.embed_tokens.weight"],
        "layers": {i: layer(i) for i in range(TINY.num_layers)},
        "final_norm": tensors["model.norm.weight"],
    }
    return params | ({"lm_head": tensors["lm_head.weight"].T} if "lm_head.weight" in tensors else {})


def assert_equal_trees(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_tensor_lands_in_its_place(tmp_path: Path, num_shards: int, is_tied: bool) -> None:
    config = dataclasses.replace(TINY, tie_word_embeddings=is_tied)
    loaded = load_model(write_tiny_llama(tmp_path / "base", config=config, num_shards=num_shards), progress=False)
    assert loaded.config == config
    assert (loaded.name, loaded.dtype) == ("base", "float32")
    assert_equal_trees(loaded.params, expected_params(tiny_llama_tensors(config)))


@pytest.mark.parametrize("vocab", [250, 257])
def test_c1_a_vocabulary_of_any_size_loads(tmp_path: Path, vocab: int) -> None:
    config = dataclasses.replace(TINY, vocab=vocab)
    loaded = load_model(write_tiny_llama(tmp_path, config=config), progress=False)
    assert loaded.params["embed"].shape == (vocab, 64)
    assert loaded.params["lm_head"].shape == (64, vocab)


@pytest.mark.parametrize(
    ("stored", "requested", "expected"),
    [
        ("float32", None, "float32"),
        ("bfloat16", None, "bfloat16"),
        ("float16", None, "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
        ("float16", "float32", "float32"),
    ],
)
def test_weights_take_the_requested_dtype_or_their_own(
    tmp_path: Path, stored: Any, requested: Any, expected: str
) -> None:
    loaded = load_model(write_tiny_llama(tmp_path, dtype=stored), dtype=requested, progress=False)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.params)} == {expected}
    weight = tiny_llama_tensors(TINY)["model.embed_tokens.weight"].astype(jnp.dtype(stored)).astype(expected)
    np.testing.assert_array_equal(loaded.params["embed"], weight)


def test_a_dtype_that_is_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="'float16'; a model is loaded as 'bfloat16' or 'float32'"):
        model_dtype("float32", "float16")


def test_every_missing_unexpected_and_misshaped_tensor_is_named_at_once(tmp_path: Path) -> None:
    write_tiny_llama(
        tmp_path,
        without_tensors=["model.norm.weight", "model.layers.1.mlp.up_proj.weight"],
        extra_tensors={
            "model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32),
            "score.weight": np.zeros((2, 64), np.float32),
            "model.layers.0.self_attn.k_proj.weight": np.zeros((64, 32), np.float32),
            "model.layers.0.self_attn.v_proj.weight": np.zeros((32, 64), np.int8),
        },
    )
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path, progress=False)
    for part in (
        "missing tensors: model.layers.1.mlp.up_proj.weight, model.norm.weight",
        "model.layers.0.self_attn.q_proj.bias, score.weight",
        "model.layers.0.self_attn.k_proj.weight has (64, 32), expected (32, 64)",
        "model.layers.0.self_attn.v_proj.weight is I8",
    ):
        assert part in str(error.value)


def test_stored_rotary_frequencies_are_the_one_tensor_that_may_be_left_over(tmp_path: Path) -> None:
    frequencies = np.ones(8, np.float32)
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    write_tiny_llama(tmp_path, extra_tensors=dict.fromkeys(names, frequencies))
    assert load_model(tmp_path, progress=False).config == TINY


def test_a_tied_model_may_repeat_its_embedding_as_lm_head(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    embed = tiny_llama_tensors(config)["model.embed_tokens.weight"]
    write_tiny_llama(tmp_path, config=config, extra_tensors={"lm_head.weight": embed})
    assert "lm_head" not in load_model(tmp_path, progress=False).params


def test_a_tied_model_with_another_lm_head_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    write_tiny_llama(tmp_path, config=config, extra_tensors={"lm_head.weight": np.ones((128, 64), np.float32)})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_model(tmp_path, progress=False)


def test_an_untied_model_without_lm_head_is_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, without_tensors=["lm_head.weight"])
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight"):
        load_model(tmp_path, progress=False)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_command_that_converts_them(tmp_path: Path, name: str) -> None:
    (write_tiny_llama(tmp_path) / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"(?s)pickles only .*python -c .*save_pretrained"):
        load_model(tmp_path, progress=False)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    (write_tiny_llama(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(tmp_path, progress=False)


def test_an_index_wins_over_a_single_file_as_in_transformers(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, seed=1)
    write_tiny_llama(tmp_path, seed=2, num_shards=2)
    embed = load_model(tmp_path, progress=False).params["embed"]
    np.testing.assert_array_equal(embed, tiny_llama_tensors(TINY, seed=2)["model.embed_tokens.weight"])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (write_tiny_llama(tmp_path, num_shards=3) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"do not exist: model-00002-of-00003\.safetensors"):
        load_model(tmp_path, progress=False)


def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "base", num_shards=2) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../outside.safetensors"
    write_json(path, index)
    with pytest.raises(CheckpointError, match=r"'\.\./outside\.safetensors' is no plain file name"):
        load_model(tmp_path / "base", progress=False)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, num_shards=2)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(
        (tmp_path / "model-00002-of-00002.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match="in more than one file: "):
        load_model(tmp_path, progress=False)


@pytest.mark.parametrize("damage", ["empty", "cut", "huge header", "no json", "offsets"])
def test_d8_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = write_tiny_llama(tmp_path) / "model.safetensors"
    damage_safetensors(path, damage)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no whole safetensors file"):
        load_model(tmp_path, progress=False)


def damage_safetensors(path: Path, damage: str) -> None:
    content = path.read_bytes()
    header_len = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_len])
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(content[:-100])
    elif damage == "huge header":
        path.write_bytes((2**60).to_bytes(8, "little") + content[8:])
    elif damage == "no json":
        path.write_bytes(content[:8] + b"\xff" * header_len + content[8 + header_len :])
    elif damage == "offsets":
        last = max((name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"])
        header[last]["data_offsets"][1] += 2**50
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + header_len :])
    else:
        raise ValueError(damage)


def test_an_absurd_number_of_layers_is_refused_at_once(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, config_overrides={"num_hidden_layers": 10**12})
    with pytest.raises(CheckpointError, match="1000000000000 layers are stated but the file holds only 21 tensors"):
        load_model(tmp_path, progress=False)


@pytest.mark.parametrize("name", ["with space", "a,b", "a=b", "ünï", "-dash"])
def test_a8_any_folder_name_works_and_no_connection_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_tiny_llama(tmp_path / name)

    def refuse(*args: object) -> None:
        raise AssertionError(f"connects to {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for path in (tmp_path / name, str(tmp_path / name)):
        loaded = load_model(path, progress=False)
        assert loaded.name == name
        assert loaded.tokenizer is not None


def test_a8_a_hub_name_is_not_downloaded() -> None:
    with pytest.raises(MissingFileError, match=r"'meta-llama/Llama-3\.1-8B' does not exist.*nothing is downloaded"):
        load_model("meta-llama/Llama-3.1-8B")


def test_paths_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"holds no config\.json"):
        load_model(tmp_path)
    base = write_tiny_llama(tmp_path / "base")
    with pytest.raises(CheckpointError, match="is a file; expected"):
        load_model(base / "model.safetensors")
    (base / "config.json").rename(base / "adapter_config.json")
    with pytest.raises(CheckpointError, match="is a LoRA adapter"):
        load_model(base)


def test_the_tokenizer_comes_with_its_chat_template(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, vocab=512)
    tokenizer = load_model(write_tiny_llama(tmp_path, config=config), progress=False).tokenizer
    assert tokenizer is not None
    text = "Hi é 日本 12\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_model_without_tokenizer_loads(tmp_path: Path) -> None:
    assert load_model(write_tiny_llama(tmp_path, tokenizer=False), progress=False).tokenizer is None


def test_code_in_a_tokenizer_folder_is_never_run(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path) / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {
        "tokenizer_class": "EvilTokenizer",
        "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]},
    }
    write_json(path, settings)
    (tmp_path / "evil.py").write_text("raise SystemExit('ran foreign code')\n")
    assert load_model(tmp_path, progress=False).tokenizer is not None


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (write_tiny_llama(tmp_path) / "tokenizer.json").write_text('{"model": {"type": "Evil"}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load_model(tmp_path, progress=False)


def test_a_sentencepiece_only_tokenizer_is_refused_with_the_command(tmp_path: Path) -> None:
    (write_tiny_llama(tmp_path) / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"(?s)no tokenizer\.json.*python -c"):
        load_model(tmp_path, progress=False)


def test_a_tokenizer_larger_than_the_model_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_llama(tmp_path)
    (write_tiny_llama(tmp_path / "large", config=dataclasses.replace(TINY, vocab=300)) / "tokenizer.json").replace(
        tmp_path / "tokenizer.json"
    )
    load_model(tmp_path, progress=False)
    assert "the tokenizer has 300 ids but the model 128" in caplog.text


def test_the_progress_bar_counts_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model(write_tiny_llama(tmp_path / "base"), progress=True)
    assert "loading base: 100%" in capsys.readouterr().err
