"""Certificates: bytes that never change, signatures that other tools accept, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
from quorumark.reasons import Reason
from quorumark.shamir import decode
from quorumark.verify.certificate import PAYLOAD_TYPE, Certificate, verify_signatures
from quorumark.verify.check import check_certificate
from quorumark.verify.evidence import Finding, Query
from quorumark.verify.null import cosine_text, log10_bound, log10_p, raised_threshold, z_text
from quorumark.verify.omissions import Omitted
from quorumark.verify.reference import Reference
from tests.kit.commands import run
from tests.kit.evidence import consortium, label, make_finding, make_query
from tests.kit.frozen import FILES, FOLDERS

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


def frozen(folder: Path) -> tuple[list[Reason], list[Reason]]:
    """The whole check, of a folder as tests/kit/frozen.py makes one."""
    certificate = Certificate.from_bytes((folder / "certificate.json").read_bytes())
    reference = Reference.read(folder / "consortium.json")
    return check_certificate(certificate, reference.chain, suspect=folder / "suspect.safetensors", reference=reference)


def test_a_certificate_of_long_ago_is_confirmed(root: Path) -> None:
    """Whatever this release makes of wording, names and modules: everything in it is computed again."""
    folder = root / "tests/vectors/v1/certificate"
    checked, left = frozen(folder)
    assert [reason.code for reason in checked] == [
        "check.manifest", "check.signatures", "check.partials", "check.suspect", "check.form",
    ]  # fmt: skip
    assert left == []
    data = (folder / "certificate.json").read_bytes()
    certificate = Certificate.from_bytes(data)
    assert certificate.to_bytes() == data
    assert certificate.finding.verdict == "PASSED"
    assert [reason.code for reason in certificate.finding.reasons] == ["finding.passed", "finding.corroborated"]
    codes = [reason.code for reason in certificate.finding.query.matching]
    assert codes == ["read.names-stripped", "read.cast", "read.extra-tensors"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 200_000


def test_a_certificate_by_layers_of_long_ago_is_confirmed(root: Path) -> None:
    """Its z is gone, and its layers show the mark."""
    folder = root / "tests/vectors/v1/certificate-by-layers"
    checked, left = frozen(folder)
    assert [reason.code for reason in checked] == [
        "check.manifest", "check.signatures", "check.partials", "check.suspect", "check.form",
    ]  # fmt: skip
    assert left == []
    data = (folder / "certificate.json").read_bytes()
    certificate = Certificate.from_bytes(data)
    assert certificate.to_bytes() == data
    finding = certificate.finding
    assert (finding.verdict, finding.reasons[0].code) == ("PASSED", "finding.layers-passed")
    assert abs(float(finding.z)) < float(finding.threshold)
    assert finding.layers is not None
    assert float(finding.layers.q) >= float(finding.layers.threshold)
    assert finding.layers.blocks == 4
    assert len(certificate.signers(Reference.read(folder / "consortium.json").manifest)) == 3
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 200_000


@pytest.mark.parametrize("kept", FOLDERS)
def test_the_command_confirms_it_too(root: Path, environment: dict[str, str], tmp_path: Path, kept: str) -> None:
    folder, page = root / "tests/vectors/v1" / kept, tmp_path / "report.html"
    command = ["verify", "check", folder / "certificate.json", "--manifest", folder / "consortium.json"]
    command += ["--suspect", folder / "suspect.safetensors", "--report", page]
    done = run(environment, *map(str, command))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("checked: ") == 5
    assert "NOT checked" not in done.stdout
    assert page.stat().st_size > 10_000
    asked = json.loads(run(environment, *map(str, command[:-2]), "--json").stdout)
    assert (asked["verdict"], len(asked["checked"]), asked["not_checked"]) == ("PASSED", 5, [])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", FOLDERS)
def test_one_other_bit_in_any_of_its_files_is_noticed(root: Path, tmp_path: Path, kept: str, name: str) -> None:
    shutil.copytree(root / "tests/vectors/v1" / kept, tmp_path, dirs_exist_ok=True)
    data = (tmp_path / name).read_bytes()
    rng = np.random.default_rng(len(data))
    for bit in (0, 8 * len(data) - 1, *map(int, rng.integers(0, 8 * len(data), 10))):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / name).write_bytes(changed)
        with pytest.raises(QuorumarkError):
            frozen(tmp_path)
    (tmp_path / name).write_bytes(data)
    frozen(tmp_path)


def test_another_implementation_computes_the_same_numbers(golden: dict[str, Any]) -> None:
    """The vectors' script has none of our code; what it says for people is not looked at."""
    manifest = Manifest.from_bytes(golden["manifest"].encode())
    verify_manifest(manifest)
    body = json.loads(golden["payload"])["predicate"]
    finding = Finding.from_dict(body | {"reasons": [], "query": body["query"] | {"matching": []}})
    for partial in finding.partials:
        partial.verify(manifest.terms)
    value, norm2 = int(finding.value), finding.query.norm2
    assert decode({p.point: p.value for p in finding.partials}, 2).value == value
    assert finding.z == z_text(value, norm2)
    assert finding.cosine == cosine_text(value, norm2, finding.query.coordinates)
    omitted = Omitted.of(finding.query, manifest.terms, finding.audits)
    assert (omitted.unexplained, finding.log10_choices) == ((), omitted.log10_choices)
    worth = omitted.worth(finding.z)
    assert (finding.log10_p, finding.log10_bound) == (log10_p(worth), log10_bound(worth))
    assert finding.charged == omitted.charged(finding.agreed)
    assert finding.threshold == raised_threshold(finding.charged, finding.equations)
    assert digest("certificate", golden["payload"].encode()).hex() == golden["digest"]
    for entry in json.loads(golden["envelope"])["signatures"]:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(entry["keyid"]))
        key.verify(base64.b64decode(entry["sig"]), pae(golden["payload"].encode()))


def test_signatures_in_any_order_give_the_same_bytes() -> None:
    certificate = UNSIGNED
    for person in (PEOPLE[4], PEOPLE[0], PEOPLE[1], PEOPLE[0]):  # and twice
        certificate = certificate.signed_by(person)
    assert certificate.to_bytes() == SIGNED.to_bytes()


REASON = Reason.of("finding.passed", z="21.400000", threshold="6.000000")


@pytest.mark.parametrize(
    "wrong",
    [
        "z is at least the threshold",
        {},
        {"code": "finding.splendid"},
        {"code": "finding.passed"},
        {"code": ["finding.passed"]},
        {"code": "read.adapter"},  # a code of another record
        REASON.as_dict() | {"x-note": "ours"},
        REASON.as_dict() | {"z": 21},
        REASON.as_dict() | {"z": "much"},
        {"code": "finding.corrected", "partials": 4, "members": "Avon", "liars": 1},
        {"code": "finding.uncorroborated", "partials": True},
        {"code": "finding.uncorroborated", "partials": -1},
        {"code": "finding.alpha", "alpha": "x" * 201},
        {"code": "finding.alpha", "alpha": "a\nb"},
    ],
)
def test_reasons_are_closed_codes(wrong: Any) -> None:
    """A sentence, an unknown code, a value too many or too few, or of another kind: refused when it is read."""
    body = FINDING.as_dict()
    assert Finding.from_dict(body | {"reasons": [REASON.as_dict()]}).reasons == (REASON,)
    with pytest.raises(RecordError):
        Finding.from_dict(body | {"reasons": [wrong]})
    query = FINDING.query.as_dict()
    with pytest.raises(RecordError):
        Query.from_dict(query | {"matching": [wrong if wrong != {"code": "read.adapter"} else REASON.as_dict()]})


def test_it_is_read_back() -> None:
    for certificate in (UNSIGNED, SIGNED):
        again = Certificate.from_bytes(certificate.to_bytes())
        assert again == certificate
        assert again.finding == FINDING
    statement = json.loads(SIGNED.payload)
    assert statement["subject"] == [
        {"name": "model.safetensors", "digest": {"sha256": label("model.safetensors")}},
        {
            "name": "openssf-model-signing",
            "digest": {"sha256": hashlib.sha256(bytes.fromhex(label("model.safetensors"))).hexdigest()},
        },
    ]
    assert UNSIGNED.digest() == SIGNED.digest()


def test_the_subject_of_openssfs_signature_must_be_that_of_the_files() -> None:
    statement = json.loads(SIGNED.payload)
    for other in (label("another model"), label("model.safetensors")):
        subject = [statement["subject"][0], {"name": "openssf-model-signing", "digest": {"sha256": other}}]
        with pytest.raises(RecordError, match="subject is not the suspect"):
            Certificate(canonical({**statement, "subject": subject}))
    with pytest.raises(RecordError, match="subject is not the suspect"):
        Certificate(canonical({**statement, "subject": statement["subject"][:1]}))


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
    with pytest.raises(SignatureError, match=r"lacks the signature of Birch, Elm:"):
        verify_signatures(UNSIGNED.signed_by(PEOPLE[0]).signed_by(PEOPLE[3]), MANIFEST)


def test_signatures_that_do_not_hold_are_refused_by_name() -> None:
    good = SIGNED.signatures[PEOPLE[1].ed25519]
    for bad in (SIGNED.signatures[PEOPLE[0].ed25519], "00" * 64, good[:-1] + ("0" if good[-1] != "0" else "1")):
        forged = replace(SIGNED, signatures={**SIGNED.signatures, PEOPLE[1].ed25519: bad})
        for check in (Certificate.signers, verify_signatures):
            with pytest.raises(SignatureError, match="signature of Birch does not hold"):
                check(forged, MANIFEST)
    with pytest.raises(SignatureError, match="belongs to no member"):
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


ENTRY = next(entry for entry in json.loads(SIGNED.to_bytes())["signatures"] if {"/", "+"} & set(entry["sig"]))
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
        (b"[]", "not a DSSE envelope"),
        (b"{}", "not a DSSE envelope"),
        (SIGNED.payload, "not a DSSE envelope"),
        (_envelope(extra=1), "not a DSSE envelope"),
        (_envelope(payloadType="application/json"), "payloadType is 'application/json'"),
        (_envelope(payloadType=None), "payloadType"),
        (_envelope(payload="!!!!"), "base64"),
        (_envelope(payload="äöü"), "base64"),
        (_envelope(payload=TEXT + "\n"), "base64"),
        (_envelope(payload=TEXT.rstrip("=") + "==="), "base64"),
        (_envelope(payload=5), "strings"),
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
        (_envelope(signatures=[ENTRY | {"sig": None}]), "strings"),
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
        (b"[]", "not a JSON object"),
        (json.dumps(STATEMENT).encode(), "not canonical"),
        (canonical(STATEMENT | {"_type": "https://in-toto.io/Statement/v0.1"}), "_type"),
        (canonical(STATEMENT | {"predicateType": "urn:quorumark:certificate:v2"}), "predicateType"),
        (canonical({k: v for k, v in STATEMENT.items() if k != "predicateType"}), "predicateType"),
        (canonical({k: v for k, v in STATEMENT.items() if k != "subject"}), "lacks 'subject'"),
        (canonical({k: v for k, v in STATEMENT.items() if k != "predicate"}), "lacks 'predicate'"),
        (canonical(STATEMENT | {"more": 1}), "unknown field 'more'"),
        (canonical(STATEMENT | {"subject": []}), "subject is not the suspect"),
        (canonical(STATEMENT | {"subject": [{"name": "other", "digest": {"sha256": "00" * 32}}]}), "subject is not"),
        (canonical(STATEMENT | {"predicate": {}}), "lacks 'consortium'"),
        (canonical(STATEMENT | {"predicate": []}), "JSON object"),
        (SIGNED.payload.replace(b'"equations":0', b'"equations":0.5'), "not JSON"),
        (SIGNED.payload[:-1] + b',"subject":[]}', "not JSON"),
        (SIGNED.payload.replace(b'"hospitals"', b'"\\ud800"'), "not JSON"),
    ],
)
def test_payloads_that_are_none_are_refused(payload: bytes, text: str) -> None:
    data = _envelope(payload=base64.b64encode(payload).decode())
    with pytest.raises(RecordError, match=text):
        Certificate.from_bytes(data)


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
