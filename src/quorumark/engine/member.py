"""A member on its own machine, as an engine sees it: stages with texts, numbers and arrays in and out.

    node = MemberNode(home, unlock, terms=PINNED)
    config, arrays = node.handle("join", config, arrays)

    stage    what comes                                         what goes
    join     round, run, the history so far, model:…            rate, seed: what to train with; joined (sums)
    ready    examples, result:…, joined as *join* gave it       a key for the round, signed (secagg)
    upload   an announcement, what the others said (sums)       the masked vector, its head
    unmask   a request                                          shares of the seeds
    setup    terms, messages of the others                      this member's messages; at the end the manifest
    answer   a query, the suspect, the anchor, the layout       this member's partial, if its policy allows
    sign     a certificate                                      the certificate with this member's signature

An engine may start a new process for every message, so everything between two of them lies on disk, in the member's
folder (HOME/consortia/ID/rounds/GROUP/). A QuorumarkError is a refusal; `refusal` gives its text without anything that
only this member may know.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field, sums
from quorumark.checks import is_count
from quorumark.embed import Amplitudes, MarkState, Strength, model_digest, norm_count
from quorumark.errors import EncodingError, KeystoreError, MessageError, QuorumarkError, RecordError, RoundError
from quorumark.federation import FederationMember, History, checks_sums, group_of, research_seed
from quorumark.field import Vector
from quorumark.home import ConsortiumFolder, Home, read_array, read_file
from quorumark.identity import Header, Identity
from quorumark.keystore import Unlock, only_one, replacing, write_private
from quorumark.layout import ModelLayout, read_safetensors, write_safetensors
from quorumark.records import Manifest, Terms, anchor_digest, canonical, digest, parse
from quorumark.secagg import FolderState, Group, SecAggMember, unpack
from quorumark.setup.folder import advance
from quorumark.shares import ShareInfo
from quorumark.verify.certificate import Certificate
from quorumark.verify.coalition import answer, sign
from quorumark.verify.evidence import Query
from quorumark.verify.reference import Reference

__all__ = ["MODEL", "RESULT", "Config", "MemberNode", "create_memory", "introduction", "named", "refusal"]

Config = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]
Reply = tuple[Config, dict[str, NDArray[Any]]]

MODEL, RESULT, MESSAGE = "model:", "result:", "message:"
"""What the names of a model's tensors, of a result's, and of a ceremony's messages begin with."""

_DIARY = "quorumark-diary/v1"
_NUMBERS = ("round", "as_of", "top", "upload_round", "upload_as_of", "answered_as_of")  # in a diary
_ROUND = ("join", "ready", "upload", "unmask")
_FOLDERS = re.compile(r"(?<=')/[^']*/|(?<![\w.:/'])/(?:[^\s'/]+/)+")  # of a path, in quotes or without
_MESSAGE_NAME = re.compile(r"(\d{1,2}-[a-z]{1,20})/(\d{1,6})(?:-to-(\d{1,6}))?\.msg")


def named(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    """The arrays of one kind, by their own names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def refusal(error: QuorumarkError) -> str:
    """What others may read of a refusal: not the member's weight that caused it, nor where its files lie."""
    text = f"{error.argument} {error.rule}" if isinstance(error, EncodingError) else str(error)
    return _FOLDERS.sub("…/", text)


def introduction(about: bytes, run: str) -> tuple[str, str, str]:
    """Consortium, session and step of the message in which a member says which node of a run is its own."""
    return about.hex(), digest("engine run", run.encode()).hex(), "engine/node"


class MemberNode:
    """One member. `terms` and `manifest` are digests that the member's operator pinned: nothing else is served.

    `terms` is needed for setup: the server brings the terms, and the digest says that they are those that the members
    agreed on. `consortium` is the start of an id, if the home holds several.
    """

    def __init__(
        self,
        home: Home,
        unlock: Unlock,
        *,
        terms: str | None = None,
        manifest: str | None = None,
        consortium: str | None = None,
    ) -> None:
        self._home, self._unlock = home, unlock
        self._terms, self._manifest, self._which = terms, manifest, consortium
        self._stages: dict[str, Callable[[Config, Arrays], Reply]] = {
            "join": self._join,
            "ready": self._ready,
            "upload": self._upload,
            "unmask": self._unmask,
            "setup": self._setup,
            "answer": self._answer,
            "sign": self._sign,
        }

    def __repr__(self) -> str:
        return f"MemberNode({str(self._home.path)!r}, secrets hidden)"

    def handle(self, stage: str, config: Mapping[str, Any], arrays: Arrays) -> Reply:
        """One stage. What a server sends is checked by type first: it may send anything."""
        if stage not in self._stages:
            raise MessageError(f"there is no stage {stage[:40]!r}: server and member run different releases")
        try:
            with self._alone() if stage in _ROUND else contextlib.nullcontext():
                return self._stages[stage](dict(config), arrays)
        except KeyError as error:
            raise MessageError(f"the server's message for the stage {stage!r} lacks {error}") from None

    # --- a round ---

    def _join(self, config: Config, arrays: Arrays) -> Reply:
        """Before training: is this the run, the model and the round that this member may go on with?"""
        desk = self._desk()
        if config["manifest"] != desk.manifest.digest().hex():
            raise RecordError(
                f"the server runs under the manifest {str(config['manifest'])[:16]}…, and at {desk.name} "
                f"{desk.manifest.digest().hex()[:16]}… is in force: bring both to the same one (quorumark consortium "
                "update)"
            )
        round_no = _whole(config, "round")
        if desk.point not in desk.group.cohort(round_no):
            raise RoundError(f"{desk.name} is not drawn for round {round_no}")
        with desk.memory().edit() as memory:  # it stands, and is this group's
            last = int(memory["round"])
        if round_no <= last:
            raise RoundError(
                f"round {round_no} is over for {desk.name}, which last took part in round {last}; rounds never repeat: "
                f"let the server go on after that one (watermarked(…, after={last}))"
            )
        desk.check_share(self._unlock)
        layout = desk.layout(_content(arrays["layout"]))
        model = layout.encode(named(arrays, MODEL))
        needs = desk.follow(config, arrays, layout, model)
        if needs:
            return {"needs": needs}, {}
        strength = Strength.of(desk.manifest.terms.strength, desk.manifest.terms.coordinates)
        told: Config = {"rate": float(strength.rate(round_no)), "point": desk.point, "round": round_no}
        if desk.checks:
            told["joined"] = desk.diary["joined"]
        if "seed" in config:
            told["seed"] = research_seed(_whole(config, "seed"), round_no, desk.point)
        return told, {}

    def _ready(self, config: Config, arrays: Arrays) -> Reply:
        """After training: keeps the result, and joins the round."""
        desk, round_no = self._desk(), _whole(config, "round")
        member = desk.manifest.terms.member(desk.point)
        if config["examples"] != member.examples:
            raise RoundError(
                f"{desk.name} trained on {config['examples']} examples, and the manifest, whose numbers weigh the sum, "
                f"says {member.examples}: train on those, or let all members sign the new number "
                f"(quorumark consortium amend --examples {desk.point}={config['examples']})"
            )
        if desk.checks and config["joined"] != desk.diary.get("joined"):
            raise RoundError(
                f"the result is not of the model that {desk.name} joined round {round_no} with: two messages of the "
                "server are served at once, and the later one counts"
            )
        result = named(arrays, RESULT)
        side = desk.member(self._unlock, result, round_no)
        write_safetensors(result, desk.result_path)
        message = side.ready(round_no)
        desk.note(round=round_no)
        header = Header(*introduction(desk.manifest.digest(), str(config["run"])), desk.point)
        node = desk.identity.write(header, str(config["node"]).encode())
        told: Config = {"point": desk.point, "ready": message, "introduction": node}
        if side.checks:
            told["boxes"], told["vouch"] = side.said(round_no)
        return told, {}

    def _upload(self, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002 - all stages take the same
        desk, round_no = self._desk(), _whole(config, "round")
        if desk.diary.get("round") != round_no or not desk.result_path.exists():
            raise RoundError(f"{desk.name} has not trained in round {round_no}")
        side = desk.member(self._unlock, read_safetensors(desk.result_path), round_no)
        side.ready(round_no)  # as it was: who would join with anything else now is refused
        if side.checks:
            boxes, vouches = (unpack(config[name], f"list of {name}") for name in ("boxes", "vouches"))
            upload = side.upload(config["announcement"], boxes, vouches)
            desk.note_upload(side, round_no)
        else:
            upload = side.upload(config["announcement"])
        return {"head": upload.head}, {"vector": upload.vector}

    def _unmask(self, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        desk = self._desk()
        desk.note_answer()
        message = SecAggMember(desk.identity, desk.group, desk.memory()).unmask(config["request"])
        desk.result_path.unlink(missing_ok=True)
        return {"answer": message}, {}

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """One message of a round at a time: of two that are served at once, each would undo what the other notes."""
        folder = self._home.only_consortium(self._which).path / "rounds"
        folder.mkdir(mode=0o700, exist_ok=True)
        return only_one(folder)

    def _desk(self) -> _Desk:
        place = self._home.only_consortium(self._which)
        if not place.manifest_path.exists():
            raise RecordError(f"{self._home.card().name!r} has no manifest yet: the key ceremony comes first")
        manifest = place.manifest()
        if self._manifest is not None and manifest.digest().hex() != self._manifest:
            raise RecordError(
                f"the manifest in force at this member is {manifest.digest().hex()[:16]}…, and its operator pinned "
                f"{self._manifest[:16]}…: compare them, and change the pin if the new one is right"
            )
        return _Desk(place, manifest, self._home.identity(self._unlock))

    # --- setup ---

    def _setup(self, config: Config, arrays: Arrays) -> Reply:
        """A turn in the dealer-free ceremony: takes the others' messages, does what can be done, gives its own."""
        terms = Terms.from_bytes(_content(arrays["terms"]))
        self._check_pinned(terms)
        session = str(config["session"])
        if not re.fullmatch("[0-9a-f]{32}", session):
            raise MessageError("the ceremony's session must be 32 hexadecimal digits")
        identity = self._home.identity(self._unlock)
        point = terms.point_of(identity.ed25519)
        spool = self._home.path / "ceremonies" / session
        spool.parent.mkdir(mode=0o700, exist_ok=True)
        spool.mkdir(mode=0o700, exist_ok=True)
        for name, message in named(arrays, MESSAGE).items():
            found = _MESSAGE_NAME.fullmatch(name)
            if found is None or int(found[2]) == point or (found[3] and int(found[3]) != point):
                raise MessageError(f"the server sends {name[:60]!r}, which is no message for this member")
            (spool / found[1]).mkdir(mode=0o700, exist_ok=True)
            write_private(spool / name, _content(message))
        place = self._home.consortium(terms)
        before = place.manifest_path.exists()
        progress = advance(self._home, self._unlock, terms, spool)
        have = _names(config.get("have", "[]"))
        own = [path for path in sorted(spool.glob("*/*.msg")) if _sender(path) == point]
        fresh = {path.relative_to(spool).as_posix(): path for path in own}
        messages = {MESSAGE + name: _array(path.read_bytes()) for name, path in fresh.items() if name not in have}
        header = Header(*introduction(terms.digest(), str(config["run"])), point)
        told: Config = {
            "point": point,
            "step": progress.step,
            "waiting": ", ".join(progress.waiting),
            "introduction": identity.write(header, str(config["node"]).encode()),
        }
        if progress.manifest is not None:
            told["manifest"] = progress.manifest.to_bytes()
            if not before:
                # a new key: nobody has taken part in anything yet. Later turns of the ceremony, which a server may ask
                # for at any time, make no memory: one that begins at 0 would let rounds repeat
                create_memory(place, identity, 0)
            if not messages:  # all of its own are on their way
                shutil.rmtree(spool, ignore_errors=True)
        return told, messages

    def _check_pinned(self, terms: Terms) -> None:
        name = self._home.card().name
        if self._terms is None:
            raise RecordError(
                f"{name!r} has pinned no terms, and makes a key for none that a server brings: read the terms, and pin "
                f"their digest if they are right ({terms.digest().hex()})"
            )
        if terms.digest().hex() != self._terms:
            raise RecordError(
                f"the server brings the terms {terms.digest().hex()[:16]}…, and {name!r} has pinned "
                f"{self._terms[:16]}…: compare them"
            )

    # --- verification ---

    def _answer(self, config: Config, arrays: Arrays) -> Reply:
        """This member's partial about a suspect, if its own policy approves; nobody is asked here."""
        place = self._desk().place
        with tempfile.TemporaryDirectory(prefix="suspect-", dir=place.path) as folder:
            suspect = Path(folder) / Path(str(config["name"])).name
            suspect.write_bytes(_content(arrays["suspect"]))
            anchor = Path(folder) / "the-anchor.safetensors"
            anchor.write_bytes(_content(arrays["anchor"]))
            layout = ModelLayout.from_bytes(_content(arrays["layout"]))
            reference = Reference.of(place.chain(), layout, anchor)
            query = Query.from_bytes(config["query"])
            partial = answer(self._home, self._unlock, reference, suspect, query, place=place)
        return {"partial": partial.to_bytes()}, {}

    def _sign(self, config: Config, arrays: Arrays) -> Reply:  # noqa: ARG002
        place = self._desk().place
        signed = sign(self._home, self._unlock, Certificate.from_bytes(config["certificate"]), place=place)
        return {"certificate": signed.to_bytes()}, {}


def _whole(config: Config, name: str) -> int:
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise MessageError(f"the server's message must give {name!r} as a whole number")
    return value


def _names(text: Any) -> set[str]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise MessageError("the server's message must list the messages that it has as texts")
    return set(found)


def _since(config: Config, name: str, last: int, round_no: int) -> int:
    """A round after `last`, the one that was accepted before, up to `round_no`."""
    value = _whole(config, name)
    if not last < value <= round_no:
        raise MessageError(f"the server's message must name a round since the last accepted one as {name!r}")
    return value


def _content(array: NDArray[Any]) -> bytes:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
        raise MessageError("the server's message must hold its files as bytes")
    return array.tobytes()


def _integers(array: NDArray[Any], size: int) -> NDArray[np.int64]:
    if not isinstance(array, np.ndarray) or array.dtype.kind != "i" or array.shape != (size,):
        raise MessageError(f"the server's message must hold what rounding left as {size} whole numbers")
    return array.astype(np.int64)


def _elements(array: NDArray[Any], size: int) -> Vector:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint64 or array.shape != (size,):
        raise MessageError(f"the server's message must hold the sum of norms as {size} field elements")
    return np.ascontiguousarray(array)


def _array(content: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(content, np.uint8)


def _sender(path: Path) -> int:
    found = _MESSAGE_NAME.fullmatch(f"{path.parent.name}/{path.name}")
    return int(found[2]) if found else 0


# --- what lies on disk between two messages ---------------------------------------------------------------


def create_memory(place: ConsortiumFolder, identity: Identity, after: int) -> None:
    """The memory of rounds of a member that has not taken part in any later than `after` (docs/secagg.md)."""
    group = group_of(place.manifest())
    FolderState.create(_group_folder(place, group) / "memory", identity, group, after)


def _group_folder(place: ConsortiumFolder, group: Group) -> Path:
    folder = place.path / "rounds" / group.id.hex()[:16]
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class _Desk:
    """A member's papers for the rounds under one manifest."""

    def __init__(self, place: ConsortiumFolder, manifest: Manifest, identity: Identity) -> None:
        self.place, self.manifest, self.identity = place, manifest, identity
        self.group = group_of(manifest)
        self.point = self.group.point_of(identity.ed25519)
        self.name = self.group.name(self.point)
        self._folder = _group_folder(place, self.group)
        self.memory_path = self._folder / "memory" / "rounds.sealed"
        self.result_path = self._folder / "result.safetensors"
        self._model_path, self._anchor_path = self._folder / "model.npy", self._folder / "anchor.npy"
        self._layout_path, self._diary_path = self._folder / "layout.json", self._folder / "diary.json"
        self.checks = checks_sums(manifest)
        self.diary: Config = {}
        if self._diary_path.exists():
            self.diary = parse(read_file(self._diary_path, "a diary of rounds"), _DIARY, "a diary of rounds")
            if not all(is_count(self.diary.get(name, 0)) for name in _NUMBERS):
                raise RecordError(f"{str(self._diary_path)!r} is damaged: put it back from a copy of this moment")

    def note(self, **entries: Any) -> None:
        self.diary = {"format": _DIARY, **self.diary, **entries}
        write_private(self._diary_path, canonical(self.diary))

    # --- what it must not do twice ---

    def memory(self) -> FolderState:
        """The memory of rounds. Under a new manifest it goes on where that of the old one ended."""
        if not self.memory_path.exists():
            last = self._last_round()
            if last is None:
                raise KeystoreError(
                    f"{self.name} has no memory of rounds: create it with the last round that it may have taken part "
                    "in, 0 if none (quorumark member rounds --after 0)"
                )
            FolderState.create(self._folder / "memory", self.identity, self.group, last)
        return FolderState(self._folder / "memory", self.identity)

    def _last_round(self) -> int | None:
        """The last round under earlier manifests, which are left for good."""
        rounds = []
        for path in self._folder.parent.glob("*/memory/rounds.sealed"):
            with FolderState(path.parent, self.identity).edit() as memory:
                memory.update(open=False, purposes={})
                rounds.append(int(memory["round"]))
        return max(rounds, default=None)

    # --- the share ---

    def check_share(self, unlock: Unlock) -> None:
        """That it is there and of this epoch; its root is checked before it is used."""
        path = self.place.share_path()
        if not path.exists():
            raise KeystoreError(
                f"{self.name} has no share of epoch {self.manifest.epoch}: without it the sum would be garbage; bring "
                "it back from a backup, or let the others recover it (quorumark share recover)"
            )
        share = self.place.share(unlock)
        if share.info != ShareInfo.under(self.manifest, self.point, share.info.block):
            raise KeystoreError(f"the share of {self.name} belongs to another consortium, member or epoch")

    def member(self, unlock: Unlock, result: Mapping[str, Any], round_no: int) -> FederationMember:
        """This member with its history and its result, as it was when it joined the round."""
        layout = ModelLayout.from_bytes(read_file(self._layout_path, "a layout"))
        side = FederationMember(
            self.identity,
            self.manifest,
            layout,
            lambda *_: result,
            None,
            self.place.share(unlock),
            state=self.memory(),
        )
        side.history = self._history(layout)
        side.sure = self.diary.get("sure") is True
        side.as_of = int(self.diary.get("as_of") or round_no)
        if self.checks:  # it may have answered since it joined
            self._check_answered(side.history, side.as_of)
        side.train({}, round_no)
        return side

    # --- the history ---

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

    def _history(self, layout: ModelLayout) -> History:
        """What this member accepted, as it was written down."""
        try:
            anchor, model = (read_array(path, "a model") for path in (self._anchor_path, self._model_path))
            state, beside = self.diary["mark"].encode(), bytes.fromhex(self.diary.get("beside", ""))
        except (RecordError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise RoundError(f"{self.name} has no history of this run to go on from ({type(error).__name__})") from None
        history = self._restored(layout, anchor, model, state)
        history.beside = beside
        return history

    def _restored(self, layout: ModelLayout, anchor: Vector, model: Vector, state: bytes) -> History:
        history = History(self.manifest, layout, anchor)  # checks that it is the manifest's anchor
        start = model if history.warming else anchor  # in warm-up rounds every model is the next anchor
        key = self.manifest.terms.key
        history.mark = MarkState.from_bytes(state, history.strength, layout, key, model, start)
        return history

    def follow(self, config: Config, arrays: Arrays, layout: ModelLayout, model: Vector) -> str:
        """Brings the history up to the model that the round starts from; what is missing for that, if anything.

        A member that was there in the last round derives the new state itself, and it must be the server's. One that
        missed rounds takes the server's: if that is false, its masks fit nobody's, and nothing is opened.

        Where sums are checked, the model must also be the last round's sum, and whether this member could see so for
        itself is noted (`sure`). Then it does not matter which run the last round was of: a run that begins does so
        from the anchor, and one that goes on from a sum.
        """
        run, accepted = str(config["run"]), _whole(config, "accepted")
        beside = layout.beside(named(arrays, MODEL)) if self.checks else b""
        own, sure = self._derived(config, arrays, layout, model, beside)
        if own is None:
            anchor = model if accepted == 0 else self._anchor(arrays)
            if anchor is None:
                return "anchor"
            own = self._restored(layout, anchor, model, _content(arrays["state"]))
            _keep(self._anchor_path, anchor)
        if own.mark.model_digest != model_digest(model):
            raise RoundError("the model that the round starts from is not the one that the server's history names")
        if own.warming and _whole(config, "round") > own.strength.warmup_rounds:
            raise RoundError("the warm-up rounds are over: all members must sign the amendment that names the anchor")
        if own.strength.rule == "paper":
            raise RoundError("the strength rule 'paper' needs a sum of its own before each round: no engine has it")
        if self.checks and 0 < accepted < self.top():
            raise RoundError(
                f"{self.name} has seen that round {self.top()} was summed, and the server goes back to round "
                f"{accepted}: let it go on from the last one, or begin a new run from the anchor"
            )
        as_of = self._check_repeated(config, own) if self.checks else 0
        _keep(self._model_path, model)
        self.result_path.unlink(missing_ok=True)
        noted: Config = {"run": run, "mark": own.mark.to_bytes().decode(), "round": 0, "sure": sure}
        if self.checks:  # `joined`: which of several models that it was told of in one round a result is of
            noted |= {"beside": beside.hex(), "joined": os.urandom(16).hex(), "top": self.top(own if sure else None)}
            noted["as_of"] = as_of
        self.note(**noted)
        return ""

    def _derived(
        self, config: Config, arrays: Arrays, layout: ModelLayout, model: Vector, beside: bytes
    ) -> tuple[History | None, bool]:
        """The history up to this model as far as this member has it itself, which must be the server's, and whether it
        is sure of it; none if it missed rounds."""
        accepted, before, told = _whole(config, "accepted"), _whole(config, "before"), _content(arrays["state"])
        own: History | None = None
        if self.checks and accepted == 0:
            own = History(self.manifest, layout, model)  # it is the manifest's anchor, or refused
            if own.mark.to_bytes() != told:
                raise RoundError("the server's history begins with something else than the anchor")
            _keep(self._anchor_path, model)
            return own, True
        if "mark" not in self.diary or not (self.checks or self.diary.get("run") == str(config["run"])):
            return None, False
        # whoever died between two files has a history that does not fit together: as if it had missed rounds
        with contextlib.suppress(QuorumarkError):
            own = self._history(layout)
        if own is None:
            return None, False
        sure = self.diary.get("sure") is True
        if own.mark.round == before and before < accepted:
            as_of = _since(config, "accepted-as-of", before, accepted) if self.checks else accepted
            amplitudes = own.amplitudes(accepted, as_of)
            sure = self._is_sum(config, arrays, own, model, amplitudes) and sure
            own.accept(accepted, model, amplitudes if amplitudes.marks else None, arrays.get("norms"))
        elif own.mark.round < accepted or (self.checks and own.mark.round > accepted):
            return None, False
        if own.mark.to_bytes() != told:
            raise RoundError(
                f"the server's history of this run is not the one that {self.name} has seen: it says that round "
                f"{accepted} was accepted, with another model or strength; start a new run"
            )
        if own.beside != beside:
            raise RoundError("the model's whole numbers are not those of the rounds before: they are in no sum")
        return own, sure

    def _check_repeated(self, config: Config, own: History) -> int:
        """The round whose mark this one has: its own, or an earlier one from the same model, which it repeats."""
        as_of = _since(config, "as-of", own.mark.round, _whole(config, "round"))
        self._check_answered(own, as_of)
        return as_of

    def _check_answered(self, own: History, as_of: int) -> None:
        """A sum that this member helped to open may be known to the server, whatever it says of that round. From the
        same model there must be no other with another mark: the two would differ by a mark."""
        if self.diary.get("answered_state") == own.mark.digest().hex() and self.diary["answered_as_of"] != as_of:
            raise RoundError(
                f"{self.name} has answered in a round from this model with the mark of round "
                f"{self.diary['answered_as_of']}, and takes part in no other from it"
            )

    def note_upload(self, side: FederationMember, round_no: int) -> None:
        """That t members of the round are sure of its history; what an answer in it would be for, whatever the server
        says in between.

        From the anchor nothing is ever marked. No answer is noted for it: a run that begins must not make this member
        forget the model that it answered for, to which a server may still go back (`top`).
        """
        noted: Config = {"sure": side.sure, "top": self.top(side.history)}
        if side.history is not None and side.history.mark.round:
            noted |= {"upload_round": round_no, "upload_state": side.history.mark.digest().hex()}
            noted["upload_as_of"] = side.as_of
        self.note(**noted)

    def note_answer(self) -> None:
        """Before it answers in the round that it last uploaded in: from that model there is one mark from now on."""
        with self.memory().edit() as memory:
            last = int(memory["round"])
        if self.checks and self.diary.get("upload_round") == last:
            self.note(answered_state=self.diary["upload_state"], answered_as_of=self.diary["upload_as_of"])

    def top(self, sure: History | None = None) -> int:
        """The last round that this member has ever been sure of, in any run: round numbers never repeat, so that a
        server that names an earlier one goes back, to where it could train the same model again."""
        return max(int(self.diary.get("top", 0)), 0 if sure is None else sure.mark.round)

    def _is_sum(self, config: Config, arrays: Arrays, own: History, model: Vector, amplitudes: Amplitudes) -> bool:
        """Whether the model is, rounded, the sum of the round that the server says was accepted after this member's own
        history, as far as it can tell: one that did not take part in it cannot. If it is not, this raises."""
        if not self.checks:
            return False
        layout, accepted, tag = own.layout, _whole(config, "accepted"), _whole(config, "tag")
        parts = [field.add(model, field.from_signed(_integers(arrays["rest"], layout.size)))]
        if own.strength.needs_norms:
            parts.append(_elements(arrays["norms"], norm_count(layout)))
        if tag >= field.P:
            raise MessageError("the server's message must give 'tag' as a field element")
        opened = np.concatenate([*parts, np.array([tag], np.uint64)])
        field.check(opened, "the sum that the server announces")
        secagg = SecAggMember(self.identity, self.group, self.memory())
        found = sums.check(secagg, accepted, own.binding(accepted, amplitudes), opened)
        if found is False:
            raise RoundError(
                f"the model that the server announces is not the sum of round {accepted}, in which "
                f"{self.name} took part: the server lies, or a member sent a wrong tag"
            )
        rounded = layout.unflatten(codec.decode(opened[: layout.size], layout.dtype), named(arrays, MODEL))
        if (layout.encode(rounded) != model).any():
            raise RoundError("the model that the server announces is not the sum that it announces with it")
        return found is True

    def _anchor(self, arrays: Arrays) -> Vector | None:
        """From what the server sent, or from disk; it is the manifest's, or none."""
        layout_digest, wanted = self.manifest.terms.layout, self.manifest.terms.anchor
        if "anchor" in arrays:
            anchor = np.ascontiguousarray(arrays["anchor"], np.uint64)
            if anchor_digest(layout_digest, anchor) != wanted:
                raise RecordError("the anchor that the server sends is not the one that the manifest names")
            return anchor
        if self._anchor_path.exists():
            kept: Vector = read_array(self._anchor_path, "an anchor")
            if anchor_digest(layout_digest, kept) == wanted:
                return kept
        return None


def _keep(path: Path, vector: Vector) -> None:
    with replacing(path) as file:
        np.save(file, vector)
