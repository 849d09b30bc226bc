"""Local training as one function: per-example gradients, aggregates, hooks, losses and settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from gradveil.errors import UsageError
from gradveil.learning import LOSSES, Learner, loss_by_name
from gradveil.learning.losses import binary_cross_entropy, cross_entropy, mean_squared_error
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named


def learner(settings: TrainingSettings | None = None, loss: Any = cross_entropy) -> Learner:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        model = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3)).double()
    return Learner.of(model, loss, settings)


def data(examples: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return torch.rand((examples, 6), generator=generator, dtype=torch.float64), torch.randint(3, (examples,), generator=generator)


def close(left: Named, right: Named, tolerance: float = 1e-12) -> bool:
    return left.keys() == right.keys() and all(torch.allclose(value, right[name], atol=tolerance) for name, value in left.items())


def mean(named: Named) -> Named:
    return {name: value.mean(0) for name, value in named.items()}


@pytest.mark.parametrize("loss", [cross_entropy, mean_squared_error, binary_cross_entropy])
def test_the_mean_of_the_examples_gradients_is_the_gradient_of_the_batch(loss: Any) -> None:
    one = learner(loss=loss)
    x, y = data()
    assert close(mean(one.per_example_gradients(one.weights, x, y)), one.gradient(one.weights, x, y))


@pytest.mark.parametrize(
    "settings",
    [
        TrainingSettings(clients=2),
        TrainingSettings(clients=2, shares="weights", local_steps=3, learning_rate=0.1),
        TrainingSettings(clients=2, shares="weights", epochs=2, minibatch=1, optimizer="adam", learning_rate=0.01),
    ],
)
def test_the_update_of_an_aggregate_is_the_mean_of_its_clients(settings: TrainingSettings) -> None:
    x, y = data(6)
    alone = learner(settings.replace(clients=1))
    first, second = alone.update(x[:3], y[:3]), alone.update(x[3:], y[3:])
    together = learner(settings).update(x, y)
    assert close(together, {name: (value + second[name]) / 2 for name, value in first.items()})


def test_one_sgd_step_is_the_gradient_times_the_learning_rate() -> None:
    x, y = data()
    gradient = learner().update(x, y)
    weights = learner(TrainingSettings(shares="weights", learning_rate=0.25)).update(x, y)
    assert close(weights, {name: value * 0.25 for name, value in gradient.items()})


def test_hooks_are_called_at_every_step_with_the_weights_of_that_step() -> None:
    seen: list[tuple[int, float, int]] = []

    def hook(step: int, weights: Named, gradient: Named, inputs: Tensor, targets: Tensor) -> Named:
        seen.append((step, float(weights["0.weight"].sum()), len(inputs)))
        return {name: value * 0 for name, value in gradient.items()}

    one = learner(TrainingSettings(shares="weights", local_steps=3, minibatch=3, learning_rate=1.0))
    update = one.update(*data(), hook)
    start = float(one.weights["0.weight"].sum())
    assert seen == [(0, start, 3), (1, start, 3), (2, start, 3)]
    assert all(float(value.abs().max()) == 0 for value in update.values())


def test_per_example_hooks_see_a_leading_axis() -> None:
    def hook(step: int, weights: Named, gradient: Named, inputs: Tensor, targets: Tensor) -> Named:
        assert gradient["0.weight"].shape == (4, 5, 6)
        return mean(gradient)

    one = learner().replace(per_example=True)
    assert close(one.update(*data(), hook), learner().update(*data()))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_is_differentiable_and_safe_under_vmap(optimizer: Any) -> None:
    one = learner(TrainingSettings(shares="weights", local_steps=2, optimizer=optimizer, learning_rate=0.1))
    x, y = data()

    def energy(inputs: Tensor) -> Tensor:
        return torch.stack([value.square().sum() for value in one.update(inputs, y).values()]).sum()

    slope = grad(energy)(x)
    step = torch.zeros_like(x)
    step[1, 2] = 1e-6
    numeric = (energy(x + step) - energy(x - step)) / 2e-6
    assert float(slope[1, 2]) == pytest.approx(float(numeric), rel=1e-4)
    many = torch.stack([x, x * 0.5])
    assert torch.allclose(vmap(energy)(many), torch.stack([energy(x), energy(x * 0.5)]))


def test_learners_are_copies_and_move_between_precisions() -> None:
    model = nn.Linear(6, 3)
    one = Learner.of(model, cross_entropy)
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert float(one.weights["weight"].max()) < 7
    wide = one.to(torch.float64)
    assert {value.dtype for value in wide.weights.values()} == {torch.float64}
    assert {value.dtype for value in one.weights.values()} == {torch.float32}
    assert one.parameters == 21
    assert wide.forward(wide.weights, data()[0]).dtype == torch.float64


def test_losses_agree_with_torch_for_indices_and_soft_targets() -> None:
    outputs = torch.randn((5, 3), generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([0, 2, 1, 1, 0])
    hot = F.one_hot(targets, 3).float()
    soft = outputs.flip(0).softmax(1)
    assert torch.allclose(cross_entropy(outputs, targets), F.cross_entropy(outputs, targets))
    assert torch.allclose(cross_entropy(outputs, soft), F.cross_entropy(outputs, soft))
    for ours, theirs in ((mean_squared_error, F.mse_loss), (binary_cross_entropy, F.binary_cross_entropy_with_logits)):
        assert torch.allclose(ours(outputs, targets), theirs(outputs, hot))
        assert torch.allclose(ours(outputs, soft), theirs(outputs, soft))


def test_losses_are_found_by_name_or_imported() -> None:
    assert LOSSES.names() == ["binary_cross_entropy", "cross_entropy", "dice", "mean_squared_error"]
    assert loss_by_name("cross_entropy") is cross_entropy
    assert loss_by_name("torch.nn.functional:cross_entropy") is F.cross_entropy
    with pytest.raises(UsageError, match="did you mean 'cross_entropy'"):
        loss_by_name("crossentropy")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shares": "grads"}, "shares is 'grads'; did you mean 'gradient'"),
        ({"optimizer": "lion"}, "known: adam, sgd"),
        ({"batch_norm": "off"}, "known: eval, train"),
        ({"local_steps": 0}, "must be a whole number of at least 1"),
        ({"epochs": -1}, "must be a whole number of at least 0"),
        ({"minibatch": -1}, "must be a whole number of at least 0"),
        ({"clients": 0}, "must be a whole number of at least 1"),
        ({"learning_rate": 0.0}, "must be a number above 0"),
        ({"learning_rate": float("nan")}, "must be a number above 0"),
        ({"local_steps": 2}, "shares weights, not a gradient"),
        ({"epochs": 1}, "shares weights, not a gradient"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainingSettings(**wrong)


@pytest.mark.parametrize(
    ("settings", "examples", "expected"),
    [
        (TrainingSettings(shares="weights", local_steps=3), 5, [None, None, None]),
        (TrainingSettings(shares="weights", local_steps=3, minibatch=5), 5, [None, None, None]),
        (TrainingSettings(shares="weights", local_steps=3, minibatch=2), 3, [[0, 1], [2, 0], [1, 2]]),
        (TrainingSettings(shares="weights", epochs=2), 5, [None, None]),
        (TrainingSettings(shares="weights", epochs=1, minibatch=2), 5, [[0, 1], [2, 3], [4]]),
    ],
)
def test_every_step_takes_its_minibatch(settings: TrainingSettings, examples: int, expected: list[list[int] | None]) -> None:
    steps = range(settings.steps(examples))
    assert [settings.minibatch_indices(step, examples) for step in steps] == expected


def test_answers_are_asked_for_alone_and_the_device_is_that_of_the_weights() -> None:
    class Wordy(nn.Linear):
        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(inputs), inputs.sum()

    torch.manual_seed(0)
    wordy, x = Learner.of(Wordy(3, 2), loss_by_name("cross_entropy")), torch.rand(4, 3)
    assert torch.equal(wordy.logits(wordy.weights, x), wordy.forward(wordy.weights, x)[0])
    assert wordy.device == torch.device("cpu") and wordy.to(torch.device("meta")).device.type == "meta"
    assert wordy.classes(x.double()) == 2 and Learner.of(nn.Conv2d(1, 1, 1), wordy.loss).classes(torch.rand(1, 1, 2, 2)) == 0
