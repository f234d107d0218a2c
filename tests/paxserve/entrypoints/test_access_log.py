import json
import logging
import re
import sys

import pytest

from paxserve.log import JsonFormatter, configure_logging
from tests.paxserve.serving import Serving, run


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.INFO, "paxserve")
    return lambda: [record for record in caplog.records if record.name == "paxserve.entrypoints.access_log"]


def test_each_request_is_a_line(records):
    async def test(served: Serving):
        await served.http.get("/v1/models", headers={"X-Request-Id": "trace-1"})
        await served.http.get("/nothing")
        await served.complete(max_tokens=1)

    run(test)
    fields = [record.fields for record in records()]
    assert [(f["method"], f["path"], f["status"]) for f in fields] == [
        ("GET", "/v1/models", 200), ("GET", "/nothing", 404), ("POST", "/v1/completions", 200),
    ]  # fmt: skip
    assert fields[0]["request_id"] == "trace-1"
    assert re.fullmatch(r"\S+ GET /v1/models 200 \d\.\d{3} s trace-1", records()[0].getMessage())


def test_nobody_writes_lines_of_his_own(records):
    async def test(served: Serving):
        await served.http.get("/x%0aINFO fake line%1b[2J", headers={"X-Request-Id": "a b/c"})

    run(test)
    message = records()[0].getMessage()
    assert "\n" not in message
    assert "\x1b" not in message
    assert "a b/c" not in message


def test_it_can_be_turned_off_as_a_whole_or_by_path(records):
    async def test(served: Serving):
        await served.http.get("/health")
        await served.http.get("/version")

    run(test, disable_uvicorn_access_log=True)
    assert not records()
    run(test, disable_access_log_for_endpoints=["/health"])
    assert [record.fields["path"] for record in records()] == ["/version"]


def test_the_request_id_comes_back_if_the_server_says_so():
    async def test(served: Serving):
        named = await served.http.get("/health", headers={"X-Request-Id": "trace-1"})
        return named.headers.get("x-request-id"), (await served.complete(max_tokens=1)).headers.get("x-request-id")

    assert run(test) == (None, None)
    named, random = run(test, enable_request_id_headers=True)
    assert named == "trace-1"
    assert re.fullmatch("[0-9a-f]{32}", random)


def test_the_log_as_json(capsys):
    logger = logging.getLogger("paxserve")
    before = (logger.handlers[:], logger.level, logger.propagate)
    try:
        configure_logging(form="json")
        logging.getLogger("paxserve.x").info("hello %s", "you", extra={"fields": {"path": "/a"}})
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    entry = json.loads(capsys.readouterr().err)
    assert (entry["message"], entry["level"], entry["logger"], entry["path"]) == (
        "hello you",
        "INFO",
        "paxserve.x",
        "/a",
    )


def test_an_exception_stays_on_the_line_of_its_record():
    try:
        raise ValueError("odd")
    except ValueError:
        record = logging.getLogger("x").makeRecord("x", 40, "f", 1, "failed", (), sys.exc_info())
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert "ValueError: odd" in json.loads(text)["exception"]
