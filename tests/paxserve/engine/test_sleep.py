"""An engine that has slept answers as before, and remembers no cached prefix that is gone."""

import pytest

from tests.engine_driver import make_core, request, run

PROMPT = list(range(5, 45))


def answer(core, name: str):
    result = run(core, [request(name, PROMPT, logprobs=2)])[name, 0]
    return result.token_ids, [entry.logprobs for entry in result.logprobs], result.last.num_cached_tokens


@pytest.fixture(scope="module")
def core():
    return make_core("llama")


@pytest.mark.parametrize("level", ["sleep", "discard"])
def test_the_same_answers_before_and_after(core, level):
    assert core.reset_prefix_cache()
    cold, warm = answer(core, "a"), answer(core, "b")
    weights = core.runner._weights
    assert warm[2] > 0
    assert getattr(core, level)()
    assert not core.sleep()
    assert not core.discard()
    assert all(weight.is_deleted() for weight in weights) == (level == "discard")
    assert core.wake_up()
    assert not core.wake_up()
    for expected, name in ((cold, "c"), (warm, "d")):
        assert answer(core, name) == expected
    assert core.stats().recompilations == 0


def test_an_engine_with_work_does_not_fall_asleep(core):
    core.add_request(request("a", PROMPT))
    core.step()
    assert not core.sleep()
    core.abort_requests([("a", None)])
    assert core.sleep()
    core.wake_up()
    assert [output.finish_reason for output in core.step()] == ["abort"]
    assert not core.has_unfinished_requests()


def test_profiles_begin_and_end_once(core, tmp_path, monkeypatch):
    monkeypatch.setenv("PAXSERVE_CACHE", str(tmp_path))
    assert not core.stop_profile()
    assert core.start_profile()
    assert not core.start_profile()
    run(core, [request("a", PROMPT[:5], max_tokens=2)])
    assert core.stop_profile()
    assert list(tmp_path.rglob("*.xplane.pb"))
