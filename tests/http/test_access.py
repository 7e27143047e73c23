"""Who may use which route: no key, one of two keys, both, and clients of this machine."""

import json
import re
from collections.abc import Iterator
from typing import Any

import fastapi
import httpx
import pytest
from starlette.types import Scope
from transformers import PreTrainedTokenizerFast

from serving.access import is_from_this_machine
from serving.async_engine import AsyncEngine
from serving.mixes import ModelRegistry
from serving.prompts import PromptEncoder
from serving.server import ServerConfig, create_app
from tests.http.conftest import MAX_MODEL_LEN, VOCAB, running
from tests.http.fake_engine import FakeEngine

METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE")
SPELLINGS = (
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/a", "/metrics", "/version", "/docs",
    "/openapi.json", "/redoc", "/", "/nothing", "/v1/completions/", "//v1/completions", "//health", "/health/",
    "/HEALTH", "/health/../v1/models", "/%2e%2e/v1/models", "/v1//models", "/v1/load_lora_adapter",
    "/v1/load_lora_adapter/", "//v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1//mixes", "/v1/mixes/m",
)  # fmt: skip
GENERATION = {("POST", "/v1/completions"), ("POST", "/v1/chat/completions")}


class Keyed:
    """An application with some keys, its routes and a client."""

    def __init__(self, app: fastapi.FastAPI, client: httpx.Client) -> None:
        routes = [(m, str(getattr(r, "path", ""))) for r in app.routes for m in getattr(r, "methods", None) or ["GET"]]
        assert {("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/docs")} <= {*routes}
        self.open = [route for route in routes if route[1] == "/health"]
        self.changing = [r for r in routes if r[0] not in ("GET", "HEAD") and r not in GENERATION]
        self.plain = [route for route in routes if route not in (*self.open, *self.changing)]
        assert len(self.changing) >= 4  # load, unload, POST and DELETE of mixes
        self.client = client

    def status(self, method: str, path: str, key: str | None) -> int:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        response = self.client.request(method, re.sub(r"{.*}", "a", path), headers=headers)
        if response.is_error and method != "HEAD":
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return response.status_code


@pytest.fixture
def keyed(
    engine: FakeEngine,
    registry: ModelRegistry,
    tokenizer: PreTrainedTokenizerFast,
    request: pytest.FixtureRequest,
) -> Iterator[Keyed]:
    api_key, admin_api_key = request.param
    config = ServerConfig(port=0, api_key=api_key, admin_api_key=admin_api_key, drain_s=0.2)
    async_engine = AsyncEngine(engine)
    encoder = PromptEncoder(tokenizer, vocab=VOCAB, max_model_len=MAX_MODEL_LEN)
    app = create_app(async_engine, registry, encoder, lambda: (b"", "text/plain"), config)
    with running(app, async_engine, config) as url, httpx.Client(base_url=url) as client:
        yield Keyed(app, client)


PASSED = 0  # stands for 200, 400 and 404: there is no body, and no mix "a"
KEYS = (None, "wrong", "user", "admin")
# Keys of the server; what each of KEYS gets on a route that changes nothing, and on one that changes the server.
TABLE = [
    (("user", None), (401, 401, PASSED, 401), (401, 401, PASSED, 401)),
    (("user", "admin"), (401, 401, PASSED, PASSED), (401, 401, 403, PASSED)),
    ((None, "admin"), (PASSED, PASSED, PASSED, PASSED), (401, 401, 401, PASSED)),
    ((None, None), (PASSED, PASSED, PASSED, PASSED), (PASSED, PASSED, PASSED, PASSED)),
]


@pytest.mark.parametrize(("keyed", "plain", "changing"), TABLE, indirect=["keyed"])
def test_l1_each_key_opens_exactly_its_routes(keyed: Keyed, plain: tuple[int, ...], changing: tuple[int, ...]) -> None:
    """Case L3 too: the routes are those that the application has, whatever is added to it."""
    for i, key in enumerate(KEYS):
        assert all(keyed.status(*route, key) == 200 for route in keyed.open)
        for routes, expected in ((keyed.plain, plain[i]), (keyed.changing, changing[i])):
            for route in routes:
                status = keyed.status(*route, key)
                assert (PASSED if status in (200, 400, 404) else status) == expected, (route, key)


@pytest.mark.parametrize("keyed", [("secret", None), ("secret", "admin")], indirect=True)
def test_l3_no_spelling_of_a_path_but_health_is_open(keyed: Keyed) -> None:
    for method in METHODS:
        for path in SPELLINGS:
            for key in (None, "Bearer wrong", "Bearer secret2", "secret", "bearer: secret", "Bearer sécret"):
                headers = [] if key is None else [(b"authorization", key.encode())]
                response = keyed.client.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path, key)
    right = {"authorization": "Bearer secret"}
    answer = keyed.client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1}, headers=right)
    assert answer.status_code == 200
    twice = [(b"authorization", b"Bearer secret"), (b"authorization", b"Bearer admin")]
    assert keyed.client.get("/v1/models", headers=twice).status_code == 401


@pytest.mark.parametrize("keyed", [("secret", "admin")], indirect=True)
def test_l3_no_spelling_of_an_admin_path_is_open_to_the_plain_key(keyed: Keyed) -> None:
    headers = {"authorization": "Bearer secret"}
    for path in {re.sub(r"{.*}", "a", path) for _, path in keyed.changing}:
        for spelling in (path + "/", "/" + path, path.replace("/v1/", "/v1//"), path.upper(), path + "?x=1"):
            for other in METHODS:
                status = keyed.client.request(other, spelling, headers=headers).status_code
                assert status in (403, 404, 405) or (other, path) == ("GET", "/v1/mixes"), (other, spelling, status)


@pytest.mark.parametrize("keyed", [(None, None)], indirect=True)
def test_without_a_key_only_this_machine_changes_the_server(keyed: Keyed) -> None:
    body = {"name": "m", "adapter_mix": {"a": 1}}
    for headers in (
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"x-forwarded-for": "10.0.0.1"},
        {"forwarded": "x"},
    ):
        refused = keyed.client.post("/v1/mixes", json=body, headers=headers)
        assert refused.status_code == 403
        assert "--admin-api-key" in refused.json()["error"]["message"]
        assert keyed.client.get("/v1/mixes", headers=headers).json()["data"] == []
    text = json.dumps(body)
    assert keyed.client.post("/v1/mixes", content=text, headers={"content-type": "text/plain"}).status_code == 415
    assert keyed.client.post("/v1/mixes", json=body).status_code == 200


def scope(client: str | None, host: str | None, **headers: str) -> Scope:
    given: dict[str, Any] = headers if host is None else headers | {"host": host}
    return {
        "type": "http",
        "client": None if client is None else (client, 5000),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]"])
@pytest.mark.parametrize("client", ["127.0.0.1", "::1"])
def test_a_loopback_client_that_calls_a_loopback_name_is_from_this_machine(client: str, host: str) -> None:
    assert is_from_this_machine(scope(client, host))


@pytest.mark.parametrize(
    ("client", "host", "headers"),
    [
        ("10.0.0.5", "localhost", {}),
        ("10.0.0.5", "127.0.0.1:8000", {}),
        (None, "localhost", {}),
        ("127.0.0.1", "evil.example", {}),
        ("127.0.0.1", "127.0.0.1.evil.example:80", {}),
        ("127.0.0.1", None, {}),
        ("127.0.0.1", "", {}),
        ("127.0.0.1", "localhost", {"x-real-ip": "10.0.0.5"}),
    ],
)
def test_everybody_else_is_not(client: str | None, host: str | None, headers: dict[str, str]) -> None:
    assert not is_from_this_machine(scope(client, host, **headers))
