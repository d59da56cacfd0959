"""Q of trained models that know nothing of the key (docs/layers.md, "What is tested")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from quorumark.model.blocks import blocks_of  # noqa: E402
from quorumark.model.layout import ModelLayout  # noqa: E402
from quorumark.research.attacks.symmetry import permute  # noqa: E402
from quorumark.research.known import KnownKey, TensorsInMemory  # noqa: E402
from quorumark.research.lab import models  # noqa: E402
from quorumark.verify.null import layers_threshold  # noqa: E402
from tests.kit import lab  # noqa: E402
from tests.kit.null import tail_of_q  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.research]


class Lstm(nn.Module):
    """Digits, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.lstm(x[:, 0])[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 192), nn.Linear(192, 10)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 112), nn.ReLU(), nn.Linear(112, 10),
    ),
    "resnet": lambda: lab.ResNet(24, 1, 3),
    "lstm": Lstm,
    "transformer": lambda: lab.ViT(64, 4),
    "resnet18": lambda: models.make("resnet18", 10, 1, 8, 0),
}  # fmt: skip


def _form(name: str, seed: int, epochs: int = 2) -> tuple[ModelLayout, Any]:
    make = MODELS[name]
    start = lab.initial(make, 1)
    trained = lab.trained(make, start if seed % 2 else lab.initial(make, seed), lab.data_of("mlp"), seed, epochs, 2e-3)
    layout = ModelLayout.of(make())
    known = KnownKey(np.ones(layout.coordinates, np.int8), layout, TensorsInMemory(start))
    return layout, known.form(TensorsInMemory(trained))


@pytest.mark.parametrize("name", MODELS)
def test_the_tail_of_q_over_random_keys_is_below_its_bound(name: str) -> None:
    """100,000 keys; 10,000 for the network of 11.2 million weights."""
    layout, form = _form(name, 3)
    spans = blocks_of(layout).spans
    assert len(spans) > 1
    large = layout.coordinates > 10**7
    assert large == (name == "resnet18")
    assert tail_of_q(form.x, spans, 10_000 if large else 100_000, 1) <= 0


def test_fifty_models_of_others_pass_by_no_test() -> None:
    """Half of them from the anchor itself; with one key that stays."""
    for name, count in (("mlp", 30), ("cnn", 20)):
        for seed in range(2, 2 + count):
            layout, form = _form(name, seed, 1)
            key = np.random.default_rng(99).choice(np.array([-1, 1], np.int8), layout.coordinates)
            known = KnownKey(key, layout, TensorsInMemory({}))
            found = known.q_of(form)
            assert found is not None
            assert abs(known.z_of(form)) < 6
            assert found[0] < float(layers_threshold("6", blocks_of(layout).count))


@pytest.mark.parametrize(("name", "count"), [("mlp", 30), ("cnn", 20)])
def test_aligned_models_of_others_pass_by_no_test_with_the_key_of_a_marked_model(name: str, count: int) -> None:
    """50 in all. Half of them begin at the marked model's own anchor; every other pair has its channels permuted. The
    alignment may choose among all orders of channels, and still finds nothing; the marked model it brings back."""
    run = lab.marked(name, rho="0.1")
    blocks = blocks_of(run.layout).count
    most = float(layers_threshold("6", blocks))

    def measured(weights: Mapping[str, Any]) -> tuple[float, float]:
        form = run.known.form(run.align(weights).model(TensorsInMemory(weights)))
        found = run.known.q_of(form)
        assert found is not None
        return run.known.z_of(form), found[0]

    hidden, _ = permute(run.target(), 7)
    z, q = measured(hidden)
    assert z > 6
    assert q > most
    assert abs(run.z(hidden)) < z / 2, "the permutation hides it, and the alignment brings it back"
    for seed in range(2, 2 + count):
        start = run.checkpoints[0] if seed % 2 else lab.initial(run.make, seed)
        others = lab.trained(run.make, start, lab.data_of(name), seed, 1, 2e-3)
        if seed % 4 < 2:
            others, _ = permute(replace(run.target(), weights=others), seed)
        z, q = measured(others)
        assert abs(z) < 6
        assert q < most
