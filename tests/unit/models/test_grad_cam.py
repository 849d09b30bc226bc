"""Grad-CAM++: equal to an independent implementation, to its formula by hand, and without traces in the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.errors import UsageError
from gradveil.learning.learner import Learner
from gradveil.learning.losses import cross_entropy
from gradveil.models.grad_cam import answer_scores, grad_cam_pp, saliency_of, top_share

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden" / "defenses_shadow.json").read_text())["grad_cam_pp"]


def golden_model() -> nn.Module:
    """Two convolutions and a linear layer; weights by formula, so that anybody can build the same."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(1),
        nn.Linear(5 * 36, 4),
    )
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), start=1):
            steps = torch.arange(parameter.numel(), dtype=torch.float32)
            parameter.copy_((0.4 * torch.sin(number + 1.7 * steps)).reshape(parameter.shape))
    return model.eval()


def golden_inputs() -> tuple[Tensor, Tensor]:
    steps = torch.arange(3 * 3 * 12 * 12, dtype=torch.float32)
    return (0.5 + 0.5 * torch.sin(0.37 * steps + steps.square() * 1e-4)).reshape(3, 3, 12, 12), torch.tensor([0, 3, 1])


def test_equals_monai() -> None:
    model, (inputs, targets) = golden_model(), golden_inputs()
    found = grad_cam_pp(model, model, inputs, targets, layer="3")
    expected = torch.tensor(GOLDEN["value"]).reshape(3, 12, 12)
    assert float((found - expected).abs().max()) < GOLDEN["tolerance"] == 1e-4
    assert torch.equal(found, grad_cam_pp(model, model, inputs, targets)), "the last layer with maps is number 3"


def test_equals_the_formula_written_out_pixel_by_pixel() -> None:
    features = torch.tensor([[[[1.0, 2.0], [0.0, 1.0]], [[3.0, 0.0], [1.0, 2.0]]]])
    slopes = torch.tensor([[[[0.5, -1.0], [2.0, 0.0]], [[0.25, 1.0], [-0.5, 0.0]]]])
    total = torch.zeros(2, 2)
    for k in range(2):
        cubes = sum(float(features[0, k, i, j]) * float(slopes[0, k, i, j]) ** 3 for i in range(2) for j in range(2))
        weight = 0.0
        for i in range(2):
            for j in range(2):
                d = float(slopes[0, k, i, j])
                below = 2 * d * d + cubes
                weight += d * d / (below if below else 1.0) * max(d, 0.0)
        total += weight * features[0, k]
    total = total.clamp_min(0)
    expected = (total - total.min()) / (total.max() - total.min())
    assert torch.allclose(saliency_of(features, slopes, (2, 2))[0], expected, atol=1e-6)


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e4])
def test_tiny_and_huge_slopes_leave_a_finite_map(size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    features, slopes = (torch.rand((2, 3, 4, 4), generator=generator) for _ in range(2))
    found = saliency_of(features, (slopes - 0.5) * size, (8, 8))
    assert bool(torch.isfinite(found).all()) and float(found.max()) == 1.0 and float(found.min()) == 0.0


def test_a_constant_map_is_zero_and_not_a_number_without_meaning() -> None:
    assert not saliency_of(torch.ones(1, 2, 3, 3), torch.ones(1, 2, 3, 3), (6, 6)).any()
    assert not saliency_of(torch.ones(1, 2, 3, 3), torch.zeros(1, 2, 3, 3), (6, 6)).any()


def test_overflowing_scores_do_not_matter() -> None:
    model, (inputs, targets) = golden_model(), golden_inputs()
    plain = grad_cam_pp(model, model, inputs, targets)
    last = model[5]  # type: ignore[index]
    with torch.no_grad():
        last.bias += 1000.0  # exp(1000) is infinite; the slopes are the same
    assert torch.allclose(grad_cam_pp(model, model, inputs, targets), plain, atol=1e-6)


def test_works_through_a_learner_and_leaves_nothing_behind() -> None:
    model, (inputs, targets) = golden_model(), golden_inputs()
    learner = Learner.of(model, cross_entropy)
    doubled = {name: 2 * value for name, value in learner.weights.items()}
    kept = {name: value.clone() for name, value in learner.model.state_dict().items()}
    with torch.no_grad():
        found = grad_cam_pp(lambda x: learner.logits(doubled, x), learner.model, inputs, targets)
    expected = functional_call(model, doubled, (inputs,))
    assert expected.shape == (3, 4)
    for parameter in model.parameters():
        parameter.data *= 2
    assert torch.allclose(found, grad_cam_pp(model, model, inputs, targets), atol=1e-6)
    assert all(not module._forward_hooks for module in learner.model.modules())
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    assert all(torch.equal(value, kept[name]) for name, value in learner.model.state_dict().items())
    assert not found.requires_grad and inputs.grad is None and not inputs.requires_grad


def test_hooks_go_even_where_the_model_fails() -> None:
    model = golden_model()
    with pytest.raises(RuntimeError):
        grad_cam_pp(model, model, torch.zeros(1, 2, 12, 12), torch.tensor([0]))
    assert all(not module._forward_hooks for module in model.modules())


def test_in_place_activations_are_read_after_them() -> None:
    model, (inputs, targets) = golden_model(), golden_inputs()
    plain = grad_cam_pp(model, model, inputs, targets)
    model.set_submodule("3", nn.ReLU(inplace=True))
    assert torch.allclose(grad_cam_pp(model, model, inputs, targets), plain, atol=1e-6)


def test_pools_and_the_output_itself_are_not_read() -> None:
    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.pool, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.pool(self.first(x)))
            return out

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs = Segmenter(), torch.rand(2, 1, 8, 8)
    targets = torch.zeros(2, 4, 4)
    found = grad_cam_pp(model, model, inputs, targets)
    assert torch.equal(found, grad_cam_pp(model, model, inputs, targets, layer="first"))


def test_models_without_maps_give_zeros() -> None:
    model = nn.Sequential(nn.Flatten(1), nn.Linear(16, 3))
    assert not grad_cam_pp(model, model, torch.ones(2, 1, 4, 4), torch.tensor([0, 1])).any()


def test_unknown_layers_are_refused() -> None:
    model, (inputs, targets) = golden_model(), golden_inputs()
    with pytest.raises(UsageError, match="no layer"):
        grad_cam_pp(model, model, inputs, targets, layer="layer4")
    with pytest.raises(UsageError, match="feature maps"):
        grad_cam_pp(model, model, inputs, targets, layer="5")


def test_scores_of_the_true_answer() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert answer_scores(logits, torch.tensor([0, 1])).tolist() == [1.0, 5.0]
    assert answer_scores(logits, torch.tensor([[0.5, 0.5], [0.0, 1.0]])).tolist() == [1.5, 5.0]
    assert answer_scores(logits[:, :1], torch.tensor([0, 1])).tolist() == [-1.0, 3.0]
    maps = torch.arange(8.0).reshape(1, 2, 2, 2)
    assert answer_scores(maps, torch.zeros(1, 2, 2)).tolist() == [4 + 5 + 6 + 7]
    assert answer_scores(maps[:, :1], torch.zeros(1, 1, 2, 2)).tolist() == [0 + 1 + 2 + 3]


def test_the_top_share_is_counted_and_ties_go_to_the_first() -> None:
    maps = torch.arange(10.0).reshape(1, 2, 5)
    assert top_share(maps, 0.3).flatten().tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert top_share(torch.zeros(1, 2, 5), 0.3).flatten().tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert float(top_share(maps, 0.01).sum()) == 1
    assert float(top_share(maps, 0.0).sum()) == 0
    assert float(top_share(maps, 1.0).sum()) == 10
