"""Model, data and training: what the app's author wrote, with nothing of Flower or Gradveil in it."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Loader = DataLoader[Any]


class Net(nn.Module):
    """A small network for 8 × 8 digits."""

    def __init__(self) -> None:
        """Draw first weights."""
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 16, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, 1, 8, 8) -> (B, 10)."""
        features = torch.max_pool2d(torch.relu(self.conv(inputs)), 2).flatten(1)
        outputs: Tensor = self.fc2(torch.relu(self.fc1(features)))
        return outputs


def load_data(partition: int, partitions: int) -> tuple[Loader, Loader]:
    """Return one node's records for training, and those that all test on."""
    found = load_digits()
    inputs, targets = torch.tensor(found.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(found.target)
    train, test = slice(partition, 1500, partitions), slice(1500, None)
    order = torch.Generator().manual_seed(partition)
    return (
        DataLoader(TensorDataset(inputs[train], targets[train]), batch_size=32, shuffle=True, generator=order),
        DataLoader(TensorDataset(inputs[test], targets[test]), batch_size=100),
    )


def train(model: nn.Module, records: Loader, lr: float) -> float:
    """Train for one epoch and return the mean loss."""
    optimizer, total = torch.optim.SGD(model.parameters(), lr=lr), 0.0
    model.train()
    for inputs, targets in records:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(records)


@torch.no_grad()
def accuracy(model: nn.Module, records: Loader) -> float:
    """Return the share of records that the model is right on."""
    model.eval()
    right = [(model(inputs).argmax(1) == targets).float() for inputs, targets in records]
    return float(torch.cat(right).mean())
