"""Finds the adapters that a user names on the command line or in `load`."""

import logging
from collections.abc import Iterable
from pathlib import Path

from checkpoints.errors import CheckpointError, MissingFileError
from checkpoints.peft_adapter import CONFIG_FILE

_log = logging.getLogger(__name__)


def adapter_sources(spec: str) -> list[tuple[str, Path]]:
    """Names and folders of the adapters that `spec` stands for.

    Args:
      spec: a folder with adapter_config.json (its name is the folder's name), a folder of such folders, or
        "name=folder". An existing path is always taken as a path, even with "=" in it.

    Returns:
      (name, folder) of each, at least one; the folders' files are not read.

    Raises:
      MissingFileError: If the path does not exist or holds no adapter.
      CheckpointError: If the name is empty.
    """
    if not Path(spec).exists() and "=" in spec:
        name, _, folder = spec.partition("=")
        if not name or not folder:
            raise CheckpointError(f"adapter {spec!r} is neither an existing folder nor name=folder")
        return [(name, _existing(Path(folder), spec))]
    path = _existing(Path(spec), spec)
    if (path / CONFIG_FILE).is_file():
        return [(path.resolve().name, path)]
    if (path / "config.json").is_file():
        raise MissingFileError(f"adapter {spec!r} holds no {CONFIG_FILE}; it is a base model directory, not an adapter")
    found = sorted(child for child in path.iterdir() if (child / CONFIG_FILE).is_file())
    if not found:
        raise MissingFileError(f"adapter {spec!r} holds no {CONFIG_FILE}, neither itself nor in a folder inside it")
    if others := sorted(child.name for child in path.iterdir() if child.is_dir() and child not in found):
        _log.info("%s: no adapters, left out: %s", path, ", ".join(others))
    return [(child.name, child) for child in found]


def resolve_adapters(specs: Iterable[str]) -> dict[str, Path]:
    """Folders of all adapters of several specs, by name.

    Args:
      specs: see `adapter_sources`.

    Returns:
      Folders by name, in the order given.

    Raises:
      MissingFileError: If a path does not exist or holds no adapter.
      CheckpointError: If two different folders have one name.
    """
    folders: dict[str, Path] = {}
    for spec in specs:
        for name, folder in adapter_sources(spec):
            other = folders.setdefault(name, folder)
            if other.resolve() != folder.resolve():
                raise CheckpointError(
                    f"two adapters are named {name!r}: {other} and {folder}; give one another name: NAME={folder}"
                )
    return folders


def _existing(path: Path, spec: str) -> Path:
    if not path.exists():
        raise MissingFileError(f"adapter {spec!r}: {path} does not exist; expected a folder or name=folder")
    if not path.is_dir():
        raise MissingFileError(f"adapter {spec!r}: {path} is a file; expected a folder with {CONFIG_FILE}")
    return path
