"""A member on its own machine, as an engine sees it: stages with strings, numbers and arrays in and out.

    node = MemberNode(home, unlock, terms=PINNED)
    config, arrays = node.handle("join", config, arrays)

    stage    what comes                                         what goes
    join     round, run, the last sum, or model:…               rate, seed, round, model:…: what to train with; joined
    ready    examples, result:…, joined as *join* gave it       a key for the round, signed (secagg); if asked, survival
    upload   an announcement, what the others said (sums)       the masked vector, its head
    unmask   a request                                          shares of the seeds
    again    requests of a sum that is still open               the same answer once more
    never    a state and a round, or a draw of its cohort       signed: it never answers there
    vouch    what the last sum led to, and the sum              signed: it answered there, and has checked it
    second   what t members signed so                           signed: it signs nothing else
    state    a state                                            where it is; the last model that it accepted
    setup    terms, messages of the others                      this member's messages; at the end the manifest
    answer   a query and the files that it needs (`queries`)    this member's partial, if its rules allow
    sign     a certificate                                      the certificate with this member's signature
    ledger   this member's own word that it asks                what its ledger has since then, and how its share is

What it keeps between two messages is in its `Journal`. A QuorumarkError is a refusal; `refusal` gives its text without
anything that only this member may know.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.canonical import digest
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Header, Identity
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Terms
from quorumark.errors import (
    AnsweredError,
    CeremonyError,
    EncodingError,
    InputError,
    MessageError,
    QuorumarkError,
    RecordError,
    RoundError,
    code_of,
)
from quorumark.files import only_one, unsynced, write_private
from quorumark.model.layout import ModelLayout
from quorumark.node.fields import read_content, read_count, read_digest
from quorumark.node.journal import MODEL, Journal, rounds_folder
from quorumark.round.group import FAR, group_of
from quorumark.round.history import History, research_seed
from quorumark.round.memory import FolderState
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.secagg.messages import pack, unpack
from quorumark.round.statements import Turn

__all__ = ["MODEL", "RESULT", "Config", "MemberNode", "introduction", "refusal", "refused", "with_prefix"]

Config = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]
Reply = tuple[Config, dict[str, NDArray[Any]]]

RESULT, MESSAGE = "result:", "message:"
"""What the names of a result's tensors (as `MODEL` for a model's) and of a ceremony's messages begin with."""

_ROUND = ("join", "ready", "upload", "unmask", "again", "never", "vouch", "second", "state")
_TYPES: dict[type, set[str]] = {  # of the fields of a config; integers are read by `read_count`
    bytes: {"announcement", "boxes", "vouches", "request", "query", "certificate", "turn", "approval", "asked"},
    str: {"manifest", "run", "node", "joined", "session", "have", "requests", "state", "of-manifest"}
    | {"before", "after", "whole", "link"}
    | {"of-state", "sum-under", "sum-held", "sum-level", "settings", "nonces", "history", "names", "record"},
    bool: {"with-model", "with-share", "check-only", "measure"},
}
_BESIDE = 1 << 26  # bytes of what is not weights: the layout, integers, a state
_FOLDERS = re.compile(r"(?<=')/[^']*/|(?<![\w.:/'])/(?:[^\s'/]+/)+")  # of a path, in quotes or without
_MESSAGE_NAME = re.compile(r"(\d{1,2}-[a-z]{1,20})/(\d{1,6})(?:-to-(\d{1,6}))?\.msg")


def with_prefix(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    """The arrays whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def refused(error: QuorumarkError) -> Config:
    """What a member that refuses replies: a sentence for people, and a code for programs."""
    return {"refused": refusal(error), "code": code_of(error)}


def refusal(error: QuorumarkError) -> str:
    """What others may read of a refusal: not the member's weight that caused it, nor the paths of its files."""
    text = f"{error.argument} {error.rule}" if isinstance(error, EncodingError) else str(error)
    return _FOLDERS.sub("…/", text)


class Fields(dict[str, Any]):
    """The fields of a server's message: a missing one is the server's fault, not a KeyError of ours."""

    def __init__(self, stage: str, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self._stage = stage

    def __missing__(self, name: str) -> Any:
        raise MessageError(
            f"the server's message for the stage {self._stage!r} lacks {name!r}", code="message.incomplete"
        )

    def check_types(self) -> None:
        for kind, names in _TYPES.items():
            for name in names & self.keys():
                if not isinstance(self[name], kind):
                    raise MessageError(
                        f"the server's message for the stage {self._stage!r} must give {name!r} as {kind.__name__}, "
                        f"not {type(self[name]).__name__}",
                        code="message.malformed",
                    )
                if kind is str and any("\ud800" <= letter <= "\udfff" for letter in self[name]):
                    raise MessageError(
                        f"the server's message for the stage {self._stage!r} must give {name!r} as a string in UTF-8",
                        code="message.malformed",
                    )


def introduction(about: bytes, run: str) -> tuple[str, str, str]:
    """Consortium, session and step of the message in which a member says which node of a run is its own."""
    return about.hex(), digest("engine run", run.encode()).hex(), "engine/node"


class MemberNode:
    """One member. `terms` and `manifest` are digests that the member's operator pinned: nothing else is served.

    `terms` is needed for setup: the server brings the terms, and the digest says that they are those that the members
    agreed on. `consortium` is the start of an id, if the home holds several. `seeds`: the operator lets the server
    choose what training is seeded with, for a run that can be repeated. `together`: this process serves all members of
    a simulation, and the masks that two of them share, which cancel, are left out.
    """

    def __init__(
        self,
        home: HomeFolder,
        unlock: Unlock,
        *,
        terms: str | None = None,
        manifest: str | None = None,
        consortium: str | None = None,
        seeds: bool = False,
        together: bool = False,
    ) -> None:
        self._home, self._unlock, self._seeds, self._together = home, unlock, seeds, together
        self._known: Identity | None = None
        self._terms, self._manifest, self._which = terms, manifest, consortium
        self._stages: dict[str, Callable[[Config, Arrays], Reply]] = {
            "join": self._join,
            "ready": self._ready,
            "upload": self._upload,
            "unmask": self._unmask,
            "again": self._again,
            "never": self._never,
            "vouch": self._vouch,
            "second": self._second,
            "state": self._state,
            "setup": self._setup,
            "answer": self._answer,
            "sign": self._sign,
            "ledger": self._ledger,
        }

    def __repr__(self) -> str:
        return f"MemberNode({str(self._home.path)!r}, secrets hidden)"

    def handle(self, stage: str, config: Mapping[str, Any], arrays: Arrays) -> Reply:
        """One stage. What a server sends is checked by type first: it may send anything."""
        if stage not in self._stages:
            raise MessageError(
                f"there is no stage {stage[:40]!r}: server and member run different releases", code="message.no-stage"
            )
        fields, vectors = Fields(stage, config), Fields(stage, arrays)
        fields.check_types()
        if stage not in _ROUND:
            return self._stages[stage](fields, vectors)
        with self._alone(), unsynced() if self._is_simulation() else contextlib.nullcontext():
            return self._stages[stage](fields, vectors)

    def simulated_home(self) -> tuple[str, str]:
        """Where its home is, and which consortium it serves there, if that was made for a simulation; otherwise
        nothing."""
        return (str(self._home.path.absolute()), self._which or "") if self._is_simulation() else ("", "")

    def most(self, stage: str) -> int:
        """The most bytes of arrays that a message for a stage may have, for those who read it from a stranger.

        A round brings vectors like the model: it itself or the sum, norms and perhaps the anchor and what a server
        optimiser keeps. Until the layout is known, and for suspects, which are any file, there is no limit but the
        signer's own.
        """
        if stage in ("upload", "unmask", "again", "never", "second", "state", "sign", "ledger"):
            return 0
        if stage in ("join", "ready", "vouch"):
            for path in self._home.only_consortium(self._which).path.glob("rounds/layout.json"):
                return 128 * ModelLayout.from_bytes(path.read_bytes()).size + _BESIDE
        return 1 << 62

    # --- a round ---

    def _join(self, config: Config, arrays: Arrays) -> Reply:
        """Before training: may this member go on with this run, model and round?"""
        journal = self._journal()
        if config["manifest"] != journal.manifest.digest().hex():
            raise RoundError(
                f"the server runs under the manifest {str(config['manifest'])[:16]}…, and at {journal.name} "
                f"{journal.manifest.digest().hex()[:16]}… is in force: bring both to the same one (quorumark "
                "consortium update)",
                code="round.other-manifest",
            )
        round_no = read_count(config, "round")
        with journal.memory().edit() as memory:
            last, nonce = int(memory["round"]), str(memory["nonce"])
            mine = self._seeds or bool(memory["simulation"])
        if round_no <= last:
            raise RoundError(
                f"round {round_no} is over for {journal.name}, which last took part in round {last}; numbers never "
                f"repeat: let the server go on after that one (watermarked(…, after={last}))",
                code="round.over",
            )
        _check_near(round_no, last)
        journal.check_share(self._unlock)
        layout = journal.layout(read_content(arrays["layout"]))
        try:
            needs, model = journal.follow(config, arrays, layout, with_prefix(arrays, MODEL))
        except AnsweredError:  # from a model that it has gone on from
            raise RoundError(
                f"{journal.name} has gone on from this model to others: let the run go on from the last one "
                "(watermarked(…, go_on=True), or with the folder of the run before); a second run from it takes the "
                "consent of every member's operator (quorumark member consent)",
                code="round.gone-on",
            ) from None
        if needs:
            return {"needs": needs, **({"since": journal.reached} if journal.has_links else {})}, {}
        journal.adopt()
        try:
            side = journal.side()
        except RoundError as error:
            return self._declined(journal, config, error, nonce), {}
        number = side.history.round if side.history is not None else 0
        reply: Config = {"rate": float(side.strength.rate(number)), "point": journal.point, "round": number}
        reply["examples"] = journal.manifest.terms.member(journal.point).examples
        reply["joined"], reply["repeats"] = journal.notes.joined, Turn.from_bytes(journal.notes.turn.encode()).repeats
        reply["seed"] = int.from_bytes(os.urandom(8), "big")
        if "seed" in config and mine:
            reply["seed"] = research_seed(read_count(config, "seed"), number, journal.point)
        reply["settings-changed"] = self._notice_settings(journal, str(config.get("settings", "")))
        return reply, {MODEL + name: np.array(model[name]) for name in _in_order(config, model)}

    def _declined(self, journal: Journal, config: Config, error: RoundError, nonce: str) -> Config:
        """Why it does not take part. The server may settle what stands in the way: it is told more than a sentence."""
        reply = {**self._introduced(journal, config), **refused(error), "nonce": nonce}
        if isinstance(error, AnsweredError):
            reply |= {"answered": error.round, "over": json.dumps(error.members), "halvings": error.halvings}
            reply["of-draw"] = error.draw
        return reply

    def _notice_settings(self, journal: Journal, now: str) -> bool:
        """Whether the app is told something else than last time: what a server sets from outside can show members'
        updates, and is worth a look."""
        before = journal.notes.settings
        if now != before:
            journal.note(settings=now)
        return bool(before) and now != before

    def _ready(self, config: Config, arrays: Arrays) -> Reply:
        """After training: keeps the result, and joins the round."""
        journal, round_no = self._journal(), read_count(config, "round")
        member = journal.manifest.terms.member(journal.point)
        side = journal.side(self._unlock)
        turn = Turn.from_bytes(journal.notes.turn.encode())
        if turn.round != round_no:
            raise RoundError(
                f"{journal.name} has joined round {turn.round}, not round {round_no}", code="round.not-joined"
            )
        if journal.notes.ready == round_no:  # what it uploads it may have to send again: it is not replaced
            raise RoundError(
                f"{journal.name} is ready for round {round_no} already: its result is not replaced",
                code="round.result-kept",
            )
        if turn.repeats:
            side.take_again(journal.kept_result(side.layout, side.state, side.secagg.first_round()))
        else:
            if config["examples"] != member.examples:
                raise RoundError(
                    f"{journal.name} trained on {config['examples']} examples, and the manifest, whose numbers weigh "
                    f"the sum, says {member.examples}: train on those, or let all members sign the new number "
                    f"(quorumark consortium amend --examples {journal.point}={config['examples']})",
                    code="round.other-examples",
                )
            if config["joined"] != journal.notes.joined:
                raise RoundError(
                    f"the result is not of the model that {journal.name} joined round {round_no} with: two messages of "
                    "the server are served at once, and the later one counts",
                    code="round.joined-otherwise",
                )
            side.take(with_prefix(arrays, RESULT))
        reply = self._introduced(journal, config)
        complaint = side.too_strong()
        if complaint:
            return {**reply, "strong": pack(complaint)}, {}
        if not turn.repeats:
            journal.keep_result(side, round_no)
        if config.get("measure") is True and side.history is not None:
            reply |= self._measured(journal, side.history)
        reply["ready"] = side.ready()
        journal.drop_results(round_no, side.secagg.first_round())
        journal.note_marked(side)
        journal.note(ready=round_no)
        if side.checks:
            reply["boxes"], reply["vouch"] = side.said()
        nonces = _by_point(config, "nonces") if "nonces" in config else {}
        newer = side.secagg.newer(side.state, {x: n.hex() for x, n in nonces.items() if len(n) == 32})
        reply["newer"] = json.dumps({str(x): message.hex() for x, message in newer.items()})
        return reply, {}

    def _measured(self, journal: Journal, history: History) -> Config:
        """How much of the mark training left in the model that the round starts from, by this member's own noise."""
        found = journal.noise.survival(history.mark, journal.manifest.terms.statistic)
        if found is None:
            return {}
        journal.note(survival=f"{found.part} {found.error}")
        return {"survival": found.part, "survival-error": found.error}

    def _upload(self, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002 - all stages take the same
        journal, round_no = self._journal(), read_count(config, "round")
        if journal.notes.ready != round_no:
            raise RoundError(f"{journal.name} has not trained in round {round_no}", code="round.not-trained")
        side = journal.side(self._unlock)
        repeats = side.turn is not None and side.turn.repeats
        trained_for = side.secagg.first_round() if repeats else round_no
        side.take_again(journal.kept_result(side.layout, side.state, trained_for))
        side.ready()  # as it was: a member that would join with anything else now is refused
        side.secagg.together = self._others_here(journal)
        if side.checks:
            boxes, vouches = (unpack(config[name], f"list of {name}") for name in ("boxes", "vouches"))
            upload = side.upload(config["announcement"], boxes, vouches)
            journal.note(verified=side.history_checked)
        else:
            upload = side.upload(config["announcement"])
        return {"head": upload.head}, {"vector": upload.vector}

    def _unmask(self, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        return {"answer": self._summing(self._journal()).unmask(config["request"])}, {}

    def _again(self, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        """The answer for a sum that is still open, whose server asks everybody at once."""
        journal = self._journal()
        side, requests = self._summing(journal), _by_point(config, "requests")
        reply = {**self._introduced(journal, config), "point-there": side.point}
        if side.point not in requests:
            raise RoundError(
                f"{journal.name} has no part in this sum, and is not asked for it", code="round.not-in-set"
            )
        return {**reply, "answer": side.unmask(requests[side.point])}, {}

    def _never(self, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        """Signed: this member has answered nothing from a state in a round, and never will."""
        journal = self._journal()
        group = group_of(journal.manifest_of(str(config["of-manifest"])))
        side = SecAggMember(journal.identity, group, journal.memory(), leaving=True)
        with side.state.edit() as memory:
            _check_near(read_count(config, "of-round"), int(memory["round"]))
        draw = read_count(config, "of-draw") if "of-draw" in config else 0
        if draw >= group.draws:
            raise RoundError(f"there is no draw {draw} of this group's cohorts", code="round.no-more-draws")
        said = side.never(read_digest(config, "state"), read_count(config, "of-round"), draw)
        return {**self._introduced(journal, config), "never": said, "point-there": side.point}, {}

    def _vouch(self, config: Config, arrays: Arrays) -> Reply:
        """Signed: what the sum led to in which this member answered last, once it is written down."""
        journal = self._journal()
        said, point = journal.vouch(config, arrays)
        return {**self._introduced(journal, config), "summed": said, "point-there": point}, {}

    def _second(self, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        """Signed: this member signs no other successor of a state than the one that others have checked."""
        journal = self._journal()
        said, point = journal.second(config)
        return {**self._introduced(journal, config), "seconded": said, "point-there": point}, {}

    def _state(self, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        """The last model that this member accepted, for a server that lost its own copy."""
        journal = self._journal()
        reply, found = journal.hand_out() if config.get("with-model") is True else ({}, {})
        reply |= journal.where(read_digest(config, "of-state"))
        return {**reply, **self._introduced(journal, config)}, found

    def _summing(self, journal: Journal) -> SecAggMember:
        """This member in the group in which it last took part: a sum may be open under an earlier manifest."""
        with journal.memory().edit() as memory:
            name = str(memory["group"])
        groups = (group_of(manifest) for manifest in reversed(journal.chain))
        group = next((group for group in groups if group.id.hex() == name), journal.group)
        side = SecAggMember(journal.identity, group, journal.memory())
        side.together = self._others_here(journal)
        return side

    def _introduced(self, journal: Journal, config: Config) -> Config:
        """Which member this node is, signed for this node and run."""
        header = Header(*introduction(journal.manifest.digest(), str(config["run"])), journal.point)
        node = journal.identity.write(header, str(config["node"]).encode())
        return {"point": journal.point, "introduction": node}

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """One message of a round at a time: of two that are served at once, each would undo what the other notes."""
        return only_one(rounds_folder(self._home.only_consortium(self._which)))

    def _is_simulation(self) -> bool:
        """Whether this home was made for a simulation (`allow_repeats`)."""
        consortium = self._home.only_consortium(self._which)
        if not consortium.memory_path.exists():
            return False
        with FolderState(consortium.memory_path.parent, self._identity()).edit() as memory:
            return bool(memory["simulation"])

    def _others_here(self, journal: Journal) -> frozenset[int]:
        """With whom it shares this process, and no masks."""
        if not self._together:
            return frozenset()
        if not self._is_simulation():
            raise InputError("together", "must be for homes that were made for a simulation", str(self._home.path))
        return frozenset(member.point for member in journal.group.roster)

    def _identity(self) -> Identity:
        """For as long as this object has what unlocks it."""
        if self._known is None:
            self._known = self._home.identity(self._unlock)
        return self._known

    def _journal(self) -> Journal:
        consortium = self._home.only_consortium(self._which)
        if not consortium.manifest_path.exists():
            raise RecordError(
                f"{self._home.card().name!r} has no manifest yet: make a key first (make_key, or quorumark "
                "setup dkg), or agree on sums alone (quorumark setup sums)"
            )
        journal = Journal(consortium, self._identity())
        manifest = journal.manifest
        if self._manifest is not None and manifest.digest().hex() != self._manifest:
            raise RecordError(
                f"the manifest in force at this member is {manifest.digest().hex()[:16]}…, and its operator pinned "
                f"{self._manifest[:16]}…: compare them, and change the pin if the new one is right"
            )
        return journal

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
        have = set(_listed(config, "have"))
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


def _check_near(round_no: int, last: int) -> None:
    """Numbers never repeat: a member that went far ahead could take part in nothing any more."""
    if round_no - last >= FAR:
        raise RoundError(
            f"round {round_no} is too far after round {last}, the last one: let the server go on after that one "
            f"(watermarked(…, after={last}))",
            code="round.wrong-number",
        )


def _in_order(config: Config, model: Mapping[str, Any]) -> list[str]:
    """The model's names, in the server's order if it says one: training may depend on it."""
    names = _listed(config, "names") or list(model)
    if sorted(names) != sorted(model):
        raise MessageError("the server's message names other tensors than the model has", code="message.malformed")
    return names


def _by_point(config: Config, name: str) -> dict[int, bytes]:
    """Bytes for members, in JSON: {point: hex}."""
    try:
        return {int(x): bytes.fromhex(text) for x, text in json.loads(config[name]).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise MessageError(
            f"the server's message must give {name!r} as bytes by point, in JSON", code="message.malformed"
        ) from None


def _listed(config: Config, name: str) -> list[str]:
    """A list of names in JSON; empty if there is none."""
    try:
        found = json.loads(config.get(name, "[]"))
    except (ValueError, TypeError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise MessageError(
            f"the server's message must give {name!r} as a list of names in JSON", code="message.malformed"
        )
    return found


def _array(content: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(content, np.uint8)


def _sender(path: Path) -> int:
    found = _MESSAGE_NAME.fullmatch(f"{path.parent.name}/{path.name}")
    return int(found[2]) if found else 0
