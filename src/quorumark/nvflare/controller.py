"""The server's side in FLARE: a controller for the key ceremony, rounds, queries and signatures.

What it leaves is in `folder`, by default RUN/quorumark on the server: model.safetensors, certificate-N.json and
summary.json with the report of each round and what became of each query. Where the job has a persistor, the model is
saved there, too, as FedAvg would.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from quorumark.consortium.home import read_as
from quorumark.consortium.records import Card, Terms
from quorumark.errors import EvidenceError, InputError, QuorumarkError, RoundError
from quorumark.files import write_shared
from quorumark.model.layout import write_safetensors
from quorumark.node.relay import relay_ceremony, relay_query
from quorumark.node.rounds import Rounds
from quorumark.node.start import Start
from quorumark.nvflare.optimisers import check_named
from quorumark.nvflare.wire import SiteWire
from quorumark.round.server import RoundServer
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.layered import Opened
from quorumark.verify.reference import Reference

__all__ = ["QuorumarkController"]


class QuorumarkController(Controller):  # type: ignore[misc]
    """Does in this order what it was asked for.

    With `terms` (a file) the members make their key, and the manifest is written to `consortium`. With `num_rounds`
    they train; the initial model and its layout are beside the manifest. `queries` ask whether a model is theirs, each
    a dict with `suspect` (a file or a folder; by default the model of this run) and `sites` (by default all).

    A query with `after` (the file of the plain query's certificate) and `examiner` (the file of a card) asks by layers:
    layers-N of the folder gets query.json and the sealed partial-X.json, and the examiner's word is expected there as
    opened.json (`quorumark verify open`), for `opening_timeout` seconds.

    `consortium`, `terms` and suspects are paths on the server's machine. With a `folder` a run whose server died goes
    on when the job is run again; with `go_on` one that lost its folder. `train_timeout` and `stage_timeout` say how
    long a site may take, in seconds; `patience` as in `quorumark.flower.watermarked`. `seed` is for research.
    `sums_alone` says that the members have no key: a manifest of the other kind is refused. `optimiser` is what the
    recipe named (`quorumark.nvflare.optimisers`): another one than the terms' is refused.
    """

    def __init__(
        self,
        consortium: str = "",
        terms: str = "",
        num_rounds: int = 0,
        queries: list[dict[str, Any]] | None = None,
        folder: str = "",
        task_name: str = "train",
        persistor_id: str = "",
        train_timeout: float = 3600.0,
        stage_timeout: float = 120.0,
        wait_timeout: float = 300.0,
        patience: float | None = None,
        after: int = 0,
        seed: int | None = None,
        go_on: bool = False,
        sums_alone: bool = False,
        optimiser: str = "",
        opening_timeout: float = 86400.0,
    ) -> None:
        super().__init__()
        self.consortium, self.terms, self.num_rounds, self.queries = consortium, terms, num_rounds, queries
        self.folder, self.task_name, self.persistor_id = folder, task_name, persistor_id
        self.train_timeout, self.stage_timeout, self.wait_timeout = train_timeout, stage_timeout, wait_timeout
        self.patience, self.after, self.seed, self.go_on = patience, after, seed, go_on
        self.sums_alone, self.optimiser, self.opening_timeout = sums_alone, optimiser, opening_timeout

    # --- what FLARE calls ---

    def start_controller(self, fl_ctx: Any) -> None: ...

    def stop_controller(self, fl_ctx: Any) -> None: ...

    def process_result_of_unknown_task(self, *args: Any, **kwargs: Any) -> None:
        """A site that was late: its result is not used any more."""

    def control_flow(self, abort_signal: Any, fl_ctx: Any) -> None:
        run = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_run_dir(fl_ctx.get_job_id())
        out = Path(self.folder) if self.folder else Path(run) / "quorumark"
        out.mkdir(parents=True, exist_ok=True)
        wire = SiteWire(self, fl_ctx, abort_signal, self.task_name)
        summary: dict[str, Any] = {"rounds": [], "queries": []}
        try:
            if self.terms:
                summary["manifest"] = self._make_key(wire, fl_ctx)
            if self.num_rounds:
                self._train(wire, out, summary, abort_signal, fl_ctx)
            for query in self.queries or ():
                summary["queries"].append(self._ask(wire, out, query, len(summary["queries"]) + 1, fl_ctx))
        except QuorumarkError as error:
            summary["error"] = {"text": str(error), "code": getattr(error, "code", "")}
            self.system_panic(f"quorumark: {error}", fl_ctx)
        finally:
            write_shared(out / "summary.json", json.dumps(summary, indent=1).encode())

    def _log(self, fl_ctx: Any) -> Any:
        def log(level: int, text: str, *args: Any) -> None:
            said = text % args if args else text
            if level >= WARNING:
                self.log_warning(fl_ctx, said)
            else:
                self.log_info(fl_ctx, said)

        return log

    # --- the key ceremony ---

    def _make_key(self, wire: SiteWire, fl_ctx: Any) -> str:
        terms = read_as(Path(self.terms), "terms", Terms.from_bytes)
        manifest = relay_ceremony(
            wire,
            terms,
            timeout=self.wait_timeout,
            stage_timeout=self.stage_timeout,
            note=lambda text: self.log_info(fl_ctx, f"quorumark: {text}"),
        )
        write_shared(Path(self.consortium), manifest.to_bytes())
        self.log_info(fl_ctx, f"quorumark: the key is made; its manifest is {manifest.digest().hex()}")
        return manifest.digest().hex()

    # --- rounds ---

    def _train(self, wire: SiteWire, out: Path, summary: dict[str, Any], abort: Any, fl_ctx: Any) -> None:
        start = Start(Path(self.consortium))
        start.check_kind("recipe", sums_alone=self.sums_alone)
        check_named(self.optimiser, start.manifest.terms)
        model, layout = start.model(folder=out)
        server = RoundServer(
            start.manifest,
            layout,
            model,
            run=wire.run,
            after=self.after,
            seed=self.seed,
            folder=out,
            earlier=start.earlier,
        )
        rounds = Rounds(wire, server, timeout=self.stage_timeout, patience=self.patience, log=self._log(fl_ctx))
        wire.present(server.group.least, self.wait_timeout)
        if server.resumed is None:
            rounds.survey(go_on=self.go_on)
        done = server.accepted if server.resumed is not None else 0
        model = dict(server.resumed) if server.resumed is not None else model
        server.planned = server.history.mark.round + max(0, self.num_rounds - done)
        finished = False
        for number in range(done, self.num_rounds):
            if abort.triggered:
                break
            sent = _training(model, number, self.num_rounds)
            report, weights = rounds.round(model, dict.fromkeys(wire.present(0, 0.0), sent), self.train_timeout)
            report.metrics |= _mean(rounds.told, report.members, start.manifest)
            out_of_it = {rounds.name(x): report.excluded_codes[x] for x in report.excluded}
            summary["rounds"].append({**asdict(report), "out": out_of_it})
            if weights is not None:
                model, finished = weights, True
                self._keep(model, out, fl_ctx)
        if not finished and done < self.num_rounds and not abort.triggered:
            last = rounds.reports[-1]
            reason = next(iter(last.excluded.values()), last.given_up)
            raise RoundError(
                f"no round of this run was finished, and there is no new model: {reason}", code="round.none-finished"
            )
        server.close(model)
        self._keep(model, out, fl_ctx)
        if line := rounds.last_line():
            self.log_info(fl_ctx, f"quorumark: {line}")

    def _keep(self, model: Mapping[str, NDArray[Any]], out: Path, fl_ctx: Any) -> None:
        write_safetensors(model, out / "model.safetensors")
        persistor = fl_ctx.get_engine().get_component(self.persistor_id) if self.persistor_id else None
        if persistor is not None:
            learnable = persistor.load(fl_ctx)
            learnable[ModelLearnableKey.WEIGHTS] = dict(model)
            persistor.save(learnable, fl_ctx)

    # --- queries and signatures ---

    def _ask(self, wire: SiteWire, out: Path, query: Mapping[str, Any], number: int, fl_ctx: Any) -> dict[str, Any]:
        reference = Reference.read(self.consortium)
        sites = query.get("sites")
        said: list[str] = []

        def note(text: str) -> None:
            said.append(text)
            self.log_info(fl_ctx, f"quorumark: {text}")

        try:
            layers = self._by_layers(wire, query, out / f"layers-{number}", note)
            certificate = relay_query(
                wire,
                reference,
                query.get("suspect") or out / "model.safetensors",
                nodes=None if sites is None else [wire.node_of(site) for site in sites],
                timeout=self.wait_timeout,
                stage_timeout=self.stage_timeout,
                note=note,
                **{name: query[name] for name in ("align", "lora", "with_base") if name in query},
                **layers,
            )
        except QuorumarkError as error:
            self.log_warning(fl_ctx, f"quorumark: query {number} was refused: {error}")
            return {"refused": str(error), "said": said}
        path = out / f"certificate-{number}.json"
        write_shared(path, certificate.to_bytes())
        finding = certificate.finding
        self.log_info(fl_ctx, f"quorumark: query {number}: {finding.verdict}, z = {finding.z}; {path}")
        return {"verdict": finding.verdict, "z": str(finding.z), "certificate": path.name, "said": said}

    def _by_layers(
        self, wire: SiteWire, query: Mapping[str, Any], folder: Path, note: Callable[[str], None]
    ) -> dict[str, Any]:
        """What `relay_query` needs to ask by layers; nothing for a plain query."""
        if ("after" in query) != ("examiner" in query):
            raise InputError("after, examiner", "must be given together, to ask by layers", "one of them")
        if "after" not in query:
            return {}

        def opener(asked: Query, partials: Sequence[Partial]) -> Opened:
            folder.mkdir(parents=True, exist_ok=True)
            word = folder / "opened.json"
            for old in (word, *folder.glob("partial-*.json")):
                old.unlink(missing_ok=True)
            write_shared(folder / "query.json", asked.to_bytes())
            for partial in partials:
                write_shared(folder / f"partial-{partial.point}.json", partial.to_bytes())
            note(f"the answers are sealed to {card.name!r}, whose word is expected as {word} (quorumark verify open)")
            until = time.monotonic() + self.opening_timeout
            while not word.exists():
                if wire.aborted:
                    raise EvidenceError("the job was aborted before the examiner's word was there")
                if time.monotonic() > until:
                    raise EvidenceError(f"the examiner's word was not there within {self.opening_timeout:.0f} s")
                time.sleep(0.25)
            return read_as(word, "an examiner's word", Opened.from_bytes)

        card = read_as(Path(query["examiner"]), "an examiner's card", Card.from_bytes)
        after = read_as(Path(query["after"]), "a certificate", Certificate.from_bytes)
        return {"after": after, "examiner": card, "opener": opener}


def _training(model: Mapping[str, NDArray[Any]], number: int, rounds: int) -> Any:
    """Makes what FLARE's own FedAvg would send: each site's task has a shareable of its own."""

    def made() -> Shareable:
        params = {name: np.asarray(tensor) for name, tensor in model.items()}
        sent = FLModel(ParamsType.FULL, params, start_round=0, current_round=number, total_rounds=rounds)
        shareable = FLModelUtils.to_shareable(sent)
        shareable.add_cookie(AppConstants.CONTRIBUTION_ROUND, number)
        return shareable

    return made


def _mean(told: list[tuple[int, Any]], members: tuple[int, ...], manifest: Any) -> dict[str, float]:
    """The members' own metrics, weighted as their models are."""
    inside = [(manifest.terms.member(x).examples, found) for x, found in told if x in members and found]
    names = set.intersection(*(set(found) for _, found in inside)) if inside else set()
    whole = sum(weight for weight, _ in inside)
    return {name: sum(weight * float(found[name]) for weight, found in inside) / whole for name in sorted(names)}
