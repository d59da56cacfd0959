"""What a server must never hold, read from the members' own disks after a run, so that it can be looked for."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field, shamir
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock, read_sealed
from quorumark.consortium.records import Manifest
from quorumark.consortium.shares import ShareFile
from quorumark.model.layout import ModelLayout, read_safetensors
from quorumark.round.memory import FolderState
from quorumark.round.secagg.masks import private_key
from tests.kit.overheard import Words, samples, texts, together, windows

Found = dict[str, Words]


def trained(path: Path, identity: Identity) -> NDArray[Any]:
    """What a member keeps of its training, sealed, until a successor is accepted."""
    return np.frombuffer(read_sealed(path, Unlock.by_identity(identity), "a round's result"), np.float32)


def secrets_of(name: str, identity: Identity, share: ShareFile, key_file: bytes, seeds: Iterable[str]) -> Found:
    """What every member has that nobody else may have, whatever it does with it: by its name in words."""
    private, vector = identity.to_secret_bytes(), share.vector()
    return {
        f"{name}'s share": windows(vector),
        f"{name}'s share, written otherwise": samples(vector),
        f"{name}'s salts": together(windows(share.salt), windows(share.others_salts)),
        f"{name}'s key file": texts(key_file),
        f"{name}'s private keys": together(texts(private[:32]), texts(private[32:])),
        f"{name}'s seed of the ceremony": together(*(texts(bytes.fromhex(seed)) for seed in seeds)),
    }


def signs_of(shares: Mapping[int, NDArray[Any]], threshold: int, manifest: Manifest) -> Found:
    """The key itself, which nobody ever had: here so many shares are put together."""
    points = sorted(shares)[:threshold]
    raw = field.to_signed(shamir.reconstruct({x: shares[x] for x in points}, threshold))
    assert set(np.unique(raw)) == {-1, 1}
    if threshold > 2:  # with one fewer there is nothing
        guess = field.to_signed(shamir.reconstruct({x: shares[x] for x in points[:-1]}, threshold - 1))
        assert not np.isin(guess, (-1, 1)).any()
    used = np.where(manifest.genesis.whitening(0, raw.size), -raw, raw)
    found = {}
    for name, vector in {"the signs": raw, "the signs in use": used}.items():
        packed = [np.packbits(vector > 0, bitorder=order) for order in ("big", "little")]
        found[f"{name}, packed"] = together(*(windows(bits) for p in packed for bits in (p, ~p)))
        found[f"{name}, as bytes"] = windows(vector.astype(np.int8))
    return found


class Seeds(threading.Thread):
    """Keeps the sealed states of ceremonies that come and go in members' homes in a folder, until `stop`."""

    def __init__(self, members: Path, pause: float = 0.02) -> None:
        super().__init__(daemon=True)
        self._members, self._pause = members, pause
        self._ended = threading.Event()
        self._states: dict[str, set[bytes]] = {}

    def run(self) -> None:
        while not self._ended.wait(self._pause):
            for path in self._members.glob("*/consortia/*/ceremony.sealed"):
                with contextlib.suppress(FileNotFoundError):
                    name = path.relative_to(self._members).parts[0]
                    self._states.setdefault(name, set()).add(path.read_bytes())

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def of(self, name: str, unlock: Unlock) -> set[str]:
        """The seeds of all ceremonies of a member, in hex."""
        found = set()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ceremony.sealed"
            for content in list(self._states.get(name, ())):
                path.write_bytes(content)
                found.add(str(json.loads(read_sealed(path, unlock, "ceremony"))["seed"]))
        return found - {""}


class Secrets:
    """What a server must never hold (`secret`); what it must have held, if the listening is worth anything
    (`passed`); and what is `public`, since weights that training did not move are in everybody's result."""

    def __init__(self, out: Path, kept: Path, names: Sequence[str], ready: Mapping[str, int]) -> None:
        """OUT has `members` (homes and key files) and `consortium` (manifest, layout, first and last model); KEPT is
        what a `Listener` kept. `ready` says for how many rounds a member was ready: so many results must be known."""
        self._out, self._kept, self._ready = out, kept, ready
        self._names = names
        folder = out / "consortium"
        self._manifest = Manifest.from_bytes((folder / "consortium.json").read_bytes())
        self._layout = ModelLayout.from_bytes((folder / "layout.json").read_bytes())
        models = {name: self._flat(folder / f"{name}.safetensors") for name in ("anchor", "model")}
        self._models = list(models.values())
        self.secret: dict[str, Words] = {}
        self.passed = {f"the {name}": windows(vector) for name, vector in models.items()}
        self.public = [form for vector in models.values() for form in self._forms(vector)]
        self._keys: list[Words] = []
        shares = {x: self._member(x, name) for x, name in enumerate(names, 1)}
        self.secret |= signs_of({x: shares[x] for x in (1, 3, 5)}, 3, self._manifest)
        self.passed["public keys of rounds"] = together(*self._keys)

    def _flat(self, path: Path) -> NDArray[Any]:
        return self._layout.flatten(read_safetensors(path))

    @staticmethod
    def _forms(vector: NDArray[Any], step: int = 1) -> list[Words]:
        """With a step of 4, any seven neighbouring weights hold a window."""
        return [windows(form, step) for form in (vector, vector.astype(float), codec.encode(vector))]

    def _member(self, point: int, name: str) -> NDArray[Any]:
        members, found = self._out / "members", self._kept / name
        home, unlock = HomeFolder(members / name), Unlock.key_file(members / f"{name}.key")
        identity, share = home.identity(unlock), home.only_consortium().share(unlock)
        seeds = {json.loads(read_sealed(p, unlock, "ceremony"))["seed"] for p in found.glob("*-ceremony.sealed")}
        entries = list(self._entries(found, identity))
        tags = list(self._keys_of_sums(found, identity))
        assert len(seeds) == 1, "the seed of the ceremony must be known to be looked for"
        ready = self._ready[name]
        assert len(entries) >= ready, "and the keys of the rounds"
        assert len(tags) >= ready - 1, "and those by which sums are checked"
        begun = [self._flat(path) for path in found.glob("*-model.safetensors")]
        self.public += [form for v in begun for form in self._forms(v)]
        results = [trained(path, identity) for path in found.glob("*-result-*.sealed")]
        assert len(results) >= ready, "and the results of training"  # which it keeps before it says that it is ready
        summed = [m.examples for m in self._manifest.terms.roster if self._ready[self._names[m.point - 1]]]
        part = self._manifest.terms.member(point).examples / sum(summed)
        self.secret |= secrets_of(name, identity, share, (members / f"{name}.key").read_bytes(), seeds)
        if ready:
            self.secret |= {
                f"{name}'s keys of rounds": together(*(texts(entry) for entry in entries)),
                f"{name}'s keys of sums": together(*(texts(tag) for tag in tags)),
                f"{name}'s models": together(*(form for v in results for form in self._forms(v, 4))),
                f"{name}'s models, weighted": together(*(windows(codec.encode(v, part), 4) for v in results)),
                f"{name}'s models, written otherwise": together(
                    *(samples(v, np.all([v != known for known in (*self._models, *begun)], axis=0)) for v in results)
                ),
            }
        return share.vector()

    @staticmethod
    def _memories(found: Path, identity: Identity) -> Iterator[dict[str, Any]]:
        """Its memory of rounds as it was at several times."""
        for path in found.glob("*-rounds.sealed"):
            with tempfile.TemporaryDirectory() as folder:
                shutil.copy(path, Path(folder) / "rounds.sealed")
                with FolderState(folder, identity).edit() as memory:
                    yield dict(memory)

    def _keys_of_sums(self, found: Path, identity: Identity) -> Iterator[bytes]:
        """The key of the tag of each round that it took part in."""
        memories = self._memories(found, identity)
        yield from {bytes.fromhex(memory["sum"]["key"]) for memory in memories if memory["sum"]}

    def _entries(self, found: Path, identity: Identity) -> Iterator[bytes]:
        """The secrets of the rounds that it took part in."""
        seen = set()
        for memory in self._memories(found, identity):
            for entry in (entry for entry in memory["purposes"].values() if "secret" in entry):
                if entry["secret"] not in seen:
                    seen.add(entry["secret"])
                    yield bytes.fromhex(entry["secret"])
                    yield private_key(entry).private_bytes_raw()
                    public = private_key(entry).public_key().public_bytes_raw()
                    self._keys.append(windows(np.frombuffer(public, np.uint8)))
