"""Where models come from: checkpoints on disk, on the hub or in a GGUF file, and their tokenizers."""
