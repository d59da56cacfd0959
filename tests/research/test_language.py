"""The lab's language models: text, perplexity, members' training, the mark, attacks, results. Miniatures on the CPU."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from quorumark.cli import app
from quorumark.errors import InputError, MissingDependencyError, RecordError
from quorumark.model.layout import ModelLayout
from quorumark.research import attacks
from quorumark.research.known import SeededKey
from quorumark.research.lab import language, text
from quorumark.research.lab.config import LanguageSettings, read
from quorumark.research.lab.fleet import Optimiser
from quorumark.research.lab.language import LanguageModel
from quorumark.research.lab.language_run import LanguageRun
from quorumark.research.lab.removal import read_plan
from quorumark.research.lab.scores import z_scores
from tests.kit.language import sentences, tokenizer, write_model, write_text

pytestmark = pytest.mark.usefixtures("one_thread")

MINI = LanguageSettings("toy", model="tiny-llama", rounds=4, global_batch=32, sequence=16, lr=2e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("language")
    write_text(root / "data")
    for kind in ("gpt2", "llama"):
        write_model(root / "models", kind)
    return root


def _corpus(folder: Path, name: str = "tiny-llama") -> text.Corpus:
    return text.corpus("toy", folder / "data", text.Tokenizer.of(folder / "models" / name), folder / "cache")


def _model(folder: Path, name: str = "tiny-llama", **more: Any) -> LanguageModel:
    return LanguageModel(language.load(name, folder / "models"), "cpu", **more)


# --- text -------------------------------------------------------------------------------------------------


def test_text_in_its_ordinary_forms(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a", tmp_path / "b"
    (plain / "wikitext-2").mkdir(parents=True)
    (packed / "wikitext2").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (plain / "wikitext-2" / f"wiki.{split}.tokens").write_text(f"a {split} – text\n")
        (packed / "wikitext2" / f"{split}.txt.xz").write_bytes(lzma.compress(f"a {split} – text\n".encode()))
    one, two = text.texts("wikitext2", plain), text.texts("wikitext2", packed)
    assert {k: t.text for k, t in one.items()} == {k: t.text for k, t in two.items()}
    assert one["test"].text == "a test – text\n"
    assert (one["train"].source, two["train"].source) == ("wiki.train.tokens", "train.txt.xz")
    with pytest.raises(InputError, match=r"wiki\.train\.raw"):
        text.texts("wikitext2", tmp_path)


def test_tokens_are_kept_and_read_without_the_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _corpus(folder)
    assert first["train"].size == 3000
    assert first["test"][:3].tolist() == [int(w[1:]) for w in sentences(2, 3).split()]
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    again = _corpus(folder)
    assert np.array_equal(again["train"], first["train"])
    with pytest.raises(MissingDependencyError, match="tokenizers"):  # another text is not in the cache
        text.tokens(text.Text("w1 w2", "x"), text.Tokenizer.of(folder / "models" / "tiny-llama"), folder / "cache")


def test_tokens_of_another_text_are_others(folder: Path, tmp_path: Path) -> None:
    """By what it says, not by its name: a text that was changed is cut anew."""
    made = text.Tokenizer.of(folder / "models" / "tiny-gpt2")
    for words in ("w1 w2 w3", "w4 w5"):
        found = [text.tokens(text.Text(words, "x"), made, tmp_path, "same").tolist() for _ in range(2)]
        assert found == [[int(w[1:]) for w in words.split()]] * 2
    assert len(list(tmp_path.glob("same-*.npy"))) == 2


def test_tokens_of_a_large_vocabulary_and_of_a_long_text(tmp_path: Path) -> None:
    """Numbers above 2^16 come back from the cache as they were; a tokenizer that would cut a text short does not."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"a": 65_535, "b": 65_536, "c": 151_000}, unk_token="a"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.save(str(tmp_path / "tokenizer.json"))
    source, found = text.Text("a b c b", "x"), text.Tokenizer.of(tmp_path)
    for _ in range(2):
        assert text.tokens(source, found, tmp_path).tolist() == [65_535, 65_536, 151_000, 65_536]


def test_a_text_without_all_its_splits_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    for split in ("train", "valid"):
        (tmp_path / "toy" / f"{split}.txt").write_text("w1")
    with pytest.raises(InputError, match="and valid and test likewise"):
        text.texts("toy", tmp_path)


def test_tokens_of_another_model_are_refused(folder: Path) -> None:
    corpus = _corpus(folder)
    for split in corpus.splits:
        other = text.Corpus("toy", {**corpus.splits, split: np.append(corpus[split], 61)})
        with pytest.raises(InputError, match=f"the model's vocabulary, 61, in '{split}'"):
            LanguageRun(MINI, other, _model(folder))


def test_tokens_of_another_tokenizer_are_others(folder: Path, tmp_path: Path) -> None:
    changed = tokenizer()
    changed.add_tokens(["w1 w2"])
    changed.save(str(tmp_path / "tokenizer.json"))
    one, two = text.Tokenizer.of(folder / "models" / "tiny-gpt2"), text.Tokenizer.of(tmp_path)
    source = text.Text("w1 w2 w3", "x")
    assert text.tokens(source, one, tmp_path).size == 3
    assert text.tokens(source, two, tmp_path).size != 3
    assert len(list(tmp_path.glob("*.npy"))) == 2


def test_gpt_2_s_own_tokenizer_files(tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(["low lower lowest low lower"], 270)
    made.save_model(str(tmp_path))
    found = text.Tokenizer.of(tmp_path)
    assert [file.name for file in found.files] == ["vocab.json", "merges.txt"]
    assert made.decode(found.encode("lower slow\n").tolist()) == "lower slow\n"
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        text.Tokenizer.of(tmp_path / "nowhere")


# --- perplexity -------------------------------------------------------------------------------------------


def _theirs(folder: Path, name: str) -> Any:
    """The model with transformers' own attention, step by step."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "models" / name, attn_implementation="eager")


def _by_hand(module: Any, ids: Any, length: int) -> tuple[float, int]:
    """Token by token: each but the first of its window, from those before it in the window."""
    total, count = 0.0, 0
    module.eval()
    for begin in range(0, len(ids), length):
        window = ids[begin : begin + length]
        for place in range(1, len(window)):
            with torch.no_grad():
                logits = module(input_ids=torch.tensor([window[:place]])).logits[0, -1].double()
            total -= float(torch.log_softmax(logits, 0)[window[place]])
            count += 1
    return total, count


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize("rows", [7, 4096])
def test_perplexity_is_that_of_a_plain_loop(
    name: str, rows: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of tokens has its logits at once: a batch is more than one part, or less."""
    monkeypatch.setattr(language, "_ROWS", rows)
    model, ids = _model(folder, name), _corpus(folder, name)["test"][:60]
    plain, count = _by_hand(_theirs(folder, name), ids.tolist(), 16)
    assert count == 15 + 15 + 15 + 11  # 60 = 3·16 + 12: the last window is shorter
    found = model.log_likelihood(model.initial, torch.from_numpy(ids), 16, batch=2)
    assert found[1] == count
    assert found[0] == pytest.approx(plain, rel=1e-6)
    assert model.perplexity(model.initial, torch.from_numpy(ids), 16) == pytest.approx(exp(plain / count), rel=1e-6)


def test_counting_padding_gives_another_number(folder: Path) -> None:
    """A model that has learnt that padding follows padding predicts it well: the mean over it is lower."""
    model, ids = _model(folder), torch.from_numpy(_corpus(folder)["test"][:60])
    right = model.perplexity(model.initial, ids, 16)
    padded = torch.cat([ids, torch.full((68,), 60)])  # up to whole windows
    theta = model.initial.clone()
    batches = padded.view(1, -1, 16).expand(40, -1, -1)
    model.train(theta, batches, Optimiser(3e-3, 0.0), 0)
    true, counted = model.perplexity(theta, ids, 16), model.perplexity(theta, padded, 16)
    assert counted < 0.8 * true
    assert true < right


def test_a_text_of_one_token_has_no_perplexity(folder: Path) -> None:
    model = _model(folder)
    with pytest.raises(InputError, match="two tokens"):
        model.perplexity(model.initial, torch.tensor([3]), 16)


def test_the_loss_in_parts_has_the_right_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_ROWS", 7)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 12, generator=generator, dtype=torch.float64) for n in (20, 30))
    labels = torch.randint(0, 30, (20,), generator=generator)
    found = []
    for loss in (
        lambda h, w: language.head_loss(h, w, labels),
        lambda h, w: torch.nn.functional.cross_entropy(h @ w.t(), labels),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        value = 3 * loss(h, w)
        value.backward()
        found.append((value.detach(), h.grad, w.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-7)


# --- members ----------------------------------------------------------------------------------------------


def test_a_member_trains_like_transformers_and_pytorch(folder: Path) -> None:
    """Three steps against the model's own loss and torch's AdamW."""
    model = _model(folder)
    batches = torch.randint(0, 61, (3, 4, 16), generator=torch.Generator().manual_seed(0))
    theta = model.initial.clone()
    loss = model.train(theta, batches, Optimiser(1e-3, 0.01), 0)
    module = _theirs(folder, "tiny-llama")
    adamw = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for ids in batches:
        adamw.zero_grad()
        value = module(input_ids=ids, labels=ids).loss
        value.backward()
        adamw.step()
        losses.append(float(value.detach()))
    expected = torch.from_numpy(model.layout.flatten(module))
    moved = (expected - model.initial).abs().max()
    assert (theta - expected).abs().max() < 1e-2 * moved
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_tied_embeddings_are_one_tensor_and_carry_nothing(name: str, folder: Path) -> None:
    model = _model(folder, name)
    roles = {spec.name: spec.role for spec in model.layout.tensors}
    tied = [n for n in roles if "lm_head" in n or "wte" in n or "embed" in n]
    assert sorted(roles[n] for n in tied) == ["alias", "plain"]
    assert model.layout.size == sum(p.numel() for p in model.module.parameters())
    with model.holding(model.initial + 1) as module:
        state = module.state_dict()
        assert torch.equal(state[tied[0]], state[tied[1]])


def test_a_model_with_scaled_logits_is_refused(folder: Path) -> None:
    module = language.load("tiny-llama", folder / "models")
    plain = module.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    module.forward = scaled
    with pytest.raises(InputError, match="output layer alone"):
        LanguageModel(module, "cpu")


def test_an_epoch_is_every_block_of_a_member(folder: Path) -> None:
    run = LanguageRun(MINI, _corpus(folder), _model(folder))
    seen = [run.batches(1, k).reshape(-1, 16) for k in range(4)]
    blocks = {tuple(b) for b in run._blocks.tolist()}
    assert len(run._blocks) == 3000 // 16
    assert {tuple(b) for part in seen for b in part.tolist()} == blocks
    assert not torch.equal(run.batches(1, 0), run.batches(2, 0))


def test_members_count_by_their_blocks(folder: Path) -> None:
    """The next global model is the mean of the members', weighted by how much text each has."""
    corpus, model = _corpus(folder), _model(folder)
    little = text.Corpus("toy", {**corpus.splits, "train": corpus["train"][: 16 * 5]})  # two blocks, one, one, one
    run = LanguageRun(MINI, little, model)
    run.round()
    each, counts = run.theta.double(), torch.tensor([2.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert torch.allclose(run.model.double(), (counts @ each) / 5, rtol=0, atol=1e-6 * float(each.abs().max()))
    assert not torch.allclose(run.model.double(), each.mean(0), rtol=0, atol=1e-5 * float(each.abs().max()))


@pytest.mark.research
@pytest.mark.parametrize("strength", ["none", "rho:0.05"])
@pytest.mark.parametrize("limit", [0, 4000])
def test_a_run_made_in_pieces_is_the_same_run(strength: str, limit: int, folder: Path, tmp_path: Path) -> None:
    settings = replace(MINI, strength=strength, max_coordinates=limit)
    corpus, model = _corpus(folder), _model(folder, max_coordinates=limit)
    whole = LanguageRun(settings, corpus, model)
    assert whole.train()
    first = LanguageRun(settings, corpus, model)
    for _ in range(3):
        first.round()
    first.save(tmp_path / "c.pt")
    second = LanguageRun(settings, corpus, model)
    second.restore(tmp_path / "c.pt")
    assert second.train(checkpoint=tmp_path / "c.pt")
    assert torch.equal(second.model, whole.model)
    assert torch.equal(second.released, whole.released)
    assert [(e.loss, e.perplexity, e.c) for e in second.log] == [(e.loss, e.perplexity, e.c) for e in whole.log]
    assert whole.best.measure < 0.8 * model.perplexity(model.initial, whole.validation, 16)
    assert whole.layout.coordinates == (limit or whole.layout.carrier_size)
    with pytest.raises(RecordError, match="other settings"):
        LanguageRun(replace(settings, seed=1), corpus, model).restore(tmp_path / "c.pt")
    for run in (whole, first, second):
        run.close()


def test_the_test_text_decides_nothing(folder: Path) -> None:
    """What is released, and when a run stops, depends on the validation text alone."""
    settings, whole, model = replace(MINI, rounds=6, lr=1e-2, patience=2), _corpus(folder), _model(folder)
    little = {**whole.splits, "train": whole["train"][:256]}
    runs = [
        LanguageRun(settings, text.Corpus("toy", {**little, **other}), model)
        for other in ({}, {"test": whole["test"][::-1].copy()}, {"valid": whole["valid"][::-1].copy()})
    ]
    for run in runs:
        run.train()
    mine, other_test, other_validation = runs
    assert [e.perplexity for e in mine.log] == [e.perplexity for e in other_test.log]
    assert torch.equal(mine.released, other_test.released)
    assert mine.perplexity(mine.released, mine.test) != other_test.perplexity(mine.released, other_test.test)
    assert mine.perplexity_before != other_test.perplexity_before  # known by the text, too
    assert mine.perplexity_before == model.perplexity(model.initial, mine.test, 16)
    assert [e.perplexity for e in mine.log][:2] != [e.perplexity for e in other_validation.log][:2]
    # the released model is the first of the lowest on the validation text
    assert mine.perplexity(mine.released, mine.validation) == pytest.approx(mine.best.measure, rel=1e-6)
    measured = [e.perplexity for e in mine.log if e.perplexity is not None]
    assert mine.best.round == 1 + measured.index(min(measured))


def test_dropout_hangs_on_the_seed_alone(folder: Path) -> None:
    """So that a run made in pieces is the same run; nothing else's random numbers change."""
    model = _model(folder, "tiny-gpt2")
    batches = torch.randint(0, 61, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    before, found = torch.random.get_rng_state(), []
    for seed in (1, 1, 2):
        found.append(model.initial.clone())
        model.train(found[-1], batches, Optimiser(1e-3, 0.01), seed)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(before, torch.random.get_rng_state())


def test_precision_is_put_back(folder: Path) -> None:
    model, before = _model(folder), torch.get_float32_matmul_precision()
    for quick in (True, False):
        model.perplexity(model.initial, torch.arange(20), 16, quick=quick)
        assert torch.get_float32_matmul_precision() == before
    try:
        torch.set_float32_matmul_precision("medium")
        model.perplexity(model.initial, torch.arange(20), 16)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_patience_stops_a_run_and_releases_the_same_model(folder: Path) -> None:
    settings = replace(MINI, rounds=24, lr=1e-2)
    whole = _corpus(folder)
    little = {**whole.splits, "train": whole["train"][:256]}  # so little text that it is soon learnt by heart
    corpus, model = text.Corpus("toy", little), _model(folder)
    long, short = LanguageRun(settings, corpus, model), LanguageRun(replace(settings, patience=4), corpus, model)
    assert long.train()
    assert short.train()
    assert short.stopped
    assert short.round_no == short.best.round + 4 < 24
    assert [e.perplexity for e in long.log][: short.round_no] == [e.perplexity for e in short.log]
    assert torch.equal(short.released, long.released)
    assert not long.stopped


# --- on a GPU ---------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_member_on_a_gpu_trains_as_on_the_cpu(compiled: bool, folder: Path) -> None:
    """Up to bfloat16: the same loss, an update in the same direction, the same perplexity of the same weights."""
    ids = torch.from_numpy(_corpus(folder)["train"][: 40 * 8 * 16]).view(-1, 8, 16)[:20]
    updates, losses, measured = {}, {}, {}
    for device in ("cpu", "cuda"):
        module = language.load("tiny-llama", folder / "models")
        model = LanguageModel(module, device, compiled=compiled)
        theta = model.initial.clone()
        losses[device] = float(model.train(theta, ids.to(device), Optimiser(1e-3, 0.01), 0))
        updates[device] = (theta - model.initial).cpu()[: model.layout.carrier_size]
        measured[device] = model.perplexity(model.initial, ids.reshape(-1).to(device), 16)
        if device == "cuda":
            assert model.compiled == compiled
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.02)
    assert torch.cosine_similarity(updates["cpu"], updates["cuda"], dim=0) > 0.8
    assert measured["cuda"] == pytest.approx(measured["cpu"], rel=1e-4)


@needs_gpu
def test_a_run_on_a_gpu_learns(folder: Path) -> None:
    model = LanguageModel(language.load("tiny-llama", folder / "models"), "cuda", max_coordinates=9000, compiled=True)
    run = LanguageRun(replace(MINI, strength="relative:0.2", max_coordinates=9000), _corpus(folder), model)
    run.train()
    assert run.best.measure < 0.6 * run.perplexity(run.initial, run.validation)
    key = {"key": run.keys[0]}
    found = z_scores(run.layout, run.model.cpu().numpy(), run.initial.cpu().numpy(), key, "cuda")
    assert found["balanced-anchor/v1"]["key"] > 5
    run.close()


# --- the whole path ---------------------------------------------------------------------------------------

PLAN = """
title = "small"
[[attack]]
name = "channel-removal"
ratio = 0.25
[[attack]]
name = "fine-tuning"
text = "other"
epochs = 1
batch = 8
learning_rate = 1e-3
[[attack]]
name = "quantisation"
scheme = ["static8", "q4_0"]
[[attack]]
name = "merging"
strength = 0.5
[[attack]]
name = "rotation"
part = "all"
[[attack]]
name = "averaging"
share = 0.5
[[attack]]
chain = ["permutation", "rescaling"]
"""


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_whole_path_in_miniature(kind: str, folder: Path, tmp_path: Path) -> None:
    """Train with and without the mark, attack, and make the page."""
    (tmp_path / "mini.toml").write_text(
        f'title = "mini"\ntask = "language"\n[run]\ndataset = "toy"\nmodel = "tiny-{kind}"\nsequence = 16\n'
        "rounds = 4\nglobal_batch = 32\nlr = 3e-3\n"
        '[[grid]]\nstrength = ["none", "relative:0.2"]\nseed = [0, 1]\n'
    )
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "other.txt").write_text(sentences(9, 800))
    results = tmp_path / "results"
    words = [
        "--models", str(folder / "models"), "--data", str(folder / "data"), "--cache", str(folder / "cache"),
        "--results", str(results), "--runs", str(tmp_path / "runs"), "--device", "cpu",
    ]  # fmt: skip
    ran = _invoke(["lab", "run", str(tmp_path / "mini.toml"), *words, "--only", "*-s0"])
    assert ran.output.count("test perplexity") == 2
    assert _invoke(["lab", "run", str(tmp_path / "mini.toml"), *words, "--seed", "0"]).output.count("done (4") == 2
    name = f"toy-tiny-{kind}-k4-iid-relative0.2-s0"
    more = ["--only", name, "--attacks", str(tmp_path / "plan.toml"), "--other-text", str(tmp_path / "other.txt")]
    _invoke(["lab", "run", str(tmp_path / "mini.toml"), *words, *more])
    marked = json.loads((results / f"{name}.json").read_text())
    plain = json.loads((results / f"toy-tiny-{kind}-k4-iid-none-s0.json").read_text())
    assert marked["z"]["released"]["balanced-anchor/v1"] > 8
    assert abs(plain["z"]["released"]["balanced-anchor/v1"]) < 5
    assert marked["perplexity"]["released"] < 0.5 * marked["perplexity"]["initial"]
    found = json.loads((results / "attacks" / "language" / f"{name}.json").read_text())
    rows = {row["attack"] + " " + row["settings"]: row for row in found["rows"]}
    assert len(rows) == 8
    removed = rows["channel-removal ratio 0.25"]
    assert removed["z"] is None  # its channels are not where they were
    assert 4 < removed["z_aligned"] < found["released"]["z"]
    assert found["released"]["perplexity"] == marked["perplexity"]["released"]
    moved = rows["permutation + rescaling "]
    assert abs(moved["change"]) < 0.01
    assert moved["z"] < 6
    assert moved["z_aligned"] == pytest.approx(found["released"]["z"], rel=0.05)
    assert rows["rotation part all"]["z_aligned"] > 8
    assert abs(rows["rotation part all"]["change"]) < 0.01
    assert rows["quantisation scheme static8"]["z"] > 6
    assert rows["merging strength 0.5"]["z"] > 6
    assert rows["averaging share 0.5"]["z"] < found["released"]["z"]
    tuned = next(row for label, row in rows.items() if label.startswith("fine-tuning text other"))
    assert tuned["steps"] > 0
    assert tuned["z"] > 5
    again = _invoke(["lab", "run", str(tmp_path / "mini.toml"), *words, *more])
    assert "perplexity" not in again.output  # all is there
    assert f"done ({found['rounds']} rounds)" in again.output
    _check_page(results, tmp_path / "page.md", name, marked, plain)


def _check_page(results: Path, page: Path, name: str, marked: Any, plain: Any) -> None:
    """The rows of these results, as if they were of the configuration that comes along; and of the attacks."""
    from quorumark.research.lab.page import page as make_page

    first = read("language").runs[0]
    for body, strength in ((marked, "rho:0.05"), (plain, "none")):
        run = replace(first, strength=strength)
        body["id"], body["settings"] = run.id, {**run.asdict(), "rounds": 4}
        (results / f"{body['id']}.json").write_text(json.dumps(body))
    for file in results.glob("toy*.json"):
        file.unlink()
    words = ["lab", "table", "--results", str(results), "--out", str(page)]
    _invoke(words)
    rows = page.read_text()
    ours = next(line for line in rows.splitlines() if line.startswith("| smollm2-135m | 4 | rho:0.05 |"))
    change = 100 * (marked["perplexity"]["released"] / plain["perplexity"]["released"] - 1)
    assert f"| {marked['perplexity']['released']:.3f} | {change:+.3f} % |" in ours
    assert "shorter (4 of 20 rounds, 1 of 3 seeds; round 4 released)" in ours
    stopped = {**marked, "stopped": "validation had not improved for a round"}  # the unmarked one is not: no change
    (row,) = [
        line
        for line in make_page([read("language")], {b["id"]: b for b in (stopped, plain)}).splitlines()
        if line.startswith("| smollm2-135m | 4 | rho:0.05 | all |")
    ]
    assert f"| {marked['perplexity']['released']:.3f} |  |" in row
    assert "stopped (4 of 20 rounds, 1 of 3 seeds; round 4 released)" in row
    assert "gpt2-small none coordinates: all; gpt2-small relative:0.01 coordinates: all" in rows
    assert "| c = 0.50 | 10.58 ± 0.03 | +0.57 % | 6.89 ± 2.51 |" in rows
    assert f"## Attacks on {name}" in rows
    assert "| quantisation | scheme q4_0 |" in rows
    file = results / "attacks" / "language" / f"{name}.json"
    body = json.loads(file.read_text())
    useful = {row["attack"]: row for row in body["rows"] if row["change"] <= 5 and "z_aligned" not in row}
    removed = next(row for row in body["rows"] if row["attack"] == "channel-removal")
    for z, holds in ((21.0, "true"), (19.0, "false")):  # the least of those that cost little, whatever others leave
        told = [{**row, "z": z, **({"z_aligned": z} if "z_aligned" in row else {})} for row in useful.values()]
        moved = {**told[0], "attack": "permutation", "z": 0.1, "z_aligned": z + 0.5}
        fewer = {**removed, "change": 5.0, "z_aligned": z + 0.5}
        wreck = {**told[0], "attack": "pruning", "settings": "ratio 0.9", "change": 2e5, "perplexity": 3e6, "z": 0.3}
        file.write_text(json.dumps({**body, "rows": [*told, moved, fewer, wreck]}))
        _invoke(words)
        shown = f"of perplexity: {holds}; the least of {len(told) + 2} is {z:.1f} ({told[0]['attack']}"
        assert shown in page.read_text()
        assert "| pruning | ratio 0.9 | 3.0e+06 | × 2e+03 | 0.3 |" in page.read_text()
    file.write_text(json.dumps(body))
    _invoke(words)
    _invoke([*words, "--check"])
    page.write_text(rows.replace("scheme q4_0", "scheme q5_0"))
    assert isinstance(CliRunner().invoke(app, [*words, "--check"]).exception, RecordError)
    (results / "attacks" / "language" / "forged.json").write_text("{}")
    assert isinstance(CliRunner().invoke(app, words).exception, RecordError)


def test_gpt2_small_s_architecture_carries_a_mark(tmp_path: Path) -> None:
    """All of its 124 million weights, from random initialisation: which carry, and z of a mark in them."""
    module = language.load("gpt2-small-random", tmp_path, seed=1)
    layout = ModelLayout.of(module)
    assert (layout.size, layout.coordinates) == (124_439_808, 84_934_656)  # 12 layers of 12·768², no embeddings
    assert ModelLayout.of(module, max_coordinates=1_000_000).coordinates == 1_000_000
    anchor = layout.flatten(module)
    rng, key = np.random.default_rng(0), SeededKey(layout.coordinates, 0)
    suspect = anchor + 1e-3 * rng.standard_normal(layout.size, np.float32)
    suspect[layout.carrying()] += np.float32(1e-5) * key.numpy()
    found = z_scores(layout, suspect, anchor, {"key": key}, statistics=["balanced-anchor/v1"])
    expected = 1e-2 * layout.coordinates**0.5  # ρ·√d
    assert found["balanced-anchor/v1"]["key"] == pytest.approx(expected, rel=0.1)


def test_plans_are_checked(tmp_path: Path) -> None:
    found = read_plan("language")
    assert {name for job in found.jobs for name, _ in job.steps} <= set(attacks.ATTACKS)
    assert {more["text"] for job in found.jobs for _, more in job.steps if "text" in more} == {
        "other",
        "valid",
        "train",
    }
    path = tmp_path / "plan.toml"
    for wrong, told in (("title = 'x'", "entries"), ("[[attack]]\nname = 'smash'", "must be one of")):
        path.write_text(wrong)
        with pytest.raises(InputError, match=told):
            read_plan(path)
    with pytest.raises(InputError, match="can be read, or one of"):
        read_plan(tmp_path / "none.toml")


def _invoke(words: list[str]) -> Any:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_the_table_of_attacks_in_the_docs_is_what_was_measured(root: Path) -> None:
    """docs/attacks.md, "On a language model": each change and each z, rounded as shown, is in a row of the file."""
    (body,) = (json.loads(file.read_text()) for file in (root / "results" / "attacks" / "language").glob("*.json"))
    pairs = {(change, f"{row['z']:.1f}") for row in body["rows"] for change in _shown(row["change"])}
    section = (root / "docs" / "attacks.md").read_text().split("**On a language model**")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    seen = 0
    for _, changes, zs in lines[1:-1]:  # the last one has no change
        for change, z in zip(changes.split("; "), zs.split("; "), strict=True):
            assert (change.removesuffix(" %"), z) in pairs
            seen += 1
    assert seen == 16
    moved = [row for row in body["rows"] if "z_aligned" in row]
    assert [f"{row['z']:.1f}".replace("-", "−") for row in moved] == ["−0.8", "138.3", "106.5"]
    assert all(round(row["z_aligned"]) == 138 for row in moved)
    useful = [row for row in body["rows"] if row["change"] <= 5]
    assert f"within 5 % leaves z ≥ {min(max(r['z'], r.get('z_aligned', 0)) for r in useful):.1f}" in section


def _shown(change: float) -> set[str]:
    return {f"{change:+.{digits}f}".replace("-", "−") for digits in (1, 2)}
