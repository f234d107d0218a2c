"""The engine core that fits a checkpoint: one that generates, or one that pools."""

from paxserve.config import EngineConfig
from paxserve.engine.engine_core import EngineCore
from paxserve.engine.pooling_core import PoolingCore
from paxserve.loaders.checkpoint import open_checkpoint
from paxserve.loaders.pooling_spec import resolve_pooling
from paxserve.loaders.weights import choose_architecture


def open_core(config: EngineConfig) -> EngineCore | PoolingCore:
    """The core for `config`, loaded and compiled. Raises `ConfigError` if it cannot be."""
    checkpoint = open_checkpoint(config.model)
    spec = resolve_pooling(checkpoint, *choose_architecture(checkpoint), config.model)
    return EngineCore(config, checkpoint) if spec is None else PoolingCore(config, checkpoint, spec)
