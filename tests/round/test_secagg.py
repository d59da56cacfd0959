"""Secure aggregation: the sum is exact, one upload is noise, and everything else that a server might try is refused."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from quorumark import field, shamir
from quorumark.consortium.home import _KEPT
from quorumark.consortium.identity import Identity, exchange
from quorumark.consortium.records import Genesis, Manifest
from quorumark.errors import InputError, KeystoreError, MessageError, RecordError, RoundError, SignatureError
from quorumark.field import P, Stream, Vector
from quorumark.round.group import Group
from quorumark.round.memory import FolderState, MemoryState
from quorumark.round.secagg import masks, messages
from quorumark.round.secagg import member as member_side
from quorumark.round.secagg import server as server_side
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.secagg.messages import Plan, Upload
from quorumark.round.secagg.server import SecAggServer
from tests.kit.ceremony import identities, make_terms
from tests.kit.secrecy import ALARM, features
from tests.kit.secure_sums import BINDING, LENGTH, PEOPLE, Net, announcement, make_group

OTHER = hashlib.sha256(b"another model").digest()


def request(attempt: int, uploads: dict[int, Upload], point: int, round_no: int = 1) -> bytes:
    """One for any uploads."""
    parts: list[bytes] = []
    for x in sorted(uploads):
        head = uploads[x].head
        stop = 4 + int.from_bytes(head[:4], "big")
        start = stop + masks.BOX * sorted(uploads).index(point)
        parts += head[4:stop], head[start : start + masks.BOX]
    return messages.say("request", {"round": round_no, "purpose": "model", "attempt": attempt}, parts)


# --- the sum ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "threshold"), [(3, 2), (3, 3), (4, 2), (5, 3), (8, 4), (9, 9), (12, 2)])
def test_the_sum_is_exact(count: int, threshold: int) -> None:
    net = Net(count, threshold)
    net.until_uploaded().answer(net.members)
    assert (net.server.finish() == net.expected(net.members)).all()
    assert not net.server.excluded
    assert not net.server.disputed


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_sum_is_exact_whoever_is_lost_as_long_as_the_round_can_live(data: st.DataObject) -> None:
    count = data.draw(st.integers(3, 9))
    net = Net(count, data.draw(st.integers(2, count)), length=data.draw(st.integers(1, 50)))
    alive, least = list(net.members), net.group.least

    def lose(most: int) -> list[int]:
        lost = data.draw(st.sets(st.sampled_from(alive), max_size=max(0, most)))
        return [x for x in alive if x not in lost]

    alive = lose(len(alive) - least)
    told = net.announce(alive)
    for _ in range(2):
        left = lose(len(alive) - least)
        net.upload(told, left)
        if left == alive:
            break
        told, alive = net.server.retry(), left
    else:
        net.upload(told, alive)
    assert not net.server.missing
    answering = lose(len(alive) - net.group.quorum)
    net.answer(answering)
    assert net.server.plan.members == tuple(alive)
    assert (net.server.finish() == net.expected(alive)).all()


def test_no_vector_that_is_long_enough_for_several_pieces_and_threads_is_summed_otherwise() -> None:
    net = Net(3, 2, length=masks.PIECE + 12345)
    net.until_uploaded().answer(net.members)
    total = net.vectors[1]
    for x in (2, 3):
        total = field.add(total, net.vectors[x])
    assert (net.server.finish() == total).all()


def test_every_t_and_n_leave_an_honest_member_in_common() -> None:
    """Any two sets of T answering members share t, and a sum holds T−t+1 honest vectors."""
    for count in range(3, 13):
        for threshold in range(2, count + 1):
            group = make_group(count, threshold)
            assert 2 * group.quorum - count >= threshold
            assert threshold <= group.quorum <= count
            assert group.least >= 3


def test_two_purposes_in_one_round_have_keys_of_their_own_and_are_opened_apart() -> None:
    net = Net(4, 2)
    scale = net.serve(1, "scale")
    told, told_scale = net.announce(), net.announce(server=scale)
    assert net.server.plan.keys != scale.plan.keys
    net.upload(told, net.members)
    net.answer(net.members)
    expected = net.expected(net.members)
    net.upload(told_scale, net.members, scale)
    net.answer(net.members, scale)
    assert (net.server.finish() == expected).all()
    assert (scale.finish() == net.expected(net.members)).all()


def test_rounds_follow_each_other() -> None:
    net = Net(4, 2)
    for number in (1, 2, 7):
        net.server = net.serve(number)
        net.until_uploaded().answer(net.members)
        assert (net.server.finish() == net.expected(net.members)).all()


def test_a_group_of_a_consortium_and_one_of_cards() -> None:
    terms = make_terms(PEOPLE[:4], 2, LENGTH)
    with pytest.raises(InputError, match="at least 3"):
        make_group(2, 2)
    with pytest.raises(InputError, match=r"2\.\.4"):
        make_group(4, 5)
    cards = [person.card() for person in PEOPLE[:4]]
    assert Group.of_cards(cards, 2).id == Group.of_cards(cards[::-1], 2).id
    ids = {Group.of_cards(cards, 2, **c).id for c in ({}, {"context": b"x"}, {"attempts": 2}, {"cohort_size": 3})}
    assert len(ids | {make_group(4, 3).id, Group(terms.roster, 2).id}) == 6


def test_cohorts_are_drawn_publicly_and_nobody_else_takes_part() -> None:
    net = Net(9, 3, cohort_size=5)
    assert (net.group.size, net.group.quorum) == (5, 4)
    drawn = {r: net.group.cohort(r) for r in range(1, 40)}
    assert drawn == {r: make_group(9, 3, cohort_size=5).cohort(r) for r in drawn}
    assert all(len(set(c)) == 5 for c in drawn.values())
    assert {x for c in drawn.values() for x in c} == set(range(1, 10))
    inside, outside = drawn[1], next(x for x in net.members if x not in drawn[1])
    with pytest.raises(RoundError, match="not drawn for round 1"):
        net.members[outside].ready(1, BINDING, LENGTH)
    with pytest.raises(MessageError, match="no message is expected"):
        net.server.take_ready(outside, b"")
    told = net.announce(inside)
    # nor if it signs that it is ready: more members than n would make T too small
    header = net.group.header("ready", net.group.session(1, "model"), outside)
    ready = PEOPLE[outside - 1].write(header, os.urandom(32) + BINDING + LENGTH.to_bytes(8, "big"))
    net.server._readies[outside] = ready, ""
    with pytest.raises(RoundError, match="not drawn for this round"):
        net.members[inside[0]].plan(announcement(net, 1, [*inside, outside]))
    net.upload(told, inside)
    net.answer(inside)
    assert (net.server.finish() == net.expected(inside)).all()


def test_the_server_holds_one_sum_besides_the_upload_in_flight() -> None:
    length = 200_000
    tracemalloc.start()
    try:
        net = Net(5, 2, length=length)
        told = net.announce()
        most = 0
        for x, member in net.members.items():
            upload = member.upload(member.plan(told), field.random(length))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            net.server.take_upload(x, upload)
            most = max(most, tracemalloc.get_traced_memory()[1] - before)
            assert tracemalloc.get_traced_memory()[0] - before < length
            del upload
        net.answer(net.members)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        net.server.finish()
        most = max(most, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert most < 8 * length  # beyond the sum itself: less than one more vector


def test_an_upload_is_little_more_than_its_vector() -> None:
    net = Net(12, 2)
    net.until_uploaded()
    for upload in net.uploads[1].values():
        assert len(upload.head) <= 480 + 56 * 12
        assert len(upload.to_bytes()) <= len(upload.head) + 8 * LENGTH + 11
    assert (480 + 56 * 128) / 1_000_000 < 0.1  # 128 members, a million parameters: at most 8.1 bytes for each


# --- what one upload shows --------------------------------------------------------------------------------


def assert_noise(make: Callable[[Vector], Vector], size: int = 40_000) -> None:
    """Fails if what is made of two different vectors can be told apart, or is not uniform.

    Eight tests at p < 10^-10: a false alarm in less than 1 of 10^9 runs.
    """
    low, high = make(np.zeros(size, np.uint64)), make(np.full(size, P // 2, np.uint64))
    for name, feature in features(2, P).items():
        rows = [np.bincount(feature(x[None, :]), minlength=64) for x in (low, high)]
        counts = np.array(rows)
        seen = counts.sum(axis=0) > 0
        same = stats.chi2_contingency(counts[:, seen]).pvalue if seen.sum() > 1 else 0.0
        assert same > ALARM, f"{name}: two vectors can be told apart"
        assert min(stats.chisquare(row).pvalue for row in counts) > ALARM, f"{name}: not uniform"


def masked(vector: Vector) -> Vector:
    net = Net(3, 2, length=vector.size)
    told = net.announce()
    return net.members[1].upload(net.members[1].plan(told), vector.copy()).vector


def mask_between(net: Net, plan: Plan, one: int, other: int) -> Stream:
    """The pairwise mask as `other`, the higher of the two, knows it."""
    with net.states[other].edit() as memory:
        pair = net.members[other]._pairs(memory["purposes"]["model"], plan)[one]
    return masks.pair_mask(pair, one, other)


def seen_by_all_others(vector: Vector) -> Vector:
    """One upload, less the pairwise masks: what all other members together see of it before the answers."""
    net = Net(3, 2, length=vector.size)
    plan = net.members[1].plan(net.announce())
    seen = net.members[1].upload(plan, vector.copy()).vector
    for x in (2, 3):
        mask_between(net, plan, 1, x).add_to(seen, negate=True)
    return seen


def difference_of_attempts(vector: Vector) -> Vector:
    """A member's uploads for two attempts, one less the other, as the one who was dropped in between sees it."""
    net = Net(4, 2, length=vector.size)
    told, zeros = net.announce(), np.zeros_like(vector)
    plan = net.members[1].plan(told)
    first = net.members[1].upload(plan, vector.copy())
    for x in (1, 2, 3):
        upload = first if x == 1 else net.members[x].upload(net.members[x].plan(told), zeros.copy())
        net.server.take_upload(x, upload)
    second = net.members[1].upload(net.members[1].plan(net.server.retry()), zeros)
    difference: Vector = field.sub(first.vector, second.vector)
    mask_between(net, plan, 1, 4).add_to(difference, negate=True)
    return difference


class NoStream:
    def __init__(self, *_: object) -> None: ...

    def add_to(self, *_: object, **__: object) -> None: ...


def test_one_upload_is_uniform_whatever_the_vector_is() -> None:
    assert_noise(masked)


def test_one_upload_is_uniform_even_to_all_other_members_together() -> None:
    assert_noise(seen_by_all_others)


def test_two_attempts_share_no_mask() -> None:
    assert_noise(difference_of_attempts)


def without_self_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for side in (member_side, server_side):
        monkeypatch.setattr(side, "self_mask", NoStream)


def test_two_attempts_share_no_pairwise_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    without_self_masks(monkeypatch)
    assert_noise(difference_of_attempts)


def test_even_a_memory_that_was_turned_back_repeats_no_self_mask() -> None:
    def difference(vector: Vector) -> Vector:
        net = Net(3, 2, length=vector.size)
        plan = net.members[1].plan(net.announce())
        before = net.states[1]._load()
        first = net.members[1].upload(plan, vector.copy())
        net.states[1]._save(before)
        second = net.members[1].upload(plan, np.zeros_like(vector))
        result: Vector = field.sub(first.vector, second.vector)
        return result

    assert_noise(difference)


def test_the_test_notices_a_missing_self_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    without_self_masks(monkeypatch)
    assert_noise(masked)  # the pairwise masks hide it from the server
    with pytest.raises(AssertionError, match="told apart"):
        assert_noise(seen_by_all_others)


def test_the_test_notices_masks_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "Stream", lambda _key, what, *rest: Stream(bytes(32), what, rest[-1]))  # no ctx
    with pytest.raises(AssertionError, match="told apart"):
        assert_noise(difference_of_attempts)


# --- members vanish ---------------------------------------------------------------------------------------


def test_a_member_that_vanishes_before_its_upload_costs_an_attempt() -> None:
    net = Net(5, 2)
    net.upload(net.announce(), [1, 2, 4, 5])
    assert net.server.missing == (3,)
    with pytest.raises(RoundError, match=f"nobody answers before all have uploaded; missing: {net.group.name(3)}"):
        net.server.request(1)
    told = net.server.retry()
    with pytest.raises(RoundError, match="not in the announced set"):
        net.members[3].plan(told)
    net.upload(told, [1, 2, 4, 5])
    with pytest.raises(RoundError, match="does not take part in this attempt"):
        net.server.request(3)
    net.answer([1, 2, 4, 5])
    assert (net.server.finish() == net.expected([1, 2, 4, 5])).all()


def test_a_member_that_vanishes_after_its_upload_costs_nothing_until_too_few_are_left() -> None:
    net = Net(5, 2)
    assert net.group.quorum == 4
    net.until_uploaded().answer([1, 2, 3, 5])
    assert (net.server.finish() == net.expected(net.members)).all()
    net.server = net.serve(2)
    net.until_uploaded().answer([1, 2, 3])
    with pytest.raises(RoundError, match="cannot be opened yet: 3 members answered, and 4 must"):
        net.server.finish()
    with pytest.raises(RoundError, match="no reason to try again"):
        net.server.retry()
    net.answer([5])  # it comes back: nothing was lost
    assert (net.server.finish() == net.expected(net.members)).all()
    with pytest.raises(MessageError, match="no message is expected"):
        net.server.take_answer(4, b"")


def test_a_round_is_given_up_below_the_quorum_and_after_the_last_attempt() -> None:
    net = Net(5, 3)
    for x in (1, 2, 3):
        net.server.take_ready(x, net.members[x].ready(1, BINDING, LENGTH))
    with pytest.raises(RoundError, match="3 members are left, and at least 4"):
        net.server.announce()
    net = Net(9, 2, attempts=2)
    net.upload(net.announce(), range(1, 9))
    net.upload(net.server.retry(), range(1, 8))
    with pytest.raises(RoundError, match="2 attempts failed"):
        net.server.retry()


def test_there_is_no_retry_without_a_loss() -> None:
    net = Net(5, 2)
    net.until_uploaded()
    with pytest.raises(RoundError, match="no reason to try again"):
        net.server.retry()
    net.answer(net.members)
    assert (net.server.finish() == net.expected(net.members)).all()


def test_a_late_upload_is_refused_and_does_not_touch_the_sum() -> None:
    net = Net(5, 2)
    told = net.announce()
    net.upload(told, [1, 2, 4, 5])
    late = net.members[3].upload(net.members[3].plan(told), field.random(LENGTH))
    told = net.server.retry()
    with pytest.raises(MessageError, match="no message is expected"):
        net.server.take_upload(3, late)
    stale = net.uploads[1][1]
    net.upload(told, [2, 4, 5])
    with pytest.raises(MessageError, match="belongs elsewhere: its session"):
        net.server.take_upload(1, stale)
    assert set(net.server.excluded) == {1}


# --- a server that tells members different things ---------------------------------------------------------


def test_different_sets_for_different_members_open_nothing() -> None:
    net = Net(5, 2)
    net.announce()
    everyone, four = announcement(net, 1, range(1, 6)), announcement(net, 1, range(1, 5))
    uploads = {}
    for x, member in net.members.items():
        plan = member.plan(four if x == 1 else everyone)
        uploads[x] = member.upload(plan, field.random(LENGTH))
    with pytest.raises(MessageError, match=r"for step 'secagg/upload' belongs elsewhere: its session"):
        net.members[2].unmask(request(1, uploads, 2))
    with pytest.raises(MessageError, match=r"belongs elsewhere: its session"):
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
            with pytest.raises(MessageError, match=r"excluded from round 1: .* starts from another model"):
                net.server.take_ready(x, ready)
            net.server._readies[x] = ready, messages.read_ready(net.group, 1, "model", x, ready)[0]
        else:
            net.server.take_ready(x, ready)
    told = announcement(net, 1, net.members)
    for x in net.members:
        name = net.group.name(1 if x == 3 else 3)
        with pytest.raises(RoundError, match=f"{name} was told of another model"):
            net.members[x].plan(told)
    with pytest.raises(RoundError, match=r"joined round 1 .* with another model"):
        net.members[3].ready(1, BINDING, LENGTH)


def test_forged_and_swapped_keys_are_refused() -> None:
    net = Net(4, 2)
    told = net.announce()
    mine = net.server._readies[2][0]
    forged = mine[:-72] + os.urandom(32) + mine[-40:]
    for bad in (forged, net.server._readies[3][0], mine[:-1], mine + b"x", b""):
        net.server._readies[2] = bad, ""
        with pytest.raises(MessageError, match=net.group.name(2)):
            net.members[1].plan(announcement(net, 1, net.members))
    # keys of the same member from another round, and for another sum of this one
    for round_no, purpose in ((2, "model"), (1, "scale")):
        stranger = SecAggMember(PEOPLE[1], net.group, MemoryState(net.group))
        net.server._readies[2] = stranger.ready(round_no, BINDING, LENGTH, purpose), ""
        with pytest.raises(MessageError, match="belongs elsewhere"):
            net.members[1].plan(announcement(net, 1, net.members))
    # a second key of this round, of a member without memory: everybody else takes it, the member itself does not
    net.server._readies[2] = (
        SecAggMember(PEOPLE[1], net.group, MemoryState(net.group)).ready(1, BINDING, LENGTH),
        "",
    )
    with pytest.raises(RoundError, match="is not its own"):
        net.members[2].plan(announcement(net, 1, net.members))
    net.members[1].plan(told)


def test_a_key_that_no_secret_can_be_shared_with_is_refused_by_name() -> None:
    net = Net(4, 2)
    header = net.group.header("ready", net.group.session(1, "model"), 2)
    ready = PEOPLE[1].write(header, bytes(32) + BINDING + LENGTH.to_bytes(8, "big"))
    with pytest.raises(MessageError, match="excluded"):
        net.server.take_ready(2, ready)
    net.announce([1, 3, 4])
    net.server._readies[2] = ready, "00" * 32
    with pytest.raises(MessageError, match=f"{net.group.name(2)} sent an invalid public key"):
        net.members[1].upload(net.members[1].plan(announcement(net, 1, net.members)), field.random(LENGTH))
    net.members[1].upload(net.members[1].plan(announcement(net, 1, [1, 3, 4])), field.random(LENGTH))


def test_a_set_of_colluders_and_one_victim_is_refused() -> None:
    net = Net(7, 3)
    net.announce()
    for size in range(1, net.group.least):
        with pytest.raises(RoundError, match=r"at least max\(T, 3\) = 5 must take part|not in the announced set"):
            net.members[1].plan(announcement(net, 1, range(1, size + 1)))
    net.members[1].plan(announcement(net, 1, range(1, 6)))
    for who in ([1, 1, 2, 3, 4], [2, 1, 3, 4, 5]):
        about = {"round": 1, "purpose": "model", "attempt": 1, "members": who}
        told = messages.say("announcement", about, [net.server._readies[x][0] for x in who])
        with pytest.raises(RoundError, match="a member twice"):
            net.members[1].plan(told)


def test_epochs_and_groups_do_not_mix() -> None:
    net = Net(4, 2)
    later = make_group(4, 2, context=b"epoch 1")
    with pytest.raises(RoundError, match="another group, manifest or epoch"):
        SecAggMember(PEOPLE[0], later, net.states[1])
    member = SecAggMember(PEOPLE[0], later, MemoryState(later))
    ready = member.ready(1, BINDING, LENGTH)
    told = net.announce()
    with pytest.raises(MessageError, match="its consortium is"):
        member.plan(told)
    net.server = net.serve(2)
    with pytest.raises(MessageError, match="its consortium is"):
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
        with pytest.raises(RoundError, match=r"has already answered in round 1 \('model'\)"):
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
    with pytest.raises(RoundError, match=r"does not answer for attempt 1 .*: it has uploaded for attempt 2"):
        net.members[1].unmask(request(1, net.uploads[1] | {5: fifth}, 1))
    # the uploads of one attempt under the label of the other
    with pytest.raises(MessageError, match="belongs elsewhere"):
        net.members[1].unmask(request(2, net.uploads[1], 1))
    # nor does one who did not upload at all
    late = Net(4, 2)
    late.announce()
    with pytest.raises(RoundError, match="it has not uploaded"):
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
    with pytest.raises(RoundError, match=r"attempt 1 is next for .*, not attempt 2"):
        net.members[1].plan(announcement(net, 2, range(1, 6)))
    first = announcement(net, 1, range(1, 6))
    plan = net.members[1].plan(first)
    net.members[1].upload(plan, field.random(LENGTH))
    for attempt, who, why in (
        (1, range(1, 6), "attempt 2 is next"),
        (1, range(1, 5), "attempt 2 is next"),  # a retry relabelled as a first attempt
        (3, range(1, 5), "attempt 2 is next"),
        (2, range(1, 6), "strictly inside the last one"),
        (2, [1, 2, 3, 4, 6], "strictly inside the last one"),
    ):
        with pytest.raises(RoundError, match=why):
            net.members[1].plan(announcement(net, attempt, who))
    with pytest.raises(RoundError, match="attempt 2 is next"):
        net.members[1].upload(plan, field.random(LENGTH))
    # the same set but for one key
    good = net.server._readies[2]
    other = SecAggMember(PEOPLE[1], net.group, MemoryState(net.group)).ready(1, BINDING, LENGTH)
    net.server._readies[2] = other, ""
    with pytest.raises(RoundError, match="strictly inside the last one, with its keys"):
        net.members[1].plan(announcement(net, 2, range(1, 5)))
    net.server._readies[2] = good
    net.members[1].upload(net.members[1].plan(announcement(net, 2, range(1, 6 - 1))), field.random(LENGTH))
    with pytest.raises(RoundError, match="2 attempts in a round"):
        net.members[1].plan(announcement(net, 3, [1, 2, 3, 4]))


def test_one_attempt_takes_one_vector() -> None:
    net = Net(4, 2)
    told = net.announce()
    one, two = net.members[1].plan(told), net.members[1].plan(announcement(net, 1, [1, 2, 3]))
    net.members[1].upload(one, field.random(LENGTH))
    for plan in (one, two):
        untouched = np.arange(LENGTH, dtype=np.uint64)
        with pytest.raises(RoundError, match="attempt 2 is next"):
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
    ]
    assert {name for change in changes for name in change} == {f.name for f in fields(plan)}
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
        with pytest.raises(RoundError, match=r"round 1 is over for .*: it has joined round 2"):
            call()
    # old uploads under the new round's number
    with pytest.raises(RoundError, match="it has not uploaded"):
        net.members[1].unmask(request(1, net.uploads[1], 1, round_no=2))
    with pytest.raises(RoundError, match="has not joined round 3"):
        net.members[1].plan(announcement(net, 1, net.members, round_no=3))
    net.members[1].close()
    with pytest.raises(RoundError, match=r"round 2 is over for .*: it has left it"):
        net.members[1].ready(2, BINDING, LENGTH, "scale")


def test_an_answer_needs_an_upload_of_everybody() -> None:
    net = Net(5, 2)
    net.until_uploaded()
    uploads = net.uploads[1]
    without = {x: u for x, u in uploads.items() if x != 4}
    with pytest.raises(RoundError, match="one upload of every member"):
        net.members[1].unmask(request(1, without, 1))
    twice = without | {4: uploads[3]}
    with pytest.raises(MessageError, match=net.group.name(4)):
        net.members[1].unmask(request(1, twice, 1))
    # somebody else's box, a flipped one, none
    head, parts = messages.hear("request", request(1, uploads, 1))
    other = messages.hear("request", request(1, uploads, 2))[1]
    about = {name: head[name] for name in ("round", "purpose", "attempt")}
    for box in (other[7], parts[5], bytes([parts[7][0] ^ 1]) + parts[7][1:], b""):
        with pytest.raises(MessageError, match=f"the share from {net.group.name(4)} cannot be opened"):
            net.members[1].unmask(messages.say("request", about, [*parts[:7], box, *parts[8:]]))
    net.members[1].unmask(request(1, uploads, 1))  # none of which used up its answer


# --- restarts ---------------------------------------------------------------------------------------------


def test_a_member_restarts_at_any_time_and_goes_on(tmp_path: Path) -> None:
    net = Net(5, 2)
    net.states[1] = FolderState.create(tmp_path / "rounds", PEOPLE[0], net.group, after=0)

    def restart() -> None:
        net.states[1] = FolderState(tmp_path / "rounds", PEOPLE[0])
        net.members[1] = net.member(1)

    restart()
    before = net.members[1].ready(1, BINDING, LENGTH)
    restart()
    assert net.members[1].ready(1, BINDING, LENGTH) == before
    told = net.announce()
    restart()
    net.upload(told, [1, 2, 3, 4])
    restart()
    with pytest.raises(RoundError, match="attempt 2 is next"):
        net.members[1].plan(told)
    net.upload(net.server.retry(), [1, 2, 3, 4])
    restart()
    said = net.members[1].unmask(net.server.request(1))
    net.answer([1, 2, 3, 4])
    restart()
    assert net.members[1].unmask(net.requests[1]) == said
    assert (net.server.finish() == net.expected([1, 2, 3, 4])).all()


def test_an_error_leaves_the_memory_as_it_was() -> None:
    state = MemoryState(make_group(3, 2))
    before = state._load()

    def fail() -> None:
        with state.edit() as memory:
            memory["round"] = 9
            raise CrashError

    with pytest.raises(CrashError):
        fail()
    assert state._load() == before


class CrashError(Exception):
    """The machine stops here."""


class Fragile(MemoryState):
    """Fails at its next write, before or after it is done."""

    when: str | None = None

    def _save(self, content: bytes) -> None:
        when, self.when = self.when, None
        if when == "before":
            raise CrashError
        super()._save(content)
        if when == "after":
            raise CrashError


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_a_write_never_makes_a_member_send_twice(when: str) -> None:
    net = Net(5, 2)
    state = Fragile(net.group)
    net.states[1] = state
    net.members[1] = net.member(1)

    def crash(call: Callable[[], object]) -> None:
        state.when = when
        with pytest.raises(CrashError):
            call()
        net.members[1] = net.member(1)

    crash(lambda: net.members[1].ready(1, BINDING, LENGTH))
    told = net.announce()
    plan = net.members[1].plan(told)
    crash(lambda: net.members[1].upload(plan, field.random(LENGTH)))
    if when == "after":  # it may have been sent: this attempt is lost, the next one is not
        with pytest.raises(RoundError, match="attempt 2 is next"):
            net.members[1].plan(told)
        net.upload(told, [2, 3, 4, 5])
        told = net.server.retry()
        net.upload(told, [2, 3, 4, 5])
        alive = [2, 3, 4, 5]
    else:
        net.upload(told, net.members)
        crash(lambda: net.members[1].unmask(net.server.request(1)))
        alive = list(net.members)
    net.answer(alive)
    assert (net.server.finish() == net.expected(alive)).all()


def test_an_answer_that_may_have_been_sent_is_the_same_when_it_is_sent_again() -> None:
    net = Net(5, 2)
    state = Fragile(net.group)
    net.states[1] = state
    net.members[1] = net.member(1)
    net.until_uploaded()
    state.when = "after"
    with pytest.raises(CrashError):
        net.members[1].unmask(net.server.request(1))
    with state.edit() as memory:
        written = bytes.fromhex(memory["answer"]["model"]["message"])
    net.members[1] = net.member(1)
    assert net.members[1].unmask(net.server.request(1)) == written
    net.answer(net.members)
    assert (net.server.finish() == net.expected(net.members)).all()
    assert not net.server.disputed


def test_what_is_remembered_is_sealed_whole_and_never_restored(tmp_path: Path) -> None:
    group, folder = make_group(4, 2), tmp_path / "consortia" / ("0" * 16) / "rounds"
    state = FolderState.create(folder, PEOPLE[0], group, after=3)
    member = SecAggMember(PEOPLE[0], group, state)
    with pytest.raises(RoundError, match="round 3 is over"):
        member.ready(3, BINDING, LENGTH)
    member.ready(4, BINDING, LENGTH)
    path = folder / "rounds.sealed"
    assert path.stat().st_mode & 0o777 == 0o600
    content = path.read_bytes()
    with state.edit() as memory:
        secret = memory["purposes"]["model"]["secret"]
        with pytest.raises(KeystoreError, match="another command is working"), FolderState(folder, PEOPLE[0]).edit():
            pass
    assert secret.encode() not in content
    assert bytes.fromhex(secret) not in content
    assert secret not in repr(member)
    assert not _KEPT.fullmatch(path.relative_to(tmp_path).as_posix())
    with pytest.raises(KeystoreError, match="exists already"):
        FolderState.create(folder, PEOPLE[0], group, after=0)
    with pytest.raises(KeystoreError, match="damaged or another member's"):
        SecAggMember(PEOPLE[0], group, FolderState(folder, PEOPLE[1]))
    for bad in (content[:-1], content[:20] + bytes([content[20] ^ 1]) + content[21:], b""):
        path.write_bytes(bad)
        with pytest.raises(KeystoreError, match="damaged"):
            SecAggMember(PEOPLE[0], group, FolderState(folder, PEOPLE[0]))
    path.unlink()
    with pytest.raises(KeystoreError, match="cannot read the memory of rounds"):
        member.ready(5, BINDING, LENGTH)
    with pytest.raises(KeystoreError, match="create it"):
        SecAggMember(PEOPLE[0], group, FolderState(tmp_path / "nowhere", PEOPLE[0]))


def test_keys_are_erased_once_they_are_not_needed() -> None:
    net = Net(4, 2)
    net.until_uploaded()
    with net.states[1].edit() as memory:
        assert "secret" in memory["purposes"]["model"]
    net.answer([1])
    with net.states[1].edit() as memory:
        assert memory["purposes"] == {"model": {"answered": 1}}
    assert not net.members[1]._shared
    assert net.members[2]._shared
    net.members[2].close()
    with net.states[2].edit() as memory:
        assert memory["purposes"] == {}


# --- members that send rubbish ----------------------------------------------------------------------------


def _flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def _spoiled(upload: Upload) -> dict[str, Upload | bytes]:
    whole, vector = upload.to_bytes(), upload.vector
    outside = vector.copy()
    outside[3] = P
    other = vector.copy()
    other[0] = (int(other[0]) + 1) % P
    spoiled: dict[str, Upload | bytes] = {
        "short": Upload(upload.head, vector[:-1].copy()),
        "long": Upload(upload.head, np.append(vector, vector[:1])),
        "outside": Upload(upload.head, outside),
        "changed": Upload(upload.head, other),
        "floats": Upload(upload.head, vector.astype(np.float64)),
        "a matrix": Upload(upload.head, vector.reshape(2, -1)),
        "no head": Upload(b"", vector),
        "a cut head": Upload(upload.head[:-1], vector),
        "nothing": b"",
        "no upload": None,  # type: ignore[dict-item]
        "a text for a head": Upload("head", vector),  # type: ignore[arg-type]
        "rubbish": os.urandom(500),
        "zeros": bytes(500),
        "cut": whole[:-8],
        "cut in a word": whole[:-3],
    }
    for place in (0, 2, 7, 30, 300, len(upload.head) - 1, len(whole) - 9):
        spoiled[f"flipped at {place}"] = _flipped(whole, place)
    return spoiled


def test_a_spoiled_upload_excludes_its_sender_by_name_and_the_round_goes_on() -> None:
    net = Net(5, 2)
    told = net.announce()
    net.upload(told, [1, 2, 4, 5])
    sum_before = net.server._sum.copy()
    bad = net.members[3].upload(net.members[3].plan(told), field.random(LENGTH))
    for what, spoiled in _spoiled(bad).items():
        with pytest.raises(MessageError, match=f"{net.group.name(3)} is excluded from round 1: "):
            net.server.take_upload(3, spoiled)
        assert (net.server._sum == sum_before).all(), what
        assert set(net.server.excluded) == {3}
        del net.server.excluded[3]
    net.server.excluded[3] = "for a test"
    with pytest.raises(MessageError, match="is excluded from round 1: for a test"):
        net.server.take_upload(3, bad)
    with pytest.raises(MessageError, match="no message is expected"):  # a second upload, which counts for nothing
        net.server.take_upload(1, net.uploads[1][1])
    alive = [1, 2, 4, 5]
    net.upload(net.server.retry(), alive)
    net.answer(alive)
    assert (net.server.finish() == net.expected(alive)).all()


def test_a_signed_vector_outside_the_field_is_refused() -> None:
    net = Net(4, 2)
    told = net.announce()
    good = net.members[2].upload(net.members[2].plan(told), field.random(LENGTH))
    vector, hashed = good.vector.copy(), masks.VectorDigest()
    vector[3] = P
    hashed.update(vector)
    stop = 4 + int.from_bytes(good.head[:4], "big")
    header = net.group.header("upload", net.server.plan.ctx, 2, 1)
    message = PEOPLE[1].write(header, hashed.digest() + good.head[stop - 64 : stop])
    head = len(message).to_bytes(4, "big") + message + good.head[stop:]
    with pytest.raises(MessageError, match=r"excluded .* must hold values in \[0, p\)"):
        net.server.take_upload(2, Upload(head, vector))


def test_spoiled_words_of_a_server_are_refused_and_change_nothing() -> None:
    net = Net(4, 2)
    told = net.announce()
    step = max(1, len(told) // 60)
    for place in range(0, len(told), step):
        with pytest.raises((MessageError, RoundError)):
            net.members[1].plan(_flipped(told, place))
        with pytest.raises((MessageError, RoundError)):
            net.members[1].plan(told[:place])
    with pytest.raises(RoundError, match="no answers to finish with"):
        net.server.finish()
    net.upload(told, net.members)
    asked = net.server.request(1)
    step = max(1, len(asked) // 60)
    for place in range(0, len(asked), step):
        with pytest.raises((MessageError, RoundError)):
            net.members[1].unmask(_flipped(asked, place))
    net.answer(net.members)
    assert (net.server.finish() == net.expected(net.members)).all()


def test_a_vector_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    net = Net(4, 2)
    plan = net.members[1].plan(net.announce())
    good = field.random(LENGTH)
    outside = good.copy()
    outside[7] = P
    frozen = good.copy()
    frozen.flags.writeable = False
    bad: list[Any] = [good[:-1], good.astype(np.int64), good.reshape(2, -1), outside, frozen, list(good), None]
    for vector in bad:
        with pytest.raises(InputError, match=r"vector|out"):
            net.members[1].upload(plan, vector)
    net.members[1].upload(plan, good)  # the attempt was not used up
    for arguments in ((0, BINDING, 5), (1, b"short", 5), (1, BINDING, 0), (1, BINDING, 5, ""), (True, BINDING, 5)):
        with pytest.raises(InputError):
            net.members[2].ready(*arguments)


def test_a_spoiled_ready_excludes_its_sender() -> None:
    net = Net(5, 2)
    good = net.members[3].ready(1, BINDING, LENGTH)
    for bad in (good[:-1], b"", os.urandom(400), net.members[2].ready(1, BINDING, LENGTH)):
        with pytest.raises(MessageError, match=f"{net.group.name(3)} is excluded"):
            net.server.take_ready(3, bad)
        net.server.excluded.clear()
    other = SecAggMember(PEOPLE[2], net.group, MemoryState(net.group))
    with pytest.raises(MessageError, match="another length"):
        net.server.take_ready(3, other.ready(1, BINDING, LENGTH + 1))
    with pytest.raises(RecordError, match="no member at point 6"):
        net.server.take_ready(6, good)
    net.upload(net.announce([1, 2, 4, 5]), [1, 2, 4, 5])
    net.answer([1, 2, 4, 5])
    assert (net.server.finish() == net.expected([1, 2, 4, 5])).all()


# --- wrong answers ----------------------------------------------------------------------------------------


def _lie(net: Net, point: int, about: Iterable[int] | None = None) -> None:
    """An answer of this member, signed by it, with wrong shares about some masks."""
    plan = net.server.plan
    shares = np.frombuffer(net.members[point].unmask(net.server.request(point))[-40 * len(plan.members) :], "<u8")
    shares = shares.astype(np.uint64)
    for dealer in about or plan.members:
        shares[5 * plan.members.index(dealer) + 2] ^= np.uint64(1)
    header = net.group.header("unmask", plan.ctx, point, plan.attempt)
    net.server.take_answer(point, PEOPLE[point - 1].write(header, shares.astype("<u8").tobytes()))


def test_lying_answers_are_corrected_and_named() -> None:
    net = Net(9, 2)
    assert net.group.quorum == 6
    net.until_uploaded()
    _lie(net, 4)
    net.answer([x for x in net.members if x != 4])
    assert (net.server.finish() == net.expected(net.members)).all()
    assert net.server.disputed == {4: tuple(range(1, 10))}
    net = Net(9, 2)
    net.until_uploaded()
    _lie(net, 4, about=[7])
    net.answer([x for x in net.members if x != 4])
    assert (net.server.finish() == net.expected(net.members)).all()
    assert net.server.disputed == {4: (7,)}


def test_too_many_lies_open_nothing_and_never_a_wrong_sum() -> None:
    for liars, others in (((4, 5), 7), ((4,), 5), ((4,), 6)):
        net = Net(9, 2)
        net.until_uploaded()
        for x in liars:
            _lie(net, x)
        net.answer([x for x in net.members if x not in liars][:others])
        with pytest.raises(RoundError, match=r"cannot be opened yet: the (shares of the masks|mask) of .* do(es)? not"):
            net.server.finish()


def test_a_member_that_deals_wrong_shares_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(7, 2)
    told = net.announce()
    net.upload(told, [1, 2, 3, 5, 6, 7])
    monkeypatch.setattr(shamir, "share", lambda seed, _t, count: field.random(seed.size * count).reshape(count, -1))
    net.upload(told, [4])
    monkeypatch.undo()
    net.answer(net.members)
    with pytest.raises(RoundError, match=f"the masks of {net.group.name(4)} do not fit together"):
        net.server.finish()


def test_spoiled_answers_exclude_their_senders() -> None:
    net = Net(6, 2)
    assert net.group.quorum == 4
    net.until_uploaded()
    good = net.members[1].unmask(net.server.request(1))
    header = net.group.header("unmask", net.server.plan.ctx, 1, 1)
    outside = PEOPLE[0].write(header, b"\xff" * 40 * 6)
    short = PEOPLE[0].write(header, bytes(40 * 5))
    for bad in (good[:-1], b"", os.urandom(700), outside, short, net.members[2].unmask(net.server.request(2))):
        with pytest.raises(MessageError, match=f"{net.group.name(1)} is excluded"):
            net.server.take_answer(1, bad)
        net.server.excluded.clear()
    net.answer([3, 4, 5, 6])
    with pytest.raises(MessageError, match="no message is expected"):
        net.server.take_answer(3, good)
    assert (net.server.finish() == net.expected(net.members)).all()


@pytest.mark.parametrize(("count", "threshold"), [(4, 2), (5, 3), (7, 3)])
def test_fewer_than_the_quorum_open_no_mask(count: int, threshold: int) -> None:
    net = Net(count, threshold)
    net.until_uploaded().answer(net.members)
    server, quorum = net.server, net.group.quorum
    for used in range(2, count + 1):
        xs = list(range(1, used + 1))
        answers = np.stack([server._answers[x] for x in xs])
        seeds = field.matmul(shamir.lagrange_matrix(xs, [0]), answers)[0].reshape(-1, 5)
        for dealer, seed in zip(server.plan.members, seeds, strict=True):
            opened = masks.commitment_of(server.plan.ctx, dealer, seed) == server._uploads[dealer][2]
            assert opened == (used >= quorum)


def test_a_manifest_makes_a_group() -> None:
    """Only one that all have signed."""
    terms = make_terms(PEOPLE[:3], 2, LENGTH)
    roots = ("00" * 32,) * 3
    genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, "11" * 32, roots)
    manifest = Manifest(terms, genesis, roots)
    with pytest.raises(SignatureError, match="lacks the signature"):
        Group.of_manifest(manifest)
    for point, person in enumerate(PEOPLE[:3], 1):
        manifest = manifest.with_signature(point, person.sign("manifest", manifest.sign_bytes()))
    group = Group.of_manifest(manifest, attempts=2)
    assert group.context == manifest.digest()
    assert (group.quorum, group.attempts) == (3, 2)


def test_the_benchmark_makes_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from quorumark.research.bench import secagg as bench

    monkeypatch.setattr(bench, "QUICK_SIZE", 5_000)
    rows = list(bench.rows(quick=True))
    assert [row.size for row in rows] == [5_000] * 8
    assert all(row.ratio > 0 and row.seconds > 0 for row in rows)


def test_the_documents_example_runs(root: Path) -> None:
    example = re.search(r"```python\n(.*?)```", (root / "docs" / "secagg.md").read_text(), re.DOTALL)
    assert example
    printed: list[str] = []
    exec(example[1], {"print": lambda *values: printed.append(" ".join(map(str, values)))})  # noqa: S102
    assert printed == ["[10 10 10]"]


@pytest.mark.slow
def test_a_hundred_and_twenty_eight_members_come_and_go() -> None:
    """10 % do not get ready, 1 % are lost after the set is fixed: all rounds live, and every sum is exact."""
    count, length = 128, 20_000
    people = identities(count)
    group = Group.of_cards([person.card() for person in people], 32, attempts=20)
    members = {}
    for person in people:
        member = SecAggMember(person, group, MemoryState(group))
        members[member.point] = member
    draw = np.random.default_rng(7)
    for number in range(1, 6):
        server = SecAggServer(group, number, BINDING, length)
        for x, member in members.items():
            if draw.random() > 0.1:
                server.take_ready(x, member.ready(number, BINDING, length))
        told = server.announce()
        while True:
            expected = np.zeros(length, np.uint64)
            for x in server.plan.members:
                if draw.random() > 0.01:
                    vector = field.random(length)
                    field.add(expected, vector, out=expected)
                    server.take_upload(x, members[x].upload(members[x].plan(told), vector))
            if not server.missing:
                break
            told = server.retry()
        for x in server.plan.members:
            if draw.random() > 0.01:
                server.take_answer(x, members[x].unmask(server.request(x)))
        assert (server.finish() == expected).all()


# --- derivations: what each key must hang on --------------------------------------------------------------


def test_every_key_hangs_on_everything_that_it_must() -> None:
    """By the formulas in docs/secagg.md, and each value changed alone gives another key."""
    group = Group.of_cards([person.card() for person in PEOPLE[:4]], 2)
    members = {m.point: m for m in (SecAggMember(p, group, MemoryState(group)) for p in PEOPLE[:4])}
    server = SecAggServer(group, 1, bytes(32), 3)
    for x, member in members.items():
        server.take_ready(x, member.ready(1, bytes(32), 3))
    announcement = server.announce()
    plan = members[1].plan(announcement)
    secrets = {}
    for x, member in members.items():
        with member.state.edit() as memory:
            secrets[x] = dict(memory["purposes"]["model"])
    mine = members[1]._pairs(secrets[1], plan)
    theirs = members[2]._pairs(secrets[2], members[2].plan(announcement))
    assert mine[2] == theirs[1]
    one, two = PEOPLE[:2]  # sorted by their keys, as the points are
    round_secret = exchange(masks.private_key(secrets[1]), plan.keys[1])
    lasting = one.exchange(two.x25519)
    assert mine[2] == field.derive_key(round_secret + lasting, "secagg pair", plan.ctx)
    other = replace(plan, attempt=2)
    assert members[1]._pairs(secrets[1], other)[2] != mine[2]
    # boxes: directed, and for one commitment
    cases = [(1, 2, b"a" * 32), (2, 1, b"a" * 32), (1, 2, b"b" * 32), (1, 3, b"a" * 32)]
    sealed = {masks.cipher_of(bytes(32), *case).encrypt(bytes(12), b"x" * 40, None) for case in cases}
    assert len(sealed) == len(cases)
    # masks: of a pair in order, of a member, of a ctx
    seed = field.random(5)
    streams = [
        masks.pair_mask(bytes(32), 1, 2),
        masks.pair_mask(bytes(32), 1, 3),
        masks.self_mask(plan.ctx, 1, seed),
        masks.self_mask(plan.ctx, 2, seed),
        masks.self_mask(other.ctx, 1, seed),
    ]
    assert len({tuple(map(int, stream.elements(3))) for stream in streams}) == len(streams)


def test_two_threads_of_one_member_upload_once() -> None:
    """A simulation's memory is locked while it is edited."""
    import threading

    net = Net(5, 2)
    state = net.states[1]
    assert isinstance(state, MemoryState)
    entered, release, order = threading.Event(), threading.Event(), []

    def slow() -> None:
        with state.edit():
            entered.set()
            release.wait(5)
            order.append("slow")

    def quick() -> None:
        entered.wait(5)
        with state.edit():
            order.append("quick")

    threads = [threading.Thread(target=slow), threading.Thread(target=quick)]
    for thread in threads:
        thread.start()
    entered.wait(5)
    threads[1].join(0.2)
    release.set()
    for thread in threads:
        thread.join()
    assert order == ["slow", "quick"]
