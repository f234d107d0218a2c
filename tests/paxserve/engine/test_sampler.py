"""The sampler against plain numpy in float64: which tokens stay, how often each comes, and that rows are alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxserve.engine import sampler
from paxserve.engine.sampler import SamplingTensors, apply_penalties, argmax, sample

sample_jit = jax.jit(sample)


def tensors(num_rows, *, seeds=None, **values):
    """Neutral parameters at temperature 1, but for `values` (one for all rows, or one a row)."""
    fields = {
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "position": (0, np.int32),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(values.pop(name, default), dtype), (num_rows,))
        for name, (default, dtype) in fields.items()
    }
    seeds = np.arange(num_rows) if seeds is None else np.broadcast_to(seeds, (num_rows,))
    words = np.stack([seeds, np.zeros_like(seeds)], axis=1).astype(np.uint32)
    penalties = {name: np.broadcast_to(np.float32(value), (num_rows,)) for name, value in values.items()}
    return SamplingTensors(seed=words, **arrays, **penalties)


def row_of(batch, i):
    return jax.tree.map(lambda x: x[i : i + 1], batch)


def logits_of_kind(kind, num_rows, vocab_size, rng):
    """Logits as models make them, and as they never should."""
    logits = rng.standard_normal((num_rows, vocab_size)) * 3
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "flat":
        logits = np.full_like(logits, 1.5)
    elif kind == "barred":
        logits[rng.random(logits.shape) < 0.7] = -np.inf
        logits[:, rng.integers(vocab_size)] = 0.0
    elif kind == "extreme":
        logits = rng.choice([-3e38, -1e30, -88.0, -1e-40, 0.0, 1e-40, 5.0, 1e30, 3e38], logits.shape)
    elif kind == "infinite":
        logits[:, rng.integers(vocab_size)] = np.inf
    elif kind == "bfloat16":
        logits = np.asarray(jnp.asarray(logits, jnp.bfloat16).astype(jnp.float32))
    return logits.astype(np.float32)


KINDS = ["normal", "ties", "flat", "barred", "extreme", "infinite", "bfloat16"]


def kept_by_numpy(distances, top_k, top_p, min_p):
    """The tokens that stay, in float64, by sorting; ties at a cut stay."""
    weights = np.exp(-distances.astype(np.float64))
    weights[weights < min_p] = 0
    if 0 < top_k < len(weights):
        weights[weights < np.sort(weights)[-top_k]] = 0
    if top_p < 1:
        descending = np.sort(weights)[::-1]
        enough = np.cumsum(descending) >= top_p * weights.sum()
        weights[weights < descending[np.argmax(enough)]] = 0
    return weights > 0


@jax.jit
def cuts(distances, batch):
    """Each row's cut, by both ways of finding it."""
    rows = (distances, batch.top_k, batch.top_p, batch.min_p)
    nearest = jax.lax.map(lambda row: sampler._nearest_cut(*row), rows)
    return nearest, jax.vmap(sampler._searched_cut)(*rows)


distances_jit = jax.jit(sampler._distances)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    vocab_size=st.sampled_from([1, 7, 300]),
    data_seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.01, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 255, 256, 257, 299, 300, 5000]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1, exclude_min=True), st.sampled_from([0.1, 0.5, 0.9, 0.95])),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1), st.just(1.0)),
)
def test_tokens_kept_equal_numpys(kind, vocab_size, data_seed, temperature, top_k, top_p, min_p):
    logits = logits_of_kind(kind, 3, vocab_size, np.random.default_rng(data_seed))
    batch = tensors(3, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    distances = np.asarray(distances_jit(logits, batch.temperature))
    assert (distances.min(axis=1) == 0).all()
    top_p, min_p = float(batch.top_p[0]), float(batch.min_p[0])
    for farthest in cuts(distances, batch):
        for row, limit in zip(distances, np.asarray(farthest), strict=True):
            kept = (row <= limit) & (np.exp(-row) > 0)
            # The two sets differ only where a sum or a ratio falls within float32's rounding of the limit.
            fewest = kept_by_numpy(row, top_k, top_p * (1 - 1e-5), min(1.0, min_p * (1 + 1e-5))) & (np.exp(-row) > 0)
            most = kept_by_numpy(row, top_k, min(1.0, top_p * (1 + 1e-5)), min_p * (1 - 1e-5))
            assert (kept | ~fewest).all()
            assert (most | ~kept).all()
            assert kept.any()


def test_cuts_worked_by_hand():
    logits = np.log(np.float32([[0.5, 0.25, 0.125, 0.125]]))
    cases = [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2, 3}),  # 2 and 3 are tied for the third place: both stay
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.76}, {0, 1, 2, 3}),
        ({"top_p": 0.001}, {0}),
        ({"min_p": 0.4}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 2, "top_p": 0.7}, {0, 1}),  # 0.5 of the 0.75 left is 0.667
        ({"top_k": 2, "top_p": 0.66}, {0}),
        ({"min_p": 0.4, "top_p": 0.66}, {0}),  # without min-p, 0.5 would not reach 0.66
        ({}, {0, 1, 2, 3}),
    ]
    for values, expected in cases:
        batch = tensors(400, seeds=3, position=np.arange(400), **values)
        seen = set(np.asarray(sample_jit(np.repeat(logits, 400, axis=0), batch)).tolist())
        assert seen == expected, values


def chi_square(counts, probabilities):
    """Standard deviations of the statistic above its mean: beyond 5 does not happen."""
    expected = counts.sum() * probabilities
    assert expected.min() > 5
    freedom = len(counts) - 1
    return ((((counts - expected) ** 2) / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 0.6}, {"temperature": 2.0}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05},
     {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.03}],
    ids=str,
)  # fmt: skip
def test_tokens_come_as_often_as_they_should(values):
    vocab_size, num_draws = 32, 40_000
    logits = np.random.default_rng(5).standard_normal((1, vocab_size)).astype(np.float32) * 1.2
    batch = tensors(num_draws, seeds=12345, position=np.arange(num_draws), **values)
    tokens = np.asarray(sample_jit(np.repeat(logits, num_draws, axis=0), batch))
    distances = np.asarray(distances_jit(logits, batch.temperature[:1]))[0]
    kept = kept_by_numpy(distances, int(batch.top_k[0]), float(batch.top_p[0]), float(batch.min_p[0]))
    probabilities = np.where(kept, np.exp(-distances.astype(np.float64)), 0)
    probabilities /= probabilities.sum()
    counts = np.bincount(tokens, minlength=vocab_size)
    assert counts[~kept].sum() == 0
    assert abs(chi_square(counts[kept], probabilities[kept])) < 5


def test_noise_of_a_large_vocabulary_is_uniform_and_independent():
    vocab_size = 49152
    seed = np.uint32([[0, 0], [1, 0], [0, 1], [2**32 - 1, 2**32 - 1], [7, 0], [7, 0]])
    position = np.int32([0, 0, 0, 0, 1, 2])
    noise = np.asarray(sampler._exponential_noise(seed, position, vocab_size), np.float64)
    uniform = 1 - np.exp(-noise)
    assert uniform.min() > 0
    for row in uniform:
        counts = np.histogram(row, bins=256, range=(0, 1))[0]
        assert abs(chi_square(counts, np.full(256, 1 / 256))) < 5
        # Pairs of neighbours in the vocabulary fill the square evenly.
        pairs = np.histogram2d(row[0::2], row[1::2], bins=16, range=[(0, 1)] * 2)[0].ravel()
        assert abs(chi_square(pairs, np.full(256, 1 / 256))) < 5
    correlation = np.corrcoef(uniform)[np.triu_indices(6, 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(vocab_size)
    # No row is another one shifted.
    shifted = [np.corrcoef(uniform[4], np.roll(uniform[5], k))[0, 1] for k in range(-64, 65)]
    assert np.abs(shifted).max() < 5.5 / np.sqrt(vocab_size)


@pytest.mark.parametrize("stream", ["positions", "seeds", "high words"])
def test_successive_draws_are_independent(stream):
    vocab_size, num_draws = 32, 40_000
    counting = np.arange(num_draws)
    batch = tensors(num_draws, seeds=9)
    if stream == "positions":
        batch = batch._replace(position=counting.astype(np.int32))
    else:
        words = np.zeros((num_draws, 2), np.uint32)
        words[:, int(stream == "high words")] = counting
        batch = batch._replace(seed=words)
    tokens = np.asarray(sample_jit(np.zeros((num_draws, vocab_size), np.float32), batch))
    pairs = np.bincount(tokens[:-1] * vocab_size + tokens[1:], minlength=vocab_size**2)
    assert abs(chi_square(pairs, np.full(vocab_size**2, vocab_size**-2.0))) < 5


def test_flat_large_vocabulary_is_drawn_evenly():
    vocab_size, num_draws, blocks = 49152, 64 * 20, 64
    tokens = []
    for start in range(0, num_draws, 64):
        batch = tensors(64, seeds=1, position=start + np.arange(64))
        tokens.append(np.asarray(sample_jit(np.zeros((64, vocab_size), np.float32), batch)))
    counts = np.bincount(np.concatenate(tokens) // (vocab_size // blocks), minlength=blocks)
    assert abs(chi_square(counts, np.full(blocks, 1 / blocks))) < 5
    assert len(np.unique(tokens)) > 0.97 * num_draws * (1 - num_draws / vocab_size / 2)


def mixed_batch(num_rows, rng):
    batch = tensors(
        num_rows,
        temperature=rng.choice([0, 0.5, 1, 2], num_rows),
        top_k=rng.choice([0, 1, 3, 50, 400, 10**6], num_rows),
        top_p=rng.choice([1, 0.95, 0.5, 0.01], num_rows),
        min_p=rng.choice([0, 0, 0.02, 0.5], num_rows),
        position=rng.integers(0, 1000, num_rows),
    )
    return batch._replace(seed=rng.integers(0, 2**32, (num_rows, 2), dtype=np.uint32))


@pytest.mark.parametrize(("vocab_size", "sizes"), [(1000, (3, 8, 40)), (49152, (4,))])
def test_a_row_is_the_same_alone_and_in_a_crowd(vocab_size, sizes):
    rng = np.random.default_rng(vocab_size)
    num_rows = sizes[-1]
    logits = (rng.standard_normal((num_rows, vocab_size)) * rng.choice([0.1, 1, 4], (num_rows, 1))).astype(np.float32)
    batch = mixed_batch(num_rows, rng)
    crowd = np.asarray(sample_jit(logits, batch))
    alone = [int(sample_jit(logits[i : i + 1], row_of(batch, i))[0]) for i in range(num_rows)]
    np.testing.assert_array_equal(alone, crowd)
    for size in sizes:
        order = rng.permutation(num_rows)[:size]
        some = sample_jit(logits[order], jax.tree.map(lambda x, order=order: x[order], batch))
        np.testing.assert_array_equal(some, crowd[order])


def test_company_that_changes_the_branch_changes_nothing():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((40, 1000)).astype(np.float32) * 2
    plain = tensors(40, position=np.arange(40))
    expected = np.asarray(sample_jit(logits, plain))
    for other in ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}, {"temperature": 0.0}):
        ((name, value),) = other.items()
        changed = np.array(getattr(plain, name))
        changed[10] = value
        tokens = np.asarray(sample_jit(logits, plain._replace(**{name: changed})))
        np.testing.assert_array_equal(np.delete(tokens, 10), np.delete(expected, 10))
    greedy = tensors(40, temperature=np.where(np.arange(40) == 10, 1.0, 0.0))
    tokens = np.asarray(sample_jit(logits, greedy))
    np.testing.assert_array_equal(np.delete(tokens, 10), np.delete(logits.argmax(axis=1), 10))


def test_poisoned_rows_harm_nobody():
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((8, 1000)).astype(np.float32)
    batch = mixed_batch(8, rng)
    expected = np.asarray(sample_jit(logits, batch))
    poisoned = logits.copy()
    poisoned[5:] = np.nan
    bad = np.arange(8) >= 5
    batch = batch._replace(
        temperature=np.where(bad, np.float32(np.nan), batch.temperature),
        top_p=np.where(bad, np.float32(np.nan), batch.top_p),
        min_p=np.where(bad, np.float32(-1), batch.min_p),
        top_k=np.where(bad, np.int32(-5), batch.top_k),
        position=np.where(bad, np.int32(-1), batch.position),
    )
    tokens = np.asarray(sample_jit(poisoned, batch))
    np.testing.assert_array_equal(tokens[:5], expected[:5])
    assert ((tokens >= 0) & (tokens < 1000)).all()


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.1}], ids=str)
def test_odd_logits_give_valid_tokens(values):
    logits = np.zeros((8, 1000), np.float32)
    logits[0] = np.nan
    logits[1] = -np.inf
    logits[2] = np.inf
    logits[3, 7] = np.inf
    logits[4], logits[4, 9] = -np.inf, -1e30
    logits[5, 11] = np.nan
    tokens = np.asarray(sample_jit(logits, tensors(8, **values)))
    assert ((tokens >= 0) & (tokens < 1000)).all()
    assert tokens[0] == tokens[1] == 0
    assert tokens[3] == 7
    assert tokens[4] == 9


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 100, 1000, 1037, 49152])
def test_argmax_takes_the_first_of_equals(vocab_size):
    rng = np.random.default_rng(vocab_size)
    for values in (
        rng.standard_normal((9, vocab_size)),
        rng.integers(0, 3, (9, vocab_size)),
        np.zeros((9, vocab_size)),
    ):
        values = values.astype(np.float32)
        np.testing.assert_array_equal(jax.jit(argmax)(values), values.argmax(axis=1))


def test_greedy_rows_take_the_best_token_and_so_does_top_k_1():
    logits = np.random.default_rng(3).integers(0, 4, (8, 1000)).astype(np.float32)
    best = logits.argmax(axis=1)
    np.testing.assert_array_equal(sample_jit(logits, tensors(8, temperature=0.0)), best)
    np.testing.assert_array_equal(sample_jit(logits, tensors(8, top_k=1)), best)
    mixed = np.asarray(
        sample_jit(logits, tensors(8, temperature=[0, 1, 0, 1, 0, 1, 0, 1], top_k=[0, 0, 0, 1, 0, 5, 0, 9]))
    )
    np.testing.assert_array_equal(mixed[[0, 2, 3, 4, 6]], best[[0, 2, 3, 4, 6]])


def test_default_top_k_leaves_temperature_its_effect():
    """B027: six unseeded requests at temperature 1, nothing else set, must not agree."""
    logits = np.random.default_rng(4).standard_normal((1, 1000)).astype(np.float32)
    tokens = sample_jit(np.repeat(logits, 8, axis=0), tensors(8, seeds=np.arange(100, 108)))
    assert len(set(tokens.tolist()[:6])) > 3


def test_each_position_has_its_own_noise_and_a_seed_repeats():
    """B028: one request's positions draw differently; the same seed gives the same tokens again."""
    logits = np.zeros((40, 1000), np.float32)
    batch = tensors(40, seeds=77, position=np.arange(40))
    tokens = np.asarray(sample_jit(logits, batch))
    assert len(set(tokens.tolist())) > 32
    np.testing.assert_array_equal(sample_jit(logits, batch), tokens)
    for word in (0, 1):
        seed = np.array(batch.seed)
        seed[:, word] += 1
        assert (np.asarray(sample_jit(logits, batch._replace(seed=seed))) != tokens).mean() > 0.9


def test_seeded_draws_never_change():
    """The stream is a promise: an upgrade must not change what a seed gives."""
    logits = np.random.default_rng(6).standard_normal((8, 1000)).astype(np.float32)
    tokens = sample_jit(logits, tensors(8, seeds=np.arange(8) * 1000, position=np.arange(8)))
    assert tokens.tolist() == [456, 693, 303, 38, 349, 932, 312, 205]


def test_penalties_worked_by_hand():
    #                     prompt    both      output    neither   prompt, negative   output twice, negative
    logits = np.float32([[2.0,      2.0,      2.0,      2.0,      -2.0,              -2.0]])  # fmt: skip
    prompt_mask = np.array([[True, True, False, False, True, False]])
    output_counts = np.int32([[0, 3, 1, 0, 0, 2]])
    batch = tensors(1, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    adjusted = apply_penalties(logits, prompt_mask, output_counts, batch)
    np.testing.assert_array_equal(adjusted, [[1.0, 1 - 0.75 - 0.5, 1 - 0.25 - 0.5, 2.0, -4.0, -4 - 0.5 - 0.5]])


def test_penalties_act_on_their_own_rows_and_neutral_ones_change_nothing():
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((3, 50)).astype(np.float32)
    prompt_mask, output_counts = rng.random((3, 50)) < 0.3, rng.integers(0, 4, (3, 50)).astype(np.int32)
    batch = tensors(3, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
    batch = batch._replace(presence_penalty=np.float32([0, 1, 0]), frequency_penalty=np.float32([0, 0, -0.5]))
    adjusted = np.asarray(jax.jit(apply_penalties)(logits, prompt_mask, output_counts, batch))
    np.testing.assert_array_equal(adjusted[0], logits[0])
    np.testing.assert_allclose(adjusted[1], logits[1] - (output_counts[1] > 0), rtol=1e-6)
    np.testing.assert_allclose(adjusted[2], logits[2] + 0.5 * output_counts[2], rtol=1e-6)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers_for_accelerators(platform):
    batch = jax.tree.map(jnp.asarray, tensors(16))
    traced = jax.jit(sample).trace(jnp.zeros((16, 1000)), batch)
    assert "while" in traced.lower(lowering_platforms=(platform,)).as_text()
