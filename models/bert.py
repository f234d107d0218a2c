"""BERT, and the many embedding models and cross-encoders that are one (MiniLM, BGE, E5, GTE)."""

from models.layers.bert_family import BertConfig, BertEncoder, bert_load_map, tanh_head_load_map

load_map = bert_load_map("bert") | tanh_head_load_map("bert.pooler.dense", "classifier")


class Config(BertConfig):
    """BERT's configuration."""

    def unused_tensors(self) -> tuple[str, ...]:
        """Beginnings of the names of the pretraining heads' tensors, which neither vectors nor classes need."""
        return ("bert.pooler.", "pooler.", "cls.")


class Model(BertEncoder[Config]):
    """Positions count from row 0."""
