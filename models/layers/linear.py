"""Matrix products with a stored weight."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from models.layers.axis_layout import AxisLayout
from models.layers.choice import use_weight
from models.layers.initializer import Initializer


class Linear(nnx.Module):
    """`x @ weight + bias`, the weight stored [in, out].

    That order was the fastest on XLA:CPU for 4 to 16 rows (by a third) and equal elsewhere; see docs/performance.md.
    """

    def __init__(
        self,
        init: Initializer,
        in_size: int,
        out_size: int,
        axes: tuple[str | None, str | None],
        *,
        bias: bool = False,
        in_layout: AxisLayout | None = None,
        out_layout: AxisLayout | None = None,
    ) -> None:
        self.weight = init.param((in_size, out_size), axes, layouts=(in_layout, out_layout))
        self.bias = init.param((out_size,), axes[1:], constant=0.0, layouts=(out_layout,)) if bias else None

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        """The product, in the type of `x`."""
        out = use_weight(self.weight.get_value(), lambda weight: jnp.dot(x, weight))
        return out if self.bias is None else out + self.bias.get_value()[None, :]


def keep_apart(x: Float[Array, "T O"]) -> Float[Array, "T O"]:
    """`x`, which the TPU compiler then computes on its own and as it is.

    Left to itself, it turns a product and the reshape behind it into one operation for which it transposes each layer's
    weights first, and puts one product into the next at more than the cost of both (docs/performance.md).
    """
    return lax.platform_dependent(x, tpu=lax.optimization_barrier, default=lambda x: x)
