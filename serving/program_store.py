"""Compiled programs on disk, so that the next start neither traces nor lowers them.

JAX's own cache spares compiling only: to know what to look up it traces and lowers a program first, which for the step
of a large model takes Python a second, one program after the other. Here a program is found by what it is made of: the
project's source, the versions and settings of JAX, the device, and the shapes of its arguments.
"""

import contextlib
import hashlib
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.tree_util import tree_flatten, tree_structure

logger = logging.getLogger(__name__)

_FOLDER = "dymerge-programs"
_SOURCES = ("dymerge_jax", "pallas_kernels")
_DISTRIBUTIONS = ("jax", "flax", "triton", "nvidia")  # beginnings of the names of what programs are compiled by
_MAX_UNUSED_S = 30 * 24 * 3600
_DIGEST_BYTES = hashlib.sha256().digest_size
# Once it is imported, the CUDA plugin finds the runtime of Mosaic's kernels; without it, it cannot load a program that
# has one. It takes most of a second to import, so a file begins with whether its program may need it.
_MOSAIC = "jax.experimental.mosaic.gpu"
_WITHOUT_MOSAIC, _WITH_MOSAIC = b"0", b"1"


class ProgramStore:
    """A folder of compiled programs. Any thread may call it.

    A file is a pickle, as JAX writes it: whoever can write the folder can run code here, so one that others than its
    owner can write is not used.
    """

    def __init__(self, folder: Path, device: Any) -> None:
        """Makes the folder, and removes what no start has used for a month.

        Args:
          folder: of this store alone.
          device: the programs' only one, a jax.Device.

        Raises:
          OSError: If the folder cannot be made or looked at.
          PermissionError: If somebody else can write it.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():
            raise PermissionError(
                f"{folder} belongs to another user; set JAX_COMPILATION_CACHE_DIR to a folder of yours"
            )
        if status.st_mode & 0o022:
            raise PermissionError(f"others can write {folder}; run: chmod go-w {folder}")
        self._folder = folder
        self._device = device
        self._environment = _environment(device)
        _remove_unused(folder)

    def program(
        self, description: str, args: tuple[Any, ...], result: Any, compile: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        """The program from the folder; or compiled, and kept there for the next start.

        Args:
          description: tells programs of the same arguments apart: what is static in them.
          args: positional arguments, arrays or their shapes.
          result: a tree like the program's result, with anything as leaves.
          compile: makes it.
        """
        leaves, args_tree = tree_flatten((args, {}))
        shapes = [(leaf.shape, str(leaf.dtype), str(getattr(leaf, "sharding", None))) for leaf in leaves]
        key = repr((self._environment, description, shapes, str(args_tree)))
        file = self._folder / hashlib.sha256(key.encode()).hexdigest()
        program = self._load(file, args_tree, tree_structure(result))
        if program is None:
            program = compile()
            self._save(file, program)
        return program

    def _load(self, file: Path, args_tree: Any, result_tree: Any) -> jax.stages.Compiled | None:
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("a compiled program cannot be read, it is compiled anew: %s", error)
            return None
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != digest:
            logger.warning("the compiled program %s is damaged; it is compiled anew", file)
            return None
        try:
            if data[:1] == _WITH_MOSAIC:
                importlib.import_module(_MOSAIC)
            program = serialize_executable.deserialize_and_load(
                data[1:], args_tree, result_tree, self._device.client, (self._device,)
            )
        except Exception as error:  # of the runtime's many kinds; whatever it is, compiling is the way out
            logger.warning("the compiled program %s cannot be loaded, it is compiled anew: %s", file, error)
            return None
        with contextlib.suppress(OSError):  # a folder that can only be read is of use too
            os.utime(file)
        return program

    def _save(self, file: Path, program: jax.stages.Compiled) -> None:
        if _source_digest() != _SOURCE_DIGEST:  # what has been compiled is not what the files say now
            logger.warning("the source has changed since the start: compiled programs are not kept")
            return
        part = file.with_suffix(f".{os.getpid()}")
        try:
            data, _, _ = serialize_executable.serialize(program)
            data = (_WITH_MOSAIC if _MOSAIC in sys.modules else _WITHOUT_MOSAIC) + data
            part.write_bytes(hashlib.sha256(data).digest() + data)
            part.replace(file)
        except Exception as error:  # the program is there: the next start takes longer, that is all
            logger.warning("a compiled program cannot be kept for the next start: %s", error)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def store_beside_jax_cache(device: Any) -> ProgramStore | None:
    """The store in the folder of JAX's own cache; None if JAX keeps no programs, or the folder is not to be used."""
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or not jax.config.jax_enable_compilation_cache or _SOURCE_DIGEST is None:
        return None
    try:
        return ProgramStore(Path(folder) / _FOLDER, device)
    except OSError as error:
        logger.warning("compiled programs are not kept for the next start: %s", error)
        return None


def _environment(device: Any) -> tuple[str, ...]:
    """What a compiled program depends on besides its own arguments, as far as it may change between two starts."""
    found = ((d.metadata["Name"] or "", d.version) for d in distributions())
    versions = sorted(f"{name}=={version}" for name, version in found if name.startswith(_DISTRIBUTIONS))
    return (
        *versions,
        device.client.platform_version,
        device.device_kind,
        str(device.id),
        os.environ.get("XLA_FLAGS", ""),
        repr(sorted(jax.config.values.items())),
        str(_SOURCE_DIGEST),
    )


def _source_digest() -> str | None:
    """SHA-256 of the code, and of the tables of sizes, that programs are made from; None where there are no files."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    files = [f for package in _SOURCES for f in sorted((root / package).rglob("*")) if f.suffix in (".py", ".json")]
    for file in files:
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest() if files else None


_SOURCE_DIGEST = _source_digest()
"""That of the files when they were imported, or before; a server may run long beside a checkout that changes."""


def _remove_unused(folder: Path) -> None:
    oldest_s = time.time() - _MAX_UNUSED_S
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # another start may rename or remove it meanwhile
            if file.stat().st_mtime < oldest_s:
                file.unlink()
