"""Certificates: bytes that never change, signatures that other tools accept, and what is refused."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from quorumark.canonical import canonical, digest
from quorumark.consortium.identity import Identity, verify, verify_manifest
from quorumark.consortium.records import Manifest
from quorumark.errors import InputError, QuorumarkError, RecordError, SignatureError
from quorumark.shamir import decode
from quorumark.verify.certificate import PAYLOAD_TYPE, PREDICATE_TYPE, Certificate, verify_signatures
from quorumark.verify.evidence import Finding
from quorumark.verify.null import cosine_text, log10_bound, log10_p, raised_threshold, z_text
from quorumark.verify.omissions import Omitted
from tests.kit.evidence import consortium, label, make_finding, make_query

PEOPLE, MANIFEST = consortium(5, 2)
FINDING = make_finding(PEOPLE, MANIFEST, 21.4, (1, 2, 4, 5), wrong=(4,))
UNSIGNED = Certificate.of(FINDING)
SIGNED = UNSIGNED.signed_by(PEOPLE[0]).signed_by(PEOPLE[1]).signed_by(PEOPLE[4])


def pae(payload: bytes, kind: str = PAYLOAD_TYPE) -> bytes:
    """DSSE's encoding, by hand."""
    return b" ".join([b"DSSEv1", b"%d" % len(kind), kind.encode(), b"%d" % len(payload), payload])


def library_key(person: Identity) -> SSlibKey:
    return SSlibKey(person.ed25519, "ed25519", "ed25519", {"public": person.ed25519})


@pytest.fixture(scope="module")
def golden(root: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((root / "tests/vectors/v1/certificate.json").read_text(encoding="utf-8"))
    return body


# --- bytes that stay --------------------------------------------------------------------------------------


def test_a_certificate_of_long_ago_is_read_and_holds(golden: dict[str, Any]) -> None:
    data = golden["envelope"].encode()
    certificate, manifest = Certificate.from_bytes(data), Manifest.from_bytes(golden["manifest"].encode())
    assert certificate.to_bytes() == data
    assert certificate.payload == golden["payload"].encode()
    assert certificate.digest() == golden["digest"]
    verify_manifest(manifest)
    verify_signatures(certificate, manifest)
    assert [member.point for member in certificate.signers(manifest)] == [1, 3, 5]
    finding = certificate.finding
    for partial in finding.partials:
        partial.verify(manifest.terms)
        assert partial.query == finding.query.digest()
    # the script computed its numbers by itself
    value, norm2 = int(finding.value), finding.query.norm2
    assert decode({p.point: p.value for p in finding.partials}, 2).value == value
    assert finding.z == z_text(value, norm2)
    assert finding.cosine == cosine_text(value, norm2, finding.query.coordinates)
    omitted = Omitted.of(finding.query, manifest.terms, finding.audits)
    assert (omitted.unexplained, finding.log10_choices) == ((), omitted.log10_choices)
    worth = omitted.worth(finding.z)
    assert (finding.log10_p, finding.log10_bound) == (log10_p(worth), log10_bound(worth))
    assert finding.charged == omitted.charged(finding.agreed)
    assert finding.threshold == raised_threshold(finding.charged, finding.failed)


def test_the_same_finding_gives_the_same_bytes(golden: dict[str, Any]) -> None:
    people = [Identity.from_secret_bytes(m["name"], bytes.fromhex(m["secret"])) for m in golden["members"]]
    certificate = Certificate.of(Finding.from_dict(json.loads(golden["payload"])["predicate"]))
    for person in (people[4], people[0], people[2], people[0]):  # in any order, and twice
        certificate = certificate.signed_by(person)
    assert certificate.to_bytes() == golden["envelope"].encode()


def test_it_is_read_back() -> None:
    for certificate in (UNSIGNED, SIGNED):
        again = Certificate.from_bytes(certificate.to_bytes())
        assert again == certificate
        assert again.finding == FINDING
    statement = json.loads(SIGNED.payload)
    assert statement["subject"] == [
        {"name": "model.safetensors", "digest": {"sha256": label("model.safetensors")}},
    ]
    assert UNSIGNED.digest() == SIGNED.digest()


def test_a_model_that_was_never_a_file_has_a_subject_too() -> None:
    finding = make_finding(PEOPLE, MANIFEST, 1.0, (1, 2, 3), query=make_query(MANIFEST, files=()))
    certificate = Certificate.of(finding)
    subject = [{"name": "memory", "digest": {"quorumark-suspect": finding.query.suspect}}]
    assert json.loads(certificate.payload)["subject"] == subject
    assert Certificate.from_bytes(certificate.to_bytes()) == certificate


# --- signatures, by three implementations -----------------------------------------------------------------


def test_plain_ed25519_and_an_encoding_by_hand_accept_it() -> None:
    body = json.loads(SIGNED.to_bytes())
    payload = base64.b64decode(body["payload"], validate=True)
    assert body["payloadType"] == "application/vnd.in-toto+json"
    assert [s["keyid"] for s in body["signatures"]] == sorted(PEOPLE[i].ed25519 for i in (0, 1, 4))
    for entry in body["signatures"]:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(entry["keyid"]))
        key.verify(base64.b64decode(entry["sig"], validate=True), pae(payload))
        with pytest.raises(InvalidSignature):
            key.verify(base64.b64decode(entry["sig"]), payload)


def test_the_library_accepts_ours() -> None:
    envelope = Envelope.from_dict(json.loads(SIGNED.to_bytes()))
    signers = [PEOPLE[i] for i in (0, 1, 4)]
    accepted = envelope.verify([library_key(person) for person in signers], threshold=3)
    assert accepted.keys() == {person.ed25519 for person in signers}
    with pytest.raises(VerificationError):
        envelope.verify([library_key(person) for person in PEOPLE], threshold=4)


def test_ours_accepts_what_the_library_made() -> None:
    envelope = Envelope(UNSIGNED.payload, PAYLOAD_TYPE, {})
    for i in (4, 1, 0):
        private = Ed25519PrivateKey.from_private_bytes(PEOPLE[i].to_secret_bytes()[:32])
        envelope.sign(CryptoSigner(private, library_key(PEOPLE[i])))
    certificate = Certificate.from_bytes(json.dumps(envelope.to_dict()).encode())
    assert certificate == SIGNED
    verify_signatures(certificate, MANIFEST)


def test_the_signers_are_members_in_order() -> None:
    assert UNSIGNED.signers(MANIFEST) == ()
    assert SIGNED.signers(MANIFEST) == tuple(MANIFEST.terms.member(x) for x in (1, 2, 5))


def test_everybody_whose_partial_counts_must_have_signed() -> None:
    verify_signatures(SIGNED, MANIFEST)  # without Delta, whose partial was wrong
    verify_signatures(SIGNED.signed_by(PEOPLE[2]), MANIFEST)  # a witness does no harm
    with pytest.raises(SignatureError, match="nobody has signed"):
        verify_signatures(UNSIGNED, MANIFEST)
    with pytest.raises(SignatureError, match=r"lacks the signature of Birch, Elm$"):
        verify_signatures(UNSIGNED.signed_by(PEOPLE[0]).signed_by(PEOPLE[3]), MANIFEST)


def test_signatures_that_do_not_hold_are_refused_by_name() -> None:
    good = SIGNED.signatures[PEOPLE[1].ed25519]
    for bad in (SIGNED.signatures[PEOPLE[0].ed25519], "00" * 64, good[:-1] + ("0" if good[-1] != "0" else "1")):
        forged = replace(SIGNED, signatures={**SIGNED.signatures, PEOPLE[1].ed25519: bad})
        for check in (Certificate.signers, verify_signatures):
            with pytest.raises(SignatureError, match="signature of Birch does not hold"):
                check(forged, MANIFEST)
    with pytest.raises(SignatureError, match="no member's"):
        SIGNED.signed_by(Identity.generate("Mallory")).signers(MANIFEST)


def test_it_holds_under_its_own_manifest_only() -> None:
    _, other = consortium(5, 2, title="other hospitals")
    with pytest.raises(RecordError, match="another manifest"):
        SIGNED.signers(other)
    with pytest.raises(RecordError, match="another manifest"):
        verify_signatures(SIGNED, other)


def test_a_signature_for_another_purpose_is_none_for_a_certificate() -> None:
    avon = PEOPLE[0]
    for other in (avon.sign("certificate", UNSIGNED.payload), avon.sign("partial", pae(UNSIGNED.payload))):
        with pytest.raises(SignatureError, match="Avon"):
            replace(UNSIGNED, signatures={avon.ed25519: other.hex()}).signers(MANIFEST)
    signature = SIGNED.signatures[avon.ed25519]
    for purpose in ("certificate", "partial", "manifest", "card", "message"):
        for data in (UNSIGNED.payload, pae(UNSIGNED.payload)):
            with pytest.raises(SignatureError, match="Avon"):
                verify(avon.ed25519, purpose, data, signature, "Avon")


@pytest.mark.parametrize(
    "data", [b"", b"DSSEv1", b"DSSEv2 28 " + bytes(64), digest("signature", b"card", b""), b"DSSEv1 " + bytes(25)]
)
def test_only_what_an_envelope_signs_is_signed_so(data: bytes) -> None:
    with pytest.raises(InputError, match="DSSE"):
        PEOPLE[0].sign_dsse(data)


# --- what is refused --------------------------------------------------------------------------------------


def test_every_flipped_bit_is_found() -> None:
    """In the payload or a signature: it is not read, or a signature does not hold."""
    finding = replace(make_finding(PEOPLE[:3], MANIFEST, 9, (1,)), reasons=())
    certificate = Certificate.of(finding).signed_by(PEOPLE[0])
    payload, signature = certificate.payload, bytes.fromhex(certificate.signatures[PEOPLE[0].ed25519])

    def check(payload: bytes, signature: bytes) -> None:
        body = {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"keyid": PEOPLE[0].ed25519, "sig": base64.b64encode(signature).decode()}],
        }
        verify_signatures(Certificate.from_bytes(json.dumps(body).encode()), MANIFEST)

    check(payload, signature)
    for i in range(len(payload)):
        flipped = payload[:i] + bytes([payload[i] ^ 1 << i % 8]) + payload[i + 1 :]
        with pytest.raises((RecordError, SignatureError)):
            check(flipped, signature)
    for bit in range(8 * len(signature)):
        number = int.from_bytes(signature, "big") ^ 1 << bit
        with pytest.raises(SignatureError, match="Avon"):
            check(payload, number.to_bytes(64, "big"))
    for cut in (payload[:-1], payload + b" ", b" " + payload):
        with pytest.raises(RecordError):
            check(cut, signature)
    with pytest.raises(RecordError, match="64 bytes"):
        check(payload, signature[:-1])


def _envelope(**changes: Any) -> bytes:
    return json.dumps(json.loads(SIGNED.to_bytes()) | changes).encode()


ENTRY = json.loads(SIGNED.to_bytes())["signatures"][0]
TEXT = json.loads(SIGNED.to_bytes())["payload"]
STRAY = ENTRY["sig"][:-3] + chr(ord(ENTRY["sig"][-3]) + 1) + "=="
assert base64.b64decode(STRAY) == base64.b64decode(ENTRY["sig"])
SAFE = ENTRY["sig"].replace("/", "_").replace("+", "-")
assert ENTRY["sig"] != SAFE


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no DSSE envelope"),
        (b"{}", "no DSSE envelope"),
        (SIGNED.payload, "no DSSE envelope"),
        (_envelope(extra=1), "no DSSE envelope"),
        (_envelope(payloadType="application/json"), "payloadType is 'application/json'"),
        (_envelope(payloadType=None), "payloadType"),
        (_envelope(payload="!!!!"), "base64"),
        (_envelope(payload="äöü"), "base64"),
        (_envelope(payload=TEXT + "\n"), "base64"),
        (_envelope(payload=TEXT.rstrip("=") + "==="), "base64"),
        (_envelope(payload=5), "texts"),
        (_envelope(payload=""), "not JSON"),
        (_envelope(signatures={}), "must be a list"),
        (_envelope(signatures=[5]), "must be a list"),
        (_envelope(signatures=[{"sig": ENTRY["sig"]}]), "keyid and sig"),
        (_envelope(signatures=[ENTRY | {"cert": "x"}]), "keyid and sig"),
        (_envelope(signatures=[ENTRY, ENTRY]), "signed twice by one key"),
        (_envelope(signatures=[ENTRY | {"sig": "*" * 88}]), "base64"),
        # the same bytes in another spelling: stray bits at the end, and the alphabet for addresses
        (_envelope(signatures=[ENTRY | {"sig": STRAY}]), "standard spelling"),
        (_envelope(signatures=[ENTRY | {"sig": SAFE}]), "base64"),
        (_envelope(signatures=[ENTRY | {"sig": ""}]), "64 bytes"),
        (_envelope(signatures=[ENTRY | {"sig": None}]), "texts"),
        (_envelope(signatures=[ENTRY | {"keyid": "Avon"}]), "in hex"),
        (_envelope(signatures=[ENTRY | {"keyid": ENTRY["keyid"].upper()}]), "in hex"),
        (SIGNED.to_bytes()[:-2] + b',"payload":"e30="}', "not JSON"),
    ],
)
def test_envelopes_that_are_none_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(RecordError, match=text) as caught:
        Certificate.from_bytes(data)
    assert "\n" not in str(caught.value)


STATEMENT = json.loads(SIGNED.payload)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"[]", "no JSON object"),
        (json.dumps(STATEMENT).encode(), "not canonical"),
        (canonical(STATEMENT | {"_type": "https://in-toto.io/Statement/v0.1"}), "_type"),
        (canonical(STATEMENT | {"predicateType": "urn:quorumark:certificate:v2"}), "predicateType"),
        (canonical({k: v for k, v in STATEMENT.items() if k != "predicateType"}), "predicateType"),
        (canonical({k: v for k, v in STATEMENT.items() if k != "subject"}), "lacks 'subject'"),
        (canonical({k: v for k, v in STATEMENT.items() if k != "predicate"}), "lacks 'predicate'"),
        (canonical(STATEMENT | {"more": 1}), "unknown critical field 'more'"),
        (canonical(STATEMENT | {"subject": []}), "subject is not the suspect"),
        (canonical(STATEMENT | {"subject": [{"name": "other", "digest": {"sha256": "00" * 32}}]}), "subject is not"),
        (canonical(STATEMENT | {"predicate": {}}), "lacks 'consortium'"),
        (canonical(STATEMENT | {"predicate": []}), "JSON object"),
        (SIGNED.payload.replace(b'"failed":0', b'"failed":0.5'), "not JSON"),
        (SIGNED.payload[:-1] + b',"subject":[]}', "not JSON"),
        (SIGNED.payload.replace(b'"hospitals"', b'"\\ud800"'), "not JSON"),
    ],
)
def test_payloads_that_are_none_are_refused(payload: bytes, text: str) -> None:
    data = _envelope(payload=base64.b64encode(payload).decode())
    with pytest.raises(RecordError, match=text):
        Certificate.from_bytes(data)


def test_fields_that_may_be_ignored_are_and_stay_signed() -> None:
    body = STATEMENT | {"x-note": "for the file", "predicate": STATEMENT["predicate"] | {"x-case": "A 17"}}
    certificate = Certificate(canonical(body)).signed_by(PEOPLE[0])
    assert certificate.finding == FINDING
    again = Certificate.from_bytes(certificate.to_bytes())
    assert again == certificate
    assert again.signers(MANIFEST)[0].name == "Avon"
    assert PREDICATE_TYPE.encode() in again.payload


ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, -1, 10**30, "", "x", "\x00", [], [[]], [None], {}, {"": None}, {"1": []}]
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, v in inner for p in _places(v, (*path, key)))]


@given(st.sampled_from(_places(STATEMENT)[1:]), ODD)
def test_odd_values_anywhere_are_refused_in_words_or_not_signed(path: tuple[Any, ...], odd: Any) -> None:
    body = json.loads(SIGNED.payload)
    place = body
    for key in path[:-1]:
        place = place[key]
    if place[path[-1]] == odd and type(place[path[-1]]) is type(odd):
        return
    place[path[-1]] = odd
    data = _envelope(payload=base64.b64encode(canonical(body)).decode())
    with pytest.raises(QuorumarkError):
        verify_signatures(Certificate.from_bytes(data), MANIFEST)


def test_the_library_is_loaded_only_when_it_is_needed() -> None:
    script = "import sys, quorumark.verify.certificate; print('securesystemslib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
