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
    """Gated MLPs of one size, their matrices stacked on an axis named "expert"."""

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
        def stack(*shape: int, axes: tuple[str, ...]) -> nnx.Param:
            constant = 0.0 if len(shape) == 1 else None
            return init.param((num_experts, *shape), ("expert", *axes), constant=constant)

        self.gate = stack(size, mlp_size, axes=("embed", "mlp"))
        self.up = stack(size, mlp_size, axes=("embed", "mlp"))
        self.down = stack(mlp_size, size, axes=("mlp", "embed"))
        self.gate_bias = stack(mlp_size, axes=("mlp",)) if bias else None
        self.up_bias = stack(mlp_size, axes=("mlp",)) if bias else None
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
        num_tokens, top_k = routing.experts.shape
        # 1. Sort: rows are (token, choice) pairs by expert, those of padding tokens behind all others.
        experts = jnp.where(is_real[:, None], routing.experts, self.num_experts).reshape(-1)
        order = jnp.argsort(experts)
        sizes = jnp.sum(experts[:, None] == jnp.arange(self.num_experts)[None, :], axis=0, dtype=jnp.int32)
        own = jnp.minimum(experts[order], self.num_experts - 1)
        weights = jnp.where(is_real[:, None], routing.weights, 0.0)
        rows = x[order // top_k]
        if self.weigh_inputs:
            rows = rows * weights.reshape(-1)[order].astype(x.dtype)[:, None]

        # 2. The experts; on several devices, each with its own columns of all of them.
        inner = {name: getattr(self, name) for name in ("gate", "up", "down", "gate_bias", "up_bias")}
        inner = {name: param.get_value() for name, param in inner.items() if param is not None}
        multiply = partial(self._multiply, backend)
        if mesh is not None and mesh.shape[TENSOR] > 1:
            multiply = self._on_each_shard(multiply, mesh, inner)
        results = multiply(rows, sizes, own, inner)
        if self.down_bias is not None:
            results = results + _rows_of(self.down_bias.get_value(), own)

        # 3. Back to the tokens' order, and together.
        results = results[jnp.argsort(order)].reshape(num_tokens, top_k, -1)
        results = jnp.where(is_real[:, None, None], results.astype(jnp.float32), 0.0)
        total = jnp.sum(results if self.weigh_inputs else results * weights[:, :, None], axis=1)
        return total.astype(x.dtype)

    def _multiply(
        self, backend: str, rows: Float[Array, "R D"], sizes: Array, own: Array, inner: Mapping[str, Any]
    ) -> Float[Array, "R D"]:
        """What each row's expert makes of it, but for the last bias."""

        def product(rows: Array, name: str) -> Array:
            out = _grouped(rows, inner[name], sizes, backend)
            return out + _rows_of(inner[f"{name}_bias"], own) if f"{name}_bias" in inner else out

        return product(self.gating(product(rows, "gate"), product(rows, "up")), "down")

    def _on_each_shard(
        self, multiply: Callable[..., Array], mesh: Mesh, inner: Mapping[str, Any]
    ) -> Callable[..., Array]:
        """The same, each device with its share of the "mlp" axis: kernels know of no mesh. One sum joins them."""

        def spec(name: str, array: Array) -> PartitionSpec:
            axes = getattr(self, name).get_metadata("out_sharding")
            axes = axes[axes.index("expert") + 1 :] if array.ndim else ()
            return partition_spec((*[None] * (array.ndim - len(axes)), *axes))

        specs = {name: jax.tree.map(partial(spec, name), value) for name, value in inner.items()}
        everywhere = PartitionSpec()

        def share(*arrays: Any) -> Array:
            return jax.lax.psum(multiply(*arrays), TENSOR)

        return jax.shard_map(
            share, mesh=mesh, in_specs=(everywhere, everywhere, everywhere, specs), out_specs=everywhere,
            check_vma=False,
        )  # fmt: skip


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
