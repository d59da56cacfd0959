"""The server's side of a run, whatever carries the messages (docs/engines.md).

    server = RoundServer(manifest, layout, model, run="17")
    each round:
        weights = server.prepare(ask, model)                      # what must be settled first; a sum, if one was open
        config, arrays = server.offer(model)                      # to everybody, with the model
        server.take_ready(point, ready, boxes, vouch)             # from everybody who trained; or take_strong
        server.announce()                                         # server.asked(point) goes to each of server.members
        server.take_upload(point, head, vector)
        while server.missing: server.retry()                      # server.asked(point) to server.members again
        server.take_answer(point, message)                        # server.request(point) asks for it
        weights = server.finish()                                 # Σ a_k·θ_k + S ⊙ τ: what the strategy works with

The next `offer` is told the model that the strategy made of it. A RoundError gives a round up: the last model stands.

From each model one sum is opened. Before the server asks for the first answer it writes what it needs to open the sum
later (nothing secret): if it dies, or too few answer, `prepare` asks again. What cannot be opened any more is given up
by the members (statements "never"), or made again from the same results. Where cohorts are drawn, and too few of one
come, `prepare` has it drawn anew, once enough of the first have said that they answer nothing more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.canonical import canonical, parse
from quorumark.checks import DAMAGED, is_hex
from quorumark.consortium.home import read_array, read_file
from quorumark.consortium.records import Manifest
from quorumark.errors import MessageError, QuorumarkError, RecordError, RoundError
from quorumark.field import Vector
from quorumark.files import replacing, write_private
from quorumark.model.layout import ModelLayout, read_safetensors, write_safetensors
from quorumark.round import checked_sums, statements
from quorumark.round.amplitudes import Amplitudes, MarkState
from quorumark.round.applied import OPTIMISER, optimiser_vectors, read_vectors, write_vectors
from quorumark.round.chain import Chain
from quorumark.round.group import FAR, group_of, word
from quorumark.round.history import History, Settled, checks_sums
from quorumark.round.links import Link, write_links
from quorumark.round.movement import norm_count
from quorumark.round.open_sum import OpenSum, octets
from quorumark.round.outlook import NOTHING, Outlook, outlook
from quorumark.round.past import Past
from quorumark.round.secagg.messages import Upload, pack
from quorumark.round.secagg.server import SecAggServer
from quorumark.round.statements import Said, Turn
from quorumark.round.survey import HANDED_OUT, SUMMED, Ask, ask_where, candidates
from quorumark.round.survival import Survival

__all__ = ["Ask", "RoundServer"]

Config = dict[str, Any]
Weights = Mapping[str, Any]
_RUN = "quorumark-engine-run/v2"
_MEASURED = 5  # every so many rounds


class RoundServer:
    """One run. With a `folder`, a run whose server died goes on where it was.

    `after`: the last round that these members may have joined, under whatever run; numbers never repeat. `earlier`: the
    manifests before this one. `marks=False` is for a run without the mark, as all runs of members without a key are.
    """

    def __init__(
        self,
        manifest: Manifest,
        layout: ModelLayout,
        model: Weights,
        *,
        run: str = "",
        after: int = 0,
        seed: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        earlier: tuple[Manifest, ...] = (),
        marks: bool = True,
    ) -> None:
        self.manifest, self.layout, self.group = manifest, layout, group_of(manifest)
        self.like, self.round_no, self.marks = dict(model), after, marks and manifest.terms.has_key
        self.checks = checks_sums(manifest)
        self.resumed: dict[str, Any] | None = None
        self.notes: dict[str, Any] = {}  # the caller's own, kept with the run
        self.planned = manifest.terms.strength.rounds  # how many rounds there will be in all; 0: nobody said
        self._run, self._seed = run, seed
        self._folder = None if folder is None else Path(folder)
        self._earlier = earlier
        self._settled: Settled | None = None  # what the last sum led to, until it is accepted
        self._opened: Vector | None = None  # that sum, with its tag, where sums are checked
        self._under = manifest  # it was summed under
        self.level = b""  # of the units of the sum that was opened last (`round.units`)
        self._last: dict[str, Any] = {}  # of the last accepted sum: what members check it by
        self._turn = Turn(max(1, after))
        self._past = Past(manifest, self.group, b"")
        self._nonces: dict[int, str] = {}
        self._said: dict[int, tuple[bytes, bytes]] = {}  # boxes and vouchers of those who are ready
        self._announcement = b""
        self._sum: SecAggServer | None = None  # the round under way
        self._open: OpenSum | None = None  # from the present model: members were asked for its answers
        self._amplitudes: Amplitudes | None = None
        self.chain = Chain((*earlier, manifest), self._folder) if manifest.terms.policy.has_links else None
        if self._folder is not None and (self._folder / "run.json").exists():
            self._resume()
        else:
            self._anchor = layout.encode(model)
            self.history = History(manifest, layout, self._anchor, earlier)
            self.history.buffers = layout.buffers_digest(model) if self.checks else b""

    # --- before a round ---

    def prepare(self, ask: Ask, model: Weights) -> dict[str, Any] | None:
        """Accepts the model that was made of the last sum, and settles what earlier rounds from it left open. A sum
        that opens now is this round's result. A RoundError says what the run is waiting for.
        """
        self.close(model)
        self.link(ask)
        past = self._current_past()
        if self._open is not None:
            server = self._open.server
            if self._ask_again(server, ask):
                self.round_no += 1  # this round is spent on it
                return self.finish()
            if not self._ask_to_give_up(self._open, past, ask):
                raise RoundError(
                    f"the sum of round {server.plan.round} is open: {server.answers} members have answered, and "
                    f"{server.group.quorum} must; it is asked for again in the next round",
                    code="round.sum-open",
                )
            self._drop_open()
        past.settle(ask, self.history.unclosed())
        return None

    def link(self, ask: Ask) -> None:
        """Where cohorts are drawn and sums are checked: what the last sum led to, signed by those who were drawn. A
        RoundError says for whom the next round waits."""
        if self.chain is not None and self.chain.waiting is not None:
            self.chain.gather(ask, *self._about_sum())

    def _ask_again(self, server: SecAggServer, ask: Ask) -> bool:
        """Whether the sum can be opened, once all members were asked again."""
        requests = {str(x): server.request(x).hex() for x in server.plan.members}
        for point, said in ask("again", {"requests": json.dumps(requests)}).items():
            there = int(said.get("point-there", point))
            if "answer" in said and there in server.missing:
                try:
                    server.take_answer(there, said["answer"])
                except QuorumarkError:
                    continue  # `excluded` says why
        return server.answers >= server.group.quorum

    def _ask_to_give_up(self, left: OpenSum, past: Past, ask: Ask) -> bool:
        """Whether enough members say that they never answer for an open sum."""
        if left.manifest.digest() == self.manifest.digest():
            past.drawn[left.server.plan.round] = left.server.draw
            past.gather(ask, left.server.plan.round)
            return past.is_given_up(left.server.plan.round)
        return past.close_all(ask, left.manifest)

    @property
    def cohort(self) -> tuple[int, ...]:
        """Who is drawn from the present model."""
        return self._current_past().cohort

    def _current_past(self) -> Past:
        if self._past.state != self.history.state:
            self._past = Past(self.manifest, self.group, self.history.state)
        return self._past

    # --- a round ---

    def offer(self, model: Weights) -> tuple[Config, dict[str, NDArray[Any]]]:
        """Begins the next round from a model: what every member must be told besides it."""
        self.advance(model)
        self.begin()
        history = self.history
        config: Config = {
            "manifest": self.manifest.digest().hex(),
            "run": self._run,
            "round": self.round_no,
            **self._about_state(),
            "turn": self._turn.to_bytes(),
            "nonces": json.dumps({str(x): nonce for x, nonce in self._nonces.items()}),
        }
        if self._seed is not None:
            config["seed"] = self._seed
        if self._measures:
            config["measure"] = True
        arrays: dict[str, NDArray[Any]] = {"layout": octets(self.layout.to_bytes())}
        if self._last:
            about, summed = self._about_sum()
            config, arrays = config | about, arrays | summed
        if self.chain is not None:  # most have reached the state before; the others ask for more
            arrays["links"] = octets(write_links(self.chain.into(history.state)))
        if self.announces_sum:
            config["names"] = json.dumps(list(self.like))  # training may depend on the order of the tensors
        return config, arrays

    @property
    def _measures(self) -> bool:
        """Whether members are asked what their noise says is left of the mark: that takes them a while."""
        return self.marks and (self.round_no % _MEASURED == 0 or self.history.round >= self.planned > 0)

    def _about_state(self) -> Config:
        return {"accepted": self.history.mark.round, "history": self.history.mark.digest().hex()}

    def _about_sum(self) -> tuple[Config, dict[str, NDArray[Any]]]:
        """What members check the present model by."""
        about = {**self._about_state(), **{f"sum-{name}": self._last[name] for name in HANDED_OUT}}
        return about, {name: self._last[name] for name in SUMMED if self._last[name] is not None}

    @property
    def announces_sum(self) -> bool:
        """Whether the model of the round goes to members as the sum that it comes from: they compute it themselves.
        Where sums are not checked, and in the first round, it goes along as it is."""
        return self.checks and bool(self._last)

    def catch_up(self, needs: str, since: str = "") -> dict[str, NDArray[Any]]:
        """For a member that `needs` the "model", because it missed rounds, the "anchor" as well, or only "links" (all
        of them are from the state `since`): what it must be told besides the model and the offer."""
        told: dict[str, NDArray[Any]] = {}
        if self.chain is not None:
            told["links"] = octets(write_links(self.links(since)))
        if needs == "links":
            return told
        told["state"] = octets(self.history.mark.to_bytes())
        told |= {OPTIMISER + name: vector for name, vector in self.history.mark.vectors().items()}
        return told | ({"anchor": self._anchor} if needs == "anchor" else {})

    def links(self, since: str = "") -> list[Link]:
        """From a state, in hex, to the present one; from as early as there are any, if it is not on the way."""
        state = bytes.fromhex(since) if is_hex(since, 32) else b""
        return [] if self.chain is None else self.chain.since(state, self.history.state)

    def advance(self, model: Weights) -> Turn:
        """Begins the next round: accepts the model that was made of the last sum, if there is one, and takes a turn."""
        if self._settled is not None:
            self.accept(model)
        self.round_no += 1
        self.save(model)
        history, past = self.history, self._current_past()
        if history.warming and history.round > history.strength.warmup_rounds:
            raise RoundError(
                "the warm-up rounds are over: all members must sign the amendment that names the anchor",
                code="round.anchor-not-signed",
            )
        repeats = max((r for r in past.standing() if past.drawn[r] == past.draw), default=0)
        halvings = past.halved.get(repeats, 0) if repeats else past.halvings
        self._turn = Turn(
            self.round_no,
            halvings,
            repeats,
            past.never,
            past.strong,
            past.closed,
            past.newer,
            past.draw,
        )
        self._amplitudes = None
        if self.marks and history.strength.rule != "paper":
            self._amplitudes = history.amplitudes(halvings)
        self._sum = None
        self._said.clear()
        return self._turn

    @property
    def turn(self) -> Turn:
        return self._turn

    def begin(self, purpose: str = "model", amplitudes: Amplitudes | None = None) -> None:
        """A sum of the round that has begun; `amplitudes` where they come from a sum themselves (the paper's rule)."""
        if amplitudes is not None:
            self._amplitudes = amplitudes
        marks = self._amplitudes if purpose == "model" else None
        binding = self.history.binding(self.round_no, marks, self._turn.repeats)
        about = self.group, self.round_no, binding, self.length(purpose), purpose
        tensors = self.history.tensors if purpose == "model" else 0
        drawn, unbacked = self._turn.draw, partial(self.history.mark.unbacked, backing=self.group.blocking)
        self._sum = SecAggServer(*about, origin=self.history.state, draw=drawn, tensors=tensors, unbacked=unbacked)

    def length(self, purpose: str = "model") -> int:
        if purpose != "model":
            carriers = sum(1 for spec, _ in self.layout.spans("carrier") if spec.size)
            return carriers if self.history.strength.per == "tensor" else 1
        norms = norm_count(self.layout) if self._has_norms else 0
        return self.history.packing.length(self.layout) + norms + (1 if self.checks else 0)

    @property
    def _has_norms(self) -> bool:
        return self.marks and self.history.strength.needs_norms

    @property
    def anchor(self) -> Vector:
        """For members who join a run that is under way and never saw it."""
        return self._anchor

    def take_ready(self, point: int, message: bytes, boxes: bytes = b"", vouch: bytes = b"") -> None:
        """What a member said when it was ready; `boxes` and `vouch` where sums are checked."""
        server, said = self._running(), (bytes(boxes), bytes(vouch))
        if self.checks and server.plan.purpose == "model":
            checked_sums.check_said(self.group, self.round_no, server.plan.binding, point, *said)
        server.take_ready(point, message)
        self._said[point] = said

    def take_strong(self, point: int, said: Sequence[bytes]) -> None:
        """A member says that the mark of this round is too strong for its update, and perhaps that it still is once it
        is halved: it does not take part."""
        past = self._current_past()
        for level, message in enumerate(said[: statements.HALVINGS], self._turn.halvings):
            if statements.signers(self.group, "strong", past.state, word(level), {point: message}, past.draw):
                past.strong.setdefault(level, {})[point] = message

    def take_answered(self, _: int, round_no: int, members: tuple[int, ...], halvings: int = 0, draw: int = 0) -> None:
        """A member does not take part because it has answered in an earlier round from this model, over these members,
        with a mark that was halved so many times, of a cohort that was drawn anew so many times.

        That is the member's word: what follows from it is checked by all who take part.
        """
        if round_no > self.round_no:  # a lie: the others would leave all rounds before that one
            return
        past = self._current_past()
        past.answered[round_no], past.halved[round_no] = tuple(members), max(0, min(halvings, statements.HALVINGS))
        past.drawn[round_no] = max(0, min(draw, self.group.draws - 1))

    def take_nonce(self, point: int, nonce: str) -> None:
        """A member's memory was made anew: the others must see this before it may take part."""
        self._nonces[point] = nonce

    def take_newer(self, point: int, said: Said) -> None:
        """A member says that the present model is newer than others' nonces."""
        for other, message in said.items():
            self._current_past().newer.setdefault(other, {})[point] = message

    def late(self) -> dict[int, Config]:
        """Members whose memory was made anew and who may take part now, since enough others have said in this round
        that the model is newer; what they must be told in place of what they were offered."""
        past, found = self._current_past(), {}
        for point, nonce in self._nonces.items():
            said = past.newer.get(point, {})
            if (
                point not in self._said
                and len(statements.signers(self.group, "newer", past.state, bytes.fromhex(nonce), said, past.draw))
                >= self.group.closing
            ):
                found[point] = {"turn": replace(self._turn, newer=past.newer).to_bytes()}
        return found

    def announce(self) -> bytes:
        """Fixes the set U. Where too few are ready because the mark is too strong for them, it is halved next time."""
        past, server = self._current_past(), self._running()
        try:
            if self._turn.repeats:
                self._check_repeated(server, past)
            self._announcement = server.announce()
        except RoundError:
            complaints = past.complaints(self._turn.halvings)
            if len(complaints) < self.group.blocking or past.halvings != self._turn.halvings:
                past.short = True
                raise
            past.halvings = past.asked_halvings
            raise RoundError(
                f"the mark of round {self.round_no} is too strong for {self.group.names(complaints)}: it is halved in "
                "the next round",
                code="round.too-strong",
            ) from None
        return self._announcement

    def _check_repeated(self, server: SecAggServer, past: Past) -> None:
        members = past.answered.get(self._turn.repeats, ())
        missing = set(members) - set(server.ready)
        if missing or not members:
            raise RoundError(
                f"members have answered in round {self._turn.repeats}, and its sum must be made again by the same "
                f"ones; not ready: {self.group.names(sorted(missing)) or 'all'}. If one of them is lost for ever, the "
                "operators of the others must consent to another sum (quorumark member consent)",
                code="round.repeat-waits",
            )
        server.leave_out(set(server.ready) - set(members))

    def announced_to(self, point: int) -> tuple[bytes, list[bytes], list[bytes]]:
        """For the upload of a member of the announced set: the announcement, its boxes, and everybody's vouchers."""
        if not self.checks:
            return self._announcement, [], []
        said = [self._said[x] for x in self.members]
        return (
            self._announcement,
            [checked_sums.box_for(boxes, point) for boxes, _ in said],
            [vouch for _, vouch in said],
        )

    def asked(self, point: int) -> Config:
        """The same as an engine carries it."""
        announcement, boxes, vouches = self.announced_to(point)
        config: Config = {"round": self.round_no, "announcement": announcement}
        return config | ({"boxes": pack(boxes), "vouches": pack(vouches)} if self.checks else {})

    def take_upload(self, point: int, head: bytes, vector: Vector) -> int:
        """How many bytes it was."""
        self._running().take_upload(point, Upload(head, vector))
        return len(head) + vector.nbytes

    def retry(self) -> bytes:
        try:
            self._announcement = self._running().retry()
        except RoundError:
            self._current_past().short = True
            raise
        return self._announcement

    def request(self, point: int) -> bytes:
        """What to ask a member of U. From the first request on this sum is the one from this model."""
        server = self._running()
        made = server.request(point)
        if server.plan.purpose == "model" and (self._open is None or self._open.server is not server):
            self._open = OpenSum(server, self._turn.halvings, self.manifest, self._amplitudes)
            self._save_open()
        return made

    def take_answer(self, point: int, message: bytes) -> None:
        self._running().take_answer(point, message)

    @property
    def members(self) -> tuple[int, ...]:
        return self._running().plan.members

    @property
    def missing(self) -> tuple[int, ...]:
        return self._running().missing

    @property
    def attempt(self) -> int:
        return self._running().plan.attempt

    @property
    def disputed(self) -> dict[int, tuple[int, ...]]:
        return self._running().disputed

    def open(self) -> Vector:
        """The sum that is under way, as it is."""
        return self._running().finish()

    def finish(self) -> dict[str, Any]:
        """What the opened sum makes of the model, as tensors."""
        left = self._open
        if left is not None:
            self._sum, self._amplitudes = left.server, left.amplitudes
            self._turn = Turn(left.server.plan.round, left.halvings, draw=left.server.draw)
        opened = self._running().finish()
        self.level = self._running().plan.level
        whole = opened[: len(opened) - self.checks]
        self._opened, self._under = opened, self.manifest if left is None else left.manifest
        self._settled = self.history.settle(
            whole, self.like, self._amplitudes, norms=self._has_norms, level=self.level, under=self._under
        )
        return self._settled.weights

    @property
    def has_settled(self) -> bool:
        """Whether a sum is waiting to be accepted."""
        return self._settled is not None

    @property
    def widened(self) -> dict[int, int]:
        """Who of its members needed wider units, and for how many tensors."""
        return {x: sum(map(bool, level)) for x, level in self._running().levels.items() if x in self.members}

    @property
    def alone(self) -> tuple[int, ...]:
        """Who is left out because too few need units as wide."""
        return tuple(sorted(self._running().alone))

    @property
    def settled(self) -> Settled:
        """What the sum that was finished led to."""
        if self._settled is None:
            raise RoundError("no sum is waiting to be accepted", code="round.no-sum")
        return self._settled

    @property
    def opened(self) -> Vector:
        """That sum, with its tag where sums are checked."""
        if self._opened is None:
            raise RoundError("no sum is waiting to be accepted", code="round.no-sum")
        return self._opened

    @property
    def accepted(self) -> int:
        """How many rounds were accepted since the anchor."""
        return self.history.mark.round - (0 if self.history.warming else self.history.strength.warmup_rounds)

    @property
    def marked(self) -> bool:
        return self._settled is not None and self._settled.embedded is not None

    @property
    def c(self) -> float:
        return self._amplitudes.c / (1 << 32) if self.marked and self._amplitudes is not None else 0.0

    @property
    def silenced(self) -> float:
        """The share of the carriers without a mark in this round because something jumped in the last one."""
        return self.history.mark.silenced if self.marks else 0.0

    def outlook(self, told: Survival | None = None) -> Outlook:
        """What a verification should find of the model that the last sum leads to, or of the present one; `told` is
        what members' noise says is left of the mark."""
        return outlook(self._next_mark(), self.manifest.terms, self.planned, told) if self.marks else NOTHING

    def _next_mark(self) -> MarkState:
        """The mark's state after the last sum, taken as it is: a strategy that adds noise of its own is not asked."""
        settled, history = self._settled, self.history.copy()
        if settled is not None:
            summed = (settled.encoded, settled.embedded, settled.norms, self._under.digest().hex(), self.level)
            history.accept(history.round, *summed, stood=settled.stood, taken=settled.taken)
        return history.mark

    def accept(self, model: Weights) -> None:
        """The model that the strategy made of the last sum is the global one now."""
        settled, encoded = self.settled, self.settled.encode(self.layout, model)
        history, halvings = self.history, self._turn.halvings
        if self.checks:
            if encoded is not settled.encoded and (encoded != settled.encoded).any():
                raise RoundError(
                    "the model is not what the members make of the sum of the last round, and they check that: use "
                    "a strategy that takes the sum as it is, such as FedAvg, or name a server optimiser in the terms "
                    "(quorumark consortium create --policy optimiser=…), which the members then compute",
                    code="round.not-the-sum",
                )
            self._last = {"sum": self.opened, "norms": None}  # which has the norms and the tag in it
        else:
            self._last = {"sum": None, "norms": settled.norms}
        under = self._under.digest().hex()
        self._last |= {"round": self._turn.round, "halvings": halvings, "under": under}
        self._last |= {"held": json.dumps(settled.held), "level": self.level.hex()}
        summed, before = (encoded, settled.embedded, settled.norms, under, self.level), history.state
        history.accept(history.round, *summed, stood=settled.stood, taken=settled.taken, halvings=halvings)
        if self.chain is not None:
            self.chain.begin(Link(before, under, self._turn.draw, history.state, history.whole))
        self.like = dict(model)
        self._settled = self._opened = self._open = None

    def _running(self) -> SecAggServer:
        if self._sum is None:
            raise RoundError("no round is under way", code="round.not-begun")
        return self._sum

    # --- a run that goes on ---

    def close(self, model: Weights) -> None:
        """The run is over, with this model: a later run may go on from it."""
        if self._settled is not None:
            self.accept(model)
            self.save(model)

    def survey(self, ask: Ask, *, go_on: bool = False) -> None:
        """Asks where the members are, before the first round of a run that has no files: which numbers are taken, and
        in which rounds from the present model they have answered. With `go_on` the run goes on from the newest model
        that t members name as their last; the others check it, as if this server had said it.
        """
        said = ask_where(ask, self.history.state)
        if go_on:
            self._go_on(ask)
            said = ask_where(ask, self.history.state)
        start = self.round_no
        for point, where in said.items():
            if where.round - start < FAR:
                self.round_no = max(self.round_no, where.round)
            if where.answered and where.accepted <= self.history.mark.round:  # it has not gone on from there
                self.take_answered(point, where.answered, where.over, where.halvings, where.draw)

    def _go_on(self, ask: Ask) -> None:
        replies = ask("state", {"of-state": self.history.state.hex(), "with-model": True})
        for reply in candidates(replies.values(), self.history.mark.round, self.names_needed):
            try:
                self._adopt(reply, reply["arrays"])
            except (QuorumarkError, KeyError, TypeError, ValueError):
                continue  # the next one: this server has another anchor or layout than they
            break
        if self.chain is not None:
            self.chain.take(said.get("links") for said in replies.values())
            self.chain.wait_for(self.history.state, self.history.whole)

    @property
    def names_needed(self) -> int:
        """How many members must name a state before a run goes on from it: t, of which at most t − 1 lie."""
        return self.group.threshold

    def _adopt(self, said: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        model = {name: np.array(arrays[f"model:{name}"]) for name in self.like}
        encoded = self.layout.encode(model)
        history = History(self.manifest, self.layout, self._anchor, self._earlier)
        mark = history.read_mark(arrays["state"].tobytes(), encoded, self._anchor, optimiser_vectors(arrays))
        buffers = self.layout.buffers_digest(model) if self.checks else b""
        self._last = {name: said[f"sum-{name}"] for name in HANDED_OUT}
        self._last |= {name: arrays.get(name) for name in SUMMED}
        self.history, self.like, self.resumed = history.restored(mark, buffers), model, model

    def save(self, model: Weights) -> None:
        """The model first, then the state that names it: a crash leaves the round before, or this one."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        anchor = self._folder / "anchor.npy"
        if not anchor.exists():
            with replacing(anchor) as file:
                np.save(file, self._anchor)
        number = self.history.mark.round
        name, summed = f"model-{number}.safetensors", f"sum-{number}.npz"
        if not (self._folder / name).exists():
            write_safetensors(model, self._folder / name)
        vectors = self._folder / f"optimiser-{name}.npz"
        if self.history.optimiser is not None and not vectors.exists():
            write_vectors(vectors, self.history.mark.vectors())
        if self._last and not (self._folder / summed).exists():
            with replacing(self._folder / summed) as file:
                np.savez(file, **{k: v for k, v in self._last.items() if v is not None})
        body = {
            "format": _RUN,
            "manifest": self.manifest.digest().hex(),
            "round": self.round_no,
            "model": name,
            "mark": self.history.mark.to_bytes().decode(),
            "notes": self.notes,
        }
        past = self._current_past()
        if self.chain is not None and self.chain.waiting is not None:
            body["link"] = self.chain.waiting.as_dict()
        if past.draw:  # without these statements the members of this draw take part in nothing
            body["draw"] = {"state": past.state.hex(), "number": past.draw, "closed": statements.plain(past.closed)}
        write_private(self._folder / "run.json", canonical(body))
        self._tidy(name, summed, vectors.name)
        if self._open is None:  # its successor is on disk
            (self._folder / "open.npz").unlink(missing_ok=True)

    def _tidy(self, *kept: str) -> None:
        """Without what belongs to other states: a server that died left a model that may not be the next one."""
        assert self._folder is not None  # noqa: S101
        for pattern in ("model-*.safetensors", "sum-*.npz", "optimiser-*.npz"):
            for old in self._folder.glob(pattern):
                if old.name not in kept:
                    old.unlink()

    def _save_open(self) -> None:
        if self._folder is not None and self._open is not None:
            self._open.save(self._folder / "open.npz", self.history.state)

    def _drop_open(self) -> None:
        self._open = None
        if self._folder is not None:
            (self._folder / "open.npz").unlink(missing_ok=True)

    def _resume(self) -> None:
        assert self._folder is not None  # noqa: S101
        body = parse(read_file(self._folder / "run.json", "a run's state"), _RUN, "a run's state")
        known = {manifest.digest().hex() for manifest in (*self._earlier, self.manifest)}
        if str(body.get("manifest")) not in known:
            raise RecordError(f"{str(self._folder)!r} holds a run of another consortium: use a new folder")
        try:
            kept = read_safetensors(self._folder / body["model"])
            rounded = self.layout.unflatten(self.layout.flatten(kept), self.like)  # torch's tensors stay torch's
            self.resumed = {
                name: np.array(kept[name]) if isinstance(like, np.ndarray) else rounded[name]
                for name, like in self.like.items()
            }
            self.like, self.notes = dict(self.resumed), dict(body["notes"])
            self._anchor = read_array(self._folder / "anchor.npy", "an anchor")
            history = History(self.manifest, self.layout, self._anchor, self._earlier)
            model = self.layout.encode(self.resumed)
            kept = read_vectors(self._folder / f"optimiser-{body['model']}.npz")
            mark = history.read_mark(body["mark"].encode(), model, self._anchor, kept)
            self.history = history.restored(mark, self.layout.buffers_digest(self.resumed) if self.checks else b"")
            path = self._folder / f"sum-{mark.round}.npz"
            if self.accepted:
                if not path.is_file():  # a pipe would be waited for
                    raise RecordError(f"{str(self._folder)!r} lacks the sum of its last round")
                with path.open("rb") as file, np.load(file) as found:  # numpy does not close what it cannot read
                    self._last = {name: found.get(name) for name in SUMMED}
                    self._last |= {name: int(found[name]) for name in ("round", "halvings")}
                    self._last |= {name: str(found[name]) for name in ("level", "under", "held")}
            self.round_no = max(self.round_no, int(body["round"]))
            if self.chain is not None and "link" in body:
                self.chain.begin(Link.of(body["link"]))
            drawn = body.get("draw", {})
            if drawn.get("state") == self.history.state.hex():
                past = self._current_past()
                past.draw, past.closed = int(drawn["number"]), statements.from_plain(drawn["closed"], str)
            self._tidy(body["model"], path.name, f"optimiser-{body['model']}.npz")
            self._open = OpenSum.read(
                self._folder / "open.npz", self.history, (*self._earlier, self.manifest), marks=self.marks
            )
        except (KeyError, AttributeError, StopIteration, MessageError, *DAMAGED) as error:
            raise RecordError(f"{str(self._folder)!r} holds a damaged run ({type(error).__name__})") from None
