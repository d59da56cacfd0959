"""Files that are never half-written, and locks: every atomic write and every lock of the package is here.

A file is written beside its final place, synced, then moved over it: a crash leaves the old file or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from quorumark.errors import BusyError, KeystoreError

__all__ = [
    "append_private",
    "locked",
    "move",
    "only_one",
    "replacing",
    "same_file",
    "syncs",
    "unsynced",
    "write_exchanged",
    "write_private",
    "write_shared",
]


_SYNCS: ContextVar[bool] = ContextVar("syncs", default=True)


@contextlib.contextmanager
def unsynced() -> Iterator[None]:
    """Files that are written inside are whole or not there, but may be lost in a power cut or when a process is killed.
    For simulations only, in which server and members die together and nobody is promised anything."""
    before = _SYNCS.set(False)
    try:
        yield
    finally:
        _SYNCS.reset(before)


def syncs() -> bool:
    """Whether what is written now must survive a power cut: always, but in a simulation (`unsynced`)."""
    return _SYNCS.get()


def write_private(path: str | os.PathLike[str], content: bytes) -> None:
    """A whole file of mode 0600, or the old one stays."""
    with replacing(Path(path)) as file:
        file.write(content)


def append_private(path: str | os.PathLike[str], line: bytes) -> None:
    """A line at the end of a file of mode 0600, on disk. What a crash left of an earlier line stays apart from it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise KeystoreError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from None
    try:
        content = b"\n" + line + b"\n"
        if os.write(descriptor, content) != len(content):
            raise KeystoreError(f"cannot write {os.fspath(path)!r}: the disk is full")
        if syncs():
            os.fsync(descriptor)
            _sync_folder(Path(path).parent, None)
    except OSError as error:
        raise KeystoreError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from None
    finally:
        os.close(descriptor)


def write_shared(path: str | os.PathLike[str], content: bytes) -> None:
    """A whole file that others may read (mode 0644), in a folder that is made if need be."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KeystoreError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from None
    with replacing(Path(path), 0o644) as file:
        file.write(content)


def write_exchanged(path: str | os.PathLike[str], content: bytes) -> None:
    """The same in a folder that others can write to as well: its last part must be a folder itself and no link, which
    could lead to any place of this machine."""
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        why = "it is a link, which this member does not follow" if folder.is_symlink() else error.strerror
        raise KeystoreError(f"cannot write to {str(folder)!r}: {why}") from None
    try:
        with replacing(Path(path), 0o644, descriptor) as file:
            file.write(content)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """One process at a time works on a folder; a second one is refused, not queued.

    Sealed files that were being written when a process was killed are removed: nobody is writing them now, and they
    may hold what a ceremony or a round has promised to forget.
    """
    with locked(folder / ".lock", wait=False):
        for name in os.listdir(folder):
            if name.startswith(".") and name.endswith(".partial") and ".sealed." in name:
                (folder / name).unlink(missing_ok=True)
        yield


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds the lock file `path` while the block runs. If another process holds it: wait for it, or raise an error."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise KeystoreError(f"cannot lock {str(path)!r}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise BusyError(f"another command is working on {str(path.parent)!r}; wait until it is done") from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o600, folder: int | None = None) -> Iterator[BinaryIO]:
    """A new file beside `path` that takes its place once it is complete and on disk.

    `folder`: the descriptor of the folder, if it must be the one that was opened, whatever its name leads to by now.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(6).hex()}.partial")
    if path.exists() and not path.is_file() and not path.is_dir():  # a device would be replaced by a file
        raise KeystoreError(f"cannot write {str(path)!r}: it is no regular file")
    try:
        made, name = (partial, path) if folder is None else (Path(partial.name), Path(path.name))
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        os.fchmod(descriptor, mode)
    except OSError as error:
        raise KeystoreError(f"cannot write {str(path)!r}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if syncs():
                os.fsync(file.fileno())
        if not syncs():  # over a file that is there, file systems write the new one to disk at once (ext4)
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(name, dir_fd=folder)
        os.replace(made, name, src_dir_fd=folder, dst_dir_fd=folder)
        if syncs():
            _sync_folder(path.parent, folder)
    except OSError as error:
        raise KeystoreError(f"cannot write {str(path)!r}: {error.strerror}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made, dir_fd=folder)


def move(source: Path, target: Path) -> None:
    """Gives a whole, synced file its name; what had that name before is gone. Both are on one file system."""
    os.replace(source, target)
    _sync_folder(target.parent, None)


def same_file(source: Path, target: Path) -> bool:
    """Makes a whole file known under another name as well, in place of what had that name; files are replaced, never
    written to. False if the file system cannot: then nothing has changed. For simulations: nothing is synced."""
    partial = target.with_name(f".{target.name}.{os.urandom(6).hex()}.partial")
    try:
        os.link(source, partial)
    except OSError:
        return False
    target.unlink(missing_ok=True)  # a file cannot take the place of one that it is
    os.replace(partial, target)
    return True


def _sync_folder(folder: Path, opened: int | None) -> None:
    """The new name itself must survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY) if opened is None else opened
    try:
        os.fsync(descriptor)
    finally:
        if opened is None:
            os.close(descriptor)
