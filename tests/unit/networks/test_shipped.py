"""The weights that ship: small, verified, and the evaluation network within its gate on pictures it never saw.

The gate: the mean answer lies within 0.05 of the true mixing ratio at 0, 0.1, ..., 1 and rises with it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradveil
from gradveil.data import load_data
from gradveil.data.public import public_images
from gradveil.networks.base import NETWORKS
from gradveil.networks.cards import SHIPPED, network_card, weights_beside
from gradveil.networks.store import load_network
from gradveil.randomness import Seed
from scripts.pretraining.pictures import is_held_out
from scripts.pretraining.quality import calibration

GATE = 0.05
ROOT = Path(gradveil.__file__).parent


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return load_network("evaluation-32")


def check(network: nn.Module, images: Tensor, gate: float = GATE) -> None:
    found = calibration(network, images, Seed(11))
    assert found["bias"] <= gate, found
    assert found["monotone"], found


@pytest.mark.parametrize("name", NETWORKS.names())
def test_a_shipped_network_is_small_whole_and_described(name: str) -> None:
    card, path = network_card(name), weights_beside(SHIPPED / f"{name}.json")
    assert path.is_file()
    assert path.stat().st_size <= 5_000_000
    assert path.is_relative_to(ROOT), "weights outside the package are not in the wheel"
    network = load_network(name)
    assert not network.training
    for field in ("data", "licence", "metrics", "sha256", "gradveil", "training"):
        assert card[field], field
    assert isinstance(card["training"]["seed"], int)
    assert "/" not in json.dumps([each["source"] for each in card["data"]]), "a card names a folder of whoever trained it"


@pytest.mark.parametrize("name", NETWORKS.names("*style*"))
def test_a_shipped_generator_is_nearer_to_pictures_than_noise_is_and_does_not_copy(name: str) -> None:
    metrics = network_card(name)["metrics"]
    assert metrics["kernel_distance_random_features"] < 0.05 * metrics["kernel_distance_of_noise"]
    assert metrics["memorisation_distance_ratio"] > 0.7
    assert metrics["recall_random_features"] > 0.1
    network = load_network(name)
    z = torch.randn((16, int(network.latent)), generator=Seed(0).generator("z"))  # type: ignore[arg-type]
    images = network(z)
    assert 0.05 < float(images.std()) < 0.5
    assert float(torch.pdist(images.flatten(1)).min()) > 0.5, "two codes give nearly the same picture"


@pytest.mark.parametrize("grey", [False, True])
def test_the_gate_on_photographs_that_are_built_in(network: nn.Module, grey: bool) -> None:
    images = load_data("photos", limit=100).inputs
    check(network, images.mean(1, keepdim=True) if grey else images)


def test_the_gate_on_larger_pictures(network: nn.Module) -> None:
    check(network, public_images((3, 64, 64), 12, Seed(0)))
    check(network, public_images((1, 100, 80), 6, Seed(1)))


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_gate_on_plain_pictures(network: nn.Module, level: float, channels: int) -> None:
    check(network, torch.full((40, channels, 32, 32), level))


def test_the_gate_on_smooth_pictures(network: nn.Module) -> None:
    coarse = torch.rand((60, 3, 3, 3), generator=Seed(0).generator("coarse"))
    check(network, F.interpolate(coarse, size=(32, 32), mode="bilinear", align_corners=True))


def test_pictures_of_eight_pixels_are_at_least_ordered(network: nn.Module) -> None:
    # 64 pixels, strokes one pixel wide: sharp print and noise look alike there, and docs/networks.md says so.
    check(network, load_data("digits", limit=100).inputs, gate=0.15)


def bytes_of(path: Path, name: str, count: int) -> Tensor:
    with np.load(path, allow_pickle=False) as archive:
        return torch.from_numpy(archive[name][:count]).to(torch.float32) / 255


@pytest.mark.shared
def test_the_gate_on_cifar10(network: nn.Module, shared_data: Path) -> None:
    check(network, bytes_of(shared_data / "cifar10_12k.npz", "x_test", 200).permute(0, 3, 1, 2))


@pytest.mark.shared
def test_the_gate_on_chest_x_rays_and_handwriting(network: nn.Module, shared_data: Path) -> None:
    check(network, bytes_of(shared_data / "pneumoniamnist.npz", "test_images", 80)[:, None])
    with np.load(shared_data / "mnist_with_writers.npz", allow_pickle=False) as archive:
        name = next(name for name in archive.files if "test" in name and archive[name].ndim == 3)
    check(network, bytes_of(shared_data / "mnist_with_writers.npz", name, 80)[:, None])


def test_the_answer_can_be_followed_uphill(network: nn.Module) -> None:
    """Refiner needs a gradient that leads to more noise, from a blended start."""
    images = load_data("photos", limit=8).inputs
    start = 0.5 * images + 0.5 * torch.rand(images.shape, generator=Seed(0).generator("v"))
    moved = start.clone().requires_grad_(True)
    before = network(moved)
    (slope,) = torch.autograd.grad(before.sum(), moved)
    after = network((moved + 0.02 * slope.sign()).clamp(0, 1)).detach()
    assert bool((after > before.detach() + 0.02).all())


def test_patients_of_the_small_x_ray_set_can_be_told_apart_from_what_was_trained_on() -> None:
    small = next(each for each in network_card("style-64-grey")["data"] if each["train"] + each["held_out"] < 1000)
    assert small["held_out"] >= 50
    assert any(is_held_out(str(number), 172) for number in range(20))
