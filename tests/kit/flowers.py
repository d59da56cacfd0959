"""A consortium with homes on disk, a Flower app that trains its model, and a Grid that runs nodes in this process."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.canonical import canonical
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Manifest, Member, Terms, anchor_of
from quorumark.files import write_private, write_shared
from quorumark.flower import serve_queries, watermark_mod
from quorumark.model.layout import ModelLayout, write_safetensors
from quorumark.node.member import MemberNode
from quorumark.setup.dealer import accept, deal
from quorumark.setup.inprocess import set_up_all
from quorumark.simulation import Federation, FederationMember, Losses

Model = dict[str, NDArray[Any]]
SHAPES = {"a.weight": (100, 80), "a.bias": (100,), "b.weight": (40, 100), "c.weight": (12, 5, 3, 3)}
STRENGTH = {"rule": "rho", "rho": "0.2", "c_max": "0.1", "lr": "cosine:40", "dither": "0"}


def initial() -> Model:
    rng = np.random.default_rng(5)
    model: Model = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {**model, "steps": np.array(7, np.int64)}


def train(model: Mapping[str, NDArray[Any]], data: float, seed: int, rate: float) -> Model:
    """A step that differs between members and rounds, and moves every weight."""
    rng = np.random.default_rng(seed & (1 << 63) - 1)
    step = np.float32(data * rate)
    moved = {k: v + step * rng.standard_normal(v.shape).astype(np.float32) for k, v in model.items() if k != "steps"}
    return {**moved, "steps": np.asarray(model["steps"] + 1)}


def pulled(model: Mapping[str, NDArray[Any]], made: Model, mu: float) -> Model:
    """What FedProx's term does to a step: it minimises |w − made|² + μ·|w − model|²."""
    part = np.float32(1 / (1 + mu))
    return {k: v if k == "steps" else model[k] + part * (v - model[k]) for k, v in made.items()}


@dataclass
class Consortium:
    """The homes lie in FOLDER/member-N, what opens them in FOLDER/member-N.key."""

    folder: Path
    count: int
    terms: Terms
    model: Model
    layout: ModelLayout
    manifest: Manifest | None = None

    @classmethod
    def agree(
        cls, folder: Path, count: int = 5, threshold: int = 3, model: Model | None = None, **changes: Any
    ) -> Consortium:
        """Everybody has a home, and terms are agreed on; there is no key yet."""
        model = model or initial()
        layout = ModelLayout.of(model, max_coordinates=changes.pop("max_coordinates", None))
        roster = []
        for x in range(1, count + 1):
            Unlock.new_key_file(folder / f"member-{x}.key")
            home = HomeFolder.create(
                folder / f"member-{x}", f"Hospital {x}", Unlock.key_file(folder / f"member-{x}.key")
            )
            card = home.card()
            roster.append(Member(x, card.name, card.ed25519, card.x25519, 100 + x))
        settings: dict[str, Any] = {"created": "2026-01-31T12:00:00Z", "leaf": 64, "strength": STRENGTH}
        settings |= {"policy": {"sums": "unchecked"}, **changes}  # for any strategy; tests of checked sums ask for them
        anchor = anchor_of(layout, model)
        terms = Terms("flower", threshold, tuple(roster), layout.digest(), layout.coordinates, anchor, **settings)
        write_shared(folder / "layout.json", layout.to_bytes())
        write_safetensors(model, folder / "anchor.safetensors")
        return cls(folder, count, terms, model, layout)

    @classmethod
    def make(cls, folder: Path, count: int = 5, threshold: int = 3, **changes: Any) -> Consortium:
        """With a key, made over a folder."""
        world = cls.agree(folder, count, threshold, **changes)
        world.set_up()
        return world

    def set_up(self) -> None:
        """The members make their key over a folder."""
        homes = [self.home(x) for x in range(1, self.count + 1)]
        self.keep(set_up_all(homes, self.terms, self.folder / "ceremony"))

    @classmethod
    def deal(cls, folder: Path, count: int, threshold: int, **changes: Any) -> Consortium:
        """With a dealer, for more members than a ceremony is quick for."""
        world = cls.agree(folder, count, threshold, setup="dealer", **changes)
        deal(world.terms, folder / "dealing")
        for _ in range(2):  # all sign, then all take the manifest
            for x in range(1, count + 1):
                home, unlock = world.home(x)
                manifest = accept(home, unlock, folder / "dealing", world.terms).manifest
        assert manifest is not None
        world.keep(manifest)
        return world

    def copy(self, folder: Path) -> Consortium:
        """The same consortium, as it is now, in another folder."""
        shutil.copytree(self.folder, folder)
        return replace(self, folder=folder)

    def keep(self, manifest: Manifest) -> None:
        self.manifest = manifest
        write_shared(self.path, manifest.to_bytes())

    @property
    def path(self) -> Path:
        return self.folder / "consortium.json"

    def home(self, x: int) -> tuple[HomeFolder, Unlock]:
        return HomeFolder(self.folder / f"member-{x}"), Unlock.key_file(self.folder / f"member-{x}.key")

    def in_process(
        self, rounds: int, seed: int, losses: Losses | None = None, trained: Callable[..., Model] = train
    ) -> Federation:
        """The same run without Flower: what its models must be."""
        assert self.manifest is not None
        members = {}
        for x in range(1, self.count + 1):
            home, unlock = self.home(x)
            share = home.only_consortium().share(unlock) if self.terms.has_key else None
            members[x] = FederationMember(home.identity(unlock), self.manifest, self.layout, trained, 0.01, share)
        run = Federation(self.manifest, self.layout, self.model, members, seed=seed, losses=losses)
        list(run.rounds(rounds))
        return run


def same(one: Model, two: Model) -> bool:
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and np.array_equal(one[name], two[name]) for name in one
    )


def allow(world: Consortium, x: int) -> None:
    policy = {"format": "quorumark-answer-rules/v1", "approve": "always", "max_queries_per_day": 5}
    write_private(world.home(x)[0].rules_path, canonical(policy))


def app_for(
    folder: Path,
    *,
    pinned: str | None = None,
    lost: Mapping[tuple[int, str], Iterable[int]] | None = None,
    examples: Callable[[int], int] = lambda x: 100 + x,
    trained: Callable[..., Model] = train,
    mods: Iterable[Any] = (),
    find: Callable[[Any], Any] | None = None,
) -> Any:
    """A client app as a user would write it, with the mod. `lost`: {(round, stage): members} whose node fails then."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    def member(context: Any) -> MemberNode:
        x = int(context.node_config["partition-id"]) + 1
        node = MemberNode(
            HomeFolder(folder / f"member-{x}"), Unlock.key_file(folder / f"member-{x}.key"), terms=pinned, seeds=True
        )
        return Failing(node, x, dict(lost or {})) if lost else node  # type: ignore[return-value]

    app = ClientApp(mods=[watermark_mod(find or member), *mods])
    serve_queries(app, find or member)

    @app.train()  # type: ignore[untyped-decorator]
    def step(message: Any, context: Any) -> Any:
        x = int(context.node_config["partition-id"]) + 1
        arrays, config = message.content["arrays"], message.content["config"]
        model = {name: array.numpy() for name, array in arrays.items()}
        made = trained(model, 0.01, config["quorumark-seed"], config["quorumark-rate"])
        if "proximal-mu" in config:
            made = pulled(model, made, float(config["proximal-mu"]))
        content = {
            "arrays": ArrayRecord({name: _array(tensor) for name, tensor in made.items()}),
            "metrics": MetricRecord({"num-examples": examples(x), "moved": float(x)}),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()  # type: ignore[untyped-decorator]
    def look(message: Any, context: Any) -> Any:  # noqa: ARG001
        total = sum(float(np.sum(a.numpy(), dtype=np.float64)) for a in message.content["arrays"].values())
        metrics = MetricRecord({"num-examples": 10, "sum": total})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def _array(tensor: NDArray[Any]) -> Any:
    from flwr.app import Array

    return Array(np.asarray(tensor))


class Failing:
    """A member whose machine fails at some stages."""

    def __init__(self, node: MemberNode, point: int, lost: dict[tuple[int, str], Iterable[int]]) -> None:
        self._node, self._point, self._lost = node, point, lost

    def handle(self, stage: str, config: Any, arrays: Any) -> Any:
        round_no = config.get("round", 0)
        if self._point in self._lost.get((round_no, stage), ()):
            raise OSError("the power went out")
        return self._node.handle(stage, config, arrays)


def records_of(model: Mapping[str, NDArray[Any]]) -> Any:
    from flwr.app import ArrayRecord

    return ArrayRecord({name: _array(tensor) for name, tensor in model.items()})


class LocalGrid:
    """A Grid whose nodes run in this process, each message in a fresh context, as a deployment does."""

    def __init__(self, app: Any, nodes: int, run_id: int = 7) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, 1, 1
        self.run = SimpleNamespace(run_id=run_id)
        self.apps = {101 + i: app for i in range(nodes)}
        self.seen: list[Any] = []
        self._replies: dict[str, Any] = {}
        self._names = itertools.count(1)

    def get_node_ids(self) -> list[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict  # noqa: F401

        names = []
        for message in messages:
            name = str(next(self._names))
            names.append(name)
            message.metadata.__dict__["_message_id"] = name
            node = message.metadata.dst_node_id
            got = Message(copy.deepcopy(message.content), metadata=message.metadata)
            settings = {"partition-id": node - 101, "num-partitions": len(self.apps)}
            context = Context(self.run.run_id, node, settings, RecordDict(), {})
            try:
                reply = self.apps[node](got, context)
            except Exception as error:  # noqa: BLE001 - as Flower does
                reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=got)
            if reply is not None:  # the node died, or its reply got lost
                self._replies[name] = reply
                self.seen.append(reply)
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Any]:
        return [self._replies.pop(name) for name in list(names) if name in self._replies]

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:  # noqa: ARG002
        return self.pull_messages(self.push_messages(messages))
