"""The kernel of rope_kv_write becomes H200 machine code, on a machine without a GPU."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.rope_kv_write import rope_kv_write
from tests.support.aot_h200 import H200, h200_target


@pytest.fixture(scope="module")
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


@pytest.mark.parametrize(
    ("heads", "num_tokens", "num_partials"),
    [((32, 8, 128), 8192, 1), ((9, 3, 64), 256, 1), ((4, 2, 24), 40, 3)],
    ids=["8b", "smollm2", "odd_width"],
)
def test_it_compiles_and_updates_the_cache_in_place(h200: H200, heads, num_tokens: int, num_partials: int):
    num_q_heads, num_kv_heads, head_dim = heads
    dtype = jnp.bfloat16 if num_partials == 1 else jnp.float32
    kv = jax.ShapeDtypeStruct((1024, 2, num_kv_heads, 16, head_dim), jnp.bfloat16)
    ids, angles = (
        jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
        jax.ShapeDtypeStruct((num_tokens, head_dim // 2), jnp.float32),
    )
    qkv = jax.ShapeDtypeStruct((num_partials, num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim), dtype)
    compiled = h200.compile(rope_kv_write, qkv, kv, ids, ids, angles, angles, donate_argnums=1)
    assert "rope_kv_write" in str(compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == kv.size * kv.dtype.itemsize
    assert memory.temp_size_in_bytes < 1 << 16
