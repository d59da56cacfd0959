"""Who may take part in rounds, and the numbers that follow from it (docs/secagg.md, "Numbers")."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quorumark.canonical import canonical, digest
from quorumark.checks import is_count
from quorumark.consortium.identity import Header, verify_card, verify_manifest
from quorumark.consortium.records import Card, Manifest, Member
from quorumark.errors import InputError, RecordError

__all__ = ["Group", "check_round_number", "group_of", "word"]

_SMALLEST_SET = 3  # of two members, each learns the other's vector from the sum
LARGEST_ROUND = 1 << 53
FAR = 1 << 32  # a round's number that is so much later than the last is nobody's: it would use up those between
DRAWS = 4  # of a cohort from one state: the first, and three redraws


def word(number: int) -> bytes:
    """A number in the digests of this package."""
    return number.to_bytes(8, "big")


def check_round_number(number: int) -> int:
    if not is_count(number, 1) or number >= LARGEST_ROUND:
        raise InputError("round", "must be an integer, at least 1", repr(number))
    return number


@dataclass(frozen=True)
class Group:
    """Who may take part, and how many may collude: up to threshold − 1 members, with the server.

    `context` says what the group is for (a manifest's digest, or a name that its members agreed on). With
    `cohort_size`, so many members are drawn from each state, publicly, and the others rest.
    """

    roster: tuple[Member, ...]
    threshold: int
    context: bytes = b""
    attempts: int = 3
    cohort_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.context, bytes):
            raise InputError("context", "must be bytes", type(self.context).__name__)
        points = [member.point for member in self.roster]
        if points != list(range(1, len(points) + 1)):
            raise InputError("roster", f"must list the points 1..{len(points)} in order", points)
        for what in ("name", "ed25519", "x25519"):
            if len({getattr(member, what) for member in self.roster}) != len(points):
                raise InputError("roster", f"must not give two members one {what}")
        drawn = self.cohort_size
        if drawn is not None and (not is_count(drawn, _SMALLEST_SET) or drawn > len(points)):
            raise InputError("cohort_size", f"must be an integer in {_SMALLEST_SET}..{len(points)}", drawn)
        if self.size < _SMALLEST_SET:
            raise InputError("roster", f"must have at least {_SMALLEST_SET} members", len(points))
        if not is_count(self.threshold, 2) or self.threshold > self.size:
            raise InputError("threshold", f"must be an integer in 2..{self.size}", self.threshold)
        if not is_count(self.attempts, 1):
            raise InputError("attempts", "must be an integer, at least 1", self.attempts)

    def __hash__(self) -> int:
        return hash(self.id)

    @classmethod
    def of_cards(cls, cards: Iterable[Card], threshold: int, context: bytes = b"", **settings: Any) -> Group:
        """A group of members who know each other's cards. Points follow the keys, so that the order does not matter."""
        known = sorted(cards, key=lambda card: card.ed25519)
        for card in known:
            verify_card(card)
        roster = tuple(Member(x, c.name, c.ed25519, c.x25519, examples=1) for x, c in enumerate(known, 1))
        return cls(roster, threshold, context, **settings)

    @classmethod
    def of_manifest(cls, manifest: Manifest, **settings: Any) -> Group:
        """The group of a consortium. Its id depends on the manifest's digest, so on the epoch: epochs do not mix."""
        verify_manifest(manifest)
        return cls(manifest.terms.roster, manifest.terms.threshold, manifest.digest(), **settings)

    @cached_property
    def id(self) -> bytes:
        """Everything above in one digest; all messages are bound to it."""
        about = {
            "roster": [member.as_dict() for member in self.roster],
            "threshold": self.threshold,
            "attempts": self.attempts,
            "cohort_size": self.cohort_size,
        }
        return digest("secagg group", self.context, canonical(about))

    @property
    def size(self) -> int:
        """n: members who may take part in one round."""
        return len(self.roster) if self.cohort_size is None else self.cohort_size

    @property
    def quorum(self) -> int:
        """T: answers that open a sum. It depends on nothing that the server chooses."""
        return (self.size + self.threshold - 1) // 2 + 1

    @property
    def least(self) -> int:
        """The smallest U."""
        return max(self.quorum, _SMALLEST_SET)

    @property
    def closing(self) -> int:
        """n − T + t: if so many say that they never answer, n − T + 1 of them are honest, and fewer than T are left."""
        return self.size - self.quorum + self.threshold

    @property
    def blocking(self) -> int:
        """min(t, n − T + 1): one of t is honest; and so many can stop a round by staying away in any case."""
        return min(self.threshold, self.size - self.quorum + 1)

    @property
    def draws(self) -> int:
        """How many cohorts may be drawn from one state. Members take part in no later one, so that it is known which
        must be closed before the state is used under another manifest."""
        return 1 if self.size == len(self.roster) else DRAWS

    def cohort(self, state: bytes, draw: int = 0) -> tuple[int, ...]:
        """The members drawn from a state: those with the n smallest digests of (group, state, draw, point).

        A round's number is not in it: a server that skips numbers has the same members to answer, who do so once.
        """
        everyone = range(1, len(self.roster) + 1)
        if self.size == len(self.roster):
            return tuple(everyone)
        lot = sorted(everyone, key=lambda x: digest("secagg cohort", self.id, state, word(draw), word(x)))
        return tuple(sorted(lot[: self.size]))

    def member(self, point: int) -> Member:
        if point not in range(1, len(self.roster) + 1):
            raise RecordError(f"the group has no member at point {point}")
        return self.roster[point - 1]

    def point_of(self, ed25519: str) -> int:
        if ed25519 not in self._points:
            raise RecordError("this identity is not a member of the group")
        return self._points[ed25519]

    @cached_property
    def _points(self) -> dict[str, int]:
        return {member.ed25519: member.point for member in self.roster}

    def name(self, point: int) -> str:
        return repr(self.member(point).name)

    def names(self, points: Iterable[int]) -> str:
        return ", ".join(self.name(x) for x in points)

    def header(self, step: str, session: bytes, sender: int, attempt: int = 0) -> Header:
        return Header(self.id.hex(), session.hex(), f"secagg/{step}", sender, attempt=attempt)

    def session(self, round_no: int, purpose: str, draw: int = 0) -> bytes:
        """What *ready* belongs to; the later messages belong to ctx."""
        redrawn = [word(draw)] if draw else []
        return digest("secagg session", self.id, word(round_no), purpose.encode(), *redrawn)


def group_of(manifest: Manifest) -> Group:
    """The consortium's group for secure aggregation.

    Its settings are in the terms that all signed, under `policy`: `attempts` (20), and `cohort`, the number of members
    who are drawn from each state (all). More attempts cost no secrecy: the quorum depends on K, t and the cohort alone.
    """
    verify_manifest(manifest)
    name = manifest.digest()
    if name not in _GROUPS:
        policy = manifest.terms.policy
        if len(_GROUPS) >= _MOST_GROUPS:
            _GROUPS.clear()
        _GROUPS[name] = Group.of_manifest(manifest, attempts=policy.attempts, cohort_size=policy.cohort)
    return _GROUPS[name]


_GROUPS: dict[bytes, Group] = {}  # by the manifest's digest, which says all of it; its signatures are checked each time
_MOST_GROUPS = 64
