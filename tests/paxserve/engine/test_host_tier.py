"""The cache's second tier: what is kept, replaced and pinned, and bytes that come back as they went."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import PageContent
from paxserve.engine.host_pages import HostPages
from paxserve.engine.host_tier import HostTier
from paxserve.errors import ConfigError
from tests.engine_driver import golden_data, make_core, request, run

A, B, C, D = (bytes([n]) for n in range(4))


def test_the_least_recently_used_is_replaced():
    tier = HostTier(2)
    tier.keep(A, 10)
    tier.keep(B, 11)
    tier.keep(A, 12)  # is there already
    assert tier.take_moves() == ([(10, 0, A), (11, 1, B)], [])
    tier.keep(C, 13)
    assert A in tier
    assert C in tier
    assert B not in tier
    assert tier.take_moves() == ([(13, 1, C)], [])
    tier.check_integrity()


def test_what_is_about_to_be_loaded_is_not_replaced():
    tier = HostTier(2)
    tier.keep(A, 10)
    tier.keep(B, 11)
    tier.take_moves()
    tier.pin([A, B])
    tier.keep(C, 12)
    assert C not in tier
    tier.load(A, 5)
    assert tier.take_moves() == ([], [(0, 5)])
    tier.keep(C, 12)  # the pins ended with the step; B is now the oldest
    assert A in tier
    assert B not in tier


def test_clearing_frees_every_slot():
    tier = HostTier(3)
    for page, digest in enumerate((A, B, C, D)):
        tier.keep(digest, page)
    tier.clear()
    assert len(tier) == 0
    assert tier.take_moves() == ([], [])
    tier.check_integrity()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_bytes_come_back_as_they_went(dtype):
    def content(seed):
        rng = np.random.default_rng(seed)
        values = jnp.asarray(rng.integers(-9, 9, (4, 2, 2, 8, 1, 16)), dtype)
        return PageContent(values, jnp.asarray(rng.normal(size=values.shape[:-1]), jnp.float32))

    first, second = content(0), content(1)
    host = HostPages(6, first)
    host.put([5, 0, 2], first)
    host.put([1, 2], second)  # slot 2 is given away before it was read
    found = host.get([2, 5, 1], 4)
    for held, a, b in zip(*map(jax.tree.leaves, (found, first, second)), strict=True):
        assert held.shape == a.shape
        assert held.dtype == a.dtype
        np.testing.assert_array_equal(held[:3], np.stack([b[1], a[0], b[0]]))


@pytest.mark.parametrize(
    ("kv_dtype", "tensor"),
    [
        ("auto", 1),
        ("auto", 2),
        *(pytest.param(dtype, size, marks=pytest.mark.slow) for dtype, size in [("int8", 1), ("int8", 3), ("fp8", 2)]),
    ],
)
def test_a_prompt_evicted_from_the_pool_comes_back_from_host_memory(kv_dtype, tensor):
    """With a pool of two prompts, others push the first one out; its tokens stay the same as if it had stayed."""
    data = golden_data("llama")
    prompts = [data["prompt_1"], *(np.roll(data["prompt_1"], n) for n in (1, 2, 3))]
    flags = {"block_size": 4, "num_gpu_blocks_override": 24, "kv_cache_dtype": kv_dtype, "compile_sizes": [32]}
    flags |= {"tensor_parallel_size": tensor}
    core = make_core("llama", kv_offloading_size=0.001, **flags)
    expected = run(core, [request("first", prompts[0])])["first", 0].token_ids
    assert kv_dtype != "auto" or expected == data["greedy_1"].tolist()
    run(core, [request(f"other{n}", prompt) for n, prompt in enumerate(prompts[1:])], together=False)
    before = core.stats().offloaded_hits
    again = run(core, [request("again", prompts[0])])["again", 0]
    stats = core.stats()
    full_pages = (len(prompts[0]) - 1) // 4
    assert again.token_ids == expected
    assert stats.offloaded_hits - before > 0
    assert again.last.num_cached_tokens == 4 * full_pages
    assert stats.recompilations == 0
    assert core.reset_prefix_cache()
    run(core, [request("anew", prompts[0])])
    assert core.stats().offloaded_hits == stats.offloaded_hits


def test_what_it_needs_is_said():
    with pytest.raises(ConfigError, match="kv_offloading_size needs enable_prefix_caching"):
        make_core("llama", kv_offloading_size=1.0, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="at least a page of"):
        make_core("llama", kv_offloading_size=1e-9)
    with pytest.raises(ConfigError, match="kv_offloading_size must be at least 0"):
        make_core("llama", kv_offloading_size=-1.0)
