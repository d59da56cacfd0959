"""docs/results.md, made from the results of all runs (`quorumark lab table`)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quorumark.research.lab.config import Configuration, Settings
from quorumark.research.lab.results import (
    _ALL_CARRY,
    BALANCED,
    CODE,
    GLOBAL,
    LOST_COMMITS,
    MEAN,
    best_evidence,
    check_settings,
    finished,
    groups,
    read_attacks,
)
from quorumark.research.lab.tables import as_long, compared_means, mean_of, table

__all__ = ["attack_section", "page"]


_NOT_RUN = "not run"
_DEFAULT = "rho:0.05"  # the strength that a consortium has if it says nothing
_FLAT = 20  # percent by which z may differ between numbers of members
_LOSS = 0.1  # points of accuracy that a mark may cost
_AIM, _USEFUL = 20, 5  # what z should be after attacks, and the percentage of perplexity that they may cost
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
    from quorumark.research.lab import compared

    parts = [_HEAD]
    places = {name: place for place, name in enumerate(_FIRST)}
    for configuration in sorted(configurations, key=lambda c: places.get(c.name, len(places))):
        parts.append(f"## {configuration.title}\n\n`quorumark lab run {configuration.name}`\n")
        parts += [f"{note}\n" for note in configuration.notes]
        for run in configuration.runs:
            check_settings(run, results)
        if configuration.task == "language":
            parts += _language(configuration, results)
        elif any(run.continuity for run in configuration.runs):
            parts += compared.watched(configuration, results)
        elif any(run.packing > 1 for run in configuration.runs):
            parts += compared.packed(configuration, results)
        else:
            parts += _vision(configuration, results)
        if figures is not None and (figures / f"lab-{configuration.name}.svg").exists():
            parts.append(f"![{configuration.title}]({figures.name}/lab-{configuration.name}.svg)\n")
        if configuration.aims:
            parts += _price(configuration, results)
        if configuration.plot == "members":
            parts += _flat(configuration, results)
        parts += compared.sections(configuration, results)
        told = [row for runs in groups(configuration) for row in _told_rows(runs, results)]
        if told:
            parts.append("What was told in the last round, and z of that round's model:\n")
            parts.append(table(["run", "rounds", "forecast", "measured z", "difference"], told))
        nulls = [row for runs in groups(configuration) for row in _null_rows(runs, results)]
        if nulls:
            parts.append("z of keys that the unmarked models never saw:\n")
            parts.append(table(["run", "keys", "mean", "deviation", "excess kurtosis", "largest"], nulls))
    parts += [more] if more else []
    machines = sorted({(b["hardware"], b["torch"]) for b in results.values()})
    if machines:
        parts.append("## Where they were run\n")
        parts.append("\n".join(f"- {hardware}, PyTorch {torch}" for hardware, torch in machines) + "\n")
        parts.append(_commits())
        parts.append(table(["run", "rounds", "seconds", "seconds a round", "commit"], _runs(results)))
    return "\n".join(parts)


def _vision(configuration: Configuration, results: dict[str, dict[str, Any]]) -> list[str]:
    rows = [_row(configuration, runs, results) for runs in groups(configuration)]
    heads = ["data", "K", "partition", "strength", "paper", "accuracy", "Δ", "paper's z", "z balanced", "z cosine",
             "z mean cosine", "z code", "ρ", "evidence"]  # fmt: skip
    return _with_the_rest(heads, rows, {"data": "", "K": "K = ", "partition": "", "strength": ""})


def _price(configuration: Configuration, results: dict[str, dict[str, Any]]) -> list[str]:
    """Whether marks are as strong as they should be and cost nothing, as far as both sides' seeds tell."""
    found = {
        (runs[0].dataset, runs[0].strength): bodies
        for runs in groups(configuration)
        if (bodies := best_evidence(runs, results))
    }
    rows = []
    for (dataset, strength), marked in found.items():
        plain = found.get((dataset, "none"), [])
        if strength not in configuration.aims or not plain or not as_long(marked[0], plain[0]):
            continue
        ours, theirs = ([100 * b["accuracy"]["released"] for b in bodies] for bodies in (marked, plain))
        change, noise = compared_means(ours, theirs)
        zs = [statistics.fmean(b["z"]["released"][name] for b in marked) for name in (BALANCED, GLOBAL)]
        counts, shown = f"{len(ours)} and {len(theirs)}", "not known" if noise is None else f"± {noise:.2f}"
        free = _free(change, noise, min(len(ours), len(theirs)))
        most = "not known" if noise is None else f"{max(0.0, noise - change):.2f}"
        figures = [counts, f"{change:+.2f}", shown, most, free, *(f"{z:.1f}" for z in zs)]
        least = configuration.aims[strength]
        rows.append([dataset, strength, *figures, f"{str(min(zs) >= least).lower()} (≥ {least})"])
    text = f"""\
Aim: accuracy at most {_LOSS} points lower than without the mark, with z as large as the last column says, both by the
balanced statistic and by the paper's text. Δ is between means over seeds; *noise* is the half of its 95 % interval by
Welch, from the deviations of both sides' seeds. *No loss above* is that interval's far end: a larger loss is excluded
at 95 %, a smaller one is not. *Costs nothing* is true if all of the interval is within the aim, and
false if none of it is. In between it cannot be told, which is not the same as no cost.
"""
    heads = ["data", "strength", "seeds, with and without", "Δ", "noise", "no loss above", "costs nothing",
             "z balanced", "z cosine", "z is large enough"]  # fmt: skip
    return [text, table(heads, rows), _ran_on(configuration, found)] if rows else []


def _ran_on(configuration: Configuration, found: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """The lab's commits that the compared seeds ran on: they are not all of one."""
    compared = {dataset for dataset, strength in found if strength in configuration.aims}
    told = [
        f"{dataset} {strength} {', '.join(body['commit'][:7] for body in bodies)}"
        for (dataset, strength), bodies in found.items()
        if dataset in compared and (strength == "none" or strength in configuration.aims)
    ]
    return f"The lab's commits that they ran on, in the order of their seeds: {'; '.join(told)}.\n"


def _free(change: float, noise: float | None, seeds: int) -> str:
    """Whether a mark costs no more than it may."""
    if noise is not None and change - noise >= -_LOSS:
        return "true"
    if noise is not None and change + noise < -_LOSS:
        return "false"
    count = {1: "one seed", 2: "two seeds", 3: "three seeds"}.get(seeds, f"{seeds} seeds")
    return f"cannot be told at {count}"


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
    parts = [table(heads, shown)] if shown else []
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
        parts.append(table(["strength", "perplexity", "change", "z"], rows))
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
        alike = ours in found and plain and (finished(plain, run) if finished(ours, run) else as_long(ours, plain))
        if run.strength != "none" and ours and plain and alike:
            changes.append(100 * (ours["perplexity"]["released"] / plain["perplexity"]["released"] - 1))
    rhos = [body["rho"] for body in found if body["rho"] is not None]
    return [
        first.model,
        str(first.members),
        first.strength,
        f"{sample / 1e6:.1f} M" if (sample := getattr(first, "max_coordinates", 0)) else "all",
        mean_of([body["perplexity"]["released"] for body in found], 3),
        _change(changes, len(found)),
        mean_of([body["perplexity"]["initial"] for body in found[:1]], 3),
        *(mean_of([body["z"]["released"][name] for body in found], 1) for name in (BALANCED, GLOBAL, MEAN)),
        f"{statistics.fmean(rhos):.4f}" if rhos else "",
        _language_evidence(runs, found),
    ]


def _change(percents: list[float], seeds: int) -> str:
    """What pairs of runs of one seed, with the mark and without, differ by; of how many seeds if not of all."""
    if not percents:
        return ""
    spread = f" ± {statistics.stdev(percents):.3f}" if len(percents) > 1 else ""
    fewer = f" ({len(percents)} of {seeds} seeds)" if len(percents) < seeds else ""
    return f"{statistics.fmean(percents):+.3f}{spread} %{fewer}"


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
    return [f"## Attacks on {body['id']}\n", intro, f"{aim}.\n", table(heads, cells)]


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
        mean_of(accuracies, 2),
        _difference(runs, results),
        configuration.figure("z", first),
        *(mean_of(zs[name], 1) for name in (BALANCED, GLOBAL, MEAN)),
        _code_column(found),
        f"{statistics.fmean(rhos):.4f}" if rhos else "",
        _evidence(runs, found, [results[run.id] for run in runs if run.id in results]),
    ]


def _code_column(found: list[dict[str, Any]]) -> str:
    """z by the paper's code, and in brackets with the σ that was measured; of those results that have it."""
    plain, measured = (
        [body["z"]["released"][name] for body in found if name in body["z"]["released"]]
        for name in (CODE, f"{CODE} calibrated")
    )
    return f"{mean_of(plain, 1)} ({mean_of(measured, 1)})" if plain else ""


def _difference(runs: list[Settings], results: dict[str, dict[str, Any]]) -> str:
    """Against the unmarked runs of the same seeds and length, of those runs that are shown."""
    pairs, shown = [], best_evidence(runs, results)
    for run in runs:
        ours, plain = results.get(run.id), results.get(run.unmarked.id)
        if run.strength != "none" and ours in shown and ours and plain and as_long(ours, plain):
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


def _null_rows(runs: list[Settings], results: dict[str, dict[str, Any]]) -> list[list[str]]:
    found = [results[run.id] for run in runs if run.null_keys and run.id in results]
    names = ("keys", "mean", "deviation", "excess kurtosis", "largest")
    return [[body["id"], *(str(body["null"][name]) for name in names)] for body in found if body["null"]]


def _told_rows(runs: list[Settings], results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The forecast of those results that have one; older ones do not."""
    rows = []
    for body in (results[run.id] for run in runs if run.id in results):
        told = body.get("expected_z")
        if told is not None:
            measured = body["z"]["final"][BALANCED]
            rows.append([body["id"], str(body["rounds"]), f"{told:.1f}", f"{measured:.1f}", f"{told - measured:+.1f}"])
    return rows


def _commits() -> str:
    """What the commits of the tables are, and those that nobody can look up."""
    lost = "; ".join(f"{commit[:12]} (in {near})" for commit, near in LOST_COMMITS.items())
    return (
        "*Commit* is that of the code that ran, in this table and in those of other results; a + behind it: with "
        "changes that were in no commit. "
        f"These are in no history of this repository: {lost}. They are of branches that came in as one commit, the one "
        "in brackets: exactly what ran cannot be looked up, and that commit is the nearest there is.\n"
    )


def _runs(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [
        [
            b["id"], str(b["rounds"]), f"{b['seconds']:.0f}",
            f"{b['seconds_per_round']:.2f}" + (f", {b['abreast']} abreast" if "abreast" in b else ""), b["commit"][:12],
        ]
        for b in results.values()
    ]  # fmt: skip
