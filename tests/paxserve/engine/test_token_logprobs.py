"""Log-probabilities and ranks against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxserve.engine.token_logprobs import TILE, gather_logprobs, prompt_logprobs

gather_jit = jax.jit(gather_logprobs, static_argnums=2)


def log_softmax(logits):
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def check(result, logits, token_ids, num_top):
    expected = log_softmax(logits)
    rows = np.arange(len(logits))
    np.testing.assert_allclose(result.chosen, expected[rows, token_ids], rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(result.rank, 1 + (logits > logits[rows, token_ids][:, None]).sum(axis=1))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :num_top]
    np.testing.assert_array_equal(result.top_ids, order)
    assert result.top.shape == (len(logits), num_top)
    np.testing.assert_allclose(result.top, np.take_along_axis(expected, order, axis=1), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("vocab_size", "num_top"), [(1, 0), (1, 1), (50, 0), (50, 1), (50, 50), (5000, 20), (5000, 5000)]
)
@pytest.mark.parametrize("kind", ["normal", "ties", "wide"])
def test_equals_numpy(vocab_size, num_top, kind):
    rng = np.random.default_rng(vocab_size)
    logits = (rng.standard_normal((5, vocab_size)) * {"normal": 3, "ties": 1, "wide": 40}[kind]).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits) + np.float32(0)  # no negative zeros
    token_ids = rng.integers(0, vocab_size, 5).astype(np.int32)
    check(gather_jit(logits, token_ids, num_top), logits, token_ids, num_top)


def test_worked_by_hand():
    logits = np.log(np.float32([[0.125, 0.5, 0.125, 0.25]])) + 7
    result = gather_jit(logits, np.int32([2]), 3)
    np.testing.assert_allclose(result.chosen, np.log([0.125]), rtol=1e-6)
    assert result.rank.tolist() == [3]  # token 0 is as likely, not more
    assert result.top_ids.tolist() == [[1, 3, 0]]
    np.testing.assert_allclose(result.top, np.log([[0.5, 0.25, 0.125]]), rtol=1e-6)


def test_barred_tokens_and_low_precision():
    logits = np.float32([[1.0, -np.inf, 2.0, -np.inf], [0.0, 0.0, 0.0, 0.0]])
    result = gather_jit(logits, np.int32([1, 3]), 4)
    assert result.chosen.tolist() == [-np.inf, np.float32(np.log(0.25))]
    assert result.rank.tolist() == [3, 1]
    assert result.top_ids.tolist() == [[2, 0, 1, 3], [0, 1, 2, 3]]
    assert result.top[0, 2] == -np.inf
    half = gather_jit(jnp.asarray(logits, jnp.bfloat16), np.int32([0, 3]), 2)
    assert half.chosen.dtype == half.top.dtype == jnp.float32
    np.testing.assert_allclose(half.chosen, [1 - 2 - np.log1p(np.exp(-1)), np.log(0.25)], rtol=1e-6)


def test_the_best_token_has_rank_1_and_comes_first():
    logits = np.random.default_rng(0).standard_normal((40, 1000)).astype(np.float32)
    best = logits.argmax(axis=1).astype(np.int32)
    result = gather_jit(logits, best, 1)
    assert (np.asarray(result.rank) == 1).all()
    np.testing.assert_array_equal(result.top_ids[:, 0], best)
    np.testing.assert_array_equal(result.top[:, 0], result.chosen)


def test_a_row_is_the_same_alone_and_in_a_crowd():
    logits = np.random.default_rng(1).standard_normal((16, 3000)).astype(np.float32) * 3
    token_ids = np.arange(16, dtype=np.int32)
    crowd = gather_jit(logits, token_ids, 5)
    for i in range(16):
        alone = gather_jit(logits[i : i + 1], token_ids[i : i + 1], 5)
        assert (alone.rank[0], *alone.top_ids[0]) == (crowd.rank[i], *crowd.top_ids[i])
        # XLA may add up a row in another order when there are more of them.
        np.testing.assert_allclose(alone.chosen[0], crowd.chosen[i], rtol=2e-6)
        np.testing.assert_allclose(alone.top[0], crowd.top[i], rtol=2e-6)


@pytest.mark.parametrize("num_tokens", [1, 7, TILE, TILE + 1, 3 * TILE - 5])
@pytest.mark.parametrize("num_top", [0, 3])
def test_prompt_in_tiles_equals_all_at_once(num_tokens, num_top):
    rng = np.random.default_rng(num_tokens)
    hidden = rng.standard_normal((num_tokens, 8)).astype(np.float32)
    head = rng.standard_normal((8, 300)).astype(np.float32)
    target_ids = rng.integers(0, 300, num_tokens).astype(np.int32)
    result = jax.jit(lambda h, t: prompt_logprobs(h, lambda rows: rows @ head, t, num_top))(hidden, target_ids)
    assert result.top_ids.shape == (num_tokens, num_top)
    rows = np.arange(num_tokens)
    expected = log_softmax(hidden @ head)
    np.testing.assert_allclose(result.chosen, expected[rows, target_ids], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(result.rank, 1 + (expected > expected[rows, target_ids][:, None]).sum(axis=1))
    np.testing.assert_array_equal(result.top_ids, np.argsort(-expected, axis=1)[:, :num_top])


def test_prompt_tiles_never_hold_all_logits():
    num_tokens, vocab_size = 8 * TILE, 4096
    head = jnp.zeros((8, vocab_size))
    compiled = (
        jax.jit(lambda h, t: prompt_logprobs(h, lambda rows: rows @ head, t, 5))
        .lower(jnp.zeros((num_tokens, 8)), jnp.zeros(num_tokens, jnp.int32))
        .compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < num_tokens * vocab_size * 4 / 2


def test_top_k_is_not_turned_into_a_sort():
    """XLA:CPU does so when a slice is merged into top_k: 70 times as slow."""
    lowered = jax.jit(lambda x, t: gather_logprobs(x, t, 20).top[:, 3:4]).lower(
        jnp.zeros((4, 5000)), jnp.zeros(4, jnp.int32)
    )
    text = lowered.compile().as_text()
    assert "TopK" in text
    assert " sort(" not in text
