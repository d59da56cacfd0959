"""What members' agents read from a room, for the fuzzer: heads of ledgers, calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quorumark.consortium.home import read_file
from quorumark.consortium.identity import open_message
from quorumark.room.calls import Call, call_header, read_call
from quorumark.verify.heads import Head, Seen, contradiction, differs, occasion
from tests.kit.consortium import make_world
from tests.kit.corpus import JSON, PLAIN, FileKind, Kind


def in_a_room(folder: Path, _: Path) -> Iterator[Kind]:
    world = make_world(folder, 3, 2)
    manifest, (home, unlock) = world.manifest, world.homes[0]
    identity, lines = home.identity(unlock), ("ab" * 32, "cd" * 32)
    seen = {manifest.terms.roster[1].ed25519: Seen(2, 1, "ef" * 32), manifest.terms.roster[2].ed25519: Seen(1, 0, "")}
    said = (occasion("12" * 32, False), occasion("12" * 32, True))
    head = Head.sign(
        identity,
        manifest=manifest.digest().hex(),
        point=1,
        said=said,
        lines=lines,
        seen=seen,
        created="2026-01-31T12:00:00Z",
    )

    def compared(here: Path) -> Any:
        found = Head.from_bytes(read_file(here / "file", "a head"))
        found.verify(manifest.terms)
        assert not contradiction(head, found)
        return found.signed_bytes(), [differs(one, head.as_seen, lines) for one in found.seen.values()]

    yield FileKind("ledger head", compared, JSON, data=head.to_bytes())
    for kind in ("refresh", "reshare", "recover"):
        call = Call(
            kind,
            identity.ed25519,
            manifest.digest().hex(),
            "ab" * 32 if kind == "reshare" else "",
            "cd" * 32 if kind == "recover" else "",
            (2, 3) if kind == "recover" else (),
            "why",
            "ef" * 16,
        )

        def called(here: Path, call: Call = call) -> Any:
            message = read_file(here / "file", "a call")
            found = read_call(message)
            open_message(message, manifest.terms, call_header(found, 1))
            assert found == call
            return found.digest()

        yield FileKind(f"call to {kind}", called, PLAIN, data=identity.write(call_header(call, 1), call.to_bytes()))
