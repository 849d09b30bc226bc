"""The mathematics of exposure: against closed forms of the linear-Gaussian case, and where it says nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gradveil.audit.sensitivity import first_among
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.risk.linear_bayes import Linearised, decibels, posterior_error
from gradveil.risk.listed import named_first
from gradveil.risk.prior import Prior, public_prior
from gradveil.spectra.along import grams_along, layout_of
from gradveil.spectra.jacobians import jacobian_of

SIZE = 6


def normal(*shape: int, name: str = "draws") -> Tensor:
    return torch.randn(shape, generator=Seed(3).generator(name), dtype=torch.float64)


def gaussian_prior(rank: int = SIZE) -> Prior:
    basis, _ = torch.linalg.qr(normal(SIZE, SIZE, name="basis"))
    variances = torch.tensor([2.0, 1.0, 0.5, 0.2, 0.1, 0.05], dtype=torch.float64)
    return Prior(normal(SIZE, name="mean"), basis[:, :rank], variances[:rank], torch.zeros(0, SIZE, dtype=torch.float64), 100)


def linearised(matrix: Tensor, point: Tensor, prior: Prior) -> Linearised:
    away = point - prior.mean
    moved = torch.cat([prior.basis.T, away.unsqueeze(0)]) @ matrix.T
    return Linearised({"shared": moved @ moved.T}, prior.basis.T @ away, float(away.square().sum()), SIZE)


def mean_error(matrix: Tensor, std: float, *, data_noise: float = 0.0, count: int = 800) -> float:
    """Return the mean over x ~ N(μ, Σ)."""
    prior = gaussian_prior()
    points = prior.mean + (normal(count, SIZE, name="points") * prior.variances.sqrt()) @ prior.basis.T
    noise = {"shared": std**2}
    errors = [posterior_error(linearised(matrix, x, prior), prior, noise, data_noise=data_noise) for x in points]
    return sum(errors) / count


@pytest.mark.parametrize("outputs", [3, 10])
@pytest.mark.parametrize("std", [0.01, 1.0])
@pytest.mark.parametrize("data_noise", [0.0, 0.7])
def test_the_mean_over_the_prior_is_the_trace_of_the_posterior_covariance(outputs: int, std: float, data_noise: float) -> None:
    prior, matrix = gaussian_prior(), normal(outputs, SIZE, name="matrix")
    covariance = ((prior.basis * prior.variances) @ prior.basis.T).numpy()
    A = matrix.numpy()
    clutter = std**2 * np.eye(outputs) + data_noise**2 * A @ A.T
    posterior = np.linalg.inv(np.linalg.inv(covariance) + A.T @ np.linalg.inv(clutter) @ A)
    assert mean_error(matrix, std, data_noise=data_noise) == pytest.approx(float(np.trace(posterior)) / SIZE, rel=0.06)


def test_scale_noise_and_rank_of_the_release_matter_and_its_rotation_does_not() -> None:
    prior, matrix = gaussian_prior(), normal(10, SIZE, name="matrix")
    point = prior.mean + prior.basis @ (prior.variances.sqrt() * normal(SIZE, name="z"))

    def error(release: Tensor, std: float = 0.1) -> float:
        return posterior_error(linearised(release, point, prior), prior, {"shared": std**2})

    turned, _ = torch.linalg.qr(normal(10, 10, name="turn"))
    assert error(turned @ matrix) == pytest.approx(error(matrix), rel=1e-9)
    assert error(0.1 * matrix) > 1.5 * error(matrix) and error(0.1 * matrix) == pytest.approx(error(matrix, 1.0), rel=1e-9)
    assert error(matrix, 0.01) < error(matrix) < error(matrix, 1.0) < error(matrix, 100.0)
    assert error(matrix[:2]) > 1.3 * error(matrix[:4]) > 3 * error(matrix)
    null = float((point - prior.mean).square().mean())
    assert error(matrix, 1e6) == pytest.approx(null, rel=1e-6) and error(matrix, 1e-6) < 1e-9


def test_variance_outside_the_rank_is_error_that_stays() -> None:
    prior = gaussian_prior(rank=4)
    point = prior.mean + prior.basis @ prior.variances.sqrt() + 0.3 * gaussian_prior().basis[:, 5]
    error = posterior_error(linearised(torch.eye(SIZE, dtype=torch.float64), point, prior), prior, {"shared": 1e-10})
    assert error == pytest.approx(0.09 / SIZE, rel=1e-4)


def test_noise_of_one_layer_hides_that_layer() -> None:
    prior, matrix = gaussian_prior(), normal(10, SIZE, name="matrix")
    point = prior.mean + prior.basis @ prior.variances.sqrt()
    jacobian = jacobian_of(lambda x: {"a.weight": matrix[:5] @ x, "a.bias": matrix[5:7] @ x, "b": matrix[7:] @ x}, point)
    layout = layout_of(jacobian)
    assert layout.sizes == {"a": 7, "b": 3}
    away = point - prior.mean
    directions = torch.cat([prior.basis.T, away.unsqueeze(0)])
    grams = grams_along(jacobian, directions, layout)
    for piece in (1, 8 * 7 * 4):  # the release in pieces of one and of a few values, held one at a time
        pieced = grams_along(jacobian, directions, layout, most_bytes=piece)
        assert all(torch.allclose(pieced[name], gram) for name, gram in grams.items())
    own = Linearised(grams, prior.basis.T @ away, float(away.square().sum()), SIZE)
    only_a = posterior_error(linearised(matrix[:7], point, prior), prior, {"shared": 0.01})
    assert posterior_error(own, prior, {"a": 0.01, "b": 1e12}) == pytest.approx(only_a, rel=1e-6)


def test_public_records_make_the_prior_they_are_drawn_from() -> None:
    truth = gaussian_prior()
    drawn = truth.mean + (normal(6000, SIZE, name="public") * truth.variances.sqrt()) @ truth.basis.T
    found = public_prior(drawn.reshape(-1, 2, 3), like=drawn[:4].reshape(-1, 2, 3), rank=3)
    assert found.rank == 3 and found.records == 6000 and found.outside.shape == (8, SIZE)
    assert torch.allclose(found.variances, truth.variances[:3], rtol=0.1)
    assert float((found.basis.T @ truth.basis[:, :1]).norm()) > 0.99
    assert torch.allclose(found.outside @ found.basis, torch.zeros(8, 3, dtype=torch.float64), atol=1e-9)
    assert 0.8 < found.kept < 1 and public_prior(drawn, like=drawn[:4]).rank == SIZE


def test_random_starts_find_the_directions_of_a_whole_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = normal(300, 60) * torch.linspace(3, 0.1, 60, dtype=torch.float64)
    whole = public_prior(drawn, like=drawn[:2], rank=10)
    monkeypatch.setattr("gradveil.risk.prior.EXACT", 1)
    started = public_prior(drawn, like=drawn[:2], rank=10)
    assert torch.allclose(started.variances, whole.variances, rtol=1e-3)
    assert float((started.basis.T @ whole.basis).norm()) == pytest.approx(math.sqrt(10), rel=1e-3)


@pytest.mark.parametrize(
    ("public", "options", "words"),
    [
        (torch.rand(100, 1, 3, 3), {}, r"shape \(1, 3, 3\) and the scored ones \(1, 4, 4\)"),
        (torch.rand(5, 1, 4, 4), {}, "at least 16 public records, and there are 5"),
        (255 * torch.rand(100, 1, 4, 4), {}, "scale them alike"),
        (torch.full((100, 1, 4, 4), 0.5), {}, "are alike"),
        (torch.rand(100, 1, 4, 4) / torch.zeros(()), {}, "not finite"),
        (torch.rand(100, 1, 4, 4), {"rank": 18}, "rank 18 is out of reach: 16 values a record carry at most 16 directions"),
        (torch.rand(17, 1, 4, 4), {"rank": 16}, "rank 16 is out of reach: 17 public records carry at most 15 directions"),
    ],
)
def test_public_records_that_do_not_fit_are_one_sentence(public: Tensor, options: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        public_prior(public, like=torch.rand(3, 1, 4, 4), rank=options.get("rank"))


def test_few_public_records_get_few_directions() -> None:
    assert public_prior(torch.rand(20, 50), like=torch.rand(2, 50)).rank == 9


@pytest.mark.parametrize("size", [2, 256])
@pytest.mark.parametrize("d", [0.0, 1.0, 3.0])
def test_a_list_of_equal_distances_is_the_textbook_integral(size: int, d: float) -> None:
    assert named_first([d * math.sqrt(2)] * 3, size) == pytest.approx(first_among(size, d), abs=1e-6)


def test_the_list_is_what_likelihoods_reach() -> None:
    """Candidates in random directions of many values: the share of first places of the likelihood, and nearer ones count."""
    generator = np.random.default_rng(0)
    releases, std, hits, told = generator.normal(size=(64, 400)), 7.0, [], []
    for i in range(64):
        seen = releases[i] + std * generator.normal(size=(40, 1, 400))
        hits += list(((seen - releases[None]) ** 2).sum(2).argmin(1) == i)
        others = np.delete(releases, i, axis=0)
        told.append(named_first(np.linalg.norm(others - releases[i], axis=1) / std, 64))
    assert 0.2 < np.mean(told) < 0.9 and np.mean(told) == pytest.approx(np.mean(hits), abs=0.03)
    assert named_first([0.0] * 5, 256) == pytest.approx(1 / 256, rel=1e-3) and named_first([math.inf, 0.0], 2) == pytest.approx(
        0.75
    )


def test_decibels() -> None:
    assert decibels(0.1, 0.05) == pytest.approx(10 * math.log10(2)) and decibels(1.0, 0.0) == 3000


def test_classes_have_means_of_their_own_and_directions_are_those_within_them() -> None:
    """Two classes far apart along one direction, of which nothing is left once the label is known."""
    labels = torch.arange(400) % 2
    apart = torch.zeros(400, SIZE, dtype=torch.float64)
    apart[:, 0] = 8.0 * labels
    public = normal(400, SIZE, name="within") * torch.tensor([0.1, 3.0, 0.5, 0.3, 0.2, 0.1], dtype=torch.float64) + apart
    blind, told = (public_prior(public, like=public[:2], rank=1, labels=each) for each in (None, labels))
    assert not blind.means and abs(float(blind.basis[0, 0])) > 0.95 and torch.equal(blind.mean_of(1), blind.mean)
    assert abs(float(told.basis[1, 0])) > 0.99 and torch.equal(told.mean, blind.mean)
    held = torch.arange(400) % 10 == 9  # kept from the fit
    for label in (0, 1):
        assert torch.allclose(told.mean_of(label), public[(labels == label) & ~held].mean(0))
    assert torch.equal(told.mean_of(None), told.mean) and torch.equal(told.mean_of(7), told.mean)
    assert told.kept > 0.9 and float(told.outside.square().sum(1).mean()) < 2.0


def test_a_class_of_few_records_is_expected_where_all_are() -> None:
    labels = torch.tensor([0] * 90 + [1] * 10)
    public = torch.rand(100, SIZE, generator=Seed(4).generator("public"), dtype=torch.float64)
    found = public_prior(public, like=public[:2], rank=2, labels=labels)
    assert set(found.means) == {0}
    assert not public_prior(public, like=public[:2], rank=2, labels=torch.rand(100)).means
