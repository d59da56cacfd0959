"""Members and servers that send rubbish, and members whose answers are wrong."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from quorumark import field, shamir
from quorumark.errors import InputError, MessageError, RecordError, RoundError
from quorumark.field import P
from quorumark.round.memory import MemoryState
from quorumark.round.secagg import masks
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.secagg.messages import Upload
from tests.kit.refusals import stopped, wrong_argument
from tests.kit.secure_sums import BINDING, LENGTH, PEOPLE, Net

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
        with stopped("message.altered", "message.malformed", "message.elsewhere", names=net.group.name(3)):
            net.server.take_upload(3, spoiled)
        assert (net.server._sum == sum_before).all(), what
        assert set(net.server.excluded) == {3}
        del net.server.excluded[3]
    net.server.excluded[3] = "for a test"
    with stopped("message.excluded", names="for a test"):
        net.server.take_upload(3, bad)
    with stopped("message.unexpected"):  # a second upload, which counts for nothing
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
    with stopped("message.malformed"):
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
    with stopped("round.no-answers"):
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
        with wrong_argument("vector", "out"):
            net.members[1].upload(plan, vector)
    net.members[1].upload(plan, good)  # the attempt was not used up
    for arguments in ((0, BINDING, 5), (1, b"short", 5), (1, BINDING, 0), (1, BINDING, 5, ""), (True, BINDING, 5)):
        with pytest.raises(InputError):
            net.members[2].ready(*arguments)


def test_a_spoiled_ready_excludes_its_sender() -> None:
    net = Net(5, 2)
    good = net.members[3].ready(1, BINDING, LENGTH)
    for bad in (good[:-1], b"", os.urandom(400), net.members[2].ready(1, BINDING, LENGTH)):
        with stopped("message.altered", "message.malformed", "message.elsewhere", names=net.group.name(3)):
            net.server.take_ready(3, bad)
        net.server.excluded.clear()
    other = SecAggMember(PEOPLE[2], net.group, MemoryState(net.group))
    with stopped("message.other-model"):
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
        with stopped("round.wrong-answers"):
            net.server.finish()


def test_a_member_that_deals_wrong_shares_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(7, 2)
    told = net.announce()
    net.upload(told, [1, 2, 3, 5, 6, 7])
    monkeypatch.setattr(shamir, "share", lambda seed, _t, count: field.random(seed.size * count).reshape(count, -1))
    net.upload(told, [4])
    monkeypatch.undo()
    net.answer(net.members)
    with stopped("round.wrong-answers", names=net.group.name(4)):
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
        with stopped("message.altered", "message.malformed", "message.elsewhere", names=net.group.name(1)):
            net.server.take_answer(1, bad)
        net.server.excluded.clear()
    net.answer([3, 4, 5, 6])
    with stopped("message.unexpected"):
        net.server.take_answer(3, good)
    assert (net.server.finish() == net.expected(net.members)).all()
