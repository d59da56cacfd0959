"""What a run measured, as a file of its own: written once, read again by the tables (docs/lab.md)."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorumark.errors import InputError, RecordError
from quorumark.files import write_shared
from quorumark.research.lab.config import TASKS, Configuration, Settings

if TYPE_CHECKING:
    from quorumark.research.lab.image_run import ImageRun
    from quorumark.research.lab.language_run import LanguageRun

    AnyRun = ImageRun | LanguageRun

__all__ = [
    "FORMAT",
    "LOST_COMMITS",
    "attack_record",
    "best_evidence",
    "check_settings",
    "finished",
    "groups",
    "language_record",
    "read_all",
    "read_attacks",
    "record",
    "scores_of",
    "where_run",
    "write",
    "write_lines",
]
FORMAT = "quorumark-lab-result/v1"
ATTACKS_FORMAT = "quorumark-language-attacks/v1"
_LARGEST = 1 << 26  # bytes of a result
ATTACKED = "attacks/language"  # where attacks on language models are, within the results


BALANCED, GLOBAL, MEAN = "balanced-anchor/v1", "global-cosine/v1", "mean-tensor-cosine/v1"
CODE = "paper-code"  # `papercode.CODE`: that module needs torch, and pages do not
_POINTS = 60  # of an accuracy curve
# Commits that results name and that no history of this repository has: they are of branches that came in as one commit.
# That one stands beside each. What ran cannot be looked up; the commit beside it is the nearest there is.
LOST_COMMITS = {
    "e99e31478564d717105a312d59e984d0558ca754": "0d15930",
    "dbf4bd3fa4cb85852f6769ceefab12f57f7f7c66": "9ef1bba",
    "cf291592": "52f81d7",
    "8e2f704": "94a975e",
}
_MAY_DIFFER = ("rounds", "evaluate_every", "patience", "null_keys")  # how long and how often; the page says how long


def record(run: ImageRun, abreast: int = 1) -> dict[str, Any]:
    """What there is to say about a run: on the test images, the released model is the one that validated best.

    `abreast` is the number of runs that had the device at once: what its seconds are worth.
    """
    from quorumark.research.lab.papercode import code_scores
    from quorumark.research.lab.scores import shown

    released = run.released
    size = {"train": run._x.shape[0], "validation": len(run.validation[1]), "test": len(run.test[1])}
    measured = [(entry.round, round(entry.accuracy, 4)) for entry in run.log if entry.accuracy is not None]
    body = _record(run, released, size, lambda: {
        "accuracy": {
            "released": round(run.fleet.accuracy(released, *run.test), 5),
            "final": round(run.fleet.accuracy(run.model, *run.test), 5),
            "validation": round(run.best.measure, 5),
            "released_round": run.best.round,
        },
        "curve": _thinned(measured),
        **({"abreast": abreast} if abreast > 1 else {}),
    })  # fmt: skip
    code = code_scores(run.trainable, released, run.code_keys, run.device)
    body["z"]["released"] = {**body["z"]["released"], **code}
    one_key = run.mark is not None and not run.settings.per_client
    body["shown"] = shown(run.layout, run.model, run.initial, run.keys[0]) if one_key else None
    body["continuity"] = None if run.continuity is None else run.continuity.summary()
    if run.settings.packing > 1:
        body["widened"] = [list(pair) for pair in getattr(run.mark, "widened", [])]
    return body


def language_record(run: LanguageRun) -> Callable[[], dict[str, Any]]:
    """The same of a language model: perplexity on the test text, of the model that validated best.

    What takes the device is measured now; the rest, z above all, when what comes back is called: in a thread, while the
    next run trains.
    """
    tokens = {"train": run._blocks.numel(), "validation": run.validation.numel(), "test": run.test.numel()}
    measured = [(entry.round, round(entry.perplexity, 4)) for entry in run.log if entry.perplexity is not None]
    patience = run.settings.patience
    rounds = f"{patience} rounds" if patience != 1 else "a round"
    stopped = f"validation had not improved for {rounds}" if run.stopped else ""
    perplexity = {
        "released": round(run.perplexity(run.released, run.test), 5),
        "final": round(run.perplexity(run.model, run.test), 5),
        "initial": round(run.perplexity_before, 5),
        "validation": round(run.best.measure, 5),
        "released_round": run.best.round,
    }
    found = {"perplexity": perplexity, "stopped": stopped, "curve": _thinned(measured)}
    return lambda: _record(run, run.released, tokens, lambda: found)


def _thinned(points: list[Any]) -> list[Any]:
    return points[:: max(1, -(-len(points) // _POINTS))]


def _record(run: AnyRun, released: Any, size: dict[str, int], measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    settings, log = run.settings, run.log
    if not log:
        raise RecordError("a run without a round has no result")
    taken = [entry.seconds for entry in log]
    return {
        "format": FORMAT,
        "id": settings.id,
        "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in settings.asdict().items()},
        "rounds": run.round_no,
        "data": {**size, "note": run.note},
        "parameters": run.layout.size,
        "coordinates": run.layout.coordinates,
        **measured(),
        "loss": round(log[-1].loss, 4),
        "rho": None if run.mark is None else round(run.mark.rho, 5),
        "expected_z": _forecast(run),
        "z": {
            "released": (z := scores_of(run, released)),
            "final": z if released is run.model else scores_of(run, run.model, [BALANCED]),
        },
        "null": _null(run, released) if settings.null_keys else None,
        "seconds": round(sum(taken), 1),
        "seconds_per_round": round(statistics.median(taken), 3),
        **where_run(run),
    }


def _forecast(run: AnyRun) -> float | None:
    """What a verification of the last model should find, as every real round tells it, without the key."""
    expected = None if run.mark is None else run.mark.expected_z
    return None if expected is None else round(expected, 3)


def attack_record(run: LanguageRun, title: str, digest: str, released: dict[str, float]) -> dict[str, Any]:
    """The head of a file of attacks on a run's released model; the attacks come under `rows`."""
    return {
        "format": ATTACKS_FORMAT,
        "id": run.settings.id,
        "plan": title,
        "rounds": run.round_no,
        "released_round": run.best.round,
        "released_digest": digest,
        "initial": {"perplexity": round(run.perplexity(run.initial, run.test), 5)},
        "released": released,
        **where_run(run),
        "rows": [],
    }


def scores_of(run: AnyRun, model: Any, names: Iterable[str] = (BALANCED, GLOBAL, MEAN)) -> dict[str, Any]:
    """By each statistic; with a key for each member their mean, least and largest."""
    from quorumark.research.lab.scores import z_scores

    keys = {str(number): key for number, key in enumerate(run.keys)}
    found = z_scores(run.layout, model.cpu().numpy(), run.initial.cpu().numpy(), keys, run.device, names)
    out: dict[str, Any] = {}
    for statistic, each in found.items():
        values = list(each.values())
        out[statistic] = round(statistics.fmean(values), 3)
        if len(values) > 1:
            out[f"{statistic} least"], out[f"{statistic} largest"] = round(min(values), 3), round(max(values), 3)
    return out


def _null(run: AnyRun, model: Any) -> dict[str, Any]:
    """z of keys that the model never saw, by the default statistic."""
    from quorumark.research.lab.scores import null_scores

    z = null_scores(run.layout, model.cpu().numpy(), run.initial.cpu().numpy(), run.settings.null_keys, run.device)
    mean, deviation = statistics.fmean(z), statistics.stdev(z)
    return {
        "keys": len(z),
        "mean": round(mean, 4),
        "deviation": round(deviation, 4),
        "largest": round(max(z), 3),
        "excess kurtosis": round(statistics.fmean(((v - mean) / deviation) ** 4 for v in z) - 3, 3),
    }


def where_run(run: AnyRun) -> dict[str, Any]:
    import torch

    hardware = torch.cuda.get_device_name() if run.device.type == "cuda" else f"CPU ({platform.machine()})"
    return {"commit": _commit(), "hardware": hardware, "torch": torch.__version__}


def _commit() -> str:
    """Of the code that ran; "+" behind it if there were changes that are not committed.

    A machine that got the files without their history is told by QUORUMARK_COMMIT.
    """
    commit = os.environ.get("QUORUMARK_COMMIT")
    if commit:
        return commit

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        folder = Path(__file__).parent
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=folder)  # noqa: S603, S607

    try:
        found = git("rev-parse", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", ".").returncode != 0
    except OSError:
        return "unknown"
    return found.stdout.strip() + ("+" if changed else "") if found.returncode == 0 else "unknown"


def write(body: dict[str, Any], folder: Path) -> Path | None:
    """Into the folder, unless a longer run of the same settings is there already."""
    path = folder / f"{body['id']}.json"
    if path.exists() and json.loads(path.read_text())["rounds"] > body["rounds"]:
        return None
    write_lines(body, path)
    return path


def write_lines(body: dict[str, Any], path: Path) -> None:
    """JSON with a line for each entry, and for each row of a table: changes are seen line by line."""

    def text(value: Any) -> str:
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            return "[\n" + ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in value) + "\n ]"
        return json.dumps(value, ensure_ascii=False)

    lines = [f" {json.dumps(name)}: {text(value)}" for name, value in body.items()]
    write_shared(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read_result(path: Path) -> dict[str, Any]:
    """The JSON object in a file of results."""
    try:
        body = json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size <= _LARGEST else None
    except (OSError, ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RecordError(f"{str(path)!r} is not a JSON object: remove it, and run it again")
    return body


def read_all(folder: Path) -> dict[str, dict[str, Any]]:
    """All results, by their runs' ids."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        body = read_result(path)
        if body.get("format") != FORMAT or not body.get("id") == path.stem == _id_of(body):
            raise RecordError(f"{str(path)!r} is not the result of the run that it is named after")
        found[body["id"]] = body
    return found


def _id_of(body: dict[str, Any]) -> str:
    """The id of the settings that a result was run with."""
    kind = TASKS["language" if "perplexity" in body else "vision"]
    wanted = {f.name for f in fields(kind)}
    try:
        given: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in body["settings"].items() if k in wanted
        }
        return kind(**given).id
    except (KeyError, TypeError, AttributeError, InputError):
        return ""


def check_settings(run: Settings, results: dict[str, dict[str, Any]]) -> None:
    """A result stands for a run only if what it was trained with is what the configuration says."""
    if run.id not in results:
        return
    had = results[run.id]["settings"]
    for name, wanted in run.asdict().items():
        wanted = list(wanted) if isinstance(wanted, tuple) else wanted
        if name not in _MAY_DIFFER and name in had and had[name] != wanted:
            raise RecordError(
                f"the result {run.id!r} was run with {name} {had[name]}, not {wanted} as in its configuration: run it "
                "again"
            )


def read_attacks(folder: Path) -> list[dict[str, Any]]:
    """All files of attacks."""
    found = []
    for path in sorted(folder.glob("*.json")):
        body = read_result(path)
        if body.get("format") != ATTACKS_FORMAT or body.get("id") != path.stem:
            raise RecordError(f"{str(path)!r} is not of attacks on the run that it is named after")
        found.append(body)
    return found


def finished(body: dict[str, Any], settings: Settings) -> bool:
    """Whether a result is of the whole run: all of its rounds, or stopped because validation improved no more."""
    return body["rounds"] >= settings.rounds or bool(body.get("stopped"))


def groups(configuration: Configuration) -> list[list[Settings]]:
    """The runs that differ in the seed only, together."""
    found: dict[Settings, list[Settings]] = {}
    for run in configuration.runs:
        found.setdefault(replace(run, seed=0), []).append(run)
    return list(found.values())


def best_evidence(runs: Iterable[Settings], results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of a group: those that are whole, or else those of the longest length that there is."""
    there = [(run, results[run.id]) for run in runs if run.id in results]
    whole = [body for run, body in there if finished(body, run)]
    longest = max((body["rounds"] for _, body in there), default=0)
    return whole or [body for _, body in there if body["rounds"] == longest]


_ALL_CARRY: dict[str, Any] = {"max_coordinates": 0}
