"""Which of Flower's strategies work with the mark, and what those that do not are told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.serverapp import strategy as strategies

from quorumark.errors import InputError
from quorumark.flower import watermarked
from tests.kit.flower_runs import SEED, fedavg, run, same
from tests.kit.flowers import Consortium, LocalGrid, Model, app_for, pulled, train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


class Careful(strategies.FedAvg):  # type: ignore[misc]
    """A user's own, which changes nothing about the average."""

    def summary(self) -> None: ...


class Odd(strategies.FedAvg):  # type: ignore[misc]
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return super().aggregate_train(server_round, replies)


def test_strategies_that_need_single_updates_are_refused_with_the_reason(world: Consortium) -> None:
    refused: dict[str, Any] = {
        "chooses among single updates": strategies.Krum(num_malicious_nodes=1),
        "median": strategies.FedMedian(),
        "trimmed mean": strategies.FedTrimmedAvg(),
        "own loss": strategies.QFedAvg(client_learning_rate=0.1),
        "trees": strategies.FedXgbBagging(),
        "next": strategies.FedXgbCyclic(),
        "fixedclipping_mod": strategies.DifferentialPrivacyServerSideFixedClipping(fedavg(), 1.0, 1.0, 5),
        "norm bit": strategies.DifferentialPrivacyClientSideAdaptiveClipping(fedavg(), 0.1, 50),
        "linear=True": Odd(),
    }
    for reason, strategy in refused.items():
        with pytest.raises(InputError, match=reason):
            watermarked(strategy, world.path)
    for kind in (strategies.Bulyan, strategies.MultiKrum):
        with pytest.raises(InputError, match="chooses among single updates"):
            watermarked(kind(num_malicious_nodes=1), world.path)
    with pytest.raises(InputError, match="FedMedian"):  # inside a wrapper as well
        watermarked(
            strategies.DifferentialPrivacyClientSideFixedClipping(strategies.FedMedian(), 1.0, 1.0, 5), world.path
        )
    assert watermarked(Odd(), world.path, linear=True).strategy
    assert watermarked(Careful(), world.path).strategy
    assert watermarked(strategies.FedProx(proximal_mu=0.1), world.path).strategy


def test_fedprox_is_fedavg_of_what_its_term_makes_of_the_members(world: Consortium) -> None:
    """Its μ reaches the app, which pulls its step back; the sum is FedAvg's of those models, to the bit."""
    mu = 0.5
    inner = strategies.FedProx(proximal_mu=mu, min_train_nodes=5, min_available_nodes=5, fraction_evaluate=0.0)
    wrapped, model = run(world, LocalGrid(app_for(world.folder), 5), 4, inner)

    def prox(model: Model, data: float, seed: int, rate: float) -> Model:
        return pulled(model, train(model, data, seed, rate), mu)

    expected = world.in_process(4, SEED, trained=prox)
    assert same(model, expected.model)
    assert [r.marked for r in wrapped.reports] == [r.marked for r in expected.reports] == [False, False, True, True]
    assert not same(model, world.in_process(4, SEED).model)


def test_clipping_at_the_members_and_noise_at_the_server(world: Consortium) -> None:
    """DifferentialPrivacyClientSideFixedClipping: its mod clips before the mark's mod sees the model."""
    from flwr.clientapp.mod import fixedclipping_mod

    norm = 0.05
    inner = strategies.DifferentialPrivacyClientSideFixedClipping(fedavg(), 0.0, norm, 5)
    grid = LocalGrid(app_for(world.folder, mods=[fixedclipping_mod]), 5)
    wrapped, model = run(world, grid, 1, inner)
    assert wrapped.reports[0].members == (1, 2, 3, 4, 5)
    moved = np.sqrt(sum(float(((model[n] - world.model[n]) ** 2).sum()) for n in model if n != "steps"))
    plain = world.in_process(1, SEED).model
    free = np.sqrt(sum(float(((plain[n] - world.model[n]) ** 2).sum()) for n in plain if n != "steps"))
    assert moved <= norm * 1.001 < free


def test_noise_at_the_server_comes_on_top_and_the_mark_goes_on(world: Consortium, tmp_path: Path) -> None:
    """The sum is exact; the noise has the deviation that Flower's wrapper gives it; members follow the noisy models."""
    from flwr.clientapp.mod import fixedclipping_mod

    norm, noise = 1000.0, 2e-6  # nothing is clipped
    longer = world.copy(tmp_path / "longer")
    inner = strategies.DifferentialPrivacyClientSideFixedClipping(fedavg(), noise, norm, 5)
    wrapped, model = run(world, LocalGrid(app_for(world.folder, mods=[fixedclipping_mod]), 5), 1, inner)
    plain = world.in_process(1, SEED).model
    moved = np.concatenate([(model[n] - plain[n]).ravel() for n in plain if n != "steps"])
    assert moved.std() == pytest.approx(noise * norm / 5, rel=0.05)
    grid = LocalGrid(app_for(longer.folder, mods=[fixedclipping_mod]), 5, run_id=8)
    wrapped, _ = run(longer, grid, 4, inner)
    assert [r.given_up for r in wrapped.reports] == [""] * 4
    assert wrapped.reports[-1].marked


def test_an_accountant_is_refused(world: Consortium) -> None:
    """It checks every single reply, and there is one for all; without it the same strategy is taken."""

    from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, SamplingMethod

    config = PrivacyConfig(1e-5, 5, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)
    noisy = strategies.DifferentialPrivacyClientSideFixedClipping
    assert watermarked(noisy(fedavg(), 1.0, 1.0, 5), world.path).strategy
    with pytest.raises(InputError, match="account outside"):
        watermarked(noisy(fedavg(), 1.0, 1.0, 5, accountant=SimpleNamespace(config=config)), world.path)
