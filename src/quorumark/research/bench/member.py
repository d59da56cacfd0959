"""One member of a round and its server at full size, by the calls that a round makes (`quorumark bench secagg`).

A member goes from its trained weights to the masked upload: it checks and copies them, compares the mark with its own
update, finds the level of units that the update needs, signs *ready*, weighs and encodes or packs the update, adds what
belongs to the mark (norms, dither, its share from a sealed file), the tag of the sum and the masks, and hashes and
signs the vector. Nothing of that is left out. The server goes from the masked sum to the next model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.merkle import SALT_ELEMENTS
from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Genesis, Manifest, Terms, anchor_of, roster_of
from quorumark.consortium.shares import ShareFile, ShareInfo, ShareWriter, share_root
from quorumark.consortium.strength import Strength
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout
from quorumark.round.member import RoundMember
from quorumark.round.memory import MemoryState
from quorumark.round.movement import norm_count, update_norms
from quorumark.round.secagg.messages import Upload
from quorumark.round.server import RoundServer

__all__ = ["OneRound", "layout_of", "resnet18"]

_STEP = np.float32(1e-3)  # of the average; members' own steps are √K times as large
_ROUNDS = 3  # accepted before the one that is timed: then there is a mark


def resnet18(classes: int = 100) -> dict[str, tuple[int, ...]]:
    """The tensors of a ResNet-18 for images of 32×32: 11.2 million weights."""
    shapes: dict[str, tuple[int, ...]] = {"stem.weight": (64, 3, 3, 3), "fc.weight": (classes, 512)}
    shapes |= {"fc.bias": (classes,), **_norm("norm", 64)}
    width = 64
    for stage, wide in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name = f"{stage}.{block}"
            shapes |= {f"{name}.a.weight": (wide, width, 3, 3), f"{name}.b.weight": (wide, wide, 3, 3)}
            shapes |= {**_norm(f"{name}.norm_a", wide), **_norm(f"{name}.norm_b", wide)}
            if width != wide:
                shapes |= {f"{name}.short.weight": (wide, width, 1, 1), **_norm(f"{name}.norm_short", wide)}
            width = wide
    return shapes


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{what}": (width,) for what in ("weight", "bias", "running_mean", "running_var")}


def layout_of(shapes: dict[str, tuple[int, ...]]) -> ModelLayout:
    return ModelLayout.of({name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()})


class OneRound:
    """The round after three that were accepted, up to where its set is announced; `me` may then go its way again and
    again. All have one share, and nobody but `me` reads it: what opens is no model of theirs, at the same cost."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        packing: int,
        members: int,
        mark: bool,
        folder: Path,
        *,
        drops: int = 0,
    ) -> None:
        """`drops`: so many are lost before they upload, in `uploaded_again`."""
        self.rng, self.mark, self.packing = np.random.default_rng(1), mark, packing
        model = {name: np.float32(0.05) * self._normal(*shape) for name, shape in shapes.items()}
        self.layout = ModelLayout.of(model)
        people = [Identity.generate(f"member {x}") for x in range(1, members + 1)]
        share = field.random(self.layout.coordinates)
        self.manifest, file = _consortium(self.layout, model, people, share, packing, folder)
        self.server = server = RoundServer(self.manifest, self.layout, model, marks=mark)
        start = self._accept_rounds(model, members)
        server.like, server.round_no = self.layout.unflatten(start, model), _ROUNDS
        self.result = self.layout.unflatten(start + np.float32(members**0.5) * self._step(), model)
        self.members: dict[int, RoundMember] = {}
        turn = server.advance(server.like)
        if mark and not server.history.amplitudes().marks:
            raise AssertionError("the mark is not what this row is about")
        server.begin()
        flat = self.layout.flatten(self.result)
        for person in people:
            member = RoundMember(person, self.manifest, self.layout, share if self.members else file, mark=mark)
            member.history = server.history
            member.begin(turn)
            member.take_again(flat)
            server.take_ready(member.point, member.ready(), *member.said())
            self.members[member.point] = member
        self.me = self.members[min(self.members)]
        server.announce()
        self._told = server.announced_to(self.me.point)
        self._memory = self._state()._load()
        self._masked: Vector | None = None
        if drops:
            self._fail(sorted(self.members)[: members - drops])
            self._state()._save(self._memory)

    def _state(self) -> MemoryState:
        state = self.me.secagg.state
        assert isinstance(state, MemoryState)  # noqa: S101
        return state

    def _normal(self, *shape: int) -> NDArray[np.float32]:
        return self.rng.standard_normal(shape, np.float32)

    def _step(self) -> NDArray[np.float32]:
        return _STEP * self._normal(self.layout.size)

    def _accept_rounds(self, model: dict[str, NDArray[np.float32]], members: int) -> NDArray[Any]:
        """Three rounds of members whose updates have little in common."""
        now, history = self.layout.flatten(model), self.server.history
        for number in range(1, _ROUNDS + 1):
            before, step = history.mark.model, self._step()
            own = codec.encode(now + np.float32(members**0.5) * step)
            now = now + step
            norms = np.zeros(norm_count(self.layout), np.uint64)
            if self.mark:
                norms = update_norms(self.layout, before, own, Fraction(1))
            amplitudes = history.amplitudes()
            marked = amplitudes if self.mark and amplitudes.marks else None
            history.accept(number, codec.encode(now), marked, norms)
        return now

    def uploaded(self) -> Upload:
        """From the trained weights to the masked upload, as if it were the first time."""
        self._state()._save(self._memory)
        self.me.take(self.result)
        if self.me.too_strong():
            raise AssertionError("the mark is too strong for this update")
        self.me.ready()
        self.me.said()
        return self.me.upload(*self._told)

    def _fail(self, stayed: list[int]) -> None:
        """An attempt that fails, and one without those who dropped: what `me` is told of both."""
        server = self.server
        self._upload(stayed)
        server.retry()
        self._told_again = server.announced_to(self.me.point)
        self._upload(stayed)
        self._request = server.request(self.me.point)

    def _upload(self, points: Iterable[int]) -> None:
        """Without the masks of pairs, which cancel in a sum, and which nobody takes off here."""
        for x in points:
            member = self.members[x]
            member.secagg.together = frozenset(self.members)
            upload = member.upload(*self.server.announced_to(x))
            self.server.take_upload(x, upload.head, upload.vector)
            member.secagg.together = frozenset()

    def uploaded_again(self) -> bytes:
        """The same where an attempt fails: two uploads from one result, and the answer."""
        self.uploaded()
        self.me.upload(*self._told_again)
        return self.me.unmask(self._request)

    def mask_again(self) -> None:
        """The server's sum as it was before it was unmasked; at first, all upload and answer."""
        server = self.server
        if self._masked is None:
            self._state()._save(self._memory)
            members = server.members
            if server.missing:
                self._upload(server.missing)
            for x in members:
                server.take_answer(x, self.members[x].unmask(server.request(x)))
            self._masked = server._running()._sum.copy()
        server._running()._sum[:] = self._masked
        server._running()._stage = "unmask"

    def unmasked(self) -> object:
        """From the masked sum to the next model."""
        return self.server.finish()

    def unmasked_once(self) -> object:
        self.mask_again()
        return self.unmasked()


def _consortium(
    layout: ModelLayout,
    model: dict[str, NDArray[np.float32]],
    people: list[Identity],
    share: Vector,
    packing: int,
    folder: Path,
) -> tuple[Manifest, ShareFile]:
    """A manifest that all have signed, with one root for all shares, and the first member's share in a sealed file."""
    roster = roster_of((person.card(), 100) for person in people)
    terms = Terms(
        "bench", 2, roster, layout.digest(), layout.coordinates, anchor_of(layout, model),
        created="2026-01-31T12:00:00Z", strength=Strength.of({}, layout.coordinates), policy=Policy(packing=packing),
    )  # fmt: skip
    salt = field.random(SALT_ELEMENTS)
    roots = (share_root([share], salt, terms.leaf, layout.coordinates).hex(),) * len(people)
    session = os.urandom(32).hex()
    genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, session, roots)
    manifest = Manifest(terms, genesis, roots)
    for person in people:
        signature = person.sign("manifest", manifest.sign_bytes())
        manifest = manifest.with_signature(terms.point_of(person.ed25519), signature)
    path, key = folder / f"share-{packing}-{len(people)}.sealed", folder / f"{packing}-{len(people)}.key"
    if not key.exists():
        Unlock.new_key_file(key)
    unlock, info = Unlock.key_file(key), ShareInfo.under(manifest, terms.point_of(people[0].ed25519))
    others = field.random(SALT_ELEMENTS * len(people)).reshape(len(people), SALT_ELEMENTS)
    with ShareWriter(path, unlock, info, salt, others) as file:
        file.write(share)
    return manifest, ShareFile(path, unlock)
