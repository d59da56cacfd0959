"""The dealer-free setup over a folder that all members can reach: a network share, a synchronised folder, a stick.

Each member runs `advance` whenever it likes; it does all that can be done with what is there, writes its messages and
says what it waits for. A crash at any point loses nothing: the state is sealed on disk before a message is written,
every step can be done again with the same result, and messages are files that appear whole or not at all.

    FOLDER/1-commit/SENDER.msg  2-reveal/…  3-deal/SENDER-to-RECIPIENT.msg  4-open/ATTEMPT-SENDER.msg
    FOLDER/4-open/ATTEMPT.sum (made by whoever sees all openings first)  5-confirm/…  6-root/…  7-health/…  8-sign/…

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
from quorumark.keystore import Unlock, read_sealed, write_private, write_sealed
from quorumark.records import Manifest, Terms, canonical
from quorumark.setup.dkg import STEPS, DkgMember, openers, relay_sum
from quorumark.shares import ShareInfo, ShareWriter

__all__ = ["Progress", "advance"]

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
    *,
    chosen: tuple[int, ...] | None = None,
    attempt: int = 0,
    note: Callable[[str], None] = lambda _: None,
) -> Progress:
    """Does what can be done now. Call it again when others have written; `note` hears of each step as it is done.

    `chosen` and `attempt`: after an opener was lost for good, all go on with another set of 2t−1 and a new number.
    """
    place = home.consortium(terms)
    if place.manifest_path.exists():
        if place.share_path.exists():
            return Progress("sign", (), place.manifest())
        raise CeremonyError("the ceremony is finished, but this member's share is gone: it must be recovered")
    run = _Run(home, unlock, terms, Path(folder), note)
    try:
        return Progress("sign", (), run.all_steps(chosen or openers(terms), attempt))
    except _Waiting as waiting:
        return waiting.progress


class _Run:
    """One member's visit to the folder."""

    def __init__(self, home: Home, unlock: Unlock, terms: Terms, folder: Path, note: Callable[[str], None]) -> None:
        self._place, self._unlock, self._terms, self._folder, self._note = (
            home.consortium(terms),
            unlock,
            terms,
            folder,
            note,
        )
        identity = home.identity(unlock)
        if self._place.ceremony_path.exists():
            self._state: dict[str, Any] = json.loads(read_sealed(self._place.ceremony_path, unlock, _KIND))
        else:
            self._state = {"seed": os.urandom(32).hex(), "sent": {}, "used": {}, "attempts": {}}
            self._save()
        self._member = DkgMember(identity, terms, bytes.fromhex(self._state["seed"]))
        self._others = [m.point for m in terms.roster if m.point != self._member.point]

    def all_steps(self, chosen: tuple[int, ...], attempt: int) -> Manifest:
        member = self._member
        self._publish("commit", member.commit())
        self._publish("reveal", self._use("commit", member.reveal))
        for recipient, message in self._use("reveal", member.deal).items():
            self._publish("deal", message, recipient)
        self._use("deal", member.receive)
        if member.point in chosen:
            self._open(chosen, attempt)
        total = self._sum(chosen, attempt)
        self._publish("confirm", member.confirm(total))
        self._publish("root", self._use("confirm", member.root))
        self._publish("health", self._use("root", member.health))
        self._use("health", member.finish)
        self._publish("sign", member.sign())
        manifest: Manifest = self._use("sign", member.signed)
        self._keep(manifest)
        return manifest

    def _open(self, chosen: tuple[int, ...], attempt: int) -> None:
        """The set of an attempt is fixed on disk before the opening leaves this machine."""
        before = self._state["attempts"].setdefault(str(attempt), list(chosen))
        if tuple(before) != chosen:
            raise CeremonyError(f"attempt {attempt} was made with the members {before}: take a new number")
        self._save()
        self._publish("open", self._member.open(chosen, attempt), attempt=attempt)

    def _sum(self, chosen: tuple[int, ...], attempt: int) -> bytes:
        path = self._path("open", attempt=attempt, name=f"{attempt}.sum")
        if not path.exists():
            paths = {x: self._path("open", sender=x, attempt=attempt) for x in chosen}
            self._wait("open", [x for x, p in paths.items() if not p.exists()])
            messages = {x: p.read_bytes() for x, p in paths.items()}
            write_private(path, relay_sum(self._terms, self._member.session, messages, attempt))
            self._note("squares added up")
        return path.read_bytes()

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

    def _path(self, step: str, sender: int = 0, recipient: int = 0, attempt: int = 0, name: str = "") -> Path:
        folder = self._folder / f"{STEPS.index(step) + 1}-{step}"
        if not name:
            name = f"{sender}-to-{recipient}.msg" if recipient else f"{sender}.msg"
            name = f"{attempt}-{name}" if step == "open" else name
        return folder / name

    def _publish(self, step: str, message: bytes, recipient: int = 0, attempt: int = 0) -> None:
        """Writes this member's message unless it is there already, as it was written."""
        path = self._path(step, self._member.point, recipient, attempt)
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == self._state["sent"].get(path.name + step):
            return
        self._state["sent"][path.name + step] = hashlib.sha256(message).hexdigest()
        self._save()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, message)
        path.chmod(0o644)  # for the others; what is secret in it is sealed to them
        self._note(f"{step} written" + (f" for {self._terms.member(recipient).name}" if recipient else ""))

    def _use(self, step: str, consume: Callable[[Mapping[int, bytes]], Any]) -> Any:
        """Hands a step's messages over once all are there. What was used once must not change afterwards."""
        recipient = self._member.point if step == "deal" else 0
        paths = {x: self._path(step, x, recipient) for x in self._others}
        self._wait(step, [x for x, path in paths.items() if not path.exists()])
        messages = {x: path.read_bytes() for x, path in paths.items()}
        result = consume(messages)
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
