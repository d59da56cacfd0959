"""An agent's part in the life of shares: refresh, other members or terms, recovery. Each waits for a person.

What is called for (`calls`) is checked here and shown; once the member agreed, the agent does the steps with the same
code that works over a folder, and `carrying` brings its messages to the room and back. A policy agrees to nothing but
calls that it names by their digests.

A member who is new has no manifest yet. It takes the chain from the room, up to the digest in the call, which the
person compares by phone: a room that swaps it can only invent a consortium of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from quorumark.consortium.home import ConsortiumFolder
from quorumark.consortium.identity import open_message
from quorumark.consortium.records import Manifest, Member, Terms
from quorumark.consortium.succession import check_terms_follow
from quorumark.errors import (
    BusyError,
    CeremonyError,
    KeystoreError,
    MessageError,
    QuorumarkError,
    RecordError,
    RoomError,
    SignatureError,
)
from quorumark.files import write_exchanged
from quorumark.room.calls import Call, call_header, read_call
from quorumark.room.carrying import Carrier
from quorumark.room.client import Client, Notice
from quorumark.room.desk import Matter
from quorumark.room.founding import fetch_agreed, flat
from quorumark.room.manifests import fetch_chain, publish_chain
from quorumark.room.numbering import sender_of
from quorumark.room.seat import Seat
from quorumark.setup import amend, exchange, recover
from quorumark.setup.chain import show_chain
from quorumark.setup.reshare import ReshareMember
from quorumark.setup.waiting import Progress
from quorumark.verify.public import keep_agreed

__all__ = ["Changing"]

_LARGEST_WORD = 1 << 13
_LARGEST_TERMS = 1 << 22
_CALLED = re.compile("call/([0-9a-f]{64})/call.msg")
_SMALL = 1 << 13


@dataclass(frozen=True)
class _Called:
    """A call that this agent has checked. `ours` is None for a member who is new: `chain` is what the room has."""

    call: Call
    caller: Member
    terms: Terms  # after it
    chain: list[Manifest]  # up to the manifest in the call
    ours: ConsortiumFolder | None

    @property
    def before(self) -> Manifest:
        return self.chain[-1]

    @property
    def new_shares(self) -> bool:
        return self.call.kind in ("refresh", "reshare")

    @property
    def title(self) -> str:
        if self.call.kind == "recover":
            return f"Help {self.caller.name} to get its share back"
        if self.call.kind == "refresh":
            return f"Make new shares for all members of {self.terms.name!r}"
        what = "Make new shares under other terms" if self.new_shares else "Sign other terms"
        return f"{what} of {self.terms.name!r}"


class Changing:
    """One member's ceremonies after the founding."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._called: dict[str, _Called] = {}
        self._carriers: dict[str, Carrier] = {}
        self._refused: dict[tuple[str, str, str], frozenset[str]] = {}
        self._passed: set[str] = set()  # calls in which this member has no part

    def step(self, client: Client) -> None:
        """Does what can be done now."""
        for notice in self._seat.mirror.named("call/", "/call.msg"):
            found = _CALLED.fullmatch(notice.name)
            if found is None or found[1] in self._passed:
                continue
            about = found[1]
            if about not in self._called:
                self._look(client, about, notice)
            if about in self._called:
                self._go_on(client, about, self._called[about])

    def sent_again(self) -> None:
        for carrier in self._carriers.values():
            carrier.sent_again()

    # --- what is called for ---

    def _look(self, client: Client, about: str, word: Notice) -> None:
        there = frozenset(one.sha256 for one in self._seat.mirror.named(f"call/{about}/", ""))
        if self._refused.get((about, word.author, word.sha256)) == there:
            return
        try:
            called = self._check(client, about, word)
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            self._refused[about, word.author, word.sha256] = there
            code = error.code if error.code.startswith("room.") else "room.other-call"
            self._seat.desk.put(Matter("call", about, f"Call {about[:12]}…", (), "refused", str(error), code))
            return
        if called is None:
            self._passed.add(about)
            return
        self._called[about] = called
        own = called.call.kind == "recover" and called.caller.ed25519 == self._seat.key
        title = "Get your share back" if own else called.title
        self._seat.desk.put(Matter("call", about, title, _facts(called)))
        self._seat.desk.move(about, "working" if own else "waiting")

    def _check(self, client: Client, about: str, word: Notice) -> _Called | None:
        """1. The call has the digest in its name. None: this member has no part in it."""
        call = read_call(client.small(word, _LARGEST_WORD))
        if call.digest() != about or call.caller != word.author:
            raise RoomError("the room's call is not what its name says, or another member's", code="room.other-call")
        # 2. It is about the manifest in force here; a member who is new has the chain from the room.
        ours = self._seat.home.consortium_of(call.manifest)
        ours = ours if ours is not None and ours.manifest_path.exists() else None
        terms = None
        if call.terms:
            there = self._seat.there(word.author, f"call/{about}/terms.json")
            terms = Terms.from_bytes(client.small(there, _LARGEST_TERMS))
            if terms.digest().hex() != call.terms:
                raise RoomError("the room's terms are not those of the call", code="room.other-call")
            if self._seat.key not in {member.ed25519 for member in terms.roster}:
                return None
        if ours is None and terms is None:
            return None
        if ours is not None:
            chain = ours.chain()
            at = [link.digest().hex() for link in chain].index(call.manifest)
            if at < len(chain) - 1 and self._seat.desk.said(about)[0] != "yes":
                return None  # over, and this member had no part in it
            chain = chain[: at + 1]
        else:
            chain = fetch_chain(client, lambda name: self._seat.mirror.named(name, name), call.manifest)
        before = chain[-1].terms
        # 3. A member calls, in words that it signed.
        caller = before.member(before.point_of(word.author))
        open_message(client.small(word, _LARGEST_WORD), before, call_header(call, caller.point))
        called = _Called(call, caller, terms or before, chain, ours)
        # 4. New terms follow those in force, and have this member's own card.
        if terms is not None:
            self._check_terms(called)
        if call.kind == "recover":
            point = before.point_of(self._seat.key)
            if point not in call.helpers and point != caller.point:
                return None
            self._keep_request(client, called)
        return called

    def _check_terms(self, called: _Called) -> None:
        terms, identity = called.terms, self._seat.identity
        own = terms.member(terms.point_of(identity.ed25519))
        if (own.x25519, own.name) != (identity.x25519, identity.name):
            raise RoomError("the new terms have another card of this member: refused", code="room.other-call")
        if terms.anchor != called.before.terms.anchor:
            raise RoomError("another anchor does not go through a room: use consortium sign", code="room.other-call")
        check_terms_follow(terms, called.before.terms)
        if not called.new_shares:
            amend.successor(called.before, terms)  # refuses a change that takes new shares

    def _keep_request(self, client: Client, called: _Called) -> None:
        """The request is the one that the call names."""
        notice = self._seat.there(called.caller.ed25519, f"call/{called.call.digest()}/request.msg")
        if notice.sha256 != called.call.request:
            raise RoomError("the room's request is not that of the call", code="room.other-call")
        data = client.small(notice, _SMALL)
        if recover.read_asked(data, called.before) != (called.caller.point, called.call.helpers):
            raise RoomError(
                "the request is another member's, or asks others than the call says", code="room.other-call"
            )
        path = self._seat.place.folder("exchange", called.call.digest()) / "request.msg"
        if not path.exists():
            write_exchanged(path, data)

    # --- what follows ---

    def _go_on(self, client: Client, about: str, called: _Called) -> None:
        desk, matter = self._seat.desk, self._seat.desk.find(about)
        if matter is None or matter.state in ("done", "refused", "declined"):
            return
        own = called.call.kind == "recover" and called.caller.ed25519 == self._seat.key
        if not self._seat.share.is_here:
            desk.move(about, "refused", _AT_THE_SIGNER, "room.signer")
            return
        said, by = desk.said(about)
        if by == "policy" and not self._seat.policy.agrees(about):
            desk.withdraw(about)
            desk.move(about, "waiting")
            return
        if not said and not own and self._seat.policy.agrees(about):
            desk.decide(about, matter.shown, "yes", "policy")
            said = "yes"
        if said == "no":
            desk.move(about, "declined", "you declined")
        if said != "yes" and not own:
            return
        carrier = self._carrier(about, called)
        if self._is_over(called, carrier):
            desk.move(about, "done", "another manifest came into force since: this call is over")
            return
        try:
            self._prepare(client, called, carrier)
            progress = carrier.visit(self._act(called, carrier))
            if progress is not None and not progress.finished:
                desk.move(about, "working", f"waiting for {', '.join(progress.waiting)} ({progress.step})")
        except BusyError as error:
            desk.move(about, "working", str(error))
        except (MessageError, SignatureError) as error:
            carrier.stuck()
            desk.move(about, "working", str(error), error.code)
        except (CeremonyError, RoomError, RecordError, KeystoreError) as error:
            if error.code == "room.unreachable":
                raise
            if error.code == "ceremony.under-way":
                desk.move(about, "working", f"another ceremony comes first: {error}", error.code)
            else:
                desk.move(about, "refused", str(error), error.code or "room.other-call")
            return
        finally:
            carrier.send(client)
        self._finish(client, about, called, carrier)

    def _carrier(self, about: str, called: _Called) -> Carrier:
        if about not in self._carriers:
            terms = called.terms if called.call.kind != "recover" else called.before.terms
            folder = self._seat.place.folder("exchange", about)
            point = terms.point_of(self._seat.key)
            self._carriers[about] = Carrier(self._seat, f"call/{about}/", folder, point)
        return self._carriers[about]

    def _is_over(self, called: _Called, carrier: Carrier) -> bool:
        """Whether the manifest in force came from something else: a ceremony must not begin anew in an old folder."""
        if called.ours is None:
            return False
        now = called.ours.manifest()
        if now.digest() == called.before.digest():
            return False
        here = now.predecessor == called.call.manifest and called.call.kind != "recover"
        if called.new_shares:  # this member signed the successor in this ceremony
            step = f"{ReshareMember.STEPS.index('sign') + 1}-sign"
            return not (here and (carrier.folder / step / f"{called.terms.point_of(self._seat.key)}.msg").exists())
        return not (here and now.terms.digest() == called.terms.digest())

    def _prepare(self, client: Client, called: _Called, carrier: Carrier) -> None:
        ours = called.ours
        started = ours is not None and ours.manifest().digest() != called.before.digest()
        if not started:
            carrier.check_not_set_back(client)
        if ours is None:
            show_chain(called.chain, carrier.folder)
        carrier.fetch(client, self._expected(called))

    def _expected(self, called: _Called) -> dict[str, tuple[Member, int]]:
        """The messages of others that this member takes: their senders, and the most bytes of each."""
        terms, before = called.terms, called.before
        if called.call.kind == "recover":
            most = recover.largest_answer(before)
            names = {f"hello-{x}.msg": _SMALL for x in called.call.helpers}
            names |= {f"answer-{x}.msg": most for x in called.call.helpers}
        elif called.new_shares:
            names = exchange.expected_in_resharing(terms, before, terms.point_of(self._seat.key))
        else:
            names = {f"signature-{member.point}.hex": _SMALL for member in terms.roster}
        return {
            name: (sender, most)
            for name, most in names.items()
            if (sender := terms.member(sender_of(name))).ed25519 != self._seat.key
        }

    def _act(self, called: _Called, carrier: Carrier) -> Callable[[], Progress]:
        """A visit to the ceremony's folder."""
        home, unlock, folder = self._seat.home, self._seat.unlock, carrier.folder
        ours, pinned = called.ours, None if called.ours is not None else called.call.manifest
        if called.call.kind == "recover" and ours is not None:
            if called.caller.ed25519 == self._seat.key:
                return lambda: recover.finish(home, ours, unlock, folder)
            return lambda: recover.help_recover(home, ours, unlock, folder)
        if called.new_shares:
            terms = called.terms if called.call.terms else None
            return lambda: exchange.reshare(home, unlock, folder, terms, ours, pinned)
        return lambda: amend.sign(home, unlock, called.terms, folder, ours, pinned)

    def _finish(self, client: Client, about: str, called: _Called, carrier: Carrier) -> None:
        progress = carrier.progress
        if progress is None or not progress.finished:
            return
        if called.call.kind == "recover":
            own = called.caller.ed25519 == self._seat.key
            text = "your share is back" if own else f"{called.caller.name} can now read its own share, and nothing else"
            self._seat.desk.move(about, "done", text)
            return
        ours = self._seat.home.consortium(called.chain[0].terms)
        if called.ours is None:
            self._keep_files(client, ours)
        publish_chain(client, self._seat, ours)
        self._remove_leavers(client, called)
        terms = called.terms
        text = f"any {terms.threshold} of {terms.members} can prove ownership"
        if called.new_shares:
            text = f"new shares are in force, and your old one is erased; {text}"
        self._seat.desk.move(about, "done", text)

    def _keep_files(self, client: Client, ours: ConsortiumFolder) -> None:
        """Layout, anchor and groups for a member who is new, each as the terms name it."""
        manifest = ours.manifest()
        first = manifest.genesis.terms
        folder = self._seat.place.folder("proposals", first)
        fetch_agreed(
            client, manifest.terms, folder, lambda name: self._seat.mirror.named(f"proposal/{first}/{name}", name)
        )
        keep_agreed(ours, folder)

    def _remove_leavers(self, client: Client, called: _Called) -> None:
        """Whose keys no longer count has no place in the room either. Only the founder can do that, by its agent."""
        gone = {m.ed25519 for m in called.before.terms.roster} - {m.ed25519 for m in called.terms.roster}
        about = client.about() if gone else {}
        if about.get("founder") != self._seat.key:
            return
        for person in about.get("people", ()):
            if isinstance(person, dict) and person.get("key") in gone and person.get("active") is True:
                named = [m.name for m in called.before.terms.roster if m.ed25519 == person.get("key")]
                client.post("remove", name=named[0])


_AT_THE_SIGNER = (
    "this member's share is with its signer: refresh, reshare, amend and recover there, with the commands over a folder"
)


def _differences(terms: Terms, before: Terms) -> list[tuple[str, str]]:
    """Every field that differs, the keys of new members among them: whatever `changes` has no words for."""
    now, then = dict(flat("terms", terms.as_dict())), dict(flat("terms", before.as_dict()))
    return [
        (path, f"{then.get(path, 'not there')} → {now.get(path, 'not there')}")
        for path in sorted(now.keys() | then.keys())
        if now.get(path) != then.get(path)
    ]


def _facts(called: _Called) -> tuple[tuple[str, str], ...]:
    """What a person must see before it agrees; all of it was computed or checked here."""
    call, terms, before = called.call, called.terms, called.before
    facts = [("who calls", called.caller.name), ("why", call.purpose)]
    if call.kind == "recover":
        helpers = ", ".join(before.terms.member(x).name for x in call.helpers)
        facts += [
            ("what", f"{called.caller.name} lost its share; its helpers give it back, and do not learn it: {helpers}"),
            ("be sure", f"that it is really {called.caller.name} who asks: call by phone"),
        ]
    elif call.kind == "refresh":
        facts += [("what", "new shares of the same key for the same members; old ones count no longer, and are erased")]
    else:
        what = "new shares of the same key; old ones count no longer" if called.new_shares else "the shares stay"
        facts += [("what", f"other terms; {what}")]
        facts += [(f"change {number}", text) for number, text in enumerate(amend.changes(terms, before.terms), 1)]
        facts += _differences(terms, before.terms)
        facts += [("members then", ", ".join(f"{m.name} ({m.examples:,} examples)" for m in terms.roster))]
        facts += [("the new terms' digest", terms.digest().hex())]
    if called.ours is None:
        facts += [("you are new", "compare the manifest's digest by phone with several members: it says whom you join")]
    then = terms if call.kind != "recover" else before.terms
    facts += [
        ("it takes then", f"{then.threshold} of {then.members} to prove ownership"),
        ("epoch now", str(before.epoch)),
        ("manifest in force", call.manifest),
        ("call", call.digest()),
    ]
    return tuple(facts)
