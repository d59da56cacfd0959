"""Attacks on language models: tiny GPT-2 and Llama models, so that every one of them takes a second."""

from __future__ import annotations

from collections.abc import Callable
from math import floor
from typing import Any

import numpy as np
import pytest

from quorumark.errors import InputError

torch = pytest.importorskip("torch")
import transformers  # noqa: E402

from quorumark.research.attacks import ATTACKS, Target, run, transfer_rate  # noqa: E402

pytestmark = pytest.mark.research

torch.set_num_threads(1)


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=4, use_cache=False, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def llama(**more: Any) -> Any:
    """Six heads of queries, three of keys and values."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=40, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
            head_dim=8, num_key_value_heads=3, max_position_embeddings=32, use_cache=False, bos_token_id=0,
            eos_token_id=0, **more,
        )
    )  # fmt: skip


def tied_llama() -> Any:
    return llama(tie_word_embeddings=True, attention_bias=True)


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "llama": llama, "tied-llama": tied_llama}


def words(seed: int, count: int = 64) -> Any:
    """Made-up text: each word is mostly the last one plus a number that is the text's own."""
    rng = np.random.default_rng(seed)
    text = np.empty((count, 12), np.int64)
    text[:, 0] = rng.integers(0, 40, count)
    for t in range(1, 12):
        text[:, t] = (text[:, t - 1] + 1 + 3 * seed + rng.integers(0, 2, count)) % 40
    return torch.from_numpy(text)


def target_of(name: str, dtype: Any = torch.float64) -> Target:
    """Random weights, with gains and biases that differ."""
    torch.manual_seed(3)
    make = lambda: MODELS[name]().to(dtype)  # noqa: E731
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p) if p.dim() < 2 else 0.05 * torch.randn_like(p)
    released = {n: t.detach().clone() for n, t in model.state_dict().items()}
    torch.manual_seed(4)
    base = {n: t.detach().clone() for n, t in make().state_dict().items()}
    text = words(1)
    return Target(make, released, (text, text), example={"input_ids": text[:1]}, base=base)


def logits(target: Target, weights: Any = None) -> Any:
    with torch.no_grad():
        return target.module(weights).eval()(words(2)).logits


def changed(target: Target, weights: Any) -> set[str]:
    """The kinds of layers whose weights are not what they were."""
    return {
        name.removesuffix(".weight").rpartition(".")[2]
        for name, w in weights.items()
        if name.endswith(".weight") and not torch.equal(w, target.weights[name])
    }


# --- rotations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("octaves", [0.0, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_rotations_keep_the_function(name: str, octaves: float) -> None:
    target = target_of(name)
    before = logits(target)
    for part, fused, apart in (
        ("queries-keys", {"c_attn"}, {"q_proj", "k_proj"}),
        ("values-outputs", {"c_attn", "c_proj"}, {"v_proj", "o_proj"}),
        ("all", {"c_attn", "c_proj"}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ):
        result = run("rotation", target, seed=5, part=part, octaves=octaves)
        assert changed(target, result.weights) == (fused if name == "gpt2" else apart)
        assert result.notes["matrices"] == (2 if part == "all" else 1) * 2 * (4 if name == "gpt2" else 3)
        after = logits(target, result.weights)
        assert float((after - before).abs().max()) < 1e-10 * float(before.abs().max())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_rotations_mix_channels(name: str) -> None:
    """Each row of a head becomes a mixture of many (of two with rotary positions), of the same total size."""
    target = target_of(name)
    weights = run("rotation", target, seed=5).weights
    if name == "gpt2":
        layer = "transformer.h.0.attn.c_attn.weight"
        before, after = target.weights[layer].T, weights[layer].T
        heads = [slice(h, h + 8) for h in range(0, 96, 8)]
    else:
        before, after = (w["model.layers.0.self_attn.k_proj.weight"] for w in (target.weights, weights))
        heads = [slice(h, h + 8) for h in range(0, 24, 8)]
    for head in heads:
        by = after[head] @ torch.linalg.pinv(before[head])
        assert torch.allclose(by @ by.T, torch.eye(8, dtype=by.dtype), atol=1e-8)
        assert int((by.abs() > 1e-8).sum(1).max()) == (8 if name == "gpt2" else 2)
        assert float(by.abs().max(1).values.min()) < 0.95  # no permutation


def test_queries_alone_may_not_be_turned_against_positions() -> None:
    """The check above can fail: an orthogonal matrix that mixes other pairs does not commute with the positions."""
    from quorumark.research.attacks.rotation import orthogonal

    target = target_of("llama")
    by = torch.from_numpy(orthogonal(8, np.random.default_rng(0)))
    weights = target.copied()
    for layer, count in (("q", 6), ("k", 3)):
        name = f"model.layers.0.self_attn.{layer}_proj.weight"
        weights[name] = (by @ weights[name].view(count, 8, 48)).reshape(8 * count, 48)
    assert float((logits(target, weights) - logits(target)).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["llama", "tied-llama"])
def test_the_residual_stream_is_turned(name: str) -> None:
    target = target_of(name)
    result = run("residual-rotation", target, seed=5)
    before, after = logits(target), logits(target, result.weights)
    # the model's norms work in float32, whatever the weights are
    assert float((after - before).abs().max()) < 1e-5 * float(before.abs().max())
    assert result.weights.keys() == target.weights.keys()
    gains = {n: w for n, w in result.weights.items() if "norm" in n}
    assert len(gains) == 5
    assert all(bool((w == 1).all()) for w in gains.values())
    embedding, output = (result.weights[n] for n in ("model.embed_tokens.weight", "lm_head.weight"))
    assert not torch.equal(embedding, output)  # both names, each with its own tensor
    original = target.weights["model.embed_tokens.weight"]
    assert torch.allclose(embedding @ embedding.T, original @ original.T)
    assert changed(target, result.weights) >= {"embed_tokens", "o_proj", "down_proj", "q_proj", "up_proj", "lm_head"}
    # and it goes on from there: the module is untied
    again = run("fine-tuning", target.with_weights(result.weights), seed=1, epochs=1, batch=32, fraction=1.0).weights
    assert not torch.equal(again["model.embed_tokens.weight"], again["lm_head.weight"])


def test_what_cannot_be_turned_says_so() -> None:
    with pytest.raises(InputError, match="must have attention or norms as GPT-2 or Llama"):
        run("residual-rotation", target_of("gpt2"))
    for settings in ({"part": "half"}, {"octaves": -1.0}):
        with pytest.raises(InputError):
            run("rotation", target_of("gpt2"), **settings)
    gemma = lambda: transformers.GemmaForCausalLM(  # noqa: E731
        transformers.GemmaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8,
        )
    )  # fmt: skip
    with pytest.raises(InputError, match="GemmaRMSNorm"):  # its gain is 1 + w
        run("residual-rotation", Target(gemma, gemma().state_dict()))


# --- quantisation -----------------------------------------------------------------------------------------


def q8_0(block: list[np.float32]) -> list[np.float32]:
    """ggml's reference, weight by weight."""
    scale = np.float32(max(abs(w) for w in block) / np.float32(127))
    inverse = np.float32(1) / scale if scale else np.float32(0)
    out = []
    for w in block:
        x = np.float32(w * inverse)
        out.append(np.float32(np.float16(scale)) * np.float32(np.sign(x) * floor(abs(x) + np.float32(0.5))))
    return out


def q4_0(block: list[np.float32]) -> list[np.float32]:
    largest = np.float32(0)
    for w in block:
        if abs(w) > abs(largest):
            largest = w
    scale = np.float32(largest / np.float32(-8))
    inverse = np.float32(1) / scale if scale else np.float32(0)
    levels = [min(15, int(np.float32(w * inverse) + np.float32(8.5))) for w in block]
    return [np.float32(np.float16(scale)) * np.float32(q - 8) for q in levels]


def absmax4(block: list[np.float32]) -> list[np.float32]:
    scale = np.float32(max(abs(w) for w in block) / np.float32(7))
    return [scale * np.float32(np.rint(w / scale)) if scale else np.float32(0) for w in block]


@pytest.mark.parametrize(("scheme", "size", "levels"), [("q8_0", 32, 255), ("q4_0", 32, 16), ("absmax4", 64, 15)])
def test_blocks_are_quantised_as_the_format_says(scheme: str, size: int, levels: int) -> None:
    target = target_of("llama", torch.float32)
    target.weights["model.layers.0.mlp.up_proj.weight"][3] = 0.0
    weights = run("quantisation", target, scheme=scheme).weights
    oracle = {"q8_0": q8_0, "q4_0": q4_0, "absmax4": absmax4}[scheme]
    seen = 0
    for name, w in weights.items():
        before = target.weights[name]
        if name not in target.carriers:
            assert torch.equal(w, before)
            continue
        for row, original in zip(w.numpy(), before.numpy(), strict=True):
            for start in range(0, row.size, size):
                expected = np.array(oracle(list(original[start : start + size])), np.float32)
                assert np.array_equal(row[start : start + size], expected)
                assert np.unique(row[start : start + size]).size <= levels
                seen += 1
    assert seen > 500
    half = {n: t.to(torch.bfloat16) for n, t in target.weights.items()}
    assert all(
        t.dtype == torch.bfloat16
        for t in run("quantisation", target.with_weights(half), scheme=scheme).weights.values()
    )


# --- training on text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["words", "mapping", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_fine_tuning_on_other_text(name: str, form: str) -> None:
    """The default loss is that of the next word; what is padded (−100) does not count."""
    target = target_of(name, torch.bfloat16 if form == "bfloat16" else torch.float32)
    other = words(5)
    labels = other.clone()
    inputs: Any = other
    if form == "mapping":
        labels[:, 9:] = -100
        mask = torch.ones_like(other)
        mask[:, 9:] = 0
        inputs = {"input_ids": other, "attention_mask": mask}
    target = Target(target.make, target.weights, (inputs, labels))
    settings = {"fraction": 0.5, "batch": 16, "learning_rate": 1e-2}
    first, last = (run("fine-tuning", target, seed=1, epochs=n, **settings) for n in (1, 25))
    assert (last.examples, last.steps) == (32, 25 * 2)
    assert last.notes["loss"] < 0.6 * first.notes["loss"]
    assert all(last.weights[n].dtype == t.dtype for n, t in target.weights.items())
    # as transformers itself counts it
    if form != "bfloat16":
        module = target.module(last.weights).eval()
        arguments = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
        with torch.no_grad():
            ours, theirs = target.loss(module, inputs, labels), module(**arguments, labels=labels).loss
        assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    single = run("fine-tuning", target, seed=1, epochs=1, batch=1, fraction=0.1, learning_rate=1e-3)
    assert single.steps == single.examples == 6


def test_distillation_of_a_language_model() -> None:
    target = target_of("gpt2", torch.float32)
    settings = {"fraction": 1.0, "batch": 16, "learning_rate": 1e-2}
    target = target.with_weights(run("fine-tuning", target, seed=2, epochs=20, **settings).weights)
    first, last = (run("distillation", target, seed=1, epochs=n, **settings) for n in (1, 20))
    assert last.notes["loss"] < first.notes["loss"]
    teacher, student = target.module(), target.module(last.weights)
    assert last.notes["agreement"] == transfer_rate(teacher, student, words(1)) > first.notes["agreement"]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_attack_runs_on_language_models(name: str) -> None:
    target = target_of(name, torch.float32)
    target = Target(
        target.make, target.weights, target.data, [target.base or {}, target.weights], other=target.base,
        example=target.example, base=target.base, oracle=lambda _: [0.0] * 9,
    )  # fmt: skip
    trained = ("fine-tuning", "adaptive-fine-tuning", "distillation", "adaptive-by-part", "removal")
    short = {name: {"epochs": 1} for name in trained}
    for attack in ATTACKS:
        if (name, attack) == ("gpt2", "residual-rotation"):
            continue
        weights = run(attack, target, seed=1, **short.get(attack, {})).weights
        assert weights.keys() == target.weights.keys()
        assert bool(torch.isfinite(logits(target, weights)).all())
