"""Reads a Llama from a GGUF file: the demo model, and other byte-level BPE models without rope scaling.

llama.cpp stores the rows of q and k with the two halves of each head interleaved; here they are put back in Hugging
Face's order. Quantized weights are dequantized to float32, so float32 is such a file's own dtype.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpoints.errors import CheckpointError, refuse_if
from checkpoints.files import TensorInfo, layer_problems, tensor_problems
from checkpoints.loaded_model import LoadedModel, ModelDtype, model_dtype
from checkpoints.names import GGUF_NAMES, expected_tensors, param_sources
from checkpoints.params import load_params
from checkpoints.tokenizer import tokenizer_class
from dymerge_jax.config import LlamaConfig, RopeConfig

if TYPE_CHECKING:
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor
    from transformers import PreTrainedTokenizerFast

_CONFIG_FIELDS = {
    "llama.embedding_length": "hidden",
    "llama.feed_forward_length": "ffn",
    "llama.block_count": "num_layers",
    "llama.attention.head_count": "num_q_heads",
    "llama.context_length": "max_position",
}
_REQUIRED = (*_CONFIG_FIELDS, "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.tokens")
_PRE_TOKENIZERS = ("smollm", "gpt-2")
_SPECIAL_TOKEN_TYPES = (3, 4)  # control and user-defined, in gguf's TokenType


def load_gguf_llama(path: Path, *, name: str, dtype: ModelDtype | None, progress: bool) -> LoadedModel:
    """Loads a model and its tokenizer from one GGUF file.

    Args:
      path: the file.
      name: what users call the model.
      dtype: of the parameters; None is float32.
      progress: shows a progress bar.

    Returns:
      The model, parameters on the default device.

    Raises:
      CheckpointError: If the file is damaged or the model is not supported.
    """
    reader, metadata = _open(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _read_config(path, metadata, is_tied=GGUF_NAMES.lm_head not in tensors)
    header = {n: TensorInfo(tuple(int(d) for d in t.shape[::-1]), t.tensor_type.name) for n, t in tensors.items()}
    refuse_if(layer_problems(header, config.num_layers), str(path))
    refuse_if(tensor_problems(header, expected_tensors(param_sources(config, GGUF_NAMES))), str(path))
    tokenizer = _read_tokenizer(path, metadata)
    interleaved = _interleaved_heads(config)

    def read(tensor_name: str) -> np.ndarray:
        weight = _dequantized(path, tensors[tensor_name])
        heads = interleaved.get(tensor_name)
        return weight if heads is None else _halves_apart(weight, heads)

    chosen = model_dtype("float32", dtype)
    sources = param_sources(config, GGUF_NAMES)
    params = load_params(sources, read, dtype=chosen, progress=progress, title=f"loading {name}")
    return LoadedModel(config, params, tokenizer, name)


def _open(path: Path) -> "tuple[GGUFReader, dict[str, Any]]":
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        return reader, {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError, MemoryError) as error:
        raise CheckpointError(f"{path} is no whole GGUF file ({error}); copy or download it again") from error


def _read_config(path: Path, metadata: dict[str, Any], *, is_tied: bool) -> LlamaConfig:
    problems = []
    if metadata.get("general.architecture") != "llama":
        problems.append(f"general.architecture is {metadata.get('general.architecture')!r}; only 'llama' is supported")
    elif missing := [key for key in _REQUIRED if key not in metadata]:
        problems.append(f"missing metadata: {', '.join(missing)}")
    if metadata.get("llama.rope.scaling.type", "none") != "none" or "llama.rope.scaling.factor" in metadata:
        problems.append("rope scaling in a GGUF file is not supported; use the model's Hugging Face directory")
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        problems.append(f"tokenizer.ggml.model is {metadata.get('tokenizer.ggml.model')!r}; only 'gpt2' is supported")
    if metadata.get("tokenizer.ggml.pre") not in _PRE_TOKENIZERS:
        supported = ", ".join(_PRE_TOKENIZERS)
        problems.append(f"tokenizer.ggml.pre is {metadata.get('tokenizer.ggml.pre')!r}; supported are {supported}")
    refuse_if(problems, str(path))
    tokens = metadata["tokenizer.ggml.tokens"]
    heads = metadata["llama.attention.head_count"]
    values: dict[str, Any] = {ours: metadata[key] for key, ours in _CONFIG_FIELDS.items()}
    try:
        return LlamaConfig(
            **values,
            vocab=len(tokens),
            num_kv_heads=metadata.get("llama.attention.head_count_kv", heads),
            head_dim=metadata.get("llama.attention.key_length", values["hidden"] // heads),
            rms_norm_eps=_short(metadata["llama.attention.layer_norm_rms_epsilon"]),
            rope=RopeConfig(theta=_short(metadata.get("llama.rope.freq_base", 10_000.0))),
            tie_word_embeddings=is_tied,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_stop_ids(metadata),
        )
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} is refused:\n- {error}") from error


def _stop_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """End of a turn and end of a text: the file's eos is only one of them."""
    kinds = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot")]
    ids: set[int] = {metadata[kind] for kind in kinds if kind in metadata}
    tokens = metadata["tokenizer.ggml.tokens"]
    if "<|endoftext|>" in tokens:
        ids.add(tokens.index("<|endoftext|>"))
    return tuple(sorted(ids))


def _short(value: float) -> float:
    """The shortest decimal with the same float32: the file's 9.999999747378752e-06 was written as 1e-05."""
    return float(np.format_float_positional(np.float32(value), unique=True, trim="0"))


def _dequantized(path: Path, tensor: "ReaderTensor") -> np.ndarray:
    """float32, rows first. A copy, for unquantized data is otherwise a view of the mapped file."""
    from gguf import dequantize

    try:
        return np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
    except NotImplementedError as error:
        raise CheckpointError(f"{path}: {tensor.name} is {tensor.tensor_type.name}, which is not supported") from error


def _interleaved_heads(config: LlamaConfig) -> dict[str, int]:
    """Number of heads of every tensor whose rows are interleaved: q with its heads, k with the fewer KV heads."""
    heads = {"q_proj": config.num_q_heads, "k_proj": config.num_kv_heads}
    return {
        GGUF_NAMES.projections[projection].format(layer=layer): n
        for projection, n in heads.items()
        for layer in range(config.num_layers)
    }


def _halves_apart(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (2i, 2i + 1) of each head to (i, i + head_dim / 2)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _read_tokenizer(path: Path, metadata: dict[str, Any]) -> "PreTrainedTokenizerFast":
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    try:
        tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges, fuse_unk=False))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path} has no usable tokenizer: {error}") from error
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    if metadata["tokenizer.ggml.pre"] == "smollm":
        # Digits one by one, then GPT-2's regex: llama.cpp's rule, which transformers' own GGUF reader leaves out.
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=False) if kind in _SPECIAL_TOKEN_TYPES]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named = {
        ours: tokens[metadata[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if f"tokenizer.ggml.{theirs}_token_id" in metadata
    }
    return tokenizer_class()(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{f"{kind}_token": token for kind, token in named.items()},
    )
