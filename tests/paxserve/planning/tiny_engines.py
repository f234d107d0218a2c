"""Described engines on CPU devices that pass for a slice: the planner's arithmetic and reports, without libtpu."""

import dataclasses
import json
from pathlib import Path

import jax

from paxserve.config import EngineConfig
from paxserve.planning.described_engine import describe_engine
from sharding.topology import CHIPS, Topology

GOLDENS = Path(__file__).parents[2] / "goldens"
GOLDEN = GOLDENS / "llama" / "config.json"
HBM = 8 << 20


def slice_of(num_devices=1, hbm_bytes=HBM, name="v6e:1x1"):
    chip = dataclasses.replace(CHIPS["v6e"], hbm_bytes=hbm_bytes)
    return Topology(name, chip, tuple(jax.devices()[:num_devices]))


def tiny_engine(topology=None, golden="llama", **flags):
    defaults = {"dtype": "float32", "attention_backend": "xla", "block_size": 8}
    defaults |= {"max_num_seqs": 4, "max_num_batched_tokens": 32}
    path = GOLDENS / golden / "config.json"
    config = EngineConfig.from_flags(model=str(path), **(defaults | flags))
    return describe_engine(config, json.loads(path.read_text()), topology or slice_of())
