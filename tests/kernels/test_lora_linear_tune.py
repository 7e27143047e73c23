"""The block sizes of lora_linear: the committed table, the rule for what is not in it, and the tuner that makes it."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_kernels.lora_linear import config as linear_config
from pallas_kernels.lora_linear import tune
from pallas_kernels.lora_linear.config import MIN_DOT_SIZE, KernelConfig, Problem, pick_config
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, ModelShape, named_shapes

SHARED_MEMORY_BYTES = 227 << 10
"""What one program can have on an H200."""


@pytest.fixture
def read_table_from(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Makes `pick_config` read h200.json of another folder."""

    def read(folder: Path) -> None:
        monkeypatch.setattr(linear_config.resources, "files", lambda _: folder)
        linear_config._measured.cache_clear()

    yield read
    monkeypatch.undo()
    linear_config._measured.cache_clear()


def problem_of(model: ModelShape, group: Group, num_tokens: int, num_rows: int) -> Problem:
    in_features, widths = model.group(group)
    return Problem(num_tokens, num_rows, in_features, widths, is_swiglu=group == "gate_up")


def all_problems() -> list[Problem]:
    return [
        problem_of(model, group, num_tokens, num_rows)
        for model in named_shapes().values()
        for group in GROUPS
        for num_tokens in (16, 32, 64)
        for num_rows in (8, 24, 1024, 2048, 8192)
    ]


def shared_memory_bytes(config: KernelConfig, problem: Problem) -> int:
    """Of the larger of the two pipelined loops: each stage holds a block of each operand in bfloat16.

    Below 64 tokens the products read registers, and the stage that they work on needs no room: XLA says 196608 bytes
    for 5 stages of (32 + 64) x 256.
    """
    columns = config.columns * (2 if problem.is_swiglu else 1)
    base = (problem.num_tokens + columns) * config.depth
    shrink = (problem.num_tokens + config.shrink_rows) * config.shrink_columns * config.shrink_unroll
    return 2 * (config.num_stages - (problem.num_tokens < 64)) * max(base, shrink)


def assert_can_run(config: KernelConfig, problem: Problem) -> None:
    assert tune.is_valid(config, problem)
    sizes = ("columns", "depth", "tail_rows", "shrink_rows", "shrink_columns")
    for name in sizes:
        size = getattr(config, name)
        assert size >= MIN_DOT_SIZE, name
        assert size & (size - 1) == 0, name
    assert config.shrink_programs > 0
    assert config.num_warps in (4, 8, 16)
    assert shared_memory_bytes(config, problem) <= SHARED_MEMORY_BYTES
    # Blocks of rank rows that reach past the last row cost work, those that are wider than all of them only work.
    assert max(config.tail_rows, config.shrink_rows) < 2 * max(problem.num_rows, MIN_DOT_SIZE)


def assert_all_can_run(problem: Problem) -> None:
    """The choices for steps with adapters, with few and without, which must add sums up in the same order."""
    without = pick_config(problem, has_adapters=False)
    assert_can_run(without, problem)
    for num_rows in (problem.num_rows, min(problem.num_rows, 64), 8192):
        other = dataclasses.replace(problem, num_rows=num_rows)
        assert_can_run(pick_config(other), other)
        assert pick_config(other).splits == without.splits


def test_every_picked_configuration_can_run_and_fits_into_shared_memory() -> None:
    for problem in all_problems():
        assert_all_can_run(problem)


def test_the_rule_can_run_where_nothing_was_measured(tmp_path: Path, read_table_from: Callable[[Path], None]) -> None:
    (tmp_path / "h200.json").write_text('{"configs": {}, "plain": {}, "many_rows": {}}')
    read_table_from(tmp_path)
    odd = [(48, (16,)), (80, (16, 16)), (1296, (272,)), (11008, (4096,)), (3584, (3584, 512, 512))]
    others = [Problem(tokens, 512, i, widths, False) for i, widths in odd for tokens in (16, 64)]
    for problem in [*all_problems(), *others, Problem(32, 512, 4096, (11008, 11008), True)]:
        assert_all_can_run(problem)


def test_the_committed_table_holds_configurations_that_can_run_and_names_its_command() -> None:
    table = json.loads(resources.files("pallas_kernels.lora_linear").joinpath("h200.json").read_text())
    assert table["made_by"].keys() == table["configs"].keys() | {f"{key} many rows" for key in table["many_rows"]}
    by_key = {p.key: p for p in all_problems() if p.num_rows == 1024}
    assert table["configs"]
    for key, fields in table["configs"].items():
        assert_can_run(KernelConfig(**fields), by_key[key])
        assert pick_config(by_key[key]) == KernelConfig(**fields)
    for key in table["plain"]:
        assert pick_config(by_key[key], has_adapters=False) != pick_config(by_key[key])
    for key, fields in table["many_rows"].items():
        many = dataclasses.replace(by_key[key], num_rows=8192)
        assert pick_config(many) == KernelConfig(**table["configs"][key] | fields)


@pytest.mark.parametrize("has_adapters", [True, False])
def test_less_shared_memory_costs_stages_alone(has_adapters: bool) -> None:
    """So that a row on the base model gets the same bits with and without adapters there, too."""
    for problem in all_problems():
        ours = pick_config(problem, has_adapters=has_adapters)
        less = pick_config(problem, has_adapters=has_adapters, shared_bytes=99 * 1024)
        assert 2 <= less.num_stages <= ours.num_stages
        assert dataclasses.replace(less, num_stages=ours.num_stages) == ours


def test_decode_of_the_8b_shape_is_measured() -> None:
    table = json.loads(resources.files("pallas_kernels.lora_linear").joinpath("h200.json").read_text())
    model = named_shapes()["llama-3-8b"]
    for group in GROUPS:
        for num_tokens in (16, 32, 64):
            assert problem_of(model, group, num_tokens, 1024).key in table["configs"]


def test_a_configuration_that_does_not_divide_the_shapes_is_not_valid() -> None:
    problem = Problem(16, 64, 128, (64, 32), is_swiglu=False)
    good = KernelConfig(32, 32, 2, 32, 16, 32, 2, 132, 2, 2, 4)
    assert tune.is_valid(good, problem)
    for field, value in (("columns", 64), ("depth", 128), ("splits", 3), ("shrink_splits", 4), ("shrink_unroll", 4)):
        assert not tune.is_valid(dataclasses.replace(good, **{field: value}), problem), field
    halves = dataclasses.replace(problem, widths=(32, 32), is_swiglu=True)
    assert not tune.is_valid(good, halves)
    assert tune.is_valid(dataclasses.replace(good, splits=1), halves)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 128}, "128 tokens are not supported; at most 64 fit one launch"),
        ({"in_features": 4104}, "in_features 4104 is not supported; it must be a multiple of 16"),
        ({"widths": (4096, 1000)}, "width 1000 is not supported; it must be a multiple of 16"),
    ],
)
def test_what_no_configuration_supports_is_refused(changes: dict[str, Any], message: str) -> None:
    problem = problem_of(named_shapes()["llama-3-8b"], "qkv", 32, 1024)
    with pytest.raises(NotImplementedError, match=message):
        pick_config(dataclasses.replace(problem, **changes))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_the_tuner_writes_a_table_that_pick_config_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_table_from: Callable[[Path], None]
) -> None:
    out = tmp_path / "h200.json"
    flags = "--shape tiny --group o gate_up --tokens 16 --slots 4 --layers 2 --repeats 1"
    flags += " --rounds main shrink plain --out"
    monkeypatch.setattr(tune, "SHRINK_SIZES", tune.SHRINK_SIZES[::9])
    monkeypatch.setattr(sys, "argv", ["tune", *flags.split(), str(out)])
    tune.main()
    table = json.loads(out.read_text())
    problems = [problem_of(named_shapes()["tiny"], group, 16, 128) for group in ("o", "gate_up")]
    made_by = f"python -m pallas_kernels.lora_linear.tune {flags} {out} (cpu, jax {jax.__version__})"
    assert [table["made_by"][p.key] for p in problems] == [made_by] * 2
    committed = json.loads(resources.files("pallas_kernels.lora_linear").joinpath("h200.json").read_text())
    assert committed["configs"].items() <= table["configs"].items()
    read_table_from(tmp_path)
    for problem in problems:
        assert_all_can_run(problem)
        assert dataclasses.asdict(pick_config(problem)) == table["configs"][problem.key]
        assert set(table["us_per_layer"][problem.key]) == {"base", "one", "three", "plain"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_the_tuner_keeps_choices_for_many_rank_rows_beside_those_for_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_table_from: Callable[[Path], None]
) -> None:
    out = tmp_path / "h200.json"
    flags = "--shape tiny --group o --tokens 16 --slots 33 --rank 64 --layers 1 --repeats 1 --rounds tail_rows"
    monkeypatch.setattr(sys, "argv", ["tune", *flags.split(), "--out", str(out)])
    few = problem_of(named_shapes()["tiny"], "o", 16, 1024)
    before = pick_config(few)
    tune.main()
    table = json.loads(out.read_text())
    assert table["many_rows"][few.key].keys() == set(tune.MANY_ROWS_FIELDS)
    assert few.key not in table["configs"]
    read_table_from(tmp_path)
    assert pick_config(few) == before
    many = dataclasses.replace(few, num_rows=33 * 64)
    assert pick_config(many) == dataclasses.replace(before, **table["many_rows"][few.key])


def test_sizes_of_the_base_product_are_not_tuned_with_many_rank_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--shape tiny --group o --tokens 16 --slots 33 --rank 64 --layers 1 --rounds main tail_rows"
    monkeypatch.setattr(sys, "argv", ["tune", *flags.split()])
    with pytest.raises(SystemExit):
        tune.main()
    expected = "--rounds main is for fewer rank rows; expected of shrink tail_rows num_stages shrink_columns"
    assert expected in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_the_tuner_measures_no_program_that_is_wrong() -> None:
    case = tune.make_case("tiny", "o", 16, num_slots=4, slot_rank=8, num_layers=2)
    compiled = tune.compile_case(case, pick_config(case.problem))
    assert tune.score(tune.measure(case, compiled, 1)) < float("inf")
    wrong = dataclasses.replace(case, expected=case.expected + 0.1)
    assert tune.measure(wrong, compiled, 1) is None
    refused = tune.compile_case(case, dataclasses.replace(pick_config(case.problem), columns=48))
    assert tune.measure(case, refused, 1) is None
    assert tune.score(None) == float("inf")
