"""How a session is set up, and where what it makes ahead is kept."""

from __future__ import annotations

import errno
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cloister.crypto import checks
from cloister.crypto.checks import whole
from cloister.crypto.engine.identity import Identity
from cloister.crypto.fixed import FRACTION_BITS, MOST_FRACTION
from cloister.errors import InvalidParameter

TRANSFERS = ("softspoken1", "softspoken2", "softspoken4", "softspoken8", "silent", "by-link")


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
    or neither bring a store; the hello compares them. Plans are made for the slower of both parties' links.

    `fraction` is 0 to 24; SiLU, GELU, exp, softmax, norms and reciprocals work with 10 to 13: below, their tables would
    be coarser than the numbers, above, their intermediate results would leave the field.

    `model` is 32 bytes, a digest of the weights. A store needs one that is not zero: what `Party.prepare` makes belongs
    to one set of weights, and with other weights it would give wrong results without a word, which may even tell
    the client how the two differ. Weights that change need a new digest, and with it the store begins anew.

    `threads` is how many the work runs on; `cores` is what plans count on when they weigh work against bytes, and the
    parties tell it each other."""

    identity: Identity | None = None
    peer: str | None = None  # the other party's fingerprint
    insecure_loopback: bool = False  # no TLS, on one machine only: for tests and measurements
    fraction: int = FRACTION_BITS
    transfers: Literal["softspoken1", "softspoken2", "softspoken4", "softspoken8", "silent", "by-link"] = "silent"
    post_quantum: bool = False  # rest the transfers on ML-KEM-768
    model: bytes = bytes(32)  # a digest of the weights, for instance hashlib.sha256(file).digest()
    quiet_seconds: float = 60.0  # how long the peer may be silent, besides the time that a long product takes it
    threads: int | None = None
    cores: int = 1  # cores of this party that plans count on
    store: Store | None = None
    link_bits_per_second: float | None = None  # imitate a slower link
    link_delay_seconds: float = 0.0  # of that link

    def as_native(self) -> dict[str, Any]:
        """The dictionary that the Rust core reads."""
        whole(self.fraction, "fraction", 0, MOST_FRACTION)
        checks.one_of(self.transfers, "transfers", TRANSFERS)
        checks.real(self.quiet_seconds, "quiet_seconds", 0, math.inf)
        whole(self.cores, "cores", 1, 65535)
        if not isinstance(self.model, bytes) or len(self.model) != 32:
            said = f"{len(self.model)} bytes" if isinstance(self.model, bytes) else checks.kind_of(self.model)
            raise InvalidParameter(
                f"`model` must be 32 bytes, not {said}.", advice="Use hashlib.sha256(...).digest().", param="model"
            )
        given: dict[str, Any] = {
            "fraction_bits": float(self.fraction),
            "transfers": self.transfers,
            "post_quantum": self.post_quantum,
            "quiet_seconds": float(self.quiet_seconds),
            "model": self.model,
            "cores": float(self.cores),
        }
        if self.threads is not None:
            given["threads"] = float(whole(self.threads, "threads", 1, 4096))
        if self.link_bits_per_second is not None:
            given["link_bits_per_second"] = checks.real(
                self.link_bits_per_second, "link_bits_per_second", 1000, math.inf
            )
            given["link_delay_seconds"] = checks.real(self.link_delay_seconds, "link_delay_seconds", 0, 3600)
        elif self.link_delay_seconds:
            raise InvalidParameter(
                "A delay belongs to a link that is imitated, and no `link_bits_per_second` is given.",
                advice="Give both, for instance link_bits_per_second=1e9.",
                param="link_delay_seconds",
            )
        if self.store is not None:
            if self.model == bytes(32):
                raise InvalidParameter(
                    "A store needs the digest of the model: layers prepared for other weights must not be used.",
                    advice="Set Settings.model at both parties, for instance hashlib.sha256(weights_file).digest().",
                    param="model",
                )
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
    if not isinstance(store, Store):
        raise InvalidParameter(
            f"`store` must be a Store, not {checks.kind_of(store)}.",
            advice='Write store=Store("folder").',
            param="store",
        )
    if store.when_empty not in ("extend", "refuse") or store.when_behind not in ("refuse", "start over"):
        raise InvalidParameter(
            f"A store that should {store.when_empty!r} when empty and {store.when_behind!r} when behind is not known.",
            advice='Empty: "extend" or "refuse". Behind: "refuse" or "start over".',
        )
    folder = _beside(store.folder, "folder")
    given: dict[str, Any] = {
        "store": str(folder),
        "store_refuses_when_empty": store.when_empty == "refuse",
        "store_starts_over_when_behind": store.when_behind == "start over",
    }
    if store.key_folder is not None:
        given["store_key"] = str(_beside(store.key_folder, "key_folder"))
    return given


def _beside(folder: Path | str, name: str) -> Path:
    """The folder, with its parent made; the core makes the folder itself, for its owner alone."""
    if not isinstance(folder, Path | str) or not str(folder):
        raise InvalidParameter(f"`{name}` of a store must be a path, not {checks.kind_of(folder)}.", param=name)
    folder = Path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "no path of this system"
        raise InvalidParameter(
            f"No store can be kept in {str(folder)!r} ({why}).", advice="Name a folder that you can write.", param=name
        ) from None
    return folder
