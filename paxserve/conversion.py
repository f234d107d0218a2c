"""Checkpoints rewritten in the engine's own layout, so that a start only has to read them."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from paxserve.config import ModelConfig
from paxserve.errors import ConfigError
from paxserve.loaders.checkpoint import Checkpoint, open_checkpoint
from paxserve.loaders.orbax_folder import MARKER, VERSION, OrbaxFolder, save_arrays
from paxserve.loaders.orbax_weights import parameter_name
from paxserve.loaders.pooling_spec import resolve_pooling
from paxserve.loaders.tokenizer import Tokenizer
from paxserve.loaders.weights import choose_architecture, load_model

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja")
MODULE_FILES = ("[0-9]*_*/*.json", "[0-9]*_*/*.safetensors")
"""The folders of sentence-transformers' modules."""
WEIGHT_INDEX = "model.safetensors.index.json"
TYPES = {"float": "float32", "half": "float16"}


def convert(settings: ModelConfig, out: Path) -> dict[str, int]:
    """Write the checkpoint that `settings` names to the folder `out`; how many arrays and bytes that were.

    Raises `ConfigError` if the folder holds something, or the checkpoint cannot be loaded.
    """
    checkpoint = open_checkpoint(settings)
    if isinstance(checkpoint, OrbaxFolder):
        raise ConfigError(f"{checkpoint.name} is converted already.")
    if settings.load_format == "dummy":
        raise ConfigError("load_format=dummy has no weights to convert.")
    architecture, config = choose_architecture(checkpoint)
    spec = resolve_pooling(checkpoint, architecture, config, settings)
    dtype = _dtype(settings.dtype, checkpoint)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigError(f"{out} is not empty: name a new folder.")
    except OSError as error:
        raise ConfigError(f"Cannot write to {out}: {error.strerror or error}.") from None
    model = load_model(
        architecture, config, checkpoint, dtype=jnp.dtype(dtype), layer_execution="unrolled",
        num_labels=None if spec is None or spec.score_tokens else spec.num_labels,
    )  # fmt: skip
    arrays = {parameter_name(path): param.get_value() for path, param in nnx.to_flat_state(nnx.state(model))}
    save_arrays(out, arrays)
    _write_texts(checkpoint, out, dtype)
    # Last of all: a folder without it is none that was converted to the end.
    (out / MARKER).write_text(json.dumps({"version": VERSION, "dtype": dtype}) + "\n")
    return {"arrays": len(arrays), "bytes": sum(array.nbytes for array in arrays.values())}


def _dtype(wanted: str, checkpoint: Checkpoint) -> str:
    if wanted != "auto":
        return TYPES.get(wanted, wanted)
    config = checkpoint.hf_config
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def _write_texts(checkpoint: Checkpoint, out: Path, dtype: str) -> None:
    """The configuration, the tokenizer, and whatever else the engine reads beside the weights."""
    source = checkpoint.path
    if source.is_dir():
        for pattern in (*TEXT_FILES, *MODULE_FILES):
            for file in source.glob(pattern):
                if file.name != WEIGHT_INDEX:
                    target = out / file.relative_to(source)
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, target)
    else:
        write_tokenizer(checkpoint.load_tokenizer(), out)
        if checkpoint.generation_config:
            (out / "generation_config.json").write_text(json.dumps(checkpoint.generation_config, indent=2) + "\n")
    config = {**checkpoint.hf_config, "dtype": dtype}
    (out / "config.json").write_text(json.dumps(config, indent=2, default=float) + "\n")


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """A tokenizer, wherever it was read from, as the files of a Hugging Face folder."""
    tokenizer.backend.save(str(out / "tokenizer.json"))
    named = [{"name": name, "template": template} for name, template in tokenizer.chat_templates.items()]
    config = {**tokenizer.special_tokens, **({"chat_template": named} if named else {})}
    (out / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n")
