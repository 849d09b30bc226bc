"""What defenses' attackers say about the label of one example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradveil.defenses.parts.label_evidence import among_the_zeros, label_under_noise

P = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)


def prediction() -> Tensor:
    return P


@pytest.mark.parametrize("factor", [1.0, 0.01])
def test_the_evidence_of_noise_is_the_likelihood_with_the_factor_fitted(factor: float) -> None:
    std = 0.3
    generator = torch.Generator().manual_seed(0)
    for label in range(4):
        one_hot = torch.eye(4, dtype=torch.float64)[label]
        bias = factor * (P - one_hot) + factor * 0.1 * torch.randn(4, generator=generator, dtype=torch.float64)
        found = label_under_noise(std)(bias, prediction)
        assert found is not None and int(found.argmin()) == label
        scales = torch.linspace(0, 3 * factor, 30001, dtype=torch.float64)[:, None, None]
        residuals = bias - scales * (P - torch.eye(4, dtype=torch.float64))
        searched = (residuals.square().sum(2) / (2 * std**2)).min(0).values
        assert torch.allclose(found - found[0], searched - searched[0], atol=1e-6 / std**2)


def test_where_the_largest_are_withheld_the_label_is_among_the_zeros() -> None:
    bias = torch.tensor([0.5, 0.0, 0.2, 0.0], dtype=torch.float64)
    found = among_the_zeros(bias, prediction)
    assert found is not None
    assert float(found[1]) == float(found[3]) < min(float(found[0]), float(found[2]))
    assert among_the_zeros(bias + 1, prediction) is None
