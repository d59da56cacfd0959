"""Which attacks that train are tried on a run's model, and in which order (docs/lab.md, "Attacks")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quorumark.research.lab.attacked import ALPHAS, DISTILLATION, LR

__all__ = ["Trained", "layered_plan", "plan"]

_GENTLE = 1e-4  # the learning rate of those who mind the accuracy: with the paper's it falls at once
_MIDDLE = 3e-4


@dataclass(frozen=True)
class Trained:
    """An attack that trains, as a row of the table names it; `coalition` is how many members subtract their own."""

    attack: str
    fraction: float
    alpha: float = 0.0
    estimate: str = ""
    coalition: int = 0
    lr: float = LR
    by: str = ""  # a penalty for each block or row, by attackers who know the test by layers
    weights: str = "even"
    amounts: str = ""  # an estimate is taken out of every block first

    @property
    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {"fraction": self.fraction}
        if self.estimate:
            found |= {"amounts": self.amounts} if self.amounts else {"alpha": self.alpha}
            found["estimate"] = self.estimate
        found |= {"by": self.by, "weights": self.weights} if self.by else {}
        found |= {"coalition": self.coalition} if self.coalition else {}
        return found | ({"lr": self.lr} if self.lr != LR else {})


def plan(coalitions: Sequence[int], observed: bool, side: int = 8) -> list[list[Trained]]:
    """Attacks that train side by side, the most important first. Without an observer there is the sum of deltas only.

    The paper's, at every budget; everybody with a tenth of the paper's learning rate at 20 %; stronger estimates at 20
    and 5 %; the estimates of coalitions (their sizes, ascending) at 5 %, and with α = 0.3 and 0.7 at 20 %.
    """

    def against(
        fraction: float, how: str, alphas: Sequence[float] = ALPHAS, coalition: int = 0, lr: float = LR
    ) -> list[Trained]:
        return [Trained("adaptive-fine-tuning", fraction, a, how, coalition, lr) for a in alphas]

    def paper(fraction: float) -> list[Trained]:
        tuned = Trained("fine-tuning", fraction)
        return [tuned, *against(fraction, "sum"), Trained(DISTILLATION, fraction)]

    some = (0.3, 0.7)
    gentle = [Trained("fine-tuning", 0.2, lr=_GENTLE), *against(0.2, "sum", some, lr=_GENTLE)]
    if observed:
        gentle += [job for how in ("gls", "regression") for job in against(0.2, how, some, lr=_GENTLE)]
        gentle += [job for c in coalitions for job in against(0.2, "gls", some, c, _GENTLE)]
    groups = [paper(0.2), gentle, paper(0.05), paper(0.01)]
    if observed:
        groups += [against(0.2, "gls") + against(0.2, "regression")]
        groups += [[job for c in coalitions for job in against(0.05, "gls", ALPHAS, c)]]
    groups += [paper(0.1)]
    if observed:
        groups += [against(0.05, "gls") + against(0.05, "regression")]
        groups += [[job for c in coalitions for how in ("gls", "sum") for job in against(0.2, how, some, c)]]
        groups += [against(0.05, "last") + [job for c in coalitions for job in against(0.05, "regression", some, c)]]
        groups += [against(0.2, "last", some)]
    return [part for group in groups for part in _parts(group, side)]


def layered_plan(coalitions: Sequence[int], observed: bool, side: int = 8) -> list[list[Trained]]:
    """Those who take z to 0, and attackers who know the test by layers, on 20 % of the data; the strongest first.

    An estimate is taken out of every block, with an oracle's amounts or those that an attacker expects, and the model
    repaired; penalties by block and by row. Whoever knows most also trains at lower rates, which keep more accuracy.
    """
    sizes = sorted(coalitions, reverse=True)
    hows = ("gls", "regression", "sum") if observed else ("sum",)
    who = [(how, c) for c in (*sizes, 0) for how in hows]
    best = [(hows[0], c) for c in (*sizes, 0)]
    ends = [(hows[0], c) for c in dict.fromkeys((*sizes[:1], 0))]
    some = [*best, *(("sum", c) for _, c in ends if observed)]

    def against(
        whom: Sequence[tuple[str, int]], alpha: float, lr: float = LR, by: str = "", weights: str = "even"
    ) -> list[Trained]:
        name = "adaptive-by-part" if by else "adaptive-fine-tuning"
        return [Trained(name, 0.2, alpha, how, c, lr, by, weights) for how, c in whom]

    def taken(whom: Sequence[tuple[str, int]], amounts: str, lr: float = LR) -> list[Trained]:
        return [Trained("removal", 0.2, 0.0, how, c, lr, amounts=amounts) for how, c in whom]

    tuned = [Trained("fine-tuning", 0.2, lr=lr) for lr in (LR, _MIDDLE, _GENTLE)]
    groups = [
        tuned + taken(best, "oracle", _MIDDLE) + taken(best, "oracle", _GENTLE),
        taken(who, "oracle") + taken(best, "expected"),
        against(who, 0.7) + against(ends, 0.7, _MIDDLE) + against(ends, 0.7, _GENTLE),
    ]
    for by in ("block", "row"):
        groups += [against(some, 0.9, by=by) + against(best, 0.9, _MIDDLE, by=by) + against(best, 0.9, _GENTLE, by=by)]
    groups += [[job for w in ("random", "alternating") for job in against(ends, 0.9, by="block", weights=w)]]
    return [part for group in groups for part in _parts(group, side)]


def _parts(group: list[Trained], side: int) -> list[list[Trained]]:
    """As many parts of about one size as it takes for `side` at once."""
    count = -(-len(group) // side)
    return [group[i * len(group) // count : (i + 1) * len(group) // count] for i in range(count)]
