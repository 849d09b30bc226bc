"""The attacker's smooth stand-in for ReLU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradveil.adversary import OpenAdversary
from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.attacks.engine.smooth_relu import has_relu, sharpness_at, smooth_learner, with_sharpness
from gradveil.learning import Learner
from gradveil.records import Comparison
from tests.unit.attacks.scenes import make_batch, make_learner

RELU = "lenet(activation='relu')"


def smooth_at(learner: Learner, sharpness: float) -> Learner:
    return with_sharpness(smooth_learner(learner), torch.tensor(sharpness, dtype=torch.float64))


def test_only_models_with_relu_modules_are_changed() -> None:
    assert has_relu(make_learner(RELU)) and not has_relu(make_learner("lenet"))
    model = smooth_learner(make_learner(RELU)).model
    assert not any(isinstance(module, nn.ReLU) for module in model.modules())
    assert any(isinstance(module, nn.ReLU) for module in make_learner(RELU).model.modules())


def test_names_of_weights_stay_and_the_original_is_untouched() -> None:
    learner = make_learner(RELU)
    copy = smooth_learner(learner)
    assert list(copy.weights) == list(learner.weights) and not learner.buffers
    assert all("sharpness" in name for name in copy.buffers)


def test_it_becomes_a_relu() -> None:
    learner = make_learner(RELU)
    z = torch.linspace(-3, 3, 601, dtype=torch.float64)
    module = next(m for m in smooth_learner(learner).model.modules() if type(m).__name__ == "_SmoothReLU")
    gaps = []
    for sharpness in (2.0, 10.0, 100.0):
        found = functional_call(module, {"gradveil_sharpness": torch.tensor(sharpness, dtype=torch.float64)}, (z,))
        gaps.append(float((found - z.relu()).abs().max()) / float(z.std()))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.01, "at the end it is a ReLU to within a percent of the layer's scale"


def test_a_sharp_update_is_the_update() -> None:
    learner, batch = make_learner(RELU), make_batch()
    true = learner.update(batch.inputs, batch.targets)
    gaps = []
    for sharpness in (2.0, 30.0, 1000.0):
        sent = smooth_at(learner, sharpness).update(batch.inputs, batch.targets)
        gaps.append(float(OBJECTIVES.get("cosine")(Comparison(sent, true))))
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 1e-3


def test_candidates_are_smoothed_by_their_own_scale() -> None:
    learner = smooth_at(make_learner(RELU), 5.0)
    inputs = torch.stack([make_batch(seed=s).inputs * (1 + s) for s in range(3)])
    together = vmap(lambda x: learner.forward(learner.weights, x))(inputs)
    assert torch.allclose(together, torch.stack([learner.forward(learner.weights, x) for x in inputs]))


def dead(learner: Learner) -> Learner:
    """Push every unit of the first layer far below zero."""
    return learner.replace(weights={n: v - 20 if n == "conv1.bias" else v for n, v in learner.weights.items()})


@pytest.mark.parametrize("smooth", [False, True])
def test_a_silent_network_has_a_slope_only_where_it_is_smooth(smooth: bool) -> None:
    learner, truth, start = dead(make_learner(RELU)), make_batch(seed=1), make_batch(seed=2)
    observed = make_learner(RELU).update(truth.inputs, truth.targets)
    copy = smooth_at(learner, 2.0) if smooth else learner

    def loss(inputs: Tensor) -> Tensor:
        return OBJECTIVES.get("cosine")(Comparison(OpenAdversary().replay(copy, inputs, truth.targets, {}), observed))

    slope = grad(loss)(start.inputs)
    assert bool(torch.isfinite(slope).all())
    assert bool(slope.abs().max() > 0) is smooth


def test_sharpness_grows_geometrically_and_settles() -> None:
    found = [sharpness_at(step, 100) for step in (0, 45, 90, 99)]
    assert found == pytest.approx([2, (2 * 100) ** 0.5, 100, 100])
    assert sharpness_at(0, 1) == 2
