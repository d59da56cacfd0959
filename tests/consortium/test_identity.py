"""Identities and messages: what is refused, and that nothing secret shows."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from quorumark.canonical import digest
from quorumark.consortium.curve import is_ed25519_key, is_x25519_key
from quorumark.consortium.identity import Header, Identity, open_message, verify, verify_card, verify_manifest
from quorumark.consortium.records import Card, Terms
from quorumark.errors import InputError, MessageError, RecordError, SignatureError
from quorumark.setup.inprocess import deal_key
from tests.kit.ceremony import identities, make_terms
from tests.kit.oracle import spelled

PEOPLE = identities(3)
AVON, BIRCH, CEDAR = PEOPLE
TERMS = make_terms(PEOPLE, 2, 10)
SEALED = Header("ab" * 32, "cd" * 32, "deal", sender=1, recipient=2)
OPEN = Header("ab" * 32, "cd" * 32, "commit", sender=1)


def test_cards_are_read_back_and_hold() -> None:
    card = Card.from_bytes(AVON.card().to_bytes())
    assert card == AVON.card()
    verify_card(card)
    for changed in (replace(card, name="Eve"), replace(card, x25519=BIRCH.x25519), replace(card, signature="00" * 64)):
        with pytest.raises(SignatureError, match="does not hold"):
            verify_card(changed)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "quorumark-member/v2"}, "quorumark-member/v2"),
        ({"extra": 1}, "unknown field 'extra'"),
        ({"name": ""}, "1 to 100 printable"),
        ({"name": "a\nb"}, "1 to 100 printable"),
        ({"ed25519": "00"}, "32 bytes in hex"),
        ({"x25519": "ZZ" * 32}, "32 bytes in hex"),
        ({"signature": 5}, "64 bytes in hex"),
    ],
)
def test_bad_cards_are_refused(change: dict[str, Any], text: str) -> None:
    body = json.loads(AVON.card().to_bytes()) | change
    with pytest.raises(RecordError, match=text):
        Card.from_bytes(spelled(body))


def test_secrets_survive_storage_and_show_nowhere() -> None:
    secret = AVON.to_secret_bytes()
    again = Identity.from_secret_bytes("Avon", secret)
    assert again.card() == AVON.card()
    assert secret[:32].hex() not in repr(again)
    assert "hidden" in repr(again)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(again)
    with pytest.raises(InputError) as caught:
        Identity.from_secret_bytes("Avon", secret[:-1])
    assert secret.hex()[:16] not in str(caught.value)


def test_a_signature_is_for_one_purpose_one_text_one_key() -> None:
    signature = AVON.sign("manifest", b"text")
    verify(AVON.ed25519, "manifest", b"text", signature, "Avon")
    for key, purpose, text in [
        (AVON.ed25519, "message", b"text"),
        (AVON.ed25519, "manifest", b"texts"),
        (BIRCH.ed25519, "manifest", b"text"),
    ]:
        with pytest.raises(SignatureError, match="Avon"):
            verify(key, purpose, text, signature, "Avon")


def test_messages_arrive() -> None:
    sealed = AVON.write(SEALED, b"a secret body", BIRCH.x25519)
    assert b"a secret body" not in sealed
    assert BIRCH.read(sealed, TERMS, SEALED) == b"a secret body"
    assert AVON.write(SEALED, b"a secret body", BIRCH.x25519) != sealed  # a fresh key each time
    open_one = AVON.write(OPEN, b"for all")
    assert CEDAR.read(open_one, TERMS, OPEN) == open_message(open_one, TERMS, OPEN) == b"for all"


def test_every_flipped_byte_and_every_cut_is_found() -> None:
    for header, to in ((SEALED, BIRCH.x25519), (OPEN, None)):
        data = AVON.write(header, b"body", to)
        for i in range(len(data)):
            spoiled = data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]
            with pytest.raises(MessageError, match=r"'Avon'.*'(deal|commit)'"):
                BIRCH.read(spoiled, TERMS, header)
            with pytest.raises(MessageError, match="'Avon'"):
                BIRCH.read(data[:i], TERMS, header)
        with pytest.raises(MessageError, match="'Avon'"):
            BIRCH.read(data + b"\0", TERMS, header)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"consortium": "ee" * 32}, "consortium"),
        ({"session": "ee" * 32}, "session"),
        ({"step": "open"}, "its step is 'deal', not 'open'"),
        ({"sender": 3}, "its sender is 1, not 3"),
        ({"recipient": 3}, "its recipient is 2, not 3"),
        ({"attempt": 1}, "its attempt is 0, not 1"),
    ],
)
def test_a_message_for_something_else_is_refused(change: dict[str, Any], text: str) -> None:
    data = AVON.write(SEALED, b"body", BIRCH.x25519)
    with pytest.raises(MessageError, match=text):
        BIRCH.read(data, TERMS, replace(SEALED, **change))


def test_forgeries_are_refused() -> None:
    # Cedar writes in Avon's name
    forged = CEDAR.write(SEALED, b"body", BIRCH.x25519)
    with pytest.raises(MessageError, match="not what 'Avon' signed"):
        BIRCH.read(forged, TERMS, SEALED)
    # sealed to the wrong key: only its holder could read it
    misdirected = AVON.write(SEALED, b"body", CEDAR.x25519)
    with pytest.raises(MessageError, match="cannot be opened"):
        BIRCH.read(misdirected, TERMS, SEALED)
    # a key of small order gives everybody the same secret
    with pytest.raises(MessageError, match="no secret can be shared"):
        AVON.exchange("00" * 32)


def test_a_sealed_message_needs_a_recipient_and_an_open_one_has_none() -> None:
    with pytest.raises(InputError, match="recipient"):
        AVON.write(SEALED, b"")
    with pytest.raises(InputError, match="recipient"):
        AVON.write(OPEN, b"", BIRCH.x25519)
    with pytest.raises(InputError, match="open message"):
        open_message(b"", TERMS, SEALED)


# --- keys that are no keys ---

P = 2**255 - 19
# the eight points of small order and their other spellings; the points of order 8 are those of libsodium's list
SMALL_ORDER = [
    "01" + "00" * 31,
    "ec" + "ff" * 30 + "7f",
    "00" * 32,
    "00" * 31 + "80",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
]
OTHER_SPELLINGS = [
    "01" + "00" * 30 + "80",
    "ec" + "ff" * 31,
    "ed" + "ff" * 30 + "7f",
    "ed" + "ff" * 31,
    "ee" + "ff" * 30 + "7f",
    "ee" + "ff" * 31,
]
LOW_ORDER_U = [
    "00" * 32,
    "01" + "00" * 31,
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ec" + "ff" * 30 + "7f",
    "ed" + "ff" * 30 + "7f",
    "ee" + "ff" * 30 + "7f",
]
SIGNATURE = "01" + "00" * 63  # R = O, S = 0: under A = O it is everybody's over everything


def _little(number: int) -> str:
    return number.to_bytes(32, "little").hex()


def _mixed(ed25519: str) -> str:
    """A + (0, −1) = (−x, −y): of order 2L."""
    raw = int.from_bytes(bytes.fromhex(ed25519), "little")
    return _little((P - (raw & (1 << 255) - 1)) | (1 - (raw >> 255)) << 255)


def _twin(x25519: str) -> str:
    """P + (0, 0) on the Montgomery curve: 1/u, of order 2L."""
    return _little(pow(int.from_bytes(bytes.fromhex(x25519), "little"), -1, P))


def test_one_signature_under_a_key_of_small_order_fits_every_message_and_is_refused() -> None:
    for text in (b"one", b"another", b"a third"):  # the primitive itself accepts it
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(SMALL_ORDER[0]))
        key.verify(bytes.fromhex(SIGNATURE), digest("signature", b"manifest", text))
        with pytest.raises(SignatureError, match="Eve"):
            verify(SMALL_ORDER[0], "manifest", text, SIGNATURE, "Eve")


def test_the_order_check_is_what_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorumark.consortium.signatures.is_ed25519_key", lambda _: True)
    for text in (b"one", b"another"):
        verify(SMALL_ORDER[0], "manifest", text, SIGNATURE, "Eve")


def test_a_signature_that_held_once_vouches_for_nothing_else() -> None:
    """What was found right is remembered in a process: for that key, those bytes and that signature alone."""
    good = AVON.sign("manifest", b"text")
    for _ in range(2):
        verify(AVON.ed25519, "manifest", b"text", good, "Avon")
        wrong = [
            (BIRCH.ed25519, "manifest", b"text", good),
            (AVON.ed25519, "card", b"text", good),
            (AVON.ed25519, "manifest", b"Text", good),
            (AVON.ed25519, "manifest", b"text", good[:-1] + bytes([good[-1] ^ 1])),
        ]
        for case in wrong:
            for _ in range(2):
                with pytest.raises(SignatureError):
                    verify(*case, "Avon")


def test_a_manifest_that_was_verified_once_vouches_for_no_other_signatures() -> None:
    manifest, _ = deal_key(PEOPLE, make_terms(PEOPLE, 2, 10, setup="dealer"))
    for _ in range(2):
        verify_manifest(manifest)
        swapped = replace(manifest, signatures={**manifest.signatures, 1: manifest.signatures[2]})
        fewer = replace(manifest, signatures={x: s for x, s in manifest.signatures.items() if x != 3})
        other = replace(manifest, roots=(manifest.roots[1], *manifest.roots[1:]), predecessor="ab" * 32)
        for changed in (swapped, fewer, other):
            with pytest.raises(SignatureError):
                verify_manifest(changed)


def _refused(name: str, key: str, text: str) -> None:
    card, terms = json.loads(AVON.card().to_bytes()), json.loads(TERMS.to_bytes())
    with pytest.raises(RecordError, match=text):
        Card.from_bytes(spelled(card | {name: key, "signature": SIGNATURE}))
    terms["roster"][1][name] = key
    with pytest.raises(RecordError, match=text):
        Terms.from_bytes(spelled(terms))


def test_cards_and_rosters_with_an_invalid_signing_key_are_refused() -> None:
    for key in [*SMALL_ORDER, *OTHER_SPELLINGS, _mixed(AVON.ed25519), "02" + "00" * 31, "ff" * 32]:
        with pytest.raises(SignatureError):
            verify(key, "card", b"text", SIGNATURE, "Eve")
        _refused("ed25519", key, "a member's signing key must be a point of prime order")


def test_cards_and_rosters_with_an_invalid_sealing_key_are_refused() -> None:
    for key in [*LOW_ORDER_U, _twin(AVON.x25519), "02" + "00" * 31, _little(P + 9)]:
        _refused("x25519", key, "a member's sealing key must be a point of prime order")


def test_a_sealing_key_has_a_twin_that_opens_to_the_same_secrets() -> None:
    """Why points of mixed order are refused: the roster's rule that no two members have one key would not hold."""
    private = X25519PrivateKey.generate()
    keys = [X25519PublicKey.from_public_bytes(bytes.fromhex(key)) for key in (AVON.x25519, _twin(AVON.x25519))]
    assert private.exchange(keys[0]) == private.exchange(keys[1])


def test_honest_keys_are_of_prime_order() -> None:
    assert is_ed25519_key("58" + "66" * 31)  # the base point
    assert is_x25519_key("09" + "00" * 31)
    for person in identities(12):
        assert is_ed25519_key(person.ed25519)
        assert is_x25519_key(person.x25519)
        assert not is_ed25519_key(_mixed(person.ed25519))
        assert not is_x25519_key(_twin(person.x25519))
        assert _mixed(_mixed(person.ed25519)) == person.ed25519
    # of bytes at random half are no point's y, and of the others one in eight is of prime order: 1/16, and 1/32 with
    # the highest bit of u clear. 1 in 10^5 tests would find more than 43, or fewer than 9, of 400
    rng = random.Random(5)
    assert 9 <= sum(is_ed25519_key(rng.randbytes(32).hex()) for _ in range(400)) <= 43
    assert not is_ed25519_key("58" + "66" * 30)


def test_names_are_checked_before_keys_are_kept() -> None:
    with pytest.raises(RecordError, match="name"):
        Identity.generate(" spaces ")
