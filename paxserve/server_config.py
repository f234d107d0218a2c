"""Every setting of the HTTP server, one dataclass a concern, joined in `ServerConfig`.

As in `config`, flags, `--help` and the README's table are made from the fields and the docstrings under them.
"""

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from paxserve.config import environment_api_key
from paxserve.errors import ConfigError
from paxserve.sampling_params import MAX_BAD_WORDS, MAX_N

MAX_FRONTS = 256
"""Most front processes: far more than one engine can feed."""

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"


@dataclass(frozen=True, kw_only=True)
class ListenConfig:
    """Where the server listens, and to whom."""

    host: str | None = None
    """Address to listen on; by default 127.0.0.1, or every interface once there is an API key."""
    port: int = 8000
    """Port to listen on; 0 picks a free one and prints it."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead of host and port."""
    root_path: str | None = None
    """Path under which a proxy shows the server; the proxy cuts it off."""
    ssl_keyfile: str | None = None
    """File with the private key, for HTTPS."""
    ssl_certfile: str | None = None
    """File with the certificate and its chain, for HTTPS."""
    ssl_ca_certs: str | None = None
    """File with the certificates that vouch for clients' ones."""
    ssl_cert_reqs: int = 0
    """Whether clients must show a certificate: 0 no, 1 if they have one, 2 yes."""
    timeout_keep_alive: int = 5
    """Seconds that a connection without a request is kept."""
    api_key: list[str] = field(default_factory=list)
    """Keys that clients may present; with none, the server is open (also from PAXSERVE_API_KEY, VLLM_API_KEY)."""
    admin_api_key: list[str] = field(default_factory=list)
    """Keys for the admin routes (sleep, pause, profile ...), which exist only if there is such a key."""
    open_metrics: bool = False
    """Serve /metrics without a key even if the others need one."""
    open_version: bool = False
    """Serve /version without a key even if the others need one."""
    allowed_origins: list[str] = field(default_factory=list)
    """Web origins whose pages may read answers (CORS); none by default, * is all."""
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    """Methods that pages of the allowed origins may use."""
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    """Headers that pages of the allowed origins may send."""
    allow_credentials: bool = False
    """Let pages of the allowed origins send cookies and the like."""
    disable_fastapi_docs: bool = False
    """Do not serve /docs, /redoc and /openapi.json."""


@dataclass(frozen=True, kw_only=True)
class LimitConfig:
    """What one request may ask for; more is refused before anything is allocated."""

    max_request_body_bytes: int = 32 * 2**20
    """Largest request body accepted."""
    max_json_depth: int = 64
    """Deepest nesting of objects and lists in a body."""
    request_body_timeout: float = 60.0
    """Seconds that a request's body may take to arrive."""
    h11_max_incomplete_event_size: int = 256 * 2**10
    """Most bytes of a request's line and headers."""
    h11_max_header_count: int = 256
    """Most headers of a request."""
    max_prompts: int = 1024
    """Most prompts in a completion request."""
    max_choices: int = 2048
    """Most choices in one answer: prompts times n."""
    max_n: int = MAX_N
    """Most choices a prompt (n)."""
    max_stop_strings: int = 4
    """Most stop strings in a request."""
    max_bad_words: int = MAX_BAD_WORDS
    """Most bad_words in a request."""
    max_num_queued_reqs: int | None = None
    """Most requests that may wait to be begun; more get a 429 with Retry-After."""
    max_num_queued_tokens: int | None = None
    """Most prompt tokens of waiting requests; more get a 429 with Retry-After."""
    queue_full_status: int = 429
    """What a full queue answers: 429, which clients know as a rate limit, or 503 as in vLLM; with Retry-After."""
    request_timeout: float = 0.0
    """Seconds after which a request is ended, finished or not (finish_reason abort); 0 is never."""
    chat_template_timeout: float = 30.0
    """Seconds that a chat template may take to render; then its process is killed."""
    max_prompt_characters: int = 16 * 2**20
    """Most characters that a chat template may make of a conversation."""
    trust_request_chat_template: bool = False
    """Render chat templates that requests bring along, instead of refusing them."""


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """What requests are answered with."""

    served_model_name: list[str] = field(default_factory=list)
    """Names that clients may use for the model; by default the model as given."""
    chat_template: str | None = None
    """A Jinja chat template, or a file with one, instead of the tokenizer's."""
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """How the template gets messages' contents: one string, a list of parts (openai), or what it seems to expect."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template that requests may override (JSON)."""
    response_role: str = "assistant"
    """Role that chat answers carry."""
    exclude_tools_when_tool_choice_none: bool = False
    """Do not show tools to the template when tool_choice is none."""
    return_tokens_as_token_ids: bool = False
    """Show tokens in log-probabilities as token_id:N unless a request says otherwise."""
    stream_interval: int = 1
    """Fewest tokens in a chunk of a stream, but for the first and the last one."""
    sse_keep_alive_interval: float = 0.0
    """Seconds of silence in a stream after which a comment is sent, lest proxies close it; 0 is never."""
    enable_force_include_usage: bool = False
    """End every stream with a usage chunk, asked for or not."""
    enable_prompt_tokens_details: bool = True
    """Tell how many prompt tokens the prefix cache had (usage.prompt_tokens_details)."""
    enable_request_id_headers: bool = False
    """Send X-Request-Id back with every answer, a random one if the request had none."""
    enable_responses_store: bool = False
    """Keep responses (/v1/responses) in memory, to be retrieved, continued and run in the background."""
    max_stored_responses: int = 1000
    """Most responses that are kept; the oldest make room."""
    enable_tokenizer_info_endpoint: bool = False
    """Serve /tokenizer_info, which tells the tokenizer's configuration and chat template."""
    fingerprint_mode: Literal["full", "hash", "custom", "none"] = "full"
    """What system_fingerprint is: version and a hash of the configuration, the hash alone, a given value, or null."""
    fingerprint_value: str | None = None
    """The system_fingerprint with fingerprint_mode=custom."""


@dataclass(frozen=True, kw_only=True)
class OperationConfig:
    """How the server logs, and how it stops."""

    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "info"
    """Log level of the HTTP server."""
    log_format: Literal["text", "json"] = "text"
    """How the log is written: lines to read, or one JSON object a line."""
    disable_uvicorn_access_log: bool = False
    """Do not log each request."""
    disable_access_log_for_endpoints: list[str] = field(default_factory=list)
    """Paths whose requests are not logged, such as /health and /metrics."""
    otlp_traces_endpoint: str | None = None
    """Address of an OpenTelemetry collector that gets a trace of each request (OTLP over HTTP, as JSON)."""
    api_server_count: int = 1
    """Front processes that answer HTTP on the one port, in front of the one engine."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM; meanwhile /health and new requests get 503."""


SERVER_SECTIONS: dict[type, str] = {
    ListenConfig: "HTTP server: access",
    LimitConfig: "HTTP server: limits",
    AnswerConfig: "HTTP server: answers",
    OperationConfig: "HTTP server: operation",
}
"""The parts of `ServerConfig`, in the order in which help and README show them."""

AT_LEAST_ONE = (
    "max_request_body_bytes", "max_json_depth", "h11_max_incomplete_event_size", "h11_max_header_count",
    "max_prompts", "max_choices", "max_prompt_characters", "stream_interval", "max_stored_responses",
)  # fmt: skip
ABOVE_ZERO = ("request_body_timeout", "chat_template_timeout")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ListenConfig, LimitConfig, AnswerConfig, OperationConfig):
    """The HTTP server in front of the engine."""

    def __post_init__(self) -> None:
        if not self.api_key:
            key = environment_api_key()
            object.__setattr__(self, "api_key", [key] if key else [])
        if self.host is None:
            object.__setattr__(self, "host", EVERYWHERE if self.api_key else LOOPBACK)
        self._expect(self.ssl_cert_reqs in (0, 1, 2), "ssl_cert_reqs", "0, 1 or 2")
        self._expect(self.timeout_keep_alive >= 1, "timeout_keep_alive", "at least 1")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile need each other.")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            self._expect(path is None or os.access(path, os.R_OK), name, "a file that can be read")
        self._expect(not self.root_path or self.root_path.startswith("/"), "root_path", "a path such as /models")
        self._expect(0 <= self.port < 65536, "port", "between 0 and 65535")
        self._expect(1 <= self.api_server_count <= MAX_FRONTS, "api_server_count", f"between 1 and {MAX_FRONTS}")
        self._expect(self.shutdown_timeout >= 0, "shutdown_timeout", "at least 0")
        for name in AT_LEAST_ONE:
            self._expect(getattr(self, name) >= 1, name, "at least 1")
        for name in ABOVE_ZERO:
            self._expect(getattr(self, name) > 0, name, "greater than 0")
        self._expect(1 <= self.max_n <= MAX_N, "max_n", f"between 1 and {MAX_N}")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            self._expect(getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        self._expect(self.queue_full_status in (429, 503), "queue_full_status", "429 or 503")
        self._expect(self.request_timeout >= 0, "request_timeout", "at least 0")
        self._expect(self.sse_keep_alive_interval >= 0, "sse_keep_alive_interval", "at least 0")
        if (self.fingerprint_mode == "custom") != (self.fingerprint_value is not None):
            raise ConfigError("fingerprint_mode=custom and fingerprint_value need each other.")
        self._expect(self.max_stop_strings >= 0, "max_stop_strings", "at least 0")
        self._expect(0 <= self.max_bad_words <= MAX_BAD_WORDS, "max_bad_words", f"between 0 and {MAX_BAD_WORDS}")
        endpoint = self.otlp_traces_endpoint
        is_http = endpoint is None or endpoint.startswith(("http://", "https://"))
        self._expect(is_http, "otlp_traces_endpoint", "an address such as http://collector:4318")
        for name in ("api_key", "admin_api_key"):
            # The message must not show a key.
            if not all(key.strip() == key != "" for key in getattr(self, name)):
                raise ConfigError(f"{name} must be one or several keys, none empty or with white space around it.")
        if set(self.api_key) & set(self.admin_api_key):
            raise ConfigError("admin_api_key must differ from api_key: whoever has the one would have the other.")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("allow_credentials needs allowed_origins that are named: with * any page could log in.")

    @property
    def log_level(self) -> str:
        """Python's name of the log's level."""
        return "DEBUG" if self.uvicorn_log_level == "trace" else self.uvicorn_log_level.upper()

    def _expect(self, condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise ConfigError(f"{name} must be {expected}, got {getattr(self, name)!r}.")
