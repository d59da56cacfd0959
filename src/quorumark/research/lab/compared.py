"""Sections of docs/results.md about the paper's own claims, what a mark shows of its key, and its safety nets.

Each is made from result files alone, and is left out while there are none.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from quorumark.research.lab.config import Configuration, Settings
from quorumark.research.lab.results import BALANCED, CODE, best_evidence, groups
from quorumark.research.lab.tables import as_long, compared_means, mean_of, table

__all__ = ["packed", "sections", "watched"]

Results = dict[str, dict[str, Any]]


def sections(configuration: Configuration, results: Results) -> list[str]:
    """What a configuration's table is followed by."""
    return [*_reproduced(configuration, results), *_baseline(configuration, results), *_shown(configuration, results)]


def _reproduced(configuration: Configuration, results: Results) -> list[str]:
    """Whether runs by the rule of the paper's code have the paper's z, and cost as little as it says."""
    parts = []
    for wanted in configuration.reproduce:
        for runs in groups(configuration):
            first, found = runs[0], _with_code(best_evidence(runs, results))
            named = wanted["dataset"], wanted["strength"], "iid", wanted.get("members", first.members)
            if (first.dataset, first.strength, first.partition, first.members) != named:
                continue
            if not found:
                continue
            z = statistics.fmean(body["z"]["released"][CODE] for body in found)
            ours = statistics.fmean(body["z"]["released"][BALANCED] for body in found)
            near = abs(z - wanted["z"]) <= wanted["within"]
            pairs = [
                100 * (body["accuracy"]["released"] - plain["accuracy"]["released"])
                for run in runs
                if (body := results.get(run.id)) in found and as_long(plain := results.get(run.unmarked.id), body)
                if body is not None and plain is not None
            ]
            cost = statistics.fmean(pairs) if pairs else None
            cheap = "not known" if cost is None else f"{str(cost > -wanted['loss']).lower()} ({cost:+.2f})"
            parts.append(
                f"The paper reproduced, {first.dataset}, {first.strength}, "
                f"{found[0]['rounds']} of {first.rounds} rounds: z by its own statistic within "
                f"{wanted['z']} ± {wanted['within']}: {str(near).lower()} ({z:.1f}); "
                f"accuracy less than {wanted['loss']} points lower than without the mark: {cheap}; "
                f"z of the same models by the balanced statistic: {ours:.0f}.\n"
            )
    return parts


def _with_code(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [body for body in bodies if CODE in body["z"]["released"]]


def _baseline(configuration: Configuration, results: Results) -> list[str]:
    """The paper's claim about a key per member: z below 4 from 16 members on, by its own rule and statistic."""
    if configuration.plot != "members":
        return []
    parts = []
    for strength in sorted({run.strength for run in configuration.runs if run.per_client and run.papers_code}):
        found = {
            runs[0].members: bodies
            for runs in groups(configuration)
            if runs[0].strength == strength and (bodies := _with_code(best_evidence(runs, results)))
        }
        if not found:
            continue
        counts = sorted({run.members for run in configuration.runs if run.strength == strength})
        code, ours = (
            {k: statistics.fmean(body["z"]["released"][name] for body in found[k]) for k in counts if k in found}
            for name in (CODE, BALANCED)
        )
        shown, beside = (", ".join(f"{z:.1f} (K = {k})" for k, z in zs.items()) for zs in (code, ours))
        # z grows with the rounds, so what holds after a few of them need not hold after all
        rounds = sorted({body["rounds"] for bodies in found.values() for body in bodies})
        full = max(run.rounds for run in configuration.runs if run.strength == strength)
        holds = _faded(code) if set(found) == set(counts) else "not all numbers of members were run"
        parts.append(
            f"The paper's claim that the baseline falls below z = 4 from 16 members on, by its own rule ({strength}) "
            f"and statistic, after {' or '.join(map(str, rounds))} of {full} rounds: {holds}. {shown}. z of the same "
            f"models by the balanced statistic: {beside}.\n"
        )
    return parts


def _faded(zs: dict[int, float]) -> str:
    """Two claims apart: z is below 4 from 16 members on, and it gets there from above."""
    after, before = ([z for k, z in zs.items() if (k >= 16) == late] for late in (True, False))
    below = all(z < 4 for z in after)
    above = [k for k, z in zs.items() if z >= 4]
    if not above:
        where = "z is below 4 with every number of members, so it crosses 4 nowhere"
    elif max(above) == max(zs):
        where = f"z is {zs[max(above)]:.1f} with {max(above)} members"
    else:
        where = f"the last z of 4 or more is that of {max(above)} members"
    seen = "seen" if below and before and all(z >= 4 for z in before) else "**not seen**"
    return (
        f"below 4 from 16 members on: {str(below).lower()}; its shape, 4 or more with fewer than 16 and below 4 from "
        f"there: {seen}, {where}"
    )


def _shown(configuration: Configuration, results: Results) -> list[str]:
    """What the last model of marked runs shows of the key to those who saw it and the first one."""
    if not configuration.reproduce:
        return []
    rows = []
    for runs in groups(configuration):
        bodies = [body for body in best_evidence(runs, results) if body.get("shown")]
        if bodies:
            mean = {name: statistics.fmean(body["shown"][name] for body in bodies) for name in bodies[0]["shown"]}
            rho = statistics.fmean(body["rho"] for body in bodies)
            figures = [f"{mean['cosine']:.3f}", f"{100 * mean['signs']:.1f} %", f"{100 * mean['bare']:.2f} %"]
            rows.append([runs[0].dataset, runs[0].strength, str(bodies[0]["rounds"]), f"{rho:.3f}", *figures])
    text = """\
What the move θ − θ_0 of the last model, which every member and the server know, shows of the key: its cosine with the
key, the share of weights that moved the way of their sign (50 % is chance), and the share of weights in rows where
95 % of them did, which little but the mark moves.
"""
    heads = ["data", "strength", "rounds", "ρ", "cosine with the key", "signs", "in bare rows"]
    return [text, table(heads, rows)] if rows else []


def watched(configuration: Configuration, results: Results) -> list[str]:
    """The runs with dither and the continuity rule, in a table of their own."""
    rows, missing = [], []
    for runs in groups(configuration):
        found = best_evidence(runs, results)
        if found:
            rows.append(_watched_row(runs[0], found))
        else:
            missing.append(f"{runs[0].dataset} {runs[0].strength} κ = {runs[0].dither:g}")
    heads = ["data", "K", "strength", "κ", "rounds", "accuracy", "z balanced", "ρ", "seconds a round",
             "rows silenced", "coordinates silenced", "most coordinates in a round"]  # fmt: skip
    parts = [table(heads, rows)] if rows else []
    return parts + ([f"Not run: {'; '.join(missing)}.\n"] if missing else [])


def packed(configuration: Configuration, results: Results) -> list[str]:
    """The runs with several weights in an element, beside those with one."""
    found = {runs[0]: best_evidence(runs, results) for runs in groups(configuration)}
    rows, missing = [], []
    for first, bodies in found.items():
        name = f"{first.dataset} {first.strength} packing {first.packing}"
        plain = found.get(replace(first, packing=1), [])
        if bodies:
            rows.append(_packed_row(first, bodies, plain if plain and as_long(plain[0], bodies[0]) else []))
        else:
            missing.append(name)
    heads = ["data", "K", "strength", "packing", "rounds", "seeds", "accuracy", "Δ accuracy", "z balanced", "Δ z",
             "told from 1", "ρ", "rounds with wider units", "seconds a round"]  # fmt: skip
    parts = [table(heads, rows)] if rows else []
    return parts + ([f"Not run: {'; '.join(missing)}.\n"] if missing else [])


def _packed_row(first: Settings, found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> list[str]:
    def figures(bodies: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
        accuracies = [100 * body["accuracy"]["released"] for body in bodies]
        return accuracies, [body["z"]["released"][BALANCED] for body in bodies]

    changes, told = ["", ""], ""
    if first.packing > 1 and plain:
        pairs = zip(figures(found), figures(plain), (2, 1), strict=True)
        apart = [(*compared_means(ours, theirs), digits) for ours, theirs, digits in pairs]
        changes = [f"{d:+.{n}f}" + ("" if noise is None else f" ± {noise:.{n}f}") for d, noise, n in apart]
        known = [abs(d) > noise for d, noise, _ in apart if noise is not None]
        names = [name for name, far in zip(("accuracy", "z"), known, strict=False) if far]
        told = (" and ".join(names) or "no") if known else "one seed says nothing"
    accuracies, zs = figures(found)
    return [
        first.dataset,
        str(first.members),
        first.strength,
        str(first.packing),
        str(found[0]["rounds"]),
        str(len(found)),
        mean_of(accuracies, 2),
        changes[0],
        mean_of(zs, 1),
        changes[1],
        told,
        f"{statistics.fmean(body['rho'] for body in found):.4f}",
        f"{statistics.fmean(len(body['widened']) for body in found):.1f}" if first.packing > 1 else "",
        f"{statistics.fmean(body['seconds_per_round'] for body in found):.2f}",
    ]


def _watched_row(first: Settings, found: list[dict[str, Any]]) -> list[str]:
    def share(name: str) -> str:
        return f"{100 * statistics.fmean(body['continuity'][name] for body in found):.3f} %"

    return [
        first.dataset,
        str(first.members),
        first.strength,
        f"{first.dither:g}",
        str(found[0]["rounds"]),
        mean_of([100 * body["accuracy"]["released"] for body in found], 2),
        mean_of([body["z"]["released"][BALANCED] for body in found], 1),
        "" if found[0]["rho"] is None else f"{statistics.fmean(body['rho'] for body in found):.4f}",
        f"{statistics.fmean(body['seconds_per_round'] for body in found):.2f}",
        share("rows"),
        share("coordinates"),
        share("coordinates largest"),
    ]
