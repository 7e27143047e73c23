"""Tiny random models, adapters and gated sets in memory, for tests that need no files."""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dymerge_jax.config import PROJECTIONS, LlamaConfig, named_config
from dymerge_jax.gating import GatedSetWeights, Granularity
from dymerge_jax.lora import AdapterWeights, ProjectionWeights
from dymerge_jax.model import SplitModel, random_model
from dymerge_jax.xlora import XLoraRule, XLoraSetWeights


def tiny_model(dtype: DTypeLike = jnp.float32, **overrides: Any) -> SplitModel:
    """A random two-layer Llama; `overrides` replace fields of its config."""
    return random_model(dataclasses.replace(named_config("tiny"), **overrides), dtype, seed=7)


def random_adapter(
    config: LlamaConfig,
    *,
    rank: int,
    seed: int,
    alpha: float = 16.0,
    projections: Sequence[str] = PROJECTIONS,
    layers: Sequence[int] | None = None,
    strength: float = 0.3,
) -> AdapterWeights:
    """An adapter with B far from zero, so that greedy text changes."""
    rng = np.random.default_rng(seed)
    shapes = {
        n: (g.in_features, w) for g in config.groups.values() for n, w in zip(g.projections, g.widths, strict=True)
    }
    weights = {}
    for layer in range(config.num_layers) if layers is None else layers:
        for name in projections:
            fan_in, fan_out = shapes[name]
            a = rng.normal(size=(rank, fan_in)).astype(np.float32) * fan_in**-0.5
            b = rng.normal(size=(fan_out, rank)).astype(np.float32) * strength / rank**0.5
            weights[layer, name] = ProjectionWeights(a=a, b=b, scale=alpha / rank)
    return AdapterWeights(projections=weights, content_hash=hashlib.sha256(f"{rank} {seed}".encode()).hexdigest())


def random_gated_set(
    config: LlamaConfig,
    name: str,
    experts: Sequence[str],
    *,
    granularity: Granularity,
    top_k: int | None,
    renormalize: bool,
    seed: int,
) -> GatedSetWeights:
    """A gated set whose gates are sharp enough to tell tokens apart."""
    rng = np.random.default_rng(seed)
    sites = {"layer": config.hidden}
    if granularity == "projection":
        sites = {n: g.in_features for g in config.groups.values() for n in g.projections}
    gates = {
        (layer, site): rng.normal(size=(len(experts), width)).astype(np.float32) * 2 * width**-0.5
        for layer in range(config.num_layers)
        for site, width in sites.items()
    }
    return GatedSetWeights(name, tuple(experts), granularity, top_k, renormalize, gates)


def random_xlora_set(
    config: LlamaConfig, name: str, experts: Sequence[str], *, seed: int, depth: int = 1, **rule: Any
) -> XLoraSetWeights:
    """An X-LoRA set whose classifier is sharp enough to tell tokens apart; `rule` as in `XLoraRule`."""
    rng = np.random.default_rng(seed)
    num_sites = config.num_layers * len(PROJECTIONS) if rule.get("is_layerwise") else 1
    sizes = [config.hidden, *[24] * (depth - 1), num_sites * len(experts)]
    layers = tuple(
        (
            (rng.normal(size=(fan_out, fan_in)) * 2 * fan_in**-0.5).astype(np.float32),
            rng.normal(size=fan_out).astype(np.float32) * np.float32(0.3),
        )
        for fan_in, fan_out in itertools.pairwise(sizes)
    )
    return XLoraSetWeights(name, tuple(experts), layers, XLoraRule(**rule))
