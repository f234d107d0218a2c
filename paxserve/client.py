"""What every client of an OpenAI-compatible server here needs: addresses, event lines, error texts."""

import json
from typing import Any
from urllib.parse import urlsplit

from paxserve.errors import ConfigError

LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def server_root(url: str) -> str:
    """The server's address without `/v1` and without a slash at its end. Raises `ConfigError` if it is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"The server's address must be like http://127.0.0.1:8000, got {url!r}.")
    return url.rstrip("/").removesuffix("/v1")


def client_options(root: str, api_key: str | None, timeout: float | None = None) -> dict[str, Any]:
    """Options for an httpx client: the key's header, the time limit, and no proxy for a server on this machine."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return {"headers": headers, "timeout": timeout, "trust_env": urlsplit(root).hostname not in LOOPBACK}


class LineSplitter:
    """Whole lines out of chunks of bytes. Only a newline ends one: httpx would also split at U+2028 inside JSON."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that this chunk completes; what is after the last newline waits for the next."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines


def parse_event(line: str | bytes) -> dict[str, Any] | None:
    """The object that one line of an event stream carries; None for every other line and the closing `[DONE]`."""
    line = line.decode() if isinstance(line, bytes) else line
    if not line.startswith("data:"):
        return None
    body = line[len("data:") :].strip()
    return None if body == "[DONE]" else json.loads(body)


def error_text(body: bytes | str) -> str:
    """What went wrong, from the body of a failed answer, whatever its shape."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    try:
        return error_message(json.loads(text))
    except ValueError:
        return text.strip()[:500] or "no details"


def error_message(answer: Any) -> str:
    """The message in an answer or event that is, or holds, an error as OpenAI, FastAPI or vLLM shape it."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
