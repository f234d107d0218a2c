"""A folder of KV pages: a file each, written whole or not at all, checked when read, the least recently used deleted.

A file's name is what its page is found by, in a subfolder for each fingerprint (all that a page's bytes depend on
besides its tokens). Other processes may not use the folder meanwhile; what lies there besides pages is let alone.
"""

import contextlib
import fcntl
import hashlib
import itertools
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from paxserve.errors import ConfigError

MAGIC = b"paxserve-page-1\n"
CHECK_BYTES = 16
HEADER = struct.Struct(f"<{len(MAGIC)}s{CHECK_BYTES}sQ")
"""What a file begins with: the magic, the check, and how many bytes follow."""

SUFFIX, UNFINISHED = ".page", ".unfinished"
LOCK = "lock"


def _check_of(name: str, parts: Sequence[bytes | memoryview]) -> bytes:
    """A hash of the bytes and of whose they are, so that neither a torn nor a renamed file passes."""
    check = hashlib.blake2b(name.encode(), digest_size=CHECK_BYTES)
    for part in parts:
        check.update(part)
    return check.digest()


class DiskFolder:
    """The pages of one fingerprint in a folder that holds up to `max_bytes` of them, whatever their fingerprints.

    Safe to call from several threads.
    """

    def __init__(self, folder: Path, max_bytes: int, fingerprint: str) -> None:
        """`ConfigError` if the folder cannot be used."""
        self.folder, self.max_bytes = folder, max_bytes
        self.num_damaged = 0
        """Files that were found to be other than they were written."""
        self._own = fingerprint
        self._mutex = threading.Lock()
        self._numbers = itertools.count()
        # Ordered by last use: the front is deleted first.
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0
        with contextlib.ExitStack() as stack:
            try:
                (folder / fingerprint).mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(open(folder / LOCK, "ab"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._take_stock()
            except BlockingIOError as error:
                raise ConfigError(f"kv_offloading_disk_path: another engine uses {folder}.") from error
            except OSError as error:
                raise ConfigError(f"kv_offloading_disk_path: {error}") from error
            self._lock = stack.pop_all()
        self._make_room(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages in the folder."""
        return self._num_bytes

    def __len__(self) -> int:
        prefix = f"{self._own}/"
        return sum(name.startswith(prefix) for name in list(self._sizes))

    def __contains__(self, key: bytes) -> bool:
        return self._name(key) in self._sizes

    def _name(self, key: bytes) -> str:
        return f"{self._own}/{key.hex()}{SUFFIX}"

    def _take_stock(self) -> None:
        """Find out what is there; what a process left unfinished is deleted."""
        found = []
        for subfolder in (entry for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False)):
            for entry in os.scandir(subfolder):
                if entry.name.endswith(UNFINISHED):
                    os.unlink(entry.path)
                elif entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, f"{subfolder.name}/{entry.name}", status.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self._num_bytes += size

    def write(self, key: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        """Keep a page's bytes; False if they could not be written, or are more than the folder may hold.

        Those that are there are not written again.
        """
        name, length = self._name(key), sum(len(part) for part in parts)
        size = HEADER.size + length
        if self._use(name) or size > self.max_bytes:
            return name in self._sizes
        unfinished = self.folder / self._own / f"{next(self._numbers)}{UNFINISHED}"
        try:
            self._make_room(size)
            with open(unfinished, "wb") as file:
                file.write(HEADER.pack(MAGIC, _check_of(name, parts), length))
                for part in parts:
                    file.write(part)
            os.replace(unfinished, self.folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            return False
        with self._mutex:
            self._num_bytes += size - self._sizes.get(name, 0)
            self._sizes[name] = size
        return True

    def read(self, key: bytes) -> bytes | None:
        """A page's bytes as they were written; None, and the file is deleted, if they are not there any more."""
        name = self._name(key)
        path = self.folder / name
        try:
            content = path.read_bytes()
        except OSError:
            self._forget(name)
            return None
        body = memoryview(content)[HEADER.size :]
        if len(content) < HEADER.size or HEADER.unpack_from(content) != (MAGIC, _check_of(name, [body]), len(body)):
            self.num_damaged += 1
            self._forget(name)
            return None
        self._use(name)
        return bytes(body)

    def _use(self, name: str) -> bool:
        """Note that a page is of use, now and for the next process; False if there is none of that name."""
        with self._mutex:
            if name not in self._sizes:
                return False
            self._sizes.move_to_end(name)
        with contextlib.suppress(OSError):
            os.utime(self.folder / name)
        return True

    def clear(self) -> None:
        """Delete the pages of this fingerprint."""
        prefix = f"{self._own}/"
        for name in [name for name in list(self._sizes) if name.startswith(prefix)]:
            self._forget(name)

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def _make_room(self, size: int) -> None:
        """Delete what was not used for longest, until `size` more bytes may be written."""
        while True:
            with self._mutex:
                if not self._sizes or self._num_bytes + size <= self.max_bytes:
                    return
                oldest = next(iter(self._sizes))
            self._forget(oldest)

    def _forget(self, name: str) -> None:
        with self._mutex:
            self._num_bytes -= self._sizes.pop(name, 0)
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()
