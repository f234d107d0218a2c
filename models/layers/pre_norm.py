"""The layer of Llama, which most dense families vary only in biases and norms."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from models.layers.attention import Attention
from models.layers.config import DecoderConfig
from models.layers.decoder import DecoderLayer
from models.layers.initializer import Initializer
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm

Norm = Callable[[int], nnx.Module]


def pre_norm_layer(
    init: Initializer,
    config: DecoderConfig,
    *,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    post_norms: bool = False,
    norm: Norm | None = None,
    mlp: nnx.Module | None = None,
    residual_multiplier: float = 1.0,
    **attention: Any,
) -> DecoderLayer:
    """Norm, grouped-query attention, norm, gated MLP.

    `qk_norm` normalises each query and key head, `post_norms` what both blocks give; `norm` makes the norm of a
    size (RMSNorm by default), `mlp` replaces the gated MLP, and the rest are options of `Attention`.
    """
    c = config
    make_norm = norm or (lambda size: RMSNorm(init, size, eps=c.rms_norm_eps))
    heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    if qk_norm:
        attention |= {"q_norm": make_norm(c.head_dim), "k_norm": make_norm(c.head_dim)}
    return DecoderLayer(
        attention_norm=make_norm(c.hidden_size),
        attention=Attention(init, c.hidden_size, *heads, **attention),
        attention_post_norm=make_norm(c.hidden_size) if post_norms else None,
        mlp_norm=make_norm(c.hidden_size),
        mlp=mlp or GatedMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=mlp_bias),
        mlp_post_norm=make_norm(c.hidden_size) if post_norms else None,
        residual_multiplier=residual_multiplier,
    )
