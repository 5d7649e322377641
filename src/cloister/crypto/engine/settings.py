"""How a session is set up, and where what it makes ahead is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cloister.crypto.engine.identity import Identity
from cloister.crypto.engine.shares import FRACTION_BITS
from cloister.errors import InvalidParameter


@dataclass(frozen=True)
class Store:
    """A folder for one-time correlations, shared with one peer: what one session makes ahead, a later one uses, once.

    The folder is made with 0700 and its files with 0600. Never copy it, back it up or put it back: the peer refuses a
    store that lags behind what it knows. `key_folder` moves the key to another place, best one that no backup reaches;
    then a folder put back alone is found here already. Of the two parties' wishes the stricter one holds.
    """

    folder: Path | str
    key_folder: Path | str | None = None
    when_empty: Literal["extend", "refuse"] = "extend"  # make more while the step waits, or fail with UsedUp
    when_behind: Literal["refuse", "start over"] = "refuse"  # or both parties throw away everything that is stored


@dataclass(frozen=True)
class Settings:
    """How a session is set up. Both parties must agree on `fraction`, `transfers`, `post_quantum` and `model`, and both
    or neither bring a store; the hello compares them. Plans are made for the slower of both parties' links."""

    identity: Identity | None = None
    peer: str | None = None  # the other party's fingerprint
    insecure_loopback: bool = False  # no TLS, on one machine only: for tests and measurements
    fraction: int = FRACTION_BITS
    transfers: Literal["softspoken1", "softspoken2", "softspoken4", "softspoken8", "silent", "by-link"] = "silent"
    post_quantum: bool = False  # rest the transfers on ML-KEM-768
    model: bytes = bytes(32)  # a digest of what is computed
    quiet_seconds: float = 60.0  # how long the peer may be silent, besides the time that a long product takes it
    threads: int | None = None
    cores: int = 1  # cores of this party that plans count on
    store: Store | None = None
    link_bits_per_second: float | None = None  # imitate a slower link
    link_delay_seconds: float = 0.0

    def as_native(self) -> dict[str, Any]:
        """The dictionary that the Rust core reads."""
        given: dict[str, Any] = {
            "fraction_bits": float(self.fraction),
            "transfers": self.transfers,
            "post_quantum": self.post_quantum,
            "quiet_seconds": float(self.quiet_seconds),
            "model": self.model,
            "cores": float(self.cores),
        }
        if self.threads is not None:
            given["threads"] = float(self.threads)
        if self.link_bits_per_second is not None:
            given["link_bits_per_second"] = float(self.link_bits_per_second)
            given["link_delay_seconds"] = float(self.link_delay_seconds)
        if self.store is not None:
            given |= _store(self.store)
        if self.identity is not None and self.peer is not None:
            given |= {"certificate": self.identity.certificate, "key": self.identity.key, "peer": self.peer}
        elif not self.insecure_loopback:
            raise InvalidParameter(
                "A session needs this party's identity and the peer's fingerprint.",
                advice="Make identities with Identity.create and exchange the fingerprints.",
            )
        return given


def _store(store: Store) -> dict[str, Any]:
    if store.when_empty not in ("extend", "refuse") or store.when_behind not in ("refuse", "start over"):
        raise InvalidParameter(
            f"A store that should {store.when_empty!r} when empty and {store.when_behind!r} when behind is not known.",
            advice='Empty: "extend" or "refuse". Behind: "refuse" or "start over".',
        )
    folder = Path(store.folder)
    folder.parent.mkdir(parents=True, exist_ok=True)  # the core makes the folder itself, for its owner alone
    given: dict[str, Any] = {
        "store": str(folder),
        "store_refuses_when_empty": store.when_empty == "refuse",
        "store_starts_over_when_behind": store.when_behind == "start over",
    }
    if store.key_folder is not None:
        Path(store.key_folder).parent.mkdir(parents=True, exist_ok=True)
        given["store_key"] = str(store.key_folder)
    return given
