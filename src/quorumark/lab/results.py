"""The file that a run leaves, and docs/results.md from all of them.

A result is written by a run and by nothing else: `record` takes the run itself. `page` makes the tables: for every
configuration each group of runs that differ only in the seed, the paper's figure beside ours, and how strong the
evidence is: run in full as the paper did, run shorter, or not run. `check` says whether a page is what the files say.
"""

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
from quorumark.lab.config import TASKS, Configuration, Settings

if TYPE_CHECKING:
    from quorumark.lab.loop import Run
    from quorumark.lab.tuning import LanguageRun

    AnyRun = Run | LanguageRun

__all__ = [
    "FORMAT",
    "attack_record",
    "attack_section",
    "best_evidence",
    "finished",
    "groups",
    "language_record",
    "page",
    "read_all",
    "read_attacks",
    "record",
    "replace_text",
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
_NOT_RUN = "not run"
_DEFAULT = "rho:0.05"  # the strength that a consortium has if it says nothing
_FLAT = 20  # percent by which z may differ between numbers of members
_LOSS = 0.1  # points of accuracy that a mark may cost
_AIM, _USEFUL = 20, 5  # what z should be after attacks, and the percentage of perplexity that they may cost
_MAY_DIFFER = ("rounds", "evaluate_every", "patience", "null_keys")  # how long and how often; the page says how long


# --- from a run -------------------------------------------------------------------------------------------


def record(run: Run, abreast: int = 1) -> dict[str, Any]:
    """What there is to say about a run: on the test images, the released model is the one that validated best.

    `abreast` is the number of runs that had the device at once: what its seconds are worth.
    """
    from quorumark.lab.papercode import code_scores
    from quorumark.lab.scores import shown

    released = run.best.model if run.best.model is not None else run.model
    size = {"train": run._x.shape[0], "validation": len(run.validation[1]), "test": len(run.test[1])}
    measured = [(entry.round, round(entry.accuracy, 4)) for entry in run.log if entry.accuracy is not None]
    body = _record(run, released, size, lambda: {
        "accuracy": {
            "released": round(run.fleet.accuracy(released, *run.test), 5),
            "final": round(run.fleet.accuracy(run.model, *run.test), 5),
            "validation": round(run.best.accuracy, 5),
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
        "validation": round(run.best.perplexity, 5),
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
        "z": {
            "released": (z := _z(run, released)),
            "final": z if released is run.model else _z(run, run.model, [BALANCED]),
        },
        "null": _null(run, released) if settings.null_keys else None,
        "seconds": round(sum(taken), 1),
        "seconds_per_round": round(statistics.median(taken), 3),
        **_where(run),
    }


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
        **_where(run),
        "rows": [],
    }


def _z(run: AnyRun, model: Any, names: Iterable[str] = (BALANCED, GLOBAL, MEAN)) -> dict[str, Any]:
    """By each statistic; with a key for each member their mean, least and largest."""
    from quorumark.lab.scores import z_scores

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
    from quorumark.lab.scores import null_scores

    z = null_scores(run.layout, model.cpu().numpy(), run.initial.cpu().numpy(), run.settings.null_keys, run.device)
    mean, deviation = statistics.fmean(z), statistics.stdev(z)
    return {
        "keys": len(z),
        "mean": round(mean, 4),
        "deviation": round(deviation, 4),
        "largest": round(max(z), 3),
        "excess kurtosis": round(statistics.fmean(((v - mean) / deviation) ** 4 for v in z) - 3, 3),
    }


def _where(run: AnyRun) -> dict[str, Any]:
    import torch

    hardware = torch.cuda.get_device_name() if run.device.type == "cuda" else f"CPU ({platform.machine()})"
    return {"commit": _commit(), "hardware": hardware, "torch": torch.__version__}


def _commit() -> str:
    """Of the code that ran; "+" behind it if there were changes that are not committed.

    A machine that got the files without their history is told by QUORUMARK_COMMIT.
    """
    told = os.environ.get("QUORUMARK_COMMIT")
    if told:
        return told

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

    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(name)}: {text(value)}" for name, value in body.items()]
    replace_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def replace_text(path: Path, text: str) -> None:
    """The whole file, or the old one stays."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# --- to a page --------------------------------------------------------------------------------------------


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


def _check_settings(run: Settings, results: dict[str, dict[str, Any]]) -> None:
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


_HEAD = """# Results

Made by `quorumark lab table` from the files in `results/`, each of which a run has written; `quorumark lab table
--check` fails where this page is not what they say. [lab.md](lab.md) says how to run them.

Accuracy is on the test images, in percent, of the model with the highest validation accuracy; ± is the standard
deviation over seeds. *Δ* is the difference to the same runs without the mark, in points. z is of the same model:
*balanced* is the project's statistic, *cosine* the paper's text (the whole model's cosine with the key), *mean cosine*
the mean of the carrying tensors' cosines, in its own deviations. *z code* is what the paper's public code computes: the
mean of all trainable tensors' cosines, divided by σ = 0.01; in brackets by the σ that random keys have on that model.
Results that are older than it have none. ρ is the mark's share of the distance from the initial model.
*Evidence*: **full** is as many rounds as the paper ran, **stopped** fewer because validation improved no more,
**shorter** fewer, **not run** none. Rows that were not run are in the tables only where the paper has a figure; the
others are named below them.
"""
_FIRST = ("table1", "table2", "language")  # the page begins with these


def page(
    configurations: Iterable[Configuration],
    results: dict[str, dict[str, Any]],
    more: str = "",
    figures: Path | None = None,
) -> str:
    """docs/results.md; `more` are sections that other results make, `figures` a folder with what `lab plot` drew."""
    from quorumark.lab import compared

    parts = [_HEAD]
    places = {name: place for place, name in enumerate(_FIRST)}
    for configuration in sorted(configurations, key=lambda c: places.get(c.name, len(places))):
        parts.append(f"## {configuration.title}\n\n`quorumark lab run {configuration.name}`\n")
        parts += [f"{note}\n" for note in configuration.notes]
        for run in configuration.runs:
            _check_settings(run, results)
        if configuration.task == "language":
            parts += _language(configuration, results)
        elif any(run.continuity for run in configuration.runs):
            parts += compared.watched(configuration, results)
        else:
            parts += _vision(configuration, results)
        if figures is not None and (figures / f"lab-{configuration.name}.svg").exists():
            parts.append(f"![{configuration.title}]({figures.name}/lab-{configuration.name}.svg)\n")
        if configuration.aims:
            parts += _price(configuration, results)
        if configuration.plot == "members":
            parts += _flat(configuration, results)
        parts += compared.sections(configuration, results)
        nulls = [row for runs in groups(configuration) for row in _null_rows(runs, results)]
        if nulls:
            parts.append("z of keys that the unmarked models never saw:\n")
            parts.append(_table(["run", "keys", "mean", "deviation", "excess kurtosis", "largest"], nulls))
    parts += [more] if more else []
    machines = sorted({(b["hardware"], b["torch"]) for b in results.values()})
    if machines:
        parts.append("## Where they were run\n")
        parts.append("\n".join(f"- {hardware}, PyTorch {torch}" for hardware, torch in machines) + "\n")
        parts.append(_table(["run", "rounds", "seconds", "seconds a round", "commit"], _runs(results)))
    return "\n".join(parts)


def _vision(configuration: Configuration, results: dict[str, dict[str, Any]]) -> list[str]:
    rows = [_row(configuration, runs, results) for runs in groups(configuration)]
    heads = ["data", "K", "partition", "strength", "paper", "accuracy", "Δ", "paper's z", "z balanced", "z cosine",
             "z mean cosine", "z code", "ρ", "evidence"]  # fmt: skip
    return _with_the_rest(heads, rows, {"data": "", "K": "K = ", "partition": "", "strength": ""})


def _price(configuration: Configuration, results: dict[str, dict[str, Any]]) -> list[str]:
    """Whether marks are as strong as they should be and cost nothing, as far as the noise of seeds tells.

    The deviation σ of one run's accuracy is that over the default's seeds (two at least) on the same data. The
    difference of the means of n marked and m unmarked runs has the standard error σ·√(1/n + 1/m).
    """
    found = {
        (runs[0].dataset, runs[0].strength): bodies
        for runs in groups(configuration)
        if (bodies := best_evidence(runs, results))
    }
    rows = []
    for (dataset, strength), marked in found.items():
        plain, default = found.get((dataset, "none"), []), found.get((dataset, _DEFAULT), [])
        if strength not in configuration.aims or len(default) < 2 or not plain or not _as_long(marked[0], plain[0]):
            continue
        ours, theirs, seeds = ([100 * b["accuracy"]["released"] for b in bodies] for bodies in (marked, plain, default))
        change = statistics.fmean(ours) - statistics.fmean(theirs)
        noise = 2 * statistics.stdev(seeds) * (1 / len(ours) + 1 / len(theirs)) ** 0.5
        zs = [statistics.fmean(b["z"]["released"][name] for b in marked) for name in (BALANCED, GLOBAL)]
        free = "true" if change >= -_LOSS else "not told from noise" if change >= -noise else "false"
        counts = f"{len(ours)} and {len(theirs)}"
        figures = [counts, f"{change:+.2f}", f"± {noise:.2f}", free, *(f"{z:.1f}" for z in zs)]
        least = configuration.aims[strength]
        rows.append([dataset, strength, *figures, f"{str(min(zs) >= least).lower()} (≥ {least})"])
    text = f"""\
Aim: accuracy at most {_LOSS} points lower than without the mark, with z as large as the last column says, both by the
balanced statistic and by the paper's text. Δ is between means over seeds; *noise* is twice its standard error, from the
deviation of the default's seeds. A loss within it is not told from noise, which is not the same as none; a gain beyond
it is not claimed: so few seeds tell a deviation badly.
"""
    heads = ["data", "strength", "seeds, with and without", "Δ", "noise", "costs nothing", "z balanced", "z cosine",
             "z is large enough"]  # fmt: skip
    return [text, _table(heads, rows)] if rows else []


def _flat(configuration: Configuration, results: dict[str, dict[str, Any]]) -> list[str]:
    """How far z of the default is from being the same for all numbers of members."""
    found = {
        runs[0].members: statistics.fmean(body["z"]["released"][BALANCED] for body in bodies)
        for runs in groups(configuration)
        if runs[0].strength == _DEFAULT and (bodies := best_evidence(runs, results))
    }
    if len(found) < 2:
        return []
    low, high = min(found.values()), max(found.values())
    apart, whole = 100 * (1 - low / high), {run.members for run in configuration.runs} == set(found)
    holds = str(apart <= _FLAT).lower() if whole else "not all were run"
    aim = f"Aim: z of {_DEFAULT} within {_FLAT} % from {min(found)} to {max(found)} members: {holds}"
    return [f"{aim}; {low:.1f} is {apart:.0f} % below {high:.1f}.\n"]


def _with_the_rest(heads: list[str], rows: list[list[str]], named: dict[str, str]) -> list[str]:
    """A table of the rows that say something, and a sentence that names the others."""
    columns, figures = [heads.index(head) for head in named], [i for i, head in enumerate(heads) if "paper" in head]
    shown = [row for row in rows if row[-1] != _NOT_RUN or any(row[i] for i in figures)]
    rest = [row for row in rows if row not in shown]
    parts = [_table(heads, shown)] if shown else []
    if rest:
        names = "; ".join(" ".join(f"{named[heads[i]]}{row[i]}" for i in columns) for row in rest)
        parts.append(f"Not run: {names}.\n")
    return parts


def _language(configuration: Configuration, results: dict[str, dict[str, Any]]) -> list[str]:
    """The paper's rows, then ours; *change* is against the unmarked runs, in percent."""
    parts = []
    for entry in configuration.paper:
        plain = float(entry["perplexity"]["none"].split()[0])
        rows = [
            [strength, shown, "" if strength == "none" else f"{100 * (float(shown.split()[0]) / plain - 1):+.2f} %",
             entry["z"].get(strength, "")]
            for strength, shown in entry["perplexity"].items()
        ]  # fmt: skip
        parts.append(f"The paper's, for {entry['model']}:\n")
        parts.append(_table(["strength", "perplexity", "change", "z"], rows))
    heads = ["model", "K", "strength", "coordinates", "perplexity", "change", "before", "z balanced", "z cosine",
             "z mean cosine", "ρ", "evidence"]  # fmt: skip
    parts.append(
        "Ours; *before* is the perplexity of the model that fine-tuning begins with, *change* is against the unmarked "
        "runs of the same seeds:\n"
    )
    rows = [_language_row(runs, results) for runs in groups(configuration)]
    return parts + _with_the_rest(heads, rows, {"model": "", "strength": "", "coordinates": "coordinates: "})


def _language_row(runs: list[Settings], results: dict[str, dict[str, Any]]) -> list[str]:
    first, found = runs[0], best_evidence(runs, results)
    changes = []
    for run in runs:
        ours, plain = results.get(run.id), results.get(replace(run, strength="none", **_ALL_CARRY).id)
        alike = ours in found and plain and (finished(plain, run) if finished(ours, run) else _as_long(ours, plain))
        if run.strength != "none" and ours and plain and alike:
            changes.append(100 * (ours["perplexity"]["released"] / plain["perplexity"]["released"] - 1))
    rhos = [body["rho"] for body in found if body["rho"] is not None]
    return [
        first.model,
        str(first.members),
        first.strength,
        f"{sample / 1e6:.1f} M" if (sample := getattr(first, "max_coordinates", 0)) else "all",
        _mean([body["perplexity"]["released"] for body in found], 3),
        _change(changes, len(found)),
        _mean([body["perplexity"]["initial"] for body in found[:1]], 3),
        *(_mean([body["z"]["released"][name] for body in found], 1) for name in (BALANCED, GLOBAL, MEAN)),
        f"{statistics.fmean(rhos):.4f}" if rhos else "",
        _language_evidence(runs, found),
    ]


def _as_long(one: dict[str, Any] | None, other: dict[str, Any]) -> bool:
    return one is not None and bool(one["rounds"] == other["rounds"])


def _change(percents: list[float], seeds: int) -> str:
    """What pairs of runs of one seed, with the mark and without, differ by; of how many seeds if not of all."""
    if not percents:
        return ""
    spread = f" ± {statistics.stdev(percents):.3f}" if len(percents) > 1 else ""
    fewer = f" ({len(percents)} of {seeds} seeds)" if len(percents) < seeds else ""
    return f"{statistics.fmean(percents):+.3f}{spread} %{fewer}"


_ALL_CARRY: dict[str, Any] = {"max_coordinates": 0}


def _language_evidence(runs: list[Settings], found: list[dict[str, Any]]) -> str:
    if not found:
        return _NOT_RUN
    seeds, at = f"{len(found)} of {len(runs)} seeds", [body["perplexity"]["released_round"] for body in found]
    stopped = [body for body in found if body["stopped"] and body["rounds"] < runs[0].rounds]
    released = f"round {_range(at)} released"
    if not finished(found[0], runs[0]):
        return f"shorter ({found[0]['rounds']} of {runs[0].rounds} rounds, {seeds}; {released})"
    if not stopped:
        return f"full ({runs[0].rounds} rounds, {seeds}; {released})"
    return f"stopped ({_range([b['rounds'] for b in found])} of {runs[0].rounds} rounds, {seeds}; {released})"


def _range(numbers: list[int]) -> str:
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def attack_section(folder: Path) -> str:
    """Attacks on language models, a section for each; nothing if there are none."""
    return "\n".join(part for body in read_attacks(folder) for part in _attacked(body))


def _attacked(body: dict[str, Any]) -> list[str]:
    """Attacks on one released model: whether the aim holds, and a table."""
    plain, rows = body["released"], body["rows"]
    intro = (
        f"On the model that round {body['released_round']} of {body['rounds']} released: perplexity "
        f"{plain['perplexity']:.3f} on the test text ({body['initial']['perplexity']:.3f} before fine-tuning), "
        f"z {plain['z']:.1f}. *Change* is against that perplexity.\n"
    )
    useful = [(max(_zs(row)), row) for row in rows if row["change"] <= _USEFUL]
    aim = f"Aim: z ≥ {_AIM} after each attack that costs at most {_USEFUL} % of perplexity"
    if useful:
        z, least = min(useful, key=lambda pair: pair[0])
        shown = f"{least['attack']} {least['settings']}".strip()
        aim += f": {str(z >= _AIM).lower()}; the least of {len(useful)} is {z:.1f} ({shown})"
    cells = [
        [
            row["attack"], row["settings"], _perplexity(row["perplexity"]), _cost(row["change"]),
            "" if row["z"] is None else f"{row['z']:.1f}",
            f"{row['z_aligned']:.1f}" if "z_aligned" in row else "", f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    heads = ["attack", "settings", "perplexity", "change", "z", "z aligned", "seconds"]
    return [f"## Attacks on {body['id']}\n", intro, f"{aim}.\n", _table(heads, cells)]


def _zs(row: dict[str, Any]) -> list[float]:
    return [z for z in (row["z"], row.get("z_aligned")) if z is not None]


def _perplexity(value: float) -> str:
    return f"{value:.3f}" if value < 1000 else f"{value:.1e}"


def _cost(percent: float) -> str:
    return f"{percent:+.2f} %" if percent < 1000 else f"× {1 + percent / 100:.3g}"


def _row(configuration: Configuration, runs: list[Settings], results: dict[str, dict[str, Any]]) -> list[str]:
    first, found = runs[0], best_evidence(runs, results)
    accuracies = [100 * body["accuracy"]["released"] for body in found]
    zs = {name: [body["z"]["released"][name] for body in found] for name in (BALANCED, GLOBAL, MEAN)}
    rhos = [body["rho"] for body in found if body["rho"] is not None]
    if first.per_client:  # K marks of S/K each, with independent signs: together ‖S‖/√K, where the state counts ‖S‖
        rhos = [rho / first.members**0.5 for rho in rhos]
    return [
        first.dataset,
        str(first.members),
        first.partition,
        first.strength,
        configuration.figure("accuracy", first),
        _mean(accuracies, 2),
        _difference(runs, results),
        configuration.figure("z", first),
        *(_mean(zs[name], 1) for name in (BALANCED, GLOBAL, MEAN)),
        _code(found),
        f"{statistics.fmean(rhos):.4f}" if rhos else "",
        _evidence(runs, found, [results[run.id] for run in runs if run.id in results]),
    ]


def _code(found: list[dict[str, Any]]) -> str:
    """z by the paper's code, and in brackets with the σ that was measured; of those results that have it."""
    plain, measured = (
        [body["z"]["released"][name] for body in found if name in body["z"]["released"]]
        for name in (CODE, f"{CODE} calibrated")
    )
    return f"{_mean(plain, 1)} ({_mean(measured, 1)})" if plain else ""


def _difference(runs: list[Settings], results: dict[str, dict[str, Any]]) -> str:
    """Against the unmarked runs of the same seeds and length, of those runs that are shown."""
    pairs, shown = [], best_evidence(runs, results)
    for run in runs:
        ours, plain = results.get(run.id), results.get(run.unmarked.id)
        if run.strength != "none" and ours in shown and ours and plain and _as_long(ours, plain):
            pairs.append(100 * (ours["accuracy"]["released"] - plain["accuracy"]["released"]))
    return f"{statistics.fmean(pairs):+.2f}" if pairs else ""


def _evidence(runs: list[Settings], found: list[dict[str, Any]], there: list[dict[str, Any]]) -> str:
    """What a row rests on, and what there is besides: runs of other seeds that are not as long."""
    if not found:
        return _NOT_RUN
    rounds, note = found[0]["rounds"], found[0]["data"]["note"]
    kind = f"full ({rounds} rounds" if rounds >= runs[0].rounds else f"shorter ({rounds} rounds"
    seeds = f"{len(found)} of {len(runs)} seeds"
    besides = [
        f"; seed {body['settings']['seed']}: {body['rounds']} rounds, {100 * body['accuracy']['released']:.2f}, "
        f"z {body['z']['released'][BALANCED]:.1f}"
        for body in there
        if body not in found
    ]
    return f"{kind}, {seeds})" + "".join(besides) + (f"; {note}" if "not comparable" in note else "")


def _mean(values: list[float], digits: int) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def _null_rows(runs: list[Settings], results: dict[str, dict[str, Any]]) -> list[list[str]]:
    found = [results[run.id] for run in runs if run.null_keys and run.id in results]
    names = ("keys", "mean", "deviation", "excess kurtosis", "largest")
    return [[body["id"], *(str(body["null"][name]) for name in names)] for body in found if body["null"]]


def _runs(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [
        [
            b["id"], str(b["rounds"]), f"{b['seconds']:.0f}",
            f"{b['seconds_per_round']:.2f}" + (f", {b['abreast']} abreast" if "abreast" in b else ""), b["commit"][:12],
        ]
        for b in results.values()
    ]  # fmt: skip


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
