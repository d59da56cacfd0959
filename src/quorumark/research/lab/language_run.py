"""Federated fine-tuning of a language model on one device, round by round, with the mark as the ideal functionality.

A round is as in `lab.image_run`: every member gets the global model and a new AdamW, trains one epoch on its own
blocks of text, and the models' weighted sum with the mark is the next global model. Members train one after another: a
batch of theirs fills a GPU. The pretrained weights are the anchor θ_0.

The released model is the one of the lowest validation perplexity. With `patience` a run stops when validation has not
improved for that many rounds.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quorumark.errors import InputError
from quorumark.research.known import SeededKey
from quorumark.research.lab import data, text
from quorumark.research.lab.config import LanguageSettings, strength_settings
from quorumark.research.lab.federated_run import FederatedRun, RoundLog, check_loss, mixed_seed
from quorumark.research.lab.fleet import Optimiser
from quorumark.research.lab.language import LanguageModel
from quorumark.research.lab.mark import Mark, decoded, weighted_sum

__all__ = ["LanguageRun", "TextRound"]


@dataclass
class TextRound(RoundLog):
    """A round with text; perplexity on the validation text, None where it was not measured."""

    perplexity: float | None = None


class LanguageRun(FederatedRun[TextRound]):
    """A run with text. `model` holds the pretrained weights, and is used by one run at a time."""

    ENTRY = TextRound
    SIGN = -1  # perplexity

    settings: LanguageSettings

    def __init__(self, settings: LanguageSettings, corpus: text.Corpus, model: LanguageModel) -> None:
        if model.layout.coordinates != min(
            settings.max_coordinates or model.layout.carrier_size, model.layout.carrier_size
        ):
            raise InputError("model", "must have the settings' max_coordinates", model.layout.coordinates)
        super().__init__()
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

    # --- a round ---

    @property
    def stopped(self) -> bool:
        """Whether validation has not improved for `patience` rounds."""
        patience = self.settings.patience
        return 0 < patience <= self.round_no - self.best.round and self.best.model is not None

    def batches(self, round_no: int, k: int) -> Tensor:
        """A member's epoch: blocks[steps, n, length] in a random order; the last batch is filled from its beginning."""
        seed = mixed_seed(self.settings.seed, round_no)
        order = np.random.default_rng([seed, k]).permutation(self._parts[k])
        chosen = np.resize(order, self.steps * self.batch)
        return self._blocks[torch.from_numpy(chosen).to(self.device)].view(self.steps, self.batch, -1)

    def local_models(self, round_no: int) -> Tensor:
        """Everybody trains from the global model; the mean loss. The results are in `theta`."""
        losses = []
        for k, row in enumerate(self.theta):
            row.copy_(self.model)
            seed = mixed_seed(self.settings.seed, round_no) + k
            losses.append(self.language.train(row, self.batches(round_no, k), self.optimiser, seed))
        return torch.stack(losses).mean()

    def round(self) -> TextRound:
        """One round."""
        start, number = time.perf_counter(), self.round_no + 1
        loss = self.local_models(number)
        check_loss(number, float(loss))
        total = weighted_sum(self.theta, self.weights)
        c = 0.0
        if self.mark is None:
            self.model = decoded(total)
        else:
            self.model, c = self.mark.apply(number, self.model, total, self.weights, self.theta.__getitem__)
        perplexity = None
        if self.validates(number):
            perplexity = self.perplexity(self.model, self.validation, quick=True)
            self.keep_best(perplexity, number)
        done = TextRound(number, float(loss), c, time.perf_counter() - start, perplexity)
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

    @property
    def done(self) -> bool:
        return super().done or self.stopped

    def _tensors(self, vector: Tensor) -> Mapping[str, Any]:
        """By the module's names; tied weights once."""
        aliases = {spec.name for spec in self.layout.tensors if spec.role == "alias"}
        return {n: t for n, t in self.language.tensors(vector).items() if n not in aliases}
