"""Adapters loaded, replaced and unloaded, and named mixes, while a fake engine serves."""

import concurrent.futures
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from transformers import PreTrainedTokenizerFast

from serving.mixes import ModelRegistry
from serving.server import ServerConfig
from tests.http.conftest import serving
from tests.http.fake_engine import FakeEngine
from tests.support.waiting import wait_until

GREEDY = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Adapters "one" and "two" of a slot, "six" of six, "bad"; a folder without weights and a link out of the root."""
    for name, weights in (("one", "1 x"), ("two", "1 y"), ("six", "6"), ("bad", "0"), ("my, =adapter", "1 z")):
        write(tmp_path / "root" / name, weights)
    (tmp_path / "root" / "empty").mkdir()
    write(tmp_path / "outside", "1 secret")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "inner").symlink_to(tmp_path / "root" / "one")
    return tmp_path / "root"


def write(folder: Path, weights: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").write_text(weights)


@pytest.fixture
def url(engine: FakeEngine, registry: ModelRegistry, tokenizer: PreTrainedTokenizerFast, root: Path) -> Iterator[str]:
    config = ServerConfig(port=0, drain_s=0.2, adapter_roots=(str(root),))
    with serving(engine, registry, tokenizer, config) as address:
        yield address


def load(client: httpx.Client, name: str, path: str | Path, **fields: Any) -> httpx.Response:
    return client.post(LOAD, json={"lora_name": name, "lora_path": str(path)} | fields)


def unload(client: httpx.Client, name: str, **fields: Any) -> httpx.Response:
    return client.post(UNLOAD, json={"lora_name": name} | fields)


def cards(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in client.get("/v1/models").json()["data"]}


def complete(client: httpx.Client, **fields: Any) -> str:
    response = client.post("/v1/completions", json=GREEDY | fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    content = response.json()["error"]
    assert set(content) == {"message", "type", "param", "code"}
    return content


def test_an_adapter_is_loaded_used_and_unloaded_in_vllms_words(
    client: httpx.Client, engine: FakeEngine, root: Path
) -> None:
    loaded = load(client, "new", "one", is_3d_lora_weight=False)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert loaded.headers["content-type"].startswith("text/plain")
    card = cards(client)["new"]
    assert card["generation"] == loaded.headers["x-adapter-generation"]
    assert (card["parent"], card["root"]) == ("tiny", str(root / "one"))
    assert complete(client, model="new") == complete(client, adapter_mix={"new": 1}) != complete(client)
    assert complete(client, lora=[{"id": 4, "scale": 1}]) == complete(client, model="new")
    removed = unload(client, "new", lora_int_id=1)
    assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert removed.headers["content-type"].startswith("text/plain")
    assert engine.adapters == {}
    assert client.post("/v1/completions", json=GREEDY | {"model": "new"}).status_code == 404
    assert len(engine.threads) == 1


def test_an_absolute_path_and_any_characters_are_taken_below_the_root(client: httpx.Client, root: Path) -> None:
    for i, path in enumerate((root / "one", "two", "two/../one", "inner", "./two/", "my, =adapter")):
        assert load(client, f'name, {i} "=\n', path).status_code == 200, path
    assert len(cards(client)) == 7 + 6


NAME, PATH = "lora_name", "lora_path"
VLLM, INVALID, FORBIDDEN, CONFLICT = "InvalidUserInput", "invalid_request_error", "permission_error", "conflict_error"
# Fields of a load, its status, the type of its error, words of the message.
BAD_LOADS: list[tuple[dict[str, Any], int, str, str]] = [
    ({}, 400, VLLM, "Both 'lora_name' and 'lora_path' must be provided."),
    ({NAME: "x"}, 400, VLLM, "Both 'lora_name' and 'lora_path' must be provided."),
    ({PATH: "one"}, 400, VLLM, "Both 'lora_name' and 'lora_path' must be provided."),
    ({NAME: "a", PATH: "one"}, 400, VLLM, "The lora adapter 'a' has already been loaded"),
    ({NAME: "tiny", PATH: "one"}, 400, INVALID, "base model"),
    ({NAME: "moe", PATH: "one"}, 400, INVALID, "gated set"),
    ({NAME: " ", PATH: "one"}, 400, INVALID, "1 to 256"),
    ({NAME: "x" * 257, PATH: "one"}, 400, INVALID, "1 to 256"),
    ({NAME: "x", PATH: "nowhere"}, 404, "NotFoundError", "nowhere"),
    ({NAME: "x", PATH: "org/hub-name"}, 404, "NotFoundError", "Hub ids are not fetched"),
    ({NAME: "x", PATH: "empty"}, 404, "NotFoundError", "holds no weights"),
    ({NAME: "x", PATH: "one/weights"}, 404, "NotFoundError", "weights"),
    ({NAME: "x", PATH: "bad"}, 400, INVALID, "no slots"),
    ({NAME: "x", PATH: "https://hub/x"}, 403, FORBIDDEN, "nothing is fetched"),
    ({NAME: "x", PATH: "s3://bucket/x"}, 403, FORBIDDEN, "nothing is fetched"),
    ({NAME: "x", PATH: "/etc"}, 403, FORBIDDEN, "--adapter-root"),
    ({NAME: "x", PATH: "/nowhere/at/all"}, 403, FORBIDDEN, "--adapter-root"),
    ({NAME: "x", PATH: "../outside"}, 403, FORBIDDEN, "--adapter-root"),
    ({NAME: "x", PATH: "link"}, 403, FORBIDDEN, "symlinks resolved"),
    ({NAME: "x", PATH: "link/../outside"}, 403, FORBIDDEN, "--adapter-root"),
    ({NAME: "x", PATH: "one\0"}, 400, INVALID, "no path"),
    ({NAME: "x", PATH: "x" * 5000}, 404, "NotFoundError", "does not exist"),
    ({NAME: 3, PATH: "one"}, 400, INVALID, "string"),
    ({NAME: "x", PATH: "one", "load_inplace": "yes"}, 400, INVALID, "load_inplace"),
    ({NAME: "x", PATH: "one", "is_3d_lora_weight": True}, 400, INVALID, "3d"),
    ({NAME: "x", PATH: "one", "inplace": True}, 400, INVALID, "'load_inplace'"),
    ({NAME: "c", PATH: "one", "expected_generation": "x"}, 400, INVALID, "load_inplace"),
    ({NAME: "c", PATH: "one", "load_inplace": True, "expected_generation": "x"}, 409, CONFLICT, "'01234567.*'x'"),
    ({NAME: "x", PATH: "one", "load_inplace": True, "expected_generation": "y"}, 409, CONFLICT, "None.*'y'"),
    ({NAME: "a", PATH: "one", "load_inplace": True}, 409, CONFLICT, "gated set 'moe', 'wide'"),
]  # fmt: skip


def test_a_load_that_is_refused_says_why_and_changes_nothing(client: httpx.Client, engine: FakeEngine) -> None:
    before = cards(client)
    for fields, status, type_, words in BAD_LOADS:
        content = error(client.post(LOAD, json=fields), status)
        assert content["type"] == type_
        assert re.search(words, content["message"]), content
        assert cards(client) == before
        assert engine.adapters == {}
    assert load(client, "y", "one").status_code == 200


def test_loading_is_off_without_a_root(
    engine: FakeEngine, registry: ModelRegistry, tokenizer: PreTrainedTokenizerFast, root: Path
) -> None:
    with serving(engine, registry, tokenizer) as url, httpx.Client(base_url=url) as client:
        content = error(load(client, "x", root / "one"), 403)
        assert content["code"] == "adapter_path_forbidden"
        assert "--adapter-root" in content["message"]
        assert unload(client, "c").status_code != 403


def test_l5_a_link_that_is_swapped_after_the_check_is_not_followed(
    client: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    read_adapter = engine.read_adapter

    def read_swapped(name: str, folder: Path) -> object:
        (root / "inner").unlink()
        (root / "inner").symlink_to(root.parent / "outside")
        return read_adapter(name, folder)

    monkeypatch.setattr(engine, "read_adapter", read_swapped)
    assert load(client, "x", "inner").status_code == 200
    assert cards(client)["x"]["root"] == str(root / "one")  # what was checked was read


@pytest.mark.parametrize("swapped", ["folder", "file"])
def test_l5_a_folder_or_file_that_becomes_a_link_out_of_the_root_while_it_is_read_is_refused(
    client: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, root: Path, swapped: str
) -> None:
    read_adapter = engine.read_adapter

    def read_swapped(name: str, folder: Path) -> object:
        if swapped == "folder":
            folder.rename(root / "away")
            folder.symlink_to(root.parent / "outside")
        else:
            (folder / "adapter_config.json").symlink_to(root.parent / "outside" / "weights")
        return read_adapter(name, folder)

    monkeypatch.setattr(engine, "read_adapter", read_swapped)
    assert "leads out of" in error(load(client, "x", "one"), 403)["message"]
    assert engine.adapters == {}


def test_l5_a_file_that_is_a_link_must_stay_below_the_root(client: httpx.Client, root: Path) -> None:
    link = root / "one" / "adapter_model.safetensors"
    link.symlink_to(root / "two" / "weights")  # as in a hub cache
    assert load(client, "inside", "one").status_code == 200
    link.unlink()
    link.symlink_to(root.parent / "outside" / "weights")
    assert "adapter_model.safetensors" in error(load(client, "outside", "one"), 403)["message"]


def test_a_replacement_serves_new_requests_and_not_those_that_run(client: httpx.Client, engine: FakeEngine) -> None:
    first = load(client, "x", "one").headers["x-adapter-generation"]
    before = complete(client, model="x")
    engine.step_s = 0.02
    with client.stream("POST", "/v1/completions", json=GREEDY | {"model": "x", "max_tokens": 60, "stream": True}) as r:
        lines = r.iter_lines()
        next(lines)
        second = load(client, "x", "two", load_inplace=True)
        assert second.text == "Success: LoRA adapter 'x' added successfully."
        running = engine.added[-1].adapters
        engine.step_s = 0.0
        assert "data: [DONE]" in list(lines)
    assert complete(client, model="x") != before
    assert [i.partition("@")[0] for i in (*running, *engine.added[-1].adapters)] == ["x", "x"]
    assert running != engine.added[-1].adapters
    assert cards(client)["x"]["generation"] == second.headers["x-adapter-generation"] != first
    assert len(engine.adapters) == 1
    assert list(cards(client)).index("x") == 5  # keeps its place, which is its id in `lora`


@pytest.mark.slow
def test_a_replacement_by_the_same_content_keeps_it(client: httpx.Client, engine: FakeEngine) -> None:
    load(client, "x", "one")
    assert load(client, "x", "inner", load_inplace=True).status_code == 200
    assert len(engine.adapters) == 1
    assert load(client, "x", "bad", load_inplace=True).status_code == 400
    assert load(client, "x", "nowhere", load_inplace=True).status_code == 404
    assert len(engine.adapters) == 1
    assert complete(client, model="x")


def test_a_generation_that_has_passed_replaces_and_unloads_nothing(client: httpx.Client) -> None:
    first = load(client, "x", "one").headers["x-adapter-generation"]
    swap = {"load_inplace": True, "expected_generation": first}
    second = load(client, "x", "two", **swap).headers["x-adapter-generation"]
    for refused in (load(client, "x", "six", **swap), unload(client, "x", expected_generation=first)):
        content = error(refused, 409)
        assert content["code"] == "generation_mismatch"
        assert first in content["message"]
        assert second in content["message"]
    assert cards(client)["x"]["generation"] == second
    assert unload(client, "x", expected_generation=second).status_code == 200


BAD_UNLOADS = [
    ("", 400, "'lora_name' needs to be provided"),
    ("nobody", 404, "The lora adapter 'nobody' cannot be found."),
    ("tiny", 400, "base model"),
    ("moe", 400, "gated set"),
    ("mixed", 400, "DELETE /v1/mixes/mixed"),
    ("a", 409, "gated set 'moe', 'wide'"),
    ("c", 409, "mix 'mixed'"),
]


def test_an_unload_that_is_refused_says_why(client: httpx.Client) -> None:
    client.post("/v1/mixes", json={"name": "mixed", "adapter_mix": {"c": 1}})
    before = cards(client)
    for name, status, words in BAD_UNLOADS:
        assert words in error(unload(client, name), status)["message"]
        assert cards(client) == before


def test_e4_one_of_twenty_loads_of_a_name_wins_and_one_of_twenty_unloads(
    client: httpx.Client, engine: FakeEngine
) -> None:
    engine.read_s = 0.05
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        loads = [r.status_code for r in pool.map(lambda i: load(client, "x", ("one", "two")[i % 2]), range(20))]
        assert (loads.count(200), loads.count(400)) == (1, 19)
        assert (engine.num_reads, len(engine.adapters)) == (1, 1)
        unloads = [r.status_code for r in pool.map(lambda _: unload(client, "x"), range(20))]
    assert (unloads.count(200), unloads.count(404)) == (1, 19)
    assert engine.adapters == {}
    assert load(client, "x", "one").status_code == 200


@pytest.mark.slow
def test_e4_one_of_many_replacements_of_a_generation_wins(client: httpx.Client, engine: FakeEngine) -> None:
    swap = {"load_inplace": True, "expected_generation": load(client, "x", "one").headers["x-adapter-generation"]}
    engine.read_s = 0.02
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        statuses = [r.status_code for r in pool.map(lambda _: load(client, "x", "two", **swap), range(10))]
    assert (statuses.count(200), statuses.count(409)) == (1, 9)
    assert len(engine.adapters) == 1


@pytest.mark.slow
def test_loads_and_unloads_under_traffic_never_break_a_request(client: httpx.Client, engine: FakeEngine) -> None:
    load(client, "x", "one")

    def replace(i: int) -> int:
        return load(client, "x", ("one", "two")[i % 2], load_inplace=True).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(complete, client, model="x") for _ in range(40)]
        assert {f.result() for f in [pool.submit(replace, i) for i in range(20)]} == {200}
        assert len({answer.result() for answer in answers}) <= 2
    assert len(engine.adapters) == 1


@pytest.mark.slow
def test_more_loads_than_run_at_once_are_told_to_come_back(client: httpx.Client, engine: FakeEngine) -> None:
    engine.may_read.clear()
    with concurrent.futures.ThreadPoolExecutor(70) as pool:
        loads = [pool.submit(load, client, f"x{i % 4}", "one") for i in range(70)]
        wait_until(lambda: sum(f.done() for f in loads) == 6)
        assert engine.num_reads == 4
        assert complete(client)  # requests go on meanwhile
        engine.may_read.set()
        statuses = [f.result().status_code for f in loads]
    assert [statuses.count(status) for status in (200, 400, 429)] == [4, 60, 6]
    refused = next(f.result() for f in loads if f.result().status_code == 429)
    assert error(refused, 429)["code"] == "lora_load_busy"
    assert int(refused.headers["retry-after"]) >= 1
    assert load(client, "y", "one").status_code == 200
    assert 'dymerge_requests_refused_total{reason="lora_load_busy"} 6.0' in client.get("/metrics").text


def test_an_engine_that_cannot_take_an_adapter_leaves_everything_as_it_was(
    client: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(adapter: object) -> str:
        raise RuntimeError("no memory")

    def refuse_politely(adapter: object) -> str:
        raise ValueError("it needs 9 bytes and 8 are left")

    load(client, "x", "one")
    before = cards(client)
    monkeypatch.setattr(engine, "add_adapter", refuse)
    assert "no memory" in error(load(client, "y", "one"), 500)["message"]
    assert "no memory" in error(load(client, "x", "two", load_inplace=True), 500)["message"]
    monkeypatch.setattr(engine, "add_adapter", refuse_politely)
    assert "9 bytes" in error(load(client, "y", "one"), 400)["message"]
    assert cards(client) == before
    assert client.get("/health").status_code == 200
    assert complete(client, model="x")


def test_a_named_mix_is_a_model_like_any_other(client: httpx.Client, url: str) -> None:
    made = client.post("/v1/mixes", json={"name": "legal/french", "adapter_mix": {"a": 0.7, "b": -0.3}})
    assert made.json() == {"name": "legal/french", "object": "mix", "adapter_mix": {"a": 0.7, "b": -0.3}}
    pairs = [{"adapter": "b", "weight": -0.3}, {"adapter": "a", "weight": 0.7}]
    assert client.post("/v1/mixes", json={"name": "other", "adapter_mix": pairs}).status_code == 200
    listed = client.get("/v1/mixes").json()
    assert listed["object"] == "list"
    assert [mix["name"] for mix in listed["data"]] == ["legal/french", "other"]
    answers = {complete(client, **f) for f in ({"model": "legal/french"}, {"model": "other"}, {"adapter_mix": pairs})}
    assert len(answers) == 1
    card = cards(client)["legal/french"]
    assert (card["parent"], card["adapter_mix"]) == ("tiny", {"a": 0.7, "b": -0.3})
    with OpenAI(base_url=f"{url}/v1", api_key="none") as openai:
        assert "legal/french" in [model.id for model in openai.models.list()]
        chat = openai.chat.completions.create(
            model="legal/french", messages=[{"role": "user", "content": "x"}], max_tokens=2
        )
        assert chat.model == "legal/french"
    assert client.delete("/v1/mixes/legal/french").json() == {"name": "legal/french", "object": "mix", "deleted": True}
    assert client.post("/v1/completions", json=GREEDY | {"model": "legal/french"}).status_code == 404
    assert error(client.delete("/v1/mixes/legal/french"), 404)["param"] == "name"


def test_a_named_mix_follows_a_replaced_adapter(client: httpx.Client, engine: FakeEngine) -> None:
    load(client, "x", "one")
    assert client.post("/v1/mixes", json={"name": "m", "adapter_mix": {"x": 0.5, "c": 1}}).status_code == 200
    before = complete(client, model="m")
    load(client, "x", "two", load_inplace=True)
    assert complete(client, model="m") == complete(client, adapter_mix={"x": 0.5, "c": 1}) != before
    assert load(client, "x", "six", load_inplace=True).status_code == 200  # 6 + 2 slots of 8
    assert client.post("/v1/mixes", json={"name": "full", "adapter_mix": {"x": 1, "c": 1, "b": 0}}).status_code == 200


def test_a_replacement_that_a_mix_has_no_room_for_is_refused(client: httpx.Client, engine: FakeEngine) -> None:
    load(client, "x", "one")
    client.post("/v1/mixes", json={"name": "m", "adapter_mix": {"x": 1, "c": 1, "a": 1}})
    assert "'m' would need 9" in error(load(client, "x", "six", load_inplace=True), 409)["message"]
    assert complete(client, model="m")
    assert [adapter.num_slots for adapter in engine.adapters.values()] == [1]


BAD_MIXES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"name": "a", "adapter_mix": {"b": 1}}, 400, "name", "adapter"),
    ({"name": "moe", "adapter_mix": {"b": 1}}, 400, "name", "gated set"),
    ({"name": "tiny", "adapter_mix": {"b": 1}}, 400, "name", "base model"),
    ({"name": "", "adapter_mix": {"b": 1}}, 400, "name", "1 to 256"),
    ({"name": "taken", "adapter_mix": {"b": 1}}, 409, "name", '"replace": true'),
    ({"name": "m", "adapter_mix": {"nobody": 1}}, 404, "adapter_mix", "nobody"),
    ({"name": "m", "adapter_mix": {"taken": 1}}, 400, "adapter_mix", "a mix, not an adapter"),
    ({"name": "m", "adapter_mix": {"moe": 1}}, 400, "adapter_mix", "a gated set, not an adapter"),
    ({"name": "m", "adapter_mix": {"a": 1e39}}, 400, "adapter_mix", "finite"),
    ({"name": "m", "adapter_mix": {"a": "1"}}, 400, "adapter_mix", "finite"),
    ({"name": "m", "adapter_mix": {}}, 400, "adapter_mix", "no adapter"),
    ({"name": "m", "adapter_mix": None}, 400, "adapter_mix", "no adapter"),
    ({"name": "m", "adapter_mix": {"huge": 1}}, 400, "adapter_mix", "9 slots"),
    ({"name": "m"}, 400, "adapter_mix", "missing"),
    ({"adapter_mix": {"a": 1}}, 400, "name", "missing"),
    ({"name": "m", "adapter_mix": {"a": 1}, "weights": {}}, 400, "weights", "unknown"),
]


def test_a_mix_that_is_refused_says_why(client: httpx.Client) -> None:
    assert client.post("/v1/mixes", json={"name": "taken", "adapter_mix": {"a": 1}}).status_code == 200
    for body, status, param, words in BAD_MIXES:
        content = error(client.post("/v1/mixes", json=body), status)
        assert content["param"] == param
        assert words in content["message"]
        assert [mix["name"] for mix in client.get("/v1/mixes").json()["data"]] == ["taken"]


def test_a_mix_is_replaced_only_where_that_is_asked_for(client: httpx.Client) -> None:
    for weight, fields, status in ((1, {}, 200), (2, {}, 409), (3, {"replace": True}, 200)):
        body = {"name": "m", "adapter_mix": {"a": weight}} | fields
        assert client.post("/v1/mixes", json=body).status_code == status
    assert complete(client, model="m") == complete(client, adapter_mix={"a": 3})
    refused = client.post("/v1/completions", json=GREEDY | {"model": "m", "adapter_mix": {"b": 1}})
    assert error(refused, 400)["param"] == "adapter_mix"
    assert error(load(client, "m", "one"), 400)["message"].startswith("the name 'm' is taken (mix)")
