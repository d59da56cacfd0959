"""The server's side in Flower: a strategy whose training goes through secure aggregation with the mark.

`watermarked(strategy, …)` has `start`, like every strategy, and hands the strategy a Grid that looks like Flower's.
What the strategy sends for training goes to the nodes with what the members must know; of what comes back it sees one
reply, which holds the opened sum: the average of the members' models, by the manifest's weights, plus the mark. So any
strategy works that takes that average as it is. Server optimisers are the members' own (`flower.optimisers`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields
from logging import INFO
from pathlib import Path
from typing import Any

from quorumark.errors import InputError, RoundError
from quorumark.flower.optimisers import averaging, check_optimiser
from quorumark.flower.simulation import SimulationWire, is_simulation
from quorumark.flower.wire import FlowerWire, exchange, flwr_app, tensors, to_record
from quorumark.node.rounds import Rounds
from quorumark.node.start import Start
from quorumark.round.outlook import Outlook
from quorumark.round.server import RoundServer
from quorumark.simulation import RoundReport

__all__ = ["Watermarked", "secure", "watermarked"]

_LINEAR = ("FedAvg", "FedProx", "FedAvgM", "FedOpt", "FedAdam", "FedYogi", "FedAdagrad")
_REASONS = {
    "Krum": "it chooses among single updates",
    "MultiKrum": "it chooses among single updates",
    "Bulyan": "it chooses among single updates",
    "FedMedian": "a median needs every single update",
    "FedTrimmedAvg": "a trimmed mean needs every single update",
    "QFedAvg": "it weighs every update by its own loss",
    "FedXgbBagging": "it collects trees, which have no average",
    "FedXgbCyclic": "it passes one member's trees on to the next",
    "DifferentialPrivacyServerSideFixedClipping": "the server clips every single update; clip at the members "
    "(DifferentialPrivacyClientSideFixedClipping with fixedclipping_mod)",
    "DifferentialPrivacyServerSideAdaptiveClipping": "the server clips every single update; clip at the members "
    "(DifferentialPrivacyClientSideFixedClipping with fixedclipping_mod)",
    "DifferentialPrivacyClientSideAdaptiveClipping": "it reads every member's own norm bit; use a fixed clipping norm "
    "(DifferentialPrivacyClientSideFixedClipping with fixedclipping_mod)",
}
_NOISY = "DifferentialPrivacyClientSideFixedClipping"


def watermarked(
    strategy: Any,
    consortium: str | os.PathLike[str],
    *,
    layout: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    after: int = 0,
    seed: int | None = None,
    stage_timeout: float = 120.0,
    patience: float | None = None,
    linear: bool = False,
    go_on: bool = False,
) -> Watermarked:
    """The same strategy, with secure aggregation and the consortium's mark.

    `consortium` is the file of the signed manifest; layout.json beside it (or `layout`) says where each weight of the
    model is in the vector, and is made from the initial model if there is none. anchor.safetensors beside it is the
    model that the run begins with, unless `start` is given the same one. With a `folder` a run whose server died
    goes on. With `go_on` a run that lost its folder goes on from the newest model that t members name as their last,
    which they hand out: a second run from the initial model takes the consent of every member's operator. `after` is
    the last round in which these members took part in any run; the nodes that are there are asked for it, so it is
    needed only if others come later. `stage_timeout` is how long a node may take for an
    upload or an answer, in seconds; training has the strategy's own timeout. With `patience` (3, say), nodes that are
    silent when more than half have replied get that many times as long as those took, if it is less. `linear` vouches
    for your own strategy: that what it makes of the replies depends on their weighted average alone. `seed` is for
    research.
    """
    return _wrapped(
        strategy,
        consortium,
        linear,
        sums_alone=False,
        layout=layout,
        folder=folder,
        after=after,
        seed=seed,
        stage_timeout=stage_timeout,
        patience=patience,
        go_on=go_on,
    )


def secure(
    strategy: Any,
    consortium: str | os.PathLike[str],
    *,
    layout: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    after: int = 0,
    seed: int | None = None,
    stage_timeout: float = 120.0,
    patience: float | None = None,
    linear: bool = False,
    go_on: bool = False,
) -> Watermarked:
    """The same strategy, with secure aggregation alone: no key, no mark. The server sees the sum and nothing else.

    `consortium` is the file of the manifest that the members signed (`quorumark setup sums`). All else is as in
    `watermarked`. FedAvg's model is the weighted average to K/2 units (docs/secagg.md), rounded to the model's types.
    """
    return _wrapped(
        strategy,
        consortium,
        linear,
        sums_alone=True,
        layout=layout,
        folder=folder,
        after=after,
        seed=seed,
        stage_timeout=stage_timeout,
        patience=patience,
        go_on=go_on,
    )


def _wrapped(
    strategy: Any,
    consortium: str | os.PathLike[str],
    linear: bool,
    *,
    sums_alone: bool,
    layout: str | os.PathLike[str] | None,
    patience: float | None,
    **options: Any,
) -> Watermarked:
    _check_strategy(strategy, linear)
    if patience is not None and not patience >= 1:
        raise InputError("patience", "must be at least 1", str(patience))
    made = Watermarked(strategy, Path(consortium), layout, patience=patience, **options)
    made._start.check_kind("strategy", sums_alone=sums_alone)
    check_optimiser(made.inner, made.manifest.terms)
    return made


def _check_strategy(strategy: Any, linear: bool) -> None:
    """Whether a strategy's result is a function of the members' weighted average."""
    import flwr.serverapp.strategy as known

    rule = "must work with the weighted average of the members' models alone"
    if not isinstance(strategy, known.Strategy):
        raise InputError("strategy", "must be one of Flower's (flwr.serverapp.strategy)", type(strategy).__name__)
    name = type(strategy).__name__
    for kind in type(strategy).__mro__:
        if kind.__name__ in _REASONS and kind.__module__.startswith("flwr."):
            raise InputError("strategy", rule, f"{name}: {_REASONS[kind.__name__]}")
    if isinstance(strategy, getattr(known, _NOISY)):
        if strategy.accountant is not None:
            raise InputError(
                "strategy", rule, f"{name} with an accountant, which checks every single reply; account outside"
            )
        _check_strategy(strategy.strategy, linear)
        return
    maker = next(kind for kind in type(strategy).__mro__ if "aggregate_train" in vars(kind))
    if linear or (maker.__module__.startswith("flwr.") and maker.__name__ in _LINEAR):
        return
    raise InputError(
        "strategy", rule, f"{name}, whose own aggregate_train nobody can check; say linear=True if it does"
    )


class Watermarked:
    """A strategy's `start`, through secure aggregation. `reports` has a RoundReport for each round."""

    def __init__(
        self,
        strategy: Any,
        consortium: Path,
        layout: str | os.PathLike[str] | None,
        *,
        folder: str | os.PathLike[str] | None,
        after: int,
        seed: int | None,
        stage_timeout: float,
        patience: float | None,
        go_on: bool = False,
    ) -> None:
        self.strategy, self.reports = strategy, list[RoundReport]()
        elsewhere = (
            "a relative path begins where the server's process was started (with flwr run: where its SuperLink was), "
            "so name the whole path if in doubt"
        )
        self._start = Start(consortium, layout, elsewhere)
        self.manifest, self._go_on = self._start.manifest, go_on
        self._folder, self._after, self._seed, self._timeout = folder, after, seed, stage_timeout
        self._patience = patience
        self.inner = strategy.strategy if type(strategy).__name__ == _NOISY else strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.strategy, name)

    def start(
        self,
        grid: Any,
        initial_arrays: Any = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: Any = None,
        evaluate_config: Any = None,
        evaluate_fn: Any = None,
    ) -> Any:
        """As the strategy's own. Rounds that are given up leave the last model standing; `reports` says why.

        Without `initial_arrays` the run begins with the anchor beside the manifest, which is the only model that it can
        begin with. A run whose rounds were all given up raises a RoundError: apps save what they get, and it would be
        the model that the run began with, over one that an earlier run trained. If all nodes refuse in the first round,
        for reasons that another round does not mend, it is raised then, with what each of them says.
        """
        given = None if initial_arrays is None else tensors(initial_arrays)
        call = "strategy.start(grid=grid, num_rounds=…)"
        model, layout = self._start.model(given, self._folder, "initial_arrays", call)
        initial_arrays, before = to_record(model) if initial_arrays is None else initial_arrays, len(self.reports)
        server = RoundServer(
            self.manifest,
            layout,
            model,
            run=str(grid.run.run_id),
            after=self._after,
            seed=self._seed,
            folder=self._folder,
            earlier=self._start.earlier,
        )
        carrier = _Carrier(grid, self, server)
        if server.resumed is None:
            carrier.rounds.survey(go_on=self._go_on)
        if server.resumed is not None:
            initial_arrays = to_record(server.resumed)
            num_rounds = max(0, num_rounds - server.accepted)
        server.planned = server.history.mark.round + num_rounds
        evaluate = evaluate_fn and (lambda round_no, arrays: evaluate_fn(round_no, carrier.in_own_types(arrays)))
        metrics = self.inner.train_metrics_aggr_fn
        self.inner.train_metrics_aggr_fn = carrier.metrics
        carrier.gather = metrics
        try:
            with averaging(self.inner, self.manifest.terms):
                result = self.strategy.start(
                    grid=carrier,
                    initial_arrays=initial_arrays,
                    num_rounds=num_rounds,
                    timeout=timeout,
                    train_config=train_config,
                    evaluate_config=evaluate_config,
                    evaluate_fn=evaluate,
                )
        finally:
            self.inner.train_metrics_aggr_fn = metrics
        if result.arrays:
            result.arrays = carrier.in_own_types(result.arrays)
            server.close(tensors(result.arrays))
            if line := carrier.rounds.last_line():
                _log()(INFO, "quorumark: %s", line)
            return result
        tried = self.reports[before:]
        if tried:
            reason = next(iter(tried[-1].excluded.values()), tried[-1].given_up)
            raise RoundError(
                f"no round of this run was finished, and there is no new model: {reason}", code="round.none-finished"
            )
        result.arrays = carrier.in_own_types(initial_arrays)  # nothing was left to do: the last model stands
        return result


class _Carrier:
    """What the strategy takes for the Grid."""

    def __init__(self, grid: Any, owner: Watermarked, server: RoundServer) -> None:
        self._grid, self._owner, self._server = grid, owner, server
        self._wire = SimulationWire(grid, "train") if is_simulation(grid) else FlowerWire(grid, "train")
        self.rounds = Rounds(
            self._wire,
            server,
            timeout=owner._timeout,
            patience=owner._patience,
            log=_log(),
            slim=_without_arrays,
            together=self._wire if isinstance(self._wire, SimulationWire) else None,
        )
        self.rounds.reports = owner.reports
        self.gather: Any = None
        self._like = server.like

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def in_own_types(self, arrays: Any) -> Any:
        """A strategy's model in the types that the layout has: Flower's averages turn integers into fractions, which
        stay as they were here, and server optimisers turn float32 into float64."""
        roles = {spec.name: spec.role for spec in self._server.layout.tensors}
        made = {}
        for name, tensor in tensors(arrays).items():
            like = self._like.get(name, tensor)
            made[name] = like if roles.get(name) == "buffer" else tensor.astype(like.dtype, copy=False)
        return to_record(made)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Iterable[Any]:
        sent = list(messages)
        training = [m for m in sent if m.metadata.message_type.partition(".")[0] == "train"]
        for content in {id(m.content): m.content for m in sent}.values():
            for name, record in list(content.array_records.items()):
                content[name] = self.in_own_types(record)
        if not training:
            return list(exchange(self._grid, sent, timeout or 3600.0).values())
        return self._round(training, timeout or 3600.0)

    def _round(self, messages: list[Any], timeout: float) -> list[Any]:
        """All stages of a round; one reply with the sum, or none if the round is given up."""
        flwr, key = flwr_app(), self._owner.inner.weighted_by_key
        name, record = next(iter(messages[0].content.array_records.items()))
        model = tensors(record)
        self._wire.kind = messages[0].metadata.message_type
        beside = {message.metadata.dst_node_id: dict(message.content) for message in messages}
        self._report, weights = self.rounds.round(model, beside, timeout, {"weighted": key, "record": name})
        if weights is None:
            return []
        total = sum(int(self._server.manifest.terms.member(x).examples) for x in self._report.members)
        content = flwr.RecordDict({"arrays": to_record(weights), "metrics": flwr.MetricRecord({key: total})})
        return [flwr.Message(content, reply_to=messages[0])]

    def metrics(self, contents: list[Any], key: str) -> Any:  # noqa: ARG002 - the strategy's own hold one sum
        """The members' own metrics, as the strategy puts them together, and what the round cost."""
        inside = set(self._report.members)
        record = self.gather([content for point, content in self.rounds.told if point in inside], key)
        report = self._report
        record["quorumark-members"], record["quorumark-attempts"] = len(report.members), report.attempts
        record["quorumark-marked"], record["quorumark-silenced"] = int(report.marked), report.silenced
        for told in fields(Outlook):
            if told.name != "advice":
                record[f"quorumark-{told.name.replace('_', '-')}"] = getattr(report, told.name)
        for name, value in report.metrics.items():
            record[f"quorumark-{name}"] = value
        for stage, seconds in report.seconds.items():
            record[f"quorumark-seconds-{stage}"] = seconds
        return record


def _without_arrays(content: dict[str, Any]) -> dict[str, Any]:
    """A training message without its model, which the members compute."""
    kind = flwr_app().ArrayRecord
    return {name: record for name, record in content.items() if not isinstance(record, kind)}


def _log() -> Any:
    from flwr.common.logger import log

    return log
