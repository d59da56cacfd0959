"""The server's side in Flower: a strategy whose training goes through secure aggregation with the mark.

`watermarked(strategy, …)` has `start`, like every strategy, and hands the strategy a Grid that looks like Flower's.
What the strategy sends for training goes to the nodes with what the members must know; of what comes back it sees one
reply, which holds the opened sum: the average of the members' models, by the manifest's weights, plus the mark. So any
strategy works that is a function of that average.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.consortium.home import read_as
from quorumark.consortium.records import anchor_of
from quorumark.errors import EncodingError, InputError, LayoutError, QuorumarkError, RoundError, code_of
from quorumark.flower.wire import (
    accepted_config,
    config_of,
    content_of,
    exchange,
    flwr_app,
    records,
    size_of,
    split,
    tensors,
    to_record,
    wait_for,
)
from quorumark.model.layout import ModelLayout, read_safetensors
from quorumark.node.ceremony import check_introduction
from quorumark.round.server import RoundServer
from quorumark.simulation import RoundReport, timed, without_values
from quorumark.verify.reference import ANCHOR, LAYOUT, read_chain

__all__ = ["Watermarked", "watermarked"]

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
_ADAPTIVE = ("FedAdam", "FedYogi", "FedAdagrad")
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
    _check_strategy(strategy, linear)
    if patience is not None and not patience >= 1:
        raise InputError("patience", "must be at least 1", str(patience))
    for kind in type(strategy).__mro__:
        if kind.__name__ in _ADAPTIVE and kind.__module__.startswith("flwr."):
            text = "quorumark: %s divides every weight's step by its own size, and may leave little of the mark"
            _log()(WARNING, text + ": measure z before you rely on it (docs/flower.md)", kind.__name__)
    return Watermarked(
        strategy,
        Path(consortium),
        layout,
        folder=folder,
        after=after,
        seed=seed,
        stage_timeout=stage_timeout,
        patience=patience,
        go_on=go_on,
    )


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
        if not consortium.is_file():
            raise InputError(
                "consortium",
                "must be the file of the signed manifest; a relative path begins where the server's process was "
                "started (with flwr run: where its SuperLink was), so name the whole path if in doubt",
                f"{str(consortium)!r}, looked for at {str(consortium.absolute())!r}",
            )
        *earlier, self.manifest = read_chain(consortium)
        self._earlier, self._go_on = tuple(earlier), go_on
        usual, self._anchor_path = consortium.parent / LAYOUT, consortium.parent / ANCHOR
        self._layout_path = Path(layout) if layout is not None else usual if usual.exists() else None
        self._folder, self._after, self._seed, self._timeout = folder, after, seed, stage_timeout
        self._patience = patience
        self._inner = strategy.strategy if type(strategy).__name__ == _NOISY else strategy

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
        model, layout = self._initial(initial_arrays)
        initial_arrays, before = to_record(model) if initial_arrays is None else initial_arrays, len(self.reports)
        server = RoundServer(
            self.manifest,
            layout,
            model,
            run=str(grid.run.run_id),
            after=self._after,
            seed=self._seed,
            folder=self._folder,
            earlier=self._earlier,
        )
        carrier = _Carrier(grid, self, server)
        if server.resumed is None:
            needed = server.names_needed if self._go_on else 0
            nodes = wait_for(grid, needed, self._timeout)
            server.survey(lambda stage, config: carrier.ask_all(nodes, "train", stage, config), go_on=self._go_on)
        if server.resumed is not None:
            initial_arrays = to_record(server.resumed)
            num_rounds = max(0, num_rounds - server.accepted)
        server.planned = server.history.mark.round + num_rounds
        evaluate = evaluate_fn and (lambda round_no, arrays: evaluate_fn(round_no, carrier.in_own_types(arrays)))
        metrics = self._inner.train_metrics_aggr_fn
        self._inner.train_metrics_aggr_fn = carrier.metrics
        carrier.gather = metrics
        try:
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
            self._inner.train_metrics_aggr_fn = metrics
        if result.arrays:
            result.arrays = carrier.in_own_types(result.arrays)
            server.close(tensors(result.arrays))
            return result
        tried = self.reports[before:]
        if tried:
            reason = next(iter(tried[-1].excluded.values()), tried[-1].given_up)
            raise RoundError(
                f"no round of this run was finished, and there is no new model: {reason}", code="round.none-finished"
            )
        result.arrays = carrier.in_own_types(initial_arrays)  # nothing was left to do: the last model stands
        return result

    def _initial(self, arrays: Any) -> tuple[dict[str, NDArray[Any]], ModelLayout]:
        """The model that the run begins with, which must be the one that the members agreed on, and its layout."""
        terms, path = self.manifest.terms, self._anchor_path
        given = arrays is not None
        if not given and not path.is_file():
            raise InputError(
                "initial_arrays",
                f"must be given, or the members' initial model must be beside the manifest as {ANCHOR} "
                "(qm.Reference.publish writes it there)",
                f"nothing, and there is no {str(path)!r}",
            )
        model = tensors(arrays) if given else _read_anchor(path)
        layout = (
            ModelLayout.of(model)
            if self._layout_path is None
            else read_as(self._layout_path, "a layout", ModelLayout.from_bytes)
        )
        remedy = (
            "leave initial_arrays out, and the run begins with that model: strategy.start(grid=grid, num_rounds=…)"
            if path.is_file()
            else f"put that model beside the manifest as {ANCHOR}, and leave initial_arrays out: "
            "strategy.start(grid=grid, num_rounds=…)"
        )
        what = ("initial_arrays", remedy) if given else (ANCHOR, "get the file from the member who published it")
        if layout.digest() != terms.layout:
            raise _not_agreed(*what, "names and shapes", layout.digest(), terms.layout)
        if self._folder is not None and (Path(self._folder) / "run.json").exists():
            return model, layout  # the run goes on from its folder
        try:
            found = anchor_of(layout, model)
        except LayoutError as error:
            raise InputError(what[0], f"must have the tensors of the agreed layout: {what[1]}", error) from None
        if found != terms.anchor:
            raise _not_agreed(*what, "weights", found, terms.anchor)
        if terms.buffers and layout.buffers_digest(model).hex() != terms.buffers:
            raise _not_agreed(*what, "integers", layout.buffers_digest(model).hex(), terms.buffers)
        return model, layout


def _read_anchor(path: Path) -> dict[str, NDArray[Any]]:
    """The model in a file. Files are sorted by name; where names are numbers, as Flower gives them to a list of arrays,
    apps rely on their order."""
    found = {name: np.asarray(tensor) for name, tensor in read_safetensors(path).items()}
    return {name: found[name] for name in (sorted(found, key=int) if all(map(str.isdecimal, found)) else found)}


def _not_agreed(argument: str, remedy: str, part: str, found: str, agreed: str) -> InputError:
    rule = f"must be the model that the members agreed on, whose {part} have the digest {agreed}: {remedy}"
    return InputError(argument, rule, f"a model with the digest {found}")


class _Carrier:
    """What the strategy takes for the Grid."""

    def __init__(self, grid: Any, owner: Watermarked, server: RoundServer) -> None:
        self._grid, self._owner, self._server = grid, owner, server
        self._points: dict[int, int] = {}  # node → point, as members signed it
        self._silent: set[int] = set()  # nodes that did not reply when they were last asked
        self._contents: list[Any] = []
        self._nodes: dict[int, int] = {}
        self._mended: set[int] = set()  # nodes that refused for what the server settles before the next round
        self._first = True
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

    # --- a round ---

    def _round(self, messages: list[Any], timeout: float) -> list[Any]:
        """All stages of a round; one reply with the sum, or none if the round is given up."""
        log = _log()
        server, report = self._server, RoundReport(0)
        flwr = flwr_app()
        self._contents = []
        self._report, weights = report, None
        try:
            model = tensors(next(iter(messages[0].content.array_records.values())))
            kind, nodes = messages[0].metadata.message_type, [m.metadata.dst_node_id for m in messages]
            report.round = server.round_no + 1
            weights = server.prepare(lambda stage, config: self.ask_all(nodes, kind, stage, config), model)
            if weights is None:
                offer, arrays = server.offer(model)
                self._train(messages, offer, arrays, timeout, report)
                self._sum(kind, report)
                weights = server.finish()
        except (RoundError, EncodingError) as error:
            report.given_up, report.given_up_code = _text(error), code_of(error)
            log(WARNING, "quorumark: %s; the last model stands", report.given_up)
        self._owner.reports.append(report)
        for point, reason in report.excluded.items():
            log(WARNING, "quorumark: %s is out of round %s: %s", self._name(point), report.round, reason)
        if report.given_up and self._first:
            self._check_hope(report)
        self._first = False
        if report.given_up or weights is None:
            return []
        report.members, report.marked, report.c, report.rho = server.members, server.marked, server.c, server.rho
        report.disputed, report.silenced = dict(server.disputed), server.silenced
        report.expected_z = server.expected_z
        found = server.course(report.expected_z)
        report.final_z, report.advice = found.final_z, found.advice
        if report.advice and not any(earlier.advice for earlier in self._owner.reports[:-1]):
            log(WARNING, "quorumark: %s", report.advice)
        log(
            INFO,
            "quorumark: round %s of %s members, %s, attempt %s, %s bytes up; z of %.1f expected before it",
            report.round,
            len(report.members),
            "marked" if report.marked else "not marked",
            report.attempts,
            report.uploaded_bytes,
            report.expected_z,
        )
        key, total = self._owner._inner.weighted_by_key, sum(self._examples(x) for x in report.members)
        content = flwr.RecordDict({"arrays": to_record(weights), "metrics": flwr.MetricRecord({key: total})})
        return [flwr.Message(content, reply_to=messages[0])]

    def _check_hope(self, report: RoundReport) -> None:
        """Ends a run in whose first round every node that replied refused, and will again: somebody must act first."""
        if self._nodes or self._mended or not report.excluded:
            return
        said: dict[str, list[str]] = {}
        for point, reason in sorted(report.excluded.items(), reverse=True):
            said.setdefault(reason, []).append(self._name(point))
        silent = len(report.lost.get("train", ()))
        raise RoundError(
            f"no round of this run was finished, and there is no new model: all {len(report.excluded)} nodes that "
            "replied refuse"
            + (f", and {silent} did not reply" if silent else "")
            + "".join(f"\n  {', '.join(nodes)}: {reason}" for reason, nodes in said.items()),
            code="round.none-finished",
        )

    def ask_all(
        self, nodes: Iterable[int], message_type: str, stage: str, config: Mapping[str, Any]
    ) -> dict[int, dict[str, Any]]:
        """Asks every node for a stage, and gives what the members said, by point."""
        flwr, manifest, run = flwr_app(), self._server.manifest, str(self._grid.run.run_id)
        content = {**config, "stage": stage, "run": run}
        made = [flwr.Message(flwr.RecordDict(records(content, {})), node, message_type) for node in nodes]
        said: dict[int, dict[str, Any]] = {}
        for node, reply in exchange(self._grid, made, self._owner._timeout, self._silent).items():
            try:
                config_back = accepted_config(reply)
                point, shown = int(config_back["point"]), config_back["introduction"]
                check_introduction(manifest.digest(), manifest.terms, run, point, str(node), shown)
                said[point] = {**config_back, "arrays": split(reply.content)[1]}
            except (QuorumarkError, KeyError, TypeError, ValueError) as error:
                _log()(INFO, "quorumark: node %s, asked for %r: %s", node, stage, _text(error))
        return said

    def _examples(self, point: int) -> int:
        return int(self._server.manifest.terms.member(point).examples)

    def _name(self, point: int) -> str:
        """A member, or (below 0) a node that has not shown that it is one."""
        return self._server.group.name(point) if point > 0 else f"node {-point}"

    def _train(
        self,
        messages: list[Any],
        offer: dict[str, Any],
        arrays: Mapping[str, NDArray[Any]],
        timeout: float,
        report: RoundReport,
    ) -> None:
        flwr, server = flwr_app(), self._server
        offer = {**offer, "stage": "train", "weighted": self._owner._inner.weighted_by_key}
        drawn = server.cohort
        made = []
        for message in messages:
            node = message.metadata.dst_node_id
            if self._points.get(node, drawn[0]) not in drawn:
                continue  # known, and it rests in this round
            content = flwr.RecordDict({**message.content, **records(offer, arrays)})
            made.append(flwr.Message(content, node, message.metadata.message_type))
        with timed(report, "train"):
            replies = self._exchange(made, timeout, report)
            late = [m for m in made if config_of(replies.get(m.metadata.dst_node_id)).get("needs") == "anchor"]
            if late:  # members who never saw the model that the run began with
                extra = {**arrays, "anchor": server.anchor}
                again = []
                for message in late:
                    others = split(message.content)[2]
                    content = flwr.RecordDict({**others, **records(offer, extra)})
                    again.append(flwr.Message(content, message.metadata.dst_node_id, message.metadata.message_type))
                replies |= self._exchange(again, timeout, report)
            self._nodes, self._mended = {}, set()
            for node, reply in replies.items():
                self._take_ready(node, reply, str(offer["run"]), report)
            self._train_late(made, offer, timeout, report)
        silent = {m.metadata.dst_node_id for m in made} - replies.keys()
        lost = [self._points.get(node, -node) for node in silent]
        report.lost["train"] = tuple(sorted(lost))

    def _train_late(self, made: list[Any], offer: Mapping[str, Any], timeout: float, report: RoundReport) -> None:
        """Members whose memory was made anew, once the others have said that the model is newer."""
        flwr, late = flwr_app(), self._server.late()
        again = {}
        for message in made:
            node = message.metadata.dst_node_id
            point = self._points.get(node, 0)
            if point in late:
                _, arrays, others = split(message.content)
                content = flwr.RecordDict({**others, **records({**offer, **late[point]}, arrays)})
                again[node] = flwr.Message(content, node, message.metadata.message_type)
                report.readmit([point])
        for node, reply in self._exchange(list(again.values()), timeout, report).items():
            self._take_ready(node, reply, str(offer["run"]), report)

    def _take_ready(self, node: int, reply: Any, run: str, report: RoundReport) -> None:
        point = self._points.get(node, -node)
        try:
            said = config_of(reply)
            if "introduction" in said:
                point = int(said["point"])
                manifest = self._server.manifest
                check_introduction(manifest.digest(), manifest.terms, run, point, str(node), said["introduction"])
                self._points[node] = point
                self._mended |= {node} if said.get("nonce") or "answered" in said or "strong" in said else set()
                self._take_refusal(point, said)
            said = accepted_config(reply)
            if self._nodes.get(point, node) != node:
                raise RoundError(f"{self._name(point)} runs two nodes: stop one", code="node.twice")
            self._server.take_ready(point, said["ready"], said.get("boxes", b""), said.get("vouch", b""))
            newer = json.loads(said.get("newer", "{}")).items()
            self._server.take_newer(point, {int(x): bytes.fromhex(message) for x, message in newer})
        except (QuorumarkError, KeyError, TypeError, ValueError) as error:
            excluded = self._points.get(node, point if isinstance(error, RoundError) else -node)
            excluded = -node if self._nodes.get(excluded, node) != node else excluded  # the member itself takes part
            report.exclude(excluded, _text(error), code_of(error))
            return
        self._points[node], self._nodes[point] = point, node
        self._contents.append((point, flwr_app().RecordDict(dict(reply.content.metric_records))))

    def _take_refusal(self, point: int, said: Mapping[str, Any]) -> None:
        """What a member that does not take part says besides the reason, for the rounds that follow."""
        if said.get("nonce"):
            self._server.take_nonce(point, str(said["nonce"]))
        if "answered" in said:
            over = tuple(int(x) for x in json.loads(said["over"]))
            self._server.take_answered(point, int(said["answered"]), over, int(said["halvings"]), int(said["of-draw"]))
        if "strong" in said:
            self._server.take_strong(point, said["strong"])
            raise RoundError("the mark of this round is too strong for its update", code="round.too-strong")

    def _sum(self, message_type: str, report: RoundReport) -> None:
        server = self._server
        server.announce()
        while True:
            report.attempts = server.attempt
            with timed(report, "upload"):
                asked = {x: {"stage": "upload", **server.asked(x)} for x in server.members}
                for point, reply in self._ask(asked, message_type, report).items():
                    try:
                        config, arrays, _ = split(content_of(reply))
                        accepted_config(reply)
                        report.uploaded_bytes += server.take_upload(point, (config or {})["head"], arrays["vector"])
                    except (QuorumarkError, KeyError, TypeError) as error:
                        report.exclude(point, _text(error), code_of(error))
            if not server.missing:
                break
            silent = {x for x in server.missing if x not in report.excluded}
            report.lost["upload"] = tuple(sorted({*report.lost.get("upload", ()), *silent}))
            server.retry()
        with timed(report, "unmask"):
            asked = {x: {"stage": "unmask", "request": server.request(x)} for x in server.members}
            for point, reply in self._ask(asked, message_type, report).items():
                try:
                    server.take_answer(point, accepted_config(reply)["answer"])
                except (QuorumarkError, KeyError, TypeError) as error:
                    report.exclude(point, _text(error), code_of(error))
            report.lost["unmask"] = tuple(x for x in server.missing if x not in report.excluded)

    def _ask(self, asked: Mapping[int, dict[str, Any]], message_type: str, report: RoundReport) -> dict[int, Any]:
        """One stage's messages to members, and their replies by point."""
        flwr = flwr_app()
        made = [
            flwr.Message(flwr.RecordDict(records(config, {})), self._nodes[point], message_type)
            for point, config in asked.items()
        ]
        replies = self._exchange(made, self._owner._timeout, report)
        return {self._points[node]: reply for node, reply in replies.items()}

    def _exchange(self, messages: list[Any], timeout: float, report: RoundReport) -> dict[int, Any]:
        replies = exchange(self._grid, messages, timeout, self._silent, self._owner._patience)
        asked = {message.metadata.dst_node_id for message in messages}
        self._silent = (self._silent | asked) - replies.keys()
        down, up = (sum(size_of(m.content) for m in ms if m.has_content()) for ms in (messages, replies.values()))
        report.metrics["bytes-down"] = report.metrics.get("bytes-down", 0.0) + down
        report.metrics["bytes-up"] = report.metrics.get("bytes-up", 0.0) + up
        report.metrics["messages"] = report.metrics.get("messages", 0.0) + len(messages)
        return replies

    def metrics(self, contents: list[Any], key: str) -> Any:  # noqa: ARG002 - the strategy's own hold one sum
        """The members' own metrics, as the strategy puts them together, and what the round cost."""
        inside = set(self._report.members)
        record = self.gather([content for point, content in self._contents if point in inside], key)
        report = self._report
        record["quorumark-members"], record["quorumark-attempts"] = len(report.members), report.attempts
        record["quorumark-marked"], record["quorumark-silenced"] = int(report.marked), report.silenced
        record["quorumark-rho"], record["quorumark-expected-z"] = report.rho, report.expected_z
        record["quorumark-final-z"] = report.final_z
        for name, value in report.metrics.items():
            record[f"quorumark-{name}"] = value
        for stage, seconds in report.seconds.items():
            record[f"quorumark-seconds-{stage}"] = seconds
        return record


def _text(error: Exception) -> str:
    if isinstance(error, QuorumarkError):
        return without_values(error)
    return f"its message cannot be read ({type(error).__name__})"


def _log() -> Any:
    from flwr.common.logger import log

    return log
