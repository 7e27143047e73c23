"""The bench of maf_mvm runs from its command line, and only right answers are timed."""

import json
from pathlib import Path

import pytest

from pallas_kernels.maf_mvm import bench
from pallas_kernels.maf_mvm.bench_cases import Mixes, Problem, random_mixes

COLUMNS = ["maf_loop", "copy_sgmv", "sgmv", "naive", "bmm", "dense", "site_base", "site_loop"]


def problem(mixes: Mixes = "distinct") -> Problem:
    return Problem(
        in_features=512,
        widths=(512, 256, 256),
        num_adapters=16,
        rank=8,
        slot_rank=8,
        mixes=mixes,
        mix_size=3,
        dtype="bfloat16",
        cold_bytes=2**22,
        has_projection=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("mixes", "rank"), [("distinct", 4), ("one", 8), ("zipf", 16)])
def test_every_column_is_timed_and_right(tmp_path: Path, mixes: Mixes, rank: int) -> None:
    out = tmp_path / "report.json"
    argv = f"--shape tiny --group qkv --batch 2 --rank {rank} --mixes {mixes} --site --repeats 2 --jobs 2 --out {out}"
    bench.main(argv.split())  # ends with an error if an output is wrong
    report = json.loads(out.read_text())
    (layer,) = report["layers"]
    assert sorted(layer["median_us"]) == sorted(COLUMNS)
    assert all(us > 0 for us in layer["median_us"].values())
    assert layer["max_error"] < 1e-4
    assert {row["column"] for row in report["groups"]} == set(COLUMNS)


def test_adapters_of_each_token_differ_and_distinct_mixes_go_round() -> None:
    sizes: dict[Mixes, int] = {"distinct": 3, "zipf": 3, "one": 1}
    for mixes, size in sizes.items():
        rows = random_mixes(problem(mixes), 7)
        assert all(len({adapter for adapter, _ in row}) == size for row in rows)
    assert [[adapter for adapter, _ in row] for row in random_mixes(problem("distinct"), 6)][5] == [0, 1, 15]


def test_a_wrong_output_ends_the_run() -> None:
    timing = bench.Timing("one", 8, "qkv", 2, "naive", 1, 9, 1.0, 1.0, 1.0, 1.0, float("nan"))
    with pytest.raises(SystemExit, match="naive at qkv, batch 2, rank 8: nan"):
        bench.check_errors([timing], "float32")


def test_an_unknown_column_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--column", "magic"])
    assert "--column magic: expected maf_loop, copy_sgmv" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("group", ["qkv", "gate_up"])
def test_what_adapters_add_to_the_one_launch_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], group: str
) -> None:
    argv = f"--shape tiny --dtype bfloat16 --group {group} --batch 2 --rank 8 --site --repeats 2"
    bench.main([*argv.split(), "--column", "bmm", "site_fused", "site_plain", "--out", str(tmp_path / "report.json")])
    (layer,) = json.loads((tmp_path / "report.json").read_text())["layers"]
    added_us = layer["median_us"]["site_fused"] - layer["median_us"]["site_plain"]
    header, row = capsys.readouterr().out.splitlines()[-2:]
    cells = dict(zip(header.split(), row.split(), strict=True))
    assert cells["added"] == f"{added_us:.1f}"
    assert cells["bmm/ours"] == f"{layer['median_us']['bmm'] / added_us:.2f}"
