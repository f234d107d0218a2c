"""The machines of `scheduler_machine` and `disk_machine`, run often enough to have met everything, and at length."""

import pytest
from hypothesis import HealthCheck, settings

from tests.paxserve.engine.checked_loop import MET
from tests.paxserve.engine.disk_machine import DiskMachine
from tests.paxserve.engine.scheduler_machine import EngineMachine

NUM_SEQUENCES = 1500
NUM_WITH_DISK = 800
OFTEN = ("saved", "restored", "copied", "prefix hits", "forked beams", "preempted", "decodes", "decodes ahead",
         "written to disk", "deleted from disk")  # fmt: skip
RARELY = ("from disk", "read after a restart", "damaged pages met", "reads given up")


def at_random(machine, num_sequences, num_rules):
    """The test case that runs so many sequences of so many rules."""
    machine.TestCase.settings = settings(
        max_examples=num_sequences, stateful_step_count=num_rules, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return machine.TestCase


TestScheduler = at_random(EngineMachine, NUM_SEQUENCES, 12)
TestSchedulerWithDisk = at_random(DiskMachine, NUM_WITH_DISK, 12)


def test_the_sequences_have_met_everything():
    """Random sequences that never copy, restore or fork anything would prove little."""
    if MET["sequences"] < NUM_SEQUENCES + NUM_WITH_DISK:
        pytest.skip("the sequences above have not been run")
    assert min(MET[name] for name in OFTEN) > 100, MET
    assert min(MET[name] for name in RARELY) > 0, MET


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_answer_is_found_again_when_the_conversation_goes_on(depth, ahead):
    """Pages that fill up token by token are cached as well, however deep the pipeline."""
    machine = EngineMachine()
    machine.start(
        num_pages=40, page_size=3, max_num_seqs=2, budget=20, chunked=True, caching=True, max_model_len=60,
        depth=depth, salt=0, partial=(1, 1, 0), ahead=ahead,
    )  # fmt: skip
    chat = {
        "n": 1, "min_tokens": 0, "is_endless": True, "cache_salt": None, "cache_keys": [], "prompt_logprobs": None,
        "own": [], "priority": 0, "timeout": None,
    }  # fmt: skip
    machine.add(shared=4, max_tokens=12, needs_host=False, repeat=False, **chat)
    machine.steps(20)
    assert not machine.open
    machine.add(shared=0, max_tokens=1, needs_host=False, repeat=True, **chat)
    (row,) = machine.scheduler.schedule().rows
    assert len(row.request.token_ids) == 4 + 6
    assert row.start == 9


@pytest.mark.slow
class TestSchedulerAtLength(EngineMachine.TestCase):
    settings = settings(EngineMachine.TestCase.settings, max_examples=10_000, stateful_step_count=50)


@pytest.mark.slow
class TestSchedulerWithDiskAtLength(DiskMachine.TestCase):
    settings = settings(DiskMachine.TestCase.settings, max_examples=10_000, stateful_step_count=50)
