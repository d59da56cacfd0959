"""An agent's part in "is this model ours?": what is asked, checked here; the member's answer; what follows from all.

    asker                                       each member
    query.json, file/N, ask.msg          →      computes the query again from the suspect, shows it, waits for a person
    head.json                            ↔      head.json: everybody's ledger, compared before anybody answers (`heads`)
                                         ←      partial.json, or declined.msg
    opened.json (by layers)              ←      the examiner's word about the sealed answers
    combined.msg (t+1 answers, or as many as were asked for)
                                         ←      signed.json, once everything in it follows from the partials
    certificate.json, report.html
                                         ←      partial.json of who answers later: combined-4.msg, signed-4.json, …

Who asks, and why, is signed by the asker and bound to the query's digest. How many it takes, and who counts, is in the
manifest of this home. A member answers one query once; what it sent is kept before it is sent, and sent again if
need be.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from quorumark.canonical import canonical, digest, parse
from quorumark.checks import is_count, is_text, require, take
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.identity import Identity, open_message
from quorumark.consortium.records import Card, Manifest
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
from quorumark.report.texts import about_cost, about_layers, sentences
from quorumark.room.answering import Answering
from quorumark.room.client import Client, Notice
from quorumark.room.combining import Combining, Papers
from quorumark.room.desk import Matter
from quorumark.room.heads import Heads, say_head
from quorumark.room.past import Past
from quorumark.room.place import Place
from quorumark.room.question import ASK, LARGEST_CERTIFICATE, LARGEST_QUERY, LARGEST_WORD, Asked, header
from quorumark.room.seat import Seat, sha256_of
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Query
from quorumark.verify.guard import budget
from quorumark.verify.ledger import Ledger
from quorumark.verify.public import copy_public
from quorumark.verify.query import AskLayers, Prepared, difference, prepare, prepare_again
from quorumark.verify.reference import Reference
from quorumark.verify.rules import read_rules

__all__ = ["Asking", "ask", "compute_query", "send_question"]

_LEDGERS = "room.ledger-head"  # looked at again: people mend it
_ASKED = re.compile("query/([0-9a-f]{64})/ask.msg")


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
    after: Certificate | None = None,
    examiner: Card | None = None,
    consortium: ConsortiumFolder | None = None,
) -> Query:
    """Puts a question into the room, with the suspect's files unless they are to stay here.

    By layers with `after`, the certificate of the plain query that did not pass, and the examiner's card.
    """
    require((after is None) == (examiner is None), "--layers", "takes --after and --examiner")
    layers = None if after is None or examiner is None else AskLayers.of(after, examiner)
    query = compute_query(home, suspect, align=align, lora=lora, layers=layers, consortium=consortium)
    files = {file.name: suspect / file.name if suspect.is_dir() else suspect for file in query.files}
    if keep_file:  # this member's own agent needs it all the same
        for name, path in files.items():
            copy_public(path, Place(home.path).folder("suspects", query.digest()) / name)
    send_question(client, home, identity, query, files, purpose, answers=answers, keep_file=keep_file, after=after)
    return query


def compute_query(
    home: HomeFolder,
    suspect: Path,
    *,
    align: bool = False,
    lora: bool = False,
    layers: AskLayers | None = None,
    consortium: ConsortiumFolder | None = None,
) -> Query:
    """What to ask about a suspect, without the leaves that this member knows to be opened."""
    ours = consortium or home.only_consortium()
    reference = Reference.read(ours.manifest_path)
    burnt = Ledger.open(ours, reference.manifest).burnt()
    return prepare(reference, suspect, align=align, lora=lora, burnt=burnt, layers=layers).query


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
    after: Certificate | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Puts a query, with why it is asked, into the room; done again, it changes nothing. `files`: its files here."""
    ours = home.consortium_of(query.manifest)
    if ours is None:
        raise RoomError("the query is about a consortium that is not in this home", code="room.other-query")
    manifest = ours.manifest()
    terms = manifest.terms
    wanted = answers or min(terms.threshold + 1, terms.members)
    require(terms.threshold <= wanted <= terms.members, "--answers", f"must be {terms.threshold} to {terms.members}")
    require(is_text(purpose, 500) and bool(purpose), "--purpose", "must say why in 1 to 500 printable characters")
    start = f"query/{query.digest()}"
    for index, file in enumerate(query.files):
        if not keep_file:
            client.upload(files[file.name], f"{start}/file/{index}", progress)
    if after is not None:
        client.upload(after.to_bytes(), f"{start}/after.json")
    client.upload(query.to_bytes(), f"{start}/query.json")
    word = canonical({"format": ASK, "purpose": purpose, "answers": wanted})
    point = terms.point_of(identity.ed25519)
    client.upload(identity.write(header("ask", query, point), word), f"{start}/ask.msg")
    say_head(client, home, identity, ours, manifest, query)


class _EarlierError(RoomError):
    """A query under a manifest that is not in force any more."""

    def __init__(self, past: Past) -> None:
        super().__init__("the query is about an earlier manifest: ask again", code="room.other-query")
        self.past = past


class Asking:
    """One member's queries in a room."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._combining = Combining(seat)
        self._heads = Heads(seat)
        self._answering = Answering(seat, self._combining, self._heads)
        self._asked: dict[str, Asked] = {}
        self._past: dict[str, Past] = {}  # with a certificate, under an earlier manifest
        self._refused: dict[str, frozenset[str]] = {}
        self._references: dict[str, Reference] = {}
        self._names: dict[str, str] = {}  # of queries that were refused
        self._wanted: set[str] = set()  # large suspects that a person wants to see
        self._states: dict[str, str] = {}  # of folders that people put files into
        self._entries: Counter[str] = Counter()  # of each query
        self._settled: dict[str, tuple[int, str]] = {}  # how many there were when nothing was left to do

    def step(self, client: Client) -> None:
        """Does what can be done now. Who is in the room without a key, such as an examiner, has nothing to answer."""
        if not any(place.manifest_path.exists() for place in self._seat.home.consortia()):
            return
        self._entries = Counter(one.name.split("/")[1] for one in self._seat.mirror.named("query/", ""))
        for notice in self._seat.mirror.named("query/", "/ask.msg"):
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

    # --- what is asked ---

    def _look(self, client: Client, about: str, name: str, word: Notice) -> None:
        there = frozenset(one.sha256 for one in self._seat.mirror.named(f"query/{name}/", "")) | self._ledgers()
        if self._refused.get(about) == there and not self._put_here(name):
            return
        try:
            asked, prepared = self._check(client, name, word)
            facts = self._facts(asked)
        except _EarlierError as error:
            self._refused[about] = there
            self._seat.desk.put(self._earlier(client, about, word.author, error))
            return
        except RoomError as error:
            if error.code == "room.unreachable":
                raise
            self._refuse(about, name, error, there)
            return
        except QuorumarkError as error:
            self._refuse(about, name, error, there)
            return
        files = ", ".join(file.name for file in asked.query.files[:3]) or "a model in memory"
        matter = Matter("query", about, f"Is {files!r} ours?", facts)
        try:
            if not asked.kept(self._seat.place, "partial.json").exists():
                self._seat.share.check(asked, prepared)
        except (EvidenceError, GuardError, RoomError) as error:  # nobody is asked about what would be refused anyway
            self._refused[about] = there
            self._seat.desk.put(
                replace(matter, state="refused", status=str(error), code=error.code or "room.other-query")
            )
            return
        self._asked[about] = asked
        self._seat.desk.put(matter)
        self._seat.desk.move(about, "waiting")

    def _earlier(self, client: Client, about: str, asker: str, error: _EarlierError) -> Matter:
        """A query under a manifest that is not in force any more: over, with a certificate or without."""
        past = error.past
        name = past.query.digest()
        files = ", ".join(file.name for file in past.query.files[:3])
        matter = Matter("query", about, f"Is {files!r} ours?", (("query", name),), "refused", str(error), error.code)
        certificate, number = self._combining.certificate(client, asker, past.query, past.manifest)
        if certificate is None:
            return matter
        self._combining.keep(past, certificate, number)
        self._past[about] = past
        verdict = certificate.finding.verdict
        text = f"{verdict}, under the manifest {past.query.manifest[:16]}… before the one in force"
        return replace(matter, state="done", status=text, code="", verdict=verdict)

    def _ledgers(self) -> frozenset[str]:
        """Changes when the guard could say something else."""
        paths = [place.ledger_head_path for place in self._seat.home.consortia()]
        return frozenset(sha256_of(path) for path in paths if path.exists())

    def _put_here(self, name: str) -> bool:
        """Whether somebody put files of a suspect into its folder by hand since they were looked for."""
        folder = self._seat.place.folder("suspects") / name
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
        self._seat.desk.put(Matter("query", about, f"Query {name[:12]}…", (), "refused", text, code))

    def _check(self, client: Client, name: str, word: Notice) -> tuple[Asked, Prepared]:
        """1. The query has the digest in its name, and is about the manifest in force here."""
        query = Query.from_bytes(client.small(self._seat.there(word.author, f"query/{name}/query.json"), LARGEST_QUERY))
        if query.digest() != name:
            raise RoomError("the room's query has another digest than its name says", code="room.other-query")
        ours = self._seat.home.consortium_of(query.manifest)
        if ours is None or not ours.manifest_path.exists():
            raise RoomError("the query is about a consortium that is not in this home", code="room.other-query")
        manifest = ours.manifest()
        if manifest.digest().hex() != query.manifest:
            before = next(one for one in ours.chain() if one.digest().hex() == query.manifest)
            raise _EarlierError(Past(query, ours, before, self._seat.place.folder("suspects", name)))
        # 2. A member of it asks, in words that it signed for this query.
        terms = manifest.terms
        point = terms.point_of(word.author)
        body = open_message(client.small(word, LARGEST_WORD), terms, header("ask", query, point))
        said = take(parse(body, ASK, "a question"), ["purpose", "answers"], "a question")
        require(is_text(said["purpose"], 500), "a question's purpose", "must be printable")
        require(is_count(said["answers"], terms.threshold), "a question's answers", "must be at least the threshold")
        after = None
        if query.layers is not None:
            there = self._seat.there(word.author, f"query/{name}/after.json")
            after = Certificate.from_bytes(client.small(there, LARGEST_CERTIFICATE))
        # 3. The suspect's bytes are the ones that the query names, and the query is what follows from them.
        suspect = self._fetch_suspect(client, query, word.author)
        reference = self._reference(ours, manifest)
        prepared = prepare_again(reference, suspect, query)
        if prepared.query != query:
            text = f"the query does not describe this suspect: {difference(prepared.query, query)}"
            raise RoomError(text, code="room.other-query")
        asked = Asked(query, word.author, said["purpose"], said["answers"], ours, manifest, reference, suspect, after)
        return asked, prepared

    def _reference(self, ours: ConsortiumFolder, manifest: Manifest) -> Reference:
        key = manifest.digest().hex()
        if key not in self._references:
            self._references[key] = Reference.read(ours.manifest_path)
        return self._references[key]

    def _fetch_suspect(self, client: Client, query: Query, author: str) -> Path:
        """The suspect on this disk: from the room, or where somebody put it; each file by its digest."""
        name = query.digest()
        folder = self._seat.place.folder("suspects", name)
        if not query.files:
            raise RoomError("the query is about a model that was never a file", code="room.other-query")
        for index, file in enumerate(query.files):
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._ -]{0,199}", file.name):
                raise RoomError(f"the suspect's file {file.name[:80]!r} has no plain name", code="room.other-query")
            path = folder / file.name
            here = [p for p in (path, *sorted(folder.iterdir())) if p.is_file() and p.stat().st_size == file.size]
            same = next((p for p in here if sha256_of(p) == file.sha256), None)  # under whatever name it was put there
            if same is not None:
                same.replace(path)
                continue
            notice = self._seat.mirror.find(author, f"query/{name}/file/{index}")
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
        if size > self._seat.policy.most_mib << 20 and query.digest() not in self._wanted:
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
            self._seat.desk.news.set()

    def report(self, about: str) -> Papers | None:
        """Certificate and report of a query that is done."""
        asked = self._asked.get(about) or self._past.get(about)
        return None if asked is None else self._combining.report(asked)

    def _facts(self, asked: Asked) -> tuple[tuple[str, str], ...]:
        """What a person must see before it answers; all of it was computed here."""
        query, terms = asked.query, asked.terms
        book = Ledger.open(asked.ours, asked.manifest)
        opened, known = book.equations(), book.known()
        reached = read_rules(self._seat.home.rules_path).reached
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
            *self._by_layers(query),
            ("cost", about_cost(query, terms, used, failed, budget(terms, reached))),
            ("answered before", f"{len(book.answered())} queries here; this suspect: {before}"),
            ("it takes", f"{terms.threshold} of {terms.members} members; {asked.answers} answers are asked for"),
            ("query", query.digest()),
            ("consortium", f"{terms.name}, manifest {query.manifest}"),
        )

    def _by_layers(self, query: Query) -> tuple[tuple[str, str], ...]:
        if query.layers is None:
            return ()
        card = query.layers.examiner.card
        return (
            ("by layers", " ".join(about_layers(query))),
            ("the examiner's card, to compare by phone", card.fingerprint()),
        )

    # --- what follows ---

    def _go_on(self, client: Client, about: str, asked: Asked) -> None:
        matter = self._seat.desk.find(about)
        if matter is None or (matter.state == "refused" and matter.code != _LEDGERS):
            return
        news = self._entries[asked.query.digest()], self._seat.desk.said(about)[0]
        if matter.state == "done" and self._settled.get(about) == news:
            return
        try:
            self._do(client, about, asked, matter)
        except (GuardError, EvidenceError, RoomError) as error:
            if error.code == "room.unreachable":
                raise
            if matter.state == "done":  # what comes late must not hide the certificate
                self._seat.desk.trouble(about, str(error))
            else:
                self._seat.desk.move(about, "refused", str(error), error.code)
        except (MessageError, RecordError, SignatureError) as error:
            self._seat.desk.trouble(about, str(error))  # what is there now is not used; the right one may come
        else:
            self._seat.desk.trouble(about, "")
        self._settled[about] = news

    def _do(self, client: Client, about: str, asked: Asked, matter: Matter) -> None:
        in_force = matter.state != "done" or asked.ours.manifest().digest().hex() == asked.query.manifest
        if in_force:
            self._answering.check_not_set_back(client, asked)
            compared = self._compare(client, asked)
            matter = self._renewed(about, asked, matter)
            if matter.state != "done":  # a policy adds nothing to what is done
                self._answering.decide(about, asked, matter)
            said, by = self._seat.desk.said(about)
            if said == "yes":
                self._answering.answer(client, asked, by, len(compared) + 1 >= asked.terms.threshold)
                self._answering.sign(client, asked)
            elif said == "no":
                self._answering.decline(client, asked)
            if asked.asker == self._seat.key:
                self._combining.combine(client, asked)
                self._combining.finish(client, asked)
            self._show(client, about, asked, said, compared)

    def _compare(self, client: Client, asked: Asked) -> list[str]:
        """Says this member's head, and compares the others' before it answers; whose were compared."""
        self._heads.say(client, asked)
        answered = asked.kept(self._seat.place, "partial.json").exists()
        return [] if answered else self._heads.compare(client, asked)

    def _renewed(self, about: str, asked: Asked, matter: Matter) -> Matter:
        """The same with what an answer costs now, as long as nobody has decided."""
        if not self._seat.desk.said(about)[0] and (facts := self._facts(asked)) != matter.facts:
            matter = replace(matter, facts=facts)
            self._seat.desk.put(matter)
        return matter

    def _show(self, client: Client, about: str, asked: Asked, said: str, compared: list[str]) -> None:
        final, number = self._combining.certificate(client, asked.asker, asked.query, asked.manifest)
        people = self._combining.people(client, asked, final)
        if final is not None:
            self._combining.keep(asked, final, number)
            if asked.asker != self._seat.key:
                self._combining.look_late(client, asked, final)
            finding = final.finding
            z, least = (f"{float(number):.2f}" for number in (finding.z, finding.threshold))
            text = f"{finding.verdict}: z = {z}, threshold {least}; {finding.corroboration}"
            if finding.layers is not None:
                text += f"; by layers Q = {finding.layers.q}, threshold {finding.layers.threshold}"
            own = asked.terms.point_of(self._seat.key)
            late = own not in {partial.point for partial in finding.partials}
            if late and said == "yes":
                text += "; you answered after it: a new one comes once the asker's agent has combined it with the rest"
            move = self._seat.desk.move
            move(about, "done", text, verdict=finding.verdict, people=people, late=late and not said)
            return
        answered = [name for name, what in people if what == "answered"]
        count = f"{len(answered)} of {asked.answers} answers ({', '.join(answered) or 'nobody yet'})"
        if asked.query.layers is not None and len(answered) >= asked.answers:
            count += f"; {asked.query.layers.examiner.name} must open them"
        if said == "no":
            self._seat.desk.move(about, "declined", f"you declined; {count}", people=people)
        elif said == "yes":
            place, more = self._seat.place, ""
            if not asked.kept(place, "partial.json").exists():
                others, names = asked.terms.threshold - 1, ", ".join(compared) or "nobody yet"
                more = f"; your answer waits until the ledgers of {others} others were compared ({names})"
            elif asked.kept(place, "signed.json").exists():
                more = "; you signed what follows from them"
            self._seat.desk.move(about, "working", f"you approved; {count}{more}", people=people)
        else:
            self._seat.desk.move(about, "waiting", count, people=people)
