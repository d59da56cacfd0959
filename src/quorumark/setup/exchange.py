"""Ceremonies over a folder that all members can reach: a network share, a synchronised folder, a stick.

Each member calls `set_up` (setup), `check` (health) or `reshare` whenever it likes; it does all that can be done with
what is there, writes its messages and says what it waits for (`waiting` calls it until it is done). A crash at any
point loses nothing: the state is sealed on disk before a message is written, every step can be done again with the same
result, and messages are files that appear whole or not at all.

    FOLDER/1-commit/SENDER.msg  2-reveal/…  3-deal/SENDER-to-RECIPIENT.msg  4-…     one folder for each step, in order
    FOLDER/chain/….json         for a resharing: the manifests so far, for members who are new

There is no relay: every member adds up the signed openings itself. Use a new, empty folder for each ceremony, and keep
it until everybody has finished: who has finished has forgotten what it would take to write a message again.

A file that is damaged, or somebody else's, is refused by the sender's name and the step; once the right one is there,
go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from quorumark.canonical import canonical, digest, parse
from quorumark.consortium import memory
from quorumark.consortium.archive import leaf_count, write_archive
from quorumark.consortium.home import UNDER_WAY, ConsortiumFolder, HomeFolder, read_exchanged, read_file
from quorumark.consortium.identity import Header, Identity, open_message
from quorumark.consortium.keystore import SealedReader, Unlock, read_sealed, write_sealed
from quorumark.consortium.records import ARCHIVE_KEY, Manifest, Terms
from quorumark.consortium.shares import ShareFile, ShareInfo, ShareWriter
from quorumark.consortium.succession import check_terms_follow
from quorumark.errors import CeremonyError, MessageError, RecordError
from quorumark.files import only_one, write_exchanged, write_private, write_shared
from quorumark.setup.ceremony import Ceremony
from quorumark.setup.chain import (
    chain_for_newcomer,
    folder_for_newcomer,
    show_chain,
    started_from,
    wait_for_chain,
)
from quorumark.setup.check import CheckMember
from quorumark.setup.dkg import DkgMember, KeyCeremony, check_terms, openers, relay_sum
from quorumark.setup.paper import PaperMember, check_paper_terms
from quorumark.setup.reshare import ReshareMember
from quorumark.setup.sums import STEP, sign_terms
from quorumark.setup.waiting import Progress

__all__ = ["check", "discard", "expected_in_resharing", "expected_messages", "reshare", "set_up"]

_KIND = "ceremony"
_LARGEST_WRAPPING = 1 << 13  # header, signature, and all that is not as long as the key
_MOST_ARCHIVES = 1 << 12  # more first members than any consortium has
_FINISHED = "quorumark-finished/v1"
Note = Callable[[str], None]


class _Waiting(Exception):  # noqa: N818 - not an error: the ceremony pauses
    def __init__(self, step: str, names: tuple[str, ...], files: tuple[Path, ...]) -> None:
        super().__init__(step)
        self.progress = Progress(step, names, files=files)


def _silent(_: str) -> None:
    pass


# --- setup ------------------------------------------------------------------------------------------------


def set_up(
    home: HomeFolder, unlock: Unlock, terms: Terms, folder: str | os.PathLike[str], note: Note = _silent
) -> Progress:
    """Does what can be done now of a setup without a dealer. Call it again when others have written.

    `note` hears of each step as it is done. After a fault that only a new ceremony mends, every further call says so,
    until `discard` is called. Where the terms have no key, all members sign them, and that is all.
    """
    if not terms.has_key:
        return sign_terms(home, unlock, terms, folder)
    check_paper_terms(terms) if terms.setup == "paper" else check_terms(terms)
    terms.point_of(home.card().ed25519)  # nothing is made for terms of others
    consortium = home.consortium(terms)
    with only_one(consortium.path):
        if consortium.manifest_path.exists():
            if _about(consortium).get("context") == terms.digest().hex():
                consortium.ceremony_path.unlink()  # a power cut came between the two
            if consortium.share_path().exists():
                return Progress("sign", (), consortium.manifest())
            raise CeremonyError(
                "the ceremony is finished, but this member's share is gone: it must be recovered",
                code="ceremony.no-share",
            )
        kind = PaperMember if terms.setup == "paper" else DkgMember
        visit: _Visit[KeyCeremony] = _Visit(
            home, unlock, consortium, folder, note, terms.digest(), lambda identity, seed: kind(identity, terms, seed)
        )
        return visit.attempt(_setup_steps)


def expected_messages(terms: Terms, point: int) -> dict[str, int]:
    """All messages that the member at `point` takes in a setup without a dealer, by their names in the folder, and the
    most bytes that each may have: what terms allow, and nothing that a relay could add."""
    if not terms.has_key:
        return {f"{STEP}/{x}.msg": _LARGEST_WRAPPING for x in range(1, terms.members + 1) if x != point}
    kind = PaperMember if terms.setup == "paper" else DkgMember
    found = {}
    for number, step in enumerate(kind.STEPS, 1):
        long = step in ("deal", "open")
        most = _LARGEST_WRAPPING + (8 * terms.coordinates if long else 0)
        for x in openers(terms) if step == "open" else range(1, terms.members + 1):
            if x != point:
                found[f"{number}-{step}/{x}{f'-to-{point}' if step == 'deal' else ''}.msg"] = most
    return found


def expected_in_resharing(terms: Terms, before: Manifest, point: int) -> dict[str, int]:
    """The same for new shares, for the members in `terms`, after the manifest `before`."""
    stay = check_terms_follow(terms, before.terms)
    keys = ARCHIVE_KEY * leaf_count(terms.coordinates, terms.leaf)
    # a dealer shares at most the numbers of a share under both polynomials, and its archive's keys
    sizes = {"deal": 8 * (2 * before.share_length + keys), "difference": 8 * before.share_length}
    found = {}
    for number, step in enumerate(ReshareMember.STEPS, 1):
        for x in stay if step == "difference" else range(1, terms.members + 1):
            if x != point:
                name = f"{number}-{step}/{x}{f'-to-{point}' if step == 'deal' else ''}.msg"
                found[name] = _LARGEST_WRAPPING + sizes.get(step, 0)
    return found


def _setup_steps(visit: _Visit[KeyCeremony]) -> Progress:
    member, terms = visit.member, visit.member.terms
    visit.begin()
    for recipient, message in visit.use("reveal", member.deal).items():
        visit.publish("deal", message, recipient)
    visit.use("deal", member.receive)  # fixed on disk before this member opens anything of it
    if isinstance(member, DkgMember):
        chosen, own = openers(terms), dict[int, bytes]()
        if member.point in chosen:
            own[member.point] = member.open(chosen)
            visit.publish("open", own[member.point])
        # used, as all else is: who confirmed one sum must not go on with another
        summed = visit.use("open", lambda others: relay_sum(terms, member.session, {**others, **own}), chosen)
        visit.publish("confirm", member.confirm(summed))
        visit.publish("root", visit.use("confirm", member.root))
    elif isinstance(member, PaperMember):
        visit.publish("root", member.root())
    visit.publish("echo", visit.use("root", member.echo))
    visit.publish("health", visit.use("echo", member.health))
    unsigned: Manifest = visit.use("health", member.finish)
    # the share and the memory of rounds first, then the signature, then the manifest; then everything that made them is
    # forgotten
    visit.keep_share(member, ShareInfo.first(terms, member.session, member.point), 0)
    visit.begin_memory()
    visit.sign(terms.digest().hex(), unsigned, member.sign())
    manifest: Manifest = visit.use("sign", member.signed)
    write_shared(visit.consortium.manifest_path, manifest.to_bytes())
    visit.forget("share and manifest kept")
    return Progress("sign", (), manifest)


# --- the health of a finished setup -----------------------------------------------------------------------


def check(
    home: HomeFolder, unlock: Unlock, consortium: ConsortiumFolder, folder: str | os.PathLike[str], note: Note = _silent
) -> Progress:
    """Does what can be done now of a health check of the shares on disk; `found` says what it showed."""
    with only_one(consortium.path):
        manifest = consortium.manifest()
        context = digest("check", manifest.digest())
        before = _finished_before(consortium, context, Path(folder), manifest.terms.point_of(home.card().ed25519))
        if before is not None:
            note("this folder's check was finished before, and this is what it showed: a new one takes a new folder")
            return Progress("health", (), manifest, before)
        share = consortium.verify_share(unlock)
        visit: _Visit[CheckMember] = _Visit(
            home,
            unlock,
            consortium,
            folder,
            note,
            context,
            lambda identity, seed: CheckMember(identity, manifest, share, seed),
        )
        progress = visit.attempt(_check_steps)
        return progress if progress.waiting else Progress("health", (), manifest, progress.finding)


def _check_steps(visit: _Visit[CheckMember]) -> Progress:
    member = visit.member
    visit.begin()
    for recipient, message in visit.use("reveal", member.deal).items():
        visit.publish("deal", message, recipient)
    visit.publish("echo", visit.use("deal", member.echo))
    visit.publish("health", visit.use("echo", member.health))
    found: str = visit.use("health", member.finish)
    visit.finish(found)
    visit.forget("checked")
    return Progress("health", (), finding=found)


def _finished_before(consortium: ConsortiumFolder, context: bytes, folder: Path, point: int) -> str | None:
    """What the ceremony in this folder showed, if this member finished it: running it again changes nothing."""
    path, own = consortium.path / "finished.json", folder / "1-commit" / f"{point}.msg"
    if not path.exists() or not own.is_file():
        return None
    record = parse(read_file(path, "a record"), _FINISHED, "a record")
    same = (record.get("context"), record.get("commit")) == (context.hex(), _hash_file(own))
    return str(record.get("found")) if same else None


def _hash_file(path: Path) -> str:
    return hashlib.sha256(read_exchanged(path, "a message")).hexdigest()


def _about(consortium: ConsortiumFolder) -> dict[str, Any]:
    """What the ceremony under way here says of itself in the open: its context, and what this member signed in it."""
    return SealedReader(consortium.ceremony_path, None, _KIND).about if consortium.ceremony_path.exists() else {}


# --- new shares -------------------------------------------------------------------------------------------


def reshare(
    home: HomeFolder,
    unlock: Unlock,
    folder: str | os.PathLike[str],
    terms: Terms | None = None,
    consortium: ConsortiumFolder | None = None,
    pinned: str | None = None,
    note: Note = _silent,
) -> Progress:
    """Does what can be done now of making new shares: for the members in `terms`, or for the present ones.

    A member who holds a share names its `consortium`. One who is new, or comes back, needs `terms` and the digest of
    the manifest in force (`pinned`), and takes the manifests so far from the folder.
    """
    folder = Path(folder)
    newcomers_chain: list[Manifest] = []
    if consortium is None or pinned is not None:
        if terms is None:
            raise CeremonyError(
                "who is new to the consortium must know the terms that were agreed", code="ceremony.no-terms"
            )
        consortium = _newcomers_folder(home, folder, terms)
        if consortium is None:
            if pinned is not None and started_from(folder) is None:
                return wait_for_chain(folder)
            newcomers_chain = chain_for_newcomer(folder, terms, pinned)
            consortium = folder_for_newcomer(home, newcomers_chain)
    with only_one(consortium.path):
        chain = newcomers_chain or consortium.chain()
        agreed = terms or chain[-1].terms
        agreed.point_of(home.card().ed25519)
        if not newcomers_chain and len(chain) > 1 and chain[-1].epoch > chain[-2].epoch:
            # the last resharing is in force here; in its own folder, or where that was lost, its last step may be left
            here = started_from(folder) == chain[-1].predecessor
            left = _about(consortium).get("context") == _reshare_context(chain[-1].predecessor, chain[-1].terms).hex()
            another = agreed.digest() != chain[-1].terms.digest()  # terms that the last one did not bring into force
            if not another and (here or (left and started_from(folder) is None)):
                if not left:
                    note(f"epoch {chain[-1].epoch} was reached in this folder before: newer shares take a new folder")
                elif not here:
                    note(f"the last step to epoch {chain[-1].epoch} was left; newer shares take another folder then")
                show_chain(chain[:-1], folder)
                return _keep(home, unlock, consortium, folder, note)
            if here and not left:
                raise CeremonyError(
                    f"{str(folder)!r} is the folder of the last resharing: use a new, empty one",
                    code="ceremony.folder-used",
                )
            if left:
                raise CeremonyError(
                    "the last resharing is not finished here: run it with its own folder, until all have said kept; or "
                    "discard it (--although-signed), if somebody never will: the old share then stays",
                    code="ceremony.under-way",
                )
        check_terms_follow(agreed, chain[-1].terms)
        if not consortium.ceremony_path.exists() and consortium.has_signed(chain[-1].digest().hex()):
            raise CeremonyError(
                "this member has signed a successor of the present manifest: bring it into force first, or, if it "
                "never can be, run quorumark setup discard --although-signed",
                code="ceremony.signed-already",
            )
        share = None
        if not newcomers_chain:
            share = consortium.verify_share(unlock)
            show_chain(chain, folder)

        def make(identity: Identity, seed: bytes) -> ReshareMember:
            return ReshareMember(identity, chain, agreed, seed, None if share is None else share.vector())

        context = _reshare_context(chain[-1].digest().hex(), agreed)
        visit: _Visit[ReshareMember] = _Visit(home, unlock, consortium, folder, note, context, make)
        if visit.member.unchecked:
            note(f"warning: {visit.member.unchecked}")
        progress = visit.attempt(lambda v: _reshare_steps(v, share))
        return progress if progress.waiting else _keep(home, unlock, consortium, folder, note)


def _reshare_context(before: str | None, terms: Terms) -> bytes:
    return digest("reshare", bytes.fromhex(before or ""), terms.digest())


def _newcomers_folder(home: HomeFolder, folder: Path, terms: Terms) -> ConsortiumFolder | None:
    """A newcomer's folder once its manifest is in force: then it is new no longer."""
    for consortium in home.consortia():
        if not consortium.manifest_path.exists():
            continue
        current = consortium.manifest()
        if current.terms.digest() == terms.digest() and current.predecessor == started_from(folder):
            return consortium
    return None


def _reshare_steps(visit: _Visit[ReshareMember], old: ShareFile | None) -> Progress:
    """Up to the manifest in force. The new share is on disk before this member signs for it."""
    member = visit.member
    visit.begin()
    for recipient, message in visit.use("reveal", member.deal).items():
        visit.publish("deal", message, recipient)
    visit.use("deal", member.receive)  # fixed on disk before this member says anything that depends on it
    if member.deals_here:
        visit.publish("difference", member.difference())
    visit.publish("root", visit.use("difference", member.root, member.dealers))
    visit.publish("echo", visit.use("root", member.echo))
    visit.publish("health", visit.use("echo", member.health))
    unsigned: Manifest = visit.use("health", member.finish)
    visit.keep_share(member, ShareInfo.under(unsigned, member.point), unsigned.epoch)
    if old is None and not member.was_here:  # one that comes back may have taken part: its memory is there, or lost
        visit.begin_memory()
    if old is not None and old.info.epoch == 0 and member.deals_here:
        write_archive(visit.consortium.archive_path, old, member.archive_keys())
    visit.sign(str(unsigned.predecessor), unsigned, member.sign())
    chain: list[Manifest] = visit.use("sign", member.signed)
    visit.consortium.adopt(chain)  # the manifest's replacement is the step to the new epoch
    visit.empty()  # the seed of this ceremony is needed no more
    return Progress("sign", (), chain[-1])


def _keep(home: HomeFolder, unlock: Unlock, consortium: ConsortiumFolder, folder: Path, note: Note) -> Progress:
    """The last step: all say that they hold their new shares under the new manifest; only then are old ones erased.

    If one were erased earlier, members who are not so far yet and lose their way could leave fewer than t of either.
    """
    manifest = consortium.manifest()
    consortium.verify_share(unlock)
    identity, terms = home.identity(unlock), manifest.terms
    point = terms.point_of(identity.ed25519)
    step = folder / f"{len(ReshareMember.STEPS)}-kept"

    def header(sender: int) -> Header:
        return Header(manifest.digest().hex(), manifest.genesis.session, "reshare/kept", sender)

    said = step / f"{point}.msg"
    with contextlib.suppress(MessageError, RecordError):
        open_message(read_exchanged(said, "a message"), terms, header(point))
        said = Path()  # it is there, and right
    if said.name:
        write_exchanged(said, identity.write(header(point), b"kept"))
        note("new share and manifest kept")
    missing = [m for m in terms.roster if not (step / f"{m.point}.msg").exists()]
    if missing:
        files = tuple(step / f"{m.point}.msg" for m in missing)
        return Progress("kept", tuple(m.name for m in missing), files=files)
    for member in terms.roster:
        data = read_exchanged(step / f"{member.point}.msg", f"the message of {member.name!r} for step 'reshare/kept'")
        open_message(data, terms, header(member.point))
    consortium.tidy()
    if _about(consortium).get("context") == _reshare_context(manifest.predecessor, terms).hex():
        consortium.ceremony_path.unlink()  # not that of the next ceremony, if it is under way already
        note("all hold their new shares: the old one is erased")
    return Progress("kept", (), manifest)


def discard(consortium: ConsortiumFolder, although_signed: bool = False) -> bool:
    """Forgets a ceremony that cannot go on; whether there was one. The next needs a new, empty folder.

    Once this member has signed, the others may finish without it, and its share would be missing; once its manifest is
    in force, they wait for it to say so: that takes `although_signed`. Without a ceremony, that forgets an amendment
    which was signed and never came into force.
    """
    with only_one(consortium.path):
        there = consortium.ceremony_path.exists()
        about = _about(consortium)
        if there and about.get("signed") and not although_signed:
            raise CeremonyError(
                "this member has signed already: the others may finish, or have. Go on with this ceremony; only if "
                "nobody has finished, and nobody will, give --although-signed",
                code="ceremony.signed-already",
            )
        signed = {str(about.get("signed"))} if there else consortium.pending() if although_signed else set()
        forgotten = signed & consortium.pending()
        if forgotten:
            consortium.forget_signed(forgotten)
            there = True
        consortium.ceremony_path.unlink(missing_ok=True)
        return there


# --- one member's visit to the folder ---------------------------------------------------------------------

Member = TypeVar("Member", bound=Ceremony)


class _Visit(Generic[Member]):
    """Carries one member's messages, and remembers what was sent and used."""

    def __init__(
        self,
        home: HomeFolder,
        unlock: Unlock,
        consortium: ConsortiumFolder,
        folder: str | os.PathLike[str],
        note: Note,
        context: bytes,
        make: Callable[[Identity, bytes], Member],
    ) -> None:
        self.consortium, self._unlock, self._folder, self._note = consortium, unlock, Path(folder), note
        self._identity = identity = home.identity(unlock)
        fresh = not consortium.ceremony_path.exists()
        if fresh:
            self._state: dict[str, Any] = {
                "context": context.hex(),
                "seed": os.urandom(32).hex(),
                "sent": {},
                "used": {},
                "failed": "",
                "signed": "",
            }
        else:
            self._state = json.loads(read_sealed(consortium.ceremony_path, unlock, _KIND))
            self._saved = canonical(self._state)
        if self._state["context"] != context.hex():
            raise CeremonyError(UNDER_WAY, code="ceremony.under-way")
        if self._state["failed"]:
            raise CeremonyError(
                f"this ceremony has failed ({self._state['failed']}); discard it and start a new one",
                code="ceremony.failed-before",
            )
        self.member = make(identity, bytes.fromhex(self._state["seed"]))
        self._terms = self.member.terms
        self._others = [m.point for m in self._terms.roster if m.point != self.member.point]
        if fresh:
            if self._path("commit", self.member.point).exists():
                raise CeremonyError(
                    f"{str(self._folder)!r} holds an earlier ceremony of this member: use a new, empty folder",
                    code="ceremony.folder-used",
                )
            self._save()

    def attempt(self, steps: Callable[[_Visit[Member]], Progress]) -> Progress:
        """Runs the steps as far as they go. After a fault these dealings must never be opened again."""
        try:
            return steps(self)
        except _Waiting as waiting:
            return waiting.progress
        except CeremonyError as error:
            if not self._state["failed"]:
                self._state["failed"] = str(error)
                self._save()
            raise

    def begin(self) -> None:
        """The steps that all ceremonies begin with."""
        self.publish("commit", self.member.commit())
        # all commitments are fixed on disk before this member reveals anything
        self.publish("reveal", self.use("commit", self.member.reveal))

    def keep_share(self, member: KeyCeremony | ReshareMember, info: ShareInfo, epoch: int) -> None:
        if member.share is None:
            raise CeremonyError("this member has no share yet", code="ceremony.too-early")
        path = self.consortium.share_path(epoch)
        with ShareWriter(path, self._unlock, info, member.salt, member.others_salts) as file:
            file.write(member.share)

    def begin_memory(self) -> None:
        """With the first share: later it would look as if this member had never taken part in a round."""
        memory.begin(self.consortium, self._identity)

    def finish(self, found: str) -> None:
        """Remembers that this ceremony is finished, and what it showed."""
        commit = _hash_file(self._path("commit", self.member.point))
        record = {"format": _FINISHED, "context": self._state["context"], "commit": commit, "found": found}
        write_private(self.consortium.path / "finished.json", canonical(record))

    def sign(self, predecessor: str, manifest: Manifest, message: bytes) -> None:
        """Says this member's signature, having written down what it signs: one successor of each manifest."""
        self.consortium.remember_signed(predecessor, manifest.digest().hex())
        self._state["signed"] = manifest.digest().hex()
        self._save()
        self.publish("sign", message)

    def empty(self) -> None:
        """All that is left to do needs no secrets of this ceremony."""
        self._state |= {"seed": "", "sent": {}, "used": {}}
        self._save()

    def forget(self, what: str) -> None:
        """The ceremony is over."""
        self.consortium.ceremony_path.unlink()
        self._note(what)

    # --- files ---

    def _path(self, step: str, sender: int, recipient: int = 0) -> Path:
        name = f"{sender}-to-{recipient}.msg" if recipient else f"{sender}.msg"
        return self._folder / f"{self.member.STEPS.index(step) + 1}-{step}" / name

    def _read(self, path: Path, step: str, sender: int) -> bytes:
        """A message. The largest ones hold the key's elements and those of the archives' keys, under two polynomials;
        who writes to the folder may also put a device there, or a file of any size."""
        leaves = leaf_count(self._terms.coordinates, self._terms.leaf)
        most = 16 * (self._terms.coordinates + _MOST_ARCHIVES * ARCHIVE_KEY * leaves)
        try:
            return read_exchanged(path, "a message", most)
        except RecordError as error:
            name = self._terms.member(sender).name
            raise MessageError(
                f"the message of {name!r} for step '{self.member.NAME}/{step}' cannot be read: {error}",
                code="message.malformed",
            ) from None

    def publish(self, step: str, message: bytes, recipient: int = 0) -> None:
        """Writes this member's message unless it is there already, as it was written."""
        path = self._path(step, self.member.point, recipient)
        written = hashlib.sha256(self._read(path, step, self.member.point)).hexdigest() if path.exists() else ""
        if written and written == self._state["sent"].get(path.name + step):
            return
        self._state["sent"][path.name + step] = hashlib.sha256(message).hexdigest()
        self._save()
        write_exchanged(path, message)  # for the others; what is secret in it is sealed to them
        self._note(f"{step} written" + (f" for {self._terms.member(recipient).name}" if recipient else ""))

    def wait_for(self, step: str, senders: Iterable[int], recipient: int = 0) -> dict[int, bytes]:
        """A step's messages, once all are there."""
        paths = {x: self._path(step, x, recipient) for x in senders}
        missing = [x for x, path in paths.items() if not path.exists()]
        if missing:
            names = tuple(self._terms.member(x).name for x in missing)
            raise _Waiting(step, names, tuple(paths[x] for x in missing))
        return {x: self._read(path, step, x) for x, path in paths.items()}

    def use(
        self,
        step: str,
        consume: Callable[[Mapping[int, bytes]], Any],
        senders: Iterable[int] | None = None,
    ) -> Any:
        """Hands a step's messages over once all are there. What was used once must not change afterwards."""
        wanted = [x for x in (senders or self._others) if x != self.member.point]
        messages = self.wait_for(step, wanted, self.member.point if step == "deal" else 0)
        result = consume(messages)
        # compare what they say, not their bytes: a sealed message that is sent again looks different
        said = {str(x): hashlib.sha256(self.member.read(step, x, data)).hexdigest() for x, data in messages.items()}
        before = self._state["used"].setdefault(step, said)
        for x, value in said.items():
            if before[x] != value:
                name = self._terms.member(int(x)).name
                raise MessageError(
                    f"{name!r} says something else for step '{self.member.NAME}/{step}' than when it was used: refused",
                    code="message.changed",
                )
        self._save()
        return result

    def _save(self) -> None:
        content = canonical(self._state)
        if getattr(self, "_saved", None) != content:
            about = {"context": self._state["context"], "signed": self._state["signed"]}
            write_sealed(self.consortium.ceremony_path, self._unlock, _KIND, content, about)
            self._saved = content
