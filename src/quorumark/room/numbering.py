"""What names say, for the room and the agents alike: what is made once more when late answers came, and who sends a
message of a ceremony."""

from __future__ import annotations

import re

__all__ = ["again", "count_in", "sender_of"]

_SENDERS = (
    re.compile(r"[1-9]-[a-z]{1,20}/([0-9]{1,6})(-to-[0-9]{1,6})?\.msg"),  # a step of a ceremony
    re.compile(r"signature-([0-9]{1,6})\.hex"),  # of an amendment
    re.compile(r"(?:hello|answer)-([0-9]{1,6})\.msg"),  # of a recovery
)


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


def sender_of(name: str) -> int:
    """The point of the member whose file in a ceremony's folder this is, by its name; 0 for others."""
    found = next((match for one in _SENDERS if (match := one.fullmatch(name)) is not None), None)
    return 0 if found is None else int(found[1])
