"""What may be pushed, and where checkpoints come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloister import hub
from cloister.errors import PeerUnreachable, UsageError, WouldRevealSecret
from cloister.permute import selfcheck
from cloister.permute.protect import protect


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    plain = selfcheck.make_tiny("LlamaForCausalLM", folder / "plain")
    protect(plain, folder / "out", base="secret", measure=False)
    return folder / "out"


class Recorder:
    """Stands in for the hub's library and writes down what it is asked to upload."""

    def __init__(self) -> None:
        self.uploaded: list[Any] = []

    def HfApi(self) -> Recorder:
        return self

    def create_repo(self, *args: Any, **options: Any) -> str:
        return "created"

    def upload_folder(self, **options: Any) -> str:
        self.uploaded.append(options)
        return "address"


@pytest.mark.parametrize("which", ["client", "developer", "."])
def test_directories_with_keys_are_never_pushed(out: Path, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorder()
    monkeypatch.setattr(hub, "_library", lambda: library)
    with pytest.raises(WouldRevealSecret):
        hub.push(out / which, "me/model")
    assert not library.uploaded


def test_the_server_directory_is_pushed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorder()
    monkeypatch.setattr(hub, "_library", lambda: library)
    assert hub.push(out / "server", "me/model") == "address"
    assert library.uploaded[0]["repo_id"] == "me/model"


def test_a_name_without_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerUnreachable, match="hub"):
        hub.resolve("cloister-tests/there-is-no-such-model")


@pytest.mark.parametrize("name", ["nowhere", "/no/such/dir", "a/b/c", "../no-such-folder"])
def test_neither_directory_nor_name(name: str) -> None:
    with pytest.raises(UsageError, match="neither"):
        hub.resolve(name)
