"""Choice of the next tokens on the device, inside the jitted step: greedy, or by temperature, min-p, top-k and top-p.

A row's token depends on its logits, parameters, seed and position alone, never on the other rows or how many there are.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

NUM_NEAREST = 256
"""Most likely tokens looked at first for a top-k or top-p cut; the whole row is searched when they do not settle it."""

WEIGHTLESS = 104.0
"""exp(-104) is 0 in float32: no token as far as that adds to a sum."""


class SamplingTensors(NamedTuple):
    """Sampling parameters of R rows; the penalties may be left out by steps in which no row has any."""

    temperature: Float32[Array, " R"]
    """0 is greedy."""
    top_k: Int32[Array, " R"]
    """0 is off; 1 is greedy."""
    top_p: Float32[Array, " R"]
    """1 is off."""
    min_p: Float32[Array, " R"]
    """0 is off."""
    seed: UInt32[Array, "R 2"]
    """The request's seed of 64 bits, in two words."""
    position: Int32[Array, " R"]
    """Index in its output of the token to be sampled: with the seed, all that the row's noise depends on."""
    presence_penalty: Float32[Array, " R"] | None = None
    frequency_penalty: Float32[Array, " R"] | None = None
    repetition_penalty: Float32[Array, " R"] | None = None


def sample(logits: Float32[Array, "R V"], tensors: SamplingTensors) -> Int32[Array, " R"]:
    """The token of each row, always in [0, V).

    Greedy rows take the highest logit, the lowest id among equals. Random rows take temperature, min-p, top-k and
    top-p in this order, each on what the one before left; tokens tied at a cut all stay, and the best always does.
    A row without a finite logit gives token 0 when random; NaN counts as the highest logit when greedy.
    """
    is_random = (tensors.temperature > 0) & (tensors.top_k != 1)
    is_cut = is_random & ((tensors.top_k > 0) | (tensors.top_p < 1) | (tensors.min_p > 0))

    def random() -> Int32[Array, " R"]:
        farthest = lax.cond(
            jnp.any(is_cut),
            lambda: _farthest_kept(_distances(logits, tensors.temperature), is_cut, tensors),
            lambda: jnp.full(is_cut.shape, jnp.inf),
        )
        distances = _distances(logits, tensors.temperature)
        weights = jnp.where(distances <= farthest[:, None], jnp.exp(-distances), 0.0)
        # An exponential race, which is the Gumbel-max trick without its logarithms: token i arrives after
        # Exp(1) / weight i, and the first one wins.
        speeds = weights / _exponential_noise(tensors.seed, tensors.position, logits.shape[1])
        return argmax(jnp.where(is_random[:, None], speeds, logits))

    return lax.cond(jnp.any(is_random), random, lambda: argmax(logits))


def argmax(values: Float32[Array, "R V"]) -> Int32[Array, " R"]:
    """The index of each row's first maximum."""
    return lax.platform_dependent(
        values, cpu=_argmax_by_blocks, default=lambda values: jnp.argmax(values, axis=-1).astype(jnp.int32)
    )


def _argmax_by_blocks(values: Float32[Array, "R V"]) -> Int32[Array, " R"]:
    """Block maxima, then the first best block: jnp.argmax is slow on CPU."""
    num_rows, num_values = values.shape
    size = min(256, num_values & -num_values)
    if size < 16:  # an odd vocabulary
        size = 128
        values = jnp.pad(values, ((0, 0), (0, -num_values % size)), constant_values=-jnp.inf)
    blocks = values.reshape(num_rows, -1, size)
    best = jnp.argmax(blocks.max(axis=-1), axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(blocks, best[:, None, None], axis=1)[:, 0]
    return best * size + jnp.argmax(inside, axis=-1).astype(jnp.int32)


def apply_penalties(
    logits: Float32[Array, "R V"],
    prompt_mask: Bool[Array, "R V"],
    output_counts: Int32[Array, "R V"],
    tensors: SamplingTensors,
) -> Float32[Array, "R V"]:
    """Logits after the repetition penalty (tokens of prompt and output), then frequency and presence (output only)."""
    assert tensors.repetition_penalty is not None
    assert tensors.frequency_penalty is not None
    assert tensors.presence_penalty is not None
    in_output = output_counts > 0
    repetition = jnp.where(prompt_mask | in_output, tensors.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - tensors.frequency_penalty[:, None] * output_counts
    return logits - tensors.presence_penalty[:, None] * in_output


def _distances(logits: Float32[Array, "R V"], temperature: Float32[Array, " R"]) -> Float32[Array, "R V"]:
    """How far each logit is below its row's highest, over the temperature: non-negative, infinite for barred tokens."""
    largest = float(jnp.finfo(jnp.float32).max)
    top = jnp.clip(logits.max(axis=-1, keepdims=True), -largest, largest)
    scale = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    return (top - jnp.minimum(logits, largest)) / scale


def _exponential_noise(
    seed: UInt32[Array, "R 2"], position: Int32[Array, " R"], vocab_size: int
) -> Float32[Array, "R V"]:
    """Draws from Exp(1), each a function of (seed, position, token id)."""
    words = _stream_words(seed, position.astype(jnp.uint32))
    token = lax.broadcasted_iota(jnp.uint32, (seed.shape[0], vocab_size), 1)
    # Two keyed rounds: after one alone, rows whose keys differ by a multiple of the stride would share their noise.
    bits = _mix(_mix(token * jnp.uint32(0x9E3779B1) + words[:, :1]) ^ words[:, 1:])
    # The race is won by small draws, and float32 is finest near 0: hence log1p(-u) and not log(u).
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log1p(-uniform)


def _stream_words(seed: UInt32[Array, "R 2"], position: UInt32[Array, " R"]) -> UInt32[Array, "R 2"]:
    """64 bits that name the stream of (seed, position): a Feistel network over the seed, keyed by the position."""
    left, right = seed[:, 0], seed[:, 1]
    for constant in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344):
        left, right = right, left ^ _mix(right + position * jnp.uint32(0x9E3779B1) + jnp.uint32(constant))
    return jnp.stack([left, right], axis=1)


def _mix(word: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A bijection of 32 bits in which every bit of the result depends on every bit given (MurmurHash3's finaliser)."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _farthest_kept(
    distances: Float32[Array, "R V"], is_cut: Bool[Array, " R"], tensors: SamplingTensors
) -> Float32[Array, " R"]:
    """The largest distance that each row's min-p, top-k and top-p leave in."""

    def one_by_one(*rows: Array) -> Float32[Array, " R"]:
        # On CPU a row at a time stays in the cache, and a row without a cut costs nothing.
        return lax.map(lambda row: lax.cond(row[0], _nearest_cut, lambda *_: jnp.float32(jnp.inf), *row[1:]), rows)

    def together(*rows: Array) -> Float32[Array, " R"]:
        return jnp.where(rows[0], jax.vmap(_searched_cut)(*rows[1:]), jnp.inf)

    rows = (is_cut, distances, tensors.top_k, tensors.top_p, tensors.min_p)
    return lax.platform_dependent(*rows, cpu=one_by_one, default=together)


def _nearest_cut(
    distances: Float32[Array, " V"], top_k: Int32[Array, ""], top_p: Float32[Array, ""], min_p: Float32[Array, ""]
) -> Float32[Array, ""]:
    """One row's cut, from the nearest tokens alone wherever they settle it."""
    # The barrier keeps XLA:CPU from merging a later slice into top_k, which turns it into a sort, 70 times as slow. It
    # is on one result alone: a barrier around the pair stops XLA:CPU's compiler when it compiles for several devices.
    nearest = jnp.abs(lax.optimization_barrier(lax.top_k(-distances, min(NUM_NEAREST, distances.shape[0]))[0]))
    num_nearest = nearest.shape[0]
    farthest = -jnp.log(min_p)
    kth = lax.cond(
        top_k <= num_nearest,
        lambda: nearest.at[jnp.maximum(top_k - 1, 0)].get(mode="clip"),
        lambda: _kth_distance(distances, top_k, nearest[-1]),
    )
    farthest = jnp.where(top_k > 0, jnp.minimum(farthest, kth), farthest)
    weights = jnp.exp(-distances)
    target = top_p * jnp.where(distances <= farthest, weights, 0.0).sum()
    mass = jnp.cumsum(jnp.exp(-nearest))
    pth = lax.cond(
        (mass[-1] >= target) | (top_p >= 1),
        lambda: jnp.where(mass >= target, nearest, jnp.inf).min(),
        lambda: _distance_of_mass(distances, weights, target, nearest[-1]),
    )
    return jnp.where(top_p < 1, jnp.minimum(farthest, pth), farthest)


def _searched_cut(
    distances: Float32[Array, " V"], top_k: Int32[Array, ""], top_p: Float32[Array, ""], min_p: Float32[Array, ""]
) -> Float32[Array, ""]:
    """One row's cut by bisection over the whole row, in the same steps for every row."""
    farthest = -jnp.log(min_p)
    kth = _kth_distance(distances, jnp.where(top_k > 0, top_k, distances.shape[0]))
    farthest = jnp.where(top_k > 0, jnp.minimum(farthest, kth), farthest)
    weights = jnp.exp(-distances)
    target = top_p * jnp.where(distances <= farthest, weights, 0.0).sum()
    pth = _distance_of_mass(distances, weights, target)
    return jnp.where(top_p < 1, jnp.minimum(farthest, pth), farthest)


def _kth_distance(
    distances: Float32[Array, " V"], k: Int32[Array, ""], at_least: Float32[Array, ""] | float = 0.0
) -> Float32[Array, ""]:
    """The k-th smallest distance, known to be `at_least` so far; infinite when there are fewer."""
    return _bisect(lambda limit: (distances <= limit).astype(jnp.float32).sum() >= k, at_least, jnp.inf)


def _distance_of_mass(
    distances: Float32[Array, " V"],
    weights: Float32[Array, " V"],
    target: Float32[Array, ""],
    at_least: Float32[Array, ""] | float = 0.0,
) -> Float32[Array, ""]:
    """The smallest distance within which the weights add up to `target`, known to be `at_least` so far."""
    return _bisect(lambda limit: jnp.where(distances <= limit, weights, 0.0).sum() >= target, at_least, WEIGHTLESS)


def _bisect(
    is_enough: Callable[[Float32[Array, ""]], Bool[Array, ""]], first: Float32[Array, ""] | float, last: float
) -> Float32[Array, ""]:
    """The smallest float in [first, last] with `is_enough`, exactly: floats from 0 up are ordered like their bits."""

    def bits(value: Float32[Array, ""] | float) -> Int32[Array, ""]:
        return lax.bitcast_convert_type(jnp.float32(value), jnp.int32)

    def halve(bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = low + (high - low) // 2
        enough = is_enough(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    _, high = lax.while_loop(lambda bracket: bracket[1] - bracket[0] > 1, halve, (bits(first) - 1, bits(last)))
    return lax.bitcast_convert_type(high, jnp.float32)
