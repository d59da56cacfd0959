"""Each attack does what it says, costs what it says, and what it does to the mark is measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quorumark.consortium.strength import Strength
from quorumark.errors import InputError

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from quorumark.model.blocks import blocks_of  # noqa: E402
from quorumark.research import attacks  # noqa: E402
from quorumark.research.attacks import ATTACKS, Target, chain, estimate_key, public_scales, run, transfer_rate  # noqa: E402
from quorumark.research.attacks.amounts import zeroed  # noqa: E402
from quorumark.research.attacks.by_layers import parts_of  # noqa: E402
from quorumark.research.attacks.compact import compacted  # noqa: E402
from quorumark.research.known import TensorsInMemory  # noqa: E402
from tests.kit import lab  # noqa: E402

MEMBERS = 5
TRANSFORMERS = {"rotation": ("gpt2", "llama"), "residual-rotation": ("llama",)}  # attacks on such models only
NORMS = {"signs": [name for name in lab.MODELS if name not in ("mlp", "cnn")]}  # others have none to change

pytestmark = pytest.mark.research


@pytest.fixture(scope="module")
def marked() -> lab.Run:
    """Five members train the small CNN; its z is about 20."""
    return lab.marked("cnn", rho="0.1", members=MEMBERS)


@pytest.fixture(scope="module")
def target(marked: lab.Run) -> Target:
    return marked.target(
        layout=marked.layout,
        checkpoints=marked.checkpoints,
        scales=public_scales(
            marked.layout, Strength.of(marked.strength, marked.layout.coordinates), marked.checkpoints
        ),
        own=[np.sum(updates[:2], axis=0) for updates in marked.own],  # of the first two members
        other=lab.trained(marked.make, marked.checkpoints[0], lab.data_of("cnn"), 5, 3, 2e-3),
        base=marked.checkpoints[0],
        oracle=lambda weights: marked.known.z_by_block(marked.known.form(TensorsInMemory(weights))),
    )


def carriers(marked: lab.Run, weights: Any) -> Any:
    return torch.cat([weights[spec.name].flatten() for spec, _ in marked.layout.spans("carrier")])


def cosine(one: Any, two: Any) -> float:
    return float(one @ two / (np.linalg.norm(one) * np.linalg.norm(two)))


# --- the registry -----------------------------------------------------------------------------------------


def test_every_attack_runs_and_records_its_costs(marked: lab.Run, target: Target) -> None:
    trained = ("fine-tuning", "adaptive-fine-tuning", "distillation", "adaptive-by-part", "removal")
    short = {name: {"epochs": 1} for name in trained}
    for name, attack in ATTACKS.items():
        assert attack.name == name
        if name in TRANSFORMERS:
            with pytest.raises(InputError, match="must have attention or norms as GPT-2 or Llama"):
                run(name, target, seed=1)
            continue
        for settings in (attack.settings[0], attack.settings[-1]):
            state = torch.get_rng_state()
            result = run(name, target, seed=1, **settings, **short.get(name, {}))
            assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers were used"
            assert result.weights.keys() == marked.released.keys()
            assert (result.steps > 0) == (result.examples > 0) == (name in short)
            assert result.seconds > 0
            assert result.budget.items() >= settings.items()
            module = target.module(result.weights)
            assert 0.05 < lab.accuracy(module) <= 1


def test_the_released_model_is_left_alone(marked: lab.Run, target: Target) -> None:
    before = {name: tensor.clone() for name, tensor in marked.released.items()}
    for name in ("pruning", "permutation", "rescaling", "splitting", "structured-pruning"):
        run(name, target, seed=3)
    run("fine-tuning", target, seed=3, epochs=1)
    assert all(torch.equal(before[name], tensor) for name, tensor in marked.released.items())


@pytest.mark.parametrize("name", ["fine-tuning", "noise", "permutation", "padding", "distillation"])
def test_a_seed_is_a_seed(target: Target, name: str) -> None:
    settings = {"epochs": 1} if name in ("fine-tuning", "distillation") else {}
    one, two, other = (run(name, target, seed=seed, **settings).weights for seed in (1, 1, 2))
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert any(not torch.equal(one[n], other[n]) for n in one)


def test_what_cannot_be_run_says_why(marked: lab.Run, target: Target) -> None:
    bare = Target(marked.make, marked.released)
    for name, match in (
        ("shrinking", "attack must be one of adaptive-by-part, "),
        ("fine-tuning", "must have data"),
        ("adaptive-fine-tuning", "must have data"),
        ("averaging", "must have other"),
        ("merging", "must have base"),
        ("permutation", "must have data or an example"),
    ):
        with pytest.raises(InputError, match=match):
            run(name, bare)
    for name, settings in (
        ("fine-tuning", {"fraction": 0}),
        ("adaptive-fine-tuning", {"alpha": 2}),
        ("adaptive-fine-tuning", {"estimate": "prayer"}),
        ("quantisation", {"scheme": "static1"}),
        ("pruning", {"ratio": 1.5}),
        ("channel-removal", {"ratio": 1.0}),
    ):
        with pytest.raises(InputError):
            run(name, target, **settings)
    with pytest.raises(InputError, match="steps must name"):
        chain(target, [])


# --- training ---------------------------------------------------------------------------------------------


def test_fine_tuning(marked: lab.Run, target: Target) -> None:
    labels = lab.data_of("cnn")[1]
    result = run("fine-tuning", target, seed=3, fraction=0.2, epochs=20)
    assert result.examples == round(0.2 * len(labels))
    assert result.steps == 20 * -(-result.examples // 128)
    first = run("fine-tuning", target, seed=3, fraction=0.2, epochs=1)
    assert result.notes["loss"] < first.notes["loss"]
    z = marked.z(result.weights)
    assert 10 < z < marked.z(marked.released)
    # the paper's settings are the defaults
    defaults = attacks.learning.fine_tune.__kwdefaults__
    assert defaults == {"fraction": 0.2, "epochs": 100, "batch": 128, "learning_rate": 1e-3, "decay": 1e-4}
    assert [s["fraction"] for s in ATTACKS["fine-tuning"].settings] == [0.01, 0.05, 0.1, 0.2]


def test_a_batch_of_one_is_left_out() -> None:
    """BatchNorm has no statistics of one example; where there is only one, there is nothing to leave out."""

    def make() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))

    inputs = torch.randn(129, 4, generator=torch.Generator().manual_seed(0))
    target = Target(make, make().state_dict(), (inputs, (inputs[:, 0] > 0).long()))
    result = run("fine-tuning", target, seed=1, fraction=1.0, epochs=3)
    assert (result.examples, result.steps) == (129, 3)
    assert run("fine-tuning", target, seed=1, fraction=1.0, epochs=3, batch=43).steps == 9
    plain = Target(lambda: torch.nn.Linear(4, 2), torch.nn.Linear(4, 2).state_dict(), target.data)
    assert run("fine-tuning", plain, seed=1, fraction=0.008, epochs=3).steps == 3
    assert run("fine-tuning", plain, seed=1, fraction=0.1, epochs=1, batch=1).steps == 13


def test_from_the_anchor_the_way_is_turned_and_not_the_weights(marked: lab.Run, target: Target) -> None:
    """|cos(θ − θ_0, τ′)| instead of |cos(θ, τ′)|: the first falls to nothing."""
    guess, start = estimate_key(target, "regression"), carriers(marked, marked.checkpoints[0])
    settings: dict[str, Any] = {"fraction": 0.2, "epochs": 40, "alpha": 0.9, "estimate": "regression"}
    angles, scores = {}, {}
    for from_anchor in (False, True):
        found = run("adaptive-fine-tuning", target, seed=3, from_anchor=from_anchor, **settings).weights
        angles[from_anchor] = abs(cosine((carriers(marked, found) - start).numpy(), guess))
        scores[from_anchor] = marked.z(found)
    assert angles[True] < 0.01 < 0.02 < angles[False]
    assert scores[True] < 0


def test_estimates_of_the_key(marked: lab.Run, target: Target) -> None:
    """What an attacker sees of the key grows with what it knows: all of it is measured against the real one."""
    total = estimate_key(target, "sum")
    telescoped = carriers(marked, marked.checkpoints[-1]) - carriers(marked, marked.checkpoints[0])
    assert np.allclose(total, telescoped.numpy(), atol=1e-6)
    for count in (1, 5):
        moved = carriers(marked, marked.checkpoints[-1]) - carriers(marked, marked.checkpoints[-1 - count])
        assert np.allclose(estimate_key(target, "last", last=count), moved.numpy(), atol=1e-6)
    found = {
        (how, coalition): cosine(estimate_key(target, how, coalition=coalition), marked.key)
        for how in ("sum", "last", "regression", "gls")
        for coalition in (False, True)
    }
    assert all(value > 0.03 for value in found.values())  # chance: 0.004
    said = {False: (0.068, 0.065, 0.091, 0.267), True: (0.111, 0.100, 0.138, 0.447)}  # docs/attacks.md
    for coalition, row in said.items():
        for how, value in zip(("sum", "last", "regression", "gls"), row, strict=True):
            assert found[how, coalition] == pytest.approx(value, abs=0.02)
    assert found["regression", False] > found["sum", False]
    for how in ("sum", "last", "regression", "gls"):
        assert found[how, True] > found[how, False]
    for coalition in (False, True):
        assert found["gls", coalition] > found["regression", coalition]
    with pytest.raises(InputError, match="must have scales for each of the 12 rounds"):
        estimate_key(marked.target(checkpoints=marked.checkpoints), "regression")
    with pytest.raises(InputError, match="two checkpoints"):
        estimate_key(marked.target())


def test_adaptive_fine_tuning(marked: lab.Run, target: Target) -> None:
    settings: dict[str, Any] = {"fraction": 0.2, "epochs": 15}
    guess = estimate_key(target, "sum")
    plain = run("fine-tuning", target, seed=3, **settings)
    same = run("adaptive-fine-tuning", target, seed=3, alpha=0.0, **settings)
    assert all(torch.allclose(plain.weights[n], same.weights[n], atol=1e-6) for n in plain.weights)
    angles, scores = [], []
    for alpha in (0.0, 0.3, 0.7):
        weights = run("adaptive-fine-tuning", target, seed=3, alpha=alpha, **settings).weights
        angles.append(abs(cosine(carriers(marked, weights).numpy(), guess)))
        scores.append(marked.z(weights))
    assert angles[0] > 1.2 * angles[1] > 1.2 * angles[2] > 0
    assert scores[0] > scores[1]
    assert scores[0] > scores[2]
    # what a coalition of two knows does more harm than the public models alone
    coalition = run(
        "adaptive-fine-tuning", target, seed=3, alpha=0.7, estimate="regression", coalition=True, **settings
    )
    assert marked.z(coalition.weights) < scores[2]


def test_distillation(marked: lab.Run, target: Target) -> None:
    result = run("distillation", target, seed=3, fraction=0.5, epochs=15)
    teacher, student = target.module(), target.module(result.weights)
    assert result.notes["loss"] < run("distillation", target, seed=3, fraction=0.5, epochs=1).notes["loss"]
    assert result.notes["agreement"] > 0.9
    inputs = lab.digits()[0][1437:]
    assert transfer_rate(teacher, student, inputs) > 0.8
    assert transfer_rate(teacher, teacher, inputs) == 1
    # a mark in the weights does not pass to a student: this attack works, and costs a training
    assert abs(marked.z(result.weights)) < 4
    assert abs(marked.z_aligned(result.weights)) < 4


def test_distillation_is_what_its_formula_says() -> None:
    """α·KL(σ(z_s/T) ‖ σ(z_t/T)) + (1 − α)·CE with T = 3, α = 0.5, by Adam: beside a plain loop."""

    def make() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(100, 4, generator=generator)
    teacher = make()
    labels = torch.randint(0, 3, (100,), generator=generator)
    target = Target(make, {n: 3 * w for n, w in teacher.state_dict().items()}, (inputs, labels))
    found = run("distillation", target, seed=5, fraction=0.5, epochs=4, batch=20)
    chosen = torch.randperm(100, generator=torch.Generator().manual_seed(5))[:50]
    order = torch.Generator().manual_seed(5)
    teacher = target.module()
    torch.manual_seed(5)
    student = make()
    adam = torch.optim.Adam(student.parameters(), lr=1e-3)
    for _ in range(4):
        for part in torch.randperm(50, generator=order).split(20):
            x, y = inputs[chosen][part], labels[chosen][part]
            ours, theirs = (torch.softmax(net(x) / 3.0, -1) for net in (student, teacher))
            divergence = (ours * (ours.log() - theirs.detach().log())).sum(-1).mean()
            adam.zero_grad()
            (0.5 * divergence + 0.5 * torch.nn.functional.cross_entropy(student(x), y)).backward()
            adam.step()
    for name, tensor in student.state_dict().items():
        assert torch.allclose(found.weights[name], tensor, atol=1e-5)


# --- weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "levels"), [("static8", 255), ("static4", 15), ("dynamic8", 255)])
def test_quantisation(marked: lab.Run, target: Target, scheme: str, levels: int) -> None:
    weights = run("quantisation", target, scheme=scheme).weights
    for name, tensor in weights.items():
        original = marked.released[name]
        if name not in target.carriers:
            assert torch.equal(tensor, original)
            continue
        pieces = tensor.flatten(1) if scheme == "dynamic8" else tensor.flatten()[None]
        originals = original.flatten(1) if scheme == "dynamic8" else original.flatten()[None]
        for piece, before in zip(pieces, originals, strict=True):
            assert piece.unique().numel() <= levels
            step = before.abs().max() / (levels // 2)
            assert float((piece - before).abs().max()) <= 0.5001 * float(step)
    assert marked.z(weights) > (0.9 if "8" in scheme else 0.5) * marked.z(marked.released)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7, 0.9])
def test_pruning(marked: lab.Run, target: Target, ratio: float) -> None:
    weights = run("pruning", target, ratio=ratio).weights
    before, after = carriers(marked, marked.released), carriers(marked, weights)
    gone = after == 0
    assert int(gone.sum()) == int(ratio * before.numel())
    assert torch.equal(after[~gone], before[~gone])
    assert float(before[gone].abs().max()) <= float(before[~gone].abs().min())
    assert marked.z(weights) > 6


@pytest.mark.parametrize("ratio", [0.3, 0.9])
def test_structured_pruning(marked: lab.Run, target: Target, ratio: float) -> None:
    weights = run("structured-pruning", target, ratio=ratio).weights
    for name in target.carriers[:-1]:
        sizes = marked.released[name].flatten(1).abs().sum(1)
        gone = ~weights[name].flatten(1).any(1)
        assert int(gone.sum()) == int(ratio * len(sizes))
        assert sizes[gone].max() <= sizes[~gone].min()
    assert torch.equal(weights[target.carriers[-1]], marked.released[target.carriers[-1]])


def test_noise_another_mark_and_an_average(marked: lab.Run, target: Target) -> None:
    noisy = run("noise", target, seed=2, strength=0.2).weights
    for name in target.carriers:
        difference = noisy[name] - marked.released[name]
        if difference.numel() > 1000:
            assert float(difference.std() / marked.released[name].std()) == pytest.approx(0.2, rel=0.1)
    z = marked.z(marked.released)
    assert 0.8 * z < marked.z(noisy)
    over = run("overwriting", target, seed=2, strength=0.1).weights
    moved = (carriers(marked, over) - carriers(marked, marked.released)).numpy()
    size = (carriers(marked, marked.released) - carriers(marked, marked.checkpoints[0])).numpy()
    assert np.linalg.norm(moved) / np.linalg.norm(size) == pytest.approx(0.1, rel=0.01)
    assert marked.z(over) > 0.9 * z  # one mark lies beside the other
    mean = run("averaging", target, share=0.25).weights
    assert target.other is not None
    for name, tensor in mean.items():
        assert torch.allclose(tensor, 0.75 * marked.released[name] + 0.25 * target.other[name], atol=1e-7)
    assert 6 < marked.z(mean) < z


@pytest.mark.parametrize("strength", [0.5, 0.9, 1.3])
def test_merging_with_the_initial_model(marked: lab.Run, target: Target, strength: float) -> None:
    """The mark lies along θ − θ_0: a part of it is as good as all, after the anchor is taken out."""
    weights = run("merging", target, strength=strength).weights
    for name, w in weights.items():
        start = marked.checkpoints[0][name]
        assert torch.allclose(w, start + strength * (marked.released[name] - start), atol=1e-6)
    assert marked.z(weights) == pytest.approx(marked.z(marked.released), rel=0.1)


# --- the function stays -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        (m, name)
        for m in lab.MODELS
        for name, a in ATTACKS.items()
        if a.keeps and m in (NORMS | TRANSFORMERS).get(name, lab.MODELS)
    ],
)
def test_what_keeps_the_function_keeps_it(name: str, attack: str) -> None:
    run_ = lab.marked(name, rho="0.1")
    target = run_.target(checkpoints=run_.checkpoints)
    weights = run(attack, target, seed=4).weights
    changed = [
        n for n, t in weights.items() if t.shape != run_.released[n].shape or not torch.equal(t, run_.released[n])
    ]
    assert changed
    inputs = lab.data_of(name)[0][:32]
    with torch.no_grad():
        before, after = (lab.logits(target.module(w).eval(), inputs) for w in (run_.released, weights))
    assert float((after - before).abs().max()) < 1e-4 * float(before.abs().max())
    if attack == "permutation":
        assert abs(run_.z(weights)) < 4


def test_resized_models(target: Target) -> None:
    shapes = lambda weights: [tuple(weights[name].shape) for name in target.carriers]  # noqa: E731
    original = shapes(target.weights)
    assert original == [(24, 1, 3, 3), (32, 24, 3, 3), (128, 512), (10, 128)]
    smaller = run("channel-removal", target, ratio=0.5).weights
    assert shapes(smaller) == [(12, 1, 3, 3), (16, 12, 3, 3), (64, 256), (10, 64)]
    larger = [(30, 1, 3, 3), (40, 30, 3, 3), (160, 640), (10, 160)]
    assert shapes(run("padding", target, ratio=0.25).weights) == larger
    assert shapes(run("splitting", target, ratio=0.25).weights) == larger
    module = target.module(smaller)
    assert (module[2].in_channels, module[2].out_channels, module[6].in_features) == (12, 16, 256)
    norm = torch.nn.Sequential(torch.nn.LayerNorm(8))
    with pytest.raises(InputError, match="cannot be resized"):
        attacks.fitted(norm, {"0.weight": torch.ones(4), "0.bias": torch.ones(4)})


def test_what_is_removed_is_the_smallest() -> None:
    """Half of the neurons say next to nothing: without them the function is the same."""

    def make() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    torch.manual_seed(0)
    module = make()
    with torch.no_grad():
        for weight in (module[0].weight, module[0].bias, module[2].weight.T):
            weight[[1, 2, 5, 6]] *= 1e-4
    inputs = torch.randn(50, 6)
    target = Target(make, module.state_dict(), (inputs, torch.zeros(50, dtype=torch.int64)))
    result = run("channel-removal", target, seed=1, ratio=0.5)
    assert result.weights["0.weight"].shape == (4, 6)
    with torch.no_grad():
        assert torch.allclose(target.module(result.weights)(inputs), module(inputs), atol=1e-5)


def test_decoys_mislead_alignment_and_show(marked: lab.Run, target: Target) -> None:
    """A known limit: at three times the width the anchor's own channels are there to be found; the width shows."""
    result = run("decoys", target, seed=2)
    assert result.notes["channels"] == 2 * (24 + 32 + 128)
    assert marked.z_aligned(result.weights) < 6
    assert marked.align(result.weights).surplus == result.notes["channels"]
    assert marked.align(run("permutation", target, seed=2).weights).surplus == 0


@pytest.mark.parametrize("attack", ["decoys", "padding", "splitting"])
def test_an_examiner_takes_out_channels_that_do_nothing(marked: lab.Run, target: Target, attack: str) -> None:
    """The function stays, and what is left has the sizes of the released model and its mark; a trained model stays."""
    hidden = run(attack, target, seed=1)
    weights, gone = compacted(target.with_weights(hidden.weights))
    assert gone == hidden.notes["channels"] > 0
    assert {name: w.shape for name, w in weights.items()} == {name: w.shape for name, w in target.weights.items()}
    inputs = lab.data_of(marked.name)[0][:64]
    with torch.no_grad():
        before, after = (lab.logits(target.module(w).eval(), inputs) for w in (hidden.weights, weights))
    assert torch.allclose(before, after, rtol=1e-3, atol=1e-3)
    assert marked.align(weights).surplus == 0
    assert marked.z_aligned(weights) > 0.98 * marked.z(marked.released)
    if attack == "decoys":
        assert marked.z_aligned(hidden.weights) < 6, "else there is nothing to undo"
    assert compacted(target)[1] == 0


def test_groups_that_are_known_are_those_of_the_model_as_it_was(target: Target) -> None:
    """Where an attack changes sizes, the next one finds them again."""
    from dataclasses import replace

    known = replace(target, known=target.groups)
    steps: list[tuple[str, dict[str, Any]]] = [("channel-removal", {"ratio": 0.25}), ("permutation", {})]
    told, found = (chain(each, steps, seed=1).weights for each in (known, target))
    assert all(torch.equal(told[name], found[name]) for name in found)
    assert known.with_weights(target.weights).known is not None


def test_chains(marked: lab.Run, target: Target) -> None:
    steps: list[tuple[str, dict[str, Any]]] = [
        ("fine-tuning", {"epochs": 2, "fraction": 0.2}),
        ("splitting", {"ratio": 0.25}),
        ("permutation", {}),
        ("rescaling", {}),
        ("fine-tuning", {"epochs": 3, "fraction": 0.1}),
        ("quantisation", {"scheme": "dynamic8"}),
    ]
    result = chain(target, steps, seed=1)
    assert result.attack == "fine-tuning + splitting + permutation + rescaling + fine-tuning + quantisation"
    assert result.examples == 287
    assert result.steps == 2 * 3 + 3 * 2
    assert result.settings["5.scheme"] == "dynamic8"
    assert lab.accuracy(target.module(result.weights)) > 0.8
    assert marked.z_aligned(result.weights) > 0.8 * marked.z(marked.released)


# --- attackers who know the test by layers ----------------------------------------------------------------


def test_parts_are_the_agreed_blocks_or_rows(marked: lab.Run) -> None:
    blocks, rows = (parts_of(marked.layout, by) for by in ("block", "row"))
    assert blocks.size == rows.size == marked.layout.coordinates
    assert int(blocks[-1]) + 1 == blocks_of(marked.layout).count
    assert int(rows[-1]) + 1 == sum(spec.shape[0] for spec, _ in marked.layout.spans("carrier"))
    with pytest.raises(InputError, match="block or row"):
        parts_of(marked.layout, "tensor")


def test_an_oracle_takes_the_mark_out_of_every_block_and_an_expectation_does_not(
    marked: lab.Run, target: Target
) -> None:
    def q(**settings: Any) -> float:
        result = run("removal", target, seed=1, estimate="gls", coalition=True, epochs=0, **settings)
        if settings["amounts"] == "oracle":
            assert result.notes["left"] < 1, "z of each block right after the removal"
        else:
            assert "left" not in result.notes
        weights = result.weights
        found = marked.known.q_of(marked.known.form(TensorsInMemory(weights)))
        assert found is not None
        return found[0]

    blocks = blocks_of(marked.layout).count
    assert q(amounts="oracle") < 0.5 * blocks
    assert q(amounts="expected", rho=0.1) > 2 * blocks


def _blocks(like: float, seed: int = 0, blocks: int = 12, size: int = 4096) -> tuple[Any, Any, Any]:
    """Marked blocks, the key, and an estimate: what resembles the blocks by a cosine of about `like`, and a mark."""
    rng = np.random.default_rng(seed)
    key = rng.choice(np.array([-1.0, 1.0]), (blocks, size))
    moved = rng.standard_normal((blocks, size)) + 0.06 * key
    guess = like * moved + np.sqrt(1 - like**2) * rng.standard_normal((blocks, size)) + 0.05 * (1 - like) * key
    return key, moved, guess


def _secant(asked: Any, scale: Any, asks: int = 4) -> Any:
    """A secant in each block without anything that holds it."""
    before, now = np.zeros_like(scale), 0.1 * scale
    was = asked(before)
    for _ in range(asks - 1):
        found = asked(now)
        slope = np.where(np.abs(found - was) > 1e-9, found - was, np.inf)
        before, now, was = now, now - found * (now - before) / slope, found
    return now


@pytest.mark.parametrize("like", [0.0, 0.3, 0.6, 0.9, 0.99])
def test_amounts_are_exact_however_much_the_estimate_resembles_the_update(like: float) -> None:
    key, moved, guess = _blocks(like)

    def asked(taken: Any) -> Any:
        left = moved - taken[:, None] * guess
        return (left * key).sum(1) / np.linalg.norm(left, axis=1)

    scale = np.linalg.norm(moved, axis=1) / np.linalg.norm(guess, axis=1)
    exact = (moved * key).sum(1) / (guess * key).sum(1)
    found = zeroed(asked, scale)
    assert found.found
    assert found.left < 0.1
    assert found.asked <= 40
    assert np.abs(found.taken - exact).max() < 0.05 * np.abs(exact).max()
    # an unguarded secant leaves for good where z rises before it falls
    if like >= 0.6:
        assert np.abs(asked(_secant(asked, scale))).max() > 3
    if like >= 0.9:
        assert np.abs(_secant(asked, scale)).max() > 100


def test_amounts_that_do_not_exist_are_reported_and_do_no_harm() -> None:
    """No amount takes the mark out of a block where the estimate knows nothing of it, or where the oracle is blind."""
    key, moved, guess = _blocks(0.0)
    guess[3] -= (guess[3] @ key[3]) / key.shape[1] * key[3]  # at right angles to the key

    def asked(taken: Any) -> Any:
        left = moved - taken[:, None] * guess
        return (left * key).sum(1) / np.linalg.norm(left, axis=1)

    found = zeroed(asked, np.linalg.norm(moved, axis=1) / np.linalg.norm(guess, axis=1))
    assert not found.found
    assert found.asked <= 40
    assert (np.abs(found.z) <= np.abs(asked(np.zeros(12))) + 1e-9).all()
    assert (np.abs(np.delete(found.z, 3)) < 0.1).all(), "the others are at 0 nevertheless"
    constant = zeroed(lambda _: np.full(2, 9.0), np.ones(2))
    assert constant.left == 9.0
    assert not constant.taken.any()
    backwards = zeroed(lambda taken: 5.0 + 10 * taken, np.ones(2))  # the estimate points the other way
    assert backwards.found
    assert np.allclose(backwards.taken, -0.5, atol=0.01)
    assert zeroed(lambda _: np.full(1, 3.0), np.zeros(1)).asked == 2  # a block that did not move


@pytest.mark.parametrize("weights", ["even", "random", "alternating"])
def test_penalties_by_part_keep_each_cosine_small(marked: lab.Run, target: Target, weights: str) -> None:
    settings: dict[str, Any] = {"estimate": "gls", "coalition": True, "alpha": 0.9, "epochs": 10, "fraction": 0.2}
    guess = estimate_key(target, "gls", coalition=True)
    parts = parts_of(marked.layout, "block")

    def cosines(changed: Any) -> Any:
        moved = (carriers(marked, changed) - carriers(marked, marked.checkpoints[0])).numpy()
        return [cosine(moved[parts == b], guess[parts == b]) for b in range(int(parts[-1]) + 1)]

    before = cosines(marked.released)
    after = cosines(run("adaptive-by-part", target, seed=1, weights=weights, **settings).weights)
    assert max(map(abs, after)) < 0.5 * min(map(abs, before))
    with pytest.raises(InputError, match="even, random or alternating"):
        run("adaptive-by-part", target, seed=1, **{**settings, "weights": "odd"})
