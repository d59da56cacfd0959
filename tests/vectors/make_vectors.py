"""Makes the test vectors in v1/. It uses none of quorumark's code: Python ints, fractions, hashlib, and AES and Ed25519
from the `cryptography` package. Run it from anywhere; the files must not change (tests/house/test_vectors.py compares).

Files written by a release stay readable by all later ones: add new files, never change these.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

P = 2**61 - 1
EDGES = [0, 1, P - 1, P - 2, 2**60]


def numbers(label: str, count: int, modulus: int = P) -> list[int]:
    """Integers from a hash: the same in every run."""
    return [int.from_bytes(hashlib.sha512(f"{label}/{i}".encode()).digest(), "big") % modulus for i in range(count)]


def field() -> dict[str, Any]:
    x = EDGES + numbers("x", 20)
    y = list(reversed(EDGES)) + numbers("y", 20)
    z = EDGES + numbers("z", 20)
    a = numbers("a", 1)[0]
    nonzero = [v or 1 for v in x]
    squares = [v * v % P for v in nonzero]
    left = [numbers(f"row{i}", 7) for i in range(3)]
    left[0] = [P - 1] * 7
    right = [EDGES + numbers(f"column{i}", 8) for i in range(7)]
    return {
        "x": x,
        "y": y,
        "z": z,
        "a": a,
        "nonzero": nonzero,
        "squares": squares,
        "left": left,
        "right": right,
        "add": [(u + v) % P for u, v in zip(x, y, strict=True)],
        "sub": [(u - v) % P for u, v in zip(x, y, strict=True)],
        "neg": [-u % P for u in x],
        "mul": [u * v % P for u, v in zip(x, y, strict=True)],
        "scale": [a * u % P for u in x],
        "axpy": [(a * u + v) % P for u, v in zip(x, y, strict=True)],
        "axpy_vector": [(w * u + v) % P for w, u, v in zip(z, x, y, strict=True)],
        "dot": sum(u * v for u, v in zip(x, y, strict=True)) % P,
        "inv": [pow(u, P - 2, P) for u in nonzero],
        "inv_sqrt": [pow(u, (P - 3) // 4, P) for u in squares],
        "matmul": [[sum(r[k] * right[k][j] for k in range(7)) % P for j in range(13)] for r in left],
    }


def hkdf(secret: bytes, info: bytes) -> bytes:
    """RFC 5869, SHA-256, no salt, 32 bytes."""
    key = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(key, info + b"\x01", hashlib.sha256).digest()


def stream_key(secret: bytes, purpose: str, context: Sequence[bytes]) -> bytes:
    parts = [purpose.encode(), *context]
    return hkdf(secret, b"quorumark/v1" + b"".join(len(p).to_bytes(8, "big") + p for p in parts))


def stream_elements(key: bytes, start: int, count: int) -> list[int]:
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    data = encryptor.update(bytes(8 * (start + count)))
    words = [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(start, start + count)]
    return [0 if word & P == P else word & P for word in words]


def stream() -> list[dict[str, Any]]:
    cases = []
    for secret, purpose, context in [
        (bytes(32), "example", []),
        (bytes(range(32)), "mask", [b"round 7", b""]),
        (hashlib.sha256(b"s").digest() * 2, "mask", [b"", b"round 7"]),
    ]:
        key = stream_key(secret, purpose, context)
        cases.append(
            {
                "secret": secret.hex(),
                "purpose": purpose,
                "context": [c.hex() for c in context],
                "key": key.hex(),
                "first": stream_elements(key, 0, 9),
                "from_1001": stream_elements(key, 1001, 5),
            }
        )
    return cases


def evaluate(coefficients: Sequence[int], x: int) -> int:
    return sum(c * pow(x, j, P) for j, c in enumerate(coefficients)) % P


def lagrange(points: Sequence[int], at: int) -> list[int]:
    result = []
    for i, x in enumerate(points):
        above = below = 1
        for j, other in enumerate(points):
            if i != j:
                above, below = above * (at - other), below * (x - other)
        result.append(above * pow(below, -1, P) % P)
    return result


def shamir() -> dict[str, Any]:
    sharings = []
    for members, threshold in [(2, 2), (5, 3), (7, 7), (32, 16), (128, 64)]:
        polynomials = [numbers(f"{members},{threshold},{c}", threshold) for c in range(3)]
        wrong = list(range(1, 1 + (members - threshold) // 2))
        answers = {x: evaluate(polynomials[0], x) for x in range(1, members + 1)}
        for x in wrong:
            answers[x] = (answers[x] + x) % P
        sharings.append(
            {
                "members": members,
                "threshold": threshold,
                "secret": [p[0] for p in polynomials],
                "shares": [[evaluate(p, x) for p in polynomials] for x in range(1, members + 1)],
                "answers": [[x, y] for x, y in answers.items()],
                "wrong": wrong,
            }
        )
    points = [[1, 2, 3], [5, 2, 9], [P - 1, 1, 2**60], list(range(1, 17))]
    weights = [{"points": p, "at": at, "weights": lagrange(p, at)} for p in points for at in (0, 4, P - 2)]
    return {"sharings": sharings, "lagrange": weights, "compressed": compressed()}


def compressed() -> dict[str, Any]:
    """Five members, t = 3: in block b the members at 1 + (b+i) mod 5, i = 0, 1, hold generator output."""
    members, threshold, block, length = 5, 3, 4, 10
    secret = numbers("compressed secret", length)
    seeds = {x: hashlib.sha256(f"seed {x}".encode()).digest() for x in range(1, members + 1)}
    full: dict[int, list[int]] = {x: [] for x in seeds}
    stored: dict[int, list[int]] = {x: [] for x in seeds}
    for index, start in enumerate(range(0, length, block)):
        part = secret[start : start + block]
        generated = [1 + (index + i) % members for i in range(threshold - 1)]
        values = {}
        for x in generated:
            key = stream_key(seeds[x], "compressed share", [x.to_bytes(8, "big"), index.to_bytes(8, "big")])
            values[x] = stream_elements(key, 0, len(part))
        for x in seeds:
            if x not in generated:
                weights = lagrange([0, *generated], x)
                columns = zip(part, *(values[g] for g in generated), strict=True)
                values[x] = [sum(w * v for w, v in zip(weights, column, strict=True)) % P for column in columns]
                stored[x] += values[x]
            full[x] += values[x]
    return {
        "members": members,
        "threshold": threshold,
        "block": block,
        "secret": secret,
        "seeds": {str(x): seed.hex() for x, seed in seeds.items()},
        "stored": {str(x): v for x, v in stored.items()},
        "shares": {str(x): v for x, v in full.items()},
    }


def codec() -> list[dict[str, Any]]:
    """Floats as hex, so that no reader rounds them."""
    step = 2.0**-40
    values = [0.0, 1.0, -1.0, 0.1, -0.1, step, -step, step / 2, -step / 2, 1.5 * step, 2.5 * step, 1e-30, 524287.75]
    values += [-524287.75, 3.141592653589793, -2.718281828459045, 123456.789, 2.0**-24, 2.0**18]
    cases = []
    for weight in (1.0, 0.2, 1 / 3, -0.5):
        encoded = [round(Fraction(v * weight) * 2**40) % P for v in values]
        lifted = [e - P if e > P // 2 else e for e in encoded]
        decoded = [float(Fraction(v, 2**40)) for v in lifted]
        cases.append(
            {
                "weight": weight.hex(),
                "values": [v.hex() for v in values],
                "encoded": encoded,
                "decoded": [v.hex() for v in decoded],
            }
        )
    return cases


def layout() -> dict[str, Any]:
    """A layout's bytes written by hand: carriers, plain, alias, buffer, each sorted by name; keys sorted; no spaces."""
    tensors = [
        {"dtype": "F32", "name": "conv.weight", "role": "carrier", "shape": [16, 3, 3, 3]},
        {"dtype": "BF16", "name": "dense.weight", "role": "carrier", "shape": [10, 64]},
        {"dtype": "F32", "name": "conv.bias", "role": "plain", "shape": [16]},
        {"dtype": "F32", "name": "größe", "role": "plain", "shape": []},
        {"dtype": "F32", "name": "out", "role": "alias", "shape": [16], "of": "conv.bias"},
        {"dtype": "I64", "name": "steps", "role": "buffer", "shape": []},
    ]

    def canonical(limit: int | None) -> str:
        body = {"format": "quorumark-layout/v1", "max_coordinates": limit, "tensors": tensors}
        return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    total, count = 16 * 27 + 640, 100
    seed = hashlib.sha256(b"quorumark-layout-sample/v1" + canonical(None).encode()).digest()
    data = hashlib.shake_128(seed + (0).to_bytes(8, "big")).digest(8 * count)
    sample = []
    for i in range(count):
        low, high = i * total // count, (i + 1) * total // count
        sample.append(low + int.from_bytes(data[8 * i : 8 * i + 8], "little") % (high - low))
    return {
        "all": canonical(None),
        "all_digest": hashlib.sha256(canonical(None).encode()).hexdigest(),
        "sampled": canonical(count),
        "sampled_digest": hashlib.sha256(canonical(count).encode()).hexdigest(),
        "sample": sample,
    }


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(domain: str, *parts: bytes) -> bytes:
    pieces = [domain.encode(), *parts]
    return hashlib.sha256(b"quorumark/v1" + b"".join(len(p).to_bytes(8, "big") + p for p in pieces)).digest()


def label(text: str) -> str:
    """32 bytes in hex that stand for something."""
    return hashlib.sha256(text.encode()).hexdigest()


def certificate() -> dict[str, Any]:
    """Three of five, where two suffice, test a model of two files and sign what they found."""
    people = ["Avon", "Birch", "Cedar", "Delta", "Größe & Söhne"]
    signing = [Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"sign {n}".encode()).digest()) for n in people]
    sealing = [X25519PrivateKey.from_private_bytes(hashlib.sha256(f"seal {n}".encode()).digest()) for n in people]
    secrets = [s.private_bytes_raw() + u.private_bytes_raw() for s, u in zip(signing, sealing, strict=True)]
    keys = [s.public_key().public_bytes_raw().hex() for s in signing]

    def sign(point: int, purpose: str, data: bytes) -> str:
        return signing[point - 1].sign(digest("signature", purpose.encode(), data)).hex()

    coordinates, norm, value = 2_560_000, 10**6, 21_374_512
    terms: dict[str, Any] = {
        "name": "hospitals",
        "threshold": 2,
        "roster": [
            {"point": x, "name": name, "ed25519": key, "x25519": u.public_key().public_bytes_raw().hex(), "examples": x}
            for x, (name, key, u) in enumerate(zip(people, keys, sealing, strict=True), 1)
        ],
        "layout": label("layout"),
        "coordinates": coordinates,
        "anchor": label("anchor"),
        "created": "2026-01-31T12:00:00Z",
        "key": "rademacher",
        "setup": "dkg",
        "leaf": 1024,
        "strength": {
            "rule": "rho",
            "rho": "0.05",
            "c_max": "0.03",
            "alike": "skip",
            "dither": "3",
            "continuity": "off",
            "warmup_rounds": "0",
            "lr": "constant",
            "below_threshold": "refuse",
        },
        "statistic": "balanced-anchor/v1",
        "policy": {"z": "6", "sums": "checked", "attempts": "20", "packing": "2", "blocks": "rows/v1"},
        "buffers": "",
    }
    terms_digest = digest("terms", canonical_json({"format": "quorumark-terms/v1", **terms})).hex()
    roots = [label(f"root {x}") for x in range(1, 6)]
    manifest: dict[str, Any] = {
        "format": "quorumark-manifest/v1",
        "terms": terms,
        "genesis": {
            "terms": terms_digest,
            "layout": terms["layout"],
            "anchor": terms["anchor"],
            "statistic": terms["statistic"],
            "session": label("session"),
            "roots": roots,
        },
        "roots": roots,
        "epoch": 0,
        "commitment": None,
        "predecessor": None,
        "archived": [],
    }
    manifest_digest = digest("manifest", canonical_json(manifest))
    manifest["signatures"] = {str(x): sign(x, "manifest", manifest_digest) for x in range(1, 6)}

    query: dict[str, Any] = {
        "manifest": manifest_digest.hex(),
        "epoch": 0,
        "statistic": "balanced-anchor/v1",
        "alignment": "none",
        "suspect": label("suspect"),
        "files": [
            {"name": "model-1-of-2.safetensors", "sha256": label("file 1"), "size": 9_663_676},
            {"name": "größe-2-of-2.safetensors", "sha256": label("file 2"), "size": 577_012},
        ],
        "x": label("x"),
        "coordinates": coordinates,
        "carriers": coordinates,
        "covered": 2_559_000,
        "norm1": 10**9,
        "norm2": norm * norm,
        "norm4": 10**18,
        "burnt": [3, 17],
        "burnt_norm2": 10**9,
        "matching": ["tensors were found under the prefix 'module.'"],
        "created": "2026-03-01T08:00:00Z",
        "surplus": 0,
        "blocks": 64,
        "layers": None,
    }
    query_digest = digest("query", canonical_json({"format": "quorumark-query/v1", **query})).hex()
    known = {label("an earlier x"): "failed"}
    polynomial = [value, numbers("certificate", 1)[0]]  # t = 2
    partials = []
    for x in (1, 3, 5):
        partial: dict[str, Any] = {
            "manifest": manifest_digest.hex(),
            "epoch": 0,
            "point": x,
            "query": query_digest,
            "suspect": query["suspect"],
            "x": query["x"],
            "answer": str(evaluate(polynomial, x)),
            "members": [],
            "history": known,
            "blocks": {label("an earlier x"): 16},
            "ledger": label(f"ledger {x}"),
            "created": f"2026-03-01T09:0{x}:00Z",
            "sealed": "",
        }
        signed = canonical_json({"format": "quorumark-partial/v1", **partial})
        partials.append({**partial, "signature": sign(x, "partial", signed)})
    z = value / norm
    # two of 2,500 leaves were left out: L·C(L,2) choices, by the bound of the binomial by its entropy
    leaves = coordinates // 1024
    choices = math.log(leaves) + leaves * math.log(leaves) - 2 * math.log(2) - (leaves - 2) * math.log(leaves - 2)
    share = query["burnt_norm2"] / (query["burnt_norm2"] + query["norm2"])

    def charged(agreed: float) -> float:
        wide = agreed**2 + 2 * math.log(2)
        part = math.sqrt(share * (wide + 2 * choices))
        found = min(math.sqrt(agreed**2 + 2 * choices), (math.sqrt(wide) + part) / math.sqrt(1 - share))
        return math.ceil(1e6 * found) / 1e6

    low, high = 0, round(1e6 * z)  # what z is worth without the choices, in steps of 10^-6
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if charged(middle / 1e6) <= z else (low, middle)
    worth = low / 1e6
    finding = {
        "consortium": "hospitals",
        "members": 5,
        "quorum": 2,
        "query": query,
        "partials": partials,
        "names": {"1": people[0], "3": people[2], "5": people[4]},
        "corroboration": "corroborated",
        "wrong": [],
        "value": str(value),
        "z": f"{z:.6f}",
        "cosine": f"{z / math.sqrt(coordinates):.6f}",
        "log10_p": f"{math.log10(math.erfc(worth / math.sqrt(2)) / 2):.2f}",
        "log10_bound": f"{-worth * worth / 2 / math.log(10):.2f}",
        "agreed": "6",
        "alpha": "",
        "audits": {label("a challenge"): [3, 17]},
        "log10_choices": f"{math.ceil(100 * choices / math.log(10)) / 100:.2f}",
        "charged": f"{charged(6):.6f}",
        "equations": 16,
        "threshold": f"{charged(6) + 4:.6f}",
        "known": known,
        "blocks": {label("an earlier x"): 16},
        "layers": None,
        "opened": None,
        "verdict": "PASSED",
        "reasons": ["z is at least the threshold"],
        "created": "2026-03-01T10:00:00Z",
    }
    by_name = sorted(query["files"], key=lambda file: str(file["name"]))
    root = hashlib.sha256(b"".join(bytes.fromhex(f["sha256"]) for f in by_name)).hexdigest()
    payload = canonical_json(
        {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [
                *({"name": f["name"], "digest": {"sha256": f["sha256"]}} for f in query["files"]),
                {"name": "openssf-model-signing", "digest": {"sha256": root}},
            ],
            "predicateType": "urn:quorumark:certificate:v1",
            "predicate": finding,
        }
    )
    kind = "application/vnd.in-toto+json"
    signed = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    signatures = {keys[x - 1]: signing[x - 1].sign(signed) for x in (1, 3, 5)}
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": kind,
        "signatures": [{"keyid": k, "sig": base64.b64encode(s).decode()} for k, s in sorted(signatures.items())],
    }
    return {
        "members": [{"name": n, "secret": s.hex()} for n, s in zip(people, secrets, strict=True)],
        "manifest": canonical_json(manifest).decode(),
        "payload": payload.decode(),
        "digest": digest("certificate", payload).hex(),
        "envelope": json.dumps(envelope, indent=2) + "\n",
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "v1"
    folder.mkdir(parents=True, exist_ok=True)
    parts = {
        "field": field(),
        "stream": stream(),
        "shamir": shamir(),
        "codec": codec(),
        "layout": layout(),
        "certificate": certificate(),
    }
    for name, content in parts.items():
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
