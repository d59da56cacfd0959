"""Time stamps in a room, beside the manifests and certificates that they date.

    stamps/DIGEST/….json      a member's file of stamps; DIGEST: the first 32 bytes of the SHA-512 of what they date

Agents do not touch them: a stamp is worth something to who trusts its authority. So a member takes over those that hold
under roots that it names itself, and the room can only leave some out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quorumark.errors import InputError, QuorumarkError, StampError
from quorumark.files import write_shared
from quorumark.room.client import Client
from quorumark.stamps.record import MOST_CHAINS, Dated, Stamps, stamps_path
from quorumark.verify.dates import find_stamps, read_dated

if TYPE_CHECKING:
    from cryptography import x509

__all__ = ["put_stamps", "take_stamps"]

_LARGEST = 1 << 24


def _start(stamps: Stamps) -> str:
    return f"stamps/{stamps.sha512[:64]}/"


def put_stamps(client: Client, path: Path) -> int:
    """Puts the stamps beside a manifest or a certificate into the room; how many there are."""
    found = find_stamps(read_dated(path), [path.parent])
    if not found.stamps.chains:
        raise InputError("FILE", "must have stamps beside it (quorumark stamp)", str(path))
    data = found.stamps.to_bytes()
    client.upload(data, f"{_start(found.stamps)}{hashlib.sha256(data).hexdigest()[:16]}.json")
    return len(found.stamps.chains)


def take_stamps(client: Client, path: Path, roots: Sequence[x509.Certificate]) -> list[Dated]:
    """Adds the stamps in the room that hold under these roots to those beside a file; what all of them show."""
    found = find_stamps(read_dated(path), [path.parent])
    stamps, message = found.stamps, found.message
    for notice in client.whole_log():
        if not notice.name.startswith(_start(stamps)) or notice.gone:
            continue
        try:
            other = Stamps.from_bytes(client.small(notice, _LARGEST))
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            continue
        if (other.kind, other.sha512) != (stamps.kind, stamps.sha512):
            continue
        for number in range(len(other.chains)):
            try:
                other.check(number, message, roots)
            except StampError:
                continue  # of an authority that this reader does not trust, ended, or made up
            stamps = _with_chain(stamps, other.chains[number])
    dated = [stamps.check(number, message, roots) for number in range(len(stamps.chains))]
    if stamps != found.stamps:
        write_shared(stamps_path(path, message), stamps.to_bytes())
    return dated


def _with_chain(stamps: Stamps, chain: tuple[bytes, ...]) -> Stamps:
    """With one more chain, or with a longer one in the place of what it renews."""
    chains = list(stamps.chains)
    for number, one in enumerate(chains):
        short, long = sorted((one, chain), key=len)
        if long[: len(short)] == short:
            chains[number] = long
            return Stamps(stamps.kind, stamps.sha512, tuple(chains))
    if len(chains) >= MOST_CHAINS:
        return stamps
    return Stamps(stamps.kind, stamps.sha512, (*chains, chain))
