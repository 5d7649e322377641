"""The messages between server and enclave: one fixed header, then one tensor. Nothing else can be said.

    magic 4s | version u8 | operation u8 | status u8 | dtype u8 | place u8 | pad 3x | session u64 | dims 4 x u32
    | start u32 | scale f32 | length u64

`place` says whether the tensor's bytes follow on the stream or lie at the start of the shared window. Sizes are checked
against the header's own dims and the limit before memory is taken. A session has one request in flight: the answer to a
request comes before the next request is read.
"""

from __future__ import annotations

import math
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.errors import BadTensor, PeerDied, PeerTimeout, TooLarge

HEADER = struct.Struct("<4s5B3xQ4IIfQ")
MAGIC = b"CLEN"
VERSION = 1
MAX_BYTES = 1 << 30
MAX_TEXT = 256
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.int32)}
_CODES: dict[np.dtype[Any], int] = {dtype: code for code, dtype in _DTYPES.items()}


class Operation(IntEnum):
    """What the enclave is asked to do."""

    HELLO = 1  # answers with the number of outputs and the digest of the bundle
    EMBED = 2  # session 0 opens one
    LENGTHS = 3
    SOFTMAX = 4
    LEAVE = 5
    NORM = 6
    INVERT = 7
    CLOSE = 8


class Place(IntEnum):
    """Where the tensor's bytes are."""

    STREAM = 0
    WINDOW = 1


class Status(IntEnum):
    """How it went. With anything but OK the payload is a sentence."""

    OK = 0
    BAD_TENSOR = 1
    TOO_LARGE = 2
    NO_SESSION = 3
    TOO_BUSY = 4
    FAILED = 5


@dataclass(frozen=True)
class Message:
    """A header, taken apart and checked."""

    operation: Operation
    session: int = 0
    shape: tuple[int, ...] = ()
    dtype: np.dtype[np.generic] = _DTYPES[1]
    place: Place = Place.STREAM
    status: Status = Status.OK
    start: int = 0
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize if self.shape else 0


def pack(message: Message, text: bytes = b"") -> bytes:
    """The header's bytes. `text` is an error's sentence, which takes the tensor's place."""
    dims = (*message.shape, 0, 0, 0, 0)[:4]
    length = len(text) if message.status else message.nbytes
    code = _CODES[message.dtype]
    fields = (
        MAGIC,
        VERSION,
        message.operation,
        message.status,
        code,
        message.place,
        message.session,
        *dims,
        message.start,
    )
    return HEADER.pack(*fields, message.scale, length)


def unpack(header: bytes, *, limit: int = MAX_BYTES) -> tuple[Message, int]:
    """The message and the number of bytes that belong to it; `BadTensor` or `TooLarge` before anything is read."""
    magic, version, operation, status, code, place, session, *dims, start, scale, length = HEADER.unpack(header)
    if magic != MAGIC or version != VERSION or code not in _DTYPES or place not in (0, 1) or status > max(Status):
        raise BadTensor("That is no message of the enclave's protocol.")
    if operation not in set(Operation):
        raise BadTensor("The enclave knows no such operation.")
    while dims and dims[-1] == 0:
        dims.pop()
    if 0 in dims or not math.isfinite(scale):
        raise BadTensor("A message with an empty dimension or a scale that is not finite.")
    message = Message(
        Operation(operation), session, tuple(dims), _DTYPES[code], Place(place), Status(status), start, scale
    )
    if length > limit or message.nbytes > limit:
        raise TooLarge(f"A message of {max(length, message.nbytes)} bytes; the limit is {limit}.")
    if status and (length > MAX_TEXT or place != Place.STREAM):
        raise BadTensor("An error message that is too long.")
    if not status and length != message.nbytes:
        raise BadTensor("A message whose length does not fit its shape.")
    return message, length


def receive_exactly(stream: socket.socket, count: int) -> bytearray:
    """`count` bytes; an empty array at a clean end of the stream, `PeerDied` in the middle of a message."""
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        try:
            got = stream.recv_into(view[done:])
        except TimeoutError:
            raise PeerTimeout("The other side of the enclave's socket made no progress.") from None
        except ConnectionError:
            got = 0
        if got == 0:
            if done == 0:
                return bytearray()
            raise PeerDied("The enclave's connection broke in the middle of a message.")
        done += got
    return buffer


def tensor_from(message: Message, data: bytes | bytearray | memoryview) -> NDArray[np.generic]:
    """A view of the bytes as the tensor that the header describes."""
    return np.frombuffer(data, message.dtype, count=math.prod(message.shape)).reshape(message.shape)
