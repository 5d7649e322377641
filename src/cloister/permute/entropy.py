"""Randomness for keys: one 32-byte secret per context, expanded per purpose.

The secret comes from the operating system. Every draw of a context is expanded from it (HKDF per label, then
AES-256-CTR), so a
developer keeps 32 bytes instead of gigabytes of matrices, and an interrupted `protect` draws the same again.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32


class MasterKey:
    """The secret of one context. Its bytes leave only through `expose_secret`."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise ValueError(f"a master key has {KEY_BYTES} bytes, not {len(secret)}")
        self._secret = secret

    @classmethod
    def fresh(cls) -> MasterKey:
        """A new key from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_insecure_seed(cls, seed: int) -> MasterKey:
        """A repeatable key for tests and figures. Everybody who knows the seed can undo the protection."""
        return cls(hashlib.sha256(b"cloister insecure seed %d" % seed).digest())

    def expose_secret(self) -> bytes:
        """The raw bytes, for the developer's key file only."""
        return self._secret

    def tag_key(self, file: str) -> bytes:
        """The key under which one written file is tagged. The file of a name is always the same, so it is used once."""
        return self._derive(f"file tag:{file}")

    def public_id(self) -> str:
        """A fingerprint that names the key without betraying it."""
        return self._derive("public id").hex()[:16]

    def stream(self, label: str) -> Stream:
        """Independent randomness for one purpose."""
        return Stream(self._derive(label))

    def _derive(self, label: str) -> bytes:
        return HKDF(hashes.SHA256(), 32, salt=b"cloister permute 1", info=label.encode()).derive(self._secret)

    def __repr__(self) -> str:
        return "MasterKey(...)"


class Stream:
    """A stream of uniform bits and the draws made from it."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> np.ndarray:
        """`count` uniform 64-bit words."""
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), dtype="<u8")

    def uniform(self, count: int) -> np.ndarray:
        """`count` numbers in (0, 1), 53 bits each."""
        return ((self.words(count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def normal(self, count: int) -> np.ndarray:
        """`count` standard normal numbers (Box-Muller)."""
        half = (count + 1) // 2
        radius, angle = np.sqrt(-2.0 * np.log(self.uniform(half))), 2.0 * np.pi * self.uniform(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def permutation(self, size: int) -> np.ndarray:
        """A uniform permutation: the order of `size` random words; a repeated word (chance below size^2 / 2^65) draws
        again."""
        while True:
            words = self.words(size)
            order = np.argsort(words, kind="stable")
            ranked = words[order]
            if size < 2 or bool((ranked[1:] != ranked[:-1]).all()):
                return order.astype(np.int64)

    def signs(self, count: int) -> np.ndarray:
        """`count` signs."""
        return np.where(self.words(count) >> np.uint64(63), 1.0, -1.0)

    def scales(self, count: int) -> np.ndarray:
        """`count` factors, log-uniform between 1/sqrt(2) and sqrt(2): any two are within a factor of 2."""
        return np.exp2(self.uniform(count) - 0.5)

    def orthogonal(self, size: int) -> np.ndarray:
        """A Haar-distributed orthogonal matrix (QR of a Gaussian one, signs fixed by R's diagonal)."""
        if size == 0:
            return np.zeros((0, 0))
        q, r = np.linalg.qr(self.normal(size * size).reshape(size, size))
        return q * np.sign(np.diagonal(r))

    def orthogonal_keeping_ones(self, size: int) -> np.ndarray:
        """An orthogonal matrix Q with Q 1 = 1: a reflection that sends the ones vector to the first axis, a free
        rotation of the other axes, and the reflection back. LayerNorm's mean is then left alone."""
        mirror = np.full(size, 1.0 / np.sqrt(size))
        mirror[0] -= 1.0
        norm = float(np.linalg.norm(mirror))
        if norm == 0.0:
            return np.ones((1, 1))
        mirror /= norm
        inner = np.eye(size)
        inner[1:, 1:] = self.orthogonal(size - 1)
        inner -= 2.0 * np.outer(mirror, mirror @ inner)
        inner -= 2.0 * np.outer(inner @ mirror, mirror)
        return inner

    def invertible(self, size: int) -> np.ndarray:
        """A well-conditioned invertible matrix: rotation, scales within a factor of 2, rotation."""
        return (self.orthogonal(size) * self.scales(size)) @ self.orthogonal(size)
