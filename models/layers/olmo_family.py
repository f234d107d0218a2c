"""The layer that OLMo 2 and 3 share."""

from models.layers.config import DecoderConfig
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.head_norms import norms_of_all_heads
from models.layers.initializer import Initializer


def olmo_layer(init: Initializer, config: DecoderConfig, *, bias: bool) -> DecoderLayer:
    """Norms after each block, and over all query heads and all key heads together."""
    norms = norms_of_all_heads(init, config, eps=config.rms_norm_eps)
    return dense_layer(init, config, pre_norms=False, post_norms=True, bias=bias, out_bias=bias, **norms)
