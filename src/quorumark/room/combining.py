"""What follows from the answers to a query in a room: the asker combines them, all who answered sign, and everybody
can check the certificate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quorumark.checks import require
from quorumark.consortium.identity import open_message
from quorumark.consortium.records import Manifest
from quorumark.errors import QuorumarkError
from quorumark.files import write_private, write_shared
from quorumark.report import certificate_page, write_page
from quorumark.room.client import Client
from quorumark.room.question import LARGEST_CERTIFICATE, LARGEST_PARTIAL, LARGEST_WORD, Asked, header
from quorumark.room.seat import Seat
from quorumark.verify.certificate import Certificate, verify_signatures
from quorumark.verify.check import check_certificate
from quorumark.verify.combine import check_signed, combine
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.layered import Opened
from quorumark.verify.ledger import Ledger

__all__ = ["Combining"]


class Combining:
    """One member's view of all answers; what the asker makes of them."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def partials(self, client: Client, asked: Asked) -> list[Partial]:
        """The answers that are there and hold, in the order of points."""
        found = []
        for member in asked.terms.roster:
            notice = self._seat.mirror.find(member.ed25519, f"{asked.start}/partial.json")
            if notice is None:
                continue
            try:
                partial = Partial.from_bytes(self._seat.cached(client, notice, LARGEST_PARTIAL))
                partial.verify(asked.terms)
                sound = (partial.point, partial.query) == (member.point, asked.query.digest())
                require(sound, f"the answer of {member.name!r}", "must be to this query, and its own")
            except QuorumarkError as error:
                if error.code == "room.unreachable":
                    raise
                self._seat.desk.trouble(notice.name + member.name, f"the answer of {member.name} is not used: {error}")
                continue
            found.append(partial)
        return found

    def declined(self, client: Client, asked: Asked) -> set[int]:
        found = set()
        for member in asked.terms.roster:
            notice = self._seat.mirror.find(member.ed25519, f"{asked.start}/declined.msg")
            if notice is not None:
                try:
                    word = self._seat.cached(client, notice, LARGEST_WORD)
                    open_message(word, asked.terms, header("declined", asked.query, member.point))
                except QuorumarkError as error:
                    if error.code == "room.unreachable":
                        raise
                    continue
                found.add(member.point)
        return found

    # --- the asker ---

    def combine(self, client: Client, asked: Asked) -> None:
        seat, path = self._seat, asked.kept(self._seat.place, "combined.msg")
        if not path.exists():
            partials = self.partials(client, asked)
            opened = self._opened(client, asked, partials)
            if opened is not None:
                partials = [partial for partial in partials if partial.digest() in opened.partials]
            every = len(partials) + len(self.declined(client, asked)) >= asked.terms.members
            enough = len(partials) >= asked.answers or (every and len(partials) >= asked.terms.threshold)
            if not enough or (asked.query.layers is not None and opened is None):
                return
            audits = Ledger.open(asked.ours, asked.manifest).audits()
            finding = combine(asked.manifest, asked.query, partials, audits=audits, opened=opened)
            certificate = Certificate.of(finding)
            point = asked.terms.point_of(seat.key)
            message = seat.identity.write(header("combined", asked.query, point), certificate.to_bytes())
            write_private(path, message)
        seat.send(client, path, f"{asked.start}/combined.msg")

    def _opened(self, client: Client, asked: Asked, partials: list[Partial]) -> Opened | None:
        """For a query by layers: the examiner's word, with the most answers of those that are about answers in the
        room. Who put it there does not matter: the examiner signed it."""
        layers, best = asked.query.layers, None
        there = {partial.digest() for partial in partials}
        for notice in self._seat.mirror.named(f"{asked.start}/", "opened.json") if layers is not None else ():
            try:
                word = Opened.from_bytes(self._seat.cached(client, notice, LARGEST_PARTIAL))
                require(layers is not None and word.query == asked.query.digest(), "a word", "must be about the query")
                if layers is not None:
                    word.verify(layers.examiner)
            except QuorumarkError as error:
                if error.code == "room.unreachable":
                    raise
                self._seat.desk.trouble(notice.name + notice.author, f"an examiner's word is not used: {error}")
                continue
            if set(word.partials) <= there and (best is None or len(word.partials) > len(best.partials)):
                best = word
        return best

    def combined(self, client: Client, asked: Asked) -> Certificate | None:
        """What the asker says follows from the answers; its word is checked, not its truth."""
        notice = self._seat.mirror.find(asked.asker, f"{asked.start}/combined.msg")
        if notice is None:
            return None
        point = asked.terms.point_of(asked.asker)
        message = self._seat.cached(client, notice, LARGEST_CERTIFICATE)
        return Certificate.from_bytes(open_message(message, asked.terms, header("combined", asked.query, point)))

    def finish(self, client: Client, asked: Asked) -> None:
        """The asker's last step: all signatures on one certificate, checked like anybody would."""
        folder = self._seat.place.folder("certificates", asked.query.digest())
        path = folder / "certificate.json"
        if not path.exists():
            combined = asked.kept(self._seat.place, "combined.msg")
            if not combined.exists():
                return
            point = asked.terms.point_of(self._seat.key)
            body = open_message(combined.read_bytes(), asked.terms, header("combined", asked.query, point))
            certificate = self._with_signatures(client, asked, Certificate.from_bytes(body))
            if certificate is None:
                return
            _write_report(folder, certificate, asked)
            write_shared(path, certificate.to_bytes())
        for name in ("report.html", "certificate.json"):
            self._seat.send(client, folder / name, f"{asked.start}/{name}")

    def _with_signatures(self, client: Client, asked: Asked, certificate: Certificate) -> Certificate | None:
        """The certificate with everybody's signature; None while some are missing."""
        finding, desk = certificate.finding, self._seat.desk
        for point in {partial.point for partial in finding.partials} - set(finding.wrong):
            member = asked.terms.member(point)
            notice = self._seat.mirror.find(member.ed25519, f"{asked.start}/signed.json")
            if notice is None:
                return None
            try:
                given = Certificate.from_bytes(self._seat.cached(client, notice, LARGEST_CERTIFICATE))
                require(given.payload == certificate.payload, "what was signed", "must be what was combined")
                one = replace(certificate, signatures={member.ed25519: given.signatures.get(member.ed25519, "")})
                one.signers(asked.manifest)
            except QuorumarkError as error:
                if error.code == "room.unreachable":
                    raise
                desk.trouble(notice.name + member.name, f"the signature of {member.name} is not used: {error}")
                return None
            certificate = replace(certificate, signatures={**certificate.signatures, **one.signatures})
        verify_signatures(certificate, asked.manifest)
        return certificate

    # --- anybody ---

    def people(self, client: Client, asked: Asked, final: Certificate | None) -> tuple[tuple[str, str], ...]:
        """Every member of the signed roster, with what it did that holds here."""
        partials = self.partials(client, asked) if final is None else final.finding.partials
        answered, declined = {partial.point for partial in partials}, self.declined(client, asked)
        signed = set() if final is None else {member.point for member in final.signers(asked.manifest)}

        def what(point: int) -> str:
            if point in answered:
                return "answered and signed" if point in signed else "answered"
            return "declined" if point in declined else ""

        return tuple((member.name, what(member.point)) for member in asked.terms.roster)

    def keep(self, asked: Asked, final: Certificate) -> None:
        """A certificate that holds, for this member's page."""
        path = self._seat.place.folder("certificates", asked.query.digest()) / "certificate.json"
        if not path.exists():
            write_shared(path, final.to_bytes())

    def report(self, asked: Asked) -> Path | None:
        """The folder with certificate and report of a query, once it is done; the report is made here."""
        folder = self._seat.place.folder("certificates", asked.query.digest())
        if not (folder / "certificate.json").exists():
            return None
        if not (folder / "report.html").exists():
            _write_report(folder, Certificate.from_bytes((folder / "certificate.json").read_bytes()), asked)
        return folder

    def certificate(self, client: Client, asker: str, query: Query, manifest: Manifest) -> Certificate | None:
        """The certificate of a query under a manifest, if it is there and holds."""
        notice = self._seat.mirror.find(asker, f"query/{query.digest()}/certificate.json")
        if notice is None:
            return None
        try:
            certificate = Certificate.from_bytes(self._seat.cached(client, notice, LARGEST_CERTIFICATE))
            require(certificate.finding.query == query, "a certificate", "must be about the query")
            check_signed(certificate, manifest)
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            self._seat.desk.trouble(notice.name, f"the certificate in the room does not hold: {error}")
            return None
        return certificate


def _write_report(folder: Path, certificate: Certificate, asked: Asked) -> None:
    """The page of a certificate, after the whole check."""
    checked, left = check_certificate(
        certificate,
        asked.ours.chain(),
        suspect=asked.suspect,
        reference=asked.reference,
        audits=Ledger.open(asked.ours, asked.manifest).audits(),
    )
    signers = certificate.signers(asked.manifest)
    page = certificate_page(certificate, asked.manifest, signers=signers, checked=checked, left=left)
    write_page(folder / "report.html", page)
