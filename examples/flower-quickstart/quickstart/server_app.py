"""The server app of a quickstart."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import Net
from quorumark.flower import watermarked

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Main entry point for the ServerApp."""
    fraction_train = context.run_config["fraction-train"]
    num_rounds = context.run_config["num-server-rounds"]
    torch.manual_seed(2026)  # the members agreed on this initial model
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(fraction_train=fraction_train)
    strategy = watermarked(strategy, "consortium/consortium.json")
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=num_rounds)
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
