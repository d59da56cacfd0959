"""Verification end to end: who can, who cannot, who lies, and what a stranger can check years later."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark import shamir
from quorumark.canonical import canonical
from quorumark.consortium.records import Manifest, anchor_digest
from quorumark.consortium.shares import ShareInfo, ShareWriter
from quorumark.errors import (
    EvidenceError,
    InconclusiveError,
    InputError,
    KeystoreError,
    QuorumarkError,
    RecordError,
    SignatureError,
)
from quorumark.field import P
from quorumark.model.layout import ModelLayout, write_safetensors
from quorumark.model.statistic import inner_product
from quorumark.reasons import Reason
from quorumark.report.texts import sentences
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.setup.inprocess import deal_key
from quorumark.verify.answer import answer, answer_with, whitened
from quorumark.verify.certificate import Certificate
from quorumark.verify.check import check_certificate, sign
from quorumark.verify.combine import combine
from quorumark.verify.evidence import Finding, Partial, Query
from quorumark.verify.ledger import Ledger
from quorumark.verify.query import prepare
from quorumark.verify.reference import Reference, read_chain
from tests.kit.answers import through
from tests.kit.ceremony import identities, make_terms
from tests.kit.consortium import World, anchor_model, make_world, trained_from
from tests.kit.evidence import consortium, make_finding
from tests.kit.oracle import spelled
from tests.kit.refusals import refused


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def asked(world: World) -> tuple[Query, list[Partial]]:
    return world.answers(world.suspect, (1, 2, 3, 4, 5))


# --- who can, and who cannot ------------------------------------------------------------------------------


def test_any_three_of_five_pass_and_two_cannot(world: World, asked: tuple[Query, list[Partial]]) -> None:
    query, partials = asked
    expected = world.known.z(world.marked)
    for some in itertools.permutations(partials, 3):
        finding = combine(world.manifest, query, some)
        assert (finding.verdict, finding.corroboration) == ("PASSED", "uncorroborated")
        assert float(finding.z) == pytest.approx(expected, abs=1e-5)
        assert Reason.of("finding.uncorroborated", partials=3) in finding.reasons
    assert expected > 20
    for count, corroboration in ((4, "corroborated"), (5, "corroborated")):
        assert combine(world.manifest, query, partials[:count]).corroboration == corroboration
    for pair in itertools.combinations(partials, 2):
        with pytest.raises(EvidenceError, match="2 partials are too few: 'hospitals' needs 3"):
            combine(world.manifest, query, pair)


def test_two_partials_say_nothing_about_z(world: World, asked: tuple[Query, list[Partial]]) -> None:
    """With two of three needed, every value of Y is possible: there is a third partial that gives it."""
    _, (one, two, *_) = asked
    for wanted in (0, 1, P - 1, 12345):
        third = through({0: wanted, one.point: one.value, two.point: two.value}, 3)
        assert shamir.decode({one.point: one.value, two.point: two.value, 3: third}, 3).value == wanted
    assert world.manifest.terms.threshold == 3


def test_other_models_fail(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    models = [trained_from(anchor_model(), 11), trained_from(anchor_model(), 12), trained_from(anchor_model(99), 5)]
    for model in models:
        query, partials = world.answers(model, (1, 3, 4))
        finding = combine(world.manifest, query, partials)
        assert finding.verdict == "FAILED"
        assert abs(float(finding.z)) < 5
        assert float(finding.z) == pytest.approx(world.known.z(model), abs=1e-5)
    # each of them raised the threshold for the next: 6, 6 + 1, 6 + √2, and now 6 + √3
    query, partials = world.answers(world.suspect, (1, 3, 4))
    finding = combine(world.manifest, query, partials)
    assert (finding.verdict, finding.equations, finding.threshold) == ("PASSED", 3, "7.732051")
    # members who did not answer those queries know nothing of them
    query, partials = world.answers(world.suspect, (2, 5))
    assert all(partial.history == {} for partial in partials)


def test_the_threshold_itself_is_enough() -> None:
    people, manifest = consortium(5, 3)
    for z, verdict in ((6.0, "PASSED"), (5.999999, "FAILED")):
        made = make_finding(people, manifest, z, (1, 2, 3))
        found = combine(manifest, made.query, made.partials)
        assert (float(found.z), found.threshold, found.verdict) == (z, "6.000000", verdict)


def test_a_threshold_by_probability(world: World, asked: tuple[Query, list[Partial]]) -> None:
    query, partials = asked
    finding = combine(world.manifest, query, partials[:3], alpha="1e-9")
    assert finding.agreed == "6.437899"
    assert finding.verdict == "PASSED"
    assert Reason.of("finding.alpha", alpha="1e-9") in finding.reasons
    finding = combine(world.manifest, query, partials[:3], alpha="1e-900000")
    assert finding.verdict == "FAILED"
    # e^-18 = 1.52e-8 is the bound at z = 6; with 0.9 every second model would pass
    assert combine(world.manifest, query, partials[:3], alpha="1.5e-8").agreed == "6.002536"
    for weaker in ("1.6e-8", "0.001", "0.9"):
        with pytest.raises(InputError, match="must not allow more than the agreed threshold 6"):
            combine(world.manifest, query, partials[:3], alpha=weaker)


# --- who lies ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seven() -> tuple[Manifest, Query, list[Partial], Callable[[int, int], Partial]]:
    """Seven members, three needed; `lie(point, by)` is a signed partial that is wrong by so much."""
    anchor = anchor_model()
    layout = ModelLayout.of(anchor)
    people = identities(7)
    terms = make_terms(
        people, 3, layout.coordinates, layout=layout.digest(), setup="dealer",
        anchor=anchor_digest(layout.digest(), layout.encode(anchor)),
    )  # fmt: skip
    manifest, shares = deal_key(people, terms)
    prepared = prepare(Reference.of([manifest], layout, anchor), trained_from(anchor, 1))
    x = whitened(manifest, prepared.form.x, 0, layout.coordinates)
    values = {point: inner_product(x, share) for point, share in shares.items()}

    def lie(point: int, by: int) -> Partial:
        return answer_with(people[point - 1], manifest, prepared.query, values[point] + by)

    return manifest, prepared.query, [lie(point, 0) for point in values], lie


@pytest.mark.parametrize("count", [5, 7])
def test_liars_are_corrected_and_named_or_detected(
    seven: tuple[Manifest, Query, list[Partial], Callable[[int, int], Partial]], count: int
) -> None:
    """m = t + 2e partials: any e wrong ones are corrected and named, e+1 to 2e that do not conspire are refused."""
    manifest, query, honest, lie = seven
    truth = combine(manifest, query, honest)
    assert truth.corroboration == "corroborated"
    points = range(1, count + 1)
    most = (count - 3) // 2
    rng = np.random.default_rng(count)
    for wrong in range(1, 2 * most + 1):
        for liars in list(itertools.combinations(points, wrong))[:20]:
            partials = [
                lie(p, int(rng.integers(1, P - 1))) if p in liars else honest[p - 1] for p in rng.permutation(points)
            ]
            if wrong <= most:
                finding = combine(manifest, query, partials)
                assert (finding.wrong, finding.value, finding.corroboration) == (liars, truth.value, "corrected")
                named = tuple(finding.names[str(p)] for p in liars)
                assert Reason.of("finding.corrected", partials=count, members=named, liars=most) in finding.reasons
            else:
                with pytest.raises(EvidenceError, match="contradict each other"):
                    combine(manifest, query, partials)


def test_more_liars_than_that_who_conspire_can_frame_others_and_the_certificate_says_so(
    seven: tuple[Manifest, Query, list[Partial], Callable[[int, int], Partial]],
) -> None:
    """Two of five: they add a polynomial that is 0 where the two others whom they do not frame sit."""
    manifest, query, honest, lie = seven
    # c·(x − 1)·(x − 2) at the liars' points 3 and 4; the member at 5 is framed
    forged = [honest[0], honest[1], lie(3, 7 * 2 * 1), lie(4, 7 * 3 * 2), honest[4]]
    finding = combine(manifest, query, forged)
    assert finding.wrong == (5,)
    assert finding.value != combine(manifest, query, honest).value
    framed = (finding.names["5"],)
    assert Reason.of("finding.corrected", partials=5, members=framed, liars=1) in finding.reasons
    assert "more who work together could have framed them" in " ".join(sentences(finding.reasons))


def test_a_lone_liar_among_t_who_says_rubbish_is_noticed(
    seven: tuple[Manifest, Query, list[Partial], Callable[[int, int], Partial]],
) -> None:
    """A number that no key of ±1 gives. A liar who stays within reach is not noticed: hence uncorroborated."""
    manifest, query, honest, lie = seven
    with pytest.raises(EvidenceError, match="no key can give the number"):
        combine(manifest, query, [honest[0], honest[1], lie(3, P // 3)])
    finding = combine(manifest, query, [honest[0], honest[1], lie(3, 1000)])
    assert finding.corroboration == "uncorroborated"


def test_what_is_not_a_partial_of_this_query_is_refused_and_named(
    world: World, asked: tuple[Query, list[Partial]], tmp_path: Path
) -> None:
    query, partials = asked
    good = partials[:2]
    identity = world.homes[2][0].identity(world.homes[2][1])
    values = {f: getattr(partials[2], f) for f in partials[2].as_dict() if f != "signature"}

    def forged(**changes: Any) -> Partial:
        return Partial.sign(identity, **{**values, **changes})

    other = "ab" * 32
    for partial, error, text in (
        (forged(suspect=other), EvidenceError, "the partial of 'Cedar' is for another suspect"),
        (forged(manifest=other), EvidenceError, "the partial of 'Cedar' is for another manifest"),
        (forged(epoch=1), EvidenceError, "the partial of 'Cedar' is for another epoch of shares"),
        (forged(x=other), EvidenceError, "the partial of 'Cedar' is for another canonical form"),
        (forged(query=other), EvidenceError, "the partial of 'Cedar' is for another query"),
        (forged(point=6), EvidenceError, "point 6, but 'hospitals' has 5 members"),
        (forged(point=4), SignatureError, "the signature of Delta does not hold"),
        (replace(partials[2], answer="1"), SignatureError, "the signature of Cedar does not hold"),
        (replace(partials[2], signature="00" * 64), SignatureError, "the signature of Cedar does not hold"),
    ):
        with pytest.raises(error, match=text):
            combine(world.manifest, query, [*good, partial])
    with pytest.raises(EvidenceError, match="two partials of 'Cedar' with different answers"):
        combine(world.manifest, query, [*good, partials[2], forged(answer="1")])
    assert combine(world.manifest, query, [*good, partials[2], partials[2]]).corroboration == "uncorroborated"
    stranger = make_world(tmp_path)
    with pytest.raises(EvidenceError, match="the query was made under another manifest"):
        combine(stranger.manifest, query, partials)


def test_of_two_equal_answers_the_one_that_knows_more_counts(world: World, asked: tuple[Query, list[Partial]]) -> None:
    query, partials = asked
    home, unlock = world.homes[0]
    more = answer_with(home.identity(unlock), world.manifest, query, partials[0].value, history={"ab" * 32: "failed"})
    for order in ([more, *partials], [*partials, more]):
        assert combine(world.manifest, query, order).equations == 1


def test_rubbish_partials_are_refused(asked: tuple[Query, list[Partial]]) -> None:
    data = asked[1][0].to_bytes()
    body = json.loads(data)
    for wrong in (
        b"", b"{}", data[:-5], data.replace(b"quorumark-partial/v1", b"quorumark-partial/v2"),
        spelled({**body, "answer": str(P)}), spelled({**body, "answer": "01"}),
        spelled({**body, "answer": 5}), spelled({**body, "extra": 1}),
        spelled({**body, "members": [3, 2]}), spelled({**body, "history": {"x": "passed"}}),
        spelled({**body, "point": 1.0}), spelled({**body, "epoch": True}),
    ):  # fmt: skip
        with pytest.raises(RecordError):
            Partial.from_bytes(wrong)
    assert Partial.from_bytes(data) == asked[1][0]


# --- the paper's variant, and its key ----------------------------------------------------------------------


def test_masked_partials_open_the_sum_and_nothing_else(world: World, asked: tuple[Query, list[Partial]]) -> None:
    query, partials = asked
    people = [home.identity(unlock) for home, unlock in world.homes]
    chosen = (1, 3, 4)
    masked = [answer_with(people[p - 1], world.manifest, query, partials[p - 1].value, chosen) for p in chosen]
    finding = combine(world.manifest, query, masked)
    assert finding.value == combine(world.manifest, query, partials[:3]).value
    assert finding.corroboration == "uncorroborated"
    weights = dict(zip(chosen, shamir.lagrange(chosen), strict=True))
    for partial in masked:  # neither the answer nor λ times it shows
        plain = partials[partial.point - 1].value
        assert partial.value not in (plain, weights[partial.point] * plain % P)
    for wrong in ([*masked[:2], partials[3]], masked[:2], [*masked, partials[4]]):
        with pytest.raises(EvidenceError, match=r"masked partials open nothing unless|are too few"):
            combine(world.manifest, query, wrong)
    with pytest.raises(QuorumarkError, match="members must be at least 3 of the points 1 to 5"):
        answer_with(people[1], world.manifest, query, 1, chosen)


def test_masks_of_partials_are_for_one_query_and_one_set(world: World, asked: tuple[Query, list[Partial]]) -> None:
    """The same masks again would show the difference of two answers; over several sets of members, single answers."""
    query, partials = asked
    people, y = [home.identity(unlock) for home, unlock in world.homes], partials[0].value

    def mask(query: Query, chosen: tuple[int, ...]) -> int:
        """What is left of the first member's masked answer without λ·y."""
        partial = answer_with(people[0], world.manifest, query, y, chosen)
        return (partial.value - shamir.lagrange(chosen)[0] * y) % P

    assert mask(query, (1, 3, 4)) == mask(query, (1, 3, 4))  # nothing random is in them
    later = replace(query, created="2026-03-01T08:00:01Z")
    assert mask(later, (1, 3, 4)) != mask(query, (1, 3, 4))
    # masks of pairs that were the same in every set would add up: (m₃+m₄) + (m₃+m₅) + (m₄+m₅) = 2·(m₃+m₄+m₅)
    pairs = sum(mask(query, chosen) for chosen in ((1, 3, 4), (1, 3, 5), (1, 4, 5)))
    assert pairs % P != 2 * mask(query, (1, 3, 4, 5)) % P


def test_a_set_that_cannot_be_masked_for_costs_no_entry(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    query = prepare(world.reference, world.suspect).query
    for members in ((1, 2), (2, 3, 4), (1, 2, 9), (0, 1, 2)):
        with pytest.raises(InputError, match="members must be at least 3 of the points 1 to 5, this member's 1 among"):
            answer(*world.homes[0], world.reference, world.suspect, query, approved=True, members=members)
    assert not Ledger.open(world.homes[0][0].only_consortium(), world.manifest).entries


@pytest.mark.parametrize("setup", ["dealer", "paper"])
def test_gaussian_keys_are_scaled_by_their_norm(setup: str) -> None:
    """A dealer opens the norm; of a key that nobody knows it is taken as it is on average, 2^8·√d."""
    anchor = anchor_model()
    layout = ModelLayout.of(anchor)
    people = identities(3)
    terms = make_terms(
        people, 2, layout.coordinates, layout=layout.digest(), setup="dealer", key="gaussian",
        anchor=anchor_digest(layout.digest(), layout.encode(anchor)),
    )  # fmt: skip
    manifest, shares = deal_key(people, terms)
    if setup == "paper":
        terms = replace(terms, setup="paper")
        manifest = Manifest(terms, replace(manifest.genesis, terms=terms.digest().hex()), manifest.roots)
    prepared = prepare(Reference.of([manifest], layout, anchor), trained_from(anchor, 1))
    x = whitened(manifest, prepared.form.x, 0, layout.coordinates)
    partials = [answer_with(p, manifest, prepared.query, inner_product(x, shares[i])) for i, p in enumerate(people, 1)]
    finding = combine(manifest, prepared.query, partials)
    raw = shamir.reconstruct({1: shares[1], 2: shares[2]}, 2).astype(np.int64)
    key = np.where(raw > P // 2, raw - P, raw).astype(float)
    norm = np.linalg.norm(key) if setup == "dealer" else 2**8 * np.sqrt(key.size)
    expected = x.astype(float) @ key * np.sqrt(key.size) / (np.linalg.norm(x.astype(float)) * norm)
    assert float(finding.z) == pytest.approx(expected, abs=1e-4)


# --- what a member refuses --------------------------------------------------------------------------------


def test_a_member_takes_nobodys_word_for_the_query(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    home, unlock = world.homes[0]
    query = prepare(world.reference, world.suspect).query
    for changed in (
        replace(query, norm2=query.norm2 + 1), replace(query, x="cd" * 32), replace(query, covered=1),
        replace(query, burnt=(3,)), replace(query, statistic="global-cosine/v1"),
        replace(query, matching=(Reason.of("read.adapter"),)),
    ):  # fmt: skip
        with pytest.raises(EvidenceError, match="the query does not describe this suspect"):
            answer(home, unlock, world.reference, world.suspect, changed, approved=True)
    other = world.save(trained_from(anchor_model(), 3), "other.safetensors")
    with pytest.raises(EvidenceError, match="the query does not describe this suspect: suspect is"):
        answer(home, unlock, world.reference, other, query, approved=True)
    ledger = Ledger.open(home.only_consortium(), world.manifest)
    assert ledger.answered() == set()
    with refused("not-approved"):
        answer(home, unlock, world.reference, world.suspect, query)
    assert [entry["kind"] for entry in Ledger.open(home.only_consortium(), world.manifest).entries] == ["refused"]


def test_a_damaged_share_does_not_answer(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    home, unlock = world.homes[0]
    place = home.only_consortium()
    query = prepare(world.reference, world.suspect).query
    data = bytearray(place.share_path().read_bytes())
    data[-100] ^= 1
    place.share_path().write_bytes(bytes(data))
    with pytest.raises(KeystoreError):
        answer(home, unlock, world.reference, world.suspect, query, approved=True)
    shutil.copy(world.homes[1][0].only_consortium().share_path(), place.share_path())
    with pytest.raises(KeystoreError):
        answer(home, world.homes[1][1], world.reference, world.suspect, query, approved=True)
    # well sealed, but another member's; and one's own with another number in it
    theirs = world.homes[1][0].only_consortium().share(world.homes[1][1])
    theirs.copy_to(place.share_path(), unlock)
    with pytest.raises(KeystoreError, match="belongs to another consortium, member or epoch"):
        answer(home, unlock, world.reference, world.suspect, query, approved=True)
    values = theirs.vector()
    info = ShareInfo.under(world.manifest, 1, theirs.info.block)
    with ShareWriter(place.share_path(), unlock, info, theirs.salt, theirs.others_salts) as writer:
        writer.write(values)
    with pytest.raises(KeystoreError, match="is not the share that the manifest's root commits to"):
        answer(home, unlock, world.reference, world.suspect, query, approved=True)
    assert not Ledger.open(place, world.manifest).entries


def test_a_reference_of_another_consortium_is_not_the_members(world: World, tmp_path: Path) -> None:
    stranger = make_world(tmp_path)
    query = prepare(world.reference, world.suspect).query
    with pytest.raises(EvidenceError, match="manifest in force is another one than the query's"):
        answer(*stranger.homes[0], world.reference, world.suspect, query, approved=True)


def test_the_largest_number_that_signs_can_give(world: World, asked: tuple[Query, list[Partial]]) -> None:
    """|Y| ≤ Σ|x|: a liar who sets it to one more is noticed even among t."""
    query, partials = asked
    home, unlock = world.homes[2]
    for sign_, more, fits in ((1, 0, True), (-1, 0, True), (1, 1, False), (-1, 1, False)):
        wanted = sign_ * (query.norm1 + more) % P
        value = through({0: wanted, 1: partials[0].value, 2: partials[1].value}, 3)
        third = answer_with(home.identity(unlock), world.manifest, query, value)
        if fits:
            assert combine(world.manifest, query, [*partials[:2], third]).value == str(sign_ * query.norm1)
        else:
            with pytest.raises(EvidenceError, match="no key can give the number"):
                combine(world.manifest, query, [*partials[:2], third])


def test_queries_that_contradict_themselves_are_refused(asked: tuple[Query, list[Partial]]) -> None:
    for change, text in (
        ({"covered": asked[0].carriers + 1}, "coverage must not exceed the carriers"),
        ({"covered": 0, "carriers": 0}, "carriers must be at least 1"),
        ({"burnt": (2, 1)}, "burnt leaves must be integers in order"),
        ({"burnt": (1, 1)}, "burnt leaves must be integers in order"),
    ):
        with pytest.raises(RecordError, match=text):
            replace(asked[0], **change)


def test_an_anchor_or_a_layout_that_is_not_the_consortiums_is_refused(world: World, tmp_path: Path) -> None:
    for name in ("consortium.json", "layout.json", "anchor.safetensors"):
        shutil.copy(world.folder / name, tmp_path / name)
    anchor = anchor_model()
    anchor["fc.weight"][0, 0] += 1e-3
    write_safetensors(anchor, tmp_path / "anchor.safetensors")
    with pytest.raises(RecordError, match="the anchor is not the model that the manifest names"):
        Reference.read(tmp_path / "consortium.json")
    (tmp_path / "layout.json").write_bytes(ModelLayout.of(anchor, max_coordinates=100).to_bytes())
    with pytest.raises(RecordError, match="the layout is not the one that the manifest names"):
        Reference.read(tmp_path / "consortium.json")
    (tmp_path / "layout.json").unlink()
    with pytest.raises(RecordError, match=r"the layout is not at .* name it with --layout"):
        Reference.read(tmp_path / "consortium.json")


def test_what_the_anchors_digest_does_not_cover_cannot_be_chosen_afterwards() -> None:
    """A consortium that lies names an anchor of zeros, and later shows one that is tiny and leads to its key."""
    zeros = {"fc.weight": np.zeros((80, 120), np.float32)}
    layout, people = ModelLayout.of(zeros), identities(3)
    named = anchor_digest(layout.digest(), layout.encode(zeros))
    terms = make_terms(people, 2, layout.coordinates, layout=layout.digest(), setup="dealer", anchor=named)
    manifest, shares = deal_key(people, terms)
    key = KnownKey.from_shares(manifest, shares, layout, TensorsInMemory(zeros)).key
    innocent = {"fc.weight": np.random.default_rng(3).standard_normal((80, 120)).astype(np.float32)}
    leading = {"fc.weight": (2.0**-60 * (innocent["fc.weight"] - key.reshape(80, 120))).astype(np.float32)}
    assert KnownKey(key, layout, TensorsInMemory(leading)).z(innocent) > 12  # what it would be worth
    honest, lying = (prepare(Reference.of([manifest], layout, anchor), innocent) for anchor in (zeros, leading))
    assert lying.form.digest == honest.form.digest
    value = int((lying.form.x.astype(np.int64) * key).sum())
    assert abs(value) < 5 * lying.form.norm2**0.5


# --- suspects of all kinds --------------------------------------------------------------------------------


def test_copies_that_look_different_pass_as_well(tmp_path: Path) -> None:
    """Each is asked in a consortium of its own: near copies of one model count as one query, and are refused."""
    for number, change in enumerate(("half", "prefix", "extra", "scaled", "one huge weight", "partly")):
        folder = tmp_path / str(number)
        folder.mkdir()
        world = make_world(folder)
        before = world.known.z(world.marked)
        model = {name: w.copy() for name, w in world.marked.items()}
        if change == "half":
            model = {name: w.astype(np.float16) for name, w in model.items()}
        elif change == "prefix":
            model = {f"module.model.{name}": w for name, w in model.items()}
        elif change == "extra":
            model["head.weight"] = np.ones((5, 5), np.float32)
        elif change == "scaled":
            model = {name: w * np.float32(3) for name, w in model.items()}
        elif change == "one huge weight":
            model["fc.weight"][3, 3] = 1e30
        elif change == "partly":
            del model["fc.weight"]
        query, partials = world.answers(world.save(model, "copy.safetensors"), (1, 2, 5))
        finding = combine(world.manifest, query, partials)
        assert finding.verdict == "PASSED", change
        if change == "partly":
            assert Reason.of("finding.weights-missing", missing=9_600, carriers=20_400) in finding.reasons
        else:
            assert abs(float(finding.z) / before - 1) < 0.1, change


def test_what_is_wrong_with_a_suspect_is_said(world: World) -> None:
    model = {name: w.copy() for name, w in world.marked.items()}
    model["conv.weight"][0, 0, 0, :2] = np.nan
    query = prepare(world.reference, model).query
    assert query.matching == (Reason.of("read.not-finite", tensor="conv.weight", numbers=2),)
    with pytest.raises(InconclusiveError, match=r"does not fit the consortium's model: 0 of 20,400"):
        prepare(world.reference, {"something.else": np.ones((3, 3), np.float32)})
    with pytest.raises(InconclusiveError) as caught:
        prepare(world.reference, {"fc.weight": np.ones((80, 121), np.float32)})
    assert caught.value.reason == Reason.of("untestable.coverage", covered=0, carriers=20_400)
    assert caught.value.problems == (
        Reason.of("read.carriers-missing", missing=1, carriers=2, some=("conv.weight",)),
        Reason.of("read.carrier-shape", tensor="fc.weight", shape=(80, 121), wanted=(80, 120)),
    )
    with pytest.raises(InconclusiveError, match="the suspect is the anchor itself"):
        prepare(world.reference, anchor_model())


def test_a_low_z_of_half_a_model_is_inconclusive(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    model = trained_from(anchor_model(), 8)
    del model["fc.weight"]
    query, partials = world.answers(model, (1, 2, 3))
    finding = combine(world.manifest, query, partials)
    assert finding.verdict == "INCONCLUSIVE"
    why = {"z": finding.z, "threshold": finding.threshold}
    assert finding.reasons[0] == Reason.of("finding.coverage", **why, covered=10_800, carriers=20_400)
    with pytest.raises(InconclusiveError, match="9,600 of 20,400 carrying weights were found"):  # 47.1 %
        prepare(world.reference, {"fc.weight": trained_from(anchor_model(), 8)["fc.weight"]})
    for covered, verdict in ((18_360, "FAILED"), (18_359, "INCONCLUSIVE")):  # 90 %, and one less
        asked = replace(query, covered=covered)
        zeros = [answer_with(home.identity(unlock), world.manifest, asked, 0) for home, unlock in world.homes]
        assert combine(world.manifest, asked, zeros).verdict == verdict


def test_leaves_that_are_called_burnt_clear_nobody(tmp_path: Path) -> None:
    """Who gets answers all the same (here members believe every query) asks about a marked model and leaves out four
    fifths of it: its z is then less than half."""
    world = make_world(tmp_path)
    leaves = -(-world.manifest.terms.coordinates // world.manifest.terms.leaf)
    query = prepare(world.reference, world.suspect, burnt=range(leaves - leaves // 5)).query
    assert query.covered == query.carriers
    with refused("unexplained-leaves"):
        world.answers(world.suspect, (1,), query)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Ledger, "burnt", lambda _: query.burnt)
        _, partials = world.answers(world.suspect, (1, 2, 3, 4), query)
    high = "1e-100"  # z* = 21.5; the whole model has 35, a fifth of it 16, each ± 1
    finding = combine(world.manifest, query, partials, alpha=high)
    assert combine(world.manifest, *world.answers(world.suspect, (1, 2, 3, 4)), alpha=high).verdict == "PASSED"
    assert finding.verdict == "INCONCLUSIVE"
    why = {"z": finding.z, "threshold": finding.threshold}
    assert finding.reasons[0] == Reason.of("finding.left-out", **why, left_out=16_384, coordinates=20_400)
    certificate = Certificate.of(replace(finding, verdict="FAILED"))
    with pytest.raises(EvidenceError, match="says something else than its partials"):
        sign(*world.homes[0], certificate)
    # 31 leaves of 64 are 9.7 %, 32 are 10.04 %; what was not found counts besides
    for burnt, covered, verdict in ((31, 20_400, "FAILED"), (32, 20_400, "INCONCLUSIVE"), (31, 20_343, "INCONCLUSIVE")):
        asked = replace(query, burnt=tuple(range(burnt)), covered=covered)
        zeros = [answer_with(home.identity(unlock), world.manifest, asked, 0) for home, unlock in world.homes]
        assert combine(world.manifest, asked, zeros).verdict == verdict
    beyond = replace(query, burnt=(leaves,))
    zeros = [answer_with(home.identity(unlock), world.manifest, beyond, 0) for home, unlock in world.homes]
    with pytest.raises(EvidenceError, match="leaves out leaves that no share has"):
        combine(world.manifest, beyond, zeros)


def test_a_query_by_another_statistic_size_or_epoch_is_not_combined(
    world: World, asked: tuple[Query, list[Partial]]
) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"statistic": "global-cosine/v1"}, "the query is not by the agreed statistic"),
        ({"coordinates": 5}, "the query is not by the agreed statistic"),
        ({"epoch": 1}, "the query was made under another manifest"),
    ]
    for change, text in changes:
        query = replace(asked[0], **change)
        partials = [answer_with(home.identity(unlock), world.manifest, query, 0) for home, unlock in world.homes]
        with pytest.raises(EvidenceError, match=text):
            combine(world.manifest, query, partials)


# --- the certificate --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(world: World, asked: tuple[Query, list[Partial]]) -> Certificate:
    return world.certified(*asked)


def test_a_member_signs_for_no_answer_that_its_ledger_does_not_have(tmp_path: Path) -> None:
    """Somebody else answers in its name, with its key and share: its ledger knows of no such query."""
    world = make_world(tmp_path)
    query, partials = world.answers(world.suspect, (1, 2))
    x = prepare(world.reference, world.suspect).form.x
    home, unlock = world.homes[2]
    value = inner_product(whitened(world.manifest, x, 0, x.size), home.only_consortium().share(unlock).vector())
    partials.append(answer_with(home.identity(unlock), world.manifest, query, value))
    made = Certificate.of(combine(world.manifest, query, partials))
    assert made.finding.verdict == "PASSED"
    sign(*world.homes[0], made)
    with pytest.raises(EvidenceError, match="this member has no part in the certificate: it did not answer that query"):
        sign(home, unlock, made)
    assert Ledger.open(home.only_consortium(), world.manifest).entries == ()


def test_a_certificate_checks_out_from_its_files_alone(world: World, certificate: Certificate, tmp_path: Path) -> None:
    for name in ("consortium.json", "layout.json", "anchor.safetensors", "suspect.safetensors"):
        shutil.copy(world.folder / name, tmp_path / name)
    (tmp_path / "certificate.json").write_bytes(certificate.to_bytes())
    found = Certificate.from_bytes((tmp_path / "certificate.json").read_bytes())
    chain = read_chain(tmp_path / "consortium.json")
    reference = Reference.read(tmp_path / "consortium.json")
    checked, left = check_certificate(found, chain, suspect=tmp_path / "suspect.safetensors", reference=reference)
    assert len(checked) == 5
    assert left == []
    checked, left = check_certificate(found, chain)
    assert len(checked) == 3
    assert len(left) == 2
    with pytest.raises(EvidenceError, match="the suspect given is not the one"):
        check_certificate(found, chain, suspect=tmp_path / "anchor.safetensors")


def test_a_file_may_have_another_name(world: World, certificate: Certificate, tmp_path: Path) -> None:
    renamed = tmp_path / "downloaded (1).safetensors"
    shutil.copy(world.suspect, renamed)
    checked, left = check_certificate(certificate, [world.manifest], suspect=renamed, reference=world.reference)
    assert len(checked) == 5
    assert left == []
    query = certificate.finding.query
    partial = answer(*world.homes[0], world.reference, renamed, query, approved=True)
    assert partial.answer == next(p for p in certificate.finding.partials if p.point == 1).answer


def test_a_file_may_not_have_another_size(world: World, certificate: Certificate) -> None:
    query = certificate.finding.query
    asked = replace(query, files=(replace(query.files[0], size=5),))
    with pytest.raises(EvidenceError, match="the query does not describe this suspect: files is"):
        answer(*world.homes[0], world.reference, world.suspect, asked, approved=True)
    numbers = {partial.point: partial.value for partial in certificate.finding.partials}
    made = [
        answer_with(home.identity(unlock), world.manifest, asked, numbers[x])
        for x, (home, unlock) in enumerate(world.homes, 1)
    ]
    lie = Certificate.of(combine(world.manifest, asked, made))
    for home, unlock in world.homes:
        lie = lie.signed_by(home.identity(unlock))
    with pytest.raises(EvidenceError, match="the certificate's query does not follow: files is"):
        check_certificate(lie, [world.manifest], suspect=world.suspect, reference=world.reference)


def test_nobody_signs_what_the_combiner_wrote_between_the_lines(
    world: World, asked: tuple[Query, list[Partial]]
) -> None:
    """No command shows a field that it does not know, and the signature would cover it all the same."""
    whole = json.loads(Certificate.of(combine(world.manifest, *asked)).payload)
    deep: tuple[tuple[str, ...], ...] = ((), ("predicate",), ("predicate", "query"), ("predicate", "partials", "0"))
    for where in deep:
        body = json.loads(canonical(whole))
        place = body
        for name in where:
            place = place[int(name) if name.isdecimal() else name]
        place["x-licence"] = "the members give this model to Mallory"
        with pytest.raises(RecordError, match="unknown field 'x-licence'"):
            Certificate(canonical(body))


def test_a_certificate_that_does_not_follow_is_refused(
    world: World, asked: tuple[Query, list[Partial]], certificate: Certificate
) -> None:
    """Even if all members sign it: everything in it is computed again."""
    finding = certificate.finding
    people = [home.identity(unlock) for home, unlock in world.homes]

    def signed(changed: Finding) -> Certificate:
        made = Certificate.of(changed)
        for person in people:
            made = made.signed_by(person)
        return made

    for changes in (
        {"z": "99.000000"}, {"verdict": "FAILED"}, {"value": "7"}, {"threshold": "1.000000"}, {"equations": 3},
        {"log10_p": "-1000.00"}, {"log10_bound": "-1.00"}, {"cosine": "1.000000"}, {"corroboration": "uncorroborated"},
        {"reasons": (Reason.of("finding.corroborated", partials=5, liars=4),)},
        {"consortium": "banks"}, {"names": {"1": "somebody else"}}, {"wrong": (2,)},
        {"agreed": "5"}, {"known": {"ab" * 32: "passed"}}, {"members": 6}, {"quorum": 2},
    ):  # fmt: skip
        with pytest.raises(EvidenceError, match="says something else than the partials in it"):
            check_certificate(signed(replace(finding, **changes)), [world.manifest])
        with pytest.raises(EvidenceError, match="do not sign it"):
            sign(*world.homes[0], Certificate.of(replace(finding, **changes)))
    # a query about x that nobody computed from the suspect: only those who compute it again see that
    query, _ = asked
    wrong = replace(query, norm2=query.norm2 // 4)
    values = {p.point: p.value for p in finding.partials}
    forged = [answer_with(person, world.manifest, wrong, values[x]) for x, person in enumerate(people, 1)]
    lying = signed(combine(world.manifest, wrong, forged, created=finding.created))
    check_certificate(lying, [world.manifest])
    with pytest.raises(EvidenceError, match="the certificate's query does not follow: norm2"):
        check_certificate(lying, [world.manifest], suspect=world.suspect, reference=world.reference)


def test_a_certificate_needs_everybody_who_answered(world: World, certificate: Certificate) -> None:
    half = Certificate.of(certificate.finding)
    for home, unlock in world.homes[:4]:
        half = sign(home, unlock, half)
    with pytest.raises(SignatureError, match="lacks the signature of Elm"):
        check_certificate(half, [world.manifest])


def test_who_did_not_answer_does_not_sign(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    query, partials = world.answers(world.suspect, (1, 2, 3))
    made = Certificate.of(combine(world.manifest, query, partials))
    with pytest.raises(EvidenceError, match="this member has no part in the certificate"):
        sign(*world.homes[3], made)
    # three of three: one liar could have made it pass, so the ledger does not believe it; of four it does
    sign(*world.homes[0], made)
    ledger = Ledger.open(world.homes[0][0].only_consortium(), world.manifest)
    assert (made.finding.verdict, ledger.known()) == ("PASSED", {query.x: "open"})
    assert [entry["kind"] for entry in ledger.entries] == ["answered"]
    _, more = world.answers(world.suspect, (4,), query)
    _, again = world.answers(world.suspect, (1,), query)
    assert again[0].history == {}  # what is asked is no earlier query
    signed = sign(*world.homes[0], Certificate.of(combine(world.manifest, query, [*partials, *more])))
    ledger = Ledger.open(world.homes[0][0].only_consortium(), world.manifest)
    assert ledger.known() == {query.x: "passed"}
    assert [entry["kind"] for entry in ledger.entries] == ["answered", "outcome"]
    # a second query of the same three: what passed raises no threshold
    query, partials = world.answers(trained_from(anchor_model(), 31), (1, 2, 3))
    assert {partial.history.get(signed.finding.query.x) for partial in partials} == {"passed", "open"}


def test_who_signs_learns_of_the_queries_that_the_others_know(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    earlier, _ = world.answers(trained_from(anchor_model(), 41), (1,))
    query, partials = world.answers(world.suspect, (1, 2, 3, 4))
    sign(*world.homes[3], Certificate.of(combine(world.manifest, query, partials)))
    ledger = Ledger.open(world.homes[3][0].only_consortium(), world.manifest)
    assert ledger.known() == {query.x: "passed", earlier.x: "open"}


def test_nobody_signs_that_its_own_partial_is_wrong(tmp_path: Path) -> None:
    """Two of five who conspire frame a third, whose share is as it should be (⌊(5 − 3)/2⌋ + 1 of them)."""
    world = make_world(tmp_path)
    query, partials = world.answers(world.suspect, (1, 2, 3, 4, 5))
    values = {p.point: p.value for p in partials}
    framed = {x: through({0: 12345, 1: values[1], 2: values[2]}, x) for x in (4, 5)}
    lies = [answer_with(world.homes[x - 1][0].identity(world.homes[x - 1][1]), world.manifest, query, framed[x])
            for x in (4, 5)]  # fmt: skip
    certificate = Certificate.of(combine(world.manifest, query, [*partials[:3], *lies]))
    assert certificate.finding.wrong == (3,)
    with pytest.raises(EvidenceError, match="calls this member's own partial wrong: do not sign it"):
        sign(*world.homes[2], certificate)
    assert not [e for e in Ledger.open(world.homes[2][0].only_consortium(), world.manifest).entries
                if e["kind"] == "outcome"]  # fmt: skip
    assert sign(*world.homes[0], certificate).signatures


def test_the_budget_counts_what_all_members_know(world: World, asked: tuple[Query, list[Partial]]) -> None:
    """20,400 coordinates allow 16 queries; members who answered different ones know of more together."""
    query, partials = asked

    def knowing(*counts: int) -> list[Partial]:
        made = []
        for x, count in enumerate(counts, 1):
            identity = world.homes[x - 1][0].identity(world.homes[x - 1][1])
            history = {f"{x:02x}{i:02x}" * 16: "passed" for i in range(count)}
            made.append(answer_with(identity, world.manifest, query, partials[x - 1].value, (), history))
        return made

    for counts in ((6, 6, 6), (6, 6, 4)):  # with this query 19 and 17
        with pytest.raises(EvidenceError, match="more than the 16 that the consortium may answer"):
            combine(world.manifest, query, knowing(*counts))
    assert combine(world.manifest, query, knowing(6, 6, 3)).equations == 0
