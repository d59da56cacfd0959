"""Servers that tell members different things, or ask for a second sum of one round."""

from __future__ import annotations

import itertools
import os
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from quorumark import field
from quorumark.consortium.identity import Identity
from quorumark.errors import InputError, RecordError, RoundError
from quorumark.round.memory import MemoryState
from quorumark.round.secagg import messages
from quorumark.round.secagg.member import SecAggMember
from tests.kit.refusals import stopped
from tests.kit.secure_sums import (
    BINDING,
    LENGTH,
    OTHER,
    PEOPLE,
    Net,
    announcement,
    make_group,
    request,
    without_self_masks,
)

# --- a server that tells members different things ---------------------------------------------------------


def test_different_sets_for_different_members_open_nothing() -> None:
    net = Net(5, 2)
    net.announce()
    everyone, four = announcement(net, 1, range(1, 6)), announcement(net, 1, range(1, 5))
    uploads = {}
    for x, member in net.members.items():
        plan = member.plan(four if x == 1 else everyone)
        uploads[x] = member.upload(plan, field.random(LENGTH))
    with stopped("message.elsewhere", names="session"):
        net.members[2].unmask(request(1, uploads, 2))
    with stopped("message.elsewhere", names="session"):
        net.members[1].unmask(request(1, {x: uploads[x] for x in range(1, 5)}, 1))


def test_pairwise_masks_cancel_only_among_members_who_were_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    without_self_masks(monkeypatch)
    for size, alike in ((5, True), (4, False)):
        net = Net(5, 2)
        everyone = net.announce()
        total = np.zeros(LENGTH, np.uint64)
        for x, member in net.members.items():
            plan = member.plan(announcement(net, 1, range(1, size + 1)) if x == 1 else everyone)
            field.add(total, member.upload(plan, np.zeros(LENGTH, np.uint64)).vector, out=total)
        assert bool((total == 0).all()) == alike
        assert bool((total != 0).all()) != alike


def test_a_member_that_was_told_of_another_model_is_named() -> None:
    net = Net(5, 2)
    for x in net.members:
        ready = net.members[x].ready(1, OTHER if x == 3 else BINDING, LENGTH)
        if x == 3:
            with stopped("message.other-model"):
                net.server.take_ready(x, ready)
            net.server._readies[x] = ready, messages.read_ready(net.group, 1, "model", x, ready)[0]
        else:
            net.server.take_ready(x, ready)
    told = announcement(net, 1, net.members)
    for x in net.members:
        name = net.group.name(1 if x == 3 else 3)
        with stopped("round.told-otherwise", names=name):
            net.members[x].plan(told)
    with stopped("round.joined-otherwise"):
        net.members[3].ready(1, BINDING, LENGTH)


def test_forged_and_swapped_keys_are_refused() -> None:
    net = Net(4, 2)
    told = net.announce()
    mine = net.server._readies[2][0]
    forged = mine[:-72] + os.urandom(32) + mine[-40:]
    for bad in (forged, net.server._readies[3][0], mine[:-1], mine + b"x", b""):
        net.server._readies[2] = bad, ""
        with stopped("message.altered", "message.elsewhere", "message.malformed", names=net.group.name(2)):
            net.members[1].plan(announcement(net, 1, net.members))
    # keys of the same member from another round, and for another sum of this one
    for round_no, purpose in ((2, "model"), (1, "scale")):
        stranger = SecAggMember(PEOPLE[1], net.group, MemoryState(net.group))
        net.server._readies[2] = stranger.ready(round_no, BINDING, LENGTH, purpose), ""
        with stopped("message.elsewhere"):
            net.members[1].plan(announcement(net, 1, net.members))
    # a second key of this round, of a member without memory: everybody else takes it, the member itself does not
    net.server._readies[2] = (
        SecAggMember(PEOPLE[1], net.group, MemoryState(net.group)).ready(1, BINDING, LENGTH),
        "",
    )
    with stopped("round.wrong-key"):
        net.members[2].plan(announcement(net, 1, net.members))
    net.members[1].plan(told)


def test_a_key_that_no_secret_can_be_shared_with_is_refused_by_name() -> None:
    net = Net(4, 2)
    header = net.group.header("ready", net.group.session(1, "model"), 2)
    ready = PEOPLE[1].write(header, bytes(32) + BINDING + LENGTH.to_bytes(8, "big"))
    with stopped("message.invalid-key"):
        net.server.take_ready(2, ready)
    net.announce([1, 3, 4])
    net.server._readies[2] = ready, "00" * 32
    with stopped("message.invalid-key", names=net.group.name(2)):
        net.members[1].upload(net.members[1].plan(announcement(net, 1, net.members)), field.random(LENGTH))
    net.members[1].upload(net.members[1].plan(announcement(net, 1, [1, 3, 4])), field.random(LENGTH))


def test_a_set_of_colluders_and_one_victim_is_refused() -> None:
    net = Net(7, 3)
    net.announce()
    for size in range(1, net.group.least):
        with stopped("round.too-few", "round.not-in-set"):
            net.members[1].plan(announcement(net, 1, range(1, size + 1)))
    net.members[1].plan(announcement(net, 1, range(1, 6)))
    for who in ([1, 1, 2, 3, 4], [2, 1, 3, 4, 5]):
        about = {"round": 1, "purpose": "model", "attempt": 1, "members": who}
        told = messages.say("announcement", about, [net.server._readies[x][0] for x in who])
        with stopped("round.wrong-members"):
            net.members[1].plan(told)


def test_epochs_and_groups_do_not_mix() -> None:
    net = Net(4, 2)
    later = make_group(4, 2, context=b"epoch 1")
    with stopped("round.other-memory"):
        SecAggMember(PEOPLE[0], later, net.states[1])
    member = SecAggMember(PEOPLE[0], later, MemoryState(later))
    ready = member.ready(1, BINDING, LENGTH)
    told = net.announce()
    with stopped("message.elsewhere", names="consortium"):
        member.plan(told)
    net.server = net.serve(2)
    with stopped("message.elsewhere", names="consortium"):
        net.server.take_ready(1, ready)
    with pytest.raises(RecordError, match="not a member"):
        SecAggMember(Identity.generate("stranger"), later, MemoryState(later))


# --- attempts ---------------------------------------------------------------------------------------------


def test_an_attempt_is_opened_once() -> None:
    net = Net(4, 2)
    net.until_uploaded()
    asked = net.server.request(1)
    said = net.members[1].unmask(asked)
    for call in (
        lambda: net.members[1].ready(1, BINDING, LENGTH),
        lambda: net.members[1].plan(announcement(net, 1, net.members)),
        lambda: net.members[1].plan(announcement(net, 2, [1, 2, 3])),
        lambda: net.members[1].unmask(request(2, net.uploads[1], 1)),
    ):
        with stopped("round.answered-already"):
            call()
    # the same answer comes again, whatever is shown with the question, in another process and after other rounds
    other = Net(4, 2).until_uploaded()
    assert net.members[1].unmask(asked) == said
    assert net.member(1).unmask(request(1, other.uploads[1], 1)) == said
    net.members[1].ready(2, BINDING, LENGTH)
    assert net.members[1].unmask(asked) == said


def test_nothing_is_answered_for_an_attempt_before_the_last() -> None:
    net = Net(5, 2)
    told = net.announce()
    net.upload(told, [1, 2, 3, 4])
    fifth = net.members[5].upload(net.members[5].plan(told), field.random(LENGTH))  # kept back by the server
    net.upload(net.server.retry(), [1, 2, 3, 4])
    with stopped("round.wrong-attempt"):
        net.members[1].unmask(request(1, net.uploads[1] | {5: fifth}, 1))
    # the uploads of one attempt under the label of the other
    with stopped("message.elsewhere"):
        net.members[1].unmask(request(2, net.uploads[1], 1))
    # nor does one who did not upload at all
    late = Net(4, 2)
    late.announce()
    with stopped("round.not-uploaded"):
        late.members[1].unmask(request(1, net.uploads[1], 1))


def test_two_sums_of_one_round_are_never_opened() -> None:
    """t−1 colluders answer everything; the server asks some honest members for one attempt, the others for the next."""
    count, threshold = 5, 3
    colluders, honest = {1, 2}, {3, 4, 5}
    for asked in itertools.chain.from_iterable(itertools.combinations(sorted(honest), n) for n in range(4)):
        net = Net(count, threshold)
        net.until_uploaded()
        first = colluders | {x for x in asked if _answers(net, x, 1)}
        told, second = announcement(net, 2, range(1, 5)), set(colluders)
        uploads = {}
        for x in range(1, 5):
            try:
                uploads[x] = net.members[x].upload(net.members[x].plan(told), field.random(LENGTH))
            except RoundError:
                continue
        if len(uploads) == 4:
            net.uploads[2] = uploads
            second |= {x for x in honest & set(uploads) if _answers(net, x, 2)}
            first |= {x for x in honest if _answers(net, x, 1)}
        assert not (len(first) >= net.group.quorum and len(second) >= net.group.quorum)


def _answers(net: Net, point: int, attempt: int) -> bool:
    try:
        net.members[point].unmask(request(attempt, net.uploads[attempt], point))
    except RoundError:
        return False
    return True


def test_attempts_come_in_order_and_sets_shrink() -> None:
    net = Net(6, 2, attempts=2)
    net.announce()
    with stopped("round.wrong-attempt"):
        net.members[1].plan(announcement(net, 2, range(1, 6)))
    first = announcement(net, 1, range(1, 6))
    plan = net.members[1].plan(first)
    net.members[1].upload(plan, field.random(LENGTH))
    for attempt, who, why in (
        (1, range(1, 6), "round.wrong-attempt"),
        (1, range(1, 5), "round.wrong-attempt"),  # a retry relabelled as a first attempt
        (3, range(1, 5), "round.wrong-attempt"),
        (2, range(1, 6), "round.wrong-members"),
        (2, [1, 2, 3, 4, 6], "round.wrong-members"),
    ):
        with stopped(why):
            net.members[1].plan(announcement(net, attempt, who))
    with stopped("round.wrong-attempt"):
        net.members[1].upload(plan, field.random(LENGTH))
    # the same set but for one key
    good = net.server._readies[2]
    other = SecAggMember(PEOPLE[1], net.group, MemoryState(net.group)).ready(1, BINDING, LENGTH)
    net.server._readies[2] = other, ""
    with stopped("round.wrong-members"):
        net.members[1].plan(announcement(net, 2, range(1, 5)))
    net.server._readies[2] = good
    net.members[1].upload(net.members[1].plan(announcement(net, 2, range(1, 6 - 1))), field.random(LENGTH))
    with stopped("round.no-more-attempts"):
        net.members[1].plan(announcement(net, 3, [1, 2, 3, 4]))


def test_one_attempt_takes_one_vector() -> None:
    net = Net(4, 2)
    told = net.announce()
    one, two = net.members[1].plan(told), net.members[1].plan(announcement(net, 1, [1, 2, 3]))
    net.members[1].upload(one, field.random(LENGTH))
    for plan in (one, two):
        untouched = np.arange(LENGTH, dtype=np.uint64)
        with stopped("round.wrong-attempt"):
            net.members[1].upload(plan, untouched)
        assert (untouched == np.arange(LENGTH)).all()


def test_everything_that_members_must_agree_on_is_in_ctx() -> None:
    net = Net(4, 2)
    plan = net.members[1].plan(net.announce())
    changes: list[dict[str, Any]] = [
        {"group": bytes(32)},
        {"quorum": 2},
        {"round": 2},
        {"purpose": "scale"},
        {"attempt": 2},
        {"length": LENGTH + 1},
        {"binding": OTHER},
        {"members": (1, 2, 3, 5)},
        {"keys": (*plan.keys[:3], "11" * 32)},
        {"level": b"\1"},
    ]
    others = {"levels"}  # of which `level` is the widest: a member reads them in what all of the set have signed
    assert {name for change in changes for name in change} == {f.name for f in fields(plan)} - others
    assert len({replace(plan, **change).ctx for change in [{}, *changes]}) == 1 + len(changes)
    for change in changes[:3] + changes[5:7]:
        with pytest.raises((RoundError, InputError)):
            net.members[1].upload(replace(plan, **change), field.random(LENGTH))


def test_a_round_is_not_replayed() -> None:
    net = Net(4, 2)
    old = net.announce()
    net.upload(old, net.members)
    asked = net.server.request(1)
    net.members[1].ready(2, BINDING, LENGTH)
    for call in (
        lambda: net.members[1].plan(old),
        lambda: net.members[1].unmask(asked),
        lambda: net.members[1].ready(1, BINDING, LENGTH),
        lambda: net.members[1].ready(1, BINDING, LENGTH, "scale"),
        lambda: net.members[1].upload(net.server.plan, field.random(LENGTH)),
    ):
        with stopped("round.over"):
            call()
    # old uploads under the new round's number
    with stopped("round.not-uploaded"):
        net.members[1].unmask(request(1, net.uploads[1], 1, round_no=2))
    with stopped("round.not-joined"):
        net.members[1].plan(announcement(net, 1, net.members, round_no=3))
    net.members[1].close()
    with stopped("round.over"):
        net.members[1].ready(2, BINDING, LENGTH, "scale")


def test_an_answer_needs_an_upload_of_everybody() -> None:
    net = Net(5, 2)
    net.until_uploaded()
    uploads = net.uploads[1]
    without = {x: u for x, u in uploads.items() if x != 4}
    with stopped("message.incomplete", kind=RoundError):
        net.members[1].unmask(request(1, without, 1))
    twice = without | {4: uploads[3]}
    with stopped("message.elsewhere", names=net.group.name(4)):
        net.members[1].unmask(request(1, twice, 1))
    # somebody else's box, a flipped one, none
    head, parts = messages.hear("request", request(1, uploads, 1))
    other = messages.hear("request", request(1, uploads, 2))[1]
    about = {name: head[name] for name in ("round", "purpose", "attempt")}
    for box in (other[7], parts[5], bytes([parts[7][0] ^ 1]) + parts[7][1:], b""):
        with stopped("message.cannot-open", names=net.group.name(4)):
            net.members[1].unmask(messages.say("request", about, [*parts[:7], box, *parts[8:]]))
    net.members[1].unmask(request(1, uploads, 1))  # none of which used up its answer
