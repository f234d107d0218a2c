"""The machine of `scheduler_machine` with pages on disk as well, processes that end, and files that are damaged."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from paxserve.engine.disk_folder import HEADER
from paxserve.engine.host_tier import HostTier
from paxserve.engine.kv_cache import PagePool
from paxserve.sampling_params import SamplingParams
from tests.paxserve.engine.checked_loop import MET
from tests.paxserve.engine.late_disk import DAMAGES, KnownFolder, LateDisk
from tests.paxserve.engine.paged_device import EOS, PAGE_BYTES
from tests.paxserve.engine.scheduler_machine import SETTINGS, SHARED, EngineMachine

PAGE_FILE_BYTES = HEADER.size + PAGE_BYTES
SETTINGS = {
    **SETTINGS,
    "caching": st.just(True),
    "num_slots": st.sampled_from([1, 3, 8]),
    "most_pages": st.sampled_from([2, 9, 100]),
    "limits": st.sampled_from([(1, 1, 1), (3, 1, 9), (2, 2, 2), (99, 4, 99)]),
    "pace": st.integers(0, 3),
    "former": st.sampled_from([0, 5, 12, 12, 12]),
    "decay": st.lists(st.sampled_from(DAMAGES), max_size=4),
}


class DiskMachine(EngineMachine):
    """What is saved into host memory is written to a folder too, and read from there: both take their time."""

    folder = None

    @initialize(**SETTINGS)
    def start(self, most_pages, limits, pace, former, decay, **settings):
        self.most_pages = most_pages
        most_fetched, num_fetches, num_pending = limits
        self.limits = {
            "most_fetched": max(most_fetched, len(settings["reaches"])), "num_fetches": num_fetches,
            "num_pending": num_pending,
        }  # fmt: skip
        self.pace = pace
        self.folder = TemporaryDirectory()
        self.written, self.damaged = {}, set()
        super().start(**settings)
        if former:
            self._live_before(former, decay)

    def _live_before(self, length, decay):
        """A process has answered one request with the beginning that many share, and has left its pages on disk."""
        self.ask(SHARED[:length], SamplingParams(max_tokens=1, eos_token_ids=[EOS]))
        self.finish()
        self.retire(self.pool.num_free)
        self.restart(is_clean=True, has_changed=False, most_pages=None)
        for place, kind in enumerate(decay):
            self.damage(place, kind, count=1)

    def new_pool(self):
        folder = KnownFolder(
            Path(self.folder.name), self.most_pages * PAGE_FILE_BYTES, f"g{self.contents.generation}",
            written=self.written, damaged=self.damaged, met=MET,
        )  # fmt: skip
        folder.check()
        return PagePool(**self.pages, host=HostTier(self.num_slots), disk=LateDisk(folder, **self.limits))

    @rule(count=st.integers(1, 6), loser=st.sampled_from([None, None, None, 0, 1, 5]))
    def steps(self, count, loser=None):
        """Some pages get to the disk and from it meanwhile."""
        super().steps(count, loser)
        for number in range(count * self.pace):
            self.pool.disk.work(number)

    @rule(numbers=st.lists(st.integers(0, 7), min_size=1, max_size=6))
    def work(self, numbers):
        """Time passes for pages on their way to disk and from there."""
        self.device.settle()
        for number in numbers:
            self.pool.disk.work(number)

    @rule()
    def reset(self):
        """Nothing that was computed before is found or written after."""
        is_idle = self.pool.num_in_use == 0
        super().reset()
        assert not is_idle or len(self.pool.disk.folder) == 0

    @precondition(lambda self: self.pool.disk.folder.num_bytes)
    @rule(place=st.integers(0, 60), kind=st.sampled_from(DAMAGES), count=st.sampled_from([1, 2, 100]))
    def damage(self, place, kind, count):
        for other in range(min(count, len(self.pool.disk.folder.names))):
            self.pool.disk.folder.damage(place + other, kind)

    @rule(
        is_clean=st.booleans(),
        has_changed=st.sampled_from([False, False, True]),
        most_pages=st.sampled_from([None, 1, 9]),
    )
    def restart(self, is_clean, has_changed, most_pages):
        """The process ends, or is killed, and another begins on the folder, perhaps with other weights or more room."""
        if is_clean:
            self.device.settle()
            self.pool.disk.close()
        else:
            self.pool.disk.crash()
        MET["preempted"] += self.scheduler.stats().num_preemptions
        self.contents.generation += has_changed
        self.most_pages = most_pages or self.most_pages
        self.boot(self.new_pool())

    def teardown(self):
        try:
            super().teardown()
            if hasattr(self, "scheduler"):
                disk = self.pool.disk
                disk.folder.check()
                disk.close()
                assert len(disk.folder) == 0
        finally:
            if self.folder is not None:
                self.pool.disk.folder.close()
                self.folder.cleanup()
