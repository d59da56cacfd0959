"""What a member's memory of rounds says (the memory itself: `consortium.memory`)."""

from __future__ import annotations

from quorumark.consortium.memory import FolderState, Memory, MemoryState, State
from quorumark.errors import RoundError
from quorumark.round.group import Group

__all__ = [
    "FolderState",
    "Memory",
    "MemoryState",
    "State",
    "adopt",
    "answers_from",
    "apart",
    "follow",
    "is_newer",
    "sent_with",
]


def adopt(memory: Memory, group: Group) -> None:
    """Goes over to another group of the same consortium, of a later manifest. There is no way back."""
    now = group.id.hex()
    if memory["group"] == now:
        return
    if not memory["group"]:  # it has taken part in nothing yet
        memory["group"] = now
        return
    if now in memory["left"]:
        raise RoundError(
            "this member has gone over to a later manifest, and takes part under this one no more",
            code="round.manifest-left",
        )
    memory["left"].append(memory["group"])
    memory.update(group=now, open=False, purposes={})


def answers_from(memory: Memory, state: bytes, purpose: str) -> list[tuple[int, str, int]]:
    """The rounds in which this member answered from a state, their groups and draws: more than one only where a sum was
    made again, or the operator consented."""
    given = memory["answered"].get(state.hex(), {}).get(purpose, [])
    return [(int(last), str(group), int(draw)) for last, group, draw in given]


def sent_with(memory: Memory, state: bytes, round_no: int) -> tuple[int, ...]:
    """Over whom the last vector was that this member sent from a state in a round; nobody if it sent none."""
    sent = memory["sent"].get("model", {})
    right = sent.get("origin") == state.hex() and round_no in sent["rounds"]
    return tuple(int(x) for x in sent["members"]) if right else ()


def apart(memory: Memory, state: bytes) -> Memory:
    """The same, to find out what `SecAggMember.check_free` would say of a state: what it changes is a copy."""
    given = dict(memory["answered"].get(state.hex(), {}))
    return {**memory, "known": [*memory["known"]], "answered": {**memory["answered"], state.hex(): given}}


def is_newer(memory: Memory, state: bytes) -> bool:
    """Whether this memory holds all that its member ever did from a state: always, unless it was made anew."""
    return not memory["nonce"] or state.hex() in memory["known"]


def follow(memory: Memory, before: bytes, after: bytes) -> None:
    """One state came after another: what is newer than the first is newer than a nonce that was seen at it."""
    if before.hex() in memory["known"]:
        memory["known"] = [*memory["known"], after.hex()][-_LONGEST:]
    for entry in memory["nonces"].values():
        if entry["last"] == before.hex():
            entry.update(last=after.hex(), newer=after.hex() not in memory["answered"])


_LONGEST = 1 << 12
