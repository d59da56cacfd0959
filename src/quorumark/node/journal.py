"""What a member's machine keeps of rounds between two messages (docs/engines.md).

An engine may start a new process for every message, so everything is on disk, in HOME/consortia/ID/rounds/: one folder
for the consortium, whatever its manifests.

    memory/rounds.sealed   what it must not do twice (`consortium.memory`)
    notes.json             the state that it is at, and the round that it joined (`Notes`)
    state-N/               the files of that state, the next one's in the other folder (`quorumark.node.state_files`)
    anchor.npy             E of the model that the run began with
    layout.json            where each weight is in the vector
    links.json             the last links that led to a state of this member, where cohorts are drawn and sums checked
    result-N.sealed        what it trained for round N, as long as that may have to be uploaded again
    marked.txt             digests of the models with this consortium's mark, or from which a marked sum was made; of a
                           consortium without a key, of the models from which any sum was made

None of it is in a backup.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.canonical import canonical, digest
from quorumark.consortium.home import ConsortiumFolder, read_array, read_file
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import SealedReader, SealedWriter, Unlock
from quorumark.consortium.records import Manifest, anchor_digest
from quorumark.consortium.shares import ShareFile, ShareInfo
from quorumark.errors import KeystoreError, MessageError, QuorumarkError, RecordError, RoundError
from quorumark.field import Vector
from quorumark.files import replacing, syncs, write_private
from quorumark.model.layout import ModelLayout
from quorumark.node import remembered
from quorumark.node.fields import read_content, read_count, read_digest, read_elements, read_held, read_level, read_text
from quorumark.node.marked import MarkedModels
from quorumark.node.noise import OwnNoise
from quorumark.node.notes import Notes
from quorumark.node.state_files import MODEL, StateFiles, write_each
from quorumark.round import checked_sums, links
from quorumark.round.amplitudes import model_digest
from quorumark.round.applied import optimiser_vectors
from quorumark.round.group import group_of
from quorumark.round.history import History, checks_sums, packing_of
from quorumark.round.member import RoundMember
from quorumark.round.memory import FolderState, adopt, answers_from, follow, sent_with
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.statements import Turn
from quorumark.round.survival import Step

__all__ = ["MODEL", "Journal", "Notes", "allow_repeats", "create_lost_memory"]

Config = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]
_RESULT = "a round's result"
_MOST_HELD = 1 << 25  # elements of all members' shares: 256 MiB
_LINKS = 64  # are kept: a server that loses its folder has those from its members, and no earlier ones


def create_lost_memory(consortium: ConsortiumFolder, identity: Identity) -> None:
    """The memory of rounds of a member that lost it (docs/secagg.md). The first one comes with the share: afterwards
    nobody can say that a member never took part."""
    FolderState.create(consortium.memory_path.parent, identity, group_of(consortium.manifest()), lost=True)


def allow_repeats(consortium: ConsortiumFolder, identity: Identity) -> None:
    """For a home that was made for a simulation: rounds may be repeated, and seeds be the server's."""
    with FolderState(consortium.memory_path.parent, identity).edit() as memory:
        memory["simulation"] = True


def is_simulation(consortium: ConsortiumFolder, identity: Identity) -> bool:
    """Whether a home was made for a simulation (`allow_repeats`)."""
    with FolderState(consortium.memory_path.parent, identity).edit() as memory:
        return bool(memory["simulation"])


def rounds_folder(consortium: ConsortiumFolder) -> Path:
    folder = consortium.path / "rounds"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class Journal:
    """What a member keeps on disk for the rounds of one consortium.

    `memory`: what it must not do twice, if that is open already; `simulated`: whether all of it is a simulation.
    """

    def __init__(self, consortium: ConsortiumFolder, identity: Identity, memory: FolderState | None = None) -> None:
        self.consortium, self.identity, self._memory = consortium, identity, memory
        self.simulated = False
        self._made_of = self._made_from()
        self._known_share: tuple[tuple[object, ...], ShareFile] | None = None  # in a simulation
        self.chain = consortium.chain()
        self.manifest = self.chain[-1]
        self.group = group_of(self.manifest)
        self.point = self.group.point_of(identity.ed25519)
        self.name = self.group.name(self.point)
        self.checks, self.has_links = checks_sums(self.manifest), self.manifest.terms.policy.has_links
        self._folder = rounds_folder(consortium)
        self._anchor_path, self._links_path = self._folder / "anchor.npy", self._folder / "links.json"
        self._layout_path, self._notes_path = self._folder / "layout.json", self._folder / "notes.json"
        self.marked = MarkedModels(consortium, self.manifest, self.name)
        self.notes, self._written_notes = Notes(), b""
        self.read_again()

    def read_again(self) -> None:
        """What other processes of a simulation may have written, where this one is kept for several messages."""
        if self._memory is not None:
            with self._memory.edit() as known:
                self.simulated = bool(known["simulation"])
        there = self._notes_path.exists()
        written = read_file(self._notes_path, "a member's notes of rounds") if there else b""
        if written != self._written_notes:
            self.notes = Notes.from_bytes(written) if there else Notes()
            self._written_notes = written
        self.noise = OwnNoise(self._files.noise, self.identity, self.manifest)

    def _made_from(self) -> tuple[object, ...]:
        place = self.consortium.path
        return remembered.as_seen((place.parent, place / "terms.json", self.consortium.manifest_path))

    def is_current(self) -> bool:
        """Whether there is no other manifest and no other consortium since it was made, and the memory is there."""
        return self._made_from() == self._made_of and self.consortium.memory_path.exists()

    def note(self, **entries: Any) -> None:
        self.notes = replace(self.notes, **entries)
        self._written_notes = self.notes.to_bytes()
        write_private(self._notes_path, self._written_notes)

    @property
    def _files(self) -> StateFiles:
        return StateFiles(self._folder, self.notes.place)

    # --- what it must not do twice ---

    def memory(self) -> FolderState:
        if self._memory is not None:
            return self._memory
        path = self.consortium.memory_path
        if not path.exists():
            raise KeystoreError(
                f"{self.name} has lost its memory of rounds, which came with its share: the file was removed, or this "
                "home comes from a backup. Say so on this node (quorumark member rounds --lost); it takes part again "
                "two rounds later"
            )
        return FolderState(path.parent, self.identity)

    def adopt(self) -> None:
        """Goes over to the manifest in force."""
        with self.memory().edit() as memory:
            adopt(memory, self.group)

    def manifest_of(self, digest: str) -> Manifest:
        for manifest in self.chain:
            if manifest.digest().hex() == digest:
                return manifest
        raise RecordError(
            f"{self.name} does not have the manifest {digest[:16]}… of this consortium: bring it up to date (quorumark "
            "consortium update)"
        )

    # --- the share ---

    def check_share(self, unlock: Unlock) -> None:
        """Whether it is there and of this epoch; its root is checked before it is used."""
        if not self.manifest.terms.has_key:
            return
        path = self.consortium.share_path()
        if not path.exists():
            raise KeystoreError(
                f"{self.name} has no share of epoch {self.manifest.epoch}: without it the sum would be garbage; bring "
                "it back from a backup, or let the others recover it (quorumark share recover)"
            )
        share = self._share(unlock)
        if share.info != ShareInfo.under(self.manifest, self.point, share.info.block):
            raise KeystoreError(
                f"the share of {self.name} belongs to another consortium, member or epoch: bring the right one "
                "back from a backup, or let the others recover it (quorumark share recover)"
            )

    def _share(self, unlock: Unlock) -> ShareFile:
        if not self.simulated:
            return self.consortium.share(unlock)
        files = remembered.as_seen([self.consortium.share_path()])
        if self._known_share is None or self._known_share[0] != files:
            self._known_share = files, self.consortium.share(unlock)
        return self._known_share[1]

    def hold_share(self) -> None:
        """In memory, where one process serves all members of a simulation, if all of theirs are small enough."""
        if self._known_share is not None and self.manifest.share_length * len(self.group.roster) <= _MOST_HELD:
            self._known_share[1].hold()

    # --- this member in a round ---

    def side(self, unlock: Unlock | None = None) -> RoundMember:
        """This member with its history, as it was when it joined the round. Without `unlock` it has no share: it can
        say whether it takes part, but not upload."""
        layout = remembered.read_layout(self._layout_path)
        share = None if unlock is None or not self.manifest.terms.has_key else self._share(unlock)
        side = RoundMember(self.identity, self.manifest, layout, share, mark=share is not None, memory=self.memory())
        side.history, side.history_checked = self.history(layout), self.notes.verified
        side.begin(Turn.from_bytes(self.notes.turn.encode()))
        return side

    def _check_back(self, layout: ModelLayout, history: History, turn: Turn, chain: Sequence[links.Link] = ()) -> None:
        """Before this member goes back to an earlier model, as for another run: may it take part from there? Else it
        stays where it is, and can still say which model is the last one."""
        reached = _round_of(self.notes.mark) if self.notes.mark else 0
        if history.mark.round < reached:
            if self.has_links:
                links.check_way(self.memory(), history, chain)
            self.adopt()
            side = RoundMember(self.identity, self.manifest, layout, mark=False, memory=self.memory())
            side.history = history
            side.has_links = False  # it has not gone there yet
            side.begin(turn)

    def keep_result(self, side: RoundMember, round_no: int) -> None:
        """Sealed, and on disk before this member says that it is ready: the same sum may have to be made again."""
        about = {"round": round_no, "state": side.state.hex()}
        with SealedWriter(self._result_path(round_no), Unlock.by_identity(self.identity), _RESULT, about) as file:
            file.write(np.ascontiguousarray(side.result).data.cast("B"))

    def kept_result(self, layout: ModelLayout, state: bytes, round_no: int) -> NDArray[Any]:
        """What this member trained for a round from a state."""
        path = self._result_path(round_no)
        text = f"{self.name} has not trained in round {round_no} from this model"
        missing = RoundError(text, code="round.not-trained")
        if not path.exists():
            raise missing
        reader = SealedReader(path, Unlock.by_identity(self.identity), _RESULT)
        if reader.about != {"round": round_no, "state": state.hex()}:
            raise missing
        result = np.frombuffer(b"".join(reader.chunks()), layout.dtype)
        if result.shape != (layout.size,):
            raise missing
        return result

    def drop_results(self, *needed: int) -> None:
        """Removes the results of all other rounds. A member that says that it is ready for a round has left the earlier
        ones for good; until then one of them may be made again, and so nothing is removed before."""
        kept = {self._result_path(round_no) for round_no in needed}
        for name in os.listdir(self._folder):
            if name.startswith("result-") and name.endswith(".sealed") and self._folder / name not in kept:
                (self._folder / name).unlink(missing_ok=True)

    def _result_path(self, round_no: int) -> Path:
        return self._folder / f"result-{round_no}.sealed"

    # --- the history ---

    def state_of_anchor(self) -> bytes:
        """What a run begins from."""
        layout = remembered.read_layout(self._layout_path)
        anchor = read_array(self._anchor_path, "an anchor")
        return History(self.manifest, layout, anchor, self.chain[:-1]).state

    def last_state(self) -> bytes:
        """That of the last model which this member accepted."""
        return self.history(remembered.read_layout(self._layout_path)).state

    def layout(self, data: bytes) -> ModelLayout:
        layout = ModelLayout.from_bytes(data)
        if layout.digest() != self.manifest.terms.layout:
            raise RecordError(
                f"the server's model has the layout {layout.digest()[:16]}…, and the manifest names "
                f"{self.manifest.terms.layout[:16]}…: train the model that was agreed, or set up a consortium for this"
            )
        if not self._layout_path.exists():
            write_private(self._layout_path, layout.to_bytes())
        return layout

    def history(self, layout: ModelLayout) -> History:
        """What this member accepted, as it was written down."""
        files = self._anchor_path, self._files.model
        known = remembered.find(self._named(), files if syncs() else None)
        if known is not None:
            return known
        try:
            anchor = read_array(self._anchor_path, "an anchor")
            model = layout.encode(self._files.read_model())
            mark, buffers = self.notes.mark.encode(), bytes.fromhex(self.notes.buffers)
        except (OSError, ValueError, QuorumarkError) as error:
            raise RoundError(
                f"{self.name} has no history of this run to go on from ({type(error).__name__})",
                code="round.no-history",
            ) from None
        history = remembered.match(self._named(), files, anchor, model)
        if history is None:
            history = self._restored(layout, anchor, model, mark, buffers, self._files.vectors())
            remembered.keep(self._named(), files, history)
        return history

    def _named(self) -> tuple[object, ...]:
        """What a history is a function of: the manifests, and what was noted, which names model and anchor."""
        return tuple(link.digest() for link in self.chain), self.notes.mark.encode(), self.notes.buffers.encode()

    def _restored(
        self, layout: ModelLayout, anchor: Vector, model: Vector, state: bytes, buffers: bytes, vectors: Arrays
    ) -> History:
        history = History(self.manifest, layout, anchor, self.chain[:-1])  # checks that it is the manifest's anchor
        return history.restored(history.read_mark(state, model, anchor, vectors), buffers)

    def follow(
        self, config: Config, arrays: Arrays, layout: ModelLayout, given: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        """Brings the history up to the model that the round starts from; what is missing for that, if anything, and
        that model. `given` is the model as the server sends it; where sums are checked it sends the sum instead.

        A member that was there in the last round derives the new state itself, and it must be the server's. One that
        missed rounds takes the server's: if that is false, its masks fit nobody's, and nothing is opened. Where sums
        are checked, the model is what follows from the last one and the sum; whether this member could check that
        itself is noted (`verified`).
        """
        self.noise.elsewhere = self.simulated and config.get("noise-elsewhere") is True
        turn = Turn.from_bytes(read_text(config, "turn", bytes))
        if turn.round != read_count(config, "round"):
            raise MessageError(
                "the server's message names one round in 'round' and another in 'turn'", code="message.malformed"
            )
        self.marked.check_unmarked(layout, self.memory())
        derived = self._derived(config, arrays, layout, given)
        if derived is None:
            anchor = self._anchor(arrays)
            if anchor is None:
                return "anchor", {}
            if not given or "state" not in arrays:
                return "model", {}
            encoded, buffers = layout.encode(given), self._buffers(layout, given)
            self.marked.check_other_keys(encoded)
            model, verified, state = given, False, read_content(arrays["state"])
            own = self._restored(layout, anchor, encoded, state, buffers, optimiser_vectors(arrays))
            if self.has_links and own.is_begun:
                self._check_buffers(layout, given)
            _check_history(own, config, self.name)
            with contextlib.suppress(QuorumarkError):  # of what it missed, its noise moved with the models
                self.noise.skip(Step(self.history(layout).mark), own.mark)
            _keep(self._anchor_path, anchor)
        else:
            own, model, verified = derived
            encoded = layout.encode(model)
        if not np.array_equal(own.mark.model, encoded):
            raise RoundError(
                "the model that the round starts from is not the one that the server's history names: start a new run",
                code="round.other-history",
            )
        if own.warming and own.round > own.strength.warmup_rounds:
            raise RoundError(
                "the warm-up rounds are over: all members must sign the amendment that names the anchor",
                code="round.anchor-not-signed",
            )
        if own.strength.rule == "paper":
            raise RoundError(
                "the strength rule 'paper' needs another sum before each round, which engines do not have: use "
                "the rule 'rho'",
                code="round.other-rule",
            )
        if self.has_links:
            chain = links.read_links(read_content(arrays["links"]))
            if not links.leads(self.memory(), own, chain):
                return "links", {}
            self._check_back(layout, own, turn, chain)
            links.reach(self.memory(), own, chain)
            verified = True
            self._keep_links(chain)
        else:
            self._check_back(layout, own, turn)
        joined, said = os.urandom(16).hex(), turn.to_bytes().decode()
        self._save(own, model, config, arrays, verified=verified, joined=joined, turn=said)
        return "", model

    def _save(self, own: History, model: Mapping[str, Any], config: Config, arrays: Arrays, **noted: Any) -> None:
        """The state that this member is at now, and what is to be noted of it.

        The files of the state before stay until the notes name the new ones: who dies in between is at one of the two,
        with all that it knows of it.
        """
        before, vectors = self._files, None if own.optimiser is None else own.mark.vectors()
        new = {"mark": own.mark.to_bytes().decode(), "buffers": self._buffers(own.layout, model).hex()}
        name = (*self._named()[:1], *new.values(), own.mark.model_digest)
        write = partial(remembered.write_once, name) if self.simulated else write_each
        files = before.after(model, vectors, config, arrays, write)
        self.noise.save(own.mark, files.noise)
        fresh = {"verified": False, "joined": "", "turn": "", "ready": 0, "checked": ""}
        self.note(**{**fresh, **new, "place": files.place, **noted})
        before.remove()
        remembered.keep(self._named(), (self._anchor_path, files.model), own)

    # --- links, where cohorts are drawn and sums are checked (`round.links`) ---

    @property
    def reached(self) -> str:
        """The state from which this member must be shown links."""
        return links.reached(self.memory()).hex() if self.has_links else ""

    def vouch(self, config: Config, arrays: Arrays) -> tuple[bytes, int]:
        """Goes on to what the announced sum leads to, if this member answered for it and its tag is right; and signs
        that, with its point under the manifest of that round. The model is on disk before anybody may follow it."""
        link = links.Link.told(config)
        member, name = self._under(link), digest("link", canonical(link.as_dict())).hex()
        self.noise.elsewhere = self.simulated and config.get("noise-elsewhere") is True
        own = self.history(remembered.read_layout(self._layout_path))
        if own.state == link.before:
            links.check_summed(member, link)
            own, model, checked = self._accept(config, arrays, own, {})
            _check_history(own, config, self.name)
            if not checked or (own.state, own.whole) != (link.after, link.whole):
                raise RoundError(
                    f"{self.name} cannot say that this is what the last sum leads to", code="round.other-history"
                )
            self._save(own, model, config, arrays, checked=name)
        elif own.state != link.after or not (links.has_signed(member, link) or self.notes.checked == name):
            raise RoundError(f"{self.name} was not at the model before this one", code="round.other-history")
        return links.sign_summed(member, link), member.point

    def second(self, config: Config) -> tuple[bytes, int]:
        """Signs that it signs no other successor of a state than one that t of its cohort have checked."""
        shown = links.read_links(config["link"])
        if len(shown) != 1:
            raise MessageError("the server's message must hold one link", code="message.malformed")
        member = self._under(shown[0])
        return links.second(member, shown[0], self.chain), member.point

    def _under(self, link: links.Link) -> SecAggMember:
        return SecAggMember(self.identity, group_of(self.manifest_of(link.under)), self.memory(), leaving=True)

    def _keep_links(self, chain: list[links.Link]) -> None:
        """For a server that loses its own: the last ones up to the state that this member reached."""
        kept = self._links_here()
        if chain and (not kept or kept[-1].after != chain[-1].after):
            kept = kept if kept and kept[-1].after == chain[0].before else []
            write_private(self._links_path, links.write_links([*kept, *chain][-_LINKS:]))

    def _links_here(self) -> list[links.Link]:
        """None if the file is damaged: others have them, too."""
        with contextlib.suppress(QuorumarkError):
            return links.read_links(read_file(self._links_path, "links"))
        return []

    def _kept_links(self) -> str:
        """Those, and what this member signed itself."""
        found = self._links_here()
        layout = remembered.read_layout(self._layout_path)
        link = links.signed_into(self.memory(), self.history(layout).state, self.chain)
        if link is not None:
            member = self._under(link)
            with contextlib.suppress(RoundError):  # it may have seconded it
                found.append(replace(link, summed={member.point: links.sign_summed(member, link)}))
        return links.write_links(found).decode()

    def _derived(
        self, config: Config, arrays: Arrays, layout: ModelLayout, given: Mapping[str, Any]
    ) -> tuple[History, Mapping[str, Any], bool] | None:
        """The history up to the model of the round as this member has it itself, which must be the server's; that
        model; and whether it has verified it. None if it missed rounds."""
        accepted = read_count(config, "accepted")
        if accepted == self._start():
            if not given:
                return None
            encoded = layout.encode(given)
            self.marked.check_other_keys(encoded)
            begun = History(self.manifest, layout, encoded, self.chain[:-1])  # it is the manifest's anchor, or refused
            begun.buffers = self._buffers(layout, given)
            if begun.mark.digest() != read_digest(config, "history"):
                raise RoundError(
                    "the server's history does not begin with the anchor: start from the model that the manifest names",
                    code="round.other-history",
                )
            self._check_buffers(layout, given)
            _keep(self._anchor_path, encoded)
            return begun, given, True
        own: History | None = None
        # a process that died between two files left a history that does not fit together: as if it had missed rounds
        with contextlib.suppress(QuorumarkError):
            own = self.history(layout)
        if own is None or own.mark.round not in (accepted - 1, accepted):
            return None
        model, verified = given, self.notes.verified
        if not self.checks:
            if not given:
                return None
            self.marked.check_other_keys(layout.encode(given))
        if own.mark.round == accepted - 1:
            before = own.state
            own, model, checked = self._accept(config, arrays, own, given)
            verified = checked and verified
            if not self.has_links:  # where there are links, they say what follows
                with self.memory().edit() as memory:
                    follow(memory, before, own.state)
        elif self.checks:
            model = self._files.read_model()
        if self.has_links and own.mark.digest() != read_digest(config, "history"):
            return None  # it checked another sum than the one that T of the cohort signed
        _check_history(own, config, self.name)
        if self.checks:
            self.marked.check_other_keys(own.mark.model)
            if given and model_digest(layout.encode(given)) != own.mark.model_digest:
                raise RoundError(
                    "the model that the server announces is not what follows from the sum that it announces with it: "
                    "use a strategy that takes the sum as it is, such as FedAvg, or the optimiser that the terms name",
                    code="round.not-the-sum",
                )
            if given and layout.buffers_digest(given) != own.buffers:
                raise RoundError(
                    "the model's integers are not those of the rounds before: they are in no sum, and the server must "
                    "keep them",
                    code="round.other-integers",
                )
        return own, model, verified

    def _buffers(self, layout: ModelLayout, model: Mapping[str, Any]) -> bytes:
        return layout.buffers_digest(model) if self.checks else b""

    def _start(self) -> int:
        """How many rounds are accepted where a run begins: none, or the warm-up rounds, once their model is named."""
        terms = self.manifest.terms
        warming = self.manifest.genesis.terms == terms.digest().hex()
        return 0 if warming else terms.strength.warmup_rounds

    def _check_buffers(self, layout: ModelLayout, model: Mapping[str, Any]) -> None:
        """Integers and booleans, which are in no sum, must be those that were agreed on."""
        agreed = self.manifest.terms.buffers
        if agreed and layout.buffers_digest(model).hex() != agreed:
            raise RoundError(
                "the model's integers and booleans are not those that the terms name: start from the agreed model",
                code="round.other-integers",
            )

    def _accept(
        self, config: Config, arrays: Arrays, own: History, given: Mapping[str, Any]
    ) -> tuple[History, Mapping[str, Any], bool]:
        """The history with the successor of this member's own model: what follows from the announced sum or, where sums
        are not checked, the model that is `given`. Also that model, and whether this member could check that it is the
        sum.

        If it is not, this raises.
        """
        under = self.manifest_of(str(read_text(config, "sum-under", str)))
        halvings, level = read_count(config, "sum-halvings"), read_level(config, own.layout)
        number, name = own.round, under.digest().hex()
        before, step, last = own.state, Step(own.mark), read_count(config, "sum-round")
        if not self.checks:
            amplitudes = own.amplitudes_under(under, halvings) if under.terms.has_key else None
            embedded = None if amplitudes is None else own.widened(amplitudes, level, under).without(read_held(config))
            embedded_or_none = embedded if embedded is not None and embedded.marks else None
            told = own.layout.encode(given), embedded_or_none, arrays.get("norms"), name, level
            own.accept(number, *told, halvings=halvings)
            with self.memory().edit() as memory:
                answered = last in [given for given, *_ in answers_from(memory, before, "model")]
                members = sent_with(memory, before, last) if answered else ()
            self.noise.follow(before, step, own.mark, embedded_or_none, under, members)
            return own, given, False
        length = packing_of(under).length(own.layout) + own.norms + 1
        opened = read_elements(arrays["sum"], length, "the sum")
        # under another manifest than it says, nobody would ask whether the state is closed under the true one
        found = checked_sums.check(self.memory(), before, group_of(under), last, halvings, opened, level)
        if found is False:
            raise RoundError(
                f"the sum that the server announces is not that of the last round, in which {self.name} took part: the "
                "server lies, or a member sent a wrong tag. The run cannot go on from the model before: another sum "
                "from it could show the key. Find out who it was, and let the operators decide",
                code="round.wrong-tag",
            )
        follows_from = *self._named(), name, halvings, level
        known = remembered.find_next(follows_from, opened) if self.simulated else None
        if known is not None:
            own, weights, embedded = known
        else:
            amplitudes = own.amplitudes_under(under, halvings) if under.terms.has_key else None
            like, norms = self._files.read_model(), own.norms > 0
            settled = own.settle(opened[:-1], like, amplitudes, norms=norms, level=level, under=under)
            weights, embedded = settled.weights, settled.embedded
            summed = settled.encoded, embedded, settled.norms, name, level
            own.accept(number, *summed, stood=settled.stood, taken=settled.taken, halvings=halvings)
            if self.simulated:
                own.mark.digest()  # which its copies then know
                remembered.keep_next(follows_from, opened, own, weights, embedded)
        with self.memory().edit() as memory:
            members = sent_with(memory, before, last) if found else ()
        self.noise.follow(before, step, own.mark, embedded, under, members)
        return own, weights, found is True

    def _anchor(self, arrays: Arrays) -> Vector | None:
        """From what the server sent, or from disk, if it is the manifest's."""
        layout_digest, wanted = self.manifest.terms.layout, self.manifest.terms.anchor
        if "anchor" in arrays:
            anchor = np.ascontiguousarray(arrays["anchor"], np.uint64)
            if anchor_digest(layout_digest, anchor) != wanted:
                raise RecordError(
                    "the anchor that the server sends is not the one that the manifest names: start from the agreed "
                    "model"
                )
            return anchor
        if self._anchor_path.exists():
            kept: Vector = read_array(self._anchor_path, "an anchor")
            if anchor_digest(layout_digest, kept) == wanted:
                return kept
        return None

    # --- handing it out ---

    def where(self, state: bytes) -> Config:
        """Where this member is: how many rounds it has accepted, the last number that it joined, and in which round,
        over whom, it has answered from a state."""
        with self.memory().edit() as memory:
            last, given = int(memory["round"]), answers_from(memory, state, "model")
            kept = memory["answer"].get("model", {})
        answered, draw = (given[-1][0], given[-1][2]) if given else (0, 0)
        kept = kept if answered and kept.get("round") == answered else {}
        over, halvings = kept.get("members", []), kept.get("halvings", 0)
        accepted = _round_of(self.notes.mark) if self.notes.mark and self._files.has_sum else 0
        reached = {"accepted": accepted, "round": last, "answered": answered}
        return {**reached, "over": json.dumps(over), "halvings": halvings, "of-draw": draw}

    def hand_out(self) -> tuple[Config, dict[str, NDArray[Any]]]:
        """The last state that this member accepted, as a server needs it to go on."""
        if not self.notes.mark or not self._files.has_sum:
            return {}, {}
        config, arrays = self._files.hand_out()
        arrays["state"] = np.frombuffer(self.notes.mark.encode(), np.uint8)
        if self.has_links:
            config["links"] = self._kept_links()
        return config, arrays


def _check_history(own: History, config: Mapping[str, Any], name: str) -> None:
    """Whether the server's history, of which it tells the digest, is this member's."""
    if own.mark.digest() != read_digest(config, "history"):
        raise RoundError(
            f"the server's history of this run is not the one that {name} has seen: it says that round "
            f"{own.mark.round} was accepted, with another model or strength; start a new run",
            code="round.other-history",
        )


@lru_cache(maxsize=4)
def _round_of(mark: str) -> int:
    """How many rounds were accepted at a state, by its record."""
    return int(json.loads(mark)["round"])


def _keep(path: Path, vector: Vector) -> None:
    with replacing(path) as file:
        np.save(file, vector)
