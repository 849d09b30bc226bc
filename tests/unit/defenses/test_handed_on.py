"""What single defenses hand on within themselves: how many directions are looked for, and what a vanished matrix says."""

from __future__ import annotations

import pytest
import torch

from gradveil.defenses.invl.singular_noise import noise_range
from gradveil.defenses.svdefense.truncation import truncate
from gradveil.randomness import Seed
from gradveil.spectra.jacobians import Jacobian


class Asked(Exception):
    pass


@pytest.mark.parametrize(("most", "seed"), [(7, None), (100, Seed(3))])
def test_as_many_directions_are_looked_for_as_are_allowed(most: int, seed: Seed | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(jacobian: Jacobian, **given: object) -> None:
        raise Asked(given)

    monkeypatch.setattr("gradveil.spectra.spectrum.spectrum", asked)
    jacobian = Jacobian(lambda point: point, torch.zeros(120))
    with pytest.raises(Asked) as found:
        noise_range(jacobian, low=0.0, high=0.9, rule="sum", mode="leading", most=most, seed=seed)
    assert found.value.args == ({"mode": "leading", "leading": most, "right": True, "seed": seed or Seed(0)},)


def test_a_matrix_of_zeros_has_no_entropy_no_rank_and_nothing_cut_off() -> None:
    found = truncate(torch.zeros(3, 5), weights="squared", beta=0.3, threshold=None)
    assert (found.entropy, found.rank, found.residual) == (0.0, 0, 0.0)
    assert found.whole.shape == (3, 5) and not bool(found.whole.any())
    assert found.right.shape == (1, 5) and float(found.right.norm()) == 1.0
