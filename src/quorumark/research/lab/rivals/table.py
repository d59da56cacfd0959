"""What the methods' runs left, in `results/rivals`, and their section of docs/results.md. Read without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quorumark.errors import RecordError
from quorumark.research.lab.config import Settings
from quorumark.research.lab.results import BALANCED, CODE, read_result
from quorumark.research.lab.rivals import chance
from quorumark.research.lab.tables import table

__all__ = [
    "ATTACKS",
    "FOLDER",
    "FORMAT",
    "FULL_RATE",
    "METHODS",
    "SHOWN",
    "best_p",
    "name_of",
    "read_rivals",
    "section",
]

FORMAT = "quorumark-lab-rivals/v1"
FOLDER = "rivals"  # within the results
FEDIPR_BITS, FEDIPR_GAINS = 10, 512  # a member's bits in each of ResNet-18's four norms, and such a norm's gains
METHODS = ("none", "quorumark", "paper-code", "fedipr", "waffle", "fedtracker")
PAPERS_RATE = 5e-4  # of a server that trains on triggers, in WAFFLE's and FedTracker's code
SHOWN = {  # rows of the tables: (method, rate of its server), and what they are called
    ("quorumark", None): "quorumark, ρ* = 0.05",
    ("paper-code", None): "the paper's code, c = 0.025",
    ("fedipr", None): "FedIPR",
    ("waffle", 0.005): "WAFFLE",
    ("waffle", PAPERS_RATE): "WAFFLE at its code's rate",
    ("fedtracker", 0.005): "FedTracker",
    ("fedtracker", PAPERS_RATE): "FedTracker at its code's rate",
}
FULL_RATE = "adaptive fine-tuning, the full rate"
ATTACKS = {  # as the harness names them, and as a column does
    "fine-tuning 20 %": "fine-tuning 20 %",
    "fine-tuning 20 %, a tenth of the rate": "… a tenth of the rate",
    "adaptive fine-tuning": "adaptive",
    FULL_RATE: "… the full rate",
    "pruning 50 %": "pruning 50 %",
    "4 bits": "4 bits",
    "permutation and rescaling": "permutation, rescaling",
}
_HOLD = {  # who holds the secret, secure aggregation, how many members it takes
    "quorumark": ["nobody: members have shares", "yes", "any t of K"],
    "paper-code": ["nobody: members have shares", "yes", "any t of K"],
    "fedipr": ["each member its own", "yes", "each member alone"],
    "waffle": ["the server", "yes: it needs the average only", "no: the server decides"],
    "fedtracker": ["the server", "of uploads: it sends each member another model", "no: the server decides"],
}


def name_of(method: str, settings: Settings, rate: float | None = None) -> str:
    """The name of a method's run, without its length, as other runs' names; with its server's rate if it is another."""
    parts = [settings.dataset, settings.model, f"k{settings.members}", settings.partition, method, f"s{settings.seed}"]
    parts += [settings.augmented] * bool(settings.augmented)
    parts += [f"rate{rate:g}"] if rate not in (None, PAPERS_RATE) else []
    return "-".join(parts).replace(":", "")


def rate_of(body: Mapping[str, Any]) -> float | None:
    """The learning rate of a method's server; None if it does not train."""
    rate: float | None = body.get("server_epochs", {}).get("rate")
    return rate


def read_rivals(folder: Path) -> dict[str, dict[str, Any]]:
    """All files of methods' runs, by name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        body = read_result(path)
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in body.get("settings", {}).items()}
        if body.get("format") != FORMAT or not (
            body.get("id") == path.stem == name_of(body["method"], Settings(**given), rate_of(body))
        ):
            raise RecordError(f"{str(path)!r} is not of the method's run that it is named after")
        found[path.stem] = body
    return found


def best_p(found: Mapping[str, Any]) -> float:
    """log10 p of the strongest claim that a detector supports: all members together, triggers or fingerprint."""
    names = ("log10_p", "together", "fingerprint")
    return min(float(found[name]) for name in names if name in found)


def _figure(value: float) -> str:
    return f"{value:.0f}" if value <= -20 else f"{value:.1f}".replace("-0.0", "0.0")


def _p(found: Mapping[str, Any]) -> str:
    """log10 p; behind it the other claims that a method has."""
    text = _figure(found["log10_p"])
    for name, shown in (("together", "all members"), ("fingerprint", "fingerprint")):
        text += f" ({shown} {_figure(found[name])})" if name in found else ""
    return text


def _found(bodies: Mapping[str, Mapping[str, Any]], method: str, rate: float | None, members: int) -> Any:
    return next(
        (b for b in bodies.values()
         if (b["method"], rate_of(b), b["settings"]["members"]) == (method, rate, members)),
        None,
    )  # fmt: skip


def section(folder: Path, results: Mapping[str, Mapping[str, Any]], figures: Path) -> str:
    """Its part of docs/results.md; nothing if there are no files. `results` are those of the other runs."""
    bodies = read_rivals(folder)
    plain = _found(bodies, "none", None, 32)
    if plain is None:
        return ""
    rows = {key: body for key in SHOWN if (body := _found(bodies, *key, 32)) is not None}
    parts = [_HEAD.format(rounds=plain["rounds"], accuracy=100 * plain["accuracy"]["released"])]
    parts.append(table(["method", "who holds the secret", "with secure aggregation", "who can claim"], [
        [SHOWN[key], *_HOLD[key[0]]] for key in rows if key[1] != PAPERS_RATE
    ]))  # fmt: skip
    parts.append(_DETECTED)
    heads = ["method", "K = 4", "K = 32", "K = 128", "what is detected, K = 32", "its target", "accuracy", "Δ"]
    parts.append(table(heads, [_detected(key, bodies, results, plain) for key in rows]))
    run = [attack for attack in ATTACKS if any(attack == row["attack"] for b in rows.values() for row in b["attacks"])]
    parts.append(_ATTACKED.format(missing="" if FULL_RATE in run else _MISSING))
    heads = ["method", *(ATTACKS[attack] for attack in run)]
    parts.append(table(heads, [_attacked(SHOWN[key], body, run) for key, body in rows.items()]))
    if (figures / "lab-rivals.svg").exists():
        parts.append(f"![Accuracy against log10 p for every attack]({figures.name}/lab-rivals.svg)\n")
        parts.append(_beside(rows, plain))
    parts.append(_CALIBRATED)
    heads = ["method", "cases", "p ≤ 0.05", "least log10 p", "what was seen"]
    parts.append(table(heads, [line for key, body in rows.items() for line in _calibrated(SHOWN[key], body)]))
    parts.append(_FORGED)
    parts.append(table(["method", "after", "in advance"], [
        [SHOWN[key], *(_p(body["forged"][when]) for when in ("after", "advance"))]
        for key, body in rows.items() if key[1] != PAPERS_RATE
    ]))  # fmt: skip
    bare = {when: rows["quorumark", None]["forged"][when]["z without whitening"] for when in ("after", "advance")}
    parts.append(f"Without the whitening, quorumark's z would be {bare['after']:.0f} and {bare['advance']:.0f}.\n")
    parts.append(_where(bodies))
    return "\n".join(parts)


def _detected(key: tuple[str, float | None], bodies: Any, results: Any, plain: Any) -> list[str]:
    body = _found(bodies, *key, 32)
    ps = []
    for members in (4, 32, 128):
        own = _found(bodies, *key, members)
        if own is not None:
            ps.append(_p(own["detection"]) + ("" if own["rounds"] == plain["rounds"] else f", {own['rounds']} rounds"))
        else:
            ps.append(_elsewhere(key[0], members, results))
    accuracy = 100 * body["accuracy"]["released"]
    targets = [
        f"K = {members}: {told}"
        for members in (4, 32, 128)
        if (own := _found(bodies, *key, members)) is not None and (told := _target(own))
    ]
    target = "; ".join(targets) or ("in table 1" if key[0] == "paper-code" else "")
    return [SHOWN[key], *ps, _seen(body), target, f"{accuracy:.2f}", f"{_change(body, plain):+.2f}"]


def _change(body: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """Points of accuracy against the unmarked run."""
    return 100 * float(body["accuracy"]["released"] - plain["accuracy"]["released"])


def _beside(rows: Mapping[tuple[str, float | None], Mapping[str, Any]], plain: Mapping[str, Any]) -> str:
    """What must be said where the picture is seen without the text."""
    served = {key: rate for key in rows if (rate := key[1]) is not None and rate != PAPERS_RATE}
    lost = " and ".join(f"{SHOWN[key]} {_change(rows[key], plain):+.1f}" for key in served)
    times = " or ".join(sorted({f"{rate / PAPERS_RATE:.0f}" for rate in served.values()}))
    told = (
        f" **{lost} points here are no figures of these methods**: they are at {times} times their codes' rate, after "
        f"{plain['rounds']} rounds of a network that starts at random and has not converged, where WAFFLE's abstract "
        "has -0.17 for its own."
    )
    return (
        "The picture: accuracy of the attacked model to the right, -log10 p of the strongest claim upwards; for FedIPR "
        "that is all members together, who would have to open their bits to each other, not the median member of the "
        f"tables; for FedTracker triggers or fingerprint, whichever is stronger.{told if served else ''}\n"
    )


def _elsewhere(method: str, members: int, results: Any) -> str:
    """log10 p of a run of the configuration `clients`, where there is one."""
    strength = {"quorumark": "rho0.05", "paper-code": "paper-code0.025"}.get(method)
    body = results.get(f"cifar10-resnet18-k{members}-iid-{strength}-s0")
    if body is None:
        return "not run"
    z = body["z"]["released"][BALANCED if method == "quorumark" else f"{CODE} calibrated"]
    return f"{_figure(chance.signs(z))}, {body['rounds']} rounds"


def _target(body: Mapping[str, Any]) -> str:
    """Whether a run has all bits, or the share of triggers that the method's code trains until."""
    found, method = body["detection"], body["method"]
    if method == "fedipr":
        if found["bits"] == 1:
            return "yes (all bits)"
        held = chance.agreed(FEDIPR_BITS * body["settings"]["members"], FEDIPR_GAINS)
        why = "" if held > -3 else ", and no gains could have all"
        return f"**no** (all bits; {100 * found['bits']:.1f} %{why})"
    if method in ("waffle", "fedtracker"):
        share = f"98 % of triggers; {100 * found['triggers']:.0f} %"
        return f"yes ({share})" if found["triggers"] >= 0.98 else f"**no** ({share})"
    return ""


def _seen(body: Mapping[str, Any]) -> str:
    """What the detector counts."""
    found, method = body["detection"], body["method"]
    if method in ("quorumark", "paper-code"):
        return f"z = {found['z']:.1f}"
    if method == "fedipr":
        return f"{100 * found['bits']:.1f} % of bits"
    text = (
        f"{100 * found['triggers']:.0f} % of triggers ({found['as if independent']:.0f} as if images were independent)"
    )
    if method == "fedtracker":
        whom = "the right" if found["traced"] == 0 else "a wrong"
        text += f", {100 * found['bits']:.1f} % of bits, traced to {whom} member"
    return text


def _attacked(name: str, body: Mapping[str, Any], attacks: Sequence[str]) -> list[str]:
    rows = {row["attack"]: row for row in body["attacks"]}
    found = [
        f"{_p(rows[attack])}; {100 * rows[attack]['accuracy']:.1f} %" if attack in rows else "not run"
        for attack in attacks
    ]
    return [name, *found]


def _calibrated(name: str, body: Mapping[str, Any]) -> list[list[str]]:
    found = body["calibration"]
    what = {
        "deviation": "deviation of z {:.2f}", "largest": "largest {:.2f}", "bits": "mean share of bits {:.3f}",
        "triggers": "mean share of triggers {:.3f}",
        "independent at 0.01": "as if images were independent, p ≤ 0.01 in {:.1%}",
    }  # fmt: skip
    seen = "; ".join(text.format(found[key]) for key, text in what.items() if key in found)
    lines = [[name, str(found["cases"]), f"{found['share at 0.05']:.1%}", _figure(found["least log10 p"]), seen]]
    prints = found.get("fingerprints")
    if prints is not None:
        lines.append([f"{name}, fingerprints", str(prints["cases"]), f"{prints['share at 0.05']:.1%}",
                      _figure(prints["least log10 p"]), ""])  # fmt: skip
    return lines


def _where(bodies: Mapping[str, Mapping[str, Any]]) -> str:
    heads = ["run", "rounds", "seconds", "epochs of its server a round", "hardware", "commit"]
    rows: Sequence[Sequence[str]] = [
        [name, str(b["rounds"]), f"{b['seconds']:.0f}",
         f"{b['server_epochs']['mean']:.0f}" if "server_epochs" in b else "", b["hardware"], b["commit"][:12]]
        for name, b in bodies.items()
    ]  # fmt: skip
    return table(heads, [list(row) for row in rows])


_HEAD = """## Other methods under the same attacks

`quorumark lab rivals none quorumark paper-code fedipr waffle fedtracker`

Marks that people would pick instead, written anew after their public code and their papers' abstracts (the full papers
were not at hand), in one harness: CIFAR-10, ResNet-18, 32 members, {rounds} rounds, the same optimiser, partition and
attacks. One seed: a Δ of less than a point says nothing. After {rounds} rounds no model has converged (unmarked:
{accuracy:.2f} %), and fine-tuning raises accuracy: what is compared is what is left of the marks, and accuracies only
with one another. [lab.md](lab.md#rivals) has the repository, commit and file of each setting, and what differs.

- **FedIPR** (arXiv 2109.13236): every member has 40 secret bits, signs of projections of the gains of the four norms of
  the last stage. α = 0.2, rate 0.01 and momentum 0.9 as in its code; the step stands beside AdamW's.
- **WAFFLE** (arXiv 2008.07298): the server has 100 trigger images of 10 patterns, and trains the average on them
  after each round until 98 % are right, for at most 100 epochs. Its code's rate, 0.0005, was for a VGG pretrained on
  ImageNet and does not get there with this network; 0.005 was tried next, and does. Both are shown, and no other rate
  was tried. Running statistics of norms stay. Its abstract reports a loss of 0.17 points: the loss here is that of
  another network, which starts at random, at round {rounds}, and must not be read as the method's.
- **FedTracker** (arXiv 2211.07160): WAFFLE's triggers with steps that keep what members learnt, and a fingerprint of
  128 bits in two norms' gains for each member's copy. What is attacked is the first member's copy. What differs from
  its code: two norms (it has three, of a VGG), fingerprints are random (it searches those that differ most), the
  initial model is trained on triggers as WAFFLE's is, and the step that keeps what members learnt is the plain
  projection (it has another sign and a margin).
"""
_DETECTED = """\
Detection: log10 of the probability that an innocent model does as well. It is exact or a bound, if the secret was drawn
at random before the model (see below). FedIPR's is the median member's by itself. For triggers it is over all
assignments of labels to patterns, and cannot be below 10^−6.6 with ten of them: images of one pattern are not trials of
their own. K = 4 and 128 of quorumark and the paper's code are the runs of "z against the number of members". *Its
target*, for each K that was run: whether the released model shows all bits (FedIPR), or the 98 % of triggers that the
code trains until. The papers' own tables of detection were not at hand: their abstracts report none, at no K. With
128 members FedIPR asks each norm for 1,280 signs of 512 gains. No gains meet that many random signs (the chance is
10^-12.5 for one norm, by Cover's count), and its code's README lets a layer have at most as many bits as channels:
320 at K = 32, which fits. The condition in FedIPR's paper was not verified. So K = 128 shows what 40 bits a member come
to beyond that, not the method at its own setting for so many. Δ is against the unmarked run.
"""
_ATTACKED = """\
Attacks: log10 p and accuracy. Those that train have a fifth of the training images for 100 epochs. *Adaptive* is
fine-tuning with a tenth of the rate by somebody who knows the method, not the secret: against quorumark and the paper's
code away from the model's move (α = 0.3), against signs in gains the gains of each layer are evened out, against
triggers an eighth of each batch are other patterns with random labels.{missing} The attacks are not equally strong
against all methods: a better one may exist for each. Only quorumark aligns channels that were moved; the other papers
have no such step.
"""
_MISSING = """ **Not run: adaptive fine-tuning at the full rate**, which
removed quorumark's mark from a CIFAR-100 model at a loss of twelve to fourteen points (above); on models that have not
converged it might cost nothing. The harness has this attack; these results are from before."""
_CALIBRATED = """\
Each detector with secrets that nothing was marked with, on five unmarked models (one of 60 rounds, four of 30): an
honest p is at most 0.05 in at most 5 % of cases, up to chance. Cases with one secret are not independent.
"""
_FORGED = """\
False claims: log10 p that somebody gets for an innocent, unmarked model without having trained it. *After*: the secret
is made when the model is known. *In advance*: it is made, and could be dated, before, from a model of the forger's own.
Gains are near 1 in every network, so bits that fit one model fit the next; images that one model is made to class by
its gradient are classed so by others of the same data; most gains are positive, which a key for the paper's code can
use. Quorumark's key is fitted in the same way, and then whitened, as every manifest does: nobody can choose those
signs. One try each: a forger who makes many manifests until one fits was not tried; by the bound p ≤ exp(-z²/2),
z = 6.2 takes about 2·10^8 of them. None of the codes binds its secret
to a date or a public draw; a registry that draws the secrets would stop these claims for the other methods as well.
"""
