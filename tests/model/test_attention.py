"""attend gives the same outputs and the same cache whichever kernels it takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dymerge_jax.attention import AttentionContext, attend
from dymerge_jax.config import LlamaConfig, named_config
from dymerge_jax.layers import rope_angles
from pallas_kernels.paged_attention import build_query_tiles
from pallas_kernels.paged_attention.api import Implementation
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

CONFIG = named_config("tiny")
BLOCK_SIZE, BLOCKS_PER_SEQ = 8, 4
CONTEXTS = (0, 7, 8, 21, 5)
IS_USED = (1, 1, 0, 1, 1)


@dataclasses.dataclass(frozen=True)
class Step:
    """Arguments of `attend` for one new token of each of five sequences, of which the third is not used."""

    qkv: jax.Array
    kv: jax.Array
    context: AttentionContext
    config: LlamaConfig = CONFIG

    def run(self, implementation: Implementation | None) -> tuple[np.ndarray, np.ndarray]:
        """The outputs of the used rows, and the cache."""
        call = jax.jit(attend, static_argnames=("config", "implementation"))
        out, kv = call(self.qkv, self.kv, self.context, config=self.config, implementation=implementation)
        return np.asarray(out)[np.asarray(IS_USED, bool)], np.asarray(kv)


@pytest.fixture
def step(rng: np.random.Generator) -> Step:
    num_seqs = len(CONTEXTS)
    num_blocks = num_seqs * BLOCKS_PER_SEQ
    contexts, is_used = np.array(CONTEXTS, np.int32), np.array(IS_USED, np.int32)
    tables = rng.permutation(num_blocks).astype(np.int32).reshape(num_seqs, BLOCKS_PER_SEQ)
    kv = np.full((num_blocks, 2, CONFIG.num_kv_heads, BLOCK_SIZE, CONFIG.head_dim), np.nan, np.float32)
    for seq, context in enumerate(CONTEXTS):
        for position in range(context):
            cell = kv[tables[seq, position // BLOCK_SIZE], :, :, position % BLOCK_SIZE]
            cell[...] = rng.standard_normal(cell.shape)
    cos, sin = rope_angles(jnp.asarray(contexts * is_used), CONFIG.head_dim, CONFIG.rope)
    blocks = tables[np.arange(num_seqs), contexts // BLOCK_SIZE]
    starts = jnp.arange(num_seqs, dtype=jnp.int32)
    context = AttentionContext(
        cos=cos,
        sin=sin,
        block_ids=jnp.asarray(np.where(is_used, blocks, num_blocks).astype(np.int32)),
        offsets=jnp.asarray(contexts % BLOCK_SIZE),
        block_tables=jnp.asarray(tables),
        tiles=build_query_tiles(starts, jnp.asarray(is_used), jnp.asarray(contexts), num_tokens=num_seqs, tile_size=1),
    )
    qkv = rng.standard_normal((num_seqs, CONFIG.q_width + 2 * CONFIG.kv_width), np.float32)
    return Step(jnp.asarray(qkv), jnp.asarray(kv), context)


def test_a_decode_step_in_one_kernel_equals_the_steps_one_after_another(step: Step):
    assert step.context.is_decode
    out, kv = step.run("pallas_triton")
    expected, expected_kv = step.run("reference")
    assert_close(out, expected)
    # The interpreter multiplies and adds as the scatter's path does, to the bit.
    np.testing.assert_array_equal(kv, expected_kv)


def test_the_default_on_a_cpu_is_the_portable_path(step: Step, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    for a, b in zip(step.run(None), step.run("portable"), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", ["portable", "pallas_triton"])
def test_partial_sums_are_added_up_first(step: Step, implementation: Implementation):
    expected, expected_kv = step.run("reference")
    halves = dataclasses.replace(step, qkv=jnp.stack([step.qkv * 0.25, step.qkv * 0.75]))
    out, kv = halves.run(implementation)
    assert_close(out, expected)
    np.testing.assert_allclose(kv, expected_kv, rtol=1e-5, atol=1e-5)


def test_several_tokens_of_a_sequence_are_no_decode_step(step: Step):
    """Their keys must be in the cache before any of them attends."""
    fewer = dataclasses.replace(step.context.tiles, starts=step.context.tiles.starts[:3])
    assert not dataclasses.replace(step.context, tiles=fewer).is_decode
    wider = dataclasses.replace(step.context.tiles, tile_size=16)
    assert not dataclasses.replace(step.context, tiles=wider).is_decode
