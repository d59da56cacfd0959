"""Text as tokens: where it is read from, how it is cut, and how a model's tokens are kept (docs/lab.md, "Language").

Nothing is downloaded. `texts(name, folder)` looks in the folder for

    wikitext2       wikitext-2/wiki.train.tokens …, wikitext-2-raw/wiki.train.raw …, or these files in the folder itself
    any name        NAME/train.txt, NAME/valid.txt, NAME/test.txt, or the same with .xz

`tokens` keeps what a tokenizer made of a text in a file named after both, so that a machine without the `tokenizers`
package reads it as well.
"""

from __future__ import annotations

import hashlib
import lzma
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import InputError, MissingDependencyError
from quorumark.files import replacing

__all__ = ["Corpus", "Text", "Tokenizer", "blocks", "corpus", "read_text", "texts", "tokens"]

Ids = NDArray[np.int64]
SPLITS = ("train", "valid", "test")
_TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))


# --- text -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A text, and the name of the file that it is from."""

    text: str
    source: str

    def digest(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()


def read_text(path: str | os.PathLike[str]) -> Text:
    """A text file, packed with xz or not."""
    path = Path(path)
    if not path.is_file():
        raise InputError("a text", "must be a file that exists", str(path))
    data = path.read_bytes()
    try:
        return Text((lzma.decompress(data) if path.suffix == ".xz" else data).decode(), path.name)
    except (UnicodeDecodeError, lzma.LZMAError) as error:
        raise InputError("a text", "must be UTF-8, or packed with xz", f"{str(path)!r}: {error}") from None


def texts(name: str, folder: str | os.PathLike[str]) -> dict[str, Text]:
    """The three splits of a text by its name."""
    root = Path(folder)
    patterns = [f"{name}/{{}}.txt", f"{name}/{{}}.txt.xz"]
    if name == "wikitext2":
        files = [f"wiki.{{}}.{kind}" for kind in ("tokens", "raw")]
        places = ("", "wikitext-2/", "wikitext-2-raw/")
        patterns = [place + file for place in places for file in files] + patterns
    for pattern in patterns:
        paths = {split: root / pattern.format(split) for split in SPLITS}
        if all(path.is_file() for path in paths.values()):
            return {split: read_text(path) for split, path in paths.items()}
    wanted = " or ".join(pattern.format("train") for pattern in patterns)
    raise InputError("data folder", f"must hold {wanted}, and valid and test likewise", f"{str(root)!r} without them")


# --- tokens -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer's files. Its digest needs no package; encoding needs `tokenizers`."""

    files: tuple[Path, ...]

    @classmethod
    def of(cls, *folders: Path) -> Tokenizer:
        """From the first folder that has one: tokenizer.json, or GPT-2's vocab.json and merges.txt."""
        for folder in folders:
            for names in _TOKENIZER_FILES:
                files = tuple(folder / name for name in names)
                if all(file.is_file() for file in files):
                    return cls(files)
        rule = "must hold tokenizer.json, or vocab.json and merges.txt"
        raise InputError("model folder", rule, " and ".join(repr(str(f)) for f in folders) + " without them")

    def digest(self) -> bytes:
        return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in self.files)).digest()

    def encode(self, text: str) -> Ids:
        """The whole text at once, without special tokens."""
        try:
            import tokenizers
        except ImportError:
            raise MissingDependencyError("tokenizers", "making tokens of a text that is not in the cache") from None
        if len(self.files) == 1:
            made: Any = tokenizers.Tokenizer.from_file(str(self.files[0]))
            made.no_truncation()
        else:
            made = tokenizers.ByteLevelBPETokenizer(*map(str, self.files))
        return np.array(made.encode(text, add_special_tokens=False).ids, np.int64)


def tokens(text: Text, tokenizer: Tokenizer, cache: Path, label: str = "text") -> Ids:
    """A text's tokens; from the cache, if the same text was cut by the same tokenizer before."""
    key = hashlib.sha256(b"quorumark-tokens/v1" + text.digest() + tokenizer.digest()).hexdigest()[:24]
    path = cache / f"{label}-{key}.npy"
    if path.exists():
        kept: Ids = np.load(path).astype(np.int64)
        return kept
    found = tokenizer.encode(text.text)
    cache.mkdir(parents=True, exist_ok=True)
    with replacing(path, 0o644) as file:
        np.save(file, found.astype(np.uint16 if found.size == 0 or found.max() < 1 << 16 else np.uint32))
    return found


@dataclass(frozen=True, eq=False)
class Corpus:
    """The tokens of a text's splits, and of other texts that attackers train with."""

    name: str
    splits: Mapping[str, Ids]
    note: str = ""

    def __getitem__(self, split: str) -> Ids:
        if split not in self.splits:
            raise InputError("a text", f"must be one of {', '.join(self.splits)}", repr(split))
        return self.splits[split]


def corpus(
    name: str, folder: Path, tokenizer: Tokenizer, cache: Path, others: Mapping[str, Path] | None = None
) -> Corpus:
    """The tokens of a text, and of others by their own names."""
    found = texts(name, folder)
    splits = {split: tokens(text, tokenizer, cache, f"{name}-{split}") for split, text in found.items()}
    for label, path in (others or {}).items():
        splits[label] = tokens(read_text(path), tokenizer, cache, label)
    return Corpus(name, splits, f"from {found['train'].source}")


def blocks(ids: Ids, length: int) -> Ids:
    """Contiguous blocks of that many tokens; what is left at the end is not in any."""
    count = ids.size // length
    if not count:
        raise InputError("sequence", f"must be at most the text's length, {ids.size} tokens", length)
    return ids[: count * length].reshape(count, length)
