"""RoBERTa: BERT with one type of text, and positions that count on from the padding token's id."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.bert_family import BertConfig, BertEncoder, bert_load_map, tanh_head_load_map
from models.layers.config import refuse

load_map = bert_load_map("roberta") | tanh_head_load_map("classifier.dense", "classifier.out_proj")


@dataclass(frozen=True, kw_only=True)
class Config(BertConfig):
    """RoBERTa's configuration; `max_position_embeddings` is the longest sequence, without the rows of padding."""

    type_vocab_size: int = 1
    layer_norm_eps: float = 1e-5

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Takes off the rows of the table up to the padding token's."""
        refuse(config, pad_token_id=1)
        length = config.get("max_position_embeddings", 0) - Model.position_offset
        return super().derive(config) | {"max_position_embeddings": length}

    def unused_tensors(self) -> tuple[str, ...]:
        """Beginnings of the names of the pretraining heads' tensors, which neither vectors nor classes need."""
        return ("roberta.pooler.", "pooler.", "lm_head.")


class Model(BertEncoder[Config]):
    """Positions count from row 2, the one after the padding token's."""

    position_offset = 2
