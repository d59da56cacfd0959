"""Tiny language models as folders that transformers reads, with a tokenizer and a text of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = 60


def sentences(seed: int, count: int) -> str:
    """A made-up language: after each word one of three, by a table."""
    table = np.random.default_rng(4).integers(0, WORDS, (WORDS, 3))
    rng, word, found = np.random.default_rng(seed), 0, []
    for _ in range(count):
        word = int(table[word, rng.integers(0, 3)])
        found.append(f"w{word}")
    return " ".join(found)


def write_text(folder: Path, train: int = 3000) -> None:
    """toy/train.txt and its companions."""
    (folder / "toy").mkdir(parents=True)
    for seed, (split, count) in enumerate((("train", train), ("valid", 700), ("test", 701))):
        (folder / "toy" / f"{split}.txt").write_text(sentences(seed, count))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)} | {"?": WORDS}, unk_token="?"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def config(kind: str, layers: int = 2) -> Any:
    from transformers import GPT2Config, LlamaConfig

    if kind == "gpt2":
        return GPT2Config(
            vocab_size=61, n_positions=32, n_embd=48, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    return LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip


def write_model(folder: Path, kind: str) -> Path:
    """models/tiny-KIND: random weights, config.json, tokenizer.json."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config(kind))
    path = folder / f"tiny-{kind}"
    model.save_pretrained(path)
    tokenizer().save(str(path / "tokenizer.json"))
    return path
