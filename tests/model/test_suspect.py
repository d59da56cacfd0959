"""quorumark.model.suspect: every kind of suspect gives the same numbers, none runs code, misfits are named."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quorumark.errors import InputError, LayoutError, MissingDependencyError
from quorumark.model import tensors
from quorumark.model.layout import BFLOAT16, ModelLayout, write_safetensors
from quorumark.model.suspect import Cast, Suspect, SuspectFile, match_layout, non_finite, read_suspect
from quorumark.reasons import Reason
from tests.kit.suspects import (
    LAYOUT,
    as_checkpoint,
    as_columns,
    as_compressed_npz,
    as_files_without_index,
    as_hugging_face,
    as_index,
    as_npy,
    as_npz,
    as_old_pt,
    as_pt,
    as_safetensors,
    as_shards,
    as_torch_folder,
    as_torch_shards,
    model,
    to_torch,
    torch,
    write_index,
)

CARRIERS = {"conv.weight", "half.weight", "brain.weight", "wide.weight", "head.weight"}


def floats(tensor: NDArray[Any]) -> NDArray[Any]:
    """The oracle: bfloat16 by Python's own arithmetic on its fields."""
    if tensor.dtype != BFLOAT16:
        return tensor if tensor.dtype == np.float64 else tensor.astype(np.float32)
    out = [
        (-1) ** (b >> 15) * math.ldexp(128 + (b & 127), (b >> 7 & 255) - 134)
        for b in tensor.view("<u2").ravel().tolist()
    ]
    return np.array(out, np.float32).reshape(tensor.shape)


KINDS = [
    as_safetensors, as_shards, as_index, as_files_without_index, as_hugging_face, as_torch_folder, as_torch_shards,
    as_pt, as_old_pt, as_checkpoint, as_npz, as_compressed_npz, as_npy, as_columns,
]  # fmt: skip


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write: Callable[[Path], Path] = request.param
    return write(tmp_path)


def whole(suspect: Suspect, name: str, limit: int = 1 << 22) -> NDArray[Any]:
    parts, at = [], 0
    for begin, values in suspect.blocks(name, limit):
        assert begin == at
        assert values.flags.c_contiguous
        at += len(values)
        parts.append(values)
    assert at == suspect.tensors[name].rows
    return np.concatenate(parts)


def test_every_kind_gives_the_same_numbers(source: Path) -> None:
    suspect = read_suspect(source)
    match = match_layout(suspect, LAYOUT)
    assert match.fits, match.problems
    assert (match.stripped, match.added, match.missing, match.absent, match.extra) == ("", "", (), (), ())
    assert match.casts == {}
    assert match.names == {name: name for name in CARRIERS}
    assert match.coverage == (LAYOUT.carrier_size, LAYOUT.carrier_size)
    in_memory = read_suspect(model())
    assert suspect.tensors == in_memory.tensors
    for name, tensor in model().items():
        if name == "steps":
            continue
        expected = floats(np.atleast_1d(tensor))
        for limit in (1 << 22, 7, 1):
            for values in (whole(suspect, name, limit), whole(in_memory, name, limit)):
                assert values.dtype == expected.dtype
                np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(suspect.rows("conv.weight", 1, 3), model()["conv.weight"][1:3])
    np.testing.assert_array_equal(suspect.rows("conv.weight", 4, 5), model()["conv.weight"][4:])
    np.testing.assert_array_equal(suspect.rows("conv.weight", 0, 1), model()["conv.weight"][:1])  # and back again
    assert suspect.rows("conv.weight", 2, 2).shape == (0, 3, 2, 2)
    assert non_finite(suspect, match) == {}


def test_the_files_are_named_hashed_and_sorted(source: Path) -> None:
    suspect = read_suspect(source)
    folder = source if source.is_dir() else source.parent
    others = {"config.json", "training_args.bin"}
    paths = sorted(path for path in folder.iterdir() if path.name not in others)
    hashes = subprocess.run(["sha256sum", *paths], capture_output=True, text=True, check=True).stdout.split()[::2]
    # the name of a single file is its sender's choice, and what certificates sign is not
    names = (
        [p.name for p in paths] if len(paths) > 1 else [f"suspect{tensors.KINDS.get(paths[0].suffix, paths[0].suffix)}"]
    )
    expected = [SuspectFile(n, h, p.stat().st_size) for n, p, h in zip(names, paths, hashes, strict=True)]
    assert suspect.files == tuple(expected)
    assert suspect.memory is None
    again = read_suspect(source).digest()
    assert len(suspect.digest()) == 64
    assert again == suspect.digest()


def test_rows_are_the_callers_own() -> None:
    tensors = {"a": np.ones((3, 3), np.float32), "b": torch.ones(3, 3)}
    suspect = read_suspect(tensors)
    for name in tensors:
        suspect.rows(name, 0, 3)[:] = 5
    assert (tensors["a"] == 1).all()
    assert bool((tensors["b"] == 1).all())


def test_a_model_in_memory_has_a_digest_of_names_types_shapes_and_bytes() -> None:
    tensors = model()
    first = read_suspect(tensors)
    assert first.files == ()
    same = [dict(reversed(tensors.items())), to_torch(tensors), {n: np.array(t, order="F") for n, t in tensors.items()}]
    assert {read_suspect(other).digest() for other in same} == {first.digest()}
    assert {read_suspect(other).memory for other in same} == {first.memory}
    changed = {
        "value": tensors | {"head.weight": tensors["head.weight"] + np.float32(1)},
        "shape": tensors | {"head.weight": tensors["head.weight"].reshape(-1)},  # the same bytes
        "dtype": tensors | {"half.weight": tensors["half.weight"].view(np.int16)},  # the same bytes again
        "name": {("Head" + n[4:] if n.startswith("head") else n): t for n, t in tensors.items()},
    }
    assert len({read_suspect(other).digest() for other in changed.values()} | {first.digest()}) == 5


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    path = as_safetensors(tmp_path)
    suspect = read_suspect(path)
    write_safetensors({n: t * 2 if t.dtype == np.float32 else t for n, t in model().items()}, path)
    os.utime(path, ns=(1, 1))
    for use in (lambda: suspect.rows("head.weight", 0, 1), suspect.digest):
        with pytest.raises(LayoutError, match="changed while they were read"):
            use()


@pytest.mark.parametrize("how", ["written over", "replaced"])
def test_a_file_that_changes_and_hides_it_is_refused(tmp_path: Path, how: str) -> None:
    """Who may write to the folder lets a member read one model and hash another of the same size, and sets the time
    back."""
    path = as_safetensors(tmp_path)
    suspect, before, content = read_suspect(path), path.stat(), path.read_bytes()
    suspect.rows("head.weight", 0, 1)
    time.sleep(0.02)  # file systems tell times apart that are some milliseconds apart
    if how == "replaced":
        path.unlink()
    path.write_bytes(content[:-8] + bytes(8))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    for use in (lambda: suspect.rows("head.weight", 0, 1), suspect.digest):
        with pytest.raises(LayoutError, match="changed while they were read"):
            use()


# --- types ---


@pytest.mark.parametrize("torch_type", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("where", ["file", "memory", "pt"])
def test_every_short_float_is_read_as_torch_reads_it(tmp_path: Path, torch_type: str, where: str) -> None:
    from safetensors.torch import save_file

    bits = 8 if "8_" in torch_type else 16
    codes = torch.arange(1 << bits, dtype=torch.int32).to(torch.int16 if bits == 16 else torch.uint8)
    tensors = {"w": codes.view(getattr(torch, torch_type)).reshape(16, -1)}
    source: Any = tensors
    if where == "file":
        source = tmp_path / "w.safetensors"
        save_file(tensors, source)
    elif where == "pt":
        source = tmp_path / "w.pt"
        torch.save(tensors, source)
    values = whole(read_suspect(source), "w", limit=1 << (bits - 2))
    np.testing.assert_array_equal(values, tensors["w"].to(torch.float32).numpy())
    assert np.isnan(values).any()


def test_files_are_read_without_torch(tmp_path: Path) -> None:
    as_safetensors(tmp_path)
    (tmp_path / "x.pt").write_bytes(b"")
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from quorumark.model.suspect import read_suspect\n"
        "from quorumark.errors import MissingDependencyError\n"
        "suspect = read_suspect('ours.safetensors')\n"
        "print([float(suspect.rows(n, 0, 1).flat[0]) for n in ('half.weight', 'brain.weight')])\n"
        "try: read_suspect('x.pt')\n"
        "except MissingDependencyError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    numbers, error = done.stdout.splitlines()
    assert json.loads(numbers) == [float(floats(model()[n]).flat[0]) for n in ("half.weight", "brain.weight")]
    assert error == str(MissingDependencyError("torch", "reading a suspect from a .pt, .pth or .bin file"))


def quantised(scale: str, per_row: bool, zero: str | None = None) -> tuple[dict[str, Any], NDArray[np.float64]]:
    rng = np.random.default_rng(1)
    kind = np.int8 if zero is None else np.uint8
    q = rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, (6, 5), kind, endpoint=True)
    scales = rng.uniform(0.01, 0.1, (6, 1) if per_row else ()).astype(np.float32)
    tensors = {"l.weight": q, scale: scales}
    offset = 0.0
    if zero is not None:
        tensors[zero], offset = np.array(128, np.int32), 128.0
    return tensors, (q - offset) * scales.astype(np.float64) / (127 if scale.endswith("SCB") else 1)


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize(
    ("scale", "zero"),
    [
        ("l.weight_scale", None), ("l.weight.scale", None), ("l.weight.SCB", None), ("l.SCB", None),
        ("l.weight_scale", "l.weight_zero_point"), ("l.weight.scale", "l.weight.zero_point"),
    ],
)  # fmt: skip
def test_integers_with_scales_are_dequantised(tmp_path: Path, scale: str, zero: str | None, per_row: bool) -> None:
    tensors, expected = quantised(scale, per_row, zero)
    write_safetensors(tensors, tmp_path / "q.safetensors")
    suspect = read_suspect(tmp_path / "q.safetensors")
    layout = ModelLayout.of({"l.weight": np.zeros((6, 5), np.float32)})
    match = match_layout(suspect, layout)
    assert match.fits, match.problems
    kind = "I8" if zero is None else "U8"
    rows = "row" if per_row else "tensor"
    assert match.casts == {"l.weight": Cast("F32", kind, rows)}
    for limit in (1 << 22, 10):
        values = whole(suspect, "l.weight", limit)
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, expected, rtol=3e-7)


def test_zero_points_by_row_beside_one_scale_and_scaled_float8() -> None:
    q = np.arange(12, dtype=np.int8).reshape(3, 4)
    zeros = np.array([1, 2, 3], np.int8)
    suspect = read_suspect({"w": q, "w_scale": np.array([0.5], np.float16), "w_zero_point": zeros})
    np.testing.assert_array_equal(whole(suspect, "w", 4), (q - zeros[:, None]) / 2)
    eighth = torch.arange(8, dtype=torch.float32).reshape(2, 4).to(torch.float8_e4m3fn)
    suspect = read_suspect({"w": eighth, "w_scale": torch.tensor([[2.0], [4.0]], dtype=torch.bfloat16)})
    np.testing.assert_array_equal(whole(suspect, "w"), [[0, 2, 4, 6], [16, 20, 24, 28]])


@pytest.mark.parametrize(
    ("beside", "code", "text"),
    [
        ({}, "read.no-scale", "has the type I8 and no scale beside it"),
        (
            {"l.weight_scale": np.ones((6, 2), np.float32)},
            "read.scale-shape",
            "neither one number nor one for each row",
        ),
        ({"l.weight_scale": np.ones(5, np.float32)}, "read.scale-shape", "neither one number nor one for each row"),
        ({"l.weight_scale": np.ones(6, np.int32)}, "read.scale-type", "must be floating-point, not I32"),
        ({"l.SCB": np.ones(6, np.float32), "l.weight_format": np.array(2, np.uint8)}, "read.row-order", "row order"),
        ({"l.SCB": np.ones(6, np.float32), "l.weight_scale": np.ones(6, np.float32)}, "read.several-scales", "more"),
    ],
)
def test_integers_that_cannot_be_dequantised_do_not_fit(beside: dict[str, Any], code: str, text: str) -> None:
    suspect = read_suspect({"l.weight": np.ones((6, 5), np.int8), **beside})
    match = match_layout(suspect, ModelLayout.of({"l.weight": np.zeros((6, 5), np.float32)}))
    assert not match.fits
    assert [problem.code for problem in match.problems] == [code]
    assert match.problems[0].values["tensor"] == "l.weight"
    assert match.coverage == (0, 30)
    assert match.names == {}
    with pytest.raises(LayoutError, match=text) as caught:
        suspect.rows("l.weight", 0, 1)
    assert caught.value.code == code


def test_tensors_of_unknown_types_only_matter_where_a_carrier_is_wanted(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(2, 2), "odd": torch.ones(2, 2, dtype=torch.complex64), "thin": sparse}, path)
    suspect = read_suspect(path)
    match = match_layout(suspect, ModelLayout.of({"w": np.zeros((2, 2), np.float32)}))
    assert match.fits
    assert match.extra == ("odd", "thin")
    wanted = ModelLayout.of({"odd": np.zeros((2, 2), np.float32), "thin": np.zeros((3, 3), np.float32)})
    assert match_layout(suspect, wanted).problems == (
        Reason.of("read.no-scale", tensor="odd", type="complex64"),
        Reason.of("read.no-scale", tensor="thin", type="sparse_coo cpu"),
    )


# --- hostile files ---


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2, 2), "x": Bomb()}, "bomb.pt", _use_new_zipfile_serialization=zipped)
    for suffix in ("pt", "pth", "bin"):
        Path(f"bomb.{suffix}").write_bytes(Path("bomb.pt").read_bytes())
        with pytest.raises(LayoutError, match=r"holds more than tensors.* save its state_dict\(\) as safetensors"):
            read_suspect(f"bomb.{suffix}")
    np.save("w.npy", np.array([Bomb()], dtype=object))
    np.savez("w.npz", w=np.array([Bomb()], dtype=object))
    for name in (".", "w.npz"):
        with pytest.raises(LayoutError, match="pickled objects, which are not loaded"):
            read_suspect(name)
    assert not Path("exploded").exists()
    pickle.loads(pickle.dumps(Bomb()))  # noqa: S301 - the bomb is a real one
    assert Path("exploded").exists()


@pytest.mark.parametrize("write", [as_safetensors, as_pt, as_npz, as_compressed_npz, as_old_pt])
def test_a_truncated_file_is_refused(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    path = write(tmp_path)
    content = path.read_bytes()
    for length in (len(content) - 1, len(content) // 2, 9, 0):
        path.write_bytes(content[:length])
        with pytest.raises(LayoutError, match=path.name):
            read_suspect(path)


def test_a_damaged_npy_or_npz_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.ones((4, 4)))
    content = (tmp_path / "w.npy").read_bytes()
    headers = [
        content.replace(old, new) for old, new in ((b"(4, 4)", b"(4,-4)"), (b"}", b" "), (b"False", b"\x00alse"))
    ]
    for damaged in (content[:-1], content + b"x", content[:20], b"", *headers):
        (tmp_path / "w.npy").write_bytes(damaged)
        with pytest.raises(LayoutError, match=r"not a sound \.npy file"):
            read_suspect(tmp_path)
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("w.npy", content)
        archive.writestr("w", content)
    with pytest.raises(LayoutError, match="'w' is in it twice"):
        read_suspect(tmp_path / "w.npz")
    random = np.random.default_rng(0).standard_normal(4096)
    np.savez_compressed(tmp_path / "z.npz", w=random)
    body = bytearray((tmp_path / "z.npz").read_bytes())
    body[len(body) // 2] ^= 255
    (tmp_path / "z.npz").write_bytes(body)
    with pytest.raises(LayoutError, match="'w' cannot be read"):
        whole(read_suspect(tmp_path / "z.npz"), "w")


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({"weight_map": {"w": "../outside.safetensors"}}, "not a .safetensors file beside it"),
        ({"weight_map": {"w": "sub/a.safetensors"}}, "not a .safetensors file beside it"),
        ({"weight_map": {"w": "{outside}"}}, "not a .safetensors file beside it"),
        ({"weight_map": {"w": "sub\\a.safetensors"}}, "not a .safetensors file beside it"),
        ({"weight_map": {"w": ".."}}, "not a .safetensors file beside it"),
        ({"weight_map": {"w": "a.safetensors\0"}}, "not a .safetensors file beside it"),
        ({"weight_map": {"w": "a.safetensors", "v": "bomb.pt"}}, "not a .safetensors file beside it"),
        ({"weight_map": {"w": "a.safetensors", "v": "gone.safetensors"}}, "'gone.safetensors'.* is not there; fetch"),
        ({"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}, "'v' is not in 'a.safetensors'"),
        ({"weight_map": {"w": "c.safetensors", "y": "a.safetensors"}}, "'w' is not in 'c.safetensors'"),
        ({"weight_map": {"w": "a.safetensors", "x": "b.safetensors"}}, "'w' is in both 'a.*' and 'b.safetensors'"),
        ({"weight_map": {}}, "no tensors"),
        ({"weight_map": {"w": 5}}, "is not an index of shards"),
        ({"weight_map": {"w": ["a.safetensors"]}}, "is not an index of shards"),
        ({"weight_map": "a.safetensors"}, "is not an index of shards"),
        ({}, "is not an index of shards"),
        ([], "is not an index of shards"),
        ('{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}', "names a tensor twice"),
        ("{", "is not an index of shards"),
        ("[" * 100_000, "is not an index of shards"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, index: object, problem: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    weights = np.ones((2, 2), np.float32)
    for path in (tmp_path / "outside", folder / "sub" / "a", folder / "a"):
        write_safetensors({"w": weights}, path.with_suffix(".safetensors"))
    write_safetensors({"w": weights, "x": weights}, folder / "b.safetensors")
    write_safetensors({"y": weights}, folder / "c.safetensors")
    text = (
        index if isinstance(index, str) else json.dumps(index).replace("{outside}", f"{tmp_path}/outside.safetensors")
    )
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(LayoutError, match=problem):
        read_suspect(folder)


def test_a_folder_that_could_be_two_models_is_refused(tmp_path: Path) -> None:
    as_shards(tmp_path)
    write_safetensors(model(), tmp_path / "model.safetensors")  # Transformers would take this one
    with pytest.raises(LayoutError, match=r"more than one model: 'model.safetensors', 'model.safetensors.index.json'"):
        read_suspect(tmp_path)
    assert len(read_suspect(tmp_path / "model.safetensors.index.json").files) == 3
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(LayoutError, match="is in both"):
        read_suspect(tmp_path)
    (tmp_path / "a.safetensors.index.json").write_text("{}")
    (tmp_path / "b.safetensors.index.json").write_text("{}")
    with pytest.raises(LayoutError, match="more than one model"):
        read_suspect(tmp_path)


def test_an_index_may_list_the_one_file_it_stands_beside(tmp_path: Path) -> None:
    write_safetensors(model(), tmp_path / "model.safetensors")
    write_index(tmp_path, {"model.safetensors": model()}, "model.safetensors.index.json")
    assert match_layout(read_suspect(tmp_path), LAYOUT).fits


def test_what_is_no_model_is_said_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(LayoutError, match="save the model as safetensors"):
            read_suspect(path)
    for name in ("gone.safetensors", "gone.pt", "gone.npz", "gone.index.json"):
        with pytest.raises(LayoutError, match=f"cannot read .*{name}"):
            read_suspect(tmp_path / name)
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(LayoutError, match="holds no model"):
        read_suspect(tmp_path / "folder.npz")
    with pytest.raises(LayoutError, match="no tensors"):
        read_suspect({})
    with pytest.raises(InputError, match="numpy array or a torch tensor"):
        read_suspect({"w": [1.0]})


def test_a_checkpoint_with_two_models_or_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    weights = {"w": torch.ones(2, 2)}
    for body, problem in (
        ({"model": weights, "ema": {"w": torch.ones(2, 2)}}, "more than one model: 'ema', 'model'"),
        ({"w": torch.ones(2, 2), "old": weights}, "more than one model"),
        ({"epoch": 3}, "no mapping of names to weights"),
        ([torch.ones(2, 2)], "no mapping of names to weights"),
    ):
        torch.save(body, path)
        with pytest.raises(LayoutError, match=problem):
            read_suspect(path)
    torch.save({"run": {"model": weights}, "epoch": 3}, path)
    assert list(read_suspect(path).tensors) == ["w"]


def test_rows_and_names_out_of_range_are_refused() -> None:
    suspect = read_suspect(model())
    for begin, end in ((-1, 2), (2, 1), (0, 6)):
        with pytest.raises(InputError, match=r"within \[0, 5\)"):
            suspect.rows("conv.weight", begin, end)
    with pytest.raises(LayoutError, match="no tensor 'x'"):
        suspect.rows("x", 0, 1)
    with pytest.raises(InputError, match="limit"):
        list(suspect.blocks("conv.weight", 0))


# --- matching ---


WORDS = ["module", "model", "_orig_mod", "base_model", "transformer"]
PREFIXES = st.lists(st.sampled_from(WORDS), max_size=4).map(lambda words: "".join(f"{word}." for word in words))
NAMES = st.lists(
    st.builds(
        lambda prefix, rest: prefix + rest,
        st.sampled_from(["", "", "", "model.", "transformer."]),
        st.sampled_from(["h.0.w", "h.1.w", "h.2.w", "head", "mlp.up", "mlp.down", "model"]),
    ),
    min_size=2,
    max_size=7,
    unique=True,
)


@given(NAMES, PREFIXES, PREFIXES)
def test_one_prefix_rule_joins_all_names(names: list[str], theirs: str, ours: str) -> None:
    """Each tensor has its own shape, so that a wrong join would not fit."""
    plain = {name: np.full((i + 1, 2), i, np.float32) for i, name in enumerate(sorted(names))}
    layout = ModelLayout.of({ours + name: t for name, t in plain.items()})
    suspect = read_suspect({theirs + name: t for name, t in plain.items()} | {"other": np.ones(1)})
    match = match_layout(suspect, layout)
    assert match.fits, match.problems
    assert match.names == {ours + name: theirs + name for name in plain}
    assert match.extra == ("other",)
    for carrier, name in match.names.items():
        assert match.added + name.removeprefix(match.stripped) == carrier
    assert (match.stripped + match.added == "") == (theirs == ours)


def test_prefixes_are_named() -> None:
    def prefix(theirs: str, ours: str) -> tuple[str, str]:
        layout = ModelLayout.of({f"{ours}{i}.w": np.ones((2, 2)) for i in range(3)})
        match = match_layout(read_suspect({f"{theirs}{i}.w": np.ones((2, 2)) for i in range(3)}), layout)
        return match.stripped, match.added

    assert prefix("", "") == ("", "")
    assert prefix("_orig_mod.module.", "") == ("_orig_mod.module.", "")
    assert prefix("base_model.model.", "model.") == ("base_model.", "")
    assert prefix("", "transformer.") == ("", "transformer.")
    assert prefix("module.", "model.") == ("module.", "model.")


def test_a_prefix_is_one_for_all_names_and_found_by_majority() -> None:
    one = np.ones((2, 2), np.float32)
    layout = ModelLayout.of({name: one.copy() for name in "abc"})
    match = match_layout(read_suspect({"module.a": one, "module.b": one, "c": one}), layout)
    assert match.stripped == "module."
    assert match.missing == ("c",)
    assert match.extra == ("c",)
    assert match.coverage == (8, 12)
    assert match.problems == (Reason.of("read.carriers-missing", missing=1, carriers=3, some=("c",)),)
    # the exact names win over a few copies under another one
    assert match_layout(read_suspect({"a": one, "b": one, "c": one, "module.a": one}), layout).names["a"] == "a"
    # a word that most names begin with is a wrapper, whatever it is; one of some names is none
    found = match_layout(read_suspect({f"student.{n}": one for n in "abc"}), layout)
    assert found.names == {n: f"student.{n}" for n in "abc"}
    assert found.stripped == "student."
    some = {"student.a": one} | {f"other.{k}": one for k in range(3)}
    assert match_layout(read_suspect(some), layout).missing == ("a", "b", "c")


@pytest.mark.parametrize(
    ("kept", "others"),
    [
        ("parametrizations.weight.original1", ["parametrizations.weight.original0"]),
        ("weight_v", ["weight_g"]),
        ("parametrizations.weight.original", []),
        ("weight_orig", ["weight_u", "weight_v"]),
    ],
)
def test_a_weight_stands_for_what_a_parametrisation_keeps(kept: str, others: list[str]) -> None:
    one, two = np.ones((4, 3), np.float32), np.ones((2, 4), np.float32)
    parametrised = {f"a.{kept}": one, **{f"a.{other}": np.ones(4, np.float32) for other in others}, "b.weight": two}
    exported = {"a.weight": one, "b.weight": two}
    for ours, theirs, name in ((parametrised, exported, "a.weight"), (exported, parametrised, f"a.{kept}")):
        match = match_layout(read_suspect({f"net.{n}": t for n, t in theirs.items()}), ModelLayout.of(ours))
        assert match.fits, match.problems
        assert f"net.{name}" in match.names.values()
    # where both are there, each is what it is called
    both = read_suspect(parametrised | exported)
    assert match_layout(both, ModelLayout.of(parametrised)).names[f"a.{kept}"] == f"a.{kept}"


def test_two_names_for_one_carrier_are_a_problem() -> None:
    one = np.ones((2, 2), np.float32)
    layout = ModelLayout.of({name: one.copy() for name in "ab"})
    copies = {f"{prefix}{name}": one for name in "ab" for prefix in ("module.", "model.")}
    match = match_layout(read_suspect(copies), layout)
    assert match.problems == tuple(
        Reason.of("read.carrier-ambiguous", tensor=name, candidates=2, some=(f"model.{name}", f"module.{name}"))
        for name in "ab"
    )
    assert match.coverage == (0, 8)


def test_only_carriers_must_fit() -> None:
    tensors: dict[str, Any] = model()
    tensors["head.weight"] = tensors["head.weight"].astype(np.float16)
    del tensors["conv.bias"], tensors["steps"]
    tensors |= {"temperature": np.ones(7), "lora.weight": np.ones((2, 2))}
    match = match_layout(read_suspect(tensors), LAYOUT)
    assert match.fits
    assert match.absent == ("conv.bias", "steps")
    assert match.extra == ("lora.weight",)
    assert match.casts == {"head.weight": Cast("F32", "F16", "")}


def test_what_does_not_fit_is_said() -> None:
    tensors: dict[str, Any] = model()
    del tensors["conv.weight"]
    tensors["head.weight"] = tensors["head.weight"].T
    tensors["half.weight"] = tensors["half.weight"][:5]
    tensors["wide.weight"] = np.ones((3, 4), np.int64)
    match = match_layout(read_suspect(tensors), LAYOUT)
    assert not match.fits
    assert match.problems == (
        Reason.of("read.carriers-missing", missing=1, carriers=5, some=("conv.weight",)),
        Reason.of("read.carrier-shape", tensor="half.weight", shape=(5, 3), wanted=(7, 3)),
        Reason.of("read.carrier-transposed", tensor="head.weight", shape=(9, 2), wanted=(2, 9)),
        Reason.of("read.no-scale", tensor="wide.weight", type="I64"),
    )
    assert match.names == {"brain.weight": "brain.weight"}
    assert match.coverage == (24, LAYOUT.carrier_size)


def test_a_foreign_model_fits_nowhere() -> None:
    match = match_layout(read_suspect({"x": np.ones((3, 3))}), LAYOUT)
    assert set(match.missing) == CARRIERS
    assert match.coverage == (0, LAYOUT.carrier_size)


def test_an_alias_stands_in_for_its_original() -> None:
    tied = np.arange(12, dtype=np.float32).reshape(3, 4)
    layout = ModelLayout.of({"a.weight": tied, "b.weight": tied, "c.weight": tied, "d": np.ones((2, 2))})
    copies = {f"{name}.weight": tied.copy() for name in "abc"}
    d = {"d": np.ones((2, 2))}
    assert match_layout(read_suspect(copies | d), layout).names["a.weight"] == "a.weight"
    match = match_layout(read_suspect({"module.d": d["d"], "module.b.weight": tied.copy()}), layout)
    assert match.fits
    assert match.names["a.weight"] == "module.b.weight"
    assert (match.absent, match.extra) == ((), ())
    del copies["a.weight"]
    found = match_layout(read_suspect(copies | d), layout).problems
    some = ("b.weight", "c.weight")
    assert found == (Reason.of("read.carrier-ambiguous", tensor="a.weight", candidates=2, some=some),)
    assert match_layout(read_suspect(d), layout).missing == ("a.weight",)


def test_nan_by_tensor(tmp_path: Path) -> None:
    tensors = model()
    tensors["conv.weight"][1, 0, 0, 0], tensors["conv.weight"][4, 2, 1, 1] = np.nan, np.inf
    tensors["brain.weight"].view("<u2")[2, 3] = 0x7FC0
    tensors["conv.bias"][0] = np.nan  # carries nothing
    write_safetensors({f"module.{name}": t for name, t in tensors.items()}, tmp_path / "x.safetensors")
    suspect = read_suspect(tmp_path / "x.safetensors")
    assert non_finite(suspect, match_layout(suspect, LAYOUT)) == {"conv.weight": 2, "brain.weight": 1}
    assert np.isnan(suspect.rows("module.conv.weight", 1, 2)[0, 0, 0, 0])


def test_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    net = transformers.GPT2LMHeadModel(config)
    layout = ModelLayout.of(net)
    net.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    net.transformer.save_pretrained(tmp_path / "base")
    for folder, prefix in (("shards", ""), ("base", "transformer.")):
        suspect = read_suspect(tmp_path / folder)
        match = match_layout(suspect, layout)
        assert match.fits, match.problems
        assert (match.stripped, match.added) == ("", prefix)
        for carrier, name in match.names.items():
            np.testing.assert_array_equal(whole(suspect, name), net.state_dict()[carrier].numpy())
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()


# --- memory ---

WALK = """
import sys
import numpy as np
from quorumark.model.layout import ModelLayout
from quorumark.model.suspect import SuspectFile
from quorumark.model.suspect import match_layout, non_finite, read_suspect
if sys.argv[1].endswith(".pt"):
    import torch
def peak(): return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
before = peak()
suspect = read_suspect(sys.argv[1])
layout = ModelLayout.from_bytes(sys.stdin.buffer.read())
match = match_layout(suspect, layout)
assert match.fits and match.coverage[0] == layout.carrier_size
assert len(suspect.files) == 1
assert non_finite(suspect, match) == {"a": 1}
print(peak() - before)
"""


@pytest.mark.parametrize("kind", ["safetensors", "pt", "npz"])
def test_a_large_model_is_walked_in_little_memory(tmp_path: Path, kind: str) -> None:
    """400 MB in one tensor and 400 MB in another, mostly holes on the disk; blocks are 16 MB."""
    rows, path = 100_000, tmp_path / f"big.{kind}"
    names = ("a", "b")
    if kind == "safetensors":
        each = rows * 4000
        header = {n: {"dtype": "F32", "shape": [rows, 1000], "data_offsets": [i * each, (i + 1) * each]}
                  for i, n in enumerate(names)}  # fmt: skip
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(file.tell() + 2 * each)
            file.seek(8 + len(text) + each // 2)
            file.write(np.float32(np.nan).tobytes())
    else:
        big = {name: np.zeros((rows, 1000), np.float32) for name in names}
        big["a"][rows // 2, 0] = np.nan
        if kind == "npz":
            np.savez_compressed(path, **big)  # type: ignore[arg-type]
        else:
            torch.save(to_torch(big), path)
    layout = ModelLayout.of({name: np.broadcast_to(np.zeros((), np.float32), (rows, 1000)) for name in names})
    done = subprocess.run(
        [sys.executable, "-c", WALK, path], input=layout.to_bytes(), capture_output=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    grown = float(done.stdout)
    assert grown < {"safetensors": 64, "npz": 128, "pt": 256}[kind]
