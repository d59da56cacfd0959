"""What became of attacked models, as rows of a table: one for each model, the first six columns for everybody.

Attack suites and the lab write it, reports draw it (docs/attacks.md, "The suite"). Nothing here knows a key.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quorumark.errors import RecordError

__all__ = ["COLUMNS", "LEAST_LOG10", "MOST_LEFT", "ORIGINAL", "Row", "parsed_rows", "table_text"]

COLUMNS = (
    "attack", "budget", "accuracy", "z", "z_aligned", "seconds", "seed", "settings", "examples", "steps", "surplus",
    "q", "log10_q", "left",
)  # fmt: skip
LEAST_LOG10 = -8.12
"""log10 of the bound from which a query by layers is PASSED with z* = 6: half of exp(−z*²/2), for it has two tests."""
MOST_LEFT = 1.0
"""The largest |z_b| right after a removal up to which its amounts count as found: chance alone gives as much."""
ORIGINAL = "none"
"""The attack that the row of the released model names."""


@dataclass(frozen=True)
class Row:
    """One attacked model. z is None where it could not be tested: too few weights fit.

    `q` is Q by layers (docs/layers.md) and `log10_q` its bound, the better of aligned and not; None where there are no
    layers. `left` is the largest |z_b| right after an estimate was taken out of each block by an oracle's amounts.
    """

    attack: str
    accuracy: float
    z: float | None
    z_aligned: float | None
    seconds: float = 0.0
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    examples: int = 0
    steps: int = 0
    surplus: int = 0
    q: float | None = None
    log10_q: float | None = None
    left: float | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes it this attack and no other."""
        return self.attack, json.dumps(dict(self.settings), sort_keys=True), self.seed

    @property
    def budget(self) -> str:
        """What the attacker chose and spent, in words."""
        parts = [f"{name}={value}" for name, value in self.settings.items()]
        if self.examples:
            parts.append(f"{self.examples} examples")
        if self.steps:
            parts.append(f"{self.steps} steps")
        return ", ".join(parts)

    @property
    def best(self) -> float | None:
        """The larger z of both queries: what verifiers get who ask twice."""
        return max((z for z in (self.z, self.z_aligned) if z is not None), default=None)

    @property
    def evidence(self) -> float | None:
        """−log10 of what an innocent model has at most a chance of, by z (exp(−z²/2)) or by Q, whichever is more."""
        best = self.best
        if best is None:
            return None if self.log10_q is None else -self.log10_q
        return max(max(best, 0.0) ** 2 / 2 / math.log(10), -(self.log10_q or 0.0))

    @property
    def escapes(self) -> bool:
        """Whether neither test sees it: a query by layers after a plain one that did not pass."""
        return self.evidence is not None and self.evidence < -LEAST_LOG10

    @property
    def unsolved(self) -> bool:
        """Whether the oracle's amounts were not found, so that the model says nothing of what such an attacker can."""
        return self.left is not None and self.left > MOST_LEFT

    @property
    def fraction(self) -> float:
        """How much of the training data was used."""
        return max((float(v) for k, v in self.settings.items() if k.rpartition(".")[2] == "fraction"), default=0.0)


def table_text(rows: Sequence[Row]) -> str:
    """The rows as CSV."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for row in rows:
        zs = ["" if z is None else f"{z:.4f}" for z in (row.z, row.z_aligned)]
        settings = json.dumps(dict(row.settings))
        table.writerow(
            [row.attack, row.budget, f"{row.accuracy:.6f}", *zs, f"{row.seconds:.3f}", row.seed, settings, row.examples,
             row.steps, row.surplus, *("" if q is None else f"{q:.2f}" for q in (row.q, row.log10_q, row.left))]
        )  # fmt: skip
    return text.getvalue()


def parsed_rows(text: str, source: str) -> list[Row]:
    """The rows of such a table; `source` says where it came from."""
    found = []
    try:
        lines = list(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise RecordError(f"{source!r} is not a table of results ({error}): remove it, and run again") from None
    for number, line in enumerate(lines, 2):
        try:
            zs = [float(line[name]) if line[name] else None for name in ("z", "z_aligned")]
            found.append(
                Row(
                    line["attack"], float(line["accuracy"]), zs[0], zs[1], float(line["seconds"]), int(line["seed"]),
                    json.loads(line["settings"]), int(line["examples"]), int(line["steps"]), int(line["surplus"]),
                    *(float(line[name]) if line.get(name) else None for name in ("q", "log10_q", "left")),
                )
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, RecursionError):
            raise RecordError(f"line {number} of {source!r} is not a result: remove it, and run again") from None
    return found
