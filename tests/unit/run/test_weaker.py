"""Every knob turns the right way: what is below a setting is weaker, and the weakest comes first."""

from __future__ import annotations

import pytest

from gradveil.audit.materials import Materials
from gradveil.defenses import DEFENSES, parts_of
from gradveil.run.ladders import expand_defense
from gradveil.run.weaker import weaker_settings


@pytest.mark.parametrize(
    ("defense", "below"),
    [
        ("none", []),
        ("gaussian_noise(std=0.01)", ["gaussian_noise(std=0.0001)", "gaussian_noise(std=0.001)"]),
        ("gaussian_noise(std=0.05)", ["gaussian_noise(std=0.0001)", "gaussian_noise(std=0.001)", "gaussian_noise(std=0.01)"]),
        # Below the ladder, towards off at nought.
        ("gaussian_noise(std=1e-05)", ["gaussian_noise(std=1.11e-06)", "gaussian_noise(std=3.33e-06)"]),
        ("top_k(keep=0.01)", ["top_k(keep=0.5)", "top_k(keep=0.1)"]),  # fewer entries kept are the stronger setting
        ("clipping(bound=20.0)", ["clipping(bound=180.0)", "clipping(bound=60.0)"]),  # off has no bound at all
        ("quantisation(bits=2)", ["quantisation(bits=8)", "quantisation(bits=4)", "quantisation(bits=3)"]),
        ("dgp(largest=0.1, smallest=0.6)", ["dgp(largest=0.0111, smallest=0.0667)", "dgp(largest=0.0333, smallest=0.2)"]),
        ("mq(bits=(8, 4))", ["mq(bits=(12, 8))"]),
        # Parts of a chain are weakened together; the one with fewer steps stays at its weakest.
        (
            "clipping(bound=1.0) + gaussian_noise(std=0.01)",
            ["clipping(bound=4.0) + gaussian_noise(std=0.0001)", "clipping(bound=4.0) + gaussian_noise(std=0.001)"],
        ),
        # All of a ladder of five; of a longer one the three next below and the weakest.
        ("dp_sgd(noise_multiplier=1.0)", [f"dp_sgd(noise_multiplier={each})" for each in (0.001, 0.01, 0.1, 0.5)]),
    ],
)
def test_what_is_below_is_weaker_and_the_weakest_comes_first(defense: str, below: list[str]) -> None:
    (spelt,) = expand_defense(defense)
    assert weaker_settings(spelt) == below


@pytest.mark.parametrize(("rounds", "below"), [(None, [1, 5]), (1, []), (2, [1]), (5, [1]), (7, [1, 5])])
def test_a_setting_that_lasts_as_long_as_is_seen_is_no_weaker(rounds: int | None, below: list[int]) -> None:
    expected = [f"censor(active_rounds={each})" for each in below]
    assert weaker_settings("censor(active_rounds=10)", rounds=rounds) == expected
    assert weaker_settings("censor(active_rounds=0)", rounds=rounds)[: len(below)] == expected


def test_other_settings_of_the_user_stay() -> None:
    (spelt,) = expand_defense("dp_sgd(noise_multiplier=0.3, bound=2.0)")
    assert all("bound=2.0" in each for each in weaker_settings(spelt))


@pytest.mark.parametrize("name", DEFENSES.names())
def test_every_rung_of_every_ladder_has_those_before_it_below(name: str) -> None:
    materials = Materials()
    rungs = expand_defense(f"{name}:ladder", materials)
    for place, rung in enumerate(rungs):
        below = weaker_settings(rung, materials)
        assert below == (rungs[:place] if place <= 4 else [rungs[0], *rungs[place - 3 : place]])
        # Spelt as a plan spells them, so that an equal cell is found; and built already.
        assert all(expand_defense(each) == [each] and parts_of(materials.defense(each)) for each in below)
