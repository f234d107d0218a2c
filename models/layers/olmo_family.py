"""The layer that OLMo 2 and 3 share."""

from models.layers.config import DecoderConfig
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.norm import FlatRMSNorm


def olmo_layer(init: Initializer, config: DecoderConfig, *, bias: bool) -> DecoderLayer:
    """Norms after each block, and over all query heads and all key heads together."""
    c = config
    return dense_layer(
        init,
        c,
        pre_norms=False,
        post_norms=True,
        bias=bias,
        out_bias=bias,
        q_norm=FlatRMSNorm(init, c.num_attention_heads * c.head_dim, eps=c.rms_norm_eps),
        k_norm=FlatRMSNorm(init, c.num_key_value_heads * c.head_dim, eps=c.rms_norm_eps),
    )
