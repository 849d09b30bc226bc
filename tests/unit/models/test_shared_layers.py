"""A layer that stands in several places keeps one set of weights, and survives differentiation."""

from __future__ import annotations

import copy

import torch
from torch import nn

from gradveil.learning import Learner, loss_by_name
from gradveil.models.shared_layers import separate_layers

CLASSES = torch.tensor([1, 0, 2])


class Tied(nn.Module):
    """A block and a normalisation used twice, under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.BatchNorm1d(6))
        self.again = self.block
        self.rows = nn.ModuleList([self.first, nn.Sequential(self.block, nn.Tanh())])
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.block, self.again, *self.rows):
            x = layer(x)
        return self.last(x)  # type: ignore[no-any-return]


def made() -> tuple[Tied, torch.Tensor]:
    torch.manual_seed(0)
    return Tied().eval(), torch.rand(3, 6)


def test_the_gradient_of_tied_weights_is_torch_s_and_the_model_can_be_copied_afterwards() -> None:
    model, inputs = made()
    learner = Learner.of(model, loss_by_name("cross_entropy"))
    assert list(learner.weights) == [name for name, _ in model.named_parameters()]
    found = learner.update(inputs, CLASSES)
    nn.functional.cross_entropy(model(inputs), CLASSES).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and torch.allclose(found[name], weight.grad, atol=1e-7), name
    torch.func.vmap(lambda x: learner.update(x.unsqueeze(0), CLASSES[:1]))(inputs)
    again = learner.to(torch.float64).update(inputs.double(), CLASSES)
    assert all(torch.allclose(again[name], value.double(), atol=1e-6) for name, value in found.items())


def test_places_get_layers_of_their_own_with_the_same_tensors() -> None:
    model, inputs = made()
    apart = separate_layers(copy.deepcopy(model))
    assert isinstance(apart, Tied) and isinstance(apart.rows[1], nn.Sequential)
    third = apart.rows[1][0]
    assert isinstance(third, nn.Sequential) and apart.again is not apart.block and third is not apart.block
    assert apart.again[0].weight is apart.block[0].weight is third[0].weight
    assert apart.again[0] is not apart.block[0]
    assert apart.block[2].running_mean is apart.again[2].running_mean
    assert torch.equal(apart(inputs), model(inputs))
    assert [name for name, _ in apart.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_a_model_without_repeats_is_left_alone() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    before = list(model._modules.values())
    assert separate_layers(model) is model and all(a is b for a, b in zip(model._modules.values(), before, strict=True))
