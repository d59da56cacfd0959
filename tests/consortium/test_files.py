"""Atomic writes and locks are in one place, and do what they say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from quorumark.errors import KeystoreError
from quorumark.files import locked, only_one, replacing

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
