"""Records that an attacker may learn from who holds none of the audited data."""

from __future__ import annotations

import pytest
import torch

from gradveil.data import other_pictures, public_images, stationary
from gradveil.errors import UsageError
from gradveil.randomness import Seed


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (6, 128), (12,)])
def test_a_stationary_law_is_grey_in_the_mean_and_as_contrasty_as_pictures(shape: tuple[int, ...]) -> None:
    drawn = stationary(shape, 400, Seed(0))
    assert drawn.shape == (400, *shape) and float(drawn.min()) >= 0 and float(drawn.max()) <= 1
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.03)
    assert float((drawn - 0.5).square().mean().sqrt()) == pytest.approx(0.24, abs=0.03)
    places = (drawn - 0.5).square().mean(0).sqrt()
    assert float(places.min()) > 0.18, "the same everywhere"


def test_its_spectrum_falls_with_the_square_of_the_frequency() -> None:
    drawn = stationary((1, 64, 64), 400, Seed(1)).double()
    power = torch.fft.fft2(drawn - 0.5).abs().square().mean((0, 1))
    # Clipping to [0, 1] adds a little at high frequencies.
    assert float(power[0, 2] / power[0, 8]) == pytest.approx(16, rel=0.25)
    assert float(power[0, 4] / power[4, 0]) == pytest.approx(1, rel=0.25), "no direction is preferred"


def test_its_colours_go_together() -> None:
    drawn = stationary((3, 16, 16), 300, Seed(2))
    table = torch.corrcoef(drawn.transpose(0, 1).flatten(1))
    assert float(table[0, 1]) == pytest.approx(0.9, abs=0.03)
    assert not torch.equal(drawn, stationary((3, 16, 16), 300, Seed(3)))
    with pytest.raises(UsageError, match="no empty axis"):
        stationary((0, 4), 3, Seed(0))


def test_other_pictures_come_from_all_photographs_or_the_public_one() -> None:
    many = other_pictures((3, 16, 16), 18, Seed(0), photos=True)
    assert many.shape == (18, 3, 16, 16) and float(many.std()) > 0.15
    assert torch.equal(many, other_pictures((3, 16, 16), 18, Seed(0), photos=True))
    public = public_images((3, 16, 16), 18, Seed(0))
    assert torch.equal(other_pictures((3, 16, 16), 18, Seed(0), photos=False), public)
    assert not torch.equal(many, public)
    assert torch.equal(other_pictures((5, 40), 3, Seed(0), photos=True), public_images((5, 40), 3, Seed(0)))
    grey = other_pictures((1, 16, 16), 9, Seed(0), photos=True)
    assert grey.shape == (9, 1, 16, 16)
