"""Where members say that they are, as a server reads it before a run goes on (docs/secagg.md).

One member's word is not enough: a state that it makes up would be refused by all others, and the run would stop. Among
t members that name the same state at least one is honest, and has accepted it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quorumark.checks import is_count
from quorumark.errors import RoundError

__all__ = ["Ask", "Where", "ask_where", "candidates"]

HANDED_OUT = ("round", "halvings", "level", "under", "held")
"""What members are told of the sum that a model comes from, and hand out with it: `sum-round`, …"""

SUMMED = ("sum", "norms")
"""The arrays beside it: where sums are checked the sum itself, with its norms and tag; else the sum of the norms."""

Reply = Mapping[str, Any]


class Ask(Protocol):
    """Asks every member that can be reached for a stage, or `only` some, and gives what they said, by point."""

    def __call__(
        self,
        stage: str,
        config: dict[str, Any],
        /,
        *,
        arrays: Mapping[str, Any] = ...,
        only: Collection[int] | None = None,
    ) -> Mapping[int, dict[str, Any]]: ...


@dataclass(frozen=True)
class Where:
    """A member's own word: how many rounds it has accepted, the last one that it joined, and the one in which it has
    answered from the server's present state (0: none), over which members, with how many halvings of the mark, under
    which draw of the cohort."""

    accepted: int = 0
    round: int = 0
    answered: int = 0
    over: tuple[int, ...] = ()
    halvings: int = 0
    draw: int = 0

    @classmethod
    def of(cls, reply: Reply) -> Where:
        numbers = {name: reply.get(name, 0) for name in ("accepted", "round", "answered", "halvings")}
        try:
            over = json.loads(reply.get("over", "[]"))
        except (ValueError, TypeError, RecursionError):
            over = None
        numbers["draw"] = reply.get("of-draw", 0)
        if not all(is_count(number) for number in numbers.values()):
            raise RoundError("it does not say where it is in integers", code="message.malformed")
        if not isinstance(over, list) or not all(is_count(point, 1) for point in over):
            raise RoundError("it does not say as a list of points over whom it has answered", code="message.malformed")
        return cls(over=tuple(over), **numbers)


def ask_where(ask: Ask, state: bytes) -> dict[int, Where]:
    """Where the members are, and in which round from a state they have answered, by point. A reply that cannot be read
    is left out."""
    found = {}
    for point, reply in ask("state", {"of-state": state.hex(), "with-model": False}).items():
        try:
            found[point] = Where.of(reply)
        except RoundError:
            continue
    return found


def candidates(replies: Iterable[Reply], present: int, least: int) -> list[Reply]:
    """The states after the `present` number of accepted rounds that at least so many members hand out, newest first.

    An empty list: enough members are where the server is. A RoundError: no state has enough of them.
    """
    named: dict[bytes, list[Reply]] = {}
    here = 0
    for reply in replies:
        try:
            if Where.of(reply).accepted <= present:
                here += 1
            else:
                named.setdefault(_name(reply), []).append(reply)
        except (RoundError, KeyError, TypeError, ValueError, AttributeError):
            continue
    agreed = [group[0] for group in named.values() if len(group) >= least]
    if not agreed and here < least:
        most = max([here, *(len(group) for group in named.values())])
        raise RoundError(
            f"the run cannot go on: {least} members must be at the same model, and at most {most} are; start the nodes "
            "of the others, and try again",
            code="round.no-common-model",
        )
    return sorted(agreed, key=lambda reply: -int(reply["accepted"]))


def _name(reply: Reply) -> bytes:
    """A digest of all that a member hands out, so that a lie about any of it does not count for the honest ones."""
    about = {name: reply[f"sum-{name}"] for name in HANDED_OUT}
    hashed = hashlib.sha256(json.dumps({**about, "accepted": reply["accepted"]}, sort_keys=True).encode())
    for name, array in sorted(reply["arrays"].items()):
        hashed.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        hashed.update(array.tobytes())
    return hashed.digest()
