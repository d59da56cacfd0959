"""A command that waits for other members shows for whom: one live line on a terminal, elsewhere a line for each change.

Exit code 3: the time is up and others are still missing. Nothing is lost then, nor after Ctrl-C (130): the same command
goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from quorumark.cli.options import awaited
from quorumark.errors import BusyError
from quorumark.setup.waiting import Progress, until_finished

GOES_ON = "nothing is lost: the same command goes on from here"
TIMED_OUT = 3


def wait_visibly(visit: Callable[[], Progress], timeout: float | None, name: str = "") -> Progress:
    """Visits until the ceremony is finished; ends the command if the time is up or somebody interrupts it."""
    line = _Line(name)

    def visit_undisturbed() -> Progress:
        line.clear()  # a visit prints what it does
        return visit()

    try:
        progress = until_finished(visit_undisturbed, timeout, line.show)
    except KeyboardInterrupt:
        line.clear()
        typer.echo(GOES_ON, err=True)
        raise
    except BusyError as error:
        if timeout is None:
            raise
        typer.echo(f"quorumark: {error}", err=True)
        raise typer.Exit(TIMED_OUT) from None
    finally:
        line.clear()
    if progress.finished:
        return progress
    typer.echo(f"quorumark: {awaited(progress)}, and {timeout:g} s are over; {GOES_ON}", err=True)
    raise typer.Exit(TIMED_OUT)


class _Line:
    """Who is awaited, and by whom."""

    def __init__(self, name: str) -> None:
        from quorumark.cli.console import make_console

        self._console, self._live, self._last = make_console(), sys.stdout.isatty(), ""
        self._status: Any = None
        self._about = f"{name}: " if name else ""

    def show(self, progress: Progress) -> None:
        from rich.text import Text

        text = self._about + awaited(progress)
        if not self._live:
            if text != self._last:
                typer.echo(text)
        elif self._status is None:
            self._status = self._console.status(Text(text))
            self._status.start()
        elif text != self._last:
            self._status.update(Text(text))
        self._last = text

    def clear(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
