"""The lab's networks, members and runs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.errors import InputError, RecordError
from quorumark.model.layout import ModelLayout
from quorumark.research.lab import data
from tests.kit.lab_runs import MINI

torch = pytest.importorskip("torch")
from quorumark.research.lab import models  # noqa: E402
from quorumark.research.lab.fleet import Fleet  # noqa: E402
from quorumark.research.lab.image_run import ImageRun  # noqa: E402
from quorumark.research.lab.mark import Mark  # noqa: E402
from quorumark.research.lab.results import record  # noqa: E402
from quorumark.research.lab.scores import z_scores  # noqa: E402

pytestmark = [pytest.mark.research, pytest.mark.usefixtures("one_thread")]


# --- networks and members ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18-tiny", "vgg11", "cnn", "mlp"])
def test_members_train_like_pytorch(name: str) -> None:
    """Three steps of two members, against torch's own modules and AdamW."""
    size = 32 if name == "vgg11" else 16
    module = models.make(name, 10, 3, size, 0)
    layout = ModelLayout.of(module)
    start = torch.from_numpy(layout.flatten(module))
    fleet = Fleet(models.make(name, 10, 3, size, 0), layout, 2, 8, (size, size, 3), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 8, size, size, 3, generator=generator)
    y = torch.randint(0, 10, (3, 2, 8), generator=generator)
    for _ in range(2):  # the second round begins anew
        fleet.load(start)
        assert torch.equal(fleet.model(1), start)
        fleet.train(x, y)
    module.train()
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=1e-4)
    for images, labels in zip(x[:, 1], y[:, 1], strict=True):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(images.permute(0, 3, 1, 2)), labels).backward()
        optimiser.step()
    expected = torch.from_numpy(layout.flatten(module))
    moved = (expected - start).abs().max()
    assert (fleet.model(1) - expected).abs().max() < 1e-3 * moved
    module.eval()
    with torch.no_grad():
        logits = module(x[0, 0].permute(0, 3, 1, 2))
    assert torch.allclose(fleet.logits(expected, x[0, 0]), logits, atol=1e-5)


def test_resnet18_is_the_paper_s() -> None:
    layout = ModelLayout.of(models.make("resnet18", 10, 3, 32, 0))
    assert layout.coordinates == 11_164_352
    assert layout.size == 11_164_352 + 10 + 4 * 4800  # a bias; BatchNorm's scales, shifts, means and variances
    with pytest.raises(InputError, match="model"):
        models.make("resnet50", 10, 3, 32, 0)


# --- runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strength",
    [
        "none",
        "rho:0.05",
        "paper:0.025",
        "per-client:0.1",
        "per-client-rho:0.05",
        "paper-code:0.1",
        "per-client-paper-code:0.1",
        "rho:0.05 packing 4",
    ],
)
def test_a_run_made_in_pieces_is_the_same_run(strength: str, tmp_path: Path) -> None:
    strength, _, packing = strength.partition(" packing ")
    settings, images = replace(MINI, strength=strength, packing=int(packing or 1)), data.load("shapes")
    whole = ImageRun(settings, images)
    assert whole.train()
    first = ImageRun(settings, images)
    assert not first.train(seconds=-1.0, checkpoint=tmp_path / "c.pt")  # no time at all: saved before the first round
    first.round()
    first.round()
    first.round()
    first.save(tmp_path / "c.pt")
    second = ImageRun(settings, images)
    second.restore(tmp_path / "c.pt")
    assert second.train(checkpoint=tmp_path / "c.pt")
    assert torch.equal(second.model, whole.model)
    assert [(e.loss, e.accuracy, e.c) for e in second.log] == [(e.loss, e.accuracy, e.c) for e in whole.log]
    assert second.best.round == whole.best.round
    with pytest.raises(RecordError, match="other settings"):
        ImageRun(replace(settings, seed=1), images).restore(tmp_path / "c.pt")
    for run in (whole, first, second):
        run.close()


def test_members_may_keep_their_optimisers() -> None:
    """A member that is alone and keeps its moments trains as if there were no rounds."""
    made = models.make("cnn", 10, 3, 16, 0)
    layout = ModelLayout.of(made)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 1, 8, 16, 16, 3, generator=generator)
    y = torch.randint(0, 10, (6, 1, 8), generator=generator)
    place = (layout, 1, 8, (16, 16, 3), torch.device("cpu"))

    def trained(rounds: int, *, kept: bool) -> Any:
        fleet, model = (
            Fleet(models.make("cnn", 10, 3, 16, 0), *place, kept=kept),
            torch.from_numpy(layout.flatten(made)),
        )
        for part_x, part_y in zip(x.chunk(rounds), y.chunk(rounds), strict=True):
            fleet.load(model)
            fleet.train(part_x, part_y)
            model = fleet.model(0)
        return model

    whole = trained(1, kept=True)
    assert torch.allclose(trained(3, kept=True), whole, atol=1e-6)
    assert not torch.allclose(trained(3, kept=False), whole, atol=1e-3)


def test_a_run_that_keeps_optimisers_goes_on_from_no_checkpoint(tmp_path: Path) -> None:
    settings, images = replace(MINI, kept=True, decay=0.01, rounds=2), data.load("shapes")
    assert settings.id.endswith("-kept-decay0.01")
    run = ImageRun(settings, images)
    run.round()
    run.save(tmp_path / "c.pt")
    with pytest.raises(RecordError, match="begin again"):
        ImageRun(settings, images).restore(tmp_path / "c.pt")
    assert run.train(checkpoint=tmp_path / "c.pt")
    done = ImageRun(settings, images, fleet=run.fleet)
    done.restore(tmp_path / "c.pt")
    assert torch.equal(done.model, run.model)
    fresh = ImageRun(settings, images, fleet=run.fleet)  # with another run's fleet, without its moments
    assert fresh.train()
    assert torch.equal(fresh.model, run.model)
    for one in (run, done, fresh):
        one.close()


def test_a_run_tells_what_a_verification_would_find() -> None:
    """Within max(10 %, 2), and three deviations of the key's own chance; only a run with one key has a forecast."""
    settings = replace(MINI, strength="rho:0.1", model="resnet18-tiny", rounds=12)
    run = ImageRun(settings, data.load("shapes"))
    assert run.train()
    body = record(run)
    measured = body["z"]["final"]["balanced-anchor/v1"]
    assert measured > 15
    assert abs(body["expected_z"] - measured) < max(0.1 * measured, 2) + 3
    run.close()
    for strength in ("none", "per-client-rho:0.05", "paper-code:0.1"):
        other = ImageRun(replace(MINI, strength=strength, rounds=1), data.load("shapes"))
        assert other.train()
        assert record(other)["expected_z"] is None
        other.close()


def test_a_run_goes_back_to_a_checkpoint_while_its_state_is_on_the_move(tmp_path: Path) -> None:
    settings, images = replace(MINI, strength="rho:0.05"), data.load("shapes")
    whole, run = ImageRun(settings, images), ImageRun(settings, images)
    assert whole.train()
    run.round()
    run.round()
    run.save(tmp_path / "c.pt")
    assert isinstance(run.mark, Mark)
    run.mark._worker.submit(time.sleep, 0.2)
    run.round()  # its part of the state comes late
    run.restore(tmp_path / "c.pt")
    assert run.train()
    assert torch.equal(run.model, whole.model)
    assert run.mark.rho == (whole.mark and whole.mark.rho)
    for one in (whole, run):
        one.close()


def test_rounds_that_nobody_waits_for_have_their_losses_in_the_end(tmp_path: Path) -> None:
    """As on CUDA: known after the first round, after one that is validated, in a checkpoint, and at the end."""
    settings, images = replace(MINI, rounds=8, evaluate_every=3), data.load("shapes")
    eager, lazy = ImageRun(settings, images), ImageRun(settings, images)
    lazy._lazy = True
    told: list[float] = []
    eager.train()
    lazy.train(checkpoint=tmp_path / "c.pt", every=4, tell=lambda entry: told.append(entry.loss))
    known = [not np.isnan(loss) for loss in told]
    assert known == [True, False, True, False, False, True, False, True]
    assert [(e.loss, e.accuracy) for e in lazy.log] == [(e.loss, e.accuracy) for e in eager.log]
    assert len({entry.seconds for entry in lazy.log}) == 5  # rounds 2 and 3, 5 and 6, 7 and 8 share the time
    assert min(entry.seconds for entry in lazy.log) > 0
    stopped = ImageRun(settings, images)
    stopped._lazy = True
    for _ in range(4):
        stopped.round()
    assert np.isnan(stopped.log[-1].loss)
    stopped.save(tmp_path / "d.pt")
    stopped.round()
    stopped.restore(tmp_path / "d.pt")
    assert stopped._open == []  # what is forgotten takes no time of the rounds to come
    assert [entry.loss for entry in stopped.log] == [entry.loss for entry in eager.log[:4]]
    stopped.round()
    assert not stopped.train(seconds=-1.0)  # the time is up
    assert [entry.loss for entry in stopped.log] == [entry.loss for entry in eager.log[:5]]
    stopped.train()
    assert [entry.loss for entry in stopped.log] == [entry.loss for entry in eager.log]
    for run in (eager, lazy, stopped):
        run.close()


def test_the_test_images_decide_nothing() -> None:
    """What is released depends on the validation images alone; those are never trained on."""
    images, settings = data.load("shapes"), replace(MINI, rounds=6, lr=3e-3)
    wrong = replace(images, test_x=images.test_x[::-1].copy(), test_y=(images.test_y + 1) % 4)
    one, two = ImageRun(settings, images), ImageRun(settings, wrong)
    for run in (one, two):
        run.train()
    assert [entry.accuracy for entry in one.log] == [entry.accuracy for entry in two.log]
    assert torch.equal(one.best.model, two.best.model)
    assert one.fleet.accuracy(one.best.model, *one.test) != two.fleet.accuracy(two.best.model, *two.test)
    assert one.best.measure == one.fleet.accuracy(one.best.model, *one.validation)
    assert one.best.measure == max(entry.accuracy or 0.0 for entry in one.log)
    held_out = {x.tobytes() for x in images.train_x[data.split(images.train_y, 0.2, 0)[1]]}
    assert len(held_out) == len(one.validation[1]) == 120
    assert not held_out & {x.numpy().tobytes() for x in one._x}


def test_members_learn_and_the_mark_shows() -> None:
    run = ImageRun(replace(MINI, strength="relative:0.1", rounds=12, lr=3e-3), data.load("shapes"))
    run.train()
    assert run.best.measure > 0.6  # of four kinds
    found = z_scores(run.layout, run.model.numpy(), run.initial.numpy(), {"key": run.keys[0]})
    assert found["balanced-anchor/v1"]["key"] > 5
    run.close()


@pytest.mark.parametrize("strength", ["none", "rho:0.05", "paper:0.025", "per-client:0.1", "per-client-rho:0.05"])
def test_the_real_protocol_gives_the_same_bits(strength: str) -> None:
    pytest.importorskip("cryptography")
    from quorumark.research.lab.masked import compare

    found = compare(replace(MINI, strength=strength), data.load("shapes"), 4)
    assert [r.different for r in found] == [0] * 4
    assert all(r.alike for r in found)
    assert found[-1].marked == (strength != "none")
    assert (found[-1].largest > 0) == (strength != "none")


@pytest.mark.parametrize(
    ("packing", "strength", "changes", "widened"),
    [
        (2, "rho:0.05", {"model": "resnet18-tiny", "partition": "dirichlet:0.3"}, [0] * 4),
        (3, "rho:0.05", {"model": "resnet18-tiny", "lr": 3e-3}, [4, 0, 0, 0]),
        (4, "rho:0.05", {"lr": 1e-2}, [4, 0, 0, 0]),
        (4, "paper:0.025", {}, [4, 0, 0, 0]),
        (3, "target:20", {}, [0] * 4),
    ],
)
def test_packed_rounds_give_the_same_bits(
    packing: int, strength: str, changes: dict[str, Any], widened: list[int]
) -> None:
    """Models, marks and the members' norms, running statistics included, also where updates need wider units."""
    pytest.importorskip("cryptography")
    from quorumark.research.lab.masked import compare

    found = compare(replace(MINI, strength=strength, packing=packing, **changes), data.load("shapes"), 4)
    assert [r.different for r in found] == [0] * 4
    assert all(r.alike for r in found)
    assert [r.widened for r in found] == widened
    assert found[-1].marked
    assert found[-1].largest > 0


@pytest.mark.parametrize(("packing", "giants", "factor"), [(2, 1, 1 << 20), (3, 1, 1 << 20), (4, 1, 512), (4, 2, 512)])
def test_who_needs_units_that_too_few_ask_for_is_left_out_as_in_the_protocol(
    packing: int, giants: int, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five members, two must ask. The same members take part, with the same weights, and models, marks and norms are
    the same bits, in that round and after it."""
    pytest.importorskip("cryptography")
    from quorumark.research.lab.masked import compare

    honest = ImageRun.local_models

    def trained(run: ImageRun, number: int) -> Any:
        loss = honest(run, number)
        if number == 3:
            rows, start = run.fleet.theta[:giants], run.model[run.fleet.order.to_device]
            rows += (factor - 1) * (rows - start)
        return loss

    monkeypatch.setattr(ImageRun, "local_models", trained)
    settings = replace(MINI, strength="rho:0.05", members=5, global_batch=60, packing=packing, lr=1e-4)
    rounds = 5 if giants == 1 else 3  # after two of them the mark is too strong for all
    found = compare(settings, data.load("shapes"), rounds)
    assert [r.alone for r in found] == [0, 0, 1 if giants == 1 else 0, 0, 0][:rounds]
    assert [r.different for r in found] == [0] * rounds
    assert all(r.alike for r in found)
    assert found[-1].largest > 0 if giants == 1 else found[2].widened == 2
    if packing == 4 and giants == 1:  # and without the rule the two are not alike
        monkeypatch.setattr("quorumark.research.lab.mark.backing", lambda _: 1)
        assert not compare(settings, data.load("shapes"), 3)[-1].alike


def test_another_rounding_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control of the test above: rounded down in place of to nearest, in the sum or in the norms."""
    pytest.importorskip("cryptography")
    from quorumark.research.lab import packed
    from quorumark.research.lab.masked import compare

    settings = replace(MINI, strength="rho:0.05", packing=4)
    rounded = packed.Units.rounded
    monkeypatch.setattr(packed.Units, "rounded", lambda *args: rounded(*args) >> 1)
    found = compare(settings, data.load("shapes"), 1)
    assert not found[0].alike
    monkeypatch.setattr(packed.Units, "rounded", rounded)
    monkeypatch.setattr("quorumark.research.lab.packed.torch.round", torch.floor)
    assert compare(settings, data.load("shapes"), 1)[0].different > 1000


def test_batches_are_an_epoch_of_each_member_s_own_images() -> None:
    run = ImageRun(replace(MINI, members=3, global_batch=90, augment=()), data.load("shapes"))
    x, y = run.batches(1)
    assert (run.steps, run.batch) == (6, 30)  # 160 images each: the last batch is filled up
    assert x.shape == (6, 3, 30, 16, 16, 3)
    for k in range(3):
        own = {run._x[i].numpy().tobytes() for i in run._own[k].tolist()}
        mean, spread = run._spread
        back = torch.round((x[:, k] * torch.tensor(spread) + torch.tensor(mean)) * 255).to(torch.uint8)
        assert {one.numpy().tobytes() for one in back.reshape(-1, 16, 16, 3)} == own
    assert not torch.equal(run.batches(2)[1], y)
    assert torch.equal(run.batches(1)[0], x)


def test_gradients_that_are_not_copied_together_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All carriers large, some of them, none: the same models bit for bit."""
    ends = []
    for large in (1, 300, 1000, 1 << 30):
        monkeypatch.setattr("quorumark.research.lab.fleet._LARGE", large)
        run = ImageRun(replace(MINI, rounds=2, strength="rho:0.05"), data.load("shapes"))
        ends.append((len(run.fleet.order.large), run.train() and run.model))
        run.close()
    counts, found = zip(*ends, strict=True)
    assert counts == (4, 3, 2, 0)
    assert all(torch.equal(model, found[-1]) for model in found)


@pytest.mark.parametrize("channels", [1, 3])
def test_black_channels_change_nothing(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are widened for a GPU's sake: the same losses, the same models, up to the order of sums."""
    module = models.make("cnn", 10, channels, 16, 0)
    layout = ModelLayout.of(module)
    start = torch.from_numpy(layout.flatten(module))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 2, 8, 16, 16, channels, generator=generator), torch.randint(0, 10, (3, 2, 8))
    ends = []
    for stem in (None, "conv1.weight"):
        monkeypatch.setattr(Fleet, "_widened", lambda _fleet, _channels, stem=stem: stem)
        fleet = Fleet(models.make("cnn", 10, channels, 16, 1), layout, 2, 8, (16, 16, channels), torch.device("cpu"))
        assert fleet._x.shape[-1] == (channels if stem is None else 8)
        fleet.load(start)
        loss = fleet.train(x, y)
        ends.append((loss, fleet.model(1), fleet.logits(fleet.model(0), x[0, 0])))
    assert not torch.equal(ends[0][1], start)
    for ours, theirs in zip(*ends, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_fleet_trains_rounds_of_any_length() -> None:
    """A fleet serves several runs; each round begins Adam anew, however long the one before was."""
    module = models.make("cnn", 10, 3, 16, 0)
    layout = ModelLayout.of(module)
    start = torch.from_numpy(layout.flatten(module))
    x, y = torch.randn(3, 2, 8, 16, 16, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(3, 2, 8).long()
    ends = []
    for lengths in ((3,), (1, 3), (3, 2, 3)):
        fleet = Fleet(models.make("cnn", 10, 3, 16, 1), layout, 2, 8, (16, 16, 3), torch.device("cpu"))
        for steps in lengths:
            fleet.load(start)
            fleet.train(x[:steps], y[:steps])
        ends.append(fleet.model(1))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
