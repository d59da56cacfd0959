"""A server with one helping member: it kills units of a ReLU network and reads the mark of weights that stand still.

The helper poisons its own upload, so that rows of a layer, or the biases of units, move where no input reaches them any
more. In the next round nobody's training moves those weights, and the opened sum shows S ⊙ τ there. Everything else is
honest: sums are checked, one sum per state is opened, and messages go through the real stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark import field
from quorumark.errors import RoundError
from quorumark.round.amplitudes import HALVINGS, MarkState
from quorumark.round.dither import add_dither, dither_stream
from quorumark.round.mark import weights
from quorumark.round.movement import upload_norms
from tests.kit.drawn import Drawn
from tests.kit.flowers import Consortium, Model
from tests.kit.helpers import HELPER, MEMBERS, THRESHOLD, key_of
from tests.kit.opened import summed
from tests.kit.ways import WAYS, ways

INPUTS, UNITS, CLASSES = 40, 128, 6
WARM = 6  # honest rounds before the attack
ATTACKED = 12  # units
NONE = {"rule": "rho", "rho": "0.1", "c_max": "0.03", "dither": "0"}


# --- a small network --------------------------------------------------------------------------------------


def network() -> Model:
    rng = np.random.default_rng(1)

    def layer(rows: int, columns: int) -> NDArray[Any]:
        return (rng.standard_normal((rows, columns)) * sqrt(2 / columns)).astype(np.float32)

    model: Model = {"a.weight": layer(UNITS, INPUTS), "b.weight": layer(CLASSES, UNITS)}
    return model | {"a.bias": np.full(UNITS, 0.1, np.float32), "b.bias": np.zeros(CLASSES, np.float32)}


def images(x: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Pixels from 0 to 1 around a pattern for each class, which all members share."""
    patterns = np.random.default_rng(2).random((CLASSES, INPUTS))
    rng = np.random.default_rng([3, x])
    labels = rng.integers(0, CLASSES, 200)
    noisy = patterns[labels] + 0.25 * rng.standard_normal((200, INPUTS))
    return np.clip(noisy, 0, 1).astype(np.float32), labels


def hidden(model: Model, inputs: NDArray[Any]) -> NDArray[Any]:
    return np.maximum(inputs @ model["a.weight"].T + model["a.bias"], 0)  # type: ignore[no-any-return]


def accuracy(model: Model, x: int = 99) -> float:
    inputs, labels = images(x)
    found = hidden(model, inputs) @ model["b.weight"].T + model["b.bias"]
    return float(np.mean(found.argmax(1) == labels))


def train(model: Model, x: int, seed: int, rate: float) -> Model:
    """An epoch of SGD. A unit that no image reaches has a gradient of exactly 0."""
    rng, (inputs, labels) = np.random.default_rng(seed & (1 << 63) - 1), images(x)
    made = {name: tensor.copy() for name, tensor in model.items()}
    for batch in np.array_split(rng.permutation(len(labels)), 12):
        shown = hidden(made, inputs[batch])
        logits = shown @ made["b.weight"].T + made["b.bias"]
        logits -= logits.max(1, keepdims=True)
        wrong = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        wrong[np.arange(len(batch)), labels[batch]] -= 1
        wrong /= len(batch)
        back = (wrong @ made["b.weight"]) * (shown > 0)
        step = np.float32(0.05 * rate)
        made["b.weight"] -= step * (wrong.T @ shown)
        made["b.bias"] -= step * wrong.sum(0)
        made["a.weight"] -= step * (back.T @ inputs[batch])
        made["a.bias"] -= step * back.sum(0)
    return made


# --- the attack -------------------------------------------------------------------------------------------

Poison = Callable[[Model, Model, "Helped"], Model]


class Helped(Drawn):
    """Member HELPER, where it is drawn, sends what `poison` makes of the model and of its honest result."""

    poison: Poison | None = None

    def node(self, x: int) -> Any:
        """The helper says that its norms are a fifth larger, or rows that it moves far would count as moved alike."""
        return _Boasting(super().node(x)) if self.poison is not None and x == HELPER else super().node(x)

    def trained(self, x: int, model: Model, reply: dict[str, Any]) -> Model:
        made = train(model, x, reply["seed"], reply["rate"])
        return self.poison(model, made, self) if self.poison is not None and x == HELPER else made

    def patiently(self) -> int:
        """A round, tried again where the mark was too strong for the members; how often it was given up."""
        for tries in range(4):
            try:
                self.round()
            except RoundError:
                continue
            return tries
        raise AssertionError("a mark that was halved three times is none")

    @property
    def share(self) -> float:
        """The helper's part of the sum: what it wants to move it must move so much further."""
        return float(weights(self.server.manifest, self.server.cohort)[HELPER])

    @property
    def state(self) -> MarkState:
        return self.server.history.mark


class _Boasting:
    def __init__(self, node: Any) -> None:
        self._node = node

    def handle(self, *message: Any) -> Any:
        def boasting(honest: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *update: honest(*update) * 6 // 5

        with mock.patch("quorumark.round.member.upload_norms", boasting(upload_norms)):
            return self._node.handle(*message)


def kill_rows(units: list[int]) -> Poison:
    """All weights of these rows negative, and no pixel is; no further than that, or the mark would be too strong."""

    def poison(model: Model, made: Model, run: Helped) -> Model:
        made["a.weight"][units] = model["a.weight"][units] + (-0.02 - model["a.weight"][units]) / run.share
        return made

    return poison


def push_rows(units: list[int]) -> Poison:
    """Down, a little in each round: an optimiser that adapts makes large steps of it, and a larger jump would make the
    mark too strong for the others, who then leave it out."""

    def poison(model: Model, made: Model, run: Helped) -> Model:
        learnt = np.sqrt(np.mean((made["a.weight"] - model["a.weight"]) ** 2))
        made["a.weight"][units] = model["a.weight"][units] - np.float32(20 * learnt / run.share)
        return made

    return poison


def kill_by_bias(units: list[int]) -> Poison:
    def poison(model: Model, made: Model, run: Helped) -> Model:  # noqa: ARG001
        made["a.bias"][units] -= np.float32(20 / run.share)
        return made

    return poison


def creep_by_bias(units: list[int]) -> Poison:
    """As far as a bias may move without a jump, down, until no image of the helper's comes near these units."""

    def poison(model: Model, made: Model, run: Helped) -> Model:
        place = [spec.name for spec, _ in run.world.layout.spans("plain")].index("a.bias")
        step = 0.9 * 4 * run.state._pace.plain[place] / 2**40
        made["a.bias"][units] = model["a.bias"][units] - np.float32(step / run.share)
        return made

    return poison


def creep_by_rows(units: list[int]) -> Poison:
    """The same through the carrier's rows, and as far as its columns allow."""

    def poison(model: Model, made: Model, run: Helped) -> Model:
        rows, columns = (np.array(axis, float) / 2**40 for axis in run.state._pace.axes[:2])
        step = 0.8 * 4 * np.minimum(np.maximum(rows[units], rows.mean()), columns.mean() * sqrt(UNITS / len(units)))
        made["a.weight"][units] = model["a.weight"][units] - (step[:, None] / run.share).astype(np.float32)
        return made

    return poison


def are_dead(model: Model, units: list[int], count: int = MEMBERS) -> float:
    """The share of these units that no image of any member reaches."""
    reached = [hidden(model, images(x)[0])[:, units].any(0) for x in range(1, count + 1)]
    return float(1 - np.any(reached, axis=0).mean())


@dataclass
class Seen:
    """What the server has read in one round, over the weights of the attacked units and over all carriers."""

    dead: float  # the share of the attacked units that no member's image reaches
    marked: float  # the share of the attacked weights with a mark
    right: float  # of these, the share whose signs are read right
    signs: float  # of all attacked weights; where nothing is to be seen, half
    cosine: float
    everywhere: float
    silenced: float
    share: float = 0.0  # the helper's part of the sum, and of its noise


def read(run: Helped, key: NDArray[np.int64], units: list[int]) -> Seen:
    """One more round, honest, whose sum the server compares with the model before it; the helper tells its noise."""
    layout, history = run.world.layout, run.server.history
    run.server.advance(run.model)  # accepts the last sum
    before, state = history.mark.model, history.state
    silenced = history.mark.silenced
    dead = are_dead(dict(run.model), units, run.world.count)
    poison, run.poison = run.poison, None
    run.patiently()
    run.poison = poison
    amplitudes = history.amplitudes(run.server._turn.halvings)
    opened, weight = summed(run.server), weights(run.server.manifest, run.server.members).get(HELPER, Fraction(0))
    if history.strength.dither and weight:
        person, own = run.world.home(HELPER)[0].identity(run.world.home(HELPER)[1]), np.zeros(layout.size, np.uint64)
        add_dither(own, amplitudes, history.strength.dither, weight, dither_stream(person, state))
        opened = field.sub(opened, own)
    moved = field.to_signed(field.sub(opened, before))[: layout.carrier_size].astype(float)
    scale = amplitudes.vector.astype(float)
    for place, shift in history.mark.spans(run.server.level):
        part = moved[place]
        part[np.abs(part) < MEMBERS << shift] = 0  # what rounding leaves of nothing
    rows = np.isin(np.arange(UNITS * INPUTS) // INPUTS, units)
    here = np.concatenate([rows, np.isin(np.arange(CLASSES * UNITS) % UNITS, units)])
    right = np.where(moved == 0, 0.5, np.sign(moved) == key)
    seen = here & (scale > 0)
    parts = (moved / np.where(scale > 0, scale, 1) * key)[seen]
    cosine = float(parts.sum() / sqrt(parts.size * (parts**2).sum())) if seen.any() else 0.0
    return Seen(
        dead,
        float(seen.sum() / here.sum()),
        float(right[seen].mean()) if seen.any() else 0.5,
        float(right[here].mean()),
        cosine,
        float(right.mean()),
        silenced,
        float(weight),
    )


JUMPED = {name: WAYS[name] for name in ("plain", "cohort")} | {"fedavgm": {"optimiser": "fedavgm:server_momentum=0.9"}}
PUSHED = {  # rates with which units die in a few rounds
    "fedadam": {"optimiser": "fedadam:eta=0.05"},
    "fedyogi": {"optimiser": "fedyogi:eta=0.05"},
    "fedadagrad": {"optimiser": "fedadagrad:eta=0.2"},
}
HELPED = JUMPED | PUSHED


def consortium(folder: Path, way: str = "plain", **nets: str) -> Consortium:
    policy = {"z": "6", "sums": "checked", **HELPED[way]}
    count = 8 if "cohort" in policy else MEMBERS
    return Consortium.deal(folder, count, THRESHOLD, model=network(), strength={**NONE, **nets}, policy=policy)


def attack(
    folder: Path, poison: Callable[[list[int]], Poison], way: str = "plain", warm: int = WARM, **nets: str
) -> Seen:
    """Honest rounds; poisoned ones until the units are dead, which an optimiser's small steps draw out; one in which
    the server reads, at once: what the last sum did not move has no mark."""
    world = consortium(folder, way, **nets)
    run, units = Helped(world), list(range(ATTACKED))
    for _ in range(warm):
        run.round()
    run.poison = poison(units)
    for _ in range(60):
        run.patiently()
        if HELPER in run.server.members and are_dead(dict(run.model), units, world.count) == 1:
            break
    assert not run.refused or way != "plain"
    return read(run, key_of(world), units)


@dataclass
class Crept:
    """What the patient helper needs (rounds, and rounds given up because the mark was too strong) and gets."""

    rounds: int
    given_up: int
    rested: int
    seen: Seen
    accuracy: tuple[float, float]


def creep(folder: Path, poison: Callable[[list[int]], Poison], count: int, most: int = 25, **nets: str) -> Crept:
    """Never beyond the limit of a jump, until the units are dead (or the rounds are over); then the server reads."""
    world = consortium(folder, **nets)
    run, units, found = Helped(world), list(range(count)), Crept(0, 0, 0, Seen(0, 0, 0, 0, 0, 0, 0), (0, 0))
    for _ in range(WARM):
        run.round()
    before, run.poison = accuracy(dict(run.model)), poison(units)
    while found.rounds < most and are_dead(dict(run.model), units) < 1:
        run.server.advance(run.model)
        found.rounds += 1
        found.rested += run.server.silenced > 0
        found.given_up += run.patiently()
    found.seen, found.accuracy = read(run, key_of(world), units), (before, accuracy(dict(run.model)))
    return found


# --- what it reads ----------------------------------------------------------------------------------------

FEW = pytest.mark.parametrize("way", ways("plain", "cohort", of=JUMPED))
ADAPTIVE = pytest.mark.parametrize("way", ways("fedadam", of=PUSHED))
LEAST = {"fedavgm": 0.3}  # of the attacked weights, so many have a mark; half without an optimiser. Fewer by bias
SOON = 2  # honest rounds before the helper pushes: while the others' updates still hide a mark of what it moves
ATTACKS = pytest.mark.parametrize("poison", [kill_rows, pytest.param(kill_by_bias, marks=pytest.mark.slow)])


@ATTACKS
@FEW
def test_without_nets_the_helper_shows_all_signs_of_the_units_that_it_kills(
    tmp_path: Path, poison: Any, way: str
) -> None:
    is_all_shown(attack(tmp_path, poison, way), LEAST.get(way, 0.5))


def is_all_shown(seen: Seen, least: float = 0.5) -> None:
    assert seen.dead == 1
    assert seen.marked > least
    assert seen.right >= 0.99
    assert seen.cosine > 0.99


@ADAPTIVE
def test_nor_does_an_optimiser_that_adapts_hide_the_signs_of_units_that_the_helper_pushes(
    tmp_path: Path, way: str
) -> None:
    """Such weights keep an r above its floor, and what the helper moved last has a mark in the next round."""
    is_all_shown(attack(tmp_path, push_rows, way, SOON))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fedadam", "fedyogi"])
def test_and_continuity_does_not_stop_it(tmp_path: Path, way: str) -> None:
    """What is left, as docs/strength.md says it: such a helper is a patient one. FedAdagrad's first steps are jumps."""
    seen = attack(tmp_path, push_rows, way, SOON, continuity="4")
    assert seen.silenced == 0
    is_all_shown(seen)


@pytest.mark.slow
def test_under_fedadam_a_jump_costs_the_helper_the_mark(tmp_path: Path) -> None:
    """Why it pushes: what jumps gets a mark that is too strong for the others, who have it halved until it is gone."""
    run, units = Helped(consortium(tmp_path, "fedadam")), list(range(ATTACKED))
    for _ in range(WARM):
        run.round()
    assert run.server.history.amplitudes(run.server._turn.halvings).marks
    run.poison = kill_rows(units)
    assert [run.patiently() for _ in range(6)][-2:] == [HALVINGS] * 2
    assert not run.server.history.amplitudes(run.server._turn.halvings).marks
    assert are_dead(dict(run.model), units) < 1


@ATTACKS
def test_with_continuity_a_jump_shows_nothing(tmp_path: Path, poison: Any) -> None:
    seen = attack(tmp_path, poison, continuity="4")
    assert (seen.dead, seen.silenced) == (1, 1)
    assert (seen.marked, seen.signs) == (0, 0.5)
    assert abs(seen.everywhere - 0.5) < 4 * 0.5 / sqrt(UNITS * (INPUTS + CLASSES))


@ATTACKS
@pytest.mark.parametrize("kappa", [3, pytest.param(10, marks=pytest.mark.slow)])
@FEW
def test_with_dither_alone_it_shows_what_the_noise_leaves(tmp_path: Path, poison: Any, kappa: int, way: str) -> None:
    """The helper knows its own part of the noise: κ² of it is left times the others' weight."""
    is_what_noise_leaves(attack(tmp_path, poison, way, dither=str(kappa)), kappa, LEAST.get(way, 0.5))


@pytest.mark.slow
@ADAPTIVE
def test_so_it_does_under_an_optimiser_that_adapts(tmp_path: Path, way: str) -> None:
    is_what_noise_leaves(attack(tmp_path, push_rows, way, SOON, dither="3"), 3)


def is_what_noise_leaves(seen: Seen, kappa: int, least: float = 0.5) -> None:
    left = kappa * sqrt(1 - seen.share)
    count = seen.marked * ATTACKED * (INPUTS + CLASSES)
    assert seen.dead == 1
    assert seen.marked > least
    assert abs(seen.cosine - 1 / sqrt(1 + left**2)) < 4 / sqrt(count)
    assert abs(seen.right - NormalDist().cdf(1 / left)) < 4 * 0.5 / sqrt(count)


def test_silencing_rows_alone_would_show_the_next_layer(tmp_path: Path) -> None:
    """Why a round rests after many jumps: units that die stop the columns of the next layer, which did not jump."""
    with mock.patch("quorumark.round.continuity._FEW", 0):
        seen = attack(tmp_path, kill_rows, continuity="4")
    assert 0 < seen.marked < CLASSES / (INPUTS + CLASSES) + 0.01
    assert seen.right >= 0.99


@pytest.mark.slow
def test_a_patient_helper_is_not_stopped_by_continuity_but_by_dither(tmp_path: Path) -> None:
    """What is left, as docs/strength.md says it."""
    found = []
    for kappa in ("0", "3"):
        (tmp_path / kappa).mkdir()
        found.append(creep(tmp_path / kappa, creep_by_rows, ATTACKED, continuity="4", dither=kappa))
        assert (found[-1].seen.dead, found[-1].rested) == (1, 0)
    bare, noisy = found
    assert bare.rounds > 3
    assert bare.seen.right >= 0.99
    assert abs(noisy.seen.cosine - 0.35) < 4 / sqrt(noisy.seen.marked * ATTACKED * (INPUTS + CLASSES))


if __name__ == "__main__":  # the tables of docs/strength.md
    import itertools
    import sys
    import tempfile

    kinds = {"rows": kill_rows, "bias": kill_by_bias}
    for name, kappa, factor in itertools.product(sys.argv[1:], ("0", "3", "10"), ("off", "4")):
        with tempfile.TemporaryDirectory() as where:
            seen = attack(Path(where), kinds[name], dither=kappa, continuity=factor)
            print(name, kappa, factor, seen, flush=True)  # noqa: T201
    patient = {"rows": creep_by_rows, "bias": creep_by_bias}
    for name, kappa, factor in itertools.product(PUSHED, ("0", "3"), ("off", "4")):
        with tempfile.TemporaryDirectory() as where:
            seen = attack(Path(where), push_rows, name, SOON, dither=kappa, continuity=factor)
            print("pushed", name, kappa, factor, seen, flush=True)  # noqa: T201
    for name, count, kappa in itertools.product(patient, (1, ATTACKED, 96), ("0", "3")):
        with tempfile.TemporaryDirectory() as where:
            crept = creep(Path(where), patient[name], count, dither=kappa, continuity="4")
            print("patient", name, kappa, count, crept, flush=True)  # noqa: T201
