"""Atomic writes and locks are in one place, and do what they say."""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from quorumark.errors import KeystoreError
from quorumark.files import append_private, locked, only_one, replacing, syncs, unsynced, write_private

HOLD = """
import sys
from pathlib import Path
from quorumark.files import locked
with locked(Path(sys.argv[1]), wait=True):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_every_atomic_write_and_every_lock_is_here(root: Path) -> None:
    """Another module that moves a file over another one, or locks one, has a variant of its own."""
    wrong = []
    for path in sorted((root / "src").rglob("*.py")):
        if path.parts[-2:] == ("quorumark", "files.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Import, ast.ImportFrom)) else ""
            kept = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".partial")
            if kept or named in ("os.replace", "os.rename", "import fcntl", "tempfile.mkstemp"):
                wrong.append(f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}")
    assert not wrong, "use quorumark.files"


def test_a_lock_is_waited_for_or_refused(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(KeystoreError, match="another command is working"), locked(lock, wait=False):
            raise AssertionError("two processes hold one lock")
        with pytest.raises(KeystoreError, match="another command is working"), only_one(tmp_path):
            raise AssertionError("two processes work on one folder")
        other.stdin.write("\n")
        other.stdin.flush()
        with locked(lock, wait=True):  # the other one lets go of it
            pass
    with locked(lock, wait=False):
        pass
    with pytest.raises(KeystoreError, match="cannot lock"), locked(tmp_path / "nowhere" / ".lock", wait=True):
        pass


def test_an_error_of_the_block_itself_is_not_taken_for_a_lock(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), only_one(tmp_path):
        raise BlockingIOError("of something else")


def test_what_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def half() -> None:
        with replacing(path) as file:
            file.write(b"ne")
            raise ValueError("half of it")

    with pytest.raises(ValueError, match="half"):
        half()
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]


def test_a_line_that_a_crash_cut_short_stays_apart_from_the_next(tmp_path: Path) -> None:
    path = tmp_path / "marked.txt"
    for line in (b"one", b"two"):
        append_private(path, line)
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 2)
    append_private(path, b"three")
    assert path.read_text().split() == ["one", "tw", "three"]
    with pytest.raises(KeystoreError, match="cannot write"):
        append_private(tmp_path / "nowhere" / "marked.txt", b"four")


def test_lines_and_files_are_on_disk_unless_it_is_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    append_private(tmp_path / "lines", b"one")
    write_private(tmp_path / "file", b"one")
    assert len(synced) == 4  # each file, and the folder that names it
    with unsynced():
        assert not syncs()
        append_private(tmp_path / "lines", b"two")
        write_private(tmp_path / "file", b"two")
        with contextlib.suppress(ZeroDivisionError), replacing(tmp_path / "file") as file:
            file.write(b"three")
            raise ZeroDivisionError  # what the caller does fails: the file stays as it was
    assert syncs()
    assert len(synced) == 4
    assert (tmp_path / "file").read_bytes() == b"two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "lines"]
