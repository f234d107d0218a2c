"""XLM-RoBERTa: RoBERTa with a vocabulary of many languages (multilingual E5, BGE-M3 and its reranker)."""

from models.roberta import Config, Model, load_map

__all__ = ["Config", "Model", "load_map"]
