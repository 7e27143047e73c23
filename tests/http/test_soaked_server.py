"""A folder of random weights, served and soaked: what benchmarks/soak.sh does, in one process and a few seconds."""

import json
from pathlib import Path

import pytest

from dymerge_jax.config import named_config
from dymerge_jax.serve import build, engine_config, make_parser
from serving.async_engine import AsyncEngine
from serving.bench import load
from serving.bench.random_folder import write_random_folder
from serving.prompts import PromptEncoder
from serving.queue_bound import QueueBound
from serving.server import ServerConfig, create_app
from tests.http.conftest import running


@pytest.mark.slow
def test_a_folder_of_random_weights_serves_exact_answers_through_a_soak(tmp_path: Path):
    config = named_config("tiny")
    write_random_folder(tmp_path / "folder", config, dtype="float32", num_adapters=8, rank=4)
    churn = tmp_path / "folder" / "churn"
    flags = ["--model", tmp_path / "folder" / "model", "--adapters", tmp_path / "folder" / "adapters"]
    sizes = ["--adapter-slots", 6, "--slot-rank", 4, "--max-num-seqs", 4, "--max-model-len", 64, "--num-blocks", 32]
    options = make_parser().parse_args([str(flag) for flag in (*flags, *sizes, "--max-num-batched-tokens", 32)])
    engine, loaded, registry = build(options, engine_config(options))
    async_engine = AsyncEngine(engine, QueueBound(1000))
    encoder = PromptEncoder(loaded.tokenizer, vocab=config.vocab, max_model_len=engine.max_model_len)
    server_config = ServerConfig(port=0, drain_s=1.0, adapter_roots=(str(churn),))
    app = create_app(
        async_engine, registry, encoder, lambda: (engine.metrics.render(), "text/plain"), server_config, engine.metrics
    )
    out = tmp_path / "soak.json"
    workload = ["--workloads", "skewed", "--rates", "10", "--adapters", "8", "--mixes", "8", "--longest", "32"]
    soak = ["--soak-minutes", "0.05", "--churn-adapter", str(churn / "soak-churn"), "--exact-outputs", "--check", "64"]
    with running(app, async_engine, server_config) as url:
        assert load.main(["--url", url, "--vocab", str(config.vocab), *workload, *soak, "--out", str(out)]) == 0
    result = json.loads(out.read_text())["soak"]
    assert result["failures"] == []
    assert result["agreement"]["equal"] == result["agreement"]["sample"] == result["completed"] > 10
    assert result["agreement"]["compared_tokens"] > 100
    assert min(result["adapter_churns"], result["malformed_sent"], result["adapter_loads"]) >= 3
    engine.check_integrity()
