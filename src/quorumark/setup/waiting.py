"""How far a member got in a ceremony over a folder, and one loop for all who wait for the others there.

A visit does what can be done now and says whose files are missing. Nothing is locked between two visits. A visit may
cost seconds (it opens the share and computes), so the loop looks for the missing files only, and visits again once all
of them are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from quorumark.consortium.records import Manifest
from quorumark.errors import BusyError

__all__ = ["Progress", "until_finished"]

SHORTEST, LONGEST = 0.2, 2.0  # seconds between two looks at the folder: the longer nothing happens, the more


@dataclass(frozen=True)
class Progress:
    """How far this member got: finished, or waiting for files of a step, each of somebody who is named in `waiting`.

    `manifest` is the one in force, once a ceremony that makes one is finished. `finding` says what else it showed: that
    a check found the shares healthy, or whom a recovery was for.
    """

    step: str
    waiting: tuple[str, ...]
    manifest: Manifest | None = None
    finding: str = ""
    files: tuple[Path, ...] = ()

    @property
    def finished(self) -> bool:
        return not self.waiting

    def now(self) -> Progress:
        """The same with those only whose files are still missing: a look at the folder, no visit."""
        missing = [(name, file) for name, file in zip(self.waiting, self.files, strict=True) if not file.exists()]
        return replace(self, waiting=tuple(name for name, _ in missing), files=tuple(file for _, file in missing))


def until_finished(
    visit: Callable[[], Progress], timeout: float | None = None, tell: Callable[[Progress], None] = lambda _: None
) -> Progress:
    """Visits again and again until the ceremony is finished, or for so many seconds; how far it got.

    `tell` hears after every look who is awaited. If another process works for the same member, that is waited for as
    well. With a timeout of 0 it is one visit.
    """
    until = float("inf") if timeout is None else time.monotonic() + timeout
    while True:
        try:
            progress = visit()
        except BusyError:
            if time.monotonic() >= until:
                raise
            tell(Progress("its turn", ("another command of this member",)))
            time.sleep(min(LONGEST, max(0.0, until - time.monotonic())))
            continue
        if progress.finished:
            return progress
        pause, awaited = SHORTEST, progress
        while not awaited.finished:
            tell(awaited)
            left = until - time.monotonic()
            if left <= 0:
                return awaited
            time.sleep(min(pause, left))
            before, awaited = awaited, awaited.now()
            pause = SHORTEST if awaited.waiting != before.waiting else min(LONGEST, 1.5 * pause)
