"""An agent's part in a spot audit: a challenge that somebody brought, the member's opening, and what all then know.

    audit/A/challenge.json       what is to be opened; A is its digest
    audit/A/certificate.json     for which certificate
    audit/A/word.msg             who brings it, and why
    audit/A/opening.json         a member's leaves, public from then on
    audit/A/proof.json           by who brought it: that t members opened (`verify.proof`)

A person decides, never a policy: what is opened is burnt for good. Once t openings are there, every agent writes down
what is public now, whether its member opened or not: no later query may rest on it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quorumark.canonical import canonical, digest, parse
from quorumark.checks import is_text, require, take
from quorumark.consortium.archive import leaf_count
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.identity import Header, Identity, open_message
from quorumark.consortium.records import Manifest, Member
from quorumark.errors import EvidenceError, QuorumarkError, RoomError
from quorumark.files import write_private, write_shared
from quorumark.room.client import Client, Notice
from quorumark.room.desk import Matter
from quorumark.room.question import LARGEST_CERTIFICATE, LARGEST_WORD
from quorumark.room.seat import Seat
from quorumark.verify.certificate import Certificate
from quorumark.verify.challenge import Challenge, challenge, check_challenge
from quorumark.verify.check import check_challenged, check_corroborated
from quorumark.verify.leaves import from_shares
from quorumark.verify.ledger import Ledger
from quorumark.verify.opening import LIFE, open_leaves
from quorumark.verify.proof import Audit, explain

__all__ = ["Auditing", "bring_audit"]

_WORD = "quorumark-room-audit/v1"
_LARGEST_CHALLENGE = 1 << 24
_BROUGHT = re.compile("audit/([0-9a-f]{64})/word.msg")


def _header(asked: Challenge, sender: int) -> Header:
    return Header(asked.manifest, asked.digest(), "room/audit", sender)


def bring_audit(
    client: Client,
    home: HomeFolder,
    identity: Identity,
    certificate: Certificate,
    purpose: str,
    seed: bytes | None = None,
    source: str = "challenger",
) -> Challenge:
    """Puts a challenge to a certificate before all members, with a seed from a public coin, or a fresh one."""
    finding = certificate.finding
    ours = home.consortium_of(finding.query.manifest)
    if ours is None:
        raise RoomError("the certificate is of a consortium that is not in this home", code="room.other-audit")
    require(is_text(purpose, 500) and bool(purpose), "--purpose", "must say why in 1 to 500 printable characters")
    manifest = ours.manifest()
    asked = challenge(finding.query, manifest, finding.z, seed, source)
    _check_epoch(manifest)
    start, point = f"audit/{asked.digest()}", manifest.terms.point_of(identity.ed25519)
    client.upload(certificate.to_bytes(), f"{start}/certificate.json")
    client.upload(asked.to_bytes(), f"{start}/challenge.json")
    word = canonical({"format": _WORD, "purpose": purpose})
    client.upload(identity.write(_header(asked, point), word), f"{start}/word.msg")
    return asked


def _check_epoch(manifest: Manifest) -> None:
    if manifest.epoch:
        raise RoomError(
            "after new shares were made, an audit takes the members' archives: use quorumark verify audit",
            code="room.other-audit",
        )


@dataclass(frozen=True)
class _Brought:
    """An audit that this agent has checked."""

    asked: Challenge
    certificate: Certificate
    bringer: Member
    purpose: str
    ours: ConsortiumFolder
    manifest: Manifest

    @property
    def start(self) -> str:
        return f"audit/{self.asked.digest()}"

    @property
    def total(self) -> int:
        return leaf_count(self.manifest.terms.coordinates, self.manifest.terms.leaf)


class Auditing:
    """One member's audits in a room."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._brought: dict[str, _Brought] = {}
        self._refused: dict[str, frozenset[str]] = {}

    def step(self, client: Client) -> None:
        """Does what can be done now."""
        brought = self._seat.mirror.named("audit/", "/word.msg")
        if brought and not self._seat.share.is_here:
            text = "an audit is in the room, and this member's share is with its signer: open and record it there"
            self._seat.desk.trouble("audit", f"{text} (quorumark verify audit)")
            return
        for notice in brought:
            found = _BROUGHT.fullmatch(notice.name)
            if found is None:
                continue
            # this member's very words about this challenge: an approval is for no others
            parts = (notice.author, found[1], notice.sha256)
            about = digest("room audit", *(bytes.fromhex(part) for part in parts)).hex()
            if about not in self._brought:
                self._look(client, about, found[1], notice)
            if about in self._brought:
                self._go_on(client, about, self._brought[about])

    # --- what is asked ---

    def _look(self, client: Client, about: str, name: str, word: Notice) -> None:
        there = frozenset(one.sha256 for one in self._seat.mirror.named(f"audit/{name}/", ".json"))
        if self._refused.get(about) == there:
            return
        try:
            brought = self._check(client, name, word)
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            self._refused[about] = there
            code = error.code if error.code.startswith("room.") else "room.other-audit"
            self._seat.desk.put(Matter("audit", about, f"Audit {name[:12]}…", (), "refused", str(error), code))
            return
        self._brought[about] = brought
        self._seat.desk.put(Matter("audit", about, "Open a part of your share for an audit", self._facts(brought)))
        answered = brought.asked.x in Ledger.open(brought.ours, brought.manifest).answered()
        self._seat.desk.move(about, "waiting" if answered else "working")

    def _check(self, client: Client, name: str, word: Notice) -> _Brought:
        """1. The challenge has the digest in its name, and is about the manifest in force here."""
        seat, start = self._seat, f"audit/{name}"
        there = seat.there(word.author, f"{start}/challenge.json")
        asked = Challenge.from_bytes(client.small(there, _LARGEST_CHALLENGE))
        if asked.digest() != name:
            raise RoomError("the room's challenge has another digest than its name says", code="room.other-audit")
        ours = seat.home.consortium_of(asked.manifest)
        if ours is None or not ours.manifest_path.exists() or ours.manifest().digest().hex() != asked.manifest:
            raise RoomError("the audit is not about the manifest in force here", code="room.other-audit")
        manifest = ours.manifest()
        _check_epoch(manifest)
        # 2. A member brings it, in words that it signed.
        bringer = manifest.terms.member(manifest.terms.point_of(word.author))
        body = open_message(client.small(word, LARGEST_WORD), manifest.terms, _header(asked, bringer.point))
        said = take(parse(body, _WORD, "an audit"), ["purpose"], "an audit")
        require(is_text(said["purpose"], 500) and bool(said["purpose"]), "an audit's purpose", "must be printable")
        # 3. The certificate is signed, follows from its partials, and has this z; the seed draws these leaves.
        data = client.small(seat.there(word.author, f"{start}/certificate.json"), LARGEST_CERTIFICATE)
        certificate, ledger = Certificate.from_bytes(data), Ledger.open(ours, manifest)
        check_challenged(certificate, ours.chain(), asked, ledger.audits())
        check_corroborated(certificate.finding)
        check_challenge(asked, certificate.finding.query, manifest)
        brought = _Brought(asked, certificate, bringer, str(said["purpose"]), ours, manifest)
        # 4. A member opens only so much in its life.
        known = name in ledger.audits()
        if not known and LIFE * len({*ledger.burnt(), *asked.leaves}) > brought.total:
            raise EvidenceError(f"with this audit more than one leaf in {LIFE} would be burnt: members open no more")
        return brought

    def _facts(self, brought: _Brought) -> tuple[tuple[str, str], ...]:
        finding, asked = brought.certificate.finding, brought.asked
        files = ", ".join(file.name for file in finding.query.files[:8])
        count, burnt = len(asked.leaves), len(Ledger.open(brought.ours, brought.manifest).burnt())
        part = f"{count} of {brought.total} leaves ({100 * count / brought.total:.2f} %)"
        return (
            ("who brings it", brought.bringer.name),
            ("why", brought.purpose),
            ("what you open", f"{part} of your share: public from then on, and no later query may rest on them"),
            ("opened before", f"{burnt} leaves; members open at most one in {LIFE} in their lives"),
            ("certificate", f"{finding.verdict}, z = {finding.z}, about {files}"),
            ("the coin", f"{asked.seed}, drawn by {asked.source}"),
            ("query", asked.query),
            ("audit", asked.digest()),
        )

    # --- what follows ---

    def _go_on(self, client: Client, about: str, brought: _Brought) -> None:
        desk, matter = self._seat.desk, self._seat.desk.find(about)
        if matter is None or matter.state in ("done", "refused"):
            return
        said, _ = desk.said(about)
        try:
            if said == "yes":
                self._open(client, brought)
            openings = self._openings(client, brought)
            count = f"{len(openings)} of {brought.manifest.terms.threshold} openings are there"
            if len(openings) >= brought.manifest.terms.threshold:
                self._record(client, brought, openings)
                desk.move(about, "done", f"{len(brought.asked.leaves)} leaves are public; your ledger knows them")
            elif said:
                desk.move(about, "working" if said == "yes" else "declined", count)
            else:
                desk.move(about, matter.state, count)
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            desk.move(about, "refused", str(error), error.code or "room.other-audit")

    def _open(self, client: Client, brought: _Brought) -> None:
        seat = self._seat
        path = seat.place.folder("answers") / f"{brought.asked.digest()}-opening.json"
        if not path.exists():
            ledger = Ledger.open(brought.ours, brought.manifest)
            with ledger.exclusive():
                query = brought.certificate.finding.query
                answered = query.x in ledger.answered()
                data = open_leaves(
                    seat.home, brought.ours, seat.unlock, brought.asked, query, answered=answered, burns=ledger
                )
            write_private(path, data)
        seat.send(client, path, f"{brought.start}/opening.json")

    def _openings(self, client: Client, brought: _Brought) -> list[bytes]:
        """Those of members that lead to their roots."""
        leaf = 64 * brought.manifest.terms.leaf + (1 << 14)
        most = len(brought.asked.leaves) * leaf + (1 << 16)
        found = []
        for member in brought.manifest.terms.roster:
            notice = self._seat.mirror.find(member.ed25519, f"{brought.start}/opening.json")
            if notice is None:
                continue
            try:
                data = self._seat.cached(client, notice, most)
                sound, _ = from_shares(brought.asked, brought.ours.chain(), [data])
                require(member.point in sound, "an opening", "must be its member's, of the asked leaves")
            except QuorumarkError as error:
                if error.code == "room.unreachable":
                    raise
                text = f"the opening of {member.name} is not used: {error}"
                self._seat.desk.trouble(notice.name + member.name, text)
                continue
            self._seat.desk.trouble(notice.name + member.name, "")
            found.append(data)
        return found

    def _record(self, client: Client, brought: _Brought, openings: list[bytes]) -> None:
        """What t members opened is public: proved here, and written down."""
        proof = Audit.of(brought.certificate, brought.asked, openings, brought.ours.chain())
        ledger = Ledger.open(brought.ours, brought.manifest)
        with ledger.exclusive():
            for name, leaves in explain(brought.ours.chain(), [proof], ledger.audits()).items():
                ledger.record_burnt(leaves, name)
        if brought.bringer.ed25519 == self._seat.key:
            path = self._seat.place.folder("audits", brought.asked.digest()) / "proof.json"
            if not path.exists():
                write_shared(path, proof.to_bytes())
            self._seat.send(client, path, f"{brought.start}/proof.json")
