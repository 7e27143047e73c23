"""Sampling parameters, mixes and the token accounting of a request."""

from typing import Any

import pytest

from serving.errors import InvalidRequestError, OverloadedError, UnauthorizedError, UnknownModelError
from serving.request import Mix, SamplingParams
from tests.support.host import make_request


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("seed", 0.5),
        ("stop", ("",)),
        ("stop", ["a"]),
        ("stop_token_ids", (-1,)),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_a_bad_sampling_parameter_is_refused_with_its_name(field: str, value: Any):
    with pytest.raises(InvalidRequestError, match=f"^{field} is .*, expected") as error:
        SamplingParams(**{field: value})
    assert error.value.param == field
    assert error.value.status == 400
    assert isinstance(error.value, ValueError)


def test_border_sampling_parameters_are_valid():
    SamplingParams(max_tokens=1, temperature=0, top_p=1, min_p=1, seed=-(2**63), stop=("a",), logprobs=0)
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy


def test_a_mix_is_its_adapters_and_weights_whatever_their_order():
    mix = Mix((("b", 0.3), ("a", 0.7)))
    assert mix == Mix((("a", 0.7), ("b", 0.3)))
    assert hash(mix) == hash(Mix((("a", 0.7), ("b", 0.3))))
    assert mix.adapters == ("a", "b")
    assert mix != Mix((("a", 0.7), ("b", 0.4)))


def test_zero_weights_are_no_part_of_a_mix():
    assert Mix((("a", 0.0), ("b", -0.0))) == Mix()
    assert Mix((("a", 0),)).is_base
    assert not Mix(gated_set="moe").is_base


def test_negative_and_large_weights_are_legal():
    assert Mix((("a", -0.5), ("b", 3))).entries == (("a", -0.5), ("b", 3.0))


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -float("inf"), 1e39, True, "1"])
def test_a_weight_that_is_no_finite_float32_is_refused(weight: Any):
    with pytest.raises(InvalidRequestError, match=r"adapter 'a' the weight .* expected a finite"):
        Mix((("a", weight),))


def test_an_adapter_named_twice_is_refused():
    with pytest.raises(InvalidRequestError, match="names adapter 'a' 2 times"):
        Mix((("a", 0.5), ("b", 1.0), ("a", 0.5)))


def test_tokens_are_counted_through_prompt_output_and_flight():
    request = make_request("r", num_prompt=3)
    request.num_computed_tokens, request.num_in_flight = 3, 1
    assert (request.num_known_tokens, request.num_total_tokens, request.num_uncomputed_tokens) == (3, 4, 1)
    request.commit_token(42)
    assert (request.num_known_tokens, request.num_total_tokens, request.num_in_flight) == (4, 4, 0)
    assert request.token_id(3) == 42
    assert request.token_ids(2, 4) == [request.prompt_token_ids[2], 42]
    assert request.token_ids(0, 3) == request.prompt_token_ids
    assert request.token_ids(3, 4) == [42]
    with pytest.raises(AssertionError, match="no token in flight"):
        request.commit_token(1)


@pytest.mark.parametrize(
    ("error", "status"),
    [(UnknownModelError("x"), 404), (UnauthorizedError("x"), 401), (OverloadedError("x"), 429)],
)
def test_errors_know_their_status_and_keep_their_text(error: Any, status: int):
    assert error.status == status
    assert str(error) == error.message == "x"
