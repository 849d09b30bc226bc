"""The ends of every setting's range: the least and the largest value are taken, and the next ones refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from gradveil.defenses import DEFENSES
from gradveil.errors import UsageError

BELOW_ONE = math.nextafter(1.0, 0.0)
ABOVE_ONE = math.nextafter(1.0, 2.0)
TINY = 5e-324
FAR = 1e12

# Name, setting, values taken, values refused; what else must be set so that nothing but this one is at stake.
RANGES: list[tuple[str, str, list[Any], list[Any], dict[str, Any]]] = [
    *(
        (name, setting, [0.0, BELOW_ONE], [-TINY, 1.0], {})
        for name, setting in (
            ("embedding_dropout", "rate"),
            ("embedding_pruning", "rate"),
            ("entry_dropout", "rate"),
            ("lrp", "spread"),
            ("outpost", "rate"),
            ("outpost", "share"),
            ("pfgd", "rate"),
            ("pruning", "rate"),
            ("refiner", "blend"),
            ("shadow", "shadow_momentum"),
            ("shadow", "noise_momentum"),
            ("soteria", "rate"),
            ("svdefense", "threshold"),
        )
    ),
    ("dgp", "largest", [0.0, BELOW_ONE], [-TINY, 1.0], {"smallest": 0.0}),
    ("dgp", "smallest", [0.0, BELOW_ONE], [-TINY, 1.0], {"largest": 0.0}),
    *(
        (name, setting, [0.0, FAR], [-TINY, math.inf], {})
        for name, setting in (
            ("data_noise", "std"),
            ("dp_sgd", "noise_multiplier"),
            ("embedding_noise", "delta"),
            ("gaussian_noise", "std"),
            ("graddefense", "std"),
            ("invl_dnp", "delta"),
            ("invl_enp", "delta"),
            ("invl_gnp", "delta"),
            ("laplace_noise", "scale"),
            ("outpost", "decay"),
            ("outpost", "noise"),
            ("percentile_noise", "share"),
            ("precode", "divergence"),
            ("refiner", "balance"),
            ("refiner", "rate"),
            ("refiner", "epsilon"),
            ("shadow", "strength"),
            ("soteria", "epsilon"),
        )
    ),
    *(
        (name, setting, [TINY, FAR], [0.0, math.inf], {})
        for name, setting in (
            ("clipping", "bound"),
            ("dp_sgd", "bound"),
            ("example_clipping", "bound"),
            ("graddefense", "clip"),
            ("shadow", "latent_rate"),
            ("shadow", "fit_rate"),
            ("shadow", "temperature"),
            ("svdefense", "beta"),
            ("svdefense", "least_error"),
        )
    ),
    ("top_k", "keep", [TINY, 1.0], [0.0], {}),
    ("percentile_noise", "percentile", [TINY, 99.9], [0.0, 100.0], {}),
    ("refiner", "decay", [0.0, 1.0], [-TINY, 1.001], {}),
    ("shadow", "foreground", [0.0, 1.0], [-TINY, 1.001], {}),
    ("shadow", "foreground_least", [0.0, 1.0], [-TINY, 1.001], {"foreground_most": 1.0}),
    ("shadow", "foreground_most", [0.0, 1.0], [-TINY, 1.001], {"foreground_least": 0.0}),
    ("invl_dnp", "share", [1.0], [-TINY, ABOVE_ONE], {}),
    ("invl_enp", "share", [1.0], [-TINY, ABOVE_ONE], {"spared": 0.0}),
    ("invl_gnp", "share", [1.0], [-TINY, ABOVE_ONE], {"spared": 0.0}),
    ("invl_enp", "spared", [0.0], [-TINY, ABOVE_ONE], {"share": 1.0}),
    ("invl_gnp", "spared", [0.0], [-TINY, ABOVE_ONE], {"share": 1.0}),
    *(
        (name, setting, [least, 10**6], [least - 1], more)
        for name, setting, least, more in (
            ("censor", "trials", 1, {}),
            ("censor", "active_rounds", 0, {}),
            ("dp_sgd", "expected_batch", 0, {}),
            ("graddefense", "slices", 1, {"noisy": 1}),
            ("invl_dnp", "most", 1, {}),
            ("invl_enp", "most", 1, {}),
            ("invl_gnp", "most", 1, {}),
            ("invl_dnp", "refresh", 1, {"basis": "class"}),
            ("invl_enp", "refresh", 1, {"basis": "public"}),
            ("invl_gnp", "refresh", 1, {}),
            ("precode", "latent", 1, {}),
            ("precode", "seed", 0, {}),
            ("refiner", "steps", 0, {}),
            ("shadow", "rounds", 1, {}),
            ("shadow", "until", 0, {}),
            ("shadow", "latent_steps", 0, {}),
            ("shadow", "patience", 1, {}),
            ("shadow", "fit_steps", 0, {}),
        )
    ),
    ("graddefense", "noisy", [0, 10], [-1, 11], {"slices": 10}),
    ("quantisation", "bits", [2, 16], [1, 17], {}),
    ("mq", "bits", [(2,), (16, 2)], [(1, 8), (8, 17), (8, 1), ()], {}),
]


@pytest.mark.parametrize(("name", "setting", "taken", "refused", "more"), RANGES, ids=[f"{row[0]}.{row[1]}" for row in RANGES])
def test_both_ends_are_taken_and_what_lies_beyond_is_refused(
    name: str, setting: str, taken: list[Any], refused: list[Any], more: dict[str, Any]
) -> None:
    defense = DEFENSES.build(name)
    for value in taken:
        assert getattr(dataclasses.replace(defense, **{**more, setting: value}), setting) == value
    for value in refused:
        with pytest.raises(UsageError, match=f"{name}: {setting} is"):
            dataclasses.replace(defense, **{**more, setting: value})


def test_shares_that_leave_nothing_and_ends_in_the_wrong_order_are_refused() -> None:
    dgp, shadow = DEFENSES.build("dgp"), DEFENSES.build("shadow")
    dataclasses.replace(dgp, largest=0.25, smallest=0.74)
    with pytest.raises(UsageError, match="leave nothing"):
        dataclasses.replace(dgp, largest=0.25, smallest=0.75)
    dataclasses.replace(shadow, foreground_least=0.25, foreground_most=0.25)
    with pytest.raises(UsageError, match="swap them"):
        dataclasses.replace(shadow, foreground_least=0.26, foreground_most=0.25)
