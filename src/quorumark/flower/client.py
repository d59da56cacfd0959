"""The member's side in Flower: a mod around the app's own functions, and answers to queries.

The app's `@app.train()` is called with the message as the strategy made it, and gets three more numbers in its config:
`quorumark-rate` (the learning rate that the manifest has for this round, in units of the first one's: the mark relies
on it), `quorumark-round`, which counts the accepted rounds, and `quorumark-seed`, from this member's own system unless
its operator lets the server choose it (`quorumark-seeds=true`). What it returns never leaves the node as it is: the
mod keeps it, and the server gets the masked vector when it asks for that. Nor does the text of an exception, in
training or evaluation: Flower would send that to the server, and it may quote data or paths. The server hears of which
kind it was; the rest is in the node's own log.

Which member a node is, its operator says when it starts the node, never the server:

    --node-config 'quorumark-home="/srv/quorumark" quorumark-key-file="/srv/quorumark.key"
                   quorumark-terms="PINNED DIGEST" quorumark-manifest="PINNED DIGEST"'

With `quorumark-evaluate="off"` the node evaluates no models: otherwise a server learns the loss of any model that it
sends on this member's data. Instead of home, key file and pins the node config may name `quorumark-socket`, where a
process of another user holds the share (`quorumark member serve`, which takes the pins). In a simulation all homes are
in one folder, which the app's run config names (`quorumark-homes`), each with its key file beside it (NAME and
NAME.key). The node of partition N−1 is the member at point N, by the keys in the manifest's roster.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from quorumark.errors import InputError, MessageError, QuorumarkError, RecordError, RoundError
from quorumark.flower.simulation import CONSORTIUM, HOME
from quorumark.flower.wire import flwr_app, records, split, tensors, to_record
from quorumark.node.homes import Stages, Words, named_member, pins_of, simulated_member
from quorumark.node.journal import MODEL
from quorumark.node.member import RESULT, Config, MemberNode, refusal, refused, with_prefix

__all__ = ["QUERY", "member_in", "quorumark_mod", "serve_queries", "watermark_mod"]

QUERY = "quorumark"
"""The action of this project's queries: messages of type `query.quorumark`."""

_ASKED = ("upload", "unmask", "again", "never", "vouch", "second", "state")
"""The stages of a member that a server asks for. What a member joins with and has trained only its own node says: a
server that could say it for all but one would find that one's model in the sum."""

_RAISED = 2  # Flower's code for a client app that raised an exception

Mod = Callable[[Any, Any, Callable[[Any, Any], Any]], Any]


def watermark_mod(member: Callable[[Any], Stages] | None = None) -> Mod:
    """A mod for `ClientApp(mods=[…])`. `member` says which member a node is, from Flower's context; by default from
    the node config."""
    find = member or member_of

    def mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        category = message.metadata.message_type.partition(".")[0]
        try:
            if category == "evaluate":
                _check_evaluates(context.node_config)
            if category != "train":
                return call_next(message, context)
            config, arrays, others = split(message.content)
            if config is None:
                raise RoundError(
                    "this node trains for a watermarked strategy only, since another one would see its model: wrap the "
                    "strategy with quorumark.flower.watermarked (or secure), or take the mod out of the app",
                    code="node.not-watermarked",
                )
            node, stage = find(context), str(config.get("stage"))
            if stage == "train":
                return _train(node, message, context, call_next, config, arrays, others)
            if stage not in _ASKED:
                raise MessageError(
                    f"there is no stage {stage[:40]!r} that a server may ask for in training: use {', '.join(_ASKED)}",
                    code="message.no-stage",
                )
            return _reply(message, *node.handle(stage, {**config, "node": str(context.node_id)}, arrays))
        except QuorumarkError as error:
            return _error(message, refusal(error)) if category == "evaluate" else _refused(message, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, what it says stays here
            return _failed(message, error)

    return mod


def quorumark_mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
    """`watermark_mod()`, for `ClientApp(mods=[quorumark_mod])`."""
    return watermark_mod()(message, context, call_next)


def _train(
    node: Stages,
    message: Any,
    context: Any,
    call_next: Callable[[Any, Any], Any],
    config: Config,
    arrays: dict[str, NDArray[Any]],
    others: dict[str, Any],
) -> Any:
    """Joins the round, lets the app train, keeps what it made, and says that it is ready."""
    flwr = flwr_app()
    plain = flwr.RecordDict(others)
    models = list(plain.array_records.values())
    if len(models) > 1 or not (models or "record" in config):
        raise RoundError(
            f"a training message must hold one ArrayRecord, or the sum that it follows from, and this one holds "
            f"{len(models)}",
            code="message.malformed",
        )
    model = {MODEL + name: tensor for name, tensor in tensors(models[0]).items()} if models else {}
    about = {**config, "node": str(context.node_id), "settings": _settings(plain, context)}
    joined, computed = node.handle("join", about, {**arrays, **model})
    if "needs" in joined or "refused" in joined:
        return _reply(message, joined, {})
    if not models:
        plain[str(config["record"])] = to_record(with_prefix(computed, MODEL))
    if joined["settings-changed"]:
        _log()(WARNING, "quorumark: what the server tells this app has changed since the last round: look at it")
    key = str(config["weighted"])
    if joined["repeats"]:  # the same result goes into the same sum once more
        ready, _ = node.handle("ready", about, {})
        return _reply(message, ready, {}, {"metrics": flwr.MetricRecord({key: joined["examples"]})})
    for record in plain.config_records.values():
        record["quorumark-rate"], record["quorumark-round"] = joined["rate"], joined["round"]
        record["quorumark-seed"] = joined["seed"] & (1 << 63) - 1
    message.content = plain
    trained = call_next(message, context)
    if trained.has_error():  # another mod's
        raise RuntimeError(trained.error.reason)
    content = trained.content
    results, metrics = list(content.array_records.values()), dict(content.metric_records)
    counts = [record[key] for record in metrics.values() if key in record]
    if len(results) != 1 or len(counts) != 1:
        raise RoundError(
            f"the app's train function must return one ArrayRecord, and one MetricRecord with {key!r}",
            code="node.wrong-result",
        )
    examples = int(counts[0]) if float(counts[0]).is_integer() else counts[0]
    about |= {"examples": examples, "joined": joined["joined"]}
    result = {RESULT + name: tensor for name, tensor in tensors(results[0]).items()}
    ready, _ = node.handle("ready", about, result)
    return _reply(message, ready | _home(node, context), {}, metrics)


def _home(node: Stages, context: Any) -> dict[str, str]:
    """In a simulation: where this member's home is, so that the server's process can serve it (`flower.simulation`)."""
    if not isinstance(node, MemberNode) or "partition-id" not in context.node_config:
        return {}
    home, consortium = node.simulated_home()
    return {HOME: home, CONSORTIUM: consortium} if home else {}


def _settings(plain: Any, context: Any) -> str:
    """A digest of what an app is told from outside, but for the round's number: the run config and the strategy's."""
    settings = {
        f"{name}/{key}": repr(value) for name, record in plain.config_records.items() for key, value in record.items()
    }
    settings |= {f"run/{key}": repr(value) for key, value in context.run_config.items()}
    kept = {key: value for key, value in settings.items() if not key.endswith("/server-round")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _log() -> Any:
    from flwr.common.logger import log

    return log


def _failed(message: Any, error: Exception) -> Any:
    """What the server may know of an unexpected failure. Strategies read replies to evaluations themselves, and get
    what Flower would have made of it, without what the exception says."""
    _log()(ERROR, "quorumark: this node failed", exc_info=error)
    why = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    reason = f"{type(error).__name__}{why}; the node's log has the rest"
    if message.metadata.message_type.partition(".")[0] == "evaluate":
        return _error(message, reason)
    return _reply(message, {"failed": reason}, {})


def _error(message: Any, text: str) -> Any:
    """What strategies take for a node that failed."""
    flwr = flwr_app()
    return flwr.Message(flwr.Error(_RAISED, text), reply_to=message)


def _refused(message: Any, error: QuorumarkError) -> Any:
    return _reply(message, refused(error), {})


def _check_evaluates(settings: Mapping[str, Any]) -> None:
    """Whether this node evaluates models, which its operator says: no member can tell whose model a server sends, and
    each answer tells the server that model's loss on this member's data."""
    wanted = settings.get("quorumark-evaluate", "on")
    if wanted not in ("on", "off"):
        raise InputError("quorumark-evaluate", "must be on or off in the node config", repr(wanted))
    if wanted == "off":
        raise RoundError(
            "this node evaluates no models: its operator switched it off (quorumark-evaluate)",
            code="node.evaluates-nothing",
        )


def _reply(
    message: Any, config: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], others: Mapping[str, Any] | None = None
) -> Any:
    flwr = flwr_app()
    return flwr.Message(flwr.RecordDict({**records(config, arrays), **(others or {})}), reply_to=message)


def serve_queries(app: Any, member: Callable[[Any], Stages] | None = None) -> None:
    """Lets an app's nodes take part in the key ceremony and answer verifications, each under its own rules."""
    find = member or member_of

    @app.query(QUERY)  # type: ignore[untyped-decorator]
    def query(message: Any, context: Any) -> Any:
        try:
            config, arrays, _ = split(message.content)
            if config is None or config.get("stage") not in ("setup", "answer", "sign"):
                raise RecordError("this is not a query of quorumark: send the stages setup, answer or sign")
            about, stage = {**config, "node": str(context.node_id)}, str(config["stage"])
            node = member_of(context, setup=True) if member is None and stage == "setup" else find(context)
            return _reply(message, *node.handle(stage, about, arrays))
        except QuorumarkError as error:
            return _refused(message, error)
        except Exception as error:  # noqa: BLE001
            return _failed(message, error)


_WORDS = Words(
    place="node config",
    prefix="quorumark-",
    homes="quorumark-homes",
    set_homes="to the folder with all members' homes, as a whole path: flwr run . --run-config "
    "\"quorumark-homes='$PWD/consortium'\", and in the app's pyproject.toml, so that Flower knows the name, "
    'quorumark-homes = "" under [tool.flwr.app.config]',
    nodes="num-supernodes",
    set_nodes="flwr run . --federation-config 'num-supernodes={count}'",
)


def member_of(context: Any, *, setup: bool = False) -> Stages:
    """The member that a node is, from its node config; in a simulation from its partition."""
    settings = context.node_config
    member = named_member(settings, _WORDS)
    if member is not None:
        return member
    if "partition-id" not in settings:
        raise InputError(
            "node config",
            "must name this member's folder (quorumark-home) and key file (quorumark-key-file)",
        )
    homes = str(context.run_config.get("quorumark-homes", ""))
    if not homes:
        raise InputError(
            "quorumark-homes",
            f"must be set in a simulation, {_WORDS.set_homes}; a node on its own machine has quorumark-home and "
            "quorumark-key-file in its node config instead",
        )
    return member_in(Path(homes), context, setup=setup)


def member_in(homes: Path, context: Any, *, setup: bool = False) -> Stages:
    """The member that a node of a simulation is, by its partition, among the homes in a folder."""
    settings, pins = context.node_config, pins_of(context.node_config, _WORDS)
    if "quorumark-terms" in context.run_config:
        pins.setdefault("terms", str(context.run_config["quorumark-terms"]))
    return simulated_member(homes, int(settings["partition-id"]) + 1, pins, _WORDS, setup=setup)
