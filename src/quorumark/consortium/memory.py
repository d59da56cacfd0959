"""What a member remembers of rounds, so that it does nothing twice (docs/secagg.md, "One state, one opened sum").

One memory for each identity and consortium, whatever the manifest: what a member answered from a state it must know
under every later manifest, in every later run. It is made with the member's first share (`begin`), before there is a
manifest to take part under. So a home that has a manifest and no memory has lost it. It is in no backup: a memory that
is turned back does things twice.

    group, left     the group that it takes part in (none yet: empty), and those that it left for good
    round, open     the last round that it joined, and whether it may still do something there
    purposes        keys of that round
    answered        state → purpose → the rounds in which it answered, their groups and draws
    answer          the last answer for each purpose, to be sent again
    sent            the last vector for each purpose: its state, draw, rounds, members and halvings, to make a sum again
    closed          groups, states and draws in which it said that it answers nothing
    signed          state → group, draw and the one successor of it that this member signed (`round.links`)
    reached         the last state that this member reached along links, all that is known there, the run's first, and
                    the manifest of the last link or, later, of the round that it joined from there
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
from typing import Any, Protocol, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quorumark.canonical import canonical
from quorumark.checks import is_count
from quorumark.consortium.home import ConsortiumFolder
from quorumark.consortium.identity import Identity
from quorumark.errors import BusyError, InputError, KeystoreError
from quorumark.field import derive_key
from quorumark.files import only_one, write_private

__all__ = ["FolderState", "Memory", "MemoryState", "State", "begin"]

Memory = dict[str, Any]


class Named(Protocol):
    """A group, by its id (`round.group`)."""

    @property
    def id(self) -> bytes: ...


class State(ABC):
    """A member's memory: what it must not do twice, and the keys that it needs to go on.

    `edit` gives it as a dict, and writes what was changed when the block ends without an error. Nobody else edits
    meanwhile. What is in the dict belongs to the block.
    """

    _parsed: tuple[bytes, Memory, Memory] | None = None
    """What was read last, as it was read and as it is given to blocks: most of them look only."""

    @contextmanager
    def edit(self) -> Iterator[Memory]:
        with self._alone():
            content = self._load()
            parsed, self._parsed = self._parsed, None  # an error in the block leaves the memory as it was
            if parsed is None or parsed[0] is not content:
                # without these fields in memories of release 0
                parsed = content, json.loads(content), {"signed": {}, "reached": {}, **json.loads(content)}
            _, before, memory = parsed
            yield memory
            if memory != before:
                self._save(canonical(memory))
            else:
                self._parsed = parsed

    def _alone(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @abstractmethod
    def _load(self) -> bytes: ...

    @abstractmethod
    def _save(self, content: bytes) -> None: ...

    @staticmethod
    def _empty(group: Named | None, after: int, *, lost: bool = False, simulation: bool = False) -> bytes:
        if not is_count(after):
            raise InputError("after", "must be a round's number, at least 0", after)
        memory: Memory = {
            "group": group.id.hex() if group is not None else "",
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
            "signed": {},
            "reached": {},
        }
        return canonical(memory)


class MemoryState(State):
    """For simulations: forgotten with the process, and with it the right to take part in a round that has begun."""

    def __init__(self, group: Named, after: int = 0, *, simulation: bool = False) -> None:
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
        self._held: bytes | None = None  # what is in the file, while this object alone may write it
        self._editing = False

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        identity: Identity,
        group: Named | None,
        after: int = 0,
        *,
        lost: bool = False,
        simulation: bool = False,
    ) -> FolderState:
        """The memory of a member that has not taken part in any round later than `after`, of this group or another one
        of the same consortium: 0 for one that never took part in any. `lost`: it may have, and does not know how.
        Without a `group` it takes the first one that it is used for."""
        state = cls(folder, identity)
        if state._path.exists():
            raise KeystoreError(f"{str(state._path)!r} exists already: this member remembers its rounds")
        state._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state._save(cls._empty(group, after, lost=lost, simulation=simulation))
        return state

    @contextmanager
    def opened(self) -> Iterator[Self]:
        """For several edits in a row: nobody else edits in between, and the file is read once. Each change is written
        when its edit ends, as always."""
        with self._alone():
            self._held = self._load()
            try:
                yield self
            finally:
                self._held = self._parsed = None

    def _alone(self) -> AbstractContextManager[None]:
        if self._held is not None:
            return self._once()
        if not self._folder.is_dir():
            raise KeystoreError(f"there is no memory of rounds in {str(self._folder)!r}: create it")
        return only_one(self._folder)

    @contextmanager
    def _once(self) -> Iterator[None]:
        """An edit inside another one would be undone by that."""
        if self._editing:
            raise BusyError(f"the memory of rounds in {str(self._folder)!r} is being edited")
        self._editing = True
        try:
            yield
        finally:
            self._editing = False

    def _load(self) -> bytes:
        if self._held is not None:
            return self._held
        try:
            if self._path.exists() and not self._path.is_file():  # a pipe would be waited for
                raise ValueError
            sealed = self._path.read_bytes() if self._path.stat().st_size <= _LARGEST else b""
            return self._cipher.decrypt(sealed[:12], sealed[12:], _FORMAT)
        except OSError as error:
            raise KeystoreError(f"cannot read the memory of rounds {str(self._path)!r}: {error.strerror}") from None
        except (InvalidTag, ValueError):
            raise KeystoreError(
                f"{str(self._path)!r} is damaged or another member's: move it away, and say that the memory is lost "
                "(quorumark member rounds --lost)"
            ) from None

    def _save(self, content: bytes) -> None:
        nonce, held = os.urandom(12), self._held is not None
        self._held = None  # after an error nobody knows what is in the file, and nothing more is edited
        write_private(self._path, nonce + self._cipher.encrypt(nonce, content, _FORMAT))
        self._held = content if held else None


_FORMAT = b"quorumark-rounds/v3"
_LARGEST = 1 << 28  # bytes: keys of a round, and a line for each state that it ever answered from


def begin(consortium: ConsortiumFolder, identity: Identity) -> None:
    """The memory of a member that takes its first share of a consortium. A ceremony calls it before the member signs
    the manifest, without which nobody takes part in a round: a memory that begins later would let rounds repeat."""
    if not consortium.memory_path.exists() and not (consortium.path / "rounds" / "notes.json").exists():
        FolderState.create(consortium.memory_path.parent, identity, None)
