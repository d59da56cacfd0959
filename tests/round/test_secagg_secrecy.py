"""What uploads of a secure sum show: noise; and what each key is derived from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from quorumark import field, shamir
from quorumark.consortium.identity import exchange
from quorumark.field import P, Stream, Vector
from quorumark.round.group import Group
from quorumark.round.memory import MemoryState
from quorumark.round.secagg import masks
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.secagg.messages import Plan
from quorumark.round.secagg.server import SecAggServer
from tests.kit.secrecy import ALARM, features
from tests.kit.secure_sums import PEOPLE, Net, without_self_masks

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


def test_one_upload_is_uniform_whatever_the_vector_is() -> None:
    assert_noise(masked)


def test_one_upload_is_uniform_even_to_all_other_members_together() -> None:
    assert_noise(seen_by_all_others)


def test_two_attempts_share_no_mask() -> None:
    assert_noise(difference_of_attempts)


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


def test_masks_of_pairs_are_left_out_only_where_a_simulation_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a server that opened a member's own mask would see its vector."""

    def masked_together(vector: Vector) -> Vector:
        net = Net(3, 2, length=vector.size)
        told = net.announce()
        net.members[1].together = frozenset({1, 2, 3})
        return net.members[1].upload(net.members[1].plan(told), vector.copy()).vector

    assert_noise(masked_together)  # its own mask is there
    without_self_masks(monkeypatch)
    with pytest.raises(AssertionError, match="told apart"):
        assert_noise(masked_together)


def test_the_test_notices_masks_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "Stream", lambda _key, what, *rest: Stream(bytes(32), what, rest[-1]))  # no ctx
    with pytest.raises(AssertionError, match="told apart"):
        assert_noise(difference_of_attempts)


# --- wrong answers ----------------------------------------------------------------------------------------


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
