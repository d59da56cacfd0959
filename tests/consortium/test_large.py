"""Models that are large for the machine: read in blocks where they do not fit, once where they do, with one result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark import field
from quorumark.consortium.records import anchor_digest
from quorumark.errors import EncodingError
from quorumark.field import parallel
from quorumark.model.layout import BFLOAT16, ModelLayout, write_safetensors
from quorumark.model.statistic import STATISTICS, canonical_form
from quorumark.model.suspect import Counted, Suspect, match_layout, non_finite, read_suspect
from quorumark.research.bench import billion
from quorumark.research.known import TensorsInMemory
from quorumark.verify.reference import Anchor, digest_of_anchor

GIB = 1 << 30
SHAPES = {"a.weight": (70, 40), "b.weight": (24, 10, 3, 3), "c.weight": (300, 8), "d.weight": (5, 33)}


@pytest.mark.slow
def test_a_billion_weights_are_verified_in_a_minute_and_four_gigabytes(tmp_path: Path) -> None:
    """On a small machine, with a share that is a sample: as CPU time, because other work may share the cores."""
    scene = billion.build(tmp_path)
    taken = {"prepare": scene.prepare()} | {home.name: scene.partial(home) for home in scene.homes}
    hashed = scene.hash_models()
    taken["combine"] = scene.combine()
    for name, one in (*taken.items(), ("sha256 of both models", hashed)):
        print(f"{name}: {one.seconds:.1f} s, {one.cpu_seconds:.1f} s of CPU, {one.peak / GIB:.2f} GiB")  # noqa: T201
    assert [one.code for one in taken.values()] == [0, 0, 0, 1]  # nobody's mark is in it
    assert max(one.peak for one in taken.values()) < 4 * GIB
    assert max(one.cpu_seconds for one in taken.values()) < 60


# --- a folder of shards in several types --------------------------------------------------------------------


def _stored(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if dtype == "BF16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(BFLOAT16)
    return values.astype({"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype])


def _folder(folder: Path, seed: int, types: str, around: dict[str, NDArray[np.float32]] | None = None) -> Path:
    """As Hugging Face writes it: shards with an index, a tensor each, in the types named one after the other."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    index: dict[str, str] = {}
    for (name, shape), dtype in zip(SHAPES.items(), types.split(), strict=True):
        values = rng.standard_normal(shape, np.float32) * np.float32(0.05)
        if around is not None:
            values = np.float32(0.4) * values + around[name]
        index[name] = f"model-{len(index) + 1:05}-of-{len(SHAPES):05}.safetensors"
        write_safetensors({name: _stored(values, dtype)}, folder / index[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def _floats(suspect: Suspect) -> dict[str, NDArray[np.float32]]:
    return {name: suspect.rows(name, 0, info.rows).astype(np.float32) for name, info in suspect.tensors.items()}


@pytest.fixture(params=["F16 BF16 F32 BF16", "BF16 F32 F16 F64"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Suspect, Suspect]:
    """A suspect and an anchor, from files."""
    anchor = read_suspect(_folder(tmp_path / "anchor", 0, "BF16 BF16 F32 F16"))
    return read_suspect(_folder(tmp_path / "suspect", 1, request.param, _floats(anchor))), anchor


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("sample", [None, 700])
def test_what_is_kept_and_what_is_walked_in_blocks_give_the_same_form(
    pair: tuple[Suspect, Suspect], statistic: str, sample: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for every tensor, for the small ones, for none; in blocks of one row, and of all; in threads."""
    suspect, model = pair
    layout = ModelLayout.of(_floats(model), max_coordinates=sample)
    anchor = Anchor(model, layout.dtype)
    floats = TensorsInMemory(_floats(suspect)), TensorsInMemory(_floats(model))  # 2^-40 changes none of these
    wanted = canonical_form(statistic, layout, *floats)
    assert wanted.norm2
    before = field.threads()
    try:
        for kept in (1 << 26, 2500, 100):
            for block in (1, 1000, 1 << 20):
                for threads in (1, 3):
                    field.set_threads(threads)
                    monkeypatch.setattr("quorumark.model.statistic.KEPT", kept)
                    monkeypatch.setattr("quorumark.model.statistic.BLOCK", block)
                    monkeypatch.setattr("quorumark.field.parallel.SMALLEST_PART", 200)
                    found = canonical_form(statistic, layout, suspect, anchor)
                    assert np.array_equal(found.x, wanted.x)
                    assert found.digest == wanted.digest
    finally:
        field.set_threads(before)


def test_one_archive_may_be_suspect_and_anchor_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads read from one compressed file, each its own tensors."""
    monkeypatch.setattr("quorumark.model.statistic.BLOCK", 5000)
    rng = np.random.default_rng(2)
    names = [f"w{i}" for i in range(4)]
    tensors = {name: rng.standard_normal((200, 500), np.float32) for name in names}
    np.savez_compressed(tmp_path / "both.npz", **tensors)  # type: ignore[arg-type, unused-ignore]
    both = read_suspect(tmp_path / "both.npz")
    layout = ModelLayout.of(tensors)
    other = dict(zip(names, names[1:] + names[:1], strict=True))  # w0 against w1, and so on
    moved = {name: tensors[other[name]] for name in names}
    wanted = canonical_form("balanced-anchor/v1", layout, TensorsInMemory(moved), TensorsInMemory(tensors))
    before = field.threads()
    try:
        field.set_threads(2)
        for _ in range(3):
            found = canonical_form("balanced-anchor/v1", layout, both, both, other)
            assert found.digest == wanted.digest
    finally:
        field.set_threads(before)


@pytest.mark.parametrize("kept", [1 << 26, 100])
def test_what_is_not_finite_is_counted_while_the_form_is_made(
    tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    layout, anchor = ModelLayout.of(tensors), TensorsInMemory({n: w.copy() for n, w in tensors.items()})
    tensors["a.weight"][3, :7] = np.nan
    tensors["c.weight"][299] = np.inf
    write_safetensors(tensors, tmp_path / "suspect.safetensors")
    suspect = read_suspect(tmp_path / "suspect.safetensors")
    monkeypatch.setattr("quorumark.model.statistic.KEPT", kept)
    counted = Counted(suspect)
    form = canonical_form("balanced-anchor/v1", layout, counted, anchor)
    assert form.digest == canonical_form("balanced-anchor/v1", layout, suspect, anchor).digest
    assert counted.counts == {"a.weight": 7, "b.weight": 0, "c.weight": 8, "d.weight": 0}
    match = match_layout(suspect, layout)
    assert non_finite(counted, match) == non_finite(suspect, match) == {"a.weight": 7, "c.weight": 8}
    (tmp_path / "suspect.safetensors").unlink()
    assert non_finite(counted, match) == {"a.weight": 7, "c.weight": 8}  # nothing was read again


# --- the anchor's digest, with reading and hashing side by side ---------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_the_anchors_digest_is_that_of_the_whole_vector(tmp_path: Path, threads: int) -> None:
    tensors = {n: np.random.default_rng(4).standard_normal(s, np.float32) for n, s in SHAPES.items()}
    layout = ModelLayout.of(tensors)
    write_safetensors(tensors, tmp_path / "anchor.safetensors")
    told: list[str] = []
    before = field.threads()
    try:
        field.set_threads(threads)
        found = digest_of_anchor(layout, read_suspect(tmp_path / "anchor.safetensors"), told.append)
        assert found == anchor_digest(layout.digest(), layout.encode(tensors))
        assert told == [f"checking the anchor, tensor {i} of 4: {name}" for i, name in enumerate(sorted(SHAPES), 1)]
        tensors["c.weight"][7, 3] = np.nan
        write_safetensors(tensors, tmp_path / "anchor.safetensors")
        with pytest.raises(EncodingError, match=r"tensor 'c\.weight' must be finite"):
            digest_of_anchor(layout, read_suspect(tmp_path / "anchor.safetensors"))
    finally:
        field.set_threads(before)


def test_items_made_ahead_come_in_order_and_end_with_who_wants_them() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for n in range(100):
            made.append(n)
            yield n

    assert list(parallel.ahead(numbers())) == list(range(100))
    made.clear()
    for n in parallel.ahead(numbers()):
        if n == 3:
            break
    assert len(made) <= 6


# --- sums that would not fit 32 bits ------------------------------------------------------------------------


def test_a_column_of_more_than_a_million_cut_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is the same, and its weights lie beyond the cut: 2^20 of ±2^11 do not fit 32 bits, two of them do."""
    monkeypatch.setattr("quorumark.model.statistic.BLOCK", 1 << 23)
    row, anchor = (np.array(w, np.float32) for w in ([2.0**20, -(2.0**-20), 3.0], [1.0, 1.5, 2.0**-9]))
    few, many = 2, (1 << 20) + 2
    before = field.threads()
    try:
        field.set_threads(1)
        forms = [_repeated(row, anchor, rows) for rows in (few, many)]
    finally:
        field.set_threads(before)
    assert forms[0].any()
    assert np.array_equal(forms[1], np.tile(forms[0][:3], many))


def _repeated(row: NDArray[np.float32], anchor: NDArray[np.float32], rows: int) -> NDArray[Any]:
    suspect, reference = ({"w": np.tile(values, (rows, 1))} for values in (row, anchor))
    layout = ModelLayout.of(reference)
    return canonical_form("balanced-anchor/v1", layout, TensorsInMemory(suspect), TensorsInMemory(reference)).x


def test_a_row_of_huge_weights_is_that_of_ones() -> None:
    """Powers of two change scales, not the form; 2^17 logarithms of almost 2^15 are 2^32 together."""
    rng = np.random.default_rng(5)
    weights, anchor = (rng.uniform(-1, 1, (1, 1 << 17)).astype(np.float32) for _ in range(2))
    layout = ModelLayout.of({"w": anchor})
    forms = [
        canonical_form(
            "balanced-anchor/v1", layout, TensorsInMemory({"w": weights * size}), TensorsInMemory({"w": anchor})
        )
        for size in (np.float32(1), np.float32(2.0**127))
    ]
    assert forms[0].norm2
    assert forms[0].digest == forms[1].digest
