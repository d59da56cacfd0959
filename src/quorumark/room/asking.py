"""An agent's part in "is this model ours?": what is asked, checked here; the member's answer; what follows from all.

    asker                                       each member
    query.json, file/N, ask.msg          →      computes the query again from the suspect, shows it, waits for a person
                                         ←      partial.json, or declined.msg
    combined.msg (t+1 answers, or as many as were asked for)
                                         ←      signed.json, once everything in it follows from the partials
    certificate.json, report.html

Who asks, and why, is signed by the asker and bound to the query's digest. How many it takes, and who counts, is in the
manifest of this home. A member answers one query once, and signs one combination of it: what it sent is kept before it
is sent, and sent again if need be.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quorumark.canonical import canonical, digest, parse
from quorumark.checks import is_count, is_text, require, take
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.identity import Header, Identity, open_message
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Manifest, Terms
from quorumark.errors import (
    EvidenceError,
    GuardError,
    InconclusiveError,
    MessageError,
    QuorumarkError,
    RecordError,
    RoomError,
    SignatureError,
)
from quorumark.files import write_private, write_shared
from quorumark.report import certificate_page, write_page
from quorumark.report.texts import about_cost, sentences
from quorumark.room.client import Client, Notice
from quorumark.room.desk import Desk, Matter, Mirror
from quorumark.room.place import Place, Policy
from quorumark.verify.answer import answer
from quorumark.verify.certificate import Certificate, verify_signatures
from quorumark.verify.check import check_certificate, sign
from quorumark.verify.combine import check_signed, combine
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.guard import budget
from quorumark.verify.ledger import Ledger
from quorumark.verify.public import copy_public
from quorumark.verify.query import difference, prepare, prepare_again
from quorumark.verify.reference import Reference
from quorumark.verify.rules import AnswerRules, read_rules

__all__ = ["Asking", "ask", "compute_query", "send_question"]

_LARGEST_QUERY = 1 << 24
_LARGEST_WORD = 1 << 13
_LARGEST_PARTIAL = 1 << 20
_LARGEST_CERTIFICATE = 1 << 25
_ASK = "quorumark-room-ask/v1"
_DAY = 24 * 60 * 60
_ASKED = re.compile("query/([0-9a-f]{64})/ask.msg")


def _header(step: str, query: Query, sender: int) -> Header:
    return Header(query.manifest, query.digest(), f"room/{step}", sender)


def ask(
    client: Client,
    home: HomeFolder,
    identity: Identity,
    suspect: Path,
    purpose: str,
    *,
    align: bool = False,
    lora: bool = False,
    answers: int = 0,
    keep_file: bool = False,
    consortium: ConsortiumFolder | None = None,
) -> Query:
    """Puts a question into the room, with the suspect's files unless they are to stay here."""
    query = compute_query(home, suspect, align=align, lora=lora, consortium=consortium)
    files = {file.name: suspect / file.name if suspect.is_dir() else suspect for file in query.files}
    if keep_file:  # this member's own agent needs it all the same
        for name, path in files.items():
            copy_public(path, Place(home.path).folder("suspects", query.digest()) / name)
    send_question(client, home, identity, query, files, purpose, answers=answers, keep_file=keep_file)
    return query


def compute_query(
    home: HomeFolder,
    suspect: Path,
    *,
    align: bool = False,
    lora: bool = False,
    consortium: ConsortiumFolder | None = None,
) -> Query:
    """What to ask about a suspect, without the leaves that this member knows to be opened."""
    ours = consortium or home.only_consortium()
    reference = Reference.read(ours.manifest_path)
    burnt = Ledger.open(ours, reference.manifest).burnt()
    return prepare(reference, suspect, align=align, lora=lora, burnt=burnt).query


def send_question(
    client: Client,
    home: HomeFolder,
    identity: Identity,
    query: Query,
    files: Mapping[str, Path],
    purpose: str,
    *,
    answers: int = 0,
    keep_file: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Puts a query, with why it is asked, into the room; done again, it changes nothing. `files`: its files here."""
    ours = home.consortium_of(query.manifest)
    if ours is None:
        raise RoomError("the query is about a consortium that is not in this home", code="room.other-query")
    terms = ours.manifest().terms
    wanted = answers or min(terms.threshold + 1, terms.members)
    require(terms.threshold <= wanted <= terms.members, "--answers", f"must be {terms.threshold} to {terms.members}")
    require(is_text(purpose, 500) and bool(purpose), "--purpose", "must say why in 1 to 500 printable characters")
    start = f"query/{query.digest()}"
    for index, file in enumerate(query.files):
        if not keep_file:
            client.upload(files[file.name], f"{start}/file/{index}", progress)
    client.upload(query.to_bytes(), f"{start}/query.json")
    word = canonical({"format": _ASK, "purpose": purpose, "answers": wanted})
    point = terms.point_of(identity.ed25519)
    client.upload(identity.write(_header("ask", query, point), word), f"{start}/ask.msg")


@dataclass(frozen=True)
class _Asked:
    """A query that this agent has checked."""

    query: Query
    asker: str  # its key
    purpose: str
    answers: int
    ours: ConsortiumFolder
    manifest: Manifest
    reference: Reference
    suspect: Path

    @property
    def terms(self) -> Terms:
        return self.manifest.terms

    @property
    def start(self) -> str:
        return f"query/{self.query.digest()}"

    @property
    def kind(self) -> str:
        """What an answer opens, in a word."""
        if self.query.layers is not None:
            return "by layers"
        return "plain" if self.query.alignment == "none" else "aligned"


class Asking:
    """One member's queries in a room."""

    def __init__(
        self,
        home: HomeFolder,
        unlock: Unlock,
        identity: Identity,
        place: Place,
        desk: Desk,
        mirror: Mirror,
        policy: Policy,
    ) -> None:
        self._home, self._unlock, self._identity = home, unlock, identity
        self._place, self._desk, self._mirror, self._policy = place, desk, mirror, policy
        self._asked: dict[str, _Asked] = {}
        self._refused: dict[str, frozenset[str]] = {}
        self._references: dict[str, Reference] = {}
        self._sent: set[str] = set()
        self._names: dict[str, str] = {}  # of queries that were refused
        self._wanted: set[str] = set()  # large suspects that a person wants to see
        self._states: dict[str, str] = {}  # of folders that people put files into

    def step(self, client: Client) -> None:
        """Does what can be done now."""
        for notice in self._mirror.named("query/", "/ask.msg"):
            found = _ASKED.fullmatch(notice.name)
            if found is None:
                continue
            # this asker's very words about this query
            parts = (notice.author, found[1], notice.sha256)
            about = digest("room ask", *(bytes.fromhex(part) for part in parts)).hex()
            if about not in self._asked:
                self._look(client, about, found[1], notice)
            if about in self._asked:
                self._go_on(client, about, self._asked[about])

    def sent_again(self) -> None:
        """After the room was away: what was sent may be lost there."""
        self._sent.clear()

    # --- what is asked ---

    def _look(self, client: Client, about: str, name: str, word: Notice) -> None:
        there = frozenset(one.sha256 for one in self._mirror.named(f"query/{name}/", ""))
        if self._refused.get(about) == there and not self._put_here(name):
            return
        try:
            asked = self._check(client, name, word)
            facts = self._facts(asked)
        except RoomError as error:
            if error.code == "room.unreachable":
                raise
            self._refuse(about, name, error, there)
            return
        except QuorumarkError as error:
            self._refuse(about, name, error, there)
            return
        self._asked[about] = asked
        files = ", ".join(file.name for file in asked.query.files[:3]) or "a model in memory"
        self._desk.put(Matter("query", about, f"Is {files!r} ours?", facts))
        self._desk.move(about, "waiting")

    def _put_here(self, name: str) -> bool:
        """Whether somebody put files of a suspect into its folder by hand since they were looked for."""
        folder = self._place.folder("suspects") / name
        state = " ".join(f"{p.name}:{p.stat().st_size}" for p in sorted(folder.glob("*"))) if folder.is_dir() else ""
        changed = state != self._states.get(name, "")
        self._states[name] = state
        return changed

    def _refuse(self, about: str, name: str, error: QuorumarkError, there: frozenset[str]) -> None:
        self._refused[about], self._names[about] = there, name
        text = str(error)
        if isinstance(error, InconclusiveError) and error.problems:
            text += "; " + "; ".join(sentences(error.problems))
        code = error.code if error.code.startswith("room.") else "room.other-query"
        self._desk.put(Matter("query", about, f"Query {name[:12]}…", (), "refused", text, code))

    def _check(self, client: Client, name: str, word: Notice) -> _Asked:
        """1. The query has the digest in its name, and is about the manifest in force here."""
        query = Query.from_bytes(client.small(self._there(word.author, f"query/{name}/query.json"), _LARGEST_QUERY))
        if query.digest() != name:
            raise RoomError("the room's query has another digest than its name says", code="room.other-query")
        ours = self._home.consortium_of(query.manifest)
        if ours is None or not ours.manifest_path.exists():
            raise RoomError("the query is about a consortium that is not in this home", code="room.other-query")
        manifest = ours.manifest()
        if manifest.digest().hex() != query.manifest:
            raise RoomError("the query is about an earlier manifest: ask again", code="room.other-query")
        # 2. A member of it asks, in words that it signed for this query.
        terms = manifest.terms
        point = terms.point_of(word.author)
        body = open_message(client.small(word, _LARGEST_WORD), terms, _header("ask", query, point))
        said = take(parse(body, _ASK, "a question"), ["purpose", "answers"], "a question")
        require(is_text(said["purpose"], 500), "a question's purpose", "must be printable")
        require(is_count(said["answers"], terms.threshold), "a question's answers", "must be at least the threshold")
        if query.layers is not None:
            raise RoomError(
                "queries by layers do not go through a room yet: answer with quorumark verify partial",
                code="room.other-query",
            )
        # 3. The suspect's bytes are the ones that the query names, and the query is what follows from them.
        suspect = self._fetch_suspect(client, query, word.author)
        reference = self._reference(ours, manifest)
        again = prepare_again(reference, suspect, query).query
        if again != query:
            raise RoomError(
                f"the query does not describe this suspect: {difference(again, query)}", code="room.other-query"
            )
        return _Asked(query, word.author, said["purpose"], said["answers"], ours, manifest, reference, suspect)

    def _there(self, author: str, name: str) -> Notice:
        notice = self._mirror.find(author, name)
        if notice is None:
            raise RoomError(f"{name!r} is not in the room yet", code="room.not-found")
        return notice

    def _reference(self, ours: ConsortiumFolder, manifest: Manifest) -> Reference:
        key = manifest.digest().hex()
        if key not in self._references:
            self._references[key] = Reference.read(ours.manifest_path)
        return self._references[key]

    def _fetch_suspect(self, client: Client, query: Query, author: str) -> Path:
        """The suspect on this disk: from the room, or where somebody put it; each file by its digest."""
        name = query.digest()
        folder = self._place.folder("suspects", name)
        if not query.files:
            raise RoomError("the query is about a model that was never a file", code="room.other-query")
        for index, file in enumerate(query.files):
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._ -]{0,199}", file.name):
                raise RoomError(f"the suspect's file {file.name[:80]!r} has no plain name", code="room.other-query")
            path = folder / file.name
            here = [p for p in (path, *sorted(folder.iterdir())) if p.is_file() and p.stat().st_size == file.size]
            same = next((p for p in here if _sha256(p) == file.sha256), None)  # under whatever name it was put there
            if same is not None:
                same.replace(path)
                continue
            notice = self._mirror.find(author, f"query/{name}/file/{index}")
            if notice is None:
                raise RoomError(
                    f"the suspect is not in the room: put its files into {str(folder)!r}, as you got them from the "
                    f"asker ({file.name}, SHA-256 {file.sha256})",
                    code="room.not-found",
                )
            if (notice.sha256, notice.size) != (file.sha256, file.size):
                raise RoomError(f"the room has another file for {file.name!r}: refused", code="room.other-query")
            self._check_size(query)
            client.download(file.sha256, file.size, path)
        return folder / query.files[0].name if len(query.files) == 1 else folder

    def _check_size(self, query: Query) -> None:
        """A large suspect is fetched when a person says so: an asker must not fill this disk by itself."""
        size = sum(file.size for file in query.files)
        if size > self._policy.most_mib << 20 and query.digest() not in self._wanted:
            raise RoomError(
                f"the suspect has {size:,} bytes, and is not fetched before you want it; its files: "
                + ", ".join(f"{file.name} (SHA-256 {file.sha256})" for file in query.files[:8]),
                code="room.not-fetched",
            )

    def fetch(self, about: str) -> None:
        """A person wants to see a large suspect."""
        if about in self._names:
            self._wanted.add(self._names[about])
            self._refused.pop(about, None)
            self._desk.news.set()

    def _facts(self, asked: _Asked) -> tuple[tuple[str, str], ...]:
        """What a person must see before it answers; all of it was computed here."""
        query, terms = asked.query, asked.terms
        book = Ledger.open(asked.ours, asked.manifest)
        opened, known = book.equations(), book.known()
        used = sum(count for x, count in opened.items() if x != query.x)
        failed = sum(count for x, count in opened.items() if x != query.x and known[x] != "passed")
        files = "; ".join(f"{file.name}, {file.size:,} bytes, SHA-256 {file.sha256}" for file in query.files[:8])
        more = f"; and {len(query.files) - 8} more" if len(query.files) > 8 else ""
        before = "yes: the same answer tells nobody more" if query.x in book.answered() else "no"
        return (
            ("who asks", terms.member(terms.point_of(asked.asker)).name),
            ("why", asked.purpose),
            ("suspect", files + more),
            ("found in it", f"{100 * query.covered / query.carriers:.1f} % of the carrying weights"),
            ("kind of query", f"{asked.kind}; equations: {query.equations}; leaves left out: {len(query.burnt)}"),
            ("cost", about_cost(query, terms, used, failed, budget(terms, read_rules(self._home.rules_path).reached))),
            ("answered before", f"{len(book.answered())} queries here; this suspect: {before}"),
            ("it takes", f"{terms.threshold} of {terms.members} members; {asked.answers} answers are asked for"),
            ("query", query.digest()),
            ("consortium", f"{terms.name}, manifest {query.manifest}"),
        )

    # --- what follows ---

    def _go_on(self, client: Client, about: str, asked: _Asked) -> None:
        matter = self._desk.find(about)
        if matter is None or matter.state in ("refused", "done"):
            return
        try:
            self._check_not_set_back(client, asked)
            matter = self._renewed(about, asked, matter)
            self._decide(about, asked, matter)
            said, by = self._desk.said(about)
            if said == "yes":
                self._answer(client, asked, by)
                self._sign(client, asked)
            elif said == "no":
                self._decline(client, asked)
            if asked.asker == self._identity.ed25519:
                self._combine(client, asked)
                self._finish(client, asked)
            self._show(client, about, asked, said)
        except (GuardError, EvidenceError) as error:
            self._desk.move(about, "refused", str(error), error.code)
        except RoomError as error:
            if error.code == "room.unreachable":
                raise
            self._desk.move(about, "refused", str(error), error.code)
        except (MessageError, RecordError, SignatureError) as error:
            self._desk.trouble(about, str(error))  # what is there now is not used; the right one may come
        else:
            self._desk.trouble(about, "")

    def _renewed(self, about: str, asked: _Asked, matter: Matter) -> Matter:
        """The same with what an answer costs now, as long as nobody has decided."""
        if not self._desk.said(about)[0] and (facts := self._facts(asked)) != matter.facts:
            matter = replace(matter, facts=facts)
            self._desk.put(matter)
        return matter

    def _decide(self, about: str, asked: _Asked, matter: Matter) -> None:
        """The policy's word, if it is given now: what an earlier one said is withdrawn, and waits for a person."""
        said, by = self._desk.said(about)
        if by == "person":
            return
        allowed = self._policy_allows(asked)
        if by == "policy" and not allowed:
            self._desk.withdraw(about)
        elif not said and allowed:
            self._desk.decide(about, matter.shown, "yes", "policy")

    def _policy_allows(self, asked: _Asked) -> bool:
        """Whether the policy approves, and the member's own rules leave it to anything but a person."""
        asker = asked.terms.member(asked.terms.point_of(asked.asker)).name
        if not self._policy.approves(asker, asked.kind, asked.query.equations):
            return False
        rules = self._rules()
        book = Ledger.open(asked.ours, asked.manifest)
        again = asked.query.equations <= book.opened(asked.query.x)  # the guard does not count it either
        today = book.answers_since(int(time.time()) - _DAY)
        return rules.approve == "always" and (again or today < (rules.max_queries_per_day or 0))

    def _rules(self) -> AnswerRules:
        """The stricter of the policy and HOME/rules.json. If that says ask, a person decides."""
        own, most = read_rules(self._home.rules_path), self._policy.most_a_day
        if not self._home.rules_path.exists():
            own = replace(own, approve="always", max_queries_per_day=most)
        limit = own.max_queries_per_day
        return replace(own, max_queries_per_day=most if limit is None else min(limit, most))

    def _check_not_set_back(self, client: Client, asked: _Asked) -> None:
        """Whether the room has an answer of this member that its ledger does not know."""
        notice = self._mirror.find(self._identity.ed25519, f"{asked.start}/partial.json")
        if notice is None or self._kept(asked, "partial.json").exists():
            return
        try:
            there = Partial.from_bytes(client.small(notice, _LARGEST_PARTIAL))
            there.verify(asked.terms)
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            return  # not this member's: the room made it up
        own = there.point == asked.terms.point_of(self._identity.ed25519)
        if own and there.query == asked.query.digest():
            if asked.query.x not in Ledger.open(asked.ours, asked.manifest).answered():
                raise RoomError(
                    "this member's ledger does not know an answer that this member signed: its home was set back to an "
                    "earlier day, or another copy of it is in use; nothing is answered until that is mended",
                    code="room.set-back",
                )
            write_private(self._kept(asked, "partial.json"), there.to_bytes())

    def _kept(self, asked: _Asked, what: str) -> Path:
        return self._place.folder("answers") / f"{asked.query.digest()}-{what}"

    def _send(self, client: Client, asked: _Asked, what: str) -> None:
        """What was kept goes to the room, unless it is there."""
        path, name = self._kept(asked, what), f"{asked.start}/{what}"
        if self._mirror.find(self._identity.ed25519, name) is None and name not in self._sent:
            client.upload(path, name)
            self._sent.add(name)

    def _answer(self, client: Client, asked: _Asked, by: str) -> None:
        path = self._kept(asked, "partial.json")
        if not path.exists():
            made = answer(
                self._home,
                self._unlock,
                asked.reference,
                asked.suspect,
                asked.query,
                approved=by == "person",
                consortium=asked.ours,
                rules=self._rules() if by == "policy" else None,
            )
            write_private(path, made.to_bytes())
        self._send(client, asked, "partial.json")

    def _decline(self, client: Client, asked: _Asked) -> None:
        path = self._kept(asked, "declined.msg")
        if not path.exists():
            point = asked.terms.point_of(self._identity.ed25519)
            write_private(path, self._identity.write(_header("declined", asked.query, point), b"declined"))
        self._send(client, asked, "declined.msg")

    # --- the asker ---

    def _partials(self, client: Client, asked: _Asked) -> list[Partial]:
        """The answers that are there and hold, in the order of points."""
        found = []
        for member in asked.terms.roster:
            notice = self._mirror.find(member.ed25519, f"{asked.start}/partial.json")
            if notice is None:
                continue
            try:
                partial = Partial.from_bytes(self._cached(client, notice, _LARGEST_PARTIAL))
                partial.verify(asked.terms)
                sound = (partial.point, partial.query) == (member.point, asked.query.digest())
                require(sound, f"the answer of {member.name!r}", "must be to this query, and its own")
            except QuorumarkError as error:
                if error.code == "room.unreachable":
                    raise
                self._desk.trouble(notice.name + member.name, f"the answer of {member.name} is not used: {error}")
                continue
            found.append(partial)
        return found

    def _declined(self, client: Client, asked: _Asked) -> set[int]:
        found = set()
        for member in asked.terms.roster:
            notice = self._mirror.find(member.ed25519, f"{asked.start}/declined.msg")
            if notice is not None:
                try:
                    word = self._cached(client, notice, _LARGEST_WORD)
                    open_message(word, asked.terms, _header("declined", asked.query, member.point))
                except QuorumarkError as error:
                    if error.code == "room.unreachable":
                        raise
                    continue
                found.add(member.point)
        return found

    def _cached(self, client: Client, notice: Notice, most: int) -> bytes:
        """A small file of somebody's, fetched once."""
        path = self._place.folder("answers", "others") / notice.sha256
        if not path.exists():
            write_private(path, client.small(notice, most))
        return path.read_bytes()

    def _combine(self, client: Client, asked: _Asked) -> None:
        path = self._kept(asked, "combined.msg")
        if not path.exists():
            partials = self._partials(client, asked)
            every = len(partials) + len(self._declined(client, asked)) >= asked.terms.members
            enough = len(partials) >= asked.answers or (every and len(partials) >= asked.terms.threshold)
            if not enough:
                return
            audits = Ledger.open(asked.ours, asked.manifest).audits()
            certificate = Certificate.of(combine(asked.manifest, asked.query, partials, audits=audits))
            point = asked.terms.point_of(self._identity.ed25519)
            message = self._identity.write(_header("combined", asked.query, point), certificate.to_bytes())
            write_private(path, message)
        self._send(client, asked, "combined.msg")

    def _combined(self, client: Client, asked: _Asked) -> Certificate | None:
        """What the asker says follows from the answers; its word is checked, not its truth."""
        notice = self._mirror.find(asked.asker, f"{asked.start}/combined.msg")
        if notice is None:
            return None
        point = asked.terms.point_of(asked.asker)
        message = self._cached(client, notice, _LARGEST_CERTIFICATE)
        return Certificate.from_bytes(open_message(message, asked.terms, _header("combined", asked.query, point)))

    def _sign(self, client: Client, asked: _Asked) -> None:
        path = self._kept(asked, "signed.json")
        if not path.exists():
            certificate = self._combined(client, asked)
            if certificate is None:
                return
            own = Partial.from_bytes(self._kept(asked, "partial.json").read_bytes())
            if certificate.finding.query != asked.query or own not in certificate.finding.partials:
                return  # made without this member's answer: nothing to sign
            signed = sign(self._home, self._unlock, certificate, consortium=asked.ours)
            write_private(path, signed.to_bytes())
        self._send(client, asked, "signed.json")

    def _finish(self, client: Client, asked: _Asked) -> None:
        """The asker's last step: all signatures on one certificate, checked like anybody would."""
        folder = self._place.folder("certificates", asked.query.digest())
        path = folder / "certificate.json"
        if not path.exists():
            combined = self._kept(asked, "combined.msg")
            if not combined.exists():
                return
            point = asked.terms.point_of(self._identity.ed25519)
            body = open_message(combined.read_bytes(), asked.terms, _header("combined", asked.query, point))
            certificate = self._with_signatures(client, asked, Certificate.from_bytes(body))
            if certificate is None:
                return
            _write_report(folder, certificate, asked)
            write_shared(path, certificate.to_bytes())
        for name in ("report.html", "certificate.json"):
            entry = f"{asked.start}/{name}"
            if self._mirror.find(self._identity.ed25519, entry) is None and entry not in self._sent:
                client.upload(folder / name, entry)
                self._sent.add(entry)

    def _with_signatures(self, client: Client, asked: _Asked, certificate: Certificate) -> Certificate | None:
        """The certificate with everybody's signature; None while some are missing."""
        finding = certificate.finding
        for point in {partial.point for partial in finding.partials} - set(finding.wrong):
            member = asked.terms.member(point)
            notice = self._mirror.find(member.ed25519, f"{asked.start}/signed.json")
            if notice is None:
                return None
            try:
                given = Certificate.from_bytes(self._cached(client, notice, _LARGEST_CERTIFICATE))
                require(given.payload == certificate.payload, "what was signed", "must be what was combined")
                one = replace(certificate, signatures={member.ed25519: given.signatures.get(member.ed25519, "")})
                one.signers(asked.manifest)
            except QuorumarkError as error:
                if error.code == "room.unreachable":
                    raise
                self._desk.trouble(notice.name + member.name, f"the signature of {member.name} is not used: {error}")
                return None
            certificate = replace(certificate, signatures={**certificate.signatures, **one.signatures})
        verify_signatures(certificate, asked.manifest)
        return certificate

    # --- how far it is ---

    def _show(self, client: Client, about: str, asked: _Asked, said: str) -> None:
        final = self._certificate(client, asked)
        answered = {p.point for p in self._partials(client, asked)} if final is None else set()
        people = _who_did_what(asked, answered, self._declined(client, asked), final)
        if final is not None:
            finding = final.finding
            z, least = (f"{float(number):.2f}" for number in (finding.z, finding.threshold))
            text = f"{finding.verdict}: z = {z}, threshold {least}; {finding.corroboration}"
            path = self._place.folder("certificates", asked.query.digest()) / "certificate.json"
            if not path.exists():
                write_shared(path, final.to_bytes())
            self._desk.move(about, "done", text, verdict=finding.verdict, people=people)
            return
        names = [asked.terms.member(point).name for point in sorted(answered)]
        count = f"{len(names)} of {asked.answers} answers ({', '.join(names) or 'nobody yet'})"
        if said == "no":
            self._desk.move(about, "declined", f"you declined; {count}", people=people)
        elif said == "yes":
            signed = "; you signed what follows from them" if self._kept(asked, "signed.json").exists() else ""
            self._desk.move(about, "working", f"you approved; {count}{signed}", people=people)
        else:
            self._desk.move(about, "waiting", count, people=people)

    def report(self, about: str) -> Path | None:
        """The folder with certificate and report of a query that is done; the report is made here."""
        asked = self._asked.get(about)
        if asked is None:
            return None
        folder = self._place.folder("certificates", asked.query.digest())
        if not (folder / "certificate.json").exists():
            return None
        if not (folder / "report.html").exists():
            _write_report(folder, Certificate.from_bytes((folder / "certificate.json").read_bytes()), asked)
        return folder

    def _certificate(self, client: Client, asked: _Asked) -> Certificate | None:
        """The certificate, if it is there and holds."""
        notice = self._mirror.find(asked.asker, f"{asked.start}/certificate.json")
        if notice is None:
            return None
        try:
            certificate = Certificate.from_bytes(self._cached(client, notice, _LARGEST_CERTIFICATE))
            require(certificate.finding.query == asked.query, "a certificate", "must be about the query")
            check_signed(certificate, asked.manifest)
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            self._desk.trouble(notice.name, f"the certificate in the room does not hold: {error}")
            return None
        return certificate


def _who_did_what(
    asked: _Asked, answered: set[int], declined: set[int], final: Certificate | None
) -> tuple[tuple[str, str], ...]:
    """Every member of the signed roster, with what it did that holds here."""
    if final is not None:
        answered = {partial.point for partial in final.finding.partials}
    signed = set() if final is None else {member.point for member in final.signers(asked.manifest)}

    def what(point: int) -> str:
        if point in answered:
            return "answered and signed" if point in signed else "answered"
        return "declined" if point in declined else ""

    return tuple((member.name, what(member.point)) for member in asked.terms.roster)


def _write_report(folder: Path, certificate: Certificate, asked: _Asked) -> None:
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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
