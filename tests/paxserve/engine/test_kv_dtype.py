"""The KV pool's types through the engine: sane answers, and a pool that really is smaller."""

import dataclasses

import numpy as np
import pytest

from models.inputs import CacheSpec
from paxserve.config import EngineConfig
from paxserve.engine.page_budget import count_pages
from paxserve.errors import ConfigError
from paxserve.platform import detect_platform, resolve
from tests.engine_driver import golden_data, log_softmax, make_core, request, run

STEPS = {"int8": 1 / 254, "fp8": 2**-4}
"""Largest rounding error of each type, of a number itself or (int8) of its head's largest."""


@pytest.mark.parametrize("kv_dtype", STEPS)
def test_answers_are_those_of_float32_but_for_rounding(kv_dtype):
    """Chunked, cached and decoded: what is read back is near the reference, and the same however it came there."""
    data = golden_data("llama")
    core = make_core("llama", kv_cache_dtype=kv_dtype, block_size=4)
    prompts = [data[f"prompt_{i}"] for i in range(3)]
    scored = run(core, [request(str(i), prompt, prompt_logprobs=0) for i, prompt in enumerate(prompts)])
    cached = run(core, [request(str(i), prompt) for i, prompt in enumerate(prompts)], together=False)
    errors = []
    for i, prompt in enumerate(prompts):
        expected = log_softmax(data[f"logits_{i}"])
        found = scored[str(i), 0].prompt_logprobs[1:]
        errors += [entry.logprobs[0] - row[entry.token_ids[0]] for entry, row in zip(found, expected, strict=False)]
        assert len(found) == len(prompt) - 1
        assert cached[str(i), 0].token_ids == scored[str(i), 0].token_ids
    # A random model makes 5 of a bfloat16 pool's rounding; scales in the wrong place would make whole nats.
    assert 0 < np.mean(np.abs(errors)) < 8 * STEPS[kv_dtype]


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_the_pool_has_as_many_pages_as_its_type_allows(head_dim):
    spec = CacheSpec(num_layers=2, num_kv_heads=2, head_dim=head_dim)

    def num_pages(kv_dtype):
        config = EngineConfig.from_flags(model="m", kv_cache_dtype=kv_dtype)
        config = resolve(config, detect_platform())
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32"))
        return count_pages(config, spec, 10**6, lambda: 2**24)

    assert num_pages("bfloat16") == pytest.approx(2 * num_pages("auto"), abs=1)
    # A byte an element, and a scale of four bytes for all elements of a head.
    for kv_dtype in ("int8", "fp8", "fp8_e4m3"):
        assert num_pages(kv_dtype) == pytest.approx(4 / (1 + 4 / head_dim) * num_pages("float32"), abs=4)


def test_what_there_is_no_pool_for_is_refused():
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of .*int8, got 'fp8_e5m2'"):
        make_core("llama", kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8, block_size=16: .*multiple of 32"):
        make_core("llama", kv_cache_dtype="int8", block_size=16, attention_backend="interpret")
