"""The trial's report: one HTML page with curves, what was tested, what it costs, and the settings to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quorumark.report import environment
from quorumark.trial.results import Trial, points
from quorumark.trial.show import about_costs, about_loss, about_survival, verdict_text
from quorumark.trial.userfile import Score

__all__ = ["trial_page"]

_SIZES = {"wide": (720, 260), "narrow": (340, 220)}  # drawn twice, so that its letters are readable on a phone too
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 14, 34


def trial_page(trial: Trial, command: str) -> str:
    """Everything that the terminal shows, to keep and to pass on."""
    setting, original = trial.setting, trial.original
    ends = {name: points(curve[-1]) if curve else "" for name, curve in trial.curves.items()}
    rows = [
        {
            "what": tested.what,
            "refused": tested.refused,
            "score": points(tested.score),
            "z": _number(tested.z),
            "threshold": _number(tested.threshold),
            "verdict": verdict_text(trial, tested),
            "bad": not tested.passed and verdict_text(trial, tested) == tested.verdict,
        }
        for tested in trial.tested
    ]
    costs = [] if trial.costs is None else list(about_costs(trial.costs, setting.members).values())
    return (
        environment()
        .get_template("trial.html")
        .render(
            file=setting.file,
            works=trial.works,
            findings=trial.findings,
            warnings=setting.warnings,
            members=setting.members,
            quorum=setting.threshold,
            answering=setting.answering,
            rounds=setting.rounds,
            weights=setting.weights,
            carriers=setting.carriers,
            measure=trial.measure,
            loss=about_loss(trial),
            z=_number(None if original is None else original.z) or "none",
            threshold=_number(None if original is None else original.threshold),
            expected=_number(trial.outlook.corrected_z),
            survival=about_survival(trial.outlook) if trial.outlook.survival_error else "",
            planned=f"{setting.planned:.0f}",
            rows=rows,
            costs=[text[:1].upper() + text[1:] + "." for text in costs],
            command=command,
            pictures=[_draw(name, trial.curves, setting.rounds) for name in _SIZES] if setting.metric else [],
            **ends,
        )
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _draw(name: str, curves: Mapping[str, Sequence[Score]], rounds: int) -> str:
    """Both curves as SVG; all numbers are ours, so nothing in it needs escaping."""
    width, height = _SIZES[name]
    every = [score.value for curve in curves.values() for score in curve]
    low, high = min(every), max(every)
    span = (high - low) or 1.0

    def x(number: float) -> float:
        return _LEFT + (width - _LEFT - _RIGHT) * number / rounds

    def y(value: float) -> float:
        return _TOP + (height - _TOP - _BOTTOM) * (1 - (value - low) / span)

    def line(curve: Sequence[Score]) -> str:
        return " ".join(f"{x(number):.1f},{y(score.value):.1f}" for number, score in enumerate(curve))

    base = height - _BOTTOM
    parts = [
        f'<svg class="{name}" viewBox="0 0 {width} {height}" role="img" aria-label="Learning curves with and without '
        'the mark">',
        f'<path class="axis" d="M{_LEFT},{_TOP} V{base} H{width - _RIGHT}"/>',
    ]
    for value in (low, (low + high) / 2, high):
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{points(Score(value))}</text>')
        parts.append(f'<path class="axis" d="M{_LEFT - 4},{y(value):.1f} h4"/>')
    step = next(s * 10**k for k in range(7) for s in (1, 2, 5) if rounds / (s * 10**k) <= width / 80)
    for number in range(0, rounds + 1, step):
        parts.append(f'<path class="axis" d="M{x(number):.1f},{base} v4"/>')
        parts.append(f'<text x="{x(number):.1f}" y="{base + 18}" text-anchor="middle">{number}</text>')
    parts += [
        f'<polyline class="range" stroke-dasharray="5 4" points="{line(curves["unmarked"])}"/>',
        f'<polyline class="model" fill="none" points="{line(curves["marked"])}"/>',
        f'<path class="model" d="M{width - 150},{base - 34} h24"/>',
        f'<text x="{width - 118}" y="{base - 30}">with the mark</text>',
        f'<path class="range" stroke-dasharray="5 4" d="M{width - 150},{base - 14} h24"/>',
        f'<text x="{width - 118}" y="{base - 10}">without</text>',
        "</svg>",
    ]
    return "\n".join(parts)
