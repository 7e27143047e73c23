"""Reads a Hugging Face Llama directory: config.json, one or many safetensors files, a tokenizer."""

import contextlib
import re
from pathlib import Path

import numpy as np

from checkpoints.errors import CheckpointError, MissingFileError, refuse_if
from checkpoints.files import (
    FLOAT_DTYPES,
    SafetensorsReader,
    TensorInfo,
    dtype_problems,
    layer_problems,
    open_safetensors,
    read_json,
    tensor_problems,
)
from checkpoints.hf_config import read_hf_config
from checkpoints.loaded_model import LoadedModel, ModelDtype, model_dtype
from checkpoints.names import HF_NAMES, expected_tensors, param_sources
from checkpoints.params import load_params
from checkpoints.tokenizer import read_tokenizer
from dymerge_jax.config import LlamaConfig

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

# Old conversions stored the rotary frequencies, which follow from the config. The only tensors that nothing consumes.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def load_hf_llama(folder: Path, *, dtype: ModelDtype | None, progress: bool) -> LoadedModel:
    """Loads a model; every header is checked before any weight is read, every tensor is consumed or refused.

    Args:
      folder: the directory.
      dtype: of the parameters; None takes the checkpoint's own, see `model_dtype`.
      progress: shows a progress bar.

    Returns:
      The model, parameters on the default device.

    Raises:
      MissingFileError: If a file is missing.
      CheckpointError: If the model is not supported or its files are damaged.
    """
    config = read_hf_config(folder)
    name = folder.resolve().name
    with contextlib.ExitStack() as stack:
        readers = {path: stack.enter_context(open_safetensors(path)) for path in _weight_files(folder)}
        owner = _owners(folder, readers)
        header = {tensor: reader.header[tensor] for tensor, reader in owner.items()}
        _check_header(folder, config.llama, header)
        if config.llama.tie_word_embeddings and HF_NAMES.lm_head in owner:
            _check_tied_head(folder, owner[HF_NAMES.embed], owner[HF_NAMES.lm_head])
        tokenizer = read_tokenizer(folder, config.llama.vocab)
        own_dtype = config.dtype or FLOAT_DTYPES[header[HF_NAMES.embed].dtype]
        chosen = model_dtype(own_dtype, dtype)
        params = load_params(
            param_sources(config.llama, HF_NAMES),
            lambda tensor: owner[tensor].read(tensor),
            dtype=chosen, progress=progress, title=f"loading {name}",
        )  # fmt: skip
    return LoadedModel(config.llama, params, tokenizer, name)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model; an index wins over a single file, as in transformers."""
    if (folder / _INDEX).is_file():
        return [folder / name for name in sorted(set(_weight_map(folder).values()))]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights as pickles only ({', '.join(pickles)}), which can run code when read; convert "
            f'them where you trust them: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    raise MissingFileError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name, by the index; files outside the folder are refused."""
    path = folder / _INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map from tensor names to file names")
    files = sorted(set(weight_map.values()))
    refuse_if([f"{name!r} is no plain file name" for name in files if Path(name).name != name], str(path))
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise MissingFileError(f"{path} names files that do not exist: {', '.join(missing)}")
    return weight_map


def _owners(folder: Path, readers: dict[Path, SafetensorsReader]) -> dict[str, SafetensorsReader]:
    """Which open file holds each tensor."""
    owner: dict[str, SafetensorsReader] = {}
    twice = []
    for reader in readers.values():
        twice += [name for name in reader.header if name in owner]
        owner |= dict.fromkeys(reader.header, reader)
    refuse_if([f"in more than one file: {', '.join(twice)}"] if twice else [], str(folder))
    return owner


def _check_header(folder: Path, config: LlamaConfig, header: dict[str, TensorInfo]) -> None:
    refuse_if(layer_problems(header, config.num_layers), str(folder))
    expected = expected_tensors(param_sources(config, HF_NAMES))
    if config.tie_word_embeddings and HF_NAMES.lm_head in header:
        expected |= {HF_NAMES.lm_head: (config.vocab, config.hidden)}
    relevant = {name: info for name, info in header.items() if not _DERIVED.fullmatch(name)}
    refuse_if([*tensor_problems(relevant, expected), *dtype_problems(relevant)], str(folder))


def _check_tied_head(folder: Path, embed: SafetensorsReader, head: SafetensorsReader) -> None:
    """A tied model may carry its output matrix again, but no other one: it would be ignored silently."""
    if not np.array_equal(embed.read(HF_NAMES.embed), head.read(HF_NAMES.lm_head)):
        raise CheckpointError(
            f"{folder} says tie_word_embeddings but its {HF_NAMES.lm_head} differs from {HF_NAMES.embed}; "
            'if the model is not tied, set "tie_word_embeddings": false in config.json'
        )
