"""A loaded model as an Orbax store: restarts fast, needs nothing of the source, can be restored in another dtype.

store/
  dymerge_store.json    marks the folder; version, name and dtype
  config.json           as Hugging Face writes it
  tokenizer files       as Hugging Face writes them
  params/               Orbax's own files
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from checkpoints.errors import CheckpointError, MissingFileError, refuse_if
from checkpoints.files import TensorInfo, read_json, tensor_problems
from checkpoints.hf_config import hf_config_json, read_hf_config
from checkpoints.loaded_model import LoadedModel, ModelDtype, model_dtype
from checkpoints.names import HF_NAMES, param_sources
from checkpoints.params import Params, set_param
from checkpoints.tokenizer import read_tokenizer
from checkpoints.writing import new_folder, write_json
from dymerge_jax.config import LlamaConfig

STORE_MARKER = "dymerge_store.json"
"""The file that makes a folder a store."""

_VERSION = 1
_PARAMS = "params"


def save_model(path: Path, model: LoadedModel) -> None:
    """Writes `model` as a store, wholly or not at all.

    Args:
      path: the store's folder; must not exist.
      model: what to write.

    Raises:
      CheckpointError: If `path` exists.
    """
    import orbax.checkpoint as ocp

    if path.exists():
        raise CheckpointError(f"{path} exists; an Orbax store is written to a new folder")
    with new_folder(path) as folder:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / _PARAMS, _with_layer_keys(model.params, str))
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder)
        write_json(folder / "config.json", hf_config_json(model.config, model.dtype))
        write_json(folder / STORE_MARKER, {"version": _VERSION, "name": model.name, "dtype": model.dtype})


def restore_model(path: Path, *, dtype: ModelDtype | None = None) -> LoadedModel:
    """Restores a store straight to the default device.

    Args:
      path: the store's folder.
      dtype: of the parameters; None takes the store's own.

    Returns:
      The model that was saved, cast to `dtype`.

    Raises:
      MissingFileError: If a file is missing.
      CheckpointError: If the store is damaged or from another version; the message lists every wrong tensor.
    """
    import orbax.checkpoint as ocp

    marker = read_json(path / STORE_MARKER)
    if marker.get("version") != _VERSION:
        raise CheckpointError(f"{path} is an Orbax store of version {marker.get('version')!r}; expected {_VERSION}")
    if not (path / _PARAMS).is_dir():
        raise MissingFileError(f"{path / _PARAMS} does not exist; convert the model again")
    config = read_hf_config(path).llama
    chosen = model_dtype(str(marker.get("dtype")), dtype)
    tokenizer = read_tokenizer(path, config.vocab)
    folder = (path / _PARAMS).resolve()  # Orbax takes absolute paths only
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.metadata(folder).item_metadata.tree
            refuse_if(tensor_problems(_stored(tree), _expected(config)), str(path))
            params = checkpointer.restore(folder, _with_layer_keys(abstract_params(config, chosen), str))
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files
        raise CheckpointError(f"{folder} cannot be restored; convert the model again ({error})") from error
    return LoadedModel(config, _with_layer_keys(params, int), tokenizer, str(marker.get("name")))


def abstract_params(config: LlamaConfig, dtype: DTypeLike) -> Params:
    """Shapes and dtype of all parameters, on the default device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params: Params = {}
    for source in param_sources(config, HF_NAMES):
        struct = jax.ShapeDtypeStruct(source.param_shape, jnp.dtype(dtype), sharding=sharding)
        set_param(params, source.path, struct)
    return params


def _stored(tree: Any) -> dict[str, TensorInfo]:
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda node: hasattr(node, "shape"))
    return {_dotted(path): TensorInfo(tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves}


def _expected(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    return {".".join(map(str, source.path)): source.param_shape for source in param_sources(config, HF_NAMES)}


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(key.key) for key in path)


def _with_layer_keys(params: Params, key_type: type[int] | type[str]) -> Params:
    """Orbax writes keys as strings; ours of the layers are integers."""
    return params | {"layers": {key_type(layer): weights for layer, weights in params["layers"].items()}}
