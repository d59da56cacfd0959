"""What a member remembers of rounds, so that it does nothing twice (docs/secagg.md, "One state, one opened sum").

One memory for each identity and consortium, whatever the manifest: what a member answered from a state it must know
under every later manifest, in every later run. It is in no backup: a memory that is turned back does things twice.

    group, left     the group that it takes part in, and those that it left for good
    round, open     the last round that it joined, and whether it may still do something there
    purposes        keys of that round
    answered        state → purpose → the rounds in which it answered, their groups and draws
    answer          the last answer for each purpose, to be sent again
    sent            the last vector for each purpose: its state, draw, rounds, members and halvings, to make a sum again
    closed          groups, states and draws in which it said that it answers nothing
    nonce, known    of a memory made anew: what the others must have seen, and the states that are newer than that
    nonces          of other members whose memory is new, and the state that this member was at when it saw them
    marked          whether it has ever answered for a sum with a mark in it
    consents        states from which the operator lets this member answer once more
    simulation      whether all of it is a simulation, in which rounds may be repeated and seeds be the server's
"""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quorumark.canonical import canonical
from quorumark.checks import is_count
from quorumark.consortium.identity import Identity
from quorumark.errors import InputError, KeystoreError, RoundError
from quorumark.field import derive_key
from quorumark.files import only_one, write_private
from quorumark.round.group import Group

__all__ = ["FolderState", "MemoryState", "State"]

Memory = dict[str, Any]


class State(ABC):
    """A member's memory: what it must not do twice, and the keys that it needs to go on.

    `edit` gives it as a dict, and writes what was changed when the block ends without an error. Nobody else edits
    meanwhile.
    """

    @contextmanager
    def edit(self) -> Iterator[Memory]:
        with self._alone():
            before = self._load()
            memory: Memory = json.loads(before)
            yield memory
            after = canonical(memory)
            if after != before:
                self._save(after)

    def _alone(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @abstractmethod
    def _load(self) -> bytes: ...

    @abstractmethod
    def _save(self, content: bytes) -> None: ...

    @staticmethod
    def _empty(group: Group, after: int, *, lost: bool = False, simulation: bool = False) -> bytes:
        if not is_count(after):
            raise InputError("after", "must be a round's number, at least 0", after)
        memory: Memory = {
            "group": group.id.hex(),
            "left": [],
            "round": after,
            "open": False,
            "purposes": {},
            "answered": {},
            "answer": {},
            "sent": {},
            "closed": [],
            "nonce": os.urandom(32).hex() if lost else "",
            "known": [],
            "nonces": {},
            "consents": {},
            "marked": False,
            "simulation": simulation,
            "sum": {},
        }
        return canonical(memory)


class MemoryState(State):
    """For simulations: forgotten with the process, and with it the right to take part in a round that has begun."""

    def __init__(self, group: Group, after: int = 0, *, simulation: bool = False) -> None:
        self._content = self._empty(group, after, simulation=simulation)
        self._lock = threading.Lock()

    def _alone(self) -> AbstractContextManager[Any]:
        return self._lock

    def _load(self) -> bytes:
        return self._content

    def _save(self, content: bytes) -> None:
        self._content = content


class FolderState(State):
    """In a folder of its own, sealed under a key that comes from the member's private keys, synced before `edit` ends.

    The file must never be brought back from a backup: a member that forgets what it sent may send it twice. A member
    that lost it creates it anew with `lost`.
    """

    def __init__(self, folder: str | os.PathLike[str], identity: Identity) -> None:
        self._folder = Path(folder)
        self._path = self._folder / "rounds.sealed"
        self._cipher = AESGCM(derive_key(identity.to_secret_bytes(), "secagg state"))

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        identity: Identity,
        group: Group,
        after: int = 0,
        *,
        lost: bool = False,
        simulation: bool = False,
    ) -> FolderState:
        """The memory of a member that has not taken part in any round later than `after`, of this group or another one
        of the same consortium: 0 for one that never took part in any. `lost`: it may have, and does not know how."""
        state = cls(folder, identity)
        if state._path.exists():
            raise KeystoreError(f"{str(state._path)!r} exists already")
        state._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state._save(cls._empty(group, after, lost=lost, simulation=simulation))
        return state

    def _alone(self) -> AbstractContextManager[None]:
        if not self._folder.is_dir():
            raise KeystoreError(f"there is no memory of rounds in {str(self._folder)!r}: create it")
        return only_one(self._folder)

    def _load(self) -> bytes:
        try:
            if self._path.exists() and not self._path.is_file():  # a pipe would be waited for
                raise ValueError
            sealed = self._path.read_bytes() if self._path.stat().st_size <= _LARGEST else b""
            return self._cipher.decrypt(sealed[:12], sealed[12:], _FORMAT)
        except OSError as error:
            raise KeystoreError(f"cannot read the memory of rounds {str(self._path)!r}: {error.strerror}") from None
        except (InvalidTag, ValueError):
            raise KeystoreError(f"{str(self._path)!r} is damaged or another member's") from None

    def _save(self, content: bytes) -> None:
        nonce = os.urandom(12)
        write_private(self._path, nonce + self._cipher.encrypt(nonce, content, _FORMAT))


_FORMAT = b"quorumark-rounds/v3"
_LARGEST = 1 << 28  # bytes: keys of a round, and a line for each state that it ever answered from


# --- what it says -----------------------------------------------------------------------------------------


def adopt(memory: Memory, group: Group) -> None:
    """Goes over to another group of the same consortium, of a later manifest. There is no way back."""
    now = group.id.hex()
    if memory["group"] == now:
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
