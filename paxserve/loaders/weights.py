"""A model's parameters, filled from a checkpoint tensor by tensor, or with random numbers."""

import dataclasses
import difflib
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding
from jax.typing import DTypeLike

from models.layers.initializer import fill
from models.layers.weight_map import LoadMap, Source
from paxserve.errors import ConfigError
from paxserve.loaders.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "embedding.weight", "head.weight"
NOT_WEIGHTS = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.attn\.(masked_)?bias$|\.position_ids$")
MAX_NAMES_SHOWN = 8
TILE_ROWS = 64
READERS = 2

ShardingRule = Callable[[tuple[str | None, ...]], Sharding]


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
    sharding: ShardingRule | None = None,
) -> nnx.Module:
    """The model of `architecture` (a module from `models.find_architecture`) with its weights on the device.

    With `is_dummy` they are random numbers made there, and the checkpoint's tensors are not looked at.
    """
    if not is_dummy:
        config = settle_tied_head(config, architecture.load_map, checkpoint)

    def build() -> nnx.Module:
        return architecture.Model(
            config, dtype=dtype, layer_execution=layer_execution, max_model_len=max_model_len, rngs=nnx.Rngs(0)
        )

    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    if is_dummy:
        state = random_weights(abstract, seed=seed, sharding=sharding)
    else:
        state = load_weights(abstract, architecture.load_map, checkpoint, sharding=sharding)
    return nnx.merge(graphdef, state)


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
    abstract: nnx.State, load_map: LoadMap, checkpoint: Checkpoint, *, sharding: ShardingRule | None = None
) -> nnx.State:
    """The state with its parameters read from the checkpoint, cast to their own type.

    Raises `ConfigError` naming every tensor that is missing, unexpected, of the wrong shape or not of a float type,
    before any is read. Host memory stays at one parameter of one layer and one tensor (times two: two are in work).
    """
    plan = [_Filling(path, param, load_map) for path, param in nnx.to_flat_state(abstract)]
    is_tied = not any(filling.key == HEAD for filling in plan)
    for filling in plan:
        if is_tied and filling.key == EMBEDDING:
            filling.fall_back_to(load_map[HEAD], checkpoint)
    _check(plan, load_map[HEAD] if is_tied else None, checkpoint)
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
            placement = sharding(_axes(param))
            make = placed.setdefault(placement, _place_fill(placement))
        target = param.get_value()
        value = make(key, index, shape=target.shape, dtype=target.dtype, constant=param.get_metadata("constant"))
        filled.append((path, param.replace(value)))
    return nnx.from_flat_state(filled)


def _place_fill(placement: Sharding) -> Callable[..., jax.Array]:
    return jax.jit(fill, static_argnames=("shape", "dtype", "constant"), out_shardings=placement)


def _axes(param: nnx.Variable) -> tuple[str | None, ...]:
    return param.get_metadata("out_sharding")


class _Filling:
    """How one parameter is filled: from which tensors, for which layers."""

    def __init__(self, path: tuple[Any, ...], param: nnx.Variable, load_map: LoadMap) -> None:
        self.path, self.param = path, param
        self.key = ".".join("*" if isinstance(part, int) else part for part in path)
        assert self.key in load_map, f"no line for {self.key} in load_map"
        self.source = load_map[self.key]
        metadata = param.get_metadata()
        numbers = [part for part in path if isinstance(part, int)]
        self.is_stacked = "layers" in metadata
        if self.is_stacked:
            first, count = metadata["layers"]
            numbers = list(range(first, first + count))
        self.layers: list[int | None] = list(numbers) or [None]
        self.target = param.get_value()
        self.shape = self.target.shape[1:] if self.is_stacked else self.target.shape
        self.parts: tuple[int, ...] = metadata.get("parts") or (self.shape[-1],)
        self.groups: int = metadata.get("groups", 1)

    def names(self, layer: int | None) -> list[str]:
        """The tensors that make up one layer's parameter."""
        return [name.replace("*", str(layer)) for name in self.source.names]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor that is wanted, with the shape that it must have."""
        widths = self.parts if len(self.source.names) > 1 else (self.shape[-1],)
        for layer in self.layers:
            for name, width in zip(self.names(layer), widths, strict=True):
                width *= self.source.share[1]
                yield name, (width, *self.shape[:-1]) if self.source.order == "out_in" else (*self.shape[:-1], width)

    def fall_back_to(self, source: Source, checkpoint: Checkpoint) -> None:
        """Use a tensor that stands for the same numbers where the usual one is not stored."""
        if self.source.names[0] not in checkpoint.tensors and source.names[0] in checkpoint.tensors:
            self.source = dataclasses.replace(self.source, names=source.names)

    def load(self, checkpoint: Checkpoint, sharding: ShardingRule | None) -> jax.Array:
        """The parameter on the device."""
        placement = sharding and sharding(_axes(self.param))
        if not self.is_stacked:
            return jax.device_put(self._assemble(checkpoint, self.layers[0]), placement)
        stack = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=placement)(self.target.shape, self.target.dtype)
        for index, layer in enumerate(self.layers):
            stack = _set_layer(stack, self._assemble(checkpoint, layer), index)
        return stack

    def _assemble(self, checkpoint: Checkpoint, layer: int | None) -> np.ndarray:
        """One layer's parameter on the host."""
        names, dtype = self.names(layer), self.target.dtype
        if self.source.order == "as_stored" and self.source.share == (0, 1) and len(self.parts) == 1:
            return checkpoint.read(names[0]).astype(dtype, copy=False)
        host = np.empty(self.shape, dtype)
        first_row = 0
        for name in names:
            tensor = checkpoint.read(name)
            rows = tensor if self.source.order == "out_in" else np.moveaxis(tensor, -1, 0)
            index, count = self.source.share
            rows = rows[index * len(rows) // count : (index + 1) * len(rows) // count]
            self._deal_out(rows, first_row, np.moveaxis(host, -1, 0))
            first_row += len(rows)
        return host

    def _deal_out(self, rows: np.ndarray, first_row: int, host_rows: np.ndarray) -> None:
        """Copy rows of the parts, laid one after another from `first_row` on, to their places among the groups."""
        part_starts = np.cumsum([0, *self.parts])
        for part, size in enumerate(self.parts):
            if not first_row <= part_starts[part] < first_row + len(rows):
                continue
            piece = size // self.groups
            for group in range(self.groups):
                source = part_starts[part] - first_row + group * piece
                target = (group * part_starts[-1] + part_starts[part]) // self.groups
                # Tile by tile, so that both sides of a transposition stay in the processor's cache.
                for start in range(0, piece, TILE_ROWS):
                    stop = min(start + TILE_ROWS, piece)
                    host_rows[target + start : target + stop] = rows[source + start : source + stop]


@partial(jax.jit, donate_argnums=0)
def _set_layer(stack: jax.Array, value: jax.Array, index: int) -> jax.Array:
    return stack.at[index].set(value)


def _check(plan: list[_Filling], unused_head: Source | None, checkpoint: Checkpoint) -> None:
    """Raise one `ConfigError` for all that does not fit between the model and the checkpoint."""
    stored = checkpoint.tensors
    wanted = dict(tensor for filling in plan for tensor in filling.tensors())
    missing = [name for name in wanted if name not in stored]
    # The head of a tied model was found equal to the token table by `settle_tied_head`.
    known = wanted.keys() | set(unused_head.names if unused_head else ())
    unexpected = [name for name in stored if name not in known and not NOT_WEIGHTS.search(name)]
    faults = []
    if missing:
        faults.append(f"{len(missing)} missing ({_some(missing)})")
        close = difflib.get_close_matches(missing[0], unexpected, n=1)
        if close:
            faults[-1] += f"; {close[0]} is there instead of {missing[0]}"
    if unexpected:
        faults.append(f"{len(unexpected)} unexpected ({_some(unexpected)})")
    wrong = [
        f"{name} should be {list(shape)}, is {list(stored[name].shape)}"
        for name, shape in wanted.items()
        if name in stored and tuple(stored[name].shape) != shape
    ]
    wrong += [
        f"{name} should be of a float type, is {stored[name].dtype}"
        for name in wanted
        if name in stored and not jnp.issubdtype(stored[name].dtype, jnp.floating)
    ]
    if wrong:
        faults.append(f"{len(wrong)} of the wrong form ({_some(wrong, '; ')})")
    if faults:
        raise ConfigError(f"The tensors of {checkpoint.name} do not fit its configuration: {'; '.join(faults)}.")


def _some(names: list[str], separator: str = ", ") -> str:
    more = [f"and {len(names) - MAX_NAMES_SHOWN} more"] if len(names) > MAX_NAMES_SHOWN else []
    return separator.join(names[:MAX_NAMES_SHOWN] + more)
