"""The one device step: embed, layers, logits of the rows that need them, sampling, update of the device state.

`step(weights, pool, state, rich, packed) -> (pool, state, rich, out)` with pool and both states donated. Sampled
tokens stay in `state.last_token`, where the next step finds them, so the host can launch it unseen.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32

from models.inputs import Batch, PagedKVCache
from models.layer_groups import LayerGroups
from pallas_kernels.ragged_paged_attention import AttentionMetadata
from paxserve.engine import sampler, token_logprobs
from paxserve.engine.batch import PARAM_COLUMNS, Layout
from sharding.mesh import TENSOR
from sharding.rules import partition_spec, replicated, weight_sharding


class DeviceState(NamedTuple):
    """What a request slot keeps from step to step."""

    table: Int32[Array, " S*W"]
    """Page table and sampling parameters of every slot, flat: see `batch.SlotTable`."""
    last_token: Int32[Array, " S"]
    """The last token sampled in each slot."""


class RichState(NamedTuple):
    """What a slot keeps for biases and penalties."""

    bias: Float32[Array, "S V"]
    output_counts: Int32[Array, "S V"]
    in_prompt: Bool[Array, "S V"]


class StepOutput(NamedTuple):
    """What the host reads back; the last two only from rich programs."""

    tokens: Int32[Array, " R"]
    logprobs: token_logprobs.Logprobs | None
    prompt_logprobs: token_logprobs.Logprobs | None


class StepShape(NamedTuple):
    """The fixed sizes that every program of an engine shares."""

    num_slots: int
    max_pages: int
    """Columns of a page table."""
    groups: LayerGroups
    """Of which each has a page table."""
    vocab_size: int
    num_top_logprobs: int
    page_size: int
    backend: str
    expert_backend: str

    @property
    def num_table_columns(self) -> int:
        """Columns of the slot table that page tables take."""
        return self.groups.num_groups * self.max_pages

    @property
    def width(self) -> int:
        """Columns of the slot table."""
        return self.num_table_columns + len(PARAM_COLUMNS)


def make_step(
    graphdef: Any, treedef: Any, layout: Layout, shape: StepShape, mesh: Mesh | None = None
) -> Callable[..., Any]:
    """The step function of one bucket, ready for `jax.jit` with arguments 1, 2 and 3 donated.

    `weights` are the leaves of the model's state: passing the module itself through jit would cost
    its flattening at every step. On a mesh, they and the pool are spread over it, all else is on every device.
    """

    def whole(array: Array) -> Array:
        # What is small stays on every device; else a use of some of it would spread it back to where it comes from.
        return array if mesh is None else with_sharding_constraint(array, replicated(mesh))

    def step(
        weights: list[Array], pool: Any, state: DeviceState, rich: RichState | None, packed: Int32[Array, " L"]
    ) -> tuple[Any, DeviceState, RichState | None, StepOutput]:
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
        fields = {name: whole(packed[start : start + size]) for name, (start, size) in layout.fields.items()}

        # 1. Apply what changed in the slots, then look up this step's rows.
        table = state.table.at[fields["delta_indices"]].set(fields["delta_values"], mode="drop")
        slots = fields["slots"]
        rows = whole(table.reshape(shape.num_slots, shape.width).at[slots].get(mode="fill", fill_value=0))
        params: dict[str, Array] = dict(zip(PARAM_COLUMNS, rows[:, shape.num_table_columns :].T, strict=True))

        # 2. Tokens still on the device are named by their slot.
        ids = fields["token_ids"]
        ids = jnp.where(ids < 0, state.last_token.at[-1 - ids].get(mode="clip"), ids)
        cu_q_lens = fields["cu_q_lens"]
        metadata = AttentionMetadata(
            cu_q_lens, fields["kv_lens"], rows[:, : shape.max_pages], fields["num_decode_rows"][0]
        )

        # 3. The model, and the logits of each row's last token.
        cache = PagedKVCache(pool, metadata, shape.backend, shape.expert_backend, shape.page_size, mesh)
        if shape.groups.num_groups > 1:
            tables = rows[:, : shape.num_table_columns].reshape(-1, shape.groups.num_groups, shape.max_pages)
            cache = dataclasses.replace(cache, tables=jnp.swapaxes(tables, 0, 1), groups=shape.groups)
        hidden, cache = model(Batch(ids, fields["positions"]), cache)
        logits_of = partial(_logits, model, mesh=mesh, vocab_size=shape.vocab_size)
        logits = logits_of(hidden[jnp.maximum(cu_q_lens[1:] - 1, 0)])  # [R, V]

        # 4. Sampling, and what the next step needs to know of it.
        tensors = _sampling_tensors(params, fields["sample_positions"])
        logprobs = prompt_logprobs = None
        raw = logits
        if layout.is_rich:
            assert rich is not None
            logits = _adjust(logits, rich, slots, params, tensors)
        tokens = whole(_by_row(sampler.sample, mesh, layout.num_rows)(logits, tensors))
        if layout.is_rich:
            assert rich is not None
            logprobs, prompt_logprobs = _logprobs(logits_of, hidden, raw, tokens, fields, shape)
            counted = jnp.where((fields["samples"] > 0) & (params["has_penalties"] > 0), slots, shape.num_slots)
            rich = rich._replace(output_counts=rich.output_counts.at[counted, tokens].add(1, mode="drop"))
        sampled_slots = jnp.where(fields["samples"] > 0, slots, shape.num_slots)
        last_token = state.last_token.at[sampled_slots].set(tokens, mode="drop")
        return cache.pool, DeviceState(table, last_token), rich, StepOutput(tokens, logprobs, prompt_logprobs)

    return step


def _logits(model: Any, hidden: Float32[Array, "R D"], *, mesh: Mesh | None, vocab_size: int) -> Float32[Array, "R V"]:
    """Logits of some tokens. On a mesh, each device has all logits of its share of the rows.

    The head leaves a device its share of the vocabulary for every row. Turned round once, all that follows (penalties,
    sampling, log-probabilities) is done for each row on one device, as it is without a mesh: one exchange, the least
    data, the same tokens.
    """
    if mesh is None:
        return model.logits(hidden)[:, :vocab_size]
    logits = model.logits(with_sharding_constraint(hidden, replicated(mesh)))
    logits = with_sharding_constraint(logits, weight_sharding(mesh, (None, "vocab")))
    return with_sharding_constraint(logits, NamedSharding(mesh, _row_spec(mesh, len(hidden))))[:, :vocab_size]


def _by_row(function: Callable[..., Any], mesh: Mesh | None, num_rows: int) -> Callable[..., Any]:
    """The function of arrays with R rows, each device computing its rows, by branches of its own."""
    if mesh is None:
        return function
    spec = _row_spec(mesh, num_rows)
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _row_spec(mesh: Mesh, num_rows: int) -> PartitionSpec:
    """Where rows are: rows that do not divide are computed by every device."""
    return partition_spec(("rows",)) if num_rows % mesh.shape[TENSOR] == 0 else PartitionSpec()


def _floats(bits: Int32[Array, " R"]) -> Float32[Array, " R"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _sampling_tensors(params: dict[str, Array], positions: Int32[Array, " R"]) -> sampler.SamplingTensors:
    return sampler.SamplingTensors(
        temperature=_floats(params["temperature"]),
        top_k=params["top_k"],
        top_p=_floats(params["top_p"]),
        min_p=_floats(params["min_p"]),
        seed=jax.lax.bitcast_convert_type(jnp.stack([params["seed_low"], params["seed_high"]], axis=1), jnp.uint32),
        position=positions,
        presence_penalty=_floats(params["presence_penalty"]),
        frequency_penalty=_floats(params["frequency_penalty"]),
        repetition_penalty=_floats(params["repetition_penalty"]),
    )


def _adjust(
    logits: Float32[Array, "R V"],
    rich: RichState,
    slots: Int32[Array, " R"],
    params: dict[str, Array],
    tensors: sampler.SamplingTensors,
) -> Float32[Array, "R V"]:
    """Logits with penalties and biases, each paid for only when some row of the batch has them."""
    has_bias, has_penalties = params["has_bias"] > 0, params["has_penalties"] > 0
    rows = jnp.minimum(slots, rich.bias.shape[0] - 1)

    def penalised(logits: Array) -> Array:
        adjusted = sampler.apply_penalties(logits, rich.in_prompt[rows], rich.output_counts[rows], tensors)
        return jnp.where(has_penalties[:, None], adjusted, logits)

    def biased(logits: Array) -> Array:
        return jnp.where(has_bias[:, None], logits + rich.bias[rows], logits)

    logits = jax.lax.cond(has_penalties.any(), penalised, lambda logits: logits, logits)
    return jax.lax.cond(has_bias.any(), biased, lambda logits: logits, logits)


def _logprobs(
    logits_of: Callable[[Array], Array],
    hidden: Float32[Array, "T D"],
    logits: Float32[Array, "R V"],
    tokens: Int32[Array, " R"],
    fields: dict[str, Array],
    shape: StepShape,
) -> tuple[token_logprobs.Logprobs, token_logprobs.Logprobs]:
    """Log-probabilities of the sampled tokens and of the prompt's, computed only if some row asked."""
    num_top, targets = shape.num_top_logprobs, fields["target_ids"]

    def zeros(count: int) -> token_logprobs.Logprobs:
        top = (count, num_top)
        return token_logprobs.Logprobs(
            jnp.zeros(count), jnp.zeros(count, jnp.int32), jnp.zeros(top, jnp.int32), jnp.zeros(top)
        )

    sampled = jax.lax.cond(
        fields["wants_logprobs"][0] > 0,
        lambda: token_logprobs.gather_logprobs(logits, tokens, num_top),
        lambda: zeros(tokens.shape[0]),
    )
    prompt = jax.lax.cond(
        fields["wants_prompt_logprobs"][0] > 0,
        lambda: token_logprobs.prompt_logprobs(hidden, logits_of, targets, num_top),
        lambda: zeros(targets.shape[0]),
    )
    return sampled, prompt
