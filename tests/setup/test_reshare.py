"""New shares of the same key, in one process: what comes out, what t−1 members see, and what is refused."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quorumark import field, shamir
from quorumark.consortium.identity import Identity, verify_chain
from quorumark.consortium.merkle import SALT_ELEMENTS, salt_seed
from quorumark.consortium.records import ARCHIVE_KEY, Genesis, Manifest
from quorumark.consortium.shares import share_root
from quorumark.consortium.succession import check_follows
from quorumark.errors import RecordError, SignatureError
from quorumark.field import P, Vector
from quorumark.setup import ceremony
from quorumark.setup.amend import propose, successor
from quorumark.setup.reshare import ReshareMember
from tests.kit.ceremony import NAMES
from tests.kit.refusals import stopped
from tests.kit.reshare_runs import Reshare, key_of, share_of
from tests.kit.setup_runs import LEAK, Run, score


def founded(count: int, threshold: int, coordinates: int) -> tuple[Run, list[Manifest], dict[int, Vector]]:
    run = Run.start(count, threshold, coordinates)
    chain = [run.whole()]
    shares = {m.point: m.share for m in run.members if m.share is not None}
    return run, chain, shares


def newcomer(index: int = 7) -> Identity:
    return Identity.generate(NAMES[index])


@pytest.mark.parametrize(("count", "threshold"), [(3, 2), (5, 2), (5, 3), (4, 2), (9, 5)])
def test_a_refresh_keeps_the_key_and_changes_every_share(count: int, threshold: int) -> None:
    run, chain, shares = founded(count, threshold, 2500)  # three leaves
    key = run.key()
    again = Reshare(chain, run.terms, run.people, shares)
    chain = again.whole()
    assert (again.key() == key).all()
    for points in itertools.islice(itertools.combinations(range(1, count + 1), threshold), 10):
        assert (again.key(points) == key).all()
    for x, share in again.shares().items():
        assert (share[:2500] != shares[x]).all()
        assert share.size == chain[-1].share_length == 2500 + count * 3 * ARCHIVE_KEY
    assert (chain[-1].epoch, chain[-1].genesis) == (1, chain[0].genesis)
    # roots are those of the new shares
    for m in again.members:
        assert share_root([share_of(m)], m.salt, 1024, chain[-1].share_length).hex() == chain[-1].roots[m.point - 1]


def test_no_part_of_a_stream_serves_two_purposes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member's salts, masks, blindings and archive keys come from one stream, and what two members generate from
    streams of their own: of two things at one place each would show the other."""
    used: dict[bytes, set[tuple[int, int]]] = {}
    purposes: set[str] = set()

    class Watched(field.Stream):
        def __init__(self, secret: bytes, purpose: str, *about: bytes) -> None:
            super().__init__(secret, purpose, *about)
            self._places = used.setdefault(secret, set()) if purpose.endswith(" private") else set()
            purposes.add(purpose)

        def elements(self, count: int, start: int = 0, out: Any = None) -> Any:
            self._places.add((start, start + count))  # the same place for the same thing, however often a step is done
            return super().elements(count, start, out)

    monkeypatch.setattr(ceremony, "Stream", Watched)
    run, chain, shares = founded(5, 3, 30)
    Reshare(chain, run.terms, run.people, shares).whole()
    # a setup: the salt, its five sharings, two masks, a blinding; a resharing has two masks, a number and keys more
    assert sorted(len(places) for places in used.values()) == [9] * 5 + [13] * 5
    for places in used.values():
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(sorted(places)))
    assert {"dkg dealing", "reshare old", "reshare new", "reshare archive keys"} <= purposes


def test_three_refreshes_and_a_reshare_keep_the_key_and_the_chain() -> None:
    run, chain, shares = founded(5, 3, 1100)
    key, people = run.key(), list(run.people)
    for epoch in (1, 2, 3):
        again = Reshare(chain, run.terms, people, shares)
        chain, shares = again.whole(), again.shares()
        assert chain[-1].epoch == epoch
    people.append(newcomer())
    people.append(newcomer(8))
    terms = propose(run.terms, threshold=4, removed=[2], added=[(people[5].card(), 70), (people[6].card(), 80)])
    moved = Reshare(chain, terms, people, shares)
    chain = moved.whole()
    verify_chain(chain)
    assert [m.name for m in chain[-1].terms.roster] == ["Avon", "Cedar", "Delta", "Elm", "Hazel", "Iris"]
    assert (chain[-1].epoch, len(chain), chain[-1].genesis) == (4, 5, chain[0].genesis)
    for points in itertools.combinations(range(1, 7), 4):
        assert (moved.key(points) == key).all()
    # the new threshold holds: three of the new members have nothing, nor do they with the old member who left
    assert not (key_of(moved.shares(), replace(terms, threshold=3)) == key).mean() > 0.2
    mixed = {**{x: moved.shares()[x] for x in (1, 2, 3)}, 9: shares[2]}
    assert not (field.to_signed(shamir.reconstruct({x: v[:1100] for x, v in mixed.items()}, 4)) == key).any()


def test_old_and_new_shares_do_not_mix() -> None:
    run, chain, shares = founded(5, 3, 2000)
    again = Reshare(chain, run.terms, run.people, shares)
    again.whole()
    mixed = {1: shares[1], 2: shares[2], 3: again.shares()[3][:2000]}
    assert not np.isin(field.to_signed(shamir.reconstruct(mixed, 3)), (-1, 1)).any()


def test_the_views_of_t_minus_1_old_and_t_minus_1_new_members_are_unrelated_to_the_key() -> None:
    """Everything that two old members, of whom one leaves, and two of the new members hold or see, and any difference
    of it: |z| < LEAK for each (see tests/setup/test_dkg.py for its false-alarm rate)."""
    run, chain, shares = founded(5, 3, 30_000)
    key = run.key()
    people = [*run.people, newcomer()]
    terms = propose(run.terms, removed=[1], added=[(people[5].card(), 5)])
    moved = Reshare(chain, terms, people, shares).until_dealt().received().differences().rooted()
    # Avon (left) and Birch (stays, now point 1) pool with Hazel, who is new (point 5)
    birch, hazel = moved.members[0], moved.members[4]
    views = {"old share of Avon": shares[1], "old share of Birch": shares[2]}
    for name, member in (("Birch", birch), ("Hazel", hazel)):
        views[f"new share of {name}"] = share_of(member)[:30_000]
        views[f"new part of {name}"] = member._new_rho
    views["old part of Birch"] = birch._old_rho
    for x in moved.messages["difference"]:
        body = birch.read("difference", x, moved.messages["difference"][x]) if x != 1 else birch._own_difference
        views[f"difference of {x}"] = np.frombuffer(body, "<u8").astype(np.uint64)
    opened = shamir.reconstruct({x: views[f"difference of {x - 1}"] for x in (2, 3, 4)}, 3)
    views["τ − ρ"] = opened
    lifted = {name: field.to_signed(view).astype(np.float64) for name, view in views.items()}
    for (one, a), (two, b) in itertools.combinations(views.items(), 2):
        lifted[f"{one} − {two}"] = field.to_signed(field.sub(a, b)).astype(np.float64)
    for name, view in lifted.items():
        assert score(view, key) < LEAK, name
    # the score does find a leak: a third old share opens the key
    third = field.to_signed(shamir.reconstruct({x: shares[x] for x in (1, 2, 3)}, 3)).astype(np.float64)
    assert score(third, key) > LEAK


def _rank(rows: list[list[int]]) -> int:
    """Of a matrix mod p, by elimination in Python ints."""
    rows, rank = [row[:] for row in rows], 0
    for column in range(len(rows[0])):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column] % P), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        inverse = pow(rows[rank][column], -1, P)
        rows[rank] = [v * inverse % P for v in rows[rank]]
        for i in range(len(rows)):
            if i != rank and rows[i][column]:
                factor = rows[i][column]
                rows[i] = [(a - factor * b) % P for a, b in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


def _view_shows_the_key(
    old: tuple[int, int],
    new: tuple[int, int],
    dealers: int,
    old_coalition: set[int],
    new_coalition: set[int],
    rows: int,
) -> bool:
    """The protocol on paper: everything that a coalition sees as linear forms in the key and the honest randomness.

    Old members 1…K, of whom the first `dealers` stay, as new members 1…; `rows` combinations of each dealing are used.
    The view shows something about the keys τ_1…τ_rows iff some combination of it holds a τ and no randomness.
    """
    (_, t), (count, t2) = old, new
    secrets = rows  # the keys of `rows` coordinates that share one position of the dealings
    width = secrets + secrets * (t - 1) + dealers * (t + t2 - 1)

    def form(parts: dict[int, int]) -> list[int]:
        out = [0] * width
        for place, value in parts.items():
            out[place] = (out[place] + value) % P
        return out

    def old_share(a: int, x: int) -> dict[int, int]:
        return {a: 1} | {secrets + a * (t - 1) + i - 1: pow(x, i, P) for i in range(1, t)}

    def dealt(j: int, x: int, fresh: bool) -> dict[int, int]:
        base = secrets * t + j * (t + t2 - 1)  # ρ_j, then the old polynomial's coefficients, then the new one's
        degree, start = (t2, base + t) if fresh else (t, base + 1)
        return {base: 1} | {start + i - 1: pow(x, i, P) for i in range(1, degree)}

    def combined(a: int, x: int, fresh: bool) -> dict[int, int]:
        out: dict[int, int] = {}
        for j in range(dealers):
            for place, value in dealt(j, x, fresh).items():
                out[place] = out.get(place, 0) + pow(j + 1, a, P) * value
        return out

    view = []
    for a in range(secrets):
        view += [form(old_share(a, x)) for x in old_coalition]
        for x in range(1, dealers + 1):  # the differences, which everybody sees
            minus = {place: -value for place, value in combined(a, x, fresh=False).items()}
            view.append([(u + v) % P for u, v in zip(form(old_share(a, x)), form(minus), strict=True)])
    for j in range(dealers):  # what was dealt to the coalition, and everything that it dealt itself
        view += [form(dealt(j, x, fresh=False)) for x in old_coalition if x <= dealers or j + 1 in old_coalition]
        view += [form(dealt(j, x, fresh=True)) for x in new_coalition]
        if j + 1 in old_coalition:
            base = secrets * t + j * (t + t2 - 1)
            view += [form({base + i: 1}) for i in range(t + t2 - 1)]
    assert max(new_coalition, default=0) <= count
    return _rank(view) > _rank([row[secrets:] for row in view])


def test_no_combination_of_what_a_coalition_sees_shows_the_key() -> None:
    """Exactly, not statistically: t−1 old members (who stayed or left) and t′−1 new ones; one more, and it shows."""
    cases = [((3, 2), (3, 2), 3), ((5, 3), (5, 3), 5), ((5, 3), (6, 4), 4), ((4, 3), (5, 2), 3), ((5, 3), (5, 5), 4)]
    for old, new, dealers in cases:
        (count, t), (count2, t2) = old, new
        rows = dealers - t + 1
        for stayed in range(min(t, t2)):  # of the coalition; with them as many who left or came as the thresholds allow
            left = min(t - 1 - stayed, count - dealers)
            came = min(t2 - 1 - stayed, count2 - dealers)
            inside = set(range(1, stayed + 1))
            before = inside | set(range(dealers + 1, dealers + 1 + left))
            after = inside | set(range(dealers + 1, dealers + 1 + came))
            assert not _view_shows_the_key(old, new, dealers, before, after, rows)
            # the measure is no formality: one old member too many, or one combination too many, and it shows
            assert _view_shows_the_key(old, new, dealers, set(range(1, t + 1)), after, rows)
            if stayed == t - 1:
                assert _view_shows_the_key(old, new, dealers, before, after, rows + 1)


@pytest.mark.parametrize(("count", "threshold"), [(5, 2), (5, 3), (7, 3)])
def test_members_deal_for_as_many_combinations_as_that_allows(count: int, threshold: int) -> None:
    """What members send has the lengths of m = |D|−t+1 combinations, the number that the test above is about."""
    run, chain, shares = founded(count, threshold, 600)  # one leaf
    again = Reshare(chain, run.terms, run.people, shares).until_dealt()
    length, small = -(-600 // (count - threshold + 1)), SALT_ELEMENTS + 4
    for dealer in range(1, count + 1):
        after = [again.members[(dealer + i) % count] for i in range(count - 1)]
        sizes = [len(m.read("deal", dealer, again.deals[dealer][m.point])) // 8 for m in after]
        # t−1 have everything generated, the next one all but its new values, the others nothing
        some, all_ = small + length + ARCHIVE_KEY, small + 2 * length + ARCHIVE_KEY
        assert sizes == [small] * (threshold - 1) + [some] + [all_] * (count - 1 - threshold)


def test_traffic_of_a_refresh() -> None:
    """About six vectors, sent and received, and all differences read."""
    run, chain, shares = founded(9, 3, 7000)
    again = Reshare(chain, run.terms, run.people, shares).until_dealt().received().differences()
    sent = sum(map(len, again.deals[1].values()))
    received = sum(len(again.deals[x][1]) for x in range(2, 10))
    overhead = 16 * 1000 + 2 * 9 * 8 * 7 * ARCHIVE_KEY
    assert sent + received <= 8 * 7000 * 4 + overhead


# --- faults -----------------------------------------------------------------------------------------------


def _say(member: ReshareMember, step: str, vector: Vector) -> bytes:
    return member._say(step, vector.astype("<u8").tobytes())


def test_a_wrong_difference_is_named_before_anything_hangs_on_it() -> None:
    run, chain, shares = founded(5, 3, 500)
    again = Reshare(chain, run.terms, run.people, shares).until_dealt().received().differences()
    wrong = field.add(
        np.frombuffer(again.members[3]._own_difference, "<u8").astype(np.uint64), np.full(500, 1, np.uint64)
    )
    again.messages["difference"][4] = _say(again.members[3], "difference", wrong)
    with stopped("ceremony.wrong-share", names="'Delta'"):
        again.members[0].root(again.messages["difference"])


def test_differences_told_differently_are_noticed() -> None:
    run, chain, shares = founded(4, 2, 500)
    again = Reshare(chain, run.terms, run.people, shares).until_dealt().received().differences()
    # a consistent lie: everybody's difference shifted by the same constant polynomial, for one member only
    lie = {}
    for m in again.members:
        vector = np.frombuffer(m._own_difference, "<u8").astype(np.uint64)
        lie[m.point] = _say(m, "difference", field.add(vector, np.full(500, 5, np.uint64)))
    again.messages["root"] = {m.point: m.root(again.messages["difference"]) for m in again.members[1:]}
    victim = again.members[0]
    victim._own_difference = field.add(
        np.frombuffer(victim._own_difference, "<u8").astype(np.uint64), np.full(500, 5, np.uint64)
    ).tobytes()
    again.messages["root"][1] = victim.root(lie)
    with stopped("ceremony.members-differ"):
        again.members[1].echo(again.messages["root"])


def test_a_dealer_whose_two_sharings_differ_is_caught() -> None:
    """It would move everybody to another key; the old shares and the new ones must open to the same number."""
    run, chain, shares = founded(5, 3, 500)
    again = Reshare(chain, run.terms, run.people, shares)
    liar = again.members[2]
    honest = liar._share_new
    liar._share_new = lambda secret, purpose: honest(  # type: ignore[method-assign]
        field.add(secret, np.full(secret.size, 7, np.uint64)) if purpose == "new" else secret, purpose
    )
    with stopped("ceremony.wrong-dealing"):
        again.until_dealt().received().differences().rooted().healthy()


def test_a_member_who_computes_a_wrong_new_share_is_named() -> None:
    run, chain, shares = founded(5, 3, 500)
    again = Reshare(chain, run.terms, run.people, shares).until_dealt().received().differences()
    faulty = again.members[4]
    faulty._new_rho = field.add(faulty._new_rho, np.full(500, 1, np.uint64))
    with stopped("ceremony.wrong-share", names="'Elm'"):
        again.rooted().healthy()


def test_a_member_with_wrong_archive_keys_is_named() -> None:
    run, chain, shares = founded(5, 3, 500)
    again = Reshare(chain, run.terms, run.people, shares).until_dealt().received().differences()
    faulty = again.members[4]
    faulty._key_shares[0] = field.add(faulty._key_shares[0], np.full(ARCHIVE_KEY, 1, np.uint64))
    with stopped("ceremony.wrong-share", names="'Elm'"):
        again.rooted().healthy()


def test_health_answers_are_masked() -> None:
    run, chain, shares = founded(5, 3, 50)
    again = Reshare(chain, run.terms, run.people, shares).until_dealt().received().differences().rooted()
    again.each("echo", lambda m: m.echo(again.messages["root"]))
    key = field.from_signed(run.key())
    member = again.members[0]
    bare = member._combined(member._seen_roots, "key", [key])[0]
    unmasked = {m.point: member._combined(member._seen_roots, "key", [share_of(m)[:50]])[0] for m in again.members}
    assert shamir.decode(unmasked, 3).value == bare  # without masks, Σ ρ_j·τ_j is open
    answers = {m.point: int(m._answer[0]) for m in again.members}
    assert shamir.decode(answers, 3).value != bare
    masks = {m.point: (int(m._answer[0]) - unmasked[m.point]) % P for m in again.members}
    assert shamir.decode(masks, 3).wrong == ()


def test_messages_of_a_setup_or_of_another_resharing_are_refused() -> None:
    run, chain, shares = founded(3, 2, 50)
    one = Reshare(chain, run.terms, run.people, shares).until_dealt()
    two = Reshare(chain, run.terms, run.people, shares).until_dealt()
    member = one.members[0]
    with stopped("message.elsewhere", names="'Birch' for step 'reshare/deal'"):
        member.receive({2: two.deals[2][1], 3: one.deals[3][1]})
    with stopped("message.elsewhere", names="'Birch' for step 'reshare/commit'"):
        ReshareMember(run.people[0], chain, run.terms, bytes(32), shares[1]).reveal(run.messages["commit"])
    with stopped("ceremony.messages-missing", names="'Cedar'"):
        member.receive({2: one.deals[2][1]})
    with stopped("ceremony.no-share"):
        ReshareMember(run.people[0], chain, run.terms, bytes(32), None)


def test_two_resharings_from_one_manifest_share_no_randomness() -> None:
    """A member that starts anew draws a new seed; even with the same seed, another session gives other dealings."""
    run, chain, shares = founded(3, 2, 50)
    seen: list[Any] = []
    for _ in range(2):
        again = Reshare(chain, run.terms, run.people, shares)
        again.members[0] = ReshareMember(run.people[0], chain, run.terms, b"\1" * 32, shares[1])
        again.until_dealt()
        seen.append(again.members[0]._dealing()[1])
    assert all((a != b).any() for a, b in zip(seen[0][:-1], seen[1][:-1], strict=True))


def test_a_member_cannot_plant_a_key_that_it_knows() -> None:
    """Three stay of a threshold of three: one who shifts its difference, and its old answer with it, moves everybody to
    the key τ + v. What comes out are no signs."""
    run, chain, shares = founded(5, 3, 400)
    people = [*run.people, newcomer(), newcomer(8)]
    terms = propose(run.terms, removed=[4, 5], added=[(people[5].card(), 5), (people[6].card(), 5)])
    liar_share = field.add(shares[1], np.full(400, 9, np.uint64))
    moved = Reshare(chain, terms, people, {**shares, 1: liar_share})
    assert len(moved.members[0].dealers) == 3
    with stopped("ceremony.wrong-dealing"):
        moved.until_dealt().received().differences().rooted().healthy()
    assert moved.members[0].unchecked == ""
    # where squares cannot be checked, the members are told what nobody would notice
    four = propose(run.terms, removed=[4, 5], added=[(people[5].card(), 5)])
    assert (
        "1 who lie could change the key unnoticed"
        in ReshareMember(run.people[0], chain, four, bytes(32), shares[1]).unchecked
    )


def test_every_stream_of_every_session_is_another() -> None:
    """Dealer, recipient, purpose and session: what two of them shared would be known to one who should not know it."""
    run, chain, shares = founded(4, 2, 60)
    seen: dict[tuple[int, ...], tuple[object, ...]] = {}
    for session in range(2):
        again = Reshare(chain, run.terms, run.people, shares)
        for i, person in enumerate(run.people):  # the same seeds twice: only the session differs, by one member's nonce
            seed = bytes([i + 1] * 32) if i else os.urandom(32)
            again.members[i] = ReshareMember(person, chain, run.terms, seed, shares[i + 1])
        again.until_dealt()
        for m in again.members:
            for other in range(1, 5):
                for purpose in ("old", "new", "archive keys"):
                    first = tuple(int(v) for v in m._dealt_stream(m.point, other, purpose).elements(3))
                    assert first not in seen, (m.point, other, purpose, session, seen.get(first))
                    seen[first] = (m.point, other, purpose, session)
    # and what is dealt comes from exactly these streams
    dealer = again.members[0]
    purposes: list[str] = []
    honest = dealer._dealt_stream
    dealer._dealt_stream = lambda *a: purposes.append(a[2]) or honest(*a)  # type: ignore[method-assign,func-returns-value]
    dealer._dealing()
    assert sorted(set(purposes)) == ["archive keys", "new", "old"]
    assert purposes.count("old") == 2
    assert purposes.count("new") == purposes.count("archive keys") == 1


def test_no_answer_of_a_resharing_is_bare() -> None:
    run, chain, shares = founded(5, 3, 50)
    again = Reshare(chain, run.terms, run.people, shares).until_dealt().received().differences().rooted()
    again.each("echo", lambda m: m.echo(again.messages["root"]))
    for m in again.members:
        share, seen = share_of(m), m._seen_roots
        bare = [
            m._combined(seen, "key", [share[:50]])[0],
            m._combined(seen, "archive keys", [share[50:]])[0],
            m._combined(seen, "square", [share[:50]], squares=True)[0],
            m._combined(seen, "key", [shares[m.point]])[0],
        ]
        assert len(m._answer) == 4
        assert not set(bare) & {int(v) for v in m._answer}
    # all masks are fresh sharings of their degree: random, none of them of degree 0
    for i, degree in ((0, 2), (1, 2), (2, 4), (3, 2)):
        masks = {m.point: m._masks[i] for m in again.members}
        assert shamir.decode(masks, degree + 1).wrong == ()
        assert len(set(masks.values())) == 5
    assert shamir.decode({m.point: m._masks[2] for m in again.members}, 5).value == 0
    salts = {m.point: int(m.others_salts[0][0]) for m in again.members}
    assert len(set(salts.values())) == 5


def test_who_does_not_keep_to_its_word_is_named() -> None:
    run, chain, shares = founded(5, 3, 50)
    again = Reshare(chain, run.terms, run.people, shares)
    again.each("commit", lambda m: m.commit())
    again.each("reveal", lambda m: m.reveal(again.messages["commit"]))
    other = ReshareMember(run.people[1], chain, run.terms, os.urandom(32), shares[2])
    other.commit()
    changed = {**again.messages["reveal"], 2: other.reveal(again.messages["commit"])}
    with stopped("message.not-as-committed", names="'Birch'"):
        again.members[0].deal(changed)
    again = Reshare(chain, run.terms, run.people, shares).until_dealt().received().differences().rooted()
    false_root = {
        **again.messages["root"],
        3: again.members[2]._say("root", bytes(32) + again.members[2]._seen_differences),
    }
    again.messages["echo"] = {
        m.point: m.echo(false_root if m.point == 5 else again.messages["root"]) for m in again.members
    }
    with stopped("ceremony.members-differ", names="'Elm'"):
        again.members[0].health(again.messages["echo"])
    again = Reshare(chain, run.terms, run.people, shares).until_dealt().received().differences().rooted()
    again.each("echo", lambda m: m.echo(again.messages["root"]))
    again.each("health", lambda m: m.health(again.messages["echo"]))
    liar = again.members[3]
    liar._answer = field.add(liar._answer, np.ones(4, np.uint64))
    again.messages["health"][4] = liar.health(again.messages["echo"])
    with stopped("message.not-as-committed", names="'Delta'"):
        again.members[0].finish(again.messages["health"])


# --- chains -----------------------------------------------------------------------------------------------


def test_successors_that_are_not_allowed() -> None:
    run, chain, _ = founded(5, 3, 300)
    terms, first = run.terms, chain[0]
    stranger = newcomer()
    with pytest.raises(RecordError, match="must keep at least 3 members with their keys, but keeps 2"):
        propose(terms, removed=[1, 2, 3], added=[(newcomer(i).card(), 1) for i in (5, 6, 7)])
    with pytest.raises(RecordError, match="no member at point 9"):
        propose(terms, removed=[9])
    with stopped("ceremony.needs-new-shares"):
        successor(first, propose(terms, threshold=2))
    with stopped("ceremony.needs-new-shares"):
        successor(first, propose(terms, removed=[1], added=[(stranger.card(), 1)]))
    good = successor(first, propose(terms, examples={2: 999}))
    for change, text in [
        ({"predecessor": "ab" * 32}, "name its predecessor by digest"),
        ({"roots": ("11" * 32,) * 5}, "must leave the shares as they are"),
        ({"epoch": 2, "archived": (1, 2, 3), "roots": ("11" * 32,) * 5}, "must be the next one"),
        ({"genesis": replace(first.genesis, session="11" * 32)}, "genesis must not change"),
    ]:
        with pytest.raises(RecordError, match=text):
            check_follows(replace(good, **change), first)  # type: ignore[arg-type]
    for name, value in (("layout", "11" * 32), ("anchor", "11" * 32), ("statistic", "other/v1"), ("coordinates", 299)):
        with pytest.raises(
            RecordError, match=f"successor's {name} must not change|genesis must have the terms' layout"
        ):
            check_follows(replace(good, terms=replace(good.terms, **{name: value})), first)  # type: ignore[arg-type]
    for name, value in (("name", "clinics"), ("key", "gaussian"), ("setup", "paper"), ("leaf", 512)):
        with pytest.raises(RecordError, match=f"successor's {name} must not change: the key depends on it"):
            check_follows(replace(good, terms=replace(good.terms, **{name: value})), first)  # type: ignore[arg-type]
    # nobody makes fewer members enough by signatures alone
    with pytest.raises(RecordError, match="must keep the threshold and the number of members"):
        check_follows(replace(good, terms=replace(good.terms, threshold=2)), first)
    # a member's point is its share: two members cannot trade places by an amendment
    a, b, *others = good.terms.roster
    traded = replace(good.terms, roster=(replace(b, point=1), replace(a, point=2), *others))
    with pytest.raises(RecordError, match="at their points"):
        check_follows(replace(good, terms=traded), first)


def _signed(manifest: Manifest, people: Sequence[Identity]) -> Manifest:
    for person in people:
        point = manifest.terms.point_of(person.ed25519)
        manifest = manifest.with_signature(point, person.sign("manifest", manifest.sign_bytes()))
    return manifest


def test_every_rule_of_a_successor_is_checked() -> None:
    run, chain, shares = founded(7, 3, 300)
    first, terms = chain[0], run.terms
    # more than half must stay, not only t: 3 of 7 are not enough
    strangers = [newcomer(i) for i in (7, 8)] + [Identity.generate(f"new {i}") for i in range(2)]
    with pytest.raises(RecordError, match="at least 4 members with their keys, but keeps 3"):
        propose(terms, removed=[1, 2, 3, 4], added=[(p.card(), 1) for p in strangers])
    # who keeps one of its two keys has not stayed: 3 + one with another x25519 are not enough either
    half = replace(terms.roster[0], x25519=strangers[0].x25519)
    rest = [
        replace(m, ed25519=p.ed25519, x25519=p.x25519) for m, p in zip(terms.roster[1:4], strangers[1:], strict=True)
    ]
    from quorumark.consortium.succession import check_terms_follow

    with pytest.raises(RecordError, match="keeps 3"):
        check_terms_follow(replace(terms, roster=(half, *rest, *terms.roster[4:])), terms)
    after = Reshare(chain, terms, run.people, shares).whole()[-1]
    check_follows(after, first)
    with pytest.raises(RecordError, match="new shares for everybody"):
        check_follows(replace(after, roots=(first.roots[0], *after.roots[1:])), first)
    later = replace(after, epoch=2, predecessor=after.digest().hex(), roots=tuple(f"{i:02x}" * 32 for i in range(7)))
    check_follows(later, after)
    with pytest.raises(RecordError, match="archives must not change"):
        check_follows(replace(later, archived=(1, 2, 3)), after)
    # every link's signatures count, those in the middle too
    middle = replace(after, signatures={**after.signatures, 2: after.signatures[1]})
    good = _signed(later, run.people)
    verify_chain([first, after, good])
    with pytest.raises(SignatureError, match="Birch"):
        verify_chain([first, middle, good])


def test_a_dealers_commitment_does_not_change() -> None:
    people = [Identity.generate(name) for name in NAMES[:3]]
    from tests.kit.ceremony import make_terms

    terms = make_terms(people, 2, 300, setup="dealer")
    roots = tuple(f"{i:02x}" * 32 for i in range(3))
    session = "ab" * 32
    genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, session, roots)
    first = Manifest(terms, genesis, roots, commitment={"hash": "11" * 32, "nonce": "22" * 32})
    good = successor(first, propose(terms, examples={1: 7}))
    check_follows(good, first)
    with pytest.raises(RecordError, match="commitment must not change"):
        check_follows(replace(good, commitment={"hash": "33" * 32, "nonce": "22" * 32}), first)
    rubbish: list[Any] = [[], "text", 5]
    for commitment in rubbish:
        with pytest.raises(RecordError, match="commitment"):
            replace(first, commitment=commitment)


def test_a_chain_needs_every_link_and_every_signature() -> None:
    run, chain, _ = founded(5, 3, 300)
    terms = propose(run.terms, examples={2: 999})
    manifest = successor(chain[0], terms)
    for person in run.people[:4]:
        point = terms.point_of(person.ed25519)
        manifest = manifest.with_signature(point, person.sign("manifest", manifest.sign_bytes()))
    with pytest.raises(SignatureError, match="lacks the signature of Elm"):
        verify_chain([chain[0], manifest])
    elm = run.people[4].sign("manifest", manifest.sign_bytes())
    verify_chain([chain[0], manifest.with_signature(5, elm)])
    with pytest.raises(RecordError, match="does not reach the first one"):
        verify_chain([manifest.with_signature(5, elm)])
    with pytest.raises(SignatureError):
        verify_chain([chain[0], manifest.with_signature(5, chain[0].sign_bytes() * 2)])


def test_a_stolen_key_is_replaced_by_the_others() -> None:
    """Elm's keys were stolen: the other four and Elm's new key sign; the thief's signature counts no more."""
    run, chain, _ = founded(5, 3, 300)
    thief, elm = run.people[4], Identity.generate("Elm again")
    terms = propose(run.terms, replaced={5: elm.card()})
    manifest = successor(chain[0], terms)
    for point, person in enumerate([*run.people[:4], elm], 1):
        manifest = manifest.with_signature(point, person.sign("manifest", manifest.sign_bytes()))
    verify_chain([chain[0], manifest])
    forged = manifest.with_signature(5, thief.sign("manifest", manifest.sign_bytes()))
    with pytest.raises(SignatureError, match="Elm again"):
        verify_chain([chain[0], forged])
    # and the thief cannot take over with fewer than t others: two members and two sybils of its own
    sybils = [Identity.generate(f"sybil {i}") for i in range(3)]
    with pytest.raises(RecordError, match="keeps 2"):
        propose(run.terms, replaced={x: sybils[i].card() for i, x in enumerate((1, 2, 3))})


def test_salts_of_the_new_epoch_are_shared() -> None:
    """Any t members can give a member its salt back: that is what a recovery needs."""
    run, chain, shares = founded(5, 3, 100)
    again = Reshare(chain, run.terms, run.people, shares)
    again.whole()
    for m in again.members:
        parts = {o.point: o.others_salts[m.point - 1] for o in again.members[1:4]}
        salt = shamir.reconstruct(parts, 3)
        assert (salt == m.salt).all()
        assert salt.size == SALT_ELEMENTS
        assert salt_seed(salt) == salt_seed(m.salt)
