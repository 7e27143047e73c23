"""A plain float64 Llama with LoRA in numpy, one projection at a time: what the engine must equal."""

from collections.abc import Callable, Mapping

import numpy as np

from dymerge_jax.config import LlamaConfig
from dymerge_jax.gating import GatedSetWeights
from dymerge_jax.layers import rope_frequencies
from dymerge_jax.lora import AdapterWeights
from dymerge_jax.model import Params

Delta = Callable[[int, str, np.ndarray, np.ndarray], np.ndarray]
"""(layer, projection, its input [t, i], the layer's normed input [t, d]) to what adapters add to its output [t, o]."""


def static_delta(mix: Mapping[str, float], adapters: Mapping[str, AdapterWeights]) -> Delta:
    """sum_i w_i s_i B_i (A_i x)."""

    def delta(layer: int, projection: str, x: np.ndarray, layer_input: np.ndarray) -> np.ndarray:
        out: np.ndarray | float = 0.0
        for name, weight in mix.items():
            p = adapters[name].projections.get((layer, projection))
            if p is not None:
                out = out + weight * p.scale * (x @ p.a.astype(np.float64).T) @ p.b.astype(np.float64).T
        return np.asarray(out)

    return delta


def gated_delta(gated_set: GatedSetWeights, adapters: Mapping[str, AdapterWeights]) -> Delta:
    """The gate's formula, token by token and expert by expert."""

    def weights(gate: np.ndarray, x: np.ndarray) -> np.ndarray:
        logits = gate.astype(np.float64) @ x
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        if gated_set.top_k is not None:
            order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
            for i in order[gated_set.top_k :]:
                probs[i] = 0.0
        return probs / probs.sum() if gated_set.renormalize else probs

    def delta(layer: int, projection: str, x: np.ndarray, layer_input: np.ndarray) -> np.ndarray:
        rows = []
        for token, layer_token in zip(x, layer_input, strict=True):
            if gated_set.granularity == "layer":
                w = weights(gated_set.gates[layer, "layer"], layer_token)
            else:
                w = weights(gated_set.gates[layer, projection], token)
            mix = dict(zip(gated_set.experts, w, strict=True))
            rows.append(static_delta(mix, adapters)(layer, projection, token[None], layer_token[None]))
        return np.concatenate(rows)

    return delta


def logits(config: LlamaConfig, params: Params, tokens: list[int], delta: Delta | None = None) -> np.ndarray:
    """[t, vocab] float64 logits of one sequence."""
    p64 = {k: v for k, v in params.items() if k != "layers"}
    x = _f64(p64["embed"])[tokens]
    num_tokens = len(tokens)
    angles = np.arange(num_tokens)[:, None, None] * rope_frequencies(config.head_dim, config.rope).astype(np.float64)
    causal = np.tril(np.ones((num_tokens, num_tokens), bool))
    for layer in range(config.num_layers):
        w = params["layers"][layer]
        h = _norm(x, w["input_norm"], config)
        layer_input = h

        def project(
            group: str, x: np.ndarray, layer: int = layer, w: Params = w, layer_input: np.ndarray = layer_input
        ) -> list[np.ndarray]:
            g = config.groups[group]
            columns = np.split(x @ _f64(w[group]), np.cumsum(g.widths)[:-1], axis=1)
            if delta is None:
                return columns
            return [c + delta(layer, name, x, layer_input) for name, c in zip(g.projections, columns, strict=True)]

        q, k, v = (c.reshape(num_tokens, -1, config.head_dim) for c in project("qkv", h))
        q, k = _rope(q, angles), _rope(k, angles)
        group_size = config.num_q_heads // config.num_kv_heads
        k, v = (np.repeat(z, group_size, axis=1) for z in (k, v))
        scores = np.einsum("qnh,knh->nqk", q, k) / np.sqrt(config.head_dim)
        scores = np.where(causal, scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        x = x + project("o", np.einsum("nqk,knh->qnh", probs, v).reshape(num_tokens, -1))[0]
        h = _norm(x, w["post_attention_norm"], config)
        gate, up = project("gate_up", h)
        x = x + project("down", gate / (1 + np.exp(-gate)) * up)[0]
    head = _f64(params["embed"]).T if config.tie_word_embeddings else _f64(params["lm_head"])
    return _norm(x, params["final_norm"], config) @ head


def _f64(x: object) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _norm(x: np.ndarray, weight: object, config: LlamaConfig) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * _f64(weight)


def _rope(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)
