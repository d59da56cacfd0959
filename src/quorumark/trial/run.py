"""The trial itself: a consortium of its own, training with and without the mark, verification, attacks.

Everything goes through the front door, as in a program of your own: `Terms.agree`, `Home.make_key`, `Federation`,
`Reference.ask`, `Home.answer`, `Reference.combine`. So the numbers are those that the members would get.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quorumark as qm
from quorumark.align.coverage import Coverage
from quorumark.align.groups import Groups
from quorumark.align.trace import UnknownOperation
from quorumark.consortium.hiding import check_roster
from quorumark.consortium.plan import Plan, PlanWarning
from quorumark.consortium.policy import Policy
from quorumark.errors import InputError, QuorumarkError, RoundError
from quorumark.model.layout import ModelLayout, write_safetensors
from quorumark.research.attacks import Target
from quorumark.research.attacks import run as attack
from quorumark.round.history import research_seed
from quorumark.simulation import RoundReport
from quorumark.trial.results import Costs, Setting, Tested, Trial
from quorumark.trial.userfile import UserFile

__all__ = ["FILES", "Options", "Prepared", "Watch", "conduct", "prepare"]

NAMES = ("Avon", "Birch", "Cedar", "Delta", "Elm", "Forth", "Gale", "Hazel", "Iris", "Juniper")
FILES = {"model": "model.safetensors", "unmarked": "unmarked.safetensors", "certificate": "certificate.json"}
TUNED = 10  # so many times train() again, on one member's data
THRESHOLD = float(Policy().z)
WITHOUT = "Without alignment, anybody who renumbers the channels hides the mark"
_TIMED, _SHORT = 3, 2.0  # calls of train() to time it, if the first takes less than so many seconds
CONTROL = 1024  # coordinates of the control's key: nothing is marked with it, and a short key is made in no time


@dataclass(frozen=True)
class Options:
    """What a user may choose."""

    members: int = 5
    threshold: int | None = None
    rounds: int = 30
    seed: int = 0
    strength: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 3 <= self.members <= 64:
            raise InputError("--members", "must be from 3 to 64", self.members)
        if self.threshold is not None and not 2 <= self.threshold <= self.members:
            raise InputError("--threshold", f"must be from 2 to the {self.members} members", self.threshold)
        if self.rounds < 1:
            raise InputError("--rounds", "must be at least 1", self.rounds)
        if not 0 <= self.seed < 1 << 31:
            raise InputError("--seed", "must be from 0 to 2^31−1", self.seed)

    @property
    def quorum(self) -> int:
        """t: more than half, unless it was chosen."""
        return self.members // 2 + 1 if self.threshold is None else self.threshold


class Watch:
    """Who wants to know how far a trial is; this one does not."""

    def prepared(self, prepared: Prepared) -> None: ...

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:  # noqa: ARG002
        """Around something that takes a while."""
        yield

    def key_made(self, trial: Trial, seconds: float) -> None: ...

    @contextmanager
    def training(self, trial: Trial) -> Iterator[Callable[[], None]]:  # noqa: ARG002
        """Around training; what it gives is called after each round."""
        yield lambda: None


@dataclass(frozen=True, eq=False)
class Prepared:
    """What is known before anything is trained: the model, its data, how it would be marked."""

    user: UserFile
    setting: Setting
    initial: dict[str, Any]
    data: list[Any]
    layout: ModelLayout
    groups: Groups | None
    example: Any
    once: float  # seconds of one member's training


def prepare(user: UserFile, options: Options) -> Prepared:
    """Calls every function of the file once, and says what is wrong with it before the minutes begin."""
    module = user.make(options.seed)
    initial = user.weights_of(module)
    layout = ModelLayout.of(module)
    data = user.data(options.members)
    planned = plan(layout, options)
    example = user.example(data)
    groups, notes = find_groups(module, example, layout)
    metric = user.evaluate(initial)
    once = _time_once(user, initial, data[0], options.seed)
    names = tuple(NAMES[n] if n < len(NAMES) else f"Member{n + 1}" for n in range(options.members))
    coverage = 0.0 if groups is None else 1 - Coverage.of(groups, layout).share
    if metric is None:
        notes = (*notes, "the file has no evaluate(): what the mark costs in accuracy is not measured")
    setting = Setting(
        str(user.path),
        options.members,
        options.quorum,
        options.rounds,
        options.seed,
        dict(planned.strength),
        tuple(sorted(options.strength)),
        names,
        tuple(user.examples(own) for own in data),
        sum(tensor.numel() for tensor in initial.values()),
        layout.coordinates,
        0 if groups is None else len(groups.groups),
        coverage,
        metric is not None,
        planned.expected_z,
        planned.least_z,
        (*(advice.text for advice in planned.advice), *notes),
    )
    return Prepared(user, setting, initial, data, layout, groups, example, once)


def _time_once(user: UserFile, initial: dict[str, Any], data: Any, seed: int) -> float:
    """Seconds of one member's training. The first call takes longer: unless that is long already, others are timed."""
    taken: list[float] = []
    while not taken or (len(taken) < _TIMED and taken[0] < _SHORT):
        started = time.perf_counter()
        copied = {name: tensor.clone() for name, tensor in initial.items()}
        user.train(copied, data, seed=seed, round_no=1, rate=1.0)
        taken.append(time.perf_counter() - started)
    return min(taken)


def plan(layout: ModelLayout, options: Options) -> Plan:
    """How strong the mark will be. Where not even a usual model would pass, it is refused here, with figures."""
    if options.strength.get("warmup_rounds", "0") != "0":
        raise InputError("--strength", "must leave warmup_rounds at 0 in a trial", options.strength["warmup_rounds"])
    found = Plan.propose(layout, options.rounds, strength=options.strength)
    if found.expected_z < THRESHOLD and found.strength["rule"] != "paper":
        told = " ".join(advice.text for advice in found.advice)
        raise InputError(
            "the model",
            f"must be large enough for a mark, and the run long enough: z = {THRESHOLD:g} is needed",
            f"{layout.coordinates:,} weights that can carry it and {options.rounds} rounds, of which "
            f"z = {found.expected_z:.1f} is expected: {told}",
        )
    return found


def find_groups(module: Any, example: Any, layout: ModelLayout) -> tuple[Groups | None, tuple[str, ...]]:
    """Which channels belong together; None and why where they cannot be found: the trial goes on without alignment."""
    if example is None:
        return None, (f"no input of the model is known: the file has no example(). {WITHOUT}",)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            found = qm.derive_groups(module.cpu().eval(), example)
            found.check(layout)
        except Exception as error:  # noqa: BLE001 - it runs the user's forward(), and operations nobody foresaw
            told = (str(error).splitlines() or [""])[0]
            return None, (f"groups of channels were not found ({type(error).__name__}: {told}). {WITHOUT}",)
    unknown = tuple(str(warning.message) for warning in noted if warning.category is UnknownOperation)
    if not found:
        return None, (*unknown, f"no channels of this model can be put back in order. {WITHOUT}")
    coverage = Coverage.of(found, layout)
    little = f"{100 * coverage.share:.0f} % of the carriers could be hidden by renumbering channels"
    return found, (*unknown, *([little] if coverage.open else []))


# --- the consortium ---------------------------------------------------------------------------------------


def conduct(prepared: Prepared, folder: Path, watch: Watch | None = None) -> Trial:
    """Founds a consortium in the folder, trains, verifies and attacks. What it leaves there answers `verify`."""
    watch, started = watch or Watch(), time.perf_counter()
    setting, trial = prepared.setting, Trial(prepared.setting)
    with watch.busy("making the key"):
        homes, seconds = make_consortium(prepared, folder / "members", prepared.layout, setting.strength)
        # the control has a consortium of its own: no two sums of one round are ever opened in one
        others, _ = make_consortium(prepared, folder / "control", _short(prepared), {"lr": setting.strength["lr"]})
    watch.key_made(trial, seconds)
    marked, unmarked = _train(prepared, trial, homes, others, watch)
    trial.costs = Costs.of(marked.reports, unmarked.reports, setting.weights, seconds, setting.carriers)
    public = qm.Reference.publish(folder, homes[0], prepared.initial, prepared.groups, prepared.layout)
    models = {"model": marked.model, "unmarked": unmarked.model}
    for name, model in models.items():
        write_safetensors(_arrays(model), folder / FILES[name])
    panel = Panel(prepared, trial, public, homes[: setting.answering], watch)
    panel.certify(folder)
    panel.attack(models["model"])
    trial.control = panel.ask("trained without the mark", models["unmarked"])
    panel.permute(models["model"])
    trial.seconds = time.perf_counter() - started
    return trial


def _short(prepared: Prepared) -> ModelLayout:
    return ModelLayout.of(
        prepared.user.make(prepared.setting.seed), max_coordinates=min(CONTROL, prepared.layout.coordinates)
    )


def make_consortium(
    prepared: Prepared, members: Path, layout: ModelLayout, strength: Mapping[str, str]
) -> tuple[list[qm.Home], float]:
    """Homes for all members, terms and a key, as `quorumark member init`, `consortium create`, `setup dkg` do it."""
    setting = prepared.setting
    started = time.perf_counter()
    homes = [qm.Home.create(members / name, name, key_file=members / f"{name}.key") for name in setting.names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # `prepare` tells it, and the control has no mark
        terms = qm.Terms.agree(
            "trial",
            setting.threshold,
            [(home.card, examples) for home, examples in zip(homes, setting.examples, strict=True)],
            prepared.initial,
            layout=layout,
            groups=prepared.groups,
            without_alignment=prepared.groups is None,
            strength=strength,
        )
    check_roster(terms)
    qm.Home.make_key(homes, terms, repeatable=True)
    return homes, time.perf_counter() - started


# --- training ---------------------------------------------------------------------------------------------


def _train(
    prepared: Prepared, trial: Trial, homes: Sequence[qm.Home], others: Sequence[qm.Home], watch: Watch
) -> tuple[qm.Federation, qm.Federation]:
    """Both runs, a round of one after a round of the other, with the same seeds."""
    user, setting = prepared.user, prepared.setting
    failed: list[QuorumarkError] = []

    def train(weights: dict[str, Any], data: Any, *, seed: int, round_no: int, rate: float) -> dict[str, Any]:
        try:
            return user.train(weights, data, seed=seed, round_no=round_no, rate=rate)
        except QuorumarkError as error:  # a federation goes on without a member that fails: here it is the user's code
            failed.append(error)
            raise

    def federation(members: Sequence[qm.Home], *, mark: bool, layout: ModelLayout) -> qm.Federation:
        return qm.Federation.of_homes(
            members, prepared.initial, train, prepared.data, mark=mark, seed=setting.seed, layout=layout
        )

    marked = federation(homes, mark=True, layout=prepared.layout)
    unmarked = federation(others, mark=False, layout=_short(prepared))
    initial = user.evaluate(prepared.initial)
    for curve in trial.curves.values():
        curve += [] if initial is None else [initial]
    with watch.training(trial) as tell:
        for _ in range(setting.rounds):
            for name, run in (("marked", marked), ("unmarked", unmarked)):
                report = run.round()
                _check_round(report, failed)
                score = user.evaluate(run.model)
                trial.curves[name] += [] if score is None else [score]
            trial.outlooks.append(marked.reports[-1].outlook)
            tell()
    return marked, unmarked


def _check_round(report: RoundReport, failed: Sequence[QuorumarkError]) -> None:
    if failed:
        raise failed[0]
    if report.given_up:
        raise RoundError(f"round {report.round} was given up: {report.given_up}", code="round.given-up")
    if report.excluded:
        point, why = next(iter(report.excluded.items()))
        raise RoundError(
            f"the member at point {point} was left out of round {report.round}: {why}", code="round.given-up"
        )


# --- verification and attacks -----------------------------------------------------------------------------


class Panel:
    """The members who answer, and the models that are put to them."""

    def __init__(
        self, prepared: Prepared, trial: Trial, public: qm.Reference, homes: Sequence[qm.Home], watch: Watch
    ) -> None:
        self._prepared, self._trial, self._public, self._homes = prepared, trial, public, homes
        self._watch = watch

    def _certificate(self, suspect: Any, *, align: bool = False) -> qm.Certificate:
        """Query, answers, combination, and the signature of each who answered: then the ledgers know the verdict."""
        with self._watch.busy("the members answer"):
            query = self._public.ask(suspect, align=align)
            partials = [home.answer(self._public, suspect, query, approve=True) for home in self._homes]
            certificate = self._public.combine(query, partials)
            for home in self._homes:
                certificate = home.sign(certificate)
        return certificate

    def _told(self, what: str, certificate: qm.Certificate, weights: dict[str, Any], *, aligned: bool) -> Tested:
        finding = certificate.finding
        score = self._prepared.user.evaluate(weights)
        return Tested(what, finding.verdict, float(finding.z), float(finding.threshold), score, aligned)

    def ask(self, what: str, weights: dict[str, Any], *, align: bool = False) -> Tested:
        """What members say of a model; where they refuse to answer, why."""
        try:
            certificate = self._certificate(weights, align=align)
        except QuorumarkError as error:
            score = self._prepared.user.evaluate(weights)
            return Tested(what, "REFUSED", None, None, score, align, refused=str(error))
        return self._told(what, certificate, weights, aligned=align)

    def certify(self, folder: Path) -> None:
        """The certificate for the trained model, checked from its files, and its page."""
        from quorumark.files import write_shared
        from quorumark.research.attacks.suite import load_weights

        suspect = folder / FILES["model"]
        certificate = self._certificate(suspect)
        write_shared(folder / FILES["certificate"], certificate.to_bytes())
        self._public.check(certificate, suspect, report=folder / "certificate.html")
        self._trial.corroboration = certificate.finding.corroboration
        self._trial.original = self._told("as it was trained", certificate, load_weights(suspect), aligned=False)

    def _target(self, weights: dict[str, Any]) -> Target:
        prepared, seed = self._prepared, self._trial.setting.seed
        return Target(
            lambda: prepared.user.make(seed),
            weights,
            layout=prepared.layout,
            known=prepared.groups,
            example=prepared.example,
        )

    def attack(self, weights: dict[str, Any]) -> None:
        """What a thief would try first, each answered like a query in earnest."""
        trial, target, seed = self._trial, self._target(weights), self._trial.setting.seed
        trial.attacks.append(self.ask(f"fine-tuned: {TUNED} more rounds by one member alone", self._tuned(weights)))
        for what, name, settings in (
            ("pruned: the smaller half of the weights set to 0", "pruning", {"ratio": 0.5}),
            ("quantised to 4 bits (Q4_0)", "quantisation", {"scheme": "q4_0"}),
            ("noise of 10 % of each tensor's spread added", "noise", {"strength": 0.1}),
        ):
            with self._watch.busy(f"attack: {name}"):
                changed = attack(name, target, seed=seed, **settings).weights
            trial.attacks.append(self.ask(what, changed))

    def _tuned(self, weights: dict[str, Any]) -> dict[str, Any]:
        prepared, setting = self._prepared, self._trial.setting
        tuned = {name: tensor.clone() for name, tensor in weights.items()}
        with self._watch.busy("attack: fine-tuning"):
            for number in range(setting.rounds + 1, setting.rounds + 1 + TUNED):
                seed = research_seed(setting.seed, number, 1)
                tuned = prepared.user.train(tuned, prepared.data[0], seed=seed, round_no=number, rate=1.0)
        return tuned

    def permute(self, weights: dict[str, Any]) -> None:
        """Channels in another order: hidden from a plain query, found again by one that aligns."""
        if self._prepared.groups is None:
            return
        changed = attack("permutation", self._target(weights), seed=self._trial.setting.seed).weights
        self._trial.hidden = self.ask("channels permuted, which hides the mark", changed)
        self._trial.attacks.append(self.ask("channels permuted, and aligned again", changed, align=True))


def _arrays(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.items()}
