"""The whole model gives the same logits whichever implementation of the ops it is compiled with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dymerge_jax.library import Model, pad_batch
from dymerge_jax.lora import SlotArray
from dymerge_jax.model import Implementations, params_of
from tests.support import numpy_llama
from tests.support.tiny_models import random_adapter, random_gated_set, tiny_model

PROMPTS = [[5, 9, 2, 40, 7], [100, 90, 80], [1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("implementations", "num_layers"),
    [
        pytest.param(Implementations("reference", "reference"), 2, id="reference", marks=pytest.mark.slow),
        pytest.param(Implementations("dense", "portable"), 2, id="dense", marks=pytest.mark.slow),
        pytest.param(Implementations("loop", "portable"), 2, id="cpu", marks=pytest.mark.slow),  # fast: test_gating.py
        pytest.param(Implementations("pallas_triton", "pallas_triton"), 1, id="gpu-1"),
        pytest.param(
            Implementations("pallas_triton", "pallas_triton", gate_mix="pallas_triton"),
            2,
            id="gpu-2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_logits_of_static_gated_and_base_rows_equal_the_float64_model(
    implementations: Implementations, num_layers: int
) -> None:
    split = tiny_model(num_layers=num_layers)
    model = Model(split, None, adapter_slots=8, slot_rank=8, implementations=implementations)
    adapters = {"a": random_adapter(split.config, rank=12, seed=0), "b": random_adapter(split.config, rank=3, seed=1)}
    for name, adapter in adapters.items():
        model.add_adapter(name, adapter)
    gated = random_gated_set(
        split.config, "g", ["a", "b"], granularity="projection", top_k=1, renormalize=False, seed=2
    )
    model.add_gated_sets([gated])
    # Slots without an adapter hold NaN: whoever reads them shows it.
    free = jnp.arange(8) >= 3
    for group in model.slots.groups.values():
        assert not np.asarray(group.a)[:, 3:].any()
    model.slots = poison(model.slots, free)

    static = {"a": 0.7, "b": -0.5}
    logits = np.asarray(model.logits(pad_batch(PROMPTS), model.mix([static, "g", {}])))
    deltas = [numpy_llama.static_delta(static, adapters), numpy_llama.gated_delta(gated, adapters), None]
    for row, (prompt, delta) in enumerate(zip(PROMPTS, deltas, strict=True)):
        want = numpy_llama.logits(split.config, params_of(split), prompt, delta)
        np.testing.assert_allclose(logits[row, : len(prompt)], want, atol=2e-4, err_msg=f"row {row}")


def poison(slots: SlotArray, free: jax.Array) -> SlotArray:
    """The slot array with NaN in A and B of the free slots."""
    groups = {
        name: dataclasses.replace(
            g,
            a=jnp.where(free[None, :, None, None], jnp.nan, g.a),
            b=jnp.where(free[None, :, None, None], jnp.nan, g.b),
        )
        for name, g in slots.groups.items()
    }
    return dataclasses.replace(slots, groups=groups)
