"""What is raised when a file cannot be used."""

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A checkpoint, adapter or gated set is refused; the message names everything that is wrong with it."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """A path, or a file inside a given folder, does not exist."""


def refuse_if(problems: Sequence[str], subject: str) -> None:
    """Raises one error that lists all `problems` of `subject`, if there are any.

    Raises:
      CheckpointError: If `problems` is not empty.
    """
    if problems:
        raise CheckpointError(f"{subject} is refused:" + "".join(f"\n- {problem}" for problem in problems))
