"""Several numbers in one field element, against an oracle in Python ints."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quorumark import codec, field, packing
from quorumark.errors import EncodingError, InputError
from quorumark.field import P, norms
from quorumark.packing import BITS, Span

COUNTS = (1, 2, 3, 4)


def rounded(value: int, shift: int) -> int:
    """value/2^shift to nearest, ties to even: Python's own rounding of a fraction."""
    return round(Fraction(value, 1 << shift))


def oracle_pack(moves: list[int], spans: list[Span], count: int) -> list[int]:
    units = [rounded(moves[i], shift) for place, shift in spans for i in range(place.start, place.stop)]
    length = -(-len(units) // count)
    units += [0] * (count * length - len(units))
    return [sum(units[i * length + m] << (i * BITS[count]) for i in range(count)) % P for m in range(length)]


def oracle_unpack(packed: list[int], size: int, count: int) -> list[int]:
    """In units: signed remainders from the lowest part up."""
    bits, rows = BITS[count], [[] for _ in range(count)]  # type: ignore[var-annotated]
    for element in packed:
        left = element - P if element > P // 2 else element
        for i in range(count - 1):
            part = (left + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
            rows[i].append(part)
            left = (left - part) >> bits
        rows[-1].append(left)
    return [part for row in rows for part in row][:size]


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[Span], list[list[int]]]:
    """Numbers of several members, in spans with shifts of their own, whose sums stay in range."""
    count, members = draw(st.sampled_from(COUNTS)), draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    spans, start = [], 0
    for size in sizes:
        spans.append((slice(start, start + size), draw(st.integers(0, 12 if count > 1 else 0))))
        start += size
    most = ((1 << (BITS[count] - 1)) - 1) // members - 1
    shifts = _shifts(spans)
    numbers = [[draw(st.integers(-(most << shift), most << shift)) for shift in shifts] for _ in range(members)]
    return count, spans, numbers


@settings(max_examples=150, deadline=None)
@given(cases())
def test_sums_of_packed_vectors_are_the_packed_sums(case: tuple[int, list[Span], list[list[int]]]) -> None:
    count, spans, numbers = case
    size, total = len(numbers[0]), None
    for moves in numbers:
        packed = packing.pack(np.array(moves, np.int64), spans, count)
        assert packed.tolist() == oracle_pack(moves, spans, count)
        masked = field.add(packed, np.full_like(packed, P - 1))  # and a mask, which goes again
        total = masked if total is None else field.add(total, masked)
    assert total is not None
    opened = field.add(total, np.full_like(total, len(numbers)))
    found, fits = packing.unpack(opened, size, spans, count)
    expected = [
        sum(rounded(moves[i], shift) for moves in numbers) << shift
        for place, shift in spans
        for i in range(place.start, place.stop)
    ]
    assert found.tolist() == expected
    assert all(fits)
    units = oracle_unpack(opened.tolist(), size, count)
    assert units == [v >> s for v, s in zip(expected, _shifts(spans), strict=True)]


def _shifts(spans: list[Span]) -> list[int]:
    return [shift for place, shift in spans for _ in range(place.stop - place.start)]


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from([np.float32, np.float64]), st.data())
def test_a_packed_sum_goes_onto_a_model_in_one_pass_as_in_several(
    case: tuple[int, list[Span], list[list[int]]], kind: type, data: st.DataObject
) -> None:
    """The floats and what fits, whatever was opened: with one element that no members could have sent."""
    count, spans, (first, *_) = case
    before = codec.encode(np.random.default_rng(len(first)).standard_normal(len(first)))
    packed = packing.pack(np.array(first, np.int64), spans, count)
    if data.draw(st.booleans()):
        packed[data.draw(st.integers(0, packed.size - 1))] = data.draw(st.integers(0, P - 1))
    moves, fits = packing.unpack(packed, before.size, spans, count)
    found, also = packing.unpack_onto(before, packed, spans, count, kind)
    assert found.dtype == kind
    assert found.tobytes() == codec.decode(packing.move(before, moves), kind).tobytes()
    assert also == fits


@pytest.mark.parametrize("count", [2, 3, 4])
def test_an_element_with_a_part_out_of_range_says_nothing_about_its_other_parts(count: int) -> None:
    """Each tensor of 5 weights is a row: the last one's part is beyond its range, and no tensor's weight counts. Nor
    does one where the part is that of a place beyond the last weight."""
    spans = [(slice(5 * i, 5 * i + 5), 3) for i in range(count)]
    packed = np.zeros(5, np.uint64)
    packed[2] = 1 << (count * BITS[count] - 1)
    assert packing.unpack(packed, 5 * count, spans, count)[1] == [False] * count
    last = [*spans[:-1], (slice(5 * count - 5, 5 * count - 1), 3)]
    assert packing.unpack(packed, 5 * count - 1, last, count)[1] == [False] * count
    packed[2], packed[4] = 0, 1 << (count - 1) * BITS[count]  # one unit, where no weight is
    assert packing.unpack(packed, 5 * count, spans, count)[1] == [True] * count
    assert packing.unpack(packed, 5 * count - 1, last, count)[1] == [False] * (count - 1) + [True]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 2.0**12, -(2.0**12), -3 * 2.0**12, 2.0**18, -(2.0**18)])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_an_update_that_is_too_large_or_no_number_is_refused(count: int, wrong: float) -> None:
    """−3·2^12 is where the bits of a float that was rounded by 1.5·2^52 wrap."""
    after = np.zeros(9, np.float64)
    after[4] = wrong
    with pytest.raises(EncodingError):
        packing.pack_update(after, np.zeros(9, np.uint64), 1.0, [(slice(0, 9), 0)], count)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(COUNTS), st.lists(st.integers(0, P - 1), min_size=1, max_size=9), st.integers(0, 5))
def test_whatever_was_opened_is_read_as_the_oracle_reads_it(count: int, elements: list[int], less: int) -> None:
    size = max(1, count * len(elements) - min(less, count - 1))
    spans = [(slice(0, size), 0)]
    found, (fits,) = packing.unpack(np.array(elements, np.uint64), size, spans, count)
    whole = oracle_unpack(elements, count * len(elements), count)
    assert found.tolist() == whole[:size]
    assert fits == (all(abs(v) < 1 << (BITS[count] - 1) for v in whole) and not any(whole[size:]))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_largest_number_fits_and_one_unit_more_is_refused(count: int) -> None:
    most = (1 << (BITS[count] - 1)) - 1
    spans = [(slice(0, 4), 0), (slice(4, 8), 3)]
    for sign in (1, -1):
        moves = np.array([sign * most] * 4 + [sign * most << 3] * 4, np.int64)
        assert packing.unpack(packing.pack(moves.copy(), spans, count), 8, spans, count)[0].tolist() == moves.tolist()
        for place, unit in ((1, 1), (6, 8)):
            moves[place] += sign * unit
            with pytest.raises(EncodingError) as refused:
                packing.pack(moves.copy(), spans, count)
            assert refused.value.index == place
            moves[place] -= sign * unit


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_part_that_is_over_by_one_unit_wraps_and_moves_its_neighbour_by_one(count: int) -> None:
    """What a member that overflows a part on purpose gets: another number in its own part, and one unit next to it."""
    half = 1 << (BITS[count] - 1)
    low = np.zeros(count, np.int64)
    packed = np.array([half], np.uint64)  # the lowest part, one more than it may be
    found, _ = packing.unpack(packed, count, [(slice(0, count), 0)], count)
    low[0], low[1] = -half, 1
    assert found.tolist() == low.tolist()


def test_weighted_moves_are_rounded_once() -> None:
    rng = np.random.default_rng(1)
    before, after = (rng.integers(-(1 << 50), 1 << 50, 1000) for _ in range(2))
    for weight in (1.0, 0.3, 1 / 7):
        found = packing.weighted_moves(field.from_signed(after), field.from_signed(before), weight)
        exact = [Fraction(int(a) - int(b)) * Fraction(weight) for a, b in zip(after, before, strict=True)]
        assert max(abs(f - e) for f, e in zip(found.tolist(), exact, strict=True)) <= Fraction(1, 2) + Fraction(1, 4)
    assert packing.largest_weight(field.from_signed(before)) == int(np.abs(before).max())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from([1e-9, 1e-3, 30.0, 2.0e5]),
    st.integers(0, 1 << 30),
    st.integers(1, 3),
)
def test_largest_moves_in_whole_numbers(sizes: list[int], kind: type, scale: float, seed: int, threads: int) -> None:
    """By span, the empty ones too, from floats as from E of them: in Python's ints."""
    rng, stops = np.random.default_rng(seed), np.cumsum(sizes).tolist()
    spans = [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    after = np.clip(rng.standard_normal(stops[-1]) * scale, -4e5, 4e5).astype(kind)
    before = codec.encode(np.clip(rng.standard_normal(stops[-1] + 1) * scale, -4e5, 4e5))[:-1]
    moves = (
        [round(Fraction(float(v)) * 2**40) - int(b) for v, b in zip(after, field.to_signed(before), strict=True)]
        if stops[-1]
        else []
    )
    wanted = [max(map(abs, moves[span]), default=0) for span in spans]
    found = [packing.largest_moves(after, before, spans)]
    if stops[-1]:
        found.append(packing.largest_moves(codec.encode(after), before, spans))
        cuts = sorted(rng.integers(0, stops[-1] + 1, threads - 1).tolist())
        parts = np.zeros((threads, len(sizes)), np.uint64)
        for part, begin, end in zip(parts, [0, *cuts], [*cuts, stops[-1]], strict=True):
            norms.largest_moves(after, before, np.array(stops), begin, end, part)
        found.append([int(most) for most in parts.max(axis=0)])
    assert found == [wanted] * len(found)


@settings(max_examples=80, deadline=None)
@given(cases(), st.booleans(), st.sampled_from([np.float32, np.float64]), st.floats(0.01, 1))
def test_an_update_is_packed_in_one_pass_as_in_several(
    case: tuple[int, list[Span], list[list[int]]], noisy: bool, kind: type, weight: float
) -> None:
    count, spans, (first, *_) = case
    count, size = max(2, count), len(first)
    rng = np.random.default_rng(size)
    before = codec.encode(rng.standard_normal(size).astype(np.float32))
    noise = np.array([n // 4 % (1 << 20) for n in first], np.int64)
    # no more than half of the range, so that noise has room
    limits = np.array([2.0 ** (BITS[count] - 3 + shift - 40) for shift in _shifts(spans)])
    after: NDArray[Any] = (
        codec.decode(before, np.float64) + np.clip(rng.standard_normal(size), -limits, limits)
    ).astype(kind)
    shifts = [(place, max(shift, 8)) for place, shift in spans]
    moved = np.array([int(m) for m in field.to_signed(field.sub(codec.encode(after), before))])
    exact = np.rint(moved * weight + (noise if noisy else 0)).astype(np.int64)
    found = packing.pack_update(after, before, weight, shifts, count, noise=noise if noisy else None)
    several = packing.pack(exact, shifts, count)
    a, b = (packing.unpack(x, size, [(p, 0) for p, _ in shifts], count)[0] for x in (found, several))
    assert np.abs(a - b).max() <= 1  # rounded twice there
    assert (a != b).mean() <= 0.5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_noise_that_is_made_piece_by_piece_is_the_same_as_a_vector(count: int, threads: int) -> None:
    """Over many blocks and threads; where a piece has none, nothing is added, and what it holds does not matter."""
    size, rng = 400_003, np.random.default_rng(count)
    before = codec.encode(rng.standard_normal(size).astype(np.float32))
    after = (codec.decode(before) + 1e-3 * rng.standard_normal(size)).astype(np.float32)
    spans = [(slice(0, 100_001), 24), (slice(100_001, 100_001), 20), (slice(100_001, size), 26)]
    noise = rng.integers(-(1 << 30), 1 << 30, size)
    noise[150_000:370_000] = 0
    pieces = []

    def write(place: int, out: NDArray[np.int64]) -> bool:
        pieces.append((place, out.size))
        if not noise[place : place + out.size].any():
            out[:] = 1 << 40
            return False
        out[:] = noise[place : place + out.size]
        return True

    had = field.threads()
    try:
        field.set_threads(threads)
        found = packing.pack_update(after, before, 0.25, spans, count, noise=write)
        whole = packing.pack_update(after, before, 0.25, spans, count, noise=noise)
    finally:
        field.set_threads(had)
    assert found.tobytes() == whole.tobytes()
    ends = [stop for start, length in sorted(pieces) for stop in (start, start + length)]
    assert (ends[0], ends[-1], ends[1:-1:2]) == (0, size, ends[2::2]), "each place once"
    assert max(length for _, length in pieces) < size // 4


@settings(max_examples=80, deadline=None)
@given(cases(), st.booleans(), st.floats(0.01, 1), st.sampled_from([np.float32, np.float64]), st.data())
def test_tensors_give_the_same_bits(
    case: tuple[int, list[Span], list[list[int]]], noisy: bool, weight: float, kind: type, data: st.DataObject
) -> None:
    """What CUDA tensors go through (`test_field_cuda.py` does), here on the CPU: packing, and whatever was opened."""
    torch = pytest.importorskip("torch")
    from quorumark.field import parts_on_device

    count, spans, (first, *_) = case
    count, size = max(2, count), len(first)
    rng = np.random.default_rng(size)
    before = codec.encode(rng.standard_normal(size).astype(np.float32))
    limits = np.array([2.0 ** (BITS[count] - 3 + shift - 40) for shift in _shifts(spans)])
    exact = codec.decode(before, np.float64) + np.clip(rng.standard_normal(size), -limits, limits)
    after: NDArray[Any] = exact.astype(kind)
    spans = [(place, max(shift, 8)) for place, shift in spans]
    noise = np.array([n // 4 % (1 << 20) for n in first], np.int64) if noisy else None
    wanted = packing.pack_update(after, before, weight, spans, count, noise=noise)

    def tensor(x: Any) -> Any:
        return torch.from_numpy(x.view(np.int64) if x.dtype == np.uint64 else x)

    told = None if noise is None else tensor(noise)
    found, fits = parts_on_device.pack_update(tensor(after), tensor(before), weight, spans, BITS[count], count, told)
    assert fits
    assert found.numpy().tobytes() == wanted.tobytes()
    huge = tensor(after).clone()
    huge[data.draw(st.integers(0, size - 1))] = data.draw(st.sampled_from([np.nan, np.inf, 1e30]))
    assert not parts_on_device.pack_update(huge, tensor(before), weight, spans, BITS[count], count, told)[1]
    if data.draw(st.booleans()):
        wanted[data.draw(st.integers(0, wanted.size - 1))] = data.draw(st.integers(0, P - 1))
    floats, said = packing.unpack_onto(before, wanted, spans, count, kind)
    again, also = parts_on_device.move_by_parts(
        tensor(wanted), tensor(before), spans, BITS[count], count, np.dtype(kind).name
    )
    assert again.numpy().tobytes() == floats.tobytes()
    assert also == said


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(InputError):
        packing.elements(3, 5)
    with pytest.raises(InputError):
        packing.unpack(np.zeros(3, np.uint64), 8, [(slice(0, 8), 0)], 2)
    with pytest.raises(InputError):
        packing.unpack(np.full(4, P, np.uint64), 8, [(slice(0, 8), 0)], 2)
    before, spans = np.zeros(8, np.uint64), [(slice(0, 3), 0), (slice(3, 8), 5)]
    for place in range(4):
        wrong = np.zeros(4, np.uint64)
        wrong[place] = P
        with pytest.raises(InputError, match=f"{P} at index {place}"):
            packing.unpack_onto(before, wrong, spans, 2)
    for other in (np.zeros(4, np.int64), np.zeros(3, np.uint64)):
        with pytest.raises(InputError, match="packed"):
            packing.unpack_onto(before, other, spans, 2)  # type: ignore[arg-type]
