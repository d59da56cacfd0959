"""The dealer-free setup in one process: what comes out, what t−1 members see, and what is refused."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark import field, shamir
from quorumark.canonical import digest
from quorumark.consortium.identity import Header, exchange, open_message, verify_manifest
from quorumark.errors import InputError, SignatureError
from quorumark.field import P, Vector
from quorumark.setup import dkg
from quorumark.setup.dkg import DkgMember, neighbours, relay_sum
from quorumark.setup.paper import PaperMember
from tests.kit.ceremony import identities, make_terms
from tests.kit.refusals import stopped
from tests.kit.setup_runs import LEAK, Run, score, share


@pytest.mark.parametrize(("count", "threshold"), [(3, 2), (4, 2), (5, 2), (5, 3), (7, 4), (9, 4)])
def test_any_t_members_hold_the_same_signs(count: int, threshold: int) -> None:
    run = Run.start(count, threshold, 101)
    manifest = run.whole()
    verify_manifest(manifest)
    key = run.key()
    assert set(np.unique(key)) == {-1, 1}
    for chosen in itertools.islice(itertools.combinations(range(1, count + 1), threshold), 20):
        assert (run.key(chosen) == key).all()


def test_keys_are_balanced_and_two_runs_unrelated() -> None:
    """|z| < 6 each: a false alarm less than once in 10^8 runs."""
    people = identities(5)
    first, second = (Run.start(5, 3, 20_000, people) for _ in range(2))
    manifests = [first.whole(), second.whole()]
    assert manifests[0].genesis.session != manifests[1].genesis.session
    a, b = first.key(), second.key()
    root = np.sqrt(len(a))
    assert abs(a.sum()) < 6 * root
    assert abs(b.sum()) < 6 * root
    assert abs(a @ b) < 6 * root


def _views(run: Run, coalition: tuple[int, ...]) -> dict[str, NDArray[np.float64]]:
    """Everything per coordinate that a coalition and the relay hold, as numbers in (−1, 1)."""

    def real(x: Vector) -> NDArray[np.float64]:
        return field.to_signed(x) / (P / 2)

    views = {"squares": np.frombuffer(run.total, "<u8").astype(np.uint64)}
    for x in coalition:
        views[f"share of {x}"] = share(run.members[x - 1])
        views[f"r of {x}"] = run.members[x - 1]._received()
    for x, message in run.messages["open"].items():
        views[f"opening of {x}"] = np.frombuffer(message[-8 * run.terms.coordinates :], "<u8").astype(np.uint64)
    # the best guess of a coalition: interpolate as if the degree were lower
    points = {x: share(run.members[x - 1]) for x in coalition}
    if len(points) >= 2:
        views["interpolation"] = shamir.reconstruct(points, len(points))
    for a, b in itertools.combinations(list(points), 2):
        views[f"sum {a}+{b}"] = field.add(points[a], points[b])
        views[f"product {a}·{b}"] = field.mul(points[a], points[b])
    return {name: real(v) for name, v in views.items()}


def _worst(run: Run, coalition: tuple[int, ...]) -> tuple[str, float]:
    key = run.key()
    scores = {n: score(v, key) for n, v in _views(run, coalition).items()}
    name = max(scores, key=lambda n: scores[n])
    return name, scores[name]


def test_the_view_of_t_minus_1_members_and_the_relay_is_unrelated_to_the_key() -> None:
    for count, threshold, coalition in ((5, 3, (1, 2)), (5, 3, (2, 5)), (7, 4, (1, 4, 7))):
        run = Run.start(count, threshold, 30_000)
        run.until_dealt().received().opened().shared()
        name, score = _worst(run, coalition)
        assert score < LEAK, name


def test_the_same_score_finds_the_papers_leak() -> None:
    """The paper's protocol, run: m members know the sum of their own parts, a vector with cosine √(m/K) to the key."""
    for count, threshold, coalition in ((4, 3, 1), (4, 3, 2), (5, 3, 2), (9, 4, 3)):
        people = identities(count)
        terms = make_terms(people, threshold, 250_000, setup="paper", key="gaussian")
        members = [PaperMember(person, terms, os.urandom(32)) for person in people]
        commits = {m.point: m.commit() for m in members}
        reveals = {m.point: m.reveal(commits) for m in members}
        deals = {m.point: m.deal(reveals) for m in members}
        for m in members:
            m.receive({x: deals[x][m.point] for x in deals if x != m.point})
            m.root()
        shares = {m.point: m.share for m in members[:threshold] if m.share is not None}
        key = field.to_signed(shamir.reconstruct(shares, threshold)).astype(np.float64)
        known = sum(field.to_signed(m.part()).astype(np.float64) for m in members[:coalition])
        cosine = float(known @ key / np.linalg.norm(known) / np.linalg.norm(key))
        # two digits: the cosine's standard deviation is below 1/√d = 0.002, so 0.01 is five of them
        assert cosine == pytest.approx(np.sqrt(coalition / count), abs=0.01)
        assert score(np.asarray(known), key) > 10 * LEAK
        # and their shares alone, without their own parts, say nothing: it is the protocol that leaks, not the sharing
        assert score(field.to_signed(shares[1]).astype(np.float64), key) < LEAK


def test_no_t_minus_1_members_cut_the_ring_of_masks() -> None:
    """All sets of colluders, for small t: the honest openers stay connected. With fewer neighbours some set cuts it."""

    def cut(threshold: int, reach: int) -> bool:
        chosen = tuple(range(1, 2 * threshold))
        ties = {x: set(neighbours(chosen, x, reach)) for x in chosen}
        for colluders in itertools.combinations(chosen, threshold - 1):
            honest = set(chosen) - set(colluders)
            reached = todo = {min(honest)}
            while todo:
                todo = {y for x in todo for y in ties[x]} & honest - reached
                reached = reached | todo
            if reached != honest:
                return True
        return False

    for threshold in range(2, 8):
        assert not cut(threshold, threshold)
        assert neighbours((1, 2, 3), 1, 2) == [2, 3]
    assert cut(5, 3)
    assert cut(7, 5)


# --- known traps ------------------------------------------------------------------------------------------


def test_dealings_are_derived_in_order() -> None:
    """With one stream for both directions f_i(x_j) = f_j(x_i): the combinations are no longer random sharings."""
    honest = Run.start(3, 2, 50).until_dealt()
    a, b = honest.members[0], honest.members[1]
    forward, back = a._dealt_stream(1, 2).elements(5), a._dealt_stream(2, 1).elements(5)
    assert (forward == b._dealt_stream(1, 2).elements(5)).all()
    assert not (forward == back).any()


def test_what_members_say_is_what_the_format_says() -> None:
    """docs/format.md, "Messages": all that others must be able to check, from what was said alone; and a pair's key."""
    run = Run.start(5, 2, 30)
    run.whole()
    context, session = run.terms.digest(), bytes.fromhex(run.members[0].session)

    def said(step: str) -> dict[int, bytes]:
        bound = bytes(32) if step in ("commit", "reveal") else session
        headers = {x: Header(context.hex(), bound.hex(), f"dkg/{step}", x) for x in run.messages[step]}
        return {x: open_message(data, run.terms, headers[x]) for x, data in run.messages[step].items()}

    def number(n: int) -> bytes:
        return n.to_bytes(8, "big")

    reveals, roots, healths = said("reveal"), said("root"), said("health")
    assert session == digest("dkg session", context, b"".join(reveals[x] for x in sorted(reveals)))
    assert said("commit") == {x: digest("dkg commit", context, number(x), body) for x, body in reveals.items()}
    assert set(said("confirm").values()) == {digest("dkg squares", run.total)}
    seen = [session, *(roots[x] for x in sorted(roots))]
    assert said("echo") == {
        x: digest("dkg roots", *seen) + digest("dkg answer", session, number(x), body[:16], body[16:])
        for x, body in healths.items()
    }
    # the answers' masks for squares are shares of zero: what they open is public
    rho = field.Stream(digest("dkg health", *seen), "square").elements(30)
    squares = {x: int.from_bytes(body[8:16], "little") for x, body in healths.items()}
    assert shamir.decode(squares, 3).value == sum(map(int, rho)) % P
    # who reads one of the two secrets later, the lasting one or the session's, has no pair's key
    lasting = run.people[0].exchange(run.people[1].x25519)
    pair = field.derive_key(exchange(run.members[0]._key, reveals[2][32:].hex()) + lasting, "dkg pair", session)
    dealt = field.Stream(pair, "dkg dealing", number(1), number(2)).elements(5)
    assert (dealt == run.members[1]._dealt_stream(1, 2).elements(5)).all()


@pytest.mark.parametrize(("count", "threshold"), [(5, 2), (5, 3), (7, 2)])
def test_no_more_numbers_are_made_than_honest_dealings_hide(count: int, threshold: int) -> None:
    """Of K dealings t−1 colluders know theirs: K−t+1 combinations are uniform to them, and one more is a relation."""
    run = Run.start(count, threshold, 600).until_dealt()
    length = -(-600 // (count - threshold + 1))
    for m in run.members:
        sizes = [len(m.read("deal", x, run.deals[x][m.point])) // 8 for x in run.deals if x != m.point]
        # t of the others have it generated
        assert sorted(sizes) == [7] * threshold + [7 + length] * (count - 1 - threshold)


def test_one_dealer_short_is_refused() -> None:
    run = Run.start(5, 3, 20).until_dealt()
    deals = {x: run.deals[x][1] for x in (2, 3, 4)}
    with stopped("ceremony.messages-missing", names="'Elm'"):
        run.members[0].receive(deals)
    with stopped("ceremony.too-early"):
        run.members[0].open()


def test_one_dealer_short_with_m_unchanged_would_leak() -> None:
    """K = 3, t = 2, m = 2 combinations of dealers 1 and 2 only: member 1 knows its own dealing and one equation of
    dealer 2's two shares, so from its share of both combinations it can eliminate the unknown dealer."""
    rng = np.random.default_rng(2)
    own, other = (rng.integers(0, P, 2, dtype=np.uint64).astype(object) for _ in range(2))  # (secret, slope) of each
    # combinations at the secret: r_0 = a + b, r_1 = 1·a + 2·b with a = own secret, known: both r from one square
    r0, r1 = (own[0] + other[0]) % P, (own[0] + 2 * other[0]) % P
    squares = r0 * r0 % P, r1 * r1 % P
    roots = [(s, P - s) for s in (pow(int(q), (P + 1) // 4, P) for q in squares)]
    # member 1 tries the four sign patterns; only the right one fits r_1 = 2·r_0 − a
    fits = [(u, v) for u in roots[0] for v in roots[1] if (2 * u - own[0]) % P == v]
    assert fits == [(r0, r1)]


def test_an_equivocated_opening_is_refused_before_a_share_exists() -> None:
    run = Run.start(5, 3, 20).until_dealt().received().opened()
    squares = np.frombuffer(run.total, "<u8").astype(np.uint64).copy()
    squares[3] = 4
    run.each("confirm", lambda m: m.confirm(squares.astype("<u8").tobytes() if m.point == 4 else run.total))
    for m in run.members:
        with stopped("ceremony.members-differ"):
            m.root(run.messages["confirm"])
        assert m.share is None


def test_dealings_are_opened_once() -> None:
    run = Run.start(5, 2, 20).until_dealt().received()
    member = run.members[0]
    body = member.open((1, 2, 3))[-160:]
    assert member.open((1, 2, 3))[-160:] == body  # after a crash: the same again
    with stopped("ceremony.opened-already"):
        member.open((1, 2, 4))


def test_members_who_saw_other_roots_stop_before_they_answer() -> None:
    """Answers for different weights under one mask would open equations in the key."""
    run = Run.start(5, 3, 20).until_dealt().received().opened().shared()
    elm = run.members[4]
    other = elm._say("root", os.urandom(32))
    run.each("echo", lambda m: m.echo({**run.messages["root"], 5: other} if m.point == 2 else run.messages["root"]))
    for m in run.members:
        with stopped("ceremony.members-differ"):
            m.health(run.messages["echo"])


def test_the_last_to_answer_cannot_fit_its_answer_to_the_others() -> None:
    run = Run.start(3, 2, 20).until_dealt().received().opened().shared()
    for m in run.members:
        share(m)[3] = 2 * int(share(m)[3]) % P
    run.each("echo", lambda m: m.echo(run.messages["root"]))
    run.each("health", lambda m: m.health(run.messages["echo"]))
    cheat = run.members[2]
    answers = {m.point: int(m._answer[1]) for m in run.members}
    weights = shamir.lagrange([1, 2, 3])
    wanted = (cheat._expected - weights[0] * answers[1] - weights[1] * answers[2]) * pow(weights[2], -1, P) % P
    forged = np.array([int(cheat._answer[0]), wanted], np.uint64)
    run.messages["health"][3] = cheat._say("health", forged.astype("<u8").tobytes() + cheat._blind)
    with stopped("message.not-as-committed", names="'Cedar'"):
        run.members[0].finish(run.messages["health"])


def test_an_opening_alone_says_nothing_and_sets_do_not_mix() -> None:
    run = Run.start(5, 2, 20).until_dealt().received()
    parts = {1: run.members[0].open((1, 2, 3)), 2: run.members[1].open((1, 2, 3)), 4: run.members[3].open((1, 2, 4))}
    total = relay_sum(run.terms, run.members[0].session, parts)
    run.each("confirm", lambda m: m.confirm(total))
    with stopped("ceremony.wrong-dealing"):
        run.members[0].root(run.messages["confirm"])


def test_unmasked_health_answers_would_open_the_key_and_ours_are_masked() -> None:
    run = Run.start(5, 3, 50).until_dealt().received().opened().shared()
    run.each("echo", lambda m: m.echo(run.messages["root"]))
    run.each("health", lambda m: m.health(run.messages["echo"]))
    key = run.key()
    rho = field.Stream(run.members[0]._coins, "degree").elements(50)
    leak = field.dot(rho, field.from_signed(key))
    bare = {m.point: field.dot(rho, share(m)) for m in run.members}
    assert shamir.decode(bare, 3).value == leak  # without masks, Σ ρ_j·τ_j is open
    answers = {m.point: int(m._answer[0]) for m in run.members}
    assert shamir.decode(answers, 3).value != leak


# --- faults -----------------------------------------------------------------------------------------------


def test_the_health_check_names_a_faulty_member() -> None:
    run = Run.start(7, 3, 50).until_dealt().received().opened().shared()
    faulty = run.members[4]
    share(faulty)[7] = (int(share(faulty)[7]) + 1) % P
    run.each("echo", lambda m: m.echo(run.messages["root"]))
    run.each("health", lambda m: m.health(run.messages["echo"]))
    with stopped("ceremony.wrong-share", names="'Elm'"):
        run.members[0].finish(run.messages["health"])


def test_the_health_check_notices_shares_of_something_else_than_signs() -> None:
    run = Run.start(5, 3, 50).until_dealt().received().opened().shared()
    for m in run.members:  # everybody scales one coordinate alike: still a polynomial, no longer ±1
        share(m)[3] = 2 * int(share(m)[3]) % P
    run.each("echo", lambda m: m.echo(run.messages["root"]))
    run.each("health", lambda m: m.health(run.messages["echo"]))
    with stopped("ceremony.wrong-dealing"):
        run.members[0].finish(run.messages["health"])


def test_messages_of_another_session_step_or_sender_are_refused() -> None:
    people = identities(3)
    old = Run.start(3, 2, 20, people).until_dealt()
    run = Run.start(3, 2, 20, people).until_dealt()
    good = {x: run.deals[x][1] for x in (2, 3)}
    member = run.members[0]
    for wrong, code, names in [
        (old.deals[2][1], "message.elsewhere", "session"),
        (run.deals[2][3], "message.elsewhere", "recipient is 3, not 1"),
        (run.deals[3][1], "message.elsewhere", "sender is 3, not 2"),
        (run.messages["reveal"][2], "message.elsewhere", "step"),
        (good[2][:-1], "message.altered", "'Birch'"),
        (b"", "message.malformed", "'Birch'"),
    ]:
        with stopped(code, names=names):
            member.receive({**good, 2: wrong})
    member.receive(good)  # and with the right one it goes on


def test_numbers_outside_the_field_are_refused_by_name() -> None:
    """p itself is the smallest: sums of it are right by accident, and hashes of it are not."""
    run = Run.start(3, 2, 20).until_dealt()
    first, cheat = run.members[0], run.members[1]

    def spoiled(body: bytes) -> bytes:
        return P.to_bytes(8, "little") + body[8:]

    right = run.deals[2][1]
    run.deals[2][1] = cheat._say("deal", spoiled(first.read("deal", 2, right)), 1)
    with stopped("message.malformed", names="'Birch' for step 'dkg/deal'"):
        run.received()
    run.deals[2][1] = right
    run.received().opened()
    wrong = {**run.messages["open"], 2: cheat._say("open", spoiled(first.read("open", 2, run.messages["open"][2])))}
    with stopped("message.malformed", names="'Birch' for step 'dkg/open'"):
        relay_sum(run.terms, first.session, wrong)
    for word in (P, 0):
        with stopped("ceremony.wrong-dealing"):
            first.confirm(word.to_bytes(8, "little") + run.total[8:])
    run.shared()
    run.each("echo", lambda m: m.echo(run.messages["root"]))
    cheat._answer[0] = P
    run.messages["echo"][2] = cheat._echo(cheat._seen_roots, cheat._answer)
    run.each("health", lambda m: m.health(run.messages["echo"]))
    with stopped("message.malformed", names="'Birch' for step 'dkg/health'"):
        first.finish(run.messages["health"])


def test_a_signature_of_another_manifest_is_refused_by_name() -> None:
    run = Run.start(3, 2, 20).until_dealt().received().opened().shared().healthy()
    run.each("sign", lambda m: m.sign())
    run.messages["sign"][2] = run.members[1]._say("sign", run.people[1].sign("manifest", bytes(32)))
    with pytest.raises(SignatureError, match="signature of Birch does not hold"):
        run.members[0].signed(run.messages["sign"])


def test_a_message_of_another_length_is_refused_by_name() -> None:
    run = Run.start(3, 2, 20)
    run.each("commit", lambda m: m.commit())
    run.messages["commit"][2] = run.members[1]._say("commit", bytes(33))
    with stopped("message.malformed", names="'Birch' for step 'dkg/commit'"):
        run.members[0].reveal(run.messages["commit"])


def test_a_reveal_must_be_what_was_committed_to() -> None:
    people = identities(3)
    run, other = (Run.start(3, 2, 20, people) for _ in range(2))
    for r in (run, other):
        r.each("commit", lambda m: m.commit())
        r.each("reveal", lambda m, r=r: m.reveal(r.messages["commit"]))  # type: ignore[misc]
    mixed = {**run.messages["reveal"], 2: other.messages["reveal"][2]}
    with stopped("message.not-as-committed", names="'Birch'"):
        run.members[0].deal(mixed)


def test_too_few_members_are_refused_with_the_alternatives() -> None:
    people = identities(4)
    with stopped("ceremony.too-few-members"):
        DkgMember(people[0], make_terms(people, 3, 10), os.urandom(32))
    with stopped("ceremony.other-key"):
        DkgMember(people[0], make_terms(people, 2, 10, key="gaussian"), os.urandom(32))


def test_openers_are_checked() -> None:
    run = Run.start(5, 2, 20).until_dealt().received()
    for chosen, text in (
        ((1, 2), "2t−1 = 3"),
        ((1, 1, 2), "2t−1 = 3"),
        ((2, 3, 4), "include this member"),
        ((1, 2, 9), "2t−1"),
    ):
        with pytest.raises(InputError, match=text):
            run.members[0].open(chosen)


def test_traffic_stays_below_four_vectors() -> None:
    """Per member, sent plus received, in elements over d: dealings, one opening, one sum (small messages apart)."""
    for count, threshold in ((5, 3), (9, 4), (16, 8), (32, 16)):
        run = Run.start(count, threshold, 4000).until_dealt()
        small = 8 * dkg._SMALL + 600  # masks, salts, header, signature
        for m in run.members:
            sent = sum(len(v) - small for v in run.deals[m.point].values() if len(v) > small)
            incoming = [len(run.deals[x][m.point]) for x in run.deals if x != m.point]
            got = sum(size - small for size in incoming if size > small)
            assert (sent + got) / 8 / 4000 + 1 + 1 <= 4.0


def test_nothing_secret_shows() -> None:
    member = Run.start(3, 2, 20).until_dealt().members[0]
    assert "hidden" in repr(member)
    assert member._nonce.hex() not in repr(member)
