"""MSE, PSNR and SSIM against hand-computed numbers and scikit-image."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import skimage.metrics
import torch
from torch import Tensor

from gradveil.errors import UsageError
from gradveil.metrics import (
    METRICS,
    PSNR_CAP,
    Unavailable,
    mean_squared_error,
    measure,
    peak_signal_to_noise,
    structural_similarity,
)

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "metrics.json").read_text())


# Held as Any: scikit-image has annotations on some functions only.
REFERENCE: Any = skimage.metrics.structural_similarity


def draw(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    original = torch.rand(shape, generator=generator, dtype=torch.float64)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (original + 0.2 * noise).clamp(0, 1), original


def test_mse_by_hand() -> None:
    original = torch.tensor([[[0.0, 1.0], [0.5, 0.5]], [[0.0, 0.0], [0.0, 0.0]]])
    reconstructed = torch.tensor([[[0.5, 1.0], [0.5, 0.0]], [[0.0, 0.0], [0.0, 0.2]]])
    assert mean_squared_error(reconstructed, original).tolist() == pytest.approx([0.125, 0.01])


@pytest.mark.parametrize(("error", "decibel"), [(1.0, 0.0), (0.1, 20.0), (0.01, 40.0), (0.001, 60.0), (1e-5, 60.0), (0.0, 60.0)])
def test_psnr_of_a_constant_error(error: float, decibel: float) -> None:
    value = peak_signal_to_noise(torch.full((1, 3, 4, 4), error, dtype=torch.float64), torch.zeros(1, 3, 4, 4))
    assert value.item() == pytest.approx(decibel, abs=1e-9)
    assert value.item() <= PSNR_CAP


def test_psnr_of_grey_is_the_floor_papers_forget() -> None:
    # A uniform random image has variance 1/12 around grey: 10 log10(12) = 10.79 dB without any attack.
    original = torch.rand((4, 3, 64, 64), generator=torch.Generator().manual_seed(3))
    values = peak_signal_to_noise(torch.full_like(original, 0.5), original)
    assert values.tolist() == pytest.approx([GOLDEN["psnr_of_grey_for_uniform"]["value"]] * 4, abs=0.15)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 11, 40), (6, 40), (1, 11), (2, 12, 13, 14)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ssim_equals_scikit_image(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    reconstructed, original = (value.to(dtype) for value in draw((2, *shape)))
    values = structural_similarity(reconstructed, original)
    for index in range(2):
        expected = REFERENCE(
            reconstructed[index].double().numpy(),
            original[index].double().numpy(),
            channel_axis=0,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=1.0,
        )
        assert values[index].item() == pytest.approx(expected, abs=1e-9)


def test_ssim_golden() -> None:
    y, x = torch.meshgrid(torch.arange(16.0, dtype=torch.float64), torch.arange(16.0, dtype=torch.float64), indexing="ij")
    original = 0.5 + 0.4 * torch.sin(0.7 * x + 0.3 * y)
    reconstructed = 0.5 + 0.3 * torch.sin(0.7 * x + 0.3 * y + 0.4)
    golden = GOLDEN["ssim_of_shifted_wave"]
    assert structural_similarity(reconstructed[None, None], original[None, None]).item() == pytest.approx(
        golden["value"], abs=golden["tolerance"]
    )


@pytest.mark.parametrize(("height", "width"), [(8, 8), (8, 20), (5, 2), (10, 3), (1, 1)])
def test_ssim_of_small_images_shrinks_the_window(height: int, width: int) -> None:
    reconstructed, original = draw((1, 1, height, width))
    x, y = reconstructed[0, 0].numpy(), original[0, 0].numpy()

    def taps(length: int) -> npt.NDArray[np.float64]:
        radius = (min(11, length) - 1) // 2
        weights = [math.exp(-(k * k) / 4.5) for k in range(-radius, radius + 1)]
        return np.array(weights) / sum(weights)

    window = np.outer(taps(height), taps(width))
    rows, columns = window.shape
    assert rows % 2 == 1 and columns % 2 == 1
    total = []
    for i in range(height - rows + 1):
        for j in range(width - columns + 1):
            a, b = x[i : i + rows, j : j + columns], y[i : i + rows, j : j + columns]
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a, var_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
            covariance = (window * (a - mean_a) * (b - mean_b)).sum()
            numerator = (2 * mean_a * mean_b + 1e-4) * (2 * covariance + 9e-4)
            total.append(numerator / ((mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4)))
    assert structural_similarity(reconstructed, original).item() == pytest.approx(float(np.mean(total)), abs=1e-12)


def test_ssim_says_why_a_table_has_none() -> None:
    with pytest.raises(Unavailable, match="neighbourhoods"):
        structural_similarity(torch.zeros(2, 5), torch.zeros(2, 5))


@pytest.mark.parametrize("name", ["mse", "psnr", "ssim", "lpips"])
@pytest.mark.parametrize(
    ("reconstructed", "original", "message"),
    [
        (torch.zeros(2, 3, 8, 8), torch.zeros(3, 3, 8, 8), "one reconstruction per original"),
        (torch.zeros(0, 3, 8, 8), torch.zeros(0, 3, 8, 8), "nothing to compare"),
        (torch.tensor(0.0), torch.tensor(0.0), "nothing to compare"),
        (torch.full((1, 3, 32, 32), math.nan), torch.zeros(1, 3, 32, 32), "3072 entries that are not finite"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "floating point"),
    ],
)
def test_bad_input_is_one_clear_sentence(name: str, reconstructed: Tensor, original: Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        METRICS.get(name)(reconstructed, original)


def test_measure_gives_the_reason_in_place_of_values() -> None:
    results = measure(torch.zeros(2, 1, 8, 8), torch.ones(2, 1, 8, 8))
    assert set(results) == set(METRICS.names())
    missing, values = results["lpips"], results["mse"]
    assert isinstance(missing, Unavailable) and "32 x 32" in missing.reason
    assert isinstance(values, Tensor) and values.tolist() == [1.0, 1.0]
    assert set(measure(torch.zeros(1, 4), torch.zeros(1, 4), ["psnr"])) == {"psnr"}


def test_an_unknown_metric_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'psnr'"):
        METRICS.get("pnsr")


def test_cards_are_plain_json() -> None:
    cards = {card.name: card.as_dict() for card in METRICS.cards()}
    assert json.loads(json.dumps(cards, allow_nan=False))["psnr"]["higher_is_better"] is True
