"""An engine on a slice that is only described: its settings and sizes settled, its programs ready to lower."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models import find_architecture
from models.layers.moe import EXPERT_AXES, SparseMLP
from paxserve.config import EngineConfig, ModelConfig
from paxserve.engine.attention_choice import settle_attention
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.page_budget import count_pages, page_bytes
from paxserve.engine.program_specs import ProgramSpecs
from paxserve.engine.start import checkpoint_dtype, settle_max_model_len
from paxserve.errors import ConfigError
from paxserve.loaders.checkpoint import open_checkpoint
from paxserve.platform import PLATFORMS, leave_out_absent_tpu, resolve
from sharding.mesh import make_mesh
from sharding.topology import Topology, describe


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescribedEngine:
    """One engine on one slice. Bytes are those of one device."""

    config: EngineConfig
    """Resolved for TPU, with dtype, block size and tensor-parallel size settled."""
    model: Any
    topology: Topology
    mesh: Mesh
    max_model_len: int
    specs: ProgramSpecs
    weight_bytes: int
    table_bytes: int
    """Of the token table, if a step only looks rows up in it (it has a head of its own)."""
    page_bytes: int
    expert_bytes: int
    """Of the weights, those of routed experts, all of them."""
    routed_share: float
    """The part of its experts that one token goes to; 0 without experts."""

    @property
    def num_pages(self) -> int:
        """KV pages of the pool."""
        return self.specs.num_pages

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that the pool holds."""
        _, budget = self.config.scheduler.limits
        groups = self.specs.shape.groups
        pool = PagePool(self.num_pages, self.config.cache.block_size, reaches=groups.reaches)
        return pool.most_tokens(self.max_model_len, budget)

    def requests_of(self, num_tokens: int) -> float:
        """How many running requests of so many tokens the pool holds at once."""
        return self.num_pages / self.specs.shape.groups.pages_for(num_tokens, self.config.cache.block_size, 1)

    @property
    def full_length_requests(self) -> float:
        """How many requests of `max_model_len` tokens the pool holds at once."""
        return self.requests_of(self.max_model_len)


def read_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The model's config.json: a file, a folder's, a hub checkpoint's (nothing else is fetched), or a GGUF file's."""
    path = Path(config.model).expanduser()
    if path.suffix == ".json" and path.is_file():
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(loaded, dict):
            raise ConfigError(f"{path} must hold a JSON object, as a checkpoint's config.json does.")
        return loaded
    return open_checkpoint(dataclasses.replace(config, load_format="dummy")).hf_config


def describe_slice(name: str) -> Topology:
    """The slice called `name`; ConfigError without libtpu, or for a name that it does not know."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError('Planning needs the TPU compiler, which only Linux on x86-64 has: pip install "jax[tpu]"')
    leave_out_absent_tpu()
    try:
        return describe(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def describe_engine(config: EngineConfig, hf_config: dict[str, Any], topology: Topology) -> DescribedEngine:
    """The engine that these settings make of the model on the slice; ConfigError says what does not fit."""
    try:
        architecture = find_architecture(hf_config)
        model_config = architecture.Config.from_hf(hf_config)
    except ValueError as error:
        raise ConfigError(f"{config.model.model}: {error}") from error
    platform, shards = PLATFORMS["tpu"], config.parallel.tensor_parallel_size
    if shards > topology.num_devices:
        raise ConfigError(
            f"tensor_parallel_size={shards} takes more devices than the {topology.num_devices} of {topology.name}."
        )
    was_auto = config.compile.attention_backend == "auto"
    config = resolve(config, platform)
    max_model_len = settle_max_model_len(config.model.max_model_len, model_config.max_position_embeddings)
    dtype = platform.dtype(config.model.dtype, checkpoint_dtype(hf_config))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
    model: Any = nnx.eval_shape(
        lambda: architecture.Model(
            model_config,
            dtype=jnp.dtype(dtype),
            layer_execution=config.compile.layer_execution,
            max_model_len=max_model_len,
            rngs=nnx.Rngs(0),
            tensor_shards=shards,
        )  # fmt: skip
    )
    mesh = make_mesh(topology.devices, tensor=shards)
    with jax.set_mesh(mesh):
        config = settle_attention(config, model, max_model_len, was_auto=was_auto)
    specs = ProgramSpecs(model, config, num_pages=1, max_model_len=max_model_len, mesh=mesh)
    weight_bytes = sum(map(shard_bytes, specs.weights))
    num_pages = _count_pages(config, model, max_model_len, topology, weight_bytes)
    return DescribedEngine(
        config=config,
        model=model,
        topology=topology,
        mesh=mesh,
        max_model_len=max_model_len,
        specs=ProgramSpecs(model, config, num_pages=num_pages, max_model_len=max_model_len, mesh=mesh),
        weight_bytes=weight_bytes,
        table_bytes=shard_bytes(specs.weights[0]) if model.head is not None else 0,
        page_bytes=sum(map(shard_bytes, jax.tree.leaves(specs.pool))),
        expert_bytes=_expert_bytes(model, specs),
        routed_share=max((m.router.top_k / m.experts.num_experts for m in _expert_layers(model)), default=0.0),
    )


def shard_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of the part of an array that one device holds."""
    shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


def _expert_layers(model: Any) -> list[SparseMLP]:
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, SparseMLP)]


def _expert_bytes(model: Any, specs: ProgramSpecs) -> int:
    variables = jax.tree.leaves(nnx.split(model)[1], is_leaf=lambda node: isinstance(node, nnx.Variable))
    axes = [variable.get_metadata("out_sharding") for variable in variables]
    return sum(
        shard_bytes(weight)
        for weight, names in zip(specs.weights, axes, strict=True)
        if not EXPERT_AXES.isdisjoint(names)
    )


def _count_pages(config: EngineConfig, model: Any, max_model_len: int, topology: Topology, weight_bytes: int) -> int:
    """Pages that the engine would find room for, as it counts them: a share of the memory, less the weights."""
    hbm, shards = topology.chip.hbm_bytes, config.parallel.tensor_parallel_size
    allowed = int(hbm * config.cache.gpu_memory_utilization)
    spec = model.cache_spec
    one_page = page_bytes(config, spec, max_model_len)
    fixed = config.cache.kv_cache_memory_bytes
    room = fixed if fixed is not None else allowed - weight_bytes
    if weight_bytes + one_page // shards > allowed and config.cache.num_gpu_blocks_override is None:
        raise ConfigError(
            f"The weights take {weight_bytes / 2**30:.2f} GiB a device. {topology.name} has {hbm / 2**30:.2f}, "
            f"gpu_memory_utilization={config.cache.gpu_memory_utilization} of it is {allowed / 2**30:.2f}: "
            f"{_smallest_slice(weight_bytes * shards, shards, config, topology)}"
        )
    return count_pages(config, spec, max_model_len, lambda: room)


def _smallest_slice(total_bytes: int, shards: int, config: EngineConfig, topology: Topology) -> str:
    """Advice: the least number of devices of this generation that would do, by halving the weights with them."""
    chip = topology.chip
    needed = shards
    while total_bytes / needed > 0.95 * chip.hbm_bytes * config.cache.gpu_memory_utilization:
        needed *= 2
    if needed == shards:
        return "raise gpu_memory_utilization, or use twice as many devices."
    if needed <= topology.num_devices:
        return f"--tensor-parallel-size {needed} would fit."
    chips = needed // chip.devices_per_chip
    return f"a {chip.generation} slice of {chips} chips with --tensor-parallel-size {needed} would fit."
