"""The imagined attacker: latent codes with early stop, the loss of fine-tuning term by term, and what a batch shows."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.defenses.shadow.fit import (
    ENOUGH,
    WARM_UP,
    Terms,
    fine_tune,
    fit_codes,
    generator_on,
    imagine,
    observe,
    shadow_loss,
    styles_of,
)
from gradveil.errors import UsageError
from gradveil.networks.evaluation import EvaluationNetwork
from gradveil.networks.store import save_network
from gradveil.tensors import Named
from gradveil.testing.shadow_scene import LATENT, batch, generator, learner

CPU = torch.device("cpu")


class Line(nn.Module):
    """A generator of one grey level: mapping z -> z, synthesis w -> w₀ · gain, counting its calls and rows."""

    latent = 1

    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Identity()
        self.synthesis = Level()


class Level(nn.Module):
    """Gives pictures of 4 × 4 pixels of the level z."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()), requires_grad=False)
        self.rows: list[int] = []

    def forward(self, w: Tensor) -> Tensor:
        """Return constant pictures."""
        self.rows.append(len(w))
        return (self.gain * w[:, 0])[:, None, None, None].expand(-1, 1, 4, 4)


def fitted(network: Line, images: Tensor, start: Tensor, steps: int, rate: float = 1e-3, patience: int = 5) -> Tensor:
    return fit_codes(network, {}, images, start, steps=steps, rate=rate, patience=patience)


def test_codes_descend_to_the_image() -> None:
    network, images = Line(), torch.full((1, 1, 4, 4), 0.6)
    found = fitted(network, images, torch.zeros(1, 1), 300, rate=0.05)
    assert float(found) == pytest.approx(0.6, abs=0.01)


def test_a_step_of_adam_is_the_learning_rate_and_halves_three_times() -> None:
    # Far from its goal Adam moves by the rate: 8 steps at 1, 1, 1, 1/2, 1/2, 1/4, 1/4, 1/8 (halved from 3, 5, 7).
    network, images = Line(), torch.full((1, 1, 4, 4), 1e4)
    moved = float(fitted(network, images, torch.zeros(1, 1), 8, rate=1.0))
    assert moved == pytest.approx(3 + 1 + 0.5 + 0.125, rel=1e-3)


def test_a_code_at_its_best_stops_after_the_warm_up() -> None:
    network, images = Line(), torch.full((1, 1, 4, 4), 0.5)
    start = torch.full((1, 1), 0.5)
    found = fitted(network, images, start, 500, rate=0.1)
    assert torch.equal(found, start), "the best code is kept, not the last"
    assert len(network.synthesis.rows) == WARM_UP + 1


def test_patience_counts_steps_without_a_thousandth_less() -> None:
    network, images = Line(), torch.full((1, 1, 4, 4), 1e6)
    # In the last eighth errors fall by a quarter of a thousandth per step, a thousandth within patience: the search goes on.
    fitted(network, images, torch.zeros(1, 1), 120, rate=1e6 * ENOUGH)
    assert len(network.synthesis.rows) == 121
    slow = Line()
    fitted(slow, images, torch.zeros(1, 1), 120, rate=1e6 * ENOUGH / 20)
    assert len(slow.synthesis.rows) == WARM_UP + 1


def test_codes_that_are_done_cost_nothing_while_others_go_on() -> None:
    network = Line()
    images = torch.stack([torch.full((1, 4, 4), 0.5), torch.full((1, 4, 4), 100.0)])
    found = fitted(network, images, torch.tensor([[0.5], [0.0]]), 200, rate=0.5)
    assert network.synthesis.rows[0] == 2 and network.synthesis.rows[-1] == 1
    alone = fitted(Line(), images[1:], torch.zeros(1, 1), 200, rate=0.5)
    assert torch.allclose(found[1:], alone)
    assert float(found[0]) == 0.5


def test_no_steps_return_the_start() -> None:
    start = torch.randn((2, 1), generator=torch.Generator().manual_seed(0))
    assert torch.equal(fitted(Line(), torch.rand(2, 1, 4, 4), start, 0), start)


def test_codes_of_a_style_generator_come_nearer() -> None:
    network = generator_on(generator(3), CPU, 16)
    weights, images = dict(network.synthesis.named_parameters()), batch().inputs  # type: ignore[union-attr]
    start = torch.randn((3, LATENT), generator=torch.Generator().manual_seed(0))

    def error(codes: Tensor) -> float:
        return float(F.mse_loss(imagine(network, styles_of(network, codes), weights, images), images))

    assert error(fit_codes(network, weights, images, start, steps=60, rate=0.02, patience=5)) < 0.9 * error(start)


def test_the_loss_term_by_term() -> None:
    own, given = learner(), batch(2)
    real = observe(own, given.inputs, given.targets, {})
    pictures = given.inputs.flip(0)
    fake = observe(own, pictures, given.targets, {})

    def loss(**weights: float) -> float:
        none = {"gradient": 0.0, "statistics": 0.0, "variation": 0.0, "energy": 0.0, "pixels": 0.0}
        terms = Terms(**{**none, **weights})
        return float(shadow_loss(pictures, given.inputs, given.targets, own, {}, real, terms).detach())

    distance = sum(float((fake.gradient[n] - g).norm()) for n, g in real.gradient.items())
    assert loss(gradient=1.0) == pytest.approx(distance, rel=1e-5)
    assert loss(pixels=1.0) == pytest.approx(float((pictures - given.inputs).square().mean()), rel=1e-5)
    assert loss(energy=1.0) == pytest.approx(float(pictures.norm()) / 256**2, rel=1e-5)
    rough = 0.0
    for dy, dx in ((1, 0), (0, 1), (1, 1), (1, -1)):
        total = 0.0
        for y in range(16 - dy):
            for x in range(max(0, -dx), 16 - max(0, dx)):
                total += float((pictures[:, :, y + dy, x + dx] - pictures[:, :, y, x]).square().sum())
        rough += math.sqrt(total)
    assert loss(variation=1.0) == pytest.approx(rough, rel=1e-4)
    assert loss(statistics=1.0) == 0.0, "without BatchNorm there is no such term"


def test_statistics_are_those_of_the_layers_inputs() -> None:
    own, given = learner(norm=True, batch_norm="train"), batch(4)
    ((mean, variance),) = observe(own, given.inputs, given.targets, {}).statistics
    maps = F.conv2d(given.inputs, own.weights["conv.weight"], own.weights["conv.bias"], padding=1)
    assert torch.allclose(mean, maps.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(variance, maps.var((0, 2, 3), correction=0), atol=1e-6)
    real = observe(own, given.inputs, given.targets, {})
    terms = Terms(gradient=0.0, statistics=1.0, variation=0.0, energy=0.0, pixels=0.0)
    assert not any(value.requires_grad for pair in real.statistics for value in pair)
    same, other = (
        float(shadow_loss(each, given.inputs, given.targets, own, {}, real, terms).detach())
        for each in (given.inputs, given.inputs.flip(1))
    )
    assert same == pytest.approx(0, abs=1e-6) and other > 0.01


def test_the_gradient_is_that_of_the_client() -> None:
    own, given = learner(), batch(2)
    expected: Named = own.gradient(own.weights, given.inputs, given.targets)
    found = observe(own, given.inputs, given.targets, {})
    assert found.statistics == ()
    for name, value in expected.items():
        assert torch.allclose(found.gradient[name], value, atol=1e-6)


@pytest.mark.parametrize("only", ["gradient", "pixels"])
def test_fine_tuning_lowers_its_loss_and_moves_synthesis_alone(only: str) -> None:
    network, own, given = generator_on(generator(3), CPU, 16), learner(), batch()
    weights = dict(network.synthesis.named_parameters())  # type: ignore[union-attr]
    kept = {name: value.clone() for name, value in network.state_dict().items()}
    codes = torch.randn((3, LATENT), generator=torch.Generator().manual_seed(0))
    real = observe(own, given.inputs, given.targets, {})
    off = {"gradient": 0.0, "statistics": 0.0, "variation": 0.0, "energy": 0.0, "pixels": 0.0}
    terms = Terms(**{**off, only: 1.0})

    def loss(at: Named) -> float:
        pictures = imagine(network, styles_of(network, codes), at, given.inputs)
        return float(shadow_loss(pictures, given.inputs, given.targets, own, {}, real, terms).detach())

    tuned = fine_tune(network, weights, codes, given.inputs, given.targets, own, {}, real, terms=terms, steps=10, rate=5e-3)
    assert loss(tuned) < loss(weights)
    assert all(torch.equal(value, kept[name]) for name, value in network.state_dict().items()), "the shared generator stays"
    assert tuned.keys() == weights.keys()


def test_only_style_generators_will_do(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.safetensors"
    save_network(EvaluationNetwork(), path, {"network": "evaluation-32", "settings": {}}, half=True)
    with pytest.raises(UsageError, match="style generator"):
        generator_on(str(path), CPU, 16)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    source, path = Path(generator(3)), tmp_path / "mine.safetensors"
    for suffix in (".safetensors", ".json"):
        path.with_suffix(suffix).write_bytes(source.with_suffix(suffix).read_bytes())
    first = generator_on(str(path), CPU, 16)
    assert generator_on(str(path), CPU, 16) is first
    os.utime(path.with_suffix(".json"), ns=(1, 1))
    assert generator_on(str(path), CPU, 16) is not first
