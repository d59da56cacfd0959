"""A hospital's side."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quorumark.flower import quorumark_mod, serve_queries

app = ClientApp(mods=[quorumark_mod])
serve_queries(app)  # the key ceremony and verifications


def _data(context: Context) -> tuple[Any, Any]:
    """Where a hospital's data lie, its own node config says; in a simulation they go by the partition."""
    from hospitals import task

    settings = context.node_config
    return task.load_data(int(settings["partition-id"]), str(settings["data"]) if "data" in settings else None)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Trains on the hospital's own data."""
    import torch  # here: the stages of secure aggregation need no torch, and every message starts a process

    from hospitals import task

    torch.set_num_threads(1)
    config = msg.content["config"]
    model = task.Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data = _data(context)
    rate = float(context.run_config["learning-rate"]) * float(config.get("quorumark-rate", 1.0))
    loss = task.train(model, data, int(context.run_config["local-epochs"]), rate)
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"train_loss": loss, "num-examples": len(data[1])}),
    }
    return Message(content=RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Tests the global model on the hospital's own data."""
    from hospitals import task

    model = task.Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data = _data(context)
    loss, accuracy = task.test(model, data)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data[1])})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
