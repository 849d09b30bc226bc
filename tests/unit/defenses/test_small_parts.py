"""Small functions of defenses on numbers by hand: percentiles, denoising, orthogonal directions, bases and what is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from gradveil.defenses import build_defense, censor, percentile_noise
from gradveil.defenses.invl import gnp, singular_noise
from gradveil.defenses.parts import denoising
from gradveil.defenses.refiner.refinement import FLOOR, Refinement, project_on_ball
from gradveil.randomness import Seed
from gradveil.records import Update
from gradveil.testing.defenses_scene import Scene
from tests.unit.stand_ins import fake, noted


@pytest.mark.parametrize("percentile", [0.0, 1.0, 37.5, 50.0, 90.0, 99.9, 100.0])
@pytest.mark.parametrize("zeros", [0, 4])
def test_percentiles_of_what_is_not_zero_are_interpolated(percentile: float, zeros: int) -> None:
    update = {"a": torch.tensor([[3.0, -1.0], [0.5, -7.0]]), "b": torch.zeros(zeros), "c": torch.tensor([2.0, 11.0])}
    wanted = np.percentile([3.0, 1.0, 0.5, 7.0, 2.0, 11.0], percentile)
    assert float(percentile_noise.magnitude_percentile(update, percentile)) == pytest.approx(float(wanted))
    alone = {"a": torch.tensor([0.0, -5.0])}
    assert float(percentile_noise.magnitude_percentile(alone, percentile)) == 5.0
    assert float(percentile_noise.magnitude_percentile({"a": torch.zeros(3)}, percentile)) == 0.0
    assert float(percentile_noise.magnitude_percentile({}, percentile)) == 0.0


def test_images_are_denoised_one_by_one_and_many_channels_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(denoising, "_denoise_one", lambda image, std: noted(asked, (tuple(image.shape), std)) or image + std)
    for channels in (1, denoising.MOST_CHANNELS, denoising.MOST_CHANNELS + 1):
        asked.clear()
        images = torch.rand(2, channels, 3, 3)
        assert torch.allclose(denoising.denoise_images(images, 0.25), images + 0.25)
        single = channels > denoising.MOST_CHANNELS
        assert asked == [((1, 1 if single else channels, 3, 3), 0.25)] * (2 * channels if single else 2)
    asked.clear()
    for images, std in ((torch.rand(2, 1, 3, 3), 0.0), (torch.rand(2, 3), 0.25), (torch.rand(0, 1, 3, 3), 0.25)):
        assert denoising.denoise_images(images, std) is images and not asked


def test_noise_in_a_subspace_is_taken_off_in_passes_with_less_noise_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(denoising, "denoise_images", lambda image, level: noted(asked, level) or 0.5 * image)
    image = torch.tensor([[[[0.8, 0.4], [0.2, 0.6]]]])
    basis = torch.eye(4)[1:3]
    found = denoising.denoise_in_subspace(image.repeat(2, 1, 1, 1), [basis, basis[:0]], 0.5)
    level = 0.5 * math.sqrt(2 / 4)
    assert asked == pytest.approx([level * denoising.SHRINKS**number for number in range(denoising.PASSES)])
    half = 0.5**denoising.PASSES
    assert torch.allclose(found[0], torch.tensor([[[0.8, 0.4 * half], [0.2 * half, 0.6]]]))
    assert torch.equal(found[1], image[0]), "nothing to take off where there is no direction"


def test_nearly_parallel_draws_end_orthogonal_with_the_length_of_the_gradient() -> None:
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-3
    other = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = torch.stack([gradient * 1e15 + other, other, gradient * 1e18 + other])
    found = censor.orthogonal_directions(drawn, gradient)
    unit = gradient / gradient.norm()
    assert torch.allclose(found.norm(dim=1), gradient.norm().expand(3))
    assert float((found @ unit).abs().max()) < 1e-13 * float(gradient.norm())
    plain = other - (other @ unit) * unit
    assert torch.allclose(found[1], plain / plain.norm() * gradient.norm())
    assert not bool(censor.orthogonal_directions(torch.ones(2, 1), torch.ones(1)).any())
    assert not bool(censor.orthogonal_directions(torch.ones(2, 3), torch.zeros(3)).any())


@pytest.mark.parametrize(("centres", "seed"), [("own", Seed(9)), ("public", Seed(0))])
def test_a_basis_is_made_at_the_centres_with_the_client_s_seed_or_everybody_s(
    centres: str, seed: Seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def stop(*given: Any, **more: Any) -> None:
        raise Asked(given, more)

    defense: Any = build_defense(f"invl_gnp(share=0.8, spared=0.1, rule='count', mode='leading', most=7, centres='{centres}')")
    monkeypatch.setattr(
        gnp.InvLGNP if hasattr(gnp, "InvLGNP") else type(defense), "centres_of", lambda self, batch, view: ("x", "y")
    )
    monkeypatch.setattr(gnp, "average_jacobian", lambda *given: ("jacobian", *given))
    monkeypatch.setattr(gnp, "noise_range", stop)
    scene = Scene.of(defense)
    view = scene.view().replace(seed=Seed(9), raw_batch=scene.batch, public=scene.batch.inputs)
    with pytest.raises(Asked) as stopped:
        defense._made(view)
    (jacobian,), more = stopped.value.args
    assert jacobian == ("jacobian", view.learner, "x", "y")
    assert more == {"low": 0.1, "high": 0.8, "rule": "count", "mode": "leading", "most": 7, "seed": seed}


@pytest.mark.parametrize("noisy", [True, False])
def test_the_mean_derivative_is_that_of_one_shift_of_all_centres(noisy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.spectra.jacobians.check_records_are_separate", lambda learner: None)
    scene = Scene.of(build_defense("none"))
    learner = scene.learner
    if noisy:
        learner = fake(
            weights=learner.weights,
            zero_noise=lambda count: {"n": count},
            gradient=lambda weights, inputs, labels, noise: {"w": inputs.sum() * noise["n"], "l": labels},
        )
    centres, labels = scene.batch.inputs[:2], scene.batch.targets[:2]
    found = singular_noise.average_jacobian(learner, centres, labels)
    shift = torch.full_like(centres[0], 0.25)
    assert found.at.shape == centres[0].shape and not bool(found.at.any())
    given: Any = found
    inner = next(value for value in vars(given).values() if callable(value))
    made = inner(shift)
    if noisy:
        assert float(made["w"]) == pytest.approx(2 * float((centres + 0.25).sum()), rel=1e-5) and made["l"] is labels
        return
    direct = learner.gradient(learner.weights, centres + 0.25, labels)
    assert all(torch.allclose(made[f"inner.{name}"], value, atol=1e-6) for name, value in direct.items())
    learners = [value for value in vars(given).values() if hasattr(value, "per_example_gradients")]
    assert len(learners) == 1 and any(value is labels for value in vars(given).values())


@pytest.mark.parametrize(("terms", "utility"), [("raw", 3.0), ("relative", 1.5), ("log", math.log(1.5 + FLOOR))])
@pytest.mark.parametrize("balance", [0.0, 0.25])
def test_the_objective_is_in_units_of_its_first_value_less_what_the_network_sees(
    terms: Any, utility: float, balance: float
) -> None:
    network: Any = lambda inputs: inputs * 2  # noqa: E731
    made = Refinement(fake(), network, balance, 1, 1.0, 0.1, terms, "adam")
    value, unit = made._objective(torch.tensor(3.0), torch.tensor(2.0), torch.tensor(7.0), torch.tensor([0.25, 0.75]))
    privacy = math.log(1.0 + FLOOR) if terms == "log" else 1.0
    assert float(value) == pytest.approx(utility - balance * privacy) and float(unit) == 2.0
    first, unit = made._objective(torch.tensor(0.0), torch.tensor(0.0), torch.tensor(7.0), torch.tensor([0.5]))
    assert float(unit) == 7.0 and bool(first.isfinite())
    pull, seen, unit = made._rates(torch.tensor(3.0), torch.tensor(2.0), torch.tensor(7.0), torch.tensor(1.0))
    slopes = {"raw": (1.0, -balance), "relative": (0.5, -balance), "log": (1 / (3 + 2 * FLOOR), -balance / (1 + FLOOR))}
    assert (float(pull), float(seen)) == pytest.approx(slopes[terms]) and float(unit) == 2.0
    assert float(made._rates(torch.tensor(0.0), torch.tensor(0.0), torch.tensor(7.0), torch.tensor(1.0))[2]) == 7.0


@pytest.mark.parametrize(
    ("relative", "scope", "shares"), [(False, "global", [0.1]), (True, "global", [0.5]), (False, "layer", [0.25, 1 / 6])]
)
def test_a_gradient_is_pulled_into_the_ball_around_the_raw_one(relative: bool, scope: Any, shares: list[float]) -> None:
    centre = {"a.weight": torch.tensor([3.0, 0.0]), "b.weight": torch.tensor([0.0, 4.0])}
    gradient = {"a.weight": torch.tensor([3.0, 4.0]), "b.weight": torch.tensor([6.0, 4.0])}
    length = math.sqrt(16 + 36)
    epsilon = 0.1 * length if scope == "global" and not relative else 0.5 * length / 5 if relative else 1.0
    found, told = project_on_ball(gradient, centre, epsilon, scope, relative)
    assert told.tolist() == pytest.approx(shares)
    for place, name in enumerate(gradient):
        share = shares[min(place, len(shares) - 1)]
        assert torch.allclose(found[name], centre[name] + share * (gradient[name] - centre[name]))
    inside, all_of_it = project_on_ball(gradient, centre, 100.0, scope, relative)
    assert all(value is gradient[name] or torch.equal(value, gradient[name]) for name, value in inside.items())
    assert all_of_it.tolist() == [1.0] * len(shares)


@pytest.mark.parametrize("spelling", ["svdefense", "clipping + svdefense", "svdefense(hardened=True)", "quantisation", "pruning"])
def test_what_is_read_is_what_the_server_decodes(spelling: str) -> None:
    defense = build_defense(spelling)
    scene = Scene.of(defense)
    view = scene.view()
    update = Update({name: value.detach() for name, value in scene.gradient().items()}, 1)
    read = defense.as_read(update, view)
    lossy = "svdefense" in spelling
    assert (read is not update) == lossy
    from gradveil.records import ModelSpec

    decoded = defense.decode(defense.encode(update, view), ModelSpec.of(view.learner.model)).weights
    for name, value in read.weights.items():
        assert torch.allclose(value, decoded[name], atol=1e-5) and (lossy or torch.equal(value, update.weights[name]))
    changed = [name for name, value in read.weights.items() if not torch.allclose(value, update.weights[name], atol=1e-6)]
    assert bool(changed) == lossy
