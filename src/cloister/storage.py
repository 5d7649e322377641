"""Files and directories that are either complete or not there.

Everything Cloister writes goes through here: it is written under another name, flushed to the disk and renamed. A
full disk becomes `DiskFull`, and nothing half-written is left behind unless the caller asked to keep the partial
directory in order to continue later.

    with storage.fresh_directory(out) as partial:
        (partial / "config.json").write_text("{}")
    # `out` exists now, complete; had anything failed, it would not
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from cloister.errors import DiskFull, TooBusy, UsageError

SECRET_MODE = 0o600
ORDINARY_MODE = 0o644
SECRET_FOLDER = 0o700
ORDINARY_FOLDER = 0o755
_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def disk_errors(
    path: Path | str, *, advice: str = "Free some space or choose another disk, then run it again."
) -> Iterator[None]:
    """Turn "no space left" of any writer into `DiskFull` that names `path`."""
    try:
        yield
    except Exception as error:
        if _says_full(error):
            raise DiskFull(f"No space left on the disk that holds {path}.", advice=advice) from error
        raise


def _says_full(error: Exception) -> bool:
    """safetensors reports the operating system's error only as text, so the text is looked at for it."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return type(error).__name__ == "SafetensorError" and any(f"os error {code}" in str(error) for code in _FULL)


def require_space(path: Path | str, needed: int) -> None:
    """Raise `DiskFull` at once when the disk that holds `path` has less than `needed` bytes left."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"{path} needs {gigabytes(needed)} and its disk has {gigabytes(free)} left.",
            advice="Free some space or choose another disk. Nothing was written.",
        )


def gigabytes(size: float) -> str:
    """A size for people: "3.2 GB", "12 MB"."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def partial_path(out: Path | str) -> Path:
    """Where `fresh_directory(out)` collects its files: beside `out`, on the same disk."""
    out = Path(out).absolute()
    return out.with_name(f".{out.name}.partial")


@contextmanager
def fresh_directory(
    out: Path | str,
    *,
    replace: bool = False,
    resume: bool = False,
    keep_partial: bool = False,
    mode: int = ORDINARY_FOLDER,
) -> Iterator[Path]:
    """Yield a partial directory that becomes `out` when the block ends well.

    `replace` allows an `out` that exists and is not empty; `resume` begins with what an earlier run kept;
    `keep_partial` leaves the partial directory after a failure, so that `resume` can continue it.
    """
    out = Path(out).absolute()
    if not replace:
        _not_there(out)
    partial = partial_path(out)
    with disk_errors(out, advice=_full_advice(keep_partial)):
        out.parent.mkdir(parents=True, exist_ok=True)
        with _only_writer(out):
            _tidy(out)
            if not replace:
                _not_there(out)
            if not resume:
                remove(partial)
            try:
                partial.mkdir(mode=SECRET_FOLDER, exist_ok=True)
                yield partial
                sync_tree(partial)
                partial.chmod(mode)
                _put_in_place(partial, out)
            except BaseException:
                if not keep_partial:
                    remove(partial)
                raise


def _not_there(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty.", advice="Choose another directory or remove it first.")


def restore(out: Path | str) -> None:
    """If a process was killed while it replaced `out`, put back what was there; for whoever is about to read it."""
    out = Path(out).absolute()
    if out.exists() or not _moved_away(out):
        return
    with suppress(TooBusy, OSError), _only_writer(out):  # busy: it is being replaced this moment, by somebody alive
        _tidy(out)


def _moved_away(out: Path) -> list[Path]:
    """Where `_put_in_place` has put earlier contents of `out`; only there after a process was killed."""
    name = re.compile(rf"\.{re.escape(out.name)}\.old-[a-z0-9_]{{8}}")
    try:
        return [path for path in out.parent.iterdir() if name.fullmatch(path.name)]
    except OSError:
        return []


def _tidy(out: Path) -> None:
    """End what a killed `_put_in_place` has begun: back to the old contents, unless the new are in place."""
    for old in _moved_away(out):
        replaced = out.exists() and (not out.is_dir() or any(out.iterdir()))
        if replaced or not any(old.iterdir()):
            remove(old)
        else:
            old.replace(out)


def _full_advice(keep_partial: bool) -> str:
    if keep_partial:
        return "Free some space and run the same command again: it goes on where it stopped."
    return "Free some space or choose another disk, then run it again. Nothing half-written was left."


@contextmanager
def _only_writer(out: Path) -> Iterator[None]:
    """Two writers of one directory would mix their files; the second one is refused.

    The lock is the operating system's, so it ends with the process that holds it, however that ends.
    """
    try:
        import fcntl
    except ImportError:  # not on this platform; the rename at the end is still atomic
        yield
        return
    lock = out.with_name(f".{out.name}.lock")
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, SECRET_MODE)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TooBusy(f"Another process is writing {out}.", advice="Wait until it has finished.") from None
        yield
        lock.unlink(missing_ok=True)
    finally:
        os.close(handle)
        with suppress(OSError):
            lock.unlink(missing_ok=True)


def _put_in_place(partial: Path, out: Path) -> None:
    old: Path | None = None
    if out.exists():
        if any(out.iterdir()):
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
            out.replace(old)  # an empty directory may be replaced
        else:
            out.rmdir()
    try:
        partial.replace(out)
    except BaseException:
        if old is not None:
            old.replace(out)
        raise
    sync_directory(out.parent)
    if old is not None:
        remove(old)


def private_directory(path: Path | str) -> Path:
    """Make a directory, and those above it that are missing, for this user alone. One that is there stays as it is."""
    path = Path(path)
    if not path.is_dir():
        private_directory(path.parent)
        path.mkdir(mode=SECRET_FOLDER, exist_ok=True)
    return path


def make_private(folder: Path) -> None:
    """Everything in `folder`, and the folder itself, for this user alone."""
    for place, _, names in os.walk(folder):
        for name in names:
            (Path(place) / name).chmod(SECRET_MODE)
        Path(place).chmod(SECRET_FOLDER)


@contextmanager
def fresh_file(path: Path | str, *, mode: int = ORDINARY_MODE) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` when the block ends well; `mode` holds from the first byte on."""
    path = Path(path)
    with disk_errors(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # created 0600
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if mode != SECRET_MODE:
                Path(name).chmod(mode)
            Path(name).replace(path)
            sync_directory(path.parent)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def write_bytes(path: Path | str, data: bytes, *, mode: int = ORDINARY_MODE) -> None:
    """Write `data` to `path`, all of it or nothing."""
    with fresh_file(path, mode=mode) as file:
        file.write(data)


def write_text(path: Path | str, text: str, *, mode: int = ORDINARY_MODE) -> None:
    """Write `text` as UTF-8 to `path`, all of it or nothing."""
    write_bytes(path, text.encode(), mode=mode)


def write_secret(path: Path | str, data: bytes) -> None:
    """Write `data` to `path`, readable by its owner only from the moment the file is created."""
    write_bytes(path, data, mode=SECRET_MODE)


def sync_tree(directory: Path) -> None:
    """Flush every file and folder below `directory` to the disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            _sync(Path(folder) / name, os.O_RDONLY)
        sync_directory(Path(folder))


def sync_directory(directory: Path) -> None:
    """Flush the directory's own entries, without which a rename may be lost when the power fails."""
    if os.name != "nt":
        _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a directory tree if it is there; links are removed, not followed."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path)
