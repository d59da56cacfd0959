"""Names of what is made once more when late answers came; for the room and the agents alike."""

from __future__ import annotations

import re

__all__ = ["again", "count_in"]


def again(name: str, count: int) -> str:
    """What is made once more, by how many answers there are now: signed.json, then signed-4.json. 0: the first time."""
    start, dot, end = name.rpartition(".")
    return f"{start}-{count}{dot}{end}" if count else name


def count_in(name: str, what: str) -> int | None:
    """Whether `name` is `what`, the first time (0) or with so many answers; None: it is something else."""
    if name == what:
        return 0
    start, _, end = what.rpartition(".")
    found = re.fullmatch(rf"{re.escape(start)}-([1-9][0-9]{{0,5}})\.{re.escape(end)}", name)
    return None if found is None else int(found[1])
