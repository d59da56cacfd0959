"""The lab's mark on a device: the same bits as the protocol's."""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark import codec, field
from quorumark.consortium.strength import Strength
from quorumark.errors import InputError
from quorumark.model.layout import ModelLayout
from quorumark.research.known import KnownKey, SeededKey, TensorsInMemory
from quorumark.research.lab import data
from quorumark.round.amplitudes import MarkState
from quorumark.round.mark import ideal_mark
from quorumark.round.movement import ideal_norms
from quorumark.round.paper import PaperScale, paper_amplitudes
from tests.kit.lab_runs import MINI, STRENGTHS

torch = pytest.importorskip("torch")
from quorumark.research.lab import models  # noqa: E402
from quorumark.research.lab.fleet import Order  # noqa: E402
from quorumark.research.lab.image_run import ImageRun  # noqa: E402
from quorumark.research.lab.mark import Mark, axis_norms, axis_sums, square_sum, weighted_sum  # noqa: E402
from quorumark.research.lab.scores import null_scores, z_scores  # noqa: E402

pytestmark = [pytest.mark.research, pytest.mark.usefixtures("one_thread")]


def test_sums_of_squares_are_exact() -> None:
    numbers = torch.randint(-(2**44) + 1, 2**44, (300_000,), generator=torch.Generator().manual_seed(0))
    assert square_sum(numbers) == sum(n * n for n in numbers.tolist())
    with pytest.raises(InputError, match="below 16"):
        square_sum(torch.tensor([1 << 44]))


def test_norms_by_rows_columns_and_taps_are_exact() -> None:
    layout = ModelLayout.of({"a": np.zeros((3, 4, 5), np.float32), "b": np.zeros((6, 7), np.float32)})
    generator = torch.Generator().manual_seed(0)
    for size, weight in ((2**30, Fraction(1, 3)), (2**44, Fraction(5, 7)), (3, Fraction(1, 2))):
        d = torch.randint(-size + 1, size, (layout.size,), generator=generator)
        exact = []
        for cube in (d[:60].view(3, 4, 5), d[60:].view(6, 7)):
            for axis in range(cube.dim()):
                for part in cube.unbind(axis):
                    square = sum(n * n for n in part.reshape(-1).tolist())
                    exact.append(isqrt(weight.numerator**2 * square // weight.denominator**2))
        sums = axis_sums(torch.stack([torch.ones_like(d), d]), layout).numpy()  # of two members
        assert axis_norms(sums[:, 1], weight).tolist() == exact


@pytest.mark.parametrize("settings", STRENGTHS, ids=lambda s: s["rule"])
def test_the_ideal_mark_is_the_protocol_s_bit_for_bit(settings: dict[str, str]) -> None:
    """Amplitudes, mark, sum and rounding on the device against `round` and `codec` on the same local results."""
    module = models.make("resnet18-tiny", 10, 3, 16, 0)
    layout, rng = ModelLayout.of(module), np.random.default_rng(0)
    model = layout.flatten(module)
    key, shares = SeededKey(layout.coordinates, 0), [Fraction(3, 7), Fraction(4, 7)]
    mark = Mark(settings, layout, torch.from_numpy(model.copy()), [key], "cpu")
    strength = Strength.of(settings, layout.coordinates)
    state = MarkState(strength, layout, "rademacher", codec.encode(model))
    scales = [PaperScale(strength, layout) for _ in shares] if settings["rule"] == "paper" else []
    marked = 0
    for number in range(1, 6):
        local = [model + np.float32(0.01) * rng.standard_normal(model.size, np.float32) for _ in shares]
        rows = torch.from_numpy(np.stack(local))
        total = weighted_sum(rows, shares)
        ours, _ = mark.apply(number, torch.from_numpy(model), total, shares, rows.__getitem__)
        y = field.add(*(codec.encode(one, float(a)) for one, a in zip(local, shares, strict=True)))
        if scales:
            each = [s.scale(codec.encode(model), codec.encode(one)) for s, one in zip(scales, local, strict=True)]
            amplitudes = paper_amplitudes(strength, layout, "rademacher", number, field.add(*each), 2)
        else:
            amplitudes = state.amplitudes(number)
        if amplitudes.marks:
            ideal_mark(y, amplitudes, key.numpy().astype(np.int64))
            assert np.array_equal(mark.amplitude_vector(amplitudes).numpy(), amplitudes.vector.astype(np.int64))
            marked += 1
        theirs = codec.decode(y)
        assert np.array_equal(ours.numpy(), theirs)
        _advanced(state, number, theirs, model, local, shares, amplitudes)
        assert mark.rho == state.rho / (1 << 32)
        model = theirs
    assert marked >= 3
    mark.close()


def _advanced(
    state: Any, number: int, after: Any, before: Any, local: list[Any], shares: list[Fraction], amplitudes: Any
) -> None:
    embedded, extra = amplitudes if amplitudes.marks else None, ()
    if getattr(state.strength, "needs_norms", False):
        results = {x: codec.encode(one) for x, one in enumerate(local)}
        extra = (ideal_norms(state.layout, codec.encode(before), results, dict(enumerate(shares))),)  # type: ignore[attr-defined, unused-ignore, assignment]
    state.advance(number, codec.encode(after), embedded, *extra)


@pytest.mark.parametrize("rule", ["rho", "paper"])
def test_a_round_waits_for_the_state_of_the_round_before(rule: str) -> None:
    """What arrives for the worker lies where the last round's did: a slow worker must not find the next round there."""
    settings = {"rule": "rho", "rho": "0.05", "dither": "0"} if rule == "rho" else {"rule": "paper", "c": "0.025"}
    settings["warmup_rounds"] = "1"  # the anchor is the first round's model
    module = models.make("cnn", 10, 3, 16, 0)
    layout, shares = ModelLayout.of(module), [Fraction(1, 2), Fraction(1, 2)]
    start = torch.from_numpy(layout.flatten(module))
    ends = []
    for slow in (False, True):
        mark = Mark(settings, layout, start, [SeededKey(layout.coordinates, 0)], "cpu")
        generator, model = torch.Generator().manual_seed(0), start
        for number in range(1, 6):
            rows = model + 0.01 * torch.randn(2, start.numel(), generator=generator)
            if slow:
                mark._worker.submit(time.sleep, 0.2)
            model, _ = mark.apply(number, model, weighted_sum(rows, shares), shares, rows.__getitem__)
        ends.append((mark.saved(), mark.rho, model))
        mark.close()
    assert ends[0][1] == ends[1][1] > 0
    assert ends[0][0]["state"] == ends[1][0]["state"]
    assert np.array_equal(ends[0][0]["anchor"], ends[1][0]["anchor"])
    assert torch.equal(ends[0][2], ends[1][2])


def test_an_update_that_is_too_large_is_told_by_the_next_who_ask(tmp_path: Path) -> None:
    """It is found in a thread, later: no checkpoint, no round and no end after it that looks as if all was well."""
    run = ImageRun(replace(MINI, strength="rho:0.05"), data.load("shapes"))
    run.round()
    run.save(tmp_path / "c.pt")
    before = (tmp_path / "c.pt").read_bytes()
    assert isinstance(run.mark, Mark)
    local = run.model.expand(4, -1).clone()
    local[2, 0] += 17.0
    run.mark.apply(2, run.model, weighted_sum(local, run.weights), run.weights, local.__getitem__)
    for ask in (lambda: run.save(tmp_path / "c.pt"), run.round, run.close):
        with pytest.raises(InputError, match="below 16"):
            ask()
    assert (tmp_path / "c.pt").read_bytes() == before
    with pytest.raises(RuntimeError, match="shutdown"):
        run.mark._worker.submit(time.sleep, 0)  # its thread has ended all the same


def test_members_are_looked_at_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All together, in parts, one by one: the same state."""
    module = models.make("cnn", 10, 3, 16, 0)
    layout, shares = ModelLayout.of(module), [Fraction(n, 15) for n in range(1, 6)]
    start = torch.from_numpy(layout.flatten(module))
    rows = start + 0.01 * torch.randn(5, start.numel(), generator=torch.Generator().manual_seed(0))
    states = []
    for together in (5, 2, 0):
        monkeypatch.setattr("quorumark.research.lab.mark._TOGETHER", together * layout.carrier_size)
        mark = Mark(
            {"rule": "rho", "rho": "0.05", "dither": "0"}, layout, start, [SeededKey(layout.coordinates, 0)], "cpu"
        )
        mark.apply(1, start, weighted_sum(rows, shares), shares, rows.__getitem__)
        states.append(mark.saved()["state"])
        mark.close()
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("large", [1, 100, 1 << 30])
def test_sums_on_a_device_find_the_rows_columns_and_taps(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel looks for a row's, column's and tap's weight is where the device has it, in any order."""
    monkeypatch.setattr("quorumark.research.lab.fleet._LARGE", large)
    nn = torch.nn
    odd = nn.Sequential(nn.Linear(7, 5), nn.Conv1d(5, 3, 4), nn.Conv2d(6, 6, (2, 3), groups=6), nn.Linear(5, 1))
    for module in (odd, models.make("resnet18-tiny", 10, 3, 16, 0)):
        layout = ModelLayout.of(module)
        order = Order(module, layout, torch.device("cpu"))
        places = [(s, place) for s, place in layout.spans("carrier") if sorted(s.shape)[-1] < s.size]
        cubes = order.cubes(layout)
        assert len(cubes) == len(places) > 2
        for (first, rows, columns, taps, tap_step, column_step), (spec, place) in zip(cubes, places, strict=True):
            assert (rows, columns, taps) == (*spec.shape[:2], spec.size // (spec.shape[0] * spec.shape[1]))
            row, column, tap = torch.meshgrid(*map(torch.arange, (rows, columns, taps)), indexing="ij")
            found = order.to_device[first + row * taps * columns + tap * tap_step + column * column_step]
            assert torch.equal(found.reshape(-1), torch.arange(place.start, place.stop))


def test_a_known_key_is_the_same_everywhere_and_hidden() -> None:
    key = SeededKey(1001, 7)
    assert np.array_equal(key.numpy(), key.signs("cpu").numpy())
    assert abs(int(key.numpy().astype(int).sum())) < 160  # five deviations
    assert not np.array_equal(key.numpy(), SeededKey(1001, 7, 1).numpy())
    assert np.array_equal(SeededKey.of_signs(key.numpy()).numpy(), key.numpy())
    assert "hidden" in repr(key)


def test_z_finds_the_key_that_was_embedded_and_no_other() -> None:
    module = models.make("resnet18-tiny", 10, 3, 16, 0)
    layout = ModelLayout.of(module)
    start = layout.flatten(module)
    key = SeededKey(layout.coordinates, 0)
    end = start + np.float32(0.01) * np.random.default_rng(0).standard_normal(start.size, np.float32)
    end[: layout.coordinates] += np.float32(0.001) * key.numpy()
    found = z_scores(layout, end, start, {"right": key, "wrong": SeededKey(layout.coordinates, 1)})
    balanced = found["balanced-anchor/v1"]
    assert balanced["right"] > 20  # about 0.1·√d = 42
    for each in found.values():
        assert abs(each["wrong"]) < 5
    anchor = TensorsInMemory.of(layout, start)
    for name, seeded in (("right", key), ("wrong", SeededKey(layout.coordinates, 1))):
        exact = KnownKey(seeded.numpy(), layout, anchor).all_z(TensorsInMemory.of(layout, end))
        assert {statistic: each[name] for statistic, each in found.items()} == pytest.approx(exact, rel=1e-9)
    null = null_scores(layout, end, start, 200)
    known = KnownKey(SeededKey(layout.coordinates, 1 << 32, 199).numpy(), layout, anchor)
    assert null[199] == pytest.approx(known.z(TensorsInMemory.of(layout, end)), rel=1e-9)
    assert abs(float(np.mean(null))) < 5 / 200**0.5
    assert 0.75 < float(np.std(null)) < 1.25  # five deviations of a standard deviation from 200
