"""Identities and messages: what is refused, and that nothing secret shows."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from quorumark.errors import InputError, MessageError, RecordError, SignatureError
from quorumark.identity import Header, Identity, open_message, verify, verify_card
from quorumark.records import Card
from tests.ceremony import identities, make_terms

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
        ({"extra": 1}, "unknown critical field 'extra'"),
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
        Card.from_bytes(json.dumps(body).encode())


def test_fields_that_may_be_ignored_are() -> None:
    body = json.loads(AVON.card().to_bytes()) | {"x-colour": "green"}
    assert Card.from_bytes(json.dumps(body).encode()) == AVON.card()


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


def test_names_are_checked_before_keys_are_kept() -> None:
    with pytest.raises(RecordError, match="name"):
        Identity.generate(" spaces ")
