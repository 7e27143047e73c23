"""The training steps compile for an H200 with our kernels going forward, and update their state in place."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dymerge_jax.config import PROJECTIONS, named_config
from dymerge_jax.gating import GatedSetWeights
from dymerge_jax.model import abstract_model
from dymerge_jax.train.adapter import adapter_loss, new_factors, place_mates
from dymerge_jax.train.forward import TrainBatch, differentiable_implementations, freeze_model
from dymerge_jax.train.gate import gate_loss, new_gates, place_in_slots
from dymerge_jax.train.loop import TrainConfig, TrainState, train_step
from tests.support.aot_h200 import H200, h200_target
from tests.support.tiny_models import random_adapter

CONFIG = dataclasses.replace(named_config("llama-3-8b"), num_layers=2, vocab=4096)
NUM_SEQS, SEQ_LEN, NUM_TARGETS = 8, 128, 256


@pytest.fixture(scope="module")
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


def batch_structs(num_mates: int) -> TrainBatch:
    def struct(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def ints(*shape: int) -> Any:
        return struct(shape, jnp.int32)

    return TrainBatch(
        tokens=ints(NUM_SEQS, SEQ_LEN),
        lengths=ints(NUM_SEQS),
        sources=ints(NUM_TARGETS),
        targets=ints(NUM_TARGETS),
        is_target=struct((NUM_TARGETS,), jnp.bool_),
        mate_weights=struct((NUM_SEQS, num_mates), jnp.float32),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "adapter-remat", "gate"])
def test_a_training_step_compiles_with_our_kernels_and_updates_its_state_in_place(h200: H200, kind: str) -> None:
    model = abstract_model(CONFIG, jnp.bfloat16)
    frozen = jax.eval_shape(lambda state: freeze_model(dataclasses.replace(model, state=state)), model.state)
    options = {"implementations": differentiable_implementations(), "remat": kind == "adapter-remat"}
    mates = {name: random_adapter(CONFIG, rank=8, seed=i, layers=[0]) for i, name in enumerate("ab")}
    config = TrainConfig(steps=10)
    if kind == "gate":
        like = GatedSetWeights("g", ("a", "b"), "layer", None, False, {})
        placed: Any = place_in_slots(CONFIG, mates, like, slot_rank=8, dtype="bfloat16")
        trained = jax.eval_shape(lambda: new_gates(CONFIG, 2, "layer", seed=0))
        loss: Any = functools.partial(gate_loss, balance=0.1, **options)
    else:
        placed = place_mates(CONFIG, list(mates.values()), slot_rank=8, dtype="bfloat16")
        trained = jax.eval_shape(lambda: new_factors(CONFIG, PROJECTIONS, rank=8, seed=0))
        loss = functools.partial(adapter_loss, scale=2.0, **options)
    state = jax.eval_shape(lambda t: TrainState(t, config.optimizer().init(t)), trained)
    step = functools.partial(train_step, loss=loss, config=config)
    compiled = h200.compile(step, state, (frozen, placed), batch_structs(len(mates)), donate_argnums=0)
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * 4 for x in jax.tree.leaves(trained))
    kernels = str(compiled.as_text())
    assert "maf_" in kernels, "our kernel is not in the program"
    assert "add_rms_norm" in kernels, "the norm's own kernel is not in the program"
