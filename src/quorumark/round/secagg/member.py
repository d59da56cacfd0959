"""A member's side of one secure sum: what it may answer, and what it keeps before it answers."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from quorumark import field, shamir
from quorumark.canonical import digest
from quorumark.checks import is_count
from quorumark.consortium.identity import Identity, exchange
from quorumark.errors import (
    AnsweredError,
    InputError,
    MessageError,
    RoundError,
)
from quorumark.field import Vector, derive_key
from quorumark.round import statements
from quorumark.round.group import Group, check_round_number, word
from quorumark.round.memory import Memory, State, adopt, answers_from, is_newer
from quorumark.round.secagg.masks import (
    NONCE,
    PIECE,
    SEED,
    VectorDigest,
    add_masks,
    bytes_of,
    cipher_of,
    commitment_of,
    elements_of,
    pair_mask,
    private_key,
    self_mask,
)
from quorumark.round.secagg.messages import Plan, Upload, check_arguments, hear, own_origin, read_readies, read_uploads
from quorumark.round.statements import Turn
from quorumark.round.units import widest

__all__ = ["SecAggMember"]


class SecAggMember:
    """One member's side. It may be made anew at any time: what matters is in `state`."""

    def __init__(self, identity: Identity, group: Group, state: State, *, leaving: bool = False) -> None:
        """`leaving`: only to say that it answers nothing more (`never`), in a group that it may have left."""
        self.group = group
        self.point = group.point_of(identity.ed25519)
        self._identity = identity
        self.state = state
        self._shared: dict[tuple[str, str], bytes] = {}  # of this round, to spare exchanges; erased with its keys
        self._derived: dict[tuple[str, bytes], dict[int, bytes]] = {}  # of the last attempt, likewise
        # members of a simulation, who hide nothing from each other in one process (`simulation.Federation`): the masks
        # that two of them would share cancel in the sum, and are not made
        self.together: frozenset[int] = frozenset()
        with state.edit() as memory:
            if not memory["group"] and not leaving:
                adopt(memory, group)
            if memory["group"] != group.id.hex() and not leaving:
                raise RoundError(
                    "this memory of rounds belongs to another group, manifest or epoch", code="round.other-memory"
                )

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
        closed: Iterable[tuple[str, int]] = (),
        level: bytes = b"",
    ) -> bytes:
        """Joins a round, and leaves all earlier ones for good.

        `binding` is a digest of all else that the members must agree on, which the caller computes itself: the model
        that training started from, the weights, … `length` is that of the vectors. `purpose` tells several sums of one
        round apart; every one has its own keys. `origin` is the digest of the state that the round starts from, `turn`
        what the server says about earlier rounds from it; `closed` are draws of earlier groups, by id, in which nothing
        from it can be opened any more. `level` is what this member's vector needs (`round.units`): the sum has the
        widest one of its members.
        """
        check_round_number(round_no)
        check_arguments(binding, length, purpose)
        start, turn = origin or own_origin(self.group, round_no), turn or Turn(round_no)
        if self.point not in self.group.cohort(start, turn.draw):
            raise RoundError(f"{self.name} is not drawn for round {round_no}", code="round.not-drawn")
        agreed = {
            "binding": binding.hex(),
            "length": length,
            "origin": start.hex(),
            "draw": turn.draw,
            "needs": level.hex(),
        }
        with self.state.edit() as memory:
            if round_no > memory["round"] or (round_no == memory["round"] and purpose not in memory["purposes"]):
                about = self.check_free(memory, start, purpose, turn, closed)
                if "repeats" not in about:  # what it sent before is not kept any longer
                    memory["sent"].pop(purpose, None)
                if round_no > memory["round"]:
                    memory.update(round=round_no, open=True, purposes={})
                    self._forget()
                if memory["open"]:
                    if "repeats" in about:
                        about["repeated-level"] = memory["sent"][purpose]["level"]
                    about |= {"halvings": turn.halvings, "secret": os.urandom(32).hex(), "attempt": 0}
                    memory["purposes"][purpose] = {**agreed, **about}
            entry = self._entry(memory, round_no, purpose)
            if {name: entry[name] for name in agreed} != agreed:
                raise RoundError(
                    f"{self.name} has joined round {round_no} ({purpose!r}) with another model, other weights or "
                    "another length; it joins once",
                    code="round.joined-otherwise",
                )
            key = private_key(entry).public_key().public_bytes_raw()
        header = self.group.header("ready", self.group.session(round_no, purpose, turn.draw), self.point)
        return self._identity.write(header, key + binding + word(length) + level)

    def check_free(
        self, memory: Memory, origin: bytes, purpose: str, turn: Turn, closed: Iterable[tuple[str, int]] = ()
    ) -> dict[str, Any]:
        """Whether this member may take part from a state; an AnsweredError if it has answered from it and may not.

        It changes the memory: statements that it was shown once it need not be shown again.
        """
        if self.point not in self.group.cohort(origin, turn.draw):
            raise RoundError(f"{self.name} is not drawn for round {turn.round}", code="round.not-drawn")
        if [self.group.id.hex(), origin.hex(), turn.draw] in memory["closed"]:
            raise RoundError(
                f"{self.name} has said that it answers nothing more from this model under this "
                + ("draw of the cohort" if self.group.draws > 1 else "manifest"),
                code="round.said-never",
            )
        free = memory["simulation"] or memory["consents"].get(origin.hex())
        if not free:
            statements.check_redrawn(self.group, origin, turn.draw, turn.closed)
        if not is_newer(memory, origin):
            self._check_newer(memory, origin, turn)
        if turn.repeats:
            return {"repeats": self._repeated(memory, origin, purpose, turn)}
        given = answers_from(memory, origin, purpose)
        mine = self.group.id.hex()
        over = {*closed} if free else {*closed, *((mine, draw) for draw in range(turn.draw))}
        standing = [answer for answer in given if not self._given_up(origin, answer, turn, over)]
        consented = bool(memory["consents"].get(origin.hex())) and not memory["simulation"]
        if not standing:
            memory["answered"].get(origin.hex(), {}).pop(purpose, None)
            seconded = origin.hex() in memory["signed"]  # what came of a sum that it did not answer for
            return {"consented": True} if consented and seconded else {}
        if memory["simulation"]:
            return {}
        if consented:
            return {"consented": True}
        last, _, draw = standing[-1]
        kept = self._kept(memory, purpose, last)
        raise AnsweredError(
            f"{self.name} has answered in round {last} from this model, and takes part in no other from it: open "
            "that sum, or let the others give it up",
            last,
            tuple(kept.get("members", ())),
            int(kept.get("halvings", 0)),
            draw,
        )

    def _check_newer(self, memory: Memory, origin: bytes, turn: Turn) -> None:
        """Of a memory made anew: whether it has answered nothing under this draw. It knows all that it did from this
        state only if that holds for all draws; until then it says nothing about them (`never`)."""
        nonce, said = bytes.fromhex(memory["nonce"]), turn.newer.get(self.point, {})
        statements.check_newer(self.group, origin, nonce, said, turn.draw)
        about = self.group, "newer", origin, nonce, said
        if all(len(statements.signers(*about, draw)) >= self.group.closing for draw in range(self.group.draws)):
            memory["known"].append(origin.hex())

    def _given_up(
        self, origin: bytes, answer: tuple[int, str, int], turn: Turn, closed: Container[tuple[str, int]]
    ) -> bool:
        """Whether a sum that this member answered for can never be opened."""
        last, group, draw = answer
        if (group, draw) in closed:
            return True
        if group != self.group.id.hex() or last not in turn.never:
            return False
        statements.check_given_up(self.group, origin, last, turn.never[last], draw)
        return True

    def _repeated(self, memory: Memory, origin: bytes, purpose: str, turn: Turn) -> list[int]:
        """The members of a round that is made again, which must be the same ones, and its mark as strong: another sum
        from the same results would show the mark, or a member."""
        sent = memory["sent"].get(purpose, {})
        # under another manifest weights or shares may be others, and the sum would not be the same
        mine = (origin.hex(), self.group.id.hex())
        if (sent.get("origin"), sent.get("group")) != mine or turn.repeats not in sent["rounds"]:
            raise RoundError(
                f"{self.name} has not uploaded in round {turn.repeats} from this model, and cannot make it again",
                code="round.other-repeat",
            )
        if sent["halvings"] != turn.halvings:
            raise RoundError(
                f"the mark of round {turn.repeats} was halved {sent['halvings']} times, not {turn.halvings} times: a "
                "sum that is made again has the same mark",
                code="round.other-repeat",
            )
        if sent["draw"] != turn.draw:
            raise RoundError(
                f"round {turn.repeats} was of draw {sent['draw']} of the cohort, not of draw {turn.draw}",
                code="round.other-repeat",
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

    def never(self, origin: bytes, round_no: int, draw: int = 0) -> bytes:
        """Says, signed, that this member has not answered in a round from a state and never will; 0: in none under this
        draw. What it has joined of that is over."""
        with self.state.edit() as memory:
            if not is_newer(memory, origin):
                raise RoundError(
                    f"the memory of {self.name} was made anew: it does not know what it answered before",
                    code="round.memory-anew",
                )
            given = [entry for answers in memory["answered"].get(origin.hex(), {}).values() for entry in answers]
            mine, about = self.group.id.hex(), word(round_no) if round_no else statements.in_draw(draw)
            answered = (last == round_no if round_no else of == draw for last, group, of in given if group == mine)
            signed = memory["signed"].get(origin.hex(), ["", 0])
            if any(answered) or (signed[0] == mine and (round_no or signed[1] == draw)):
                raise RoundError(
                    f"{self.name} has answered from this model, or signed what came after it",
                    code="round.answered-already",
                )
            if round_no == 0:
                entry = [mine, origin.hex(), draw]
                if entry not in memory["closed"]:
                    memory["closed"].append(entry)
                joined = memory["purposes"].values() if memory["group"] == mine else ()
                if any((of.get("origin"), of.get("draw")) == (origin.hex(), draw) for of in joined):
                    memory.update(open=False, purposes={})
            elif memory["round"] <= check_round_number(round_no):
                memory.update(round=round_no, open=False, purposes={})
            self._forget()
        return statements.sign(self._identity, self.group, "never", origin, about)

    def sign(self, what: str, state: bytes, about: bytes) -> bytes:
        """A statement of this member (`round.statements`), once the caller knows that it may make it."""
        return statements.sign(self._identity, self.group, what, state, about)

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
            raise MessageError(
                "the server's announcement is refused: it does not list its members and their keys",
                code="message.malformed",
            )
        with self.state.edit() as memory:
            entry = self._entry(memory, round_no, purpose)
        drawn = group.cohort(bytes.fromhex(entry["origin"]), entry["draw"])
        if members != sorted(set(members)) or not set(members) <= set(drawn):
            raise RoundError(
                "the announced set holds a member twice, or one who is not drawn for this round",
                code="round.wrong-members",
            )
        if self.point not in members:
            raise RoundError(f"{self.name} is not in the announced set", code="round.not-in-set")
        if len(members) < group.least:
            raise RoundError(
                f"the announced set has {len(members)} members; at least max(T, 3) = {group.least} must "
                f"take part, or {group.threshold - 1} colluders and the server see single vectors",
                code="round.too-few",
            )
        keys, levels = [], []
        said = read_readies(group, round_no, purpose, entry["draw"], tuple(members), tuple(readies))
        for point, (key, binding, length, level) in zip(members, said, strict=True):
            if (binding.hex(), length) != (entry["binding"], entry["length"]):
                raise RoundError(
                    f"{group.name(point)} was told of another model, other weights or another length than this member",
                    code="round.told-otherwise",
                )
            keys.append(key)
            levels.append(level)
        if keys[members.index(self.point)] != private_key(entry).public_key().public_bytes_raw().hex():
            raise RoundError(f"the announced key of {self.name} is not its own", code="round.wrong-key")
        planned = self._planned(entry, round_no, purpose, attempt, members, keys)
        plan = replace(planned, level=widest(levels), levels=tuple(levels))
        self._admit(entry, plan)
        return plan

    def upload(
        self, plan: Plan, vector: Vector, *, marked: bool = False, known: Mapping[str, Any] | None = None
    ) -> Upload:
        """Masks the vector, in place. This member will then answer for this attempt or a later one, no earlier one.

        Once per attempt: two vectors under the same masks would show their difference. `marked` is remembered for what
        an operator may be asked to consent to, `known` for the check of the sum (`checked_sums.kept`).
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
            seed = field.random(SEED)
            commitment = commitment_of(ctx, point, seed)
            masks = [(self_mask(ctx, point, seed), False)]
            for other in plan.members:
                if other != point and other not in self.together:
                    low, high = sorted((point, other))
                    masks.append((pair_mask(pairs[other], low, high), point == high))
            shares = shamir.share(seed, plan.quorum, len(self.group.roster))
            boxes = b"".join(
                cipher_of(pairs[other], point, other, commitment).encrypt(NONCE, bytes_of(shares[other - 1]), None)
                for other in plan.members
            )
            hashed = VectorDigest()
            for part in field.chunks(plan.length, PIECE):
                add_masks(vector, part, masks)
                hashed.update(vector[part])
            body = hashed.digest() + digest("secagg boxes", boxes) + commitment
            message = self._identity.write(self.group.header("upload", ctx, point, plan.attempt), body)
            entry.update(attempt=plan.attempt, members=list(plan.members), keys=list(plan.keys), marked=marked)
            entry["level"] = plan.level.hex()
            earlier = memory["sent"][plan.purpose]["rounds"] if "repeats" in entry else []
            memory["sent"][plan.purpose] = {
                "origin": entry["origin"],
                "group": self.group.id.hex(),
                "rounds": [*earlier, plan.round],
                "members": list(plan.members),
                "halvings": entry["halvings"],
                "draw": entry["draw"],
                "level": plan.level.hex(),
            }
            if known is not None:
                memory["sum"] = dict(known)
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
                    f"{self.name} does not answer for attempt {attempt} of round {round_no} ({purpose!r}): "
                    + (
                        f"it has uploaded for attempt {entry['attempt']}" if entry["attempt"] else "it has not uploaded"
                    ),
                    code="round.wrong-attempt" if entry["attempt"] else "round.not-uploaded",
                )
            plan = self._planned(entry, round_no, purpose, attempt, entry["members"], entry["keys"])
            plan = replace(plan, level=bytes.fromhex(entry["level"]))
            if len(parts) != 2 * len(plan.members):
                raise RoundError(
                    "the server's request must show one upload of every member of the announced set",
                    code="message.incomplete",
                )
            pairs, shares = self._pairs(entry, plan), b""
            said = read_uploads(self.group, plan, tuple(parts[::2]))
            for dealer, (_, _, commitment), box in zip(plan.members, said, parts[1::2], strict=True):
                try:
                    share = cipher_of(pairs[dealer], dealer, self.point, commitment).decrypt(NONCE, box, None)
                    shares += bytes_of(elements_of(share, SEED))
                except (InvalidTag, ValueError):
                    raise MessageError(
                        f"the share from {self.group.name(dealer)} cannot be opened (step 'secagg/unmask')",
                        code="message.cannot-open",
                    ) from None
            message = self._identity.write(self.group.header("unmask", plan.ctx, self.point, attempt), shares)
            memory["purposes"][purpose] = {"answered": attempt}  # the keys are gone
            given = memory["answered"].setdefault(entry["origin"], {}).setdefault(purpose, [])
            given.append([round_no, self.group.id.hex(), entry["draw"]])
            about = {"round": round_no, "attempt": attempt, "members": list(plan.members)}
            about["halvings"] = entry["halvings"]
            memory["answer"][purpose] = {**about, "message": message.hex()}
            memory["marked"] = memory["marked"] or entry["marked"]
            if entry.get("consented"):
                memory["consents"].pop(entry["origin"], None)
                memory["signed"].pop(entry["origin"], None)  # the operator lets another sum follow from here
            self._forget()
        return message

    def close(self) -> None:
        """Ends the current round for this member: it erases the round's keys, and answers no more."""
        with self.state.edit() as memory:
            memory.update(open=False, purposes={})
            self._forget()

    # --- rules and keys ---

    def _entry(self, memory: dict[str, Any], round_no: int, purpose: str) -> dict[str, Any]:
        """What is remembered of a round and purpose in which this member may still do something."""
        if round_no < memory["round"]:
            raise RoundError(
                f"round {round_no} is over for {self.name}: it has joined round {memory['round']}", code="round.over"
            )
        if round_no == memory["round"] and not memory["open"]:
            raise RoundError(f"round {round_no} is over for {self.name}: it has left it", code="round.over")
        entry: dict[str, Any] | None = memory["purposes"].get(purpose) if round_no == memory["round"] else None
        if entry is None:
            raise RoundError(f"{self.name} has not joined round {round_no} ({purpose!r})", code="round.not-joined")
        if "answered" in entry:
            raise RoundError(
                f"{self.name} has already answered in round {round_no} ({purpose!r})", code="round.answered-already"
            )
        return entry

    def _admit(self, entry: dict[str, Any], plan: Plan) -> None:
        """The rule of attempts: one after the other, each with a set strictly inside the last, with the same keys."""
        last: int = entry["attempt"]
        if plan.attempt != last + 1:
            raise RoundError(
                f"attempt {last + 1} is next for {self.name}, not attempt {plan.attempt}", code="round.wrong-attempt"
            )
        if plan.attempt > self.group.attempts:
            raise RoundError(
                f"there are {self.group.attempts} attempts in a round, no more", code="round.no-more-attempts"
            )
        mine = (self.group.id, self.group.quorum, entry["length"], entry["binding"])
        if (plan.group, plan.quorum, plan.length, plan.binding.hex()) != mine:
            raise RoundError("this plan was not made by this member in this round", code="round.other-plan")
        if "repeats" in entry and list(plan.members) != entry["repeats"]:
            raise RoundError(
                f"a sum that is made again is of the same members {entry['repeats']}, not of {list(plan.members)}",
                code="round.other-repeat",
            )
        if plan.level.hex() != entry.get("repeated-level", plan.level.hex()):
            raise RoundError(
                "a sum that is made again has the units that it had: members need other ones now",
                code="round.other-repeat",
            )
        if last:
            before = dict(zip(entry["members"], entry["keys"], strict=True))
            now = dict(zip(plan.members, plan.keys, strict=True))
            if not (now.items() < before.items()):
                raise RoundError(
                    "the set of a further attempt must lie strictly inside the last one, with its keys",
                    code="round.wrong-members",
                )

    def _planned(
        self, entry: dict[str, Any], round_no: int, purpose: str, attempt: int, members: list[int], keys: list[str]
    ) -> Plan:
        agreed = entry["length"], bytes.fromhex(entry["binding"]), tuple(members), tuple(keys)
        return Plan(self.group.id, self.group.quorum, round_no, purpose, attempt, *agreed)

    def _pairs(self, entry: dict[str, Any], plan: Plan) -> dict[int, bytes]:
        """A secret with every member of U, bound to ctx; the one with itself seals its own box."""
        known = (entry["secret"], plan.ctx)
        if known in self._derived:
            return self._derived[known]
        private, pairs = private_key(entry), {}
        own = plan.keys[plan.members.index(self.point)]
        for point, key in zip(plan.members, plan.keys, strict=True):
            if point == self.point:
                secret = bytes.fromhex(entry["secret"])
            else:
                pair = (entry["secret"], key)
                try:
                    lasting = self._identity.exchange_lasting(self.group.member(point).x25519)
                    if pair not in self._shared:
                        here = point in self.together
                        self._shared[pair] = _exchanged_once(private, own, key) if here else exchange(private, key)
                except MessageError:
                    raise MessageError(
                        f"{self.group.name(point)} sent an invalid public key (step 'secagg/ready')",
                        code="message.invalid-key",
                    ) from None
                # both the round's keys and the lasting ones: the first can be forgotten, the second say who
                secret = self._shared[pair] + lasting
            pairs[point] = derive_key(secret, "secagg pair", plan.ctx)
        self._derived = {known: pairs}
        return pairs

    def _forget(self) -> None:
        """What follows from keys that are gone."""
        self._shared.clear()
        self._derived.clear()

    @property
    def name(self) -> str:
        return self.group.name(self.point)


_TOGETHER: dict[frozenset[str], bytes] = {}
_MOST_TOGETHER = 1 << 19


def _exchanged_once(private: X25519PrivateKey, own: str, other: str) -> bytes:
    """The secret of two keys of a round, whose members are of a simulation and in one process: the second of them takes
    what the first one computed."""
    pair = frozenset((own, other))
    found = _TOGETHER.pop(pair, None)
    if found is None:
        if len(_TOGETHER) >= _MOST_TOGETHER:  # of members who were lost before they took theirs
            _TOGETHER.clear()
        found = _TOGETHER[pair] = exchange(private, other)
    return found
