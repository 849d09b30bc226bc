"""Noise on the update and on the data: its law, where it goes, and what the attacker makes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from skimage import data
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses import Defense
from gradveil.defenses.data_noise import DataNoise
from gradveil.defenses.gaussian_noise import GaussianNoise
from gradveil.defenses.laplace_noise import LaplaceNoise, draw_laplace
from gradveil.defenses.parts.denoising import denoise_images
from gradveil.errors import UsageError
from gradveil.records import Batch, Reconstruction, ThreatModel, Update
from gradveil.testing.defenses_scene import Scene

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses.json").read_text())


def moments(values: Tensor) -> dict[str, float]:
    values = values.double()
    variance = float(values.var())
    return {
        "std": math.sqrt(variance),
        "mean_abs": float(values.abs().mean()),
        "kurtosis": float((values**4).mean()) / variance**2,
    }


def noise_on_zeros(defense: Defense, *, dtype: torch.dtype = torch.float32) -> Tensor:
    update = Update({"w": torch.zeros(400, 1000, dtype=dtype)}, examples=1)
    protected, _ = defense.protect_update(update, Scene.of(defense).view(), {})
    return protected.weights["w"]


@pytest.mark.parametrize(
    ("defense", "golden"), [(GaussianNoise(std=0.5), "gaussian_moments"), (LaplaceNoise(scale=0.5), "laplace_moments")]
)
def test_noise_follows_its_law(defense: Defense, golden: str) -> None:
    found = moments(noise_on_zeros(defense) / 0.5)
    assert found == pytest.approx(GOLDEN[golden]["value"], rel=GOLDEN[golden]["tolerance"])


def test_sharers_add_what_together_is_the_whole_noise() -> None:
    one, whole = GaussianNoise(std=0.6, sharers=9), GaussianNoise(std=0.6)
    assert one.own_std == pytest.approx(0.2) and whole.own_std == 0.6
    found = noise_on_zeros(one)
    assert torch.allclose(3 * found, noise_on_zeros(whole), rtol=1e-5)
    arrived = one.adversary().arrives(Scene.of(one).observe(one, 1, Scene.of(one).batch))
    assert arrived.noise_std == pytest.approx(0.2)
    with pytest.raises(UsageError, match="sharers"):
        GaussianNoise(sharers=0)


@pytest.mark.parametrize("defense", [GaussianNoise(std=0.5), LaplaceNoise(scale=0.5)])
def test_half_precision_noise_is_finite_and_of_the_right_size(defense: Defense) -> None:
    found = noise_on_zeros(defense, dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert float(found.double().std()) == pytest.approx(float(noise_on_zeros(defense).std()), rel=0.02)


def test_laplace_draws_are_finite_at_the_edge_of_the_uniform_law() -> None:
    # The largest number below one, which a uniform draw can give; one itself would be infinite.
    assert bool(torch.isfinite(torch.log1p(-torch.nextafter(torch.ones(()), torch.zeros(())))))
    assert bool(torch.isfinite(draw_laplace(torch.zeros(1_000_000), 1.0, torch.Generator().manual_seed(0))).all())


def test_noise_leaves_buffers_and_counts_alone() -> None:
    update = Update({"w": torch.ones(3)}, examples=7, round=4, buffers={"mean": torch.ones(2)})
    protected, _ = GaussianNoise(std=1.0).protect_update(update, Scene.of(GaussianNoise()).view(), {})
    assert torch.equal(protected.buffers["mean"], torch.ones(2))
    assert (protected.examples, protected.round) == (7, 4)


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_data_noise_has_the_told_deviation_under_both_laws(law: Any) -> None:
    batch = Batch(torch.full((4, 3, 100, 100), 0.5), torch.zeros(4, dtype=torch.long))
    noisy, _ = DataNoise(std=0.05, law=law).protect_batch(batch, Scene.of(DataNoise()).view(), {})
    assert float(noisy.inputs.std()) == pytest.approx(0.05, rel=0.02)
    assert torch.equal(batch.inputs, torch.full((4, 3, 100, 100), 0.5))


@pytest.mark.parametrize("row", GOLDEN["clamped_data_noise"]["value"], ids=str)
def test_data_noise_is_clamped_to_the_range_of_inputs(row: dict[str, float]) -> None:
    batch = Batch(torch.full((4, 3, 100, 100), 0.5), torch.zeros(4, dtype=torch.long))
    noisy, _ = DataNoise(std=row["std"]).protect_batch(batch, Scene.of(DataNoise()).view(), {})
    assert 0 <= float(noisy.inputs.min()) <= float(noisy.inputs.max()) <= 1
    assert float(noisy.inputs.std()) == pytest.approx(row["left"], rel=GOLDEN["clamped_data_noise"]["tolerance"])


def test_attackers_know_the_noise() -> None:
    scene = Scene.of(GaussianNoise())
    seen = scene.observe(GaussianNoise(std=0.1), 1, scene.batch)
    assert seen.adversary.arrives(seen).noise_std == pytest.approx(0.1)
    assert seen.adversary.arrives(seen).exact() == frozenset()
    aggregate = seen.replace(threat=ThreatModel(clients=4))
    assert seen.adversary.arrives(aggregate).noise_std == pytest.approx(0.05)
    assert LaplaceNoise(scale=0.1).adversary().arrives(seen).noise_std == pytest.approx(0.1 * math.sqrt(2))
    assert DataNoise(std=0.1).adversary().arrives(seen).noise_std is None
    assert DataNoise(std=0.1).adversary().arrives(seen).exact() == frozenset(seen.update.weights)


@pytest.mark.parametrize("defense", [GaussianNoise(std=0), LaplaceNoise(scale=0), DataNoise(std=0)])
def test_switched_off_the_attacker_is_the_open_one(defense: Defense) -> None:
    assert defense.adversary() == OpenAdversary()


def astronaut_patches() -> Tensor:
    picture: npt.NDArray[np.uint8] = data.astronaut()  # type: ignore[no-untyped-call]
    image = torch.tensor(picture).permute(2, 0, 1) / 255
    patches = image.unfold(1, 32, 32).unfold(2, 32, 32)  # (3, 16, 16, 32, 32)
    return patches.permute(1, 2, 0, 3, 4).reshape(-1, 3, 32, 32)[5::25]


def psnr(left: Tensor, right: Tensor) -> Tensor:
    return -10 * (left - right).square().flatten(1).mean(1).log10()


@pytest.mark.parametrize(("std", "gain"), [(0.05, 4.0), (0.1, 6.0), (0.2, 7.0), (0.4, 5.0)])
@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_the_attacker_on_noisy_data_denoises_natural_images(std: float, gain: float, law: Any) -> None:
    images = astronaut_patches()
    defense = DataNoise(std=std, law=law)
    scene = Scene.of(defense)
    noisy, _ = defense.protect_batch(Batch(images, torch.zeros(len(images), dtype=torch.long)), scene.view(), {})
    rebuilt = Reconstruction(noisy.inputs, noisy.targets, "perfect inversion of the noisy data")
    finished = defense.adversary().finish(rebuilt, scene.observe(defense, 1, scene.batch))
    before, after = psnr(noisy.inputs, images), psnr(finished.inputs, images)
    assert float((after - before).mean()) > gain
    assert float((after > before).float().mean()) > 0.9


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (2, 1, 8, 8), (2, 1, 5, 40), (2, 3, 1, 1), (1, 6, 12, 12)])
def test_denoising_keeps_shape_range_and_constants(shape: tuple[int, ...]) -> None:
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    cleaned = denoise_images(images, 0.2)
    assert cleaned.shape == images.shape
    assert 0 <= float(cleaned.min()) <= float(cleaned.max()) <= 1
    flat = torch.full(shape, 0.25)
    assert torch.allclose(denoise_images(flat, 0.2), flat, atol=0.02)


def test_what_is_no_image_or_has_no_noise_is_left_alone() -> None:
    table, images = torch.rand(4, 10, generator=torch.Generator()), torch.rand(2, 1, 9, 9, generator=torch.Generator())
    assert denoise_images(table, 0.3) is table
    assert denoise_images(images, 0.0) is images
    assert denoise_images(images[:0], 0.3).shape == (0, 1, 9, 9)


@pytest.mark.parametrize("wrong", [-0.1, math.nan, math.inf, "much", None, True])
def test_nonsense_amounts_are_refused_in_one_sentence(wrong: Any) -> None:
    for kind, setting in ((GaussianNoise, "std"), (LaplaceNoise, "scale"), (DataNoise, "std")):
        with pytest.raises(UsageError, match=rf"{setting} is .*; it must be a number at least 0"):
            kind(**{setting: wrong})


def test_an_unknown_law_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'laplace'"):
        DataNoise(law="laplacian")  # type: ignore[arg-type]
