"""Plain autograd for one candidate computes what the mapped program computes, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks.engine.execution import Execution
from gradveil.learning import Learner, loss_by_name
from gradveil.learning.autograd import AutogradLearner, one_at_a_time
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

STEPS = TrainingSettings(shares="weights", local_steps=2, learning_rate=0.1)


def slopes(learner: Learner) -> tuple[Tensor, Tensor]:
    """Return the slope in the inputs of a distance of updates, and the distance."""
    generator = Seed(0).generator("inputs")
    truth, dummy = (torch.rand((1, 1, 12, 12), generator=generator) for _ in range(2))
    label = torch.tensor([1])
    seen = {name: value.detach() for name, value in learner.update(truth, label).items()}

    def loss(row: Tensor, constants: Named) -> Tensor:
        found = learner.update(row.reshape(truth.shape), label)
        return torch.stack([(value - seen[name]).square().sum() for name, value in found.items()]).sum()

    gradients, values = Execution("looped", 1).prepare(loss)(dummy.flatten(1), {})
    return gradients, values


@pytest.mark.parametrize("settings", [TrainingSettings(), STEPS], ids=["a gradient", "two local steps"])
def test_second_derivatives_are_those_of_the_transforms(settings: TrainingSettings) -> None:
    model = build_model("lenet", input_shape=(1, 12, 12), classes=3, seed=Seed(0))
    learner = Learner.of(model, loss_by_name("cross_entropy"), settings)
    plain = one_at_a_time(learner)
    assert isinstance(plain, AutogradLearner)
    for left, right in zip(slopes(plain), slopes(learner), strict=True):
        assert bool(left.any()) and torch.equal(left, right)


def test_a_weight_that_no_output_needs_has_a_slope_of_zero() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self.used(inputs)
            return found

    learner = one_at_a_time(Learner.of(Idle(), loss_by_name("cross_entropy")))
    update = learner.update(torch.ones(1, 4), torch.tensor([0]))
    assert not bool(update["idle.weight"].any()) and bool(update["used.weight"].any())


def test_a_loss_that_does_not_depend_on_the_inputs_has_no_slope() -> None:
    gradients, values = Execution("looped", 1).prepare(lambda row, constants: torch.ones(()))(torch.rand(2, 3), {})
    assert not bool(gradients.any()) and values.tolist() == [1.0, 1.0]
