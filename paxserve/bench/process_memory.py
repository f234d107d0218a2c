"""The memory that a server's processes have taken, from Linux's /proc."""

from pathlib import Path

from paxserve.errors import ConfigError


def descendants(pid: int) -> list[int]:
    """The process and all that it has started, as long as they live. Raises `ConfigError` if it does not."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        raise ConfigError(f"There is no process {pid} that /proc tells about.") from None
    found = [pid]
    for thread in threads:
        for child in _read(thread / "children").split():
            found += descendants(int(child)) if Path(f"/proc/{child}").exists() else []
    return found


def peak_bytes(pid: int) -> int:
    """The sum of each process's own peak: what the server took at most, or a little more."""
    return sum(status_bytes(process, "VmHWM") for process in descendants(pid))


def status_bytes(pid: int, name: str) -> int:
    """One of the sizes in a process's /proc status: VmHWM is its peak, RssAnon what is its own; 0 if it has ended."""
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # the process or thread has ended since it was listed
