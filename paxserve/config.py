"""Every setting of the engine, checked once, in frozen dataclasses (the server's are in `server_config`).

Names, defaults and meanings follow vLLM's flags. Command-line flags, `--help` and the README's
table are generated from these fields and the docstrings under them.
"""

import dataclasses
import difflib
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from paxserve.errors import ConfigError

SIZE_SUFFIXES = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
KV_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""Types of the KV pool whose flag's value is not the name that numpy and jax have for them."""
SIZE_FIELDS = {"max_model_len", "kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens"}
"""Fields that accept what `parse_size` does."""

LONG_PREFILL_SHARE = 0.04
"""Part of the context that makes a prompt long where nothing else is said, as in vLLM."""


def parse_size(value: int | str | float, name: str) -> int:
    """A number from forms such as 4096, "32k" (32,000), "32K" (32,768) or "1.5G"."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)", str(value).strip())
    if not match:
        raise ConfigError(f"{name} must be a number such as 4096, 32k or 1.5G, got {value!r}.")
    return int(float(match[1]) * SIZE_SUFFIXES[match[2]])


def cache_root() -> Path:
    """The folder for downloaded demo models and compiled programs (`PAXSERVE_CACHE`)."""
    return Path(os.environ.get("PAXSERVE_CACHE") or Path.home() / ".cache" / "paxserve")


def flag_environment() -> dict[str, str]:
    """The environment's variables that may stand for flags: ours and vLLM's, but for those that are read elsewhere."""
    elsewhere = ("PAXSERVE_CACHE", "PAXSERVE_API_KEY", "VLLM_API_KEY")
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PAXSERVE_", "VLLM_")) and name not in elsewhere
    }


def environment_api_key() -> str | None:
    """The key that servers ask for, and our clients present, when no flag names one."""
    return os.environ.get("PAXSERVE_API_KEY") or os.environ.get("VLLM_API_KEY") or None


def _expect(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(f"{name} must be {expected}, got {got!r}.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is run, and in what precision."""

    model: str
    """A Hugging Face folder or hub name, a .gguf file, or the alias smollm2-135m-instruct."""
    runner: Literal["auto", "generate", "pooling"] = "auto"
    """What the model is run for: text, or vectors and scores; auto is what the checkpoint says it is made for."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the checkpoint's config.json to set otherwise (JSON)."""
    pooler_config: dict[str, Any] = field(default_factory=dict)
    """How a pooling model pools, instead of what the checkpoint says: pooling_type, use_activation (JSON)."""
    tokenizer: str | None = None
    """Folder, hub name or .gguf file to take the tokenizer from; the model's own by default."""
    skip_tokenizer_init: bool = False
    """Work on token ids only: no tokenizer is loaded, no text comes back."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    hf_token: str | None = None
    """Token for the hub; by default the one that huggingface_hub finds."""
    download_dir: str | None = None
    """Where hub downloads are kept; huggingface_hub's own cache by default."""
    load_format: Literal["auto", "safetensors", "gguf", "orbax", "dummy"] = "auto"
    """Where weights come from; dummy fills them with random numbers (for benchmarks)."""
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = "auto"
    """Type of weights and activations; auto is float32 on CPU, else the checkpoint's type."""
    seed: int = 0
    """Seed of everything random that no request seeds itself."""
    max_model_len: int | None = None
    """Most tokens in a sequence, prompt and output (accepts 32k); by default the model's own."""
    max_logprobs: int = 20
    """Most log-probabilities a position that a request may ask for; -1 allows the whole vocabulary."""
    generation_config: str = "auto"
    """Source of default sampling values: auto (the model's generation_config.json), vllm (neutral), or a folder."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Default sampling values that win over the model's (JSON)."""
    trust_remote_code: bool = False
    """Always refused: paxserve never runs code from a checkpoint."""

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            object.__setattr__(self, "max_model_len", parse_size(self.max_model_len, "max_model_len"))
            if self.max_model_len == -1:
                object.__setattr__(self, "max_model_len", None)
            else:
                _expect(self.max_model_len >= 1, "max_model_len", "at least 1", self.max_model_len)
        _expect(self.max_logprobs >= -1, "max_logprobs", "-1 or at least 0", self.max_logprobs)
        if self.trust_remote_code:
            raise ConfigError("trust_remote_code is not supported: paxserve never runs code from a checkpoint.")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV pool."""

    block_size: int = 0
    """Tokens a KV page holds; 0 stands for 16, on TPU for the fewest from 64 up that its attention kernels take."""
    gpu_memory_utilization: float = 0.92
    """Share of the accelerator's memory to use for weights, KV pool and temporaries."""
    kv_cache_memory_bytes: int | None = None
    """KV pool of each device (accepts 2G); by default what gpu_memory_utilization leaves, on CPU 1.1 GiB for all."""
    num_gpu_blocks_override: int | None = None
    """Number of KV pages, whatever the memory."""
    enable_prefix_caching: bool = True
    """Keep full pages of finished requests and reuse them for prompts that start alike."""
    kv_offloading_size: float = 0.0
    """GiB of host memory for cached pages that the pool has no room for; they come back instead of being recomputed."""
    kv_offloading_disk_path: str | None = None
    """Folder for the pages that go to host memory, found again after a restart; needs kv_offloading_size."""
    kv_offloading_disk_size: float = 16.0
    """GiB of that folder; the pages used least recently are deleted."""
    disable_hybrid_kv_cache_manager: bool = False
    """Have layers with a sliding window or chunks keep all pages of a sequence, as layers that see everything do."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "int8"] = "auto"
    """Type of the KV pool; auto is the model's dtype, fp8 is fp8_e4m3. fp8 and int8 keep a scale a token and head."""

    def __post_init__(self) -> None:
        _expect(0 <= self.block_size <= 4096, "block_size", "between 0 and 4096", self.block_size)
        _expect(
            0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", "in (0, 1]", self.gpu_memory_utilization
        )
        if self.kv_cache_memory_bytes is not None:
            size = parse_size(self.kv_cache_memory_bytes, "kv_cache_memory_bytes")
            object.__setattr__(self, "kv_cache_memory_bytes", size)
        _expect(self.kv_offloading_size >= 0, "kv_offloading_size", "at least 0", self.kv_offloading_size)
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ConfigError("kv_offloading_size needs enable_prefix_caching: pages are found by what they hold.")
        size = self.kv_offloading_disk_size
        _expect(size > 0, "kv_offloading_disk_size", "above 0", size)
        if self.kv_offloading_disk_path is not None and not self.kv_offloading_size:
            raise ConfigError("kv_offloading_disk_path needs kv_offloading_size: pages go to disk from host memory.")
        pages = self.num_gpu_blocks_override
        _expect(pages is None or pages >= 1, "num_gpu_blocks_override", "at least 1", pages)


MAX_SCHEDULER_STEPS = 64
"""Decode steps in one program: more would let arrivals wait for seconds."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How requests share the steps of the engine."""

    max_num_seqs: int | None = None
    """Most requests running at once; by default 256, on CPU 64."""
    max_num_batched_tokens: int | None = None
    """Most tokens a step computes (accepts 2k); by default 2048, on CPU 512."""
    enable_chunked_prefill: bool = True
    """Split long prompts over several steps, so that running requests are not held up."""
    async_scheduling: bool = True
    """Launch a step before the tokens of the one before it have been read."""
    num_scheduler_steps: int = 1
    """Most decode steps run as one program while nobody waits; their tokens come together, arrivals wait for them."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Who goes first: fcfs is order of arrival; priority looks at the requests' priority (lowest first) before that."""
    max_num_partial_prefills: int = 1
    """Most prompts that are computed in parts at the same time."""
    max_long_partial_prefills: int = 1
    """Most of these that may be long; fewer lets short prompts overtake long ones."""
    long_prefill_token_threshold: int = 0
    """Prompts above it are long, and a request computes no more a step; 0: off (4 % of the context if several run)."""
    short_prompt_share: float = 0.25
    """Share of a step for waiting prompts that fit into it whole, ahead of those computed in parts; 0: for none."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_size(value, name))
                _expect(getattr(self, name) >= 1, name, "at least 1", value)
        most, most_long = self.max_num_partial_prefills, self.max_long_partial_prefills
        _expect(most >= 1, "max_num_partial_prefills", "at least 1", most)
        _expect(1 <= most_long <= most, "max_long_partial_prefills", f"between 1 and {most}", most_long)
        threshold = self.long_prefill_token_threshold
        _expect(threshold >= 0, "long_prefill_token_threshold", "at least 0", threshold)
        most_steps = self.num_scheduler_steps
        _expect(
            1 <= most_steps <= MAX_SCHEDULER_STEPS,
            "num_scheduler_steps",
            f"between 1 and {MAX_SCHEDULER_STEPS}",
            most_steps,
        )
        share = self.short_prompt_share
        _expect(0 <= share < 1, "short_prompt_share", "at least 0 and less than 1", share)
        if not self.enable_chunked_prefill and (most > 1 or threshold):
            raise ConfigError(
                "max_num_partial_prefills and long_prefill_token_threshold split prompts: they need chunked prefill."
            )

    def long_prefill_threshold(self, max_model_len: int) -> int:
        """`long_prefill_token_threshold`, or what stands for it when several prompts are to be computed in parts."""
        if self.long_prefill_token_threshold == 0 and self.max_num_partial_prefills > 1:
            return max(1, int(max_model_len * LONG_PREFILL_SHARE))
        return self.long_prefill_token_threshold

    @property
    def limits(self) -> tuple[int, int]:
        """`max_num_seqs` and `max_num_batched_tokens`, once the platform's defaults have filled them in."""
        assert self.max_num_seqs is not None, "unresolved configuration"
        assert self.max_num_batched_tokens is not None, "unresolved configuration"
        return self.max_num_seqs, self.max_num_batched_tokens


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is spread over devices."""

    tensor_parallel_size: int = 1
    """Number of devices that share every layer; heads and vocabularies that do not divide are padded."""

    def __post_init__(self) -> None:
        _expect(self.tensor_parallel_size >= 1, "tensor_parallel_size", "at least 1", self.tensor_parallel_size)


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Which programs are compiled, and how attention, experts and layers are lowered."""

    attention_backend: Literal["auto", "reference", "xla", "tpu", "interpret"] = "auto"
    """Implementation of paged attention; auto is tpu on TPU (xla where its kernels refuse a model), else xla."""
    expert_backend: Literal["auto", "reference", "ragged", "cpu", "tpu", "interpret"] = "auto"
    """Products of mixture-of-experts layers; auto is cpu on CPU, tpu on TPU, else XLA's ragged."""
    layer_execution: Literal["auto", "unrolled", "scanned", "looped"] = "auto"
    """Layers one after another in the program, a loop over stacked weights, or a loop over separate ones (CPU)."""
    compile_sizes: list[int] = field(default_factory=list)
    """Token counts to compile steps for, instead of the platform's ladder; the whole budget always joins them."""
    compilation_cache_dir: str | None = None
    """Folder of compiled programs, reused by later starts; by default under PAXSERVE_CACHE, "" turns it off."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All that an engine needs to know."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)

    @property
    def kv_dtype(self) -> str:
        """numpy's name of the KV pool's type, once the model's dtype is resolved."""
        name = self.cache.kv_cache_dtype
        return self.model.dtype if name == "auto" else KV_DTYPES.get(name, name)

    @classmethod
    def from_flags(cls, **flags: Any) -> Self:
        """The configuration from flat names, as `LLM(...)` and the command line give them.

        Raises `ConfigError` for a name that no section knows, with the closest one that exists.
        """
        sections: dict[str, type] = {f.name: f.type for f in fields(cls)}  # type: ignore[misc]
        owner = {f.name: section for section, kind in sections.items() for f in fields(kind)}
        values: dict[str, dict[str, Any]] = {section: {} for section in sections}
        for name, value in flags.items():
            if name not in owner:
                close = difflib.get_close_matches(name, owner, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise ConfigError(f"Unknown argument {name!r}.{hint}")
            values[owner[name]][name] = value
        for section, kind in sections.items():
            check_types(kind, values[section])
        return cls(**{section: kind(**values[section]) for section, kind in sections.items()})


def check_types(kind: type, values: dict[str, Any]) -> None:
    """Raise `ConfigError` when a value's type or choice does not fit the field of dataclass `kind`."""
    for f in dataclasses.fields(kind):
        if f.name not in values or f.name in SIZE_FIELDS:
            continue
        value, annotation = values[f.name], f.type
        choices = getattr(annotation, "__args__", ()) if str(annotation).startswith("typing.Literal") else ()
        if choices:
            _expect(value in choices, f.name, f"one of {', '.join(map(str, choices))}", value)
        elif annotation is bool:
            _expect(isinstance(value, bool), f.name, "true or false", value)
        elif annotation in (int, int | None):
            ok = isinstance(value, int) and not isinstance(value, bool)
            _expect(ok or (value is None and annotation is not int), f.name, "an integer", value)
        elif annotation in (str, str | None):
            _expect(isinstance(value, str) or (value is None and annotation is not str), f.name, "a string", value)
