"""decode_attention against its float32 reference; interpreted on a CPU, compiled on a GPU."""

import dataclasses
import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from pallas_kernels.decode_attention import Implementation, decode_attention, pallas_triton, reference
from pallas_kernels.decode_attention.config import KernelConfig, kernel_config
from pallas_kernels.decode_attention.shapes import HEADS, DecodeInputs, Heads, random_inputs
from pallas_kernels.paged_attention import pallas_triton as paged_triton
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

IMPLEMENTATIONS: tuple[Implementation, ...] = ("portable", "pallas_triton")

CHUNK = 16
ONE_RANGE = KernelConfig(chunk_tokens=CHUNK, num_splits=1, min_split_chunks=1, num_warps=4, num_stages=2)
RANGES = dataclasses.replace(ONE_RANGE, num_splits=4)
LONG_RANGES = dataclasses.replace(ONE_RANGE, num_splits=4, min_split_chunks=2)
MANY_RANGES = dataclasses.replace(ONE_RANGE, num_splits=16)

# Nothing cached, one token, the borders of a chunk (and of blocks), of two, four and more chunks; unused rows between.
POSITIONS = (0, 1, -1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, -1, 4 * CHUNK - 1, 4 * CHUNK, 4 * CHUNK + 1, 139)


def run(inputs: DecodeInputs, implementation: Implementation | None) -> tuple[Array, Array]:
    call = jax.jit(decode_attention, static_argnames="implementation")
    return call(*inputs.arguments, implementation=implementation)


def run_kernel(inputs: DecodeInputs, config: KernelConfig) -> tuple[Array, Array]:
    return jax.jit(pallas_triton.decode_attention, static_argnames="config")(*inputs.arguments, config=config)


@functools.cache
def inputs_of(q_per_kv: int, head_dim: int, dtype: str, block_size: int, num_partials: int | None) -> DecodeInputs:
    heads = Heads(num_q_heads=2 * q_per_kv, num_kv_heads=2, head_dim=head_dim)
    rng = np.random.default_rng([q_per_kv, head_dim, block_size])
    return random_inputs(POSITIONS, heads, dtype, rng, block_size=block_size, num_partials=num_partials)


def check(inputs: DecodeInputs, out: Array, kv: Array) -> None:
    """Compares the outputs with those of float32 inputs, and the cache with what a scatter makes of it."""
    expected, _ = jax.jit(reference.decode_attention)(inputs.qkv.astype(jnp.float32), *_in_float32(inputs))
    is_used = np.asarray(inputs.positions) >= 0
    assert out.dtype == kv.dtype == inputs.kv.dtype
    assert_close(np.asarray(out)[is_used], np.asarray(expected)[is_used])
    assert not np.asarray(out, np.float32)[~is_used].any(), "rows that are not used are not zero"
    check_cache(inputs, kv)


def _in_float32(inputs: DecodeInputs) -> tuple[Array, ...]:
    return inputs.kv.astype(jnp.float32), *inputs.arguments[2:]


def check_cache(inputs: DecodeInputs, kv: Array) -> None:
    _, expected = jax.jit(reference.decode_attention)(*inputs.arguments)
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(bits(kv), bits(expected))
        return
    # Triton and XLA may fuse the rotation's multiplications and additions differently.
    assert_close(kv, expected)
    tables, positions = np.asarray(inputs.block_tables), np.asarray(inputs.positions)
    block_size = kv.shape[3]
    is_new = np.zeros((kv.shape[0], block_size), np.bool_)
    for seq in np.flatnonzero(positions >= 0):
        is_new[tables[seq, positions[seq] // block_size], positions[seq] % block_size] = True
    is_old = np.broadcast_to(~is_new[:, None, None, :], kv.shape[:-1])
    np.testing.assert_array_equal(bits(kv)[is_old], bits(inputs.kv)[is_old])


def bits(x: Array) -> np.ndarray:
    """As integers: NaN equals itself."""
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


CONFIGS = {"one_range": ONE_RANGE, "ranges": RANGES, "long_ranges": LONG_RANGES, "many_ranges": MANY_RANGES}

# (query heads per KV head, head_dim, dtype, block_size, partial sums of qkv)
KERNEL_CASES = {
    "group_1_head_dim_64": (1, 64, "float32", 8, None),
    "group_3_head_dim_64_partials": (3, 64, "float32", 16, 3),
    "group_4_head_dim_128": (4, 128, "bfloat16", 16, None),
    "group_4_head_dim_64_partials": (4, 64, "bfloat16", 32, 2),
    "group_3_head_dim_128_block_1": (3, 128, "float32", 1, None),
    "group_1_head_dim_128_block_64": (1, 128, "bfloat16", 64, 4),
    "head_dim_not_a_power_of_two": (3, 24, "float32", 8, 2),
}
FAST = {
    ("group_3_head_dim_64_partials", "long_ranges"),
    ("group_4_head_dim_128", "ranges"),
}


@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(case, config, marks=() if (case, config) in FAST else pytest.mark.slow)
        for case in KERNEL_CASES
        for config in CONFIGS
    ],
)
def test_kernel_matches_the_reference_however_the_context_is_split(case: str, config: str):
    inputs = inputs_of(*KERNEL_CASES[case])
    check(inputs, *run_kernel(inputs, CONFIGS[config]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_public_function_matches_the_reference(implementation: Implementation):
    inputs = inputs_of(3, 16, "float32", 8, None)
    check(inputs, *run(inputs, implementation))


def test_float32_qkv_is_rounded_to_the_cache_as_a_projection_in_its_dtype_is():
    inputs = inputs_of(2, 16, "bfloat16", 8, None)
    unrounded = dataclasses.replace(inputs, qkv=inputs.qkv.astype(jnp.float32))
    for a, b in zip(run(inputs, "pallas_triton"), run(unrounded, "pallas_triton"), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_partial_sums_give_the_bits_of_their_rounded_sum():
    inputs = inputs_of(2, 16, "bfloat16", 8, 3)
    total = (inputs.qkv[0] + inputs.qkv[1] + inputs.qkv[2]).astype(jnp.bfloat16)
    for a, b in zip(
        run(inputs, "pallas_triton"), run(dataclasses.replace(inputs, qkv=total), "pallas_triton"), strict=True
    ):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_decode_steps_one_after_another_equal_the_attention_of_the_whole_sequence(rng: np.random.Generator):
    """Each step attends over what the steps before it wrote."""
    inputs = random_inputs((0, 3), HEADS["tiny"], "float32", rng, block_size=16)
    kv = dense_kv = inputs.kv
    for step in range(3):
        now = dataclasses.replace(
            inputs,
            qkv=jnp.asarray(rng.standard_normal(inputs.qkv.shape, np.float32)),
            positions=inputs.positions + step,
        )
        out, kv = run_kernel(dataclasses.replace(now, kv=kv), RANGES)
        expected, dense_kv = run(dataclasses.replace(now, kv=dense_kv), "reference")
        assert_close(out, expected)
    np.testing.assert_allclose(kv, dense_kv, rtol=1e-6, atol=1e-6)


def test_a_sequence_gets_the_same_bits_whatever_shares_its_batch():
    inputs = inputs_of(*KERNEL_CASES["group_3_head_dim_64_partials"])
    together, _ = run_kernel(inputs, LONG_RANGES)
    for seq in (3, 9, 11):
        positions = np.where(np.arange(len(POSITIONS)) == seq, POSITIONS, -1).astype(np.int32)
        alone = dataclasses.replace(inputs, positions=jnp.asarray(positions))
        np.testing.assert_array_equal(run_kernel(alone, LONG_RANGES)[0][seq], together[seq])


def test_the_same_batch_twice_gives_the_same_bits():
    inputs = inputs_of(*KERNEL_CASES["group_4_head_dim_128"])
    for a, b in zip(run_kernel(inputs, RANGES), run_kernel(inputs, RANGES), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.slow
def test_layers_that_share_the_counters_agree_with_the_reference():
    """A launch leaves the counters for the next one as it found them; the interpreter gives each fresh ones."""
    inputs = inputs_of(3, 64, "float32", 16, None)

    def layers(qkv: Array, kv: Array, *rest: Array) -> list[Array]:
        return [pallas_triton.decode_attention(qkv * x, kv, *rest, config=RANGES)[0] for x in (1, 2, -1)]

    outs = jax.jit(layers)(*inputs.arguments)
    for out, factor in zip(outs, (1, 2, -1), strict=True):
        scaled = dataclasses.replace(inputs, qkv=inputs.qkv * factor)
        check(scaled, out, run_kernel(scaled, RANGES)[1])


def test_the_default_on_a_cpu_is_the_portable_form(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    inputs = inputs_of(3, 16, "float32", 8, None)
    np.testing.assert_array_equal(run(inputs, None)[0], run(inputs, "portable")[0])


def test_every_implementation_is_tested():
    assert set(get_args(Implementation)) == {"reference", *IMPLEMENTATIONS}


# The choice of splits.


def splits(num_seqs: int, max_context: int, head_dim: int = 128) -> int:
    config = kernel_config(
        num_seqs=num_seqs, num_kv_heads=8, head_dim=head_dim, max_context=max_context, dtype=jnp.bfloat16
    )
    return config.num_splits


def test_few_sequences_over_a_long_context_are_split_and_many_are_not():
    assert [splits(1, context) for context in (16, 255, 256, 512, 8192, 1 << 17)] == [1, 1, 2, 4, 32, 32]
    assert [splits(n, 512) for n in (32, 64, 256)] == [1, 1, 1]
    assert splits(32, 8192) == 1
    assert splits(1, 512, head_dim=64) == 4


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="chunk_tokens must be a power of two and at least 16, got 24"):
        dataclasses.replace(ONE_RANGE, chunk_tokens=24)
    with pytest.raises(ValueError, match="num_splits must be between 1 and 32, got 64"):
        dataclasses.replace(ONE_RANGE, num_splits=64)
    with pytest.raises(ValueError, match="min_split_chunks at least 1, got 4, 2 and 0"):
        dataclasses.replace(ONE_RANGE, min_split_chunks=0)


# Bad arguments.


def call_changed(implementation: str | None = None, **changes: Any) -> None:
    arguments = dict(zip(("qkv", "kv", "block_tables", "positions", "cos", "sin"), example().arguments, strict=True))
    keywords: Any = {"implementation": implementation}
    decode_attention(**(arguments | changes), **keywords)


def example() -> DecodeInputs:
    return inputs_of(3, 16, "float32", 8, None)


@pytest.mark.usefixtures("unchecked_annotations")
def test_arguments_that_do_not_fit_are_refused_by_name():
    x = example()
    with pytest.raises(ValueError, match=r"expected qkv \[num_seqs, qkv_width\]"):
        call_changed(qkv=x.qkv[0])
    with pytest.raises(ValueError, match="qkv holds one token of each of 12 sequences, but block_tables has 5 rows"):
        call_changed(block_tables=x.block_tables[:5])
    with pytest.raises(ValueError, match=r"qkv has width 150, which is not \(num_q_heads \+ 2 \* 2\) \* 16"):
        call_changed(qkv=x.qkv[:, :150])
    with pytest.raises(ValueError, match=r"cos and sin must be \[12, 8\] for 12 sequences and head_dim 16"):
        call_changed(cos=x.cos[:, :4])
    with pytest.raises(TypeError, match="qkv is bfloat16 and kv is float32"):
        call_changed(qkv=x.qkv.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="must hold integers, got int32 and float32"):
        call_changed(positions=x.positions.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"one of \['pallas_triton', 'portable', 'reference'\] or None, got 'cuda'"):
        call_changed(implementation="cuda")


def test_what_the_kernel_does_not_support_is_named_and_left_to_the_portable_form(monkeypatch: pytest.MonkeyPatch):
    inputs = inputs_of(3, 16, "float32", 6, None)
    with pytest.raises(NotImplementedError, match="block_size that is a power of two, got 6"):
        run(inputs, "pallas_triton")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    check(inputs, *run(inputs, None))


# Real sizes: compiled on a GPU; a few are interpreted among the slow tests.

needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU: minutes in the interpreter")
REAL_BATCHES = {
    "1x256": (255,),
    "1x2048": (2047,),
    "8x_mixed": (0, 17, 255, 256, 700, 1023, -1, 4000),
    "32x256": tuple(range(225, 257)),
    "64x_mixed": tuple(37 * i % 900 - 1 for i in range(64)),
}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("num_partials", [None, 4])
@pytest.mark.parametrize(
    ("batch", "heads", "dtype"),
    [
        pytest.param(batch, heads, "bfloat16", marks=() if batch == "8x_mixed" else needs_gpu)
        for batch in REAL_BATCHES
        for heads in ("8b", "1b", "135m")
    ]
    + [("8x_mixed", "135m", "float32"), pytest.param("32x256", "8b", "float32", marks=needs_gpu)],
)
def test_model_shapes_match_the_reference(
    batch: str, heads: str, dtype: str, num_partials: int | None, rng: np.random.Generator
):
    inputs = random_inputs(REAL_BATCHES[batch], HEADS[heads], dtype, rng, num_partials=num_partials)
    out, kv = run(inputs, "pallas_triton")
    check(inputs, out, kv)
    again, _ = run(inputs, "pallas_triton")
    np.testing.assert_array_equal(bits(again), bits(out))
    unfused = functools.partial(reference.decode_attention, attend=paged_triton.paged_attention)
    is_used = np.asarray(inputs.positions) >= 0
    assert_close(np.asarray(out)[is_used], np.asarray(jax.jit(unfused)(*inputs.arguments)[0])[is_used])
