"""Secure aggregation: a server learns the sum of its members' vectors, and nothing else (docs/secagg.md).

Vectors are of field elements (mod 2^61−1). Each member runs a `SecAggMember`, the server a `SecAggServer`; every stage
takes bytes and gives bytes. How they travel is somebody else's business.

    ready    a key of this round, signed                                            member → server
    plan     the set U who take part, with their keys (the *announcement*)          server → each
    upload   the vector under pairwise masks, which cancel over U, and a mask of
             the member's own, whose seed is shared among U in sealed boxes         member → server
    unmask   every member of U has uploaded: the shares of all seeds                server → each → server

It is all or nothing: if one of U is missing, nothing of this attempt is ever opened; the others upload again for a
smaller U. T = ⌊(n+t−1)/2⌋+1 answers open a sum. Any two sets of T among n members have t in common, so that one of
them is honest whoever the t−1 colluders are, and an honest member answers once per round and purpose: no two sums of
one round are ever opened. Everything that members must agree on is in ctx, which enters every key: members who were
told different things share no masks, and cannot open each other's boxes.

What a member must not do twice it writes to disk before anything is sent (`FolderState`).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quorumark import field, shamir
from quorumark.checks import is_count
from quorumark.errors import (
    DecodingError,
    InputError,
    KeystoreError,
    MessageError,
    QuorumarkError,
    RecordError,
    RoundError,
)
from quorumark.field import P, Stream, Vector, derive_key
from quorumark.identity import Header, Identity, exchange, open_message, verify_card, verify_manifest
from quorumark.keystore import only_one, write_private
from quorumark.records import Card, Manifest, Member, canonical, digest, parse

__all__ = [
    "FolderState",
    "Group",
    "MemoryState",
    "Plan",
    "SecAggMember",
    "SecAggServer",
    "State",
    "Upload",
    "pack",
    "unpack",
]

_SEED = 5  # field elements in the seed of a self-mask: 305 bits, so that 256-bit keys lose nothing
_SHARE = 8 * _SEED
_BOX = _SHARE + 16
# elements that all masks are added to before the next ones: 8 MiB, enough to be worth spreading over threads, and small
# enough to stay in a third-level cache
_PIECE = 1 << 20
_SMALLEST_SET = 3  # of two members, each learns the other's vector from the sum
_LARGEST_ROUND = 1 << 53
# every box has a key of its own (ctx, sender, recipient, seed), so one nonce is right
_NONCE = bytes(12)


# --- who takes part ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Who may take part, and how many may collude: up to threshold − 1 members, with the server.

    `context` says what the group is for (a manifest's digest, or a name that its members agreed on). With
    `cohort_size`, so many members are drawn for each round, publicly, and the others rest.
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
                raise InputError("roster", f"must not give two members one {what}", "a roster that does")
        drawn = self.cohort_size
        if drawn is not None and (not is_count(drawn, _SMALLEST_SET) or drawn > len(points)):
            raise InputError("cohort_size", f"must be a whole number in {_SMALLEST_SET}..{len(points)}", drawn)
        if self.size < _SMALLEST_SET:
            raise InputError("roster", f"must have at least {_SMALLEST_SET} members", len(points))
        if not is_count(self.threshold, 2) or self.threshold > self.size:
            raise InputError("threshold", f"must be a whole number in 2..{self.size}", self.threshold)
        if not is_count(self.attempts, 1):
            raise InputError("attempts", "must be a whole number, at least 1", self.attempts)

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
        """The group of a consortium. Its id hangs on the manifest's digest, so on the epoch: epochs do not mix."""
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

    def cohort(self, round_no: int) -> tuple[int, ...]:
        """The members drawn for a round: those with the n smallest digests of (group, round, point)."""
        everyone = range(1, len(self.roster) + 1)
        if self.cohort_size is None:
            return tuple(everyone)
        lot = sorted(everyone, key=lambda x: digest("secagg cohort", self.id, _word(_round(round_no)), _word(x)))
        return tuple(sorted(lot[: self.size]))

    def member(self, point: int) -> Member:
        if point not in range(1, len(self.roster) + 1):
            raise RecordError(f"the group has no member at point {point}")
        return self.roster[point - 1]

    def point_of(self, ed25519: str) -> int:
        for member in self.roster:
            if member.ed25519 == ed25519:
                return member.point
        raise RecordError("this identity is not a member of the group")

    def name(self, point: int) -> str:
        return repr(self.member(point).name)

    def names(self, points: Iterable[int]) -> str:
        return ", ".join(self.name(x) for x in points)

    def header(self, step: str, session: bytes, sender: int, attempt: int = 0) -> Header:
        return Header(self.id.hex(), session.hex(), f"secagg/{step}", sender, attempt=attempt)

    def session(self, round_no: int, purpose: str) -> bytes:
        """What *ready* belongs to; the later messages belong to ctx."""
        return digest("secagg session", self.id, _word(round_no), purpose.encode())


# --- what a member remembers ------------------------------------------------------------------------------


class State(ABC):
    """A member's memory of the current round: what it must not do twice, and the keys that it needs to go on.

    `edit` gives it as a dict, and writes what was changed when the block ends without an error. Nobody else edits
    meanwhile.
    """

    @contextmanager
    def edit(self) -> Iterator[dict[str, Any]]:
        with self._alone():
            before = self._load()
            memory: dict[str, Any] = json.loads(before)
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
    def _empty(group: Group, after: int) -> bytes:
        if not is_count(after):
            raise InputError("after", "must be a round's number, at least 0", after)
        return canonical({"group": group.id.hex(), "round": after, "open": False, "purposes": {}})


class MemoryState(State):
    """For simulations: forgotten with the process, and with it the right to take part in a round that has begun."""

    def __init__(self, group: Group, after: int = 0) -> None:
        self._content = self._empty(group, after)
        self._lock = threading.Lock()

    def _alone(self) -> AbstractContextManager[Any]:
        return self._lock

    def _load(self) -> bytes:
        return self._content

    def _save(self, content: bytes) -> None:
        self._content = content


class FolderState(State):
    """In a folder of its own, sealed under a key that comes from the member's private keys, synced before `edit` ends.

    The file must never be brought back from a backup: a member that forgets what it sent may send it twice. Whoever
    lost it creates it anew with `after` = the last round that it may have taken part in.
    """

    def __init__(self, folder: str | os.PathLike[str], identity: Identity) -> None:
        self._folder = Path(folder)
        self._path = self._folder / "rounds.sealed"
        self._cipher = AESGCM(derive_key(identity.to_secret_bytes(), "secagg state"))

    @classmethod
    def create(cls, folder: str | os.PathLike[str], identity: Identity, group: Group, after: int) -> FolderState:
        """The memory of a member that has not taken part in any round later than `after`, of this group or another one
        of the same members (of an earlier epoch, say): 0 for one that never took part in any."""
        state = cls(folder, identity)
        if state._path.exists():
            raise KeystoreError(f"{str(state._path)!r} exists already")
        state._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state._save(cls._empty(group, after))
        return state

    def _alone(self) -> AbstractContextManager[None]:
        if not self._folder.is_dir():
            raise KeystoreError(f"there is no memory of rounds in {str(self._folder)!r}: create it")
        return only_one(self._folder)

    def _load(self) -> bytes:
        try:
            if self._path.exists() and not self._path.is_file():  # a pipe would be waited for
                raise ValueError
            sealed = self._path.read_bytes() if self._path.stat().st_size <= _LARGEST_STATE else b""
            return self._cipher.decrypt(sealed[:12], sealed[12:], _STATE_FORMAT)
        except OSError as error:
            raise KeystoreError(f"cannot read the memory of rounds {str(self._path)!r}: {error.strerror}") from None
        except (InvalidTag, ValueError):
            raise KeystoreError(f"{str(self._path)!r} is damaged or another member's") from None

    def _save(self, content: bytes) -> None:
        nonce = os.urandom(12)
        write_private(self._path, nonce + self._cipher.encrypt(nonce, content, _STATE_FORMAT))


_STATE_FORMAT = b"quorumark-rounds/v1"
_LARGEST_STATE = 1 << 26  # bytes: keys of a round, a few for each member


# --- messages ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """An attempt: what a member must know to compute its vector, and all that the members must agree on."""

    group: bytes
    quorum: int
    round: int
    purpose: str
    attempt: int
    length: int
    binding: bytes
    members: tuple[int, ...]
    keys: tuple[str, ...]

    @cached_property
    def ctx(self) -> bytes:
        """The digest of all of it, which enters every key."""
        numbers = (self.quorum, self.round, self.attempt, self.length)
        everyone = b"".join(_word(x) + bytes.fromhex(key) for x, key in zip(self.members, self.keys, strict=True))
        return digest("secagg ctx", self.group, self.purpose.encode(), *map(_word, numbers), self.binding, everyone)


@dataclass(frozen=True, eq=False)
class Upload:
    """A masked vector, and the signed head that belongs to it."""

    head: bytes
    vector: Vector

    def to_bytes(self) -> bytes:
        """The head's length, the head, zeros up to a multiple of 8 bytes, the vector in little-endian words."""
        start = 4 + len(self.head)
        return b"".join([len(self.head).to_bytes(4, "big"), self.head, bytes(-start % 8), _bytes(self.vector)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Upload:
        """Without copying the vector. What is inside is checked by whoever uses it."""
        stop = 4 + int.from_bytes(data[:4], "big")
        start = stop + -stop % 8
        if len(data) <= start or (len(data) - start) % 8:
            raise MessageError("an upload that is cut short or is none")
        vector = np.frombuffer(data, "<u8", offset=start).astype(np.uint64, copy=False)
        return cls(bytes(data[4:stop]), vector if vector.flags.aligned else vector.copy())


@dataclass(frozen=True)
class _Only:
    """A roster of one member."""

    who: Member

    def member(self, point: int) -> Member:
        if point != self.who.point:
            raise RecordError(f"nobody is known at point {point}")
        return self.who


@lru_cache(maxsize=1 << 12)
def _opened(sender: Member, expected: Header, data: bytes) -> bytes:
    """An open message's body. The same ones come again in a further attempt, and to all members of a simulation."""
    return open_message(data, _Only(sender), expected)


def _read_ready(group: Group, round_no: int, purpose: str, point: int, data: bytes) -> tuple[str, bytes, int]:
    """A member's key for the round, what it was told, and how long its vector is."""
    body = _opened(group.member(point), group.header("ready", group.session(round_no, purpose), point), data)
    if len(body) != 72:
        raise MessageError(f"the message of {group.name(point)} for step 'secagg/ready' must hold 72 bytes")
    return body[:32].hex(), body[32:64], int.from_bytes(body[64:], "big")


def _read_upload(group: Group, plan: Plan, point: int, data: bytes) -> tuple[bytes, bytes, bytes]:
    """Digests of a member's vector and of its boxes, and the commitment to its seed."""
    body = _opened(group.member(point), group.header("upload", plan.ctx, point, plan.attempt), data)
    if len(body) != 96:
        raise MessageError(f"the message of {group.name(point)} for step 'secagg/upload' must hold 96 bytes")
    return body[:32], body[32:64], body[64:]


def _say(kind: str, about: Mapping[str, Any], parts: Iterable[bytes]) -> bytes:
    """What the server sends: a JSON object, then byte strings, each with its length before it."""
    return pack((canonical({"format": f"quorumark-{kind}/v1", **about}), *parts))


def pack(parts: Iterable[bytes]) -> bytes:
    """Byte strings in one, each with its length before it."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def unpack(data: bytes, what: str) -> list[bytes]:
    if not isinstance(data, bytes):
        raise MessageError(f"the server's {what} must be bytes")
    parts, start = [], 0
    while start < len(data):
        stop = start + 4 + int.from_bytes(data[start : start + 4], "big")
        if stop > len(data) or start + 4 > len(data):
            raise MessageError(f"the server's {what} is cut short or is none")
        parts.append(data[start + 4 : stop])
        start = stop
    return parts


def _hear(kind: str, data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    parts = unpack(data, kind)
    try:
        head = parse(parts[0] if parts else b"", f"quorumark-{kind}/v1", f"a server's {kind}")
    except (RecordError, InputError) as error:
        raise MessageError(f"the server's {kind} is refused: {error}") from None
    sound = all(is_count(head.get(name), 1) for name in ("round", "attempt")) and isinstance(head.get("purpose"), str)
    if not sound or head["round"] >= _LARGEST_ROUND:
        raise MessageError(f"the server's {kind} is refused: it names no round, purpose and attempt")
    return head, parts[1:]


# --- member -----------------------------------------------------------------------------------------------


class SecAggMember:
    """One member's side. It may be made anew at any time: what matters is in `state`."""

    def __init__(self, identity: Identity, group: Group, state: State) -> None:
        self.group = group
        self.point = group.point_of(identity.ed25519)
        self._identity = identity
        self.state = state
        self._lasting: dict[int, bytes] = {}
        self._shared: dict[tuple[str, str], bytes] = {}  # of this round, to spare exchanges; erased with its keys
        with state.edit() as memory:
            if memory["group"] != group.id.hex():
                raise RoundError("this memory of rounds belongs to another group, manifest or epoch")

    def __repr__(self) -> str:
        return f"SecAggMember(point {self.point}, secrets hidden)"

    def ready(self, round_no: int, binding: bytes, length: int, purpose: str = "model") -> bytes:
        """Joins a round, and leaves all earlier ones for good.

        `binding` is a digest of all else that the members must agree on, which the caller computes itself: the model
        that training started from, the weights, … `length` is that of the vectors. `purpose` tells several sums of one
        round apart; every one has its own keys and is opened once.
        """
        _round(round_no)
        _check_told(binding, length, purpose)
        if self.point not in self.group.cohort(round_no):
            raise RoundError(f"{self._name()} is not drawn for round {round_no}")
        told = {"binding": binding.hex(), "length": length}
        with self.state.edit() as memory:
            if round_no > memory["round"]:
                memory.update(round=round_no, open=True, purposes={})
                self._shared.clear()
            if round_no == memory["round"] and memory["open"] and purpose not in memory["purposes"]:
                memory["purposes"][purpose] = {**told, "secret": os.urandom(32).hex(), "attempt": 0}
            entry = self._entry(memory, round_no, purpose)
            if {name: entry[name] for name in told} != told:
                raise RoundError(
                    f"{self._name()} has joined round {round_no} ({purpose!r}) with another model, other weights or "
                    "another length; it joins once"
                )
            key = _private(entry).public_key().public_bytes_raw()
        header = self.group.header("ready", self.group.session(round_no, purpose), self.point)
        return self._identity.write(header, key + binding + _word(length))

    def plan(self, announcement: bytes) -> Plan:
        """The attempt that the server announces, if this member may take part in it."""
        head, readies = _hear("announcement", announcement)
        group, round_no, purpose, attempt = self.group, head["round"], head["purpose"], head["attempt"]
        members = head.get("members")
        if not isinstance(members, list) or not all(is_count(x, 1) for x in members) or len(members) != len(readies):
            raise MessageError("the server's announcement is refused: it does not list its members and their keys")
        if members != sorted(set(members)) or not set(members) <= set(group.cohort(round_no)):
            raise RoundError("the announced set holds a member twice, or one who is not drawn for this round")
        if self.point not in members:
            raise RoundError(f"{self._name()} is not in the announced set")
        if len(members) < group.least:
            raise RoundError(
                f"the announced set has {len(members)} members; at least max(T, {_SMALLEST_SET}) = {group.least} must "
                f"take part, or {group.threshold - 1} colluders and the server see single vectors"
            )
        with self.state.edit() as memory:
            entry = self._entry(memory, round_no, purpose)
        keys = []
        for point, data in zip(members, readies, strict=True):
            key, binding, length = _read_ready(group, round_no, purpose, point, data)
            if (binding.hex(), length) != (entry["binding"], entry["length"]):
                raise RoundError(
                    f"{group.name(point)} was told of another model, other weights or another length than this member"
                )
            keys.append(key)
        if keys[members.index(self.point)] != _private(entry).public_key().public_bytes_raw().hex():
            raise RoundError(f"the announced key of {self._name()} is not its own")
        plan = self._planned(entry, round_no, purpose, attempt, members, keys)
        self._admit(entry, plan)
        return plan

    def upload(self, plan: Plan, vector: Vector) -> Upload:
        """Masks the vector, in place. This member will then answer for this attempt or a later one, no earlier one.

        Once per attempt: two vectors under the same masks would show their difference.
        """
        point, ctx = self.point, plan.ctx
        if not isinstance(vector, np.ndarray) or vector.dtype != np.uint64 or vector.shape != (plan.length,):
            received = f"{vector.dtype} of shape {vector.shape}" if isinstance(vector, np.ndarray) else type(vector)
            raise InputError("vector", f"must be a uint64 vector of {plan.length} elements", received)
        field.check_output(vector, vector.shape)
        field.check(vector, "vector")
        with self.state.edit() as memory:
            entry = self._entry(memory, plan.round, plan.purpose)
            self._admit(entry, plan)
            pairs = self._pairs(entry, plan)
            seed = field.random(_SEED)
            commitment = _commitment(ctx, point, seed)
            masks = [(_self_mask(ctx, point, seed), False)]
            for other in plan.members:
                if other != point:
                    low, high = sorted((point, other))
                    masks.append((_pair_mask(pairs[other], low, high), point == high))
            shares = shamir.share(seed, plan.quorum, len(self.group.roster))
            boxes = b"".join(
                _cipher(pairs[other], point, other, commitment).encrypt(_NONCE, _bytes(shares[other - 1]), None)
                for other in plan.members
            )
            hashed = _VectorDigest()
            for part in field.chunks(plan.length, _PIECE):
                _add_masks(vector, part, masks)
                hashed.update(vector[part])
            body = hashed.digest() + digest("secagg boxes", boxes) + commitment
            message = self._identity.write(self.group.header("upload", ctx, point, plan.attempt), body)
            entry.update(attempt=plan.attempt, members=list(plan.members), keys=list(plan.keys))
        return Upload(len(message).to_bytes(4, "big") + message + boxes, vector)

    def unmask(self, request: bytes) -> bytes:
        """The shares of all self-masks, once all of U have uploaded; then the keys of this round are erased.

        Once per round and purpose, and never for an attempt before the last one that this member uploaded for.
        """
        head, parts = _hear("request", request)
        round_no, purpose, attempt = head["round"], head["purpose"], head["attempt"]
        with self.state.edit() as memory:
            entry = self._entry(memory, round_no, purpose)
            if attempt != entry["attempt"]:
                raise RoundError(
                    f"{self._name()} does not answer for attempt {attempt} of round {round_no} ({purpose!r}): "
                    + (f"it has uploaded for attempt {entry['attempt']}" if entry["attempt"] else "it has not uploaded")
                )
            plan = self._planned(entry, round_no, purpose, attempt, entry["members"], entry["keys"])
            if len(parts) != 2 * len(plan.members):
                raise RoundError("the server's request must show one upload of every member of the announced set")
            pairs = self._pairs(entry, plan)
            shares = b""
            for dealer, message, box in zip(plan.members, parts[::2], parts[1::2], strict=True):
                _, _, commitment = _read_upload(self.group, plan, dealer, message)
                try:
                    share = _cipher(pairs[dealer], dealer, self.point, commitment).decrypt(_NONCE, box, None)
                    shares += _bytes(_elements(share, _SEED))
                except (InvalidTag, ValueError):
                    raise MessageError(
                        f"the share from {self.group.name(dealer)} cannot be opened (step 'secagg/unmask')"
                    ) from None
            memory["purposes"][purpose] = {"answered": attempt}  # the keys are gone
            self._shared.clear()
        return self._identity.write(self.group.header("unmask", plan.ctx, self.point, attempt), shares)

    def close(self) -> None:
        """Ends the current round for this member: it erases the round's keys, and answers no more."""
        with self.state.edit() as memory:
            memory.update(open=False, purposes={})
            self._shared.clear()

    # --- rules and keys ---

    def _entry(self, memory: dict[str, Any], round_no: int, purpose: str) -> dict[str, Any]:
        """What is remembered of a round and purpose in which this member may still do something."""
        if round_no < memory["round"]:
            raise RoundError(f"round {round_no} is over for {self._name()}: it has joined round {memory['round']}")
        if round_no == memory["round"] and not memory["open"]:
            raise RoundError(f"round {round_no} is over for {self._name()}: it has left it")
        entry: dict[str, Any] | None = memory["purposes"].get(purpose) if round_no == memory["round"] else None
        if entry is None:
            raise RoundError(f"{self._name()} has not joined round {round_no} ({purpose!r})")
        if "answered" in entry:
            raise RoundError(f"{self._name()} has answered in round {round_no} ({purpose!r}), and does so once")
        return entry

    def _admit(self, entry: dict[str, Any], plan: Plan) -> None:
        """The rule of attempts: one after the other, each with a set strictly inside the last, with the same keys."""
        last: int = entry["attempt"]
        if plan.attempt != last + 1:
            raise RoundError(f"attempt {last + 1} is next for {self._name()}, not attempt {plan.attempt}")
        if plan.attempt > self.group.attempts:
            raise RoundError(f"there are {self.group.attempts} attempts in a round, no more")
        mine = (self.group.id, self.group.quorum, entry["length"], entry["binding"])
        if (plan.group, plan.quorum, plan.length, plan.binding.hex()) != mine:
            raise RoundError("this plan was not made by this member in this round")
        if last:
            before = dict(zip(entry["members"], entry["keys"], strict=True))
            now = dict(zip(plan.members, plan.keys, strict=True))
            if not (now.items() < before.items()):
                raise RoundError("the set of a further attempt must lie strictly inside the last one, with its keys")

    def _planned(
        self, entry: dict[str, Any], round_no: int, purpose: str, attempt: int, members: list[int], keys: list[str]
    ) -> Plan:
        told = entry["length"], bytes.fromhex(entry["binding"]), tuple(members), tuple(keys)
        return Plan(self.group.id, self.group.quorum, round_no, purpose, attempt, *told)

    def _pairs(self, entry: dict[str, Any], plan: Plan) -> dict[int, bytes]:
        """A secret with every member of U, bound to ctx; the one with itself seals its own box."""
        private, pairs = _private(entry), {}
        for point, key in zip(plan.members, plan.keys, strict=True):
            if point == self.point:
                secret = bytes.fromhex(entry["secret"])
            else:
                known = (entry["secret"], key)
                try:
                    if point not in self._lasting:
                        self._lasting[point] = self._identity.exchange(self.group.member(point).x25519)
                    if known not in self._shared:
                        self._shared[known] = exchange(private, key)
                except MessageError:
                    raise MessageError(
                        f"{self.group.name(point)} shows a key of no use (step 'secagg/ready')"
                    ) from None
                # both the round's keys and the lasting ones: the first can be forgotten, the second say who
                secret = self._shared[known] + self._lasting[point]
            pairs[point] = derive_key(secret, "secagg pair", plan.ctx)
        return pairs

    def _name(self) -> str:
        return self.group.name(self.point)


# --- server -----------------------------------------------------------------------------------------------


class SecAggServer:
    """The server's side of one sum.

    `take_ready` → `announce` → `take_upload` → (`retry` → `take_upload`) → `request` → `take_answer` → `finish`.

    A message that cannot be used raises a MessageError; its sender is then out of this round, `excluded` says why, and
    the round goes on without it. Who sent a message is what the transport says. A RoundError ends the round: the last
    model stands. The server keeps one running sum, and looks at one upload at a time.
    """

    def __init__(self, group: Group, round_no: int, binding: bytes, length: int, purpose: str = "model") -> None:
        _check_told(binding, length, purpose)
        self.group = group
        self.excluded: dict[int, str] = {}
        self.disputed: dict[int, tuple[int, ...]] = {}
        self._stage = "ready"
        self._plan = Plan(group.id, group.quorum, _round(round_no), purpose, 0, length, binding, (), ())
        self._cohort = group.cohort(round_no)
        self._readies: dict[int, tuple[bytes, str]] = {}  # message, key
        self._uploads: dict[int, tuple[bytes, bytes, bytes]] = {}  # message, boxes, commitment
        self._answers: dict[int, Vector] = {}
        self._sum: Vector = np.zeros(length, np.uint64)

    # --- ready ---

    def take_ready(self, point: int, data: bytes) -> None:
        """A member's wish to take part; before the set is fixed."""
        with self._taking("ready", point, self._cohort, self._readies):
            name = self.group.name(point)
            key, binding, length = _read_ready(self.group, self._plan.round, self._plan.purpose, point, data)
            if (binding, length) != (self._plan.binding, self._plan.length):
                raise MessageError(f"{name} starts from another model, other weights or another length")
            exchange(_PROBE, key)  # one key that no secret can be shared with would stop all members
            self._readies[point] = data, key

    def announce(self) -> bytes:
        """Fixes the set U: all who are ready. For all of them."""
        if self._stage != "ready":
            raise RoundError(f"the set of round {self._plan.round} is fixed; `retry` makes it smaller")
        return self._announce(self._readies)

    def _announce(self, members: Iterable[int]) -> bytes:
        chosen = tuple(sorted(members))
        if len(chosen) < self.group.least:
            raise self._give_up(f"{len(chosen)} members are left, and at least {self.group.least} must take part")
        keys = tuple(self._readies[x][1] for x in chosen)
        self._plan = replace(self._plan, attempt=self._plan.attempt + 1, members=chosen, keys=keys)
        self._stage = "upload"
        self._uploads.clear()
        self._sum.fill(0)
        return _say("announcement", self._about() | {"members": list(chosen)}, (self._readies[x][0] for x in chosen))

    # --- upload ---

    @property
    def plan(self) -> Plan:
        """The attempt as it stands."""
        return self._plan

    @property
    def missing(self) -> tuple[int, ...]:
        """Members of U whose upload or, once they were asked, whose answer has not come."""
        came: Mapping[int, object] = self._uploads if self._stage == "upload" else self._answers
        return tuple(x for x in self._plan.members if x not in came)

    def take_upload(self, point: int, upload: Upload | bytes) -> None:
        """Adds a vector to the sum, if everything about it is right."""
        plan = self._plan
        with self._taking("upload", point, plan.members, self._uploads):
            if isinstance(upload, bytes):
                upload = Upload.from_bytes(upload)
            if not isinstance(upload, Upload) or not isinstance(upload.head, bytes):
                raise MessageError("what came is not an upload")
            name, head, vector = self.group.name(point), upload.head, upload.vector
            stop = 4 + int.from_bytes(head[:4], "big")
            message, boxes = head[4:stop], head[stop:]
            vector_digest, boxes_digest, commitment = _read_upload(self.group, plan, point, message)
            if len(boxes) != _BOX * len(plan.members) or digest("secagg boxes", boxes) != boxes_digest:
                raise MessageError(f"the boxes in the upload of {name} are cut or altered")
            if not isinstance(vector, np.ndarray) or vector.dtype != np.uint64 or vector.shape != (plan.length,):
                raise MessageError(f"the upload of {name} must hold a uint64 vector of {plan.length} elements")
            field.check(vector, f"the upload of {name}")
            hashed = _VectorDigest()
            for part in field.chunks(plan.length, _PIECE):
                hashed.update(vector[part])
            if hashed.digest() != vector_digest:
                raise MessageError(f"the vector in the upload of {name} is not the one that it signed")
            field.add(self._sum, vector, out=self._sum, checked=False)
            self._uploads[point] = message, boxes, commitment

    def retry(self) -> bytes:
        """The next attempt, among those whose uploads came. Nothing of the last one will be opened."""
        if self._stage != "upload" or not self.missing:
            raise RoundError(f"round {self._plan.round} is not missing an upload: there is no reason to try again")
        if self._plan.attempt == self.group.attempts:
            lost = self.group.names(self.missing)
            raise self._give_up(f"{self._plan.attempt} attempts failed, the last one without {lost}")
        return self._announce(self._uploads)

    # --- unmask ---

    def request(self, point: int) -> bytes:
        """What a member of U must see before it answers. From here there is no way back to `retry`."""
        if self._stage == "upload" and not self.missing:
            self._stage = "unmask"
        if self._stage != "unmask":
            raise RoundError(f"nobody answers before all have uploaded; missing: {self.group.names(self.missing)}")
        if point not in self._plan.members:
            raise RoundError(f"{self.group.name(point)} does not take part in this attempt, and is not asked")
        place = self._plan.members.index(point) * _BOX
        parts: list[bytes] = []
        for dealer in self._plan.members:
            message, boxes, _ = self._uploads[dealer]
            parts += message, boxes[place : place + _BOX]
        return _say("request", self._about(), parts)

    def take_answer(self, point: int, data: bytes) -> None:
        """A member's shares of all self-masks."""
        plan = self._plan
        with self._taking("unmask", point, plan.members, self._answers):
            body = open_message(data, self.group, self.group.header("unmask", plan.ctx, point, plan.attempt))
            try:
                self._answers[point] = _elements(body, _SEED * len(plan.members))
            except ValueError:
                raise MessageError(f"the answer of {self.group.name(point)} does not hold field elements") from None

    def finish(self) -> Vector:
        """The sum, from T answers or more.

        Up to ⌊(answers − T)/2⌋ wrong ones are corrected. `disputed` then says whose answers were wrong, and about whose
        masks: if about all, that member lied; if about a few, it did, or those dealt it wrong shares.
        """
        if self._stage != "unmask":
            raise RoundError(f"round {self._plan.round} has no answers to finish with")
        if len(self._answers) < self.group.quorum:
            lost = self.group.names(self.missing)
            raise self._give_up(f"{len(self._answers)} members answered, and {self.group.quorum} must; missing: {lost}")
        plan, masks = self._plan, []
        for dealer, seed in self._seeds().items():
            if _commitment(plan.ctx, dealer, seed) != self._uploads[dealer][2]:
                raise self._give_up(
                    f"the mask of {self.group.name(dealer)} does not open: it dealt wrong shares, or an answer is wrong"
                )
            masks.append((_self_mask(plan.ctx, dealer, seed), True))
        for part in field.chunks(plan.length, _PIECE):
            _add_masks(self._sum, part, masks)
        self._stage = "over"
        return self._sum

    def _seeds(self) -> dict[int, Vector]:
        """Every member's seed, from the answers that fit together.

        One random combination of all that each member answers, decoded as a Reed–Solomon code, finds the wrong answers.
        """
        points = sorted(self._answers)
        answers = np.stack([self._answers[x] for x in points])
        rho = field.random(answers.shape[1]).reshape(-1, 1)
        columns = {dealer: slice(_SEED * i, _SEED * (i + 1)) for i, dealer in enumerate(self._plan.members)}

        def wrong(part: slice) -> tuple[int, ...] | None:
            combined = field.matmul(np.ascontiguousarray(answers[:, part]), rho[part], checked=False).reshape(-1)
            try:
                return shamir.decode(dict(zip(points, map(int, combined), strict=True)), self.group.quorum).wrong
            except DecodingError:
                return None

        liars = wrong(slice(None))
        if liars is None:
            about = self.group.names(dealer for dealer, part in columns.items() if wrong(part) is None)
            spare = len(points) - self.group.quorum
            raise self._give_up(
                f"the shares of the masks of {about} do not fit together: dealt wrong, or more than {spare // 2} "
                f"of the {len(points)} answers are wrong"
            )
        good = [i for i, x in enumerate(points) if x not in liars][: self.group.quorum]
        basis, xs = np.ascontiguousarray(answers[good]), [points[i] for i in good]
        for liar in liars:
            truth = field.matmul(shamir.lagrange_matrix(xs, [liar]), basis, checked=False)[0]
            differs = truth != answers[points.index(liar)]
            self.disputed[liar] = tuple(dealer for dealer, part in columns.items() if differs[part].any())
        opened = field.matmul(shamir.lagrange_matrix(xs, [0]), basis, checked=False)[0]
        return {dealer: np.ascontiguousarray(opened[part]) for dealer, part in columns.items()}

    # --- what all stages share ---

    def _about(self) -> dict[str, Any]:
        return {"round": self._plan.round, "purpose": self._plan.purpose, "attempt": self._plan.attempt}

    def _give_up(self, reason: str) -> RoundError:
        self._stage = "over"
        return RoundError(f"round {self._plan.round} ({self._plan.purpose!r}) is given up: {reason}")

    @contextmanager
    def _taking(self, stage: str, point: int, allowed: Container[int], taken: Container[int]) -> Iterator[None]:
        """One message of a stage from each member; an error in it excludes its sender, and says so."""
        name, where = self.group.name(point), f"round {self._plan.round}"
        if stage != self._stage or point not in allowed or point in taken:
            raise MessageError(f"no message is expected of {name} for step 'secagg/{stage}' of {where} now")
        if point in self.excluded:
            raise MessageError(f"{name} is excluded from {where}: {self.excluded[point]}")
        try:
            yield
        except QuorumarkError as error:
            self.excluded[point] = str(error)
            raise MessageError(f"{name} is excluded from {where}: {error}") from None


_PROBE = X25519PrivateKey.generate()


# --- masks, boxes, small things ---------------------------------------------------------------------------


def _private(entry: Mapping[str, Any]) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derive_key(bytes.fromhex(entry["secret"]), "secagg round key"))


def _pair_mask(pair: bytes, low: int, high: int) -> Stream:
    """The lower one adds it, the higher one subtracts it."""
    return Stream(pair, "secagg mask", _word(low), _word(high))


def _self_mask(ctx: bytes, point: int, seed: Vector) -> Stream:
    return Stream(_bytes(seed), "secagg self mask", ctx, _word(point))


def _commitment(ctx: bytes, point: int, seed: Vector) -> bytes:
    """Shows nothing of 305 random bits, and shows the server that it opened the right ones."""
    return digest("secagg seed", ctx, _word(point), _bytes(seed))


def _cipher(pair: bytes, sender: int, recipient: int, commitment: bytes) -> AESGCM:
    """Directed, and for one seed: a box is no box of the other direction, another attempt or another upload."""
    return AESGCM(derive_key(pair, "secagg box", _word(sender), _word(recipient), commitment))


def _add_masks(vector: Vector, part: slice, masks: Sequence[tuple[Stream, bool]]) -> None:
    piece = vector[part]
    for stream, negate in masks:
        stream.add_to(piece, part.start, negate=negate, checked=False)


class _VectorDigest:
    """SHA-256 of a vector's little-endian bytes, piece by piece."""

    def __init__(self) -> None:
        self._hashed = hashlib.sha256(b"quorumark/v1 secagg vector")

    def update(self, piece: Vector) -> None:
        self._hashed.update(np.ascontiguousarray(piece.astype("<u8", copy=False)).data)

    def digest(self) -> bytes:
        return self._hashed.digest()


def _elements(data: bytes, count: int) -> Vector:
    """Field elements from bytes; a ValueError if they are none."""
    if len(data) != 8 * count:
        raise ValueError("length")
    words = np.frombuffer(data, "<u8").astype(np.uint64)
    if int(words.max()) >= P:
        raise ValueError("range")
    return words


def _bytes(vector: Vector) -> bytes:
    return vector.astype("<u8", copy=False).tobytes()


def _word(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _round(number: int) -> int:
    if not is_count(number, 1) or number >= _LARGEST_ROUND:
        raise InputError("round", "must be a whole number, at least 1", repr(number))
    return number


def _check_told(binding: bytes, length: int, purpose: str) -> None:
    if not isinstance(binding, bytes) or len(binding) != 32:
        raise InputError("binding", "must be a digest of 32 bytes", type(binding).__name__)
    if not is_count(length, 1):
        raise InputError("length", "must be a whole number, at least 1", length)
    if not isinstance(purpose, str) or not 0 < len(purpose) <= 100 or not purpose.isprintable():
        raise InputError("purpose", "must be a short text", repr(purpose)[:80])
