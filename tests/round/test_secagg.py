"""Secure sums: exact, with little memory, anyone who vanishes as long as a quorum is left."""

from __future__ import annotations

import os
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorumark import field
from quorumark.consortium.records import Genesis, Manifest
from quorumark.errors import SignatureError
from quorumark.round.group import Group
from quorumark.round.memory import MemoryState
from quorumark.round.secagg import masks
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.secagg.messages import own_origin
from quorumark.round.secagg.server import SecAggServer
from tests.kit.ceremony import identities, make_terms
from tests.kit.refusals import stopped, wrong_argument
from tests.kit.secure_sums import BINDING, LENGTH, PEOPLE, Net, announcement, make_group

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
def test_the_sum_is_exact_whichever_member_is_lost_as_long_as_the_round_can_live(data: st.DataObject) -> None:
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
    with wrong_argument("roster", received="2"):
        make_group(2, 2)
    with wrong_argument("threshold", received="5"):
        make_group(4, 5)
    cards = [person.card() for person in PEOPLE[:4]]
    assert Group.of_cards(cards, 2).id == Group.of_cards(cards[::-1], 2).id
    ids = {Group.of_cards(cards, 2, **c).id for c in ({}, {"context": b"x"}, {"attempts": 2}, {"cohort_size": 3})}
    assert len(ids | {make_group(4, 3).id, Group(terms.roster, 2).id}) == 6


def test_cohorts_are_drawn_publicly_and_nobody_else_takes_part() -> None:
    net = Net(9, 3, cohort_size=5)
    assert (net.group.size, net.group.quorum) == (5, 4)
    drawn = {r: net.group.cohort(own_origin(net.group, r)) for r in range(1, 40)}
    other = make_group(9, 3, cohort_size=5)
    assert drawn == {r: other.cohort(own_origin(other, r)) for r in drawn}
    assert all(len(set(c)) == 5 for c in drawn.values())
    assert {x for c in drawn.values() for x in c} == set(range(1, 10))
    inside, outside = drawn[1], next(x for x in net.members if x not in drawn[1])
    with stopped("round.not-drawn"):
        net.members[outside].ready(1, BINDING, LENGTH)
    with stopped("message.unexpected"):
        net.server.take_ready(outside, b"")
    told = net.announce(inside)
    # nor if it signs that it is ready: more members than n would make T too small
    header = net.group.header("ready", net.group.session(1, "model"), outside)
    ready = PEOPLE[outside - 1].write(header, os.urandom(32) + BINDING + LENGTH.to_bytes(8, "big"))
    net.server._readies[outside] = ready, ""
    with stopped("round.wrong-members"):
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


# --- members vanish ---------------------------------------------------------------------------------------


def test_a_member_that_vanishes_before_its_upload_costs_an_attempt() -> None:
    net = Net(5, 2)
    net.upload(net.announce(), [1, 2, 4, 5])
    assert net.server.missing == (3,)
    with stopped("round.uploads-missing", names=net.group.name(3)):
        net.server.request(1)
    told = net.server.retry()
    with stopped("round.not-in-set"):
        net.members[3].plan(told)
    net.upload(told, [1, 2, 4, 5])
    with stopped("round.not-in-set"):
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
    with stopped("round.too-few-answers"):
        net.server.finish()
    with stopped("round.nothing-missing"):
        net.server.retry()
    net.answer([5])  # it comes back: nothing was lost
    assert (net.server.finish() == net.expected(net.members)).all()
    with stopped("message.unexpected"):
        net.server.take_answer(4, b"")


def test_a_round_is_given_up_below_the_quorum_and_after_the_last_attempt() -> None:
    net = Net(5, 3)
    for x in (1, 2, 3):
        net.server.take_ready(x, net.members[x].ready(1, BINDING, LENGTH))
    with stopped("round.too-few"):
        net.server.announce()
    net = Net(9, 2, attempts=2)
    net.upload(net.announce(), range(1, 9))
    net.upload(net.server.retry(), range(1, 8))
    with stopped("round.no-more-attempts"):
        net.server.retry()


def test_there_is_no_retry_without_a_loss() -> None:
    net = Net(5, 2)
    net.until_uploaded()
    with stopped("round.nothing-missing"):
        net.server.retry()
    net.answer(net.members)
    assert (net.server.finish() == net.expected(net.members)).all()


def test_a_late_upload_is_refused_and_does_not_touch_the_sum() -> None:
    net = Net(5, 2)
    told = net.announce()
    net.upload(told, [1, 2, 4, 5])
    late = net.members[3].upload(net.members[3].plan(told), field.random(LENGTH))
    told = net.server.retry()
    with stopped("message.unexpected"):
        net.server.take_upload(3, late)
    stale = net.uploads[1][1]
    net.upload(told, [2, 4, 5])
    with stopped("message.elsewhere", names="session"):
        net.server.take_upload(1, stale)
    assert set(net.server.excluded) == {1}


# --- wrong answers ----------------------------------------------------------------------------------------


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

    monkeypatch.setattr(bench, "QUICK", {"a.weight": (40, 50), "b.bias": (7,)})
    rows = [*bench.rows(quick=True), *bench.packed_rows(quick=True)]
    assert [row.size for row in rows] == [2_007] * len(rows)
    assert all(row.ratio > 0 and row.seconds > 0 for row in rows)
    names = [row.name for row in rows]
    assert len({(row.name, row.against) for row in rows}) == len(rows) == 2 + 4 * 2 * 4 + 3 * 3
    for count in bench.PACKINGS:
        for case in ("a client masks", "the server unmasks", "a client, 3 of 8 drop, retry included"):
            assert f"{case}, {bench.about(count, 8, False)}, CPU time" in names


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
