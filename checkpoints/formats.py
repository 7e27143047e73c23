"""The known model formats, how to tell them apart, and the one way in: `load_model`."""

import enum
from pathlib import Path

from checkpoints.errors import CheckpointError, MissingFileError
from checkpoints.gguf_llama import load_gguf_llama
from checkpoints.hf_llama import load_hf_llama
from checkpoints.loaded_model import LoadedModel, ModelDtype
from checkpoints.orbax_store import STORE_MARKER, restore_model
from dymerge_jax.demo import find_demo_gguf

DEMO = "demo"
"""The name that stands for the demo model; write "./demo" for a folder of that name."""


class ModelFormat(enum.Enum):
    """What a model path can be."""

    HF_LLAMA = "Hugging Face Llama directory"
    GGUF_LLAMA = "GGUF file"
    ORBAX = "Orbax store"


def detect_model_format(path: Path) -> ModelFormat:
    """Which format a path has.

    Raises:
      MissingFileError: If the path does not exist, or the folder lacks the files of every format.
      CheckpointError: If it is something else.
    """
    if not path.exists():
        raise MissingFileError(
            f"model path {str(path)!r} does not exist; expected 'demo', a Hugging Face Llama directory, a .gguf file "
            "or an Orbax store (nothing is downloaded by name)"
        )
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelFormat.GGUF_LLAMA
        raise CheckpointError(f"model path {str(path)!r} is a file; expected a .gguf file or a model directory")
    if (path / STORE_MARKER).is_file():
        return ModelFormat.ORBAX
    if (path / "config.json").is_file():
        return ModelFormat.HF_LLAMA
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"model path {str(path)!r} is a LoRA adapter; give its base model, and the adapter as one"
        )
    raise MissingFileError(
        f"model path {str(path)!r} holds no config.json (Hugging Face) and no {STORE_MARKER} (Orbax store)"
    )


def load_model(path: str | Path, *, dtype: ModelDtype | None = None, progress: bool = True) -> LoadedModel:
    """Loads a model from any known format.

    Args:
      path: a directory or file, or "demo".
      dtype: "bfloat16" or "float32"; None takes the checkpoint's own, where float16 becomes bfloat16 and quantized
        weights become float32.
      progress: shows a progress bar.

    Returns:
      The model, parameters on the default device.

    Raises:
      MissingFileError: If something is missing; for "demo" the message ends with the command that installs it.
      CheckpointError: If the model is not supported or damaged; the message lists every reason.
    """
    if path == DEMO:
        return _load_demo(dtype, progress)
    path = Path(path)
    match detect_model_format(path):
        case ModelFormat.HF_LLAMA:
            return load_hf_llama(path, dtype=dtype, progress=progress)
        case ModelFormat.GGUF_LLAMA:
            return load_gguf_llama(path, name=path.stem, dtype=dtype, progress=progress)
        case ModelFormat.ORBAX:
            return restore_model(path, dtype=dtype)


def _load_demo(dtype: ModelDtype | None, progress: bool) -> LoadedModel:
    try:
        path = find_demo_gguf()
    except FileNotFoundError as error:
        raise MissingFileError(str(error)) from error
    return load_gguf_llama(path, name=DEMO, dtype=dtype, progress=progress)
