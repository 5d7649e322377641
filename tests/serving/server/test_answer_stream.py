"""A stream whose first token is slow, and numbers larger than any float, without a model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cloister.errors import InvalidParameter
from cloister.serving.server.requests import Shape, parse_completion


class _Request:
    """A client that stays."""

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError


def test_the_first_token_is_not_lost_when_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    from cloister.serving.server import app
    from cloister.serving.server.engine import Event
    from cloister.serving.server.sampling import Choice

    monkeypatch.setattr(app, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(app, "_EventStream", lambda content, generation: content)

    class Answer:
        wanted = parse_completion({"prompt": [1], "stream": True}, Shape(10, 4, 16))
        generation = None

        def chunk(self, events: list[Event]) -> dict[str, Any]:
            return {"ids": [event.choice.id for event in events if event.choice]}

    async def run() -> bytes:
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        content: Any = await app._stream(_Request(), Answer(), inbox)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        inbox.put_nowait(Event(Choice(3)))
        await asyncio.sleep(0.01)
        inbox.put_nowait(Event(Choice(4), finish="length"))
        return b"".join([part async for part in content])

    assert b'{"ids":[3,4]}' in asyncio.run(run())


@pytest.mark.parametrize("amount", [float("inf"), float("nan"), "1", True, None])
def test_a_bias_that_is_no_number_is_refused(amount: object) -> None:
    with pytest.raises(InvalidParameter):
        parse_completion({"prompt": [1], "logit_bias": {"3": amount}}, Shape(10, 4, 16))


def test_a_bias_larger_than_any_float_is_clipped() -> None:
    wanted = parse_completion({"prompt": [1], "logit_bias": {"3": 10**400, "4": -(10**400)}}, Shape(10, 4, 16))
    assert wanted.sampling.logit_bias == {3: 100.0, 4: -100.0}
