"""Many attacks on one model, measured: a plan, a table of results that grows, and nothing done twice.

`[target]` of a plan (`quorumark.research.attacks.plan`) says what is attacked (`read_subject`).

z is measured with the key put together, as `quorumark.research.known` does it, but of exactly the vector x that members
would compute: aligned and not.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quorumark.canonical import digest
from quorumark.consortium.home import HomeFolder, read_file
from quorumark.consortium.keystore import Unlock
from quorumark.errors import InconclusiveError, InputError, QuorumarkError, RecordError
from quorumark.field import Vector
from quorumark.files import write_shared
from quorumark.model.layout import read_safetensors
from quorumark.model.suspect import read_suspect
from quorumark.model.usercode import load_function
from quorumark.research.attacks import chain, public_scales
from quorumark.research.attacks.base import Target, _torch
from quorumark.research.attacks.plan import Job, Plan, known_only
from quorumark.research.known import KnownKey
from quorumark.research.page import Row, read_rows, write_rows
from quorumark.research.rows import ORIGINAL
from quorumark.verify.query import prepare
from quorumark.verify.reference import Reference

__all__ = [
    "Subject",
    "classifier",
    "key_of_members",
    "load_weights",
    "read_results",
    "read_subject",
    "run",
]

_STATE = "quorumark-attack-suite/v1"
_TARGET = {"code", "model", "manifest", "members", "make", "data", "evaluate", "checkpoints", "norms", "other"}


# --- what is attacked -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Subject:
    """A released model, what its attacker has, how good it is, and the key that it is marked with.

    `accuracy` judges a module, from 0 to 1. With the reference's groups z is measured aligned, too.
    """

    title: str
    target: Target
    accuracy: Callable[[Any], float]
    reference: Reference
    known: KnownKey

    @property
    def threshold(self) -> float:
        return float(self.reference.manifest.terms.policy.z)

    def digest(self) -> str:
        """Of the model and the manifest: results of another are not gone on with."""
        arrays = {name: _array(tensor) for name, tensor in self.target.weights.items()}
        model = read_suspect(arrays).digest()
        return digest("attacked", self.reference.manifest.digest(), bytes.fromhex(model)).hex()

    def z(self, weights: Mapping[str, Any], *, align: bool) -> tuple[float | None, int]:
        """z of a model as members would get it, and how many of its channels were left over; None: not testable."""
        if align and self.reference.groups is None:
            return None, 0
        arrays = {name: _array(tensor) for name, tensor in weights.items()}
        try:
            prepared = prepare(self.reference, arrays, align=align)
        except InconclusiveError:
            return None, 0
        return self.known.z_of(prepared.form), prepared.query.surplus

    def q(self, weights: Mapping[str, Any]) -> tuple[float | None, float | None]:
        """Q by layers and log10 of its bound, as members would get it: the better of aligned and not."""
        arrays, found = {name: _array(tensor) for name, tensor in weights.items()}, []
        for align in (False, True) if self.reference.groups is not None else (False,):
            with contextlib.suppress(InconclusiveError):
                measured = self.known.q_of(prepare(self.reference, arrays, align=align).form)
                found += [] if measured is None else [measured]
        return min(found, key=lambda pair: pair[1], default=(None, None))

    def z_by_block(self, weights: Mapping[str, Any]) -> list[float]:
        """What an oracle tells an attacker: z of every block."""
        arrays = {name: _array(tensor) for name, tensor in weights.items()}
        return self.known.z_by_block(prepare(self.reference, arrays).form)

    @property
    def attacked(self) -> Target:
        """The target, with an oracle for attackers who may ask one."""
        return replace(self.target, oracle=self.z_by_block)

    def row(self, job: Job | None, weights: Mapping[str, Any], **cost: Any) -> Row:
        """What an attacked model is worth."""
        accuracy = self.accuracy(self.target.module(weights))
        z, _ = self.z(weights, align=False)
        aligned, surplus = self.z(weights, align=True)
        q, log10_q = self.q(weights)
        more: dict[str, Any] = {"surplus": surplus, "q": q, "log10_q": log10_q}
        if job is None:
            return Row(ORIGINAL, accuracy, z, aligned, **more)
        return Row(job.name, accuracy, z, aligned, seed=job.seed, settings=job.settings, **more, **cost)


def _array(tensor: Any) -> Any:
    return tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else np.asarray(tensor)


def load_weights(path: Path) -> dict[str, Any]:
    """The tensors of a .safetensors file, as torch's."""
    torch = _torch()
    return {name: torch.from_numpy(np.array(tensor)) for name, tensor in read_safetensors(path).items()}


def key_of_members(reference: Reference, homes: Mapping[Path, Path]) -> KnownKey:
    """The key, put together from members' homes and the key files that open them: research only."""
    terms, shares = reference.manifest.terms, dict[int, Vector]()
    for home, key_file in homes.items():
        member, unlock = HomeFolder(home), Unlock.key_file(key_file)
        shares[terms.point_of(member.identity(unlock).ed25519)] = member.only_consortium().share(unlock).vector()
    if len(shares) < terms.threshold:
        raise InputError("members", f"must be at least {terms.threshold}, to put the key together", len(shares))
    return KnownKey.from_shares(reference.manifest, shares, reference.layout, reference.anchor)


def read_subject(plan: Plan) -> Subject:
    """What a plan's `[target]` names; paths are relative to the plan.

    code        a Python file with `make()`, a module of the architecture, and `data()`: ((inputs, labels) to train
                with, (inputs, labels) to test with); and `evaluate(module)`, from 0 to 1, if it is no classifier
    model       the released model, .safetensors
    manifest    consortium.json, with layout.json, anchor.safetensors and groups.json beside it
    members     home = key file, for t members who give up their shares
    checkpoints, norms, other    the global models of the rounds (a glob, in order of names), the sums of norms that
                they opened (.npy), a second model to average with; all optional
    """
    body = plan.target
    known_only("the plan's target", body, _TARGET)
    missing = [name for name in ("code", "model", "manifest", "members") if name not in body]
    if missing:
        raise InputError("the plan's target", "must name code, model, manifest and members", f"no {missing[0]}")

    def path(name: str) -> Path:
        return plan.folder / str(body[name])

    def function(name: str) -> Callable[..., Any]:
        return load_function(f"{path('code')}:{body.get(name, name)}", "the plan's code")

    torch = _torch()
    reference = Reference.read(path("manifest"))
    homes = {plan.folder / str(home): plan.folder / str(key) for home, key in dict(body["members"]).items()}
    known = key_of_members(reference, homes)
    (train, test), make = function("data")(), function("make")
    checkpoints: list[dict[str, Any]] = []
    scales: Sequence[Any] = ()
    if "checkpoints" in body:
        found = sorted(plan.folder.glob(str(body["checkpoints"])))
        checkpoints = [{n: torch.from_numpy(v) for n, v in _anchor(reference).items()}, *map(load_weights, found)]
        norms = np.load(path("norms")) if "norms" in body else None
        with contextlib.suppress(InputError):  # without norms that the strength needs there is no regression
            scales = public_scales(reference.layout, reference.manifest.terms.strength, checkpoints, norms)
    other = load_weights(path("other")) if "other" in body else None
    target = Target(
        make,
        load_weights(path("model")),
        tuple(train),
        checkpoints,
        scales,
        other=other,
        layout=reference.layout,
        base={name: torch.from_numpy(values) for name, values in _anchor(reference).items()},
    )
    accuracy = function("evaluate") if "evaluate" in body else classifier(*test)
    return Subject(plan.title, target, accuracy, reference, known)


def _anchor(reference: Reference) -> dict[str, Any]:
    """The anchor's tensors, whole."""
    return {
        name: np.concatenate([rows for _, rows in reference.anchor.model.blocks(name)]).reshape(info.shape)
        for name, info in reference.anchor.model.tensors.items()
    }


def classifier(inputs: Any, labels: Any) -> Callable[[Any], float]:
    """The accuracy of a module on examples."""

    def accuracy(module: Any) -> float:
        with _torch().no_grad():
            return float((module.eval()(inputs).argmax(-1) == labels).float().mean())

    return accuracy


# --- running ----------------------------------------------------------------------------------------------


def run(
    subject: Subject, plan: Plan, out: Path, progress: Callable[[int, int, str], None] | None = None
) -> tuple[list[Row], list[str]]:
    """Runs what is not in OUT/results.csv yet; all rows, and which attacks could not be run, and why.

    `progress` is told how many of how many are done, and the next one's name.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.csv"
    rows = _begun(subject, out)
    if not rows:
        rows.append(subject.row(None, subject.target.weights))
        if rows[0].best is None:
            raise InputError("the model", "must be one that can be tested")
        write_rows(path, rows)
    done, failed = {row.key for row in rows}, []
    for number, job in enumerate(plan.jobs):
        if progress is not None:
            progress(number, len(plan.jobs), job.name)
        if job.key in done:
            continue
        try:
            result = chain(subject.attacked, job.steps, seed=job.seed)
            cost = {"seconds": result.seconds, "examples": result.examples, "steps": result.steps}
            left = [value for name, value in result.notes.items() if name.rpartition(".")[2] == "left"]
            row = subject.row(job, result.weights, **cost, left=max(left, default=None))
        except QuorumarkError as error:
            failed.append(f"{job.name}: {error}")
            continue
        rows.append(row)
        done.add(job.key)
        write_rows(path, rows)
    if progress is not None:
        progress(len(plan.jobs), len(plan.jobs), "done")
    return read_rows(path), failed  # as everybody else reads them: rounded


def _begun(subject: Subject, out: Path) -> list[Row]:
    """The rows of an earlier run on the same model; none for a new folder."""
    state = out / "suite.json"
    body = {
        "format": _STATE, "title": subject.title, "attacked": subject.digest(), "threshold": f"{subject.threshold:g}",
    }  # fmt: skip
    if not state.exists():
        if (out / "results.csv").exists():
            raise InputError("--out", "must be a new folder, or one that a suite was run in", str(out))
        write_shared(state, (json.dumps(body, indent=2) + "\n").encode())
        return []
    if _state(out).get("attacked") != body["attacked"]:
        raise InputError("--out", "must be a new folder: this one holds attacks on another model", str(out))
    return read_rows(out / "results.csv") if (out / "results.csv").exists() else []


def _state(out: Path) -> dict[str, Any]:
    """What a suite wrote down of itself."""
    try:
        body = json.loads(read_file(out / "suite.json", "a suite's state"))
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RecordError(f"{str(out / 'suite.json')!r} is damaged: run the suite again in a new folder")
    return body


def read_results(out: Path) -> tuple[str, float, list[Row]]:
    """The title, the threshold and the rows of a suite that was run."""
    try:
        body = _state(out)
        if body["format"] != _STATE:
            raise RecordError(f"{str(out)!r} was written by another release: format {body['format']!r}")
        title, threshold = str(body["title"]), float(body["threshold"])
    except (ValueError, KeyError, TypeError):
        raise RecordError(f"{str(out / 'suite.json')!r} is damaged: run the suite again in a new folder") from None
    return title, threshold, read_rows(out / "results.csv")
