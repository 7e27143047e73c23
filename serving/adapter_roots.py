"""Which folders an adapter may be loaded from over HTTP: those below the configured roots, symlinks resolved."""

from collections.abc import Sequence
from pathlib import Path

from checkpoints.peft_adapter import CONFIG_FILE, WEIGHTS_FILE
from dymerge_jax.example_lines import EXAMPLES_FILE
from serving.errors import ForbiddenError, InvalidRequestError, UnknownModelError
from serving.mixes import shown

FORBIDDEN = "adapter_path_forbidden"
_FILES = (CONFIG_FILE, WEIGHTS_FILE, EXAMPLES_FILE)


class AdapterRoots:
    """The folders given by --adapter-root.

    Attributes:
      folders: absolute, without symlinks. None means that nothing may be loaded over HTTP.
    """

    def __init__(self, folders: Sequence[str | Path] = ()) -> None:
        """Resolves the roots.

        Raises:
          ValueError: If one is no folder.
        """
        for folder in folders:
            if not Path(folder).is_dir():
                raise ValueError(f"--adapter-root {str(folder)!r} is no folder; give a folder that holds adapters")
        self.folders = tuple(Path(folder).resolve(strict=True) for folder in folders)

    def find(self, lora_path: str) -> Path:
        """The folder that a client's path means: absolute and without symlinks, so that no link in it can be turned
        elsewhere between this check and the reading of its files.

        Args:
          lora_path: absolute, or relative to one of the roots; the first root that has it counts.

        Raises:
          ForbiddenError: If there is no root, or the path is not below one. What exists elsewhere is not told.
          UnknownModelError: If there is no such folder.
          InvalidRequestError: If it is no path.
        """
        if not self.folders:
            raise ForbiddenError(
                "loading adapters over HTTP is off; start the server with --adapter-root FOLDER to allow those below "
                "that folder",
                param="lora_path",
                code=FORBIDDEN,
            )
        if "://" in lora_path:
            raise ForbiddenError(
                f"lora_path {shown(lora_path)} is a URL; nothing is fetched, only folders below an --adapter-root are "
                "loaded",
                param="lora_path",
                code=FORBIDDEN,
            )
        if "\0" in lora_path:
            raise InvalidRequestError(f"lora_path {shown(lora_path)} is no path", param="lora_path")
        candidates = [_resolve(root / lora_path, lora_path) for root in self.folders]
        allowed = [folder for folder in candidates if self._is_below(folder)]
        if not allowed:
            raise ForbiddenError(
                f"lora_path {shown(lora_path)} is not below an --adapter-root of this server, symlinks resolved",
                param="lora_path",
                code=FORBIDDEN,
            )
        folder = next((folder for folder in allowed if _exists(folder)), None)
        if folder is None:
            raise UnknownModelError(
                f"lora_path {shown(lora_path)} does not exist below an --adapter-root; expected a folder there, "
                "absolute or relative to it. Hub ids are not fetched: download the adapter into that folder first",
                param="lora_path",
            )
        self.check_files(folder)
        return folder

    def check_files(self, folder: Path) -> None:
        """Checks that a folder that `find` gave, and the files of an adapter in it, still lead below the roots.

        Called again when its files have been read: one that was swapped for a link meanwhile is found out then.

        Raises:
          ForbiddenError: If something leads elsewhere.
        """
        outside = [file for file in _FILES if not self._is_below(_resolve(folder / file, file))]
        if folder.resolve() != folder:
            outside.append(str(folder))
        if outside:
            raise ForbiddenError(
                f"{', '.join(outside)}: a link that leads out of every --adapter-root; put the files themselves there",
                param="lora_path",
                code=FORBIDDEN,
            )

    def _is_below(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self.folders)


def _resolve(path: Path, given: str) -> Path:
    """Absolute and without symlinks, whether it exists or not."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links, a name too long
        raise InvalidRequestError(f"lora_path {shown(given)} cannot be followed: {error}", param="lora_path") from None


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except OSError:  # too long a name too
        return False
    return True
