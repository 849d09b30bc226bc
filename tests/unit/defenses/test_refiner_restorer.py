"""The filter an attacker learns from public pictures: better than a denoiser, made once, and left out where it cannot be made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.client.update import run_client
from gradveil.data import public_images
from gradveil.defenses import build_defense
from gradveil.defenses.refiner import restorer as refiner_restorer
from gradveil.defenses.refiner.adversary import NOISE, deblend
from gradveil.defenses.refiner.defense import Refiner
from gradveil.defenses.refiner.restorer import LEAST_SIDE, fit_restorer, public_pairs, restorer_for, with_contrast
from gradveil.randomness import Seed
from gradveil.records import Batch, Reconstruction
from tests.unit.defenses.test_refiner import Roughness, make_learner, refined
from tests.unit.defenses.test_refiner_adversary import error, observe

SHAPE = (3, 16, 16)


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> Roughness:
    """Put a network that needs no training in the place of the trained one, and forget other tests' filters."""
    judge = Roughness().eval().requires_grad_(False)
    monkeypatch.setattr("gradveil.defenses.refiner.defense.evaluation_network", lambda name, like: judge.to(like))
    refiner_restorer._FILTERS.clear()
    return judge


def pictures(count: int, name: str, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return public_images(shape, count, Seed(0).child(name))


def one_picture(shape: tuple[int, ...] = SHAPE) -> Batch:
    return Batch(pictures(1, "client", shape), torch.tensor([1]))


def test_the_filter_is_the_ridge_solution_and_undoes_a_known_blend() -> None:
    clean = pictures(12, "known")
    # An affine change of each pixel has an exact inverse among the filters; what is left is the ridge's shrinkage.
    found = fit_restorer(clean, 0.8 * clean + 0.1).clean(0.8 * pictures(4, "other") + 0.1)
    assert error(found, pictures(4, "other")) < 1e-3
    seen = 0.5 * clean + 0.5 * torch.rand(clean.shape, generator=torch.Generator().manual_seed(0))
    fitted = fit_restorer(clean, seen, most_contrast=1.0).coefficients
    rows = torch.cat([refiner_restorer._patches(image) for image in seen.split(1)]).double()
    wanted = clean.permute(0, 2, 3, 1).reshape(-1, 3).double()
    ridge = refiner_restorer.RIDGE * (rows.T @ rows).diagonal().mean()
    assert torch.allclose(rows.T @ (rows @ fitted - wanted) + ridge * fitted, torch.zeros_like(fitted), atol=1e-6)


def blended(clean: Tensor, share: float, seed: int) -> Tensor:
    return (1 - share) * clean + share * torch.rand(clean.shape, generator=torch.Generator().manual_seed(seed))


def test_predictions_get_the_contrast_of_the_truth_and_keep_their_mean() -> None:
    clean = pictures(12, "known")
    seen = blended(clean, 0.8, 0)
    rows = torch.cat([refiner_restorer._patches(image) for image in seen.split(1)]).double()
    brought = rows @ fit_restorer(clean, seen).coefficients
    pale = rows @ fit_restorer(clean, seen, most_contrast=1.0).coefficients
    wanted = clean.double().var((0, 2, 3), correction=0)
    assert (pale.var(0, correction=0) < 0.9 * wanted).all()
    assert torch.allclose(brought.var(0, correction=0), wanted, rtol=1e-6)
    assert torch.allclose(brought.mean(0), pale.mean(0), atol=1e-9)


def test_contrast_is_not_restored_to_what_little_is_known_of() -> None:
    features = torch.cat([torch.randn((500, 1), generator=torch.Generator().manual_seed(0)), torch.ones((500, 1))], 1).double()
    gram, pale = features.T @ features, torch.tensor([[0.01], [0.4]], dtype=torch.float64)
    brought = with_contrast(pale, gram, torch.ones(1, dtype=torch.float64))
    assert torch.allclose(brought[0], 2 * pale[0])
    assert torch.allclose((features @ brought).mean(), (features @ pale).mean())
    strong = with_contrast(pale, gram, torch.full((1,), 1e-6, dtype=torch.float64))
    assert torch.allclose(strong, pale)
    flat = torch.full((4, 3, 16, 16), 0.3)
    assert torch.allclose(fit_restorer(flat, flat).clean(flat), flat, atol=1e-2)


def test_with_its_contrast_more_pictures_are_told_from_others() -> None:
    clean, others = pictures(24, "known"), pictures(200, "others")
    seen = blended(others, 0.7, 1)
    told = {}
    for most in (1.0, 2.0):
        found = fit_restorer(clean, blended(clean, 0.7, 0), most).clean(seen)
        told[most] = int((torch.cdist(found.flatten(1), others.flatten(1)).argmin(1) == torch.arange(200)).sum())
    assert told[2.0] > 1.2 * told[1.0] > 50


@pytest.mark.parametrize("defense", [Refiner(), Refiner(balance=1000.0), Refiner(blend=0.8)], ids=["paper", "privacy", "noise"])
def test_the_filter_beats_the_denoiser_on_pictures_it_never_saw(defense: Refiner) -> None:
    learner, clean = make_learner(), pictures(8, "held out")
    public = pictures(32, "public")
    robust = torch.cat([refined(defense, learner, Batch(x, torch.tensor([2])), seed=i) for i, x in enumerate(clean.split(1))])
    made = fit_restorer(public, public_pairs(defense, public, learner, 1, 4, torch.tensor([0])))
    assert error(made.clean(robust), clean) < 0.8 * error(deblend(robust, defense.blend), clean)


@pytest.mark.parametrize("defense", [Refiner(steps=4), Refiner(epsilon=1e6, steps=4)], ids=["exact", "ball"])
def test_the_attacker_filters_with_public_pictures_and_deblends_without(defense: Refiner) -> None:
    learner, batch = make_learner(), one_picture()
    observation, robust = observe(defense, learner, batch)
    variables = {NOISE: (2 * robust - batch.inputs)[None]}
    found = robust if defense.epsilon is None else batch.inputs
    guess = Reconstruction(found, batch.targets, "truth", variables=variables)

    def finished(public: Tensor | None) -> Tensor:
        return observation.adversary.finish(guess, observation.replace(public=public)).inputs

    plain = deblend(robust, 0.5)
    assert torch.allclose(finished(None), plain, atol=1e-5)
    assert torch.allclose(finished(pictures(30, "few")), plain, atol=1e-5)
    assert torch.allclose(finished(pictures(32, "large", (3, 32, 32))), plain, atol=1e-5)
    spoilt = pictures(32, "public")
    spoilt[3, 0, 2, 2] = torch.nan
    assert torch.allclose(finished(spoilt), plain, atol=1e-5)
    with_public = finished(pictures(32, "public"))
    assert not torch.allclose(with_public, plain, atol=1e-2)
    assert error(with_public, batch.inputs) < error(plain, batch.inputs)
    assert with_public.min() >= 0 and with_public.max() <= 1


def test_small_pictures_and_tables_have_no_filter() -> None:
    defense = Refiner(balance=0.0)
    for shape in ((3, LEAST_SIDE - 1, LEAST_SIDE - 1), (1, 6)):
        learner = make_learner("mlp(hidden=5)", shape)
        observation, robust = observe(defense, learner, Batch(torch.full((1, *shape), 0.4), torch.tensor([0])))
        observation = observation.replace(public=torch.full((4000, *shape), 0.5))
        assert restorer_for(defense, observation, robust, torch.tensor([0])) is None


def test_one_filter_serves_a_round_and_another_model_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*given: Any) -> Tensor:
        calls.append(given)
        return public_pairs(*given)

    monkeypatch.setattr(refiner_restorer, "public_pairs", counted)
    defense, batch, public = Refiner(steps=2), one_picture(), pictures(32, "public")
    observation, robust = observe(defense, make_learner(), batch)
    observation = observation.replace(public=public)
    state = torch.get_rng_state()
    first, again = (restorer_for(defense, observation, robust, batch.targets) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first is not None and first is again and len(calls) == 1
    refiner_restorer._FILTERS.clear()
    afresh = restorer_for(defense, observation, robust, batch.targets)
    assert afresh is not None and torch.equal(afresh.coefficients, first.coefficients)
    learner = make_learner("lenet(activation='relu')")
    other = restorer_for(defense, observation.replace(learners=(learner,)), robust, batch.targets)
    stronger = restorer_for(Refiner(steps=2, blend=0.7), observation, robust, batch.targets)
    assert other is not None and stronger is not None and len(calls) == 4
    assert not torch.equal(other.coefficients, first.coefficients)
    assert not torch.equal(stronger.coefficients, first.coefficients)


def test_pairs_are_made_as_clients_make_them() -> None:
    defense, learner, public = Refiner(steps=3), make_learner(minibatch=2, local_steps=1), pictures(6, "public")
    made = public_pairs(defense, public, learner, 2, 4, torch.tensor([0, 1]))
    seed = Seed(0).child("refiner's restorer").child(1)
    sent = run_client(learner, Batch(public[2:4], torch.tensor([2, 3])), defense, seed)
    assert torch.equal(made[2:4], sent.trained_batch.inputs)


def test_an_adapted_model_is_at_the_mean_of_what_it_draws() -> None:
    learner = make_learner().replace(noise={"drawn": torch.ones((1, 1, 3))})
    seen: list[torch.Size] = []

    class Watching(Refiner):
        def protect_batch(self, batch: Batch, view: Any, state: Any) -> Any:
            seen.append(view.learner.noise["drawn"].shape)
            assert not view.learner.noise["drawn"].any()
            return batch, state

    public_pairs(Watching(steps=2), pictures(4, "public"), learner, 2, 4, torch.tensor([0]))
    assert seen == [torch.Size((1, 2, 3))] * 2


def test_a_chain_filters_too() -> None:
    batch, public = one_picture(), pictures(32, "public")
    observation, robust = observe(Refiner(steps=2), make_learner(), batch)
    observation = observation.replace(public=public)
    guess = Reconstruction(robust, batch.targets, "truth")
    alone, chained = (build_defense(spelling).adversary() for spelling in ("refiner(steps=2)", "refiner(steps=2) + clipping"))
    expected = alone.finish(guess, observation).inputs
    assert torch.equal(chained.finish(guess, observation).inputs, expected)
    assert not torch.equal(expected, deblend(robust, 0.5))
