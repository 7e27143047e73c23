"""The raw Triton kernels of maf_mvm compile for an H200 where triton is installed, and refuse well elsewhere."""

import importlib.util
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.maf_mvm
from pallas_kernels.maf_mvm import ProjectionSlots, maf_mvm, token_tile_size
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.segments import build_segments
from tests.support.aot_h200 import H200, h200_target
from tests.support.maf_cases import Problem, make_case
from tests.support.tolerances import assert_close

needs_triton = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "jax_triton")),
    reason="needs pip install jax-triton==0.4.1 (190 MB, with triton)",
)


@pytest.fixture
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if nothing had imported the implementation yet."""
    monkeypatch.delitem(sys.modules, "pallas_kernels.maf_mvm.jax_triton", raising=False)
    monkeypatch.delattr(pallas_kernels.maf_mvm, "jax_triton", raising=False)
    return monkeypatch


def compile_group(h200: H200, group: Group, num_tokens: int, dtype: type) -> jax.stages.Compiled:
    in_features, widths = named_shapes()["llama-3-8b"].group(group)
    rows, num_slots, rank = len(widths) * 8, 64, 8
    struct = jax.ShapeDtypeStruct
    slots = ProjectionSlots(
        a=struct((2, num_slots, rows, in_features), dtype),  # pyright: ignore[reportArgumentType]
        b=struct((2, num_slots, rank, sum(widths)), dtype),  # pyright: ignore[reportArgumentType]
        scale=struct((2, num_slots, len(widths)), jnp.float32),  # pyright: ignore[reportArgumentType]
        widths=widths,
    )

    def call(x: jax.Array, slots: ProjectionSlots, weights: jax.Array, base: jax.Array, layer: jax.Array) -> jax.Array:
        segments = build_segments(weights, tile_size=token_tile_size(num_tokens))
        return maf_mvm(x, slots, segments, base, layer=layer, implementation="jax_triton")

    return h200.compile(
        call,
        struct((num_tokens, in_features), dtype),
        slots,
        struct((num_tokens, 1, num_slots), jnp.float32),
        struct((num_tokens, sum(widths)), dtype),
        struct((), jnp.int32),
    )


@needs_triton
def test_a_decode_batch_compiles_to_two_kernels(h200: H200) -> None:
    text = compile_group(h200, "qkv", 32, jnp.bfloat16).as_text()
    assert text is not None
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 2


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("dtype", "num_tokens"),
    [(jnp.bfloat16, 1), (jnp.bfloat16, 512), (jnp.float32, 64)],
    ids=["bfloat16-1", "bfloat16-512", "float32-64"],
)
def test_every_group_of_the_8b_shape_compiles(h200: H200, group: Group, dtype: type, num_tokens: int) -> None:
    stats = compile_group(h200, group, num_tokens, dtype).memory_analysis()
    assert stats is not None
    assert stats.temp_size_in_bytes < 64 * 8 * 4096 * 2  # the slot array is read in place


def test_without_triton_it_says_what_to_install(rng: np.random.Generator, unloaded: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    unloaded.setattr(importlib.util, "find_spec", lambda name: None if name == "jax_triton" else find_spec(name))
    case = make_case(rng, Problem())
    with pytest.raises(NotImplementedError, match=r"needs the package .*jax-triton; run: pip install"):
        maf_mvm(case.x, case.slots, case.segments, case.base, layer=1, implementation="jax_triton")


@needs_triton
def test_it_refuses_a_jax_that_jax_triton_does_not_fit(rng: np.random.Generator, unloaded: pytest.MonkeyPatch) -> None:
    unloaded.setattr(jax, "__version_info__", (0, 12, 0, 1))
    case = make_case(rng, Problem())
    with pytest.raises(NotImplementedError, match=r"does not work with jax .* use jax 0.11, or another implementation"):
        maf_mvm(case.x, case.slots, case.segments, case.base, layer=1, implementation="jax_triton")


@needs_triton
def test_it_needs_a_gpu(rng: np.random.Generator) -> None:
    case = make_case(rng, Problem())
    with pytest.raises(NotImplementedError, match="Triton kernels need a GPU; on a CPU use 'loop'"):
        maf_mvm(case.x, case.slots, case.segments, case.base, layer=1, implementation="jax_triton")


def test_where_both_kernels_refuse_the_dense_form_answers(
    rng: np.random.Generator, unloaded: pytest.MonkeyPatch
) -> None:
    unloaded.setattr(jax, "default_backend", lambda: "gpu")
    case = make_case(rng, Problem(slot_rank=6))
    actual = maf_mvm(case.x, case.slots, case.segments, case.base, layer=1)
    assert_close(actual, maf_mvm(case.x, case.slots, case.segments, case.base, layer=1, implementation="reference"))
