"""Llama 4 as a language model: layers that rotate and see a chunk, layers that see all, experts in some or all."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models.inputs import CacheSpec, PagedKVCache
from models.layer_groups import Reach
from models.layers.attention import Attention
from models.layers.causal_lm import CausalLM
from models.layers.chunked_attention import split_rows
from models.layers.config import DecoderConfig, LayerTraits
from models.layers.decoder import DecoderLayer
from models.layers.initializer import Initializer
from models.layers.mlp import GatedMLP
from models.layers.moe import Experts, Gated, Router, SparseMLP
from models.layers.rope import RopeTable, apply_rope
from models.layers.weight_map import LLAMA_LOAD_MAP, stored, stored_share, transposed
from pallas_kernels.ragged_paged_attention.metadata import token_places

BLOCK = "model.layers.*.feed_forward"
load_map = {
    **LLAMA_LOAD_MAP,
    "layers.*.mlp.gate.weight": transposed(f"{BLOCK}.gate_proj.weight"),
    "layers.*.mlp.up.weight": transposed(f"{BLOCK}.up_proj.weight"),
    "layers.*.mlp.down.weight": transposed(f"{BLOCK}.down_proj.weight"),
    "layers.*.mlp.router.weight": transposed(f"{BLOCK}.router.weight"),
    "layers.*.mlp.experts.gate": stored_share(f"{BLOCK}.experts.gate_up_proj", 0, 2),
    "layers.*.mlp.experts.up": stored_share(f"{BLOCK}.experts.gate_up_proj", 1, 2),
    "layers.*.mlp.experts.down": stored(f"{BLOCK}.experts.down_proj"),
    "layers.*.mlp.shared.gate.weight": transposed(f"{BLOCK}.shared_expert.gate_proj.weight"),
    "layers.*.mlp.shared.up.weight": transposed(f"{BLOCK}.shared_expert.up_proj.weight"),
    "layers.*.mlp.shared.down.weight": transposed(f"{BLOCK}.shared_expert.down_proj.weight"),
}


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """Llama 4's configuration; `no_rope_layers` has 1 for each layer that DOES rotate."""

    head_dim: int = 128
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    intermediate_size_mlp: int = 16384
    """Of the layers without experts."""
    num_local_experts: int = 16
    num_experts_per_tok: int = 1
    moe_layers: tuple[int, ...]
    no_rope_layers: tuple[int, ...]
    attention_chunk_size: int | None = 8192
    use_qk_norm: bool = True
    attn_temperature_tuning: bool = True
    floor_scale: float = 8192
    attn_scale: float = 0.1

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds which layers rotate and which have experts, where they are not listed."""
        values = super().derive({"rope_theta": 500000.0} | dict(config))
        num_layers = config.get("num_hidden_layers", 0)
        values["head_dim"] = config.get("head_dim") or 128
        step, interval = config.get("interleave_moe_layer_step", 1), config.get("no_rope_layer_interval", 4)
        moe_layers = config.get("moe_layers")
        values["moe_layers"] = tuple(range(step - 1, num_layers, step) if moe_layers is None else moe_layers)
        default = [int((i + 1) % interval != 0) for i in range(num_layers)]
        rotates = values["no_rope_layers"] = tuple(config.get("no_rope_layers") or default)
        chunk = values["attention_chunk_size"] = config.get("attention_chunk_size", 8192)
        kinds = tuple("chunked_attention" if own and chunk is not None else "full_attention" for own in rotates)
        if tuple(config.get("layer_types") or kinds) != kinds:
            raise ValueError("layer_types is not supported: the layers that rotate must be the chunked ones.")
        return values | {"layer_types": (), "sliding_window": None}

    def layer_traits(self) -> tuple[LayerTraits, ...]:
        """Traits of each layer; chunks are the business of `Llama4Attention`."""
        return tuple(LayerTraits(rope=0 if rotates else None) for rotates in self.no_rope_layers)


class Llama4Attention(Attention):
    """Attention that rotates, normalises heads and stays in its chunk, or does nothing of that.

    What sees everything instead sharpens with distance: its queries grow with their position
    ("scalable softmax", arXiv:2501.19399).
    """

    def __init__(self, init: Initializer, config: Config, *, rotates: bool, chunk: int | None) -> None:
        c, bias = config, config.attention_bias
        sizes = (c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        super().__init__(init, *sizes, bias=bias, out_bias=bias)
        self.rotates = rotates
        self.chunk = chunk if rotates else None
        self.norm_eps = c.rms_norm_eps if c.use_qk_norm and rotates else None
        self.sharpening = (c.floor_scale, c.attn_scale) if c.attn_temperature_tuning and not rotates else None

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: PagedKVCache,
        layer: int | Int32[Array, ""],
        rope: RopeTable | None,
        window: int | Int32[Array, ""],
    ) -> tuple[Float[Array, "T D"], PagedKVCache]:
        """The block's output without the residual, and the cache with this layer's keys and values."""
        num_tokens = x.shape[0]
        q, k, v = self.project(x)
        if self.rotates:
            assert rope is not None
            q, k = (apply_rope(heads, rope, interleaved=True) for heads in (q, k))
        if self.norm_eps is not None:
            q, k = (_unit(heads, self.norm_eps) for heads in (q, k))
        if self.sharpening is not None:
            floor, scale = self.sharpening
            positions = token_places(cache.metadata, num_tokens).positions.astype(jnp.float32)
            factor = jnp.log1p(jnp.floor((positions + 1) / floor)) * scale + 1
            q = (q * factor[:, None, None]).astype(q.dtype)
        if self.chunk is None:
            out, cache = cache.attend(layer, q, k, v, scale=self.scale)
        else:
            chunks = split_rows(cache.rows_of(layer), num_tokens, self.chunk, cache.page_size)
            out, cache = cache.attend(layer, q, k, v, scale=self.scale, rows=chunks)
        return self.out(out.reshape(num_tokens, -1)), cache


def _unit(x: Float[Array, "T N H"], eps: float) -> Float[Array, "T N H"]:
    """Heads divided by their root mean square."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class Model(CausalLM[Config]):
    """Pre-norm layers."""

    @property
    def cache_spec(self) -> CacheSpec:
        """What the layers cache for each token; chunks begin with a page."""
        chunk = self._chunk
        reaches = tuple(Reach(chunk=chunk if own and chunk else 0) for own in self.config.no_rope_layers)
        return dataclasses.replace(super().cache_spec, page_divides=chunk, reaches=reaches)

    @property
    def _chunk(self) -> int | None:
        """Tokens of a chunk, unless no sequence is longer than one."""
        chunk = self.config.attention_chunk_size
        return None if chunk is None or (self.max_model_len or chunk + 1) <= chunk else chunk

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer, rotated or not, with experts or without."""
        c = self.config
        mlp = GatedMLP(init, c.hidden_size, c.intermediate_size_mlp, act=c.hidden_act)
        if index in c.moe_layers:
            mlp = self._experts(init)
        return DecoderLayer(
            attention_norm=self.make_norm(init, c.hidden_size),
            attention=Llama4Attention(init, c, rotates=bool(c.no_rope_layers[index]), chunk=self._chunk),
            mlp_norm=self.make_norm(init, c.hidden_size),
            mlp=mlp,
        )

    def _experts(self, init: Initializer) -> SparseMLP:
        c = self.config
        sizes = (c.hidden_size, c.num_local_experts)
        gating = Gated(c.hidden_act)
        return SparseMLP(
            router=Router(init, *sizes, c.num_experts_per_tok, score="sigmoid", renormalise=False),
            experts=Experts(
                init, c.hidden_size, c.intermediate_size, c.num_local_experts, gating=gating, weigh_inputs=True
            ),
            shared=GatedMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act),
        )
