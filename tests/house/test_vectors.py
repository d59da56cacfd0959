"""Vectors that an independent script made (tests/vectors/make_vectors.py), through the public functions."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from quorumark import codec, field, shamir
from quorumark.model.layout import ModelLayout
from tests.kit.oracle import array, ints

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


def test_the_script_still_makes_these_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(FOLDER / "make_vectors.py"), str(tmp_path)], check=True, timeout=120)
    names = sorted(p.name for p in (FOLDER / "v1").iterdir() if p.is_file())  # the folder is tests/kit/frozen.py's
    assert names == sorted(p.name for p in tmp_path.iterdir())
    for name in names:
        assert (tmp_path / name).read_bytes() == (FOLDER / "v1" / name).read_bytes(), name


def test_the_script_is_independent() -> None:
    tree = ast.parse((FOLDER / "make_vectors.py").read_text())
    modules = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    modules += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not [m for m in modules if m.startswith(("quorumark", "tests"))]
