"""GGUF files: the same parameters as the Hugging Face directory that they were made from."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize

from checkpoints.errors import CheckpointError
from checkpoints.formats import load_model
from checkpoints.names import GGUF_NAMES, HF_NAMES
from dymerge_jax.config import PROJECTIONS, LlamaConfig, named_config
from tests.support.tiny_checkpoints import tiny_llama_tensors, write_tiny_llama

TINY = named_config("tiny")
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(33 + i) for i in range(90)), "Ġ", "Ċ", "ab"]
TOKENS += [f"x{i}" for i in range(TINY.vocab - len(TOKENS))]


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row order of q and k in GGUF: row i of a head's first half goes to 2i, of its second half to 2i + 1."""
    head_dim = weight.shape[0] // num_heads
    out = np.empty_like(weight)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = weight[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = weight[head * head_dim + head_dim // 2 + i]
    return out


def gguf_tensors(config: LlamaConfig) -> dict[str, np.ndarray]:
    """The tiny model's tensors as GGUF names and orders them."""
    ours = tiny_llama_tensors(config)
    tensors = {GGUF_NAMES.embed: ours[HF_NAMES.embed], GGUF_NAMES.final_norm: ours[HF_NAMES.final_norm]}
    if not config.tie_word_embeddings:
        tensors[GGUF_NAMES.lm_head] = ours[HF_NAMES.lm_head]
    for layer in range(config.num_layers):
        names = [(GGUF_NAMES.projections[p], HF_NAMES.projections[p]) for p in PROJECTIONS]
        names += [(GGUF_NAMES.input_norm, HF_NAMES.input_norm)]
        names += [(GGUF_NAMES.post_attention_norm, HF_NAMES.post_attention_norm)]
        tensors |= {theirs.format(layer=layer): ours[hf.format(layer=layer)] for theirs, hf in names}
        for projection, heads in (("q_proj", config.num_q_heads), ("k_proj", config.num_kv_heads)):
            name = GGUF_NAMES.projections[projection].format(layer=layer)
            tensors[name] = interleaved(tensors[name], heads)
    return tensors


def write_gguf(
    path: Path,
    config: LlamaConfig = TINY,
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    quantized: GGMLQuantizationType | None = None,
    pre: str = "smollm",
    architecture: str = "llama",
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Writes a tiny Llama as GGUF; `quantized` is the format of the projections."""
    writer = GGUFWriter(path, architecture)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.ffn)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_q_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_context_length(config.max_position)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL if i < 3 else TokenType.NORMAL for i in range(len(TOKENS))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    for name, tensor in (gguf_tensors(config) if tensors is None else tensors).items():
        if quantized is not None and tensor.ndim == 2:
            writer.add_tensor(name, quantize(tensor, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_gives_the_parameters_of_the_directory_it_was_made_from(tmp_path: Path) -> None:
    expected = load_model(write_tiny_llama(tmp_path / "hf"), progress=False)
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf"), progress=False)
    assert (loaded.name, loaded.dtype) == ("tiny", "float32")
    assert loaded.config.rope == expected.config.rope
    assert (loaded.config.rms_norm_eps, loaded.config.eos_token_ids, loaded.config.bos_token_id) == (1e-5, (0, 2), 1)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(expected.params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)


@pytest.mark.parametrize("quantized", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.F16])
def test_quantized_weights_become_float32(tmp_path: Path, quantized: GGMLQuantizationType) -> None:
    expected = load_model(write_tiny_llama(tmp_path / "hf"), progress=False)
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", quantized=quantized), progress=False)
    assert loaded.dtype == "float32"
    steps = {GGMLQuantizationType.Q8_0: 127, GGMLQuantizationType.Q4_1: 8, GGMLQuantizationType.F16: 1000}
    down = expected.params["layers"][1]["down"]
    difference = np.abs(loaded.params["layers"][1]["down"] - down).max()
    assert 0 < difference <= np.abs(down).max() / steps[quantized]


def test_the_tokenizer_splits_digits_as_the_model_was_trained(tmp_path: Path) -> None:
    tokenizer = load_model(write_gguf(tmp_path / "tiny.gguf"), progress=False).tokenizer
    assert tokenizer is not None
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab  12<|im_end|>")["input_ids"]) == [
        "ab", "Ġ", "Ġ", "1", "2", "<|im_end|>"
    ]  # fmt: skip
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert rendered == "<|im_start|>ab<|im_end|>"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"architecture": "qwen2"}, "general.architecture is 'qwen2'; only 'llama' is supported"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'; supported are smollm, gpt-2"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling in a GGUF file is not supported"),
    ],
)
def test_another_architecture_is_refused(tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_model(write_gguf(tmp_path / "tiny.gguf", **kwargs), progress=False)
    assert message in str(error.value)


def test_every_wrong_tensor_is_named_at_once(tmp_path: Path) -> None:
    tensors = gguf_tensors(TINY)
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.0.attn_q.bias"] = np.zeros(64, np.float32)
    tensors["rope_freqs.weight"] = np.zeros(8, np.float32)
    tensors["blk.0.attn_k.weight"] = np.zeros((64, 64), np.float32)
    with pytest.raises(CheckpointError) as error:
        load_model(write_gguf(tmp_path / "tiny.gguf", tensors=tensors), progress=False)
    for part in (
        "missing tensors: blk.1.ffn_up.weight",
        "blk.0.attn_q.bias, rope_freqs.weight",
        "blk.0.attn_k.weight has (64, 64), expected (32, 64)",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("size", [0, 3, 30, 500, 5000, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    os.truncate(path, size if size >= 0 else path.stat().st_size - 64)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is no whole GGUF file"):
        load_model(path, progress=False)
