"""Federated fine-tuning of a language model on one device, round by round, with the mark as the ideal functionality.

A round is as in `lab.loop`: every member gets the global model and a new AdamW, trains one epoch on its own
blocks of text, and the models' weighted sum with the mark is the next global model. Members train one after another: a
batch of theirs fills a GPU. The pretrained weights are the anchor θ_0.

The released model is the one of the lowest validation perplexity. With `patience` a run stops when validation has not
improved for that many rounds.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quorumark.errors import InputError, RecordError
from quorumark.files import replacing
from quorumark.model.layout import write_safetensors
from quorumark.research.known import SeededKey
from quorumark.research.lab import data, text
from quorumark.research.lab.config import LanguageSettings, strength_settings
from quorumark.research.lab.fleet import Optimiser
from quorumark.research.lab.language import LanguageModel
from quorumark.research.lab.loop import _kept, _mixed, check_loss
from quorumark.research.lab.mark import Mark, decoded, weighted_sum

__all__ = ["LanguageRun", "TextRound"]


@dataclass
class TextRound:
    """What a round was: perplexity on the validation text (None where it was not measured), mean training loss."""

    round: int
    loss: float
    perplexity: float | None
    c: float
    seconds: float


@dataclass
class Lowest:
    """The model with the lowest validation perplexity so far."""

    perplexity: float = float("inf")
    round: int = 0
    model: Any = field(default=None, repr=False)


class LanguageRun:
    """One run. `round()` is one round; `save` and `restore` make it last.

    `model` holds the pretrained weights, and is used by one run at a time.
    """

    def __init__(self, settings: LanguageSettings, corpus: text.Corpus, model: LanguageModel) -> None:
        if model.layout.coordinates != min(
            settings.max_coordinates or model.layout.carrier_size, model.layout.carrier_size
        ):
            raise InputError("model", "must have the settings' max_coordinates", model.layout.coordinates)
        self.settings, self.language, self.device, self.note = settings, model, model.device, corpus.note
        self.layout, self.initial = model.layout, model.initial
        self.model = self.initial
        vocabulary = model.module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        for split, ids in corpus.splits.items():
            if ids.size and ids.max() >= vocabulary:
                rule = f"must be below the model's vocabulary, {vocabulary}, in {split!r}: the tokenizer is another's"
                raise InputError("tokens", rule, int(ids.max()))
        blocks = text.blocks(corpus["train"], settings.sequence)
        self._parts = data.iid_partition(np.arange(len(blocks)), settings.members, settings.seed)
        self._blocks = torch.from_numpy(blocks).to(self.device)
        self.validation = torch.from_numpy(corpus["valid"]).to(self.device)
        self.test = torch.from_numpy(corpus["test"]).to(self.device)
        self._test_digest = hashlib.sha256(corpus["test"].tobytes()).hexdigest()
        self.batch = max(1, settings.global_batch // settings.members)
        self.steps = -(-max(map(len, self._parts)) // self.batch)
        self.weights = [Fraction(len(part), len(blocks)) for part in self._parts]
        self.optimiser = Optimiser(settings.lr, settings.decay, (settings.beta1, settings.beta2))
        self.theta = torch.empty(settings.members, self.layout.size, device=self.device)
        count = settings.members if settings.per_client else 1
        self.keys = [SeededKey(self.layout.coordinates, settings.seed, number) for number in range(count)]
        strength = strength_settings(settings.strength)
        self.mark = None if strength is None else Mark(strength, self.layout, self.initial, self.keys, self.device)
        self.log: list[TextRound] = []
        self.best = Lowest()

    # --- a round ---

    @property
    def round_no(self) -> int:
        """The rounds that are done."""
        return self.log[-1].round if self.log else 0

    @property
    def released(self) -> Tensor:
        """The model of the lowest validation perplexity."""
        chosen: Tensor = self.best.model if self.best.model is not None else self.model
        return chosen

    @property
    def stopped(self) -> bool:
        """Whether validation has not improved for `patience` rounds."""
        patience = self.settings.patience
        return 0 < patience <= self.round_no - self.best.round and self.best.model is not None

    def batches(self, round_no: int, k: int) -> Tensor:
        """A member's epoch: blocks[steps, n, length] in a random order; the last batch is filled from its beginning."""
        seed = _mixed(self.settings.seed, round_no)
        order = np.random.default_rng([seed, k]).permutation(self._parts[k])
        chosen = np.resize(order, self.steps * self.batch)
        return self._blocks[torch.from_numpy(chosen).to(self.device)].view(self.steps, self.batch, -1)

    def local_models(self, round_no: int) -> Tensor:
        """Everybody trains from the global model; the mean loss. The results are in `theta`."""
        losses = []
        for k, row in enumerate(self.theta):
            row.copy_(self.model)
            seed = _mixed(self.settings.seed, round_no) + k
            losses.append(self.language.train(row, self.batches(round_no, k), self.optimiser, seed))
        return torch.stack(losses).mean()

    def round(self) -> TextRound:
        """One round."""
        start, number, settings = time.perf_counter(), self.round_no + 1, self.settings
        loss = self.local_models(number)
        check_loss(number, float(loss))
        total = weighted_sum(self.theta, self.weights)
        c = 0.0
        if self.mark is None:
            self.model = decoded(total)
        else:
            self.model, c = self.mark.apply(number, self.model, total, self.weights, self.theta.__getitem__)
        perplexity = None
        if number % settings.evaluate_every == 0 or number == settings.rounds:
            perplexity = self.perplexity(self.model, self.validation, quick=True)
            if perplexity < self.best.perplexity:
                self.best = Lowest(perplexity, number, self.model)
        done = TextRound(number, float(loss), perplexity, c, time.perf_counter() - start)
        self.log.append(done)
        return done

    def perplexity(self, vector: Tensor, ids: Tensor, *, quick: bool = False) -> float:
        """Of a model on a text, in windows of the length that it trains with."""
        return self.language.perplexity(vector, ids, self.settings.sequence, batch=4 * self.batch, quick=quick)

    @property
    def perplexity_before(self) -> float:
        """Of the pretrained model on the test text: measured once, whatever the number of runs."""
        known, what = self.language.known, (self._test_digest, self.settings.sequence)
        if what not in known:
            known[what] = self.perplexity(self.initial, self.test)
        return known[what]

    def train(
        self,
        *,
        seconds: float | None = None,
        checkpoint: Path | None = None,
        tell: Callable[[TextRound], None] = lambda _: None,
    ) -> bool:
        """Rounds until all are done or validation improves no more (True), or the time is up; saved at the end."""
        start = time.perf_counter()
        while not self.done:
            if seconds is not None and time.perf_counter() - start > seconds:
                break
            tell(self.round())
        if checkpoint is not None:
            self.save(checkpoint)
        return self.done

    @property
    def done(self) -> bool:
        return self.round_no >= self.settings.rounds or self.stopped

    # --- making it last ---

    def save(self, path: Path) -> None:
        """All that the rest of the run depends on; the whole file, or the old one stays."""
        best = None if self.best.model is None else self.best.model.cpu()
        body = {
            "settings": _kept(self.settings),
            "model": self.model.cpu(),
            "best": (self.best.perplexity, self.best.round, best),
            "log": [asdict(entry) for entry in self.log],
            "mark": None if self.mark is None else self.mark.saved(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, 0o644) as file:
            torch.save(body, file)

    def restore(self, path: Path) -> None:
        """Goes on where `save` was."""
        body = torch.load(path, map_location="cpu", weights_only=False)
        if body["settings"] != _kept(self.settings):
            raise RecordError(f"{str(path)!r} is of a run with other settings: remove it, or use another folder")
        self.model = body["model"].to(self.device)
        perplexity, number, best = body["best"]
        self.best = Lowest(perplexity, number, None if best is None else best.to(self.device))
        self.log = [TextRound(**entry) for entry in body["log"]]
        if self.mark is not None:
            self.mark.restore(body["mark"], self.model)

    def export(self, path: Path) -> None:
        """The released model, as a .safetensors file with the module's names; tied weights once."""
        aliases = {spec.name for spec in self.layout.tensors if spec.role == "alias"}
        state = {n: t for n, t in self.language.tensors(self.released).items() if n not in aliases}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(state, path)

    def close(self) -> None:
        """Ends the mark's thread."""
        if self.mark is not None:
            self.mark.close()
