"""Reads LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors.

The tensors decide which projections are adapted; target_modules and exclude_modules only tell how they were chosen.
Everything is checked on the config and the tensors' header before any tensor is read, and a tensor that nothing would
use refuses the adapter: it is never half-loaded. A tokenizer saved with an adapter is not used (the base model's is),
and the log says so; saved token embeddings refuse the adapter, even if they equal the base model's.
"""

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError, MissingFileError, refuse_if
from checkpoints.files import (
    SafetensorsReader,
    TensorInfo,
    open_safetensors,
    parse_json,
    pickle_message,
    read_json_bytes,
)
from checkpoints.lora_config import read_lora_config
from checkpoints.peft_header import BaseShapes, ProjectionSource, Site, resolve_projections, sorted_keys
from checkpoints.safetensors_bytes import SafetensorsContent, header_of, read_header
from dymerge_jax.adapter_weights import AdapterWeights, ProjectionWeights
from dymerge_jax.config import PROJECTIONS, LlamaConfig

_log = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_BFLOAT16_EXPONENT = np.uint16(0x7F80)  # all of its bits are set in NaN and infinities only


@dataclasses.dataclass(frozen=True)
class AdapterInfo:
    """What an adapter's config and header say; no tensor was read.

    Attributes:
      path: its folder.
      rank: the largest rank of any projection.
      num_bytes: of all tensors as stored.
      projections: names of the adapted projections, in the model's order.
      has_tokenizer: the folder holds a tokenizer, which is not used.
    """

    path: Path
    rank: int
    num_bytes: int
    projections: tuple[str, ...]
    has_tokenizer: bool


def inspect_adapter(path: str | Path, config: LlamaConfig, *, max_rank: int | None = None) -> AdapterInfo:
    """Checks an adapter without reading its tensors: cheap enough for thousands at start-up.

    Args:
      path: the adapter's folder.
      config: the base model.
      max_rank: largest rank that fits the slot array; None for no limit.

    Returns:
      Its rank and size.

    Raises:
      MissingFileError: If the folder or one of its two files is missing.
      CheckpointError: If the adapter is not supported, does not fit the model or is damaged; lists every reason.
    """
    path = Path(path)
    header = read_header(weights_file(path))
    projections = _checked_projections(path, BaseShapes.of_model(config), _read_config(path), header, max_rank)
    num_bytes = sum(info.num_bytes for info in header.values())
    names = {projection for _, projection in projections}
    return AdapterInfo(
        path=path,
        rank=max(p.rank for p in projections.values()),
        num_bytes=num_bytes,
        projections=tuple(name for name in PROJECTIONS if name in names),
        has_tokenizer=any((path / file).is_file() for file in ("tokenizer.json", "tokenizer.model")),
    )


def load_adapter(path: str | Path, config: LlamaConfig, *, max_rank: int | None = None) -> AdapterWeights:
    """Reads an adapter to the host; each of its two files is read once, so that the hash is of what is used.

    Args:
      path: the adapter's folder.
      config: the base model.
      max_rank: largest rank that fits the slot array; None for no limit.

    Returns:
      A and B of every adapted projection, in the stored dtype, with their scales.

    Raises:
      MissingFileError: If the folder or one of its two files is missing.
      CheckpointError: If the adapter is not supported, does not fit the model, is damaged or holds NaN or infinite
        weights; lists every reason.
    """
    path = Path(path)
    files = _read_files(path, config, max_rank)
    weights = _weights(files, _content_hash(files.config, files.weights))
    _refuse_non_finite(path, files.sites, weights.projections)
    if any((path / file).is_file() for file in ("tokenizer.json", "tokenizer.model")):
        _log.info("adapter %s brings a tokenizer; the base model's is used instead", path)
    return weights


def load_again(
    path: str | Path, config: LlamaConfig, content_hash: str, *, max_rank: int | None = None
) -> AdapterWeights:
    """Reads an adapter that `load_adapter` has read before, whose tensors need no second look.

    Args:
      path: the adapter's folder.
      config: the base model.
      content_hash: of the adapter as it was.
      max_rank: as for `load_adapter`; files of a higher rank are others, and are not read.

    Raises:
      MissingFileError: If the folder or one of its two files is missing.
      CheckpointError: If the files are others now.
    """
    path = Path(path)
    message = f"{path} has changed on disk since it was loaded; load it anew under its name to use what is there now"
    try:
        files = _read_files(path, config, max_rank)
    except MissingFileError:
        raise
    except CheckpointError as error:  # it was not refused then
        raise CheckpointError(message) from error
    if _content_hash(files.config, files.weights) != content_hash:
        raise CheckpointError(message)
    return _weights(files, content_hash)


class _Files(NamedTuple):
    """An adapter's files, of which all was checked but the values of the tensors."""

    config: bytes
    weights: bytes
    tensors: SafetensorsContent  # in `weights`
    sites: dict[Site, ProjectionSource]


def _read_files(path: Path, config: LlamaConfig, max_rank: int | None) -> _Files:
    """Reads an adapter's files; the weights only once their header was checked: a file of any size may be there."""
    file = weights_file(path)
    config_bytes = _read_config(path)
    with file.open("rb", buffering=0) as raw:  # with a buffer, the part of the weights in it would cost a copy of all
        header = header_of(file, cast(BinaryIO, raw))
        sites = _checked_projections(path, BaseShapes.of_model(config), config_bytes, header, max_rank)
        raw.seek(0)
        weights_bytes = raw.readall()
    tensors = SafetensorsContent(file, weights_bytes)
    if tensors.header != header:
        raise CheckpointError(f"{file} has changed while it was read; try again when nothing writes it any more")
    return _Files(config_bytes, weights_bytes, tensors, sites)


def _weights(files: _Files, content_hash: str) -> AdapterWeights:
    """The adapter in the bytes of its files; it may hold NaN."""
    projections = {
        site: ProjectionWeights(a=files.tensors.read(p.a_key), b=files.tensors.read(p.b_key), scale=p.scale)
        for site, p in sorted(files.sites.items())
    }
    return AdapterWeights(projections, content_hash)


class OpenAdapter:
    """An adapter whose files were checked, to be read one projection at a time.

    Attributes:
      path: its folder.
      config: the object in its adapter_config.json.
      sites: rank and scale of every adapted projection.
      dtypes: of its tensors, by their name in a safetensors header.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], sites: dict[Site, ProjectionSource], reader: SafetensorsReader
    ) -> None:
        self.path = path
        self.config = config
        self.sites = sites
        self.dtypes = {info.dtype for info in reader.header.values()}
        self._reader = reader

    def read(self, site: Site) -> ProjectionWeights:
        """A, B and scale of one projection, in the stored dtype.

        Raises:
          CheckpointError: If it holds NaN or infinite weights.
        """
        source = self.sites[site]
        weights = ProjectionWeights(self._reader.read(source.a_key), self._reader.read(source.b_key), source.scale)
        _refuse_non_finite(self.path, self.sites, {site: weights})
        return weights

    def shape(self, site: Site) -> tuple[int, int]:
        """(out_features, in_features) of an adapted projection."""
        source = self.sites[site]
        return self._reader.header[source.b_key].shape[0], self._reader.header[source.a_key].shape[1]


@contextlib.contextmanager
def open_adapters(paths: Sequence[Path]) -> Iterator[list[OpenAdapter]]:
    """Opens adapters of one base model, which need not be there: their shapes are compared with each other's.

    Raises:
      MissingFileError: If a folder or one of its two files is missing.
      CheckpointError: If an adapter is not supported, is damaged or has other shapes than those before it; lists every
        reason.
    """
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(open_safetensors(weights_file(path))) for path in paths]
        base = BaseShapes.of_adapters(reader.header for reader in readers)
        adapters = []
        for path, reader in zip(paths, readers, strict=True):
            config_bytes = _read_config(path)
            sites = _checked_projections(path, base, config_bytes, reader.header, None)
            adapters.append(OpenAdapter(path, parse_json(path / CONFIG_FILE, config_bytes), sites, reader))
        yield adapters


def weights_file(path: Path) -> Path:
    """The adapter's safetensors file, its config being there too.

    Raises:
      MissingFileError: If the folder or one of its two files is missing.
      CheckpointError: If the weights are there as a pickle only.
    """
    if not path.exists():
        raise MissingFileError(f"adapter path {str(path)!r} does not exist; expected a folder with {CONFIG_FILE}")
    if not path.is_dir():
        raise MissingFileError(f"adapter path {str(path)!r} is a file; expected a folder with {CONFIG_FILE}")
    if not (path / CONFIG_FILE).is_file():
        is_base = (path / "config.json").is_file()
        hint = "; it is a base model directory, not an adapter" if is_base else ""
        raise MissingFileError(f"adapter path {str(path)!r} holds no {CONFIG_FILE}{hint}")
    weights = path / WEIGHTS_FILE
    if not weights.is_file() and (path / "adapter_model.bin").is_file():
        message = pickle_message(path / "adapter_model.bin", weights)
        raise CheckpointError(f"adapter {str(path)!r} has its weights as a pickle {message}")
    if not weights.is_file():
        raise MissingFileError(f"adapter path {str(path)!r} holds no {WEIGHTS_FILE}")
    return weights


def _read_config(path: Path) -> bytes:
    return read_json_bytes(path / CONFIG_FILE)


def _checked_projections(
    path: Path, base: BaseShapes, config_bytes: bytes, header: dict[str, TensorInfo], max_rank: int | None
) -> dict[Site, ProjectionSource]:
    """All checks that need no tensor data; every problem of config and header goes into one error."""
    lora, problems = read_lora_config(parse_json(path / CONFIG_FILE, config_bytes))
    keys, key_problems = sorted_keys(header, base)
    problems += key_problems
    sites: dict[Site, ProjectionSource] = {}
    if lora is not None:
        sites, site_problems = resolve_projections(keys, header, base, lora)
        problems += site_problems
    rank = max((p.rank for p in sites.values()), default=0)
    if max_rank is not None and rank > max_rank:
        problems.append(f"rank {rank} is above the limit of {max_rank}; raise --adapter-slots or --slot-rank")
    refuse_if(problems, f"adapter {str(path)!r}")
    return sites


def _refuse_non_finite(
    path: Path, sites: dict[Site, ProjectionSource], projections: dict[Site, ProjectionWeights]
) -> None:
    broken = [
        key
        for site, weights in projections.items()
        for key, tensor in ((sites[site].a_key, weights.a), (sites[site].b_key, weights.b))
        if not _is_finite(tensor)
    ]
    refuse_if([f"NaN or infinite weights: {', '.join(broken)}"] if broken else [], f"adapter {str(path)!r}")


def _is_finite(tensor: np.ndarray) -> bool:
    if tensor.dtype != ml_dtypes.bfloat16:
        return bool(np.isfinite(tensor).all())
    # On its bits: numpy holds the interpreter's lock in what it computes with a dtype that is not its own.
    return not ((tensor.view(np.uint16) & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any()


def _content_hash(config_bytes: bytes, weights_bytes: bytes) -> str:
    """SHA-256 over the bytes of both files, the length of the first before them."""
    digest = hashlib.sha256(len(config_bytes).to_bytes(8, "little"))
    digest.update(config_bytes)
    digest.update(weights_bytes)
    return digest.hexdigest()


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


def collect_adapters(specs: Iterable[str | Path]) -> list[tuple[str, Path]]:
    """Names and folders of the adapters that all `specs` stand for together; see `adapter_sources`.

    A folder that is given twice under one name counts once; under two names it is two adapters.

    Raises:
      MissingFileError: If a path does not exist or holds no adapter.
      CheckpointError: If two folders have one name.
    """
    by_name: dict[str, Path] = {}
    for spec in specs:
        for name, path in adapter_sources(str(spec)):
            first = by_name.setdefault(name, path)
            if first.resolve() != path.resolve():
                raise CheckpointError(
                    f"two adapters are named {name!r}: {first} and {path}; give one another name with name=folder"
                )
    return list(by_name.items())


def _existing(path: Path, spec: str) -> Path:
    if not path.exists():
        raise MissingFileError(f"adapter {spec!r}: {path} does not exist; expected a folder or name=folder")
    if not path.is_dir():
        raise MissingFileError(f"adapter {spec!r}: {path} is a file; expected a folder with {CONFIG_FILE}")
    return path
