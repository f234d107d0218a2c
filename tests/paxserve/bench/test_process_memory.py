"""Memory is summed over a process and its children."""

import subprocess
import sys

import pytest

from paxserve.bench import process_memory
from paxserve.errors import ConfigError

CHILD = "import sys; block = bytearray(64 << 20); print('ready', flush=True); sys.stdin.read()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_children_count():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        family = process_memory.descendants(process.pid)
        assert family[0] == process.pid
        assert len(family) == 2
        assert 64 << 20 < process_memory.peak_bytes(process.pid) < 256 << 20
        process.stdin.close()
    with pytest.raises(ConfigError, match="no process"):
        process_memory.peak_bytes(process.pid)
