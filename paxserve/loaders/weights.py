"""A model's parameters, filled from a checkpoint tensor by tensor, or with random numbers."""

import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Sharding
from jax.typing import DTypeLike

from models import find_architecture
from models.layers.initializer import fill
from models.layers.weight_map import SCORE_LOAD_MAP, LoadMap, Source
from paxserve.errors import ConfigError
from paxserve.loaders.checkpoint import Checkpoint
from paxserve.loaders.filling import Filling, ShardingRule, axes_of
from paxserve.loaders.mxfp4 import with_whole_tensors
from paxserve.loaders.orbax_folder import OrbaxFolder
from paxserve.loaders.orbax_weights import load_converted
from paxserve.loaders.tensor_check import check_tensors

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "embedding.weight", "head.weight"
READERS = 2


def choose_architecture(checkpoint: Checkpoint) -> tuple[ModuleType, Any]:
    """The family's module and its configuration for a checkpoint.

    Raises `ConfigError` for a family or a setting that is not supported.
    """
    try:
        architecture = find_architecture(checkpoint.hf_config)
        return architecture, architecture.Config.from_hf(checkpoint.hf_config)
    except ValueError as error:
        raise ConfigError(f"{checkpoint.name}: {error}") from error


def load_model(
    architecture: ModuleType,
    config: Any,
    checkpoint: Checkpoint,
    *,
    dtype: DTypeLike,
    layer_execution: str = "unrolled",
    max_model_len: int | None = None,
    is_dummy: bool = False,
    seed: int = 0,
    tensor_shards: int = 1,
    sharding: ShardingRule | None = None,
    num_labels: int | None = None,
) -> nnx.Module:
    """The model of `architecture` (a module from `models.find_architecture`) with its weights on their devices.

    With `is_dummy` they are random numbers made there, and the checkpoint's tensors are not looked at. `sharding` says
    where an array with certain logical axes goes; it may split "tensor" axes into `tensor_shards`.
    With `num_labels` the model classifies instead of naming tokens; 0 leaves it without a head.
    """
    load_map = architecture.load_map
    if num_labels is not None:
        load_map = SCORE_LOAD_MAP | load_map
    is_converted = isinstance(checkpoint, OrbaxFolder) and not is_dummy
    if is_converted:
        config = dataclasses.replace(config, tie_word_embeddings=HEAD not in checkpoint.tensors)
    elif not is_dummy:
        checkpoint = with_whole_tensors(checkpoint)
        load_map = settle_prefix(load_map, checkpoint)
        if num_labels is None:
            config = settle_tied_head(config, load_map, checkpoint)
    options = {} if num_labels is None else {"num_labels": num_labels}

    def describe(layer_execution: str, tensor_shards: int) -> tuple[Any, nnx.State]:
        return nnx.split(
            nnx.eval_shape(
                lambda: architecture.Model(
                    config, dtype=dtype, layer_execution=layer_execution, max_model_len=max_model_len,
                    tensor_shards=tensor_shards, rngs=nnx.Rngs(0), **options,
                )
            )
        )  # fmt: skip

    graphdef, abstract = describe(layer_execution, tensor_shards)
    if is_dummy:
        state = random_weights(abstract, seed=seed, sharding=sharding)
    elif isinstance(checkpoint, OrbaxFolder):
        # Converted for text and run for vectors, it has a head that is not wanted.
        unused = () if num_labels is None else ("head.",)
        stored = describe("unrolled", 1)[1] if tensor_shards > 1 else None
        state = load_converted(abstract, checkpoint, stored=stored, sharding=sharding, unused=unused)
    else:
        unused = config.unused_tensors()
        state = load_weights(abstract, load_map, checkpoint, sharding=sharding, unused=unused)
    return nnx.merge(graphdef, state)


def settle_prefix(load_map: LoadMap, checkpoint: Checkpoint) -> LoadMap:
    """The table with the names' first component left out, if the checkpoint is of a model without its head.

    Such checkpoints (gpt2, many embedding models) store `layers.0…` for `model.layers.0…`.
    """
    embedding = load_map[EMBEDDING].names[0]
    prefix, bare = embedding.split(".", 1)
    if embedding in checkpoint.tensors or bare not in checkpoint.tensors:
        return load_map

    def strip(source: Source) -> Source:
        names = tuple(name.removeprefix(f"{prefix}.") for name in source.names)
        return dataclasses.replace(source, names=names, otherwise=source.otherwise.removeprefix(f"{prefix}."))

    return {key: strip(source) for key, source in load_map.items()}


def settle_tied_head(config: Any, load_map: LoadMap, checkpoint: Checkpoint) -> Any:
    """The configuration with `tie_word_embeddings` off where the checkpoint has a head that is not the token table.

    This is what transformers does; both log a warning, as the checkpoint contradicts itself.
    """
    head, embedding = load_map[HEAD].names[0], load_map[EMBEDDING].names[0]
    if not config.tie_word_embeddings or not {head, embedding} <= checkpoint.tensors.keys():
        return config
    if checkpoint.tensors[head].shape == checkpoint.tensors[embedding].shape:
        if np.array_equal(checkpoint.read(head), checkpoint.read(embedding)):
            return config
    logger.warning(
        "%s: tie_word_embeddings is set, but %s differs from %s. The head is used as it is stored; "
        "set tie_word_embeddings to false in config.json to silence this.",
        checkpoint.name, head, embedding,
    )  # fmt: skip
    return dataclasses.replace(config, tie_word_embeddings=False)


def load_weights(
    abstract: nnx.State,
    load_map: LoadMap,
    checkpoint: Checkpoint,
    *,
    sharding: ShardingRule | None = None,
    unused: tuple[str, ...] = (),
) -> nnx.State:
    """The state with its parameters read from the checkpoint, cast to their own type.

    Tensors whose names begin with one of `unused` may be there.

    Raises `ConfigError` naming every tensor that is missing, unexpected, of the wrong shape or not of a float type,
    before any is read. Host memory stays at one device's shard of one layer's parameter and the tensors that it is made
    of (times two: two are in work); tensors of safetensors files are mapped, not read whole.
    """
    plan = [Filling(path, param, load_map) for path, param in nnx.to_flat_state(abstract)]
    is_tied = HEAD in load_map and not any(filling.key == HEAD for filling in plan)
    for filling in plan:
        if filling.source.otherwise:
            filling.prefer_stored((filling.source.otherwise,), checkpoint)
        elif is_tied and filling.key == EMBEDDING:
            filling.prefer_stored(load_map[HEAD].names, checkpoint)
    wanted = dict(tensor for filling in plan for tensor in filling.tensors())
    # The head of a tied model was found equal to the token table by `settle_tied_head`.
    check_tensors(checkpoint, wanted, known=set(load_map[HEAD].names if is_tied else ()), unused=unused)
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        values = pool.map(lambda filling: filling.load(checkpoint, sharding), plan)
        return nnx.from_flat_state([(f.path, f.param.replace(v)) for f, v in zip(plan, values, strict=True)])


def random_weights(abstract: nnx.State, *, seed: int, sharding: ShardingRule | None = None) -> nnx.State:
    """The state with random parameters made on the device, equal for equal seeds."""
    key = jax.random.key(seed)
    filled = []
    placed: dict[Sharding, Callable[..., jax.Array]] = {}
    for index, (path, param) in enumerate(nnx.to_flat_state(abstract)):
        make = fill
        if sharding:
            placement = sharding(axes_of(param))
            make = placed.setdefault(placement, _place_fill(placement))
        target = param.get_value()
        value = make(key, index, shape=target.shape, dtype=target.dtype, constant=param.get_metadata("constant"))
        filled.append((path, param.replace(value)))
    return nnx.from_flat_state(filled)


def _place_fill(placement: Sharding) -> Callable[..., jax.Array]:
    return jax.jit(fill, static_argnames=("shape", "dtype", "constant"), out_shardings=placement)
