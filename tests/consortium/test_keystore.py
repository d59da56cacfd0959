"""Sealed files: flipped bits, cuts, wrong keys, crashes, modes, memory."""

from __future__ import annotations

import os
import pickle
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quorumark import field
from quorumark.consortium import keystore
from quorumark.consortium.keystore import CHUNK, SealedReader, SealedWriter, Unlock, read_sealed, write_sealed
from quorumark.consortium.merkle import SALT_ELEMENTS, new_salt
from quorumark.consortium.shares import ShareFile, ShareInfo, ShareWriter
from quorumark.errors import InputError, KeystoreError
from quorumark.files import write_exchanged, write_shared


@pytest.fixture
def unlock(tmp_path: Path) -> Unlock:
    Unlock.new_key_file(tmp_path / "key")
    return Unlock.key_file(tmp_path / "key")


@pytest.mark.parametrize("size", [0, 1, 100, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_content_comes_back(tmp_path: Path, unlock: Unlock, size: int) -> None:
    content = os.urandom(size)
    path = tmp_path / "file"
    with SealedWriter(path, unlock, "test", {"shown": "yes"}) as file:
        for start in range(0, size, 100_000):
            file.write(content[start : start + 100_000])
    assert read_sealed(path, unlock, "test") == content
    assert SealedReader(path, None).about == {"shown": "yes"}
    assert path.stat().st_mode & 0o777 == 0o600
    if size > 50:
        assert content[:50] not in path.read_bytes()


@pytest.mark.parametrize("pieces", [[1, CHUNK, CHUNK - 1], [CHUNK], [2 * CHUNK], [5, 0, 3 * CHUNK - 5, 7]])
def test_it_does_not_matter_in_which_pieces_content_is_written(
    tmp_path: Path, unlock: Unlock, pieces: list[int]
) -> None:
    """Chunks are whole but for the last one, which is never empty: a reader that begins in the middle relies on it."""
    content, at = os.urandom(sum(pieces)), 0
    with SealedWriter(tmp_path / "file", unlock, "test") as file:
        for size in pieces:
            file.write(memoryview(content)[at : at + size])
            at += size
    read = SealedReader(tmp_path / "file", unlock, "test")
    sizes = [len(chunk) for chunk in read.chunks()]
    assert b"".join(read.chunks()) == content
    assert set(sizes[:-1]) <= {CHUNK}
    assert 0 < sizes[-1] <= CHUNK


def test_a_passphrase_opens_and_another_does_not(tmp_path: Path, unlock: Unlock) -> None:
    path = tmp_path / "file"
    write_sealed(path, Unlock.passphrase("correct horse"), "test", b"content")
    assert read_sealed(path, Unlock.passphrase("correct horse"), "test") == b"content"
    with pytest.raises(KeystoreError, match="passphrase or key file is wrong"):
        read_sealed(path, Unlock.passphrase("correct house"), "test")
    with pytest.raises(KeystoreError, match="sealed under a passphrase"):
        read_sealed(path, unlock, "test")
    with pytest.raises(KeystoreError, match="holds 'test', not 'share'"):
        read_sealed(path, Unlock.passphrase("correct horse"), "share")


def test_every_kind_of_damage_is_found(tmp_path: Path, unlock: Unlock) -> None:
    path, content = tmp_path / "file", os.urandom(2 * CHUNK + 100)
    write_sealed(path, unlock, "test", content)
    data = path.read_bytes()
    start = 4 + int.from_bytes(data[:4], "big")
    sealed = CHUNK + 16
    first, second = data[start : start + sealed], data[start + sealed : start + 2 * sealed]
    damaged = {
        "a flipped bit in chunk 0": _flip(data, start + 10),
        "a flipped bit in chunk 1": _flip(data, start + sealed + 10),
        "a flipped bit in the last chunk": _flip(data, len(data) - 1),
        "a flipped bit in the header": data.replace(b'"kind":"test"', b'"kind":"tesu"'),
        "cut by one byte": data[:-1],
        "cut at a chunk's end": data[: start + 2 * sealed],
        "cut after the first chunk": data[: start + sealed],
        "cut in the header": data[: start - 5],
        "empty": b"",
        "something added": data + b"\0",
        "chunks swapped": data[:start] + second + first + data[start + 2 * sealed :],
        "a chunk twice": data[: start + sealed] + data[start:],
        "a huge header": b"\xff\xff\xff\xff" + data[4:],
    }  # fmt: skip
    for what, spoiled in damaged.items():
        path.write_bytes(spoiled)
        with pytest.raises(KeystoreError) as caught:
            SealedReader(path, unlock).read()
        assert str(path) in str(caught.value), what


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def test_no_chunk_is_carried_over_from_another_file(tmp_path: Path, unlock: Unlock) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for path in (a, b):
        write_sealed(path, unlock, "test", os.urandom(CHUNK + 1))
    first, second = a.read_bytes(), b.read_bytes()
    start = 4 + int.from_bytes(first[:4], "big")
    a.write_bytes(first[: start + CHUNK + 16] + second[start + CHUNK + 16 :])
    with pytest.raises(KeystoreError, match="at chunk 1"):
        read_sealed(a, unlock, "test")


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path, unlock: Unlock) -> None:
    path = tmp_path / "file"
    write_sealed(path, unlock, "test", b"old")

    def interrupted() -> None:
        with SealedWriter(path, unlock, "test") as file:
            file.write(os.urandom(3 * CHUNK))
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        interrupted()
    assert read_sealed(path, unlock, "test") == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "key"]


def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path, unlock: Unlock) -> None:
    path = tmp_path / "file"
    write_sealed(path, unlock, "test", b"old")
    script = (
        "import sys, time\n"
        "from quorumark.consortium.keystore import SealedWriter, Unlock\n"
        "with SealedWriter(sys.argv[1], Unlock.key_file(sys.argv[2]), 'test') as file:\n"
        "    file.write(bytes(5_000_000)); file._file.flush(); print('half', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "key")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    assert read_sealed(path, unlock, "test") == b"old"
    write_sealed(path, unlock, "test", b"new")
    assert read_sealed(path, unlock, "test") == b"new"


def test_a_file_is_on_disk_before_it_gets_its_name_and_the_name_after(
    tmp_path: Path, unlock: Unlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut leaves cannot be tried here, so the calls to the operating system are watched."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("folder synced" if folder else f"{os.fstat(descriptor).st_size} bytes synced")
        fsync(descriptor)

    def watched_replace(source: Path, target: Path, **folders: Any) -> None:
        done.append(f"{Path(target).name} named")
        replace(source, target, **folders)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    monkeypatch.setattr(os, "rename", watched_replace)
    write_sealed(tmp_path / "file", unlock, "test", os.urandom(CHUNK + 5))
    size = (tmp_path / "file").stat().st_size
    write_shared(tmp_path / "public" / "record", b"eight by")
    write_exchanged(tmp_path / "exchange" / "message", b"nine byte")
    assert done == [
        f"{size} bytes synced", "file named", "folder synced",
        "8 bytes synced", "record named", "folder synced",
        "9 bytes synced", "message named", "folder synced",
    ]  # fmt: skip


def test_key_files_must_be_private_long_and_there(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(KeystoreError, match="cannot read the key file"):
        Unlock.key_file(path)
    Unlock.new_key_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeystoreError, match="exists already"):
        Unlock.new_key_file(path)
    for mode in (0o644, 0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(KeystoreError, match="open to others"):
            Unlock.key_file(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(KeystoreError, match="at least 32 random bytes"):
        Unlock.key_file(path)


def test_secrets_show_nowhere() -> None:
    unlock = Unlock.passphrase("correct horse battery")
    assert "horse" not in repr(unlock)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(unlock)
    with pytest.raises(InputError) as caught:
        Unlock.passphrase("hunter2")
    assert "hunter2" not in str(caught.value)


def test_a_strangers_header_cannot_ask_for_endless_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    monkeypatch.setattr(keystore, "SCRYPT_COST", 1 << 10)
    write_sealed(path, Unlock.passphrase("correct horse"), "test", b"content")
    path.write_bytes(path.read_bytes().replace(b'"n":1024', b'"n":1073741824'))
    data = path.read_bytes()
    length = int.from_bytes(data[:4], "big") + len("1073741824") - len("1024")
    path.write_bytes(length.to_bytes(4, "big") + data[4:])
    started = time.process_time()
    with pytest.raises(KeystoreError, match="more scrypt work than is allowed"):
        read_sealed(path, Unlock.passphrase("correct horse"), "test")
    assert time.process_time() - started < 5  # such work would take an hour


def test_unwritable_places_are_named(tmp_path: Path, unlock: Unlock) -> None:
    with pytest.raises(KeystoreError, match="cannot write"):
        write_sealed(tmp_path / "no" / "such" / "file", unlock, "test", b"")
    with pytest.raises(KeystoreError, match="cannot read"):
        read_sealed(tmp_path / "missing", unlock, "test")


def test_a_share_with_salts_outside_the_field_is_refused(tmp_path: Path, unlock: Unlock) -> None:
    """A dealer writes them: they would come to light in a recovery, when it is too late."""
    info = ShareInfo("ab" * 32, "cd" * 32, epoch=0, point=1, threshold=2, members=3, length=4, leaf=2, block=0)
    salts = field.random(3 * SALT_ELEMENTS).reshape(3, SALT_ELEMENTS)
    for wrong in (False, True):
        if wrong:
            salts[1, 2] = field.P
        with ShareWriter(tmp_path / "share", unlock, info, new_salt(), salts) as file:
            file.write(field.random(4))
        if not wrong:
            assert (ShareFile(tmp_path / "share", unlock).others_salts == salts).all()
    with pytest.raises(InputError, match="salts must"):
        ShareFile(tmp_path / "share", unlock)
