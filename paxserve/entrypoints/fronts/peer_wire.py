"""The messages between fronts on their private sockets: msgpack with a fixed schema, each behind its length."""

import asyncio
import json
from typing import Any, TypeVar

import msgspec

from paxserve.entrypoints.fronts.desk import Order

LENGTH_BYTES = 4

T = TypeVar("T")


class Result(msgspec.Struct, tag=True):
    """The answer to an order."""

    text: str
    """As JSON: numbers of clients may be larger than msgpack's."""

    @classmethod
    def of(cls, value: Any) -> "Result":
        """The message for a value."""
        return cls(json.dumps(value))

    @property
    def value(self) -> Any:
        """The value."""
        return json.loads(self.text)


class Piece(msgspec.Struct, tag=True):
    """A part of an answer that comes in parts; an empty one is the last."""

    content: bytes


class Refusal(msgspec.Struct, tag=True):
    """The `RequestError` that the order ended with."""

    message: str
    param: str | None
    code: int


class Failure(msgspec.Struct, tag=True):
    """The order ended with another error, which the log of the front that had it tells."""

    message: str


Answer = Result | Piece | Refusal | Failure

_encoder = msgspec.msgpack.Encoder()
orders: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Order)
answers: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)


async def read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The next message. Raises `asyncio.IncompleteReadError` (an `EOFError`) when the other side has gone."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
    return decoder.decode(await reader.readexactly(length))


async def write(writer: asyncio.StreamWriter, message: Order | Answer) -> None:
    """Send a message; waits while the other side does not read."""
    payload = _encoder.encode(message)
    writer.write(len(payload).to_bytes(LENGTH_BYTES) + payload)
    await writer.drain()
