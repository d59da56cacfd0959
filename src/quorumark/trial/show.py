"""What `quorumark try` prints: a line for each step, both learning curves while they grow, a table, a verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quorumark.round.outlook import Outlook
from quorumark.trial.results import Costs, Tested, Trial, gap, points
from quorumark.trial.run import THRESHOLD, Prepared, Watch
from quorumark.trial.userfile import Score

__all__ = ["Screen", "curves"]

_HEIGHT, _WIDTH = 9, 61  # with its labels, 80 columns
_SIGNS = {"marked": "●", "unmarked": "○"}


class Screen(Watch):
    """Follows a trial on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def _say(self, what: str, text: str) -> None:
        self._print(f"{what:<12}{text}", " " * 12)

    def _print(self, text: str, indent: str = "") -> None:
        """Between words, not at the last column."""
        width = max(40, min(self._console.width, 120))
        lines = textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
        self._console.print("\n".join(lines), soft_wrap=True)

    def prepared(self, prepared: Prepared) -> None:
        setting = prepared.setting
        self._print(
            f"quorumark try {setting.file}: {setting.members} members, any {setting.threshold} of whom can prove "
            f"ownership; {setting.rounds} rounds, with and without the mark"
        )
        self._console.print()
        self._say("model", f"{setting.weights:,} weights, of which {setting.carriers:,} can carry the mark")
        if setting.groups:
            self._say("channels", f"{setting.groups} groups: copies with renumbered channels can be put back in order")
        self._say("data", f"{', '.join(f'{count:,}' for count in setting.examples)} examples")
        settings = " ".join(f"{name}={value}" for name, value in setting.shown.items())
        self._say(
            "plan",
            f"z = {setting.planned:.0f} is expected after {setting.rounds} rounds, {setting.planned_least:.0f} at "
            f"least; {THRESHOLD:g} is needed ({settings})",
        )
        for text in setting.warnings:
            self._say("warning", text)
        seconds = 2 * setting.rounds * setting.members * prepared.once
        self._say("time", f"one member trains for {prepared.once:.2g} s a round: {_time(seconds)} of training in all")

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        with self._console.status(what):
            yield

    def key_made(self, trial: Trial, seconds: float) -> None:
        setting = trial.setting
        self._say("key", f"made by all {setting.members} together in {seconds:.1f} s; nobody has seen it")

    @contextmanager
    def training(self, trial: Trial) -> Iterator[Callable[[], None]]:
        with Live(console=self._console, transient=True, auto_refresh=False) as live:
            yield lambda: live.update(curves(trial), refresh=True)
        self._console.print(curves(trial))

    def result(self, trial: Trial) -> None:
        """The table, what it costs, and the verdict."""
        self._console.print(_tests(trial))
        original, costs = trial.original, trial.costs
        if original is not None and original.z is not None:
            expected = f"{trial.outlook.corrected_z:.1f} expected after training"
            self._say("z", f"{trial.setting.planned:.0f} planned, {expected}, {original.z:.1f} measured")
            if trial.outlook.survival_error:
                self._say("", about_survival(trial.outlook))
        if trial.loss is not None:
            self._say(trial.measure, about_loss(trial))
        if costs is not None:
            for what, text in about_costs(costs, trial.setting.members).items():
                self._say(what, text)

    def verdict(self, trial: Trial) -> None:
        self._console.print()
        if trial.works:
            self._console.print(Text("It works for this model.", "bold green"))
            return
        for finding in trial.findings:
            self._console.print(Text(finding.text, "bold red"))
            self._print(finding.remedy)


# --- learning curves --------------------------------------------------------------------------------------


def curves(trial: Trial) -> Group:
    """Both learning curves in characters, and a line with the newest numbers."""
    setting, done = trial.setting, len(trial.outlooks)
    line = f"round {done} of {setting.rounds}: a z of {trial.outlook.corrected_z:.1f} is expected"
    if not setting.metric:
        return Group(Text(line))
    named = ", ".join(f"{_SIGNS[name]} {name} {points(curve[-1])}" for name, curve in trial.curves.items() if curve)
    return Group(Text(), *map(Text, plot(trial.curves, setting.rounds)), Text(f"{line}; {named}"), Text())


def plot(curves: Mapping[str, Sequence[Score]], rounds: int, height: int = _HEIGHT, width: int = _WIDTH) -> list[str]:
    """Scores over rounds in a field of characters; where both curves meet there is one sign for both."""
    every = [score.value for curve in curves.values() for score in curve]
    low, high = min(every), max(every)
    span = (high - low) or 1.0
    columns = min(width, max(1, (width - 1) // rounds) * rounds + 1)  # whole steps, where a round has one
    rows = [[" "] * columns for _ in range(height)]
    for name, curve in curves.items():
        for number, score in enumerate(curve):
            column = round(number * (columns - 1) / rounds)
            row = height - 1 - round((score.value - low) / span * (height - 1))
            rows[row][column] = _SIGNS[name] if rows[row][column] in (" ", _SIGNS[name]) else "◉"
    labels = {0: points(Score(high)), height - 1: points(Score(low))}
    lines = [f"{labels.get(number, ''):>9} ┤{''.join(row)}".rstrip() for number, row in enumerate(rows)]
    axis = "└" + "─" * columns
    ends = "0" + f"round {rounds}".rjust(columns - 1)
    both = "◉ both" if any("◉" in row for row in rows) else ""
    return [*lines, f"{'':>9} {axis}", f"{'':>11}{ends}  {both}".rstrip()]


# --- tables and sentences ---------------------------------------------------------------------------------


def _tests(trial: Trial) -> Table:
    table = Table("the model", trial.measure, "z", "threshold", "verdict")
    for column in table.columns[1:4]:
        column.justify = "right"
    for tested in trial.tested:
        numbers = [
            "" if number is None else f"{number:.1f}".replace("-", "−") for number in (tested.z, tested.threshold)
        ]
        table.add_row(
            tested.what, points(tested.score), *numbers, Text(verdict_text(trial, tested), _colour(trial, tested))
        )
    return table


def verdict_text(trial: Trial, tested: Tested) -> str:
    """The verdict, and whether it is as it should be where a mark is not there or cannot be seen."""
    return f"{tested.verdict}, as it should" if _rightly(trial, tested) else tested.verdict


def _rightly(trial: Trial, tested: Tested) -> bool:
    return tested.verdict == "FAILED" and tested in (trial.control, trial.hidden)


def _colour(trial: Trial, tested: Tested) -> str:
    return "green" if tested.passed or _rightly(trial, tested) else "red" if trial.kept(tested) else "yellow"


def about_loss(trial: Trial) -> str:
    """What the mark costs in accuracy, in a sentence."""
    if trial.loss is None:
        return ""
    marked, unmarked = (trial.curves[name][-1] for name in ("marked", "unmarked"))
    difference, chance = trial.loss
    pair = f"{points(marked)} with the mark, {points(unmarked)} without"
    between = f"{gap(difference, unmarked)}, and chance alone explains ±{gap(chance, unmarked).lstrip('+')}"
    told = f"the mark costs {trial.measure}" if trial.costs_accuracy else "no loss can be told"
    return f"{pair}: {between}; {told}"


def about_survival(outlook: Outlook) -> str:
    """What the expected z is made of."""
    left = f"{100 * outlook.survival:.0f} ± {100 * outlook.survival_error:.0f} %"
    return f"by what is public {outlook.expected_z:.1f}; by the members' own noise training left {left} of the mark"


def about_costs(costs: Costs, members: int) -> dict[str, str]:
    """What a round costs more than plain averaging, in time and in bytes."""
    more = costs.marking / costs.training if costs.training else 0.0
    mark = max(0.0, costs.marking - costs.summing)
    own, upload = _bytes(costs.marked_bytes - costs.summed_bytes), _bytes(costs.marked_bytes)
    return {
        "time": f"a round of all {members} trains for {costs.training:.2f} s; secure aggregation adds "
        f"{costs.summing:.2f} s and the mark {mark:.2f} s, together {100 * more:.0f} % of training",
        "bytes": f"a member uploads {upload} a round, {own} of it for the mark (its float32 weights are "
        f"{_bytes(costs.plain_bytes)}); its share of the key is {_bytes(costs.key_bytes)}",
    }


def _bytes(count: int) -> str:
    for unit, size in (("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def _time(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} minutes"
