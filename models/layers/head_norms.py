"""Norms of an attention's heads whose weights differ from head to head, spread over devices as the heads are."""

from typing import Any

from models.layers.config import DecoderConfig
from models.layers.head_layout import HeadLayout
from models.layers.initializer import Initializer
from models.layers.norm import FlatRMSNorm, HeadLayerNorm


def norms_of_each_head(init: Initializer, config: DecoderConfig, *, eps: float) -> dict[str, Any]:
    """`q_norm` and `k_norm` of an attention whose heads have a LayerNorm with weights of their own each."""
    c = config
    heads = HeadLayout(c.num_attention_heads, c.num_key_value_heads, init.tensor_shards)
    q, k = heads.heads_layout(), heads.kv_heads_layout()
    return {
        "q_norm": HeadLayerNorm(init, c.num_attention_heads, c.head_dim, eps=eps, axis="heads", layout=q),
        "k_norm": HeadLayerNorm(init, c.num_key_value_heads, c.head_dim, eps=eps, axis="kv_heads", layout=k),
    }


def norms_of_all_heads(init: Initializer, config: DecoderConfig, *, eps: float) -> dict[str, Any]:
    """`q_norm` and `k_norm` of an attention with an RMSNorm over all query heads, and one over all key heads."""
    c = config
    heads = HeadLayout(c.num_attention_heads, c.num_key_value_heads, init.tensor_shards)
    q_size, k_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    q, k = heads.heads_layout(c.head_dim), heads.kv_heads_layout(c.head_dim)
    return {
        "q_norm": FlatRMSNorm(init, q_size, eps=eps, axis="heads", layout=q),
        "k_norm": FlatRMSNorm(init, k_size, eps=eps, axis="kv_heads", layout=k, copies=heads.copies),
    }
