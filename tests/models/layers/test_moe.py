"""Routing against what the families' papers and checkpoints say, worked out in numpy; experts one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers.choice import LayerChoice, LayerStack
from models.layers.initializer import Initializer
from models.layers.moe import Experts, Gated, Router, Routing
from sharding.mesh import make_mesh
from sharding.rules import weight_sharding

SIZE, MLP_SIZE, NUM_EXPERTS = 8, 12, 6


def initializer(dtype=jnp.float32):
    return Initializer(dtype, nnx.Rngs(0))


def router_for(logits, **options):
    """A router that gives these logits for the token [1, 0, 0 …], and that token."""
    router = Router(initializer(), SIZE, len(logits), **options)
    router.weight.set_value(jnp.zeros((SIZE, len(logits))).at[0].set(jnp.array(logits)))
    return router, jnp.zeros((1, SIZE)).at[0, 0].set(1.0)


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


LOGITS = np.array([0.5, -1.0, 2.0, 1.5, 0.0, 1.0])


@pytest.mark.parametrize("renormalise", [True, False])
def test_softmax_routing(renormalise):
    router, x = router_for(LOGITS, top_k=2, renormalise=renormalise, scaling=2.5)
    routing = router(x)
    assert routing.experts.tolist() == [[2, 3]]
    scores = softmax(LOGITS[[2, 3]]) if renormalise else softmax(LOGITS)[[2, 3]]
    np.testing.assert_allclose(routing.weights[0], 2.5 * scores, rtol=1e-6)


def test_correction_chooses_but_does_not_weigh():
    router, x = router_for(LOGITS, top_k=2, renormalise=True, score="sigmoid", has_correction=True)
    router.correction.set_value(jnp.array([0.0, 9.0, 0.0, 0.0, 0.0, 0.0]))
    routing = router(x)
    assert routing.experts.tolist() == [[1, 2]]
    scores = sigmoid(LOGITS[[1, 2]])
    np.testing.assert_allclose(routing.weights[0], scores / scores.sum(), rtol=1e-6)


@pytest.mark.parametrize(("group_score", "chosen"), [("best", [2, 3]), ("best_two", [5, 4])])
def test_only_the_best_group_can_be_chosen(group_score, chosen):
    # Groups of two: the second has the best expert, the third the best two together.
    logits = np.array([0.0, -1.0, 2.0, -3.0, 0.9, 1.0])
    options = {"renormalise": False, "score": "sigmoid", "num_groups": 3, "top_groups": 1, "group_score": group_score}
    router, x = router_for(logits, top_k=2, **options)
    routing = router(x)
    assert routing.experts.tolist() == [chosen]
    np.testing.assert_allclose(routing.weights[0], sigmoid(logits[chosen]), rtol=1e-6)


def test_routing_is_float32_in_a_bfloat16_model():
    router = Router(initializer(jnp.bfloat16), 256, 2, 1, renormalise=False, has_correction=True)
    assert router.correction.get_value().dtype == jnp.float32
    # Logits 256 and 257: one number in bfloat16, whose spacing is 2 there.
    router.weight.set_value(jnp.ones((256, 2), jnp.bfloat16).at[0, 1].set(2.0))
    routing = router(jnp.ones((1, 256), jnp.bfloat16))
    assert routing.experts.tolist() == [[1]]
    np.testing.assert_allclose(routing.weights, [[softmax(np.array([0.0, 1.0]))[1]]], rtol=1e-6)


def make_experts(shards=1, mlp_size=MLP_SIZE, **options):
    init = Initializer(jnp.float32, nnx.Rngs(0), shards)
    return Experts(init, SIZE, mlp_size, NUM_EXPERTS, gating=Gated("silu"), **options)


def one_at_a_time(experts, x, routing):
    gate, up, down = (np.asarray(param.get_value(), np.float64) for param in (experts.gate, experts.up, experts.down))
    biases = [p.get_value() if p is not None else np.zeros(NUM_EXPERTS)[:, None] for p in
              (experts.gate_bias, experts.up_bias, experts.down_bias)]  # fmt: skip
    out = np.zeros(x.shape)
    for token, (chosen, weights) in enumerate(zip(*map(np.asarray, routing), strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            row = np.asarray(x[token], np.float64) * (weight if experts.weigh_inputs else 1.0)
            g, u = row @ gate[expert] + biases[0][expert], row @ up[expert] + biases[1][expert]
            result = (g * sigmoid(g) * u) @ down[expert] + biases[2][expert]
            out[token] += result if experts.weigh_inputs else weight * result
    return out


def random_routing(num_tokens, top_k=2):
    rng = np.random.default_rng(1)
    chosen = np.stack([rng.permutation(NUM_EXPERTS)[:top_k] for _ in range(num_tokens)])
    return Routing(jnp.asarray(chosen, jnp.int32), jnp.asarray(rng.random((num_tokens, top_k)), jnp.float32))


@pytest.mark.parametrize("backend", ["cpu", "ragged", "reference"])
@pytest.mark.parametrize("options", [{}, {"weigh_inputs": True}, {"bias": True}])
def test_each_token_gets_its_experts(backend, options):
    experts = make_experts(**options)
    if experts.gate_bias is not None:
        for number, bias in enumerate((experts.gate_bias, experts.up_bias, experts.down_bias)):
            bias.set_value(0.1 * jax.random.normal(jax.random.key(number), bias.get_value().shape))
    x = 10 * jax.random.normal(jax.random.key(9), (5, SIZE))
    routing = random_routing(5)
    out = experts(x, routing, jnp.ones(5, bool), backend)
    np.testing.assert_allclose(out, one_at_a_time(experts, x, routing), rtol=1e-4, atol=1e-6)


def test_padding_goes_to_no_expert_and_changes_nothing():
    experts = make_experts(bias=True)
    x = jax.random.normal(jax.random.key(9), (5, SIZE)).at[3:].set(jnp.nan)
    routing = random_routing(5)
    routing = Routing(routing.experts.at[:3].set(jnp.array([0, 2])[None, :]), routing.weights.at[3:].set(jnp.nan))
    poisoned = [experts.gate, experts.up, experts.down]
    for param in poisoned:  # the experts that only padding would take
        param.set_value(param.get_value().at[jnp.array([1, 3, 4, 5])].set(jnp.nan))
    out = experts(x, routing, jnp.arange(5) < 3, "cpu")
    expected = one_at_a_time(experts, x[:3], Routing(routing.experts[:3], routing.weights[:3]))
    np.testing.assert_allclose(out[:3], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(out[3:], np.zeros((2, SIZE)))


@pytest.mark.parametrize("kind", ["stack", "choice"])
@pytest.mark.parametrize("backend", ["cpu", "ragged"])
def test_a_layer_among_others(kind, backend):
    layers = [make_experts(), make_experts()]
    for name in ("gate", "up", "down"):
        matrices = [getattr(layer, name).get_value() * (1 + number) for number, layer in enumerate(layers)]
        getattr(layers[1], name).set_value(matrices[1])
        index = jnp.int32(1)
        chosen = LayerStack(jnp.stack(matrices), index) if kind == "stack" else LayerChoice(tuple(matrices), index)
        setattr(layers[0], name, nnx.Param(chosen))
    x, routing = jax.random.normal(jax.random.key(9), (4, SIZE)), random_routing(4)
    out, expected = (layer(x, routing, jnp.ones(4, bool), backend) for layer in layers)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-7)


def one_and_several(mesh, mlp_size, **options):
    """The same experts on one device and spread over the mesh's four."""
    one, several = (
        nnx.eval_shape(lambda shards=shards: make_experts(shards, mlp_size=mlp_size, **options)) for shards in (1, 4)
    )
    rng = np.random.default_rng(2)
    for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
        target = getattr(several, name)
        numbers = rng.standard_normal(getattr(one, name).get_value().shape, np.float32)
        getattr(one, name).set_value(jnp.asarray(numbers))
        padding = target.get_value().shape[0] - NUM_EXPERTS
        assert padding == (2 if several.is_whole else 0)
        numbers = np.pad(numbers, ((0, padding), *[(0, 0)] * (numbers.ndim - 1)))
        target.set_value(jax.device_put(numbers, weight_sharding(mesh, target.get_metadata("out_sharding"))))
    return one, several


@pytest.mark.parametrize(("mlp_size", "options"), [(12, {"bias": True}), (512, {"bias": True, "weigh_inputs": True})])
def test_among_several_devices(mlp_size, options):
    """Twelve columns do not divide into tiles: eight experts, two of them empty, are shared out whole."""
    mesh = make_mesh(jax.devices(), tensor=4)
    one, several = one_and_several(mesh, mlp_size, **options)
    assert several.is_whole == (mlp_size == 12)
    x, routing = jax.random.normal(jax.random.key(9), (7, SIZE)), random_routing(7)
    is_real = jnp.asarray(np.arange(7) < 5)
    with jax.set_mesh(mesh):
        out = jax.jit(lambda: several(x, routing, is_real, "ragged", mesh))()
    np.testing.assert_allclose(out, jax.jit(lambda: one(x, routing, is_real, "ragged"))(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_even", [True, False])
def test_a_device_takes_its_usual_rows_or_all(is_even):
    mesh = make_mesh(jax.devices(), tensor=4)
    one, several = one_and_several(mesh, 12, bias=True)
    assert several._usual_rows(4096, 2) == 2048
    assert several._usual_rows(4095, 2) == 4095
    x, routing = jax.random.normal(jax.random.key(9), (2048, SIZE)), random_routing(2048)
    if not is_even:  # all of them on the first device
        routing = Routing(routing.experts.at[:].set(jnp.array([1, 0])[None, :]), routing.weights)
    is_real = jnp.ones(2048, bool)
    with jax.set_mesh(mesh):
        out = jax.jit(lambda: several(x, routing, is_real, "ragged", mesh))()
    np.testing.assert_allclose(out, jax.jit(lambda: one(x, routing, is_real, "ragged"))(), rtol=1e-4, atol=1e-5)
