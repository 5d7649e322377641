"""A party's key and certificate on disk, and the fingerprint by which the other party knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cloister import storage
from cloister.crypto import native
from cloister.errors import BrokenManifest, UsageError

CERTIFICATE, KEY = "engine-certificate.pem", "engine-key.pem"


@dataclass(frozen=True)
class Identity:
    """What a party proves itself with. Give the `fingerprint` to the other party over a channel you trust."""

    certificate: str = field(repr=False)
    key: str = field(repr=False)
    fingerprint: str

    @classmethod
    def create(cls, folder: Path | str) -> Identity:
        """Make a key and a certificate in `folder`; refuses to replace one that is there."""
        folder = Path(folder)
        if (folder / KEY).exists():
            raise UsageError(
                f"{folder} holds an engine identity already.", advice="Load it, or delete both files to make another."
            )
        with native.translated():
            certificate, key, fingerprint = native.load().generate_identity()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            storage.write_text(folder / CERTIFICATE, certificate)  # the key last: its file says that both are there
            storage.write_secret(folder / KEY, key.encode())
        except OSError as error:
            raise UsageError(
                f"No identity can be written to {folder} ({error.strerror}).", advice="Name a folder of your own."
            ) from None
        return cls(certificate, key, fingerprint)

    @classmethod
    def load(cls, folder: Path | str) -> Identity:
        """Read what `create` wrote."""
        folder = Path(folder)
        try:
            if (folder / KEY).stat().st_mode & 0o077:
                raise BrokenManifest(
                    f"{folder / KEY} can be read by others.", advice=f"Run `chmod 600 {folder / KEY}` if nobody has."
                )
            certificate, key = (folder / CERTIFICATE).read_text(), (folder / KEY).read_text()
        except OSError as error:
            raise BrokenManifest(
                f"There is no engine identity in {folder} ({error.strerror}).", advice="Make one with Identity.create."
            ) from None
        except UnicodeDecodeError:
            raise BrokenManifest(
                f"The certificate or key in {folder} is not text in PEM.",
                advice="Put back the files that Identity.create wrote, or make others and exchange fingerprints again.",
            ) from None
        with native.translated():
            return cls(certificate, key, native.load().fingerprint(certificate))
