"""The messages between the front process and the engine core's process, as msgpack without pickle."""

from typing import Any, Self

import msgspec

from paxserve.config import EngineConfig
from paxserve.log import LogFormat
from paxserve.messages import DecodedTokens, EngineOutput, EngineRequest, EngineStats, ModelInfo, StepOutputs

REQUESTS = "requests"
"""Name of the socket on which the core listens."""

BOARD = "board"
"""Name of the file with the fronts' shared numbers, beside it."""


def outputs_name(front: int) -> str:
    """Name of the socket on which a front listens; the first one's is the plain name."""
    return f"outputs-{front}" if front else "outputs"


class LaunchOrder(msgspec.Struct, kw_only=True):
    """What the core process is told at birth, as one JSON line on its standard input."""

    config: EngineConfig
    core: str
    """`module:name` of the engine core's class."""
    folder: str
    """Private folder of the sockets: `requests`, `outputs`, and an `outputs-N` for each front that joins later."""
    log_format: LogFormat = "text"


class Join(msgspec.Struct, tag=True):
    """To the core: a front with this number, which none had before, is there; it is answered with `Ready`."""

    front: int


class Leave(msgspec.Struct, tag=True):
    """To the core: this front has ended; nobody waits for its requests any more."""

    front: int


class AddRequest(msgspec.Struct, tag=True, omit_defaults=True):
    """To the core: run this request of this front."""

    request: EngineRequest
    front: int = 0


class AbortRequests(msgspec.Struct, tag=True):
    """To the core: stop these requests; an index stops one choice only."""

    keys: list[tuple[str, int | None]]


class Call(msgspec.Struct, tag=True, omit_defaults=True):
    """To the core: answer this front with what this method of it returns."""

    call_id: int
    method: str
    front: int = 0


class Shutdown(msgspec.Struct, tag=True):
    """To the core: leave."""


class Ready(msgspec.Struct, tag=True):
    """From the core: everything is loaded and compiled."""

    model_info: ModelInfo


class Failed(msgspec.Struct, tag=True):
    """From the core: it cannot start, for a reason that the user can mend."""

    message: str


class Died(msgspec.Struct, tag=True):
    """From the core: a step or the start failed in a way that is a bug; it leaves."""

    reason: str


class Outputs(msgspec.Struct, tag=True):
    """From the core: what a step brought, and the state after it."""

    outputs: list[EngineOutput]
    stats: EngineStats
    decoded: DecodedTokens | None = None

    @classmethod
    def of(cls, outputs: StepOutputs | list[EngineOutput], stats: EngineStats) -> Self:
        """The message for what a core's step returned."""
        if isinstance(outputs, StepOutputs):
            return cls(outputs.listed, stats, outputs.decoded)
        return cls(outputs, stats)


class Refused(msgspec.Struct, tag=True, kw_only=True):
    """From the core: a request that it does not take."""

    request_id: str
    message: str
    param: str | None
    code: int


class Reply(msgspec.Struct, tag=True, kw_only=True):
    """From the core: the result of a `Call`."""

    call_id: int
    value: bool | EngineStats | None = None
    error: str | None = None


ToCore = Join | Leave | AddRequest | AbortRequests | Call | Shutdown
FromCore = Ready | Failed | Died | Outputs | Refused | Reply

LOOP_CALLS = {"freeze", "thaw", "stats", "check_integrity"}
"""Calls that the loop around the core answers: stop stepping, whatever there is to do, and go on; what it counts and
checks itself, with what the core does."""

CALLS = LOOP_CALLS | {"reset_prefix_cache", "sleep", "discard", "wake_up", "start_profile", "stop_profile"}
"""Methods that a `Call` may name."""

_encoder = msgspec.msgpack.Encoder()
_to_core = msgspec.msgpack.Decoder(ToCore)
_from_core = msgspec.msgpack.Decoder(FromCore)


def encode(message: ToCore | FromCore) -> bytes:
    """The message as bytes for a socket."""
    return _encoder.encode(message)


def decode_to_core(payload: bytes) -> Any:
    """A message of the front, checked field by field."""
    return _to_core.decode(payload)


def decode_from_core(payload: bytes) -> Any:
    """A message of the core, checked field by field."""
    return _from_core.decode(payload)
