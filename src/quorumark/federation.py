"""A federation in one process: members and a server with the protocol's real messages (docs/federation.md).

    members = {x: FederationMember(person, manifest, layout, train, data, share) for …}
    run = Federation(manifest, layout, initial_model, members, evaluate=…)
    for report in run.rounds(20):
        …

A round: everybody trains from the global model; those who are ready take part; each uploads its weighted model and its
part of the mark under masks (`secagg`, `embed`); the server opens the one sum, which is the next global model. Members
may be lost at every stage.

A `FederationMember` takes the public models and the server's bytes, and decides by itself: how strong the mark is it
derives from the models that it accepted (its `History`). In one process all members may look at one history, since it
is the same for all: that saves work, and nothing else hangs on it.

`train` is any function from (weights, data) to weights: named tensors, numpy or torch. It may also take `seed` (from
the operating system, or from the federation's research seed, so that a run can be repeated), `round_no`, and `rate`:
the learning rate that the manifest's table has for this round, in units of the first one's.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live
from rich.table import Table

from quorumark import codec, field, sums
from quorumark.checks import DAMAGED
from quorumark.embed import (
    Amplitudes,
    MarkState,
    PaperScale,
    Strength,
    check_round,
    check_weights,
    marked_vector,
    norm_count,
    paper_amplitudes,
    update_norms,
    weights,
)
from quorumark.errors import EncodingError, InputError, MessageError, QuorumarkError, RecordError, RoundError
from quorumark.field import Vector
from quorumark.home import read_array, read_file
from quorumark.identity import Identity
from quorumark.keystore import replacing, write_private, write_shared
from quorumark.layout import ModelLayout, read_safetensors, write_safetensors
from quorumark.records import Manifest, anchor_digest, canonical, digest, parse
from quorumark.secagg import Group, MemoryState, Plan, SecAggMember, SecAggServer, State, Upload
from quorumark.shares import ShareFile, ShareInfo

__all__ = [
    "Federation",
    "FederationMember",
    "History",
    "Losses",
    "RoundReport",
    "checks_sums",
    "group_of",
    "research_seed",
    "watch",
]

Weights = Mapping[str, Any]
Train = Callable[..., Weights]
STAGES = ("train", "upload", "unmask")
DEFAULT_ATTEMPTS = 20


def group_of(manifest: Manifest) -> Group:
    """The consortium's group for secure aggregation.

    Its settings are in the terms that all signed, under `policy`: `attempts` (20), and `cohort`, the number of members
    who are drawn for each round (all). More attempts cost no secrecy: the quorum hangs on K, t and the cohort's size.
    """
    policy = manifest.terms.policy
    for name in ("attempts", "cohort"):
        if name in policy and not (policy[name].isascii() and policy[name].isdecimal()):
            raise InputError(f"policy {name!r}", "must be a whole number", repr(policy[name]))
    cohort = int(policy["cohort"]) if "cohort" in policy else None
    return Group.of_manifest(manifest, attempts=int(policy.get("attempts", DEFAULT_ATTEMPTS)), cohort_size=cohort)


def checks_sums(manifest: Manifest) -> bool:
    """Whether the members check what a server announces as a sum (policy `sums`; docs/secagg.md, "Checked sums")."""
    return manifest.terms.policy.get("sums") == "checked"


def research_seed(seed: int, round_no: int, point: int) -> int:
    """What a member's training is seeded with in a run that can be repeated."""
    return int.from_bytes(digest("research seed", *(n.to_bytes(8, "big") for n in (seed, round_no, point)))[:8], "big")


# --- what is public ---------------------------------------------------------------------------------------


class History:
    """The global models that were accepted, as far as a member needs them: what the mark of a round must be."""

    def __init__(self, manifest: Manifest, layout: ModelLayout, encoded: Vector) -> None:
        """From E of the public initial model, which must be the anchor that the manifest names."""
        terms = manifest.terms
        if layout.digest() != terms.layout:
            raise InputError("layout", "must be the one that the manifest names", layout.digest()[:16])
        self.strength = Strength.of(terms.strength, terms.coordinates)
        # until an amendment names the model after the warm-up rounds as the anchor nothing is marked: signs will change
        self.warming = bool(self.strength.warmup_rounds) and manifest.genesis.terms == terms.digest().hex()
        if anchor_digest(layout.digest(), encoded) != terms.anchor:
            raise InputError("model", "must be the initial model that the manifest names as its anchor", "another")
        self.manifest, self.layout = manifest, layout
        self.mark = MarkState(self.strength, layout, terms.key, encoded)
        self.beside = b""  # a digest of what models have besides E(θ), where sums are checked (`ModelLayout.beside`)
        self._known: Amplitudes | None = None
        self._repeated = 0  # the round whose mark they are

    def amplitudes(self, round_no: int, as_of: int | None = None) -> Amplitudes:
        """For a round, or for one that repeats the round `as_of`: with the mark that it had.

        The mark is weaker after rounds that were given up. A round that members have answered in may have been opened
        all the same, and two sums from one model with marks of two strengths differ by a mark.
        """
        repeated = as_of or round_no
        if self._known is None or (self._known.round, self._repeated) != (round_no, repeated):
            self._known, self._repeated = replace(self.mark.amplitudes(repeated), round=round_no), repeated
        return self._known

    def accept(self, round_no: int, encoded: Vector, embedded: Amplitudes | None, norms: Vector | None = None) -> None:
        """A round's model is the global one now; `embedded` is what was added in it, `norms` the opened sum of the
        members' norms where they are summed. Told twice, it is the same."""
        if round_no != self.mark.round:
            self.mark.advance(round_no, encoded, embedded, norms)
            self._known = None

    def binding(self, round_no: int, amplitudes: Amplitudes | None) -> bytes:
        """What all members of a round must agree on besides the set U and its keys, which secure aggregation adds.

        The state's digest holds the global model, the chain of all before it, and the strength. The weights follow
        from U and the manifest.
        """
        marks = b"" if amplitudes is None else amplitudes.digest()
        parts = [self.manifest.digest(), round_no.to_bytes(8, "big"), self.mark.digest(), marks]
        return digest("round", *parts, *([self.beside] if self.beside else []))


# --- a member ---------------------------------------------------------------------------------------------


class FederationMember:
    """One organisation: it trains, uploads and answers.

    `share` is its `ShareFile`, which is checked against the manifest, or (for research) the vector. `mark=False` is for
    a run without the mark, in which all must agree. `own_key`, signs of its own, makes it a member of the baseline in
    which everybody has a key.
    """

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        layout: ModelLayout,
        train: Train,
        data: Any,
        share: ShareFile | Vector | None = None,
        *,
        mark: bool = True,
        state: State | None = None,
        own_key: NDArray[np.int64] | None = None,
    ) -> None:
        self.manifest, self.layout = manifest, layout
        self.group = group_of(manifest)
        self.marks = mark
        self.strength = Strength.of(manifest.terms.strength, manifest.terms.coordinates)
        self.secagg = SecAggMember(identity, self.group, state or MemoryState(self.group))
        self.point = self.secagg.point
        if mark and (share is None) == (own_key is None):
            raise InputError("share", "must be given to a member that marks, or a key of its own instead", "otherwise")
        if mark and share is not None:
            _check_share(share, manifest, self.point)
        self.history: History | None = None
        self.checks = checks_sums(manifest)
        self.sure = True  # whether it has seen for itself that its history is what was summed
        self.as_of: int | None = None  # the round that the next one repeats
        self._identity = identity
        self._train, self._data, self._share, self._own_key = train, data, share, own_key
        self._scale = PaperScale(self.strength, layout) if self.strength.rule == "paper" else None
        self._result: NDArray[Any] | None = None
        self._joined: dict[str, tuple[int, Amplitudes | None]] = {}
        self._scaled: tuple[int, Vector, Any] | None = None
        self._paper: Amplitudes | None = None

    def __repr__(self) -> str:
        return f"FederationMember(point {self.point} of {self.manifest.terms.name!r}, secrets hidden)"

    # --- a round ---

    def train(self, model: Weights, round_no: int, seed: int | None = None) -> None:
        """Trains from the global model, and keeps the result until the round is over."""
        self._result = None
        known = {
            "seed": int.from_bytes(os.urandom(8), "big") if seed is None else seed,
            "round_no": round_no,
            "rate": float(self.strength.rate(round_no)),
        }
        taken = inspect.signature(self._train).parameters
        result = self._train(model, self._data, **{name: value for name, value in known.items() if name in taken})
        self.layout.encode(result)  # NaN, another shape or an overflow stops here, by the tensor's name
        self._result = self.layout.flatten(result)  # a copy: the function may go on using its tensors

    def ready(self, round_no: int, purpose: str = "model") -> bytes:
        """Joins the round, bound to what this member itself knows of the history and the strength."""
        amplitudes = None
        if self.marks and purpose == "model":
            amplitudes = self._paper if self._scale is not None else self._known().amplitudes(round_no, self.as_of)
            if amplitudes is not None and amplitudes.round != round_no:
                raise RoundError(f"the scale of round {round_no} has not been summed")
        self._joined[purpose] = round_no, amplitudes
        return self.secagg.ready(round_no, self._known().binding(round_no, amplitudes), self.length(purpose), purpose)

    def length(self, purpose: str = "model") -> int:
        """Of the vectors that are summed: the model, the members' norms where the mark needs them, and a tag."""
        if purpose == "scale":
            return self.scale_length()
        return self.layout.size + (norm_count(self.layout) if self.has_norms else 0) + (1 if self.checks else 0)

    @property
    def has_norms(self) -> bool:
        """Whether it uploads the norms of its update: not in a run without the mark, which has no use for them."""
        return self.marks and self.strength.needs_norms

    def said(self, round_no: int) -> tuple[bytes, bytes]:
        """What goes with *ready* where sums are checked: its part of the round's key, sealed, and whether it vouches.

        Both are for the others of the round, and bound to what this member joined it with.
        """
        if not self.checks:
            return b"", b""
        joined, amplitudes = self._joined["model"]
        if joined != round_no:
            raise RoundError(f"member {self.point} has not joined round {round_no}")
        binding = self._known().binding(round_no, amplitudes)
        boxes = sums.seal_keys(self._identity, self.group, round_no, binding)
        return boxes, sums.vouch(self._identity, self.group, round_no, binding) if self.sure else b""

    def upload(self, announcement: bytes, boxes: Sequence[bytes] = (), vouches: Sequence[bytes] = ()) -> Upload:
        """The weighted model and this member's part of the mark, under masks: exactly what it joined the round for.

        Where sums are checked, `boxes` and `vouches` are what the members of the announced set said (`said`): their
        boxes for this member, and their vouchers, in the set's order.
        """
        plan = self.secagg.plan(announcement)
        if self._result is None:
            raise RoundError(f"member {self.point} has not trained in this round")
        joined, amplitudes = self._joined.get(plan.purpose, (0, None))
        if joined != plan.round:
            raise RoundError(f"member {self.point} has not joined round {plan.round} ({plan.purpose!r})")
        before, after = self._known().mark.model, codec.encode(self._result, name="model")
        if plan.purpose == "scale":
            return self.secagg.upload(plan, self._own_scale(plan.round, before, after))
        check_weights(self.manifest, plan.members)
        exact = weights(self.manifest, plan.members)[self.point]
        share_of = float(exact)
        whole = np.empty(self.length(), np.uint64)
        y = codec.encode(self._result, share_of, whole[: self.layout.size], name="model")
        if self.has_norms:
            whole[self.layout.size : whole.size - self.checks] = update_norms(self.layout, before, after, exact)
        marks = amplitudes is not None and check_round(
            self.strength, self.manifest, amplitudes, plan.members, before, after
        )
        if marks and amplitudes is not None:
            self._add_mark(y, amplitudes, plan.members, share_of)
        if self.checks:
            self._add_tag(whole, plan, boxes, vouches)
        return self.secagg.upload(plan, whole)

    def _add_tag(self, whole: Vector, plan: Plan, boxes: Sequence[bytes], vouches: Sequence[bytes]) -> None:
        """Behind the vector. The key is kept for the sum of this round."""
        if len(vouches) != len(plan.members):
            raise MessageError("the server must hand on what every member of the announced set vouches for")
        sums.check_vouchers(self.group, plan.round, plan.binding, dict(zip(plan.members, vouches, strict=True)))
        self.sure = True
        key = sums.round_key(self._identity, self.group, plan.round, plan.binding, plan.members, boxes)
        whole[-1] = sums.tag(key, whole[:-1], first=self.point == plan.members[0])
        sums.keep(self.secagg, plan.binding, key)

    def check_sum(self, round_no: int, opened: Vector) -> bool | None:
        """Whether this is the sum of a round, with its tag; None if this member did not take part, and cannot say."""
        joined, amplitudes = self._joined.get("model", (0, None))
        if joined != round_no:
            return None
        return sums.check(self.secagg, round_no, self._known().binding(round_no, amplitudes), opened)

    def unmask(self, request: bytes) -> bytes:
        return self.secagg.unmask(request)

    def accept(self, round_no: int, encoded: Vector, embedded: Amplitudes | None, norms: Vector | None = None) -> None:
        """The round's sum is the global model now."""
        self._known().accept(round_no, encoded, embedded, norms)
        self._scaled, self._result = None, None

    def give_up(self) -> None:
        """The round led to nothing: what belongs to it is forgotten, and the paper's average is as it was."""
        if self._scaled is not None and self._scale is not None:
            self._scale._ema = self._scaled[2]
        self._scaled, self._result = None, None

    # --- the paper's rule: a sum of scales first ---

    def take_scales(self, round_no: int, total: Vector, members: tuple[int, ...]) -> Amplitudes:
        """From the opened sum of all scales: the strength of this round."""
        key = self.manifest.terms.key
        self._paper = paper_amplitudes(self.strength, self.layout, key, round_no, total, len(members))
        return self._paper

    def scale_length(self) -> int:
        carriers = sum(1 for spec, _ in self.layout.spans("carrier") if spec.size)
        return carriers if self.strength.per == "tensor" else 1

    def _own_scale(self, round_no: int, before: Vector, after: Vector) -> Vector:
        """Moved on once a round, however many attempts it takes."""
        if self._scale is None:
            raise RoundError("a scale is summed under the rule 'paper' only")
        if self._scaled is None or self._scaled[0] != round_no:
            ema = self._scale._ema
            self._scaled = round_no, self._scale.scale(before, after), ema
        return self._scaled[1].copy()

    # --- what it knows ---

    def _add_mark(self, y: Vector, amplitudes: Amplitudes, members: tuple[int, ...], share_of: float) -> None:
        if self._own_key is not None:
            _own_mark(y, amplitudes, self._own_key, share_of)
            return
        if self._share is None:
            raise RoundError(f"member {self.point} has no share: without it the sum would be garbage and show others'")
        pieces: Iterable[Vector] = self._share.pieces() if isinstance(self._share, ShareFile) else [self._share]
        marked_vector(y, amplitudes, self.manifest, members, self.point, pieces)

    def _known(self) -> History:
        if self.history is None:
            raise RoundError(f"member {self.point} knows no history: give it one that starts from the initial model")
        return self.history

    def rejoin(self, after: int) -> None:
        """Goes on after a round, in a simulation that is taken up again: server and members died together.

        A state on disk remembers by itself, and is left alone.
        """
        if isinstance(self.secagg.state, MemoryState):
            self.secagg = SecAggMember(self._identity, self.group, MemoryState(self.group, after))


def _check_share(share: ShareFile | Vector, manifest: Manifest, point: int) -> None:
    """A wrong share, or one of another epoch, would turn the sum into garbage that shows the others' shares."""
    if isinstance(share, ShareFile):
        if share.info != ShareInfo.under(manifest, point, share.info.block):
            raise InputError("share", "must be this member's, of the manifest's epoch", f"epoch {share.info.epoch}")
        if share.root().hex() != manifest.roots[point - 1]:
            raise InputError("share", "must be what the manifest's root commits to", "another")
    elif not isinstance(share, np.ndarray) or share.shape != (manifest.share_length,):
        received = getattr(share, "shape", type(share).__name__)
        raise InputError("share", f"must be a vector of {manifest.share_length} elements", received)


def _own_mark(y: Vector, amplitudes: Amplitudes, key: NDArray[np.int64], weight: float) -> None:
    """The baseline's mark: a_k·S ⊙ key_k, as if the member had marked its own model."""
    carrying = amplitudes.layout.carrying()
    marks = np.round(amplitudes.vector.astype(np.float64) * weight).astype(np.int64) * key
    y[carrying] = field.add(np.ascontiguousarray(y[carrying]), field.from_signed(marks))


# --- losses -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Losses:
    """Who is lost when: by plan, {(round, stage): points} or {(round, stage, attempt): points}, and at random by rates.

    Stages: "train" (never gets ready), "upload" (after U is fixed), "unmask" (after the upload).
    """

    plan: Mapping[tuple[Any, ...], Iterable[int]] = dataclass_field(default_factory=dict)
    rates: Mapping[str, float] = dataclass_field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        for key in self.plan:
            sound = isinstance(key, tuple) and len(key) in (2, 3) and key[1] in STAGES
            if not sound or not all(isinstance(n, int) for n in (key[0], *key[2:])):
                raise InputError("losses", f"must be at (round, stage) with the stages {', '.join(STAGES)}", key)
        for stage, rate in self.rates.items():
            if stage not in STAGES or not 0 <= rate < 1:
                raise InputError("losses", f"must have rates from 0 to 1 at {', '.join(STAGES)}", (stage, rate))

    def at(self, round_no: int, stage: str, attempt: int, members: Iterable[int]) -> set[int]:
        """Who of these members is lost now."""
        here = set(members)
        planned = set(self.plan.get((round_no, stage, attempt), ()))
        if attempt == 1:
            planned |= set(self.plan.get((round_no, stage), ()))
        rate = self.rates.get(stage, 0.0)
        if rate:
            place = None if self.seed is None else [self.seed, round_no, STAGES.index(stage), attempt]
            drawn = np.random.default_rng(place).random(max(here, default=0) + 1)
            planned |= {x for x in here if drawn[x] < rate}
        return planned & here


# --- the federation ---------------------------------------------------------------------------------------


@dataclass
class RoundReport:
    """What happened in a round. `given_up` says why there is no new model, if there is none.

    `excluded`: who was out, and why. `disputed`: whose answers were wrong, and about whose masks (see `secagg`).
    """

    round: int
    members: tuple[int, ...] = ()
    attempts: int = 0
    lost: dict[str, tuple[int, ...]] = dataclass_field(default_factory=dict)
    excluded: dict[int, str] = dataclass_field(default_factory=dict)
    disputed: dict[int, tuple[int, ...]] = dataclass_field(default_factory=dict)
    marked: bool = False
    rho: float = 0.0
    c: float = 0.0
    uploaded_bytes: int = 0
    seconds: dict[str, float] = dataclass_field(default_factory=dict)
    metrics: dict[str, float] = dataclass_field(default_factory=dict)
    given_up: str = ""


class Federation:
    """The server and all members of a consortium in one process.

    Members that have no history yet share one. With a `folder` every round is kept (`events.jsonl`,
    `model.safetensors`), and a run that was killed goes on after its last whole round when it is made again with the
    same folder.

    With `warmup_rounds` a first federation runs those, unmarked; then all sign the amendment that names its model as
    the anchor, and a second one goes on under the new manifest, from that model, `after` that round.
    """

    def __init__(
        self,
        manifest: Manifest,
        layout: ModelLayout,
        model: Weights,
        members: Mapping[int, FederationMember],
        *,
        evaluate: Callable[[Weights], Mapping[str, float]] | None = None,
        losses: Losses | None = None,
        seed: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        after: int = 0,
    ) -> None:
        wrong = [x for x, member in members.items() if member.point != x or member.manifest != manifest]
        if wrong or not members:
            raise InputError("members", "must be of this manifest, each at its point", wrong or "none")
        kinds = {(member.marks, member._own_key is None) for member in members.values()}
        if len(kinds) != 1:
            raise InputError("members", "must all mark, or none, and all with shares or all with keys", "a mixture")
        if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 1 << 63):
            raise InputError("seed", "must be a whole number from 0 to 2^63−1", repr(seed))
        self.manifest, self.layout, self.members = manifest, layout, dict(members)
        self.group = next(iter(members.values())).group
        self.marks = next(iter(kinds))[0]
        self._evaluate, self._losses, self._seed = evaluate, losses or Losses(), seed
        self._folder = None if folder is None else Path(folder)
        self.history = History(manifest, layout, layout.encode(model))
        self.reports: list[RoundReport] = []
        self._like: Weights = dict(model)
        self._vector = layout.flatten(model)
        warmup = self.history.strength.warmup_rounds
        if after < 0 or (warmup and not self.history.warming and after < warmup):
            raise InputError("after", f"must be {warmup} or more after the warm-up rounds", after)
        self.round_no = after
        # where sums are checked: the first round from the present model that members were asked to unmask
        self._as_of: int | None = None
        for member in self.members.values():
            member.rejoin(after)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._resume()
        for member in self.members.values():
            if member.history is None:
                member.history = self.history

    @property
    def model(self) -> dict[str, Any]:
        """The global model, in tensors of its own."""
        return self.layout.unflatten(self._vector, self._like)

    def rounds(self, count: int) -> Iterator[RoundReport]:
        """Runs rounds until `count` are done in all, and reports each."""
        while self.round_no < count:
            yield self.round()

    def round(self) -> RoundReport:
        """One round. If it cannot be finished the last model stands, and the report says why."""
        round_no = self.round_no + 1
        report = RoundReport(round_no)
        try:
            self._run(round_no, report)
        except (RoundError, EncodingError) as error:
            report.given_up = without_values(error)
            for member in self.members.values():
                member.give_up()
        self.round_no = round_no
        if self._evaluate is not None:
            with timed(report, "evaluate"):
                report.metrics = {name: float(value) for name, value in self._evaluate(self.model).items()}
        self.reports.append(report)
        if self._folder is not None:
            self._keep()
        return report

    def _run(self, round_no: int, report: RoundReport) -> None:
        if self.history.warming and round_no > self.history.strength.warmup_rounds:
            raise RoundError("the warm-up rounds are over: all members must sign the amendment that names the anchor")
        taking_part = self._train_all(round_no, report)
        amplitudes = self._amplitudes(round_no, taking_part, report)
        member = next(iter(self.members.values()))
        opened, members = self._sum(round_no, taking_part, amplitudes, "model", member.length(), report)
        if member.checks:
            if not self.members[members[0]].check_sum(round_no, opened):
                raise RoundError("the opened sum is not what the members sent: one of them sent a wrong tag")
            opened = opened[:-1]
        total, norms = opened[: self.layout.size], opened[self.layout.size :] if member.has_norms else None
        # all of it, or nothing: a sum that is no model (a member lied) leaves the last one standing
        vector = codec.decode(total, self.layout.dtype)
        rounded = self.layout.flatten(self.layout.unflatten(vector, self._like))
        encoded = codec.encode(rounded, name="the opened sum")
        embedded = amplitudes if amplitudes is not None and amplitudes.marks else None
        with timed(report, "strength"):
            self.history.accept(round_no, encoded, embedded, norms)
            for member in self.members.values():
                member.accept(round_no, encoded, embedded, norms)
        self._as_of = None
        self._vector = rounded
        report.members, report.marked = members, embedded is not None
        report.rho = self.history.mark.rho / (1 << 32)
        report.c = 0.0 if embedded is None else embedded.c / (1 << 32)

    def _train_all(self, round_no: int, report: RoundReport) -> list[int]:
        """Everybody who is there trains; whose training fails is out of this round, and named."""
        here = [x for x in self.group.cohort(round_no) if x in self.members]
        lost = self._losses.at(round_no, "train", 1, here)
        report.lost["train"] = tuple(sorted(lost))
        failed: Exception | None = None
        with timed(report, "train"):
            for x in here:
                if x in lost:
                    continue
                try:
                    self.members[x].train(self.model, round_no, self._seed_for(round_no, x))
                except QuorumarkError as error:
                    report.excluded[x] = without_values(error)
                except Exception as error:  # noqa: BLE001 - a member's own code: it is out, the others go on
                    report.excluded[x] = f"its training failed: {type(error).__name__}: {error}"
                    failed = error
        left = [x for x in here if x not in lost and x not in report.excluded]
        if failed is not None and not left:
            raise failed  # nobody can train: that is no loss, but a fault in the code
        return left

    def _amplitudes(self, round_no: int, taking_part: list[int], report: RoundReport) -> Amplitudes | None:
        if not self.marks:
            return None
        if self.history.strength.rule != "paper":
            with timed(report, "strength"):
                for member in self.members.values():
                    member.as_of = self._as_of
                return self.history.amplitudes(round_no, self._as_of)
        length = self.members[next(iter(self.members))].scale_length()
        total, members = self._sum(round_no, taking_part, None, "scale", length, report)
        found = [member.take_scales(round_no, total, members) for member in self.members.values()]
        return found.pop()

    def _sum(
        self,
        round_no: int,
        taking_part: Iterable[int],
        amplitudes: Amplitudes | None,
        purpose: str,
        length: int,
        report: RoundReport,
    ) -> tuple[Vector, tuple[int, ...]]:
        """One secure sum, with all its attempts; the sum and the members in it."""
        server = SecAggServer(self.group, round_no, self.history.binding(round_no, amplitudes), length, purpose)
        said: dict[int, tuple[bytes, bytes]] = {}
        with timed(report, "ready"):
            for x in taking_part:
                with _excluding(report, x):
                    server.take_ready(x, self.members[x].ready(round_no, purpose))
                    said[x] = self.members[x].said(round_no) if purpose == "model" else (b"", b"")
        announcement = server.announce()
        while True:
            attempt = server.plan.attempt
            report.attempts = max(report.attempts, attempt)
            lost = self._losses.at(round_no, "upload", attempt, server.plan.members)
            report.lost["upload"] = tuple(sorted({*report.lost.get("upload", ()), *lost}))
            with timed(report, "upload"):
                for x in server.plan.members:
                    if x not in lost:
                        with _excluding(report, x):
                            boxes = [sums.box_for(said[k][0], x) for k in server.plan.members]
                            vouches = [said[k][1] for k in server.plan.members]
                            upload = self.members[x].upload(announcement, boxes, vouches)
                            report.uploaded_bytes += len(upload.head) + upload.vector.nbytes
                            server.take_upload(x, upload)
            if not server.missing:
                break
            announcement = server.retry()
        if purpose == "model" and self.members[server.plan.members[0]].checks:
            self._as_of = self._as_of or round_no
        lost = self._losses.at(round_no, "unmask", 1, server.plan.members)
        report.lost["unmask"] = tuple(sorted(lost))
        with timed(report, "unmask"):
            for x in server.plan.members:
                if x not in lost:
                    with _excluding(report, x):
                        server.take_answer(x, self.members[x].unmask(server.request(x)))
            total = server.finish()
        report.disputed = {x: tuple(about) for x, about in server.disputed.items()}
        return total, server.plan.members

    def _seed_for(self, round_no: int, point: int) -> int | None:
        return None if self._seed is None else research_seed(self._seed, round_no, point)

    # --- a run's folder ---

    def _keep(self) -> None:
        """The model first, then the state that names it: a crash leaves the round before, or this one."""
        assert self._folder is not None  # noqa: S101
        name = f"model-{self.round_no}.safetensors"
        write_safetensors(self.model, self._folder / name)
        if self.round_no == 1 or not self._anchor_path.exists():
            with replacing(self._anchor_path) as file:
                np.save(file, self.history.mark.anchor)
        averages = {str(x): m._scale._ema for x, m in self.members.items() if m._scale is not None}
        body = {
            "format": _RUN,
            "manifest": self.manifest.digest().hex(),
            "round": self.round_no,
            "model": name,
            "mark": self.history.mark.to_bytes().decode(),
            "marks": self.marks,
            "seed": self._seed,
            "averages": averages,
            "as_of": self._as_of or 0,
            "reports": json.dumps([asdict(r) for r in self.reports]),
        }
        write_private(self._folder / "run.json", canonical(body))
        self._show()

    def _show(self) -> None:
        """What people look at, made from what the run goes on from: whole again after a crash."""
        assert self._folder is not None  # noqa: S101
        lines = [json.dumps(asdict(report)) + "\n" for report in self.reports]
        write_shared(self._folder / "events.jsonl", "".join(lines).encode())
        write_safetensors(self.model, self._folder / "model.safetensors")
        for old in self._folder.glob("model-*.safetensors"):
            if old.name != f"model-{self.round_no}.safetensors":
                old.unlink()

    @property
    def _anchor_path(self) -> Path:
        assert self._folder is not None  # noqa: S101
        return self._folder / "anchor.npy"

    def _resume(self) -> None:
        assert self._folder is not None  # noqa: S101
        path = self._folder / "run.json"
        if not path.exists():
            return
        body = parse(read_file(path, "a run's state"), _RUN, "a run's state")
        mine = (self.manifest.digest().hex(), self.marks, self._seed)
        if tuple(body.get(name) for name in ("manifest", "marks", "seed")) != mine:
            raise RecordError(f"{str(self._folder)!r} holds another run: use a new folder")
        try:
            self.round_no, self._as_of = body["round"], body.get("as_of") or None
            self._vector = self.layout.flatten(read_safetensors(self._folder / body["model"]))
            encoded, anchor = self.layout.encode(self.model), read_array(self._anchor_path, "an anchor")
            history, key = self.history, self.manifest.terms.key
            state = body["mark"].encode()
            history.mark = MarkState.from_bytes(state, history.strength, self.layout, key, encoded, anchor)
            self.reports = [_report(entry) for entry in json.loads(body["reports"])]
            for x, member in self.members.items():
                member.rejoin(self.round_no)
                if member._scale is not None:
                    member._scale._ema = body["averages"][str(x)]
        except (KeyError, AttributeError, *DAMAGED) as error:
            raise RecordError(f"{str(self._folder)!r} holds a damaged run ({type(error).__name__})") from None
        self._show()


def watch(run: Federation, rounds: int, console: Console, title: str = "training", last: int = 12) -> None:
    """Runs until so many rounds are done, with a table of the last ones that grows while it runs."""
    with Live(console=console, transient=True, auto_refresh=False) as live:
        for _ in run.rounds(rounds):
            live.update(_table(run, rounds, title, last), refresh=True)


def _table(run: Federation, rounds: int, title: str, last: int) -> Table:
    shown = run.reports[-last:]
    metrics = sorted({name for report in shown for name in report.metrics})
    stages = ("train", "upload", "unmask", "strength")
    heads = ["round", *metrics, "members", "attempts", "mark", "ρ", *(f"{stage} s" for stage in stages)]
    table = Table(*heads, title=f"{title}: round {run.round_no} of {rounds}", title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for report in shown:
        numbers = [f"{report.metrics[name]:.4f}" if name in report.metrics else "" for name in metrics]
        taken = [f"{report.seconds.get(stage, 0.0):.2f}" for stage in stages]
        if report.given_up:
            table.add_row(str(report.round), *numbers, "given up", *[""] * (3 + len(stages)))
            continue
        counts = [str(len(report.members)), str(report.attempts), "yes" if report.marked else "no", f"{report.rho:.4f}"]
        table.add_row(str(report.round), *numbers, *counts, *taken)
    return table


_RUN = "quorumark-run/v1"


def _report(entry: dict[str, Any]) -> RoundReport:
    entry["members"] = tuple(entry["members"])
    entry["lost"] = {stage: tuple(points) for stage, points in entry["lost"].items()}
    entry["excluded"] = {int(x): why for x, why in entry["excluded"].items()}
    entry["disputed"] = {int(x): tuple(about) for x, about in entry["disputed"].items()}
    return RoundReport(**entry)


def without_values(error: QuorumarkError) -> str:
    """An error for a report that others read: not with the member's weight that caused it."""
    return f"{error.argument} {error.rule}" if isinstance(error, EncodingError) else str(error)


@contextlib.contextmanager
def _excluding(report: RoundReport, point: int) -> Iterator[None]:
    """A member that refuses, or whose weights or messages are of no use, is out and named; the round goes on."""
    try:
        yield
    except QuorumarkError as error:
        report.excluded[point] = without_values(error)


class timed:  # noqa: N801 - used like a function
    """Adds the time of a block to a report."""

    def __init__(self, report: RoundReport, stage: str) -> None:
        self._report, self._stage = report, stage

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        taken = time.perf_counter() - self._start
        self._report.seconds[self._stage] = self._report.seconds.get(self._stage, 0.0) + taken
