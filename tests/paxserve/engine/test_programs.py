import subprocess
import sys
import threading

import pytest

from paxserve.engine.program_cache import ProgramCache
from paxserve.engine.programs import Programs


def no_cache():
    return ProgramCache(None)


def test_needed_programs_are_there_and_later_ones_come():
    gate = threading.Event()
    programs = Programs(no_cache(), {"now": lambda: "a"}, {"later": lambda: gate.wait(10) and "b"})
    assert programs["now"] == "a"
    assert programs.choose(["later", "now"]) == "now"
    assert programs.choose(["later"]) == "later"
    gate.set()
    assert programs["later"] == "b"
    assert programs.choose(["later", "now"]) == "later"
    programs.wait()
    assert len(programs) == 2


def test_a_failing_program_fails_the_start():
    def fail():
        raise ValueError("no such instruction")

    with pytest.raises(ValueError, match="no such instruction"):
        Programs(no_cache(), {"now": fail}, {})


def test_a_process_that_ends_does_not_wait_for_what_is_queued():
    script = """
import time
from paxserve.engine.program_cache import ProgramCache
from paxserve.engine.programs import Programs
Programs(ProgramCache(None), {"now": lambda: 1}, {n: lambda: time.sleep(2) for n in range(200)})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=90)  # else it would take minutes
