"""The programs that the bench of maf_mvm times hold the op and nothing else, as compiled for an H200."""

import functools
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.maf_mvm import ProjectionSlots, baselines, bench, token_tile_size
from pallas_kernels.maf_mvm.bench_cases import UNROLL, Problem, make_batch, make_site
from pallas_kernels.segments import build_segments
from tests.support.aot_h200 import H200, h200_target

PROBLEM = Problem(
    in_features=512,
    widths=(512, 256, 256),
    num_adapters=16,
    rank=8,
    slot_rank=8,
    mixes="distinct",
    mix_size=3,
    dtype="bfloat16",
    cold_bytes=2**22,
    has_projection=True,
)


@pytest.fixture(scope="module")
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


def kernels_of_the_innermost_loops(h200: H200, column: bench.Column, batch_size: int) -> list[list[str]]:
    """For each loop that holds no other: names of the kernels that one iteration launches."""
    site = jax.eval_shape(lambda: make_site(PROBLEM))
    batch = jax.eval_shape(lambda site: make_batch(site, batch_size), site)
    inputs = bench.inputs_of(column, site, batch)
    text = h200.compile(functools.partial(bench.chain, column, 2), inputs).as_text()
    assert text is not None
    loops = []
    for name in re.findall(r" body=%([\w.-]+)", text):
        body = text.split(f"\n%{name} (")[1].split("\n}")[0]
        lines = re.findall(r"^ +(?:ROOT )?%([\w-]+)[\w.-]* = (?:\(.*?\)|\S+) ([\w-]+)\(", body, re.MULTILINE)
        if "while" not in (op for _, op in lines):
            loops.append([name for name, op in lines if op in ("fusion", "custom-call", "copy", "wrapped_slice")])
    return loops


def test_an_op_of_the_timed_loop_is_two_launches_and_its_layer_costs_none(h200: H200) -> None:
    column = bench.kernel_columns(["pallas_triton"], "pallas_triton")["maf_pallas_triton"]
    (kernels,) = kernels_of_the_innermost_loops(h200, column, 4)
    assert kernels.count("pallas_call") == 2 * UNROLL
    assert len(kernels) == 2 * UNROLL + 1  # the loop's counter


@pytest.mark.parametrize(("name", "gemms_per_op"), [("dense", 4), ("site_base", 1)])
def test_what_does_not_depend_on_the_base_stays_in_the_timed_loop(h200: H200, name: str, gemms_per_op: int) -> None:
    columns = bench.kernel_columns([], "pallas_triton") | bench.site_columns([])
    (kernels,) = kernels_of_the_innermost_loops(h200, columns[name], 4)
    assert sum("gemm" in kernel for kernel in kernels) == gemms_per_op * UNROLL


@pytest.mark.slow
def test_the_naive_loop_takes_one_adapter_after_another(h200: H200) -> None:
    column = bench.kernel_columns([], "pallas_triton")["naive"]
    loops = kernels_of_the_innermost_loops(h200, column, 5)  # 15 adapters: an iteration of 8, then 7
    assert max(sum("gemm" in kernel for kernel in kernels) for kernels in loops) >= 8 * 4


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [32, 512])
def test_the_baselines_of_a_step_compile_for_its_shapes(h200: H200, num_tokens: int) -> None:
    weights = jax.ShapeDtypeStruct((num_tokens, 1, 64), jnp.float32)
    slots = jax.eval_shape(
        lambda: ProjectionSlots(
            a=jnp.zeros((2, 64, 3 * 8, 512), jnp.bfloat16),
            b=jnp.zeros((2, 64, 8, 1024), jnp.bfloat16),
            scale=jnp.zeros((2, 64, 3)),
            widths=(512, 256, 256),
        )
    )
    x = jax.ShapeDtypeStruct((num_tokens, 512), jnp.bfloat16)
    base = jax.ShapeDtypeStruct((num_tokens, 1024), jnp.bfloat16)

    def copy_sgmv(x, slots, weights, base):
        segments = build_segments(weights, tile_size=token_tile_size(num_tokens))
        composites = baselines.composites_of_step(segments)
        return baselines.copy_sgmv(x, slots, composites, base, jnp.int32(1), implementation="pallas_triton")

    def bmm(x, slots, weights, base):
        segments = build_segments(weights, tile_size=token_tile_size(num_tokens), max_segments=8)
        return baselines.bmm_of_step(x, slots, segments, base, jnp.int32(1))

    for run in (copy_sgmv, bmm):
        text = h200.compile(run, x, slots, weights, base).as_text()
        assert text is not None
        assert ("pallas_call" in text) is (run is copy_sgmv)
