"""A federation in one process: members and a server with the protocol's real messages (docs/federation.md).

    members = {x: FederationMember(person, manifest, layout, train, data, share) for …}
    run = Federation(manifest, layout, initial_model, members, evaluate=…)
    for report in run.rounds(20):
        …

A round: everybody trains from the global model; those who are ready take part; each uploads its weighted model and its
part of the mark under masks (`round.mark`, `round.secagg`); the server opens the one sum, which is the next global
model. Members may be lost at every stage.

A `FederationMember` takes the public models and the server's bytes, and decides by itself: how strong the mark is it
derives from the models that it accepted (its `History`). In one process all members may look at one history, since it
is the same for all: that saves work, and nothing else depends on it.

`train` is any function from (weights, data) to weights: named tensors, numpy or torch. It may also take `seed` (from
the operating system, or from the federation's research seed, so that a run can be repeated), `round_no`, which counts
the accepted rounds, and `rate`: the learning rate that the manifest's table has for this round, in units of the first
one's.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from dataclasses import field as dataclass_field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live
from rich.table import Table

from quorumark.checks import DAMAGED
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Manifest
from quorumark.consortium.shares import ShareFile
from quorumark.errors import AnsweredError, EncodingError, InputError, QuorumarkError, RecordError, RoundError, code_of
from quorumark.field import Vector
from quorumark.files import write_private, write_shared
from quorumark.model.layout import ModelLayout, write_safetensors
from quorumark.round.history import History, research_seed
from quorumark.round.links import Link, read_links, start_here
from quorumark.round.member import RoundMember
from quorumark.round.memory import MemoryState, State
from quorumark.round.outlook import Outlook, will_pass
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.server import RoundServer
from quorumark.round.survival import Step, Tracer

__all__ = ["Federation", "FederationMember", "Losses", "RoundReport", "summary", "watch"]

Weights = Mapping[str, Any]
Train = Callable[..., Weights]
STAGES = ("train", "upload", "unmask")
NOISE = "noise.npz"  # in a run's folder, what `round.survival` keeps: it shows the members' dither, and is theirs alone
NOTHING: Mapping[str, Any] = {}


# --- a member ---------------------------------------------------------------------------------------------


class FederationMember(RoundMember):
    """One organisation: it trains, uploads and answers. See `RoundMember` for what it may be given."""

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
        super().__init__(identity, manifest, layout, share, mark=mark, memory=state, own_key=own_key)
        self._train, self._data = train, data

    @property
    def has_own_key(self) -> bool:
        return self._own_key is not None

    def train(self, model: Weights, seed: int | None = None) -> None:
        """Trains from the global model, and keeps the result until the round is over."""
        self.give_up()
        number = self._known().round
        known = {
            "seed": int.from_bytes(os.urandom(8), "big") if seed is None else seed,
            "round_no": number,
            "rate": float(self.strength.rate(number)),
        }
        taken = inspect.signature(self._train).parameters
        self.take(self._train(model, self._data, **{name: value for name, value in known.items() if name in taken}))

    def rejoin(self, after: int) -> None:
        """Goes on after a round, in a simulation that is taken up again: server and members died together.

        A state on disk remembers by itself, and is left alone.
        """
        if self.forgets:
            self.secagg = SecAggMember(self._identity, self.group, self.fresh_memory(after))

    @property
    def forgets(self) -> bool:
        """Whether its memory ends with this process."""
        return isinstance(self.secagg.state, MemoryState)

    def start(self, history: History) -> None:
        """What `rejoin` forgot besides: where links had led this member."""
        if self.forgets:
            start_here(self.secagg.state, history)


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
    """What happened in a round. `given_up` says why there is no new model, if there is none; `given_up_code` says it
    as a code of `quorumark.refusals`.

    `excluded` and `excluded_codes`: who was out, and why. `disputed`: whose answers were wrong, and about whose masks
    (see `round.secagg`).
    `halvings`: how often the mark was halved because it was too strong for members. `held`: tensors that kept their
    weights, because the sum had a number there that no model may have: a member lied, or diverges. `silenced`: the
    share of the carriers that got no mark because something jumped in the round before (`quorumark.round.continuity`).
    `widened`: members whose update was larger than the units of a packed round expected, and in how many tensors
    (`quorumark.round.units`).
    `corrected_z`: what a verification of this round's model should find, give or take the key's own chance of 1 and
    `corrected_error`. It is made of `expected_z`, the forecast from what is public, and `survival`, the part of the
    mark that training left by the members' own noise, with `survival_error`: 0 where nobody told. `final_z`: what the
    run is on course for at its end, 0 where that is not known yet; `advice`: what to do if that is too little
    (`quorumark.round.outlook`).
    """

    round: int
    members: tuple[int, ...] = ()
    attempts: int = 0
    lost: dict[str, tuple[int, ...]] = dataclass_field(default_factory=dict)
    excluded: dict[int, str] = dataclass_field(default_factory=dict)
    excluded_codes: dict[int, str] = dataclass_field(default_factory=dict)
    disputed: dict[int, tuple[int, ...]] = dataclass_field(default_factory=dict)
    marked: bool = False
    halvings: int = 0
    held: tuple[str, ...] = ()
    silenced: float = 0.0
    widened: dict[int, int] = dataclass_field(default_factory=dict)
    rho: float = 0.0
    expected_z: float = 0.0
    survival: float = 0.0
    survival_error: float = 0.0
    corrected_z: float = 0.0
    corrected_error: float = 0.0
    final_z: float = 0.0
    advice: str = ""
    c: float = 0.0
    uploaded_bytes: int = 0
    seconds: dict[str, float] = dataclass_field(default_factory=dict)
    metrics: dict[str, float] = dataclass_field(default_factory=dict)
    given_up: str = ""
    given_up_code: str = ""

    @property
    def outlook(self) -> Outlook:
        """What it says of the mark."""
        return Outlook(**{each.name: getattr(self, each.name) for each in fields(Outlook)})

    @outlook.setter
    def outlook(self, found: Outlook) -> None:
        for name, value in asdict(found).items():
            setattr(self, name, value)

    def exclude(self, point: int, why: str, code: str) -> None:
        """A member is out of this round."""
        self.excluded[point], self.excluded_codes[point] = why, code

    def leave_out(self, alone: Iterable[int]) -> None:
        """Members whose update does not fit into the units of the round."""
        for point in alone:
            self.exclude(point, "its update needs wider units than so few may ask for", "round.level-alone")

    def readmit(self, points: Iterable[int]) -> None:
        """Members who were out, and may take part after all."""
        for point in list(points):
            self.excluded.pop(point, None)
            self.excluded_codes.pop(point, None)


class Federation:
    """The server and all members of a consortium in one process.

    Members that have no history yet share one. With a `folder` every round is kept (`events.jsonl`,
    `model.safetensors`), and a run that was killed goes on after its last whole round when it is made again with the
    same folder.

    With `warmup_rounds` a first federation runs those, unmarked; then all sign the amendment that names its model as
    the anchor, and a second one goes on under the new manifest, from that model, `after` that round.

    In one process members hide nothing from each other, and the masks that two of them share cancel in the sum. So they
    are not made, unless `pair_masks` asks for what members on machines of their own compute: each of K members makes
    K − 1 vectors as long as the model. The models are the same, bit for bit.
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
        pair_masks: bool = False,
    ) -> None:
        wrong = [x for x, member in members.items() if member.point != x or member.manifest != manifest]
        if wrong or not members:
            raise InputError("members", "must be of this manifest, each at its point", wrong or "none")
        kinds = {(member.marks, member.has_own_key) for member in members.values()}
        if len(kinds) != 1:
            raise InputError("members", "must all mark, or none, and all with shares or all with keys")
        if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 1 << 63):
            raise InputError("seed", "must be an integer from 0 to 2^63−1", repr(seed))
        self.manifest, self.layout, self.members = manifest, layout, dict(members)
        self.marks = next(iter(kinds))[0]
        self._evaluate, self._losses, self._seed = evaluate, losses or Losses(), seed
        self._folder = None if folder is None else Path(folder)
        self.reports: list[RoundReport] = []
        self.norms: dict[int, Vector] = {}  # the sums of norms that accepted rounds opened: public
        self.round_no = after
        self.server = RoundServer(manifest, layout, dict(model), after=after, folder=self._folder, marks=self.marks)
        strength = self.history.strength
        shared = self.marks and not next(iter(kinds))[1]
        self._tracer = Tracer(layout.coordinates, strength.dither) if shared and strength.dither else None
        warmup = self.history.strength.warmup_rounds
        if after < 0 or (warmup and not self.history.warming and after < warmup):
            raise InputError("after", f"must be {warmup} or more after the warm-up rounds", after)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._resume()
        for member in self.members.values():
            member.rejoin(self.server.round_no)
            member.secagg.together = frozenset(() if pair_masks else self.members)
            if member.history is None:
                member.history = self.history
            member.start(self.history)
        if self.server.chain is not None and all(member.forgets for member in self.members.values()):
            self.server.chain.waiting = None  # nobody remembers the round that it is about

    @property
    def group(self) -> Any:
        return self.server.group

    @property
    def history(self) -> History:
        return self.server.history

    @property
    def model(self) -> dict[str, Any]:
        """The global model, in tensors of its own."""
        return self.layout.unflatten(self.layout.flatten(self.server.like), self.server.like)

    def rounds(self, count: int) -> Iterator[RoundReport]:
        """Runs rounds until `count` are done in all, and reports each."""
        self.server.planned = count
        while self.round_no < count:
            yield self.round()

    def round(self) -> RoundReport:
        """One round. If it cannot be finished the last model stands, and the report says why."""
        report = RoundReport(self.round_no + 1)
        try:
            self._run(report)
        except (RoundError, EncodingError) as error:
            report.given_up, report.given_up_code = without_values(error), code_of(error)
            for member in self.members.values():
                member.give_up()
        self.round_no += 1
        if self._evaluate is not None:
            with timed(report, "evaluate"):
                report.metrics = {name: float(value) for name, value in self._evaluate(self.model).items()}
        self.reports.append(report)
        if self._folder is not None:
            self._keep()
        return report

    def _run(self, report: RoundReport) -> None:
        server = self.server
        with timed(report, "unmask"):
            weights = server.prepare(partial(self._ask, report), server.like)
        if weights is None:
            report.readmit(report.excluded)  # who could not answer for an earlier sum may take part in this one
            turn = server.advance(server.like)
            taking_part = self._train_all(report)
            if self.marks and self.history.strength.rule == "paper":
                self._sum(taking_part, "scale", report)
                total, members = server.open(), server.members
                found = [member.take_scales(total, members) for member in self.members.values()]
                server.begin("model", found[-1])
            else:
                with timed(report, "strength"):
                    server.begin()
            self._sum(taking_part, "model", report)
            weights = server.finish()
            report.disputed = {x: tuple(about) for x, about in server.disputed.items()}
            report.attempts = max(report.attempts, server.attempt)
            report.halvings = turn.halvings
        self._accept(weights, report)
        with contextlib.suppress(RoundError):  # who cannot be reached now is asked again before the next round
            server.link(partial(self._ask, RoundReport(report.round)))

    def _accept(self, weights: Weights, report: RoundReport) -> None:
        server, members = self.server, self.server.members
        if server.checks and self.members[members[0]].check_sum(server.opened, server.level) is False:
            raise RoundError(
                "the opened sum is not what the members sent: one of them sent a wrong tag. The run cannot go on from "
                "this model, since another sum from it could show the key: find out who it was, and begin a new run",
                code="round.wrong-tag",
            )
        settled, number, level = server.settled, self.history.round, server.level
        report.members, report.marked, report.held = members, settled.embedded is not None, settled.held
        report.c, report.silenced, report.widened = server.c, server.silenced, server.widened
        step = None if self._tracer is None else Step(self.history.mark)
        noise = [self.members[x].noise(members) for x in members] if step is not None else []
        with timed(report, "strength"):
            server.accept(weights)
            if settled.norms is not None:
                self.norms[number] = settled.norms
            halvings = server.turn.halvings
            for member in self.members.values():
                summed = settled.encoded, settled.embedded, settled.norms, level
                member.accept(number, *summed, stood=settled.stood, taken=settled.taken, halvings=halvings)
        with timed(report, "forecast"):
            told = None
            if self._tracer is not None and step is not None:
                self._tracer.follow(step, self.history.mark, noise, settled.embedded)
                told = self._tracer.survival(self.history.mark, self.manifest.terms.statistic)
            report.outlook = server.outlook(told)

    def _train_all(self, report: RoundReport) -> list[int]:
        """Everybody who is there trains; whose training fails is out of this round, and named."""
        here = [x for x in self.server.cohort if x in self.members]
        lost = self._losses.at(report.round, "train", 1, here)
        report.lost["train"] = tuple(sorted(lost))
        failed: Exception | None = None
        with timed(report, "train"):
            for x in here:
                if x in lost:
                    continue
                try:
                    self.members[x].follow(self.server.links(self.members[x].reached.hex()))
                    self.members[x].begin(self.server.turn)
                    self.members[x].train(self.model, self._seed_for(x))
                except AnsweredError as error:
                    self.server.take_answered(x, error.round, error.members, error.halvings, error.draw)
                    report.exclude(x, without_values(error), code_of(error))
                except QuorumarkError as error:
                    report.exclude(x, without_values(error), code_of(error))
                except Exception as error:  # noqa: BLE001 - a member's own code: it is out, the others go on
                    report.exclude(x, f"its training failed: {type(error).__name__}: {error}", "node.failed")
                    failed = error
        left = [x for x in here if x not in lost and x not in report.excluded]
        if failed is not None and not left:
            raise failed  # nobody can train: that is no loss, but a fault in the code
        return left

    def _sum(self, taking_part: Iterable[int], purpose: str, report: RoundReport) -> None:
        """One secure sum, with all its attempts, up to the answers."""
        server = self.server
        if purpose == "scale":
            server.begin("scale")
        with timed(report, "ready"):
            for x in taking_part:
                with _excluding(report, x):
                    self._take_ready(x, purpose, report)
        server.announce()
        report.leave_out(server.alone)
        while True:
            report.attempts = max(report.attempts, server.attempt)
            lost = self._losses.at(report.round, "upload", server.attempt, server.members)
            report.lost["upload"] = tuple(sorted({*report.lost.get("upload", ()), *lost}))
            with timed(report, "upload"):
                for x in server.members:
                    if x not in lost:
                        with _excluding(report, x):
                            asked = server.announced_to(x)
                            upload = self.members[x].upload(*asked)
                            report.uploaded_bytes += server.take_upload(x, upload.head, upload.vector)
            if not server.missing:
                break
            server.retry()
            report.leave_out(server.alone)
        lost = self._losses.at(report.round, "unmask", 1, server.members)
        report.lost["unmask"] = tuple(sorted(lost))
        with timed(report, "unmask"):
            for x in server.members:
                request = server.request(x)
                if x not in lost:
                    with _excluding(report, x):
                        server.take_answer(x, self.members[x].unmask(request))

    def _take_ready(self, x: int, purpose: str, report: RoundReport) -> None:
        member, server = self.members[x], self.server
        complaint = member.too_strong() if purpose == "model" else []
        if complaint:
            server.take_strong(x, complaint)
            report.exclude(x, "the mark of this round is too strong for its update", "round.too-strong")
            return
        message = member.ready(purpose)
        server.take_ready(x, message, *(member.said() if purpose == "model" else ()))

    def _ask(
        self,
        report: RoundReport,
        stage: str,
        config: Mapping[str, Any],
        /,
        *,
        arrays: Mapping[str, Any] = NOTHING,
        only: Collection[int] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """What members say when the server must settle an earlier round first."""
        said: dict[int, dict[str, Any]] = {}
        lost = self._losses.at(report.round, "unmask", 1, self.members)
        requests = json.loads(config.get("requests", "{}"))
        for x, member in self.members.items():
            if x in lost or (only is not None and x not in only) or (stage == "again" and str(x) not in requests):
                continue
            with _excluding(report, x):
                if stage == "again":
                    said[x] = {"answer": member.unmask(bytes.fromhex(requests[str(x)]))}
                elif stage == "state":
                    answered, draw = member.answered(bytes.fromhex(config["of-state"]))
                    said[x] = {"answered": answered, "of-draw": draw}
                elif stage == "never":
                    state, draw = bytes.fromhex(config["state"]), config.get("of-draw", 0)
                    said[x] = {"never": member.never(state, config["of-round"], draw)}
                elif stage == "vouch":
                    level, number = bytes.fromhex(config["sum-level"]), config["sum-round"]
                    told = number, config["sum-halvings"], arrays["sum"], level
                    said[x] = {"summed": member.vouch(Link.told(config), *told)}
                elif stage == "second":
                    said[x] = {"seconded": member.second(*read_links(config["link"]))}
        return said

    def _seed_for(self, point: int) -> int | None:
        return None if self._seed is None else research_seed(self._seed, self.history.round, point)

    # --- a run's folder ---

    def _keep(self) -> None:
        """With the server's own file, so that a crash leaves the round before, or this one."""
        averages = {str(x): m.average for x, m in self.members.items() if m.average is not None}
        self.server.notes = {
            "rounds": self.round_no,
            "marks": self.marks,
            "seed": self._seed,
            "averages": averages,
            "reports": json.dumps([asdict(r) for r in self.reports]),
        }
        self.server.save(self.server.like)
        if self._tracer is not None and self._folder is not None:
            write_private(self._folder / NOISE, self._tracer.to_bytes(self.history.mark))
        self._show()

    def _show(self) -> None:
        """What people look at, made from what the run goes on from: whole again after a crash."""
        assert self._folder is not None  # noqa: S101
        lines = [json.dumps(asdict(report)) + "\n" for report in self.reports]
        write_shared(self._folder / "events.jsonl", "".join(lines).encode())
        write_safetensors(self.model, self._folder / "model.safetensors")

    def _resume(self) -> None:
        notes = self.server.notes
        if not notes:  # it died in its first round
            return
        if (notes.get("marks"), notes.get("seed")) != (self.marks, self._seed):
            raise RecordError(f"{str(self._folder)!r} holds another run: use a new folder")
        try:
            self.round_no = int(notes["rounds"])
            self.reports = [_report(entry) for entry in json.loads(notes["reports"])]
            for x, member in self.members.items():
                member.average = notes["averages"].get(str(x))
        except (KeyError, AttributeError, *DAMAGED) as error:
            raise RecordError(f"{str(self._folder)!r} holds a damaged run ({type(error).__name__})") from None
        if self._tracer is not None and self._folder is not None:
            with contextlib.suppress(OSError):  # without it, what is measured is about the rounds that follow
                self._tracer.restore((self._folder / NOISE).read_bytes(), self.history.mark.chain)
        self._show()


def watch(run: Federation, rounds: int, console: Console, title: str = "training", last: int = 12) -> None:
    """Runs until so many rounds are done, with a table of the last ones that grows while it runs, and says at once if
    the mark will end up weak; the last line tells what z to expect."""
    warned = False
    with Live(console=console, transient=True, auto_refresh=False) as live:
        for report in run.rounds(rounds):
            live.update(_table(run, rounds, title, last), refresh=True)
            if report.advice and not warned:
                warned = True
                live.console.print(f"round {report.round}: {report.advice}")
    line = summary(run)
    if line:
        console.print(f"{title}: {line}")


def summary(run: Federation) -> str:
    """A run's last line: what a verification of its model should find. Empty if there is no mark."""
    done = [report for report in run.reports if not report.given_up]
    if not run.marks or not done:
        return ""
    return will_pass(done[-1].outlook, run.manifest.terms.policy.z, len(done))


def _table(run: Federation, rounds: int, title: str, last: int) -> Table:
    shown = run.reports[-last:]
    metrics = sorted({name for report in shown for name in report.metrics})
    stages = ("train", "upload", "unmask", "strength")
    heads = ["round", *metrics, "members", "attempts", "mark", "ρ", "z", *(f"{stage} s" for stage in stages)]
    table = Table(*heads, title=f"{title}: round {run.round_no} of {rounds}", title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for report in shown:
        numbers = [f"{report.metrics[name]:.4f}" if name in report.metrics else "" for name in metrics]
        taken = [f"{report.seconds.get(stage, 0.0):.2f}" for stage in stages]
        if report.given_up:
            table.add_row(str(report.round), *numbers, "given up", *[""] * (4 + len(stages)))
            continue
        counts = [str(len(report.members)), str(report.attempts), "yes" if report.marked else "no"]
        mark = [f"{report.rho:.4f}", f"{report.corrected_z:.1f}"]
        table.add_row(str(report.round), *numbers, *counts, *mark, *taken)
    return table


def _report(entry: dict[str, Any]) -> RoundReport:
    entry["members"] = tuple(entry["members"])
    entry["lost"] = {stage: tuple(points) for stage, points in entry["lost"].items()}
    for name in ("excluded", "excluded_codes"):
        entry[name] = {int(x): why for x, why in entry[name].items()}
    entry["widened"] = {int(x): count for x, count in entry["widened"].items()}
    entry["disputed"] = {int(x): tuple(about) for x, about in entry["disputed"].items()}
    entry["held"] = tuple(entry["held"])
    return RoundReport(**entry)


def without_values(error: QuorumarkError) -> str:
    """An error for a report that others read: not with the member's weight that caused it."""
    return f"{error.argument} {error.rule}" if isinstance(error, EncodingError) else str(error)


@contextlib.contextmanager
def _excluding(report: RoundReport, point: int) -> Iterator[None]:
    """A member that refuses, or whose weights or messages cannot be used, is out and named; the round goes on."""
    try:
        yield
    except QuorumarkError as error:
        report.exclude(point, without_values(error), code_of(error))


class timed:  # noqa: N801 - used like a function
    """Adds the time of a block to a report."""

    def __init__(self, report: RoundReport, stage: str) -> None:
        self._report, self._stage = report, stage

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        taken = time.perf_counter() - self._start
        self._report.seconds[self._stage] = self._report.seconds.get(self._stage, 0.0) + taken
