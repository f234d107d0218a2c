"""Several decode steps in one program: a loop on the device around the body of the one step.

A row ends by a stop token or by its length, both seen here. What has ended computes its last token again, which changes
nothing, until the loop ends with the last row or the last iteration.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int32

from paxserve.engine.batch import MultiLayout
from paxserve.engine.step import DeviceState, StepOutput, StepShape, make_step


class _Loop(NamedTuple):
    """What one iteration hands to the next."""

    iteration: Int32[Array, ""]
    inputs: Int32[Array, " R"]
    """The token that each row computes next."""
    age: Int32[Array, " R"]
    """Tokens that each row has gone on by."""
    has_ended: Bool[Array, " R"]
    tokens: Int32[Array, "K R"]
    """What was sampled; -1 where a row had ended."""
    pool: Any
    state: DeviceState


def make_multi_step(
    graphdef: Any, treedef: Any, layout: MultiLayout, shape: StepShape, mesh: Mesh | None = None
) -> Callable[..., Any]:
    """The function of up to `layout.num_steps` decode steps, called and donated like `make_step`'s.

    Its output has the tokens of every iteration, [K, R].
    """
    single = layout.single
    step = make_step(graphdef, treedef, single, shape, mesh)

    def steps(
        weights: list[Array], pool: Any, state: DeviceState, rich: None, packed: Int32[Array, " L"]
    ) -> tuple[Any, DeviceState, None, StepOutput]:
        fields = {name: packed[start : start + size] for name, (start, size) in layout.fields.items()}
        stop_ids = fields["stop_ids"].reshape(layout.num_rows, -1)
        num_left = fields["num_left"]

        def is_stop(tokens: Int32[Array, " R"]) -> Bool[Array, " R"]:
            return (tokens[:, None] == stop_ids).any(axis=1)

        def buffer(loop: _Loop) -> Int32[Array, " L"]:
            """The packed buffer of the iteration's step: that of the first, its rows moved on."""
            moved = {name: fields[name] + loop.age for name in ("positions", "kv_lens", "sample_positions")}
            changed = {**moved, "token_ids": loop.inputs, "samples": jnp.where(loop.has_ended, 0, 1)}
            found = packed[: single.size]
            for name, values in changed.items():
                start, size = single.fields[name]
                found = found.at[start : start + size].set(values)
            return found

        def goes_on(loop: _Loop) -> Bool[Array, ""]:
            return (loop.iteration < fields["num_iterations"][0]) & ~loop.has_ended.all()

        def advance(loop: _Loop) -> _Loop:
            pool, state, _, out = step(weights, loop.pool, loop.state, None, buffer(loop))
            tokens = loop.tokens.at[loop.iteration].set(jnp.where(loop.has_ended, -1, out.tokens))
            iteration = loop.iteration + 1
            has_ended = loop.has_ended | is_stop(out.tokens) | (iteration >= num_left)
            # Whoever has ended stays where it is: that page is its own, and what it writes there is there already.
            inputs = jnp.where(has_ended, loop.inputs, out.tokens)
            return _Loop(
                iteration, inputs, jnp.where(has_ended, loop.age, loop.age + 1), has_ended, tokens, pool, state
            )

        ids = fields["token_ids"]
        inputs = jnp.where(ids < 0, state.last_token.at[-1 - ids].get(mode="clip"), ids)
        # A stop token that the host has not seen yet; those that it has seen are the prompt's.
        has_ended = (num_left <= 0) | ((ids < 0) & is_stop(inputs))
        nothing = jnp.full((layout.num_steps, layout.num_rows), -1, jnp.int32)
        start = _Loop(jnp.int32(0), inputs, jnp.zeros_like(inputs), has_ended, nothing, pool, state)
        end = jax.lax.while_loop(goes_on, advance, start)
        return end.pool, end.state, None, StepOutput(end.tokens, None, None)

    return steps
