import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxserve.entrypoints.request_guard import flaw
from tests.paxserve.entrypoints.test_errors import check_shape
from tests.paxserve.serving import Serving, run

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


@given(JSON, st.booleans())
def test_depth_is_counted_as_a_parser_would(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    deep = depth(value)
    assert flaw(text, max(deep, 1)) is None
    if deep > 1:
        assert flaw(text, deep - 1) == f"The request body must be nested at most {deep - 1} levels deep."


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1E+400", "1" * 400, "2" * 309 + ".0"])
def test_numbers_that_are_not_finite_are_found_wherever_they_are(number):
    assert "finite" in (flaw(f'{{"chat_template_kwargs": {{"x": [{number}]}}}}'.encode(), 9) or "")
    assert flaw(json.dumps({"text": number}).encode(), 9) is None


@pytest.mark.parametrize("unit", [b'"', b'\\"', b"[", b"[]", b"1e5,", b'"\\', b"-1.", b"\\"])
def test_no_text_takes_long_to_look_through(unit):
    text = unit * (200_000 // len(unit))

    async def look():
        return await asyncio.wait_for(asyncio.to_thread(flaw, text, 64), 2)

    asyncio.run(look())


def test_nesting_is_refused_on_every_route():
    async def test(served: Serving):
        nested = "[" * 65 + "]" * 65
        return [
            await served.http.post(path, content=body, headers={"Content-Type": "application/json"})
            for path, body in (
                ("/v1/completions", f'{{"prompt": "x", "logit_bias": {nested}}}'),
                ("/v1/chat/completions", f'{{"messages": [], "chat_template_kwargs": {nested}}}'),
                ("/tokenize", nested),
            )
        ]

    for response in run(test):
        error = check_shape(response, 400, "Bad Request")
        assert "64 levels" in error["message"]


def test_a_body_that_trickles_is_given_up():
    async def test(served: Serving):
        async def pieces():
            for _ in range(50):
                yield b" "
                await asyncio.sleep(0.05)

        return await served.http.post("/tokenize", content=pieces(), headers={"Content-Type": "application/json"})

    response = run(test, request_body_timeout=0.2)
    check_shape(response, 408, "RequestTimeoutError")
    assert response.headers["connection"] == "close"


def test_too_many_headers():
    async def test(served: Serving):
        many = [(f"x-{number}", "x") for number in range(300)]
        return await served.http.get("/version", headers=many), await served.http.get("/version", headers=many[:200])

    many, few = run(test)
    check_shape(many, 431)
    assert few.status_code == 200


def test_a_large_body_is_looked_through_as_well():
    async def test(served: Serving):
        raw = '{"prompt": "' + "x" * 400_000 + '", "top_p": NaN}'
        return await served.http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})

    assert "finite" in check_shape(run(test), 400)["message"]
