"""Tokenizers of the kinds that models have, small enough to be made in a test."""

import functools

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from paxserve.loaders.tokenizer import Tokenizer

CORPUS = [
    "Hello world, the quick brown fox jumps over the lazy dog.",
    "naïve café — 日本語 안녕하세요 😀👩‍🚀🇰🇷 é",
    "1 2 3 4 5",
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    """Every token is bytes, as in GPT-2, Llama 3, Qwen and SmolLM; characters are cut over several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS[:1], trainer)
    # Not special, not in the byte alphabet, and one whose letters look like bytes of the alphabet.
    backend.add_tokens([AddedToken("  ", normalized=False), AddedToken("né", normalized=False)])
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        chat_templates={"default": CHATML},
    )


@functools.cache
def byte_fallback_tokenizer() -> Tokenizer:
    """Text pieces with `<0x..>` for what has none, as in Gemma; puts BOS in front."""
    pieces = ["<pad>", "<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({char for char in "▁" + CORPUS[0] + CORPUS[2] if char != " "})
    words = ["▁t", "he", "▁the", "▁▁", "▁w", "or"]
    vocabulary = {piece: place for place, piece in enumerate([*pieces, *letters, *words])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("▁", "w"), ("o", "r")]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<pad>", "<s>", "</s>", "<unk>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    template = "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    return Tokenizer(
        backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, chat_templates={"default": template}
    )


@functools.cache
def word_piece_tokenizer() -> Tokenizer:
    """A decoder that the engine knows nothing about: words are joined by spaces."""
    vocabulary = {
        word: place for place, word in enumerate(["[UNK]", "[END]", "hel", "##lo", "world", ",", "don", "'", "t"])
    }
    backend = Backend(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens(["[UNK]", "[END]"])
    return Tokenizer(backend, special_tokens={"eos_token": "[END]"})
