"""Rotary position embeddings: the frequencies of every scaling scheme, and the rotation."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
OTHER_NAMES = {"type": "rope_type"}
WITHOUT_EFFECT = {"finetuned"}


@dataclass(frozen=True, kw_only=True)
class RopeParameters:
    """The `rope_parameters` of a checkpoint's configuration, with its names."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {self.rope_type!r}.")
        missing = [name for name in NEEDED.get(self.rope_type, ()) if not getattr(self, name)]
        if missing:
            raise ValueError(f"rope_type {self.rope_type!r} needs {', '.join(missing)} in rope_parameters.")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> Self:
        """The parameters of a configuration: `rope_parameters`, or the older `rope_theta` with `rope_scaling`.

        `parameters` replaces the configuration's own, for families with different ones by layer type.
        """
        own: Mapping[str, Any] = parameters or config.get("rope_parameters") or config.get("rope_scaling") or {}
        known = {f.name for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {
            name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None
        }
        for given_name, value in own.items():
            name = OTHER_NAMES.get(given_name, given_name)
            if name in WITHOUT_EFFECT or value is None or (given_name in OTHER_NAMES and name in own):
                continue
            if name not in known:
                raise ValueError(f"Unknown rope parameter {name!r} = {value!r}: expected {', '.join(sorted(known))}.")
            values[name] = tuple(value) if isinstance(value, list) else value
        if values.get("rope_type") == "su":  # what longrope was called in the first Phi-3 checkpoints
            values["rope_type"] = "longrope"
        # Phi-3 keeps the trained length outside, and there it wins.
        outside = config.get("original_max_position_embeddings")
        if outside is not None:
            values["original_max_position_embeddings"] = outside
        values.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        return cls(**values)


class RopeFrequencies(NamedTuple):
    """Radians a position for each rotated pair, and the factor on cosines and sines."""

    inv_freq: np.ndarray
    attention_factor: float


def rope_frequencies(
    rope: RopeParameters, head_dim: int, *, max_position_embeddings: int, max_model_len: int | None = None
) -> RopeFrequencies:
    """Frequencies for sequences of at most `max_model_len` tokens (by default the model's own maximum).

    Schemes that look at the sequence's length (dynamic, longrope) are settled by that maximum once: cached keys
    cannot be rotated again when a sequence grows.
    """
    dim = int(head_dim * rope.partial_rotary_factor)
    longest = max_model_len or max_position_embeddings
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    base = np.float32(rope.rope_theta)
    inv_freq = np.float32(1.0) / base**exponents
    match rope.rope_type:
        case "linear":
            return RopeFrequencies(inv_freq / np.float32(rope.factor), 1.0)
        case "dynamic":
            assert rope.factor is not None
            stretch = rope.factor * max(longest, max_position_embeddings) / max_position_embeddings - (rope.factor - 1)
            scaled_base = np.float32(rope.rope_theta * stretch ** (dim / (dim - 2)))
            return RopeFrequencies(np.float32(1.0) / scaled_base**exponents, 1.0)
        case "llama3":
            return RopeFrequencies(_llama3(rope, inv_freq), 1.0)
        case "yarn":
            return _yarn(rope, inv_freq, dim, max_position_embeddings)
        case "longrope":
            return _longrope(rope, inv_freq, longest, max_position_embeddings)
        case _:
            return RopeFrequencies(inv_freq, 1.0)


def _llama3(rope: RopeParameters, inv_freq: np.ndarray) -> np.ndarray:
    """High frequencies as they are, low ones divided by the factor, a smooth passage between."""
    low, high, trained = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings
    assert low is not None
    assert high is not None
    assert trained is not None
    assert rope.factor is not None
    turns = trained * inv_freq / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - smooth) * inv_freq / rope.factor + smooth * inv_freq).astype(np.float32)


def _yarn(rope: RopeParameters, inv_freq: np.ndarray, dim: int, max_position_embeddings: int) -> RopeFrequencies:
    trained = rope.original_max_position_embeddings or max_position_embeddings
    factor = rope.factor or max_position_embeddings / trained

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = rope.attention_factor
    if attention_factor is None:
        both = bool(rope.mscale and rope.mscale_all_dim)
        attention_factor = magnitude(rope.mscale or 1) / magnitude(rope.mscale_all_dim or 1) if both else magnitude(1)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = pair_that_turns(rope.beta_fast or 32), pair_that_turns(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / ((high - low) or 0.001), 0, 1)
    mixed = inv_freq / factor * ramp + inv_freq * (1 - ramp)
    return RopeFrequencies(mixed.astype(np.float32), float(attention_factor))


def _longrope(
    rope: RopeParameters, inv_freq: np.ndarray, longest: int, max_position_embeddings: int
) -> RopeFrequencies:
    trained = rope.original_max_position_embeddings or max_position_embeddings
    factors = np.asarray(rope.long_factor if longest > trained else rope.short_factor, np.float32)
    if factors.shape != inv_freq.shape:
        raise ValueError(f"longrope needs {inv_freq.size} long and short factors, got {factors.size}.")
    factor = rope.factor or max_position_embeddings / trained
    attention_factor = rope.attention_factor
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return RopeFrequencies(inv_freq / factors, float(attention_factor))


class RopeTable(NamedTuple):
    """Cosines and sines of one step's tokens."""

    cos: Float[Array, "T R"]
    sin: Float[Array, "T R"]


def rope_table(frequencies: RopeFrequencies, positions: Int32[Array, " T"]) -> RopeTable:
    """The table for tokens at `positions`, in float32; computed once a step and used by every layer."""
    angles = positions[:, None].astype(jnp.float32) * frequencies.inv_freq[None, :]
    factor = np.float32(frequencies.attention_factor)
    return RopeTable(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def apply_rope(x: Float[Array, "T N H"], table: RopeTable, *, interleaved: bool = False) -> Float[Array, "T N H"]:
    """`x` with its first 2 R channels rotated in pairs (i, i + R), or (2 i, 2 i + 1) if `interleaved`."""
    cut, swap = partial(_rotate_parts, interleaved=interleaved), partial(_rotate_swapped, interleaved=interleaved)
    return jax.lax.platform_dependent(x, table, tpu=swap, default=cut)


def _rotate_parts(x: Float[Array, "T N H"], table: RopeTable, *, interleaved: bool) -> Float[Array, "T N H"]:
    num_pairs = table.cos.shape[-1]
    cos, sin = table.cos[:, None, :], table.sin[:, None, :]
    rotated = x[..., : 2 * num_pairs].astype(jnp.float32)
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :num_pairs], rotated[..., num_pairs:]
    pairs = (first * cos - second * sin, second * cos + first * sin)
    out = jnp.stack(pairs, axis=-1).reshape(rotated.shape) if interleaved else jnp.concatenate(pairs, axis=-1)
    return jnp.concatenate([out.astype(x.dtype), x[..., 2 * num_pairs :]], axis=-1)


def _rotate_swapped(x: Float[Array, "T N H"], table: RopeTable, *, interleaved: bool) -> Float[Array, "T N H"]:
    """The same numbers for TPUs, whose lanes are slow to cut: the matrix unit, idle here, swaps each pair's channels.

    A product with a permutation is exact: every sum has one term that is not zero.
    """
    num_pairs, head_dim = table.cos.shape[-1], x.shape[-1]
    channels = np.arange(head_dim)
    partner = channels ^ 1 if interleaved else (channels + num_pairs) % (2 * num_pairs)
    partner = np.where(channels < 2 * num_pairs, partner, channels)
    swap = jnp.asarray(np.eye(head_dim)[partner].T, x.dtype)
    swapped = jnp.dot(x, swap, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    if interleaved:
        cos, sin = jnp.repeat(table.cos, 2, axis=-1), jnp.stack([-table.sin, table.sin], axis=-1).reshape(len(x), -1)
    else:
        # Not `jnp.tile`, a broadcast, which XLA leaves inside the loop over layers.
        cos, sin = (jnp.concatenate(halves, axis=-1) for halves in ([table.cos] * 2, [-table.sin, table.sin]))
    rest = ((0, 0), (0, head_dim - 2 * num_pairs))
    cos, sin = jnp.pad(cos, rest, constant_values=1), jnp.pad(sin, rest)
    return (x.astype(jnp.float32) * cos[:, None, :] + swapped * sin[:, None, :]).astype(x.dtype)
