"""What strength a run needs, and what z to expect of it, before there is a key (docs/strength.md, "Plan").

Each round adds at most c·‖update‖ of the mark, and after N rounds z = √d·min(c·reach(N), share·ρ*): d weights carry, c
is the strength's `c_max`, and the rule stops where the mark has ρ* of the distance from the anchor. How far a mark gets
depends on how the model trains: where updates cancel out the mark adds up beside them (ρ ≈ c·√N), where they go
straight on it does not (ρ ≈ c). So `reach` is from measured runs, twice: what most of them reached, and the least. A
plan counts on the least, and tells both.

    plan = Plan.propose(layout, rounds=30)
    plan.strength, plan.expected_z, plan.least_z, [advice.code for advice in plan.advice]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, exp, floor, log, sqrt

from quorumark.consortium.strength import ONE, Strength
from quorumark.errors import InputError
from quorumark.model.layout import ModelLayout

__all__ = ["SPARED", "TARGET_Z", "Advice", "Plan", "PlanWarning", "growth", "unplanned"]

TARGET_Z = 12.0
"""What a plan aims at: twice the usual threshold, so that a suspect may lose half of the mark."""

CHANCE = 2.0  # z of one key differs from what is expected by a normal number of variance 1
MOST_RHO = MOST_C = 0.1  # a plan proposes no more of either: what the trajectory, and a single update, tell
USUAL_RHO, USUAL_C = 0.05, 0.03  # nor less: a stronger mark than z = 12 needs stands more
SPARED = 2  # rounds before the mark begins

# z/(c·√d) after so many rounds, of eighteen kinds of training of small models (docs/strength.md has the table); where z
# dips on its way, the least has the dip before it, too, so that more rounds never promise less
_LEAST = {3: 0.06, 4: 0.1, 8: 0.105, 10: 0.14, 13: 0.142, 15: 0.165, 20: 0.31, 30: 0.42, 45: 0.455, 60: 0.46}
_LIKELY = {3: 0.18, 4: 0.3, 5: 0.37, 8: 0.48, 10: 0.52, 15: 0.6, 20: 0.68, 30: 0.8, 45: 0.92, 60: 1.0}
# z/(ρ*·√d) of the same runs; the least is one whose steps soon became small, so that L was used up far below ρ*
_LEAST_SHARE, _LIKELY_SHARE = 0.44, 0.85
_FELT = 0.75  # ‖S‖/(c·‖D‖): amplitudes are the least of rows, columns and taps
_LONGEST = 60  # what longer runs reach beyond this was not measured, and is not counted on


@dataclass(frozen=True)
class Advice:
    """Something that the members should know before they make a key: a code for programs, a sentence for people."""

    code: str
    text: str


class PlanWarning(UserWarning):
    """A plan that may end with too little: `Terms.agree` warns by it."""


@dataclass(frozen=True)
class Plan:
    """The strength that a run of `rounds` rounds needs, and what to expect at its end.

    `strength` is what `Terms` takes. `expected_z` is what most models get, `least_z` what the slowest did; `c` the
    largest cosine of one update with the key, `rho` that of the whole way, `leak` is √Σ(‖S‖/‖D‖)² over all rounds.
    `advice` is empty where there is nothing to say.
    """

    coordinates: int
    rounds: int
    target_z: float
    strength: Mapping[str, str]
    expected_z: float
    least_z: float
    c: float
    rho: float
    leak: float
    advice: tuple[Advice, ...]

    @classmethod
    def propose(
        cls,
        model: ModelLayout | int,
        rounds: int | None = None,
        *,
        target_z: float = TARGET_Z,
        strength: Mapping[str, str] | None = None,
    ) -> Plan:
        """The strength for a model (its layout, or how many weights carry), with whatever `strength` sets already.

        Without `rounds` it proposes the fewest that are enough, or the longest run that was measured if none is. It
        never proposes more than ρ = 0.1 and c = 0.1, though terms may have more: the advice says what that would bring.
        """
        coordinates = model if isinstance(model, int) else model.coordinates
        if rounds is None:
            plans = (
                cls.propose(coordinates, number, target_z=target_z, strength=strength)
                for number in range(1, _LONGEST + 1)
            )
            for plan in plans:
                if plan.enough:
                    break
            return plan
        if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds < 10**6:
            raise InputError("rounds", "must be an integer from 1 to 999999", repr(rounds))
        if not 0 < target_z <= 1e6:
            raise InputError("target_z", "must be above 0", target_z)
        given = dict(strength or {})
        settings = {"rounds": str(rounds), **given}
        if given.get("rule", "rho") == "rho":
            first = Strength.of(settings, coordinates)
            aim, root = target_z + CHANCE, sqrt(coordinates)
            if "rho" not in given:
                settings["rho"] = _text(min(MOST_RHO, max(USUAL_RHO, target_z / (_LEAST_SHARE * root))))
            if "c_max" not in given:
                most = _most_c(first)
                reach = _reach(_LEAST, _full_rounds(first, rounds))
                reach *= _left(first, _full_rounds(first, rounds))
                settings["c_max"] = _text(min(most, max(USUAL_C, aim / (reach * root) if reach else most)), most)
        return cls.of(Strength.of(settings, coordinates), coordinates, rounds, target_z=target_z)

    @classmethod
    def of(cls, strength: Strength, coordinates: int, rounds: int, *, target_z: float = TARGET_Z) -> Plan:
        """What to expect of a strength as it is."""
        c, limit, full = strength.c_max / ONE, strength.rho / ONE, _full_rounds(strength, rounds)
        most = limit if strength.rule in ("rho", "target") else 1.0

        def z(reach: Mapping[int, float], share: float) -> float:
            return sqrt(coordinates) * min(c * _reach(reach, full) * _left(strength, full), share * most)

        least, likely = z(_LEAST, _LEAST_SHARE), z(_LIKELY, _LIKELY_SHARE)
        if strength.rule == "paper":  # its scale depends on the model (docs/strength.md, "The paper's rule")
            least = likely = 0.0
        rho = min(most, likely / (_LIKELY_SHARE * sqrt(coordinates)))
        free = c * _reach(_LIKELY, full) / _LIKELY_SHARE  # what ρ would be if nothing stopped it
        leak = _FELT * c * sqrt(max(0, rounds - SPARED - strength.warmup_rounds)) * (rho / free if free else 0.0)
        plan = cls(
            coordinates, rounds, target_z, strength.as_dict(), round(likely, 1), round(least, 1), c, rho, leak, ()
        )
        return replace(plan, advice=tuple(_advice(plan, strength, full)))

    @property
    def enough(self) -> bool:
        """Whether even a model that is slow to take the mark gets as far as was asked for."""
        return self.least_z >= self.target_z

    def lines(self) -> list[str]:
        """For people: what to expect, and what to know."""
        if any(advice.code == "plan.no-forecast" for advice in self.advice):
            return [advice.text for advice in self.advice]
        rule = self.strength["rule"]
        most = self.strength["c" if rule == "relative" else "c_max"]
        whole = f", rho={self.strength['rho']} of the whole way from the initial model" if rule == "rho" else ""
        found = [
            f"plan: after {self.rounds} rounds with {self.coordinates:,} carrying weights a z of {self.expected_z:.0f} "
            f"is expected, {self.least_z:.0f} for models that are slow to take a mark; {self.target_z:g} is asked for",
            f"the mark is at most c_max={most} of one update{whole}",
        ]
        return found + [f"{'note' if self.enough else 'WARNING'}: {advice.text}" for advice in self.advice]


def _advice(plan: Plan, strength: Strength, full: float) -> Iterator[Advice]:
    if strength.rule == "paper":
        yield Advice("plan.no-forecast", "under the rule 'paper' no z can be expected before the first rounds")
        return
    if plan.c > MOST_C or strength.rho > ONE * MOST_RHO:
        yield Advice(
            "plan.loud",
            f"a single update shows the key with a cosine of up to {plan.c:.2g}, the whole way with "
            f"{strength.rho / ONE:.2g}: plans propose no more than {MOST_C:g} of either",
        )
    if strength.rate(plan.rounds) == 0:
        yield Advice(
            "plan.rate-ends",
            f"the learning rate is 0 before round {plan.rounds} (lr={strength.lr}): such rounds carry no mark",
        )
    if plan.enough:
        return
    most, wanted = _most_c(strength), plan.target_z / sqrt(plan.coordinates)  # z/√d
    reach = max(_reach(_LEAST, full) * _left(strength, full), 1e-9)
    loud = wanted / reach  # the c that it takes
    long_enough = next(
        (n for n in range(1, _LONGEST + 1) if max(plan.c, most) * _reach(_LEAST, n) * _left(strength, n) >= wanted),
        None,
    )
    helps = []
    if strength.rule in ("rho", "target") and _LEAST_SHARE * strength.rho / ONE < wanted:
        need = wanted / _LEAST_SHARE
        if need <= MOST_RHO:
            helps.append(f"rho={_text(need)}")
        elif need <= 1 / 2:
            helps.append(
                f"rho={_text(need)} with a c_max as large, if you accept that the global models then show the key with "
                "such a cosine"
            )
    if long_enough is not None and long_enough > full:
        helps.append(f"{long_enough + plan.rounds - floor(full)} rounds")
    if plan.c < min(most, loud) - 1e-6:
        helps.append(f"c_max={_text(min(most, loud), most)}")
    if plan.c < min(loud, MOST_C) - 1e-6 and most < MOST_C:
        helps.append(f"dither={min(3, floor(1 / (2 * min(loud, MOST_C))))} with a c_max of {_text(min(loud, MOST_C))}")
    at_most = min(max(plan.c, most) * reach, _LEAST_SHARE * max(MOST_RHO, strength.rho / ONE))
    if _left(strength, full) < 0.5:
        helps.append("less weight decay")
    carriers = ceil((plan.target_z / at_most) ** 2)
    if plan.coordinates < carriers < 10**12:
        helps.append(f"a model of {_rounded(carriers):,} carrying weights or more (a wider one)")
    small = wanted > _LEAST_SHARE * max(MOST_RHO, strength.rho / ONE) or long_enough is None
    short = long_enough is not None and full < long_enough
    code = "plan.too-small" if small else "plan.too-short" if short else "plan.too-weak"
    why = {
        "plan.too-small": f"the model is small for a mark: {plan.coordinates:,} weights carry",
        "plan.too-short": f"the run is short for a mark: {plan.rounds} rounds",
        "plan.too-weak": "the strength is set low for this run",
    }[code]
    yield Advice(
        code,
        f"{why}. A verification may find as little as z = {plan.least_z:.0f}, and {plan.target_z:g} is asked for. "
        f"What would help: {'; '.join(helps) or 'a larger model and a longer run'}",
    )


def _most_c(strength: Strength) -> float:
    """The largest c_max that a plan proposes: noise of κ·c_max is at most 1/2 of an update."""
    return min(MOST_C, ONE / (2 * strength.dither)) if strength.dither else MOST_C


def _full_rounds(strength: Strength, rounds: int) -> float:
    """How many rounds at the full learning rate the run comes to: a smaller rate moves the model less, and the mark."""
    warm = strength.warmup_rounds
    if strength.lr == "constant":
        return float(max(0, rounds - warm))
    return sum(min(float(strength.rate(number)), 1.0) for number in range(warm + 1, rounds + 1))


def _left(strength: Strength, full: float) -> float:
    """How much weight decay leaves of a mark that was laid on evenly over so many rounds: (1 − e^−x)/x."""
    x = full * float(strength.as_dict().get("decay", "0"))
    return (1 - exp(-x)) / x if x else 1.0


def _reach(table: Mapping[int, float], rounds: float) -> float:
    """Between the table's rounds, linear in their logarithm; nothing before the mark begins."""
    if rounds <= SPARED:
        return 0.0
    points = [(SPARED, 0.0), *table.items()]
    for (a, low), (b, high) in pairwise(points):
        if rounds <= b:
            return low + (high - low) * log(rounds / a) / log(b / a)
    return points[-1][1]


def _text(value: float, most: float = 1.0) -> str:
    """Three decimals, upwards, as settings have them."""
    return f"{min(ceil(value * 1000 - 1e-6), floor(most * 1000 + 1e-6)) / 1000:.3f}".rstrip("0")


def _rounded(count: int) -> int:
    """Upwards to two digits."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step


def growth(strength: Strength, done: int, rounds: int) -> float:
    """By what factor z grows from round `done` to round `rounds` in most runs, where ρ* does not stop it."""
    now, then = (_reach(_LIKELY, _full_rounds(strength, number)) for number in (done, rounds))
    return max(1.0, then / now) if now else 1.0


def unplanned(strength: Strength, coordinates: int) -> Advice:
    """What to tell members whose terms do not say how many rounds they will train."""
    longest = Plan.of(strength, coordinates, _LONGEST)
    long_enough = next((n for n in range(1, _LONGEST + 1) if Plan.of(strength, coordinates, n).enough), None)
    if strength.rule == "paper":
        return longest.advice[0]
    small = next((one for one in longest.advice if one.code == "plan.too-small"), None)
    if small is not None:
        return Advice(small.code, f"nobody said how many rounds you will train. After {_LONGEST}: {small.text}")
    needs = "more rounds than were ever tried" if long_enough is None else f"about {long_enough} rounds"
    return Advice(
        "plan.no-rounds",
        f"nobody said how many rounds you will train: with this strength a z of {TARGET_Z:g} takes {needs}. Say "
        "how many, and the strength is chosen for them",
    )
