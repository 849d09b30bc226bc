"""The network behind Refiner's privacy metric: it rises with noise on data it never saw, and the check notices one that falls."""

from __future__ import annotations

from torch import Tensor, nn

from gradveil.data import load_data
from gradveil.networks.store import load_network
from studies.evaluation_network import answered


class Inverted(nn.Module):
    """Answers the share of picture instead of noise, as a network trained with swapped targets does."""

    def __init__(self, right: nn.Module) -> None:
        super().__init__()
        self.right = right

    def forward(self, images: Tensor) -> Tensor:
        answer: Tensor = self.right(images)
        return 1 - answer


def test_the_shipped_network_rises_with_the_noise_on_data_it_never_saw() -> None:
    found = answered(load_network("evaluation-32"), load_data("photos").inputs[:64], seed=0)
    assert found["kept"] and found["bias"] < 0.05, found["mean"]
    upside_down = answered(Inverted(load_network("evaluation-32")), load_data("photos").inputs[:8], seed=0)
    assert not upside_down["kept"] and not upside_down["monotone"]
