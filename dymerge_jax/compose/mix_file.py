"""Files of named mixes, as the server's --mixes takes them: {"name": {"adapter": weight}}."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.files import read_json


def read_mix_file(path: Path) -> dict[str, Any]:
    """The mixes in a file; none if there is no such file.

    Raises:
      CheckpointError: If the file is no JSON object.
    """
    return read_json(path) if path.exists() else {}


def check_mix_name(path: Path, name: str, adapters: Collection[str]) -> None:
    """Checks that a mix of this name can be added to a file, before the search for it begins.

    Raises:
      CheckpointError: If the file is no JSON object, or the name is empty, the file's already or an adapter's.
    """
    if not name.strip():
        raise CheckpointError(f"the mix's name is {name!r}; give one that is not empty")
    if name in adapters:
        raise CheckpointError(f"the name {name!r} is that of an adapter; give the mix another")
    if name in read_mix_file(path):
        raise CheckpointError(f"{path} holds a mix named {name!r} already; give another name or file")


def add_mix(path: Path, name: str, weights: Mapping[str, float]) -> None:
    """Adds a mix to a file, which is made if it is not there; the file is replaced as a whole."""
    content = {**read_mix_file(path), name: dict(weights)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.partial-{os.getpid()}"
    try:
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
