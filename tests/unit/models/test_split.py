"""Bottom and top of a model at a named cut."""

import pytest
import torch
from torch import nn

from gradveil.errors import UsageError
from gradveil.models import build_model, cuts_of, split_model
from gradveil.models.split import widen_first_linear
from gradveil.randomness import Seed

SHAPE = (3, 16, 16)
FAMILIES = {
    "resnet20": ["cut1", "cut2", "cut3"],
    "resnet18": ["cut1", "cut2", "cut3", "cut4"],
    "lenet": ["cut1", "cut2", "cut3"],
    "convnet(width=4)": [f"cut{k}" for k in range(1, 9)],
    "mlp(hidden=(8, 6))": ["cut1", "cut2"],
}


def build(spelling: str) -> nn.Module:
    return build_model(spelling, input_shape=SHAPE, classes=5, seed=Seed(3))


@pytest.mark.parametrize("spelling", FAMILIES)
def test_top_of_bottom_is_the_model_at_every_cut(spelling: str) -> None:
    model = build(spelling)
    inputs = torch.rand((2, *SHAPE), generator=torch.Generator().manual_seed(0))
    assert cuts_of(model) == FAMILIES[spelling]
    for cut in FAMILIES[spelling]:
        bottom, top = split_model(model, cut)
        with torch.no_grad():
            assert torch.equal(top(bottom(inputs)), model(inputs)), cut
        names = [*dict(bottom.named_parameters()), *dict(top.named_parameters())]
        assert names == list(dict(model.named_parameters())), cut
        assert len(names) > len(dict(bottom.named_parameters())) > 0


def test_resnet_cuts_halve_the_resolution_as_its_stages_do() -> None:
    model = build("resnet18")
    with torch.no_grad():
        found = [tuple(split_model(model, cut)[0](torch.zeros(1, *SHAPE)).shape[1:]) for cut in ("cut1", "cut2", "cut3")]
    assert found == [(64, 16, 16), (128, 8, 8), (256, 4, 4)]


def test_children_of_a_sequential_are_cuts_too() -> None:
    model = nn.Sequential(nn.Flatten(1), nn.Linear(4, 3), nn.Linear(3, 2))
    assert cuts_of(model) == []
    bottom, _ = split_model(model, "1")
    assert tuple(bottom(torch.zeros(1, 4)).shape) == (1, 3)
    with pytest.raises(UsageError, match="nothing for the label owner"):
        split_model(model, "2")


class Own(nn.Module):
    """A model that knows how to split itself."""

    cuts = ("middle",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.second(self.first(inputs).relu())
        return logits

    def split(self, cut: str) -> tuple[nn.Module, nn.Module]:
        return nn.Sequential(self.first, nn.ReLU()), self.second


def test_a_model_of_yours_splits_as_it_says() -> None:
    model, inputs = Own(), torch.rand((2, 4), generator=torch.Generator().manual_seed(0))
    bottom, top = split_model(model, "middle")
    assert torch.equal(top(bottom(inputs)), model(inputs))
    with pytest.raises(UsageError, match="did you mean 'middle'"):
        split_model(model, "midle")


def test_what_cannot_be_split_gets_one_sentence() -> None:
    with pytest.raises(UsageError, match="did you mean 'cut1'"):
        split_model(build("lenet"), "cut11")
    with pytest.raises(UsageError, match=r"make it an nn\.Sequential"):
        split_model(nn.Bilinear(2, 2, 2), "cut1")

    class Wrong(Own):
        def split(self, cut: str) -> tuple[nn.Module, nn.Module]:
            return self.first  # type: ignore[return-value]

    with pytest.raises(UsageError, match="two modules"):
        split_model(Wrong(), "middle")


def test_first_linear_layer_grows_with_the_parties() -> None:
    _, top = split_model(build("mlp(hidden=(8, 6))"), "cut1")
    assert tuple(widen_first_linear(top, 3)(torch.zeros(2, 24)).shape) == (2, 5)
    _, top = split_model(build("lenet"), "cut3")
    assert isinstance(widen_first_linear(top, 2), nn.Module)
    _, top = split_model(build("lenet"), "cut1")
    with pytest.raises(UsageError, match="not linear"):
        widen_first_linear(top, 2)
