"""The step programs compile for a GPU that has less shared memory than an H200, with block sizes that fit."""

from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from tests.support.aot_h200 import H200, l40_target
from tests.support.compiled_steps import compile_step, kernels_of


@pytest.fixture(scope="module")
def l40() -> Iterator[H200]:
    with l40_target() as target:
        yield target


@pytest.mark.parametrize(
    ("size", "num_tokens", "num_seqs"),
    [
        ("llama-3-8b", 32, 32),
        *(
            pytest.param("llama-3-8b", num_tokens, num_seqs, marks=pytest.mark.slow)
            for num_tokens, num_seqs in [(1, 1), (16, 16), (64, 64), (128, 32), (512, 32), (8192, 4)]
        ),
        *(pytest.param("llama-3.2-1b", n, 32, marks=pytest.mark.slow) for n in (32, 512, 2048)),
        pytest.param("smollm2-135m", 512, 4, marks=pytest.mark.slow),
    ],
)
def test_a_step_program_compiles_with_our_kernels(l40: H200, size: str, num_tokens: int, num_seqs: int) -> None:
    compiled, *_ = compile_step(l40, size, jnp.bfloat16, num_tokens, num_seqs, gated=False)
    linear = {"lora_linear", "lora_swiglu"} if num_tokens <= 64 else {"maf_mvm_shrink", "maf_mvm_expand"}
    attention = {"decode_paged_attention"} if num_tokens == num_seqs else {"paged_attention", "rope_kv_write"}
    assert kernels_of(compiled) >= linear | attention | {"add_rms_norm"}
