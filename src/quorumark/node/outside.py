"""A member's stages outside rounds: its part in a dealer-free ceremony, answers to verifications, its ledger."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Header
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Terms
from quorumark.errors import CeremonyError, MessageError, QuorumarkError
from quorumark.files import write_private
from quorumark.node.fields import read_content, read_count, read_names, with_prefix
from quorumark.node.journal import Journal
from quorumark.node.wire import introduction

__all__ = ["MESSAGE", "Config", "OutsideRounds"]

Config = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]
Reply = tuple[Config, dict[str, NDArray[Any]]]

MESSAGE = "message:"
"""What the names of a ceremony's messages begin with."""

_MESSAGE_NAME = re.compile(r"(\d{1,2}-[a-z]{1,20})/(\d{1,6})(?:-to-(\d{1,6}))?\.msg")


class OutsideRounds:
    """Of one member. `terms` is the digest that its operator pinned, `journal` what it keeps, read anew."""

    def __init__(self, home: HomeFolder, unlock: Unlock, terms: str | None, journal: Callable[[], Journal]) -> None:
        self._home, self._unlock, self._terms, self._journal = home, unlock, terms, journal
        self.stages: dict[str, Callable[[Config, Arrays], Reply]] = {
            "setup": self._setup,
            "answer": self._answer,
            "sign": self._sign,
            "ledger": self._ledger,
        }

    def __repr__(self) -> str:
        return f"OutsideRounds({str(self._home.path)!r}, secrets hidden)"

    # --- setup ---

    def _setup(self, config: Config, arrays: Arrays) -> Reply:
        """A turn in the dealer-free ceremony: takes the others' messages, does what can be done, gives its own."""
        from quorumark.setup.exchange import expected_messages, set_up  # here: a round, often a new process, needs none

        terms = Terms.from_bytes(read_content(arrays["terms"]))
        self._check_pinned(terms)
        session = str(config["session"])
        if not re.fullmatch("[0-9a-f]{32}", session):
            raise MessageError(
                "the server's message must give 'session' as 32 hexadecimal digits", code="message.malformed"
            )
        identity = self._home.identity(self._unlock)
        point = terms.point_of(identity.ed25519)
        allowed = expected_messages(terms, point)
        sent = {name: read_content(message) for name, message in with_prefix(arrays, MESSAGE).items()}
        for name, content in sent.items():  # before any is kept: a server must not fill this disk
            if name not in allowed:
                raise MessageError(
                    f"the server sends {name[:60]!r}, which is not a message for this member", code="message.unexpected"
                )
            if len(content) > allowed[name]:
                raise MessageError(
                    f"the server sends {name!r} with {len(content)} bytes, and a message of this step has at most "
                    f"{allowed[name]}",
                    code="message.too-large",
                )
        spool = self._spool(terms, session)
        for name, content in sent.items():
            (spool / name).parent.mkdir(mode=0o700, exist_ok=True)
            write_private(spool / name, content)
        progress = set_up(self._home, self._unlock, terms, spool)
        have = set(read_names(config, "have"))
        own = [path for path in sorted(spool.glob("*/*.msg")) if _sender(path) == point]
        fresh = {path.relative_to(spool).as_posix(): path for path in own}
        messages = {MESSAGE + name: _array(path.read_bytes()) for name, path in fresh.items() if name not in have}
        header = Header(*introduction(terms.digest(), str(config["run"])), point)
        reply: Config = {
            "point": point,
            "step": progress.step,
            "waiting": ", ".join(progress.waiting),
            "introduction": identity.write(header, str(config["node"]).encode()),
        }
        if progress.manifest is not None:
            reply["manifest"] = progress.manifest.to_bytes()
            if not messages:  # all of its own are on their way
                shutil.rmtree(spool, ignore_errors=True)
        return reply, messages

    def _spool(self, terms: Terms, session: str) -> Path:
        """Where this ceremony's messages are kept. Another session takes the place of the one before: there is one
        ceremony for one set of terms, which goes on from what this member remembers of it."""
        folder, mine = self._home.path / "ceremonies", terms.digest().hex()[:16]
        folder.mkdir(mode=0o700, exist_ok=True)
        spool = folder / f"{mine}-{session}"
        for old in folder.glob(f"{mine}-*"):
            if old != spool:
                shutil.rmtree(old, ignore_errors=True)
        spool.mkdir(mode=0o700, exist_ok=True)
        return spool

    def _check_pinned(self, terms: Terms) -> None:
        name = self._home.card().name
        if self._terms is None:
            raise CeremonyError(
                f"{name!r} has pinned no terms, and makes a key for none that a server brings: read the terms, and pin "
                f"their digest if they are right ({terms.digest().hex()})",
                code="ceremony.not-pinned",
            )
        if terms.digest().hex() != self._terms:
            raise CeremonyError(
                f"the server brings the terms {terms.digest().hex()[:16]}…, and {name!r} has pinned "
                f"{self._terms[:16]}…: compare them, and pin the right ones",
                code="ceremony.not-pinned",
            )

    # --- verification ---

    def _answer(self, config: Config, arrays: Arrays) -> Reply:
        """This member's partial about a suspect, if its own rules approve, or if a person did, as the member's own
        identity signed. `check-only`: whether there would be one."""
        from quorumark.node.queries import unpack_query  # here, as in `_setup`
        from quorumark.verify.answer import answer, check_answerable
        from quorumark.verify.approval import check_approval
        from quorumark.verify.evidence import Query
        from quorumark.verify.query import prepare_again

        journal = self._journal()
        consortium, query = journal.consortium, Query.from_bytes(config["query"])
        approved = "approval" in config
        if approved:
            check_approval(config["approval"], journal.manifest, journal.point, query)
        with unpack_query(consortium, arrays) as asked:
            if config.get("check-only") is True:
                prepared = prepare_again(asked.reference, asked.suspect, query)
                check_answerable(self._home, asked.reference, prepared, after=asked.after, consortium=consortium)
                return {}, {}
            partial = answer(
                self._home,
                self._unlock,
                asked.reference,
                asked.suspect,
                query,
                approved=approved,
                audits=asked.audits,
                after=asked.after,
                consortium=consortium,
            )
        return {"partial": partial.to_bytes()}, {}

    def _sign(self, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        from quorumark.verify.certificate import Certificate
        from quorumark.verify.check import sign

        certificate = Certificate.from_bytes(config["certificate"])
        signed = sign(self._home, self._unlock, certificate, consortium=self._journal().consortium)
        return {"certificate": signed.to_bytes()}, {}

    def _ledger(self, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        """For this member's own agent, which has the identity and not the share: the ledger from a place on."""
        from quorumark.verify.approval import check_asked
        from quorumark.verify.ledger import Ledger

        journal = self._journal()
        check_asked(config["asked"], journal.manifest, journal.point)
        ours, have = journal.consortium, read_count(config, "have-bytes")
        ledger = Ledger.open(ours, journal.manifest)
        with ledger.exclusive():
            content = ours.ledger_path.read_bytes() if ours.ledger_path.exists() else b""
        reply: Config = {"before": hashlib.sha256(content[:have]).hexdigest() if have <= len(content) else ""}
        if config.get("with-share") is True:
            try:
                ours.verify_share(self._unlock)
                reply["share"] = "sound"
            except QuorumarkError:
                reply["share"] = "unsound"
        return reply, {"ledger": _array(content[have:])}


def _array(content: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(content, np.uint8)


def _sender(path: Path) -> int:
    found = _MESSAGE_NAME.fullmatch(f"{path.parent.name}/{path.name}")
    return int(found[2]) if found else 0
