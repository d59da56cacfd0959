"""What the code computes is what it computed when tests/golden.json was written; and one bit more would be seen."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark.consortium.strength import Strength
from tests.kit import golden

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # Flower's
EVENTS, *OTHERS, GIVEN_UP = (name for name in golden.BUILDERS if name.startswith("federation"))
FLOWER = "flower: checked sums, four rounds, a loss and a retry"


def test_every_builder_has_its_entry() -> None:
    assert list(golden.read()) == list(golden.BUILDERS)


@pytest.mark.parametrize("name", golden.BUILDERS)
def test_what_is_computed_has_not_changed(name: str) -> None:
    needed = golden.BUILDERS[name].needs
    if needed:
        pytest.importorskip(needed)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    assert golden.build(name) == golden.read()[name]


def test_the_entries_hold_what_they_are_named_after() -> None:
    """A loss, a retry, marks, a round that was given up; and settings that make a difference."""
    found = {name: golden.read()[name]["digests"] for name in (EVENTS, *OTHERS, GIVEN_UP)}
    assert [len(m) for m in found[EVENTS]["members"]] == [5, 4, 5, 4, 5, 5]
    assert found[EVENTS]["attempts"] == [1, 1, 1, 2, 1, 1]
    assert found[EVENTS]["marked"] == [False, False, True, True, True, True]
    assert not any(any(entry["given up"]) for name, entry in found.items() if name != GIVEN_UP)
    assert found[GIVEN_UP]["given up"] == [False, False, False, True, False, False]
    alike, unchecked, paper = (found[name]["models"] for name in OTHERS)
    assert len({alike[-1], unchecked[-1], paper[-1]}) == 3
    assert unchecked[:3] == found[GIVEN_UP]["models"][:3]  # the same run, whose sums are checked


def test_the_members_learn() -> None:
    before, after = golden.initial(), golden.initial()
    for seed in range(20):
        after = golden.train(after, 1, seed, 1.0)
    errors = [golden.gradients(model, "images of nobody")[1] for model in (before, after)]
    assert errors[1] < 0.8 * errors[0]


# --- one bit more -----------------------------------------------------------------------------------------


def flipped(monkeypatch: pytest.MonkeyPatch, changed: str, bit: int) -> None:
    """The first number that a label gives, with one other bit."""
    honest = golden.integers

    def integers(label: str, count: int) -> NDArray[np.int64]:
        found = honest(label, count).astype(np.int16)
        if label == changed:
            found[0] ^= np.array(1 << bit, np.uint16).astype(np.int16)
        return found.astype(np.int64)

    monkeypatch.setattr(golden, "integers", integers)


@pytest.mark.parametrize(
    ("name", "changed", "bit"),
    [
        (EVENTS, "a", 0),  # a weight of the initial model, in its last bit
        (EVENTS, "key", 15),  # a sign of the key
        *((name, "key", 15) for name in (*OTHERS, GIVEN_UP)),
        ("canonical forms", "vit patch.weight moved", 15),
        ("alignments", "cnn 0.weight moved", 15),
        ("LoRA gauge", "B q", 15),
        ("share files", "key", 15),
        ("lab: masked rounds", "member 2 round 4", 0),
        ("lab: masked rounds", "key", 15),
    ],
)
def test_one_bit_changes_the_digests(name: str, changed: str, bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flipped(monkeypatch, changed, bit)
    made = golden.BUILDERS[name]
    if made.needs:
        pytest.importorskip(made.needs)
    assert golden.build(name) != golden.read()[name]


@pytest.mark.parametrize(("name", "value"), [("c_max", (1 << 32) // 20 + (1 << 16)), ("alike", "mark")])
def test_another_strength_changes_the_digests(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """c_max by 2^-16 of 1, which is a unit or more of the mark; rows that move alike."""
    honest = Strength.of
    monkeypatch.setattr(Strength, "of", lambda *arguments: replace(honest(*arguments), **{name: value}))
    made, known = golden.build(EVENTS)["digests"], golden.read()[EVENTS]["digests"]
    assert made["models"][:2] == known["models"][:2]  # before the mark
    last = "amplitudes of the next round"
    assert made[last] != known[last]
    assert (made["c in 2^-32"] != known["c in 2^-32"]) == (name == "c_max")
    if name == "alike":
        assert made["models"][-1] != known["models"][-1]


# --- Flower -----------------------------------------------------------------------------------------------


def test_one_bit_changes_the_model_in_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    flipped(monkeypatch, "key", 15)
    made, known = golden.build(FLOWER)["digests"], golden.read()[FLOWER]["digests"]
    assert made["members"] == known["members"]
    assert made["model"] != known["model"]


def test_a_simulation_on_ray_gives_the_same_model(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    pytest.importorskip("ray", reason="flwr's simulation is not installed")
    from tests.kit.golden_flower import simulated

    environment: dict[str, Any] = {
        **os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "RAY_DISABLE_IMPORT_WARNING": "1",
        "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.kit.golden_flower", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert simulated(tmp_path) == golden.read()[FLOWER]["digests"]
