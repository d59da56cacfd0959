"""What members sign about a state, so that the others may go on (docs/secagg.md, "One state, one opened sum").

    never    I have answered nothing from this state in this round (0: in any round of this group), and never will
    strong   the mark of this state, halved so many times, is too strong for my update
    newer    I first accepted this state after I had seen this nonce

A *turn* is what a server says about a round besides the model that it starts from: its number, how often the mark is
halved, whether it makes an earlier sum again, and the statements that allow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quorumark.canonical import canonical, digest, parse
from quorumark.checks import is_count
from quorumark.consortium.identity import Identity, open_message
from quorumark.errors import InputError, MessageError, QuorumarkError, RecordError, RoundError
from quorumark.round.group import Group, check_round_number, word

__all__ = [
    "HALVINGS",
    "Said",
    "Turn",
    "check_closed",
    "check_given_up",
    "check_halved",
    "check_newer",
    "sign",
    "signers",
]

HALVINGS = 3
"""After so many there is no mark from this state."""

Said = Mapping[int, bytes]
"""Signed statements by point."""


def sign(identity: Identity, group: Group, what: str, state: bytes, about: bytes) -> bytes:
    """`about`: a round's number, a number of halvings (`word`), or a nonce."""
    header = group.header(what, _session(what, state, about), group.point_of(identity.ed25519))
    return identity.write(header, b"")


def signers(group: Group, what: str, state: bytes, about: bytes, said: Said) -> tuple[int, ...]:
    """Whose statements are right. A wrong one counts as none: its sender cannot stop the others with it."""
    found = []
    for point, message in said.items():
        try:
            open_message(message, group, group.header(what, _session(what, state, about), point))
        except QuorumarkError:
            continue
        found.append(point)
    return tuple(found)


def _session(what: str, state: bytes, about: bytes) -> bytes:
    return digest(f"secagg {what}", state, about)


# --- what members check -----------------------------------------------------------------------------------


def check_given_up(group: Group, state: bytes, round_no: int, said: Said) -> None:
    """Whether a round's sum can never be opened: n − T + t members never answer in it."""
    found = signers(group, "never", state, word(round_no), said)
    if len(found) < group.closing:
        raise RoundError(
            f"{group.closing} members must say that they never answer in round {round_no}, and {len(found)} do"
        )


def check_closed(group: Group, state: bytes, said: Said) -> None:
    """Whether nothing can be opened from a state under an earlier manifest."""
    found = signers(group, "never", state, word(0), said)
    if len(found) < group.closing:
        raise RoundError(
            f"the manifest has changed since this model was summed: {group.closing} members under the manifest before "
            f"must say that they answer nothing more from it there, and {len(found)} do"
        )


def check_halved(group: Group, state: bytes, halvings: int, said: Mapping[int, Said]) -> None:
    """Whether the mark may be halved so many times: each time enough members found it too strong."""
    if not 0 <= halvings <= HALVINGS:
        raise RoundError(f"a mark is halved {HALVINGS} times at most, not {halvings} times")
    for level in range(halvings):
        found = signers(group, "strong", state, word(level), said.get(level, {}))
        if len(found) < group.blocking:
            raise RoundError(
                f"{group.blocking} members must say that a mark halved {level} times is too strong, and {len(found)} do"
            )


def check_newer(group: Group, state: bytes, nonce: bytes, said: Said) -> None:
    """Whether n − T + t members first accepted a state after they had seen this member's nonce.

    n − T + 1 of them are honest, so that fewer than T members had accepted it before: nothing can have been opened from
    it. One honest member would not do, since a server may have kept it behind.
    """
    found = signers(group, "newer", state, nonce, said)
    if len(found) < group.closing:
        raise RoundError(
            "this member's memory of rounds was made anew: it goes on from a model that was summed after that, as soon "
            f"as {group.closing} members say so, and {len(found)} do"
        )


# --- a turn -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A round, as the server begins it.

    `repeats`: the round whose sum is made again, from the same results of the same members; 0 for a new one. `never`:
    for each earlier round from this state, who never answers there. `strong`: for each halving, who asked for it.
    `closed`: for each earlier manifest, by its digest, who answers nothing more from this state under it. `newer`: who
    says that the state is newer than the nonce of the member that this is for.
    """

    FORMAT = "quorumark-turn/v1"

    round: int
    halvings: int = 0
    repeats: int = 0
    never: Mapping[int, Said] = field(default_factory=dict)
    strong: Mapping[int, Said] = field(default_factory=dict)
    closed: Mapping[str, Said] = field(default_factory=dict)
    newer: Mapping[int, Said] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        lists = {name: _plain(getattr(self, name)) for name in _LISTS}
        about = {"round": self.round, "halvings": self.halvings, "repeats": self.repeats}
        return canonical({"format": self.FORMAT, **about, **lists})

    @classmethod
    def from_bytes(cls, data: bytes) -> Turn:
        try:
            body = parse(data, cls.FORMAT, "a round's turn")
            round_no, halvings, repeats = (body[name] for name in ("round", "halvings", "repeats"))
            if not is_count(halvings) or not is_count(repeats):
                raise ValueError
            check_round_number(round_no)
            never, strong, newer = (_statements(body[name], int) for name in ("never", "strong", "newer"))
            closed = _statements(body["closed"], str)
        except (KeyError, TypeError, ValueError, AttributeError, RecordError, InputError):
            raise MessageError("the server's message about this round cannot be read") from None
        return cls(round_no, halvings, repeats, never, strong, closed, newer)


_LISTS = ("never", "strong", "closed", "newer")


def _plain(said: Mapping[Any, Said]) -> dict[str, dict[str, str]]:
    return {str(key): {str(x): message.hex() for x, message in inner.items()} for key, inner in said.items()}


def _statements(said: Mapping[str, Mapping[str, str]], kind: Any) -> dict[Any, dict[int, bytes]]:
    return {kind(key): {int(x): bytes.fromhex(m) for x, m in inner.items()} for key, inner in said.items()}
