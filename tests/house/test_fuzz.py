"""Damaged files and messages by the thousand: tests/kit/fuzz.py says what must hold. First, that it would be seen."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quorumark.errors import MessageError, QuorumarkError, RecordError
from quorumark.verify.evidence import Partial
from tests.kit import corpus, fuzz
from tests.kit import mutations as m


def tried(seed: int, count: int, limit: float) -> dict[str, Any]:
    """In a process of its own, which has limits on memory."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.fuzz", "--seed", str(seed), "--count", str(count)],
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
    monkeypatch.setattr(fuzz, "EVERY", 1)
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


# --- what it has found, once more -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, corpus.Kind]:
    found: dict[str, corpus.Kind] = {}
    for make in (corpus._records, corpus._homes, corpus._engines, corpus._suspects, corpus._labs):
        folder = tmp_path_factory.mktemp("corpus")
        found |= {kind.name: kind for kind in make(folder, folder / "ran")}
    return found


def _multiple_disks(data: bytes) -> bytes:
    """The end of a zip file says that it has a continuation elsewhere."""
    end = data.rindex(b"PK\5\6")
    locator = b"PK\6\7" + (0).to_bytes(4, "little") + bytes(8) + (9).to_bytes(4, "little")
    return data[:end] + locator + data[end:]


def _bad_lzma(_: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("w.npy", bytes(5000))
    data = bytearray(packed.getvalue())
    start = data.index(b"w.npy") + 5 + 4 + 5
    data[start : start + 8] = b"\xff" * 8
    return bytes(data)


def _replaced(name: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | {name: value}, sort_keys=True, separators=(",", ":")).encode()


def _overflowing(_: bytes) -> bytes:
    """A sum whose array has a length that no machine word holds."""
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1" + b"0" * 30 + b",), }\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("rest", "norms", "about"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    return packed.getvalue()


def _huge(data: bytes) -> bytes:
    """An array that says that it has 10^12 numbers, in a header of the same length."""
    start = data.index(b"(")
    return data[:start] + b"(1000000000000,)".ljust(data.index(b"\n") - start) + data[data.index(b"\n") :]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("run sum-1.npz", lambda data: data[: len(data) // 2]),
        ("run sum-1.npz", lambda _: b"not a zip file"),
        ("run sum-1.npz", _overflowing),
        ("run anchor.npy", _huge),
        ("rounds anchor.npy", _huge),
        ("run open.npz", lambda data: data[: len(data) // 2]),
        ("run open.npz", None),
        ("simulation run.json", _replaced("manifest", {})),
        ("rounds notes.json", _replaced("buffers", {})),
        ("rounds notes.json", _replaced("buffers", "no hex")),
        ("rounds notes.json", _replaced("ready", {})),
        ("rounds notes.json", _replaced("turn", "{}")),
        ("rounds layout.json", None),
        ("archive", None),
        ("lab table2", None),
        ("rounds memory", None),
        ("run sum-1.npz", None),
        ("kept query", None),
        ("signer frame", lambda _: (200_000).to_bytes(8, "big") + b"[" * 100_000 + b"]" * 100_000),
        ("suspect as_checkpoint", _multiple_disks),
        ("suspect as_npz", _bad_lzma),
        ("lab table2", lambda _: b"\xff"),
        ("lab table2", lambda _: b"title = ["),
        ("lab table2", lambda _: b"x = " + b"[" * 5000),
        ("lab table2", lambda _: b"[run]"),
        ("lab table2", lambda data: data.replace(b'"rho:0.05"', b"0.5")),
        ("lab result", None),
        ("lab result", lambda _: b"[]"),
        ("lab result", lambda _: b"[" * 100_000),
        ("lab attacks", lambda _: b"\xff"),
        ("attack plan", lambda _: b"x = " + b"[" * 5000),
        ("attack rows", lambda data: data + b"\n" + b"x" * 200_000),
        ("attack rows", lambda data: data.replace(b"{", b"[" * 100_000)),
        ("suite results.csv", lambda data: data + b"\xff"),
        ("suite suite.json", lambda _: b"[" * 100_000),
    ],
)
def test_what_was_found_is_refused(
    kinds: dict[str, corpus.Kind], tmp_path: Path, name: str, change: Callable[[bytes], bytes] | None
) -> None:
    kind = kinds[name]
    assert isinstance(kind, corpus.FileKind)
    kind.prepare(tmp_path)  # sound, it is accepted
    case = tmp_path / "case"
    case.mkdir()
    target = kind._lay(case)
    if change is None:
        target.unlink()
        os.mkfifo(target)
    else:
        target.write_bytes(change(kind.sound))
    with pytest.raises(QuorumarkError):
        kind.read(case / "here")


@pytest.mark.parametrize("have", ["[", None, "{}", "[[]]", "[" * 100_000])
def test_what_a_server_says_that_it_has(kinds: dict[str, corpus.Kind], tmp_path: Path, have: Any) -> None:
    kind = kinds["engine setup 2"]
    assert isinstance(kind, corpus.CallKind)
    shutil.copytree(kind.home, tmp_path / "home")
    with pytest.raises(MessageError, match="'have'"):
        kind.node(tmp_path / "home").handle("setup", {**kind.config, "have": have}, kind.arrays)
