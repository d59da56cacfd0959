"""What a trial found, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from quorumark.consortium.plan import MOST_C, MOST_RHO
from quorumark.round.outlook import NOTHING, Outlook
from quorumark.simulation import RoundReport
from quorumark.trial.userfile import Score

__all__ = ["ENOUGH", "Costs", "Finding", "Setting", "Tested", "Trial", "gap", "points"]

ENOUGH = 4.0
"""z above its threshold by this much is safe from the key's own chance, which moves z by 1."""
KEPT = 0.05
"""An attack that costs less than this share of the score would be worth it to a thief."""
LEAST = 0.01
"""Where evaluate() gives one number, a smaller loss than this share of it is not told from chance."""

_TRAINING = ("train", "evaluate")  # stages of a round that a run without quorumark has as well


@dataclass(frozen=True)
class Setting:
    """What the trial was run with."""

    file: str
    members: int
    threshold: int
    rounds: int
    seed: int
    strength: Mapping[str, str]
    chosen: tuple[str, ...]  # the settings of the strength that the user set
    names: tuple[str, ...]
    examples: tuple[int, ...]
    weights: int
    carriers: int
    groups: int
    covered: float
    metric: bool
    planned: float  # what most models reach, and below what the slowest did
    planned_least: float
    warnings: tuple[str, ...] = ()

    @property
    def shown(self) -> dict[str, str]:
        """The settings of the strength that matter: those that were planned, and those that the user set."""
        return {n: text for n, text in sorted(self.strength.items()) if n in ("rho", "c_max", *self.chosen)}

    @property
    def answering(self) -> int:
        """How many members answer a query: one more than it takes, so that a wrong answer is noticed."""
        return min(self.members, self.threshold + 1)


@dataclass(frozen=True)
class Tested:
    """A model that was put to the members: what was done to it, what they found, and how good it still is."""

    what: str
    verdict: str
    z: float | None
    threshold: float | None
    score: Score | None = None
    aligned: bool = False
    refused: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict == "PASSED"


@dataclass(frozen=True)
class Costs:
    """Of a round, in the median over rounds: all members and the server, in one process.

    seconds of training, of secure aggregation without a mark, and with it; bytes that a member uploads in each case,
    and what its float32 weights would be.
    """

    training: float
    summing: float
    marking: float
    plain_bytes: int
    summed_bytes: int
    marked_bytes: int
    key_seconds: float
    key_bytes: int

    @classmethod
    def of(
        cls,
        marked: list[RoundReport],
        unmarked: list[RoundReport],
        weights: int,
        key_seconds: float,
        coordinates: int,
    ) -> Costs:
        def protocol(reports: list[RoundReport]) -> float:
            return median(sum(s for stage, s in r.seconds.items() if stage not in _TRAINING) for r in reports)

        def uploaded(reports: list[RoundReport]) -> int:
            return int(median(r.uploaded_bytes // max(1, len(r.members)) for r in reports))

        training = median(r.seconds.get("train", 0.0) for r in (*marked, *unmarked))
        return cls(
            training,
            protocol(unmarked),
            protocol(marked),
            4 * weights,
            uploaded(unmarked),
            uploaded(marked),
            key_seconds,
            8 * coordinates,
        )


@dataclass
class Trial:
    """Everything that a trial found."""

    setting: Setting
    curves: dict[str, list[Score]] = field(default_factory=lambda: {"marked": [], "unmarked": []})
    outlooks: list[Outlook] = field(default_factory=list)
    original: Tested | None = None
    corroboration: str = ""
    control: Tested | None = None
    hidden: Tested | None = None
    attacks: list[Tested] = field(default_factory=list)
    costs: Costs | None = None
    seconds: float = 0.0

    @property
    def tested(self) -> list[Tested]:
        """All models that were put to the members, in the order in which they were."""
        aligned = [tested for tested in self.attacks if tested.aligned]
        plain = [tested for tested in self.attacks if not tested.aligned]
        every = (self.original, *plain, self.control, self.hidden, *aligned)
        return [tested for tested in every if tested is not None]

    @property
    def outlook(self) -> Outlook:
        """What was expected after the last round."""
        return self.outlooks[-1] if self.outlooks else NOTHING

    @property
    def loss(self) -> tuple[float, float] | None:
        """What the mark costs in score, marked less unmarked, and what chance may do (three standard errors)."""
        marked, unmarked = self.curves["marked"], self.curves["unmarked"]
        if not marked or not unmarked:
            return None
        difference, error = marked[-1].less(unmarked[-1])
        return difference, LEAST * abs(unmarked[-1].value) if error is None else 3 * error

    @property
    def costs_accuracy(self) -> bool:
        """Whether the marked model is worse by more than chance."""
        return self.loss is not None and self.loss[0] < -self.loss[1]

    def kept(self, tested: Tested) -> bool:
        """Whether an attacked model is still worth having; yes where nothing tells."""
        if tested.score is None or not self.curves["marked"]:
            return True
        before = self.curves["marked"][-1].value
        return tested.score.value >= before - KEPT * abs(before)

    @property
    def beaten_by(self) -> list[Tested]:
        """Attacks that hid the mark and left a good model."""
        return [tested for tested in self.attacks if not tested.passed and self.kept(tested)]

    @property
    def findings(self) -> list[Finding]:
        """What speaks against it, and what would help."""
        found, original = [], self.original
        if original is None or original.z is None or original.threshold is None:
            return [Finding(f"The members could not test the model: {original.refused if original else ''}", "")]
        if not original.passed:
            text = f"z = {original.z:.1f} is below the threshold {original.threshold:.1f}: the mark is too weak."
            found.append(Finding(text, self._stronger()))
        elif original.z < original.threshold + ENOUGH:
            text = f"z = {original.z:.1f} is near the threshold {original.threshold:.1f}: another key may fail."
            found.append(Finding(text, self._stronger()))
        if self.costs_accuracy and self.loss is not None:
            lost, chance = (gap(size, self.curves["unmarked"][-1]).lstrip("−+") for size in self.loss)
            text = f"The mark costs {lost} of {self.measure}, more than the {chance} that chance explains."
            weaker = " ".join(self._strength(0.5))
            found.append(Finding(text, f"What helps: a weaker mark ({weaker}), or a larger model."))
        if original.passed and self.beaten_by:
            named = "; ".join(tested.what for tested in self.beaten_by)
            text = f"The mark is not found, and the model still good, after: {named}."
            found.append(Finding(text, self._stronger()))
        return found

    def _stronger(self) -> str:
        options = [f"more rounds (--rounds {2 * self.setting.rounds})", "a larger model"]
        stronger = self._strength(2)
        if stronger:
            options.append(f"a stronger mark ({' '.join(stronger)})")
        return f"What helps: {', or '.join(options)}."

    def _strength(self, factor: float) -> list[str]:
        """Options for a stronger or weaker mark, as far as a plan would go; none if it is there already."""
        settings = self.setting.strength
        most = {"rho": MOST_RHO, "c_max": MOST_C}
        before = {name: float(settings[name]) for name in most if name in settings}
        after = {name: max(min(most[name], factor * old), min(old, factor * old)) for name, old in before.items()}
        return [f"--strength {name}={new:.3g}" for name, new in after.items() if new != before[name]]

    @property
    def measure(self) -> str:
        """What evaluate() seems to give."""
        curve = self.curves["unmarked"]
        return "accuracy" if curve and all(0 <= score.value <= 1 for score in curve) else "score"

    @property
    def works(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """For trial.json: numbers, no key, no share."""
        original = self.original
        return {
            "works": self.works,
            "findings": [finding.text for finding in self.findings],
            "members": self.setting.members,
            "threshold": self.setting.threshold,
            "rounds": self.setting.rounds,
            "seed": self.setting.seed,
            "strength": dict(self.setting.strength),
            "weights": self.setting.weights,
            "carriers": self.setting.carriers,
            "score": {name: [score.value for score in curve] for name, curve in self.curves.items()},
            "difference": None if self.loss is None else {"value": self.loss[0], "chance": self.loss[1]},
            "z": {
                "planned": self.setting.planned,
                "planned_least": self.setting.planned_least,
                "forecast": self.outlook.expected_z,
                "survival": self.outlook.survival,
                "survival_error": self.outlook.survival_error,
                "corrected": self.outlook.corrected_z,
                "corrected_error": self.outlook.corrected_error,
                "measured": None if original is None else original.z,
                "threshold": None if original is None else original.threshold,
            },
            "corroboration": self.corroboration,
            "rho": self.outlook.rho,
            "tested": [
                {
                    "what": tested.what,
                    "verdict": tested.verdict,
                    "z": tested.z,
                    "threshold": tested.threshold,
                    "score": None if tested.score is None else tested.score.value,
                    "refused": tested.refused,
                }
                for tested in self.tested
            ],
            "costs": None if self.costs is None else vars(self.costs),
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Finding:
    """Something that speaks against the mark in this model, and what to change."""

    text: str
    remedy: str


def points(score: Score | None) -> str:
    """A score as people read it: in percent from 0 to 1, as it is otherwise."""
    if score is None:
        return ""
    return f"{100 * score.value:.1f} %" if 0 <= score.value <= 1 else f"{score.value:.4g}".replace("-", "−")


def gap(difference: float, score: Score) -> str:
    """A difference of such scores, with its sign."""
    text = f"{round(100 * difference, 1) + 0.0:+.1f} points" if 0 <= score.value <= 1 else f"{difference:+.3g}"
    return text.replace("-", "−")
