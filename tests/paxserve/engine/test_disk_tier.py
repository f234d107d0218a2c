"""Pages on disk: read while others run, found after a restart, never of another model, the same tokens throughout."""

import threading

import numpy as np
import pytest

from paxserve.engine.decode_steps import DecodeStep
from paxserve.engine.disk_folder import DiskFolder
from paxserve.engine.disk_tier import MOST_FETCHES, DiskTier
from paxserve.engine.host_tier import HostTier
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.request import expand_choices
from paxserve.engine.scheduler import Scheduler
from paxserve.engine.step_plan import RowResult
from paxserve.errors import ConfigError
from paxserve.messages import EngineRequest
from paxserve.sampling_params import SamplingParams
from tests.engine_driver import golden_data, make_core, request, run

PAGE = b"x" * 50


@pytest.fixture
def folder(tmp_path):
    folder = DiskFolder(tmp_path, 10**6, "ours")
    yield folder
    folder.close()


class Disk(DiskTier):
    """A tier whose reads wait until they are let go on."""

    def __init__(self, folder, most_fetched=100):
        super().__init__(folder, most_fetched=most_fetched)
        self.gate = threading.Event()
        inner = folder.read

        def read(key):
            assert self.gate.wait(10)
            return inner(key)

        folder.read = read


def scheduler_on(disk, num_pages=20, max_num_seqs=8):
    pool = PagePool(num_pages, 4, host=HostTier(2), disk=disk)
    return Scheduler(pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=80)


def add(scheduler, number, prompt, priority=0):
    source = EngineRequest(
        request_id=f"r{number}", prompt_token_ids=list(prompt), params=SamplingParams(max_tokens=2, ignore_eos=True),
        arrival_time=0.0, priority=priority,
    )  # fmt: skip
    (made,) = expand_choices(source, [0], number)
    scheduler.add([made])
    return made


def on_disk(folder, prompt, places):
    (probe,) = expand_choices(
        EngineRequest(request_id="p", prompt_token_ids=list(prompt), params=SamplingParams(), arrival_time=0.0), [0], 0
    )
    hashes = probe.page_hashes(len(prompt) // 4, 4)
    for place in places:
        folder.write(hashes[place], [PAGE + bytes([place])])
    return hashes


def take_in(scheduler, step):
    is_decode = isinstance(step, DecodeStep)
    scheduler.update(step, np.full((1, step.num_rows), 7) if is_decode else [RowResult(7) for _ in step.rows])


def test_a_request_waits_for_its_pages_and_others_pass_it(folder):
    disk = Disk(folder)
    scheduler = scheduler_on(disk)
    on_disk(folder, range(17), range(4))
    waits, other = add(scheduler, 0, range(17)), add(scheduler, 1, [99] * 9)
    step = scheduler.schedule()
    assert [row.request for row in step.rows] == [other]
    scheduler.update(step, [RowResult(7)])
    disk.gate.set()
    while waits.num_computed == 0:
        if (step := scheduler.schedule()) is None:
            disk.wait(1)  # the other has ended
            continue
        scheduler.check_integrity()
        take_in(scheduler, step)
    assert waits.num_cached_tokens == 16
    scheduler.check_integrity()


def test_what_comes_from_disk_goes_into_the_pages_of_the_step(folder):
    disk = Disk(folder)
    scheduler = scheduler_on(disk)
    on_disk(folder, range(17), range(4))
    reads = add(scheduler, 0, range(17))
    assert scheduler.schedule() is None
    disk.gate.set()
    for fetch in disk._fetches:
        for read in fetch.reads:
            read.result(10)
    step = scheduler.schedule()
    assert step.page_fills == [(PAGE + bytes([n]), page) for n, page in enumerate(reads.pages[:4])]
    assert step.rows[0].start == 16
    assert not disk._fetches


def test_a_damaged_page_shortens_the_prefix(folder, tmp_path):
    disk = Disk(folder)
    disk.gate.set()
    scheduler = scheduler_on(disk)
    hashes = on_disk(folder, range(17), range(4))
    (tmp_path / "ours" / f"{hashes[2].hex()}.page").write_bytes(b"torn")
    add(scheduler, 0, range(17))
    while (step := scheduler.schedule()) is None:
        disk.wait(1)
    assert step.rows[0].start == 8
    assert hashes[2] not in disk


def test_one_request_reads_no_more_than_its_share(folder):
    disk = Disk(folder, most_fetched=3)
    disk.gate.set()
    scheduler = scheduler_on(disk)
    on_disk(folder, range(33), range(8))
    add(scheduler, 0, range(33))
    while (step := scheduler.schedule()) is None:
        disk.wait(1)
    assert step.rows[0].start == 12


def test_an_aborted_request_gives_its_place_to_the_next(folder):
    disk = Disk(folder)
    scheduler = scheduler_on(disk)
    prompts = [[n] * 9 for n in range(MOST_FETCHES + 1)]
    for number, prompt in enumerate(prompts):
        on_disk(folder, prompt, [0, 1])
        add(scheduler, number, prompt)
    assert scheduler.schedule() is None
    assert len(disk._fetches) == MOST_FETCHES
    scheduler.abort("r0")
    assert len(disk._fetches) == MOST_FETCHES - 1
    assert scheduler.schedule() is None
    assert len(disk._fetches) == MOST_FETCHES
    disk.gate.set()
    count = 0
    while scheduler.has_unfinished():
        if (step := scheduler.schedule()) is None:
            disk.wait(1)
            continue
        count += sum(row.start == 8 for row in step.rows)
        take_in(scheduler, step)
    assert count >= MOST_FETCHES
    assert not disk._fetches


def test_whoever_comes_first_in_rank_is_read_for_first(folder):
    """Requests that have been overtaken must not keep the places of those that they wait behind."""
    disk = Disk(folder)
    scheduler = scheduler_on(disk, max_num_seqs=MOST_FETCHES)
    prompts = [[n] * 9 for n in range(2 * MOST_FETCHES + 2)]
    for number, prompt in enumerate(prompts):
        on_disk(folder, prompt, [0, 1])
        add(scheduler, number, prompt, priority=-(number >= MOST_FETCHES))
        assert scheduler.schedule() is None
    assert len(disk._fetches) == MOST_FETCHES
    disk.gate.set()
    starts = []
    for _ in range(1000):
        if (step := scheduler.schedule()) is None:
            disk.wait(1)
            continue
        starts += [int(row.request.request_id[1:]) for row in step.rows if row.start == 8]
        take_in(scheduler, step)
    assert not scheduler.has_unfinished()
    assert sorted(starts) == list(range(2 * MOST_FETCHES + 2))
    assert min(starts[:2]) >= MOST_FETCHES


def test_what_was_computed_before_a_reset_is_not_written_after_it(folder):
    disk = DiskTier(folder, most_fetched=10)
    epoch = disk.epoch
    disk.keep(b"a", [memoryview(PAGE)], epoch)
    disk.clear()
    disk.keep(b"b", [memoryview(PAGE)], epoch)
    disk.keep(b"c", [memoryview(PAGE)], disk.epoch)
    disk._writer.shutdown()
    assert [key in disk for key in (b"a", b"b", b"c")] == [False, False, True]


# The engine


@pytest.mark.parametrize("name", ["gemma3_text", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_restart_finds_what_was_evicted(name, tmp_path):
    data = golden_data(name)
    prompt, expected = data["prompt_2"], data["greedy_2"].tolist()
    flags = {"block_size": 4, "max_num_batched_tokens": 32, "compile_sizes": [32], "kv_offloading_size": 0.01}
    flags |= {"kv_offloading_disk_path": str(tmp_path / "pages"), "compilation_cache_dir": str(tmp_path / "programs")}
    cores = []
    for life in range(2):
        core = make_core(name, num_gpu_blocks_override=40 if name == "llama" else 150, **flags)
        cores.append(core)
        first = run(core, [request("first", prompt)])["first", 0]
        assert first.token_ids == expected
        assert (first.last.num_cached_tokens > 0) == (life > 0)
        for n in range(1, 5):  # others push it out of the pool
            run(core, [request(f"other {life} {n}", np.roll(prompt, n))])
        core.runner._host_pages.settle()
        core.scheduler.pool.disk.close()
    assert cores[1].stats().offloaded_hits > 0


def test_what_it_needs_is_said(tmp_path):
    with pytest.raises(ConfigError, match="kv_offloading_disk_path needs kv_offloading_size"):
        make_core("llama", kv_offloading_disk_path=str(tmp_path))
    with pytest.raises(ConfigError, match="kv_offloading_disk_size must have room for two pages"):
        make_core("llama", kv_offloading_size=0.1, kv_offloading_disk_path=str(tmp_path), kv_offloading_disk_size=1e-9)
    with pytest.raises(ConfigError, match="kv_offloading_disk_size must be above 0"):
        make_core("llama", kv_offloading_disk_size=0.0)
