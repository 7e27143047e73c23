"""Makes one PEFT adapter of several, offline, one projection at a time."""

import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from checkpoints.errors import CheckpointError, refuse_if
from checkpoints.peft_adapter import WEIGHTS_FILE, OpenAdapter, open_adapters
from checkpoints.peft_header import Site
from checkpoints.peft_writer import AdapterDtype, adapter_config_json, module_path, write_peft_adapter
from dymerge_jax.compose.merge_maths import MergeConfig, WeightedLora, merge_projection
from dymerge_jax.config import PROJECTIONS

_log = logging.getLogger(__name__)

_MAX_LISTED = 10


@dataclasses.dataclass(frozen=True)
class MergedAdapter:
    """What was written.

    Attributes:
      path: the adapter's folder.
      rank: of every projection.
      num_projections: adapted projections of all layers.
      num_bytes: of its weights' tensors.
    """

    path: Path
    rank: int
    num_projections: int
    num_bytes: int


def merge_adapters(
    adapters: Sequence[tuple[str, Path]],
    weights: Sequence[float],
    out: Path,
    config: MergeConfig,
    *,
    dtype: AdapterDtype = "float32",
    progress: bool = True,
) -> MergedAdapter:
    """Merges adapters of one base model into a new adapter of scaling 1, written wholly or not at all.

    Args:
      adapters: name and PEFT folder of each.
      weights: of each adapter, any finite numbers; they multiply the adapters' own scalings.
      out: folder of the new adapter; must not exist.
      config: the method and its settings.
      dtype: of the stored weights; the maths is in float32.
      progress: show a progress bar.

    Raises:
      MissingFileError: If a folder or a file of an adapter is missing.
      CheckpointError: If an adapter is refused, adapters do not fit each other or the method, or `out` exists.
      ValueError: If the weights are not one finite number an adapter, or the settings do not fit the adapters.
    """
    _check_weights([name for name, _ in adapters], weights)
    if out.exists():
        raise CheckpointError(f"{out} exists; give a folder that does not exist yet")
    with open_adapters([path for _, path in adapters]) as opened:
        sites = sorted({site for adapter in opened for site in adapter.sites}, key=_model_order)
        rank = _result_rank(config, [name for name, _ in adapters], opened, sites)
        shapes = {site: next(a.shape(site) for a in opened if site in a.sites) for site in sites}
        _check_rank_fits(rank, config, shapes)
        bar = tqdm(sites, desc=config.method, unit="projection", disable=not progress)
        write_peft_adapter(
            out,
            adapter_config_json(rank, _target_modules(opened, sites), _base_model(adapters, opened)),
            shapes,
            _merged(config, opened, weights, bar, rank),
            dtype=dtype,
            metadata={"merged_from": json.dumps(_recipe(adapters, weights, config))},
        )
    return MergedAdapter(out, rank, len(sites), (out / WEIGHTS_FILE).stat().st_size)


def _merged(
    config: MergeConfig, adapters: Sequence[OpenAdapter], weights: Sequence[float], sites: Iterable[Site], rank: int
) -> Iterator[tuple[Site, np.ndarray, np.ndarray]]:
    """A and B of every projection; nothing else is held."""
    for site in sites:
        loras = []
        for index, (adapter, weight) in enumerate(zip(adapters, weights, strict=True)):
            if site in adapter.sites:
                part = adapter.read(site)
                a, b = part.a.astype(np.float32), part.b.astype(np.float32)
                loras.append(WeightedLora(a, b, weight * part.scale, index))
        yield site, *merge_projection(config, loras, rank=rank, place=_model_order(site))


def _check_weights(names: Sequence[str], weights: Sequence[float]) -> None:
    if not names:
        raise ValueError("no adapter is given; expected at least one")
    if len(names) != len(weights):
        raise ValueError(f"{len(names)} adapters ({', '.join(names)}) but {len(weights)} weights; give one weight each")
    for name, weight in zip(names, weights, strict=True):
        if not math.isfinite(weight):
            raise ValueError(f"the weight of adapter {name!r} is {weight}; expected a finite number")


def _result_rank(config: MergeConfig, names: Sequence[str], adapters: Sequence[OpenAdapter], sites: list[Site]) -> int:
    """The largest rank of any projection, which becomes that of all."""
    problems, largest = [], 0
    for site in sites:
        ranks = {n: a.sites[site].rank for n, a in zip(names, adapters, strict=True) if site in a.sites}
        if config.needs_equal_ranks and len(set(ranks.values())) > 1:
            problems.append(f"{module_path(site)}: " + ", ".join(f"{name!r} has rank {r}" for name, r in ranks.items()))
        largest = max(largest, sum(ranks.values()) if config.method == "cat" else max(ranks.values()))
    if len(problems) > _MAX_LISTED:
        problems = [*problems[:_MAX_LISTED], f"and {len(problems) - _MAX_LISTED} projections more"]
    refuse_if(problems, f"a merge by {config.method}, which needs equal ranks (cat and svd take different ones),")
    return config.rank or largest


def _check_rank_fits(rank: int, config: MergeConfig, shapes: Mapping[Site, tuple[int, int]]) -> None:
    """Before anything is read: an svd cannot have a higher rank than its matrix."""
    site, shape = min(shapes.items(), key=lambda item: min(item[1]))
    if config.method == "svd" and rank > min(shape):
        raise ValueError(f"rank {rank} is above what {module_path(site)} of {shape[0]} x {shape[1]} can have")


def _model_order(site: Site) -> tuple[int, int]:
    layer, projection = site
    return layer, PROJECTIONS.index(projection)


def _target_modules(adapters: Sequence[OpenAdapter], sites: Sequence[Site]) -> list[str]:
    """What PEFT is to adapt: plain names where all layers have them, each projection's own name otherwise."""
    names = [name for name in PROJECTIONS if any(name == projection for _, projection in sites)]
    num_layers = sites[-1][0] + 1
    if all(_adapts_all_layers(adapter.config) for adapter in adapters) and len(sites) == num_layers * len(names):
        return names
    return [module_path(site) for site in sites]


def _adapts_all_layers(config: Mapping[str, Any]) -> bool:
    targets = config.get("target_modules")
    is_plain = isinstance(targets, list) and set(targets) <= set(PROJECTIONS)
    # Layer 0 is a layer to transform, and false.
    return is_plain and config.get("layers_to_transform") is None and not config.get("exclude_modules")


def _base_model(adapters: Sequence[tuple[str, Path]], opened: Sequence[OpenAdapter]) -> str | None:
    """The first adapter's base model; one adapter of another's is told, for a name may have been written otherwise."""
    bases = [adapter.config.get("base_model_name_or_path") for adapter in opened]
    for (name, _), base in zip(adapters, bases, strict=True):
        if base != bases[0]:
            _log.warning("%r is of the base model %r, but %r of %r", name, base, adapters[0][0], bases[0])
    return bases[0] if isinstance(bases[0], str) else None


def _recipe(adapters: Sequence[tuple[str, Path]], weights: Sequence[float], config: MergeConfig) -> dict[str, Any]:
    """What was merged, as the new adapter remembers it; folders are left out, which say nothing elsewhere."""
    settings = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    return settings | {"weights": {name: weight for (name, _), weight in zip(adapters, weights, strict=True)}}
