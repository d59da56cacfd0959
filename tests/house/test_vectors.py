"""Vectors that independent scripts made (tests/vectors/make_*.py), through the public functions."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark import codec, field, shamir
from quorumark.canonical import canonical, digest, parse
from quorumark.consortium.keystore import Unlock
from quorumark.errors import RecordError
from quorumark.model import kernels
from quorumark.model.layout import ModelLayout
from quorumark.model.statistic import STATISTICS, canonical_form, inner_product, vector_digest
from quorumark.model.suspect import Suspect, match_layout, read_suspect
from quorumark.verify.null import cosine_text, log10_bound, log10_p, raised_threshold, threshold_for, z_text
from quorumark.verify.query import omitted
from quorumark.verify.reference import Anchor
from tests.kit.oracle import array, ints, lift

FOLDER = Path(__file__).parents[1] / "vectors"


def load(name: str) -> Any:
    return json.loads((FOLDER / "v1" / f"{name}.json").read_text(encoding="utf-8"))


def test_field_vectors() -> None:
    v = load("field")
    x, y, z = array(v["x"]), array(v["y"]), array(v["z"])
    assert ints(field.add(x, y)) == v["add"]
    assert ints(field.sub(x, y)) == v["sub"]
    assert ints(field.neg(x)) == v["neg"]
    assert ints(field.mul(x, y)) == v["mul"]
    assert ints(field.scale(v["a"], x)) == v["scale"]
    assert ints(field.axpy(v["a"], x, y)) == v["axpy"]
    assert ints(field.axpy(z, x, y)) == v["axpy_vector"]
    assert field.dot(x, y) == v["dot"]
    assert ints(field.inv(array(v["nonzero"]))) == v["inv"]
    assert ints(field.inv_sqrt(array(v["squares"]))) == v["inv_sqrt"]
    assert field.matmul(np.array(v["left"], np.uint64), np.array(v["right"], np.uint64)).tolist() == v["matmul"]


def test_stream_vectors() -> None:
    for case in load("stream"):
        arguments = bytes.fromhex(case["secret"]), case["purpose"], *(bytes.fromhex(c) for c in case["context"])
        assert field.derive_key(*arguments).hex() == case["key"]
        stream = field.Stream(*arguments)
        assert ints(stream.elements(9)) == case["first"]
        assert ints(stream.elements(5, start=1001)) == case["from_1001"]


def test_sharing_vectors() -> None:
    vectors = load("shamir")
    for case in vectors["sharings"]:
        shares = {x: array(row) for x, row in enumerate(case["shares"], 1)}
        t = case["threshold"]
        for chosen in (list(shares)[:t], list(shares)[-t:], list(shares)):
            assert ints(shamir.reconstruct({x: shares[x] for x in chosen}, t)) == case["secret"]
        decoded = shamir.decode(dict(case["answers"]), t)
        assert (decoded.value, list(decoded.wrong)) == (case["secret"][0], case["wrong"])
    for case in vectors["lagrange"]:
        assert shamir.lagrange(case["points"], case["at"]) == case["weights"]


def test_compressed_share_vectors() -> None:
    case = load("shamir")["compressed"]
    for x in range(1, case["members"] + 1):
        share = shamir.CompressedShare(
            x, case["threshold"], case["members"], len(case["secret"]), case["block"],
            bytes.fromhex(case["seeds"][str(x)]), array(case["stored"][str(x)]),
        )  # fmt: skip
        assert ints(share.expand()) == case["shares"][str(x)]


def test_codec_vectors() -> None:
    for case in load("codec"):
        values = np.array([float.fromhex(v) for v in case["values"]])
        encoded = codec.encode(values, float.fromhex(case["weight"]))
        assert ints(encoded) == case["encoded"]
        assert [float(v).hex() for v in codec.decode(encoded, np.float64)] == case["decoded"]


def test_layout_vectors() -> None:
    case = load("layout")
    for name in ("all", "sampled"):
        layout = ModelLayout.from_bytes(case[name].encode())
        assert layout.to_bytes() == case[name].encode()
        assert layout.digest() == case[f"{name}_digest"]
    assert ints(layout.carrying()) == case["sample"]


# --- the canonical form -----------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    """What stands between spaces; word*n is n of them."""
    return [word for word, _, count in (w.partition("*") for w in text.split()) for _ in range(int(count or 1))]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _safetensors(path: Path, tensors: dict[str, dict[str, Any]]) -> Suspect:
    """A file of these tensors, bit for bit, opened as anybody's is."""
    header: dict[str, Any] = {}
    content = b""
    bits = {name: _words(tensor["bits"]) for name, tensor in tensors.items()}
    for name, tensor in sorted(tensors.items(), key=lambda pair: -len(bits[pair[0]][0])):  # the widest first
        data = b"".join(bytes.fromhex(word)[::-1] for word in bits[name])
        place = [len(content), len(content) + len(data)]
        header[name] = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": place}
        content += data
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + content)
    return read_suspect(path)


STATISTIC = load("statistic")


def test_the_tables_are_the_vectors() -> None:
    assert ints(kernels.LOGS) == _numbers(STATISTIC["logarithms"])
    assert ints(kernels.POWERS) == _numbers(STATISTIC["powers"])


@pytest.mark.parametrize("name", STATISTIC["cases"])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_canonical_form_vectors(name: str, statistic: str, tmp_path: Path) -> None:
    case = STATISTIC["cases"][name]
    layout = ModelLayout.from_bytes(case["layout"].encode())
    suspect = _safetensors(tmp_path / "suspect.safetensors", case["suspect"])
    anchor = Anchor(_safetensors(tmp_path / "anchor.safetensors", case["anchor"]), layout.dtype)
    names = match_layout(suspect, layout).names
    assert names == case["names"]
    omit = omitted(case["burnt"], case["leaf"], layout.coordinates)
    form = canonical_form(statistic, layout, suspect, anchor, names, omit=omit)
    expected = case["forms"][statistic]
    assert form.x.tolist() == _numbers(expected["x"])
    assert (form.x.dtype.name, form.digest) == (expected["type"], expected["digest"])
    assert vector_digest(form.x) == expected["digest"]
    assert [form.norm1, form.norm2, form.norm4] == [expected[f"norm{power}"] for power in (1, 2, 4)]
    assert form.omitted == expected["burnt_norm2"]
    if opened := expected.get("opened"):
        answers = {int(m): inner_product(form.x, array(_numbers(share))) for m, share in opened["shares"].items()}
        assert {str(m): str(answer) for m, answer in answers.items()} == opened["answers"]
        value = lift(shamir.decode(answers, 2).value)
        assert (str(value), z_text(value, form.norm2)) == (opened["value"], opened["z"])


# --- records ----------------------------------------------------------------------------------------------

RECORDS = load("records")


@pytest.mark.parametrize("case", RECORDS["accepted"], ids=lambda case: case["why"])
def test_canonical_bytes_vectors(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["bytes"])
    assert canonical({"format": RECORDS["format"], **case["value"]}) == data
    assert parse(data, RECORDS["format"], "an example") == case["value"]


@pytest.mark.parametrize("case", RECORDS["refused"], ids=lambda case: case["why"])
def test_other_bytes_are_refused(case: dict[str, str]) -> None:
    with pytest.raises(RecordError):
        parse(bytes.fromhex(case["bytes"]), RECORDS["format"], "an example")


def test_digest_vectors() -> None:
    for case in RECORDS["digests"]:
        assert digest(case["domain"], *map(bytes.fromhex, case["parts"])).hex() == case["digest"]


def test_vectors_of_numbers_in_records() -> None:
    for case in RECORDS["quotients"]:
        value, norm2 = int(case["value"]), int(case["norm2"])
        assert z_text(value, norm2) == case["z"]
        assert cosine_text(value, norm2, case["coordinates"]) == case["cosine"]
    assert {alpha: threshold_for(alpha) for alpha in RECORDS["thresholds"]["alpha"]} == RECORDS["thresholds"]["alpha"]
    for z, failed, raised in RECORDS["thresholds"]["raised"]:
        assert raised_threshold(z, failed) == raised
    for case in RECORDS["tails"]:
        assert (log10_p(case["z"]), log10_bound(case["z"])) == (case["log10_p"], case["log10_bound"])


def test_passphrase_vectors() -> None:
    """In UTF-8 as it was typed: a composed ü and a decomposed one are two passphrases."""
    for case in RECORDS["passphrases"]:
        assert case["passphrase"].encode().hex() == case["utf8"]
        assert Unlock.passphrase(case["passphrase"]).key(case["settings"], "a file").hex() == case["key"]
    composed, decomposed = RECORDS["passphrases"][1:3]
    settings = composed["settings"]
    assert Unlock.passphrase(decomposed["passphrase"]).key(settings, "a file").hex() != composed["key"]


# --- the scripts ------------------------------------------------------------------------------------------

SCRIPTS = sorted(FOLDER.glob("*.py"))


def test_the_scripts_still_make_these_files(tmp_path: Path) -> None:
    for script in SCRIPTS:
        subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=120)
    names = sorted(p.name for p in (FOLDER / "v1").iterdir() if p.is_file())  # the folder is tests/kit/frozen.py's
    assert names == sorted(p.name for p in tmp_path.iterdir())
    for name in names:
        assert (tmp_path / name).read_bytes() == (FOLDER / "v1" / name).read_bytes(), name


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_script_is_independent(script: Path) -> None:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    modules = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    modules += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert modules
    assert not [m for m in modules if m.startswith(("quorumark", "tests", "numpy"))]
