import hmac

import pytest

from paxserve.entrypoints.auth import ApiKeyGuard
from paxserve.errors import ConfigError
from paxserve.server_config import ServerConfig
from tests.paxserve.serving import Serving, run

KEY = {"Authorization": "Bearer secret"}
CLOSED = [
    "/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/docs", "/openapi.json",
    "/redoc", "/nothing", "/metrics", "/version", "/metrics/x", "/server_info", "/sleep",
    "//v1/models", "/v1//models", "//health", "/health/", "/health/../v1/models", "/./health",
    "/metrics/", "/HEALTH", "/v1/models?x=/health", "/%76%31/models", "/", "", "*", "/health\x00", "/health;/v1/models",
]  # fmt: skip


def every_path(served: Serving) -> list[str]:
    return ["/docs", "/redoc", "/openapi.json", *served.app.openapi()["paths"]]


def test_every_route_but_the_open_ones_asks_for_the_key():
    async def test(served: Serving):
        without = {path: (await served.http.get(path)).status_code for path in every_path(served)}
        return without

    statuses = run(test, api_key=["secret"])
    assert {path for path, status in statuses.items() if status != 401} == {"/health"}
    assert len(statuses) > 8
    statuses = run(test, api_key=["secret"], open_metrics=True, open_version=True)
    assert {path for path, status in statuses.items() if status != 401} == {"/health", "/version", "/metrics"}


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
def test_odd_spellings_and_methods_open_nothing(path, method):
    async def test(served: Serving):
        return await raw_request(served, path, [], method)

    assert run(test, api_key=["secret"]) == 401


@pytest.mark.parametrize("host", ["test/health", "health", "test?x=/health", "test#/health", ""])
def test_the_host_header_decides_nothing(host):
    async def test(served: Serving):
        return await raw_request(served, "/v1/models", [(b"host", host.encode())])

    assert run(test, api_key=["secret"]) == 401


async def raw_request(served: Serving, path: str, headers: list[tuple[bytes, bytes]], method: str = "GET") -> int:
    """The status of a request as the server's protocol layer would hand it over."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1),
    }  # fmt: skip
    await served.app(scope, receive, send)
    return sent[0]["status"]


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("Bearer secret", 200), ("bearer second", 200), ("Bearer  secret", 200), ("Bearer wrong", 401),
        ("Bearer", 401), ("Bearer ", 401), ("secret", 401), ("Basic secret", 401), ("Bearer secret2", 401),
        ("Bearer secret second", 401),
    ],
)  # fmt: skip
def test_only_a_bearer_of_a_key_gets_in(value, status):
    async def test(served: Serving):
        return await served.http.get("/v1/models", headers={"Authorization": value})

    response = run(test, api_key=["secret", "second"])
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["type"] == "AuthenticationError"
        assert response.headers["www-authenticate"] == "Bearer"


def test_two_authorizations_are_none():
    async def test(served: Serving):
        both = [("Authorization", "Bearer wrong"), ("Authorization", "Bearer secret")]
        return await served.http.get("/v1/models", headers=both)

    assert run(test, api_key=["secret"]).status_code == 401


def test_anthropics_header_counts_on_its_routes_only():
    async def test(served: Serving):
        key = [(b"x-api-key", b"secret")]
        both = [*key, (b"authorization", b"Bearer wrong")]
        return (
            [await raw_request(served, path, key, "POST") for path in ("/v1/messages", "/v1/messages/count_tokens")],
            [
                await raw_request(served, path, key, "POST")
                for path in ("/v1/completions", "/v1/messages/", "/tokenize")
            ],
            await raw_request(served, "/v1/messages", both, "POST"),
        )

    inside, outside, contradiction = run(test, api_key=["secret"])
    assert 401 not in inside
    assert set(outside) == {401}
    assert contradiction == 401


def test_admin_paths_need_the_admin_key_with_and_without_others():
    async def guarded(served: Serving):
        guard = ApiKeyGuard(served.app, served.context.server_config, ["/admin"])
        tokens = {"none": [], "key": bearer("secret"), "admin": bearer("root"), "wrong": bearer("x")}
        return {
            (path, name): guard.is_allowed({"path": path, "headers": headers})
            for path in ("/admin", "/v1/models")
            for name, headers in tokens.items()
        }

    both = run(guarded, api_key=["secret"], admin_api_key=["root"])
    assert {key for key, allowed in both.items() if allowed} == {
        ("/admin", "admin"), ("/v1/models", "key"), ("/v1/models", "admin"),
    }  # fmt: skip
    admin_only = run(guarded, admin_api_key=["root"])
    assert [name for (path, name), allowed in admin_only.items() if path == "/admin" and allowed] == ["admin"]
    nobody = run(guarded)
    assert not any(allowed for (path, _), allowed in nobody.items() if path == "/admin")


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def test_keys_are_compared_in_constant_time(monkeypatch):
    compared = []
    real = hmac.compare_digest

    def compare(left, right):
        compared.append((left, right))
        return real(left, right)

    monkeypatch.setattr("hmac.compare_digest", compare)

    async def test(served: Serving):
        return await served.http.get("/v1/models", headers={"Authorization": "Bearer second"})

    assert run(test, api_key=["first", "second", "third"]).status_code == 200
    # Every key is looked at, whichever matched, and what is compared has one length whatever was sent.
    assert len(compared) == 3
    assert {len(value) for pair in compared for value in pair} == {32}


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"api_key": [""]}, "api_key must be"), ({"api_key": [" x"]}, "api_key must be"),
        ({"api_key": ["same"], "admin_api_key": ["same"]}, "must differ"),
        ({"allowed_origins": ["*"], "allow_credentials": True}, "allow_credentials needs"),
    ],
)  # fmt: skip
def test_settings_that_would_open_the_server_are_refused_without_showing_the_key(server, words):
    with pytest.raises(ConfigError, match=words) as error:
        ServerConfig(**server)
    assert "same" not in str(error.value)


def test_the_server_is_local_unless_told_otherwise_or_locked(monkeypatch):
    for name in ("PAXSERVE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert ServerConfig().host == "127.0.0.1"
    assert ServerConfig(api_key=["x"]).host == "0.0.0.0"
    assert ServerConfig(api_key=["x"], host="::1").host == "::1"
    assert ServerConfig(host="0.0.0.0").host == "0.0.0.0"


def test_pages_of_other_origins_read_nothing_by_default():
    async def test(served: Serving):
        preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        asked = await served.http.options("/v1/completions", headers=preflight)
        plain = await served.http.get("/health", headers={"Origin": "https://page.example"})
        return asked, plain

    asked, plain = run(test)
    assert asked.status_code == 405
    assert not [name for name in (*asked.headers, *plain.headers) if name.startswith("access-control")]
    asked, plain = run(test, allowed_origins=["https://page.example"], api_key=["secret"])
    assert (asked.status_code, plain.status_code) == (200, 200)
    assert asked.headers["access-control-allow-origin"] == "https://page.example"
    assert plain.headers["access-control-allow-origin"] == "https://page.example"
    asked, plain = run(test, allowed_origins=["https://other.example"])
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in plain.headers


def test_the_documents_of_the_api_can_be_left_out():
    async def test(served: Serving):
        return [(await served.http.get(path)).status_code for path in ("/docs", "/redoc", "/openapi.json")]

    assert run(test) == [200, 200, 200]
    assert run(test, disable_fastapi_docs=True) == [404, 404, 404]


def test_without_keys_everything_is_open():
    async def test(served: Serving):
        return await served.http.get("/v1/models")

    assert run(test).status_code == 200
