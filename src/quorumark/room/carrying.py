"""Messages of a ceremony between its folder on this disk and the room.

The ceremony itself is `setup.exchange` and its likes, unchanged. This fetches only messages that the terms make it
expect, from their authors, and no more bytes than each may have; sends this member's own; and notices if the room has
one of this member's that this home does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from quorumark.consortium.identity import is_signed_by
from quorumark.consortium.records import Member
from quorumark.errors import RoomError
from quorumark.files import write_exchanged
from quorumark.room.client import Client
from quorumark.room.numbering import sender_of
from quorumark.room.seat import Seat, sha256_of
from quorumark.setup.waiting import Progress

__all__ = ["Carrier"]

_LARGEST = 1 << 26
_SENT = "sent"


class Carrier:
    """One ceremony of one member: names in the room start with `start`."""

    def __init__(self, seat: Seat, start: str, folder: Path, point: int) -> None:
        self._seat, self._start, self.folder, self._point = seat, start, folder, point
        self._fetched: dict[Path, str] = {}
        self._progress: Progress | None = None
        self._stuck = ""

    def check_not_set_back(self, client: Client) -> None:
        """The room has no message that this member signed and this home does not know."""
        for notice in self._seat.mirror.named(self._start, ".msg"):
            name = notice.name.removeprefix(self._start)
            if notice.author != self._seat.key or sender_of(name) != self._point:
                continue
            path, where = self.folder / name, f"own {notice.name}"
            if path.exists() and sha256_of(path) == notice.sha256:
                self._seat.desk.trouble(where, "")
            elif is_signed_by(client.small(notice, _LARGEST), self._seat.key):
                raise RoomError(
                    f"the room has {name!r} from this member, which this home did not send: the home was set back to "
                    "an earlier day, or an agent with the same keys runs elsewhere; all discard this ceremony, and "
                    "begin a new one",
                    code="room.set-back",
                )
            else:
                text = f"the room has {notice.name!r} in this member's name, which it did not sign"
                self._seat.desk.trouble(where, text)

    def fetch(self, client: Client, expected: Mapping[str, tuple[Member, int]]) -> None:
        """Messages that are expected: name in the folder → its sender, and the most bytes that it may have."""
        for name, (sender, most) in expected.items():
            notice, path = self._seat.mirror.find(sender.ed25519, self._start + name), self.folder / name
            if notice is None or self._fetched.get(path) == notice.sha256:
                continue
            where = f"{self._start}{name}"
            if not path.exists() or sha256_of(path) != notice.sha256:
                try:
                    data = client.small(notice, most)
                except RoomError as error:
                    if error.code == "room.unreachable":
                        raise
                    text = f"the message {name} of {sender.name} is refused: {error}"
                    self._seat.desk.trouble(where, text)
                    continue
                write_exchanged(path, data)
                self._progress = None
            self._seat.desk.trouble(where, "")
            self._fetched[path] = notice.sha256

    def send(self, client: Client) -> None:
        """This member's messages that the room does not have."""
        for path in sorted(one for one in self.folder.rglob("*") if one.is_file()):
            name = path.relative_to(self.folder).as_posix()
            if sender_of(name) != self._point:
                continue
            there = self._seat.mirror.find(self._seat.key, self._start + name)
            if there is None and self._fetched.get(path) != _SENT:
                client.upload(path, self._start + name)
                self._fetched[path] = _SENT

    def sent_again(self) -> None:
        """After the room was away: what was sent may be lost there, so it is compared anew."""
        self._fetched = {path: value for path, value in self._fetched.items() if value != _SENT}

    # --- visits ---

    def _messages(self) -> str:
        return " ".join(f"{path}:{sha}" for path, sha in sorted(self._fetched.items()) if sha != _SENT)

    def stuck(self) -> None:
        """What is there is not good: visited again once the room has something else."""
        self._stuck = self._messages() or "nothing"

    def visit(self, act: Callable[[], Progress]) -> Progress | None:
        """A visit to the folder, unless what it waits for is not there yet; None where nothing is new."""
        if self._stuck and self._stuck == (self._messages() or "nothing"):
            return None
        last = self._progress
        if last is not None and not last.finished and last.files and not last.now().finished:
            return last.now()
        self._progress = act()
        return self._progress

    @property
    def progress(self) -> Progress | None:
        return self._progress
