import asyncio

import pytest

from paxserve.engine.admission import Admission
from paxserve.errors import RequestError
from paxserve.messages import EngineRequest
from paxserve.sampling_params import SamplingParams


def requests(*lengths: int, name: str = "r") -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=f"{name}{place}", prompt_token_ids=[1] * length, params=SamplingParams(), arrival_time=0.0
        )
        for place, length in enumerate(lengths)
    ]


def test_without_limits_all_may_begin():
    admission = Admission()
    admission.admit(requests(*range(1, 1000)))
    assert admission.num_waiting == 999


@pytest.mark.parametrize(("limits", "reason"), [
    ({"max_requests": 2}, "max_num_queued_reqs"), ({"max_tokens": 25}, "max_num_queued_tokens"),
])  # fmt: skip
def test_the_queue_has_an_end(limits, reason):
    refused = []
    admission = Admission(**limits, on_refusal=refused.append)
    admission.admit(requests(10, 10))
    with pytest.raises(RequestError, match=reason) as error:
        admission.admit(requests(10, name="x"))
    assert error.value.code == 429
    assert refused == [reason]
    assert admission.num_waiting == 2
    admission.release("r0")
    admission.release("unknown")
    admission.admit(requests(10, name="x"))
    assert admission.num_waiting == 2


def test_an_empty_queue_takes_whatever_comes():
    admission = Admission(max_requests=1, max_tokens=1)
    admission.admit(requests(10, 10))
    with pytest.raises(RequestError):
        admission.admit(requests(1, name="x"))


def test_new_requests_wait_while_paused_and_are_refused_while_asleep():
    async def main():
        admission = Admission()
        admission.state = "paused"
        waiting = asyncio.ensure_future(admission.wait())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        admission.state = "open"
        await asyncio.wait_for(waiting, 1)
        admission.state = "paused"
        refused = asyncio.ensure_future(admission.wait())
        await asyncio.sleep(0)
        admission.state = "asleep"
        with pytest.raises(RequestError, match="asleep"):
            await asyncio.wait_for(refused, 1)
        with pytest.raises(RequestError, match="asleep"):
            admission.admit(requests(1))
        admission.state = "draining"
        admission.state = "open"  # too late
        with pytest.raises(RequestError, match="shutting down"):
            admission.admit(requests(1))

    asyncio.run(main())
