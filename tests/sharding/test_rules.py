import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from sharding.mesh import make_mesh
from sharding.rules import partition_spec, replicated, weight_sharding
from tests.models.paged_runner import load_golden


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (("vocab", "embed"), P("tensor", None)),
        (("layers", "embed", "kv_heads"), P(None, None, "tensor")),
        (("expert", "embed", "mlp"), P("expert", None, "tensor")),
        ((None,), P(None)),
        ((), P()),
    ],
)
def test_specs(axes, spec):
    assert partition_spec(axes) == spec


def test_refuses_what_has_no_meaning():
    with pytest.raises(ValueError, match=r"no rule for the logical axis 'head': known are vocab, heads"):
        partition_spec(("head",))
    with pytest.raises(ValueError, match="lie along one mesh axis"):
        partition_spec(("heads", "mlp"))


def test_shardings():
    mesh = make_mesh(jax.devices(), tensor=2)
    assert weight_sharding(mesh, ("embed", "mlp")).shard_shape((6, 8)) == (6, 4)
    assert replicated(mesh).shard_shape((6, 8)) == (6, 8)
    assert len(replicated(mesh).device_set) == 2


@pytest.mark.parametrize("golden", ["llama", "phi_partial", "stablelm", "gpt2"])
def test_every_axis_of_a_model_has_a_rule(golden):
    for _, param in nnx.to_flat_state(nnx.state(load_golden(golden, is_dummy=True))):
        assert len(partition_spec(param.get_metadata("out_sharding"))) == param.get_value().ndim
