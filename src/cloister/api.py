"""What `import cloister` offers: protect a checkpoint, connect to a protected model.

    cloister.protect("checkpoint", "out", mode="permute", base="secret")
    with cloister.connect("out/client", "https://host:8420") as model:
        print(model.generate("To be, or not to be", max_new_tokens=32))
        print(model.ledger)

`connect` is for ordinary code, notebooks included: it has an event loop of its own. `aconnect` is its twin for code
that already runs in one. With a local OUT/server directory in place of a URL, both parties run on this machine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cloister import manifest as manifests
from cloister import modes
from cloister.errors import InvalidParameter, UsageError
from cloister.ledger import Ledger
from cloister.manifest import Manifest
from cloister.modes import Sampling, Session

if TYPE_CHECKING:
    import numpy as np

    from cloister.serving.local import LocalServer
    from cloister.serving.text import TextCodec

__all__ = ["AsyncModel", "Model", "aconnect", "connect", "protect"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids of the plain vocabulary, or the messages of a conversation."""

Result = TypeVar("Result")


def protect(source: str | Path, out: str | Path, *, mode: str = "permute", **options: Any) -> Manifest:
    """Turn the checkpoint `source` into OUT/developer, OUT/server and OUT/client.

    Options are those of the mode; for permute see `cloister.permute.protect.protect`.
    """
    return modes.get(mode).protect(source, out, **options)


def connect(client: str | Path, server: str | Path, **options: Any) -> Model:
    """A model to ask: `client` is OUT/client, `server` a URL or a local OUT/server. Close it, or use `with`.

    Options are those of the mode's connection, for example `token="..."`.
    """
    return Model(client, server, **options)


def aconnect(client: str | Path, server: str | Path, **options: Any) -> AsyncModel:
    """`connect` for asynchronous code: `async with cloister.aconnect(...) as model`."""
    return AsyncModel(client, server, **options)


class AsyncModel:
    """A protected model. Enter it with `async with`, or call `open` and `close`."""

    def __init__(self, client: str | Path, server: str | Path, **options: Any) -> None:
        self._client = Path(client)
        self._server = server
        self._options = options
        self._local: LocalServer | None = None
        self._session: Session | None = None
        self._texts: TextCodec | None = None
        self.manifest = manifests.read(client, role="client")
        self.ledger: Ledger = options.pop("ledger", None) or Ledger()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.manifest.model.name} ({self.manifest.protection.label})>"

    async def open(self) -> Self:
        """Start the server if it is a local directory, and check that it is the right one."""
        if self._session is None:
            mode = modes.get(self.manifest.mode)
            url = str(self._server)
            if "://" not in url:
                url = await asyncio.to_thread(self._start_local)
            session = mode.connect(self._client, url, ledger=self.ledger, **self._options)
            try:
                await session.open()
            except BaseException:
                await session.close()
                self._stop_local()
                raise
            self._session = session
        return self

    async def close(self) -> None:
        """Release the connection; a local server is stopped."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await asyncio.to_thread(self._stop_local)

    async def generate(
        self, prompt: Prompt, *, max_new_tokens: int = 64, stop: str | Sequence[str] = (), **sampling: Any
    ) -> str:
        """The answer as one text. `sampling`: the fields of `cloister.modes.Sampling`; greedy by default."""
        pieces = [piece async for piece in self.stream(prompt, max_new_tokens=max_new_tokens, stop=stop, **sampling)]
        return "".join(pieces)

    async def stream(
        self, prompt: Prompt, *, max_new_tokens: int = 64, stop: str | Sequence[str] = (), **sampling: Any
    ) -> AsyncIterator[str]:
        """The answer in pieces. Leaving the loop cancels the work on both sides."""
        from cloister.serving.generation import write

        stops = [stop] if isinstance(stop, str) else list(stop)
        ids = self._ids(prompt)
        async with aclosing(
            write(self._open(), self._codec(), ids, _sampling(max_new_tokens, sampling), stops)
        ) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text

    async def logits(self, prompt: Prompt) -> np.ndarray:
        """Plain logits [positions, vocabulary] (or [classes]) of one forward pass."""
        return await self._open().logits(self._ids(prompt))

    async def embed(self, texts: str | Sequence[str] | Sequence[Sequence[int]]) -> np.ndarray:
        """One vector for each text, [texts, hidden]."""
        batch: list[Any] = [texts] if isinstance(texts, str) else list(texts)
        return await self._open().embed([self._ids(text) for text in batch])

    async def classify(self, inputs: Any) -> np.ndarray:
        """Class scores [inputs, classes]: for texts, lists of token ids, or images [batch, channels, height, width]."""
        if self.manifest.model.task != "vision":
            batch = [inputs] if isinstance(inputs, str) else list(inputs)
            inputs = [self._ids(item) for item in batch]
        return await self._open().classify(inputs)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self) -> Session:
        if self._session is None:
            raise UsageError("This model is not open.", advice="Use `with cloister.connect(...) as model:`.")
        return self._session

    def _codec(self) -> TextCodec:
        if self._texts is None:
            from cloister.serving.text import TextCodec

            self._texts = TextCodec(self._client)
        return self._texts

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._codec().encode(prompt)
        items: list[Any] = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return self._codec().encode_chat(items)
        if not all(hasattr(item, "__index__") for item in items):
            raise InvalidParameter("A prompt is a text, a list of token ids, or a list of messages.", param="prompt")
        return [int(item) for item in items]

    def _start_local(self) -> str:
        from cloister.serving.local import LocalServer

        self._local = LocalServer(self._server)
        return self._local.url

    def _stop_local(self) -> None:
        local, self._local = self._local, None
        if local is not None:
            local.close()


class Model:
    """`AsyncModel` for ordinary code: every method waits for its result."""

    def __init__(self, client: str | Path, server: str | Path, **options: Any) -> None:
        self._model = AsyncModel(client, server, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cloister", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._wait(self._model.open())
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return repr(self._model).replace("AsyncModel", "Model", 1)

    @property
    def manifest(self) -> Manifest:
        """What the client directory says about the model and its protection."""
        return self._model.manifest

    @property
    def ledger(self) -> Ledger:
        """What left this machine."""
        return self._model.ledger

    def generate(
        self, prompt: Prompt, *, max_new_tokens: int = 64, stop: str | Sequence[str] = (), **sampling: Any
    ) -> str:
        """The answer as one text. `sampling`: the fields of `cloister.modes.Sampling`; greedy by default."""
        return self._wait(self._model.generate(prompt, max_new_tokens=max_new_tokens, stop=stop, **sampling))

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int = 64, stop: str | Sequence[str] = (), **sampling: Any
    ) -> Iterator[str]:
        """The answer in pieces. Leaving the loop cancels the work on both sides."""
        pieces = self._model.stream(prompt, max_new_tokens=max_new_tokens, stop=stop, **sampling)
        try:
            while (piece := self._wait(_next(pieces))) is not None:
                yield piece
        finally:
            if not self._closed:
                self._wait(pieces.aclose())  # type: ignore[attr-defined]

    def logits(self, prompt: Prompt) -> np.ndarray:
        """Plain logits [positions, vocabulary] (or [classes]) of one forward pass."""
        return self._wait(self._model.logits(prompt))

    def embed(self, texts: str | Sequence[str] | Sequence[Sequence[int]]) -> np.ndarray:
        """One vector for each text, [texts, hidden]."""
        return self._wait(self._model.embed(texts))

    def classify(self, inputs: Any) -> np.ndarray:
        """Class scores [inputs, classes]: for texts, lists of token ids, or images [batch, channels, height, width]."""
        return self._wait(self._model.classify(inputs))

    def close(self) -> None:
        """Release the connection; a local server is stopped."""
        if self._closed:
            return
        try:
            self._wait(self._model.close())
        finally:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            if not self._thread.is_alive():
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._closed:
            work.close()
            raise UsageError("This model is closed.", advice="Connect again.")
        future: Future[Result] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            # The loop's thread goes on; cancel there and give it the time to tell the server.
            future.cancel()
            raise
        except CancelledError:
            raise UsageError("The work was cancelled.", advice="Ask again.") from None


async def _next(pieces: AsyncIterator[str]) -> str | None:
    return await anext(pieces, None)


def _sampling(max_new_tokens: int, options: Mapping[str, Any]) -> Sampling:
    if max_new_tokens < 1:
        raise InvalidParameter("max_new_tokens must be at least 1.", param="max_new_tokens")
    try:
        return Sampling(max_tokens=max_new_tokens, **options)
    except TypeError:
        known = [name for name in Sampling.__dataclass_fields__ if name != "max_tokens"]
        wrong = ", ".join(sorted(set(options) - set(known)))
        raise InvalidParameter(f"Unknown sampling options: {wrong}.", advice=f"Known: {', '.join(known)}.") from None
