"""Flags of `vllm serve` that paxserve does not have: what each is answered with, so that moving is one command away.

The names are those of vLLM 0.32; `docs/compatibility.md` shows them with all that paxserve does have.
"""

IMPLIED = {
    "enable-server-load-tracking": "the load is always counted",
    "no-enable-log-requests": "prompts are never logged",
    "disable-log-requests": "prompts are never logged",
    "no-enable-log-outputs": "answers are never logged",
    "no-trust-request-mm-kwargs": "this is a text engine",
    "no-enable-lora": "adapters are not offered",
    "no-enable-sleep-mode": "sleep needs --admin-api-key",
    "no-enable-expert-parallel": "experts are not spread",
    "no-enable-prompt-embeds": "tensors are not taken from clients",
    "no-enforce-eager": "every step is compiled",
}
"""Switches that ask for what is always so: accepted with a note that says it."""

NEUTRAL = {
    "data-parallel-size": ("1",),
    "pipeline-parallel-size": ("1",),
    "cpu-offload-gb": ("0",),
    "prefix-caching-hash-algo": ("sha256",),
    "logprobs-mode": ("raw_logprobs",),
    "tokenizer-mode": ("auto",),
    "convert": ("auto", "none"),
    "distributed-executor-backend": ("uni", "mp"),
    "mm-processor-cache-gb": ("0",),
    "limit-mm-per-prompt": ("{}",),
    "compilation-config": ("{}",),
}
"""Values of flags below that ask for what is always so: accepted with a note as well."""

NOT_YET = "it is still to come"
TEXT_ONLY = "this is a text engine"
ONE_ENGINE = "a server has one engine"
ALWAYS_COMPILED = "XLA compiles every step"
NO_CODE = "paxserve runs no code that it did not bring along"

REFUSED = {
    "tokenizer-mode": "the tokenizer's kind is read from its files",
    "tokenizer-revision": "give the tokenizer as a folder",
    "code-revision": NO_CODE,
    "hf-config-path": "edit config.json",
    "quantization": NOT_YET,
    "enforce-eager": ALWAYS_COMPILED,
    "convert": "hf_overrides sets the architecture to one that pools",
    "logprobs-mode": "log-probabilities are those of the model's own logits (raw_logprobs)",
    "enable-prompt-embeds": "tensors are not taken from clients",
    "enable-sleep-mode": "sleep needs --admin-api-key and nothing else",
    "allowed-local-media-path": TEXT_ONLY,
    "allowed-media-domains": TEXT_ONLY,
    "prefix-caching-hash-algo": "it is always sha256",
    "cpu-offload-gb": NOT_YET,
    "structured-outputs-config": NOT_YET,
    "speculative-config": NOT_YET,
    "kv-transfer-config": NOT_YET,
    "kv-events-config": NOT_YET,
    "compilation-config": "see --compile-sizes and --layer-execution",
    "limit-mm-per-prompt": TEXT_ONLY,
    "mm-processor-kwargs": TEXT_ONLY,
    "mm-processor-cache-gb": TEXT_ONLY,
    "trust-request-mm-kwargs": TEXT_ONLY,
    "logits-processors": NO_CODE,
    "middleware": NO_CODE,
    "tool-parser-plugin": NO_CODE,
    "enable-auto-tool-choice": NOT_YET,
    "tool-call-parser": NOT_YET,
    "tool-strict-level": NOT_YET,
    "reasoning-parser": NOT_YET,
    "reasoning-effort-map": NOT_YET,
    "enable-per-request-metrics": "see /metrics, and --otlp-traces-endpoint",
    "enable-log-requests": "prompts are never logged; the access log has each request's id",
    "enable-log-outputs": "answers are never logged",
    "max-log-len": "prompts are never logged",
    "lora-modules": NOT_YET,
    "enable-lora": NOT_YET,
    "max-loras": NOT_YET,
    "max-lora-rank": NOT_YET,
    "max-cpu-loras": NOT_YET,
    "pipeline-parallel-size": NOT_YET,
    "data-parallel-size": ONE_ENGINE,
    "enable-expert-parallel": NOT_YET,
    "distributed-executor-backend": ONE_ENGINE,
    "disable-log-stats": "the log has one line every ten seconds of work, and none while idle",
    "show-hidden-metrics-for-version": "no metric is hidden",
    "enable-scale-out": NOT_YET,
    "tokens-only": "see --skip-tokenizer-init",
}
"""Flags that are refused by name, each with the reason."""
