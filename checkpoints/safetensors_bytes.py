"""Reads a safetensors file from its bytes: hashed and parsed from one read, tensors without a copy.

The `safetensors` package copies every tensor while it holds Python's interpreter lock, which an adapter that is loaded
beside a running engine must not do for long; and the content hash must be of the very bytes that are used.
"""

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.files import FLOAT_DTYPES, TensorInfo

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class SafetensorsContent:
    """The tensors of a safetensors file that was read whole.

    Attributes:
      header: shape and dtype of every tensor by name.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        """Checks the header: sizes, offsets and coverage.

        Raises:
          CheckpointError: If it is no whole safetensors file.
        """
        header = content[_LENGTH_BYTES : _LENGTH_BYTES + _header_len(path, content[:_LENGTH_BYTES], len(content))]
        self._content = content
        self._data_start = _LENGTH_BYTES + len(header)
        self.header, self._offsets = _parse(path, header, len(content) - self._data_start)

    def read(self, name: str) -> np.ndarray:
        """A tensor of a dtype among `FLOAT_DTYPES`: a read-only view of the file's bytes."""
        info = self.header[name]
        dtype, start = np.dtype(FLOAT_DTYPES[info.dtype]), self._data_start + self._offsets[name]
        return np.frombuffer(self._content, dtype, math.prod(info.shape), start).reshape(info.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Shape and dtype of every tensor of a safetensors file, checked as `SafetensorsContent` checks them.

    Raises:
      CheckpointError: If it is no whole safetensors file.
    """
    with path.open("rb") as file:
        return header_of(path, file)


def header_of(path: Path, file: BinaryIO) -> dict[str, TensorInfo]:
    """As `read_header`, of an open file."""
    num_bytes = _size(file)
    header = file.read(_header_len(path, file.read(_LENGTH_BYTES), num_bytes))
    return _parse(path, header, num_bytes - _LENGTH_BYTES - len(header))[0]


def _size(file: BinaryIO) -> int:
    num_bytes = file.seek(0, 2)
    file.seek(0)
    return num_bytes


def _header_len(path: Path, head: bytes, num_bytes: int) -> int:
    """Bytes of the JSON header, as the file's first eight bytes state them."""
    if len(head) < _LENGTH_BYTES:
        raise _damaged(path, f"it has {len(head)} bytes")
    header_len = int.from_bytes(head, "little")
    if header_len > min(num_bytes - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise _damaged(path, f"a header of {header_len} bytes is stated, the file has {num_bytes}")
    return header_len


def _parse(path: Path, header: bytes, num_data_bytes: int) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Tensors by name, and where the data of each starts; together they cover the data without gap or overlap."""
    try:
        content = json.loads(header)
        entries = {name: _entry(entry) for name, entry in content.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header is {type(error).__name__}: {error}") from error
    stop = 0
    for name, (info, start, end) in sorted(entries.items(), key=lambda item: item[1][1:]):
        if start != stop or end < start or (info.dtype in FLOAT_DTYPES and end - start != info.num_bytes):
            raise _damaged(path, f"tensor {name} of {info.dtype}{info.shape} has the bytes {start} to {end}")
        stop = end
    if stop != num_data_bytes:
        raise _damaged(path, f"its tensors have {stop} bytes, the file has {num_data_bytes} for them")
    infos = {name: info for name, (info, _, _) in entries.items()}
    return infos, {name: start for name, (_, start, _) in entries.items()}


def _entry(entry: dict[str, Any]) -> tuple[TensorInfo, int, int]:
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if any(type(size) is not int or size < 0 for size in (*shape, start, end)):
        raise ValueError(f"shape {shape} and offsets {start}, {end} are to be integers of 0 or more")
    return TensorInfo(shape, str(entry["dtype"])), start, end


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is no whole safetensors file ({reason}); it may be truncated: copy or download it again"
    )
