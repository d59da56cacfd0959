"""The server app of a quickstart."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import Net, load_test_data
from quickstart.task import test as test_fn
from quorumark.flower import watermarked

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Main entry point for the ServerApp."""
    fraction_train = context.run_config["fraction-train"]
    num_rounds = context.run_config["num-server-rounds"]
    strategy = FedAvg(fraction_train=fraction_train)
    strategy = watermarked(strategy, "consortium/consortium.json")
    result = strategy.start(
        grid=grid,
        num_rounds=num_rounds,
        evaluate_fn=global_evaluate,
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the global model on central data."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    test_loss, test_acc = test_fn(model, load_test_data())
    print(f"after round {server_round}: accuracy {test_acc:.3f}")
    return MetricRecord({"accuracy": test_acc, "loss": test_loss})
