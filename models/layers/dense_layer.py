"""The layer of Llama and of the many dense families that vary its norms, biases and products."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from models.layers.attention import Attention
from models.layers.config import DecoderConfig
from models.layers.decoder import DecoderLayer
from models.layers.initializer import Initializer
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm

MakeNorm = Callable[[int], nnx.Module]


def dense_attention(
    init: Initializer, config: DecoderConfig, *, head_norm: MakeNorm | None = None, **options: Any
) -> Attention:
    """Attention in the configuration's sizes; `head_norm` makes the norm of each query and key head."""
    c = config
    if head_norm is not None:
        options |= {"q_norm": head_norm(c.head_dim), "k_norm": head_norm(c.head_dim)}
    return Attention(init, c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, **options)


def dense_layer(
    init: Initializer,
    config: DecoderConfig,
    *,
    norm: MakeNorm | None = None,
    pre_norms: bool = True,
    post_norms: bool = False,
    qk_norm: bool = False,
    mlp: nnx.Module | None = None,
    mlp_bias: bool = False,
    residual_multiplier: float = 1.0,
    **attention: Any,
) -> DecoderLayer:
    """Norm, grouped-query attention, norm, gated MLP.

    `norm` makes the norm of a size (RMSNorm by default); norms stand before each block (`pre_norms`), after it
    (`post_norms`), on each query and key head (`qk_norm`). `mlp` replaces the gated MLP; the rest are options of
    `Attention`.
    """
    c = config
    make_norm = norm or (lambda size: RMSNorm(init, size, eps=c.rms_norm_eps))

    def norm_if(wanted: bool) -> nnx.Module | None:
        return make_norm(c.hidden_size) if wanted else None

    return DecoderLayer(
        attention_norm=norm_if(pre_norms),
        attention=dense_attention(init, c, head_norm=make_norm if qk_norm else None, **attention),
        attention_post_norm=norm_if(post_norms),
        mlp_norm=norm_if(pre_norms),
        mlp=mlp or GatedMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=mlp_bias),
        mlp_post_norm=norm_if(post_norms),
        residual_multiplier=residual_multiplier,
    )
