"""Secure aggregation: a server learns the sum of its members' vectors, and nothing else (docs/secagg.md).

Vectors are of field elements (mod 2^61−1). Each member runs a `SecAggMember`, the server a `SecAggServer`; every stage
takes bytes and gives bytes. Transport is the caller's concern.

    ready    a key of this round, signed                                            member → server
    plan     the set U who take part, with their keys (the *announcement*)          server → each
    upload   the vector under pairwise masks, which cancel over U, and a mask of
             the member's own, whose seed is shared among U in sealed boxes         member → server
    unmask   every member of U has uploaded: the shares of all seeds                server → each → server

It is all or nothing: if one of U is missing, nothing of this attempt is ever opened; the others upload again for a
smaller U. T = ⌊(n+t−1)/2⌋+1 answers open a sum. Any two sets of T among n members have t in common, so that one of
them is honest, and an honest member answers in one round from each *state* and purpose:
no two sums from one state are ever opened. A state is what a round starts from, named by the digest `origin`; without
one, every round is a state of its own. Everything that members must agree on is in ctx, which enters every key: members
who were told different things share no masks, and cannot open each other's boxes.

What a member must not do twice it writes to disk before anything is sent (`FolderState`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quorumark import field, shamir
from quorumark.consortium.canonical import canonical, digest, parse
from quorumark.consortium.checks import is_count
from quorumark.consortium.identity import Header, Identity, exchange, open_message
from quorumark.consortium.records import Member
from quorumark.errors import (
    AnsweredError,
    DecodingError,
    InputError,
    MessageError,
    QuorumarkError,
    RecordError,
    RoundError,
)
from quorumark.field import P, Stream, Vector, derive_key
from quorumark.round import statements
from quorumark.round.group import LARGEST_ROUND, Group, check_round_number, word
from quorumark.round.memory import Memory, State, answers_from, is_newer
from quorumark.round.statements import Turn

__all__ = ["Plan", "SecAggMember", "SecAggServer", "Upload", "pack", "unpack"]

_SEED = 5  # field elements in the seed of a self-mask: 305 bits, so that 256-bit keys lose nothing
_SHARE = 8 * _SEED
BOX = _SHARE + 16
# elements that all masks are added to before the next ones: 8 MiB, enough to be worth spreading over threads, and small
# enough to stay in a third-level cache
_PIECE = 1 << 20
# every box has a key of its own (ctx, sender, recipient, seed), so one nonce is right
_NONCE = bytes(12)


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
        everyone = b"".join(word(x) + bytes.fromhex(key) for x, key in zip(self.members, self.keys, strict=True))
        return digest("secagg ctx", self.group, self.purpose.encode(), *map(word, numbers), self.binding, everyone)


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


def say(kind: str, about: Mapping[str, Any], parts: Iterable[bytes]) -> bytes:
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


def hear(kind: str, data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    parts = unpack(data, kind)
    try:
        head = parse(parts[0] if parts else b"", f"quorumark-{kind}/v1", f"a server's {kind}")
    except (RecordError, InputError) as error:
        raise MessageError(f"the server's {kind} is refused: {error}") from None
    sound = all(is_count(head.get(name), 1) for name in ("round", "attempt")) and isinstance(head.get("purpose"), str)
    if not sound or head["round"] >= LARGEST_ROUND:
        raise MessageError(f"the server's {kind} is refused: it names no round, purpose and attempt")
    return head, parts[1:]


# --- member -----------------------------------------------------------------------------------------------


class SecAggMember:
    """One member's side. It may be made anew at any time: what matters is in `state`."""

    def __init__(self, identity: Identity, group: Group, state: State, *, leaving: bool = False) -> None:
        """`leaving`: only to say that it answers nothing more (`never`), in a group that it may have left."""
        self.group = group
        self.point = group.point_of(identity.ed25519)
        self._identity = identity
        self.state = state
        self._lasting: dict[int, bytes] = {}
        self._shared: dict[tuple[str, str], bytes] = {}  # of this round, to spare exchanges; erased with its keys
        with state.edit() as memory:
            if memory["group"] != group.id.hex() and not leaving:
                raise RoundError("this memory of rounds belongs to another group, manifest or epoch")

    def __repr__(self) -> str:
        return f"SecAggMember(point {self.point}, secrets hidden)"

    def ready(
        self,
        round_no: int,
        binding: bytes,
        length: int,
        purpose: str = "model",
        *,
        origin: bytes | None = None,
        turn: Turn | None = None,
        closed: Container[str] = (),
    ) -> bytes:
        """Joins a round, and leaves all earlier ones for good.

        `binding` is a digest of all else that the members must agree on, which the caller computes itself: the model
        that training started from, the weights, … `length` is that of the vectors. `purpose` tells several sums of one
        round apart; every one has its own keys. `origin` is the digest of the state that the round starts from, `turn`
        what the server says about earlier rounds from it; `closed` are earlier groups, by id, in which nothing from it
        can be opened any more.
        """
        check_round_number(round_no)
        _check_told(binding, length, purpose)
        start, turn = origin or own_origin(self.group, round_no), turn or Turn(round_no)
        if self.point not in self.group.cohort(round_no):
            raise RoundError(f"{self._name()} is not drawn for round {round_no}")
        told = {"binding": binding.hex(), "length": length, "origin": start.hex()}
        with self.state.edit() as memory:
            if round_no > memory["round"] or (round_no == memory["round"] and purpose not in memory["purposes"]):
                about = self.check_free(memory, start, purpose, turn, closed)
                if "repeats" not in about:  # what it sent before is not kept any longer
                    memory["sent"].pop(purpose, None)
                if round_no > memory["round"]:
                    memory.update(round=round_no, open=True, purposes={})
                    self._shared.clear()
                if memory["open"]:
                    about |= {"halvings": turn.halvings, "secret": os.urandom(32).hex(), "attempt": 0}
                    memory["purposes"][purpose] = {**told, **about}
            entry = self._entry(memory, round_no, purpose)
            if {name: entry[name] for name in told} != told:
                raise RoundError(
                    f"{self._name()} has joined round {round_no} ({purpose!r}) with another model, other weights or "
                    "another length; it joins once"
                )
            key = _private(entry).public_key().public_bytes_raw()
        header = self.group.header("ready", self.group.session(round_no, purpose), self.point)
        return self._identity.write(header, key + binding + word(length))

    def check_free(
        self, memory: Memory, origin: bytes, purpose: str, turn: Turn, closed: Container[str] = ()
    ) -> dict[str, Any]:
        """Whether this member may take part from a state; an AnsweredError if it has answered from it and may not.

        It changes the memory: statements that it was shown once it need not be shown again.
        """
        if [self.group.id.hex(), origin.hex()] in memory["closed"]:
            raise RoundError(
                f"{self._name()} has said that it answers nothing more from this model under this manifest"
            )
        if not is_newer(memory, origin):
            nonce = bytes.fromhex(memory["nonce"])
            statements.check_newer(self.group, origin, nonce, turn.newer.get(self.point, {}))
            memory["known"].append(origin.hex())
        if turn.repeats:
            return {"repeats": self._repeated(memory, origin, purpose, turn)}
        given = answers_from(memory, origin, purpose)
        standing = [last for last, group in given if not self._given_up(origin, last, group, turn, closed)]
        if not standing:
            memory["answered"].get(origin.hex(), {}).pop(purpose, None)
            return {}
        if memory["simulation"]:
            return {}
        if memory["consents"].get(origin.hex()):
            return {"consented": True}
        last = standing[-1]
        kept = self._kept(memory, purpose, last)
        raise AnsweredError(
            f"{self._name()} has answered in round {last} from this model, and takes part in no other from it: open "
            "that sum, or let the others give it up",
            last,
            tuple(kept.get("members", ())),
            int(kept.get("halvings", 0)),
        )

    def _given_up(self, origin: bytes, last: int, group: str, turn: Turn, closed: Container[str]) -> bool:
        """Whether a sum that this member answered for can never be opened."""
        if group in closed:
            return True
        if group != self.group.id.hex() or last not in turn.never:
            return False
        statements.check_given_up(self.group, origin, last, turn.never[last])
        return True

    def _repeated(self, memory: Memory, origin: bytes, purpose: str, turn: Turn) -> list[int]:
        """The members of a round that is made again, which must be the same ones, and its mark as strong: another sum
        from the same results would show the mark, or a member."""
        sent = memory["sent"].get(purpose, {})
        # under another manifest weights or shares may be others, and the sum would not be the same
        mine = (origin.hex(), self.group.id.hex())
        if (sent.get("origin"), sent.get("group")) != mine or turn.repeats not in sent["rounds"]:
            raise RoundError(
                f"{self._name()} has not uploaded in round {turn.repeats} from this model, and cannot make it again"
            )
        if sent["halvings"] != turn.halvings:
            raise RoundError(
                f"the mark of round {turn.repeats} was halved {sent['halvings']} times, not {turn.halvings} times: a "
                "sum that is made again has the same mark"
            )
        return list(sent["members"])

    def first_round(self, purpose: str = "model") -> int:
        """The round that the vector which this member last sent was trained for."""
        with self.state.edit() as memory:
            rounds = memory["sent"].get(purpose, {}).get("rounds", [0])
        return int(rounds[0])

    @staticmethod
    def _kept(memory: Memory, purpose: str, round_no: int) -> dict[str, Any]:
        """The answer of a round, if it is the last one that this member gave."""
        kept: dict[str, Any] = memory["answer"].get(purpose, {})
        return kept if kept.get("round") == round_no else {}

    def never(self, origin: bytes, round_no: int) -> bytes:
        """Says, signed, that this member has not answered in a round from a state and never will; 0: in none of this
        group. What it has joined of that is over."""
        with self.state.edit() as memory:
            if not is_newer(memory, origin):
                raise RoundError(
                    f"the memory of {self._name()} was made anew: it does not know what it answered before"
                )
            given = [entry for answers in memory["answered"].get(origin.hex(), {}).values() for entry in answers]
            mine = self.group.id.hex()
            if any(group == mine and round_no in (0, last) for last, group in given):
                raise RoundError(f"{self._name()} has answered from this model")
            if round_no == 0:
                if [mine, origin.hex()] not in memory["closed"]:
                    memory["closed"].append([mine, origin.hex()])
                if memory["group"] == mine:
                    memory.update(open=False, purposes={})
            elif memory["round"] <= check_round_number(round_no):
                memory.update(round=round_no, open=False, purposes={})
            self._shared.clear()
        return statements.sign(self._identity, self.group, "never", origin, word(round_no))

    def newer(self, origin: bytes, nonces: Mapping[int, str]) -> dict[int, bytes]:
        """Signed statements for members whose memory was made anew, where this state is newer than their nonces."""
        made = {}
        with self.state.edit() as memory:
            if not is_newer(memory, origin):
                return {}
            known = range(1, len(self.group.roster) + 1)
            for point, nonce in ((x, nonce) for x, nonce in nonces.items() if x in known):
                entry = memory["nonces"].get(str(point))
                if entry is None or entry["nonce"] != nonce:
                    memory["nonces"][str(point)] = {"nonce": nonce, "last": origin.hex(), "newer": False}
                elif entry["newer"] and entry["last"] == origin.hex():
                    made[point] = statements.sign(self._identity, self.group, "newer", origin, bytes.fromhex(nonce))
        return made

    def plan(self, announcement: bytes) -> Plan:
        """The attempt that the server announces, if this member may take part in it."""
        head, readies = hear("announcement", announcement)
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
                f"the announced set has {len(members)} members; at least max(T, 3) = {group.least} must "
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

    def upload(self, plan: Plan, vector: Vector, *, marked: bool = False) -> Upload:
        """Masks the vector, in place. This member will then answer for this attempt or a later one, no earlier one.

        Once per attempt: two vectors under the same masks would show their difference. `marked` is remembered for what
        an operator may be asked to consent to.
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
            entry.update(attempt=plan.attempt, members=list(plan.members), keys=list(plan.keys), marked=marked)
            earlier = memory["sent"][plan.purpose]["rounds"] if "repeats" in entry else []
            memory["sent"][plan.purpose] = {
                "origin": entry["origin"],
                "group": self.group.id.hex(),
                "rounds": [*earlier, plan.round],
                "members": list(plan.members),
                "halvings": entry["halvings"],
            }
        return Upload(len(message).to_bytes(4, "big") + message + boxes, vector)

    def unmask(self, request: bytes) -> bytes:
        """The shares of all self-masks, once all of U have uploaded; then the keys of this round are erased.

        One answer for each state and purpose, and never for an attempt before the last one that this member uploaded
        for. The same answer may be sent again.
        """
        head, parts = hear("request", request)
        round_no, purpose, attempt = head["round"], head["purpose"], head["attempt"]
        with self.state.edit() as memory:
            kept = self._kept(memory, purpose, round_no)
            if kept.get("attempt") == attempt:
                return bytes.fromhex(kept["message"])
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
            message = self._identity.write(self.group.header("unmask", plan.ctx, self.point, attempt), shares)
            memory["purposes"][purpose] = {"answered": attempt}  # the keys are gone
            given = memory["answered"].setdefault(entry["origin"], {}).setdefault(purpose, [])
            given.append([round_no, self.group.id.hex()])
            about = {"round": round_no, "attempt": attempt, "members": list(plan.members)}
            about["halvings"] = entry["halvings"]
            memory["answer"][purpose] = {**about, "message": message.hex()}
            memory["marked"] = memory["marked"] or entry["marked"]
            if entry.get("consented"):
                memory["consents"].pop(entry["origin"], None)
            self._shared.clear()
        return message

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
            raise RoundError(f"{self._name()} has already answered in round {round_no} ({purpose!r})")
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
        if "repeats" in entry and list(plan.members) != entry["repeats"]:
            raise RoundError(
                f"a sum that is made again is of the same members {entry['repeats']}, not of {list(plan.members)}"
            )
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
        self._plan = Plan(group.id, group.quorum, check_round_number(round_no), purpose, 0, length, binding, (), ())
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
        return say("announcement", self._about() | {"members": list(chosen)}, (self._readies[x][0] for x in chosen))

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

    @property
    def ready(self) -> tuple[int, ...]:
        """Who may be in U, before it is fixed."""
        return tuple(sorted(self._readies))

    def leave_out(self, points: Iterable[int]) -> None:
        """Members who are ready and must not be in U."""
        for point in points:
            del self._readies[point]

    @property
    def answers(self) -> int:
        """How many answers have come."""
        return len(self._answers)

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
            if len(boxes) != BOX * len(plan.members) or digest("secagg boxes", boxes) != boxes_digest:
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
        place = self._plan.members.index(point) * BOX
        parts: list[bytes] = []
        for dealer in self._plan.members:
            message, boxes, _ = self._uploads[dealer]
            parts += message, boxes[place : place + BOX]
        return say("request", self._about(), parts)

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
            raise self._waiting(f"{len(self._answers)} members answered, and {self.group.quorum} must; missing: {lost}")
        plan, masks = self._plan, []
        for dealer, seed in self._seeds().items():
            if _commitment(plan.ctx, dealer, seed) != self._uploads[dealer][2]:
                raise self._waiting(
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
            raise self._waiting(
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

    # --- a sum that is asked for again ---

    def kept(self) -> tuple[bytes, Vector]:
        """What it takes to ask for the answers again, in another process: nothing secret."""
        plan = self._plan
        about = {**self._about(), "length": plan.length, "binding": plan.binding.hex(), "members": list(plan.members)}
        readies = [part for x in plan.members for part in (self._readies[x][0], self._readies[x][1].encode())]
        uploads = [part for x in plan.members for part in self._uploads[x]]
        return say("kept-sum", about, [*readies, *uploads]), self._sum

    @classmethod
    def reopened(cls, group: Group, head: bytes, vector: Vector) -> SecAggServer:
        """What `kept` gave, in the stage in which answers are asked for."""
        about, parts = hear("kept-sum", head)
        server = cls(group, about["round"], bytes.fromhex(about["binding"]), about["length"], about["purpose"])
        members = about["members"]
        if len(parts) != 5 * len(members) or vector.shape != (about["length"],):
            raise MessageError("a kept sum is damaged")
        readies, uploads = parts[: 2 * len(members)], parts[2 * len(members) :]
        for i, x in enumerate(members):
            server._readies[x] = readies[2 * i], readies[2 * i + 1].decode()
            message, boxes, commitment = uploads[3 * i : 3 * i + 3]
            server._uploads[x] = message, boxes, commitment
        keys = tuple(server._readies[x][1] for x in members)
        server._plan = replace(server._plan, attempt=about["attempt"], members=tuple(members), keys=keys)
        server._sum, server._stage = np.ascontiguousarray(vector, np.uint64), "unmask"
        return server

    def _waiting(self, reason: str) -> RoundError:
        """The sum may still be opened: the same members can be asked again."""
        return RoundError(f"round {self._plan.round} ({self._plan.purpose!r}) cannot be opened yet: {reason}")

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
    return Stream(pair, "secagg mask", word(low), word(high))


def _self_mask(ctx: bytes, point: int, seed: Vector) -> Stream:
    return Stream(_bytes(seed), "secagg self mask", ctx, word(point))


def _commitment(ctx: bytes, point: int, seed: Vector) -> bytes:
    """Shows nothing of 305 random bits, and shows the server that it opened the right ones."""
    return digest("secagg seed", ctx, word(point), _bytes(seed))


def _cipher(pair: bytes, sender: int, recipient: int, commitment: bytes) -> AESGCM:
    """Directed, and for one seed: a box is no box of the other direction, another attempt or another upload."""
    return AESGCM(derive_key(pair, "secagg box", word(sender), word(recipient), commitment))


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


def own_origin(group: Group, round_no: int) -> bytes:
    """The state of a round that starts from nothing in particular: the round itself."""
    return digest("secagg origin", group.id, word(round_no))


def _check_told(binding: bytes, length: int, purpose: str) -> None:
    if not isinstance(binding, bytes) or len(binding) != 32:
        raise InputError("binding", "must be a digest of 32 bytes", type(binding).__name__)
    if not is_count(length, 1):
        raise InputError("length", "must be a whole number, at least 1", length)
    if not isinstance(purpose, str) or not 0 < len(purpose) <= 100 or not purpose.isprintable():
        raise InputError("purpose", "must be a short text", repr(purpose)[:80])
