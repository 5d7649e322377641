"""The enclave's side: a single-threaded process that answers the messages of protocol.py and does nothing else.

The server starts it with a socket it inherits (`--fd`); under Gramine, where inherited sockets do not exist, it
listens on the loopback (`--listen`) for one peer. Tensors travel on that stream or, much faster, through a shared
window (`--window`), a file in /dev/shm. The window is the server's to read and write at any time: a request is taken
out of it in one pass, the work happens in private memory, and only the finished result goes back. It exits when its
peer goes away.
"""

from __future__ import annotations

import argparse
import ipaddress
import mmap
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.errors import BadTensor, CloisterError, LimitError, NotFound, TooBusy, TooLarge, UsageError
from cloister.permute.enclave import bundle as bundles
from cloister.permute.enclave import protocol
from cloister.permute.enclave.functions import Functions, Session
from cloister.permute.enclave.protocol import Message, Operation, Place, Status

MAX_SESSIONS = 256
MAX_ROWS = 1 << 20  # rows that one session may embed in total


class EnclaveServer:
    """Serves one peer until it goes away."""

    def __init__(self, functions: Functions, window: mmap.mmap | None = None) -> None:
        self._functions = functions
        self._window = window
        self._sessions: dict[int, Session] = {}
        self._next = 1

    def serve(self, stream: socket.socket) -> None:
        """Answer requests until the stream ends, or a message cannot be parsed: there is no way to resynchronise."""
        while header := protocol.receive_exactly(stream, protocol.HEADER.size):
            try:
                message, length = protocol.unpack(bytes(header))
                if message.status:
                    raise BadTensor("A request with a status.")
            except (BadTensor, TooLarge) as error:
                self._refuse(stream, Message(Operation.HELLO), error)
                return
            payload: bytearray | memoryview = bytearray()
            if message.place == Place.STREAM and length:
                payload = protocol.receive_exactly(stream, length)
                if not payload:
                    return
            try:
                answer, result = self._answer(message, payload)
            except CloisterError as error:
                self._refuse(stream, message, error)
                continue
            self._send(stream, answer, result)

    def _answer(self, message: Message, payload: bytearray | memoryview) -> tuple[Message, NDArray[np.generic] | None]:
        operation, functions = message.operation, self._functions
        if operation == Operation.HELLO:
            facts = [functions.outputs, functions.bundle.hidden_size, int(functions.bundle.form.leaves_residual)]
            return self._fit(message, np.array(facts, np.int32))
        if operation == Operation.CLOSE:
            self._sessions.pop(message.session, None)
            return Message(operation), None
        given = self._tensor(message, payload)
        if operation == Operation.EMBED:
            return self._embed(message, given)
        session = self._session(message.session)
        if operation == Operation.LENGTHS:
            if given.dtype != np.int32 or given.shape != session.alpha.shape[:1] or given.min() < 1:
                raise BadTensor("Lengths are one positive int32 per sequence.")
            session.lengths = given.astype(np.int32)
            return Message(operation, message.session), None
        if given.dtype != np.float32 or given.ndim != (4 if operation == Operation.SOFTMAX else 3):
            raise BadTensor("That operation takes float32 rows.")
        numbers = given.astype(np.float32, copy=False)
        answer, out = self._fit(message, np.empty(0, np.float32), shape=numbers.shape)
        floats = out.view(np.float32)
        if operation == Operation.SOFTMAX:
            functions.softmax(numbers, session, message.scale, floats)
        elif operation == Operation.LEAVE:
            functions.leave(numbers, session, floats)
        elif operation == Operation.NORM:
            functions.norm(numbers, session, message.start, floats)
        else:
            functions.invert(numbers, session, message.start, floats)
        return answer, out

    def _embed(self, message: Message, given: NDArray[np.generic]) -> tuple[Message, NDArray[np.generic]]:
        session = self._session(message.session) if message.session else None
        if session is None and len(self._sessions) >= MAX_SESSIONS:
            raise TooBusy("The enclave has no free session.", advice="Close one.")
        if given.shape[0] * (given.shape[1] if given.ndim > 1 else 1) > MAX_ROWS:
            raise TooLarge(f"More than {MAX_ROWS} rows.")
        rows, grown = self._functions.embed(np.array(given), session)
        if grown.alpha.size > MAX_ROWS:
            self._sessions.pop(message.session, None)
            raise TooLarge(f"More than {MAX_ROWS} rows in one session.")
        number = message.session
        if session is None:
            number, self._next = self._next, self._next + 1
            self._sessions[number] = grown
        answer, out = self._fit(Message(message.operation, number, place=message.place), rows)
        return answer, out

    def _session(self, number: int) -> Session:
        try:
            return self._sessions[number]
        except KeyError:
            raise NotFound("The enclave has no such session.", advice="Embed first.") from None

    def _tensor(self, message: Message, payload: bytearray | memoryview) -> NDArray[np.generic]:
        if not message.shape:
            raise BadTensor("That operation needs a tensor.")
        if message.place == Place.STREAM:
            return protocol.tensor_from(message, payload)
        if self._window is None or message.nbytes > len(self._window):
            raise BadTensor("There is no shared window of that size.")
        return protocol.tensor_from(message, memoryview(self._window))

    def _fit(
        self, message: Message, result: NDArray[np.generic], *, shape: tuple[int, ...] | None = None
    ) -> tuple[Message, NDArray[np.generic]]:
        """The answer's header and where its tensor goes: the window if the request came through it and it fits."""
        shape = result.shape if shape is None else shape
        place = Place.STREAM
        answer = Message(message.operation, message.session, shape, result.dtype)
        out = result if result.shape == shape else np.empty(shape, result.dtype)
        if self._window is not None and message.operation != Operation.HELLO and answer.nbytes <= len(self._window):
            place = Place.WINDOW
            out = protocol.tensor_from(answer, memoryview(self._window))
            if result.shape == shape:
                np.copyto(out, result)
        return Message(message.operation, message.session, shape, result.dtype, place), out

    @staticmethod
    def _send(stream: socket.socket, answer: Message, result: NDArray[np.generic] | None) -> None:
        stream.sendall(protocol.pack(answer))
        if result is not None and answer.place == Place.STREAM:
            stream.sendall(np.ascontiguousarray(result).reshape(-1).view(np.uint8).data)

    @staticmethod
    def _refuse(stream: socket.socket, message: Message, error: CloisterError) -> None:
        text = str(error).encode("ascii", "replace")[: protocol.MAX_TEXT]
        stream.sendall(protocol.pack(Message(message.operation, message.session, status=_status(error)), text) + text)


def _status(error: CloisterError) -> Status:
    if isinstance(error, TooBusy):
        return Status.TOO_BUSY
    if isinstance(error, LimitError):
        return Status.TOO_LARGE
    if isinstance(error, NotFound):
        return Status.NO_SESSION
    return Status.BAD_TENSOR if isinstance(error, BadTensor) else Status.FAILED


def open_window(path: str) -> mmap.mmap:
    """The shared window, mapped. Its size is the file's."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return mmap.mmap(handle, 0)
    finally:
        os.close(handle)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `python -m cloister.permute.enclave`."""
    parser = argparse.ArgumentParser(prog="cloister.permute.enclave", description="The enclave process of `permute`.")
    parser.add_argument(
        "--bundle", type=Path, required=True, help="directory with enclave.json and enclave.safetensors"
    )
    parser.add_argument("--window", help="a shared memory file, for instance in /dev/shm")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="an inherited socket")
    where.add_argument("--listen", help="a loopback address, HOST:PORT, for one peer (Gramine)")
    options = parser.parse_args(arguments)
    try:
        functions = Functions(bundles.read(options.bundle))
        window = open_window(options.window) if options.window else None
        server = EnclaveServer(functions, window)
        if options.fd is not None:
            with socket.socket(fileno=options.fd) as stream:
                server.serve(stream)
            return
        host, _, port = options.listen.rpartition(":")
        if not ipaddress.ip_address(host).is_loopback:
            raise UsageError("The enclave listens on the loopback only.")
        with socket.create_server((host, int(port)), backlog=1) as listener:
            print(f"listening on {host}:{listener.getsockname()[1]}", flush=True)
            stream, _ = listener.accept()
        with stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.serve(stream)
    except CloisterError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
