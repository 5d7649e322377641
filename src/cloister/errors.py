"""Every error that Cloister raises on purpose, in one tree.

    CloisterError
    |-- UsageError                  the caller asked for something that cannot be
    |   |-- UnsupportedModel        no family fits; carries the full list of reasons
    |   |-- UnsupportedParameter    an API parameter that this mode cannot honour
    |   |-- InvalidParameter        an API parameter with a value that makes no sense
    |   |-- NotAvailable            a part that this installation or release does not have
    |   |-- UnusableFolder          a folder that others can reach, that is not empty, or that cannot be written
    |   `-- WouldRevealSecret       an action refused because it would publish a secret
    |-- DataError                   what was read is not what it should be
    |   |-- BrokenCheckpoint        truncated, unknown tensors, wrong shapes
    |   |-- BrokenManifest          not a Cloister directory, or a damaged one
    |   |-- FormatVersion           written by another version of Cloister
    |   |-- BadTensor               a tensor on the wire that is malformed, too large or not finite
    |   `-- BrokenStore             stored one-time randomness that is damaged, copied or restored
    |-- TrustError                  the other side is not who it should be
    |   |-- WrongKey                this client's key does not belong to this server
    |   |-- ExpiredKey              the key's life is over
    |   |-- AttestationFailed       no proof, a stale one, or an unexpected measurement
    |   `-- Unauthorised            no token, or a wrong one
    |-- PeerError                   the other side failed
    |   |-- PeerUnreachable         nobody answers
    |   |-- PeerDied                the connection broke in the middle
    |   |-- PeerTimeout             no progress within the deadline
    |   |-- PeerRefused             it answered with an error of its own
    |   |-- PeerDisagrees           the two parties were started with different parameters or models
    |   |-- ProtocolViolation       it sent something that the protocol does not allow
    |   `-- SessionOver             an earlier error ended this two-party session
    |-- LimitError                  a bound that protects the machine
    |   |-- TooLarge                body, tensor or sequence over the limit
    |   |-- TooBusy                 all places are taken; try again
    |   |-- UsedUp                  the stored one-time randomness does not suffice
    |   `-- DiskFull                nothing was left half-written
    `-- NotFound                    no such route or model

Each class has a stable `code` (sent over the wire and documented in docs/errors.md), an HTTP `status`
and an `exit_code` for the command line. `advice` says what to do next. No logic lives here.
"""

from __future__ import annotations

from collections.abc import Sequence


class CloisterError(Exception):
    """The root. `message` says what was wrong, `advice` what to do, `param` which request field is meant."""

    code = "internal_error"
    status = 500
    exit_code = 1

    def __init__(self, message: str, *, advice: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.param = param

    def __str__(self) -> str:
        return f"{self.message} {self.advice}".strip()


class UsageError(CloisterError):
    """The caller asked for something that cannot be."""

    code = "invalid_request"
    status = 400
    exit_code = 2


class UnsupportedModel(UsageError):
    """No family fits this checkpoint. `reasons` lists everything that stands against it, not only the first."""

    code = "unsupported_model"

    def __init__(self, message: str, reasons: Sequence[str] = (), *, advice: str = "") -> None:
        super().__init__("\n  - ".join([message, *reasons]), advice=advice)
        self.reasons = list(reasons)


class UnsupportedParameter(UsageError):
    """An API parameter that this mode cannot honour, so it is refused rather than ignored."""

    code = "unsupported_parameter"


class InvalidParameter(UsageError):
    """An API parameter whose value makes no sense."""

    code = "invalid_parameter"


class NotAvailable(UsageError):
    """A part that this release or this installation does not have."""

    code = "not_available"
    status = 501


class UnusableFolder(UsageError):
    """A folder that secrets cannot be kept in: open to others, not empty, another user's, or not writable."""

    code = "unusable_folder"


class WouldRevealSecret(UsageError):
    """An action refused because it would publish a secret."""

    code = "would_reveal_secret"


class DataError(CloisterError):
    """What was read is not what it should be."""

    code = "bad_data"
    status = 400
    exit_code = 3


class BrokenCheckpoint(DataError):
    """A checkpoint that is truncated, has unknown tensors or wrong shapes."""

    code = "broken_checkpoint"


class BrokenManifest(DataError):
    """Not a Cloister directory, or a damaged one."""

    code = "broken_manifest"


class FormatVersion(DataError):
    """Written by a version of Cloister that this one does not understand."""

    code = "format_version"


class BadTensor(DataError):
    """A tensor on the wire that is malformed, of the wrong size, or not finite."""

    code = "bad_tensor"


class BrokenStore(DataError):
    """A store of one-time randomness that is damaged, copied, or restored from a backup."""

    code = "broken_store"


class TrustError(CloisterError):
    """The other side is not who it should be."""

    code = "trust_error"
    status = 403
    exit_code = 4


class WrongKey(TrustError):
    """This client's key does not belong to this server."""

    code = "wrong_key"
    status = 409


class ExpiredKey(TrustError):
    """The key's life is over."""

    code = "expired_key"


class AttestationFailed(TrustError):
    """No proof of what runs on the server, a stale one, a debug one, or an unexpected measurement.

    `steps` is the machine-readable course of the verification: a list of {"step", "ok", "detail"}.
    """

    code = "attestation_failed"

    def __init__(
        self, message: str, steps: Sequence[dict[str, object]] = (), *, advice: str = "", param: str | None = None
    ) -> None:
        super().__init__(message, advice=advice, param=param)
        self.steps = list(steps)


class Unauthorised(TrustError):
    """No bearer token, or a wrong one."""

    code = "invalid_api_key"
    status = 401


class PeerError(CloisterError):
    """The other side failed."""

    code = "peer_error"
    status = 502
    exit_code = 5


class PeerUnreachable(PeerError):
    """Nobody answers at that address."""

    code = "peer_unreachable"
    status = 503


class PeerDied(PeerError):
    """The connection broke in the middle of an answer."""

    code = "peer_died"


class PeerTimeout(PeerError):
    """The other side made no progress within the deadline."""

    code = "peer_timeout"
    status = 504


class PeerRefused(PeerError):
    """The other side answered with an error of its own."""

    code = "peer_refused"


class PeerDisagrees(PeerError):
    """The two parties were started with different parameters, models or versions."""

    code = "peer_disagrees"
    status = 409


class ProtocolViolation(PeerError):
    """The other side sent something that the protocol does not allow at this point."""

    code = "protocol_violation"


class SessionOver(PeerError):
    """An earlier error ended this two-party session; nothing more can be computed in it."""

    code = "session_over"


class LimitError(CloisterError):
    """A bound that protects the machine was reached."""

    code = "limit"
    status = 413
    exit_code = 6


class TooLarge(LimitError):
    """A body, tensor or sequence over the limit."""

    code = "too_large"


class TooBusy(LimitError):
    """All places are taken; try again in a while."""

    code = "too_busy"
    status = 503


class UsedUp(LimitError):
    """The stored one-time randomness does not suffice for what was asked."""

    code = "used_up"
    status = 503


class DiskFull(LimitError):
    """No room on the disk. What was being written has been removed or can be resumed."""

    code = "disk_full"
    status = 507


class NotFound(CloisterError):
    """No such route or model."""

    code = "not_found"
    status = 404
    exit_code = 2
