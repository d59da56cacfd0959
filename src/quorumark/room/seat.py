"""What every part of an agent works with: the member's home and keys, its desk, what the room has, and its policy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.errors import RoomError
from quorumark.files import write_private
from quorumark.room.client import Client, Notice
from quorumark.room.desk import Desk, Mirror
from quorumark.room.place import Place, Policy
from quorumark.room.shares import Share

__all__ = ["Seat", "sha256_of"]


@dataclass(frozen=True)
class Seat:
    """One member in one room."""

    home: HomeFolder
    unlock: Unlock
    identity: Identity
    place: Place
    desk: Desk
    mirror: Mirror
    policy: Policy
    share: Share
    sent: set[str] = field(default_factory=set)  # names given since the room was last read whole

    @property
    def key(self) -> str:
        return self.identity.ed25519

    def there(self, author: str, name: str, code: str = "room.not-found") -> Notice:
        """An entry that must be there."""
        notice = self.mirror.find(author, name)
        if notice is None:
            raise RoomError(f"{name!r} is not in the room yet", code=code)
        return notice

    def cached(self, client: Client, notice: Notice, most: int) -> bytes:
        """A small file of somebody's, fetched once."""
        path = self.place.folder("answers", "others") / notice.sha256
        if not path.exists():
            write_private(path, client.small(notice, most))
        return path.read_bytes()

    def forget(self, notice: Notice) -> None:
        """Takes what `cached` kept off the disk."""
        (self.place.folder("answers", "others") / notice.sha256).unlink(missing_ok=True)

    def send(self, client: Client, path: Path, name: str) -> None:
        """A file goes to the room, unless it is there."""
        if self.mirror.find(self.key, name) is None and name not in self.sent:
            client.upload(path, name)
            self.sent.add(name)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
