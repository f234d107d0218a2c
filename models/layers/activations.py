"""Activation functions by the names that checkpoints give them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Callable[[Float[Array, "..."]], Float[Array, "..."]]


def _gelu_exact(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.gelu(x, approximate=True)


def _relu_squared(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": _gelu_exact,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "relu": jax.nn.relu,
    "relu2": _relu_squared,
    "tanh": jnp.tanh,
}


def activation(name: str) -> Activation:
    """The function that a configuration's `hidden_act` names."""
    if name not in ACTIVATIONS:
        raise ValueError(f"hidden_act must be one of {', '.join(sorted(ACTIVATIONS))}, got {name!r}.")
    return ACTIVATIONS[name]
