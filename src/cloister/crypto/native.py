"""The door to the Rust core: imports the native module, says what is missing where it is not there, and turns the
core's errors into ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from cloister import errors

MODULE = "cloister_native"

_ERRORS: dict[str, type[errors.CloisterError]] = {
    "engine.link": errors.PeerDied,
    "engine.peer_gone": errors.PeerDied,
    "engine.timed_out": errors.PeerTimeout,
    "engine.bad_message": errors.ProtocolViolation,
    "engine.disagreement": errors.PeerDisagrees,
    "engine.not_authenticated": errors.Unauthorised,
    "engine.unsupported": errors.UsageError,
    "engine.bad_argument": errors.InvalidParameter,
    "engine.store": errors.BrokenStore,
    "engine.store_busy": errors.TooBusy,
    "engine.store_folder": errors.UnusableFolder,
    "engine.store_mismatch": errors.InvalidParameter,
    "engine.disk_full": errors.DiskFull,
    "engine.exhausted": errors.UsedUp,
    "engine.hiding_used_up": errors.UsedUp,
    "engine.session_over": errors.SessionOver,
}

_ADVICE = {
    "engine.link": "Check that the other party is running and that the network between you holds.",
    "engine.peer_gone": "Look at the other party's log: it may have refused its own settings or its store. "
    "Then open a new session.",
    "engine.timed_out": "The other party is overloaded, stopped, or the link is slower than the time-out allows.",
    "engine.bad_message": "Open a new session. Check that both parties called the same steps with the same public "
    "arguments, and that no value overflowed; if it repeats although they did, do not trust that peer.",
    "engine.disagreement": "Give both parties the same model digest, fraction, transfers and post_quantum, "
    "a store at both or at neither, and the same version of Cloister.",
    "engine.not_authenticated": "Exchange the parties' fingerprints again: each must name the other's. A server "
    "that met a stranger calls `accept` again.",
    "engine.store": "Delete the store at both parties and make a new one, or let both start over when it is behind; "
    "never copy or restore such a folder.",
    "engine.store_busy": "Wait until the other process is done, or use another folder. Leave the store as it is.",
    "engine.store_folder": "Give the store a folder of its own on a disk that works: `chmod 700 FOLDER`, owned by the "
    "user who runs this. Leave a store that is there as it is.",
    "engine.store_mismatch": "Use another folder for this role, peer, model and kind of transfers; the store there is "
    "sound and stays.",
    "engine.disk_full": "Free some space and open a new session; the store stays.",
    "engine.exhausted": "Make more ahead of time, or let the session extend the store.",
    "engine.hiding_used_up": "Open a new session.",
    "engine.session_over": "Open a new session.",
}


def available() -> bool:
    """Whether the Rust core is installed here."""
    return find_spec(MODULE) is not None


def load() -> Any:
    """The native module; `NotAvailable` with what to do where it is not installed."""
    try:
        return import_module(MODULE)
    except ImportError as error:
        raise errors.NotAvailable(
            f"The Rust core of Cloister is not installed here ({error}), so the two-party engine cannot run.",
            advice="Install Rust 1.95 or newer (https://rustup.rs) and run `make install` again.",
        ) from None


@contextmanager
def translated(*, connecting: bool = False) -> Iterator[None]:
    """Raise the core's errors as Cloister's. A link that fails while `connecting` never was one."""
    module = load()
    try:
        yield
    except module.EngineError as error:
        code, message = error.args
        unreachable = connecting and code == "engine.link"
        kind = errors.PeerUnreachable if unreachable else _ERRORS.get(code, errors.PeerError)
        raise kind(message[:1].upper() + message[1:] + ".", advice=_ADVICE.get(code, "")) from None
    except (OverflowError, BufferError) as error:
        # A number or an array that the core's types cannot hold; the message names types, never values.
        raise errors.InvalidParameter(f"The Rust core cannot take this argument: {error}.") from None
