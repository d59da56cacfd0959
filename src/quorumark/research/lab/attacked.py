"""What attacks on the lab's models left, in `results/attacks`: files, what they say about the aims, and their section
of docs/results.md. Written by `quorumark.research.lab.attack`, read without PyTorch.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quorumark.errors import RecordError
from quorumark.files import write_shared
from quorumark.research.lab.results import BALANCED, read_result
from quorumark.research.lab.tables import table
from quorumark.research.rows import LEAST_LOG10, ORIGINAL, Row, parsed_rows, table_text

__all__ = ["ALPHAS", "EPOCHS", "FORMAT", "FRACTIONS", "LR", "Attacked", "draw", "read_attacked", "section", "write"]

FORMAT = "quorumark-lab-attacks/v1"
EPOCHS, FRACTIONS, ALPHAS = 100, (0.01, 0.05, 0.1, 0.2), (0.1, 0.3, 0.5, 0.7)
LR = 1e-3  # the paper's
DISTILLATION = "distillation"
PAPER = ("fine-tuning", "adaptive-fine-tuning", "quantisation", "pruning", "structured-pruning")
_PLAIN = 6.2  # z* of a plain query that may be aligned
_TUNED_Z, _LEAST_Z, _DROP, _INNOCENT = 50.0, 10.0, 0.05, 4.0
KNOWING = ("adaptive-by-part", "removal")
_BELOW, _PRICE = 0.1, 0.12  # of accuracy: below plain fine-tuning, and below the release
_ORDER = (ORIGINAL, *PAPER, DISTILLATION)


# --- files ------------------------------------------------------------------------------------------------


class Attacked:
    """The attacks on one run's model: its rows, and what else was found."""

    def __init__(self, rows: Sequence[Row], body: Mapping[str, Any]) -> None:
        self.rows, self.body = list(rows), body

    @property
    def original(self) -> Row:
        return next(row for row in self.rows if row.attack == ORIGINAL)

    @property
    def last(self) -> list[Row]:
        """Attacked models at the end of their attack, not on the way."""
        return [row for row in self.rows if "epoch" not in row.settings and row.attack != ORIGINAL]

    def unsolved(self, row: Row) -> bool:
        """Whether an oracle's amounts were not found, so that the model shows nothing of what such an attacker can.

        Where a table does not say what was left right after the removal, the first epoch of repair does: what is then
        beyond chance by Q was never at 0.
        """
        if row.left is not None or row.settings.get("amounts") != "oracle":
            return row.unsolved
        first = {**row.settings, "epoch": 1}
        found = [r for r in self.rows if (r.attack, r.seed, r.settings) == (row.attack, row.seed, first)]
        return any(r.log10_q is not None and r.log10_q <= LEAST_LOG10 for r in found)

    def aims(self) -> list[tuple[str, bool | None, str]]:
        """What was aimed at, whether it holds (None: not known), and the figure."""
        tuned = [r for r in self.last if r.attack == "fine-tuning" and r.settings == {"fraction": 0.2}]
        z = tuned[0].z if tuned else None
        first = (
            f"z ≥ {_TUNED_Z:.0f} after {EPOCHS} epochs of fine-tuning on 20 % of the data",
            None if z is None else z >= _TUNED_Z,
            "" if z is None else f"z = {z:.1f} at {100 * tuned[0].accuracy:.2f} %",
        )
        paper = [r for r in self.rows if r.attack in PAPER and _is_papers(r)]
        ours = [r for r in self.rows if r not in paper and r.attack not in (ORIGINAL, DISTILLATION)]
        return [
            first,
            self._kept("the paper's attacks but distillation leave", paper),
            self._kept("stronger estimates, other attacks and chains leave", ours),
            *self._innocent(),
            *self._by_layers(),
        ]

    def _by_layers(self) -> list[tuple[str, bool | None, str]]:
        """What z and Q see together, where Q was measured."""
        tested = [r for r in self.rows if r.log10_q is not None and r.attack not in (ORIGINAL, DISTILLATION)]
        tuned = [r for r in self.last if r.attack == "fine-tuning" and r.settings == {"fraction": 0.2}]
        if not tested or not tuned:
            return []
        knowing = [r for r in tested if r.attack in KNOWING and (r.escapes or not self.unsolved(r))]
        floor = tuned[0].accuracy - _BELOW
        others = [r for r in tested if r.attack not in KNOWING and r.accuracy >= floor]
        worst = min(others, key=lambda r: r.evidence or 0.0)
        text = (
            f"the suite's attacks but distillation PASS by z or Q down to {100 * _BELOW:.0f} points below fine-tuning"
        )
        shown = (
            f"weakest: 10^{-(worst.evidence or 0.0):.0f} at {100 * worst.accuracy:.2f} %, z = {worst.best or 0.0:.1f}, "
            f"by {_named(worst)}; {len(others)} models"
        )
        found: list[tuple[str, bool | None, str]] = [(text, not any(row.escapes for row in others), shown)]
        if knowing:
            found.append(self._price(knowing))
        return found

    def _price(self, knowing: Sequence[Row]) -> tuple[str, bool | None, str]:
        """What escaping both tests costs those who know of them."""
        text = f"attackers who know the test by layers lose more than {100 * _PRICE:.0f} points to escape z and Q"
        out = [row for row in knowing if row.escapes]
        if not out:
            return text, True, f"none of {len(knowing)} escapes"
        best = max(out, key=lambda row: row.accuracy)
        lost = self.original.accuracy - best.accuracy
        shown = f"least loss: {100 * lost:.2f} points, to {100 * best.accuracy:.2f} %, by {_named(best)}"
        return text, lost > _PRICE, f"{shown}; {len(out)} of {len(knowing)} models escape"

    def _kept(self, what: str, rows: Sequence[Row]) -> tuple[str, bool | None, str]:
        floor = self.original.accuracy - _DROP
        near = [row for row in rows if row.accuracy >= floor - 1e-6]  # tables have 6 digits
        text = f"{what} z ≥ {_LEAST_Z:.0f} until accuracy falls by {100 * _DROP:.0f} points"
        if not near:
            return text, None, ""
        hidden = next((row for row in near if row.best is None), None)
        if hidden is not None:  # nothing can be proved of it
            return text, False, f"not testable: {_named(hidden)}, at {100 * hidden.accuracy:.2f} %; {len(near)} models"
        worst = min(near, key=lambda row: row.best or 0.0)
        least = worst.best or 0.0
        shown = f"least z = {least:.1f} at {100 * worst.accuracy:.2f} %, by {_named(worst)}; {len(near)} models"
        return text, least >= _LEAST_Z, shown

    def _innocent(self) -> list[tuple[str, bool | None, str]]:
        text = f"no innocent model, aligned to the anchor, has z ≥ {_INNOCENT:.0f}"
        zs = [entry["z_anchor"] for entry in self.body["innocents"] if entry["z_anchor"] is not None]
        if not zs:
            return [(text, None, "")]
        shown = f"{len(zs)} models: mean {statistics.fmean(zs):.2f}, largest {max(zs):.2f}"
        return [(text, max(zs) < _INNOCENT, shown)]


def _is_papers(row: Row) -> bool:
    """Whether fine-tuning is as in the paper, and goes against the paper's estimate."""
    return row.settings.get("estimate", "sum") == "sum" and not {"coalition", "lr"} & set(row.settings)


def _named(row: Row) -> str:
    return f"{row.attack} ({_shown(row.settings)})" if row.settings else row.attack


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _sorted(rows: Sequence[Row]) -> list[Row]:
    """In an order that does not hang on what was ready first."""

    def place(row: Row) -> tuple[Any, ...]:
        first = _ORDER.index(row.attack) if row.attack in _ORDER else len(_ORDER)
        settings = {k: v for k, v in row.settings.items() if k != "epoch"}
        who = settings.get("coalition", 0), str(settings.get("estimate", ""))
        dials = [str(v) for k, v in settings.items() if k not in ("coalition", "estimate")]
        return first, row.attack, who, dials, row.settings.get("epoch", EPOCHS + 1)

    return sorted(rows, key=place)


def write(rows: Sequence[Row], body: Mapping[str, Any], folder: Path, name: str) -> None:
    """NAME.json, then NAME.csv: what has a row is done, so all that is known about it must be there before."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in body.items()]
    write_shared(folder / f"{name}.json", ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    write_shared(folder / f"{name}.csv", table_text(_sorted(rows)).encode())


def read_attacked(folder: Path) -> dict[str, Attacked]:
    """All attacks, by the runs' ids."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            body = read_result(path)
            table = path.with_suffix(".csv")
            if body["format"] != FORMAT or body["id"] != path.stem:
                raise RecordError(f"{str(path)!r} is not of attacks on the run that it is named after")
            rows = parsed_rows(table.read_text(), str(table))
        except (ValueError, KeyError, OSError):
            raise RecordError(f"{str(path)!r} and its table are damaged: remove them, and attack again") from None
        if not any(row.attack == ORIGINAL for row in rows):
            raise RecordError(f"{str(table)!r} lacks the model as it was released: remove it, and attack again")
        found[body["id"]] = Attacked(rows, body)
    return found


def draw(attacked: Attacked, folder: Path, threshold: float = 6.0) -> list[Path]:
    """The paper's Pareto plot over all epochs, and a figure for each attack: attacks-ID-NAME.svg."""
    from quorumark.research.page import figures, rows_digest, standalone

    folder.mkdir(parents=True, exist_ok=True)
    written, digest = [], rows_digest(attacked.rows, threshold)
    for name, svg in figures(attacked.rows, threshold).items():
        path = folder / f"attacks-{attacked.body['id']}-{name}.svg"
        write_shared(path, standalone(svg, digest).encode())
        written.append(path)
    return written


# --- the page ---------------------------------------------------------------------------------------------

_SHOWN = {
    "price": "What it costs to escape: accuracy against evidence, by z or by layers, whichever is more",
    "pareto": "Accuracy against z, and against Q where it was measured, for every attacked model; the lines are the "
    "best found for each share of the data",
    "adaptive-fine-tuning": "Adaptive fine-tuning to its end: z and accuracy by α, share of the data and estimate",
}
_HEAD = f"""## Attacks on the lab's models

`quorumark lab attack RUN`

With the paper's budgets: {EPOCHS} epochs of AdamW (10⁻³, weight decay 10⁻⁴, batches of 128) on 1, 5, 10 or 20 % of the
training images, augmented as in training; distillation with T = 3, α = 0.5 and Adam. Adaptive fine-tuning minimises
(1 − α)·loss + α·|cos(θ, τ′)|, over the carriers. `sum` is the paper's estimate τ′; the others, coalitions and a tenth
of the learning rate are ours (docs/attacks.md, "Estimates of the key"). z is balanced; *aligned* where channels were
moved. *Q* is by layers (docs/layers.md), where it was measured; *PASSED by* names the tests of a plain query and of one
by layers after it. *Removal* takes an estimate out of each block, with the amounts that an attacker expects or that an
oracle tells who knows the key, and repairs the model; where the oracle's *amounts* were *not found*, nothing follows
from the row. *Adaptive-by-part* keeps the cosine of θ − θ_0 small in each
block or row. Models after 1, 2, 5, 10, 20 and 50 epochs are in the table files, and count for the aims.
"""


def section(folder: Path, figures: Path) -> str:
    """Its part of docs/results.md; nothing if there are no attacks. Figures are shown if they are there."""
    found = read_attacked(folder)
    return "\n".join([_HEAD, *(_of_run(attacked, figures) for attacked in found.values())]) if found else ""


def _of_run(attacked: Attacked, figures: Path) -> str:
    body, original, layers = attacked.body, attacked.original, "random_keys" in attacked.body
    wanted, rounds = body["settings"], body["rounds"]
    less = "" if rounds >= 300 else " (the paper: 300)"
    parts = [
        f"### {body['id']}\n",
        f"{rounds} rounds{less}, {wanted['members']} members, ρ = {body['rho']}; the released model has accuracy "
        f"{100 * original.accuracy:.2f} % and z = {body['z'][BALANCED]:.1f}. {body['hardware']}, "
        f"{body['seconds']:.0f} seconds, commit {body['commit'][:12]}.\n",
    ]
    verdicts = {True: "true", False: "**false**", None: "not known"}
    parts.append(
        table(["aim", "holds", "figure"], [[text, verdicts[ok], shown] for text, ok, shown in attacked.aims()])
    )
    for figure, text in _SHOWN.items():
        name = f"attacks-{body['id']}-{figure}.svg"
        if (figures / name).exists():
            parts.append(f"![{text}]({figures.name}/{name})\n\n*{text}.*\n")
    cosines = [
        [e["estimate"], f"{e['coalition']} members" if e["coalition"] else "anybody", f"{e['cosine']:.4f}"]
        for e in body["estimates"]
    ]
    parts.append("How near estimates come to the key, to be compared with ρ:\n")
    parts.append(table(["estimate", "who", "cosine with the key"], cosines))
    rows = [
        [r.attack, _shown(r.settings), f"{100 * r.accuracy:.2f}", f"{100 * (r.accuracy - original.accuracy):+.2f}",
         *("" if z is None else f"{z:.1f}" for z in (r.z, r.z_aligned)),
         *(_layered(r, attacked.unsolved(r)) if layers else [])]
        for r in attacked.last
    ]  # fmt: skip
    if layers:
        parts.append(_random_keys(body["random_keys"]))
    if rows:
        heads = ["attack", "settings", "accuracy", "Δ", "z", "aligned"]
        parts.append(table(heads + (["Q", "log10 of its bound", "PASSED by"] if layers else []), rows))
    if body["distillation"]:
        entries = sorted(body["distillation"], key=lambda e: (e.get("epochs", EPOCHS), e["fraction"]))
        after = [f", {e['epochs']} epochs" if "epochs" in e else "" for e in entries]
        shown = ", ".join(
            f"{100 * e['fraction']:g} %{epochs}: {100 * e['agreement']:.1f} %"
            for e, epochs in zip(entries, after, strict=True)
        )
        parts.append(
            f"Distilled students give the released model's class on the test images, by their data: {shown}.\n"
        )
    if body["innocents"]:
        parts.append("Innocent models, aligned to the anchor as they must be, and to the released model:\n")
        heads = ["innocent models", "number", "accuracy", "z", "z aligned", "largest", "wrongly aligned", "largest"]
        parts.append(table(heads, _innocents(body["innocents"])))
    return "\n".join(parts)


def _layered(row: Row, unsolved: bool) -> list[str]:
    """Q, log10 of its bound, and which test a verifier would PASS it by; and whether that shows anything."""
    if row.q is None or row.log10_q is None:
        return ["", "", ""]
    by = ["z"] * ((row.best or 0.0) >= _PLAIN) + ["Q"] * (row.log10_q <= LEAST_LOG10)
    return [
        f"{row.q:.0f}",
        f"{row.log10_q:.0f}" if row.log10_q <= -10 else f"{row.log10_q:.1f}",
        (", ".join(by) or "**none**") + (" (amounts not found)" if unsolved else ""),
    ]


def _random_keys(found: Mapping[str, Any]) -> str:
    holds = "below" if found["largest_ratio"] <= 0 else "**above**"
    return (
        f"Q of the released model for {found['keys']:,} random keys over {found['blocks']} blocks: "
        f"mean {found['mean']:.2f}, variance {found['variance']:.1f}, the largest {found['largest']:.1f}, whose bound "
        f"is 10^{found['log10_bound_of_largest']}; the tail is {holds} its bound where ten keys or more are beyond.\n"
    )


def _innocents(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    out = []
    for kind in dict.fromkeys(entry["kind"] for entry in entries):
        mine = [entry for entry in entries if entry["kind"] == kind]
        accuracy = statistics.fmean(entry["accuracy"] for entry in mine)
        line = [kind, str(len(mine)), f"{100 * accuracy:.1f}"]
        for name in ("z", "z_anchor", "z_released"):
            zs = [entry[name] for entry in mine if entry[name] is not None]
            line.append(f"{statistics.fmean(zs):.2f}" if zs else "")
            if name != "z":
                line.append(f"{max(zs):.2f}" if zs else "")
        out.append(line)
    return out
