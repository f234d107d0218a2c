"""Makes the pooling goldens: tiny seeded checkpoints, and what transformers and sentence-transformers compute for them.

Run by hand in an environment with torch 2.13, transformers 5.19 and sentence-transformers 6.2, none of which
paxserve needs: `python tests/goldens/make_pooling_goldens.py [NAME ...]` writes `tests/goldens/pooling/NAME`.
Float32, eager attention.

golden.npz: `ids_i` token ids, `types_i` (pairs only) which text a token is of, then `hidden_i` the last hidden states
or `logits_i` the class logits. Folders with a tokenizer have `texts.json` instead: texts, prompts, and vectors.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

FOLDER = Path(__file__).parent / "pooling"
LENGTHS = (3, 17, 50)
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0}
EAGER = {"attn_implementation": "eager", "initializer_range": 0.3}
TEXTS = ["a river runs to the sea", "the capital of france is paris", "sea", "to be or not to be in the sun"]
WORDS = sorted({word for text in TEXTS for word in text.split()} | {"query", "find", ":", "boat", "city"})


def bert(**options):
    return transformers.BertConfig(**SIZES, max_position_embeddings=64, **EAGER, **options)


def roberta(kind=transformers.RobertaConfig, **options):
    return kind(**SIZES, max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, **EAGER, **options)


def modernbert(**options):
    return transformers.ModernBertConfig(
        **SIZES, max_position_embeddings=256, local_attention=16, pad_token_id=0, initializer_cutoff_factor=2.0,
        attn_implementation="eager", initializer_range=0.3, **options,
    )  # fmt: skip


def gemma3():
    config = transformers.Gemma3TextConfig(
        **GROUPED, sliding_window=12, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=8, use_bidirectional_attention=True, **EAGER,
    )  # fmt: skip
    return config


def labels(count):
    return {"id2label": {i: f"class {i}" for i in range(count)}, "label2id": {f"class {i}": i for i in range(count)}}


MODELS = {
    "bert": lambda: transformers.BertModel(bert(), add_pooling_layer=False),
    "bert_pair": lambda: transformers.BertForSequenceClassification(bert(**labels(1))),
    "roberta": lambda: transformers.RobertaForSequenceClassification(roberta(**labels(3))),
    "xlm_roberta": lambda: transformers.XLMRobertaModel(
        roberta(transformers.XLMRobertaConfig), add_pooling_layer=False
    ),
    "modernbert": lambda: transformers.ModernBertModel(modernbert()),
    "modernbert_classes": lambda: transformers.ModernBertForSequenceClassification(
        modernbert(classifier_pooling="mean", **labels(2))
    ),
    "gemma3_both_ways": lambda: transformers.Gemma3TextModel(gemma3()),
    "qwen3_classes": lambda: transformers.Qwen3ForSequenceClassification(
        transformers.Qwen3Config(**GROUPED, **EAGER, **labels(3))
    ),
    "qwen3_causal": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**GROUPED, tie_word_embeddings=True, **EAGER)
    ),
}


def make_golden(name):
    torch.manual_seed(sum(map(ord, name)))
    model = MODELS[name]().eval().float()
    folder = FOLDER / name
    model.save_pretrained(folder)
    if name == "gemma3_both_ways":
        # transformers halves the window when it reads the configuration, and writes the half back.
        config = json.loads((folder / "config.json").read_text()) | {"sliding_window": 12}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        model = transformers.Gemma3TextModel.from_pretrained(folder, attn_implementation="eager").eval().float()
    rng = np.random.default_rng(7)
    data = {}
    for i, length in enumerate(LENGTHS):
        ids = rng.integers(5, SIZES["vocab_size"], length)
        inputs = {"input_ids": torch.tensor(ids)[None]}
        data[f"ids_{i}"] = ids.astype(np.int32)
        if name == "bert_pair":
            types = (np.arange(length) > length // 3).astype(np.int64)
            inputs["token_type_ids"] = torch.tensor(types)[None]
            data[f"types_{i}"] = types.astype(np.int32)
        with torch.no_grad():
            output = model(**inputs)
        if hasattr(output, "last_hidden_state"):
            data[f"hidden_{i}"] = output.last_hidden_state[0].numpy()
        else:
            data[f"logits_{i}"] = (output.logits[0, -1] if name == "qwen3_causal" else output.logits[0]).numpy()
    np.savez_compressed(folder / "golden.npz", **data)


def small_tokenizer(folder, *, is_bert):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(special + WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {"[CLS]": 2, "[SEP]": 3}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]" if is_bert else "$A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if is_bert else "$A [SEP] $B [SEP]",
        special_tokens=[item for item in ends.items() if is_bert or item[0] == "[SEP]"],
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        padding_side="right" if is_bert else "left", model_max_length=64,
        model_input_names=["input_ids", *(["token_type_ids"] if is_bert else []), "attention_mask"],
    )  # fmt: skip
    fast.save_pretrained(folder)


def make_sentence_transformer(name, model, is_bert, after):
    """A checkpoint with its tokenizer and the modules `after` the transformer, and their vectors."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    torch.manual_seed(11)
    folder = FOLDER / name
    model = model().eval().float()
    model.save_pretrained(folder)
    small_tokenizer(folder, is_bert=is_bert)
    modules = [Transformer(str(folder), max_seq_length=48)]
    for part in after:
        match part:
            case "normalize":
                modules.append(Normalize())
            case int(size):
                modules.append(Dense(32, size, bias=True, activation_function=torch.nn.Tanh()))
            case mode:
                modules.append(Pooling(32, pooling_mode=mode))
    whole = SentenceTransformer(modules=modules, prompts={"query": "find : ", "document": ""}, device="cpu")
    whole.save_pretrained(str(folder), create_model_card=False)
    texts = {
        "texts": TEXTS,
        "vectors": whole.encode(TEXTS).tolist(),
        "query_vectors": whole.encode(TEXTS, prompt_name="query").tolist(),
    }
    (folder / "texts.json").write_text(json.dumps(texts) + "\n")


def make_cross_encoder():
    from sentence_transformers import CrossEncoder

    torch.manual_seed(12)
    folder = FOLDER / "cross_encoder"
    transformers.BertForSequenceClassification(bert(num_labels=1)).eval().float().save_pretrained(folder)
    small_tokenizer(folder, is_bert=True)
    encoder = CrossEncoder(str(folder), device="cpu", max_length=64)
    pairs = [(TEXTS[0], text) for text in TEXTS]
    scores = {"texts": TEXTS, "scores": [float(score) for score in encoder.predict(pairs)]}
    (folder / "texts.json").write_text(json.dumps(scores) + "\n")


def main(names):
    for name in names or MODELS:
        if name in MODELS:
            make_golden(name)
    if not names or "st_bert" in names:
        make_sentence_transformer("st_bert", lambda: transformers.BertModel(bert()), True, ["mean", 16, "normalize"])
    if not names or "st_qwen3" in names:
        qwen = lambda: transformers.Qwen3Model(transformers.Qwen3Config(**GROUPED, **EAGER))  # noqa: E731
        make_sentence_transformer("st_qwen3", qwen, False, ["lasttoken", "normalize"])
    if not names or "cross_encoder" in names:
        make_cross_encoder()


if __name__ == "__main__":
    main(sys.argv[1:])
