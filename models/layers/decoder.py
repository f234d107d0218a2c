"""The decoder layer, and the ways to run many of them: one after another, a scan over stacked weights, or a loop
that picks each layer's weights where they lie (see `choice`)."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from models.inputs import PagedKVCache
from models.layers.choice import LayerStack, choose_layer
from models.layers.config import LayerTraits
from models.layers.moe import EXPERT_AXES, SparseMLP
from models.layers.rope import RopeTable

LayerExecution = Literal["unrolled", "scanned", "looped"]


class Layer(Protocol):
    """What a layer must be for `run_layers`: an nnx module with this signature."""

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: PagedKVCache,
        layer: int | Int32[Array, ""],
        rope: RopeTable | None,
        window: int | Int32[Array, ""],
    ) -> tuple[Float[Array, "T D"], PagedKVCache]:
        """The residual stream after the layer, and the updated cache."""
        ...


class DecoderLayer(nnx.Module):
    """Attention and a feed-forward block, each normalised before (and in some families after), added to the stream."""

    def __init__(
        self,
        *,
        attention: nnx.Module,
        mlp: nnx.Module,
        attention_norm: nnx.Module | None = None,
        attention_post_norm: nnx.Module | None = None,
        mlp_norm: nnx.Module | None = None,
        mlp_post_norm: nnx.Module | None = None,
        residual_multiplier: float = 1.0,
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.attention_norm = attention_norm
        self.attention_post_norm = attention_post_norm
        self.mlp_norm = mlp_norm
        self.mlp_post_norm = mlp_post_norm
        self.residual_multiplier = residual_multiplier

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: PagedKVCache,
        layer: int | Int32[Array, ""],
        rope: RopeTable | None,
        window: int | Int32[Array, ""],
    ) -> tuple[Float[Array, "T D"], PagedKVCache]:
        """The residual stream after the layer, and the updated cache."""
        branch, cache = self.attention(_maybe(self.attention_norm, x), cache, layer, rope, window)
        x = self._add(x, _maybe(self.attention_post_norm, branch))
        normed = _maybe(self.mlp_norm, x)
        branch = self.mlp(normed, cache) if isinstance(self.mlp, SparseMLP) else self.mlp(normed)
        return self._add(x, _maybe(self.mlp_post_norm, branch)), cache

    def _add(self, x: Float[Array, "T D"], branch: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return x + (branch if self.residual_multiplier == 1.0 else branch * self.residual_multiplier)


def _maybe(module: Any, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    return x if module is None else module(x)


def arrange_layers(layers: Sequence[Layer], execution: LayerExecution) -> tuple[nnx.List, tuple[int, ...]]:
    """The layers as they will be run, and how many each entry of the list holds.

    Unrolled, an entry is a layer. Scanned, an entry is a run of neighbours of one structure, their weights
    stacked on a leading axis; the parameters' metadata `layers` says which layers (first, count) those are.
    """
    if execution == "unrolled":
        return nnx.List(list(layers)), (1,) * len(layers)
    if execution not in ("scanned", "looped"):
        raise ValueError(f"layer_execution must be unrolled, scanned or looped, got {execution!r}.")
    runs: list[list[Layer]] = []
    for layer in layers:
        if runs and _structure(runs[-1][0]) == _structure(layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    counts = tuple(len(run) for run in runs)
    if execution == "looped":
        return nnx.List(layers), counts
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    return nnx.List([_stack(run, first) for run, first in zip(runs, firsts, strict=True)]), counts


def _structure(layer: Layer) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(layer)
    return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _stack(run: list[Layer], first: int) -> Layer:
    def stack(*params: nnx.Param) -> nnx.Param:
        metadata = params[0].get_metadata()
        metadata["out_sharding"] = ("layers", *metadata["out_sharding"])
        return nnx.Param(jnp.stack([p.get_value() for p in params]), **metadata, layers=(first, len(run)))

    return jax.tree.map(stack, *run, is_leaf=lambda node: isinstance(node, nnx.Param))


# Traced once for all layers that are alike, so a program with thirty layers is as quick to trace as one with one.
@partial(jax.jit, static_argnames="window")
def _run_layer(
    module: Layer, x: Array, cache: PagedKVCache, layer: Int32[Array, ""], rope: RopeTable | None, *, window: int
) -> tuple[Array, PagedKVCache]:
    return module(x, cache, layer, rope, window)


def run_layers(
    layers: Sequence[Layer],
    counts: Sequence[int],
    traits: Sequence[LayerTraits],
    x: Float[Array, "T D"],
    cache: PagedKVCache,
    tables: Sequence[RopeTable],
) -> tuple[Float[Array, "T D"], PagedKVCache]:
    """The residual stream after all layers, however `arrange_layers` laid them out."""
    first = 0
    is_stacked = _is_stacked(layers[0])
    for run, count in enumerate(counts):
        own = traits[first : first + count]
        if is_stacked:
            x, cache = _loop_layers(layers[run], first, own, x, cache, tables)
        elif count > 1:
            x, cache = _loop_layers(layers[first : first + count], first, own, x, cache, tables)
        else:
            rope = None if own[0].rope is None else tables[own[0].rope]
            x, cache = _run_layer(layers[first], x, cache, jnp.int32(first), rope, window=own[0].window)
        first += count
    return x, cache


def _is_param(node: Any) -> bool:
    return isinstance(node, nnx.Param)


def _is_stacked(module: Layer) -> bool:
    return "layers" in jax.tree.leaves(module, is_leaf=_is_param)[0].get_metadata()


def _stays_stacked(param: nnx.Param) -> bool:
    """Whether a loop should not cut each layer's own out of the stack: matrices of experts, for what is not used."""
    is_of_experts = not EXPERT_AXES.isdisjoint(param.get_metadata("out_sharding"))
    return is_of_experts and param.get_value().ndim == 4


def _point_to(param: nnx.Param, index: Int32[Array, ""]) -> nnx.Param:
    return nnx.Param(LayerStack(param.get_value(), index), **param.get_metadata())


def _loop_layers(
    run: Layer | Sequence[Layer],
    first: int,
    traits: Sequence[LayerTraits],
    x: Float[Array, "T D"],
    cache: PagedKVCache,
    tables: Sequence[RopeTable],
) -> tuple[Float[Array, "T D"], PagedKVCache]:
    """A run of layers, stacked or apart, as one loop; what differs between them is an array with an entry a layer."""
    varying: dict[str, Any] = {}
    if len({t.window for t in traits}) > 1:
        varying["window"] = jnp.array([t.window for t in traits], jnp.int32)
    rope_choices = {t.rope for t in traits}
    if len(rope_choices) > 1:
        unrotated = RopeTable(jnp.ones_like(tables[0].cos), jnp.zeros_like(tables[0].sin))
        choices = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tables, unrotated)
        varying["rope"] = jnp.array([len(tables) if t.rope is None else t.rope for t in traits], jnp.int32)
    elif traits[0].rope is not None:
        choices = tables[traits[0].rope]
    else:
        choices = None

    apart = run if isinstance(run, Sequence) else None
    params, structure = jax.tree.flatten(None if apart else run, is_leaf=_is_param)
    sliced = [None if _stays_stacked(param) else param for param in params]

    # The layer's number is carried and not scanned over: a TPU counts in its scalar unit, but reads arrays elsewhere.
    def body(carry: tuple[Any, ...], scanned: tuple[Any, dict[str, Array]]) -> tuple[tuple[Any, ...], None]:
        (x, pool, layer), (own_params, own) = carry, scanned
        if apart is not None:
            module = choose_layer(apart, layer - first)
        else:
            pairs = zip(params, own_params, strict=True)
            module = structure.unflatten([_point_to(p, layer - first) if one is None else one for p, one in pairs])
        rope = jax.tree.map(lambda leaf: leaf[own["rope"]], choices) if "rope" in own else choices
        window = own.get("window", traits[0].window)
        x, updated = module(x, dataclasses.replace(cache, pool=pool), layer, rope, window)
        return (x, updated.pool, layer + 1), None

    scanned = (sliced, varying)
    (x, pool, _), _ = jax.lax.scan(body, (x, cache.pool, jnp.int32(first)), scanned, length=len(traits))
    return x, dataclasses.replace(cache, pool=pool)
