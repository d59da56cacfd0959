"""What a query leaves out: leaves that suit somebody get no answer, or are paid for; what audits opened is left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import ceil, comb, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark.canonical import canonical
from quorumark.consortium.archive import leaf_count
from quorumark.consortium.merkle import Opening
from quorumark.consortium.policy import Policy
from quorumark.errors import EvidenceError, QuorumarkError, RecordError
from quorumark.files import write_private, write_shared
from quorumark.model.suspect import read_suspect
from quorumark.node.member import MemberNode
from quorumark.node.queries import pack_query
from quorumark.reasons import Reason
from quorumark.setup.exchange import reshare
from quorumark.verify import opening
from quorumark.verify.answer import answer
from quorumark.verify.certificate import Certificate
from quorumark.verify.challenge import Challenge, challenge
from quorumark.verify.check import check_certificate, sign
from quorumark.verify.combine import combine
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.ledger import Ledger
from quorumark.verify.null import z_text
from quorumark.verify.omissions import Omitted, left_out
from quorumark.verify.opening import ShareOpening
from quorumark.verify.proof import Audit, explain
from quorumark.verify.query import prepare
from quorumark.verify.reference import Reference
from tests.kit.audits import SEED, Audited, ask, audit
from tests.kit.consortium import Tensors, World, make_world, trained_from
from tests.kit.evidence import consortium, make_query
from tests.kit.refusals import refused


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), rho=0.35)


def ledger_of(world: World, point: int) -> Ledger:
    return Ledger.open(world.homes[point - 1][0].only_consortium(), world.manifest)


# --- the attack --------------------------------------------------------------------------------------------


@dataclass
class Attack:
    """An innocent model, and the leaves on which it and the public marked model disagree."""

    world: World
    suspect: Path
    leaves: tuple[int, ...]
    honest: str  # z with nothing left out

    def query(self) -> Query:
        return prepare(self.world.reference, self.suspect, burnt=self.leaves).query


def _model(seed: int, scale: float = 0.05) -> Tensors:
    rng = np.random.default_rng(seed)
    return {"fc.weight": (scale * rng.standard_normal((700, 500))).astype(np.float32)}


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Attack:
    """d = 350,000 in leaves of 64; the public model's movement has the cosine 0.3 with the key: z rises to 11 ± 1."""
    anchor = _model(0)
    world = make_world(tmp_path_factory.mktemp("large"), rho=0.3, models=(anchor, trained_from(anchor, 1)))
    suspect = world.save(trained_from(anchor, 2), "innocent.safetensors")
    # an outsider needs public files only
    theirs, marked = (prepare(world.reference, path).form.x.astype(np.int64) for path in (suspect, world.suspect))
    gains = np.add.reduceat(theirs * marked, np.arange(0, theirs.size, 64))
    key = world.known.key.astype(np.int64)
    honest = z_text(int(theirs @ key), int(theirs @ theirs))
    return Attack(world, suspect, tuple(int(leaf) for leaf in np.flatnonzero(gains < 0)), honest)


def test_leaves_that_suit_the_asker_get_no_answer(attack: Attack) -> None:
    """Five honest members with empty ledgers."""
    query = attack.query()
    assert abs(float(attack.honest)) < 5
    for home in attack.world.homes:
        with refused("unexplained-leaves"):
            answer(*home, attack.world.reference, attack.suspect, query, approved=True)
    for point in range(1, 6):
        assert (ledger_of(attack.world, point).burnt(), ledger_of(attack.world, point).answered()) == ((), set())


def test_the_attack_works_without_the_guard_and_the_charge_and_not_without_one_of_them(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers by hand, as from t members who help the attacker: INCONCLUSIVE. With the charge taken out as well, the
    innocent model PASSES, corroborated and signed by all."""
    world, query = attack.world, attack.query()
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "burnt", lambda _: query.burnt)  # members believe what a query says
        _, partials = world.answers(attack.suspect, range(1, 6), query)
    finding = combine(world.manifest, query, partials)
    assert 6 < float(finding.z) < 17
    assert (finding.verdict, finding.audits) == ("INCONCLUSIVE", {})
    assert float(finding.threshold) > 60
    assert (finding.log10_p, finding.log10_bound) == ("-0.30", "0.00")  # as good as a coin
    assert float(finding.log10_choices) > 1000
    # audits that the asker makes up are not signed by anybody who has no proof of them
    claimed = combine(world.manifest, query, partials, audits={"11" * 32: query.burnt})
    with pytest.raises(EvidenceError, match="names the audit 1111111111111111, of which this member has no proof"):
        sign(*world.homes[0], Certificate.of(claimed))
    with monkeypatch.context() as patched:
        patched.setattr(Omitted, "charged", lambda _, threshold: threshold)
        finding = combine(world.manifest, query, partials)
        certificate = Certificate.of(finding)
        for home in world.homes:
            certificate = sign(*home, certificate)
        assert (finding.verdict, finding.corroboration) == ("PASSED", "corroborated")
        check_certificate(certificate, world.reference.chain, suspect=attack.suspect, reference=world.reference)
    with pytest.raises(EvidenceError, match="says something else than the partials"):
        check_certificate(certificate, world.reference.chain)


@pytest.fixture(scope="module")
def first(world: World) -> Audited:
    """Four of five open."""
    return audit(world, world.suspect, (1, 2, 3, 4))


def _leaf_numbers(world: World) -> int:
    return leaf_count(world.manifest.terms.coordinates, world.manifest.terms.leaf)


def _forged(like: Challenge, leaves: int, wanted: Sequence[int]) -> Challenge:
    """A challenge that nobody was asked, whose z and burnt leaves make it draw what its author wants."""
    others = tuple(sorted(set(range(leaves)) - set(wanted)))
    forged = replace(like, z="999999999999", burnt=others, leaves=(0,))
    return replace(forged, leaves=forged.drawn(leaves))


def test_forged_challenges_and_openings_explain_nothing(world: World, first: Audited) -> None:
    """An outsider with challenges; two of three colluders who open their own shares at will; an opening of another
    challenge, of other leaves, or changed; openings twice."""
    total, chain, real = _leaf_numbers(world), world.reference.chain, first.proof(world, (1, 2, 3))
    wanted = [leaf for leaf in range(total) if leaf not in real.challenge.leaves][:40]
    forged = _forged(first.challenge, total, wanted)
    assert set(forged.leaves) <= set(wanted)
    files = first.openings
    ground = challenge(first.certificate.finding.query, world.manifest, first.challenge.z, bytes(32))
    corrupt = []
    for point in (1, 2):  # of their own shares, whatever they are asked
        home, unlock = world.homes[point - 1]
        share = home.only_consortium().share(unlock)
        leaves = opening._opened(share, ground.leaves)
        values = {"manifest": ground.manifest, "challenge": ground.digest(), "point": point, "leaves": leaves}
        corrupt.append(ShareOpening.sign(home.identity(unlock), **values).to_bytes())
    stolen = json.loads(files[3]) | {"point": 4}
    cases: list[tuple[Challenge, list[bytes], str]] = [
        (forged, [], "is for another query|leaves that no audit here explains"),
        (forged, [files[1], files[2], files[3]], "is for another query|leaves that no audit here explains"),
        (ground, [], "0 members' openings hold, but it takes 3"),
        (ground, [files[1], files[2], files[3]], "0 members' openings hold"),
        (ground, corrupt, "2 members' openings hold, but it takes 3"),
        (ground, [*corrupt, *corrupt], "2 members' openings hold, but it takes 3"),
        (first.challenge, [files[1], files[2], canonical(stolen)], "2 members' openings hold"),
        (replace(first.challenge, z="50.0"), list(files.values()), "for another query|than its seed draws|says"),
    ]
    for asked, opened, text in cases:
        made = Audit(first.certificate, asked, tuple(opened), {})
        made = Audit.from_bytes(made.to_bytes())
        with pytest.raises(EvidenceError, match=text):
            explain(chain, [made])
        # a member who gets it with a query answers nothing, and writes nothing down
        query = prepare(world.reference, world.suspect, burnt=made.challenge.leaves).query
        before = ledger_of(world, 5).head
        with pytest.raises(EvidenceError, match="explains nothing"):
            answer(*world.homes[4], world.reference, world.suspect, query, approved=True, audits=[made])
        assert (ledger_of(world, 5).head, ledger_of(world, 5).burnt()) == (before, ())
    # the certificate must be signed, and say what the challenge says
    unsigned = replace(first.certificate, signatures={})
    with pytest.raises(QuorumarkError, match="nobody has signed the certificate"):
        explain(chain, [replace(real, certificate=unsigned)])
    assert explain(chain, [real]) == {real.name: first.challenge.leaves}  # the control


def _ground(like: Challenge, leaves: int, wanted: Sequence[int], count: int) -> list[Challenge]:
    """Challenges that leave out nothing, of two leaves each, whose seeds were drawn until both are wanted."""
    made: list[Challenge] = []
    missing = set(wanted)
    for seed in range(100_000):
        forged = replace(like, z="999999999999", seed=f"{seed:064x}", burnt=(), leaves=(0,))
        forged = replace(forged, leaves=forged.drawn(leaves))
        if set(forged.leaves) <= missing:
            missing -= set(forged.leaves)
            made.append(forged)
        if len(made) == count:
            break
    return made


def test_ground_challenges_that_explain_300_chosen_leaves_get_no_answer(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """150 challenges whose seeds fit. If a challenge burnt leaves, members would answer."""
    world, total = attack.world, _leaf_numbers(attack.world)
    query = prepare(world.reference, world.suspect).query
    like = challenge(query, world.manifest, "80.0", SEED)
    ground = _ground(like, total, attack.leaves, 150)
    leaves = {leaf for one in ground for leaf in one.leaves}
    assert len(leaves) == 300
    _, partials = world.answers(world.suspect, (1, 2, 3), query)
    certificate = world.certified(query, partials)
    audits = [Audit(certificate, one, (), {}) for one in ground]
    chosen = prepare(world.reference, attack.suspect, burnt=leaves).query
    for point in (4, 5):
        with pytest.raises(EvidenceError, match="explains nothing"):
            answer(*world.homes[point - 1], world.reference, attack.suspect, chosen, approved=True, audits=audits)
        assert ledger_of(world, point).burnt() == ()
    with monkeypatch.context() as patched:  # the control: a challenge is believed
        patched.setattr(Audit, "check", lambda *_: None)
        answer(*world.homes[4], world.reference, attack.suspect, chosen, approved=True, audits=audits)
        assert ledger_of(world, 5).burnt() == tuple(sorted(leaves))


def test_a_ledger_with_junk_in_it_would_refuse_every_honest_query(tmp_path: Path) -> None:
    """The control: why only proofs are written down."""
    other = make_world(tmp_path)
    ledger_of(other, 1).record_burnt([3], "ab" * 32)
    with refused("forgotten-leaves", count=1, leaves=(3,)):
        other.answers(other.suspect, (1,))
    with refused("unexplained-leaves", count=1, leaves=(3,)):
        other.answers(other.suspect, (2,), prepare(other.reference, other.suspect, burnt=(3,)).query)


def test_proofs_are_read_strictly(world: World, first: Audited) -> None:
    body = json.loads(first.proof(world, (1, 2, 3)).to_bytes())
    assert Audit.from_bytes(canonical(body)).to_bytes() == canonical(body)
    changes: list[tuple[Any, str]] = [
        ({"format": "quorumark-challenge/v1"}, "format"),
        ({"openings": "none"}, "must be a list"),
        ({"openings": [1]}, "0 members' openings hold"),
        ({"leaves": []}, "named by points"),
        ({"leaves": {"01": []}}, "named by points"),
        ({"leaves": {"1": [3]}}, "JSON object"),
        ({"certificate": {}}, "DSSE envelope"),
        ({"certificate": 7}, "DSSE envelope"),
        ({"challenge": []}, "format"),
        ({"surprise": 1}, "unknown field"),
    ]
    for change, text in changes:
        with pytest.raises((RecordError, EvidenceError), match=text):
            explain(world.reference.chain, [Audit.from_bytes(canonical(body | change))])


# --- an honest audit, then a later query -------------------------------------------------------------------


def test_after_an_audit_all_members_answer_as_before(world: World, first: Audited) -> None:
    """Anyone who opened knows; the fifth gets the proof with the query, and writes it down."""
    proof, points = first.proof(world, (2, 3, 4)), range(1, 6)
    assert [ledger_of(world, point).burnt() for point in (1, 5)] == [first.challenge.leaves, ()]
    query, partials = ask(world, world.suspect, points, [proof])
    assert ledger_of(world, 5).audits() == {proof.name: first.challenge.leaves}
    opened = explain(world.reference.chain, [proof])
    finding = combine(world.manifest, query, partials, audits=opened)
    assert (finding.verdict, finding.audits) == ("PASSED", {proof.name: first.challenge.leaves})
    assert 6 < float(finding.charged) < 13
    certificate = Certificate.of(finding)
    for home in world.homes:
        certificate = sign(*home, certificate)
    certificate = Certificate.from_bytes(certificate.to_bytes())
    checked, left = check_certificate(certificate, world.reference.chain, audits=opened)
    assert Reason.of("check.audits", audits=1) in checked
    # without the proof the verdict must stand with everything unexplained, and that is said
    _, without = check_certificate(certificate, world.reference.chain)
    assert len(without) == len(left) + 1
    assert (without[0].code, without[0].values["audits"]) == ("check.no-proof", 1)
    # an innocent model is not accused
    innocent = world.save(trained_from(world.marked, 7), "other.safetensors")
    query, partials = ask(world, innocent, points, [proof])
    assert combine(world.manifest, query, partials, audits=opened).query.burnt == first.challenge.leaves
    # a part of what is known, or more than that, is refused
    known = set(first.challenge.leaves)
    for burnt, count in ((known - {min(known)}, 1), (set(), len(known))):
        with refused("forgotten-leaves", count=count):
            world.answers(world.suspect, (5,), prepare(world.reference, world.suspect, burnt=burnt).query)


def test_a_pass_that_needs_the_proof_is_not_confirmed_without_it(world: World, first: Audited) -> None:
    """z between the threshold with the audit explained and the one without."""
    proof = first.proof(world, (1, 2, 3))
    opened = explain(world.reference.chain, [proof])
    query, partials = ask(world, world.suspect, range(1, 6), [proof])
    finding = combine(world.manifest, query, partials, audits=opened)
    unexplained = combine(world.manifest, query, partials)
    assert float(unexplained.threshold) > float(finding.threshold) + 0.5
    # the same with a policy's z so high that the two thresholds are on both sides of z
    omitted = Omitted.of(query, world.manifest.terms, opened)
    assert Decimal(omitted.charged(omitted.worth(finding.z))) <= Decimal(finding.z)
    high = next(alpha for alpha in (f"1e-{n}" for n in range(10, 900)) if not _passes(world, query, partials, alpha))
    middle = combine(world.manifest, query, partials, audits=opened, alpha=high)
    assert middle.verdict == "PASSED"
    certificate = Certificate.of(middle)
    for home in world.homes:
        certificate = sign(*home, certificate)
    check_certificate(certificate, world.reference.chain, audits=opened)
    with pytest.raises(EvidenceError, match="give the audit's proof"):
        check_certificate(certificate, world.reference.chain)


def _passes(world: World, query: Query, partials: Sequence[Partial], alpha: str) -> bool:
    return combine(world.manifest, query, partials, alpha=alpha).verdict == "PASSED"


def test_the_stage_of_an_engine_takes_proofs(world: World, first: Audited) -> None:
    """`answer` and `sign`, as Flower's nodes run them; nobody is asked there, the rules answer."""
    proof = first.proof(world, (1, 2, 4))
    opened = explain(world.reference.chain, [proof])
    suspect = world.save(trained_from(world.marked, 21), "engine.safetensors")
    query = prepare(world.reference, suspect, burnt=first.challenge.leaves).query
    config, arrays = pack_query(world.reference, read_suspect(suspect), query, [proof])
    rules = {"format": "quorumark-answer-rules/v1", "approve": "always", "max_queries_per_day": 99}
    partials = []
    for home, unlock in world.homes:
        write_private(home.rules_path, canonical(rules))
        reply, _ = MemberNode(home, unlock).handle("answer", config, arrays)
        partials.append(Partial.from_bytes(reply["partial"]))
    certificate = Certificate.of(combine(world.manifest, query, partials, audits=opened))
    for home, unlock in world.homes:
        reply, _ = MemberNode(home, unlock).handle("sign", {"certificate": certificate.to_bytes()}, {})
        certificate = Certificate.from_bytes(reply["certificate"])
    check_certificate(certificate, world.reference.chain, audits=opened)
    bad = {**arrays, "audit.0": np.frombuffer(first.challenge.to_bytes(), np.uint8)}
    with pytest.raises(QuorumarkError, match="this is not a proof of an audit"):
        MemberNode(*world.homes[0]).handle("answer", config, bad)


# --- years later -------------------------------------------------------------------------------------------


def test_audits_before_and_after_a_resharing(tmp_path: Path) -> None:
    """One audit in epoch 0, a resharing, another audit through the archives, a third query that leaves out both."""
    world = make_world(tmp_path, rho=0.5)
    early = audit(world, world.suspect, (1, 2, 3))
    before = early.proof(world, (1, 2, 3))
    for _ in range(20):
        progress = [
            reshare(home, key, tmp_path / "reshare", consortium=home.only_consortium()) for home, key in world.homes
        ]
        if not any(one.waiting for one in progress):
            break
    folder = world.homes[0][0].only_consortium().path
    chain = world.homes[0][0].only_consortium().chain()
    assert chain[-1].epoch == 1
    write_shared(tmp_path / "consortium.json", chain[-1].to_bytes())
    (tmp_path / "history").mkdir()
    for path in (folder / "history").iterdir():
        write_shared(tmp_path / "history" / path.name, path.read_bytes())
    world.reference = Reference.read(tmp_path / "consortium.json")
    # the later audit's query leaves out what the first one opened
    late = audit(world, world.suspect, (2, 3, 5), [before], bytes(32))
    assert late.challenge.burnt == early.challenge.leaves
    assert not set(late.challenge.leaves) & set(early.challenge.leaves)
    archives = [home.only_consortium().archive_path for home, _ in world.homes]
    after = Audit.from_bytes(late.proof(world, (2, 3, 5), archives[1:4]).to_bytes())
    with pytest.raises(EvidenceError, match="2 members' openings hold, but it takes 3"):
        late.proof(world, (2, 3), archives)
    with pytest.raises(EvidenceError, match="leaves of 2 archived genesis shares are in it, but it takes 3"):
        late.proof(world, (2, 3, 5), archives[:2])
    with pytest.raises(EvidenceError, match="leaves that no audit here explains: give those audits too"):
        explain(chain, [after])
    both = explain(chain, [after, before])  # in any order
    assert both == {before.name: early.challenge.leaves, after.name: late.challenge.leaves}
    # a leaf of other values leads to no root
    spoiled = dict(after.leaves)
    point = next(iter(spoiled))
    leaf = spoiled[point][0]
    spoiled[point] = (Opening(leaf.index, leaf.values[::-1].copy(), leaf.salt, leaf.path), *spoiled[point][1:])
    with pytest.raises(EvidenceError, match="is not what the genesis root commits to"):
        explain(chain, [before, replace(after, leaves=spoiled)])
    query, partials = ask(world, world.suspect, range(1, 6), [before, after])
    finding = combine(world.manifest, query, partials, audits=both)
    assert (finding.verdict, finding.audits) == ("PASSED", both)
    certificate = Certificate.of(finding)
    for home in world.homes:
        certificate = sign(*home, certificate)
    check_certificate(certificate, chain, audits=both)


# --- the charge --------------------------------------------------------------------------------------------


def _omitted(choices: float, share: float) -> Omitted:
    return Omitted({}, (1,), Decimal(repr(choices)), Decimal(repr(share)))


def test_the_charge_is_what_its_formula_says() -> None:
    """Against floating point, and against the exact binomial."""
    _, manifest = consortium(5, 3)
    terms, total = manifest.terms, 2500
    audits = {"aa" * 32: tuple(range(20)), "bb" * 32: tuple(range(20, 25)), "cc" * 32: (2000,)}
    for burnt, used, rest in ((range(25), 2, 0), (range(30), 2, 5), (range(20, 25), 1, 0), ((7,), 0, 1)):
        query = make_query(manifest, burnt=tuple(burnt), burnt_norm2=10**10)
        found = Omitted.of(query, terms, audits)
        assert (len(found.audits), len(found.unexplained)) == (used, rest)
        seeds = sum(log(2 * total) + min(log(comb(total, len(v))), 80 * log(2)) for v in found.audits.values())
        unexplained = log(total) + log(comb(total, rest)) if rest else 0
        exact = min(log(total) + log(comb(total, len(query.burnt))), seeds + unexplained)
        assert exact <= float(found.log_choices) <= exact + 3 * log(total)
        share = 10**10 / (10**10 + query.norm2)
        choices, wide = float(found.log_choices), 36 + 2 * log(2)
        whole = sqrt(36 + 2 * choices)
        part = (sqrt(wide) + sqrt(share * (wide + 2 * choices))) / sqrt(1 - share)
        assert float(found.charged("6")) == pytest.approx(min(whole, part), abs=2e-6)
        assert found.charged("6") == f"{ceil(float(found.charged('6')) * 1e6 - 0.01) / 1e6:.6f}"
    nothing = Omitted.of(make_query(manifest), terms, audits)
    assert (nothing.charged("6"), nothing.worth("5.5"), nothing.log10_choices, nothing.audits) == (
        "6",
        "5.5",
        "0.00",
        {},
    )
    assert left_out(terms, (0, 2499)) == 2048


def test_how_a_suspect_is_read_is_a_choice_too() -> None:
    """As it is or aligned: √(36 + 2·ln 2), and so on."""
    _, manifest = consortium(5, 3)
    for names, ways in (((), 1), (("groups",), 2), (("lora",), 2), (("groups", "lora"), 3)):
        terms = replace(manifest.terms, policy=Policy.of(dict.fromkeys(names, "ab" * 32)))
        plain = Omitted.of(make_query(manifest), terms, {})
        assert float(plain.charged("6")) == pytest.approx(sqrt(36 + 2 * log(ways)), abs=2e-6)
        assert (plain.charged("6") == "6") == (ways == 1)
        some = Omitted.of(make_query(manifest, burnt=(3,), burnt_norm2=10**9), terms, {})
        alone = replace(some, variants=1)
        assert float(some.charged("6")) == pytest.approx(float(alone.charged(plain.charged("6"))), abs=1e-5)
        assert float(some.worth(some.charged("9"))) == pytest.approx(9, abs=1e-4)


@pytest.mark.parametrize(("choices", "share"), [(65.4, 0.007), (62, 0.14), (3000, 0.5), (5, 0.001), (10, 0)])
def test_what_z_is_worth_undoes_the_charge(choices: float, share: float) -> None:
    omitted = _omitted(choices, share)
    for z in ("6", "7.5", "20"):
        charged = omitted.charged(z)
        assert abs(float(omitted.worth(charged)) - float(z)) < 1e-4
        assert float(charged) > float(z)
    assert omitted.worth("-3") == "-3"
    assert float(_omitted(65.4, 0.007).charged("6")) == pytest.approx(7.23, abs=0.01)  # the module's text
    assert omitted.worth("0.5") == "0.000000"


def test_the_charge_pays_for_the_best_of_many_seeds() -> None:
    """Of 2,000 seeds an asker who knows the whole key takes the one whose leaves suit an innocent model best, 1,000
    keys. z* = 2 is passed in no more than exp(−2) = 13.5 % of the cases with the charge, in more without."""
    rng = np.random.default_rng(5)
    leaves, asked, seeds, keys = 400, 60, 2000, 1000
    x = rng.standard_normal(leaves) * rng.choice([1, 3], leaves)  # by leaf: sums of x·τ behave like one coordinate
    chosen = np.zeros((seeds, leaves), bool)
    for row in chosen:
        row[rng.permutation(leaves)[:asked]] = True
    energy = (chosen * x**2).sum(1)
    kept = np.sqrt((x**2).sum() - energy)
    tau = rng.choice([-1.0, 1.0], (keys, leaves))
    scores = ((tau @ x)[:, None] - (tau * x) @ chosen.T) / kept
    shares = energy / (x**2).sum()
    charged = np.array([float(_omitted(log(seeds), float(share)).charged("2")) for share in shares])
    passed = (scores >= charged).any(1).mean()
    naive = (scores >= 2).any(1).mean()
    assert passed <= np.exp(-2) < 0.2 < naive


def test_x_is_0_where_it_is_left_out_and_the_query_says_how_much_that_was(world: World) -> None:
    whole = prepare(world.reference, world.suspect).form.x.astype(np.int64)
    made = prepare(world.reference, world.suspect, burnt=(0, 318))
    places: NDArray[np.int64] = np.r_[0:64, 318 * 64 : whole.size]
    assert made.query.burnt_norm2 == int((whole[places] ** 2).sum())
    assert made.query.norm2 == int((whole**2).sum()) - made.query.burnt_norm2
    assert not made.form.x[places].any()
    with pytest.raises(RecordError, match="must be 0 if nothing is left out"):
        replace(made.query, burnt=())
