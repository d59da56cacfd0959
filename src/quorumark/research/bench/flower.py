"""`quorumark bench flower`: the same Flower app with and without the mark, in Flower's simulation on Ray.

One simulation runs plain FedAvg, then the wrapped strategy, then plain FedAvg again, with the same nodes. Training
moves every weight a little and takes no time worth mentioning, so the ratio is the worst there is; with real training
both sides take that much longer. Sums are checked, and the mark has its dither, as terms have by default. A round is
timed from one model to the next. Messages and bytes are counted where the strategy meets Flower, and with the mark as
its report counts them: what a deployment sends, though in a simulation the stages of a sum are served without messages
(`quorumark.flower.simulation`).

The same comparison in a deployment is made by `examples/flower-hospitals/deploy --compare N`, whose summary.json
`deployed` reads.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field
from quorumark.errors import InputError, MissingDependencyError
from quorumark.research.bench import Row

__all__ = ["FlowerRow", "deployed", "packed_rows", "rows"]

CASES = ((5, 3, 283), (50, 10, 283), (5, 3, 2000))
QUICK = ((5, 3, 283),)
"""Members, threshold, thousands of weights."""

PACKED = (5, 3, 2000)
PACKINGS = (1, 2, 3, 4)

_WARM, _ROUNDS = 3, 8  # the mark is there from the third round on


@dataclass(frozen=True)
class FlowerRow(Row):
    """`seconds` and `plain_seconds` are medians for a round; messages and bytes are for a round and a node. `cpu` and
    `plain_cpu` are CPU seconds of a round, of the server and all nodes: they say less about waiting, and depend less on
    what else the machine does. They are 0 for a deployment, which does not count them."""

    nodes: int
    plain_seconds: float
    cpu: float
    plain_cpu: float
    messages: float
    plain_messages: float
    bytes_down: float
    plain_bytes_down: float
    bytes_up: float
    plain_bytes_up: float
    packing: int = 2  # weights in an element
    sums: str = "checked"  # what the terms say of sums


def packed_rows(quick: bool = False) -> Iterator[FlowerRow]:
    """One to four weights in an element."""
    count, threshold, thousands = QUICK[0] if quick else PACKED
    for packing in PACKINGS:
        with tempfile.TemporaryDirectory() as folder:
            yield _simulated(Path(folder), count, threshold, thousands, packing)


def rows(quick: bool = False) -> Iterator[FlowerRow]:
    """One row for each case."""
    for count, threshold, thousands in QUICK if quick else CASES:
        with tempfile.TemporaryDirectory() as folder:
            yield _simulated(Path(folder), count, threshold, thousands)


def deployed(summary: Path) -> FlowerRow:
    """The row of a deployment that was run with --compare."""
    try:
        measured = json.loads(summary.read_text())
        plain, marked, agreed = measured["plain"], measured["marked"], (int(measured["packing"]), str(measured["sums"]))
        return _row("deployment on loopback, TLS, 5 nodes", measured["coordinates"], 5, marked, plain, *agreed)
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            "--deployment", "must name the summary.json of examples/flower-hospitals/deploy --compare N", str(summary)
        ) from None


def _row(
    name: str,
    size: int,
    nodes: int,
    marked: dict[str, float],
    plain: dict[str, float],
    packing: int = 2,
    sums: str = "checked",
) -> FlowerRow:
    return FlowerRow(
        name, "plain FedAvg", size, field.threads(), marked["seconds"] / plain["seconds"], marked["seconds"],
        nodes, plain["seconds"], marked.get("cpu", 0.0), plain.get("cpu", 0.0), marked["messages"], plain["messages"],
        marked["bytes_down"], plain["bytes_down"], marked["bytes_up"], plain["bytes_up"], packing, sums,
    )  # fmt: skip


def _simulated(folder: Path, count: int, threshold: int, thousands: int, packing: int = 2) -> FlowerRow:
    try:
        import ray  # noqa: F401
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp
        from flwr.serverapp.strategy import FedAvg
        from flwr.simulation import run_simulation
    except ImportError:
        raise MissingDependencyError("quorumark[flower]", "the comparison in Flower's simulation") from None
    from quorumark.flower import watermarked
    from quorumark.flower.wire import to_record

    logging.getLogger("flwr").setLevel(logging.ERROR)
    model = {"w": np.random.default_rng(0).standard_normal((thousands, 1000), np.float32)}
    _consortium(folder, count, threshold, model, packing)
    found: dict[str, list[dict[str, float]]] = {"plain": [], "marked": []}
    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:  # noqa: ARG001
        def measure(kind: str, rounds: int) -> None:
            counted, times = _Counted(grid), list[tuple[float, ...]]()
            inner = FedAvg(min_train_nodes=count, min_available_nodes=count, fraction_evaluate=0.0)
            strategy = watermarked(inner, folder / "consortium.json") if kind == "marked" else inner
            strategy.start(
                grid=counted,
                initial_arrays=to_record(model),
                num_rounds=rounds,
                evaluate_fn=lambda *_: times.append((time.perf_counter(), _cpu_seconds(), *counted.sums)),
            )
            if kind == "marked" and not strategy.reports[-1].marked:
                raise AssertionError(strategy.reports[-1].given_up or "the mark is not what this row is about")
            names = ("seconds", "cpu", "messages", "bytes_down", "bytes_up")
            for number, (before, after) in enumerate(pairwise(times)):
                seconds, cpu, *others = np.subtract(after, before)
                if kind == "marked":
                    told = strategy.reports[number].metrics
                    others = [told["messages"], told["bytes-down"], told["bytes-up"]]
                if number >= (_WARM if kind == "marked" else 1):
                    found[kind].append(dict(zip(names, (seconds, cpu, *(n / count for n in others)), strict=True)))

        measure("plain", _ROUNDS // 2)
        measure("marked", _ROUNDS)
        measure("plain", _ROUNDS // 2)

    class Both(ClientApp):  # type: ignore[misc]
        """The app with the mod for the wrapped strategy, and without it for the plain one."""

        def __call__(self, message: Any, context: Any) -> Any:
            return _app(folder, "quorumark" in message.content.config_records)(message, context)

    backend: Any = {"client_resources": {"num_cpus": 1}, "init_args": {"include_dashboard": False}}
    run_simulation(server, Both(), count, backend_config=backend)
    marked, plain = (
        {name: _typical(name, [row[name] for row in found[kind]]) for name in found[kind][0]}
        for kind in ("marked", "plain")
    )
    return _row(f"simulation on Ray, {count} nodes", model["w"].size, count, marked, plain, packing)


def _typical(name: str, values: list[float]) -> float:
    """The median; of CPU time, which is counted in steps of 10 ms for each process, the mean."""
    return statistics.fmean(values) if name == "cpu" else statistics.median(values)


def _cpu_seconds() -> float:
    """Of this process and all that it started, as far as they still run: Ray's are among them."""
    ticks, parents = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # a program's name may have spaces in it
        except OSError:  # it has ended meanwhile
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(ticks.get(pid, 0) for pid in mine) / os.sysconf("SC_CLK_TCK")


class _Counted:
    """A Grid that counts messages, bytes to the nodes and bytes from them."""

    def __init__(self, grid: Any) -> None:
        self._grid, self.sums = grid, (0, 0, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def _count(self, down: Iterable[Any], up: Iterable[Any]) -> None:
        from quorumark.flower.wire import size_of

        sent = [size_of(message.content) for message in down]
        got = [size_of(message.content) for message in up if message.has_content()]
        self.sums = self.sums[0] + len(sent), self.sums[1] + sum(sent), self.sums[2] + sum(got)

    def push_messages(self, messages: Iterable[Any]) -> Any:
        made = list(messages)
        self._count(made, ())
        return self._grid.push_messages(made)

    def pull_messages(self, names: Iterable[str]) -> Any:
        replies = list(self._grid.pull_messages(names))
        self._count((), replies)
        return replies

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Any:
        made = list(messages)
        replies = list(self._grid.send_and_receive(made, timeout=timeout))
        self._count(made, replies)
        return replies


def _app(folder: Path, marked: bool) -> Any:
    """A client app that moves the weights a little."""
    from flwr.app import Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from quorumark.flower import watermark_mod
    from quorumark.flower.client import member_in
    from quorumark.flower.wire import tensors, to_record

    app = ClientApp(mods=[watermark_mod(partial(member_in, folder))] if marked else [])

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        x = int(context.node_config["partition-id"]) + 1
        model = tensors(message.content["arrays"])
        seed = 1000 * int(message.content["config"]["server-round"]) + x
        step = np.random.default_rng(seed).standard_normal(model["w"].shape, np.float32)
        content = {
            "arrays": to_record({"w": model["w"] + np.float32(0.01) * step}),
            "metrics": MetricRecord({"num-examples": 100 + x}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def _consortium(folder: Path, count: int, threshold: int, model: dict[str, NDArray[np.float32]], packing: int) -> None:
    """Homes for all members, with shares from a dealer."""
    from quorumark.consortium.home import HomeFolder
    from quorumark.consortium.keystore import Unlock
    from quorumark.consortium.policy import Policy
    from quorumark.consortium.records import Terms, anchor_of, roster_of
    from quorumark.consortium.strength import Strength
    from quorumark.files import write_shared
    from quorumark.model.layout import ModelLayout
    from quorumark.node.journal import allow_repeats
    from quorumark.setup.dealer import accept, deal

    layout = ModelLayout.of(model)
    people = {}
    for x in range(1, count + 1):
        key = folder / f"member-{x}.key"
        Unlock.new_key_file(key)
        unlock = Unlock.key_file(key)
        people[x] = HomeFolder.create(folder / f"member-{x}", f"member {x}", unlock), unlock
    cards = {x: home.card() for x, (home, _) in people.items()}
    roster = roster_of((card, 100 + x) for x, card in cards.items())
    terms = Terms(
        "bench", threshold, roster, layout.digest(), layout.coordinates,
        anchor_of(layout, model), created="2026-01-31T12:00:00Z",
        setup="dealer", strength=Strength.of({"rule": "relative", "c": "0.03"}, layout.coordinates),
        policy=Policy(packing=packing),
    )  # fmt: skip
    deal(terms, folder / "dealing")
    for _ in range(2):  # all sign, then all take the manifest
        for home, unlock in people.values():
            manifest = accept(home, unlock, folder / "dealing", terms).manifest
    if manifest is None:
        raise AssertionError("all have signed, and there is no manifest")
    write_shared(folder / "consortium.json", manifest.to_bytes())
    write_shared(folder / "layout.json", layout.to_bytes())
    for home, unlock in people.values():
        allow_repeats(home.only_consortium(), home.identity(unlock))
