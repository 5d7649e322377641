"""The door to the Rust core: every error of the core has a class here, and the constants agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cloister.crypto import native
from cloister.errors import CloisterError, NotAvailable

SOURCE = Path(__file__).parents[2] / "rust" / "core" / "src"


def test_every_error_of_the_core_has_a_class() -> None:
    codes = set(re.findall(r'"(engine\.[a-z_]+)"', (SOURCE / "error.rs").read_text()))
    assert codes == set(native._ERRORS)
    assert all(issubclass(kind, CloisterError) for kind in native._ERRORS.values())
    assert set(native._ADVICE) <= codes


def test_the_prime_is_the_same_on_both_sides() -> None:
    from cloister.crypto.fixed import PRIME

    written = re.search(r"pub const P: u64 = ([\d_]+);", (SOURCE / "field.rs").read_text())
    assert written is not None and int(written[1].replace("_", "")) == PRIME


def test_errors_arrive_as_cloisters_own() -> None:
    if not native.available():
        pytest.skip("the Rust core is not installed here")
    with pytest.raises(CloisterError, match="certificate") as caught, native.translated():
        native.load().fingerprint("not a certificate")
    assert caught.value.code == "invalid_parameter"


def test_without_the_core_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "MODULE", "cloister_native_that_is_not_there")
    assert not native.available()
    with pytest.raises(NotAvailable, match="make install"):
        native.load()
