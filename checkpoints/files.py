"""Reads JSON and safetensors files that nobody vouches for: every fault is a CheckpointError that names the file."""

import contextlib
import dataclasses
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy knows "bfloat16" from then on)
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.errors import CheckpointError, MissingFileError

FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The dtypes of weights that are read, by their name in a safetensors header."""

_MAX_JSON_BYTES = 256 << 20  # the largest index and tokenizer files are tens of megabytes


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor.

    Attributes:
      shape: its shape.
      dtype: its name in the file's own terms, such as "BF16" or "Q4_1".
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size in a safetensors file, in bytes."""
        return math.prod(self.shape) * np.dtype(FLOAT_DTYPES[self.dtype]).itemsize


class SafetensorsReader:
    """An open safetensors file: its header, and its tensors one at a time."""

    def __init__(self, path: Path, handle: Any) -> None:
        self._path = path
        self._handle = handle
        self.header = {name: _tensor_info(handle, name) for name in handle.keys()}  # noqa: SIM118

    def read(self, name: str) -> np.ndarray:
        """One tensor, copied to memory of its own."""
        with _naming_faults(self._path):
            return self._handle.get_tensor(name)


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[SafetensorsReader]:
    """Opens a safetensors file and checks its header: sizes, offsets and coverage; no tensor is read.

    Raises:
      MissingFileError: If there is no such file.
      CheckpointError: If it is no whole safetensors file.
    """
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist or is no file")
    with _naming_faults(path), safe_open(str(path), framework="np") as handle:
        yield SafetensorsReader(path, handle)


@contextlib.contextmanager
def _naming_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        message = f"{path} is no whole safetensors file ({error}); it may be truncated: copy or download it again"
        raise CheckpointError(message) from error


def _tensor_info(handle: Any, name: str) -> TensorInfo:
    tensor = handle.get_slice(name)
    return TensorInfo(tuple(tensor.get_shape()), tensor.get_dtype())


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
      MissingFileError: If there is no such file.
      CheckpointError: If it is too large, no UTF-8, no JSON or no object.
    """
    return parse_json(path, read_json_bytes(path))


def read_json_bytes(path: Path) -> bytes:
    """Reads a file that is to hold JSON, which `parse_json` makes of it.

    Raises:
      MissingFileError: If there is no such file.
      CheckpointError: If it is too large.
    """
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist or is no file")
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path} has {path.stat().st_size} bytes; a JSON file of at most {_MAX_JSON_BYTES} was expected"
        )
    return path.read_bytes()


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """The JSON object that the file at `path` holds.

    Raises:
      CheckpointError: If it is no UTF-8, no JSON or no object.
    """
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}; an object was expected")
    return content


def tensor_problems(found: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Compares headers with what a model needs: every missing, unexpected, misshaped and unreadable tensor."""
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing tensors: {', '.join(missing)}")
    if unexpected := [name for name in found if name not in expected]:
        problems.append(f"unexpected tensors, which nothing would use: {', '.join(unexpected)}")
    common = [(name, found[name], shape) for name, shape in expected.items() if name in found]
    if misshaped := [
        f"{name} has {info.shape}, expected {shape}" for name, info, shape in common if info.shape != shape
    ]:
        problems.append(f"wrong shapes: {'; '.join(misshaped)}")
    return problems


def layer_problems(found: Mapping[str, TensorInfo], num_layers: int) -> list[str]:
    """Compares the stated number of layers with the file, before anything is built for each of them."""
    if num_layers <= len(found):
        return []
    return [f"{num_layers} layers are stated but the file holds only {len(found)} tensors"]


def dtype_problems(found: Mapping[str, TensorInfo]) -> list[str]:
    """Every safetensors tensor whose dtype is not read."""
    wrong = [f"{name} is {info.dtype}" for name, info in found.items() if info.dtype not in FLOAT_DTYPES]
    return [f"unsupported dtypes (supported: {', '.join(FLOAT_DTYPES)}): {', '.join(wrong)}"] if wrong else []


def pickle_message(pickled: Path, target: Path) -> str:
    """Why weights that are "a pickle" are refused, and the command that makes a safetensors file of it elsewhere."""
    # Copies, since safetensors refuses tensors that share memory, as pickles may have them.
    script = (
        "import torch, safetensors.torch as s; "
        f'w = torch.load({json.dumps(str(pickled))}, "cpu", weights_only=True); '
        f"s.save_file({{k: v.clone().contiguous() for k, v in w.items()}}, {json.dumps(str(target))})"
    )
    return (
        f"({pickled.name}), which can run code when read; convert it where you trust it: "
        f"python -c {shlex.quote(script)}"
    )
