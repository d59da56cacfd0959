"""A query by layers, from the plain one that did not pass to the certificate (docs/layers.md)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

import quorumark as qm
from quorumark.canonical import canonical
from quorumark.consortium.identity import Identity
from quorumark.errors import EvidenceError, InconclusiveError, InputError, SignatureError
from quorumark.field import P
from quorumark.model.blocks import MOST
from quorumark.model.suspect import read_suspect
from quorumark.node.queries import pack_query, unpack_query
from quorumark.verify import examine as examiner
from quorumark.verify import layered
from quorumark.verify.answer import answer, answer_layers, seal_context
from quorumark.verify.certificate import Certificate
from quorumark.verify.challenge import challenge
from quorumark.verify.check import check_certificate, sign
from quorumark.verify.combine import combine
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.examine import examine
from quorumark.verify.layered import Examiner, Opened, unseal
from quorumark.verify.ledger import Ledger
from quorumark.verify.opening import open_leaves
from quorumark.verify.query import AskLayers, prepare
from tests.kit.commands import run
from tests.kit.consortium import World, make_world, trained_from
from tests.kit.layered import Asked, ask_by_layers, blocks_in, evaded, layered_anchor, layered_world, plain_certificate
from tests.kit.refusals import refused


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return layered_world(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def asked(world: World) -> Asked:
    return ask_by_layers(world, world.save(evaded(world), "evaded.safetensors"), (1, 2, 3, 4, 5))


def test_what_hides_from_z_shows_in_its_layers(world: World, asked: Asked) -> None:
    before = asked.before.finding
    assert before.verdict == "FAILED"
    assert abs(Decimal(before.z)) < 6
    certificate = asked.certified()
    finding = certificate.finding
    assert finding.layers is not None
    assert (finding.verdict, finding.layers.blocks, finding.layers.freedom) == ("PASSED", 9, 9)
    assert (finding.value, finding.z) == (before.value, before.z)
    x, key = prepare(world.reference, asked.suspect).form.x.astype(np.int64), world.known.key
    exact = sum(float(x[s] @ key[s]) ** 2 / float(x[s] @ x[s]) for s in blocks_in(world).spans)
    assert 0 <= exact - float(finding.layers.q) <= exact / 100
    assert Decimal(finding.layers.log10_bound) < -20
    assert [reason.code for reason in finding.reasons][:1] == ["finding.layers-passed"]
    checked, left = check_certificate(
        certificate, world.reference.chain, suspect=asked.suspect, reference=world.reference
    )
    assert "check.form" in {reason.code for reason in checked}
    assert not left
    home, _ = world.homes[0]
    assert Ledger.open(home.only_consortium(), world.manifest).known()[asked.query.x] == "passed"


def test_an_innocent_model_fails_and_costs_the_next_ones_its_blocks(tmp_path: Path) -> None:
    world = layered_world(tmp_path)
    innocent = world.save(trained_from(layered_anchor(), 8), "innocent.safetensors")
    certificate = ask_by_layers(world, innocent, (1, 2, 3)).certified()
    assert certificate.finding.verdict == "FAILED"
    other = world.save(trained_from(layered_anchor(), 9), "other.safetensors")
    query, partials = world.answers(other, (1, 2, 3))
    finding = combine(world.manifest, query, partials)
    assert (finding.equations, finding.threshold) == (9, "9.000000")
    assert list(finding.blocks.values()) == [9]
    # who only hears of it counts as much
    world.certified(query, partials)
    home, _ = world.homes[3]
    ledger = Ledger.open(home.only_consortium(), world.manifest)
    ledger.learn(finding.known, "ab" * 32, finding.blocks)
    assert sum(ledger.equations().values()) == 9
    ledger.learn(finding.known, "ab" * 32)
    assert sum(ledger.equations().values()) == 9, "a liar who says 1 changes nothing"


def test_only_the_examiner_sees_numbers_by_block(world: World, asked: Asked) -> None:
    numbers = asked.examined()
    secrets = {str(abs(value)) for value in numbers.values if value is not None and abs(value) > 999}
    assert len(secrets) >= 8
    public = asked.certified().payload.decode() + asked.query.to_bytes().decode() + repr(numbers)
    written = set(
        re.findall(r"(?<![0-9a-zA-Z])[0-9]+(?![0-9a-zA-Z])", public)
    )  # digests have any four digits somewhere
    assert not secrets & written
    assert secrets & set(re.findall(r"[0-9]+", repr(numbers.values))), "else this finds nothing"
    for other in (Identity.generate("Judge Oak"), world.homes[0][0].identity(world.homes[0][1])):
        with pytest.raises(EvidenceError, match="names another examiner"):
            examine(other, world.manifest, asked.query, asked.partials)
    # sealed numbers of another member, or for another query, do not open
    one, two = asked.partials[0], asked.partials[1]
    home, unlock = world.homes[0]
    moved = type(one).sign(home.identity(unlock), **{**one.as_dict(), "members": (), "sealed": two.sealed})
    with pytest.raises(EvidenceError, match="cannot be opened"):
        asked.examined([moved, *asked.partials[1:]])


def _with_seal_key(asked: Asked, asker: Identity) -> bytes:
    """The query's bytes with the judge's name, key and signature, and the asker's own key to seal to."""
    body = json.loads(asked.query.to_bytes())
    body["layers"]["examiner"]["x25519"] = asker.x25519
    return canonical(body)


def test_an_asker_cannot_put_its_own_seal_key_beside_a_judges_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = layered_world(tmp_path)  # of its own: no member has heard of a verdict by layers
    asked = ask_by_layers(world, world.save(evaded(world), "evaded.safetensors"), (1, 2, 3, 4, 5))
    asker, forged = Identity.generate("Mallory"), _with_seal_key(asked, Identity.generate("Mallory"))
    with pytest.raises(SignatureError, match="Judge Oak"):
        Query.from_bytes(forged)
    assert asked.query.layers is not None
    judge = asked.query.layers.examiner
    with pytest.raises(SignatureError):
        replace(judge, x25519=asker.x25519)
    with pytest.raises(SignatureError):
        replace(judge, name="Judge Elm")
    # what people compare has both keys in it
    card = judge.card
    assert card.fingerprint() == asked.judge.card().fingerprint()
    assert replace(card, x25519=asker.x25519).fingerprint() != card.fingerprint()
    assert replace(card, ed25519=asker.ed25519).fingerprint() != card.fingerprint()
    # with the check taken out, a member answers, and the asker reads its numbers
    monkeypatch.setattr(layered, "verify_card", lambda _: None)
    query = Query.from_bytes(_with_seal_key(asked, asker))
    partial = answer(*world.homes[0], world.reference, asked.suspect, query, approved=True, after=asked.before)
    assert len(unseal(asker, partial.sealed, seal_context(query, 1))) == 9


def test_answers_by_layers_come_after_a_plain_query_that_did_not_pass(world: World, asked: Asked) -> None:
    member, reference = world.homes[0], world.reference
    passed = plain_certificate(world, world.suspect, (1, 2, 3, 4))
    judge = asked.judge.card()
    with pytest.raises(EvidenceError, match="did not pass"):
        AskLayers.of(passed, judge)
    layers = replace(AskLayers.of(asked.before, judge), after=passed.digest(), value=passed.finding.value)
    query = prepare(reference, world.suspect, layers=layers).query
    with refused("passed-before"):
        answer(*member, reference, world.suspect, query, approved=True, after=passed)
    # another suspect's certificate, a false number, no certificate at all
    right = AskLayers.of(asked.before, judge)
    for after, wrong, suspect in (
        (asked.before, right, world.suspect),
        (None, right, world.suspect),
        (asked.before, replace(right, value="17"), asked.suspect),
    ):
        query = prepare(reference, suspect, layers=wrong).query
        with pytest.raises(EvidenceError, match="certificate"):
            answer(*member, reference, suspect, query, approved=True, after=after)


def test_a_member_that_was_not_asked_before_answers_with_the_certificate(tmp_path: Path) -> None:
    world = layered_world(tmp_path)
    suspect = world.save(evaded(world), "evaded.safetensors")
    asked = ask_by_layers(world, suspect, (1, 2, 3))
    assert asked.examined().opened.q
    late = answer(*world.homes[4], world.reference, suspect, asked.query, approved=True, after=asked.before)
    found = combine(
        world.manifest, asked.query, [*asked.partials, late], opened=asked.examined([*asked.partials, late]).opened
    )
    assert found.corroboration == "corroborated"


def _lie(asked: Asked, point: int, blocks: tuple[int, ...], shift: int = 1 << 40) -> list[Partial]:
    """The partials, of which one has other numbers in some blocks."""
    partials = list(asked.partials)
    index = next(i for i, partial in enumerate(partials) if partial.point == point)
    numbers = list(unseal(asked.judge, partials[index].sealed, seal_context(asked.query, point)))
    for block in blocks:
        numbers[block] = (numbers[block] + shift) % P
    home, unlock = asked.world.homes[point - 1]
    partials[index] = answer_layers(home.identity(unlock), asked.world.manifest, asked.query, numbers)
    return partials


def test_one_lie_in_one_block_is_corrected_and_named(asked: Asked) -> None:
    honest = asked.examined()
    found = asked.examined(_lie(asked, 2, (4,)))
    assert (found.values, found.opened.wrong) == (honest.values, (2,))


def test_liars_in_different_blocks_are_too_many_though_each_block_alone_is_decided(asked: Asked) -> None:
    """Each block could be corrected by itself; a rule by block would name two of five, and believe the rest."""
    first = _lie(asked, 2, (4,))
    second = _lie(asked, 3, (5,))
    both = [first[i] if i == 1 else second[i] for i in range(5)]
    with pytest.raises(EvidenceError, match="2 members are wrong"):
        asked.examined(both)


def test_a_lie_among_t_partials_is_noticed_by_the_plain_number(asked: Asked) -> None:
    """With t partials nothing contradicts a lie in one block; but the blocks no longer add up to Y."""
    some = replace(asked, partials=asked.partials[:3])
    assert some.examined().opened.wrong == ()
    for shift in (1000, 10**6):
        with pytest.raises(EvidenceError, match=r"add up|no key can give"):
            some.examined(_lie(some, 2, (4,), shift))


def test_a_false_word_of_an_examiner_is_refused(world: World, asked: Asked) -> None:
    opened, manifest = asked.examined().opened, world.manifest
    values = {name: getattr(opened, name) for name in ("query", "partials", "q", "wrong", "created")}

    def told(who: Identity = asked.judge, **changes: object) -> Opened:
        return Opened.sign(who, **{**values, **changes})

    with pytest.raises(SignatureError):
        combine(manifest, asked.query, asked.partials, opened=told(Identity.generate("Judge Oak")))
    for wrong in ({"query": "ab" * 32}, {"partials": ()}, {"q": "10000000"}, {"wrong": (1, 2)}):
        with pytest.raises(EvidenceError):
            combine(manifest, asked.query, asked.partials, opened=told(**wrong))
    with pytest.raises(EvidenceError, match="verify open"):
        combine(manifest, asked.query, asked.partials)
    # a certificate whose Q was changed
    body = json.loads(asked.certified().payload)
    body["predicate"]["layers"]["q"] = "999"
    forged = Certificate(canonical(body))
    with pytest.raises(EvidenceError, match="something else than its partials"):
        sign(*world.homes[0], forged)


def test_blocks_of_another_rule_or_with_other_norms_are_refused(world: World, asked: Asked) -> None:
    layers = asked.query.layers
    assert layers is not None
    joined = (layers.norm2[0] + layers.norm2[1], *layers.norm2[2:])
    fewer = replace(layers, norm2=joined, norm1=(layers.norm1[0] + layers.norm1[1], *layers.norm1[2:]))
    for wrong in (fewer, replace(layers, rule="rows/v2"), replace(layers, norm2=(1, *layers.norm2[1:]))):
        query = replace(asked.query, layers=wrong)
        with pytest.raises(EvidenceError, match="does not describe this suspect"):
            answer(*world.homes[0], world.reference, asked.suspect, query, approved=True, after=asked.before)


def test_a_small_model_says_that_it_has_no_layers(tmp_path: Path) -> None:
    world = make_world(tmp_path, 3, 2)
    suspect = world.save(trained_from(world.marked, 4), "other.safetensors")
    layers = AskLayers("ab" * 32, "0", _examiner())
    with pytest.raises(InconclusiveError) as error:
        prepare(world.reference, suspect, layers=layers)
    assert error.value.reason is not None
    assert error.value.reason.code == "untestable.no-layers"


def _examiner() -> Examiner:
    return Examiner.of(Identity.generate("Judge Oak").card())


def test_a_pruned_model_with_narrow_blocks_is_not_asked_by_layers(world: World, asked: Asked) -> None:
    anchor = layered_anchor()
    model = {name: w.copy() for name, w in trained_from(anchor, 3).items()}
    model["fc.weight"][:, 8:] = anchor["fc.weight"][:, 8:]  # nearly all of a row is the anchor's
    query = prepare(world.reference, model)
    assert query.query.norm2
    with pytest.raises(InconclusiveError) as error:
        prepare(world.reference, model, layers=AskLayers.of(asked.before, asked.judge.card()))
    assert error.value.reason is not None
    assert error.value.reason.code == "untestable.narrow-blocks"


def test_records_by_layers_survive_their_bytes(asked: Asked) -> None:
    assert Query.from_bytes(asked.query.to_bytes()) == asked.query
    opened = asked.examined().opened
    assert Opened.from_bytes(opened.to_bytes()) == opened
    certificate = asked.certified()
    assert Certificate.from_bytes(certificate.to_bytes()).finding == certificate.finding


def test_a_partial_is_below_8_kb_however_many_blocks_there_are(world: World, asked: Asked) -> None:
    layers = asked.query.layers
    assert layers is not None
    for count in (2, MOST):
        many = replace(layers, norm1=(P,) * count, norm2=(P,) * count)
        home, unlock = world.homes[0]
        partial = answer_layers(
            home.identity(unlock), world.manifest, replace(asked.query, layers=many), [P - 1] * count
        )
        assert partial.history == {}
        assert len(partial.to_bytes()) < 8000
    assert max(len(partial.to_bytes()) for partial in asked.partials) < 8000


def test_the_same_answer_again_costs_nothing(tmp_path: Path) -> None:
    world = layered_world(tmp_path, 3, 2)
    suspect = world.save(evaded(world), "evaded.safetensors")
    asked = ask_by_layers(world, suspect, (1, 2))
    place = world.homes[0][0].only_consortium()
    before = Ledger.open(place, world.manifest).entries
    again = answer(*world.homes[0], world.reference, suspect, asked.query, approved=True, after=asked.before)
    assert Ledger.open(place, world.manifest).entries == before
    assert asked.examined([again, asked.partials[1]]).values == asked.examined().values


def test_through_the_front_door_and_as_an_engine_carries_it(world: World, tmp_path: Path) -> None:
    # trained on a little, since members answer about no near-copy of what they answered about before
    suspect = world.save(trained_from(evaded(world), 77), "evaded-again.safetensors")
    homes = [qm.Home(home.path, key_file=f"{home.path}.key") for home, _ in world.homes[:3]]
    judge = qm.Home.create(tmp_path / "judge", "Judge Oak", key_file=tmp_path / "judge.key")
    public = qm.Reference.read(world.folder / "consortium.json")
    query = public.ask(suspect)
    before = public.combine(query, [home.answer(public, suspect, query, approve=True) for home in homes])
    for home in homes:
        before = home.sign(before)
    assert before.finding.verdict == "FAILED"
    assert "finding.next-layers" in {reason.code for reason in before.finding.reasons}
    query = public.ask(suspect, after=before, examiner=judge.card)
    with pytest.raises(InputError, match="together"):
        public.ask(suspect, after=before)
    partials = [home.answer(public, suspect, query, approve=True, after=before) for home in homes]
    examined = judge.open(public, query, partials)
    certificate = public.combine(query, partials, opened=examined.opened)
    for home in homes:
        certificate = home.sign(certificate)
    assert public.check(certificate, suspect).verdict == "PASSED"
    _, arrays = pack_query(public, read_suspect(suspect), query, after=before)
    with unpack_query(homes[0].consortium(), arrays) as question:
        assert question.after == before


def test_a_coalition_that_lies_in_one_block_frames_nobody(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """δ(x) = c·(x − 1)·(x − 2) added by 4 and 5 agrees with 1 and 2, so that 3 looks wrong and Y_b moves by 2c."""
    step = 50
    lied = list(asked.partials)
    for point in (4, 5):
        lied[point - 1] = _lie(asked, point, (6,), step * (point - 1) * (point - 2))[point - 1]
    with pytest.raises(EvidenceError, match="do not add up"):
        asked.examined(lied)
    # a rule that decodes each block and asks no more believes them
    with monkeypatch.context() as patched:
        patched.setattr(examiner, "_check_values", lambda *_: None)
        found = asked.examined(lied)
    honest = asked.examined().values
    assert found.opened.wrong == (3,)
    assert [a != b for a, b in zip(found.values, honest, strict=True)] == [block == 6 for block in range(9)]


def test_there_is_no_audit_by_layers(world: World, asked: Asked, environment: dict[str, str], tmp_path: Path) -> None:
    """Neither is one drawn, nor do members open for a challenge that somebody made by hand."""
    certificate = asked.certified()
    assert certificate.finding.verdict == "PASSED"
    plain = challenge(asked.before.finding.query, world.manifest, "60", bytes(32))
    forged = replace(plain, query=asked.query.digest())
    home, unlock = world.homes[0]
    place = home.only_consortium()
    burns = Ledger.open(place, world.manifest)
    for attempt in (
        lambda: challenge(asked.query, world.manifest, "60", bytes(32)),
        lambda: open_leaves(home, place, unlock, forged, asked.query, answered=True, burns=burns),
    ):
        with pytest.raises(EvidenceError) as error:
            attempt()
        assert error.value.reason is not None
        assert error.value.reason.code == "audit.by-layers"
    assert not burns.burnt()
    kept = tmp_path / "certificate.json"
    kept.write_bytes(certificate.to_bytes())
    manifest = str(world.folder / "consortium.json")
    out = tmp_path / "challenge.json"
    done = run(environment, "verify", "audit", "challenge", str(kept), "--manifest", manifest, "--out", str(out))
    assert done.returncode != 0
    assert asked.before.digest()[:16] in done.stderr
    assert not out.exists()
