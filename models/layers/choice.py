"""Weights of many layers behind one loop: each product picks its layer's matrix by a branch, not by a copy.

On XLA:CPU a program with thirty copies of a layer takes many times as long to compile as one with a
loop, but a loop over stacked weights copies each layer's out of the stack. A conditional whose branches
do nothing but the product reads each matrix where it lies, so the loop runs as fast as the copies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerChoice:
    """One parameter of every layer of a loop, and which layer's turn it is."""

    values: tuple[Array, ...]
    index: Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerStack:
    """One parameter of every layer of a loop in one array, and which layer's turn it is.

    For what is best not cut out of the stack: matrices of experts, of which a layer needs a few.
    """

    values: Array
    index: Int32[Array, ""]


def use_weight(weight: Array | LayerChoice | LayerStack, use: Callable[[Array], Any]) -> Any:
    """`use` of the weight; of a choice, in a branch of its own for each layer, so that no weight is copied."""
    if isinstance(weight, LayerStack):
        return use(weight.values[weight.index])
    if not isinstance(weight, LayerChoice):
        return use(weight)
    branches = [lambda value=value: use(value) for value in weight.values]
    return jax.lax.switch(weight.index, branches)


def choose_layer(layers: Sequence[Any], index: Int32[Array, ""]) -> Any:
    """A layer whose matrices are choices among those of `layers`; smaller parameters are read from a stack."""

    def choose(*params: nnx.Param) -> nnx.Param:
        values = tuple(param.get_value() for param in params)
        chosen = LayerChoice(values, index) if values[0].ndim > 1 else jnp.stack(values)[index]
        return nnx.Param(chosen, **params[0].get_metadata())

    return jax.tree.map(choose, *layers, is_leaf=lambda node: isinstance(node, nnx.Param))
