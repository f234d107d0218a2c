"""Checkpoints from the Hugging Face hub, or from its local cache when HF_HUB_OFFLINE is set."""

from pathlib import Path

import huggingface_hub

from paxserve.errors import ConfigError

# The pooling and projections of sentence-transformers lie in numbered folders, such as 1_Pooling/config.json.
TEXT_PATTERNS = ["*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model", "*.tiktoken"]
WEIGHT_PATTERNS = ["*.safetensors"]
# Subfolders hold the same weights again for other programs (original/, onnx/), consolidated files do for Mistral's.
IGNORED_PATTERNS = ["[!0-9]*/*", "consolidated*", "adapter_*", "training_args*"]


def download_snapshot(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
    with_weights: bool = True,
) -> Path:
    """The local folder of a hub checkpoint, downloading only the files that paxserve reads."""
    patterns = TEXT_PATTERNS + (WEIGHT_PATTERNS if with_weights else [])
    try:
        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            allow_patterns=patterns,
            ignore_patterns=IGNORED_PATTERNS,
        )
    except Exception as error:  # the client raises its own errors, its HTTP library's and the system's: all are reasons
        # Offline, the client wants every file that matches; what is truly missing, the folder's own checks tell better.
        if partial := getattr(error, "snapshot_path", None):
            return Path(partial)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            f"Cannot get {repo_id!r}{at}: it is no local folder or .gguf file, no alias, and the Hugging Face hub "
            f"answered: {type(error).__name__}: {reason}"
        ) from error
    return Path(folder)
