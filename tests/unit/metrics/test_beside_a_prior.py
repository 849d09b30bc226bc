"""RDLV in both forms and the noise fraction: by hand, against scikit-image, and where they mislead."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import skimage.metrics
import torch
from torch import Tensor, nn

from gradveil.errors import UsageError
from gradveil.metrics import (
    METRICS,
    MetricCard,
    Unavailable,
    measure,
    noise_fraction,
    predicted_noise,
    predicted_noise_by,
    relative_leakage,
    relative_leakage_nvflare,
)
from gradveil.testing.metrics import check_metric

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "metrics_shadow.json").read_text())
REFERENCE: Any = skimage.metrics.structural_similarity


def waves() -> tuple[Tensor, Tensor, Tensor]:
    """Return a picture, a noisy version and a prior, always the same."""
    grid = torch.linspace(0, 1, 24, dtype=torch.float64)
    original = (0.5 + 0.4 * torch.outer(torch.sin(9 * grid), torch.cos(7 * grid)))[None, None]
    noise = torch.sin(torch.arange(24 * 24, dtype=torch.float64) ** 2).reshape(1, 1, 24, 24)
    prior = (0.5 + 0.2 * torch.outer(torch.sin(4 * grid), torch.cos(3 * grid)))[None]
    return (original + 0.1 * noise).clamp(0, 1), original, prior


def ssim(left: Tensor, right: Tensor) -> float:
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1}
    return float(REFERENCE(left.squeeze().numpy(), right.squeeze().numpy(), **options))


def test_both_forms_against_scikit_image() -> None:
    found, original, prior = waves()
    paper = (ssim(original, found) - ssim(found, prior)) / ssim(found, prior)
    released = (ssim(original, found) - ssim(original, prior)) / ssim(original, prior)
    # skimage averages a border of five pixels away that a Gaussian cut at 3.5 sigma reaches; the two agree to rounding.
    assert relative_leakage(found, original, prior=prior).item() == pytest.approx(paper, rel=1e-6)
    assert relative_leakage_nvflare(found, original, prior=prior).item() == pytest.approx(released, rel=1e-6)


@pytest.mark.parametrize("name", ["rdlv", "rdlv_nvflare"])
def test_golden(name: str) -> None:
    found, original, prior = waves()
    golden = GOLDEN[name]
    assert METRICS.get(name)(found, original, prior=prior).item() == pytest.approx(golden["value"], abs=golden["tolerance"])


def test_the_papers_form_can_reward_a_worse_reconstruction() -> None:
    """Which is why its card says that it must not rank anything, and the released form stands beside it."""
    _, original, prior = waves()
    noise = torch.randn(original.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    little, much = ((original + std * noise).clamp(0, 1) for std in (0.05, 0.3))
    assert relative_leakage(much, original, prior=prior) > relative_leakage(little, original, prior=prior)
    assert relative_leakage_nvflare(much, original, prior=prior) < relative_leakage_nvflare(little, original, prior=prior)
    assert not METRICS.card("rdlv").ordered and METRICS.card("rdlv_nvflare").ordered


def test_the_prior_itself_leaks_nothing() -> None:
    _, original, prior = waves()
    assert relative_leakage_nvflare(prior[None], original, prior=prior).item() == pytest.approx(0, abs=1e-12)
    assert relative_leakage(prior[None], original, prior=prior).item() < 0


def test_a_prior_unlike_everything_does_not_divide_by_zero() -> None:
    _, original, _ = waves()
    values = relative_leakage_nvflare(original, original, prior=1 - original[0])
    assert 0 < values.item() <= 99


def test_measure_says_what_is_missing_and_hands_in_what_is_there() -> None:
    found, original, prior = waves()
    without = measure(found, original, ["rdlv", "psnr"])
    assert isinstance(without["rdlv"], Unavailable) and "prior" in without["rdlv"].reason
    assert isinstance(without["psnr"], Tensor)
    assert isinstance(measure(found, original, ["rdlv"], {"prior": prior})["rdlv"], Tensor)
    with pytest.raises(UsageError, match="give one like them"):
        relative_leakage(found, original, prior=prior[:, :5])


class Roughness(nn.Module):
    """Stands in for the evaluation network: a weight, and the share of a picture's variance between neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(4.0))

    def forward(self, images: Tensor) -> Tensor:
        """Return one value per picture, from 0 to 1."""
        images = nn.functional.interpolate(images, size=(32, 32), mode="nearest")
        return (self.scale * images.diff(dim=-1).square().flatten(1).mean(1)).clamp(0, 1)


def test_the_noise_fraction_keeps_the_contract_with_any_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_fraction, "_network", Roughness)
    check_metric(predicted_noise, METRICS.card("noise_fraction"))


def test_the_contract_finds_a_blind_metric_that_peeks() -> None:
    card = MetricCard(
        name="peeks", summary="Looks.", cost="-", weakness="-", higher_is_better=False, perfect=0.0, reference=False
    )
    with pytest.raises(AssertionError, match="looks at the original"):
        check_metric(METRICS.get("mse"), card)


def test_without_weights_nothing_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradveil.networks.store", None)
    with pytest.raises(Unavailable, match="evaluation-32"):
        predicted_noise(torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8))


def test_only_pictures_have_noise_fractions() -> None:
    assert predicted_noise_by(Roughness(), torch.zeros(2, 1, 8, 8)).tolist() == [0, 0]
    with pytest.raises(Unavailable, match="grey and colour"):
        predicted_noise_by(Roughness(), torch.zeros(2, 6, 40))
