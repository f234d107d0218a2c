"""What of vLLM's server paxserve has: a page made from the code, beside the names that vLLM has.

`python -m paxserve.compatibility docs/vllm_surface.json > docs/compatibility.md` writes it; a test compares.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from paxserve.arguments import VLLM_VARIABLES, known_flags
from paxserve.config import EngineConfig, ModelConfig
from paxserve.entrypoints import admin
from paxserve.entrypoints.app import PACKAGES, routers
from paxserve.entrypoints.http_metrics import HttpMetrics
from paxserve.entrypoints.protocol.chat import ChatRequest
from paxserve.entrypoints.protocol.completions import CompletionRequest
from paxserve.entrypoints.protocol.fields import HARMLESS, REASONS
from paxserve.entrypoints.protocol.fields import NEUTRAL as NEUTRAL_FIELDS
from paxserve.entrypoints.protocol.messages import MessagesRequest
from paxserve.entrypoints.protocol.responses import ResponsesRequest
from paxserve.messages import ModelInfo
from paxserve.metrics import Metrics
from paxserve.vllm_flags import IMPLIED, NEUTRAL, REFUSED

HEAD = """\
# Beside vLLM

Made by `make readme` from the code and from the names of vLLM {version}'s server (`docs/vllm_surface.json`).
*Supported* is as in vLLM, *differs* is supported with the difference that is named, *accepted* changes nothing,
*refused* is answered with an error that names it, and *absent* is not there (404, no such metric, a variable that is
not read).
"""

DOCUMENTS = ("GET /docs", "GET /redoc", "GET /openapi.json")
"""Routes that FastAPI adds by itself."""


BODIES: dict[str, type[BaseModel]] = {
    "completion fields": CompletionRequest,
    "chat fields": ChatRequest,
    "responses fields": ResponsesRequest,
    "messages fields": MessagesRequest,
}
"""What each kind of fields is declared in."""


class Status(NamedTuple):
    """How something stands, and why."""

    word: str
    reason: str = ""


class Surface:
    """The names of vLLM's server, with notes where paxserve differs."""

    def __init__(self, path: Path) -> None:
        self.names: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        self.version: str = self.names.pop("version")
        self.absent: dict[str, str] = self.names.pop("absent")
        self.differences: dict[str, str] = self.names.pop("differences")

    def rows(self) -> Iterator[tuple[str, str, Status]]:
        """Each name: its kind, itself, how it stands."""
        routes, metrics = our_routes(), our_metrics()
        for kind, names in self.names.items():
            for name in names:
                if kind == "routes":
                    status = Status("supported") if name in routes else self._absent(name)
                elif kind == "metrics":
                    status = Status("supported") if name in metrics else self._absent(name)
                elif kind == "flags":
                    status = flag_status(name)
                elif kind == "environment":
                    status = self._variable(name)
                else:
                    status = field_status(name, BODIES[kind].model_fields)
                if status.word == "supported" and name in self.differences:
                    status = Status("differs", self.differences[name])
                yield kind, name, status

    def _variable(self, name: str) -> Status:
        flag = VLLM_VARIABLES.get(name) or ("api_key" if name == "VLLM_API_KEY" else None)
        return Status("supported", f"as --{flag.replace('_', '-')}") if flag else self._absent(name)

    def _absent(self, name: str) -> Status:
        return Status("absent", self.absent[name])


def our_routes() -> set[str]:
    """Every route of a server with an admin key, as "METHOD path"."""
    routes = [route for router in routers(*PACKAGES, admin) for route in router.routes]
    declared = [route for route in routes if isinstance(route, APIRoute)]
    return {f"{method} {route.path}" for route in declared for method in route.methods or ()} | set(DOCUMENTS)


def our_metrics() -> set[str]:
    """Every metric of a server."""
    info = ModelInfo(
        max_model_len=16, max_sequence_tokens=16, vocab_size=2, num_pages=1, page_size=16, max_num_seqs=1,
        max_num_batched_tokens=1, eos_token_ids=[], generation_config={}, dtype="float32", num_programs=0,
        startup_seconds={},
    )  # fmt: skip
    metrics = Metrics("m", EngineConfig(model=ModelConfig(model="m")), info)
    HttpMetrics(metrics.registry)
    return names_in(metrics.registry)


def names_in(registry: CollectorRegistry) -> set[str]:
    """The names of a registry's metrics."""
    return {metric.name for metric in registry.collect()}


def flag_status(name: str) -> Status:
    """How a flag stands."""
    if name == "config" or name.replace("-", "_") in known_flags():
        return Status("supported")
    if name in IMPLIED:
        return Status("accepted", IMPLIED[name])
    neutral = " and ".join(NEUTRAL.get(name, ()))
    return Status("refused", REFUSED[name] + (f" ({neutral} may be given)" if neutral else ""))


def field_status(name: str, declared: Mapping[str, Any]) -> Status:
    """How a field of a request stands."""
    if name in declared:
        return Status("supported")
    if name in HARMLESS:
        return Status("accepted", "it changes no answer")
    neutral = ", ".join(json.dumps(value) for value in NEUTRAL_FIELDS[name])
    reason = REASONS.get(name, "it is not offered")
    return Status("refused", f"{reason} (null{f' and {neutral}' if neutral else ''} may be sent)")


def page(surface: Surface) -> str:
    """The page as Markdown."""
    lines = [HEAD.format(version=surface.version)]
    last = None
    for kind, name, status in surface.rows():
        if kind != last:
            lines += ["", f"## {kind.capitalize()}", "", "| name | status | |", "| --- | --- | --- |"]
            last = kind
        shown = f"--{name}" if kind == "flags" else name
        lines.append(f"| `{shown}` | {status.word} | {status.reason.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page on standard output."""
    sys.stdout.write(page(Surface(Path(sys.argv[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
