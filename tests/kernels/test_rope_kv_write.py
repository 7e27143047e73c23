"""rope_kv_write's kernel against its reference; interpreted on a CPU, compiled on a GPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope_kv_write import Implementation, rope_kv_write
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

BLOCK_SIZE = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of the op, in its order."""

    qkv: jax.Array
    kv: jax.Array
    block_ids: jax.Array
    offsets: jax.Array
    cos: jax.Array
    sin: jax.Array

    def run(self, implementation: Implementation | None) -> tuple[np.ndarray, np.ndarray]:
        args = (getattr(self, field.name) for field in dataclasses.fields(self))
        q, kv = jax.jit(rope_kv_write, static_argnames="implementation")(*args, implementation=implementation)
        return np.asarray(q), np.asarray(kv)


def make_case(
    rng: np.random.Generator,
    *,
    num_tokens: int = 21,
    heads: tuple[int, int, int] = (4, 2, 16),
    dtype: Any = jnp.float32,
    num_partials: int = 1,
    is_dropped: bool = True,
) -> Case:
    """Every third token is dropped; the cache begins as NaN, so that a stray write shows as well as a missing one."""
    num_q_heads, num_kv_heads, head_dim = heads
    num_blocks = -(-num_tokens // BLOCK_SIZE) + 2
    cells = rng.permutation(num_blocks * BLOCK_SIZE)[:num_tokens].astype(np.int32)
    block_ids = cells // BLOCK_SIZE
    if is_dropped:
        block_ids[::3] = num_blocks
    width = (num_q_heads + 2 * num_kv_heads) * head_dim
    qkv = rng.standard_normal((num_partials, num_tokens, width), np.float32)
    angles = rng.uniform(0, 6, (num_tokens, head_dim // 2)).astype(np.float32)
    return Case(
        qkv=jnp.asarray(qkv, jnp.float32 if num_partials > 1 else dtype),
        kv=jnp.full((num_blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim), jnp.nan, dtype),
        block_ids=jnp.asarray(block_ids),
        offsets=jnp.asarray(cells % BLOCK_SIZE),
        cos=jnp.asarray(np.cos(angles)),
        sin=jnp.asarray(np.sin(angles)),
    )


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        pytest.param((4, 2, 16), jnp.bfloat16, id="tiny-bfloat16"),
        pytest.param((4, 2, 16), jnp.float32, id="tiny-float32", marks=pytest.mark.slow),
        pytest.param((9, 3, 64), jnp.bfloat16, id="smollm2-bfloat16", marks=pytest.mark.slow),
        pytest.param((8, 8, 24), jnp.float32, id="odd_width-float32"),
    ],
)
def test_the_kernel_equals_the_reference(rng: np.random.Generator, heads: tuple[int, int, int], dtype: Any):
    case = make_case(rng, heads=heads, dtype=dtype)
    (q, kv), (expected_q, expected_kv) = case.run("pallas_triton"), case.run("reference")
    assert q.dtype == kv.dtype == expected_q.dtype
    assert_close(q, expected_q)
    assert_close(kv, expected_kv)


@pytest.mark.parametrize("num_tokens", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (15, 16, 17))])
def test_numbers_of_tokens_around_a_block(rng: np.random.Generator, num_tokens: int):
    case = make_case(rng, num_tokens=num_tokens, is_dropped=False)
    for actual, expected in zip(case.run("pallas_triton"), case.run("reference"), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("implementation", ["reference", "pallas_triton"])
def test_partial_sums_are_added_up_and_rounded_first(rng: np.random.Generator, implementation: Implementation):
    case = make_case(rng, num_partials=3, dtype=jnp.bfloat16)
    total = (case.qkv[0] + case.qkv[1] + case.qkv[2]).astype(jnp.bfloat16)[None]
    for a, b in zip(case.run(implementation), dataclasses.replace(case, qkv=total).run(implementation), strict=True):
        assert a.tobytes() == b.tobytes()


def test_the_reference_turns_pairs_half_a_head_apart_and_drops_tokens(rng: np.random.Generator):
    case = make_case(rng)
    q, kv = case.run("reference")
    qkv, cos, sin = (np.asarray(x, np.float64) for x in (case.qkv[0], case.cos, case.sin))
    for t in range(21):
        heads = qkv[t].reshape(8, 16)
        turned = (heads[:, :8] + 1j * heads[:, 8:]) * (cos[t] + 1j * sin[t])
        turned = np.concatenate([turned.real, turned.imag], axis=-1)
        assert_close(q[t], turned[:4], jnp.float32)
        if t % 3:
            cell = kv[case.block_ids[t], :, :, case.offsets[t]]
            assert_close(cell, np.stack([turned[4:6], heads[6:]]), jnp.float32)
    assert np.isfinite(kv).sum() == 14 * 2 * 2 * 16, "only the cells of the tokens that are kept are written"


@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_shapes_and_dtypes_are_named(rng: np.random.Generator):
    case = make_case(rng)
    with pytest.raises(ValueError, match=r"qkv has width 120, which is not \(num_q_heads \+ 2 \* 2\) \* 16"):
        dataclasses.replace(case, qkv=case.qkv[..., :120]).run(None)
    with pytest.raises(ValueError, match=r"block_ids and offsets must be \[21\] for 21 tokens, got \(20,\)"):
        dataclasses.replace(case, block_ids=case.block_ids[:20]).run(None)
    with pytest.raises(ValueError, match=r"cos and sin must be \[21, 8\]"):
        dataclasses.replace(case, cos=case.cos[:, :4]).run(None)
    with pytest.raises(TypeError, match=r"qkv is bfloat16 in 1 partial sums and kv is float32"):
        dataclasses.replace(case, qkv=case.qkv.astype(jnp.bfloat16)).run(None)
    with pytest.raises(ValueError, match="implementation 'magic' is unknown"):
        case.run("magic")  # pyright: ignore[reportArgumentType]
