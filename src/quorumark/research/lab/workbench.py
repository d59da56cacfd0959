"""Language models trained and attacked one run after the other: what is loaded once, and what is computed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quorumark.errors import InputError
from quorumark.research.attacks.plan import Plan
from quorumark.research.lab.config import LanguageSettings, Settings
from quorumark.research.lab.language import LanguageModel, load
from quorumark.research.lab.language_run import LanguageRun, TextRound
from quorumark.research.lab.removal import Attacked, attack
from quorumark.research.lab.results import ATTACKED, finished, language_record, read_all, write
from quorumark.research.lab.series import Clock
from quorumark.research.lab.text import Corpus, Tokenizer, corpus

__all__ = ["Workbench"]


@dataclass
class Workbench:
    """Where language models are trained and attacked: folders, the device, and the model that is loaded."""

    models: Path
    data: Path
    cache: Path
    results: Path
    runs: Path
    device: str
    compiled: bool
    clock: Clock
    other_text: Path | None = None
    plan: Plan | None = None
    tell: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self._loaded: dict[Any, LanguageModel] = {}
        self._scoring = ThreadPoolExecutor(1)  # z of a run is computed on the CPU while the next one trains
        self._scored: list[Future[None]] = []
        self._corpora: dict[tuple[str, str], Corpus] = {}

    def corpus(self, model: str, dataset: str) -> Corpus:
        """The tokens of a text, and of the attacker's own."""
        if (model, dataset) not in self._corpora:
            folders = [self.models / model.removesuffix("-random")]
            folders += [self.data / "gpt2_tokenizer"] if model.startswith("gpt2") else []
            others = {} if self.other_text is None else {"other": self.other_text}
            self._corpora[model, dataset] = corpus(dataset, self.data, Tokenizer.of(*folders), self.cache, others)
        return self._corpora[model, dataset]

    def model(self, settings: LanguageSettings) -> LanguageModel:
        """A model, which stays loaded for the next run."""
        seed = settings.seed if settings.model.endswith("-random") else 0
        key = settings.model, seed, settings.max_coordinates
        if key not in self._loaded:
            module = load(settings.model, self.models, seed)
            made = LanguageModel(module, self.device, max_coordinates=settings.max_coordinates, compiled=self.compiled)
            self._loaded = {key: made}  # one at a time in memory
        return self._loaded[key]

    def do(self, settings: Settings) -> None:
        """Trains a run, or the rest of it, and attacks what it releases, unless that is done."""
        if not isinstance(settings, LanguageSettings):
            raise InputError("a run", "must be of a language model", settings.id)
        done = read_all(self.results).get(settings.id)
        if done is not None and finished(done, settings):
            self.tell(f"{settings.id}: done ({done['rounds']} rounds)")
            if self.plan is None:
                return
        folder = self.models / settings.model.removesuffix("-random")
        if settings.model != "gpt2-small-random" and not (folder / "config.json").exists():
            self.tell(f"{settings.id}: left out, there is no {folder}")
        elif self.clock.short:
            self.tell(f"{settings.id}: no time left")
        elif self.plan is None:
            self._trained(settings).close()
        else:
            self._attacked(settings, self.plan)

    def _trained(self, settings: LanguageSettings) -> LanguageRun:
        """A run as far as time allows, recorded and saved."""
        run = LanguageRun(settings, self.corpus(settings.model, settings.dataset), self.model(settings))
        folder = self.runs / settings.id
        checkpoint = folder / "checkpoint.pt"
        if checkpoint.exists():
            run.restore(checkpoint)
        if run.done:
            return run

        def tell(entry: TextRound) -> None:
            shown = "" if entry.perplexity is None else f", validation {entry.perplexity:.3f}"
            self.tell(f"{settings.id}: round {entry.round}, loss {entry.loss:.4f}{shown}, {entry.seconds:.2f} s")

        run.train(seconds=self.clock.left, checkpoint=checkpoint, tell=tell)
        if run.round_no:
            run.export(folder / "released.safetensors")
            self._scored.append(self._scoring.submit(self._record, language_record(run)))
        return run

    def _record(self, rest: Callable[[], dict[str, Any]]) -> None:
        body = rest()
        written = write(body, self.results)
        z, found = body["z"]["released"]["balanced-anchor/v1"], body["perplexity"]
        self.tell(
            f"{body['id']}: {body['rounds']} rounds, test perplexity {found['released']:.3f} (before: "
            f"{found['initial']:.3f}), z {z:.1f}, {body['seconds_per_round']} s a round; "
            f"{written or 'a longer run is there already'}"
        )

    def finish(self) -> None:
        """Waits for what is still computed."""
        for done in self._scored:
            done.result()
        self._scoring.shutdown()

    def _attacked(self, settings: LanguageSettings, plan: Plan) -> None:
        """A run and attacks on it; for averaging, an unmarked run of another seed as well."""
        other = None
        if any(name == "averaging" for job in plan.jobs for name, _ in job.steps):
            second = self._trained(
                replace(settings, strength="none", seed=settings.seed - 1 if settings.seed else 1, max_coordinates=0)
            )
            other = second.released if second.done else None
            second.close()
        run = self._trained(settings)
        if not run.done:
            self.tell(f"{settings.id}: not attacked, since its training is not done")
        else:
            attacked = Attacked(run, self.corpus(settings.model, settings.dataset), other)
            path = attack(
                attacked, plan, self.results / ATTACKED, seconds=self.clock.left,
                tell=lambda line: self.tell(f"{settings.id}: {line}"),
            )  # fmt: skip
            self.tell(f"{settings.id}: attacks in {path}")
        run.close()
