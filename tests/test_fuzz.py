"""Damaged files and messages by the thousand: see tests/fuzz.py for what must hold. First, that it would be seen."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quorumark.errors import RecordError
from quorumark.verify.evidence import Partial
from tests import corpus, fuzz
from tests import mutations as m


def tried(seed: int, count: int, limit: float) -> dict[str, Any]:
    """In a process of its own, which has limits on memory."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--seed", str(seed), "--count", str(count)],
        capture_output=True, text=True, timeout=limit, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["cases"] == count
    assert not found["problems"], json.dumps(found["problems"], indent=1)[:20_000]
    return found


def test_five_hundred_damaged_files_and_messages() -> None:
    found = tried(seed=1, count=500, limit=580)
    refused = sum(kind.get("refused", 0) for kind in found["outcomes"].values())
    assert refused > 250  # it does damage them
    assert found["kinds"] > 75


@pytest.mark.slow
def test_twenty_thousand_damaged_files_and_messages() -> None:
    found = tried(seed=0, count=20_000, limit=3600)
    assert sum(found["outcomes"]["passphrase"].values()) == 200  # through scrypt
    assert len(found["outcomes"]) == found["kinds"]


# --- controls: each of these must be noticed ----------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    monkeypatch.setattr(fuzz, "MEMORY", 100 << 20)
    signal.signal(signal.SIGALRM, fuzz._late)
    yield tmp_path
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    tempfile.tempdir = None


def problems(folder: Path, kind: corpus.Kind, count: int = 12) -> set[str]:
    fuzzer = fuzz.Fuzzer(folder, 1, lambda _folder, _marker: [kind])
    return {problem for _, problem, _, _ in map(fuzzer.run, range(count)) if problem}


def _sound(here: Path) -> bool:
    return (here / "file").is_file() and (here / "file").read_bytes() == b"sound"


def _raises(here: Path) -> None:
    if not _sound(here):
        raise KeyError("x")


def _waits(here: Path) -> None:
    time.sleep(0 if _sound(here) else 3)


def _allocates(here: Path) -> None:
    if not _sound(here):
        bytearray(300 << 20)


def _accepts(here: Path) -> bool:
    return _sound(here)


def _writes(here: Path) -> None:
    (here.parent.parent / ("case" if _sound(here) else "outside")).mkdir(exist_ok=True)


def _unpickles(here: Path) -> None:
    if not _sound(here):
        pickle.loads((here / "file").read_bytes())  # noqa: S301 - that is what must be noticed


def _refuses(here: Path) -> None:
    if not _sound(here):
        raise RecordError("damaged")


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (_raises, "KeyError"), (_waits, "more than 1 s"), (_allocates, "MiB"), (_accepts, "content was accepted"),
        (_writes, "outside of its folder changed"), (_refuses, ""),
    ],
)  # fmt: skip
def test_what_must_not_happen_is_noticed(here: Path, read: Callable[[Path], Any], text: str) -> None:
    found = problems(here, corpus.FileKind("control", read, m.BYTES, data=b"sound"), 2 if read is _waits else 12)
    assert all(text in problem for problem in found)
    assert bool(found) == bool(text)


def test_a_pickle_that_runs_is_noticed(here: Path) -> None:
    runs = pickle.dumps(m.Calls(os.mkdir, str(here / "a-pickle-ran")))
    kind = corpus.FileKind("control", _unpickles, [lambda _rng, _data: runs], data=b"sound")
    assert "a pickle ran" in problems(here, kind)


def test_a_signature_that_nobody_checks_is_noticed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {kind.name: kind for kind in corpus._records(here, here)}
    (here / "with").mkdir()
    assert not problems(here / "with", kinds["partial"], 400)
    (here / "without").mkdir()
    monkeypatch.setattr(Partial, "verify", lambda *_: None)
    assert any("not what was signed" in problem for problem in problems(here / "without", kinds["partial"], 400))
