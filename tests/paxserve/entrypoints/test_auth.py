import pytest

from tests.paxserve.serving import Serving, run

KEY = {"Authorization": "Bearer secret"}
CLOSED = [
    "/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/docs", "/openapi.json",
    "/redoc", "/nothing", "//v1/models", "/v1//models", "//health", "/health/", "/health/../v1/models", "/./health",
    "/metrics/", "/HEALTH", "/v1/models?x=/health", "/%76%31/models", "/", "", "*", "/health\x00", "/health;/v1/models",
]  # fmt: skip


def every_path(served: Serving) -> list[str]:
    return ["/docs", "/redoc", "/openapi.json", *served.app.openapi()["paths"]]


def test_every_route_but_the_open_ones_asks_for_the_key():
    async def test(served: Serving):
        without = {path: (await served.http.get(path)).status_code for path in every_path(served)}
        return without

    statuses = run(test, api_key=["secret"])
    assert {path for path, status in statuses.items() if status != 401} == {"/health", "/version", "/metrics"}
    assert len(statuses) > 8


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


def test_without_keys_everything_is_open():
    async def test(served: Serving):
        return await served.http.get("/v1/models")

    assert run(test).status_code == 200
