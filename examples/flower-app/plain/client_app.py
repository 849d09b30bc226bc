"""The client."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_app.task import Net, load_data
from digits_app.task import train as train_model

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model on local data."""
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    records, _ = load_data(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    loss = train_model(model, records, float(message.content["config"]["lr"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(records.dataset)})  # type: ignore[arg-type]
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
