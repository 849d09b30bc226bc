"""What single defenses hand on within themselves: how many directions are looked for, and what a vanished matrix says."""

from __future__ import annotations

import pytest
import torch

from gradveil.defenses.invl.singular_noise import noise_range, record_jacobian
from gradveil.defenses.none import NoDefense
from gradveil.defenses.svdefense.truncation import truncate
from gradveil.randomness import Seed
from gradveil.spectra import spectrum as spectra
from gradveil.testing.defenses_scene import Scene


@pytest.mark.parametrize(("most", "seed"), [(7, None), (100, Seed(3))])
def test_as_many_directions_are_looked_for_as_are_allowed(most: int, seed: Seed | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    inner = spectra.spectrum

    def noting(jacobian: object, **given: object) -> object:
        asked.append(given)
        return inner(jacobian, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(spectra, "spectrum", noting)
    scene = Scene.of(NoDefense(), dtype=torch.float64)
    jacobian = record_jacobian(scene.learner, scene.batch.inputs[0], scene.batch.targets[0])
    found = noise_range(jacobian, low=0.0, high=0.9, rule="sum", mode="leading", most=most, seed=seed)
    assert asked == [{"mode": "leading", "leading": most, "right": True, "seed": seed or Seed(0)}]
    assert found.first == 0 and 0 < found.last <= most


def test_a_matrix_of_zeros_has_no_entropy_no_rank_and_nothing_cut_off() -> None:
    found = truncate(torch.zeros(3, 5), weights="squared", beta=0.3, threshold=None)
    assert (found.entropy, found.rank, found.residual) == (0.0, 0, 0.0)
    assert found.whole.shape == (3, 5) and not bool(found.whole.any())
    assert found.right.shape == (1, 5) and float(found.right.norm()) == 1.0
