"""The search that the deployment's test relies on, without a deployment: a database as a SuperLink has it, and secrets
that stay in it only for a moment."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tests.kit.overheard import Listener, Words, samples, search, texts, together, windows

RNG = np.random.default_rng(7)
SHARE = RNG.integers(0, 2**61 - 1, 5000, np.uint64)
MODEL = RNG.standard_normal(20_000).astype(np.float32)
SEED = RNG.bytes(32)
SIGNS = np.where(RNG.random(8000) < 0.5, 1, -1).astype(np.int8)
WANTED: dict[str, Words] = {
    "share": together(windows(SHARE), samples(SHARE)),
    "model": together(windows(MODEL, 4), samples(MODEL)),
    "seed": texts(SEED),
    "signs": together(windows(SIGNS), windows(np.packbits(SIGNS > 0))),
}
PLANTED = {
    "two words of a share": ("share", SHARE[777:779].tobytes()),
    "a share as numbers": ("share", ", ".join(map(str, SHARE[:8].tolist())).encode()),
    "a share the other way round": ("share", SHARE[:8].astype(">u8").tobytes()),
    "seven weights": ("model", MODEL[1001:1008].tobytes()),
    "a seed": ("seed", SEED),
    "a seed in hexadecimal": ("seed", SEED.hex().encode()),
    "signs": ("signs", SIGNS[100:130].tobytes()),
    "signs in bits": ("signs", np.packbits(SIGNS > 0)[40:60].tobytes()),
}


@pytest.mark.parametrize("what", [None, *PLANTED])
def test_a_secret_that_was_in_the_database_for_a_moment_is_found(tmp_path: Path, what: str | None) -> None:
    """And nothing else is; nor is anything found where nothing was put."""
    kind, secret = PLANTED[what] if what else ("", b"")
    database = sqlite3.connect(tmp_path / "superlink.db", isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA secure_delete=ON")
    database.execute("CREATE TABLE objects (content BLOB)")
    listener, pages = Listener(tmp_path, tmp_path / "kept"), tmp_path / "pages"
    with pages.open("wb") as file:
        # within a payload of several pages, at an odd offset
        database.execute("INSERT INTO objects VALUES (?)", (RNG.bytes(9001) + secret + RNG.bytes(5001),))
        listener.look(file)
        database.execute("DELETE FROM objects")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        listener.look(file)
    database.close()
    if secret:
        assert secret not in (tmp_path / "superlink.db").read_bytes()  # it is gone, and was overheard
    found = search(pages.read_bytes(), WANTED)
    assert {name for name, part in found.items() if part} == ({kind} if kind else set())


def test_what_is_public_too_is_not_looked_for() -> None:
    moved = MODEL.copy()
    moved[5000:5100] += np.float32(0.01)
    content = RNG.bytes(100) + MODEL.tobytes()
    assert search(content, {"result": windows(moved, 4)})["result"] > 0.9
    assert search(content, {"result": windows(moved, 4)}, [windows(MODEL)])["result"] == 0
    assert search(content + moved[5050:5060].tobytes(), {"result": windows(moved, 4)}, [windows(MODEL)])["result"] > 0
