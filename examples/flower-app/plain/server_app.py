"""The server."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import save_file

from digits_app.task import Net, accuracy, load_data

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and keep the last model."""
    settings = context.run_config
    torch.manual_seed(0)
    model = Net()
    nodes = int(settings.get("nodes", 2))
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": accuracy(model, load_data(0, 1)[1])})

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": float(settings.get("lr", 0.2))}),
        num_rounds=int(settings.get("num-server-rounds", 3)),
        evaluate_fn=evaluate,
    )
    if settings.get("out"):
        save_file(result.arrays.to_torch_state_dict(), Path(str(settings["out"])) / "model.safetensors")
