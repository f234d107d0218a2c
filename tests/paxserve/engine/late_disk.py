"""A disk tier whose reads and writes happen when they are told to, and which knows what each file must hold."""

from collections import Counter
from concurrent.futures import Executor, Future

from paxserve.engine.disk_folder import SUFFIX, UNFINISHED, DiskFolder
from paxserve.engine.disk_tier import DiskTier

DAMAGES = ("torn", "flipped", "swapped", "empty", "gone")


class Job(Future):
    """A call that is made at the latest when somebody waits for it."""

    def __init__(self, jobs):
        super().__init__()
        self.jobs = jobs

    def result(self, timeout=None):
        while not self.done():
            self.jobs.run()
        return super().result(0)


class Jobs(Executor):
    """Calls in the order in which they came, until another is asked for."""

    def __init__(self):
        self.calls = []

    def submit(self, call, /, *arguments):
        self.calls.append((Job(self), call, arguments))
        return self.calls[-1][0]

    def run(self, place=0):
        job, call, arguments = self.calls.pop(place)
        if job.set_running_or_notify_cancel():
            job.set_result(call(*arguments))

    def shutdown(self, wait=True, *, cancel_futures=False):
        while self.calls:
            if cancel_futures:
                self.calls[0][0].cancel()
            self.run()


class KnownFolder(DiskFolder):
    """Remembers what was written and what has been damaged since; each read must be the one and not the other."""

    def __init__(self, folder, max_bytes, fingerprint, *, written, damaged, met: Counter):
        self.written, self.damaged, self.met = written, damaged, met
        super().__init__(folder, max_bytes, fingerprint)
        self._found_at_start = set(self._sizes)

    def write(self, key, parts):
        was_there = key in self
        is_there = super().write(key, parts)
        if is_there and not was_there:
            name = self._name(key)
            self.met["written to disk"] += 1
            self.written[name] = b"".join(parts)
            self.damaged.discard(name)
            self._found_at_start.discard(name)
        return is_there

    def read(self, key):
        name, is_there, num_damaged = self._name(key), key in self, self.num_damaged
        found = super().read(key)
        assert self.num_damaged <= num_damaged + 1
        if name in self.damaged:
            assert found is None, "a damaged page was taken for a whole one"
            self.met["damaged pages met"] += is_there
        else:
            assert (found is not None) == is_there
            assert found in (None, self.written[name]), "a page holds something else than was written"
            self.met["read after a restart"] += name in self._found_at_start
        assert (key in self) == (found is not None)
        return found

    def held(self, key):
        """What the page was written with, if it is there."""
        return self.written[self._name(key)] if key in self else None

    @property
    def names(self):
        return sorted(self._sizes)

    def damage(self, place, kind):
        """Have something happen to a file behind the folder's back."""
        names = self.names
        name = names[place % len(names)]
        path = self.folder / name
        if not path.exists():
            return
        content = path.read_bytes()
        if kind == "gone":
            path.unlink()
        elif kind == "swapped":
            other = names[(place + 1) % len(names)]
            if other == name or other in self.damaged:
                return
            path.write_bytes((self.folder / other).read_bytes())
        else:
            at = place % max(1, len(content))
            changed = {"torn": content[:at], "empty": b"", "flipped": content[:at] + b"?" + content[at + 1 :]}[kind]
            if changed == content:
                return
            path.write_bytes(changed)
        self.damaged.add(name)

    def check(self):
        """Assert that the books are those of the files."""
        assert sum(self._sizes.values()) == self.num_bytes <= self.max_bytes
        files = {f"{path.parent.name}/{path.name}" for path in self.folder.glob(f"*/*{SUFFIX}")}
        assert files <= set(self._sizes)
        assert set(self._sizes) - files <= self.damaged
        assert not list(self.folder.glob(f"*/*{UNFINISHED}"))

    def _make_room(self, size):
        before = len(self._sizes)
        super()._make_room(size)
        self.met["deleted from disk"] += before - len(self._sizes)


class LateDisk(DiskTier):
    """Does nothing by itself."""

    def __init__(self, folder, **limits):
        super().__init__(folder, **limits)
        self._writer, self._readers = Jobs(), Jobs()

    @property
    def num_reads(self):
        return len(self._readers.calls)

    def end(self, fetch):
        self.folder.met["reads given up"] += not fetch.is_done
        super().end(fetch)

    def wait(self, seconds):
        self._readers.run()

    def work(self, number):
        """Read the page that the number stands for, or write the next: those keep their order."""
        if number % 2 and self._readers.calls:
            self._readers.run(number // 2 % len(self._readers.calls))
        elif self._writer.calls:
            self._writer.run()

    def crash(self):
        """Let go of the folder with nothing written that was still to be written, and something half written."""
        (self.folder.folder / self.folder._own / f"7{UNFINISHED}").write_bytes(b"half a page")
        self.folder.close()
