"""A member in a round, without its training: it joins, uploads and answers, and decides each of that by itself.

    side = RoundMember(identity, manifest, layout, share, memory=…)
    side.history = …                        # the models that it accepted
    side.begin(turn)                        # may it take part? before anything is trained
    side.take(result)                       # what training made of the global model
    side.too_strong() or side.ready()       # → server
    side.upload(announcement, …)            # → server
    side.unmask(request)                    # → server

A simulation and the engines are thin around this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Manifest
from quorumark.consortium.shares import ShareFile, ShareInfo
from quorumark.errors import InputError, MessageError, RoundError
from quorumark.field import Stream, Vector
from quorumark.model.layout import ModelLayout
from quorumark.packing import Noise, pack_update
from quorumark.round import checked_sums, links, statements
from quorumark.round.amplitudes import HALVINGS, Amplitudes
from quorumark.round.dither import add_dither, dither_noise, dither_stream
from quorumark.round.group import group_of, word
from quorumark.round.history import History, checks_sums, packing_of
from quorumark.round.mark import (
    Packed,
    TooStrongError,
    check_size,
    check_weights,
    marked_vector,
    may_mark,
    weight_of,
)
from quorumark.round.memory import MemoryState, State, answers_from, apart
from quorumark.round.movement import norm_count, upload_norms
from quorumark.round.optimiser import Taken
from quorumark.round.paper import PaperScale, paper_amplitudes
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.secagg.messages import Plan, Upload
from quorumark.round.statements import Turn
from quorumark.round.update import Update

__all__ = ["RoundMember"]


class RoundMember:
    """One organisation's side of a round.

    `share` is its `ShareFile`, which is checked against the manifest, or (for research) the vector. `mark=False` is for
    a run without the mark, in which all must agree; where the terms have no key, every run is one. `own_key`, signs of
    its own, makes it a member of the baseline in which everybody has a key.
    """

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        layout: ModelLayout,
        share: ShareFile | Vector | None = None,
        *,
        mark: bool = True,
        memory: State | None = None,
        own_key: NDArray[np.int64] | None = None,
    ) -> None:
        mark = mark and manifest.terms.has_key
        self.manifest, self.layout = manifest, layout
        self.group = group_of(manifest)
        self.marks = mark
        self.strength = manifest.terms.strength
        self.secagg = SecAggMember(identity, self.group, memory or self.fresh_memory())
        self.point = self.secagg.point
        if mark and (share is None) == (own_key is None):
            received = "neither" if share is None else "both"
            raise InputError("share", "or own_key must be given to a member that marks, exactly one of them", received)
        if mark and share is not None:
            _check_share(share, manifest, self.point)
        self.history: History | None = None
        self.checks, self.packing = checks_sums(manifest), packing_of(manifest)
        self.has_links = manifest.terms.policy.has_links
        self.history_checked = True  # whether it has seen for itself that its history is what was summed
        self.turn: Turn | None = None
        self._identity = identity
        self._share, self._own_key = share, own_key
        self._scale = PaperScale(self.strength, layout) if self.strength.rule == "paper" else None
        self._result: NDArray[Any] | None = None
        self._measured: Update | None = None  # of that result
        self._closed: frozenset[tuple[str, int]] = frozenset()  # under earlier manifests: groups and draws
        self._joined: dict[str, tuple[int, Amplitudes | None]] = {}
        self._scaled: tuple[int, Vector, Any] | None = None
        self._paper: Amplitudes | None = None

    def fresh_memory(self, after: int = 0) -> MemoryState:
        """For a run in one process. The paper's rule is for research: its scales are summed again in a further try."""
        return MemoryState(self.group, after, simulation=self.strength.rule == "paper")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(point {self.point} of {self.manifest.terms.name!r}, secrets hidden)"

    # --- may it take part? ---

    def begin(self, turn: Turn) -> None:
        """Whether this member may take part in a round, by what the server says about it; an error if not.

        1. The mark is as strong as the state says, or halved because enough members asked for that; that of a sum which
           is made again is as it was.
        2. Under earlier manifests nothing can be opened from this state any more.
        3. It is drawn, and nothing can be opened under earlier draws.
        4. It has not answered from this state, or that sum can never be opened, or it is made again.
        5. Where cohorts are drawn and sums are checked: links led it here (`follow`).
        6. The model moved wherever the last sum was marked, or the operator consents: two sums from the same weights,
           of which one is marked, show the mark.
        """
        history = self._known()
        if not turn.repeats:
            statements.check_halved(self.group, history.state, turn.halvings, turn.strong, turn.draw)
        with self.secagg.state.edit() as memory:
            if self.has_links:
                links.check_reached(memory, history)
            closed = self._check_closed(memory, history, turn)
            self._check_moved(memory, history)
            joined = memory["purposes"].get("model", {}) if memory["round"] == turn.round else {}
            if joined.get("origin") != history.state.hex():  # who has joined a round can answer in no earlier one
                self.secagg.check_free(apart(memory, history.state), history.state, "model", turn, closed)
            if self.has_links and not self._is_free(memory, history.state):
                links.take_part_under(memory, self.manifest)
        self.turn, self._closed = turn, closed

    @property
    def state(self) -> bytes:
        """What the round starts from."""
        return self._known().state

    def _check_closed(self, memory: Mapping[str, Any], history: History, turn: Turn) -> frozenset[tuple[str, int]]:
        if self._is_free(memory, history.state):
            return frozenset()
        found = []
        for manifest in history.unclosed():
            group = group_of(manifest)
            statements.check_closed(group, history.state, turn.closed)
            found += [(group.id.hex(), draw) for draw in range(group.draws)]
        return frozenset(found)

    @staticmethod
    def _is_free(memory: Mapping[str, Any], state: bytes) -> bool:
        """Whether its operator lets it answer once more from a state, or all of it is a simulation."""
        return bool(memory["simulation"] or memory["consents"].get(state.hex()))

    def _check_moved(self, memory: dict[str, Any], history: History) -> None:
        state = history.state
        if history.mark.stood and not self._is_free(memory, state) and not answers_from(memory, state, "model"):
            raise RoundError(
                "in the last sum a tensor was out of range and kept its weights, and the mark was in it: another sum "
                "from the same weights could show the key. A member sent wrong numbers, by mistake or on purpose: find "
                "out who it was. Then every operator lets its member go on from here (quorumark member consent --here)",
                code="round.stood-still",
            )

    # --- from one state to the next, where cohorts are drawn and sums are checked (`round.links`) ---

    @property
    def reached(self) -> bytes:
        """The last state that links led it to; nothing if there is none."""
        return links.reached(self.secagg.state)

    def follow(self, chain: Sequence[links.Link]) -> None:
        """Goes on to the present state of its history, if links lead there."""
        if self.has_links:
            links.reach(self.secagg.state, self._known(), chain)

    def vouch(self, link: links.Link, round_no: int, halvings: int, opened: Vector, level: bytes = b"") -> bytes:
        """Signed: what its history has now is what the sum of a round led to in which this member answered."""
        history, state = self._known(), self.secagg.state
        right = checked_sums.check(state, link.before, self.group, round_no, halvings, opened, level)
        if right is not True or (link.after, link.whole) != (history.state, history.whole):
            raise RoundError(
                f"the sum of round {round_no} is not what member {self.point} took part in, or leads elsewhere",
                code="round.wrong-tag",
            )
        return links.sign_summed(self.secagg, link)

    def second(self, link: links.Link) -> bytes:
        """Signed: this member was drawn with those who say so, and signs no other successor of that state."""
        known = self._known()
        return links.second(self.secagg, link, (*known.earlier, known.manifest))

    def answered(self, state: bytes) -> tuple[int, int]:
        """The last round in which it answered from a state, and its draw; 0 if it did not."""
        with self.secagg.state.edit() as memory:
            given = answers_from(memory, state, "model")
        return (given[-1][0], given[-1][2]) if given else (0, 0)

    def never(self, state: bytes, round_no: int, draw: int = 0) -> bytes:
        """Signed: it has answered nothing from this state in this round (0: under this draw), and never will."""
        return self.secagg.never(state, round_no, draw)

    # --- a round ---

    def take(self, result: Mapping[str, Any]) -> None:
        """What training made of the global model; it is kept until the round is over."""
        self._result = self._measured = None
        if self.turn is not None and self.turn.repeats:
            raise RoundError(
                f"round {self.turn.repeats} is made again from what member {self.point} trained for it",
                code="round.result-kept",
            )
        # NaN, another shape or an overflow stops here, by the tensor's name. A copy: the function may use its own again
        self._result = self.layout.checked(result)

    def take_again(self, result: NDArray[Any]) -> None:
        """The same as one vector, as it was kept."""
        self._result = codec.check(result, name="model")

    @property
    def result(self) -> NDArray[Any]:
        return self._trained()

    def too_strong(self) -> list[bytes]:
        """Signed, if the mark of this round is more than this member's own update hides: it cannot take part. A
        statement for each number of halvings that is not enough for it, so that no try is lost to find that out."""
        turn, amplitudes, said = self._begun(), self._amplitudes("model"), list[bytes]()
        if amplitudes is None or turn.repeats:
            return said
        update, state = self._update(), self._known().state
        for halvings in range(turn.halvings, HALVINGS):
            if halvings > turn.halvings:
                amplitudes = self._known().amplitudes(halvings)
            if not amplitudes.marks:
                break
            try:
                check_size(self.strength, amplitudes, update.before, update.after, update.distances)
                break
            except TooStrongError:
                said.append(statements.sign(self._identity, self.group, "strong", state, word(halvings)))
        return said

    def ready(self, purpose: str = "model") -> bytes:
        """Joins the round, bound to what this member itself knows of the history and the strength."""
        turn, amplitudes = self._begun(), self._amplitudes(purpose)
        self._joined[purpose] = turn.round, amplitudes
        return self.secagg.ready(
            turn.round,
            self._known().binding(turn.round, amplitudes, turn.repeats),
            self.length(purpose),
            purpose,
            origin=self._known().state,
            turn=turn,
            closed=self._closed,
            level=self._known().level(self._update()) if purpose == "model" and self.packing.packs else b"",
        )

    def _amplitudes(self, purpose: str) -> Amplitudes | None:
        """The mark of the round that has begun."""
        if not self.marks or purpose != "model":
            return None
        if self._scale is None:
            return self._known().amplitudes(self._begun().halvings)
        if self._paper is None or self._paper.round != self._known().round:
            raise RoundError(f"the scale of round {self._begun().round} has not been summed", code="round.no-scale")
        return self._paper

    @property
    def is_marked(self) -> bool:
        """Whether the round starts from a model with a mark in it, or puts one in."""
        amplitudes = self._amplitudes("model")
        return (amplitudes is not None and amplitudes.marks) or bool(self._known().mark.rho)

    def length(self, purpose: str = "model") -> int:
        """Of the vectors that are summed: the model, the members' norms where the mark needs them, and a tag."""
        if purpose == "scale":
            return self.scale_length()
        model = self.packing.length(self.layout)
        return model + (norm_count(self.layout) if self.has_norms else 0) + (1 if self.checks else 0)

    @property
    def has_norms(self) -> bool:
        """Whether it uploads the norms of its update: not in a run without the mark, which has no use for them."""
        return self.marks and self.strength.needs_norms

    def said(self) -> tuple[bytes, bytes]:
        """What goes with *ready* where sums are checked: its part of the round's key, sealed, and whether it vouches.

        Both are for the others of the round, and bound to what this member joined it with.
        """
        if not self.checks:
            return b"", b""
        round_no, amplitudes = self._joined["model"]
        binding = self._known().binding(round_no, amplitudes, self._begun().repeats)
        boxes = checked_sums.seal_keys(self._identity, self.group, round_no, binding)
        checked = self.history_checked or self.has_links
        return boxes, checked_sums.vouch(self._identity, self.group, round_no, binding) if checked else b""

    def upload(self, announcement: bytes, boxes: Sequence[bytes] = (), vouches: Sequence[bytes] = ()) -> Upload:
        """The weighted model, this member's part of the mark and its dither, under masks: exactly what it joined the
        round for.

        Where sums are checked, `boxes` and `vouches` are what the members of the announced set said (`said`): their
        boxes for this member, and their vouchers, in the set's order.
        """
        plan = self.secagg.plan(announcement)
        joined, amplitudes = self._joined.get(plan.purpose, (0, None))
        if joined != plan.round:
            raise RoundError(
                f"member {self.point} has not joined round {plan.round} ({plan.purpose!r})", code="round.not-joined"
            )
        update = self._update()
        if plan.purpose == "scale":
            after = codec.encode(update.after, name="model")
            return self.secagg.upload(plan, self._own_scale(plan.round, update.before, after))
        if len(plan.level) not in (0, self._known().tensors):
            raise MessageError("a member's level of units is for another model", code="message.malformed")
        levels = dict(zip(plan.members, plan.levels, strict=True))
        if alone := self._known().mark.unbacked(levels, self.group.blocking):
            raise RoundError(
                f"{self.group.names(sorted(alone))} needs wider units than fewer than {self.group.blocking} members "
                "may ask for, and must be left out",
                code="round.level-alone",
            )
        check_weights(self.manifest, plan.members)
        exact = weight_of(self.manifest, plan.members, self.point)
        if amplitudes is not None:
            amplitudes = self._known().in_units(amplitudes, plan.level)
        marks = amplitudes is not None and may_mark(self.strength, self.manifest, amplitudes, plan.members)
        if amplitudes is not None and marks:
            check_size(self.strength, amplitudes, update.before, update.after, update.distances)
        whole = np.empty(self.length(), np.uint64)
        y = whole[: self.packing.length(self.layout)]
        norms = whole[y.size : whole.size - self.checks]
        self._fill(y, norms, plan, update, exact, amplitudes if marks else None)
        known = self._add_tag(whole, plan, boxes, vouches) if self.checks else None
        return self.secagg.upload(plan, whole, marked=marks, known=known)

    def _fill(
        self, y: Vector, norms: Vector, plan: Plan, update: Update, exact: Fraction, amplitudes: Amplitudes | None
    ) -> None:
        """The vector but for its tag: the weighted model, or the weighted update in units if it is packed; the norms of
        the update; the mark and the dither, if there are `amplitudes`."""
        history, layout, before, after = self._known(), self.layout, update.before, update.after
        packed = history.packed(plan.level) if self.packing.packs else None
        if self.has_norms:
            spans = () if packed is None else packed.spans
            norms[:] = upload_norms(layout, before, after, exact, spans, update.squares)
        dither = None
        if amplitudes is not None and self.strength.dither:
            dither = amplitudes, self.strength.dither, exact, dither_stream(self._identity, history.state)
        if packed is None:
            codec.encode(after, float(exact), y, name="model")
            if dither is not None:
                add_dither(y, *dither)
        else:
            noise = None if dither is None else dither_noise(*dither)
            if amplitudes is not None and self._own_key is not None:  # rounded to units with the update
                noise = _with_own_marks(noise, amplitudes, self._own_key, float(exact))
            pack_update(after, before, float(exact), packed.spans, packed.count, y, noise=noise)
        if amplitudes is None:
            return
        if self._own_key is None:
            self._add_mark(y, amplitudes, plan.members, packed)
        elif packed is None:
            _own_mark(y, amplitudes, self._own_key, float(exact))

    def _add_tag(self, whole: Vector, plan: Plan, boxes: Sequence[bytes], vouches: Sequence[bytes]) -> dict[str, Any]:
        """After the vector. What is to be kept for the sum of this round: its key."""
        if len(vouches) != len(plan.members):
            raise MessageError(
                "the server must hand on what every member of the announced set vouches for", code="message.incomplete"
            )
        checked_sums.check_vouchers(self.group, plan.round, plan.binding, dict(zip(plan.members, vouches, strict=True)))
        self.history_checked = True
        key = checked_sums.round_key(self._identity, self.group, plan.round, plan.binding, plan.members, boxes)
        whole[-1] = checked_sums.tag(key, whole[:-1], first=self.point == plan.members[0])
        return checked_sums.kept(self.group, self._known().state, self._begun(), key, plan.level)

    def noise(self, members: Sequence[int]) -> tuple[Fraction, Stream]:
        """Its weight among these members and what its dither in their sum from the present state is made from. Secret:
        for the tracer of those whose noise it is (`round.survival`)."""
        return weight_of(self.manifest, members, self.point), dither_stream(self._identity, self._known().state)

    def check_sum(self, opened: Vector, level: bytes = b"") -> bool | None:
        """Whether this is the sum of the round from the present state; None if this member cannot say."""
        turn, state = self._begun(), self._known().state
        return checked_sums.check(self.secagg.state, state, self.group, turn.round, turn.halvings, opened, level)

    def unmask(self, request: bytes) -> bytes:
        return self.secagg.unmask(request)

    def accept(
        self,
        round_no: int,
        encoded: Vector,
        embedded: Amplitudes | None,
        norms: Vector | None = None,
        level: bytes = b"",
        *,
        stood: bool = False,
        taken: Taken | None = None,
        halvings: int = 0,
    ) -> None:
        """The round's sum is the global model now, or what the server optimiser made of it."""
        about = {"level": level, "stood": stood, "taken": taken, "halvings": halvings}
        self._known().accept(round_no, encoded, embedded, norms, **about)  # type: ignore[arg-type]
        self._scaled, self._result, self._measured = None, None, None

    def give_up(self) -> None:
        """The round led to nothing: what belongs to it is forgotten, and the paper's average is as it was."""
        if self._scaled is not None and self._scale is not None:
            self._scale._ema = self._scaled[2]
        self._scaled, self._result, self._measured = None, None, None

    # --- the paper's rule: a sum of scales first ---

    @property
    def average(self) -> list[int] | None:
        """The running average that the paper's rule has at this member."""
        return None if self._scale is None else self._scale._ema

    @average.setter
    def average(self, value: list[int] | None) -> None:
        if self._scale is not None:
            self._scale._ema = value

    def take_scales(self, total: Vector, members: tuple[int, ...]) -> Amplitudes:
        """From the opened sum of all scales: the strength of this round."""
        key, round_no = self.manifest.terms.key, self._known().round
        found = paper_amplitudes(self.strength, self.layout, key, round_no, total, len(members))
        self._paper = self._known().mark.in_units(found)
        return self._paper

    def scale_length(self) -> int:
        carriers = sum(1 for spec, _ in self.layout.spans("carrier") if spec.size)
        return carriers if self.strength.per == "tensor" else 1

    def _own_scale(self, round_no: int, before: Vector, after: Vector) -> Vector:
        """Moved on once a round, however many attempts it takes."""
        if self._scale is None:
            raise RoundError("a scale is summed under the rule 'paper' only", code="round.other-rule")
        if self._scaled is None or self._scaled[0] != round_no:
            ema = self._scale._ema
            self._scaled = round_no, self._scale.scale(before, after), ema
        return self._scaled[1].copy()

    # --- what it knows ---

    def _add_mark(
        self, y: Vector, amplitudes: Amplitudes, members: tuple[int, ...], packed: Packed | None = None
    ) -> None:
        if self._share is None:
            raise RoundError(
                f"member {self.point} has no share: without it the sum would be garbage and show others'",
                code="round.no-share",
            )
        pieces: Iterable[Vector] = self._share.pieces() if isinstance(self._share, ShareFile) else [self._share]
        marked_vector(y, amplitudes, self.manifest, members, self.point, pieces, packed)

    def _known(self) -> History:
        if self.history is None:
            raise RoundError(
                f"member {self.point} knows no history: give it one that starts from the initial model",
                code="round.no-history",
            )
        return self.history

    def _begun(self) -> Turn:
        if self.turn is None:
            raise RoundError(f"no round has begun for member {self.point}", code="round.not-begun")
        return self.turn

    def _update(self) -> Update:
        """What it trained, beside the model that the round starts from."""
        after, before = self._trained(), self._known().mark.model
        known = self._measured
        if known is None or known.after is not after or known.before is not before:
            known = self._measured = Update(self.layout, before, after)
        return known

    def _trained(self) -> NDArray[Any]:
        if self._result is None:
            raise RoundError(f"member {self.point} has not trained in this round", code="round.not-trained")
        return self._result


def _check_share(share: ShareFile | Vector, manifest: Manifest, point: int) -> None:
    """A wrong share, or one of another epoch, would turn the sum into garbage that shows the others' shares."""
    if isinstance(share, ShareFile):
        if share.info != ShareInfo.under(manifest, point, share.info.block):
            raise InputError("share", "must be this member's, of the manifest's epoch", f"epoch {share.info.epoch}")
        if share.root().hex() != manifest.roots[point - 1]:
            raise InputError("share", "must be what the manifest's root commits to")
    elif not isinstance(share, np.ndarray) or share.shape != (manifest.share_length,):
        received = getattr(share, "shape", type(share).__name__)
        raise InputError("share", f"must be a vector of {manifest.share_length} elements", received)


def _own_mark(y: Vector, amplitudes: Amplitudes, key: NDArray[np.int64], weight: float) -> None:
    """The baseline's mark: a_k·S ⊙ key_k, as if the member had marked its own model."""
    carrying = amplitudes.layout.carrying()
    marks = field.from_signed(_own_marks(amplitudes, key, weight))
    y[carrying] = field.add(np.ascontiguousarray(y[carrying]), marks)


def _with_own_marks(noise: Noise | None, amplitudes: Amplitudes, key: NDArray[np.int64], weight: float) -> Noise:
    """The same for a weighted update, beside its noise."""
    marks = np.zeros(amplitudes.layout.size, np.int64)
    marks[amplitudes.layout.carrying()] = _own_marks(amplitudes, key, weight)

    def write(place: int, out: NDArray[np.int64]) -> bool:
        if noise is None or not noise(place, out):
            out[:] = 0
        out += marks[place : place + out.size]
        return True

    return write


def _own_marks(amplitudes: Amplitudes, key: NDArray[np.int64], weight: float) -> NDArray[np.int64]:
    return np.round(amplitudes.vector.astype(np.float64) * weight).astype(np.int64) * key
