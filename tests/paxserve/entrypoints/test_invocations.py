from tests.paxserve.entrypoints.test_errors import check_shape
from tests.paxserve.fake_core import SCRIPT
from tests.paxserve.serving import Serving, run


def test_the_fields_tell_what_is_asked():
    async def test(served: Serving):
        chat = await served.post("/invocations", messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
        stream = await served.post("/invocations", prompt="Hi", max_tokens=3, stream=True)
        return chat, await served.post("/invocations", prompt="Hi", max_tokens=3), stream

    chat, completion, stream = run(test)
    assert chat.json()["choices"][0]["message"]["content"] == SCRIPT[:3]
    assert completion.json()["choices"][0]["text"] == SCRIPT[:3]
    assert stream.text.endswith("data: [DONE]\n\n")


def test_bodies_that_are_neither_are_refused_as_elsewhere():
    async def test(served: Serving):
        bodies = [{}, {"colour": 1}, {"prompt": "x", "temperature": "hot"}, {"messages": []}]
        return [await served.post("/invocations", **body) for body in bodies]

    *unknown, typed, empty = run(test)
    assert {check_shape(response, 400)["param"] for response in unknown} == {"body"}
    assert check_shape(typed, 400, "Bad Request")["param"] == "body.temperature"
    assert check_shape(empty, 400, "Bad Request")["param"] == "body.messages"
