"""The spot audit: honest consortia pass it, through refreshes and reshares; liars do not, whatever they try.

Keys, salts and so the leaves that are drawn are new in every run. With z = 100 on 938 leaves an audit aims at 16.6, so
that an honest one fails by chance (z_sub < 12, 4.6 standard deviations) in 2 of 10^6 cases; |z| < 6 for a model without
the mark fails in 2 of 10^9.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import comb, log10, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark import field, shamir
from quorumark.canonical import canonical, digest
from quorumark.consortium.archive import key_place, leaf_count, write_archive
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.merkle import Opening, Tree, new_salt, salt_seed
from quorumark.consortium.records import Genesis, Manifest, Terms
from quorumark.consortium.shares import ShareFile, ShareInfo, ShareWriter
from quorumark.errors import InputError, RecordError, SignatureError
from quorumark.field import P
from quorumark.model.statistic import vector_digest
from quorumark.reasons import Reason
from quorumark.setup.amend import propose
from quorumark.setup.dealer import accept, deal
from quorumark.setup.dkg import DkgMember
from quorumark.verify import audit
from quorumark.verify.audit import check_audit
from quorumark.verify.challenge import Challenge, leaves_needed
from quorumark.verify.evidence import Query
from quorumark.verify.opening import KeyOpening, ShareOpening
from quorumark.verify.reference import read_chain
from tests.kit.ceremony import NAMES, make_terms
from tests.kit.liars import LEAF, SEED, D, Liars, query_of, score, shared, signs, vector, without
from tests.kit.oracle import spelled
from tests.kit.reshare_runs import Reshare
from tests.kit.setup_runs import Run

LEAVES = -(-D // LEAF)


class Memory:
    """What a ledger does, without a file."""

    def __init__(self, leaves: Sequence[int] = ()) -> None:
        self.leaves = set(leaves)
        self.digests: list[str] = []

    def burnt(self) -> tuple[int, ...]:
        return tuple(sorted(self.leaves))

    def record_burnt(self, leaves: Sequence[int], digest: str) -> None:
        self.leaves.update(leaves)
        self.digests.append(digest)


# --- an honest consortium in folders ----------------------------------------------------------------------


class Consortium:
    """Five homes with a key from the dealer-free ceremony; refreshed and reshared in one process."""

    def __init__(self, base: Path, count: int = 5, threshold: int = 3) -> None:
        self.base = base
        self.homes: dict[str, HomeFolder] = {}
        for name in NAMES[:count]:
            self.add(name)
        people = [self.identity(name) for name in NAMES[:count]]
        terms = make_terms(people, threshold, D, leaf=LEAF)
        run = Run(people, terms, [DkgMember(p, terms, os.urandom(32)) for p in people])
        self.chain = [run.whole()]
        self.raw = run.key()
        self.tau = self.raw * signs(self.chain[0].genesis, D)
        self._first = terms
        self._keep(run.members)

    def add(self, name: str) -> Identity:
        Unlock.new_key_file(self.base / f"{name}.key")
        self.homes[name] = HomeFolder.create(self.base / name, name, self.unlock(name))
        return self.identity(name)

    def unlock(self, name: str) -> Unlock:
        return Unlock.key_file(self.base / f"{name}.key")

    def identity(self, name: str) -> Identity:
        return self.homes[name].identity(self.unlock(name))

    def place(self, name: str) -> ConsortiumFolder:
        return self.homes[name].consortium(self._first)

    @property
    def manifest(self) -> Manifest:
        return self.chain[-1]

    @property
    def members(self) -> list[str]:
        return [member.name for member in self.manifest.terms.roster]

    @property
    def archives(self) -> list[Path]:
        paths = [self.place(name).archive_path for name in self.homes]
        return [path for path in paths if path.exists()]

    def _keep(self, members: Sequence[Any]) -> None:
        for member in members:
            name = self.manifest.terms.member(member.point).name
            place, info = self.place(name), ShareInfo.under(self.manifest, member.point)
            path = place.share_path(self.manifest.epoch)
            with ShareWriter(path, self.unlock(name), info, member.salt, member.others_salts) as file:
                file.write(member.share)
            place.adopt(self.chain)

    def move(self, terms: Terms | None = None) -> None:
        """A resharing, or a refresh to the same terms; the old shares are erased."""
        before = self.manifest.terms
        files = {m.point: self.place(m.name).share(self.unlock(m.name)) for m in before.roster}
        people = [self.identity(name) for name in self.homes]
        again = Reshare(self.chain, terms or before, people, {x: file.vector() for x, file in files.items()})
        first = self.manifest.epoch == 0
        self.chain = again.whole()
        for member in again.members:
            name = self.manifest.terms.member(member.point).name
            if first and name in [m.name for m in before.roster]:
                old = files[next(m.point for m in before.roster if m.name == name)]
                write_archive(self.place(name).archive_path, old, member.archive_keys())
        self._keep(again.members)
        for name in self.members:
            self.place(name).tidy()

    def opening(self, name: str, asked: Challenge, query: Query, burns: Memory | None = None, **other: Any) -> bytes:
        place, memory = self.place(name), burns or Memory()
        arguments = {"answered": True, "burns": memory, **other}
        return audit.open_leaves(self.homes[name], place, self.unlock(name), asked, query, **arguments)


@pytest.fixture(scope="module")
def young(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    """In epoch 0; tests do not change it."""
    return Consortium(tmp_path_factory.mktemp("young"))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    """Refreshed once; then Birch left, Hazel came, and four are needed; tests do not change it."""
    group = Consortium(tmp_path_factory.mktemp("old"))
    group.move()
    hazel = group.add("Hazel")
    terms = propose(group.manifest.terms, threshold=4, removed=[2], added=[(hazel.card(), 70)])
    group.move(terms)
    return group


@dataclass
class Case:
    """A marked suspect, its query, and a challenge."""

    x: NDArray[np.int8]
    query: Query
    z: str
    asked: Challenge


def case(group: Consortium, seed: int = 1, marked: bool = True, z: str | None = None) -> Case:
    x = vector(np.random.default_rng(seed), group.tau if marked else None)
    query, found = query_of(x, group.manifest), score(x, group.tau)
    return Case(x, query, found, audit.challenge(query, group.manifest, z or found, SEED))


@pytest.fixture(scope="module")
def honest(young: Consortium) -> tuple[Case, list[bytes]]:
    made = case(young)
    return made, [young.opening(name, made.asked, made.query) for name in young.members]


# --- the digest of x --------------------------------------------------------------------------------------


def test_the_digest_of_x_names_its_type_and_not_the_machine() -> None:
    x = np.array([1, -2, 300], np.int16)
    expected = digest("canonical form", b"int16", x.astype("<i2").tobytes()).hex()
    assert vector_digest(x) == vector_digest(x.astype(">i2")) == vector_digest(np.repeat(x, 2)[::2]) == expected
    assert vector_digest(x.astype(np.int32)) != expected
    for wrong in (x.astype(np.float32), x[None], [1, 2]):
        with pytest.raises(InputError, match="vector of integers"):
            vector_digest(wrong)  # type: ignore[arg-type]


# --- how many leaves, and which ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("z", "usable", "share"), [("170", 10**6, 0.0072), ("60", LEAVES, 0.066), ("100", 10**5, 0.0208)]
)
def test_the_part_that_is_opened(z: str, usable: int, share: float) -> None:
    """(12 + 2.4·s)²/z², s² = 1 + z²/(4·L)."""
    count = leaves_needed(z, usable)
    s = sqrt(1 + float(z) ** 2 / (4 * usable))
    assert (12 + 2.4 * s) ** 2 / float(z) ** 2 * usable == pytest.approx(count, abs=1)
    assert count / usable == pytest.approx(share, rel=0.02)


def test_a_z_that_is_too_small_for_an_audit() -> None:
    assert leaves_needed("20.5", 10**6) <= 500_000
    for z, usable in (("20", 10**6), ("6", 10**6), ("0", 100), ("-50", 1000), ("60", 1), ("25", 30)):
        with pytest.raises(InputError, match="there is no audit"):
            leaves_needed(z, usable)


def test_anyone_draws_the_same_leaves(young: Consortium) -> None:
    made = case(young)
    again = audit.challenge(made.query, young.manifest, made.z, SEED)
    assert replace(again, created=made.asked.created) == made.asked
    assert Challenge.from_bytes(made.asked.to_bytes()) == made.asked
    assert list(made.asked.leaves) == sorted(set(made.asked.leaves))
    fresh = [audit.challenge(made.query, young.manifest, made.z) for _ in range(2)]
    assert fresh[0].source == "challenger"
    assert fresh[0].leaves != fresh[1].leaves != made.asked.leaves
    other = audit.challenge(replace(made.query, suspect="77" * 32), young.manifest, made.z, SEED)
    assert other.leaves != made.asked.leaves
    with pytest.raises(InputError, match="must be 32 bytes"):
        audit.challenge(made.query, young.manifest, made.z, b"short")
    # leaves that are burnt are never drawn, and every other one is about as often as the rest
    burnt = tuple(range(0, LEAVES, 7))
    query = query_of(made.x, young.manifest, burnt)
    counts = np.zeros(LEAVES, np.int64)
    for seed in range(300):
        asked = audit.challenge(query, young.manifest, made.z, bytes([seed % 256, seed // 256]) + bytes(30))
        counts[list(asked.leaves)] += 1
    assert not counts[list(burnt)].any()
    rest = np.delete(counts, burnt)
    expected = rest.sum() / rest.size
    # χ² of about 800 cells: mean 800, standard deviation 40; five of those: 1 in 10^6
    assert abs(((rest - expected) ** 2).sum() / (expected * (1 - expected / 300)) - rest.size) < 5 * sqrt(2 * rest.size)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": "00"}, "32 bytes in hex"),
        ({"z": "many"}, "decimal number"),
        ({"source": ""}, "printable string"),
        ({"leaves": [3, 3]}, "in order, each once"),
        ({"leaves": []}, "at least one leaf"),
        ({"leaves": "7"}, "must be a list"),
        ({"burnt": [-1]}, "in order, each once"),
        ({"created": "today"}, "in UTC"),
        ({"surprise": 1}, "unknown field"),
        ({"format": "quorumark-challenge/v2"}, "format 'quorumark-challenge/v2'"),
    ],
)
def test_bad_challenges_are_refused(young: Consortium, change: dict[str, Any], text: str) -> None:
    body = json.loads(case(young).asked.to_bytes()) | change
    with pytest.raises(RecordError, match=text):
        Challenge.from_bytes(spelled(body))


# --- an honest audit --------------------------------------------------------------------------------------


def test_an_honest_audit_is_a_proof(young: Consortium, honest: tuple[Case, list[bytes]]) -> None:
    made, files = honest
    result = check_audit(made.asked, made.query, made.x, young.chain, files)
    assert (result.verdict, result.proof, result.faults, result.members) == ("PASSED", True, (), (1, 2, 3, 4, 5))
    assert 94 < float(made.z) < 106
    assert result.leaves == len(made.asked.leaves) == leaves_needed(made.z, LEAVES)
    assert result.coordinates == sum(min(LEAF, D - leaf * LEAF) for leaf in made.asked.leaves)
    where = np.concatenate([np.arange(leaf * LEAF, min(D, (leaf + 1) * LEAF)) for leaf in made.asked.leaves])
    assert result.z == score(made.x[where], young.tau[where])
    energy = sqrt((made.x[where].astype(float) ** 2).sum() / (made.x.astype(float) ** 2).sum())
    assert float(result.predicted) == pytest.approx(float(made.z) * energy, abs=1e-5)
    assert abs(float(result.z) - float(result.predicted)) < 4  # the leaves are alike here: standard deviation 1
    assert (result.agrees, result.charge) == (True, "0.00")
    assert float(result.log10_bound) == pytest.approx(-(float(result.z) ** 2) / 2 / np.log(10), abs=0.02)
    assert [reason.code for reason in result.reasons] == [
        "audit.proof",
        "audit.confirmed",
        "audit.seed",
        "audit.undated",
    ]
    assert result.reasons[2] == Reason.of("audit.seed", source="challenger")
    json.dumps(result.as_dict())


def test_the_audit_shows_twelve_as_often_as_it_says(young: Consortium) -> None:
    """z = 60: of 400 honest audits at most 1 in 100 falls short; 1 in 2,500 where leaves are alike, as they are here.

    More than 4 of 400 by chance: 1 in 10^6. The mean and the deviation have 6 standard errors of room."""
    rng, shown = np.random.default_rng(3), []
    for i in range(400):
        if i % 40 == 0:
            x = vector(rng, young.tau, 60)
            z, query = score(x, young.tau), query_of(x, young.manifest)
        leaves = audit.challenge(query, young.manifest, z, rng.bytes(32)).leaves
        where = np.concatenate([np.arange(leaf * LEAF, min(D, (leaf + 1) * LEAF)) for leaf in leaves])
        shown.append(float(score(x[where], young.tau[where])))
    assert np.mean(np.array(shown) < 12) <= 0.01
    assert 15.0 < np.mean(shown) < 15.8  # 12 + 2.4·1.4 = 15.36
    assert 0.75 < np.std(shown) < 1.25


def test_fewer_members_are_enough_and_their_choice_is_charged(
    young: Consortium, honest: tuple[Case, list[bytes]]
) -> None:
    made, files = honest
    for size, price in ((4, comb(5, 3) / comb(4, 3)), (3, comb(5, 3))):
        for chosen in itertools.combinations(range(5), size):
            result = check_audit(made.asked, made.query, made.x, young.chain, [files[i] for i in chosen])
            assert result.verdict == "PASSED"
            assert result.members == tuple(i + 1 for i in chosen)
            assert float(result.charge) == pytest.approx(log10(price), abs=0.01)
            assert Reason.of("audit.some-members", opened=size, members=5) in result.reasons
    two = check_audit(made.asked, made.query, made.x, young.chain, files[:2])
    assert (two.verdict, two.z, two.members) == ("INCONCLUSIVE", "", (1, 2))
    assert two.reasons == (Reason.of("audit.too-few-shares", opened=2, needed=3), Reason.of("audit.undated"))


def test_a_charge_can_leave_too_little() -> None:
    """The bound after all charges counts, not z alone."""
    assert audit._verdict("12.5", Decimal("-23.9"), True)[0] == "INCONCLUSIVE"
    assert audit._verdict("12.5", Decimal("-24.1"), True)[0] == "PASSED"
    assert audit._verdict("11.9", Decimal("-30"), True)[0] == "INCONCLUSIVE"
    assert audit._verdict("11.9", Decimal("-30"), False)[0] == "FAILED"
    assert audit._verdict("5.9", Decimal("-7"), True)[0] == "FAILED"


# --- years later ------------------------------------------------------------------------------------------


def test_an_audit_after_a_refresh_and_a_resharing(old: Consortium) -> None:
    """Birch, who was there at first, is gone; Hazel was not there; the keys of the archives take four of today."""
    assert (old.manifest.epoch, old.members) == (2, ["Avon", "Cedar", "Delta", "Elm", "Hazel"])
    made = case(old)
    files = {name: old.opening(name, made.asked, made.query) for name in old.members}
    assert len(old.archives) == 5  # all were there at the first refresh; Birch left a copy
    result = check_audit(made.asked, made.query, made.x, old.chain, list(files.values()), old.archives)
    assert (result.verdict, result.members, result.faults, result.charge) == ("PASSED", (1, 2, 3, 4, 5), (), "0.00")
    where = np.concatenate([np.arange(leaf * LEAF, min(D, (leaf + 1) * LEAF)) for leaf in made.asked.leaves])
    assert result.z == score(made.x[where], old.tau[where])
    # any four, with three archives
    four = [files[name] for name in ("Hazel", "Elm", "Avon", "Delta")]
    result = check_audit(made.asked, made.query, made.x, old.chain, four, old.archives[2:])
    assert (result.verdict, result.members, result.charge) == ("PASSED", (3, 4, 5), "1.00")
    # three of today, or two archives, are too few
    result = check_audit(made.asked, made.query, made.x, old.chain, four[:3], old.archives)
    assert (result.verdict, result.members) == ("INCONCLUSIVE", ())
    assert result.faults == (Reason.of("fault.too-few-keys", opened=3, needed=4),)
    result = check_audit(made.asked, made.query, made.x, old.chain, four, old.archives[:2])
    assert (result.verdict, result.members) == ("INCONCLUSIVE", (1, 2))
    # what four open shows no other leaf's key
    manifest = old.manifest
    other = next(i for i in range(LEAVES) if i not in made.asked.leaves)
    place = key_place(manifest, 3, other)
    for name, data in files.items():
        share = old.place(name).share(old.unlock(name)).vector()
        assert share[place].astype("<u8").tobytes() not in b"".join(
            words.astype("<u8").tobytes() for words in KeyOpening.from_bytes(data).keys.values()
        )


def test_an_earlier_manifest_is_read_from_the_folder_of_them(old: Consortium) -> None:
    """An old certificate is checked against the manifest of its time, which has the still earlier ones beside it."""
    folder = old.place(old.members[0]).path / "history"
    found = sorted(len(read_chain(path)) for path in folder.iterdir())
    assert found == list(range(1, len(old.chain)))


def test_after_a_first_resharing_without_a_member(tmp_path: Path) -> None:
    """Birch leaves before anything was archived: there is no archive of its share, and its absence is charged."""
    group = Consortium(tmp_path)
    group.move(propose(group.manifest.terms, removed=[2], threshold=3))
    assert group.manifest.archived == (1, 3, 4, 5)
    made = case(group)
    files = [group.opening(name, made.asked, made.query) for name in group.members]
    result = check_audit(made.asked, made.query, made.x, group.chain, files, group.archives)
    assert (result.verdict, result.members, result.charge) == ("PASSED", (1, 3, 4, 5), "0.40")


def _spoilt(data: bytes, identity: Identity, at: int = 0) -> bytes:
    """A key opening with one wrong element, signed by its member."""
    opening = KeyOpening.from_bytes(data)
    keys = {point: words.copy() for point, words in opening.keys.items()}
    for words in keys.values():
        words[at] = (int(words[at]) + 1) % P
    values = {name: getattr(opening, name) for name in ("manifest", "challenge", "point", "indices")}
    return KeyOpening.sign(identity, **values, keys=keys).to_bytes()


def test_wrong_keys_open_nothing_and_are_named_where_numbers_allow(old: Consortium) -> None:
    made = case(old)
    good = [old.opening(name, made.asked, made.query) for name in old.members]
    # one of five with threshold four is beyond what decoding corrects, but a wrong key opens no archive
    mixed = [good[0], _spoilt(good[1], old.identity("Cedar"), at=7), *good[2:]]
    result = check_audit(made.asked, made.query, made.x, old.chain, mixed, old.archives)
    assert (result.verdict, result.members) == ("PASSED", (1, 2, 3, 4, 5))
    assert result.faults == (Reason.of("fault.keys-misfit", members=("Cedar",)),)
    result = check_audit(made.asked, made.query, made.x, old.chain, mixed[:4], old.archives)
    assert (result.verdict, result.members) == ("INCONCLUSIVE", ())
    assert result.faults[0] == Reason.of("fault.archive-closed", point=1)
    # keys for some archives only, for other leaves, or of another challenge
    opening = KeyOpening.from_bytes(good[0])
    values = {name: getattr(opening, name) for name in ("manifest", "challenge", "point")}
    avon = old.identity("Avon")
    some = KeyOpening.sign(avon, **values, indices=opening.indices, keys={1: opening.keys[1]})
    fewer = KeyOpening.sign(
        avon, **values, indices=opening.indices[1:], keys={point: words[3:] for point, words in opening.keys.items()}
    )
    for bad, code in ((some, "opening-lacks-archives"), (fewer, "opening-of-other-leaves")):
        result = check_audit(made.asked, made.query, made.x, old.chain, [bad.to_bytes(), *good[1:]], old.archives)
        assert result.verdict == "PASSED"  # the other four are enough
        assert result.faults[0] == Reason.of(f"fault.{code}", name="Avon")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda body: body["keys"].update({"1": "AAAA"}), "8-byte numbers in base64"),
        (lambda body: body["keys"].update({"1": body["keys"]["1"][32:]}), "3 field elements for each leaf"),
        (lambda body: body["keys"].update({"1": "/" * len(body["keys"]["1"])}), "3 field elements for each leaf"),
        (lambda body: body["keys"].update({"01": body["keys"]["1"]}), "named by points"),
        (lambda body: body.update(keys=[]), "named by points"),
        (lambda body: body.update(indices=body["indices"][::-1]), "in order, each once"),
        (lambda body: body.update(indices=7), "must be a list"),
        (lambda body: body.update(point=0), "at least 1"),
        (lambda body: body.update(signature="00"), "64 bytes in hex"),
    ],
)
def test_bad_openings_of_keys_are_refused(old: Consortium, change: Callable[[Any], None], text: str) -> None:
    made = case(old)
    body = json.loads(old.opening("Avon", made.asked, made.query))
    assert KeyOpening.from_bytes(canonical(body)).to_bytes() == canonical(body)
    change(body)
    with pytest.raises(RecordError, match=text):
        KeyOpening.from_bytes(canonical(body))


def test_spoilt_archives_are_left_out_whole(old: Consortium, tmp_path: Path) -> None:
    made = case(old)
    files = [old.opening(name, made.asked, made.query) for name in old.members]
    copies = []
    for i, path in enumerate(old.archives):
        copies.append(tmp_path / f"{i}.bin")
        copies[-1].write_bytes(path.read_bytes())
    damaged = bytearray(copies[1].read_bytes())
    start = 4 + int.from_bytes(damaged[:4], "big") + 32 * LEAVES
    damaged[start + made.asked.leaves[5] * (8 * LEAF + 48) + 9] ^= 1  # one bit of one asked leaf
    copies[1].write_bytes(damaged)
    copies[3].write_bytes(copies[3].read_bytes()[:-200_000])  # cut
    copies[4].write_bytes(b"nothing")
    result = check_audit(made.asked, made.query, made.x, old.chain, files, copies)
    assert (result.verdict, result.members) == ("INCONCLUSIVE", (1, 3))
    assert {Reason.of("fault.archive-closed", point=x) in result.faults for x in (2, 4)} == {True}
    assert Reason.of("fault.archive-unusable", file=str(copies[4])) in result.faults
    result = check_audit(made.asked, made.query, made.x, old.chain, files, [*copies, old.archives[4]])
    assert (result.verdict, result.members, result.charge) == ("PASSED", (1, 3, 5), "1.00")


def test_two_who_frame_a_third_are_found_out_by_the_archives(tmp_path: Path) -> None:
    """Avon and Birch add c·(x−4)(x−5) to their parts: decoding then finds Cedar wrong. But that key opens nothing."""
    group = Consortium(tmp_path)
    group.move()
    made = case(group)
    files = [group.opening(name, made.asked, made.query) for name in group.members]
    for i, name in enumerate(("Avon", "Birch")):
        opening, point = KeyOpening.from_bytes(files[i]), i + 1
        shift = np.uint64((point - 4) * (point - 5))
        keys = {x: (words + shift) % np.uint64(P) for x, words in opening.keys.items()}
        values = {n: getattr(opening, n) for n in ("manifest", "challenge", "point", "indices")}
        files[i] = KeyOpening.sign(group.identity(name), **values, keys=keys).to_bytes()
    result = check_audit(made.asked, made.query, made.x, group.chain, files, group.archives)
    assert (result.verdict, result.members) == ("PASSED", (1, 2, 3, 4, 5))
    assert result.faults == (Reason.of("fault.keys-misfit", members=("Avon", "Birch")),)


def test_an_archive_of_other_values_than_committed_is_left_out(old: Consortium, tmp_path: Path) -> None:
    """Avon archived signs turned round, under the right keys and behind the leaf hashes of its genesis share."""
    made = case(old)
    files = [old.opening(name, made.asked, made.query) for name in old.members]
    shares = {m.point: old.place(m.name).share(old.unlock(m.name)).vector() for m in old.manifest.terms.roster}
    place = slice(key_place(old.manifest, 1, 0).start, key_place(old.manifest, 1, LEAVES - 1).stop)
    keys = shamir.reconstruct({point: share[place] for point, share in shares.items()}, 4)
    unlock, info = old.unlock("Avon"), ShareInfo.first(old.chain[0].terms, old.manifest.genesis.session, 1)
    with ShareWriter(tmp_path / "share", unlock, info, new_salt(), np.zeros((5, 5), np.uint64)) as file:
        file.write(field.random(D))
    write_archive(tmp_path / "other", ShareFile(tmp_path / "share", unlock), keys)
    true, other = old.archives[0].read_bytes(), (tmp_path / "other").read_bytes()
    start = 4 + int.from_bytes(true[:4], "big") + 32 * LEAVES
    (tmp_path / "mixed").write_bytes(true[:start] + other[start:])
    result = check_audit(made.asked, made.query, made.x, old.chain, files, [tmp_path / "mixed", *old.archives[1:]])
    assert (result.verdict, result.members) == ("PASSED", (2, 3, 4, 5))
    assert result.faults == (Reason.of("fault.archive-leaf", point=1, leaf=made.asked.leaves[0]),)


# --- what a member opens, and when ------------------------------------------------------------------------


def test_a_member_opens_only_what_it_should(young: Consortium) -> None:
    made = case(young)
    memory = Memory()
    with pytest.raises(RecordError, match="has not answered the query"):
        young.opening("Avon", made.asked, made.query, memory, answered=False)
    free = next(leaf for leaf in range(LEAVES) if leaf not in made.asked.leaves)
    other = replace(made.asked, leaves=tuple(sorted({free, *made.asked.leaves[1:]})))
    with pytest.raises(RecordError, match="other leaves than its seed draws"):
        young.opening("Avon", other, made.query, memory)
    with pytest.raises(RecordError, match="is for another query"):
        young.opening("Avon", made.asked, replace(made.query, suspect="11" * 32), memory)
    assert memory.burnt() == ()  # nothing was burnt for nothing
    # written down before anything leaves, and again when it is asked again
    first = young.opening("Avon", made.asked, made.query, memory)
    assert (memory.burnt(), memory.digests) == (made.asked.leaves, [made.asked.digest()])
    assert young.opening("Avon", made.asked, made.query, memory) == first

    class Broken(Memory):
        def record_burnt(self, leaves: Sequence[int], digest: str) -> None:
            raise RecordError(f"the disk is full: {len(leaves)} leaves of {digest} are not written down")

    with pytest.raises(RecordError, match="disk is full"):
        young.opening("Avon", made.asked, made.query, Broken())
    # a quarter of all leaves in a member's life
    rest = [leaf for leaf in range(LEAVES) if leaf not in made.asked.leaves]
    room = LEAVES // 4 - len(made.asked.leaves)
    young.opening("Avon", made.asked, made.query, Memory(rest[:room]))
    with pytest.raises(RecordError, match="at most a quarter"):
        young.opening("Avon", made.asked, made.query, Memory(rest[: room + 1]))


def _secrets(share: ShareFile, asked: Challenge) -> dict[str, bytes]:
    """What must not be in an opening: the seeds, and all that belongs to other leaves."""
    size, values = share.info.leaf, share.vector()
    tree = Tree(salt_seed(share.salt), size, share.info.length)
    found = {"salt": share.salt.astype("<u8").tobytes(), "salt seed": salt_seed(share.salt), "seed": share._seed}
    for i in range(5):
        found[f"salt element {i}"] = share.salt[i : i + 1].astype("<u8").tobytes()
    for leaf in range(leaf_count(share.info.length, size)):
        if leaf not in asked.leaves:
            found[f"salt of leaf {leaf}"] = tree.salt(leaf)
            found[f"value of leaf {leaf}"] = values[leaf * size : leaf * size + 1].astype("<u8").tobytes()
    return found


def _content(data: bytes) -> bytes:
    """Every byte that an opening says."""
    opening = ShareOpening.from_bytes(data)
    parts = [part for leaf in opening.leaves for part in (leaf.values.astype("<u8").tobytes(), leaf.salt, *leaf.path)]
    return b"".join(parts) + data


def test_an_opening_holds_its_leaves_and_nothing_else(young: Consortium) -> None:
    """Salts of other leaves are hashes of a seed that is not in there: so their leaf hashes hide what they hold."""
    made = case(young)
    share = young.place("Avon").share(young.unlock("Avon"))
    said = _content(young.opening("Avon", made.asked, made.query))
    for name, secret in _secrets(share, made.asked).items():
        if any(secret):  # a ceremony's share has no generator: its seed is 32 zeros
            assert secret not in said, name
    assert Tree(salt_seed(share.salt), LEAF, D).salt(made.asked.leaves[0]) in said  # the search does find what is there


@pytest.mark.parametrize("leaf", [LEAF, 3000])
def test_a_dealers_share_is_opened_without_its_seed(tmp_path: Path, leaf: int) -> None:
    """Values that a generator made go out as values. Its blocks are of 2,500: smaller than a leaf, or larger."""
    homes = []
    for name in NAMES[:3]:
        Unlock.new_key_file(tmp_path / f"{name}.key")
        homes.append(HomeFolder.create(tmp_path / name, name, Unlock.key_file(tmp_path / f"{name}.key")))
    unlocks = [Unlock.key_file(tmp_path / f"{name}.key") for name in NAMES[:3]]
    people = [home.identity(unlock) for home, unlock in zip(homes, unlocks, strict=True)]
    terms = make_terms(people, 2, D, leaf=leaf, setup="dealer")
    deal(terms, tmp_path / "dealt")
    for _ in range(2):
        for home, unlock in zip(homes, unlocks, strict=True):
            manifest = accept(home, unlock, tmp_path / "dealt").manifest
    assert manifest is not None
    places = [home.consortium(terms) for home in homes]
    files = [place.share(unlock) for place, unlock in zip(places, unlocks, strict=True)]
    assert all(file.info.block == 2500 for file in files)  # compressed
    key = field.to_signed(shamir.reconstruct({i + 1: file.vector() for i, file in enumerate(files)}, 2))
    x = vector(np.random.default_rng(5), key * signs(manifest.genesis, D))
    query = query_of(x, manifest)
    asked = audit.challenge(query, manifest, score(x, key * signs(manifest.genesis, D)), SEED)
    openings = [
        audit.open_leaves(homes[i], places[i], unlocks[i], asked, query, answered=True, burns=Memory())
        for i in range(3)
    ]
    for file, data in zip(files, openings, strict=True):
        said = _content(data)
        for name, secret in _secrets(file, asked).items():
            assert secret not in said, name
    assert check_audit(asked, query, x, [manifest], openings).verdict == "PASSED"


SMALL = 12_000


def test_a_number_that_members_agreed_on_is_contradicted(young: Consortium) -> None:
    """(i) An innocent model, and a certificate that says z = 60."""
    made = case(young, seed=2, marked=False, z="60.0")
    assert abs(float(made.z)) < 6
    files = [young.opening(name, made.asked, made.query) for name in young.members]
    result = check_audit(made.asked, made.query, made.x, young.chain, files)
    assert (result.verdict, result.agrees) == ("FAILED", False)
    assert abs(float(result.z)) < 6
    assert "audit.contradicted" in [reason.code for reason in result.reasons]
    assert float(result.log10_bound) > -8
    # a number that is too small is contradicted as well, but the proof stands
    honest = case(young, z="30")
    files = [young.opening(name, honest.asked, honest.query) for name in young.members]
    result = check_audit(honest.asked, honest.query, honest.x, young.chain, files)
    assert (result.verdict, result.agrees) == ("PASSED", False)


def test_an_interval_that_holds_everything_confirms_nothing(young: Consortium) -> None:
    """z = 1,000 on 938 leaves predicts 57 ± 82: an innocent model is within that, and so is a marked one.

    Keys are new in every run. The innocent model is outside by chance where 57 (sd 3.3) − z_sub (sd 1) > 82: 7 standard
    deviations, false alarms below 1 in 10^11."""
    for seed, marked in ((2, False), (1, True)):
        made = case(young, seed=seed, marked=marked, z="1000.0")
        files = [young.opening(name, made.asked, made.query) for name in young.members]
        result = check_audit(made.asked, made.query, made.x, young.chain, files)
        assert float(result.tolerance) > float(result.predicted)
        assert (result.agrees, result.proof) == (True, False)
        assert [reason.code for reason in result.reasons][1] == "audit.neither"


def test_a_key_fitted_to_an_existing_model_is_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """(ii) Somebody else's model comes first; the key is its signs. The whitening alone stops it."""
    x = vector(np.random.default_rng(6), size=SMALL)
    fitted = np.where(x >= 0, 1, -1).astype(np.int64)
    liars = Liars(shared(fitted))
    query = query_of(x, liars.manifest)
    asked = audit.challenge(query, liars.manifest, "60.0", SEED)
    result = check_audit(asked, query, x, [liars.manifest], liars.openings(asked))
    assert result.verdict == "FAILED"
    assert abs(float(result.z)) < 6
    monkeypatch.setattr(Genesis, "whitening", lambda _self, _start, count: np.zeros(count, np.bool_))
    result = check_audit(asked, query, x, [liars.manifest], liars.openings(asked))
    assert result.verdict == "PASSED"
    assert float(result.z) > 20


def test_repeating_the_setup_does_not_help() -> None:
    """(iii) 200 setups, the best is kept: its z grows like √(2·ln 200) = 3.3. |z| < 6: false alarms 2 in 10^7."""
    x = vector(np.random.default_rng(7), size=SMALL)
    liars = Liars(shared(np.where(x >= 0, 1, -1).astype(np.int64)))
    shown = []
    for i in range(200):
        liars.redo(digest("try", i.to_bytes(8, "big")).hex())
        query = query_of(x, liars.manifest)
        asked = audit.challenge(query, liars.manifest, "60.0", SEED)
        result = check_audit(asked, query, x, [liars.manifest], liars.openings(asked))
        assert result.verdict == "FAILED"
        shown.append(float(result.z))
    assert 1.5 < max(shown) < 6
    assert 0.7 < np.std(shown) < 1.3  # six standard errors


def _wrong_values(leaf: Opening) -> Opening:
    values = leaf.values.copy()
    values[3] = (int(values[3]) + 2) % P
    return replace(leaf, values=values)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda leaves: [_wrong_values(leaves[0]), *leaves[1:]], "opening-leaf"),
        (lambda leaves: [replace(leaves[0], salt=bytes(32)), *leaves[1:]], "opening-leaf"),
        (lambda leaves: [replace(leaves[0], path=leaves[1].path), *leaves[1:]], "opening-leaf"),
        (lambda leaves: [replace(leaves[0], path=leaves[0].path[1:]), *leaves[1:]], "opening-leaf"),
        (lambda leaves: [replace(leaves[0], values=leaves[0].values[:-1]), *leaves[1:]], "opening-leaf"),
        (lambda leaves: [replace(leaves[0], values=leaves[0].values + np.uint64(P)), *leaves[1:]], "opening-leaf"),
        (lambda leaves: [leaves[1], leaves[0], *leaves[2:]], "opening-of-other-leaves"),
        (lambda leaves: [replace(leaves[1], index=leaves[0].index), *leaves[1:]], "opening-leaf"),
        (lambda leaves: leaves[:-1], "opening-of-other-leaves"),
        (lambda leaves: [*leaves, leaves[-1]], "opening-of-other-leaves"),
    ],
)
def test_other_leaves_than_committed_are_named(
    change: Callable[[list[Opening]], list[Opening]], code: str, liars_and_case: tuple[Liars, Case]
) -> None:
    """(iv), (v) Birch opens something else; the others are enough, and the choice of four is charged."""
    liars, made = liars_and_case
    leaves = change([liars.leaf(2, i) for i in made.asked.leaves])
    files = liars.openings(made.asked)
    files[1] = liars.opening(2, made.asked, leaves)
    result = check_audit(made.asked, made.query, made.x, [liars.manifest], files)
    assert [fault.code for fault in result.faults] == [f"fault.{code}"]
    assert result.faults[0].values["name"] == "Birch"
    assert (result.verdict, result.members) == ("PASSED", (1, 3, 4, 5))


@pytest.fixture(scope="module")
def liars_and_case() -> tuple[Liars, Case]:
    """Not liars yet: an honest key, dealt, and a marked model."""
    rng = np.random.default_rng(8)
    raw = rng.choice([-1, 1], SMALL).astype(np.int64)
    liars = Liars(shared(raw))
    tau = raw * signs(liars.manifest.genesis, SMALL)
    x = vector(rng, tau, 50, SMALL)
    query, z = query_of(x, liars.manifest), score(x, tau)
    return liars, Case(x, query, z, audit.challenge(query, liars.manifest, z, SEED))


def test_openings_of_somebody_else_or_for_something_else_are_named(liars_and_case: tuple[Liars, Case]) -> None:
    liars, made = liars_and_case
    good = liars.openings(made.asked)
    other = audit.challenge(made.query, liars.manifest, made.z, bytes(32))
    replayed = liars.opening(2, other)
    relabelled = liars.opening(2, made.asked, [liars.leaf(2, i) for i in other.leaves])
    forged = ShareOpening.from_bytes(good[1])
    values = {name: getattr(forged, name) for name in ("manifest", "challenge", "point", "leaves")}
    unsigned = ShareOpening.sign(liars.people[2], **values).to_bytes()
    elsewhere = liars.opening(2, made.asked, manifest="cd" * 32)
    borrowed = liars.opening(2, made.asked, [liars.leaf(3, i) for i in made.asked.leaves])
    nobody = json.loads(good[1]) | {"point": 9}
    malformed = Reason.of("fault.opening-malformed", number=2, files=5)
    for bad, fault in (
        (replayed, Reason.of("fault.opening-of-another-challenge", name="Birch")),
        (relabelled, Reason.of("fault.opening-of-other-leaves", name="Birch")),
        (unsigned, Reason.of("fault.opening-signature", name="Birch")),
        (elsewhere, Reason.of("fault.opening-of-another-challenge", name="Birch")),
        (borrowed, Reason.of("fault.opening-leaf", name="Birch", leaf=made.asked.leaves[0])),
        (good[1].replace(b'"point":2', b'"point":3'), Reason.of("fault.opening-signature", name="Cedar")),
        (spelled(nobody), Reason.of("fault.opening-of-nobody", point=9)),
        (good[1][:-100], malformed),
        (b"", malformed),
        (good[1].replace(b"quorumark-opening/v1", b"quorumark-opening/v2"), malformed),
        (good[1].replace(b'"salt":"', b'"salt":"00', 1), malformed),
        (good[1].replace(b'"values":"', b'"values":"?', 1), malformed),
    ):
        files = [good[0], bad, *good[2:]]
        result = check_audit(made.asked, made.query, made.x, [liars.manifest], files)
        assert result.faults == (fault,)
        assert (result.verdict, result.members) == ("PASSED", (1, 3, 4, 5))
    # files in any order; the same one twice counts once
    whole = check_audit(made.asked, made.query, made.x, [liars.manifest], good)
    assert check_audit(made.asked, made.query, made.x, [liars.manifest], good[::-1]) == whole
    result = check_audit(made.asked, made.query, made.x, [liars.manifest], [good[0]] * 3)
    assert (result.verdict, result.members) == ("INCONCLUSIVE", (1,))


def test_nobody_changes_the_set_of_members_between_leaves(liars_and_case: tuple[Liars, Case]) -> None:
    """(v) Three members for every leaf, but not the same three: each of them leaves something out."""
    liars, made = liars_and_case
    leaves = {x: [liars.leaf(x, i) for i in made.asked.leaves] for x in range(1, 6)}
    half = len(made.asked.leaves) // 2
    files = [liars.opening(x, made.asked, leaves[x]) for x in (1, 2)]
    files += [liars.opening(3, made.asked, leaves[3][:half]), liars.opening(4, made.asked, leaves[4][half:])]
    result = check_audit(made.asked, made.query, made.x, [liars.manifest], files)
    assert (result.verdict, result.members, len(result.faults)) == ("INCONCLUSIVE", (1, 2), 2)


def test_several_keys_in_one_commitment_are_found() -> None:
    """Shares that give a different key for every three members: five who open show it, and three pay for the choice."""
    rng = np.random.default_rng(11)
    x = vector(rng, size=SMALL)
    shares = np.stack([field.from_signed(rng.integers(-(1 << 40), 1 << 40, SMALL)) for _ in range(5)])
    # the first three give signs; the others are anything
    shares[:3] = shared(rng.choice([-1, 1], SMALL).astype(np.int64))[:3]
    liars = Liars(shares)
    query = query_of(x, liars.manifest)
    asked = audit.challenge(query, liars.manifest, "50.0", SEED)
    files = liars.openings(asked)
    result = check_audit(asked, query, x, [liars.manifest], files)
    assert result.verdict == "FAILED"
    assert result.reasons[0].code == "audit.not-one-key"
    result = check_audit(asked, query, x, [liars.manifest], files[:3])
    assert (result.verdict, result.charge) == ("FAILED", "1.00")
    assert float(result.z) < 6


def test_one_committed_share_that_does_not_fit_is_named_and_left_out() -> None:
    """Wrong everywhere, or in one coordinate: the other four are a proof, at the price of a choice of four."""
    rng = np.random.default_rng(16)
    raw = rng.choice([-1, 1], SMALL).astype(np.int64)
    for count in (SMALL, 1):
        shares = shared(raw)
        shares[3, :count] = (shares[3, :count] + np.uint64(1)) % np.uint64(P)
        liars = Liars(shares)
        tau = raw * signs(liars.manifest.genesis, SMALL)
        x = vector(rng, tau, 50, SMALL)
        query = query_of(x, liars.manifest)
        drawn = (audit.challenge(query, liars.manifest, score(x, tau), bytes([i] * 32)) for i in range(256))
        asked = next(made for made in drawn if 0 in made.leaves)
        files = liars.openings(asked)
        result = check_audit(asked, query, x, [liars.manifest], files)
        assert (result.verdict, result.members, result.charge) == ("PASSED", (1, 2, 3, 5), "0.40")
        assert result.faults == (Reason.of("fault.share-misfit", name="Delta"),)
        # four with one wrong among them: nobody can tell who
        result = check_audit(asked, query, x, [liars.manifest], files[1:])
        assert result.verdict == "FAILED"
        assert result.reasons[0].code == "audit.not-one-key"


@pytest.mark.parametrize("entry", [3, -3, 0, 2, 1 << 40])
def test_entries_that_are_no_signs_are_refused(entry: int) -> None:
    """(vi) With τ = 3 where it suits, z would be three times as large."""
    rng = np.random.default_rng(12)
    raw = rng.choice([-1, 1], SMALL).astype(np.int64)
    raw[::50] *= entry
    liars = Liars(shared(raw))
    tau = raw * signs(liars.manifest.genesis, SMALL)
    x = vector(rng, np.sign(tau), 50, SMALL)
    query = query_of(x, liars.manifest)
    asked = audit.challenge(query, liars.manifest, "50.0", SEED)
    result = check_audit(asked, query, x, [liars.manifest], liars.openings(asked))
    assert (result.verdict, result.z) == ("FAILED", "")
    assert result.reasons[0].code == "audit.not-signs"


# --- gaussian keys ----------------------------------------------------------------------------------------


def _gaussian(raw: NDArray[np.int64], x: Any = None, seed: int = 13) -> tuple[audit.AuditResult, NDArray[np.int8]]:
    liars = Liars(shared(raw), key="gaussian", setup="dealer")
    tau = raw * signs(liars.manifest.genesis, SMALL)
    if x is None:
        x = vector(np.random.default_rng(seed), tau / 256, 50, SMALL)
    query = query_of(x, liars.manifest)
    asked = audit.challenge(query, liars.manifest, "50.0", SEED)
    return check_audit(asked, query, x, [liars.manifest], liars.openings(asked)), x


def test_an_audit_of_a_gaussian_key() -> None:
    raw = np.round(256 * np.random.default_rng(14).standard_normal(SMALL)).astype(np.int64)
    result, _ = _gaussian(raw)
    assert result.verdict == "PASSED"
    assert result.agrees


def test_magnitudes_chosen_for_a_model_do_not_help_and_wild_ones_are_refused() -> None:
    """|τ| as large as |x| would raise Y/‖x‖, not the studentised z; a single huge entry is refused."""
    x = vector(np.random.default_rng(15), size=SMALL)
    raw = 8 * x.astype(np.int64)
    result, _ = _gaussian(raw, x)
    assert result.verdict == "FAILED"
    assert abs(float(result.z)) < 6
    raw = np.full(SMALL, 256, np.int64)
    raw[::LEAF] = 5000
    result, _ = _gaussian(raw, x)
    assert (result.verdict, result.z) == ("FAILED", "")
    assert result.reasons[0].code == "audit.too-large"
    result, _ = _gaussian(np.zeros(SMALL, np.int64), x)
    assert result.verdict == "INCONCLUSIVE"


# --- what the question itself must get right --------------------------------------------------------------


def test_every_part_of_the_question_is_checked(young: Consortium, honest: tuple[Case, list[bytes]]) -> None:
    made, files = honest
    asked, query, x = made.asked, made.query, made.x

    def refused(text: str, kind: type[Exception] = RecordError, **changes: Any) -> None:
        values = {"challenge": asked, "query": query, "x": x, "chain": young.chain, "openings": files, **changes}
        with pytest.raises(kind, match=text):
            check_audit(**values)

    # 1. the chain, and the query under it
    manifest = young.manifest
    refused("does not reach the first one", chain=[])
    refused(
        "lacks the signature of Birch",
        SignatureError,
        chain=[replace(manifest, signatures={1: manifest.signatures[1]})],
    )
    change: dict[str, Any]
    for change in ({"manifest": "11" * 32}, {"epoch": 1}, {"statistic": "other/v1"}, {"coordinates": D - 1}):
        altered = replace(query, **change)
        refused("the query", query=altered, challenge=replace(asked, query=altered.digest()))
    beyond = replace(query, burnt=(LEAVES,))
    refused("beyond the last", query=beyond, challenge=replace(asked, query=beyond.digest(), burnt=(LEAVES,)))
    # 2. the challenge belongs to the query
    refused("another genesis", challenge=replace(asked, genesis="11" * 32))
    for change in ({"manifest": "11" * 32}, {"query": "11" * 32}, {"x": "11" * 32}, {"burnt": (1,)}):
        refused("is for another query", challenge=replace(asked, **change))
    refused("is for another query", query=replace(query, suspect="12" * 32))
    # 3. its leaves come from the seed, and are as many as its z needs
    drawn = "other leaves than its seed draws"
    refused(drawn, challenge=replace(asked, seed="11" * 32))
    refused(drawn, challenge=replace(asked, leaves=asked.leaves[1:]))
    refused(drawn, challenge=replace(asked, z="30"))
    refused("there is no audit", InputError, challenge=replace(asked, z="15"))
    # 4. x
    other = x.copy()
    other[5] += 1
    refused("not the one that the query names", x=other)
    refused("must have 60000 entries", InputError, x=x[:-1])
    refused("int8 or int16", InputError, x=x.astype(np.float32))
    refused("int8 or int16", InputError, x=x.astype(np.int64))
    odd = replace(query, norm2=query.norm2 + 1)
    refused("is not that of x", query=odd, challenge=audit.challenge(odd, manifest, made.z, SEED))
    burnt = replace(query, burnt=(0, 3))
    refused("is not 0 on leaf 0", query=burnt, challenge=audit.challenge(burnt, manifest, made.z, SEED))
    # nothing at all
    assert check_audit(asked, query, x, young.chain, []).verdict == "INCONCLUSIVE"


# --- burnt leaves -----------------------------------------------------------------------------------------


def test_a_second_audit_leaves_out_what_the_first_one_opened(
    young: Consortium, honest: tuple[Case, list[bytes]]
) -> None:
    made, _ = honest
    burnt = made.asked.leaves
    x = without(vector(np.random.default_rng(20), young.tau), burnt)
    query, z = query_of(x, young.manifest, burnt), score(x, young.tau)
    asked = audit.challenge(query, young.manifest, z, bytes(32), source="beacon 4711")
    assert not set(asked.leaves) & set(burnt)
    again = [young.opening(name, asked, query, Memory(burnt)) for name in young.members]
    result = check_audit(asked, query, x, young.chain, again, vouched=[made.asked])
    assert (result.verdict, result.charge) == ("PASSED", "0.00")
    assert result.reasons[2:-1] == (
        Reason.of("audit.seed", source="beacon 4711"),
        Reason.of("audit.burnt-vouched", leaves=len(burnt), sources=("challenger",)),
    )
    # an auditor that does not know where the first seed is from allows for all that could be tried; once, however often
    for count in (1, 3):
        result = check_audit(asked, query, x, young.chain, again, earlier=[made.asked] * count)
        assert float(result.charge) == pytest.approx(log10(LEAVES * 2**80), abs=0.01)
        assert result.reasons[-2] == Reason.of("audit.burnt-claimed", leaves=len(burnt), sources=("challenger",))
    assert check_audit(asked, query, x, young.chain, again, earlier=[made.asked], vouched=[made.asked]).charge == "0.00"
    # without the first challenge the choice of burnt leaves could be anything, and too much is charged
    result = check_audit(asked, query, x, young.chain, again)
    assert result.verdict == "INCONCLUSIVE"
    assert float(result.charge) == pytest.approx(log10(LEAVES * comb(LEAVES, len(burnt))), abs=0.01)
    change: Any
    for change, text in (({"genesis": "11" * 32}, "another genesis"), ({"seed": "11" * 32}, "than its seed draws")):
        with pytest.raises(RecordError, match=f"earlier challenge 1 .*{text}"):
            check_audit(asked, query, x, young.chain, again, earlier=[replace(made.asked, **change)])
        with pytest.raises(RecordError, match=f"earlier challenge 1 .*{text}"):
            check_audit(asked, query, x, young.chain, again, vouched=[replace(made.asked, **change)])
    # one that opened what the query still rests on is none of those before it
    with pytest.raises(RecordError, match=r"opened \d+ leaves that the query does not leave out"):
        check_audit(asked, query, x, young.chain, again, vouched=[made.asked, asked])
