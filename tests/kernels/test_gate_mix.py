"""Both implementations of gate_mix against a loop over tokens; the kernel is interpreted where there is no GPU."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gate_mix import ALL_EXPERTS, NO_GATE, Implementation, gate_mix
from pallas_kernels.gate_mix.config import kernel_config
from tests.support.gate_cases import LAYER, GateCase, expected, random_case, structs
from tests.support.tolerances import assert_close

IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "pallas_triton")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
    *([pytest.mark.gpu] if jax.default_backend() == "gpu" else []),  # there the same cases run the compiled kernel
]
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def assert_is_the_formula(case: GateCase, implementation: Implementation | None = "pallas_triton") -> None:
    """No tolerance for bfloat16: x is widened, and nothing is rounded to it."""
    actual = case.run(implementation)
    assert actual.dtype == np.float32
    assert_close(actual, expected(case).astype(np.float32))


@each_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_adds_the_weights_of_the_tokens_experts_to_their_slots(
    rng: np.random.Generator, implementation: Implementation, dtype: Any
) -> None:
    case = random_case(rng, dtype=dtype)
    assert set(case.set_ids.flat) == {NO_GATE, ALL_EXPERTS, 0, 1, 2}
    assert_is_the_formula(case, implementation)


@pytest.mark.parametrize(
    ("in_features", "sizes", "num_gates", "num_slots"),
    [
        (576, (8, 3), 3, 64),
        pytest.param(1, (1,), 1, 1, marks=pytest.mark.slow),
        pytest.param(64, (2,), 1, 3, marks=pytest.mark.slow),
        pytest.param(1536, (20, 2), 2, 130, marks=pytest.mark.slow),
        pytest.param(4096, (8,), 3, 64, marks=pytest.mark.slow),
        pytest.param(14336, (8, 5), 1, 64, marks=pytest.mark.slow),
        pytest.param(96, (128, 33), 2, 300, marks=pytest.mark.slow),  # several blocks of slots
    ],
)
def test_every_shape_equals_the_formula(
    rng: np.random.Generator, in_features: int, sizes: tuple[int, ...], num_gates: int, num_slots: int
) -> None:
    sets = [i % len(sizes) for i in range(3)]
    case = random_case(rng, sets=sets, in_features=in_features, sizes=sizes, num_gates=num_gates, num_slots=num_slots)
    assert_is_the_formula(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_shapes_equal_the_formula(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(1, 12, rng.integers(1, 5))]
    case = random_case(
        rng,
        sets=[int(s) for s in rng.integers(-1, len(sizes), rng.integers(1, 20))],
        in_features=int(rng.integers(1, 700)),
        sizes=sizes,
        num_gates=int(rng.integers(1, 4)),
        num_slots=int(rng.integers(1, 100)),
        dtype=[jnp.float32, jnp.bfloat16][int(rng.integers(2))],
        is_base_shared=bool(rng.integers(2)),
    )
    for implementation in IMPLEMENTATIONS:
        assert_is_the_formula(case, implementation)


def one_set(rng: np.random.Generator, **rules: Any) -> GateCase:
    """16 tokens that all use the first set, of four experts, with the given rules."""
    case = random_case(rng, sets=[0] * 16)
    rows = {name: np.broadcast_to(np.int32(value), 16).copy() for name, value in rules.items()}
    experts = np.tile(np.arange(12, dtype=np.int32) % 5 - 1, (16, 1))
    return dataclasses.replace(case, experts=experts, **rows)


@each_implementation
def test_every_rule_equals_the_formula(rng: np.random.Generator, implementation: Implementation) -> None:
    rules = np.asarray([(k, r, a) for k in (1, 2, 3, 4) for r in (0, 1) for a in (0, 1)])
    case = one_set(rng)
    top_k, renormalize, is_absolute = rules.T.astype(np.int32)
    assert_is_the_formula(
        dataclasses.replace(case, top_k=top_k, renormalize=renormalize, is_absolute=is_absolute), implementation
    )


@each_implementation
@pytest.mark.parametrize(("top_k", "kept"), [(1, [1, 0, 0, 0]), (3, [1 / 3, 1 / 3, 1 / 3, 0])])
def test_equally_likely_experts_are_kept_by_their_order(
    rng: np.random.Generator, implementation: Implementation, top_k: int, kept: list[float]
) -> None:
    case = one_set(rng, top_k=top_k, renormalize=1, is_absolute=0)
    case.gates[LAYER] = case.gates[LAYER, :, :, :1]
    slots = np.asarray([2, 0, 3, 1] * 3, np.int32)
    case = dataclasses.replace(case, experts=np.tile(slots, (16, 1)), base=np.zeros_like(case.base))
    np.testing.assert_allclose(
        case.run(implementation), np.broadcast_to(np.asarray(kept)[slots], (16, 2, 12)), rtol=1e-6
    )


@each_implementation
def test_the_sign_counts_only_where_the_rule_says_so(rng: np.random.Generator, implementation: Implementation) -> None:
    case = one_set(rng, top_k=1, renormalize=1, is_absolute=1)
    turned = dataclasses.replace(case, gates=-case.gates)
    np.testing.assert_array_equal(case.run(implementation), turned.run(implementation))
    signed = (dataclasses.replace(c, is_absolute=np.zeros(16, np.int32)) for c in (case, turned))
    assert (np.abs(np.subtract(*(c.run(implementation) for c in signed))).max(axis=(1, 2)) > 0.5).all()


@pytest.mark.parametrize(("in_features", "num_gates"), [(100, 2), pytest.param(14336, 1, marks=pytest.mark.slow)])
def test_a_token_gets_the_same_bits_from_the_kernel_alone_and_in_a_batch(
    rng: np.random.Generator, in_features: int, num_gates: int
) -> None:
    case = random_case(rng, in_features=in_features, num_gates=num_gates)
    together = case.run("pallas_triton")
    for token in range(16):
        alone = case.rows(slice(token, token + 1)).run("pallas_triton")
        assert alone.tobytes() == together[token : token + 1].tobytes()


@each_implementation
def test_tokens_without_a_gate_keep_their_weights_whatever_x_and_gates_hold(
    rng: np.random.Generator, implementation: Implementation
) -> None:
    case = random_case(rng)
    nothing = dataclasses.replace(
        case,
        x=jnp.full_like(case.x, jnp.nan),
        gates=np.full_like(case.gates, np.nan),
        set_ids=np.full_like(case.set_ids, NO_GATE),
    )
    np.testing.assert_array_equal(nothing.run(implementation), np.broadcast_to(case.base, (16, 2, 12)))


@each_implementation
def test_a_token_that_is_not_finite_poisons_no_other(rng: np.random.Generator, implementation: Implementation) -> None:
    case = one_set(rng)
    sound = case.run(implementation)
    broken = dataclasses.replace(case, x=case.x.at[1].set(jnp.nan)).run(implementation)
    np.testing.assert_array_equal(np.delete(broken, 1, 0), np.delete(sound, 1, 0))
    has_expert = case.experts[1] >= 0
    assert np.isnan(broken[1, :, has_expert]).all()
    np.testing.assert_array_equal(broken[1][:, ~has_expert], np.tile(case.base[1][:, ~has_expert], (2, 1)))


def test_none_picks_the_kernel_for_few_tokens_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(implementation: Implementation | None, *, num_tokens: int = 4, num_experts: int = 8) -> int:
        def run(*arrays: Any) -> Any:
            return gate_mix(*arrays[:-1], layer=arrays[-1], implementation=implementation)

        arrays = structs(num_tokens, 64, 2, num_experts=num_experts, dtype=jnp.float32)
        return str(jax.make_jaxpr(run)(*arrays)).count("pallas_call")

    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert (kernels(None), kernels("reference"), kernels("pallas_triton")) == (0, 0, 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [kernels(None, num_tokens=n) for n in (1, 64, 65)] == [1, 1, 0]
    assert (kernels(None, num_experts=129), kernels("reference")) == (0, 0)


def test_too_many_experts_are_refused_by_the_kernel_alone(rng: np.random.Generator) -> None:
    with pytest.raises(
        NotImplementedError, match="has 129 experts, but pallas_triton ranks up to 128; use 'reference'"
    ):
        random_case(rng, sets=[0], sizes=[129]).run("pallas_triton")


def test_the_blocks_of_a_program_cover_the_features() -> None:
    for in_features in (1, 2, 3, 63, 64, 96, 576, 1536, 3072, 4096, 14336):
        for max_experts, num_gates in itertools.product((1, 2, 5, 8, 20, 128), (1, 2, 3)):
            config = kernel_config(max_experts=max_experts, in_features=in_features, num_gates=num_gates, num_slots=64)
            num_blocks, rest = divmod(in_features, config.block_features)
            assert config.block_features <= in_features
            assert rest <= config.tail_features < max(2 * rest, 1)
            before_last = (config.num_splits - 1) * config.blocks_per_split
            assert before_last < num_blocks <= before_last + config.blocks_per_split
            assert config.num_splits * num_gates <= 4


@pytest.mark.parametrize("in_features", [14336, pytest.param(13000, marks=pytest.mark.slow)])
def test_programs_that_share_a_tokens_features_leave_their_counters_as_they_were(
    rng: np.random.Generator, in_features: int
) -> None:
    """As on a GPU, where it can fail: the interpreter gives each launch fresh counters."""
    assert kernel_config(max_experts=8, in_features=in_features, num_gates=1, num_slots=12).num_splits > 2
    case = random_case(rng, in_features=in_features, sizes=(8, 5), sets=[0, -1, 1], num_gates=1)
    x, gates, set_ids, experts = (jnp.asarray(array) for array in (case.x, case.gates, case.set_ids, case.experts))

    @jax.jit
    def thrice(base: Any) -> Any:
        for _ in range(3):  # as the layers of a step, which share one array of counters
            base = gate_mix(x, gates, set_ids, case.rules, experts, base, layer=LAYER, implementation="pallas_triton")
        return base

    once = case.run("pallas_triton") - case.base
    assert np.abs(once).max() > 0.1
    assert_close(thrice(jnp.asarray(case.base)), case.base + 3 * once)


@pytest.mark.slow
def test_set_ids_may_be_constants_of_the_program(rng: np.random.Generator) -> None:
    """XLA for a GPU keeps one copy of equal constants; the counters must not be the set ids."""
    num_tokens = 160  # more programs than run at once, so that some start after others have counted
    case = random_case(rng, in_features=8192, sizes=(8,), sets=[0] * num_tokens, num_gates=1)
    assert kernel_config(max_experts=8, in_features=8192, num_gates=1, num_slots=12).num_splits == 2

    @jax.jit
    def run(x: Any, gates: Any, experts: Any, base: Any) -> Any:
        set_ids = jnp.zeros((num_tokens, 1), jnp.int32)
        return gate_mix(x, gates, set_ids, case.rules, experts, base, layer=LAYER, implementation="pallas_triton")

    actual = run(*(jnp.asarray(array) for array in (case.x, case.gates, case.experts, case.base)))
    assert_close(np.asarray(actual), expected(case).astype(np.float32))


@pytest.mark.usefixtures("unchecked_annotations")
@each_implementation
def test_wrong_arguments_are_named(rng: np.random.Generator, implementation: Implementation) -> None:
    case = random_case(rng)

    def changed(**arrays: Any) -> GateCase:
        return dataclasses.replace(case, **arrays)

    for broken, text in [
        (changed(x=case.x[:, :95]), r"x has shape \(16, 95\), gates \(2, 3, 2, 5, 100\).*in_features.* to agree"),
        (changed(set_ids=case.set_ids[:, :1]), r"set_ids \(16, 1\)"),
        (changed(experts=case.experts[:4]), r"experts \(4, 12\)"),
        (changed(gates=case.gates[0]), r"gates \(3, 2, 5, 100\).* expected \[num_tokens, in_features\]"),
        (changed(gates=case.gates[:, :0]), "without an axis of length 0"),
        (changed(base=case.base[..., :11]), r"expected base \[num_tokens, 1 or num_gates, num_slots\]"),
        (changed(top_k=case.top_k[:3]), r"rules.top_k has shape \(3,\); expected \(16,\)"),
        (changed(gates=case.gates[:1]), "layer is 1; expected 0 to 0, for gates has 1 layers"),
    ]:
        with pytest.raises(ValueError, match=text):
            broken.run(implementation)
    for broken, text in [
        (changed(x=case.x.astype(jnp.float16)), "x is float16; expected float32 or bfloat16"),
        (changed(gates=case.gates.astype(np.float16)), "gates is float16 and base float32; expected float32"),
        (changed(is_absolute=case.is_absolute > 0), "rules.is_absolute bool: expected int32"),
    ]:
        with pytest.raises(TypeError, match=text):
            broken.run(implementation)


@pytest.mark.usefixtures("unchecked_annotations")
def test_an_unknown_implementation_is_named(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="'abacus' is unknown; expected 'reference' or 'pallas_triton'"):
        random_case(rng).run("abacus")  # pyright: ignore[reportArgumentType]
