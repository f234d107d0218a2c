import pytest

from models import architectures, find_architecture
from models.layers.encoder import Encoder


def test_lists_families_and_nothing_else():
    assert {"llama", "mistral", "qwen2", "qwen3", "smollm3"} <= set(architectures())
    assert not {"inputs", "layers"} & set(architectures())


def test_every_family_exports_what_the_engine_needs():
    for name in architectures():
        family = find_architecture({"model_type": name})
        assert family.__name__ == f"models.{name}"
        assert callable(family.Config.from_hf)
        assert isinstance(family.Model, type)
        assert "embedding.weight" in family.load_map
        # A model of language has a head for its vocabulary, an encoder one for classes.
        head = "classifier.out.weight" if issubclass(family.Model, Encoder) else "head.weight"
        assert head in family.load_map


@pytest.mark.parametrize("name", ["Qwen3", "qwen-3", "qwen33"])
def test_unknown_name_gets_the_closest_one(name):
    with pytest.raises(ValueError, match=r"is not supported.*closest one is qwen3\."):
        find_architecture({"model_type": name})


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": ["llama"]}])
def test_no_model_type(config):
    with pytest.raises(ValueError, match="no model_type"):
        find_architecture(config)


@pytest.mark.parametrize("name", ["inputs", "layers", "layers.rope"])
def test_helpers_are_no_families(name):
    with pytest.raises(ValueError, match="is not supported"):
        find_architecture({"model_type": name})
