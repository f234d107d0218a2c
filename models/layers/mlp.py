"""Feed-forward blocks."""

from flax import nnx
from jaxtyping import Array, Float

from models.layers.activations import activation
from models.layers.initializer import Initializer
from models.layers.linear import Linear, keep_apart


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`.

    Gate and up stay two matrices: fusing them brought nothing measurable at any number of rows on XLA:CPU, and
    apart both can be sharded along "mlp" as they are.
    """

    def __init__(self, init: Initializer, size: int, mlp_size: int, *, act: str, bias: bool = False) -> None:
        self.gate = Linear(init, size, mlp_size, ("embed", "mlp"), bias=bias)
        self.up = Linear(init, size, mlp_size, ("embed", "mlp"), bias=bias)
        self.down = Linear(init, mlp_size, size, ("mlp", "embed"), bias=bias)
        self.act = activation(act)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """The block's output, without the residual."""
        return self.down(keep_apart(self.act(self.gate(x)) * self.up(x)))


class PlainMLP(nnx.Module):
    """`down(act(up(x)))`."""

    def __init__(self, init: Initializer, size: int, mlp_size: int, *, act: str, bias: bool) -> None:
        self.up = Linear(init, size, mlp_size, ("embed", "mlp"), bias=bias)
        self.down = Linear(init, mlp_size, size, ("mlp", "embed"), bias=bias)
        self.act = activation(act)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """The block's output, without the residual."""
        return self.down(self.act(self.up(x)))
