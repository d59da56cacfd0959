"""Links: which state came after which, where cohorts are drawn and sums are checked (docs/secagg.md, "Links").

A member that is drawn was mostly not among those who summed the last round, and cannot check that sum. It follows
*links*: statements of the cohort of a state about the one that came after it.

    summed     I answered in a round from this state, and have checked that this is what its sum leads to
    seconded   I was drawn there, I am shown t such statements, and I sign no other successor of this state

T of the cohort make a link, of which t at least have checked. One of those t is honest, so the sum is a true one; and
any two sets of T have an honest member in common, who signs one successor of each state: there is one chain, whoever
of the t − 1 helps the server. Members that were drawn but had no part in the round may second it, so that a member that
is lost after the sum was opened stops nobody.

A member keeps the last state that it *reached* along links, and takes part from that one alone. What it is shown is a
chain from there: each link begins where the one before it ended, and was made under the same manifest or a later one.
The manifest of the last one is kept, too, so that a chain that is shown in parts is as one that is shown at once. The
last link names all that is known at the present state (`History.whole`), not the model alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quorumark.canonical import canonical
from quorumark.checks import is_count, is_hex
from quorumark.consortium.records import Manifest
from quorumark.errors import MessageError, RoundError
from quorumark.round import statements
from quorumark.round.group import DRAWS, Group, group_of, word
from quorumark.round.history import History
from quorumark.round.memory import Memory, State, follow, is_newer
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.statements import Said

__all__ = [
    "Link",
    "check_reached",
    "check_summed",
    "check_way",
    "has_signed",
    "leads",
    "reach",
    "reached",
    "read_links",
    "second",
    "sign_summed",
    "signed_into",
    "start_here",
    "take_part_under",
    "write_links",
]


@dataclass(frozen=True)
class Link:
    """One state, and the one after it: `before` and `after` are states, `whole` all that is known at the later one,
    `under` the digest of the manifest and `draw` the draw of the cohort that summed it. `summed` and `seconded`: what
    its members signed, by point."""

    before: bytes
    under: str
    draw: int
    after: bytes
    whole: bytes
    summed: Said = field(default_factory=dict)
    seconded: Said = field(default_factory=dict)

    @property
    def about(self) -> bytes:
        """What the statements are about, besides the state before."""
        return word(self.draw) + self.after + self.whole

    @property
    def named(self) -> tuple[bytes, str, bytes]:
        """What it says, whoever signed it."""
        return self.before, self.under, self.about

    def checked_by(self, group: Group) -> tuple[int, ...]:
        return statements.signers(group, "summed", self.before, self.about, self.summed, self.draw)

    def signed_by(self, group: Group) -> tuple[int, ...]:
        seconds = statements.signers(group, "seconded", self.before, self.about, self.seconded, self.draw)
        return tuple(sorted({*self.checked_by(group), *seconds}))

    def is_whole(self, group: Group) -> bool:
        """Whether T of the cohort signed it, of which t have checked."""
        enough = len(self.checked_by(group)) >= group.threshold and len(self.signed_by(group)) >= group.quorum
        return self.draw < group.draws and enough

    def right(self, group: Group) -> Link:
        """Without what is not signed as it must be."""
        summed, signed = self.checked_by(group), self.signed_by(group)
        return replace(
            self,
            summed={x: self.summed[x] for x in summed},
            seconded={x: self.seconded[x] for x in signed if x not in summed},
        )

    def joined(self, other: Link) -> Link:
        """With what was signed in another copy."""
        return replace(self, summed={**other.summed, **self.summed}, seconded={**other.seconded, **self.seconded})

    def with_right(self, other: Link, group: Group) -> Link:
        """With what another copy has more of, if it is signed as it must be: a wrong signature keeps no right one out.
        This copy must be right itself."""
        summed = {x: message for x, message in other.summed.items() if x not in self.summed}
        seconded = {x: message for x, message in other.seconded.items() if x not in (*self.summed, *self.seconded)}
        return self.joined(replace(other, summed=summed, seconded=seconded).right(group))

    def as_dict(self) -> dict[str, Any]:
        said = statements.plain({name: getattr(self, name) for name in _SAID})
        states = {name: getattr(self, name).hex() for name in _STATES}
        return {**states, "under": self.under, "draw": self.draw, **said}

    @property
    def asked(self) -> dict[str, Any]:
        """What members are asked about it before anybody signed it, in the names of a server's message."""
        states = {name: getattr(self, name).hex() for name in _STATES}
        return {**states, "of-manifest": self.under, "of-draw": self.draw}

    @classmethod
    def told(cls, config: Mapping[str, Any]) -> Link:
        """The same, read from such a message."""
        body = {name: config.get(name) for name in _STATES}
        under, draw = config.get("of-manifest"), config.get("of-draw")
        return cls.of({**body, "under": under, "draw": draw, "summed": {}, "seconded": {}})

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Link:
        """From another machine: everything may be in it."""
        try:
            if sorted(body) != sorted((*_STATES, *_SAID, "under", "draw")):
                raise ValueError
            if not all(is_hex(body[name], 32) for name in (*_STATES, "under")):
                raise ValueError
            if not is_count(body["draw"]) or body["draw"] >= DRAWS:
                raise ValueError
            before, after, whole = (bytes.fromhex(body[name]) for name in _STATES)
            said = statements.from_plain({name: body[name] for name in _SAID}, str)
            return cls(before, body["under"], body["draw"], after, whole, said["summed"], said["seconded"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise MessageError("a link between two states cannot be read", code="message.malformed") from None


_STATES, _SAID = ("before", "after", "whole"), ("summed", "seconded")


def read_links(content: object) -> list[Link]:
    """A chain, as it travels: a list of links in JSON, as text or bytes. Everything may be in it."""
    try:
        body = json.loads(content if isinstance(content, str | bytes) else b"")
    except (ValueError, RecursionError):  # also text with half a letter
        body = None
    if not isinstance(body, list) or not all(isinstance(entry, dict) for entry in body):
        raise MessageError("a chain of links must be a list in JSON", code="message.malformed")
    return [Link.of(entry) for entry in body]


def write_links(links: Iterable[Link]) -> bytes:
    return canonical([link.as_dict() for link in links])


# --- what a member signs ----------------------------------------------------------------------------------


def check_summed(member: SecAggMember, link: Link) -> None:
    """Whether a member may sign what came after a state: it answered there, and has signed nothing else."""
    with member.state.edit() as memory:
        _check_summed(memory, member, link)


def _check_summed(memory: Memory, member: SecAggMember, link: Link) -> None:
    given = memory["answered"].get(link.before.hex(), {}).get("model", [])
    if not any((group, draw) == (member.group.id.hex(), link.draw) for _, group, draw in given):
        raise RoundError(
            f"{member.name} has not answered in a round from this model, and cannot say what came after it",
            code="round.not-uploaded",
        )
    _check_once(memory, member, link)


def sign_summed(member: SecAggMember, link: Link) -> bytes:
    """This member has checked what came after a state. The caller has seen to that, and has written the model down: if
    so many members sign that the others follow, at least those can go on from it."""
    with member.state.edit() as memory:
        _check_summed(memory, member, link)
        _note_signed(memory, member, link)
    return member.sign("summed", link.before, link.about)


def has_signed(member: SecAggMember, link: Link) -> bool:
    with member.state.edit() as memory:
        return bool(memory["signed"].get(link.before.hex()) == _entry(member, link))


def signed_into(state: State, after: bytes, manifests: Sequence[Manifest]) -> Link | None:
    """What this member signed about how a state came to be, without its signature."""
    groups = {group_of(manifest).id.hex(): manifest.digest().hex() for manifest in manifests}
    with state.edit() as memory:
        for before, (group, draw, successor, whole) in memory["signed"].items():
            if successor == after.hex() and group in groups:
                return Link(bytes.fromhex(before), groups[group], draw, after, bytes.fromhex(whole))
    return None


def second(member: SecAggMember, link: Link, manifests: Sequence[Manifest]) -> bytes:
    """This member has not checked it, but signs no other successor of the state before. `manifests`: all up to the one
    in force. Under one that is earlier than its last link's it signs nothing new: who was a member then may have left,
    and the cohort that summed there has signed long ago."""
    if member.point not in member.group.cohort(link.before, link.draw) or link.draw >= member.group.draws:
        raise RoundError(f"{member.name} is not drawn there", code="round.not-drawn")
    found = link.checked_by(member.group)
    if len(found) < member.group.threshold:
        raise RoundError(
            f"{member.group.threshold} members must have checked what came after a model, and {len(found)} did",
            code="round.not-linked",
        )
    with member.state.edit() as memory:
        if not is_newer(memory, link.before):
            raise RoundError(
                f"the memory of {member.name} was made anew: it does not know what it signed before",
                code="round.memory-anew",
            )
        _check_once(memory, member, link)
        order = [manifest.digest().hex() for manifest in manifests]
        if memory["signed"].get(link.before.hex()) is None and link.under in order[: _first(memory, order)]:
            raise RoundError(
                f"{member.name} has followed links under a later manifest than this one's", code="round.manifest-left"
            )
        _note_signed(memory, member, link)
    return member.sign("seconded", link.before, link.about)


def _check_once(memory: Memory, member: SecAggMember, link: Link) -> None:
    """One successor of each state, under one draw, for ever; none under a draw that it has closed.

    One draw: of a member that had signed under two, `never` would have to know both. A sum is opened under one draw, so
    the same successor under another one is a server's invention."""
    if [member.group.id.hex(), link.before.hex(), link.draw] in memory["closed"]:
        raise RoundError(
            f"{member.name} has said that nothing is summed from this model under this draw of the cohort",
            code="round.said-never",
        )
    known = memory["signed"].get(link.before.hex())
    if known is not None and known != _entry(member, link) and not memory["simulation"]:
        raise RoundError(
            f"{member.name} has signed that another model came after this one, or this one by another cohort's sum: "
            "a server shows members different sums, or a member helps it. Find out who it was, and let the operators "
            "decide",
            code="round.other-successor",
        )


def _note_signed(memory: Memory, member: SecAggMember, link: Link) -> None:
    """Under this group and draw the member must never say that it answers nothing (`SecAggMember.never`). In the edit
    in which it was checked: of two messages at the same moment the second must see what the first one signed."""
    if memory["simulation"] or link.before.hex() not in memory["signed"]:
        memory["signed"][link.before.hex()] = _entry(member, link)


def _entry(member: SecAggMember, link: Link) -> list[Any]:
    return [member.group.id.hex(), link.draw, link.after.hex(), link.whole.hex()]


# --- what a member follows --------------------------------------------------------------------------------


def reached(state: State) -> bytes:
    """The last state that a member reached along links; nothing if it has none."""
    with state.edit() as memory:
        return bytes.fromhex(memory["reached"].get("state", ""))


def leads(state: State, history: History, links: Sequence[Link]) -> bool:
    """Whether links begin where this member may start from, or it is there: otherwise it must be shown others."""
    with state.edit() as memory:
        if _is_here(memory, history) or history.is_begun:
            return True
        return bool(links) and links[0].before in _starts(memory, history)


def reach(state: State, history: History, links: Sequence[Link]) -> None:
    """Goes on to the present state, if links lead there from the last one that this member reached.

    It may start from the initial model if it has reached nothing yet, in a simulation, if the terms name another
    initial model now, or by its operator's consent to another run; elsewhere only where it is. A statement that this
    member is newer than others' nonces follows from the second alone: a chain from the initial model may end before
    the last state that this member was at.
    """
    with state.edit() as memory:
        if _is_here(memory, history):
            return
        _check_way(memory, history, links)
        if not history.is_begun and links[0].before.hex() == memory["reached"].get("state", ""):
            follow(memory, links[0].before, history.state)
        _note(memory, history, "" if history.is_begun else links[-1].under)


def check_way(state: State, history: History, links: Sequence[Link]) -> None:
    """Whether links lead to the present state, without going there."""
    with state.edit() as memory:
        if not _is_here(memory, history):
            _check_way(memory, history, links)


def _check_way(memory: Memory, history: History, links: Sequence[Link]) -> None:
    starts = _starts(memory, history)
    if not history.is_begun:
        _walk(memory, starts, history, links)
    elif history.begun not in starts:
        raise RoundError(
            "this member has gone on from the initial model: let the run go on from the last one; a second run "
            "takes the consent of every member's operator (quorumark member consent)",
            code="round.gone-on",
        )


def check_reached(memory: Memory, history: History) -> None:
    """Before a member takes part from a state."""
    if not _is_here(memory, history):
        raise RoundError(
            "this member has been shown no links from the last model that it knows to this one", code="round.not-linked"
        )


def start_here(state: State, history: History) -> None:
    """For a simulation that is taken up again, whose members' memories began anew with it."""
    with state.edit() as memory:
        _note(memory, history)


def _is_here(memory: Memory, history: History) -> bool:
    """The state alone does not name all that the next round depends on."""
    known = memory["reached"]
    return (known.get("state"), known.get("whole")) == (history.state.hex(), history.whole.hex())


def take_part_under(memory: Memory, manifest: Manifest) -> None:
    """It takes part from the state that it reached, and has seen that nothing is opened there under earlier manifests:
    so no link leads on from there under one of those."""
    memory["reached"]["under"] = manifest.digest().hex()


def _note(memory: Memory, history: History, under: str = "") -> None:
    here = {"state": history.state.hex(), "whole": history.whole.hex()}
    memory["reached"] = {**here, "begun": history.begun.hex(), "under": under}


def _first(memory: Memory, order: Sequence[str]) -> int:
    """The place of the first manifest under which a link may be made that goes on from where this member is. All are
    unknown if its own is."""
    under = memory["reached"].get("under", "")
    if not under:
        return 0
    return order.index(under) if under in order else len(order)


def _starts(memory: Memory, history: History) -> set[bytes]:
    known, begun = memory["reached"], history.begun
    anew = not known or memory["simulation"] or known["begun"] != begun.hex() or memory["consents"].get(begun.hex())
    return ({bytes.fromhex(known["state"])} if known else set()) | ({begun} if anew else set())


def _walk(memory: Memory, starts: Collection[bytes], history: History, links: Sequence[Link]) -> None:
    """From one of these states to the present one."""
    manifests = {manifest.digest().hex(): manifest for manifest in (*history.earlier, history.manifest)}
    order, place = list(manifests), None
    goes_on = bool(links) and links[0].before.hex() == memory["reached"].get("state", "")
    at = _first(memory, order) if goes_on else 0  # a chain that begins anew begins with any manifest
    for number, link in enumerate(links, 1):
        if link.before not in (starts if place is None else (place,)):
            raise _broken(number, len(links), "does not begin where the one before it ended")
        if link.under not in order[at:]:
            raise _broken(number, len(links), "was made under a manifest that is unknown here, or earlier than others")
        if not link.is_whole(group_of(manifests[link.under])):
            raise _broken(number, len(links), "is not signed by enough members of its cohort")
        place, at = link.after, order.index(link.under)
    if place != history.state or links[-1].whole != history.whole:
        raise RoundError(
            "the links that the server shows end at another state than the one that the round starts from",
            code="round.not-linked",
        )


def _broken(number: int, count: int, why: str) -> RoundError:
    return RoundError(
        f"link {number} of {count} from the last model that this member knows {why}", code="round.not-linked"
    )
