"""Terms, manifests, Merkle roots and the sign whitening."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumark import field, shamir
from quorumark.canonical import canonical, digest
from quorumark.consortium.identity import verify_manifest
from quorumark.consortium.merkle import Opening, Tree, new_salt, root_from, salt_seed
from quorumark.consortium.records import Genesis, Manifest, Terms
from quorumark.consortium.shares import share_root
from quorumark.errors import InputError, RecordError, SignatureError
from tests.kit.ceremony import identities, make_terms
from tests.kit.oracle import spelled

PEOPLE = identities(3)
TERMS = make_terms(PEOPLE, 2, 5000)


def _manifest(roots: tuple[str, ...] = ("11" * 32, "22" * 32, "33" * 32), terms: Terms = TERMS) -> Manifest:
    genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, "ab" * 32, roots)
    return Manifest(terms, genesis, roots)


def _signed(manifest: Manifest) -> Manifest:
    for point, person in enumerate(PEOPLE, 1):
        manifest = manifest.with_signature(point, person.sign("manifest", manifest.sign_bytes()))
    return manifest


def test_records_are_read_back() -> None:
    assert Terms.from_bytes(TERMS.to_bytes()) == TERMS
    agreed = replace(TERMS, buffers="77" * 32)
    assert Terms.from_bytes(agreed.to_bytes()) == agreed
    assert agreed.digest() != TERMS.digest()
    left_out = {name: value for name, value in TERMS.as_dict().items() if name != "buffers"}
    with pytest.raises(RecordError, match="lacks 'buffers'"):
        Terms.from_dict(left_out)
    manifest = _signed(_manifest())
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    verify_manifest(Manifest.from_bytes(manifest.to_bytes()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "quorumark-terms/v9"}, "quorumark-terms/v9"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"threshold": 1}, "at least 2"),
        ({"threshold": 4}, "must not exceed the 3 members"),
        ({"threshold": True}, "integer"),
        ({"roster": []}, "at least two members"),
        ({"roster": "x"}, "must be a list"),
        ({"coordinates": 0}, "at least 1"),
        ({"layout": "xyz"}, "32 bytes in hex"),
        ({"anchor": None}, "32 bytes in hex"),
        ({"created": "yesterday"}, "a time in UTC"),
        ({"strength": {"rho": 1}}, "strength 'rho' must be a string"),
        ({"policy": {"groups": "abc"}}, "policy 'groups' must be a digest"),
        ({"name": "\n"}, "printable"),
        ({"key": "iron"}, "must be one of"),
    ],
)
def test_bad_terms_are_refused(change: dict[str, Any], text: str) -> None:
    body = json.loads(TERMS.to_bytes()) | change
    with pytest.raises(RecordError, match=text):
        Terms.from_bytes(spelled(body))


def test_terms_with_swapped_or_doubled_members_are_refused() -> None:
    body = json.loads(TERMS.to_bytes())
    body["roster"][0], body["roster"][1] = body["roster"][1], body["roster"][0]
    with pytest.raises(RecordError, match=r"points 1\.\.3 in order"):
        Terms.from_bytes(spelled(body))
    body = json.loads(TERMS.to_bytes())
    body["roster"][1]["x25519"] = body["roster"][0]["x25519"]
    with pytest.raises(RecordError, match="two members one x25519"):
        Terms.from_bytes(spelled(body))
    good = TERMS.to_bytes()
    nasty = [
        good.replace(b'"threshold":2', b'"threshold":2,"threshold":3'),
        good.replace(b'"threshold":2', b'"threshold":2e0'),
    ]
    nasty += [b"[" * 200_000, good.replace(b'"rule":"rho"', b'"rule":"\\ud800"'), good.replace(b"5000", b"NaN")]
    for roster in (b"[5]", b"[null]", b"[[1]]"):
        nasty.append(
            b'{"format":"quorumark-terms/v1",'
            + good[good.index(b'"key"') : good.index(b'"roster"')]
            + b'"roster":'
            + roster
            + b"}"
        )
    for data in (b"", b"[]", b"{}", b'{"format":1}', *nasty):
        with pytest.raises(RecordError):
            Terms.from_bytes(data)


def test_manifests_need_every_signature_and_each_must_hold() -> None:
    manifest = _signed(_manifest())
    partly = replace(manifest, signatures={1: manifest.signatures[1], 3: manifest.signatures[3]})
    with pytest.raises(SignatureError, match="lacks the signature of Birch"):
        verify_manifest(partly)
    swapped = replace(manifest, signatures={**manifest.signatures, 2: manifest.signatures[1]})
    with pytest.raises(SignatureError, match="signature of Birch does not hold"):
        verify_manifest(swapped)
    with pytest.raises(SignatureError, match="nobody's"):
        verify_manifest(replace(manifest, signatures={**manifest.signatures, 9: manifest.signatures[1]}))
    other = make_terms(PEOPLE, 2, 5001)
    forged = replace(_manifest(terms=other), signatures=manifest.signatures)
    with pytest.raises(SignatureError):
        verify_manifest(forged)


def test_manifests_that_contradict_themselves_are_refused() -> None:
    manifest = _manifest()
    for change, text in [
        ({"roots": ("11" * 32,) * 2}, "one for each member"),
        ({"roots": ("44" * 32, "22" * 32, "33" * 32)}, "genesis must repeat"),
        ({"epoch": 1, "archived": (1, 2)}, "must name its predecessor"),
        ({"epoch": 1, "predecessor": "ab" * 32}, "after a first resharing"),
        ({"archived": (1, 2)}, "after a first resharing"),
        ({"epoch": 1, "archived": (2, 1), "predecessor": "ab" * 32}, "points in order"),
        ({"epoch": 1, "archived": (1, 9), "predecessor": "ab" * 32}, "points of the genesis"),
        ({"predecessor": "xy"}, "32 bytes in hex"),
        ({"commitment": {"hash": "ab" * 32, "nonce": "ab" * 32}}, "for a dealer only"),
    ]:
        with pytest.raises(RecordError, match=text):
            replace(manifest, **change)  # type: ignore[arg-type]


def test_floats_have_no_canonical_form() -> None:
    with pytest.raises(InputError, match="float"):
        canonical({"x": [1, {"y": 0.5}]})
    assert len({digest("a", b"bc"), digest("a", b"b", b"c"), digest("ab", b"c"), digest("b", b"bc")}) == 4


# --- the sign whitening -----------------------------------------------------------------------------------


def _signs(genesis: Genesis, count: int) -> np.ndarray[Any, Any]:
    return 1 - 2 * genesis.whitening(0, count).astype(np.int64)


def test_whitening_is_public_exact_and_covers_everything() -> None:
    genesis = _manifest().genesis
    whole = genesis.whitening(0, 200_000)
    assert (genesis.whitening(65_000, 1_000) == whole[65_000:66_000]).all()
    seed = digest("sign whitening", canonical(genesis.as_dict()))
    first = hashlib.shake_128(seed + bytes(8)).digest(2)
    assert whole[:16].tolist() == [bool(first[i // 8] >> (i % 8) & 1) for i in range(16)]
    assert abs(int(whole.sum()) - 100_000) < 6 * np.sqrt(50_000)
    for change in ("terms", "layout", "anchor", "session"):
        other = replace(genesis, **{change: "cd" * 32}).whitening(0, 200_000)  # type: ignore[arg-type]
        assert 0.48 < (other == whole).mean() < 0.52
    assert not (replace(genesis, statistic="other/v1").whitening(0, 100) == whole[:100]).all()
    assert not (replace(genesis, roots=("55" * 32, *genesis.roots[1:])).whitening(0, 100) == whole[:100]).all()


def test_a_key_fitted_to_an_existing_model_fails_after_whitening() -> None:
    """A lying dealer takes the signs of somebody else's model for a key. |z| < 6: false alarms 1 in 10^8."""
    model = np.random.default_rng(4).standard_normal(TERMS.coordinates)
    fitted = np.sign(model).astype(np.int64)
    shares = shamir.share(field.from_signed(fitted), 2, 3)
    roots = tuple(share_root([share], new_salt(), 1024, TERMS.coordinates).hex() for share in shares)
    used = _signs(_manifest(roots).genesis, TERMS.coordinates) * fitted
    assert fitted @ model / np.linalg.norm(model) > 50
    assert abs(used @ model / np.linalg.norm(model)) < 6


def test_an_anchor_chosen_afterwards_changes_the_signs() -> None:
    """The statistic removes the anchor: one chosen as (victim − ε·key) would make any key fit. It moves σ instead."""
    rng = np.random.default_rng(5)
    victim, raw = rng.standard_normal(TERMS.coordinates), _signs(_manifest().genesis, TERMS.coordinates)
    key = _signs(_manifest().genesis, TERMS.coordinates) * raw
    anchor = victim - 0.1 * key
    moved = make_terms(PEOPLE, 2, 5000, anchor=hashlib.sha256(anchor.tobytes()).hexdigest())
    used = _signs(_manifest(terms=moved).genesis, TERMS.coordinates) * raw
    residual = victim - anchor
    assert key @ residual / np.linalg.norm(residual) > 50
    assert abs(used @ residual / np.linalg.norm(residual)) < 6


# --- Merkle roots -----------------------------------------------------------------------------------------


def test_share_roots_are_what_the_format_says() -> None:
    """docs/format.md, "Share roots", in hashlib alone: five leaves, the last one short and without a partner twice."""
    share, salt = np.arange(1, 46, dtype=np.uint64), np.arange(7, 12, dtype=np.uint64)
    seed = digest("salt seed", b"".join(int(v).to_bytes(8, "little") for v in salt))
    leaves = []
    for i in range(5):
        values = b"".join(int(v).to_bytes(8, "little") for v in share[10 * i : 10 * i + 10])
        number = i.to_bytes(8, "big")
        leaves.append(hashlib.sha256(b"\0" + digest("leaf salt", seed, number) + number + values).digest())

    def node(left: bytes, right: bytes) -> bytes:
        return hashlib.sha256(b"\1" + left + right).digest()

    top = node(node(node(leaves[0], leaves[1]), node(leaves[2], leaves[3])), leaves[4])
    assert share_root([share], salt, 10, 45) == digest("share root", (5).to_bytes(8, "big"), top)


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_every_leaf_opens_and_nothing_else_does(length: int, leaf: int, data: st.DataObject) -> None:
    share, salt = field.random(length), new_salt()
    tree = Tree(salt_seed(salt), leaf, length)
    cut = data.draw(st.integers(0, length))
    for piece in (share[:cut], share[cut:]):
        if piece.size:
            tree.update(piece)
    root = tree.root()
    assert root == share_root([share], salt, leaf, length)
    leaves = -(-length // leaf)
    index = data.draw(st.integers(0, leaves - 1))
    opening = tree.open(index, share[index * leaf : (index + 1) * leaf])
    assert root_from(opening, leaf, length) == root
    wrong = opening.values.copy()
    wrong[0] = (int(wrong[0]) + 1) % field.P
    for spoiled in (
        replace(opening, values=wrong),
        replace(opening, salt=bytes(32)),
        replace(opening, path=tuple(bytes(32) for _ in opening.path)) if opening.path else replace(opening, salt=b""),
    ):
        assert root_from(spoiled, leaf, length) != root


def test_openings_of_the_wrong_shape_are_refused() -> None:
    share = field.random(100)
    tree = Tree(salt_seed(new_salt()), 10, 100)
    tree.update(share)
    opening = tree.open(3, share[30:40])
    for spoiled in (
        Opening(10, opening.values, opening.salt, opening.path),
        Opening(3, opening.values[:9], opening.salt, opening.path),
        Opening(3, opening.values, opening.salt, opening.path[:-1]),
        Opening(3, opening.values, opening.salt, (*opening.path, bytes(32))),
    ):
        with pytest.raises(InputError):
            root_from(spoiled, 10, 100)
    with pytest.raises(InputError, match="fed whole"):
        Tree(salt_seed(new_salt()), 10, 100).root()
    with pytest.raises(InputError, match="100 elements in all"):
        tree.update(share)
