"""Calls: a member's signed proposal, in a room, to refresh, to change terms or members, or to recover its share.

call/C/call.msg        what is called for; C is the digest of its content
call/C/terms.json      for a change: the new terms
call/C/request.msg     for a recovery: the member's own request (`setup.recover`)
call/C/…               the messages of the ceremony, by the names that they have in a folder
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from quorumark.canonical import canonical, digest, parse
from quorumark.checks import field_names, is_count, is_hex, is_text, require, take
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.identity import Header
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Terms
from quorumark.consortium.succession import check_terms_follow
from quorumark.errors import InputError, RoomError
from quorumark.room.client import Client
from quorumark.room.place import Place
from quorumark.setup.amend import needs_new_shares
from quorumark.setup.recover import request

__all__ = ["Call", "call_header", "put_call", "read_call"]

KINDS = ("refresh", "reshare", "sign", "recover")
_WITH_TERMS = ("reshare", "sign")


@dataclass(frozen=True)
class Call:
    """What a member calls for: new shares (refresh), new shares under new terms (reshare), signatures of new terms with
    the shares as they are (sign), or its own share back (recover).

    `caller` is the key of who calls, `manifest` the one in force, `terms` the digest of new terms, `request` the
    SHA-256 of a recovery's request, and `helpers` whom it asks.
    """

    FORMAT: ClassVar[str] = "quorumark-room-call/v1"

    kind: str
    caller: str
    manifest: str
    terms: str
    request: str
    helpers: tuple[int, ...]
    purpose: str
    nonce: str

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "a call", f"must be for one of {', '.join(KINDS)}")
        require(
            is_hex(self.manifest, 32) and is_hex(self.nonce, 16), "a call", "must name a manifest, and have a nonce"
        )
        for name, kinds in (("terms", _WITH_TERMS), ("request", ("recover",))):
            value = getattr(self, name)
            sound = is_hex(value, 32) if self.kind in kinds else value == ""
            require(sound, f"a call's {name}", f"must be there to {' or '.join(kinds)}, and only then")
        require(all(is_count(x, 1) for x in self.helpers), "a call's helpers", "must be points")
        require(bool(self.helpers) == (self.kind == "recover"), "a call's helpers", "must be there to recover only")
        require(is_text(self.purpose, 500) and bool(self.purpose), "a call's purpose", "must be printable")

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"helpers": list(self.helpers)}

    def to_bytes(self) -> bytes:
        return canonical({"format": self.FORMAT, **self.as_dict()})

    def digest(self) -> str:
        return digest("room call", self.to_bytes()).hex()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        taken = take(parse(data, cls.FORMAT, "a call"), field_names(cls), "a call")
        require(isinstance(taken["helpers"], list), "a call's helpers", "must be a list")
        return cls(**{**taken, "helpers": tuple(taken["helpers"])})


def call_header(call: Call, sender: int) -> Header:
    return Header(call.manifest, call.digest(), "room/call", sender)


def read_call(message: bytes) -> Call:
    """What a message says, before its signature can be checked: it names the manifest that says who may sign."""
    return Call.from_bytes(message[4 + int.from_bytes(message[:4], "big") + 64 :])


def put_call(
    client: Client,
    home: HomeFolder,
    unlock: Unlock,
    ours: ConsortiumFolder,
    purpose: str,
    *,
    terms: Terms | None = None,
    new_shares: bool | None = None,
    helpers: tuple[int, ...] = (),
) -> Call:
    """Calls for new terms, or for a recovery with these helpers, or else for a refresh; all members see it.

    `new_shares`: whether new terms come with new shares. It must be said where a member's keys are others: the same
    member has new keys and keeps its share, or another one takes its place and must not have the old one's.
    """
    identity, manifest = home.identity(unlock), ours.manifest()
    kind, asked, nonce = "refresh", b"", os.urandom(16).hex()
    if terms is not None:
        check_terms_follow(terms, manifest.terms)
        keys = [{member.ed25519 for member in one.roster} for one in (terms, manifest.terms)]
        if new_shares is None:
            if keys[0] != keys[1] and not needs_new_shares(terms, manifest.terms):
                rule = "must be said: is it another member (new shares), or the same with new keys (same shares)?"
                raise InputError("--new-shares or --same-shares", rule)
            new_shares = needs_new_shares(terms, manifest.terms)
        kind = "reshare" if new_shares else "sign"
        if terms.anchor != manifest.terms.anchor:
            raise RoomError("another anchor does not go through a room: use consortium sign", code="room.other-call")
    if helpers:
        # a folder of its own first: the call names the request that is in it
        kind, folder = "recover", Place(home.path).folder("exchange", f"recovery-{nonce}")
        request(home, ours, unlock, folder, helpers)
        asked = (folder / "request.msg").read_bytes()
    call = Call(
        kind,
        identity.ed25519,
        manifest.digest().hex(),
        "" if terms is None else terms.digest().hex(),
        hashlib.sha256(asked).hexdigest() if asked else "",
        helpers,
        purpose,
        nonce,
    )
    start = f"call/{call.digest()}"
    if terms is not None:
        client.upload(terms.to_bytes(), f"{start}/terms.json")
    if asked:
        folder.rename(folder.with_name(call.digest()))
        client.upload(asked, f"{start}/request.msg")
    point = manifest.terms.point_of(identity.ed25519)
    client.upload(identity.write(call_header(call, point), call.to_bytes()), f"{start}/call.msg")
    return call
