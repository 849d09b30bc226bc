"""The networks: shapes, ranges, determinism, and the mathematics of style and tiles."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.errors import UsageError
from gradveil.networks.base import NETWORKS
from gradveil.networks.evaluation import EvaluationNetwork, mix, tiles
from gradveil.networks.style import StyledConv, StyleGenerator
from gradveil.randomness import Seed
from scripts.pretraining.discriminator import Discriminator

SMALL = {4: 8, 8: 8, 16: 8, 32: 4}


def draw(*shape: int, role: str = "test") -> Tensor:
    return torch.randn(shape, generator=Seed(3).generator(role))


def generators() -> list[nn.Module]:
    return [StyleGenerator(32, 3, 16, 2, SMALL), StyleGenerator(16, 1, 16, 2, SMALL, noise=True)]


@pytest.mark.parametrize("index", range(2))
def test_a_generator_makes_pictures_and_the_same_code_gives_the_same_picture(index: int, untouched_global_rng: None) -> None:
    network = generators()[index].eval()
    z = draw(5, int(network.latent))  # type: ignore[arg-type]
    images = network(z).detach()
    assert images.shape == (5, network.channels, network.size, network.size)
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1
    assert torch.equal(images, network(z))
    assert float((images[0] - images[1]).abs().max()) > 1e-3, "two codes give one picture"


def test_the_first_weights_follow_the_generator_alone() -> None:
    for build in (StyleGenerator, EvaluationNetwork):
        one, two, other = (build(generator=Seed(number).generator("w")) for number in (1, 1, 2))
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
        assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_style_is_mapping_then_synthesis_and_takes_one_style_per_layer() -> None:
    network = StyleGenerator(16, 3, 16, 2, SMALL)
    w = network.mapping(draw(2, 16))
    assert w.shape == (2, 16)
    images = network.synthesis(w)
    assert torch.equal(images, network(draw(2, 16)))
    per_layer = w[:, None].repeat(1, network.synthesis.depth, 1)
    assert torch.allclose(network.synthesis(per_layer), images, atol=1e-6)
    for layer in range(network.synthesis.depth - 1):  # every entry is used but the last up-sampling one, which 4x4 lacks
        changed = per_layer.clone()
        changed[:, layer] += 1
        assert not torch.equal(network.synthesis(changed), images), layer


def test_scaling_maps_equals_scaling_and_demodulating_the_weights_of_each_example() -> None:
    layer = StyledConv(6, 5, 3, 4, rgb=False, generator=Seed(0).generator("layer"))
    inputs, w = draw(2, 6, 8, 8, role="maps"), draw(2, 4, role="w")
    found = layer(inputs, w)
    for example in range(2):  # StyleGAN2's own form: one kernel per example
        kernel = layer.weight * layer.scale * layer.style(w[example : example + 1])[0][None, :, None, None]
        kernel = kernel / (kernel.square().sum((1, 2, 3), keepdim=True) + 1e-8).sqrt()
        expected = F.leaky_relu(F.conv2d(inputs[example : example + 1], kernel, padding=1), 0.2) * 2**0.5
        assert torch.allclose(found[example : example + 1], expected, atol=1e-5)


def test_the_synthesis_works_under_vmap_and_has_second_derivatives() -> None:
    network = StyleGenerator(8, 1, 8, 2, SMALL)
    z = draw(3, 8)
    batched = torch.vmap(lambda code: network(code[None])[0])(z)
    assert torch.allclose(batched, network(z), atol=1e-5)
    z = z.requires_grad_(True)
    (slope,) = torch.autograd.grad(network(z).square().sum(), z, create_graph=True)
    slope.square().sum().backward()
    assert z.grad is not None
    assert bool(torch.isfinite(z.grad).all())


@pytest.mark.parametrize("name", NETWORKS.names())
def test_every_named_network_builds_and_is_small_enough_to_ship_in_half_precision(name: str) -> None:
    network, card = NETWORKS.get(name)(), NETWORKS.card(name)
    assert [network.size, network.channels] == [card.size, card.channels]
    assert 2 * sum(value.numel() for value in network.state_dict().values()) < 8e6


def test_the_discriminator_sees_a_generator_that_repeats_itself() -> None:
    opponent = Discriminator(16, 1, SMALL, generator=Seed(0).generator("d"))
    images = draw(8, 1, 16, 16).sigmoid()
    scores = opponent(images)
    assert scores.shape == (8,)
    repeated = images[:1].expand(8, -1, -1, -1)
    assert float((opponent(repeated)[0] - scores[0]).abs().detach()) > 1e-4, "the spread within a group is not looked at"


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 40, 70), (3, 1, 1)])
def test_the_evaluation_network_takes_any_size(shape: tuple[int, int, int]) -> None:
    network = EvaluationNetwork(widths=(16, 16, 16))
    images = draw(2, *shape).sigmoid().requires_grad_(True)
    answers = network(images)
    assert answers.shape == (2,)
    assert bool(((answers > 0) & (answers < 1)).all())
    answers.sum().backward()
    assert images.grad is not None
    assert bool((images.grad.abs().amax((0, 1)) > 0).all()), "a pixel has no say"


def test_tiles_cover_a_picture_and_mirror_a_small_one() -> None:
    picture = torch.arange(70 * 40, dtype=torch.float32).reshape(1, 1, 70, 40)
    cut = tiles(picture, 32)
    assert cut.shape == (1, 6, 1, 32, 32)
    assert set(cut.flatten().tolist()) == set(picture.flatten().tolist())
    small = torch.tensor([[1.0, 2.0, 3.0]]).expand(3, 3)[None, None]
    assert tiles(small, 8)[0, 0, 0, 0].tolist() == [1, 2, 3, 2, 1, 2, 3, 2]


def test_the_mixture_is_the_papers() -> None:
    x, v = torch.zeros(2, 1, 2, 2), torch.ones(2, 1, 2, 2)
    assert mix(x, v, torch.tensor([0.25, 1.0])).flatten(1).tolist() == [[0.25] * 4, [1.0] * 4]


BAD_NETWORKS = (
    lambda: StyleGenerator(33),
    lambda: StyleGenerator(32, 2),
    lambda: StyleGenerator(32, 3, 0),
    lambda: EvaluationNetwork(30),
)


@pytest.mark.parametrize("index", range(len(BAD_NETWORKS)))
def test_impossible_networks_are_refused_in_one_sentence(index: int) -> None:
    with pytest.raises(UsageError) as caught:
        BAD_NETWORKS[index]()
    assert "\n" not in str(caught.value)


def test_a_stack_of_two_channels_is_refused() -> None:
    with pytest.raises(UsageError, match="takes pictures"):
        EvaluationNetwork(widths=(4, 4, 4))(torch.zeros(1, 2, 32, 32))


def test_names_are_unique_over_sizes_and_colours() -> None:
    cards = NETWORKS.cards("style-*")
    assert {(card.size, card.channels) for card in cards} == set(itertools.product((32, 64), (1, 3)))
