"""Everything that is signed, or whose digest is, has one spelling and no field that this release does not know."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.align.groups import Group, Groups, Slot
from quorumark.align.lora import Factors, Lora
from quorumark.canonical import canonical, read_json
from quorumark.consortium.merkle import Opening
from quorumark.consortium.records import Card, Manifest, Terms
from quorumark.errors import QuorumarkError, RecordError
from quorumark.model.layout import ModelLayout
from quorumark.round.statements import Turn
from quorumark.verify.certificate import Certificate
from quorumark.verify.challenge import Challenge
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.opening import KeyOpening, ShareOpening
from quorumark.verify.rules import read_rules
from tests.kit.evidence import consortium, label, make_finding, make_query

Reader = Callable[[bytes], Any]

PEOPLE, MANIFEST = consortium(5, 2)
QUERY = make_query(MANIFEST, norm1=2**53 + 1, norm2=10**12, norm4=2**124 + 1)
FINDING = make_finding(PEOPLE, MANIFEST, 21.0, (1, 2, 3), failed=1, query=QUERY)
HASH = label("something")
CHALLENGE = Challenge(HASH, HASH, HASH, HASH, "21.0", HASH, "dice", (), (3,), QUERY.created)
ASKED = {"manifest": label("m"), "challenge": label("c"), "point": 1}
LEAF = Opening(3, np.arange(4, dtype=np.uint64), bytes(32), (bytes(32),))
WEIGHTS = np.zeros((3, 4), np.float32)

RECORDS: dict[str, tuple[Reader, bytes]] = {
    "card": (Card.from_bytes, PEOPLE[0].card().to_bytes()),
    "terms": (Terms.from_bytes, MANIFEST.terms.to_bytes()),
    "manifest": (Manifest.from_bytes, MANIFEST.to_bytes()),
    "query": (Query.from_bytes, QUERY.to_bytes()),
    "partial": (Partial.from_bytes, FINDING.partials[0].to_bytes()),
    "payload of a certificate": (Certificate, Certificate.of(FINDING).payload),
    "challenge": (Challenge.from_bytes, CHALLENGE.to_bytes()),
    "opening": (ShareOpening.from_bytes, ShareOpening.sign(PEOPLE[0], **ASKED, leaves=(LEAF,)).to_bytes()),
    "opening of keys": (
        KeyOpening.from_bytes,
        KeyOpening.sign(PEOPLE[0], **ASKED, indices=(3,), keys={1: np.arange(3, dtype=np.uint64)}).to_bytes(),
    ),
    "groups": (Groups.from_bytes, Groups((Group(3, (Slot("w", 0, 0, 1, 1, 1),)),)).to_bytes()),
    "factors": (Lora.from_bytes, Lora("ab" * 32, (Factors("a", "b", "w"),)).to_bytes()),
    "layout": (ModelLayout.from_bytes, ModelLayout.of({"w": WEIGHTS}).to_bytes()),
    "turn": (Turn.from_bytes, Turn(1).to_bytes()),
}
# maps whose keys are data: what they may hold is each record's own business
FREE = {"policy", "strength", "signatures", "history", "known", "names", "audits", "keys", "never", "strong", "closed",
        "newer", "digest"}  # fmt: skip

every = pytest.mark.parametrize(("read", "data"), RECORDS.values(), ids=RECORDS)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object in a value, itself included, but for maps."""
    if isinstance(value, dict):
        yield value
    inner = [v for k, v in value.items() if k not in FREE] if isinstance(value, dict) else value
    for one in inner if isinstance(inner, list) else ():
        yield from _objects(one)


@every
def test_a_field_that_nobody_knows_is_refused_at_every_depth(read: Reader, data: bytes) -> None:
    """x-… included: what is written again from known fields would be signed with and without it."""
    read(data)
    depth = len(list(_objects(json.loads(data))))
    for number in range(depth):
        for name in ("x-note", "zzz", "format", ""):
            body = json.loads(data)
            place = list(_objects(body))[number]
            if name in place:
                continue
            place[name] = "somebody else's words"
            with pytest.raises(QuorumarkError):
                read(canonical(body))


@every
def test_another_spelling_is_refused(read: Reader, data: bytes) -> None:
    text = data.decode()
    body = json.loads(text)
    backwards = dict(sorted(body.items(), reverse=True))
    others = [
        b"\xef\xbb\xbf" + data,
        text.encode("utf-16"),
        text.encode("utf-16-le"),
        text.encode("utf-32"),
        data + b"\n",
        b" " + data,
        json.dumps(body, sort_keys=True).encode(),
        json.dumps(backwards, separators=(",", ":"), ensure_ascii=False).encode(),
        text.replace("quorumark", "\\u0071uorumark", 1).encode(),
    ]
    for other in others:
        assert other != data
        with pytest.raises(QuorumarkError):
            read(other)


def test_an_envelope_may_have_spaces_but_not_another_encoding() -> None:
    data = Certificate.of(FINDING).signed_by(PEOPLE[0]).to_bytes()
    spaced = json.dumps(json.loads(data), indent=7).encode()
    assert Certificate.from_bytes(spaced) == Certificate.from_bytes(data)
    for other in (b"\xef\xbb\xbf" + data, data.decode().encode("utf-16"), data.decode().encode("utf-32-be")):
        with pytest.raises(RecordError):
            Certificate.from_bytes(other)


def test_integers_above_2_53_stay_exact() -> None:
    again = Query.from_bytes(QUERY.to_bytes())
    assert (again.norm1, again.norm4) == (2**53 + 1, 2**124 + 1)
    assert b'"norm1":9007199254740993' in QUERY.to_bytes()
    assert again.digest() == QUERY.digest()
    assert read_json(b"[9007199254740993]", "a list") == [2**53 + 1]


def test_a_policy_is_written_by_hand(tmp_path: Path) -> None:
    """Any order and spaces, and notes; not another encoding."""
    text = '{\n  "x-note": "ours",\n  "format": "quorumark-answer-rules/v1", "approve": "ask"\n}\n'
    path = tmp_path / "rules.json"
    path.write_text(text, encoding="utf-8")
    assert read_rules(path).approve == "ask"
    for other in (text.encode("utf-16"), b"\xef\xbb\xbf" + text.encode(), text.replace("x-note", "note").encode()):
        path.write_bytes(other)
        with pytest.raises(RecordError):
            read_rules(path)


def test_base64_of_an_opening_has_one_spelling() -> None:
    """The last character holds bits that no byte has; a decoder passes over them."""
    read, data = RECORDS["opening"]
    body = json.loads(data)
    values = body["leaves"][0]["values"]
    assert values.endswith("A=")
    body["leaves"][0]["values"] = values.removesuffix("A=") + "B="
    assert base64.b64decode(values) == base64.b64decode(body["leaves"][0]["values"])
    with pytest.raises(RecordError, match="base64"):
        read(canonical(body))
