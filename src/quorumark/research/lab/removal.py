"""Attacks on a run's released language model, in the process that trained it: what it is worth after each, and its z.

In a plan, `text` says which text an attack that trains is given: train (if it names none), valid, or another by its
name. The plan that comes along is `language`.

z is with the known key, by the default statistic; after alignment as well, where an attack leaves the function as it is
and moves the weights elsewhere.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quorumark.align.groups import Groups
from quorumark.align.procedure import align
from quorumark.align.trace import derive_groups
from quorumark.errors import QuorumarkError
from quorumark.research import attacks
from quorumark.research.attacks import ATTACKS, Target
from quorumark.research.attacks import plan as plans
from quorumark.research.attacks.base import same_sizes
from quorumark.research.attacks.plan import Job, Plan, Step
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.research.lab import results, text
from quorumark.research.lab.fleet import Optimiser
from quorumark.research.lab.language import head_loss, perplexity
from quorumark.research.lab.language_run import LanguageRun

__all__ = ["Attacked", "attack", "read_plan"]


def read_plan(source: str | Path) -> Plan:
    """A plan (`quorumark.research.attacks.plan`) whose attacks that train may name the `text` that they are given."""
    return plans.read_plan(source, texts=True)


def _about(job: Job) -> str:
    """The settings, as a table shows them."""
    return "; ".join(", ".join(f"{k} {v}" for k, v in settings.items()) for _, settings in job.steps).strip("; ")


# --- what is attacked -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Attacked:
    """A run's released model and what its attacker has: texts, the pretrained weights, another fine-tune."""

    run: LanguageRun
    corpus: text.Corpus
    other: Tensor | None = None

    @cached_property
    def released(self) -> dict[str, Tensor]:
        return self.run.language.tensors(self.run.released)

    @cached_property
    def anchor(self) -> dict[str, Tensor]:
        return self.run.language.tensors(self.run.initial)

    @cached_property
    def known(self) -> KnownKey:
        return KnownKey(self.run.keys[0].numpy(), self.run.layout, TensorsInMemory(self.anchor))

    @cached_property
    def groups(self) -> Groups:
        """Of the anchor, as a consortium agrees on them."""
        return derive_groups(self._plain, self._example)

    @cached_property
    def _plain(self) -> Any:
        """The module on the CPU."""
        return copy.deepcopy(self.run.language.module).cpu().eval()

    @property
    def _example(self) -> dict[str, Tensor]:
        return {"input_ids": self.run.validation[: min(16, self.run.settings.sequence)][None].cpu()}

    def digest(self) -> str:
        """Of the released model: results of another are not gone on with."""
        return hashlib.sha256(self.run.released.cpu().numpy().tobytes()).hexdigest()

    def perplexity(self, weights: Mapping[str, Any]) -> float:
        """On the test text. The module is made anew: attacks may untie its embeddings."""
        run = self.run
        module = attacks.fitted(run.language.module, {n: w.to(run.device) for n, w in weights.items()})
        return perplexity(module, run.test, run.settings.sequence, batch=run.batch)

    def z(self, weights: Mapping[str, Any]) -> float:
        return self.known.z(dict(weights))

    def z_aligned(self, weights: Mapping[str, Any]) -> float:
        suspect = TensorsInMemory(dict(weights))
        found = align(suspect, self.known.anchor, self.run.layout, self.groups)
        return self.known.z(found.model(suspect))

    def elsewhere(self, job: Job, weights: Mapping[str, Any]) -> bool:
        """Whether weights may not be where they were: put elsewhere with the function as it was, or channels fewer."""
        return any(ATTACKS[name].keeps for name, _ in job.steps) or not same_sizes(weights, self.anchor)

    def apply(self, job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
        """The attacked weights on the CPU, and what it cost."""
        weights: dict[str, Any] = dict(self.released)
        steps, examples = 0, 0
        for number, step in enumerate(job.steps):
            if step[0] == "fine-tuning":
                weights, taken, seen = self._fine_tuned(step[1], weights, job.seed + number)
            else:
                settings = {k: v for k, v in step[1].items() if k != "text"}
                done = attacks.run(step[0], self._target(step, weights), seed=job.seed + number, **settings)
                weights = {name: tensor.detach().float().cpu() for name, tensor in done.weights.items()}
                taken, seen = done.steps, done.examples
            steps, examples = steps + taken, max(examples, seen)
        return weights, {"steps": steps, "examples": examples}

    def _fine_tuned(
        self, given: Mapping[str, Any], weights: Mapping[str, Any], seed: int
    ) -> tuple[dict[str, Any], int, int]:
        """The registry's fine-tuning, by the fast step that members train with: weights, steps, blocks of text."""
        usual = {"fraction": 0.2, "epochs": 1, "batch": self.run.batch, "learning_rate": 1e-4, "decay": 0.01}
        settings = {**usual, **given}
        rng = np.random.default_rng(seed)
        blocks = text.blocks(self.corpus[given.get("text", "train")], self.run.settings.sequence)
        chosen = rng.permutation(len(blocks))[: max(1, round(float(settings["fraction"]) * len(blocks)))]
        order = np.concatenate([rng.permutation(chosen) for _ in range(int(settings["epochs"]))])
        batch = int(settings["batch"])
        steps = -(-len(order) // batch)
        batches = torch.from_numpy(blocks[np.resize(order, steps * batch)]).to(self.run.device)
        theta = torch.from_numpy(self.run.layout.flatten(dict(weights))).to(self.run.device)
        optimiser = Optimiser(float(settings["learning_rate"]), float(settings["decay"]))
        self.run.language.train(theta, batches.view(steps, batch, -1), optimiser, seed)
        return self.run.language.tensors(theta), steps, len(chosen)

    def _target(self, step: Step, weights: Mapping[str, Any]) -> Target:
        """What trains does so on the device; what moves weights about, on the CPU."""
        run = self.run
        other = None if self.other is None else run.language.tensors(self.other)
        common: Any = {"base": self.anchor, "other": other, "loss": _loss, "layout": run.layout}
        if "data" not in ATTACKS[step[0]].needs:
            known = self.groups if ATTACKS[step[0]].keeps and same_sizes(weights, self.anchor) else None
            return Target(lambda: copy.deepcopy(self._plain), weights, example=self._example, known=known, **common)
        ids = torch.from_numpy(text.blocks(self.corpus[step[1].get("text", "train")], run.settings.sequence)).to(
            run.device
        )
        there = {name: tensor.to(run.device) for name, tensor in weights.items()}
        return Target(lambda: copy.deepcopy(run.language.module), there, (ids, ids), **common)


def _loss(module: Any, ids: Tensor, _labels: Tensor) -> Tensor:
    """Of predicting each token from those before it; in bfloat16 on a GPU, with float32 weights."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        hidden = module.base_model(input_ids=ids, use_cache=False)[0][:, :-1]
    kind = torch.bfloat16 if ids.is_cuda else torch.float32
    weight = module.get_output_embeddings().weight.to(kind)
    return head_loss(hidden.reshape(-1, hidden.shape[-1]).to(kind), weight, ids[:, 1:].reshape(-1))


# --- running ----------------------------------------------------------------------------------------------


def attack(
    attacked: Attacked,
    plan: Plan,
    folder: Path,
    *,
    seconds: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Path:
    """Runs what is not in folder/ID.json yet, and writes it after each attack; time that is up stops between two."""
    start, run = time.perf_counter(), attacked.run
    path, mark = folder / f"{run.settings.id}.json", attacked.digest()
    body: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if body.get("released_digest") != mark:
        body = results.attack_record(run, plan.title, mark, _measured(attacked, attacked.released))
    done = {(row["attack"], row["settings"], row["seed"]) for row in body["rows"]}
    waiting: list[tuple[dict[str, Any], Future[dict[str, float | None]]]] = []

    def settle(most: int) -> None:
        """Takes down what is scored, and waits until no more than so many are not."""
        while len(waiting) > most:
            row, scores = waiting.pop(0)
            try:
                row |= scores.result()
            except QuorumarkError as error:  # one that cannot be aligned
                tell(f"{row['attack']} {row['settings']}: {error}")
                continue
            body["rows"].append(row)
            results.write_lines(body, path)
            found = [f"z {row['z']:.1f}"] if row["z"] is not None else []
            found += [f"z aligned {row['z_aligned']:.1f}"] if "z_aligned" in row else []
            shown = f"perplexity {row['perplexity']:.3f} ({row['change']:+.2f} %), {', '.join(found)}"
            tell(f"{row['attack']} {row['settings']}: {shown}, {row['seconds']} s")

    with ThreadPoolExecutor(1) as scoring:  # z is computed on the CPU while the next attack has the device
        for job in plan.jobs:
            if (job.name, _about(job), job.seed) in done:
                continue
            if seconds is not None and time.perf_counter() - start > seconds:
                tell("no time left for the other attacks")
                break
            begun = time.perf_counter()
            try:
                weights, cost = attacked.apply(job)
                if attacked.elsewhere(job, weights):
                    _ = attacked.groups  # here: finding them sets what all threads share
            except QuorumarkError as error:
                tell(f"{job.name} {_about(job)}: {error}")
                continue
            perplexity = round(attacked.perplexity(weights), 5)
            change = round(100 * (perplexity / body["released"]["perplexity"] - 1), 3)
            row = {"attack": job.name, "settings": _about(job), "seed": job.seed}
            row |= {"seconds": round(time.perf_counter() - begun, 1), **cost, "perplexity": perplexity}
            settle(1)
            waiting.append((row | {"change": change}, scoring.submit(_scored, attacked, job, weights)))
        settle(0)
    results.write_lines(body, path)
    return path


def _scored(attacked: Attacked, job: Job, weights: Mapping[str, Any]) -> dict[str, float | None]:
    """z, unless sizes changed; and where weights are elsewhere, z after alignment and what that took."""
    found: dict[str, float | None] = {"z": None}
    if same_sizes(weights, attacked.anchor):
        found["z"] = round(attacked.z(weights), 3)
    if attacked.elsewhere(job, weights):
        begun = time.perf_counter()
        found["z_aligned"] = round(attacked.z_aligned(weights), 3)
        found["seconds_aligned"] = round(time.perf_counter() - begun, 1)
    return found


def _measured(attacked: Attacked, weights: Mapping[str, Any]) -> dict[str, float]:
    return {"perplexity": round(attacked.perplexity(weights), 5), "z": round(attacked.z(weights), 3)}
