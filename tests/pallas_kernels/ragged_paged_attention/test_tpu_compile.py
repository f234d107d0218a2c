"""The TPU backend compiled by the real compiler for described chips: no copy of the pool, small temporaries.

`compile_table.py` compiles many more; these are one of each kind. Skipped without libtpu, which only Linux has.
"""

from functools import lru_cache

import pytest

from pallas_kernels.ragged_paged_attention.compile_table import Case, compile_case, pool_copies

pytest.importorskip("libtpu")
pytestmark = pytest.mark.tpu_aot

CASES = [
    Case("v6e:1x1", "Llama-3.1-8B", 64, 64, 16),
    Case("v6e:1x1", "Llama-3.1-8B", 2048, 64, 64),
    Case("v5e:1x1", "SmolLM2-135M", 512, 64, 64),
    Case("v5p:1x1x1", "Gemma-like", 64, 64, 128),
    Case("tpu7x:1x1x1", "Qwen3-0.6B", 64, 256, 64),
    Case("v4:1x1x1", "gpt-oss-like", 64, 64, 64),
    Case("v6e:1x1", "SmolLM2-135M", 64, 64, 32, "int8"),
    Case("tpu7x:1x1x1", "Llama-3.1-8B", 512, 64, 64, "float8_e4m3fn"),
    Case("v6e:1x1", "DeepSeek-V3 (latents), an eighth", 64, 64, 64),
]


compiled = lru_cache(compile_case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:6])))
def test_compiles_in_place(case):
    result = compiled(case)
    assert result.refusal is None
    assert result.aliased >= result.pool
    assert pool_copies(result) == []
    # Queries, results, new keys and values in the kernels' layouts, each once or twice: 32 KB a token covers it.
    assert result.temporary < 4e6 + 40e3 * case.num_tokens


def test_quantised_pages_are_half_of_bfloat16s():
    """By the compiler's own count of what is aliased: scales and padding included."""
    sizes = {dtype: compile_case(Case("v6e:1x1", "Llama-3.1-8B", 64, 64, 128, dtype)) for dtype in ("int8", "bfloat16")}
    assert sizes["int8"].refusal is None
    assert 0.5 < sizes["int8"].aliased / sizes["bfloat16"].aliased < 0.52


def test_copies_of_the_pool_would_be_seen():
    result = compiled(CASES[0])
    layers = "bf16[32,2048,8,16,256]{4,3,2,1,0} copy(%pool)"
    assert pool_copies(result._replace(text=f"  %copy.1 = {layers}")) == [f"%copy.1 = {layers}"]


def test_page_table_that_cannot_fit_is_refused_before_the_compiler():
    refusal = compile_case(Case("v6e:1x1", "Llama-3.1-8B", 64, 256, 16, max_model_len=131072)).refusal
    assert refusal is not None
    assert "page size 256 would fit" in refusal
