"""Both implementations of add_rms_norm; the kernel is interpreted on a CPU, compiled on a GPU and for an H200."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_rms_norm import Implementation, add_rms_norm
from tests.support.aot_h200 import H200, h200_target
from tests.support.tolerances import assert_close

EPS = 1e-5
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "pallas_triton")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
    *([pytest.mark.gpu] if jax.default_backend() == "gpu" else []),  # there the same cases run the compiled kernel
]
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
Args = tuple[jax.Array, jax.Array, jax.Array]


@pytest.fixture
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


def arguments(
    rng: np.random.Generator,
    *,
    num_tokens: int = 3,
    hidden: int = 64,
    num_partials: int = 2,
    dtype: Any = jnp.bfloat16,
    delta_dtype: Any = jnp.float32,
) -> Args:
    """x, delta and weight of order 1."""
    x, *delta = rng.standard_normal((1 + num_partials, num_tokens, hidden), np.float32)
    weight = rng.uniform(0.5, 1.5, hidden)
    return jnp.asarray(x, dtype), jnp.asarray(np.stack(delta), delta_dtype), jnp.asarray(weight, dtype)


def run(args: Args, implementation: Implementation | None = "pallas_triton") -> tuple[jax.Array, jax.Array]:
    return add_rms_norm(*args, eps=EPS, implementation=implementation)


def assert_matches_reference(args: Args) -> None:
    """The sum has the bits of the reference, the norm its values."""
    total, normed = run(args)
    expected_total, expected = run(args, "reference")
    assert total.dtype == normed.dtype == args[0].dtype
    assert_same_bits(total, expected_total)
    assert_close(normed, expected)


def assert_same_bits(actual: jax.Array, expected: jax.Array) -> None:
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


@each_implementation
@each_dtype
def test_it_is_the_residual_sum_and_its_rms_norm(
    rng: np.random.Generator, implementation: Implementation, dtype: Any
) -> None:
    args = arguments(rng, dtype=dtype)
    total, normed = run(args, implementation)
    x, delta, weight = (np.asarray(array, np.float64) for array in args)
    expected = x + delta.sum(0)
    assert_close(total, expected)
    expected = np.asarray(total, np.float64)
    assert_close(normed, expected / np.sqrt((expected**2).mean(1, keepdims=True) + EPS) * weight)


@each_dtype
@pytest.mark.parametrize("hidden", [64, 96, 576, pytest.param(4096, marks=pytest.mark.slow)])
def test_every_width_matches_the_reference(rng: np.random.Generator, dtype: Any, hidden: int) -> None:
    assert_matches_reference(arguments(rng, hidden=hidden, dtype=dtype))


@each_dtype
@pytest.mark.parametrize("num_partials", [1, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4, 5, 6, 7))])
def test_every_number_of_partial_sums_matches_the_reference(
    rng: np.random.Generator, dtype: Any, num_partials: int
) -> None:
    assert_matches_reference(arguments(rng, num_partials=num_partials, dtype=dtype))
    assert_matches_reference(arguments(rng, num_partials=num_partials, dtype=dtype, delta_dtype=dtype))


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_every_number_of_rows_matches_the_reference(rng: np.random.Generator, num_tokens: int) -> None:
    assert_matches_reference(arguments(rng, num_tokens=num_tokens, hidden=96))


@each_implementation
def test_partial_sums_are_added_in_order_and_rounded_once(
    rng: np.random.Generator, implementation: Implementation
) -> None:
    # 1 + 2^-8 is no bfloat16, and of these float32 partial sums another order would lose the last one.
    x = jnp.zeros((1, 64), jnp.bfloat16)
    parts = [2.0**25, -(2.0**25), 1.0, 2.0**-8, 2.0**-20]
    delta = jnp.broadcast_to(jnp.asarray(parts, jnp.float32)[:, None, None], (5, 1, 64))
    total, normed = run((x, delta, jnp.ones(64, jnp.bfloat16)), implementation)
    assert_same_bits(total, jnp.full((1, 64), 1 + 2.0**-7, jnp.bfloat16))
    assert_same_bits(normed, jnp.ones((1, 64), jnp.bfloat16))


@each_implementation
def test_rows_that_are_not_finite_poison_no_other(rng: np.random.Generator, implementation: Implementation) -> None:
    x, delta, weight = arguments(rng, num_tokens=4, hidden=96)
    sound = run((x, delta, weight), implementation)
    broken = run((x.at[1].set(jnp.inf), delta.at[1, 2].set(jnp.nan), weight), implementation)
    for actual, expected in zip(broken, sound, strict=True):
        assert_same_bits(actual[jnp.asarray([0, 3])], expected[jnp.asarray([0, 3])])
        assert not np.isfinite(np.asarray(actual[1:3], np.float32)).all(1).any()


@each_implementation
def test_a_row_of_zeros_stays_zero(implementation: Implementation) -> None:
    args = jnp.zeros((2, 96)), jnp.zeros((3, 2, 96)), jnp.ones(96)
    for y in run(args, implementation):
        assert_same_bits(y, jnp.zeros((2, 96)))


@each_implementation
def test_a_row_gets_the_same_bits_alone_and_twice(rng: np.random.Generator, implementation: Implementation) -> None:
    x, delta, weight = arguments(rng)
    for y, again in zip(run((x, delta, weight), implementation), run((x, delta, weight), implementation), strict=True):
        assert_same_bits(y, again)
    alone = run((x[1:2], delta[:, 1:2], weight), implementation)
    for y, row in zip(run((x, delta, weight), implementation), alone, strict=True):
        assert_same_bits(y[1:2], row)


def test_none_picks_one_of_them(rng: np.random.Generator) -> None:
    args = arguments(rng)
    is_gpu = jax.default_backend() == "gpu"
    for y, expected in zip(run(args, None), run(args, "pallas_triton" if is_gpu else "reference"), strict=True):
        assert_same_bits(y, expected)


@pytest.mark.usefixtures("unchecked_annotations")
@each_implementation
def test_wrong_shapes_and_dtypes_are_named(rng: np.random.Generator, implementation: Implementation) -> None:
    x, delta, weight = arguments(rng)
    for broken, text in [
        ((x[:, :32], delta, weight), r"x has shape \(3, 32\), delta \(2, 3, 64\) and weight \(64,\); expected"),
        ((x, delta[0], weight), r"delta \(3, 64\) and .* \[num_partials, num_tokens, hidden\]"),
        ((x, delta[:0], weight), r"delta \(0, 3, 64\) and .* at least one partial sum"),
        ((x, delta[:, :2], weight), r"delta \(2, 2, 64\)"),
        ((x, delta, weight[:32]), r"weight \(32,\)"),
    ]:
        with pytest.raises(ValueError, match=text):
            run(broken, implementation)
    for broken, text in [
        ((x, delta, weight.astype(jnp.float32)), "x is bfloat16, delta float32 and weight float32; expected one dtype"),
        ((x, delta.astype(jnp.float16), weight), "delta float16 and weight bfloat16; expected one dtype, or delta in"),
        ((x.astype(jnp.float32), delta.astype(jnp.bfloat16), weight.astype(jnp.float32)), "x is float32, delta bfloat"),
        ((x.astype(jnp.float16), delta, weight.astype(jnp.float16)), "x is float16; expected float32 or bfloat16"),
    ]:
        with pytest.raises(TypeError, match=text):
            run(broken, implementation)


@pytest.mark.usefixtures("unchecked_annotations")
def test_an_unknown_implementation_is_named(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="'abacus' is unknown; expected 'reference' or 'pallas_triton'"):
        add_rms_norm(*arguments(rng), eps=EPS, implementation="abacus")  # pyright: ignore[reportArgumentType]


def structs(num_tokens: int, hidden: int, num_partials: int, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    struct = jax.ShapeDtypeStruct
    delta = struct((num_partials, num_tokens, hidden), jnp.float32)
    return struct((num_tokens, hidden), dtype), delta, struct((hidden,), dtype)


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "num_partials", "dtype"),
    [
        (1, 576, 1, jnp.float32),
        (32, 4096, 4, jnp.bfloat16),
        (64, 4096, 8, jnp.bfloat16),
        pytest.param(256, 8192, 8, jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_it_compiles_to_one_launch_for_an_h200(
    h200: H200, num_tokens: int, hidden: int, num_partials: int, dtype: Any
) -> None:
    compiled = h200.compile(
        lambda *args: add_rms_norm(*args, eps=EPS), *structs(num_tokens, hidden, num_partials, dtype)
    )
    entry = str(compiled.as_text()).split("ENTRY")[1]
    launches = [line for line in entry.splitlines() if " fusion(" in line or " custom-call(" in line or " copy" in line]
    assert len(launches) == 1
    assert "add_rms_norm" in launches[0]


def test_the_rows_of_a_prefill_are_one_launch_too(h200: H200) -> None:
    text = h200.compile(lambda *args: add_rms_norm(*args, eps=EPS), *structs(8192, 4096, 1)).as_text()
    assert text is not None
    assert text.count("custom-call(") == 1
    assert "fusion(" not in text


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_on_a_gpu_decode_shapes_match_the_reference(rng: np.random.Generator) -> None:
    for num_tokens, hidden, num_partials in ((1, 576, 1), (32, 4096, 4), (64, 4096, 8)):
        assert_matches_reference(arguments(rng, num_tokens=num_tokens, hidden=hidden, num_partials=num_partials))
