"""Where a model's parameters are in a checkpoint: tables that can be read against its tensor names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Source:
    """The checkpoint tensors that one parameter is made of.

    `*` in a name stands for the layer's number; a second `*` counts along the parameter's first axis (of its
    layer), whose entries are tensors of their own: heads, experts.

    Several names are the parameter's parts, in the order of its metadata `parts`; a single name for a parameter
    with parts is a tensor that has them fused, one part after another.
    """

    names: tuple[str, ...]
    order: Literal["as_stored", "out_in"]
    share: tuple[int, int] = (0, 1)
    """Which share (index, count) of the tensor's output rows the parameter is."""
    otherwise: str = ""
    """What some checkpoints call the (single) tensor."""
    is_interleaved: bool = False
    """The shares alternate row by row, instead of lying one after another."""
    is_dealt: bool = False
    """The tensor already has its parts dealt out in groups, as the parameter has."""


LoadMap = Mapping[str, Source]


def stored(*names: str, otherwise: str = "") -> Source:
    """Taken as it is (norms, biases, token tables, matrices stored [in, out])."""
    return Source(names, "as_stored", otherwise=otherwise)


def transposed(*names: str, otherwise: str = "") -> Source:
    """A matrix that torch stores [out, in], or matrices of experts that it stores [experts, out, in]."""
    return Source(names, "out_in", otherwise=otherwise)


def dealt(name: str, *, is_matrix: bool) -> Source:
    """q, k and v fused by kv head, as GPT-NeoX and Falcon store them: the parameter's own order."""
    return Source((name,), "out_in" if is_matrix else "as_stored", is_dealt=True)


def transposed_share(name: str, index: int, count: int) -> Source:
    """One of `count` matrices of one size that a tensor [out, in] has fused."""
    return Source((name,), "out_in", (index, count))


def stored_share(name: str, index: int, count: int, *, is_interleaved: bool = False) -> Source:
    """One of `count` equal parts of the last axis of a tensor that is stored as it is used."""
    return Source((name,), "as_stored", (index, count), is_interleaved=is_interleaved)


# The names that Llama gave its tensors, which most families kept. A family without some parameter
# (a bias, its own head) leaves the line unused; one with more adds lines.
LLAMA_LOAD_MAP: dict[str, Source] = {
    "embedding.weight": stored("model.embed_tokens.weight"),
    "layers.*.attention_norm.weight": stored("model.layers.*.input_layernorm.weight"),
    "layers.*.attention.qkv.weight": transposed(
        "model.layers.*.self_attn.q_proj.weight",
        "model.layers.*.self_attn.k_proj.weight",
        "model.layers.*.self_attn.v_proj.weight",
    ),
    "layers.*.attention.qkv.bias": stored(
        "model.layers.*.self_attn.q_proj.bias",
        "model.layers.*.self_attn.k_proj.bias",
        "model.layers.*.self_attn.v_proj.bias",
    ),
    "layers.*.attention.out.weight": transposed("model.layers.*.self_attn.o_proj.weight"),
    "layers.*.attention.out.bias": stored("model.layers.*.self_attn.o_proj.bias"),
    "layers.*.mlp_norm.weight": stored("model.layers.*.post_attention_layernorm.weight"),
    "layers.*.mlp.gate.weight": transposed("model.layers.*.mlp.gate_proj.weight"),
    "layers.*.mlp.gate.bias": stored("model.layers.*.mlp.gate_proj.bias"),
    "layers.*.mlp.up.weight": transposed("model.layers.*.mlp.up_proj.weight"),
    "layers.*.mlp.up.bias": stored("model.layers.*.mlp.up_proj.bias"),
    "layers.*.mlp.down.weight": transposed("model.layers.*.mlp.down_proj.weight"),
    "layers.*.mlp.down.bias": stored("model.layers.*.mlp.down_proj.bias"),
    "norm.weight": stored("model.norm.weight"),
    "head.weight": transposed("lm_head.weight"),
}
QK_NORM_LOAD_MAP: dict[str, Source] = {
    "layers.*.attention.q_norm.weight": stored("model.layers.*.self_attn.q_norm.weight"),
    "layers.*.attention.k_norm.weight": stored("model.layers.*.self_attn.k_norm.weight"),
}
# The names of layers that normalise both before and after each block, as Gemma's.
POST_NORMS_LOAD_MAP: dict[str, Source] = {
    "layers.*.attention_post_norm.weight": stored("model.layers.*.post_attention_layernorm.weight"),
    "layers.*.mlp_norm.weight": stored("model.layers.*.pre_feedforward_layernorm.weight"),
    "layers.*.mlp_post_norm.weight": stored("model.layers.*.post_feedforward_layernorm.weight"),
}
# Where transformers puts the head of any decoder's `ForSequenceClassification`.
SCORE_LOAD_MAP: dict[str, Source] = {"classifier.out.weight": transposed("score.weight")}
FUSED_GATE_UP_LOAD_MAP: dict[str, Source] = {
    "layers.*.mlp.gate.weight": transposed_share("model.layers.*.mlp.gate_up_proj.weight", 0, 2),
    "layers.*.mlp.up.weight": transposed_share("model.layers.*.mlp.gate_up_proj.weight", 1, 2),
}
# The names that Qwen gave to a layer's router and experts, and DeepSeek to the expert that all tokens share.
EXPERTS_LOAD_MAP: dict[str, Source] = {
    "layers.*.mlp.router.weight": transposed("model.layers.*.mlp.gate.weight"),
    "layers.*.mlp.router.correction": stored("model.layers.*.mlp.gate.e_score_correction_bias"),
    "layers.*.mlp.experts.gate": transposed("model.layers.*.mlp.experts.*.gate_proj.weight"),
    "layers.*.mlp.experts.up": transposed("model.layers.*.mlp.experts.*.up_proj.weight"),
    "layers.*.mlp.experts.down": transposed("model.layers.*.mlp.experts.*.down_proj.weight"),
    "layers.*.mlp.shared.gate.weight": transposed("model.layers.*.mlp.shared_experts.gate_proj.weight"),
    "layers.*.mlp.shared.up.weight": transposed("model.layers.*.mlp.shared_experts.up_proj.weight"),
    "layers.*.mlp.shared.down.weight": transposed("model.layers.*.mlp.shared_experts.down_proj.weight"),
}


def bias_lines(load_map: Mapping[str, Source]) -> dict[str, Source]:
    """A line for the bias of every norm and matrix of layers, and of the last norm: `.weight` names with `.bias`."""
    lines = {}
    for key, source in load_map.items():
        if key.startswith(("layers.", "norm.")) and key.endswith(".weight"):
            names = tuple(_bias(name) for name in source.names)
            lines[_bias(key)] = replace(source, names=names, order="as_stored", otherwise=_bias(source.otherwise))
    return lines


def _bias(name: str) -> str:
    return re.sub("weight$", "bias", name)
