"""Mixture of experts: a router that picks each token's experts, and the experts, run as grouped products.

Tokens are sorted by expert, so that each expert multiplies its own and no others. No token is dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from models.inputs import PagedKVCache
from models.layers.activations import activation
from models.layers.choice import LayerChoice, LayerStack, use_weight
from models.layers.initializer import Initializer
from pallas_kernels.grouped_matmul import grouped_matmul
from sharding.mesh import TENSOR
from sharding.rules import partition_spec

EXPERT_AXES = frozenset(("expert", "whole_expert"))
"""Names of the axis that counts experts: the second where devices share experts out, and not their columns."""

TILE_COLUMNS = 128
"""Columns of a matrix that a TPU keeps together."""

TILE_ROWS = 128
"""Rows that the kernel for experts takes together."""

MANY_ROWS = 4096
"""From so many (token, choice) pairs up, devices that share experts out whole have a program for less than all."""

Gating = Callable[[Float[Array, "R F"], Float[Array, "R F"]], Float[Array, "R F"]]


class Routing(NamedTuple):
    """The experts of each token, and what their results (or inputs) are multiplied by."""

    experts: Int32[Array, "T k"]
    weights: Float[Array, "T k"]


class Router(nnx.Module):
    """Scores of a token's match with every expert, of which the best `top_k` are taken; all in float32.

    Scores are a softmax over the experts, or sigmoids. `renormalise` divides the chosen ones by their sum, which for a
    softmax is the same as a softmax over the chosen logits. With `has_correction` a stored term is added for the
    choice alone (DeepSeek-V3's balancing, arXiv:2412.19437). With `num_groups` G, only the experts of the best
    `top_groups` of G equal groups can be chosen, a group being as good as its best expert, or as its best two together.
    """

    def __init__(
        self,
        init: Initializer,
        size: int,
        num_experts: int,
        top_k: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        renormalise: bool,
        bias: bool = False,
        has_correction: bool = False,
        num_groups: int = 1,
        top_groups: int = 1,
        group_score: Literal["best", "best_two"] = "best",
        scaling: float = 1.0,
    ) -> None:
        self.weight = init.param((size, num_experts), ("embed", None))
        self.bias = init.param((num_experts,), (None,), constant=0.0) if bias else None
        # Of float32 in every model: rounded, it would make different experts equal.
        self.correction = init.param((num_experts,), (None,), constant=0.0, dtype="float32") if has_correction else None
        self.top_k = top_k
        self.score = score
        self.renormalise = renormalise
        self.num_groups, self.top_groups, self.group_score = num_groups, top_groups, group_score
        self.scaling = scaling

    def __call__(self, x: Float[Array, "T D"]) -> Routing:
        """Each token's experts and their weights."""
        wide = x.astype(jnp.float32)
        precision = jax.lax.Precision.HIGHEST
        logits = use_weight(
            self.weight.get_value(), lambda weight: jnp.dot(wide, weight.astype(jnp.float32), precision=precision)
        )
        if self.bias is not None:
            logits = logits + self.bias.get_value().astype(jnp.float32)[None, :]
        scores = jax.nn.softmax(logits, axis=-1) if self.score == "softmax" else jax.nn.sigmoid(logits)
        choice = scores if self.correction is None else scores + self.correction.get_value()[None, :]
        if self.num_groups > 1:
            choice = self._limit_groups(choice)
        _, experts = jax.lax.top_k(choice, self.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if self.renormalise:
            weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
        return Routing(experts, weights * self.scaling)

    def _limit_groups(self, choice: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """The scores with those of all but the best groups out of reach."""
        grouped = choice.reshape(choice.shape[0], self.num_groups, -1)
        best, _ = jax.lax.top_k(grouped, 1 if self.group_score == "best" else 2)
        _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), self.top_groups)
        is_kept = jnp.any(groups[:, :, None] == jnp.arange(self.num_groups)[None, None, :], axis=1)
        return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


@dataclass(frozen=True)
class Gated:
    """`act(gate) * up`, the usual gating, by the activation's name."""

    act: str

    def __call__(self, gate: Float[Array, "R F"], up: Float[Array, "R F"]) -> Float[Array, "R F"]:
        """What goes into the expert's second product."""
        return activation(self.act)(gate) * up


class Experts(nnx.Module):
    """Gated MLPs of one size, their matrices stacked on an axis named "expert", or "whole_expert".

    Among several devices each has its own columns of all experts where those fill the tiles in which a TPU keeps
    columns; else some experts whole (their number filled up with empty ones), as columns that do not fill their tiles
    would be copied into padded ones at every step.
    """

    def __init__(
        self,
        init: Initializer,
        size: int,
        mlp_size: int,
        num_experts: int,
        *,
        gating: Gating,
        bias: bool = False,
        weigh_inputs: bool = False,
    ) -> None:
        self.is_whole = init.tensor_shards > 1 and mlp_size % (TILE_COLUMNS * init.tensor_shards) != 0
        expert, mlp = ("whole_expert", None) if self.is_whole else ("expert", "mlp")

        def stack(*shape: int, axes: tuple[str | None, ...]) -> nnx.Param:
            constant = 0.0 if len(shape) == 1 else None
            return init.param((num_experts, *shape), (expert, *axes), constant=constant)

        self.gate = stack(size, mlp_size, axes=("embed", mlp))
        self.up = stack(size, mlp_size, axes=("embed", mlp))
        self.down = stack(mlp_size, size, axes=(mlp, "embed"))
        self.gate_bias = stack(mlp_size, axes=(mlp,)) if bias else None
        self.up_bias = stack(mlp_size, axes=(mlp,)) if bias else None
        self.down_bias = stack(size, axes=("embed",)) if bias else None
        self.num_experts = num_experts
        self.gating = gating
        self.weigh_inputs = weigh_inputs
        """Tokens are multiplied by their weights before the experts instead of behind them."""

    def __call__(
        self,
        x: Float[Array, "T D"],
        routing: Routing,
        is_real: Bool[Array, " T"],
        backend: str,
        mesh: Mesh | None = None,
    ) -> Float[Array, "T D"]:
        """The weighted sum of each token's experts; zeros for padding tokens, which go to none."""
        names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
        weights = {name: param.get_value() for name in names if (param := getattr(self, name)) is not None}
        if mesh is None or mesh.shape[TENSOR] == 1:
            return self._own_share(x, routing, is_real, weights, backend, 0, self.num_experts)
        return self._sum_of_shares(x, routing, is_real, weights, backend, mesh)

    def _own_share(
        self,
        x: Float[Array, "T D"],
        routing: Routing,
        is_real: Bool[Array, " T"],
        matrices: Mapping[str, Any],
        backend: str,
        first: int | Int32[Array, ""],
        count: int,
    ) -> Float[Array, "T D"]:
        """What experts `first` to `first + count`, whose matrices these are, add to each token."""
        num_tokens, top_k = routing.experts.shape
        # Rows are (token, choice) pairs by expert, those of others and of padding tokens behind all.
        is_own = is_real[:, None] & (routing.experts >= first) & (routing.experts < first + count)
        experts = jnp.where(is_own, routing.experts - first, count).reshape(-1)
        order = jnp.argsort(experts)
        places = jnp.argsort(order).reshape(num_tokens, top_k).T
        sizes = jnp.sum(experts[:, None] == jnp.arange(count)[None, :], axis=0, dtype=jnp.int32)
        weights = jnp.where(is_own, routing.weights, 0.0)

        def compute(num_rows: int) -> Float[Array, "T D"]:
            """With the first `num_rows` rows, among which are all that some expert here takes."""
            taken = order[:num_rows]
            own = jnp.minimum(experts[taken], count - 1)
            rows = x[taken // top_k]
            if self.weigh_inputs:
                rows = rows * weights.reshape(-1)[taken].astype(x.dtype)[:, None]

            def product(rows: Array, name: str) -> Array:
                out = _grouped(rows, matrices[name], sizes, backend)
                return out + _rows_of(matrices[f"{name}_bias"], own) if f"{name}_bias" in matrices else out

            results = product(self.gating(product(rows, "gate"), product(rows, "up")), "down")
            # Each token's first choice, then its second …; rows of nobody hold anything, NaN included. A TPU adds whole
            # arrays faster than it sums along one.
            chosen = results[jnp.minimum(places.reshape(-1), num_rows - 1)].reshape(top_k, num_tokens, -1)
            total = jnp.zeros(x.shape, jnp.float32)
            for choice in range(top_k):
                part = jnp.where(is_own[:, choice, None], chosen[choice], 0).astype(jnp.float32)
                total += part if self.weigh_inputs else part * weights[:, choice, None]
            return total.astype(x.dtype)

        every, usual = num_tokens * top_k, self._usual_rows(num_tokens * top_k, count)
        if usual == every:
            return compute(every)
        return jax.lax.cond(jnp.sum(sizes) <= usual, lambda: compute(usual), lambda: compute(every))

    def _usual_rows(self, every: int, count: int) -> int:
        """One and a half times the even share of `count` experts in so many rows; all rows where that saves little."""
        share = -(-every * count * 3 // (2 * self.num_experts * TILE_ROWS)) * TILE_ROWS
        return share if share < every and every >= MANY_ROWS else every

    def _sum_of_shares(
        self,
        x: Float[Array, "T D"],
        routing: Routing,
        is_real: Bool[Array, " T"],
        weights: Mapping[str, Any],
        backend: str,
        mesh: Mesh,
    ) -> Float[Array, "T D"]:
        """The same among devices, each with its share of the weights: kernels know of no mesh. One sum joins them."""

        def spec(name: str, array: Array) -> PartitionSpec:
            axes = getattr(self, name).get_metadata("out_sharding")
            # Of a stack's layers, either all are here or the layer's own; a layer's number has no axes.
            return partition_spec(axes[len(axes) - array.ndim :] if array.ndim else ())

        def share(x: Array, routing: Routing, is_real: Array, weights: Mapping[str, Any]) -> Array:
            shard, first, count = jax.lax.axis_index(TENSOR), 0, self.num_experts
            if self.is_whole:
                count = -(-count // mesh.shape[TENSOR])
                first = shard * count
            elif "down_bias" in weights:  # to be added once, not by every device
                weights = {**weights, "down_bias": _times(weights["down_bias"], shard == 0)}
            return jax.lax.psum(self._own_share(x, routing, is_real, weights, backend, first, count), TENSOR)

        specs = {name: jax.tree.map(partial(spec, name), value) for name, value in weights.items()}
        everywhere = PartitionSpec()
        return jax.shard_map(
            share, mesh=mesh, in_specs=(everywhere, everywhere, everywhere, specs), out_specs=everywhere,
            check_vma=False,
        )(x, routing, is_real, weights)  # fmt: skip


def _times(values: Array | LayerChoice | LayerStack, is_wanted: Bool[Array, ""]) -> Any:
    """The same numbers, or zeros; a layer's number stays."""
    return jax.tree.map(lambda leaf: jnp.where(is_wanted, leaf, 0) if leaf.ndim else leaf, values)


def _rows_of(values: Array | LayerChoice | LayerStack, own: Int32[Array, " R"]) -> Float[Array, "R N"]:
    return use_weight(values, lambda values: values[own])


def _grouped(
    rows: Float[Array, "R K"], matrices: Array | LayerChoice | LayerStack, sizes: Int32[Array, " E"], backend: str
) -> Float[Array, "R N"]:
    """The grouped product, of one layer's experts among those of all layers where they lie in one array."""
    if isinstance(matrices, LayerStack):
        experts = matrices.values.reshape(-1, *matrices.values.shape[2:])
        return grouped_matmul(rows, experts, sizes, first_group=matrices.index * sizes.shape[0], backend=backend)
    return use_weight(matrices, lambda experts: grouped_matmul(rows, experts, sizes, backend=backend))


class SparseMLP(nnx.Module):
    """A feed-forward block of routed experts and, in some families, one that every token goes through."""

    def __init__(
        self,
        *,
        router: Router,
        experts: Experts,
        shared: nnx.Module | None = None,
        shared_gate: nnx.Module | None = None,
    ) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    def __call__(self, x: Float[Array, "T D"], cache: PagedKVCache) -> Float[Array, "T D"]:
        """The block's output, without the residual; `cache` says which tokens are real and how to multiply."""
        is_real = jnp.arange(x.shape[0], dtype=jnp.int32) < cache.metadata.cu_q_lens[-1]
        out = self.experts(x, self.router(x), is_real, cache.expert_backend, cache.mesh)
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(self.shared_gate(x))
        return out + shared
