"""quorumark.model.layout: which coordinates carry, and that models come through it unharmed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quorumark import codec
from quorumark.errors import EncodingError, InputError, LayoutError
from quorumark.model.layout import BFLOAT16, ModelLayout, TensorSpec, read_safetensors, write_safetensors
from tests.kit.oracle import P, encode, ints

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(0)


def numpy_model() -> dict[str, Any]:
    return {
        "z.weight": RNG.standard_normal((4, 3)).astype(np.float32),
        "a.weight": RNG.standard_normal((2, 3, 3, 3)).astype(np.float32),
        "a.bias": RNG.standard_normal(2).astype(np.float32),
        "token_embedding": RNG.standard_normal((7, 5)).astype(np.float32),
        "half": RNG.standard_normal((3, 3)).astype(np.float16),
        "steps": np.array(17, np.int64),
        "mask": np.array([True, False]),
        "temperature": np.array(0.5, np.float32),
    }


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Tied embeddings, batch norm, a float buffer with two dimensions, bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 6)
        self.conv = torch.nn.Conv1d(6, 8, 3)
        self.norm = torch.nn.BatchNorm1d(8)
        self.half = torch.nn.Linear(8, 6, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("positions", torch.randn(4, 4))


def test_carriers_come_first_each_part_sorted_by_name() -> None:
    layout = ModelLayout.of(numpy_model())
    assert [(s.name, s.role) for s in layout.tensors] == [
        ("a.weight", "carrier"), ("half", "carrier"), ("z.weight", "carrier"),
        ("a.bias", "plain"), ("temperature", "plain"), ("token_embedding", "plain"),
        ("mask", "buffer"), ("steps", "buffer"),
    ]  # fmt: skip
    assert (layout.carrier_size, layout.size, layout.coordinates) == (54 + 9 + 12, 75 + 2 + 1 + 35, 75)
    assert layout.carrying() == slice(0, 75)
    assert [(s.name, place.start) for s, place in layout.spans("carrier")] == [
        ("a.weight", 0),
        ("half", 54),
        ("z.weight", 63),
    ]
    assert layout.locate(63) == ("z.weight", 0)
    assert layout.locate(76) == ("a.bias", 1)


def test_globs_choose_carriers() -> None:
    model = numpy_model()
    chosen = lambda **kwargs: {s.name for s in ModelLayout.of(model, **kwargs).tensors if s.role == "carrier"}  # noqa: E731
    assert chosen(include=["a.*", "token*"], exclude=[]) == {"a.weight", "token_embedding"}
    assert chosen(exclude=["half", "?.weight"], include=["*"]) == {"token_embedding"}
    with pytest.raises(LayoutError, match="no tensor can carry"):
        chosen(include=["nothing"])
    with pytest.raises(InputError, match="include must be a sequence of globs"):
        chosen(include="a.*")


def test_a_torch_module_keeps_buffers_embeddings_and_tied_weights_out() -> None:
    layout = ModelLayout.of(Net(), exclude=())  # not by name, but by what they are
    roles = {s.name: s.role for s in layout.tensors}
    assert {name for name, role in roles.items() if role == "carrier"} == {"conv.weight", "half.weight"}
    assert roles["positions"] == "plain"
    assert roles["norm.num_batches_tracked"] == "buffer"
    # one memory, two names: the embedding under the first, its alias under the second
    assert [(s.name, s.of) for s in layout.tensors if s.role == "alias"] == [("words.weight", "head.weight")]
    assert roles["head.weight"] == "plain"


def test_tied_buffers_stay_buffers_and_tied_views_are_refused() -> None:
    shared = np.arange(5)
    model = {"w": np.ones((3, 4), np.float32), "a": shared, "b": shared}
    layout = ModelLayout.of(model)
    assert [s.role for s in layout.tensors] == ["carrier", "buffer", "buffer"]
    assert ModelLayout.from_bytes(layout.to_bytes()) == layout
    assert (layout.unflatten(layout.flatten(model), model)["b"] == shared).all()
    weights = np.ones((3, 4), np.float32)
    for view in (weights.T, weights.reshape(4, 3), weights[1:], weights[:, ::2]):
        with pytest.raises(LayoutError, match=r"'(embed|head)' and '(embed|head)' share memory"):
            ModelLayout.of({"embed": weights, "head": view})
    halves = np.ones((6, 4), np.float32)  # neighbours in one memory are fine
    assert ModelLayout.of({"a": halves[:3], "b": halves[3:]}).coordinates == 24
    flat = torch.ones(24)
    assert ModelLayout.of({"a": flat[:12].reshape(3, 4), "b": flat[12:].reshape(3, 4)}).coordinates == 24


def test_specs_that_no_model_has_are_refused() -> None:
    for spec in (
        TensorSpec("a", "I64", (2, 2), "carrier"),
        TensorSpec("a", "F32", (-2, 2), "carrier"),
        TensorSpec("a", "F32", (2, 2), "king"),  # type: ignore[arg-type]
        TensorSpec("a", "F32", (0, 2), "carrier"),
    ):
        with pytest.raises(LayoutError):
            ModelLayout((spec,))


def test_the_digest_is_stable_and_knows_every_change() -> None:
    model = numpy_model()
    layout = ModelLayout.of(model)
    shuffled = dict(reversed(list(model.items())))
    assert ModelLayout.of(shuffled).digest() == layout.digest()
    assert ModelLayout.of({k: torch.from_numpy(v) for k, v in model.items()}).digest() == layout.digest()
    different = [
        ModelLayout.of({**model, "a.bias": model["a.bias"].astype(np.float64)}),
        ModelLayout.of({**model, "a.bias": model["a.bias"][:1]}),
        ModelLayout.of({("b.bias" if k == "a.bias" else k): v for k, v in model.items()}),
        ModelLayout.of(model, exclude=["half", "*embed*"]),
        ModelLayout.of(model, max_coordinates=50),
        ModelLayout.of(model, max_coordinates=51),
    ]
    assert len({other.digest() for other in [layout, *different]}) == 1 + len(different)


def test_canonical_bytes_are_read_back_and_nothing_else_is() -> None:
    layout = ModelLayout.of(Net(), max_coordinates=40)
    data = layout.to_bytes()
    assert ModelLayout.from_bytes(data) == layout
    body = json.loads(data)
    flipped = json.loads(data)
    flipped["tensors"][0], flipped["tensors"][1] = flipped["tensors"][1], flipped["tensors"][0]
    no_role = json.loads(data)
    no_role["tensors"][0]["role"] = "king"
    integer_carrier = json.loads(data)
    integer_carrier["tensors"][0]["dtype"] = "I64"
    stray_alias = json.loads(data)
    for tensor in stray_alias["tensors"]:
        if "of" in tensor:
            tensor["of"] = "nobody"
    spoiled: list[Any] = [
        {**body, "format": "quorumark-layout/v2"}, {**body, "extra": 1}, {"tensors": []}, [], flipped, no_role,
        integer_carrier, stray_alias, {**body, "max_coordinates": 0}, {**body, "max_coordinates": "7"},
    ]  # fmt: skip
    for bad in spoiled:
        text = json.dumps(bad, sort_keys=True, separators=(",", ":")).encode()
        with pytest.raises(LayoutError):
            ModelLayout.from_bytes(text)
    raws = [b"", b"{", data + b" ", data.replace(b",", b", "), b"\xff", b"[" * 200_000]
    raws += [data.replace(b'"F32"', b"[]", 1), data.replace(b'"of":"head.weight"', b'"of":[]')]
    for raw in [*raws, data.replace(b"conv.weight", b"\\ud800")]:
        with pytest.raises(LayoutError):
            ModelLayout.from_bytes(raw)


# --- models in and out ------------------------------------------------------------------------------------


def test_numpy_models_come_back_bit_for_bit() -> None:
    model = numpy_model()
    layout = ModelLayout.of(model)
    vector = layout.flatten(model)
    assert vector.dtype == np.float32
    assert (vector[:54] == model["a.weight"].reshape(-1)).all()
    back = layout.unflatten(vector, model)
    assert list(back) == list(model)
    for name, tensor in model.items():
        assert back[name].dtype == tensor.dtype
        assert np.array_equal(back[name], tensor)
    back["steps"][...] = 0
    assert model["steps"] == 17  # buffers are copied


def test_torch_models_come_back_bit_for_bit() -> None:
    net = Net()
    layout = ModelLayout.of(net)
    back = layout.unflatten(layout.flatten(net), net)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.load_state_dict(back)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.dtype == before[name].dtype
    assert torch.equal(back["words.weight"], back["head.weight"])


def test_float64_models_keep_their_precision() -> None:
    model: dict[str, Any] = {"w": RNG.standard_normal((3, 3)), "b": RNG.standard_normal(3).astype(np.float32)}
    layout = ModelLayout.of(model)
    assert layout.dtype == np.float64
    back = layout.unflatten(layout.flatten(model), model)
    assert np.array_equal(back["w"], model["w"])
    assert back["b"].dtype == np.float32


def test_every_bfloat16_comes_back_and_rounding_is_torchs() -> None:
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    like = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    layout = ModelLayout.of({"w": like})
    back = layout.unflatten(layout.flatten({"w": like}), {"w": like})["w"]
    quiet = layout.unflatten(np.full(2**16, np.uint32(0x7F800001)).view(np.float32), {"w": like})["w"]
    assert torch.isnan(quiet).all()  # a NaN whose last bits are cut off must not become infinity
    numbers = ~torch.isnan(like)
    assert torch.equal(back.view(torch.int16)[numbers], like.view(torch.int16)[numbers])
    assert torch.isnan(back[~numbers]).all()
    values = np.concatenate([RNG.standard_normal(65000) * 10.0 ** RNG.integers(-38, 38, 65000), [3.4e38] * 536])
    vector = values.astype(np.float32)
    expected = torch.from_numpy(vector).to(torch.bfloat16).reshape(256, 256)
    assert torch.equal(layout.unflatten(vector, {"w": like})["w"], expected)


@given(st.integers(1, 400), st.integers(1, 400))
def test_the_sample_is_one_place_per_stratum(total: int, wanted: int) -> None:
    layout = ModelLayout.of({"w": np.zeros((1, total), np.float32)}, max_coordinates=wanted)
    places = layout.carrying()
    if wanted >= total:
        assert places == slice(0, total)
        assert layout.coordinates == total
        return
    assert isinstance(places, np.ndarray)
    assert layout.coordinates == len(places) == wanted
    for i, place in enumerate(places.tolist()):
        assert i * total // wanted <= place < (i + 1) * total // wanted


def test_the_sample_looks_random_is_public_and_depends_on_the_model() -> None:
    model = {"w": np.zeros((300, 1000), np.float32)}
    layout = ModelLayout.of(model, max_coordinates=100_000)
    places = layout.carrying()
    assert isinstance(places, np.ndarray)
    assert (places == ModelLayout.from_bytes(layout.to_bytes()).carrying()).all()
    # each of a stratum's three places is hit a third of the time: within 6 standard deviations, fixed seed
    hits = np.bincount(places % 3, minlength=3)
    assert np.abs(hits - 100_000 / 3).max() < 6 * math.sqrt(100_000 * 2 / 9)
    # beyond the first 65,536 the stream goes on, it does not begin again
    assert not np.array_equal(np.diff(places[:1000]), np.diff(places[65536:66536]))
    other = ModelLayout.of({"v": model["w"]}, max_coordinates=100_000).carrying()
    assert 0.3 < np.mean(places == other) < 0.37


def test_encoding_a_model_names_the_tensor_that_does_not_fit() -> None:
    model = numpy_model()
    layout = ModelLayout.of(model)
    encoded = layout.encode(model, 0.25)
    assert ints(encoded) == [encode(float(v), 0.25) for v in layout.flatten(model)]
    assert np.allclose(codec.decode(encoded) * 4, layout.flatten(model), atol=1e-6)
    model["z.weight"][1, 2] = np.nan
    out = np.full(layout.size, 9, np.uint64)
    with pytest.raises(EncodingError, match=r"^tensor 'z.weight' must be finite, but got nan at index 5$"):
        layout.encode(model, out=out)
    assert set(ints(out)) == {9}
    model["z.weight"][1, 2] = 0
    model["a.bias"][0] = -1e9
    with pytest.raises(EncodingError, match=r"^tensor 'a.bias' must be below 524288 .* got -1000000000.0 at index 0$"):
        layout.encode(model)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.pop("a.bias"), "lacks 'a.bias'"),
        (lambda m: m.update(extra=np.zeros(3, np.float32)), "also has 'extra'"),
        (
            lambda m: m.update({"a.bias": np.zeros(3, np.float32)}),
            "'a.bias' must be F32 of shape (2,), but is F32 of shape (3,)",
        ),
        (lambda m: m.update({"a.bias": np.zeros(2, np.float64)}), "but is F64"),
        (lambda m: m.update({"a.bias": np.zeros(2, np.complex64)}), "complex64, which is not supported"),
        (lambda m: m.update({"a.bias": [0.0, 1.0]}), "must be a numpy array or a torch tensor, but got list"),
        (lambda m: m.update({3: np.zeros(2)}), "must name its tensors by text"),
        (lambda m: m.clear(), "has no tensors"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_reason(change: Any, text: str) -> None:
    model: dict[Any, Any] = numpy_model()
    layout = ModelLayout.of(model)
    change(model)
    with pytest.raises((LayoutError, InputError)) as caught:
        layout.flatten(model)
    assert text in str(caught.value)


def test_vectors_of_another_length_are_refused() -> None:
    model = numpy_model()
    layout = ModelLayout.of(model)
    for vector in (np.zeros(5, np.float32), np.zeros(layout.size, np.uint64), [0.0]):
        with pytest.raises(InputError, match="vector must be a floating-point vector"):
            layout.unflatten(vector, model)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="out must be"):
        layout.flatten(model, out=np.zeros(layout.size, np.float64))
    with pytest.raises(InputError, match="coordinate must be in"):
        layout.locate(layout.size)
    with pytest.raises(InputError, match="model must be a mapping"):
        ModelLayout.of(42)


def test_many_missing_names_are_summed_up() -> None:
    model = {f"w{i}": np.zeros((2, 2), np.float32) for i in range(9)}
    layout = ModelLayout.of(model)
    with pytest.raises(LayoutError, match=r"lacks 'w1', 'w2', 'w3' and 5 more$"):
        layout.flatten({"w0": model["w0"]})


# --- safetensors ------------------------------------------------------------------------------------------


def _bits(tensor: Any) -> NDArray[np.uint8]:
    array: Any = tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return np.frombuffer(array.tobytes(), np.uint8)


def test_our_files_are_read_by_the_safetensors_library_and_theirs_by_us(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {
        "bf16": torch.randn(3, 5).to(torch.bfloat16), "f16": torch.randn(2).to(torch.float16), "f32": torch.randn(2, 2),
        "f64": torch.randn(3, dtype=torch.float64), "i64": torch.tensor(5), "u8": torch.arange(7, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]), "none": torch.empty(0, 3), "naïve name": torch.ones(1),
    }  # fmt: skip
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    write_safetensors(tensors, ours)
    save_file(tensors, theirs)
    for name, tensor in load_file(ours).items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])
    for path in (ours, theirs):
        read = read_safetensors(path)
        assert read.keys() == tensors.keys()
        assert read["bf16"].dtype == BFLOAT16
        for name, array in read.items():
            assert array.shape == tuple(tensors[name].shape)
            assert np.array_equal(np.frombuffer(array.tobytes(), np.uint8), _bits(tensors[name]))
    again = tmp_path / "again.safetensors"
    write_safetensors(read_safetensors(theirs), again)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(again).items())


def test_a_file_and_a_state_dict_give_one_layout_and_one_vector(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in Net().state_dict().items() if name != "head.weight"}
    path = tmp_path / "model.safetensors"
    write_safetensors(state, path)
    layout = ModelLayout.of(path)
    assert layout.digest() == ModelLayout.of(state).digest()
    assert np.array_equal(layout.flatten(path), layout.flatten(state))
    back = layout.unflatten(layout.flatten(path), path)
    write_safetensors(back, path)
    assert np.array_equal(layout.flatten(path), layout.flatten(state))


def test_other_byte_orders_and_odd_names(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    big = np.array([[1.0, 2.0], [3.0, 4.0]], ">f4")
    write_safetensors({"w": big}, path)
    assert read_safetensors(path)["w"].tolist() == big.tolist()
    layout = ModelLayout.of({"w": big})
    assert layout.flatten({"w": big}).tolist() == [1, 2, 3, 4]
    for name in ("__metadata__", 5):
        with pytest.raises(LayoutError, match="cannot hold"):
            write_safetensors({name: big}, path)  # type: ignore[dict-item]


def test_files_with_many_tensors_need_few_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors({f"w{i}": np.full((2, 2), i, np.float32) for i in range(1500)}, path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    tensors = read_safetensors(path)
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 5
    assert tensors["w777"].tolist() == [[777, 777], [777, 777]]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors({"w": np.ones((2, 2), np.float32)}, path)
    before = path.read_bytes()
    with pytest.raises(LayoutError, match="complex"):
        write_safetensors({"w": np.ones((2, 2), np.complex128)}, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"cannot write .*nowhere"):
        write_safetensors({"w": np.ones((2, 2), np.float32)}, tmp_path / "nowhere" / "model.safetensors")


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "truncated", "lying header", "folder"])
def test_damaged_files_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors({"w": np.ones((200, 2), np.float32)}, path)
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text("this is not a model")
    elif damage == "truncated":
        path.write_bytes(data[:-10])
    elif damage == "lying header":
        path.write_bytes(data.replace(b"[200,2]", b"[900,2]"))
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(LayoutError, match=r"model\.safetensors"):
        ModelLayout.of(path)


def test_specs_cannot_be_put_together_wrongly() -> None:
    with pytest.raises(LayoutError, match="fixed order"):
        ModelLayout((TensorSpec("b", "F32", (2,), "plain"), TensorSpec("a", "F32", (2, 2), "carrier")))
    assert P == 2**61 - 1
