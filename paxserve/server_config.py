"""Every setting of the HTTP server, one dataclass a concern, joined in `ServerConfig`.

As in `config`, flags, `--help` and the README's table are made from the fields and the docstrings under them.
"""

from dataclasses import dataclass, field
from typing import Literal

from paxserve.config import environment_api_key
from paxserve.errors import ConfigError
from paxserve.sampling_params import MAX_BAD_WORDS, MAX_N

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"


@dataclass(frozen=True, kw_only=True)
class ListenConfig:
    """Where the server listens, and to whom."""

    host: str | None = None
    """Address to listen on; by default 127.0.0.1, or every interface once there is an API key."""
    port: int = 8000
    """Port to listen on; 0 picks a free one and prints it."""
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
    response_role: str = "assistant"
    """Role that chat answers carry."""


@dataclass(frozen=True, kw_only=True)
class OperationConfig:
    """How the server logs, and how it stops."""

    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "info"
    """Log level of the HTTP server."""
    disable_uvicorn_access_log: bool = False
    """Do not log each request."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""


SERVER_SECTIONS: dict[type, str] = {
    ListenConfig: "HTTP server: access",
    LimitConfig: "HTTP server: limits",
    AnswerConfig: "HTTP server: answers",
    OperationConfig: "HTTP server: operation",
}
"""The parts of `ServerConfig`, in the order in which help and README show them."""

AT_LEAST_ONE = (
    "max_request_body_bytes", "max_json_depth", "h11_max_incomplete_event_size", "h11_max_header_count",
    "max_prompts", "max_choices", "max_prompt_characters",
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
        self._expect(0 <= self.port < 65536, "port", "between 0 and 65535")
        self._expect(self.shutdown_timeout >= 0, "shutdown_timeout", "at least 0")
        for name in AT_LEAST_ONE:
            self._expect(getattr(self, name) >= 1, name, "at least 1")
        for name in ABOVE_ZERO:
            self._expect(getattr(self, name) > 0, name, "greater than 0")
        self._expect(1 <= self.max_n <= MAX_N, "max_n", f"between 1 and {MAX_N}")
        self._expect(self.max_stop_strings >= 0, "max_stop_strings", "at least 0")
        self._expect(0 <= self.max_bad_words <= MAX_BAD_WORDS, "max_bad_words", f"between 0 and {MAX_BAD_WORDS}")
        for name in ("api_key", "admin_api_key"):
            # The message must not show a key.
            if not all(key.strip() == key != "" for key in getattr(self, name)):
                raise ConfigError(f"{name} must be one or several keys, none empty or with white space around it.")
        if set(self.api_key) & set(self.admin_api_key):
            raise ConfigError("admin_api_key must differ from api_key: whoever has the one would have the other.")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("allow_credentials needs allowed_origins that are named: with * any page could log in.")

    def _expect(self, condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise ConfigError(f"{name} must be {expected}, got {getattr(self, name)!r}.")
