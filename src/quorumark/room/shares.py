"""Where a member's share is: in its own home, or with its signer, a process of another user (`member serve`).

With a signer, nothing in this process or under its user can read the share: the agent's home has the identity alone.
The agent asks the signer for answers and signatures, and for the steps of making a key; the guard and the ledger are
the signer's, and the agent keeps a copy of the ledger to show it and to compare it with the others'.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Manifest, Terms
from quorumark.errors import QuorumarkError, RoomError, RoundError
from quorumark.files import write_exchanged
from quorumark.model.suspect import read_suspect
from quorumark.node.outside import MESSAGE
from quorumark.node.queries import pack_query
from quorumark.node.signer import SignerClient
from quorumark.room.question import Asked
from quorumark.setup.exchange import expected_messages, set_up
from quorumark.setup.waiting import Progress
from quorumark.verify.answer import answer, check_answerable
from quorumark.verify.approval import approve, ask_for_ledger
from quorumark.verify.certificate import Certificate
from quorumark.verify.check import sign
from quorumark.verify.evidence import Partial
from quorumark.verify.ledger import Ledger
from quorumark.verify.query import Prepared
from quorumark.verify.rules import AnswerRules

__all__ = ["OwnShare", "Share", "Signer"]


class Share(Protocol):
    """What an agent asks of its member's share."""

    is_here: bool

    def set_up(self, terms: Terms, folder: Path) -> Progress:
        """A visit to the folder of a ceremony that makes a key."""

    def check(self, asked: Asked, prepared: Prepared) -> None:
        """Whether an answer could be given once somebody approves; an error says why not."""

    def answer(self, asked: Asked, *, person: bool, rules: AnswerRules | None) -> Partial:
        """This member's answer. `rules`: those that approve where no person did."""

    def sign(self, asked: Asked, certificate: Certificate) -> Certificate:
        """The certificate with this member's signature."""

    def is_sound(self, ours: ConsortiumFolder) -> bool:
        """Whether every bit of the share is what the manifest's root says."""

    def follow(self, ours: ConsortiumFolder) -> None:
        """Brings the copy of the ledger in this home up to date."""


class OwnShare:
    """A share in this home."""

    is_here = True

    def __init__(self, home: HomeFolder, unlock: Unlock) -> None:
        self._home, self._unlock = home, unlock

    def set_up(self, terms: Terms, folder: Path) -> Progress:
        return set_up(self._home, self._unlock, terms, folder)

    def check(self, asked: Asked, prepared: Prepared) -> None:
        check_answerable(self._home, asked.reference, prepared, after=asked.after, consortium=asked.ours)

    def answer(self, asked: Asked, *, person: bool, rules: AnswerRules | None) -> Partial:
        return answer(
            self._home,
            self._unlock,
            asked.reference,
            asked.suspect,
            asked.query,
            approved=person,
            after=asked.after,
            consortium=asked.ours,
            rules=rules,
        )

    def sign(self, asked: Asked, certificate: Certificate) -> Certificate:
        return sign(self._home, self._unlock, certificate, consortium=asked.ours)

    def is_sound(self, ours: ConsortiumFolder) -> bool:
        try:
            ours.verify_share(self._unlock)
        except QuorumarkError:
            return False
        return True

    def follow(self, ours: ConsortiumFolder) -> None:  # noqa: ARG002 - the ledger here is the one
        return


class Signer:
    """A share behind a socket. What the signer says of its ledger is checked: it only ever grows."""

    is_here = False

    def __init__(self, home: HomeFolder, identity: Identity, socket: Path) -> None:
        self._home, self._identity = home, identity
        self._client = SignerClient(socket)
        self._sent: set[str] = set()  # messages of others that the signer has

    def _ask(self, stage: str, config: dict[str, Any], arrays: dict[str, Any] | None = None) -> Any:
        try:
            return self._client.handle(stage, config, arrays or {})
        except RoundError as error:
            raise RoomError(f"this member's signer refuses: {error}", code="room.signer") from None

    def set_up(self, terms: Terms, folder: Path) -> Progress:
        """The signer makes the share; this process carries messages, which are signed, and sealed where secret. The
        signer's operator has pinned these terms."""
        point, about = terms.point_of(self._identity.ed25519), terms.digest().hex()
        names = {name for name in expected_messages(terms, point) if (folder / name).exists()}
        own = [path for path in sorted(folder.glob("*/*.msg")) if path.relative_to(folder).as_posix() not in names]
        have = [path.relative_to(folder).as_posix() for path in own]
        fresh = {name: (folder / name).read_bytes() for name in sorted(names - self._sent)}
        config = {"session": about[:32], "have": json.dumps(have), "run": "room", "node": "agent"}
        arrays = {"terms": _octets(terms.to_bytes()), **{MESSAGE + name: _octets(m) for name, m in fresh.items()}}
        reply, messages = self._ask("setup", config, arrays)
        self._sent |= set(fresh)
        expected = {name.partition("/")[0] for name in expected_messages(terms, point)}
        for name, content in messages.items():
            path = Path(name.removeprefix(MESSAGE))
            if (
                len(path.parts) != 2
                or path.parts[0] not in expected
                or path.name.split(".")[0].split("-")[0] != str(point)
            ):
                raise RoomError("this member's signer gives a message that is not its own", code="room.signer")
            write_exchanged(folder / path, bytes(content))
        waiting = tuple(one for one in str(reply["waiting"]).split(", ") if one)
        if "manifest" not in reply:
            return Progress(str(reply["step"]), waiting or ("the others",))
        manifest = Manifest.from_bytes(reply["manifest"])
        if manifest.terms != terms:
            raise RoomError("this member's signer has a manifest of other terms", code="room.signer")
        if messages:  # the others need them first
            return Progress(str(reply["step"]), ("the others",))
        self._home.consortium(terms).adopt([manifest])
        return Progress(str(reply["step"]), (), manifest)

    def _packed(self, asked: Asked) -> tuple[dict[str, Any], dict[str, Any]]:
        return pack_query(asked.reference, read_suspect(asked.suspect), asked.query, after=asked.after)

    def check(self, asked: Asked, prepared: Prepared) -> None:  # noqa: ARG002 - the signer computes it itself
        config, arrays = self._packed(asked)
        self._ask("answer", {**config, "check-only": True}, arrays)

    def answer(self, asked: Asked, *, person: bool, rules: AnswerRules | None) -> Partial:  # noqa: ARG002
        """A person's approval goes along, signed; without one the signer's own rules decide."""
        config, arrays = self._packed(asked)
        if person:
            config["approval"] = approve(self._identity, asked.manifest, asked.query)
        reply, _ = self._ask("answer", config, arrays)
        partial = Partial.from_bytes(reply["partial"])
        partial.verify(asked.terms)
        self.follow(asked.ours)
        return partial

    def sign(self, asked: Asked, certificate: Certificate) -> Certificate:
        reply, _ = self._ask("sign", {"certificate": certificate.to_bytes()})
        signed = Certificate.from_bytes(reply["certificate"])
        if signed.payload != certificate.payload:
            raise RoomError("this member's signer signed something else", code="room.signer")
        self.follow(asked.ours)
        return signed

    def is_sound(self, ours: ConsortiumFolder) -> bool:
        return bool(self._ledger(ours, 0, with_share=True)[0]["share"] == "sound")

    def _ledger(self, ours: ConsortiumFolder, have: int, *, with_share: bool = False) -> Any:
        asked = ask_for_ledger(self._identity, ours.manifest())
        return self._ask("ledger", {"asked": asked, "have-bytes": have, "with-share": with_share})

    def follow(self, ours: ConsortiumFolder) -> None:
        ledger = Ledger.open(ours, ours.manifest())
        content = ours.ledger_path.read_bytes() if ours.ledger_path.exists() else b""
        reply, arrays = self._ledger(ours, len(content))
        if reply["before"] != hashlib.sha256(content).hexdigest():
            raise RoomError(
                "the ledger of this member's signer does not continue the copy in this home: the signer's home was set "
                "back to an earlier day, or it is another one. Nothing is signed or answered until that is mended",
                code="room.set-back",
            )
        ledger.follow(arrays["ledger"].tobytes())


def _octets(content: bytes) -> Any:
    return np.frombuffer(content, np.uint8)
