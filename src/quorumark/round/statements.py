"""What members sign about a state, so that the others may go on (docs/secagg.md, "One state, one opened sum").

    never    I have answered nothing from this state in this round, or under this draw of a cohort, and never will
    strong   the mark of this state, halved so many times, is too strong for my update
    newer    I first accepted this state after I had seen this nonce

Only statements of members who are drawn count: those who rest could say anything and mean nothing. Where no cohorts
are drawn there is one draw, number 0, of everybody.

A *turn* is what a server says about a round besides the model that it starts from: its number, its draw, how often the
mark is halved, whether it makes an earlier sum again, and the statements that allow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quorumark.canonical import canonical, digest, parse
from quorumark.checks import is_count, take
from quorumark.consortium.identity import Identity, open_message
from quorumark.errors import InputError, MessageError, QuorumarkError, RecordError, RoundError
from quorumark.round.group import LARGEST_ROUND, Group, check_round_number, word

__all__ = [
    "HALVINGS",
    "Said",
    "Turn",
    "check_closed",
    "check_given_up",
    "check_halved",
    "check_newer",
    "check_redrawn",
    "from_plain",
    "in_draw",
    "is_closed",
    "place_of",
    "plain",
    "sign",
    "signers",
]

HALVINGS = 3
"""After so many there is no mark from this state."""

Said = Mapping[int, bytes]
"""Signed statements by point."""


def sign(identity: Identity, group: Group, what: str, state: bytes, about: bytes) -> bytes:
    """`about`: a round's number, a number of halvings (`word`), a draw (`in_draw`), or a nonce."""
    header = group.header(what, _session(what, state, about), group.point_of(identity.ed25519))
    return identity.write(header, b"")


def in_draw(draw: int) -> bytes:
    """What *never* is about: all rounds under a draw, in place of one round."""
    return word(0) + word(draw)


def signers(group: Group, what: str, state: bytes, about: bytes, said: Said, draw: int = 0) -> tuple[int, ...]:
    """Whose statements are right, of the cohort of a draw. A wrong one counts as none: its sender cannot stop the
    others with it."""
    found, drawn = [], group.cohort(state, draw)
    for point, message in said.items():
        if point not in drawn:
            continue
        try:
            open_message(message, group, group.header(what, _session(what, state, about), point))
        except QuorumarkError:
            continue
        found.append(point)
    return tuple(found)


def _session(what: str, state: bytes, about: bytes) -> bytes:
    return digest(f"secagg {what}", state, about)


# --- what members check -----------------------------------------------------------------------------------


def check_given_up(group: Group, state: bytes, round_no: int, said: Said, draw: int = 0) -> None:
    """Whether a round's sum can never be opened: n − T + t members of its cohort never answer in it."""
    found = signers(group, "never", state, word(round_no), said, draw)
    if len(found) < group.closing:
        raise RoundError(
            f"{group.closing} members must say that they never answer in round {round_no}, and {len(found)} do",
            code="round.not-given-up",
        )


def is_closed(group: Group, state: bytes, draw: int, said: Said) -> bool:
    """Whether nothing can be opened from a state under a draw: n − T + t members of its cohort never answer there.

    At most t − 1 of them lie, so n − T + 1 of the n never answer, and T − 1 are left.
    """
    return len(signers(group, "never", state, in_draw(draw), said, draw)) >= group.closing


def check_redrawn(group: Group, state: bytes, draw: int, said: Mapping[str, Said]) -> None:
    """Whether a draw may be used: under all before it nothing can be opened.

    So one sum is opened from a state. Of two draws under which something is opened take the later one: one of its T
    answers is an honest member's, since T ≥ t, and that member has seen that the earlier one is closed. So there is one
    such draw. Under it, any two sets of T answers have t members in common, and an honest one, who answers once.
    """
    if draw >= group.draws:
        raise RoundError(
            f"at most {group.draws} cohorts are drawn from one model, and this would be number {draw + 1}",
            code="round.no-more-draws",
        )
    for before in range(draw):
        if not is_closed(group, state, before, said.get(place_of(group, before), {})):
            raise RoundError(
                f"this is draw {draw} from this model: {group.closing} members of the cohort of draw {before} must say "
                "that they answer nothing more under it",
                code="round.not-closed",
            )


def check_closed(group: Group, state: bytes, said: Mapping[str, Said]) -> None:
    """Whether nothing can be opened from a state under an earlier manifest: under none of its draws.

    Which draws were made nobody can prove, so all that could have been made must be closed. Members take part in the
    first `group.draws` only (`check_redrawn`): with those closed, fewer than T ever answer under any draw.
    """
    for draw in range(group.draws):
        found = signers(group, "never", state, in_draw(draw), said.get(place_of(group, draw), {}), draw)
        if len(found) < group.closing:
            cohort = f" of the cohort of draw {draw}" if group.draws > 1 else ""
            raise RoundError(
                f"the manifest has changed since this model was summed: {group.closing} members under the manifest "
                f"before{cohort} must say that they answer nothing more from it there, and {len(found)} do",
                code="round.not-closed",
            )


def place_of(group: Group, draw: int) -> str:
    """What a draw of a group is called in a turn."""
    return f"{group.id.hex()}/{draw}"


def check_halved(group: Group, state: bytes, halvings: int, said: Mapping[int, Said], draw: int = 0) -> None:
    """Whether the mark may be halved so many times: each time enough of the cohort found it too strong."""
    if not 0 <= halvings <= HALVINGS:
        raise RoundError(f"a mark is halved {HALVINGS} times at most, not {halvings} times", code="round.not-halved")
    for level in range(halvings):
        found = signers(group, "strong", state, word(level), said.get(level, {}), draw)
        if len(found) < group.blocking:
            raise RoundError(
                f"{group.blocking} members must say that a mark halved {level} times is too strong, and "
                f"{len(found)} do",
                code="round.not-halved",
            )


def check_newer(group: Group, state: bytes, nonce: bytes, said: Said, draw: int = 0) -> None:
    """Whether n − T + t members of the cohort first accepted a state after they had seen this member's nonce.

    n − T + 1 of them are honest, so that fewer than T of the cohort had accepted it before: this member cannot have
    answered from it under this draw; and what it answered under another cannot matter, since of two draws the first is
    closed. One honest member would not do, since a server may have kept it behind.
    """
    found = signers(group, "newer", state, nonce, said, draw)
    if len(found) < group.closing:
        raise RoundError(
            "this member's memory of rounds was made anew: it goes on from a model that was summed after that, as soon "
            f"as {group.closing} members say so, and {len(found)} do",
            code="round.memory-anew",
        )


# --- a turn -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A round, as the server begins it.

    `repeats`: the round whose sum is made again, from the same results of the same members; 0 for a new one. `never`:
    for each earlier round from this state, who never answers there. `strong`: for each halving, who asked for it.
    `closed`: for each draw before this one, and all draws under earlier manifests (`place_of`), who answers nothing
    more from this state there. `newer`: who says that the state is newer than the nonce of the member that this is for.
    `draw`: how often the cohort was drawn anew.
    """

    FORMAT = "quorumark-turn/v1"

    round: int
    halvings: int = 0
    repeats: int = 0
    never: Mapping[int, Said] = field(default_factory=dict)
    strong: Mapping[int, Said] = field(default_factory=dict)
    closed: Mapping[str, Said] = field(default_factory=dict)
    newer: Mapping[int, Said] = field(default_factory=dict)
    draw: int = 0

    def to_bytes(self) -> bytes:
        lists = {name: plain(getattr(self, name)) for name in _LISTS}
        about = {"round": self.round, "halvings": self.halvings, "repeats": self.repeats, "draw": self.draw}
        return canonical({"format": self.FORMAT, **about, **lists})

    @classmethod
    def from_bytes(cls, data: bytes) -> Turn:
        try:
            what = "a round's turn"
            body = take(parse(data, cls.FORMAT, what), ("round", "halvings", "repeats", "draw", *_LISTS), what)
            round_no, halvings, repeats, draw = (body[name] for name in ("round", "halvings", "repeats", "draw"))
            if not all(is_count(number) and number < LARGEST_ROUND for number in (halvings, repeats, draw)):
                raise ValueError
            check_round_number(round_no)
            never, strong, newer = (from_plain(body[name], int) for name in ("never", "strong", "newer"))
            closed = from_plain(body["closed"], str)
        except (KeyError, TypeError, ValueError, AttributeError, RecordError, InputError):
            raise MessageError(
                "the server's message about this round cannot be read", code="message.malformed"
            ) from None
        return cls(round_no, halvings, repeats, never, strong, closed, newer, draw)


_LISTS = ("never", "strong", "closed", "newer")


def plain(said: Mapping[Any, Said]) -> dict[str, dict[str, str]]:
    return {str(key): {str(x): message.hex() for x, message in inner.items()} for key, inner in said.items()}


def from_plain(said: Mapping[str, Mapping[str, str]], kind: Any) -> dict[Any, dict[int, bytes]]:
    return {kind(key): {int(x): bytes.fromhex(m) for x, m in inner.items()} for key, inner in said.items()}
