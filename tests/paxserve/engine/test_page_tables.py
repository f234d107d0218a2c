"""Pages of layers that do not see everything: given back as they go out of sight, found again, never read after."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import find_architecture
from models.layer_groups import LayerGroups, Reach
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.page_tables import NO_PAGE
from paxserve.engine.request import expand_choices
from paxserve.engine.scheduler import Scheduler
from paxserve.engine.step_plan import RowResult
from paxserve.errors import ConfigError
from paxserve.messages import EngineRequest
from paxserve.sampling_params import SamplingParams
from tests.engine_driver import golden_data, make_core, request, run

CONFIGS = Path(__file__).parents[2] / "models" / "configs"
WITH_WINDOWS = ("cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "mistral_swa", "olmo3")
BOTH = (Reach(), Reach(window=6))


class Steps:
    """A scheduler whose tokens are all 7, one step after another."""

    def __init__(self, num_pages, page_size, reaches=BOTH, **options):
        self.pool = PagePool(num_pages, page_size, reaches=reaches)
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "max_model_len": 1000, **options}
        self.scheduler = Scheduler(self.pool, **options)
        self.count = 0

    def add(self, prompt, max_tokens=1, n=1):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n)
        source = EngineRequest(
            request_id=str(self.count), prompt_token_ids=list(prompt), params=params, arrival_time=0.0
        )
        choices = expand_choices(source, list(range(n)), self.count)
        self.scheduler.add(list(choices))
        self.count += 1
        return choices

    def step(self):
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is not None:
            self.scheduler.update(step, [RowResult(7) for _ in step.rows])
            self.scheduler.check_integrity()
        return step

    def finish(self):
        while self.scheduler.has_unfinished():
            self.step()


def test_pages_go_back_during_a_prompt_and_during_decoding():
    steps = Steps(num_pages=100, page_size=2)
    (request,) = steps.add(range(20), max_tokens=10)
    steps.step()
    assert len(steps.pool.prefix_cache) == 8
    assert [len(table) for table in request.tables] == [4, 4]
    steps.step()  # 8 tokens are computed: the next query sees tokens 3 to 8, and one more is kept
    assert request.tables[1].index(request.tables[1][1]) == request.tables[1].count(NO_PAGE) == 1
    while request.output_len < 9:
        steps.step()
    assert NO_PAGE not in request.tables[0]
    held = [page for page in request.tables[1] if page != NO_PAGE]
    assert len(held) <= 6 // 2 + 2
    steps.finish()
    assert steps.pool.num_in_use == 0


def test_a_prefix_is_found_where_its_last_window_is():
    """What local layers no longer see may be gone: the prompt that ends there is found, its own beginning is not."""
    steps = Steps(num_pages=100, page_size=2)
    prompt = list(range(24))
    steps.add(prompt)
    steps.finish()
    hashes = expand_choices(_source(prompt), [0], 0)[0].page_hashes(11, 2)
    cache = steps.pool.prefix_cache
    for digest in hashes[:6]:
        cache.forget(cache.page_of(digest + bytes([1])))
    (longer,) = steps.add([*prompt, 99], max_tokens=3)
    steps.step()
    assert longer.num_cached_tokens == 24
    assert longer.tables[1][:9] == [NO_PAGE] * 9
    assert NO_PAGE not in longer.tables[1][9:]
    (shorter,) = steps.add(prompt[:14])
    steps.finish()
    assert shorter.num_cached_tokens == 0
    for digest in (hashes[2], hashes[10]):
        page = cache.page_of(digest + bytes([1]))
        assert page is not None
        cache.forget(page)
    (again,) = steps.add([*prompt, 98])
    steps.finish()
    assert again.num_cached_tokens == 20


def _source(prompt):
    return EngineRequest(request_id="x", prompt_token_ids=prompt, params=SamplingParams(max_tokens=1), arrival_time=0.0)


def test_choices_share_what_is_in_sight_and_copy_the_partial_page_of_each_group():
    steps = Steps(num_pages=100, page_size=4, max_num_batched_tokens=32)
    choices = steps.add(range(22), max_tokens=4, n=3)
    steps.step()
    second = steps.step()
    leader, *others = choices
    assert [len(row.request.tables) for row in second.rows] == [2, 2, 2]
    assert len(second.page_copies) == 2 * len(others)
    for other in others:
        assert other.tables[0][:5] == leader.tables[0][:5]
        assert other.tables[1][:4] == [NO_PAGE] * 4 == leader.tables[1][:4]
        assert other.tables[1][4] == leader.tables[1][4]
        assert all(own[5] != table[5] for own, table in zip(other.tables, leader.tables, strict=True))
    steps.finish()


def test_a_choice_that_comes_after_the_window_has_moved_on_computes_for_itself():
    steps = Steps(num_pages=200, page_size=2, reaches=(Reach(), Reach(window=2)), max_num_seqs=1)
    choices = steps.add(range(9), max_tokens=12, n=2)
    steps.finish()
    assert [choice.finish_reason for choice in choices] == ["length", "length"]


def test_the_longest_sequence_follows_from_what_is_in_sight():
    whole = PagePool(20, 4)
    assert whole.most_tokens(1000, 8) == 80
    assert whole.most_tokens(50, 8) == 50
    assert PagePool(20, 4, reaches=BOTH).most_tokens(1000, 8) == (20 - 5) * 4
    assert PagePool(5, 4, reaches=BOTH[1:]).most_tokens(1000, 8) == 1000


@pytest.mark.parametrize(("name", "least"), [("gemma-3-270m", 4.0), ("gemma-3-1b", 4.0), ("gpt-oss-20b", 1.8)])
def test_more_long_requests_are_held_at_once(name, least):
    """The same bytes, as the scheduler shares them out: with groups of layers against pages of all layers."""
    held = {is_hybrid: held_at_once(name, is_hybrid, prompt_len=8000) for is_hybrid in (True, False)}
    assert held[True] >= least * held[False]


def held_at_once(name, is_hybrid, prompt_len, pool_layer_pages=40_000, page_size=16):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    traits = find_architecture(config).Config.from_hf(config).layer_traits()
    layers = [Reach(trait.window) for trait in traits]
    groups = LayerGroups.arrange(layers, 32768) if is_hybrid else LayerGroups.whole(len(layers))
    steps = Steps(
        pool_layer_pages // groups.size, page_size, groups.reaches, max_num_seqs=500, max_num_batched_tokens=2048,
        max_model_len=32768,
    )  # fmt: skip
    for number in range(500):
        steps.add([number] * prompt_len, max_tokens=1000)
    scheduler = steps.scheduler
    while (step := scheduler.schedule()) is not None and not scheduler.stats().num_preemptions:
        scheduler.update(step, [RowResult(7) for _ in step.rows])
        is_full = not any(row.num_tokens > 1 for row in step.rows)
        if is_full:
            break
    scheduler.check_integrity()
    return len(scheduler.running)


# The engine


@jax.jit
def _spoiled(pool, is_free):
    def spoil(leaf):
        mask = is_free.reshape(1, -1, *[1] * (leaf.ndim - 2))
        return jnp.where(mask, jnp.nan, leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(spoil, pool)


def spoil_free_pages(core):
    """Ahead of every step, fill the pages that nobody holds with NaN."""
    pool, step = core.scheduler.pool, core.step

    def spoiled_step():
        is_free = np.array([pool.ref_count(page) == 0 for page in range(pool.num_pages)])
        core.runner._pool = _spoiled(core.runner._pool, is_free)
        return step()

    core.step = spoiled_step


def check(core, name, sources=(0, 1, 2), *, together=True):
    data = golden_data(name)
    results = run(core, [request(str(i), data[f"prompt_{n}"]) for i, n in enumerate(sources)], together=together)
    for i, n in enumerate(sources):
        assert results[str(i), 0].token_ids == data[f"greedy_{n}"].tolist()
    return results


@pytest.mark.parametrize(
    "name", ["gemma3_text", *(pytest.param(n, marks=pytest.mark.slow) for n in WITH_WINDOWS if n != "gemma3_text")]
)
def test_what_was_given_back_is_never_read(name):
    core = make_core(
        name, block_size=4, max_num_batched_tokens=8, compile_sizes=[8], enable_prefix_caching=False,
        num_scheduler_steps=3,
    )  # fmt: skip
    spoil_free_pages(core)
    check(core, name)


@pytest.mark.parametrize("name", ["gemma3_text", pytest.param("llama4_text", marks=pytest.mark.slow)])
def test_prefixes_come_back_from_the_pool_and_from_host_memory(name):
    """A pool too small for all prompts: running requests are preempted, cached pages evicted and brought back."""
    groups = 4 if name == "gemma3_text" else 4
    flags = {"block_size": 4, "compile_sizes": [8], "max_num_batched_tokens": 8, "kv_offloading_size": 0.01}
    core = make_core(name, num_gpu_blocks_override=34 * groups, **flags)
    check(core, name, (2, 1, 2, 1))
    check(core, name, (2, 1, 0), together=False)
    check(core, name, (2, 2, 2, 2))
    stats = core.stats()
    assert stats.prefix_cache_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_WINDOWS)
@pytest.mark.parametrize(("page_size", "budget"), [(1, 8), (4, 32), (16, 256)])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("is_disabled", [True, False])
def test_goldens_with_and_without(name, page_size, budget, caching, is_disabled):
    core = make_core(
        name, block_size=page_size, max_num_batched_tokens=budget, compile_sizes=[budget],
        enable_prefix_caching=caching, disable_hybrid_kv_cache_manager=is_disabled,
    )  # fmt: skip
    assert is_disabled == (core.runner.shape.groups.reaches == (Reach(),))
    check(core, name)
    check(core, name, (2, 1, 2), together=False)


def test_too_few_pages_for_the_groups_are_refused():
    with pytest.raises(ConfigError, match="num_gpu_blocks_override must be at least 7 for this model"):
        make_core("gemma3_text", num_gpu_blocks_override=6)
