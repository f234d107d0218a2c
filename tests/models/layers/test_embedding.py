import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.layers.embedding import Embedding, Head
from models.layers.initializer import Initializer

VOCAB, SIZE = 384, 48


def test_tied_head_makes_no_copy_of_the_table():
    table = Embedding(Initializer(jnp.float32, nnx.Rngs(0)), VOCAB, SIZE)
    hidden = jnp.ones((16, SIZE))
    program = jax.jit(lambda table, hidden: table.attend(hidden)).lower(table, hidden).compile()
    made = re.findall(rf"= f32\[(?:{VOCAB},{SIZE}|{SIZE},{VOCAB})\]\S* (?!parameter)(\w+)", program.as_text())
    assert not made
    assert program.memory_analysis().temp_size_in_bytes < VOCAB * SIZE


def test_logits_are_float32_sums_of_lower_types():
    init = Initializer(jnp.bfloat16, nnx.Rngs(0))
    hidden = jax.random.normal(jax.random.key(1), (3, SIZE), jnp.bfloat16)
    table, head = Embedding(init, VOCAB, SIZE), Head(init, SIZE, VOCAB, bias=True)
    for logits, weight in (
        (table.attend(hidden), np.asarray(table.weight.get_value(), np.float32).T),
        (head(hidden), np.asarray(head.weight.get_value(), np.float32)),
    ):
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, np.asarray(hidden, np.float32) @ weight, rtol=1e-4, atol=1e-4)


def test_ids_outside_the_vocabulary_read_a_row_of_it():
    table = Embedding(Initializer(jnp.float32, nnx.Rngs(0)), VOCAB, SIZE)
    rows = table(jnp.array([VOCAB + 5, VOCAB - 1, 3]))
    np.testing.assert_array_equal(rows, table.weight.get_value()[jnp.array([VOCAB - 1, VOCAB - 1, 3])])
