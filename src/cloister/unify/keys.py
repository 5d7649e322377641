"""A party's key: by it the others know who made an artefact and who is at the other end of a connection.

The key is an elliptic-curve pair on P-384, because that is what Flower's SuperNodes authenticate with; the same key
signs what its owner sends. The fingerprint is the SHA-256 of the public key and is what people compare by telephone.

    key = Key.create(folder)            # folder/party-key.pem, 0600, and folder/party-key.pub to hand out
    key.fingerprint
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloister import storage
from cloister.errors import BrokenManifest, InvalidParameter, UsageError

PRIVATE, PUBLIC = "party-key.pem", "party-key.pub"
_PURPOSE = b"cloister.unify signature 1\0"  # a signature made for something else never counts here
_MOST = 4096


@dataclass(frozen=True)
class PublicKey:
    """What others know of a party."""

    text: str  # OpenSSH form, one line, as Flower reads it too

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """From the line that `Key.create` wrote into `party-key.pub`."""
        try:
            _public(text)
        except ValueError:
            raise InvalidParameter(
                "This is not a party's public key.",
                advice=f"Take the {PUBLIC} that `cloister unify key` wrote; it is one line.",
            ) from None
        return cls(" ".join(text.split()[:2]))

    @classmethod
    def read(cls, path: Path | str) -> PublicKey:
        """From a file, or from the folder that `Key.create` wrote."""
        path = Path(path)
        path = path / PUBLIC if path.is_dir() else path
        try:
            with path.open("rb") as file:
                return cls.parse(file.read(_MOST).decode("ascii", "replace"))
        except OSError as error:
            raise UsageError(
                f"The public key {path} cannot be read ({error.strerror}).",
                advice=f"Each owner makes one with `cloister unify key FOLDER` and hands out {PUBLIC}.",
            ) from None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the key, in hexadecimal."""
        from cryptography.hazmat.primitives import serialization as forms

        der = _public(self.text).public_bytes(forms.Encoding.DER, forms.PublicFormat.SubjectPublicKeyInfo)
        return hashlib.sha256(der).hexdigest()

    @property
    def pem(self) -> bytes:
        """The key as Flower's nodes show it."""
        from cryptography.hazmat.primitives import serialization as forms

        spelled: bytes = _public(self.text).public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
        return spelled

    def signed(self, message: bytes, signature: bytes) -> bool:
        """Whether the holder of this key signed `message`."""
        return self._verify(_PURPOSE + message, signature, "SHA384")

    def signed_for_node(self, message: bytes, signature: bytes) -> bool:
        """Whether the holder of this key signed `message` in the way of Flower's nodes."""
        return self._verify(message, signature, "SHA256")

    def _verify(self, message: bytes, signature: bytes, digest: str) -> bool:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            _public(self.text).verify(signature, message, ec.ECDSA(getattr(hashes, digest)()))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class Key:
    """A party's own key. Its secret half is never shown."""

    public: PublicKey
    folder: Path
    _secret: Any = field(repr=False)

    @classmethod
    def create(cls, folder: Path | str) -> Key:
        """Make a pair in `folder`; refuses to replace one that is there."""
        from cryptography.hazmat.primitives import serialization as forms
        from cryptography.hazmat.primitives.asymmetric import ec

        folder = Path(folder)
        if (folder / PRIVATE).exists():
            raise UsageError(f"{folder} holds a key already.", advice="Use it, or name another folder.")
        secret = ec.generate_private_key(ec.SECP384R1())
        public = secret.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
        pem = secret.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, forms.NoEncryption())
        try:
            storage.private_directory(folder)
            storage.write_bytes(folder / PUBLIC, public + b"\n")  # the secret last: its file says that both are there
            storage.write_secret(folder / PRIVATE, pem)
        except OSError as error:
            raise UsageError(
                f"No key can be written to {folder} ({error.strerror}).", advice="Name a folder of your own."
            ) from None
        return cls(PublicKey.parse(public.decode()), folder, secret)

    @classmethod
    def load(cls, folder: Path | str) -> Key:
        """Read what `create` wrote."""
        from cryptography.hazmat.primitives import serialization as forms
        from cryptography.hazmat.primitives.asymmetric import ec

        folder = Path(folder)
        path = folder / PRIVATE
        try:
            if path.stat().st_mode & 0o077:
                raise BrokenManifest(f"{path} can be read by others.", advice=f"Run `chmod 600 {path}` if nobody has.")
            secret = forms.load_ssh_private_key(path.read_bytes(), None)
        except OSError as error:
            raise UsageError(
                f"There is no key in {folder} ({error.strerror}).", advice=f"Make one: cloister unify key {folder}"
            ) from None
        except (ValueError, TypeError):
            raise BrokenManifest(f"{path} is damaged.", advice="Put the file back, or make another key.") from None
        if not isinstance(secret, ec.EllipticCurvePrivateKey) or secret.curve.name != "secp384r1":
            raise BrokenManifest(f"{path} is a key of another kind.", advice=f"Make one: cloister unify key {folder}")
        public = secret.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
        return cls(PublicKey.parse(public.decode()), folder, secret)

    @classmethod
    def at(cls, folder: Path | str) -> Key:
        """The key in `folder`, made now if there is none."""
        return cls.load(folder) if (Path(folder) / PRIVATE).exists() else cls.create(folder)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the public key."""
        return self.public.fingerprint

    def sign(self, message: bytes) -> bytes:
        """A signature that `PublicKey.signed` accepts for this message only."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        return bytes(self._secret.sign(_PURPOSE + message, ec.ECDSA(hashes.SHA384())))

    def sign_for_node(self, message: bytes) -> bytes:
        """A signature in the way of Flower's nodes; `PublicKey.signed` never accepts it."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        return bytes(self._secret.sign(message, ec.ECDSA(hashes.SHA256())))


def _public(text: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = forms.load_ssh_public_key(" ".join(text.split()[:2]).encode())
    except UnsupportedAlgorithm:
        raise ValueError("another algorithm") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise ValueError("another kind of key")
    return key
