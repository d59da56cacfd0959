"""A LoRA adapter of a small Llama, trained by a federation with the mark, and what is done to it (docs/lora.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quorumark.align.lora import Base, Lora, gauge_suspect
from quorumark.consortium.records import anchor_digest
from quorumark.errors import InputError
from quorumark.model.layout import ModelLayout
from quorumark.model.statistic import canonical_form
from quorumark.model.suspect import read_suspect
from quorumark.research.known import KnownKey, SeededKey, TensorsInMemory
from quorumark.setup.inprocess import deal_key
from quorumark.verify.query import prepare
from quorumark.verify.reference import Reference, describe_lora
from tests.kit.ceremony import identities, make_terms

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quorumark.align.trace import derive_groups  # noqa: E402
from quorumark.research.attacks import Target, chain  # noqa: E402
from quorumark.research.attacks.lora import change_rank, merge, refactor  # noqa: E402
from tests.kit import lora_lab as lab  # noqa: E402

pytestmark = pytest.mark.research

WORDS = {"input_ids": torch.arange(12)[None]}


@pytest.fixture(scope="module")
def marked() -> lab.Run:
    return lab.marked()


@pytest.fixture(scope="module")
def lora(marked: lab.Run) -> Lora:
    return describe_lora(marked.layout, lab.base())


def z_of(marked: lab.Run, lora: Lora, suspect: Any) -> float:
    base, anchor = read_suspect(lab.base()), TensorsInMemory(marked.anchor)
    return marked.known.z(gauge_suspect(read_suspect(suspect), marked.layout, anchor, lora, lambda: Base(base, base)))


def quantised(state: lab.State, bits: int) -> lab.State:
    out = dict(state)
    for name, w in state.items():
        if name.endswith("_proj.weight"):
            step = w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            out[name] = (w / step).round() * step
    return out


def pruned(state: lab.State, part: float) -> lab.State:
    out = dict(state)
    for name, w in state.items():
        if name.endswith("_proj.weight"):
            out[name] = torch.where(w.abs() < w.abs().flatten().quantile(part), torch.zeros(()), w)
    return out


def tuned_whole(state: lab.State, words: Any, rate: float, epochs: int) -> lab.State:
    module = lab.llama()
    module.load_state_dict(state)
    lab.train(module, words, rate, 5, epochs)
    return lab.copied(module.state_dict())


def test_the_strength_rule_takes_factors_as_they_are(marked: lab.Run) -> None:
    """B begins at 0 and A at random; the mark begins in round 3, comes to its ρ, and both factors carry it alike."""
    assert marked.reached[:2] == [0, 0]
    assert 0.13 < marked.reached[-1] < 0.16
    form = marked.known.form(TensorsInMemory(marked.released))
    for factor in ("lora_A", "lora_B"):
        places = [place for spec, place in marked.layout.spans("carrier") if factor in spec.name]
        x = np.concatenate([form.x[place] for place in places]).astype(np.float64)
        key = np.concatenate([marked.key[place] for place in places])
        assert x @ key / np.linalg.norm(x) > 10


@pytest.mark.parametrize("condition", [1.0, 100.0])
def test_re_factoring_is_by_a_matrix_of_that_condition(condition: float) -> None:
    generator = torch.Generator().manual_seed(0)
    adapter = {
        "x.lora_A.weight": torch.randn(8, 50, generator=generator, dtype=torch.float64),
        "x.lora_B.weight": torch.randn(40, 8, generator=generator, dtype=torch.float64),
    }
    other = refactor(adapter, 1, condition)
    (down, up), (new_down, new_up) = ([m[f"x.lora_{f}.weight"] for f in "AB"] for m in (adapter, other))
    assert torch.allclose(new_up @ new_down, up @ down)
    turn = new_down @ torch.linalg.pinv(down)
    assert torch.allclose(turn @ down, new_down)
    assert float(torch.linalg.cond(turn)) == pytest.approx(condition, rel=1e-6)
    assert (new_down - down).norm() > 0.5 * down.norm()


def test_merging_adds_the_product_at_its_strength() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 20, generator=generator), torch.randn(10, 4, generator=generator)
    adapter = {"base_model.model.x.lora_A.weight": a, "base_model.model.x.lora_B.weight": b}
    base = {"x.weight": torch.randn(10, 20, generator=generator).bfloat16(), "y.weight": torch.ones(3)}
    found = merge(adapter, base, 0.5)
    assert found["x.weight"].dtype == torch.bfloat16
    expected = base["x.weight"].double() + 0.5 * b.double() @ a.double()
    assert torch.equal(found["x.weight"], expected.bfloat16())
    assert torch.equal(found["y.weight"], base["y.weight"])
    with pytest.raises(InputError, match=r"without 'x\.weight'"):
        merge(adapter, {"y.weight": torch.ones(3)}, 0.5)
    with pytest.raises(InputError, match="lora_A"):
        merge({"z": a}, base, 0.5)


def test_what_is_left_of_a_trained_mark(marked: lab.Run, lora: Lora) -> None:
    released, more, merged = marked.released, lab.sentences(8)[:512], lab.merged(marked.released)
    z = marked.known.z(released)
    assert z > 16
    cases: dict[str, tuple[Any, float]] = {
        "as released": (released, 0.9),
        "re-factored": (refactor(released, 1), 0.9),
        "re-extracted": (change_rank(released, 8), 0.9),
        "of rank 16": (change_rank(released, 16), 0.9),
        "of rank 6": (change_rank(released, 6), 0.6),
        "of rank 4": (change_rank(released, 4), 0.4),
        "merged": (merged, 0.9),
        "merged at half strength": (lab.merged(released, 0.5), 0.9),
        "merged, bfloat16": ({n: w.bfloat16() for n, w in merged.items()}, 0.9),
        "merged, 8 bits": (quantised(merged, 8), 0.9),
        "merged, 4 bits": (quantised(merged, 4), 0.8),
        "merged, half pruned": (pruned(merged, 0.5), 0.7),
        "adapter trained on": (lab.tuned(released, more, 1e-3, 5, 2), 0.7),
        "re-factored, trained on": (lab.tuned(refactor(released, 2), more, 1e-3, 5, 2), 0.6),
        "merged, trained on": (tuned_whole(merged, more, 3e-4, 2), 0.8),
    }
    kept = {text: z_of(marked, lora, suspect) / z for text, (suspect, _) in cases.items()}
    assert all(kept[text] > least for text, (_, least) in cases.items())
    # without the gauge other factors of the same product show nothing
    assert abs(marked.known.z(refactor(released, 1))) < 4


def test_innocent_adapters(marked: lab.Run, lora: Lora) -> None:
    """24 adapters trained on other texts, half of them from the same beginning; half of them merged."""
    found = []
    for seed in range(24):
        start = marked.anchor if seed % 2 else lab.fresh(200 + seed)
        model = lab.tuned(start, lab.sentences(300 + seed, 96), 5e-3, seed, 2)
        found.append(z_of(marked, lora, model if seed % 4 < 2 else lab.merged(model)))
    assert max(map(abs, found)) < 4
    assert abs(np.mean(found)) < 4 / np.sqrt(24)


def test_random_keys_on_the_released_adapter(marked: lab.Run, lora: Lora) -> None:
    from scipy import stats

    anchor = TensorsInMemory(marked.anchor)
    gauged = gauge_suspect(read_suspect(refactor(marked.released, 3)), marked.layout, anchor, lora)
    form = canonical_form("balanced-anchor/v1", marked.layout, gauged, anchor)
    size = marked.layout.coordinates
    zs = [KnownKey(SeededKey(size, 1, n).numpy(), marked.layout, anchor).z_of(form) for n in range(2000)]
    assert stats.kstest(zs, "norm").pvalue > 1e-4


@pytest.mark.parametrize("turn", [[], [("residual-rotation", {})]], ids=["moved", "turned and moved"])
def test_a_merged_model_with_its_channels_moved(marked: lab.Run, lora: Lora, turn: list[Any]) -> None:
    """Permuted and rescaled, its stream turned: the base's groups put it back before the base is taken away."""
    groups = derive_groups(lab.llama(), WORDS)
    layout: ModelLayout = marked.layout
    people = identities(3)
    terms = make_terms(
        people, 2, layout.coordinates, layout=layout.digest(), setup="dealer",
        anchor=anchor_digest(layout.digest(), layout.encode(marked.anchor)),
        policy={"z": "6", "groups": groups.digest(), "lora": lora.digest()},
    )  # fmt: skip
    manifest, _ = deal_key(people, terms)
    reference = Reference.of([manifest], layout, marked.anchor, groups, lora, lab.base())
    target = Target(lab.llama, lab.merged(marked.released), example=WORDS)
    hidden = chain(target, [*turn, ("permutation", {}), ("rescaling", {})], seed=3).weights
    plain = marked.known.z_of(prepare(reference, hidden, lora=True).form)
    prepared = prepare(reference, hidden, lora=True, align=True)
    assert abs(plain) < 4
    assert marked.known.z_of(prepared.form) > 0.7 * marked.known.z(marked.released)
    expected = f"anchor-assignment/v1:{groups.digest()}+anchor-gauge/v1:{lora.digest()}"
    assert prepared.query.alignment == expected
    assert any(reason.code.startswith("read.aligned") for reason in prepared.query.matching)
