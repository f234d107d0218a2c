import pytest

from models import llama, mistral, qwen2, smollm3
from models.layers.config import LayerTraits
from models.layers.rope import RopeParameters

SMALL = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def test_heads_have_defaults():
    config = llama.Config.from_hf(SMALL | {"num_key_value_heads": None, "head_dim": None})
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert llama.Config.from_hf(SMALL | {"head_dim": 24}).head_dim == 24


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"hidden_act": "gulu"}, "hidden_act must be one of .*silu.*, got 'gulu'"),
        ({"num_attention_heads": 3}, "must be a multiple of num_key_value_heads, got 3 and 2"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 4 layers, got 1"),
        ({"layer_types": ["chunked_attention"] * 4}, "got chunked_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type must be one of .*, got 'spiral'"),
        ({"vocab_size": None, "intermediate_size": None}, "lacks vocab_size, intermediate_size"),
    ],
)
def test_refused(extra, message):
    with pytest.raises(ValueError, match=message):
        qwen2.Config.from_hf(SMALL | extra)


def test_old_and_new_rope_keys_are_one():
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    expected = RopeParameters(rope_type="linear", factor=2.0, rope_theta=5e5, original_max_position_embeddings=128)
    assert llama.Config.from_hf(SMALL | new).rope_parameters == expected
    for old in ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0, "type": "linear"}):
        assert llama.Config.from_hf(SMALL | {"rope_theta": 5e5, "rope_scaling": old}).rope_parameters == expected


def test_windows():
    full, windowed = LayerTraits(), LayerTraits(window=16)
    assert llama.Config.from_hf(SMALL | {"sliding_window": None}).layer_traits() == (full,) * 4
    assert mistral.Config.from_hf(SMALL).sliding_window == 4096
    assert mistral.Config.from_hf(SMALL | {"sliding_window": None}).layer_traits() == (full,) * 4
    assert mistral.Config.from_hf(SMALL | {"sliding_window": 16}).layer_traits() == (windowed,) * 4
    top = SMALL | {"sliding_window": 16, "max_window_layers": 3}
    assert qwen2.Config.from_hf(top).layer_traits() == (full,) * 4
    assert qwen2.Config.from_hf(top | {"use_sliding_window": True}).layer_traits() == (full,) * 3 + (windowed,)
    listed = top | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2}
    assert qwen2.Config.from_hf(listed).layer_traits() == (windowed, full) * 2


def test_layers_without_rotation():
    traits = smollm3.Config.from_hf(SMALL).layer_traits()
    assert [t.rope for t in traits] == [0, 0, 0, None]
    config = smollm3.Config.from_hf(
        SMALL | {"no_rope_layers": [0, 1, 1, 1], "use_sliding_window": True, "sliding_window": 8}
    )
    assert config.layer_traits() == (LayerTraits(8, None), *[LayerTraits(0, 0)] * 3)
    assert config.rope_parameters.rope_theta == 2e6
    assert config.tie_word_embeddings
