"""Q of trained models that know nothing of the key (docs/layers.md, "What is tested")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from quorumark.model.blocks import blocks_of  # noqa: E402
from quorumark.model.layout import ModelLayout  # noqa: E402
from quorumark.research.known import KnownKey, TensorsInMemory  # noqa: E402
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
}  # fmt: skip


def _form(name: str, seed: int, epochs: int = 2) -> tuple[ModelLayout, Any]:
    make = MODELS[name]
    start = lab.initial(make, 1)
    trained = lab.trained(make, start if seed % 2 else lab.initial(make, seed), lab.data_of("mlp"), seed, epochs, 2e-3)
    layout = ModelLayout.of(make())
    known = KnownKey(np.ones(layout.coordinates, np.int8), layout, TensorsInMemory(start))
    return layout, known.form(TensorsInMemory(trained))


@pytest.mark.parametrize("name", MODELS)
def test_the_tail_of_q_over_a_hundred_thousand_keys_is_below_its_bound(name: str) -> None:
    layout, form = _form(name, 3)
    spans = blocks_of(layout).spans
    assert len(spans) > 1
    assert tail_of_q(form.x, spans, 100_000, 1) <= 0


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
