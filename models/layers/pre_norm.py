"""The layer of Llama, which most dense families vary only in biases and head norms."""

from models.layers.attention import Attention
from models.layers.config import DecoderConfig
from models.layers.decoder import DecoderLayer
from models.layers.initializer import Initializer
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm


def pre_norm_layer(
    init: Initializer,
    config: DecoderConfig,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderLayer:
    """RMSNorm, grouped-query attention, RMSNorm, gated MLP; `qk_norm` normalises each query and key head."""
    c = config

    def head_norm() -> RMSNorm | None:
        return RMSNorm(init, c.head_dim, eps=c.rms_norm_eps, axis=None) if qk_norm else None

    attention = Attention(
        init,
        c.hidden_size,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        bias=qkv_bias,
        out_bias=out_bias,
        q_norm=head_norm(),
        k_norm=head_norm(),
    )
    return DecoderLayer(
        attention_norm=RMSNorm(init, c.hidden_size, eps=c.rms_norm_eps),
        attention=attention,
        mlp_norm=RMSNorm(init, c.hidden_size, eps=c.rms_norm_eps),
        mlp=GatedMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=mlp_bias),
    )
