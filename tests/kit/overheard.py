"""What a SuperLink held while it ran, and a search of it for what it must never hold.

A SuperLink keeps payloads only until they are fetched, so its database is empty of them after a run. `Listener` reads
the database's files and its write-ahead log again and again, and keeps every page that it has not seen. It also copies
what the members have on their own disks meanwhile (results of training, memories of rounds, states of the ceremony),
so that the test knows what to look for.

`search` looks for windows of 16 bytes at every offset, all of them in one pass: a vector's from every element on, so
that any two words of a share are found wherever they lie. Digests of 64 bits are compared: 10^7 windows that are looked
for in 2·10^8 bytes give a false alarm with a probability of about 2·10^15 / 2^64 = 10^-4.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 16
Words = NDArray[np.uint64]
_TABLE_BITS = 27


# --- listening --------------------------------------------------------------------------------------------


class Listener(threading.Thread):
    """Keeps in KEPT what it sees of OUT, a deployment's folder, until `stop`."""

    SECRETS = (
        "consortia/*/ceremony.sealed",
        "consortia/*/rounds/memory/rounds.sealed",
        "consortia/*/rounds/state-*/model.safetensors",
        "consortia/*/rounds/result-*.sealed",
    )

    def __init__(self, out: Path, kept: Path, pause: float = 0.7) -> None:
        super().__init__(daemon=True)
        self._out, self._kept, self._pause = out, kept, pause
        self._ended = threading.Event()
        self._seen: set[bytes] = set()
        self._looked: dict[Path, tuple[int, int]] = {}
        self.looks = 0
        kept.mkdir()

    def run(self) -> None:
        with (self._kept / "pages").open("wb") as pages:
            while not self._ended.wait(self._pause):
                self.look(pages)
            self.look(pages)

    def look(self, pages: Any) -> None:
        self.looks += 1
        for name, head, between in (("superlink.db", 0, 0), ("superlink.db-wal", 32, 24)):
            content = self._changed(self._out / name)
            for start in range(head, len(content), 4096 + between):
                page = content[start + between : start + between + 4096]
                if (digest := hashlib.blake2b(page, digest_size=16).digest()) not in self._seen:
                    self._seen.add(digest)
                    pages.write(page)
        for pattern in self.SECRETS:
            for path in self._out.glob(f"members/*/{pattern}"):
                if content := self._changed(path):
                    place = self._kept / path.relative_to(self._out / "members").parts[0]
                    place.mkdir(exist_ok=True)
                    name = hashlib.blake2b(content, digest_size=8).hexdigest()
                    (place / f"{name}-{path.name}").write_bytes(content)

    def _changed(self, path: Path) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            if self._looked.get(path) != (stat.st_mtime_ns, stat.st_size):
                self._looked[path] = stat.st_mtime_ns, stat.st_size
                return path.read_bytes()
        return b""

    def stop(self) -> None:
        self._ended.set()
        self.join()


# --- searching --------------------------------------------------------------------------------------------


def windows(vector: NDArray[Any], step: int = 1) -> Words:
    """Digests of the windows of a vector as it lies in memory, from every element on, or from every `step`-th."""
    flat = np.ascontiguousarray(vector).reshape(-1).astype(vector.dtype.newbyteorder("<"), copy=False)
    data = np.frombuffer(flat.tobytes(), np.uint8)
    if data.size < WINDOW:
        raise ValueError("a vector that is shorter than a window cannot be looked for")
    return _digests(np.lib.stride_tricks.sliding_window_view(data, WINDOW)[:: step * flat.dtype.itemsize])


def _digests(rows: NDArray[np.uint8]) -> Words:
    rows = rows[(rows != rows[:, :1]).sum(axis=1) >= 4]  # nearly the same byte sixteen times is found anywhere
    words = np.ascontiguousarray(rows).view("<u8")
    return np.unique(_mixed(words[:, 0], words[:, 1]))


def decimals(text: str) -> Words:
    """The windows of written numbers that hold some of one and some of the next: the last digits of one alone, such as
    76025390625, are those of many fractions, measured times among them."""
    rows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text.encode(), np.uint8), WINDOW)
    return _digests(rows[(rows[:, 5:11] == ord(",")).any(axis=1)])


def together(*parts: Words) -> Words:
    return np.unique(np.concatenate(parts))


def texts(content: bytes) -> Words:
    """The windows of bytes as they are and in the encodings that people use: hexadecimal, base64 at each alignment."""
    forms = [content, content.hex().encode(), content.hex().upper().encode()]
    for skip in range(3):
        piece = content[skip : skip + (len(content) - skip) // 3 * 3]
        forms += [base64.b64encode(piece), base64.urlsafe_b64encode(piece)]
    return together(*(windows(np.frombuffer(form, np.uint8)) for form in forms))


def samples(vector: NDArray[Any], where: NDArray[np.bool_] | None = None, count: int = 100) -> Words:
    """Pieces of a vector in all encodings, and its numbers as people write them; only from `where`."""
    little = vector.reshape(-1).astype(vector.dtype.newbyteorder("<"), copy=False)
    step = max(1, 64 // little.itemsize)
    starts = np.arange(little.size - step + 1)
    if where is not None:
        starts = starts[np.lib.stride_tricks.sliding_window_view(where, step).all(axis=1)]
    found = []
    for start in starts[np.linspace(0, starts.size - 1, count).astype(int)]:
        piece = little[start : start + step]
        found += [texts(piece.tobytes()), windows(piece.astype(piece.dtype.newbyteorder(">")).view(np.uint8))]
        written = ", ".join(str(number) for number in piece.tolist())
        found += [decimals(form) for form in (written, written.replace(" ", ""))]
    return together(*found)


def _mixed(first: Words, second: Words) -> Words:
    """A digest of 64 bits of each window's two words."""
    with np.errstate(over="ignore"):
        mixed = second ^ (first >> np.uint64(32))
        mixed *= np.uint64(0xD6E8FEB86659FD93)
        mixed ^= first * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        return mixed * np.uint64(0xBF58476D1CE4E5B9)


def search(content: bytes, wanted: Mapping[str, Words], public: Iterable[Words] = ()) -> dict[str, float]:
    """Which part of each kind's windows is in the content. What is `public` as well is not looked for."""
    apart = together(np.empty(0, np.uint64), *public)
    digests = {name: np.setdiff1d(found, apart, assume_unique=True) for name, found in wanted.items()}
    keys = together(*digests.values())
    table = np.zeros(1 << _TABLE_BITS, bool)
    table[keys >> np.uint64(64 - _TABLE_BITS)] = True
    data = np.frombuffer(content + bytes(-len(content) % 8), np.uint8)
    found = np.zeros(keys.size, bool)
    for offset in range(8):
        words = data[offset : offset + (data.size - offset) // 8 * 8].view("<u8")
        for start in range(0, words.size - 1, 1 << 20):
            part = words[start : start + (1 << 20) + 1]
            mixed = _mixed(part[:-1], part[1:])
            likely = mixed[table[mixed >> np.uint64(64 - _TABLE_BITS)]]
            at = np.searchsorted(keys, likely)
            at[at == keys.size] = 0
            found[at[keys[at] == likely]] = True
    hits = keys[found]
    return {name: float(np.isin(rows, hits, assume_unique=True).mean()) for name, rows in digests.items()}
