"""κ from a list of candidates."""

from __future__ import annotations

import pytest
import torch

from gradveil.errors import UsageError
from gradveil.risk.candidates import closeness_prior, identification_prior


def test_guessing_hits_one_in_all() -> None:
    prior = identification_prior(256)
    assert (prior.kappas, prior.weights, prior.kappa) == ((1 / 256,), (1.0,), 1 / 256)
    assert identification_prior(256, guesses=4).kappa == 4 / 256
    assert identification_prior(256, guesses=4, known=3).kappa == 4 / 253
    certain = [identification_prior(1), identification_prior(3, guesses=8), identification_prior(2, known=5)]
    assert [prior.kappa for prior in certain] == [1, 1, 1]


def test_labels_split_the_candidates() -> None:
    prior = identification_prior(5, labels=torch.tensor([7, 7, 7, 2, 7]))
    assert prior.kappas == (1 / 4, 1.0) and prior.weights == (0.8, 0.2)
    assert prior.kappa == pytest.approx(2 / 5)  # one hit per class


def test_closeness_counts_neighbours_within_twice_the_radius() -> None:
    line = torch.tensor([[0.0], [0.1], [0.2], [0.9]])
    # A guess at 0.1 is within 0.11 of the first three: κ is 3/4, found through the one in the middle.
    assert closeness_prior(line, 0.11**2).kappa == 3 / 4
    assert closeness_prior(line, 0.04**2).kappa == 1 / 4
    # A guess at 0.05 reaches both 0 and 0.1 within 0.05, so a radius of half the distance must count the pair.
    assert closeness_prior(line, 0.05**2 * 1.0001).kappa == 3 / 4
    assert closeness_prior(line, 1.0).kappa == 1
    assert closeness_prior(line, 0.11**2, labels=torch.tensor([0, 1, 0, 1])).kappas == (1.0, 1 / 2)


def test_closeness_bounds_every_guess() -> None:
    generator = torch.Generator().manual_seed(0)
    candidates = torch.rand(60, 3, generator=generator)
    for error in (0.003, 0.01, 0.03):
        guesses = torch.rand(4000, 3, generator=generator)
        hits = ((guesses[:, None] - candidates).square().mean(2) <= error).double().mean(1)
        assert float(hits.max()) <= closeness_prior(candidates, error).kappa


def test_duplicates_are_one_neighbourhood() -> None:
    candidates = torch.rand(10, 4, generator=torch.Generator().manual_seed(1))
    candidates[3] = candidates[8]
    assert closeness_prior(candidates, 0.0).kappa == 2 / 10


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: identification_prior(0), "no candidates"),
        (lambda: identification_prior(3, labels=torch.tensor([1])), "as many labels"),
        (lambda: closeness_prior(torch.zeros(0, 3), 0.1), "at least one candidate"),
        (lambda: closeness_prior(torch.full((2, 3), float("nan")), 0.1), "finite"),
        (lambda: closeness_prior(torch.zeros(2, 3), float("nan")), "error at least 0"),
    ],
)
def test_senseless_input_gets_one_sentence(call: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()  # type: ignore[operator]
