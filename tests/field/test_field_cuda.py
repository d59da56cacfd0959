"""The same functions on CUDA tensors, bit for bit. Runs where there is a GPU; needs neither hypothesis nor scipy."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark import field, packing
from quorumark.errors import EncodingError, InputError

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

P = 2**61 - 1
EDGES = (0, 1, P - 1, P - 2, 2**60)
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "v1" / "field.json").read_text(encoding="utf-8"))


def gpu(values: Any) -> Any:
    return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64)).cuda()


def ints(tensor: Any) -> list[int]:
    return [int(v) for v in tensor.cpu().reshape(-1).tolist()]


def numbers(count: int, seed: int) -> list[int]:
    """Edge values first, then random ones."""
    rng = random.Random(seed)
    return [*EDGES, *(rng.randrange(P) for _ in range(count))][:count]


def both(values: list[int]) -> tuple[Any, Any]:
    return np.array(values, np.uint64), gpu(values)


SIZES = [1, 5, 1023, 1024, 1025, 100_003]


@pytest.mark.parametrize("size", SIZES)
def test_three_implementations_agree_bit_for_bit(size: int) -> None:
    x, y, z = numbers(size, 1), numbers(size, 2)[::-1], numbers(size, 3)
    nonzero = [v or 1 for v in x]
    (cx, gx), (cy, gy), (cz, gz), (cn, gn) = both(x), both(y), both(z), both(nonzero)
    a = P - 2
    expected: dict[str, list[int]] = {
        "add": [(u + v) % P for u, v in zip(x, y, strict=True)],
        "sub": [(u - v) % P for u, v in zip(x, y, strict=True)],
        "neg": [-u % P for u in x],
        "mul": [u * v % P for u, v in zip(x, y, strict=True)],
        "scale": [a * u % P for u in x],
        "axpy": [(a * u + v) % P for u, v in zip(x, y, strict=True)],
        "axpy_vector": [(w * u + v) % P for w, u, v in zip(z, x, y, strict=True)],
        "inv": [pow(u, -1, P) for u in nonzero],
        "inv_sqrt": [pow(u * u % P, (P - 3) // 4, P) for u in nonzero],
    }
    for to_list, vx, vy, vz, vn in ((lambda v: [int(e) for e in v], cx, cy, cz, cn), (ints, gx, gy, gz, gn)):
        found = {
            "add": field.add(vx, vy),
            "sub": field.sub(vx, vy),
            "neg": field.neg(vx),
            "mul": field.mul(vx, vy),
            "scale": field.scale(a, vx),
            "axpy": field.axpy(a, vx, vy),
            "axpy_vector": field.axpy(vz, vx, vy),
            "inv": field.inv(vn),
            "inv_sqrt": field.inv_sqrt(field.mul(vn, vn)),
        }
        for name, values in expected.items():
            assert to_list(found[name]) == values, name
        assert field.dot(vx, vy) == sum(u * v for u, v in zip(x, y, strict=True)) % P


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (3, 7, 13), (5, 64, 2000), (17, 16, 10_001), (2, 1000, 40)])
def test_matmul(m: int, k: int, n: int) -> None:
    a, b = np.array(numbers(m * k, 4), np.uint64).reshape(m, k), np.array(numbers(k * n, 5), np.uint64).reshape(k, n)
    a[0] = P - 1
    b[:, 0] = P - 1
    found = field.matmul(gpu(a), gpu(b)).cpu().numpy().view(np.uint64)
    assert (found == field.matmul(a, b)).all()
    for i, j in ((0, 0), (m - 1, n - 1)):
        assert int(found[i, j]) == sum(int(a[i, q]) * int(b[q, j]) for q in range(k)) % P


def test_shared_vectors() -> None:
    v = VECTORS
    x, y = gpu(v["x"]), gpu(v["y"])
    assert ints(field.mul(x, y)) == v["mul"]
    assert ints(field.axpy(v["a"], x, y)) == v["axpy"]
    assert ints(field.inv(gpu(v["nonzero"]))) == v["inv"]
    assert ints(field.inv_sqrt(gpu(v["squares"]))) == v["inv_sqrt"]
    assert field.matmul(gpu(v["left"]), gpu(v["right"])).tolist() == v["matmul"]
    assert field.dot(x, y) == v["dot"]


def test_in_place_and_unchecked() -> None:
    (cx, x), (cy, y) = both(numbers(5000, 6)), both(numbers(5000, 7))
    assert field.axpy(3, x, y, out=y) is y
    assert ints(y) == [int(v) for v in field.axpy(3, cx, cy)]
    assert field.mul(x, x, out=x, checked=False) is x
    assert ints(x) == [int(v) for v in field.mul(cx, cx)]
    x[x == 0] = 1
    expected = ints(field.inv(x))
    assert field.inv(x, out=x) is x
    assert ints(x) == expected


def test_two_dimensions_and_strides() -> None:
    c, g = both(numbers(60, 8))
    c, g = c.reshape(6, 10), g.reshape(6, 10)
    assert (field.add(g[:, ::2], g[:, 1::2]).cpu().numpy().view(np.uint64) == field.add(c[:, ::2], c[:, 1::2])).all()


def test_matmul_beyond_32_bits_of_indices() -> None:
    wide = torch.ones((22, 110_000_000), dtype=torch.int64, device="cuda")
    wide[21, -1] = 5
    found = field.matmul(torch.ones((1, 22), dtype=torch.int64, device="cuda"), wide, checked=False)
    assert found[0, -2:].tolist() == [22, 26]
    tall = torch.full((70_000, 1), 3, dtype=torch.int64, device="cuda")
    assert set(ints(field.matmul(tall, torch.full((1, 2), 7, dtype=torch.int64, device="cuda")).unique())) == {21}


def test_large_vectors_and_lazy_sums() -> None:
    size = 11_200_000
    top = torch.full((size,), P - 1, dtype=torch.int64, device="cuda")
    assert field.dot(top, top) == size % P
    assert set(ints(field.mul(top, top).unique())) == {1}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda g: field.add(g, g.int()), "y must be a CUDA tensor of int64"),
        (lambda g: field.add(g.cpu(), g), "operands must be numpy arrays of uint64 or CUDA tensors"),
        (lambda g: field.add(g, np.zeros(3, np.uint64)), "y must be a CUDA tensor like the other operands"),
        (lambda g: field.add(g, g[:2]), "x and y must have the same shape"),
        (lambda g: field.neg(g[:0]), "x must not be empty"),
        (lambda g: field.mul(g, g + P), "y must hold values in [0, p)"),
        (lambda g: field.mul(g - 9, g), "x must hold values in [0, p)"),
        (lambda g: field.axpy(P, g, g), "a must be in [0, p)"),
        (lambda g: field.inv(g * 0), "x must not hold 0"),
        (lambda g: field.inv_sqrt(g * 0 + (P - 1)), "x must hold non-zero squares"),
        (lambda g: field.add(g[:2], g[1:], out=g[1:]), "must be x itself or not overlap it"),
        (lambda g: field.add(g, g, out=g[:2]), "out must be a contiguous int64 tensor"),
        (lambda g: field.matmul(g.reshape(1, 3), g.reshape(1, 3)), "a and b must be matrices"),
    ],
)
def test_bad_input(call: Any, text: str) -> None:
    g = gpu([1, 2, 3])
    with pytest.raises(InputError) as caught:
        call(g)
    assert text in str(caught.value)
    assert ints(g) == [1, 2, 3]


@pytest.mark.parametrize("count", [1, 1000, (1 << 22) + 3])
def test_the_stream_is_the_same_on_the_gpu(count: int) -> None:
    pytest.importorskip("cryptography")
    stream = field.Stream(bytes(range(32)), "gpu")
    expected = stream.elements(count, start=5)
    out = torch.zeros(count, dtype=torch.int64, device="cuda")
    assert stream.elements(count, start=5, out=out) is out
    assert (out.cpu().numpy().view(np.uint64) == expected).all()
    stream.add_to(out, start=5)
    assert (out.cpu().numpy().view(np.uint64) == field.add(expected, expected)).all()
    stream.add_to(out, start=5, negate=True)
    assert (out.cpu().numpy().view(np.uint64) == expected).all()
    with pytest.raises(InputError, match="contiguous 1-D tensor"):
        stream.add_to(out.reshape(1, -1))
    with pytest.raises(InputError, match=f"exactly count = {count + 1}"):
        stream.elements(count + 1, out=out)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("size", SIZES)
def test_packed_vectors_are_the_same_bits(count: int, size: int) -> None:
    rng = np.random.default_rng(size)
    before = field.from_signed(rng.integers(-(1 << 42), 1 << 42, size))
    cut = max(1, size // 3)
    spans = [(slice(0, cut), 26), *([(slice(cut, size), 31)] if cut < size else [])]
    after = (field.to_signed(before) * 2.0**-40 + 2.0**-5 * rng.standard_normal(size)).astype(np.float32)
    noise = rng.integers(-(1 << 30), 1 << 30, size)
    wanted = packing.pack_update(after, before, 0.3, spans, count, noise=noise)
    there = torch.from_numpy(after).cuda(), gpu(before), torch.from_numpy(noise).cuda()
    found = packing.pack_update(there[0], there[1], 0.3, spans, count, noise=there[2])
    assert ints(found) == wanted.tolist()
    wanted[0] = P - 3
    floats, fits = packing.unpack_onto(before, wanted, spans, count)
    again, also = packing.unpack_onto(there[1], gpu(wanted), spans, count)
    assert again.cpu().numpy().tobytes() == floats.tobytes()  # type: ignore[attr-defined]
    assert also == fits
    with pytest.raises(EncodingError):
        packing.pack_update(there[0] * 1e6, there[1], 0.3, spans, count)
