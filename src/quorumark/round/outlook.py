"""What z a verification of a run's model should find, and where the run is going (docs/strength.md).

The forecast is from what is public, and takes it that training leaves the mark alone but for weight decay. The survival
is what members' own noise says of that. Both together are the figure to count on: the forecast where nobody can tell,
or where chance explains the difference; the forecast times the survival where the survival is sure.
"""

from __future__ import annotations

from dataclasses import dataclass

from quorumark.consortium.records import Terms
from quorumark.consortium.strength import ONE
from quorumark.round.amplitudes import MarkState
from quorumark.round.forecast import course, expected_z
from quorumark.round.survival import ENOUGH, Survival

__all__ = ["NOTHING", "Outlook", "outlook", "will_pass"]


@dataclass(frozen=True)
class Outlook:
    """`rho`: what the mark has reached. `expected_z`: the forecast. `survival`: the part of the mark that is left after
    training; `survival_error`: its standard error, 0 where nobody told, and above 0.25 the part counts for nothing.
    `corrected_z`: the figure to count on, `corrected_error` its standard error, 0 where nothing was corrected; the
    key's own chance is 1 besides.
    `final_z`: what the run is on course for at its planned end, 0 where that is not known yet; `advice`: what to do if
    that is too little.
    """

    rho: float = 0.0
    expected_z: float = 0.0
    survival: float = 0.0
    survival_error: float = 0.0
    corrected_z: float = 0.0
    corrected_error: float = 0.0
    final_z: float = 0.0
    advice: str = ""


NOTHING = Outlook()


def outlook(mark: MarkState, terms: Terms, planned: int, told: Survival | None) -> Outlook:
    """Of a mark's state and its model, in a run of `planned` rounds. `told` is what members' noise says."""
    z, rho = expected_z(mark, terms.statistic), mark.rho / ONE
    if not z:
        return Outlook(rho)
    part, error = (told.part, told.error) if told is not None else (0.0, 0.0)
    sure = told is not None and error <= ENOUGH
    corrected = z * told.likely if told is not None and sure else z
    spent = (mark.leak / mark.leak_limit) ** 2 if mark.leak_limit else 1.0
    found = course(
        terms.strength,
        float(terms.policy.z),
        mark.round,
        planned,
        corrected,
        rho,
        coordinates=terms.coordinates,
        spent=spent,
    )
    return Outlook(rho, z, part, error, corrected, z * error if sure else 0.0, found.final_z, found.advice)


def will_pass(now: Outlook, threshold: object, rounds: int) -> str:
    """A run's last line, in words: what a verification of its model should find."""
    line = f"{rounds} rounds; a verification should find z = {now.corrected_z:.1f}, PASSED from {threshold} on"
    if now.survival_error > 0:
        left = f"{100 * now.survival:.0f} ± {100 * now.survival_error:.0f} % of the mark is left"
        sure = now.survival_error <= ENOUGH
        line += f" ({left})" if sure else f" ({left}: too unsure to count on, this is the forecast alone)"
    return f"{line}. {now.advice}" if now.advice else line
