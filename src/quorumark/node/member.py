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
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.identity import Header, Identity
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Manifest
from quorumark.errors import (
    AnsweredError,
    EncodingError,
    InputError,
    MessageError,
    QuorumarkError,
    RecordError,
    RoundError,
    code_of,
)
from quorumark.field import Stream
from quorumark.files import only_one, unsynced
from quorumark.model.layout import ModelLayout
from quorumark.node.fields import (
    Fields,
    read_by_point,
    read_content,
    read_count,
    read_digest,
    read_names,
    with_prefix,
)
from quorumark.node.journal import MODEL, Journal, is_simulation, rounds_folder
from quorumark.node.outside import OutsideRounds
from quorumark.node.wire import introduction
from quorumark.round.dither import dither_stream
from quorumark.round.group import FAR, group_of
from quorumark.round.history import History, research_seed
from quorumark.round.mark import weight_of
from quorumark.round.memory import FolderState
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.secagg.messages import pack, unpack
from quorumark.round.statements import Turn

__all__ = ["MODEL", "RESULT", "Config", "MemberNode", "refusal", "refused", "with_prefix"]

Config = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]
Reply = tuple[Config, dict[str, NDArray[Any]]]

RESULT = "result:"
"""What the names of a result's tensors begin with, as `MODEL` for a model's."""

_BESIDE = 1 << 26  # bytes of what is not weights: the layout, integers, a state
_FOLDERS = re.compile(r"(?<=')/[^']*/|(?<![\w.:/'])/(?:[^\s'/]+/)+")  # of a path, in quotes or without


def refused(error: QuorumarkError) -> Config:
    """What a member that refuses replies: a sentence for people, and a code for programs."""
    return {"refused": refusal(error), "code": code_of(error)}


def refusal(error: QuorumarkError) -> str:
    """What others may read of a refusal: not the member's weight that caused it, nor the paths of its files."""
    text = f"{error.argument} {error.rule}" if isinstance(error, EncodingError) else str(error)
    return _FOLDERS.sub("…/", text)


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
        # of a simulation, whose members are served again and again
        self._kept: Journal | None = None
        self._uploaded: SecAggMember | None = None
        self._manifest, self._which = manifest, consortium
        self._outside = OutsideRounds(home, unlock, terms, self._journal)
        self._stages: dict[str, Callable[[Journal, Config, Arrays], Reply]] = {
            "join": self._join,
            "ready": self._ready,
            "upload": self._upload,
            "unmask": self._unmask,
            "again": self._again,
            "never": self._never,
            "vouch": self._vouch,
            "second": self._second,
            "state": self._state,
        }

    def __repr__(self) -> str:
        return f"MemberNode({str(self._home.path)!r}, secrets hidden)"

    def handle(self, stage: str, config: Mapping[str, Any], arrays: Arrays) -> Reply:
        """One stage. What a server sends is checked by type first: it may send anything."""
        outside = self._outside.stages
        if stage not in self._stages and stage not in outside:
            raise MessageError(
                f"there is no stage {stage[:40]!r}: server and member run different releases", code="message.no-stage"
            )
        fields, vectors = Fields(stage, config), Fields(stage, arrays)
        fields.check_types()
        if stage in outside:
            return outside[stage](fields, vectors)
        with self._alone() as journal, unsynced() if journal.simulated else contextlib.nullcontext():
            return self._stages[stage](journal, fields, vectors)

    def simulated_home(self) -> tuple[str, str]:
        """Where its home is, and which consortium it serves there, if that was made for a simulation; otherwise
        nothing."""
        if self._kept is None:  # it has not served a message of a simulation
            consortium = self._home.only_consortium(self._which)
            if not consortium.memory_path.exists() or not is_simulation(consortium, self._identity()):
                return "", ""
        return str(self._home.path.absolute()), self._which or ""

    def noise(self, manifest: Manifest, state: bytes, members: tuple[int, ...]) -> tuple[Fraction, Stream]:
        """What this member's dither in the sum over `members` from a state is made from, and its weight there: for the
        process that serves all members of a simulation. Secret."""
        consortium, identity = self._home.only_consortium(self._which), self._identity()
        if not self._together or (self._kept is None and not is_simulation(consortium, identity)):
            raise InputError("noise", "must be asked of a home that was made for a simulation", str(self._home.path))
        return weight_of(manifest, members, manifest.terms.point_of(identity.ed25519)), dither_stream(identity, state)

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

    def _join(self, journal: Journal, config: Config, arrays: Arrays) -> Reply:
        """Before training: may this member go on with this run, model and round?"""
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

    def _ready(self, journal: Journal, config: Config, arrays: Arrays) -> Reply:
        """After training: keeps the result, and joins the round."""
        round_no = read_count(config, "round")
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
        journal.marked.note(side)
        journal.note(ready=round_no)
        if side.checks:
            reply["boxes"], reply["vouch"] = side.said()
        nonces = read_by_point(config, "nonces") if "nonces" in config else {}
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

    def _upload(self, journal: Journal, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002 - all stages take the same
        round_no = read_count(config, "round")
        if journal.notes.ready != round_no:
            raise RoundError(f"{journal.name} has not trained in round {round_no}", code="round.not-trained")
        side = journal.side(self._unlock)
        repeats = side.turn is not None and side.turn.repeats
        trained_for = side.secagg.first_round() if repeats else round_no
        side.take_again(journal.kept_result(side.layout, side.state, trained_for))
        side.ready()  # as it was: a member that would join with anything else now is refused
        side.secagg.together = self._others_here(journal)
        if side.secagg.together:
            journal.hold_share()
        if side.checks:
            boxes, vouches = (unpack(config[name], f"list of {name}") for name in ("boxes", "vouches"))
            upload = side.upload(config["announcement"], boxes, vouches)
            if journal.notes.verified != side.history_checked:
                journal.note(verified=side.history_checked)
        else:
            upload = side.upload(config["announcement"])
        self._uploaded = side.secagg if journal.simulated else None
        return {"head": upload.head}, {"vector": upload.vector}

    def _unmask(self, journal: Journal, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        return {"answer": self._summing(journal).unmask(config["request"])}, {}

    def _again(self, journal: Journal, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        """The answer for a sum that is still open, whose server asks everybody at once."""
        side, requests = self._summing(journal), read_by_point(config, "requests")
        reply = {**self._introduced(journal, config), "point-there": side.point}
        if side.point not in requests:
            raise RoundError(
                f"{journal.name} has no part in this sum, and is not asked for it", code="round.not-in-set"
            )
        return {**reply, "answer": side.unmask(requests[side.point])}, {}

    def _never(self, journal: Journal, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        """Signed: this member has answered nothing from a state in a round, and never will."""
        group = group_of(journal.manifest_of(str(config["of-manifest"])))
        side = SecAggMember(journal.identity, group, journal.memory(), leaving=True)
        with side.state.edit() as memory:
            _check_near(read_count(config, "of-round"), int(memory["round"]))
        draw = read_count(config, "of-draw") if "of-draw" in config else 0
        if draw >= group.draws:
            raise RoundError(f"there is no draw {draw} of this group's cohorts", code="round.no-more-draws")
        said = side.never(read_digest(config, "state"), read_count(config, "of-round"), draw)
        return {**self._introduced(journal, config), "never": said, "point-there": side.point}, {}

    def _vouch(self, journal: Journal, config: Config, arrays: Arrays) -> Reply:
        """Signed: what the sum led to in which this member answered last, once it is written down."""
        said, point = journal.vouch(config, arrays)
        return {**self._introduced(journal, config), "summed": said, "point-there": point}, {}

    def _second(self, journal: Journal, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        """Signed: this member signs no other successor of a state than the one that others have checked."""
        said, point = journal.second(config)
        return {**self._introduced(journal, config), "seconded": said, "point-there": point}, {}

    def _state(self, journal: Journal, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        """The last model that this member accepted, for a server that lost its own copy."""
        reply, found = journal.hand_out() if config.get("with-model") is True else ({}, {})
        reply |= journal.where(read_digest(config, "of-state"))
        return {**reply, **self._introduced(journal, config)}, found

    def _summing(self, journal: Journal) -> SecAggMember:
        """This member in the group in which it last took part: a sum may be open under an earlier manifest."""
        with journal.memory().edit() as memory:
            name = str(memory["group"])
        if self._uploaded is not None and self._uploaded.group.id.hex() == name:
            self._uploaded.state = journal.memory()
            return self._uploaded
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

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Journal]:
        """One message of a round at a time: of two that are served at once, each would undo what the other notes. What
        must not be done twice is read once, and nobody else writes it meanwhile."""
        kept = self._kept if self._kept is not None and self._kept.is_current() else None
        consortium = self._home.only_consortium(self._which) if kept is None else kept.consortium
        with only_one(rounds_folder(consortium)), contextlib.ExitStack() as held:
            if kept is not None:
                held.enter_context(kept.memory().opened())
                kept.read_again()
            else:
                memory = None
                if consortium.memory_path.exists():
                    memory = held.enter_context(FolderState(consortium.memory_path.parent, self._identity()).opened())
                kept = self._journal(consortium, memory)
            self._kept = kept if kept.simulated else None
            yield kept

    def _others_here(self, journal: Journal) -> frozenset[int]:
        """With whom it shares this process, and no masks."""
        if not self._together:
            return frozenset()
        if not journal.simulated:
            raise InputError("together", "must be for homes that were made for a simulation", str(self._home.path))
        return frozenset(member.point for member in journal.group.roster)

    def _identity(self) -> Identity:
        """For as long as this object has what unlocks it."""
        if self._known is None:
            self._known = self._home.identity(self._unlock)
        return self._known

    def _journal(self, consortium: ConsortiumFolder | None = None, memory: FolderState | None = None) -> Journal:
        consortium = consortium or self._home.only_consortium(self._which)
        if not consortium.manifest_path.exists():
            raise RecordError(
                f"{self._home.card().name!r} has no manifest yet: make a key first (make_key, or quorumark "
                "setup dkg), or agree on sums alone (quorumark setup sums)"
            )
        journal = Journal(consortium, self._identity(), memory)
        manifest = journal.manifest
        if self._manifest is not None and manifest.digest().hex() != self._manifest:
            raise RecordError(
                f"the manifest in force at this member is {manifest.digest().hex()[:16]}…, and its operator pinned "
                f"{self._manifest[:16]}…: compare them, and change the pin if the new one is right"
            )
        return journal


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
    names = read_names(config, "names") or list(model)
    if sorted(names) != sorted(model):
        raise MessageError("the server's message names other tensors than the model has", code="message.malformed")
    return names
