"""The lab on a GPU: as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from quorumark.model.layout import ModelLayout
from quorumark.research.known import SeededKey
from quorumark.research.lab import data
from quorumark.round.units import Packing
from tests.kit.lab_runs import MINI, STRENGTHS

torch = pytest.importorskip("torch")
from quorumark.research.lab import models  # noqa: E402
from quorumark.research.lab.fleet import Fleet  # noqa: E402
from quorumark.research.lab.image_run import ImageRun  # noqa: E402
from quorumark.research.lab.mark import Mark, axis_sums, encoded, weighted_sum  # noqa: E402
from quorumark.research.lab.scores import z_scores  # noqa: E402

pytestmark = [pytest.mark.research, pytest.mark.usefixtures("one_thread")]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_members_on_a_gpu_train_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to bfloat16: the same losses, and updates in the same direction; each member on its own images."""
    monkeypatch.setattr("quorumark.research.lab.fleet._LARGE", 1000)
    module = models.make("cnn", 10, 3, 16, 0)
    layout = ModelLayout.of(module)
    start = torch.from_numpy(layout.flatten(module))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 64, 16, 16, 3, generator=generator)
    y = torch.randint(0, 10, (5, 3, 64), generator=generator)
    x[..., 0] += 0.3 * y[..., None, None]
    updates, losses = {}, {}
    for device in ("cpu", "cuda"):
        own = models.make("cnn", 10, 3, 16, 0)
        fleet = Fleet(own, layout, 3, 64, (16, 16, 3), torch.device(device), streams=2)
        for _ in range(2):  # the second time from the graph alone
            fleet.load(start.to(device))
            losses[device] = float(fleet.train(x.to(device, fleet.kind), y.to(device)))
        updates[device] = torch.stack([fleet.model(k).cpu() - start for k in range(3)])[:, : layout.carrier_size]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.02)
    for k in range(3):
        assert torch.cosine_similarity(updates["cpu"][k], updates["cuda"][k], dim=0) > 0.8
    assert not torch.allclose(updates["cuda"][0], updates["cuda"][1])


@needs_gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8, 5, 3), (3, 70, 4, 4), (64, 64, 32, 32), (64, 512, 4, 4)])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_batch_norm_on_a_gpu_is_what_it_says(kind: Any, shape: tuple[int, ...], added: bool, cut: bool) -> None:
    """Outputs, gradients and running statistics as PyTorch's in float64, means far from 0 among them."""
    from quorumark.research.lab._norms import norm

    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*sizes: int, kind: Any = torch.float32) -> Any:
        return torch.randn(sizes, generator=generator, device="cuda").to(kind)

    channels = shape[1]
    x = (2 * drawn(*shape) + 5 * drawn(channels)[:, None, None]).to(kind).to(memory_format=torch.channels_last)
    inputs = [x, drawn(channels), drawn(channels)] + ([drawn(*shape, kind=kind)] if added else [])
    wanted_inputs = [t.double().requires_grad_() for t in inputs]
    inputs = [t.requires_grad_() for t in inputs]
    running = drawn(channels), drawn(channels) ** 2
    wanted_running = [t.double() for t in running]
    dy = drawn(*shape, kind=kind)
    shortcut = inputs[3] if added else None
    y = norm(inputs[0], shortcut, inputs[1], inputs[2], running, cut=cut, eps=1e-5)
    z = torch.nn.functional.batch_norm(wanted_inputs[0], *wanted_running, *wanted_inputs[1:3], True, 0.1, 1e-5)
    z = z + wanted_inputs[3] if added else z
    z = z.relu() if cut else z
    found = [y, *torch.autograd.grad(y, inputs, dy), *running]
    wanted = [z, *torch.autograd.grad(z, wanted_inputs, dy.double()), *wanted_running]
    exact, near = (2e-5, 5e-3 if cut else 2e-5) if kind == torch.float32 else (1e-2, 2e-2)  # a few are cut at 0
    for i, (one, two) in enumerate(zip(found, wanted, strict=True)):
        assert float((one - two).norm() / two.norm()) < (near if 0 < i < 1 + len(inputs) else exact)


@needs_gpu
@pytest.mark.parametrize("packing", [1, 2, 3, 4])
@pytest.mark.parametrize("settings", STRENGTHS, ids=lambda s: s["rule"])
def test_the_mark_on_a_gpu_is_the_same_bits(settings: dict[str, str], packing: int) -> None:
    module = models.make("resnet18-tiny", 10, 3, 16, 0)
    layout, shares = ModelLayout.of(module), [Fraction(3, 7), Fraction(4, 7)]
    model = torch.from_numpy(layout.flatten(module))
    key = SeededKey(layout.coordinates, 0)
    made = Packing(packing, 2)
    marks = {d: Mark(settings, layout, model.to(d), [key], d, packing=made) for d in ("cpu", "cuda")}
    generator = torch.Generator().manual_seed(0)
    for number in range(1, 6):
        local = model + 0.01 * torch.randn(2, model.numel(), generator=generator)
        found = {}
        for device, mark in marks.items():
            rows = local.to(device)
            before, packed = model.to(device), None
            if packing > 1:
                packed = mark.packed_sum(before, shares, rows.__getitem__)
            total = weighted_sum(rows, shares) if packed is None else packed.total
            found[device] = mark.apply(number, before, total, shares, rows.__getitem__, packed=packed)[0].cpu()
        assert torch.equal(found["cpu"], found["cuda"])
        model = found["cpu"]
    assert marks["cuda"].rho > 0
    assert marks["cuda"].saved() == marks["cpu"].saved()


@needs_gpu
def test_sums_on_a_gpu_are_the_same_whole_numbers() -> None:
    """In one pass, from the device's own order; with ties, which go to the even number, and differences up to 16."""
    module = models.make("resnet18-tiny", 10, 3, 16, 0)
    layout, shares = ModelLayout.of(module), [Fraction(3, 7), Fraction(3, 7), Fraction(1, 7)]
    start = torch.from_numpy(layout.flatten(module))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-3, 0.1, 3.0])[:, None]
    local = start + sizes * torch.randn(3, start.numel(), generator=generator).clamp(-5, 5)
    assert torch.equal(weighted_sum(local.cuda(), shares).cpu(), weighted_sum(local, shares))
    ties = (torch.arange(-500, 500) + 0.5).float()[None] * 2.0**-40
    assert torch.equal(weighted_sum(ties.cuda(), [Fraction(1)]).cpu(), weighted_sum(ties, [Fraction(1)]))
    end, origin = layout.carrier_size, encoded(start)
    wanted = axis_sums(torch.stack([(encoded(row) - origin)[:end] for row in local]), layout)
    fleet = Fleet(module, layout, 3, 8, (16, 16, 3), torch.device("cuda"))
    fleet.load(start.cuda())
    fleet.theta.copy_(local.cuda()[:, fleet.order.to_device])
    found = fleet.update_sums().cpu()
    assert torch.equal(found[:, :, :-1], wanted[:, :, :-1])
    assert found[0, :, -1].max() == wanted[0, :, -1].max()


@needs_gpu
def test_rounds_on_a_gpu_that_nobody_waits_for_are_the_same() -> None:
    """Validated at every round or at the end only: the same models up to the order of sums; all losses are known."""
    ends, settings = [], replace(MINI, rounds=6, strength="rho:0.05")
    for every in (1, 6):
        run = ImageRun(replace(settings, evaluate_every=every), data.load("shapes"), "cuda")
        assert run.train()
        assert all(0 < entry.loss < 10 and entry.seconds > 0 for entry in run.log)
        assert run.log[-1].c > 0
        ends.append(run.model - run.initial)
        run.close()
    assert torch.cosine_similarity(*ends, dim=0) > 0.9


@needs_gpu
def test_a_run_on_a_gpu_learns() -> None:
    steps = ("crop", "flip", "autoaugment")
    run = ImageRun(
        replace(MINI, strength="relative:0.1", rounds=12, lr=3e-3, augment=steps), data.load("shapes"), "cuda"
    )
    run.train()
    assert run.log[-1].loss < 0.8 * run.log[0].loss
    found = z_scores(run.layout, run.model.cpu().numpy(), run.initial.cpu().numpy(), {"key": run.keys[0]}, "cuda")
    assert found["balanced-anchor/v1"]["key"] > 5
