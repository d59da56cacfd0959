"""What z means: the tails to any z, thresholds, and the null of real models under random keys."""

from __future__ import annotations

import decimal
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special, stats

from quorumark.errors import InputError
from quorumark.model.layout import ModelLayout, write_safetensors
from quorumark.model.statistic import Canonical, canonical_form
from quorumark.research.known import KnownKey, SeededKey, TensorsInMemory
from quorumark.verify import null
from quorumark.verify.calibration import Calibration, calibrate
from tests.kit.commands import run
from tests.kit.training import torch_train


@pytest.mark.parametrize(
    "z", ["-40", "-12.5", "-3", "-0.5", "0", "0.7", "2.999999", "3", "3.000001", "6", "12.25", "37"]
)
def test_the_normal_tail_is_scipys(z: str) -> None:
    expected = special.log_ndtr(-float(z)) / math.log(10)
    assert abs(float(null.log10_p(z)) - expected) <= 0.0051


@given(st.decimals("-30", "2000", places=6))
def test_the_normal_tail_is_scipys_everywhere(z: decimal.Decimal) -> None:
    expected = special.log_ndtr(-float(z)) / math.log(10)
    assert abs(float(null.log10_p(str(z))) - expected) <= 0.0051 + 1e-12 * abs(expected)


def test_beyond_what_floats_hold() -> None:
    """ln P(Z ≥ z) → −z²/2 − ln(z·√(2π)): 10^6 is as far as z may ever get, with d = 10^12."""
    for z in (1000, 10**4, 10**6):
        expected = -(decimal.Decimal(z) ** 2 / 2) / decimal.Decimal(10).ln() - decimal.Decimal(
            math.log10(z * math.sqrt(2 * math.pi))
        )
        assert abs(decimal.Decimal(null.log10_p(str(z))) - expected) < decimal.Decimal("0.02")
    assert null.log10_bound("1000") == "-217147.24"
    assert null.log10_bound("-5") == "0.00"


def test_thresholds() -> None:
    assert null.threshold_for("1e-9") == "6.437899"  # √(−2·ln 10^-9) = 6.43789…
    assert float(null.threshold_for("0.05")) == pytest.approx(math.sqrt(-2 * math.log(0.05)), abs=1e-6)
    assert null.raised_threshold("6", 64) == "14.000000"
    assert null.raised_threshold("6", 0) == "6.000000"
    for wrong in ("0", "1", "2", "-1", "nan", "", "1e", "1e9"):
        with pytest.raises(InputError, match="alpha"):
            null.threshold_for(wrong)


@given(st.integers(-(10**15), 10**15), st.integers(1, 10**15))
def test_z_is_the_exact_quotient_rounded(value: int, squared: int) -> None:
    with decimal.localcontext(decimal.Context(prec=60)):
        exact = decimal.Decimal(value) / decimal.Decimal(squared).sqrt()
        assert abs(decimal.Decimal(null.z_text(value, squared)) - exact) <= decimal.Decimal("0.00000051")


def test_a_host_programs_decimal_settings_change_nothing() -> None:
    before = (null.log10_p("19.591202"), null.z_text(12345, 678), null.threshold_for("1e-9"), null.log10_bound("7.5"))
    with decimal.localcontext(decimal.Context(prec=4, rounding=decimal.ROUND_UP)):
        after = (
            null.log10_p("19.591202"),
            null.z_text(12345, 678),
            null.threshold_for("1e-9"),
            null.log10_bound("7.5"),
        )
    assert after == before


# --- real models ------------------------------------------------------------------------------------------


def _make() -> Any:
    import torch

    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 16, 48), nn.ReLU(), nn.Linear(48, 10),
    )  # fmt: skip


def _numpy(model: Any) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy().copy() for name, tensor in model.items()}


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, NDArray[Any]], list[dict[str, NDArray[Any]]]]:
    """A public initial model, and 20 models that others trained: half from it, half from other initial models."""
    torch = pytest.importorskip("torch")
    datasets = pytest.importorskip("sklearn.datasets")
    torch.set_num_threads(1)
    pixels, labels = datasets.load_digits(return_X_y=True)
    inputs = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    torch.manual_seed(0)
    initial = _make().state_dict()
    models = []
    train = torch_train(_make, epochs=3)
    for seed in range(20):
        torch.manual_seed(100 + seed)
        start = {k: v.clone() for k, v in initial.items()} if seed % 2 else _make().state_dict()
        chosen = torch.randperm(len(targets))[:1000]
        models.append(_numpy(train(start, (inputs[chosen], targets[chosen]), seed=seed)))
    return _numpy(initial), models


def _forms(anchor: dict[str, NDArray[Any]], models: list[dict[str, NDArray[Any]]]) -> list[Canonical]:
    layout = ModelLayout.of(anchor)
    reference = TensorsInMemory(anchor)
    return [canonical_form("balanced-anchor/v1", layout, TensorsInMemory(model), reference) for model in models]


def test_ten_thousand_random_keys_on_trained_models(
    trained: tuple[dict[str, NDArray[Any]], list[dict[str, NDArray[Any]]]],
) -> None:
    """5 models, 2,000 keys each. Seeded: an honest statistic fails this test for one seed in ten thousand."""
    found = calibrate(_forms(trained[0], trained[1][:5]), 2000, seed=12)
    flat = found.z.reshape(-1)
    assert flat.size == 10_000
    assert found.p_normal() > 1e-4
    assert found.p_normal() == pytest.approx(stats.kstest(flat, "norm").pvalue, abs=0.02)
    assert stats.anderson(flat, "norm", method="interpolate").pvalue >= 0.01
    for limit in (2.0, 3.0):
        expected = found.expected_above(limit)
        assert abs(found.above(limit) - expected) < 4 * math.sqrt(expected / flat.size)
    assert flat.max() < 5


def test_the_same_test_fails_on_a_statistic_that_is_not_what_it_says(
    trained: tuple[dict[str, NDArray[Any]], list[dict[str, NDArray[Any]]]],
) -> None:
    """A norm that is 5 % wrong, a mean that is off by 0.05, and keys that are not balanced: all are noticed."""
    forms = _forms(trained[0], trained[1][:5])
    honest = calibrate(forms, 2000, seed=12)
    for wrong in (honest.z * 1.05, honest.z + 0.06):
        assert Calibration(honest.names, wrong).p_normal() < 1e-4
    rng = np.random.default_rng(0)
    few = np.stack([rng.choice([-1.0, 1.0, 1.0], forms[0].x.size) for _ in range(300)])
    biased = np.stack([few @ form.x.astype(float) / math.sqrt(form.norm2) for form in forms])
    assert Calibration(honest.names, biased).p_normal() < 1e-4


def test_20_models_that_others_trained_are_not_accused(
    trained: tuple[dict[str, NDArray[Any]], list[dict[str, NDArray[Any]]]],
) -> None:
    """With one key. Seeded; for a random key one of 20 independent z exceeds 4 once in 1,500 runs."""
    layout = ModelLayout.of(trained[0])
    known = KnownKey(SeededKey(layout.coordinates, 2026).numpy(), layout, TensorsInMemory(trained[0]))
    values = [known.z(model) for model in trained[1]]
    assert max(values) < 4
    assert abs(np.mean(values)) < 4 / math.sqrt(len(values))


def test_calibrate_through_the_command_line(
    environment: dict[str, str],
    trained: tuple[dict[str, NDArray[Any]], list[dict[str, NDArray[Any]]]],
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    anchor, models = trained
    write_safetensors(anchor, tmp_path / "anchor.safetensors")
    (tmp_path / "layout.json").write_bytes(ModelLayout.of(anchor).to_bytes())
    for i in range(2):
        write_safetensors(models[i], tmp_path / f"m{i}.safetensors")
    options = ["--layout", str(tmp_path / "layout.json"), "--anchor", str(tmp_path / "anchor.safetensors")]
    files = [str(tmp_path / f"m{i}.safetensors") for i in range(2)]
    done = run(
        environment, "calibrate", *files, *options, "--keys", "200", "--seed", "1", "--plot", str(tmp_path / "null.svg")
    )
    assert done.returncode == 0
    assert done.stdout.startswith("2 models, 200 random keys each: mean")
    assert done.stderr == ""
    assert (tmp_path / "null.svg").read_text().startswith("<?xml")
    first = (tmp_path / "null.svg").read_bytes()
    done = run(
        environment, "calibrate", *files, *options, "--keys", "200", "--seed", "1", "--json",
        "--plot", str(tmp_path / "null.svg"),
    )  # fmt: skip
    assert json.loads(done.stdout)["keys"] == 200
    assert (tmp_path / "null.svg").read_bytes() == first
    np.savez(tmp_path / "other.npz", w=np.ones((3, 3), np.float32))
    done = run(environment, "calibrate", str(tmp_path / "other.npz"), *options)
    assert done.returncode == 2
    assert "does not fit the layout" in done.stderr
