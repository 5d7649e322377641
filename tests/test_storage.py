"""Files and directories are complete or not there; a full disk leaves nothing behind."""

from __future__ import annotations

import errno
import os
import signal
import stat
from pathlib import Path

import pytest

from cloister import storage
from cloister.errors import DiskFull, TooBusy, UsageError


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_directory_appears_complete(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with storage.fresh_directory(out) as partial:
        (partial / "a").write_text("1")
        assert not out.exists()
    assert (out / "a").read_text() == "1"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), storage.fresh_directory(tmp_path / "out") as partial:
        (partial / "a").write_text("1")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_kept_partial_directory_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError), storage.fresh_directory(out, keep_partial=True) as partial:
        (partial / "a").write_text("1")
        raise RuntimeError
    assert not out.exists()
    with storage.fresh_directory(out, resume=True) as partial:
        assert (partial / "a").read_text() == "1"
    assert (out / "a").exists()


def test_an_existing_directory_is_replaced_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("1")
    with pytest.raises(UsageError), storage.fresh_directory(out):
        pass
    with storage.fresh_directory(out, replace=True) as partial:
        (partial / "new").write_text("2")
    assert [path.name for path in out.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_old_directory_survives_a_failed_replacement(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("1")
    with pytest.raises(RuntimeError), storage.fresh_directory(out, replace=True):
        raise RuntimeError
    assert (out / "old").read_text() == "1"


def test_two_writers_of_one_directory_are_refused(tmp_path: Path) -> None:
    with (
        storage.fresh_directory(tmp_path / "out"),
        pytest.raises(TooBusy),
        storage.fresh_directory(tmp_path / "out"),
    ):
        pass


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="out"), storage.fresh_directory(tmp_path / "out") as partial:
        (partial / "a").write_text("1")
    with pytest.raises(DiskFull):
        storage.write_bytes(tmp_path / "file", b"x")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_safetensors_counts_too(tmp_path: Path) -> None:
    class SafetensorError(Exception):
        pass

    with pytest.raises(DiskFull), storage.disk_errors(tmp_path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(SafetensorError), storage.disk_errors(tmp_path):
        raise SafetensorError("invalid header")


def test_missing_space_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    storage.require_space(tmp_path / "not" / "there", 1)
    with pytest.raises(DiskFull):
        storage.require_space(tmp_path / "not" / "there", 1 << 60)


def test_a_secret_is_private_from_the_first_byte(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with storage.fresh_file(tmp_path / "key", mode=storage.SECRET_MODE) as file:
            (unfinished,) = tmp_path.iterdir()
            assert stat.S_IMODE(unfinished.stat().st_mode) == 0o600
            file.write(b"k")
        storage.write_secret(tmp_path / "other", b"k")
        storage.write_text(tmp_path / "open", "k")
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"key": 0o600, "other": 0o600, "open": 0o644}


def test_a_file_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    storage.write_text(tmp_path / "file", "old")
    with pytest.raises(RuntimeError), storage.fresh_file(tmp_path / "file") as file:
        file.write(b"new")
        raise RuntimeError
    assert (tmp_path / "file").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def killed_while_replacing(out: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """SIGKILL before the `at`-th rename of a process that replaces `out`; nothing gets to clean up."""
    child = os.fork()
    if child == 0:
        ordinary, seen = Path.replace, []

        def replace(self: Path, target: Path) -> Path:
            seen.append(target)
            if len(seen) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return ordinary(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        with storage.fresh_directory(out, replace=True) as partial:
            (partial / "new").write_text("2")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("at", [1, 2])
def test_a_replacement_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Between the two renames nothing is at its place: whoever reads next finds the old contents again."""
    out = tmp_path / "out"
    with storage.fresh_directory(out) as partial:
        (partial / "old").write_text("1")
    killed_while_replacing(out, monkeypatch, at)
    assert out.exists() == (at == 1)
    storage.restore(out)
    assert (out / "old").read_text() == "1"
    with storage.fresh_directory(out, replace=True) as partial:
        (partial / "new").write_text("2")
    assert [path.name for path in out.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing of the killed one is left"


def test_a_writer_that_may_not_replace_finds_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with storage.fresh_directory(out) as partial:
        (partial / "old").write_text("1")
    killed_while_replacing(out, monkeypatch, 2)
    with pytest.raises(UsageError, match="not empty"), storage.fresh_directory(out):
        pass
    assert (out / "old").read_text() == "1"


def test_restoring_leaves_a_living_writer_alone(tmp_path: Path) -> None:
    out, old = tmp_path / "out", tmp_path / ".out.old-abcd1234"
    with storage.fresh_directory(out) as partial:
        (partial / "a").write_text("1")
        old.mkdir()
        (old / "b").write_text("2")
        storage.restore(out)
        assert old.exists() and not out.exists()
    storage.restore(out)
    assert (out / "a").exists() and not (out / "b").exists()
    storage.restore(tmp_path / "nothing" / "there")


def test_folders_for_oneself(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        (tmp_path / "mine").mkdir(mode=0o755)
        made = storage.private_directory(tmp_path / "mine" / "a" / "b")
        (made / "c").mkdir(mode=0o777)
        (made / "c" / "file").write_text("1")
        storage.make_private(made)
    finally:
        os.umask(old)
    modes = {name: stat.S_IMODE((tmp_path / "mine" / name).stat().st_mode) for name in (".", "a", "a/b", "a/b/c/file")}
    assert modes == {".": 0o755, "a": 0o700, "a/b": 0o700, "a/b/c/file": 0o600}, "what was there stays as it was"
    storage.private_directory(made)
