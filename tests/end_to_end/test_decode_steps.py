"""Several decode steps in one dispatch: what requests get and what the engine owns is as with one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from serving.engine import Engine
from serving.request import FinishReason
from tests.support.engines import make_engine, make_request, run_to_end, token_ids
from tests.support.tiny_checkpoints import write_tokenizer
from tests.support.tiny_models import random_adapter, random_gated_set, tiny_model

PROMPT = [5, 9, 2, 40, 7]


@pytest.fixture(scope="module")
def engines() -> dict[int, Engine]:
    """Of one model, by steps of a dispatch."""
    split = tiny_model(vocab=257)
    adapters = {name: random_adapter(split.config, rank=8, seed=i) for i, name in enumerate("abc")}
    gated_set = random_gated_set(split.config, "g", "bc", granularity="layer", top_k=1, renormalize=True, seed=3)
    return {n: make_engine(split, adapters, [gated_set], decode_steps=n) for n in (1, 4)}


@pytest.fixture
def count_dispatches(engines: dict[int, Engine], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sequences of every dispatch of several steps, as they come."""
    sizes: list[int] = []
    programs = engines[4]._programs
    forward_many: Callable[..., Any] = programs.forward_many

    def counted(bucket: Any, cache: Any, last_tokens: Any, tables: Any, batches: Any) -> Any:
        sizes.append(bucket.num_seqs)
        assert len(batches) == 4
        return forward_many(bucket, cache, last_tokens, tables, batches)

    monkeypatch.setattr(programs, "forward_many", counted)
    return sizes


def add_requests(engine: Engine, lengths: dict[str, tuple[Any, int]], **sampling: Any) -> None:
    for i, (name, (mix, max_tokens)) in enumerate(lengths.items()):
        engine.add_request(make_request(engine, name, PROMPT[i % 3 :], mix, max_tokens=max_tokens, **sampling))


def test_every_request_gets_the_tokens_that_single_steps_give(
    engines: dict[int, Engine], count_dispatches: list[int]
) -> None:
    """Rows that end in the midst of a dispatch, rows of all kinds of mixes, and more of them than run at once."""
    lengths: dict[str, tuple[Any, int]] = {
        "base": ({}, 14), "one": ({"a": 1.0}, 7), "mix": ({"a": 0.5, "b": -0.5}, 30), "gated": ("g", 9),
        "late": ({"b": 1.0}, 17),
    }  # fmt: skip
    tokens = {}
    for decode_steps, engine in engines.items():
        add_requests(engine, lengths)
        outputs = run_to_end(engine)
        tokens[decode_steps] = {name: token_ids(of_request) for name, of_request in outputs.items()}
    assert tokens[4] == tokens[1]
    assert {name: len(ids) for name, ids in tokens[1].items()} == {name: n for name, (_, n) in lengths.items()}
    assert len(count_dispatches) > 3


def test_a_stop_token_in_the_midst_of_a_dispatch_ends_the_request_there(
    engines: dict[int, Engine], count_dispatches: list[int]
) -> None:
    engine = engines[4]
    add_requests(engine, {"free": ({"a": 1.0}, 12)})
    free = token_ids(run_to_end(engine)["free"])
    stop = next(t for t in free[6:] if free.index(t) >= 6)
    add_requests(engine, {"r": ({"a": 1.0}, 12)}, stop_token_ids=(stop,))
    outputs = run_to_end(engine)["r"]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert token_ids(outputs) == free[: free.index(stop) + 1]
    assert count_dispatches


def test_rows_that_draw_step_one_at_a_time(engines: dict[int, Engine], count_dispatches: list[int]) -> None:
    tokens = {}
    for decode_steps, engine in engines.items():
        add_requests(engine, {"greedy": ({}, 12), "drawn": ({"b": 1.0}, 12)}, temperature=0.8, seed=5)
        outputs = run_to_end(engine)
        tokens[decode_steps] = {name: token_ids(of_request) for name, of_request in outputs.items()}
    assert tokens[4] == tokens[1]
    assert count_dispatches == []


def test_a_stop_string_in_the_midst_of_a_dispatch_cuts_the_text_there(
    engines: dict[int, Engine], count_dispatches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path, 257)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for engine in engines.values():
        monkeypatch.setattr(engine, "tokenizer", tokenizer)

    def ask(engine: Engine, **sampling: Any) -> tuple[str, list[int], FinishReason | None]:
        add_requests(engine, {"r": ({"a": 1.0}, 14), "other": ({}, 20)}, **sampling)
        outputs = run_to_end(engine)["r"]
        counts = [output.num_output_tokens for output in outputs]
        assert counts == list(range(1, len(counts) + 1))
        return "".join(output.text for output in outputs), token_ids(outputs), outputs[-1].finish_reason

    whole, _, reason = ask(engines[4])
    assert (whole, reason) == (ask(engines[1])[0], FinishReason.LENGTH)
    for cut in (5, 6, 7, 8):
        stop = whole[cut : cut + 2]
        assert ask(engines[4], stop=(stop,)) == ask(engines[1], stop=(stop,))
    assert count_dispatches


@pytest.mark.parametrize(("sampling", "name"), [({"temperature": 1.5, "seed": 3}, "drawn"), ({"logprobs": 1}, "told")])
def test_a_prompt_that_goes_on_a_token_at_a_time_is_sampled_as_it_asked(
    engines: dict[int, Engine], sampling: dict[str, Any], name: str
) -> None:
    """With no more budget than rows, two decode rows leave a prompt one token a step."""
    split = engines[1].model
    tokens = {}
    for decode_steps in (1, 4):
        engine = make_engine(split, {}, decode_steps=decode_steps, max_num_seqs=3, max_num_batched_tokens=3)
        add_requests(engine, {"a": ({}, 30), "b": ({}, 9)})
        engine.step()
        engine.add_request(make_request(engine, name, [7, 3, 9, 4, 1, 2, 8, 5], {}, max_tokens=5, **sampling))
        outputs = run_to_end(engine)
        tokens[decode_steps] = {key: token_ids(of_request) for key, of_request in outputs.items() if key != "a"}
    assert tokens[4] == tokens[1]


@pytest.mark.parametrize("num_steps", [2, 3, 4])
def test_an_abort_between_dispatches_frees_everything_and_leaves_the_others_alone(
    engines: dict[int, Engine], count_dispatches: list[int], num_steps: int
) -> None:
    engine = engines[4]
    add_requests(engine, {"stays": ({"a": 1.0}, 20)})
    expected = token_ids(run_to_end(engine)["stays"])
    add_requests(engine, {"stays": ({"a": 1.0}, 20), "goes": ({"b": 1.0}, 40)})
    outputs = [output for _ in range(num_steps) for output in engine.step()]
    engine.abort("goes")
    assert engine.scheduler.num_running == 1
    outputs += run_to_end(engine)["stays"]
    assert token_ids([output for output in outputs if output.request_id == "stays"]) == expected
    assert engine.scheduler.block_pool.num_free == engine.scheduler.block_pool.num_blocks
    assert count_dispatches


def test_a_dispatch_of_several_steps_that_fails_ends_what_ran_and_the_next_request_is_right(
    engines: dict[int, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines[4]
    add_requests(engine, {"r": ({"a": 1.0}, 12)})
    expected = token_ids(run_to_end(engine)["r"])

    def fail(*args: Any) -> Any:
        raise RuntimeError("the device has gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine._programs, "forward_many", fail)
        add_requests(engine, {"r": ({"a": 1.0}, 12)})
        with pytest.raises(RuntimeError, match="the device has gone"):
            run_to_end(engine)
    engine.check_integrity()
    assert not engine.scheduler.has_work
    add_requests(engine, {"r": ({"a": 1.0}, 12)})
    assert token_ids(run_to_end(engine)["r"]) == expected
