"""A federation in one process: members and a server with the protocol's real messages (docs/protocol.md, "A round").

    members = {x: FederationMember(person, manifest, layout, train, data, share) for …}
    run = Federation(manifest, layout, initial_model, members, evaluate=…)
    for report in run.rounds(20):
        …

A round: everybody trains from the global model; those who are ready take part; each uploads its weighted model and its
part of the mark under masks (`secagg`, `embed`); the server opens the one sum, which is the next global model. Members
may be lost at every stage. What travels between a `FederationMember` and the server are bytes and arrays, so the same
members can be driven by another engine.

`train` is any function from (weights, data) to weights: named tensors, numpy or torch. If it takes a `seed`, it gets
one: from the operating system, or from the federation's research seed, so that a run can be repeated.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field
from quorumark.embed import (
    Amplitudes,
    MarkState,
    PaperScale,
    Strength,
    check_round,
    marked_vector,
    model_digest,
    paper_amplitudes,
    weights,
)
from quorumark.errors import InputError, QuorumarkError, RecordError, RoundError
from quorumark.field import Vector
from quorumark.identity import Identity
from quorumark.keystore import replacing, write_private
from quorumark.layout import ModelLayout, read_safetensors, write_safetensors
from quorumark.records import Manifest, canonical, digest, parse
from quorumark.secagg import Group, MemoryState, SecAggMember, SecAggServer, State, Upload

__all__ = ["Federation", "FederationMember", "Losses", "RoundReport", "anchor_digest", "bound", "group_of"]

Weights = Mapping[str, Any]
Train = Callable[..., Weights]
STAGES = ("train", "upload", "unmask")


def group_of(manifest: Manifest, attempts: int = 20, cohort_size: int | None = None) -> Group:
    """The consortium's group for secure aggregation. More attempts cost no secrecy: the quorum hangs on K and t."""
    return Group.of_manifest(manifest, attempts=attempts, cohort_size=cohort_size)


def binding(manifest: Manifest, round_no: int, history: bytes, marks: bytes) -> bytes:
    """What all members of a round must agree on besides the set U and its keys, which secure aggregation adds.

    The history holds the global model, the chain of all before it, and the strength; the marks are the amplitudes'
    digest. The weights follow from U and the manifest.
    """
    return digest("round", manifest.digest(), round_no.to_bytes(8, "big"), history, marks)


# --- a member ---------------------------------------------------------------------------------------------


class FederationMember:
    """One organisation: it trains, uploads and answers. It derives the strength itself, from the public models.

    `share` gives its share piece by piece (`ShareFile.pieces`), or is the vector; None for a run without the mark.
    `own_key`, signs of its own, makes it a member of the baseline in which everybody has a key.
    """

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        layout: ModelLayout,
        train: Train,
        data: Any,
        share: Vector | Callable[[], Iterable[Vector]] | None = None,
        *,
        group: Group | None = None,
        state: State | None = None,
        own_key: NDArray[np.int64] | None = None,
    ) -> None:
        self.manifest, self.layout = manifest, layout
        self.group = group or group_of(manifest)
        self._identity = identity
        self.secagg = SecAggMember(identity, self.group, state or MemoryState(self.group))
        self.point = self.secagg.point
        self.strength = Strength.of(manifest.terms.strength, manifest.terms.coordinates)
        self._train, self._data, self._share, self._own_key = train, data, share, own_key
        self._scale = PaperScale(self.strength, layout) if self.strength.rule == "paper" else None
        self._result: Weights | None = None
        self._scaled: tuple[int, Vector] | None = None

    def __repr__(self) -> str:
        return f"FederationMember(point {self.point} of {self.manifest.terms.name!r}, secrets hidden)"

    def rejoin(self, after: int) -> None:
        """Goes on after a round, in a run that is taken up again. A state on disk remembers by itself."""
        if isinstance(self.secagg.state, MemoryState):
            self.secagg = SecAggMember(self._identity, self.group, MemoryState(self.group, after))

    def train(self, model: Weights, seed: int | None = None) -> None:
        """Trains from the global model, and keeps the result until the round is over."""
        options = {}
        if "seed" in inspect.signature(self._train).parameters:
            options["seed"] = int.from_bytes(os.urandom(8), "big") if seed is None else seed
        self._result = self._train(model, self._data, **options)
        self.layout.encode(self._result)  # NaN, another shape or an overflow stops here, by the tensor's name

    def ready(self, round_no: int, mark: MarkState, amplitudes: Amplitudes | None, purpose: str = "model") -> bytes:
        """Joins the round, bound to what this member itself knows of the history and the strength."""
        length = self.layout.size if purpose == "model" else self._scale_length()
        return self.secagg.ready(round_no, bound(self.manifest, round_no, mark, amplitudes), length, purpose)

    def upload(self, announcement: bytes, mark: MarkState, amplitudes: Amplitudes | None) -> Upload:
        """The weighted model and this member's part of the mark, under masks."""
        plan = self.secagg.plan(announcement)
        result = self._trained()
        if plan.purpose == "scale":
            return self.secagg.upload(plan, self._own_scale(plan.round, mark.model))
        share_of = float(weights(self.manifest, plan.members)[self.point])
        y = self.layout.encode(result, share_of)
        if amplitudes is not None:
            after = self.layout.encode(result)
            if check_round(self.strength, self.manifest, amplitudes, plan.members, mark.model, after):
                if self._own_key is not None:
                    _own_mark(y, amplitudes, self._own_key, share_of)
                elif self._share is not None:
                    pieces = self._share() if callable(self._share) else [self._share]
                    marked_vector(y, amplitudes, self.manifest, plan.members, self.point, pieces)
        return self.secagg.upload(plan, y)

    def unmask(self, request: bytes) -> bytes:
        return self.secagg.unmask(request)

    def _trained(self) -> Weights:
        if self._result is None:
            raise RoundError(f"member {self.point} has not trained in this round")
        return self._result

    def _scale_length(self) -> int:
        return sum(1 for _ in self.layout.spans("carrier")) if self.strength.per == "tensor" else 1

    def _own_scale(self, round_no: int, before: Vector) -> Vector:
        """The paper's scale, moved on once a round, however many attempts it takes."""
        if self._scale is None:
            raise RoundError("a scale is summed under the rule 'paper' only")
        if self._scaled is None or self._scaled[0] != round_no:
            self._scaled = round_no, self._scale.scale(before, self.layout.encode(self._trained()))
        return self._scaled[1].copy()


def bound(manifest: Manifest, round_no: int, mark: MarkState, amplitudes: Amplitudes | None) -> bytes:
    """`binding` from a state and the amplitudes of the round, if there are any."""
    return binding(manifest, round_no, mark.digest(), b"" if amplitudes is None else amplitudes.digest())


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
        unknown = [key for key in self.plan if key[1] not in STAGES] + [s for s in self.rates if s not in STAGES]
        if unknown:
            raise InputError("losses", f"must be at the stages {', '.join(STAGES)}", unknown[0])

    def at(self, round_no: int, stage: str, attempt: int, members: Iterable[int]) -> set[int]:
        planned = set(self.plan.get((round_no, stage, attempt), ()))
        if attempt == 1:
            planned |= set(self.plan.get((round_no, stage), ()))
        rate = self.rates.get(stage, 0.0)
        if rate:
            entropy = [round_no, STAGES.index(stage), attempt] if self.seed is None else [self.seed, round_no, attempt]
            rng = np.random.default_rng(None if self.seed is None else [*entropy, STAGES.index(stage)])
            drawn = rng.random(max(members, default=0) + 1)
            planned |= {x for x in members if drawn[x] < rate}
        return planned & set(members)


# --- the federation ---------------------------------------------------------------------------------------


@dataclass
class RoundReport:
    """What happened in a round. `given_up` says why there is no new model, if there is none."""

    round: int
    members: tuple[int, ...] = ()
    attempts: int = 0
    lost: dict[str, tuple[int, ...]] = dataclass_field(default_factory=dict)
    excluded: dict[int, str] = dataclass_field(default_factory=dict)
    marked: bool = False
    rho: float = 0.0
    c: float = 0.0
    uploaded_bytes: int = 0
    seconds: dict[str, float] = dataclass_field(default_factory=dict)
    metrics: dict[str, float] = dataclass_field(default_factory=dict)
    given_up: str = ""


class Federation:
    """The server and all members of a consortium in one process.

    `mark=False` trains without the mark. With a `folder` every round is kept (`events.jsonl`, `model.safetensors`), and
    a run that was killed goes on after its last whole round when it is made again with the same folder.
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
        mark: bool = True,
        seed: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if layout.digest() != manifest.terms.layout:
            raise InputError("layout", "must be the one that the manifest names", layout.digest()[:16])
        wrong = [x for x, member in members.items() if member.point != x or member.manifest != manifest]
        if wrong or not members:
            raise InputError("members", "must be of this manifest, each at its point", wrong or "none")
        self.manifest, self.layout, self.members = manifest, layout, dict(members)
        self.group = next(iter(members.values())).group
        self._evaluate, self._losses, self._marks, self._seed = evaluate, losses or Losses(), mark, seed
        self._folder = None if folder is None else Path(folder)
        self.strength = Strength.of(manifest.terms.strength, manifest.terms.coordinates)
        self.reports: list[RoundReport] = []
        self._like: Weights = dict(model)
        self._vector = layout.flatten(model)
        encoded = layout.encode(model)
        if self.strength.warmup_rounds:
            # a later anchor must enter the sign whitening by an amendment that all sign, which is not built yet
            raise InputError("strength 'warmup_rounds'", "must be 0 in this release", self.strength.warmup_rounds)
        if anchor_digest(layout, encoded) != manifest.terms.anchor:
            raise InputError("model", "must be the initial model that the manifest names as its anchor", "another")
        self.mark = MarkState(self.strength, layout, manifest.terms.key, encoded)
        self.round_no = 0
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._resume()

    @property
    def model(self) -> dict[str, Any]:
        """The global model."""
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
        except RoundError as error:
            report.given_up = str(error)
        self.round_no = round_no
        for member in self.members.values():
            member._result = None
        if self._evaluate is not None:
            with _timed(report, "evaluate"):
                report.metrics = {name: float(value) for name, value in self._evaluate(self.model).items()}
        self.reports.append(report)
        if self._folder is not None:
            self._keep(report)
        return report

    def _run(self, round_no: int, report: RoundReport) -> None:
        cohort = self.group.cohort(round_no)
        lost = self._losses.at(round_no, "train", 1, [x for x in cohort if x in self.members])
        report.lost["train"] = tuple(sorted(lost))
        taking_part = [x for x in cohort if x in self.members and x not in lost]
        with _timed(report, "train"):
            model = self.model
            for x in taking_part:
                with _excluding(report, x):
                    self.members[x].train(model, self._seed_for(round_no, x))
            taking_part = [x for x in taking_part if x not in report.excluded]
        amplitudes = self._amplitudes(round_no, taking_part, report)
        total, plan_members = self._sum(round_no, taking_part, amplitudes, "model", self.layout.size, report)
        report.members = plan_members
        self._vector = codec.decode(total, self.layout.dtype)
        embedded = amplitudes if amplitudes is not None and len(plan_members) >= self.manifest.terms.threshold else None
        if embedded is not None and not embedded.marks:
            embedded = None
        with _timed(report, "strength"):
            self.mark.advance(round_no, self.layout.encode(self.model), embedded)
        report.marked = embedded is not None
        report.rho = self.mark.rho / (1 << 32)
        report.c = 0.0 if embedded is None else embedded.c / (1 << 32)

    def _amplitudes(self, round_no: int, taking_part: list[int], report: RoundReport) -> Amplitudes | None:
        if not self._marks:
            return None
        if self.strength.rule != "paper":
            with _timed(report, "strength"):
                return self.mark.amplitudes(round_no)
        first = self.members[next(iter(self.members))]
        total, members = self._sum(round_no, taking_part, None, "scale", first._scale_length(), report)
        key = self.manifest.terms.key
        return paper_amplitudes(self.strength, self.layout, key, round_no, total, len(members))

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
        server = SecAggServer(
            self.group, round_no, bound(self.manifest, round_no, self.mark, amplitudes), length, purpose
        )
        with _timed(report, "ready"):
            for x in taking_part:
                with _excluding(report, x):
                    server.take_ready(x, self.members[x].ready(round_no, self.mark, amplitudes, purpose))
        announcement = server.announce()
        while True:
            attempt = server.plan.attempt
            report.attempts = max(report.attempts, attempt)
            lost = self._losses.at(round_no, "upload", attempt, server.plan.members)
            report.lost["upload"] = tuple(sorted({*report.lost.get("upload", ()), *lost}))
            with _timed(report, "upload"):
                for x in server.plan.members:
                    if x not in lost:
                        self._upload(server, x, announcement, amplitudes, report)
            if not server.missing:
                break
            announcement = server.retry()
        lost = self._losses.at(round_no, "unmask", 1, server.plan.members)
        report.lost["unmask"] = tuple(sorted(lost))
        with _timed(report, "unmask"):
            for x in server.plan.members:
                if x not in lost:
                    with _excluding(report, x):
                        server.take_answer(x, self.members[x].unmask(server.request(x)))
            total = server.finish()
        report.excluded.update(server.excluded)
        return total, server.plan.members

    def _upload(
        self, server: SecAggServer, x: int, announcement: bytes, amplitudes: Amplitudes | None, report: RoundReport
    ) -> None:
        with _excluding(report, x):
            upload = self.members[x].upload(announcement, self.mark, amplitudes)
            report.uploaded_bytes += len(upload.head) + upload.vector.nbytes
            server.take_upload(x, upload)

    def _seed_for(self, round_no: int, point: int) -> int | None:
        if self._seed is None:
            return None
        parts = (self._seed, round_no, point)
        return int.from_bytes(digest("research seed", *(n.to_bytes(8, "big") for n in parts))[:8], "big")

    # --- a run's folder ---

    def _keep(self, report: RoundReport) -> None:
        """The model first, then the state that names it: a crash leaves the round before, or this one."""
        assert self._folder is not None  # noqa: S101
        name = f"model-{self.round_no}.safetensors"
        tensors = {k: _numpy(v) for k, v in self.model.items()}
        write_safetensors(tensors, self._folder / name)
        reports = [asdict(r) for r in self.reports]
        body = {
            "format": "quorumark-run/v1",
            "manifest": self.manifest.digest().hex(),
            "round": self.round_no,
            "model": name,
            "mark": self.mark.to_bytes().decode(),
            "marks": self._marks,
            "reports": json.dumps(reports),
        }
        if not self._anchor_path.exists():
            with replacing(self._anchor_path) as file:
                np.save(file, self.mark.anchor)
        write_private(self._folder / "run.json", canonical(body))
        with (self._folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")
        write_safetensors(tensors, self._folder / "model.safetensors")
        for old in self._folder.glob("model-*.safetensors"):
            if old.name != name:
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
        body = parse(path.read_bytes(), "quorumark-run/v1", "a run's state")
        if body["manifest"] != self.manifest.digest().hex() or body["marks"] != self._marks:
            raise RecordError(f"{str(self._folder)!r} holds another run: use a new folder")
        self.round_no = body["round"]
        stored = read_safetensors(self._folder / body["model"])
        self._vector = self.layout.flatten(_as(stored, self._like))
        model, anchor = self.layout.encode(self.model), np.load(self._anchor_path)
        if model_digest(model) != self.mark.model_digest or self.round_no:
            key = self.manifest.terms.key
            state = body["mark"].encode()
            self.mark = MarkState.from_bytes(state, self.strength, self.layout, key, model, anchor)
        self.reports = [_report(entry) for entry in json.loads(body["reports"])]
        for member in self.members.values():
            member.rejoin(self.round_no)


def anchor_digest(layout: ModelLayout, encoded: Vector) -> str:
    """What terms name as their anchor, from E of the model."""
    return digest("anchor", bytes.fromhex(layout.digest()), encoded.astype("<u8").tobytes()).hex()


def _report(entry: dict[str, Any]) -> RoundReport:
    entry["members"] = tuple(entry["members"])
    entry["lost"] = {stage: tuple(points) for stage, points in entry["lost"].items()}
    entry["excluded"] = {int(x): why for x, why in entry["excluded"].items()}
    return RoundReport(**entry)


def _numpy(tensor: Any) -> Any:
    return tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else tensor


def _as(stored: Mapping[str, Any], like: Weights) -> dict[str, Any]:
    """Tensors from a file in the library of `like`."""
    out: dict[str, Any] = {}
    for name, tensor in like.items():
        if hasattr(tensor, "detach"):
            import torch

            out[name] = torch.from_numpy(np.array(stored[name]))
        else:
            out[name] = stored[name]
    return out


@contextlib.contextmanager
def _excluding(report: RoundReport, point: int) -> Iterator[None]:
    """A member that refuses, or whose weights or messages are of no use, is out and named; the round goes on."""
    try:
        yield
    except QuorumarkError as error:
        report.excluded[point] = str(error)


class _timed:  # noqa: N801 - used like a function
    """Adds the time of a block to a report."""

    def __init__(self, report: RoundReport, stage: str) -> None:
        self._report, self._stage = report, stage

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        taken = time.perf_counter() - self._start
        self._report.seconds[self._stage] = self._report.seconds.get(self._stage, 0.0) + taken
