"""Time stamps by a real authority (openssl): good ones hold, and whatever is wrong with one has its own code."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from quorumark.errors import InputError, RecordError, StampError
from quorumark.reasons import CODES
from quorumark.stamps.record import MOST_CHAINS, MOST_RENEWALS, Stamps
from quorumark.stamps.tokens import LARGEST, ask, check_token, inspect_token, read_request, read_roots
from tests.kit.authority import NOW, STAMPING, Authority, changed, der, inside, make_authority, named, openssl, reverse

MESSAGE = b"the bytes that are dated"
SIGNED_DATA = (1, 1, 0)
SIGNER_INFO = (*SIGNED_DATA, -1, 0)
YEAR = timedelta(days=365)


@pytest.fixture(scope="module")
def avon(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("avon") / "tsa")


@pytest.fixture(scope="module")
def birch(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("birch") / "tsa", "Birch Stamps")


@pytest.fixture(scope="module")
def query() -> bytes:
    return ask(MESSAGE)


def refusal(response: bytes, *authorities: Authority, message: bytes = MESSAGE, nonce: int | None = None) -> str:
    with pytest.raises(StampError) as caught:
        check_token(response, message, read_roots([one.root for one in authorities]), nonce)
    assert str(caught.value).startswith("the stamp is refused: ")
    return caught.value.code


# --- what holds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", [False, True])
def test_an_authoritys_answer_holds_and_says_who_and_when(avon: Authority, query: bytes, chain: bool) -> None:
    asked = read_request(query)
    assert asked.is_about(MESSAGE)
    assert not asked.is_about(MESSAGE + b".")
    response = avon.answer(query, chain=chain)
    token = check_token(response, MESSAGE, read_roots([avon.root]), asked.nonce)
    assert token.authority == "Avon Stamps"
    assert abs(token.time - NOW) < timedelta(minutes=30)
    assert token.latest - token.time == timedelta(seconds=1)  # the authority's own accuracy
    assert token.expires == NOW + timedelta(days=400)  # its certificate ends before its root's


def test_openssl_confirms_what_we_accept(avon: Authority, query: bytes, tmp_path: Path) -> None:
    """Our request is one to openssl, and it verifies the answer with none of our code."""
    assert b"sha512" in openssl("ts", "-query", "-in", _file(tmp_path / "q", query), "-text")
    answer, data = _file(tmp_path / "r", avon.answer(query)), _file(tmp_path / "d", MESSAGE)
    assert b"Verification: OK" in openssl("ts", "-verify", "-in", answer, "-data", data, "-CAfile", avon.root)


@pytest.mark.parametrize("algorithm", ["sha256", "sha384", "sha512"])
def test_requests_that_openssl_makes_do_as_well(avon: Authority, tmp_path: Path, algorithm: str) -> None:
    data = _file(tmp_path / "d", MESSAGE)
    query = openssl("ts", "-query", "-data", data, f"-{algorithm}", "-cert")
    asked = read_request(query)
    assert (asked.algorithm, asked.is_about(MESSAGE)) == (algorithm, True)
    assert check_token(avon.answer(query), MESSAGE, read_roots([avon.root]), asked.nonce).algorithm == algorithm


def test_every_request_has_a_nonce_of_its_own() -> None:
    nonces = {read_request(ask(MESSAGE)).nonce for _ in range(50)}
    assert len(nonces) == 50
    assert None not in nonces


# --- what is refused ----------------------------------------------------------------------------------------


def test_a_stamp_of_something_else(avon: Authority, query: bytes) -> None:
    assert refusal(avon.answer(query), avon, message=b"something else") == "stamp.other-bytes"


def test_an_answer_to_another_request(avon: Authority, query: bytes) -> None:
    other = read_request(ask(MESSAGE)).nonce
    assert refusal(avon.answer(query), avon, nonce=other) == "stamp.nonce"
    bare = openssl("ts", "-query", "-digest", read_request(query).imprint.hex(), "-sha512", "-cert", "-no_nonce")
    assert refusal(avon.answer(bare), avon, nonce=other) == "stamp.nonce"


def test_an_authority_under_another_root(avon: Authority, birch: Authority, query: bytes) -> None:
    assert refusal(avon.answer(query), birch) == "stamp.untrusted"
    check_token(avon.answer(query), MESSAGE, read_roots([avon.root, birch.root]))


def test_a_root_that_the_response_brings_along_is_not_trusted(
    avon: Authority, birch: Authority, query: bytes, tmp_path: Path
) -> None:
    assert refusal(avon.answer(query, chain=True), birch) == "stamp.untrusted"
    # nor one of the right name with another key
    twin = make_authority(tmp_path / "tsa", avon.name)
    assert refusal(twin.answer(query, chain=True), avon) == "stamp.untrusted"


@pytest.mark.parametrize("days", [-500, 500])
def test_a_chain_that_was_not_valid_at_the_time_of_the_stamp(avon: Authority, query: bytes, days: int) -> None:
    assert refusal(avon.answer(query, at=NOW + timedelta(days=days)), avon) == "stamp.not-valid-then"
    check_token(avon.answer(query, at=NOW - timedelta(days=100)), MESSAGE, read_roots([avon.root]))


@pytest.mark.parametrize("signer", ["plain", "mail", "loose"])
def test_a_certificate_that_is_not_for_time_stamps(avon: Authority, query: bytes, signer: str) -> None:
    said = avon.said(query)
    check_token(avon.sign(said), MESSAGE, read_roots([avon.root]))  # it is not the way of signing that is refused
    assert refusal(avon.sign(said, signer), avon) == "stamp.purpose"


def test_a_response_without_the_signers_certificate(avon: Authority, query: bytes) -> None:
    assert refusal(avon.sign(avon.said(query), certificates=False), avon) == "stamp.no-certificate"


def test_another_certificate_of_the_same_key(avon: Authority, query: bytes) -> None:
    """Which certificate comes along is not signed. OpenSSL takes this one; what is signed names the first."""
    import rfc3161_client

    root_key = ec.generate_private_key(ec.SECP256R1())
    key = serialization.load_pem_private_key((avon.folder / "tsa.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)

    def issued(name: str, to: ec.EllipticCurvePrivateKey, end: datetime) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(named(name)).issuer_name(named("Twin root"))
        made = made.public_key(to.public_key()).serial_number(x509.random_serial_number())
        return made.not_valid_before(NOW - YEAR).not_valid_after(end)

    ca = issued("Twin root", root_key, NOW + 20 * YEAR).add_extension(x509.BasicConstraints(True, None), True)
    root = ca.sign(root_key, hashes.SHA256())
    twin = issued("Avon Stamps", key, NOW + 9 * YEAR).add_extension(*STAMPING[0]).sign(root_key, hashes.SHA256())
    raw = twin.public_bytes(serialization.Encoding.DER)
    sid = der(0x30, named("Twin root").public_bytes(), _serial(twin))
    swapped = changed(avon.answer(query), (*SIGNED_DATA, 3), lambda _: der(0xA0, raw))
    swapped = changed(swapped, (*SIGNER_INFO, 1), lambda _: sid)
    verifier = rfc3161_client.VerifierBuilder().add_root_certificate(root).build()
    assert verifier.verify_message(rfc3161_client.decode_timestamp_response(swapped), MESSAGE)
    with pytest.raises(StampError) as caught:
        check_token(swapped, MESSAGE, [root])
    assert caught.value.code == "stamp.signer"


def _serial(certificate: x509.Certificate) -> bytes:
    number = certificate.serial_number
    return der(0x02, number.to_bytes(number.bit_length() // 8 + 1, "big"))


@pytest.mark.parametrize("path", [(*SIGNED_DATA, 3), (*SIGNER_INFO, 3)], ids=["certificates", "signed attributes"])
def test_unsorted_sets(avon: Authority, query: bytes, path: tuple[int, ...]) -> None:
    spoilt = changed(avon.answer(query, chain=True), path, reverse)
    assert refusal(spoilt, avon) == "stamp.unsorted"
    assert check_token(changed(spoilt, path, reverse), MESSAGE, read_roots([avon.root]))  # put in order again it holds


@pytest.mark.parametrize(
    ("place", "code"),
    [((*SIGNER_INFO, 5), "stamp.signature"), ((*SIGNED_DATA, 2, 1, 0), "stamp.signature")],
    ids=["signature", "what is said"],
)
def test_a_forged_answer(avon: Authority, query: bytes, place: tuple[int, ...], code: str) -> None:
    """One bit of the signature; one bit of the serial number in what is signed."""

    def flip(element: bytes) -> bytes:
        # the serial number follows the message imprint; in a signature any byte will do
        at = element.find(b"\x18\x0f") - 1 if b"\x18\x0f" in element else len(element) - 4
        return element[:at] + bytes([element[at] ^ 1]) + element[at + 1 :]

    assert refusal(changed(avon.answer(query), place, flip), avon) == code


def test_a_time_that_was_set_back(avon: Authority, query: bytes) -> None:
    response = avon.answer(query)
    year = NOW.strftime("%Y").encode()
    earlier = str(int(year) - 1).encode()
    at = response.index(b"\x18\x0f" + year) + 2
    assert refusal(response[:at] + earlier + response[at + 4 :], avon) in {"stamp.signature", "stamp.not-valid-then"}


def test_an_authority_that_refuses(avon: Authority, query: bytes) -> None:
    refused = openssl(
        "ts", "-reply", "-queryfile", _file(avon.folder / "bad.tsq", query[:-3] + b"\x01\x01\xff"),
        "-config", _without_sha512(avon), "-signer", avon.folder / "tsa.pem", "-inkey", avon.folder / "tsa.key",
    )  # fmt: skip
    assert refusal(refused, avon) == "stamp.refused"


def _without_sha512(avon: Authority) -> Path:
    text = (avon.folder / "tsa.cnf").read_text()
    path = avon.folder / "strict.cnf"
    path.write_text(text.replace("digests = sha256, sha384, sha512", "digests = sha256"))
    return path


def test_a_weak_hash(avon: Authority, tmp_path: Path) -> None:
    sha1 = openssl("ts", "-query", "-data", _file(tmp_path / "d", MESSAGE), "-sha1", "-cert")
    with pytest.raises(StampError, match="SHA-256"):
        read_request(sha1)
    config = avon.folder / "weak.cnf"
    config.write_text((avon.folder / "tsa.cnf").read_text().replace("digests = sha256", "digests = sha1, sha256"))
    response = openssl(
        "ts", "-reply", "-queryfile", _file(tmp_path / "q", sha1), "-config", config,
        "-signer", avon.folder / "tsa.pem", "-inkey", avon.folder / "tsa.key",
    )  # fmt: skip
    assert refusal(response, avon) == "stamp.hash"


def test_truncated_and_huge_answers(avon: Authority, query: bytes) -> None:
    response = avon.answer(query)
    for size in range(0, len(response), 7):
        assert refusal(response[:size], avon) == "stamp.malformed"
    assert refusal(response + b"\0", avon) == "stamp.malformed"
    assert refusal(response + bytes(LARGEST), avon) == "stamp.too-large"


def test_any_damage_is_a_refusal_of_ours(avon: Authority, query: bytes) -> None:
    """Each byte of an answer changed, two hundred at random twice; nothing else than a StampError comes of it."""
    response, rng = avon.answer(query, chain=True), random.Random(3)
    roots = read_roots([avon.root])
    whole = check_token(response, MESSAGE, roots)
    held, codes = 0, set[str]()
    for at in [*range(len(response)), *(rng.randrange(len(response)) for _ in range(200))]:
        spoilt = bytearray(response)
        spoilt[at] ^= 1 << rng.randrange(8)
        try:
            found = check_token(bytes(spoilt), MESSAGE, roots)
        except StampError as error:
            codes.add(error.code)
        else:  # what is not signed may change (a certificate that nobody needs), what is said may not
            assert replace(found, authority="") == replace(whole, authority="")
            held += 1
    assert held < len(response) // 2
    assert {"stamp.malformed", "stamp.signature", "stamp.signer", "stamp.other-bytes"} <= codes <= CODES.keys()


@pytest.mark.parametrize("data", [b"", b"\x30", b"\x30\x80" * 40, bytes(5000)])
def test_requests_that_are_none(data: bytes) -> None:
    with pytest.raises(StampError, match="request"):
        read_request(data)


# --- roots --------------------------------------------------------------------------------------------------


def test_roots_are_pem_files_with_a_root(avon: Authority, tmp_path: Path) -> None:
    assert read_roots([]) == ()
    with pytest.raises(InputError, match="must hold certificates in PEM"):
        read_roots([_file(tmp_path / "rubbish", b"rubbish")])
    with pytest.raises(InputError, match="signs itself"):
        read_roots([avon.folder / "tsa.pem"])
    with pytest.raises(InputError, match="at most 1 MiB"):
        read_roots([_file(tmp_path / "huge", bytes((1 << 20) + 1))])
    with pytest.raises(InputError, match="at most 1 MiB"):
        read_roots([tmp_path / "nowhere"])


# --- several stamps, and renewals ---------------------------------------------------------------------------


def renewed(stamps: Stamps, number: int, authority: Authority, at: datetime | None = None) -> Stamps:
    query = ask(stamps.message(number, MESSAGE))
    assert stamps.place_of(read_request(query), MESSAGE) == number
    return stamps.with_response(number, authority.answer(query, at=at))


def code_of(work: Callable[[], object]) -> str:
    with pytest.raises(StampError) as caught:
        work()
    return caught.value.code


def test_two_authorities_each_date_the_file(avon: Authority, birch: Authority) -> None:
    stamps = renewed(renewed(Stamps.of("manifest", MESSAGE), 0, avon), 1, birch)
    stamps = Stamps.from_bytes(stamps.to_bytes())
    assert [len(chain) for chain in stamps.chains] == [1, 1]
    both = read_roots([avon.root, birch.root])
    assert [stamps.check(n, MESSAGE, both).authority for n in (0, 1)] == ["Avon Stamps", "Birch Stamps"]
    assert code_of(lambda: stamps.check(0, b"another file", both)) == "stamp.other-bytes"
    assert code_of(lambda: stamps.with_response(0, stamps.chains[1][0])) == "stamp.twice"


def test_a_renewal_carries_a_stamp_over_the_end_of_its_chain(avon: Authority, birch: Authority, tmp_path: Path) -> None:
    """A stamp of two years ago, whose certificates ended one year ago, renewed before by another authority."""
    old = make_authority(tmp_path / "old", "Old Stamps", begin=NOW - 3 * YEAR, end=NOW - YEAR)
    roots = read_roots([old.root, birch.root])
    alone = renewed(Stamps.of("manifest", MESSAGE), 0, old, NOW - 2 * YEAR)
    assert code_of(lambda: alone.check(0, MESSAGE, roots)) == "stamp.expired"
    assert alone.check(0, MESSAGE, roots, at=NOW - YEAR - timedelta(days=1)).authority == "Old Stamps"
    new = make_authority(tmp_path / "new", "New Stamps", begin=NOW - 2 * YEAR, end=NOW + 5 * YEAR)
    roots = read_roots([old.root, new.root])
    kept = renewed(alone, 0, new, NOW - YEAR - timedelta(days=30))
    dated = Stamps.from_bytes(kept.to_bytes()).check(0, MESSAGE, roots)
    assert (dated.authority, dated.renewals) == ("Old Stamps", ("New Stamps",))
    assert dated.latest == NOW - 2 * YEAR + timedelta(seconds=1)
    assert dated.expires == NOW + 5 * YEAR
    # too late: a thief of the old key by then could have made the first stamp as well
    late = renewed(alone, 0, new, NOW - timedelta(days=30))
    assert code_of(lambda: late.check(0, MESSAGE, roots)) == "stamp.renewed-late"
    # older than what it renews: a renewal holds the stamp that it renews, so its authority's clock is wrong
    early = renewed(alone, 0, new, NOW - 2 * YEAR + timedelta(days=1))
    wrong = renewed(renewed(Stamps.of("manifest", MESSAGE), 0, old, NOW - YEAR - timedelta(days=9)), 0, new,
                    NOW - YEAR - timedelta(days=99))  # fmt: skip
    assert early.check(0, MESSAGE, roots).renewals == ("New Stamps",)
    assert code_of(lambda: wrong.check(0, MESSAGE, roots)) == "stamp.renewed-early"
    # a renewal of another chain, or one that is put in front
    other = replace(kept, chains=((renewed(alone, 0, avon).chains[0][1], kept.chains[0][0]),))
    assert code_of(lambda: other.check(0, MESSAGE, roots)) == "stamp.other-bytes"
    # without what it renews, it dates nothing of the file
    bare = replace(kept, chains=(kept.chains[0][1:],))
    assert code_of(lambda: bare.check(0, MESSAGE, roots)) == "stamp.other-bytes"


def test_a_stamp_from_the_future(avon: Authority) -> None:
    stamps = renewed(Stamps.of("manifest", MESSAGE), 0, avon, NOW + timedelta(days=2))
    roots = read_roots([avon.root])
    assert code_of(lambda: stamps.check(0, MESSAGE, roots)) == "stamp.future"
    assert stamps.check(0, MESSAGE, roots, at=NOW + timedelta(days=2))


def test_a_request_for_stamps_that_have_changed_since_is_refused(avon: Authority, birch: Authority) -> None:
    stamps = renewed(Stamps.of("manifest", MESSAGE), 0, avon)
    asked = read_request(ask(stamps.message(0, MESSAGE)))
    assert stamps.place_of(asked, MESSAGE) == 0
    with pytest.raises(StampError, match="renews none of its stamps as they are now"):
        renewed(stamps, 0, birch).place_of(asked, MESSAGE)
    assert stamps.place_of(read_request(ask(MESSAGE)), MESSAGE) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"kind":"manifest"', b'"kind":"model"'),
        (b'"chains":[["', b'"chains":[[" '),
        (b'"chains":[[', b'"chains":[["!",'),
        (b'"chains":[[', b'"chains":[[],['),
        (b'"chains":[[', b'"chains":["x",['),
        (b'"sha512":"', b'"sha512":"0'),
        (b"{", b'{"also":1,'),
        (b"stamps/v1", b"stamps/v2"),
    ],
)
def test_files_of_stamps_that_are_damaged(avon: Authority, old: bytes, new: bytes) -> None:
    data = renewed(Stamps.of("manifest", MESSAGE), 0, avon).to_bytes()
    with pytest.raises(RecordError):
        Stamps.from_bytes(data.replace(old, new, 1))


def test_files_of_stamps_have_an_end() -> None:
    start = Stamps.of("manifest", MESSAGE)
    for chains in (((b"x",),) * (MOST_CHAINS + 1), ((b"x",) * (MOST_RENEWALS + 1),), ((bytes(LARGEST + 1),),)):
        with pytest.raises(RecordError):
            replace(start, chains=chains)


def test_what_nobody_checked_is_only_what_it_says(avon: Authority, query: bytes) -> None:
    token = inspect_token(avon.answer(query), MESSAGE)
    assert (token.authority, token.expires) == ("Avon Stamps", None)


def test_the_library_can_be_missing(query: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from quorumark.errors import MissingDependencyError

    monkeypatch.setitem(sys.modules, "rfc3161_client", None)
    with pytest.raises(MissingDependencyError, match="rfc3161-client"):
        ask(MESSAGE)
    with pytest.raises(MissingDependencyError, match="rfc3161-client"):
        check_token(query, MESSAGE, [])


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_the_ders_that_spoil_answers_are_right(avon: Authority, query: bytes) -> None:
    response = avon.answer(query)
    assert changed(response, (*SIGNER_INFO, 3), lambda element: der(element[0], *inside(element))) == response
