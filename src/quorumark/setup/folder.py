"""The dealer-free setup over a folder that all members can reach: a network share, a synchronised folder, a stick.

Each member runs `advance` whenever it likes; it does all that can be done with what is there, writes its messages and
says what it waits for. A crash at any point loses nothing: the state is sealed on disk before a message is written,
every step can be done again with the same result, and messages are files that appear whole or not at all.

    FOLDER/1-commit/SENDER.msg  2-reveal/…  3-deal/SENDER-to-RECIPIENT.msg  4-open/…  5-confirm/…  6-root/…  7-echo/…
    FOLDER/8-health/…  9-sign/…

There is no relay: every member adds up the signed openings itself. Keep the folder until everybody has finished: who
has finished has forgotten what it would take to write a message again.

A file that is damaged, or somebody else's, is refused by the sender's name and the step; once the right one is there,
go on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorumark.errors import CeremonyError, MessageError
from quorumark.home import Home
from quorumark.keystore import Unlock, only_one, read_sealed, write_private, write_sealed, write_shared
from quorumark.records import Manifest, Terms, canonical
from quorumark.setup.dkg import STEPS, DkgMember, check_terms, openers, relay_sum
from quorumark.shares import ShareInfo, ShareWriter

__all__ = ["Progress", "advance", "discard"]

_KIND = "ceremony"


@dataclass(frozen=True)
class Progress:
    """How far this member got: finished, or waiting for the named members' messages of a step."""

    step: str
    waiting: tuple[str, ...]
    manifest: Manifest | None = None

    @property
    def finished(self) -> bool:
        return self.manifest is not None


class _Waiting(Exception):  # noqa: N818 - not an error: the ceremony pauses
    def __init__(self, step: str, names: tuple[str, ...]) -> None:
        super().__init__(step)
        self.progress = Progress(step, names)


def advance(
    home: Home,
    unlock: Unlock,
    terms: Terms,
    folder: str | os.PathLike[str],
    note: Callable[[str], None] = lambda _: None,
) -> Progress:
    """Does what can be done now. Call it again when others have written; `note` hears of each step as it is done.

    After a fault that only a new ceremony mends, every further call says so, until `discard` is called.
    """
    check_terms(terms)
    terms.point_of(home.card().ed25519)  # nothing is made for terms of others
    place = home.consortium(terms)
    with only_one(place.path):
        if place.manifest_path.exists():
            place.ceremony_path.unlink(missing_ok=True)  # a power cut came between the two
            if place.share_path.exists():
                return Progress("sign", (), place.manifest())
            raise CeremonyError("the ceremony is finished, but this member's share is gone: it must be recovered")
        run = _Run(home, unlock, terms, Path(folder), note)
        try:
            return Progress("sign", (), run.all_steps())
        except _Waiting as waiting:
            return waiting.progress
        except CeremonyError as error:
            run.give_up(str(error))
            raise


def discard(home: Home, terms: Terms) -> bool:
    """Forgets a ceremony that cannot go on; whether there was one. The next needs a new, empty folder."""
    place = home.consortium(terms)
    with only_one(place.path):
        there = place.ceremony_path.exists()
        place.ceremony_path.unlink(missing_ok=True)
        return there


class _Run:
    """One member's visit to the folder."""

    def __init__(self, home: Home, unlock: Unlock, terms: Terms, folder: Path, note: Callable[[str], None]) -> None:
        self._place = home.consortium(terms)
        self._unlock, self._terms, self._folder, self._note = unlock, terms, folder, note
        identity = home.identity(unlock)
        if self._place.ceremony_path.exists():
            self._state: dict[str, Any] = json.loads(read_sealed(self._place.ceremony_path, unlock, _KIND))
        else:
            self._state = {"seed": os.urandom(32).hex(), "sent": {}, "used": {}, "failed": ""}
            self._save()
        if self._state["failed"]:
            raise CeremonyError(f"this ceremony has failed ({self._state['failed']}); discard it and start a new one")
        self._member = DkgMember(identity, terms, bytes.fromhex(self._state["seed"]))
        self._others = [m.point for m in terms.roster if m.point != self._member.point]

    def all_steps(self) -> Manifest:
        member = self._member
        self._publish("commit", member.commit())
        # a commitment is not held against its sender until it was revealed: it may be one of an earlier ceremony
        self._publish("reveal", self._use("commit", member.reveal, remember=False))
        for recipient, message in self._use("reveal", member.deal).items():
            self._publish("deal", message, recipient)
        self._use("deal", member.receive)  # fixed on disk before this member opens anything of it
        chosen = openers(self._terms)
        if member.point in chosen:
            self._publish("open", member.open(chosen))
        openings = {x: self._path("open", x) for x in chosen}
        self._wait("open", [x for x, path in openings.items() if not path.exists()])
        total = relay_sum(self._terms, member.session, {x: self._read(p, "open", x) for x, p in openings.items()})
        self._publish("confirm", member.confirm(total))
        self._publish("root", self._use("confirm", member.root))
        self._publish("echo", self._use("root", member.echo))
        self._publish("health", self._use("echo", member.health))
        self._use("health", member.finish)
        self._publish("sign", member.sign())
        manifest: Manifest = self._use("sign", member.signed)
        self._keep(manifest)
        return manifest

    def give_up(self, reason: str) -> None:
        """After a fault these dealings must never be opened again, whatever the folder shows next."""
        if not self._state["failed"]:
            self._state["failed"] = reason
            self._save()

    def _keep(self, manifest: Manifest) -> None:
        """The share first, then the manifest; then everything that made them is forgotten."""
        member = self._member
        if member.share is None:
            raise CeremonyError("this member has no share yet")
        info = ShareInfo.of(self._terms, member.session, 0, member.point, block=0)
        with ShareWriter(self._place.share_path, self._unlock, info, member.salt, member.others_salts) as file:
            file.write(member.share)
        write_private(self._place.manifest_path, manifest.to_bytes())
        self._place.ceremony_path.unlink()
        self._note("share and manifest kept")

    # --- files ---

    def _path(self, step: str, sender: int, recipient: int = 0) -> Path:
        name = f"{sender}-to-{recipient}.msg" if recipient else f"{sender}.msg"
        return self._folder / f"{STEPS.index(step) + 1}-{step}" / name

    def _read(self, path: Path, step: str, sender: int) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            name = self._terms.member(sender).name
            raise MessageError(
                f"the message of {name!r} for step 'dkg/{step}' cannot be read: {error.strerror}"
            ) from None

    def _publish(self, step: str, message: bytes, recipient: int = 0) -> None:
        """Writes this member's message unless it is there already, as it was written."""
        path = self._path(step, self._member.point, recipient)
        written = hashlib.sha256(self._read(path, step, self._member.point)).hexdigest() if path.exists() else ""
        if written and written == self._state["sent"].get(path.name + step):
            return
        self._state["sent"][path.name + step] = hashlib.sha256(message).hexdigest()
        self._save()
        write_shared(path, message)  # for the others; what is secret in it is sealed to them
        self._note(f"{step} written" + (f" for {self._terms.member(recipient).name}" if recipient else ""))

    def _use(self, step: str, consume: Callable[[Mapping[int, bytes]], Any], *, remember: bool = True) -> Any:
        """Hands a step's messages over once all are there. What was used once must not change afterwards."""
        recipient = self._member.point if step == "deal" else 0
        paths = {x: self._path(step, x, recipient) for x in self._others}
        self._wait(step, [x for x, path in paths.items() if not path.exists()])
        messages = {x: self._read(path, step, x) for x, path in paths.items()}
        result = consume(messages)
        if not remember:
            return result
        # compare what they say, not their bytes: a sealed message that is sent again looks different
        said = {str(x): hashlib.sha256(self._member.read(step, x, data)).hexdigest() for x, data in messages.items()}
        before = self._state["used"].setdefault(step, said)
        for x, value in said.items():
            if before[x] != value:
                name = self._terms.member(int(x)).name
                raise MessageError(f"{name!r} says something else for step 'dkg/{step}' than when it was used: refused")
        self._save()
        return result

    def _wait(self, step: str, missing: list[int]) -> None:
        if missing:
            raise _Waiting(step, tuple(self._terms.member(x).name for x in missing))

    def _save(self) -> None:
        content = canonical(self._state)
        if getattr(self, "_saved", None) != content:
            write_sealed(self._place.ceremony_path, self._unlock, _KIND, content)
            self._saved = content
