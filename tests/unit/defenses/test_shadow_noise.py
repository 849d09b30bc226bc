"""The noise pipeline of the shadow defense: each step by hand, every guard, and the alignment with the image."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gradveil.defenses.shadow.noise import (
    amplitude,
    equalise,
    error_map,
    foreground_map,
    foreground_weight,
    inverse_softmax,
    reduce_foreground,
    relative_noise,
    scaled_noise,
    softmax_map,
    stretch,
)
from gradveil.testing.released_shadow import scattered


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_the_error_of_a_pixel_is_the_squared_distance_of_its_colours() -> None:
    images, imagined = torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2)
    imagined[0, :, 0, 1] = torch.tensor([0.1, 0.2, 0.2])
    assert torch.allclose(error_map(images, imagined), torch.tensor([[[0.0, 0.09]]]))


def test_the_first_map_is_the_inverse_of_a_softmax() -> None:
    errors = rand(2, 3, 4)
    softmax = torch.softmax(errors.flatten(1) / 20, 1).reshape(errors.shape)
    expected = 1 / softmax
    expected = expected / expected.amax((1, 2), keepdim=True)
    assert torch.allclose(inverse_softmax(errors, 20.0), expected, atol=1e-6)


def test_low_temperatures_do_not_overflow() -> None:
    errors = 100 * rand(1, 4, 4)
    assert bool(torch.isinf(1 / torch.softmax(errors.flatten() / 1e-3, 0)).any()), "the plain formula does"
    assert bool(torch.isfinite(relative_noise(errors, 1e-3)).all())


def test_equalised_levels_by_hand() -> None:
    # Levels 0, 0, 85, 255: shares 1/2, 3/4, 1; counted from above the darkest: 0, 1/2, 1.
    maps = torch.tensor([[[0.0, 0.0], [1.0, 3.0]]])
    assert equalise(maps).flatten().tolist() == [0, 0, 128, 255]


def test_equalisation_agrees_with_an_independent_one() -> None:
    maps = rand(1, 32, 32).square()
    levels = np.round(255 * ((maps - maps.min()) / (maps.max() - maps.min())).numpy()[0]).astype(int)
    shares = np.cumsum(np.bincount(levels.ravel(), minlength=256)) / levels.size
    table = np.round(255 * (shares - shares[levels.min()]) / (1 - shares[levels.min()]))
    assert np.array_equal(equalise(maps)[0].numpy(), table[levels])
    counts = np.histogram(equalise(maps)[0].numpy(), bins=8, range=(0, 256))[0]
    assert counts.max() < 1.5 * counts.min(), "the histogram is even"


def test_images_are_equalised_one_by_one() -> None:
    dark, bright = rand(1, 8, 8), 100 + 50 * rand(1, 8, 8, seed=1)
    together = equalise(torch.cat([dark, bright]))
    assert torch.equal(together, torch.cat([equalise(dark), equalise(bright)]))
    assert float(together[0].max()) == 255 == float(together[1].max())


def test_small_errors_keep_their_levels_at_high_temperature() -> None:
    errors = 1e-5 * rand(1, 16, 16)
    assert len(relative_noise(errors, 20.0).unique()) > 100


@pytest.mark.parametrize("equalised", [True, False])
def test_what_is_rebuilt_best_gets_most_noise(equalised: bool) -> None:
    errors = rand(2, 8, 8)
    found = relative_noise(errors, 20.0, equalised=equalised)
    assert torch.allclose(found.sum((1, 2)), torch.ones(2))
    assert torch.equal(found.flatten(1).argmax(1), errors.flatten(1).argmin(1))
    order = errors.flatten(1).argsort(1)
    along = found.flatten(1).gather(1, order)
    assert bool((along[:, 1:] <= along[:, :-1] + 1e-9).all()), "the more error, the less noise"


def test_equalisation_gives_noise_to_a_fixed_share_of_the_pixels_however_errors_are_spread() -> None:
    errors = rand(1, 16, 16).pow(8)
    even, uneven = (relative_noise(errors, 20.0, equalised=each) for each in (True, False))
    assert float(even.max()) != float(uneven.max())
    assert float((even > even.max() / 10).float().mean()) < float((uneven > uneven.max() / 10).float().mean())


@pytest.mark.parametrize("value", [0.0, 0.3, 1e6])
def test_constant_maps_have_no_contrast_and_no_nan(value: float) -> None:
    constant = torch.full((1, 4, 4), value)
    assert not equalise(constant).any() and not stretch(constant).any()
    assert torch.allclose(relative_noise(constant, 20.0), torch.full((1, 4, 4), 1 / 16))


@pytest.mark.parametrize(("rows", "columns"), [(3, 0), (0, 5), (2, 7)])
def test_shifted_errors_give_shifted_noise(rows: int, columns: int) -> None:
    errors = rand(2, 8, 8)

    def noise(each: Tensor, *, released: bool = False) -> Tensor:
        maps = relative_noise(each, 20.0)
        return scattered(maps, 3) if released else maps.unsqueeze(1).expand(-1, 3, -1, -1)

    moved = errors.roll((rows, columns), (1, 2))
    assert torch.equal(noise(moved), noise(errors).roll((rows, columns), (2, 3)))
    # The released layout puts noise elsewhere: this very check rejects it.
    assert not torch.allclose(noise(moved, released=True), noise(errors, released=True).roll((rows, columns), (2, 3)))


def test_the_released_layout_is_as_described() -> None:
    maps = torch.arange(4.0).reshape(1, 2, 2)
    assert scattered(maps, 3)[0].flatten().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_the_foreground_is_the_softmax_of_the_most_salient_pixels() -> None:
    saliency = torch.tensor([[[0.1, 0.9], [0.5, 0.2]]])
    expected = torch.softmax(torch.tensor([0.0, 0.9, 0.5, 0.0]) / 0.1, 0).reshape(1, 2, 2)
    assert torch.allclose(foreground_map(saliency, 0.5, 0.1), expected)
    flat = foreground_map(torch.zeros(1, 2, 2), 0.5, 0.1)
    assert torch.allclose(flat, torch.full((1, 2, 2), 0.25)), "no saliency: the same everywhere"


def test_the_foreground_gets_less_noise_and_the_complement_would_get_more() -> None:
    noise, saliency = torch.full((1, 4, 4), 1 / 16), torch.zeros(1, 4, 4)
    saliency[0, 1:3, 1:3] = 1.0
    inside = saliency.bool()
    right = reduce_foreground(noise, foreground_map(saliency, 0.25, 0.5), 0.5)
    assert float(right[inside].max()) < float(right[~inside].min())
    wrong = reduce_foreground(noise, softmax_map(1 - saliency, 0.5), 0.5)
    assert float(wrong[inside].min()) > float(wrong[~inside].max())


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 0.1), (0.3, 0.3), (0.9, 0.5), (1.0, 0.5)])
def test_the_weight_of_the_foreground_follows_the_training(progress: float, expected: float) -> None:
    assert foreground_weight(progress, 0.1, 0.5) == expected


def test_schedules() -> None:
    assert amplitude(0.19, 0.0, "increase") == 0.19
    assert amplitude(0.19, 1.0, "increase") == pytest.approx(0.19 * math.e)
    assert amplitude(0.19, 0.7, "fix") == 0.19
    for progress in (0.0, 0.25, 1.0):
        assert amplitude(0.19, progress, "decrease") == pytest.approx(amplitude(0.19, 1 - progress, "increase"))


def test_the_largest_noise_is_a_share_of_the_largest_value() -> None:
    images = 0.8 * rand(3, 1, 8, 8)
    noise = reduce_foreground(relative_noise(rand(3, 8, 8), 20.0), torch.full((3, 8, 8), 1 / 64), 0.1)
    found = scaled_noise(noise, images, 0.19)
    assert found.shape == (3, 1, 8, 8)
    assert torch.allclose(found.abs().amax((1, 2, 3)), 0.19 * images.amax((1, 2, 3)))


def test_no_positive_entry_does_not_explode() -> None:
    images = torch.ones(1, 1, 2, 2)
    # The paper's divisor, max(N4) = 1e-9, would give noise of 1e8.
    noise = torch.tensor([[[1e-9, -0.5], [-0.2, -0.1]]])
    assert torch.allclose(scaled_noise(noise, images, 0.2)[0, 0], torch.tensor([[4e-10, -0.2], [-0.08, -0.04]]))


def test_zero_maps_and_black_images_get_no_noise() -> None:
    assert not scaled_noise(torch.zeros(1, 2, 2), torch.ones(1, 1, 2, 2), 0.2).any()
    assert not scaled_noise(torch.ones(1, 2, 2), torch.zeros(1, 1, 2, 2), 0.2).any()
