"""A process that reads adapters from disk and cuts them into slots, in memory that the engine's process maps too.

`serving.reader_processes` starts it: one line of JSON comes in for each adapter, one goes out when its slots are there.
Whatever reading, hashing, checking and cutting take of Python's lock, of page faults and of the processor is taken
here: no decode step of the engine waits for it. It ends when its input does, which is when the server ends, however
that happens. It imports no jax, and so is there in a fraction of a second.
"""

import dataclasses
import json
import logging
import mmap
import os
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from checkpoints.errors import CheckpointError, MissingFileError
from checkpoints.peft_adapter import load_adapter, load_again
from dymerge_jax.adapter_weights import AdapterWeights, content_shape, fill_slot
from dymerge_jax.config import LlamaConfig, RopeConfig

_ALIGNMENT = 64  # bytes; of every array in the memory

Slots = list[tuple[np.ndarray, np.ndarray]]
"""values [slot_len] and scales [num_scales] of each slot: see `dymerge_jax.lora.SlotContent`."""


@dataclasses.dataclass(frozen=True)
class CutSettings:
    """What all adapters of an engine are read and cut for.

    Attributes:
      config: shape of the model they adapt.
      slot_rank: rank rows of a slot.
      dtype: of the device's slot array, by its name.
      max_rank: largest rank that the slot array holds; None for no limit.
    """

    config: LlamaConfig
    slot_rank: int
    dtype: str
    max_rank: int | None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "CutSettings":
        fields = json.loads(text)
        config = fields["config"]
        config |= {"rope": RopeConfig(**config["rope"]), "eos_token_ids": tuple(config["eos_token_ids"])}
        return CutSettings(**(fields | {"config": LlamaConfig(**config)}))


class SlotMemory:
    """The slots of one adapter in a file that has no name and lies in memory: mapped once, and again when it grows."""

    def __init__(self, file: BinaryIO, settings: CutSettings) -> None:
        """Maps nothing yet.

        Args:
          file: open for reading and writing.
          settings: give the layout.
        """
        self._file = file
        self._dtype = np.dtype(settings.dtype)
        self._slot_len, self._num_scales = content_shape(settings.config, settings.slot_rank)
        self._values_start = _aligned(4 * self._num_scales)
        self._stride = self._values_start + _aligned(self._slot_len * self._dtype.itemsize)
        self._map: mmap.mmap | None = None

    def slots(self, num_slots: int) -> Slots:
        """The first `num_slots` slots: views, which stay valid when the memory grows."""
        num_bytes = num_slots * self._stride
        if self._map is None or len(self._map) < num_bytes:
            if os.fstat(self._file.fileno()).st_size < num_bytes:
                os.ftruncate(self._file.fileno(), num_bytes)
            self._map = mmap.mmap(self._file.fileno(), num_bytes)
        starts = range(0, num_bytes, self._stride)
        return [
            (
                np.frombuffer(self._map, self._dtype, self._slot_len, start + self._values_start),
                np.frombuffer(self._map, np.float32, self._num_scales, start),
            )
            for start in starts
        ]


def main() -> None:
    """Answers requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the server's terminal is for the server
    settings, descriptor = CutSettings.from_json(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not come between the answers
    log: list[tuple[str, int, str]] = []
    logging.basicConfig(level=logging.INFO, handlers=[_LogKeeper(log)])
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        memory = SlotMemory(file, settings)
        try:
            _send(answers, {})  # it has started
            for line in sys.stdin.buffer:
                _send(answers, _answer(json.loads(line), settings, memory) | {"log": log})
                log.clear()
        except BrokenPipeError:
            os._exit(0)  # nobody is left to hear, nor to read what Python would say of it


def _answer(request: dict[str, Any], settings: CutSettings, memory: SlotMemory) -> dict[str, Any]:
    """Reads an adapter and cuts it.

    Args:
      request: `folder`; `content_hash` of one that was read before, or None; `max_slots`, beyond which nothing is cut.
      settings: of the engine.
      memory: where the slots go.

    Returns:
      `content_hash` and `rank`, or what was raised instead.
    """
    try:
        weights = _read(Path(request["folder"]), settings, request["content_hash"])
        num_slots = weights.num_slots(settings.slot_rank)
        if num_slots <= request["max_slots"]:
            _cut(weights, settings, memory.slots(num_slots))
        return {"content_hash": weights.content_hash, "rank": weights.rank}
    except Exception as error:
        return {"error": error_fields(error)}


def _read(folder: Path, settings: CutSettings, content_hash: str | None) -> AdapterWeights:
    if content_hash is None:
        return load_adapter(folder, settings.config, max_rank=settings.max_rank)
    return load_again(folder, settings.config, content_hash, max_rank=settings.max_rank)


def _cut(weights: AdapterWeights, settings: CutSettings, slots: Slots) -> None:
    for index, (values, scales) in enumerate(slots):
        values.view(np.uint8).fill(0)  # another adapter's are there
        scales.fill(0)
        fill_slot(settings.config, weights, index, slot_rank=settings.slot_rank, values=values, scales=scales)


def error_fields(error: Exception) -> dict[str, Any]:
    """An exception as JSON; `error_of` makes it again."""
    if isinstance(error, CheckpointError):
        kind = "missing" if isinstance(error, MissingFileError) else "refused"
        return {"kind": kind, "arguments": [str(error)]}
    if isinstance(error, OSError) and error.errno is not None:  # without, it has its text only
        return {"kind": "os", "arguments": [error.errno, error.strerror, error.filename and str(error.filename)]}
    return {"kind": "other", "arguments": [f"{type(error).__name__}: {error}"]}


def error_of(fields: dict[str, Any]) -> Exception:
    """The exception that `error_fields` was given, or a RuntimeError for one that nobody tells from others."""
    kinds = {"missing": MissingFileError, "refused": CheckpointError, "os": OSError, "other": RuntimeError}
    return kinds[fields["kind"]](*fields["arguments"])


class _LogKeeper(logging.Handler):
    """Keeps log lines, for the server to log as its own."""

    def __init__(self, log: list[tuple[str, int, str]]) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.append((record.name, record.levelno, record.getMessage()))


def _send(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


if __name__ == "__main__":
    main()
