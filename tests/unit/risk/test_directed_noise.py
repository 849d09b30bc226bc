"""Noise along singular vectors enters Theorems 2 and 3 by its variance along each of them."""

from __future__ import annotations

import pytest
import torch

from gradveil.defenses import build_defense
from gradveil.errors import UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.risk.exposure import Assessment, assess, defended_release
from gradveil.risk.invloss import RankVariances, inversion_loss
from gradveil.spectra.jacobians import gradient_jacobian
from gradveil.spectra.spectrum import spectrum
from gradveil.study.local_training import TrainingSettings

SHAPE = (1, 8, 8)
BATCH = Batch(torch.rand((2, *SHAPE), generator=Seed(1).generator("inputs")), torch.tensor([0, 2]))


def learner(settings: TrainingSettings | None = None) -> Learner:
    model = build_model("lenet", input_shape=SHAPE, classes=3, seed=Seed(0))
    return Learner.of(model, loss_by_name("cross_entropy"), settings)


def scored(spelling: str, form: str = "inverse", own: Learner | None = None) -> Assessment:
    return assess(own or learner(), BATCH, build_defense(spelling), alpha=0.9, noise_form=form)


@pytest.mark.parametrize("form", ["paper", "inverse"])
@pytest.mark.parametrize(
    ("directed", "even"),
    [
        ("invl_dnp(delta=0.09, share=1.0)", "data_noise(std=0.3)"),
        ("invl_gnp(delta=0.01, share=1.0, spared=0.0)", "gaussian_noise(std=0.1)"),
        ("invl_gnp(delta=0.1, variance=False, share=1.0, spared=0.0)", "gaussian_noise(std=0.1)"),
    ],
)
def test_noise_in_all_directions_is_even_noise(directed: str, even: str, form: str) -> None:
    for left, right in zip(scored(directed, form).records, scored(even, form).records, strict=True):
        assert left.score == pytest.approx(right.score, rel=1e-6)


@pytest.mark.parametrize(
    ("directed", "even"), [("invl_dnp(delta=0.09)", "data_noise(std=0.3)"), ("invl_gnp(delta=1e-4)", "gaussian_noise(std=0.01)")]
)
def test_less_noise_protects_less_and_more_than_nothing(directed: str, even: str) -> None:
    none, guided, full = (scored(each) for each in ("none", directed, even))
    assert none.mean_score < guided.mean_score < full.mean_score
    assert not guided.notes


def test_parts_of_a_chain_add_their_variances() -> None:
    both = scored("data_noise(std=0.3) + invl_dnp(delta=0.07, share=1.0)")
    assert both.mean_score == pytest.approx(scored("data_noise(std=0.4)").mean_score, rel=1e-6)


def test_other_parts_of_a_chain_take_the_ordinary_road() -> None:
    release = defended_release(learner(), BATCH.inputs[0], BATCH.targets[0], build_defense("clipping + invl_dnp"), Seed(0))
    assert release.directed == ()
    assert release.notes


def test_several_local_steps_are_noted() -> None:
    own = learner(TrainingSettings(shares="weights", local_steps=2, learning_rate=0.1))
    assert any("several steps" in note for note in scored("invl_gnp(delta=1e-4)", own=own).notes)


def test_a_public_basis_is_taken_as_the_records_own_and_that_is_noted() -> None:
    found, own = scored("invl_gnp(delta=1e-4, centres='public')"), scored("invl_gnp(delta=1e-4)")
    assert found.mean_score == own.mean_score
    assert any("public" in note for note in found.notes) and not own.notes


def test_embeddings_are_scored_alike() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.Sigmoid())
    own = EmbeddingLearner.of_bottom(model, loss_by_name("cross_entropy"))
    release = defended_release(own, BATCH.inputs[0], BATCH.targets[0], build_defense("invl_enp(delta=0.04)"), Seed(0))
    measured = spectrum(release.jacobian)
    found = release.noise_on("shared", measured)
    assert isinstance(found, RankVariances)
    noisy = (found.values > 0).nonzero().flatten()
    assert float(found.values.max()) == pytest.approx(0.04) and float(found.values.min()) == 0
    assert 0 < int(noisy[0]) < int(noisy[-1]) < 20 and len(noisy) == int(noisy[-1] - noisy[0]) + 1


def test_variances_must_fit_the_spectrum() -> None:
    measured = spectrum(gradient_jacobian(learner(), BATCH.inputs[0], BATCH.targets[0]), mode="dense")
    with pytest.raises(UsageError, match="variances for"):
        inversion_loss(measured, data_noise=RankVariances(torch.ones(3)))
    with pytest.raises(UsageError, match="variances for"):
        inversion_loss(measured, data_noise=RankVariances(-torch.ones(len(measured.values))))
