"""What follows from the answers to a query in a room: the asker combines them, all who answered sign, and everybody
can check the certificate.

Answers that come later are added: then the asker combines all of them, and all sign once more. The names of what is
made so have the number of answers in them (`numbering.again`). The certificates before stay. One that passed is
followed by such only that pass: an answer must not take back what was proved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from quorumark.checks import require
from quorumark.consortium.identity import open_message
from quorumark.consortium.records import Manifest
from quorumark.errors import EvidenceError, QuorumarkError
from quorumark.files import write_private, write_shared
from quorumark.report import certificate_page, write_page
from quorumark.room.client import Client
from quorumark.room.numbering import again, count_in
from quorumark.room.past import Past
from quorumark.room.question import LARGEST_CERTIFICATE, LARGEST_PARTIAL, LARGEST_WORD, Asked, header
from quorumark.room.seat import Seat
from quorumark.verify.certificate import Certificate, verify_signatures
from quorumark.verify.check import check_certificate
from quorumark.verify.combine import check_signed, combine
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.layered import Opened
from quorumark.verify.ledger import Ledger

__all__ = ["Combining", "Papers", "follows"]


@dataclass(frozen=True)
class Papers:
    """What came of a query, on this disk."""

    certificate: Path
    report: Path


def follows(later: Certificate, before: Certificate) -> bool:
    """Whether a certificate may come after another one: more answers to the same query, and no proof is lost."""
    now, then = ({partial.digest() for partial in one.finding.partials} for one in (later, before))
    same = later.finding.query == before.finding.query
    return same and now > then and not (before.finding.verdict == "PASSED" and later.finding.verdict != "PASSED")


class Combining:
    """One member's view of all answers; what the asker makes of them."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._tried: set[tuple[str, ...]] = set()  # answers that were combined, or do not fit each other

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
        """All answers that are there: once enough are, and again when later ones came."""
        counts = self._made(asked)
        if not counts:
            self._combine_first(client, asked)
        elif self._folder(asked, counts[0]).certificate.exists():
            later = self.look_late(client, asked, self._own(asked, counts[-1]))
            if later is not None:
                self._keep_combined(asked, later, len(later.finding.partials))
        for count in self._made(asked):
            name = again("combined.msg", count)
            self._seat.send(client, asked.kept(self._seat.place, name), f"{asked.start}/{name}")

    def _made(self, asked: Asked) -> list[int]:
        """The combinations on this disk, in order: how many answers each has, the first one 0."""
        counts = range(asked.terms.threshold, asked.terms.members + 1)
        return [n for n in (0, *counts) if asked.kept(self._seat.place, again("combined.msg", n)).exists()]

    def _own(self, asked: Asked, count: int) -> Certificate:
        message = asked.kept(self._seat.place, again("combined.msg", count)).read_bytes()
        point = asked.terms.point_of(self._seat.key)
        return Certificate.from_bytes(open_message(message, asked.terms, header("combined", asked.query, point)))

    def _combine_first(self, client: Client, asked: Asked) -> None:
        partials = self.partials(client, asked)
        opened = self._opened(client, asked, partials)
        if opened is not None:
            partials = [partial for partial in partials if partial.digest() in opened.partials]
        every = len(partials) + len(self.declined(client, asked)) >= asked.terms.members
        enough = len(partials) >= asked.answers or (every and len(partials) >= asked.terms.threshold)
        if enough and (asked.query.layers is None or opened is not None):
            self._keep_combined(asked, self._combined_of(asked, partials, opened), 0)

    def look_late(self, client: Client, asked: Asked, before: Certificate) -> Certificate | None:
        """What follows with the answers that came after a certificate, once for the same answers. What does not fit it
        is named, at every member, since an asker could be silent about it; the certificate stays."""
        partials = self.partials(client, asked)
        opened = self._opened(client, asked, partials)
        if asked.query.layers is not None:
            partials = [one for one in partials if opened is not None and one.digest() in opened.partials]
        there = tuple(sorted(partial.digest() for partial in partials))
        known, where = {partial.digest() for partial in before.finding.partials}, f"{asked.start}/late"
        if there in self._tried or not set(there) > known:
            if known == set(there):
                self._seat.desk.trouble(where, "")
            return None
        self._tried.add(there)
        late = {one.point for one in partials} - {one.point for one in before.finding.partials}
        names = ", ".join(asked.terms.member(point).name for point in sorted(late))
        try:
            certificate = self._combined_of(asked, partials, opened)
        except EvidenceError as error:
            self._seat.desk.trouble(where, f"the late answer of {names} does not fit the certificate: {error}")
            return None
        if not follows(certificate, before):
            text = f"with the late answer of {names} it would say {certificate.finding.verdict}: the certificate stays"
            self._seat.desk.trouble(where, text)
            return None
        self._seat.desk.trouble(where, "")
        return certificate

    def _combined_of(self, asked: Asked, partials: list[Partial], opened: Opened | None) -> Certificate:
        audits = Ledger.open(asked.ours, asked.manifest).audits()
        return Certificate.of(combine(asked.manifest, asked.query, partials, audits=audits, opened=opened))

    def _keep_combined(self, asked: Asked, certificate: Certificate, count: int) -> None:
        point = asked.terms.point_of(self._seat.key)
        message = self._seat.identity.write(header("combined", asked.query, point), certificate.to_bytes())
        write_private(asked.kept(self._seat.place, again("combined.msg", count)), message)

    def _opened(self, client: Client, asked: Asked, partials: list[Partial]) -> Opened | None:
        """For a query by layers: the examiner's word, with the most answers of those that are about answers in the
        room. Who put it there does not matter: the examiner signed it."""
        layers, best = asked.query.layers, None
        there = {partial.digest() for partial in partials}
        for notice in self._seat.mirror.named(f"{asked.start}/opened", ".json") if layers is not None else ():
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

    def offered(self, asked: Asked) -> list[int]:
        """What the asker combined, as far as the room tells: by the numbers of answers, the first one 0."""
        start = f"{asked.start}/"
        named = self._seat.mirror.named(f"{start}combined", ".msg")
        counts = {count_in(one.name.removeprefix(start), "combined.msg") for one in named if one.author == asked.asker}
        return sorted(count for count in counts if count is not None and count <= asked.terms.members)

    def combined(self, client: Client, asked: Asked, count: int) -> Certificate | None:
        """What the asker says follows from the answers; its word is checked, not its truth."""
        notice = self._seat.mirror.find(asked.asker, f"{asked.start}/{again('combined.msg', count)}")
        if notice is None:
            return None
        point = asked.terms.point_of(asked.asker)
        message = self._seat.cached(client, notice, LARGEST_CERTIFICATE)
        found = Certificate.from_bytes(open_message(message, asked.terms, header("combined", asked.query, point)))
        require(count in (0, len(found.finding.partials)), "what was combined", "must have the answers in its name")
        return found

    def finish(self, client: Client, asked: Asked) -> None:
        """The asker's last step: all signatures on one certificate, checked like anybody would."""
        for count in self._made(asked):
            papers = self._folder(asked, count)
            if not papers.certificate.exists():
                certificate = self._with_signatures(client, asked, self._own(asked, count), count)
                if certificate is None:
                    continue  # who answered first may be away: later certificates wait for nobody else
                _write_report(papers.report, certificate, asked)
                write_shared(papers.certificate, certificate.to_bytes())
            for path in (papers.report, papers.certificate):
                self._seat.send(client, path, f"{asked.start}/{path.name}")

    def _folder(self, asked: Asked | Past, count: int) -> Papers:
        folder = self._seat.place.folder("certificates", asked.query.digest())
        return Papers(folder / again("certificate.json", count), folder / again("report.html", count))

    def _with_signatures(
        self, client: Client, asked: Asked, certificate: Certificate, count: int
    ) -> Certificate | None:
        """The certificate with everybody's signature; None while some are missing."""
        finding, desk = certificate.finding, self._seat.desk
        for point in {partial.point for partial in finding.partials} - set(finding.wrong):
            member = asked.terms.member(point)
            notice = self._seat.mirror.find(member.ed25519, f"{asked.start}/{again('signed.json', count)}")
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
        partials = (*self.partials(client, asked), *(() if final is None else final.finding.partials))
        answered, declined = {partial.point for partial in partials}, self.declined(client, asked)
        signed = set() if final is None else {member.point for member in final.signers(asked.manifest)}

        def what(point: int) -> str:
            if point in answered:
                return "answered and signed" if point in signed else "answered"
            return "declined" if point in declined else ""

        return tuple((member.name, what(member.point)) for member in asked.terms.roster)

    def keep(self, asked: Asked | Past, final: Certificate, count: int) -> None:
        """A certificate that holds, for this member's page."""
        path = self._folder(asked, count).certificate
        if not path.exists():
            write_shared(path, final.to_bytes())

    def report(self, asked: Asked | Past) -> Papers | None:
        """Certificate and report of a query, once it is done, the latest ones; the report is made here."""
        counts = (*range(asked.manifest.terms.members, 0, -1), 0)
        found = next((p for n in counts if (p := self._folder(asked, n)).certificate.exists()), None)
        if found is not None and not found.report.exists():
            _write_report(found.report, Certificate.from_bytes(found.certificate.read_bytes()), asked)
        return found

    def certificate(
        self, client: Client, asker: str, query: Query, manifest: Manifest
    ) -> tuple[Certificate | None, int]:
        """The certificate of a query under a manifest, if one is there and holds, with the number in its name: the
        first one, or one with later answers."""
        start, best, at = f"query/{query.digest()}/", None, 0
        named = self._seat.mirror.named(f"{start}certificate", ".json")
        counts = {count_in(one.name.removeprefix(start), "certificate.json") for one in named if one.author == asker}
        for count in sorted(count for count in counts if count is not None and count <= manifest.terms.members):
            one = self._certificate(client, asker, query, manifest, again("certificate.json", count))
            if one is not None and (best is None or follows(one, best)):
                best, at = one, count
        return best, at

    def _certificate(
        self, client: Client, asker: str, query: Query, manifest: Manifest, name: str
    ) -> Certificate | None:
        notice = self._seat.mirror.find(asker, f"query/{query.digest()}/{name}")
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


def _write_report(path: Path, certificate: Certificate, asked: Asked | Past) -> None:
    """The page of a certificate, after the whole check, by the manifest that it was made under."""
    chain = asked.ours.chain()
    suspect = asked.tested
    checked, left = check_certificate(
        certificate,
        chain[: [link.digest() for link in chain].index(asked.manifest.digest()) + 1],
        suspect=suspect,
        reference=None if suspect is None else asked.compared_with(),
        audits=Ledger.open(asked.ours, asked.manifest).audits(),
    )
    signers = certificate.signers(asked.manifest)
    page = certificate_page(certificate, asked.manifest, signers=signers, checked=checked, left=left)
    write_page(path, page)
