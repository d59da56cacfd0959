"""An agent's word on its member's share and ledger, told to the room when it changes; and whether the room holds a word
of this member that this home does not know: then the home was set back, or has a double."""

from __future__ import annotations

import time

from quorumark.checks import is_hex
from quorumark.consortium.home import ConsortiumFolder
from quorumark.errors import QuorumarkError, RoomError
from quorumark.room.client import Client, Notice
from quorumark.room.heads import accepted_standings
from quorumark.room.seat import Seat
from quorumark.room.statement import LARGEST, Standing, name_of, number_of
from quorumark.verify.dates import find_stamps
from quorumark.verify.evidence import now
from quorumark.verify.guard import budget
from quorumark.verify.ledger import Ledger

__all__ = ["Standings"]

_DAY = 24 * 60 * 60


class Standings:
    """One member's statements in a room, about consortia whose terms were proposed there; others do not concern it."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._read: dict[str, Standing] = {}  # own statements that were fetched, by their SHA-256
        self._health: dict[str, tuple[float, str]] = {}

    def step(self, client: Client) -> None:
        """Compares, then tells. A RoomError if this home was set back: then nothing else may be done with it."""
        ours = {c.manifest().genesis.terms: c for c in self._seat.home.consortia() if c.manifest_path.exists()}
        proposals = self._seat.place.folder("proposals")
        for genesis in sorted(path.name for path in proposals.iterdir() if is_hex(path.name, 32)):
            own = [n for n in self._seat.mirror.named(f"standing/{genesis}/", ".json") if number_of(n.name, genesis)]
            own = [n for n in own if n.author == self._seat.key]
            lost = accepted_standings(self._seat.place, ours[genesis]) if genesis in ours else set()
            last = self._last(client, [n for n in own if n.sha256 not in lost], genesis)
            if genesis in ours:
                self._seat.share.follow(ours[genesis])
                ledger = Ledger.open(ours[genesis], ours[genesis].manifest())
                if last is not None:
                    self._compare(last, ours[genesis], ledger)
                self._tell(client, ours[genesis], ledger, last)
            elif last is not None:
                raise _set_back("the room has this member's word about a key that is not in this home")

    def _last(self, client: Client, own: list[Notice], genesis: str) -> Standing | None:
        """The latest own statement in the room that holds; a room can hold it back, but make none up."""
        for notice in sorted(own, key=lambda n: number_of(n.name, genesis), reverse=True):
            if notice.sha256 not in self._read:
                try:
                    self._read[notice.sha256] = Standing.read(client.small(notice, LARGEST), self._seat.key)
                except QuorumarkError as error:
                    if error.code == "room.unreachable":
                        raise
                    continue
            if self._read[notice.sha256].genesis == genesis:
                return self._read[notice.sha256]
        return None

    @staticmethod
    def _compare(last: Standing, ours: ConsortiumFolder, ledger: Ledger) -> None:
        if last.epoch > ours.manifest().epoch:
            raise _set_back(
                f"this member had epoch {last.epoch} of its share, and this home has {ours.manifest().epoch}"
            )
        if last.entries > len(ledger.entries):
            raise _set_back(f"this member's ledger had {last.entries} lines, and has {len(ledger.entries)} here")
        heads = [*(str(entry["previous"]) for entry in ledger.entries), ledger.head]
        if heads[last.entries] != last.head:
            raise _set_back(f"line {last.entries} of this member's ledger is another one here")

    def _tell(self, client: Client, ours: ConsortiumFolder, ledger: Ledger, last: Standing | None) -> None:
        """Its number is the time, so that a name which the room hides from this member is not given again."""
        try:
            said = self._now(ours, ledger)
            if last is None or not last.same(said) or last.time[:10] != said.time[:10]:
                client.upload(said.signed(self._seat.identity), name_of(said.genesis, int(time.time())))
        except QuorumarkError as error:  # a file that is damaged here, or a room that is full: the rest goes on
            if error.code == "room.unreachable":
                raise
            self._seat.desk.trouble("standing", f"this member's word on its share is not in the room: {error}")
        else:
            self._seat.desk.trouble("standing", "")

    def _now(self, ours: ConsortiumFolder, ledger: Ledger) -> Standing:
        manifest = ours.manifest()
        return Standing(
            genesis=manifest.genesis.terms,
            manifest=manifest.digest().hex(),
            epoch=manifest.epoch,
            share=self._share(ours) if manifest.terms.has_key else "sound",
            entries=len(ledger.entries),
            head=ledger.head,
            used=sum(ledger.equations().values()),
            budget=budget(manifest.terms) if manifest.terms.has_key else 0,
            stamps=len(find_stamps(manifest, [ours.path]).stamps.chains),
            time=now(),
        )

    def _share(self, ours: ConsortiumFolder) -> str:
        """Whether every bit of the share is what the manifest's root says; looked at once a day."""
        key = ours.manifest().digest().hex()
        when, found = self._health.get(key, (0.0, ""))
        if not found or time.monotonic() - when > _DAY:
            found = "sound" if self._seat.share.is_sound(ours) else "unsound"
            self._health[key] = time.monotonic(), found
        return found


def _set_back(what: str) -> RoomError:
    return RoomError(
        f"{what}: the home was set back to an earlier day, or another copy of it is in use. Nothing is signed or "
        "answered: stop the other copy, or put the newest backup back (if the ledger is lost for good: quorumark room "
        "accept-ledger, with your own name)",
        code="room.set-back",
    )
