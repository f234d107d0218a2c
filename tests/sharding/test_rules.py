import json
from pathlib import Path

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from models import find_architecture
from sharding.mesh import make_mesh
from sharding.rules import partition_spec, replicated, weight_sharding

CONFIGS = Path(__file__).parents[1] / "models" / "configs"


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


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_axis_of_every_model_has_a_rule(path):
    hf_config = json.loads(path.read_text())
    architecture = find_architecture(hf_config)
    config = architecture.Config.from_hf(hf_config)
    model = nnx.eval_shape(lambda: architecture.Model(config, layer_execution="scanned", rngs=nnx.Rngs(0)))
    for _, param in nnx.to_flat_state(nnx.state(model)):
        assert len(partition_spec(param.get_metadata("out_sharding"))) == param.get_value().ndim
