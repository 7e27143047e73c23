"""The folder beside a training's result, from which a run that was stopped goes on; gone once the result is there.

OUT.training/
  settings.json     what decides the result; a run with others does not go on from here
  losses.jsonl      one line a step
  checkpoints/      Orbax: what is trained and the optimizer's state, by steps done
  result/           what becomes OUT, by one rename
"""

import dataclasses
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from checkpoints.errors import CheckpointError
from checkpoints.files import read_json

_log = logging.getLogger(__name__)

_SETTINGS = "settings.json"
_CHECKPOINTS = "checkpoints"
_RESULT = "result"
LOSSES = "losses.jsonl"


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What is told of one step.

    Attributes:
      step: steps done with it, from 1.
      loss: mean cross-entropy before its update, in nats.
      grad_norm: global norm of the gradient before it was clipped.
      num_tokens: tokens of its samples, without padding.
    """

    step: int
    loss: float
    grad_norm: float
    num_tokens: int


def work_path(out: Path) -> Path:
    """The work folder of a result."""
    return out.parent / f"{out.name}.training"


@contextmanager
def open_work_folder(out: Path, settings: Mapping[str, Any], *, restart: bool) -> Iterator["WorkFolder"]:
    """Makes the work folder of `out` or finds it; it is this process's alone until the block ends.

    Args:
      out: where the result goes; must not exist.
      settings: whatever decides the result, as JSON.
      restart: throw away what an earlier run left.

    Raises:
      CheckpointError: If `out` exists, another process works on it, or an earlier run had other settings.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists; give --out a folder that does not exist yet, or remove it")
    path = work_path(out)
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(
                f"{path} is in use by another training; wait for it, or give another --out"
            ) from error
        if restart:
            _empty(path)
        _check_settings(path, settings)
        work = WorkFolder(path)
        try:
            yield work
        finally:
            work.close()
    finally:
        os.close(lock)


def _empty(path: Path) -> None:
    for child in path.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
        else:
            child.unlink()


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    file = path / _SETTINGS
    if not file.exists():
        _replace_text(file, json.dumps(settings, indent=2) + "\n")
        return
    before = read_json(file)
    now = json.loads(json.dumps(settings))
    if changes := [
        f"{k} was {before.get(k)!r} and is {now.get(k)!r}" for k in {**before, **now} if before.get(k) != now.get(k)
    ]:
        raise CheckpointError(
            f"{path} holds a training with other settings: {'; '.join(changes)}; give the same to go on with it, "
            "--restart to begin anew, or another --out"
        )


def _replace_text(file: Path, text: str) -> None:
    """Writes a file wholly or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(file)


class WorkFolder:
    """What a training keeps on disk while it runs; see `open_work_folder`."""

    def __init__(self, path: Path) -> None:
        import orbax.checkpoint as ocp

        self._path = path
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager((path / _CHECKPOINTS).absolute(), options=options)
        self._losses = None

    def restore[T](self, like: T) -> tuple[int, T]:
        """Steps done and the state then, from the newest checkpoint; (0, like) without one.

        Args:
          like: a state of the same structure, shapes and dtypes.

        Raises:
          CheckpointError: If the checkpoint cannot be read.
        """
        import orbax.checkpoint as ocp

        step = self._manager.latest_step()
        if step is None:
            return 0, like
        leaves, structure = jax.tree.flatten(like)
        shapes = {str(i): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)}
        try:
            stored = self._manager.restore(step, args=ocp.args.StandardRestore(shapes))  # pyright: ignore[reportCallIssue]
        except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files
            raise CheckpointError(
                f"the checkpoint of step {step} in {self._path} cannot be restored ({error}); --restart begins anew"
            ) from error
        return step, jax.tree.unflatten(structure, [stored[str(i)] for i in range(len(leaves))])

    def save(self, step: int, state: Any) -> None:
        """Writes a checkpoint, wholly or not at all; the losses up to it are on disk before."""
        import orbax.checkpoint as ocp

        if self._losses is not None:
            self._losses.flush()
        # A flat dictionary: what Orbax gives back does not depend on the classes of the optimizer's state.
        leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}
        self._manager.save(step, args=ocp.args.StandardSave(leaves))  # pyright: ignore[reportCallIssue]
        self._manager.wait_until_finished()

    def begin_losses(self, step: int) -> list[StepRecord]:
        """Opens the file of losses; what it has of steps after `step`, which are done again, is cut off."""
        file = self._path / LOSSES
        kept = read_losses(file, step) if file.exists() else []
        _replace_text(file, "".join(map(_line, kept)))
        self._losses = file.open("a", encoding="utf-8")
        return kept

    def add_loss(self, record: StepRecord) -> None:
        """Appends a step."""
        assert self._losses is not None
        self._losses.write(_line(record))

    def publish(self, out: Path, write: Callable[[Path], None]) -> None:
        """Makes the result and removes the work folder.

        Args:
          out: the result's folder; appears as a whole.
          write: fills a new folder.
        """
        self.close()
        result = self._path / _RESULT
        shutil.rmtree(result, ignore_errors=True)  # of a run that was stopped while it wrote
        result.mkdir()
        write(result)
        shutil.copyfile(self._path / LOSSES, result / LOSSES)
        result.rename(out)
        shutil.rmtree(self._path, ignore_errors=True)

    def close(self) -> None:
        """Closes the files."""
        if self._losses is not None:
            self._losses.close()
            self._losses = None
        self._manager.close()


def read_losses(file: Path, until: int | None = None) -> list[StepRecord]:
    """Records of a file of losses, up to a step; a last line that was cut short is left out."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            records.append(StepRecord(**json.loads(line)))
        except ValueError:
            break
    return [r for r in records if until is None or r.step <= until]


def _line(record: StepRecord) -> str:
    return json.dumps(dataclasses.asdict(record)) + "\n"
