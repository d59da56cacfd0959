"""A member's answer to a query in a room: who decides, the answer or the refusal, and the signature that follows.

A member answers one query once: what it sends is kept before it is sent. It signs the certificate that follows, and
another one only if that has more answers, and takes back nothing that was proved.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from quorumark.errors import QuorumarkError, RoomError
from quorumark.files import write_private
from quorumark.room.client import Client
from quorumark.room.combining import Combining, follows
from quorumark.room.desk import Matter
from quorumark.room.heads import Heads
from quorumark.room.numbering import again
from quorumark.room.question import LARGEST_PARTIAL, Asked, header
from quorumark.room.seat import Seat
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Partial
from quorumark.verify.ledger import Ledger
from quorumark.verify.rules import AnswerRules, read_rules

__all__ = ["Answering"]

_DAY = 24 * 60 * 60


class Answering:
    """One member's answers."""

    def __init__(self, seat: Seat, combining: Combining, heads: Heads) -> None:
        self._seat, self._combining, self._heads = seat, combining, heads

    # --- who decides ---

    def decide(self, about: str, asked: Asked, matter: Matter) -> None:
        """The policy's word, if it is given now: what an earlier one said is withdrawn, and waits for a person."""
        desk = self._seat.desk
        said, by = desk.said(about)
        if by == "person":
            return
        allowed = self._policy_allows(asked)
        if by == "policy" and not allowed:
            desk.withdraw(about)
        elif not said and allowed:
            desk.decide(about, matter.shown, "yes", "policy")

    def _policy_allows(self, asked: Asked) -> bool:
        """Whether the policy approves, and the member's own rules leave it to anything but a person."""
        asker = asked.terms.member(asked.terms.point_of(asked.asker)).name
        if not self._seat.policy.approves(asker, asked.kind, asked.query.equations):
            return False
        rules = self._rules()
        book = Ledger.open(asked.ours, asked.manifest)
        again = asked.query.equations <= book.opened(asked.query.x)  # the guard does not count it either
        today = book.answers_since(int(time.time()) - _DAY)
        return rules.approve == "always" and (again or today < (rules.max_queries_per_day or 0))

    def _rules(self) -> AnswerRules:
        """The stricter of the policy and HOME/rules.json. If that says ask, a person decides."""
        path, most = self._seat.home.rules_path, self._seat.policy.most_a_day
        own = read_rules(path)
        if not path.exists():
            own = replace(own, approve="always", max_queries_per_day=most)
        limit = own.max_queries_per_day
        return replace(own, max_queries_per_day=most if limit is None else min(limit, most))

    # --- what follows ---

    def check_not_set_back(self, client: Client, asked: Asked) -> None:
        """Whether the room has an answer of this member that its ledger does not know."""
        seat, kept = self._seat, asked.kept(self._seat.place, "partial.json")
        notice = seat.mirror.find(seat.key, f"{asked.start}/partial.json")
        if notice is None or kept.exists():
            return
        try:
            there = Partial.from_bytes(client.small(notice, LARGEST_PARTIAL))
            there.verify(asked.terms)
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            return  # not this member's: the room made it up
        own = there.point == asked.terms.point_of(seat.key)
        if own and there.query == asked.query.digest():
            if asked.query.x not in Ledger.open(asked.ours, asked.manifest).answered():
                raise RoomError(
                    "this member's ledger does not know an answer that this member signed: its home was set back to an "
                    "earlier day, or another copy of it is in use; nothing is answered until that is mended",
                    code="room.set-back",
                )
            write_private(kept, there.to_bytes())

    def answer(self, client: Client, asked: Asked, by: str, compared: bool) -> None:
        """Once enough ledgers were compared (`compared`)."""
        seat, path = self._seat, asked.kept(self._seat.place, "partial.json")
        if not path.exists():
            if not compared:
                return
            rules = self._rules() if by == "policy" else None
            made = seat.share.answer(asked, person=by == "person", rules=rules)
            write_private(path, made.to_bytes())
        self._heads.say(client, asked, answered=True)  # first: those who see the answer can know what it did
        seat.send(client, path, f"{asked.start}/partial.json")

    def decline(self, client: Client, asked: Asked) -> None:
        seat, path = self._seat, asked.kept(self._seat.place, "declined.msg")
        if not path.exists():
            point = asked.terms.point_of(seat.key)
            write_private(path, seat.identity.write(header("declined", asked.query, point), b"declined"))
        seat.send(client, path, f"{asked.start}/declined.msg")

    def sign(self, client: Client, asked: Asked) -> None:
        """The certificates that follow from this answer and the others', once everything in them does: the first one,
        and each with more answers than what this member has signed."""
        own = asked.kept(self._seat.place, "partial.json")
        if not own.exists():
            return
        before: Certificate | None = None
        for count in self._combining.offered(asked):
            path = asked.kept(self._seat.place, again("signed.json", count))
            if not path.exists():
                certificate = self._combining.combined(client, asked, count)
                if certificate is None or not self._has_part(asked, certificate, own):
                    continue  # made without this member's answer: nothing to sign
                if before is not None and not follows(certificate, before):
                    continue
                signed = self._seat.share.sign(asked, certificate)
                write_private(path, signed.to_bytes())
            before = Certificate.from_bytes(path.read_bytes())
            self._seat.send(client, path, f"{asked.start}/{path.name.partition('-')[2]}")

    @staticmethod
    def _has_part(asked: Asked, certificate: Certificate, own: Path) -> bool:
        finding = certificate.finding
        return finding.query == asked.query and Partial.from_bytes(own.read_bytes()) in finding.partials
