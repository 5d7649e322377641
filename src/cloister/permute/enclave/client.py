"""The server's side of the enclave's protocol: start the process, ask, take the answer.

    with EnclaveProcess(bundle_directory) as enclave:
        session, rows = enclave.embed(token_ids)

This is the SIMULATED enclave: an ordinary process, with ordinary memory that root can read. `EnclaveConnection` talks
to one that somebody else started (Gramine on SGX hardware; deploy/gramine).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cloister.errors import BadTensor, CloisterError, NotFound, PeerDied, PeerRefused, TooBusy, TooLarge
from cloister.permute.enclave import protocol
from cloister.permute.enclave.protocol import Message, Operation, Place, Status

Floats = NDArray[np.float32]
WINDOW_BYTES = 64 << 20  # sparse: pages that no tensor touches take no memory
SHARED_MEMORY = Path("/dev/shm")
_ERRORS: dict[Status, type[CloisterError]] = {
    Status.BAD_TENSOR: BadTensor,
    Status.TOO_LARGE: TooLarge,
    Status.NO_SESSION: NotFound,
    Status.TOO_BUSY: TooBusy,
}


class EnclaveConnection:
    """Requests and answers over one socket.

    Results may be views of the shared window, which the next call overwrites: hold `lock` until they are used, or copy.
    """

    def __init__(self, stream: socket.socket, window: mmap.mmap | None = None, *, timeout: float = 60.0) -> None:
        self._stream = stream
        self._stream.settimeout(timeout)
        self._window = window
        self.lock = threading.RLock()
        outputs, hidden, leaves = self._ask(Message(Operation.HELLO), None)
        self.outputs, self.hidden_size, self.leaves_residual = int(outputs), int(hidden), bool(leaves)

    def room(self, shape: tuple[int, ...]) -> Floats:
        """An array to compute a request into: in the shared window if it fits, so that nothing is copied."""
        wanted = Message(Operation.HELLO, shape=shape)
        if self._window is None or wanted.nbytes > len(self._window):
            return np.empty(shape, np.float32)
        return protocol.tensor_from(wanted, memoryview(self._window)).view(np.float32)

    def embed(
        self, values: NDArray[np.generic], session: int = 0, lengths: NDArray[np.int32] | None = None
    ) -> tuple[int, Floats]:
        """Scaled, permuted rows; opens a session unless one is given. `lengths` marks right-padded sequences."""
        with self.lock:
            answer, rows = self._exchange(Message(Operation.EMBED, session), values)
            result = rows.view(np.float32).copy()
            if lengths is not None:
                self._exchange(Message(Operation.LENGTHS, answer.session), lengths.astype(np.int32))
        return answer.session, result

    def softmax(self, scores: Floats, session: int, scale: float) -> Floats:
        """The first layer's attention weights."""
        return self._ask(Message(Operation.SOFTMAX, session, scale=scale), scores).view(np.float32)

    def leave(self, attended: Floats, session: int) -> Floats:
        """What to add to the residual stream in place of the attention's output."""
        return self._ask(Message(Operation.LEAVE, session), attended).view(np.float32)

    def norm(self, rows: Floats, session: int, start: int = 0) -> Floats:
        """The last norm."""
        return self._ask(Message(Operation.NORM, session, start=start), rows).view(np.float32)

    def invert(self, outputs: Floats, session: int, start: int = 0) -> Floats:
        """Plain outputs."""
        return self._ask(Message(Operation.INVERT, session, start=start), outputs).view(np.float32)

    def close_session(self, session: int) -> None:
        """Forget a session's scalings."""
        self._exchange(Message(Operation.CLOSE, session), None)

    def close(self) -> None:
        """Hang up; an enclave process exits then."""
        self._stream.close()
        if self._window is not None:
            with contextlib.suppress(BufferError):  # somebody still holds a view: it is freed with the last of them
                self._window.close()

    def _ask(self, message: Message, tensor: NDArray[np.generic] | None) -> NDArray[np.generic]:
        return self._exchange(message, tensor)[1]

    def _exchange(self, message: Message, tensor: NDArray[np.generic] | None) -> tuple[Message, NDArray[np.generic]]:
        with self.lock:
            try:
                self._send(message, tensor)
            except (BrokenPipeError, ConnectionError):
                raise _dead() from None
            header = protocol.receive_exactly(self._stream, protocol.HEADER.size)
            if not header:
                raise _dead()
            answer, length = protocol.unpack(bytes(header))
            data: bytearray | memoryview = bytearray()
            if answer.place == Place.WINDOW:
                if self._window is None or answer.nbytes > len(self._window):
                    raise BadTensor("The enclave answered into a window that does not exist.")
                data = memoryview(self._window)
            elif length:
                data = protocol.receive_exactly(self._stream, length)
                if not data:
                    raise _dead()
            if answer.status:
                text = bytes(data).decode("ascii", "replace")
                raise _ERRORS.get(answer.status, PeerRefused)(f"The enclave refused: {text}")
            if answer.operation != message.operation:
                raise BadTensor("The enclave answered another question.")
            return answer, protocol.tensor_from(answer, data) if answer.shape else np.empty(0, np.float32)

    def _send(self, message: Message, tensor: NDArray[np.generic] | None) -> None:
        if tensor is None:
            self._stream.sendall(protocol.pack(message))
            return
        place = Place.STREAM
        if self._window is not None and 0 < tensor.nbytes <= len(self._window):
            place = Place.WINDOW
            there = np.frombuffer(self._window, tensor.dtype, count=tensor.size).reshape(tensor.shape)
            if not np.may_share_memory(there, tensor):
                np.copyto(there, tensor)
        header = Message(
            message.operation,
            message.session,
            tensor.shape,
            tensor.dtype,
            place,
            start=message.start,
            scale=message.scale,
        )
        self._stream.sendall(protocol.pack(header))
        if place == Place.STREAM:
            self._stream.sendall(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


class EnclaveProcess(EnclaveConnection):
    """An enclave process of our own, over a socket pair and a shared window. Simulated: no hardware protects it."""

    def __init__(self, bundle: Path | str, *, window_bytes: int = WINDOW_BYTES, timeout: float = 60.0) -> None:
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "cloister.permute.enclave",
            "--bundle",
            str(bundle),
            "--fd",
            str(theirs.fileno()),
        ]
        window, path = _make_window(window_bytes)
        if path is not None:
            command += ["--window", str(path)]
        try:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
            super().__init__(ours, window, timeout=timeout)
        except BaseException:
            ours.close()
            self._reap()
            raise
        finally:
            theirs.close()
            if path is not None:
                path.unlink(missing_ok=True)  # both sides have it mapped by now

    def close(self) -> None:
        """Hang up and wait for the process."""
        super().close()
        self._reap()

    def _reap(self) -> None:
        process = getattr(self, "process", None)
        if process is None:
            return
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _make_window(size: int) -> tuple[mmap.mmap | None, Path | None]:
    if size <= 0 or not SHARED_MEMORY.is_dir():
        return None, None
    handle, name = tempfile.mkstemp(prefix="cloister-enclave-", dir=SHARED_MEMORY)  # 0600
    try:
        os.ftruncate(handle, size)
        return mmap.mmap(handle, size), Path(name)
    finally:
        os.close(handle)


def _dead() -> PeerDied:
    return PeerDied("The enclave process is gone.", advice="Start it again; sessions that it held are lost.")
