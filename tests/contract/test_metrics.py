"""Every registered metric keeps the metric contract, and the contract rejects metrics that do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradveil.metrics import METRICS, Metric, MetricCard, Unavailable, mean_squared_error
from gradveil.metrics.lpips import lpips_distance
from gradveil.metrics.lpips_weights import NETS, Weights
from gradveil.testing import metrics as suite
from gradveil.testing.metrics import METRIC_CHECKS, Check, check_metric

CARD = MetricCard(
    name="wrong",
    summary="A metric that breaks one promise.",
    cost="None.",
    weakness="Wrong on purpose.",
    higher_is_better=False,
    perfect=0.0,
)


@pytest.mark.parametrize("check", METRIC_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", METRICS.names())
def test_registered_metric_keeps_its_promise(name: str, check: Check) -> None:
    """Each check holds for each metric; one whose weights are missing is skipped with the reason."""
    try:
        check(METRICS.get(name), METRICS.card(name))
    except Unavailable as missing:
        pytest.skip(missing.reason)


def random_weights(net: str) -> Weights:
    """Weights of the right shapes that keep the scale of the features, with the positive heads LPIPS has."""
    generator = torch.Generator().manual_seed(5)
    weights: Weights = {}
    for name, shape in NETS[net].shapes().items():
        drawn = torch.randn(shape, generator=generator)
        scale = (2.0 / drawn[0].numel()) ** 0.5 if len(shape) == 4 else 0.1
        weights[name] = drawn.abs() if name.startswith("head") else scale * drawn
    return weights


@pytest.mark.parametrize(("name", "net"), [("lpips", "vgg"), ("lpips_alex", "alex")])
def test_lpips_keeps_the_contract_with_any_weights(name: str, net: str) -> None:
    """The mathematics of LPIPS is held to the contract also where the genuine weights are missing."""
    weights = random_weights(net)

    def metric(reconstructed: Tensor, original: Tensor) -> Tensor:
        """LPIPS with random weights."""
        return lpips_distance(reconstructed, original, net, weights)

    check_metric(metric, METRICS.card(name))


def averages_the_batch(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Say the mean of the batch for everyone."""
    return mean_squared_error(reconstructed, original).mean().expand(len(original))


def gives_a_scalar(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Say one value for all."""
    return mean_squared_error(reconstructed, original).mean()


def flips_direction(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Say more for better, against the card."""
    return -mean_squared_error(reconstructed, original)


def clips_in_place(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Write to the reconstruction."""
    return mean_squared_error(reconstructed.mul_(0.5), original.mul(0.5))


def scales_in_place_in_double(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Write to what ``.double()`` returns, which is the input itself when that is double already."""
    return mean_squared_error(reconstructed.double().mul_(0.5), original.double() * 0.5)


def adds_noise(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Draw from the global generator."""
    values = mean_squared_error(reconstructed, original)
    return values + 1e-9 * torch.rand_like(values)


def has_an_offset(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Be imperfect on equal inputs."""
    return mean_squared_error(reconstructed, original) + 0.01


def saturates(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Stop telling bad from worse."""
    return mean_squared_error(reconstructed, original).clamp_max(0.005)


def normalises_by_spread(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Divide zero by zero on constant images."""
    return mean_squared_error(reconstructed, original) / original.double().flatten(1).var(dim=1)


def normalises_by_batch(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Let the neighbours change an example's value."""
    return mean_squared_error(reconstructed, original) / (1.0 + original.double().var() + reconstructed.double().var())


def depends_on_position(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Weigh the first example more."""
    values = mean_squared_error(reconstructed, original)
    return values * torch.linspace(2.0, 1.0, len(values), dtype=torch.float64)


def computes_in_input_precision(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Lose half precision's few digits in a sum of squares."""
    values = (reconstructed.square() - 2 * reconstructed * original + original.square()).flatten(1).mean(dim=1)
    return values.double()


def stays_single(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Return single precision."""
    return mean_squared_error(reconstructed, original).float()


WRONG: list[tuple[Metric, Check]] = [
    (averages_the_batch, suite.batch_equals_one_by_one),
    (gives_a_scalar, suite.one_value_per_example),
    (stays_single, suite.one_value_per_example),
    (flips_direction, suite.worse_input_is_worse),
    (flips_direction, suite.equal_inputs_are_perfect),
    (clips_in_place, suite.inputs_are_untouched),
    (scales_in_place_in_double, suite.inputs_are_untouched),
    (adds_noise, suite.is_deterministic),
    (has_an_offset, suite.equal_inputs_are_perfect),
    (saturates, suite.worse_input_is_worse),
    (normalises_by_spread, suite.odd_inputs_survive),
    (normalises_by_batch, suite.batch_equals_one_by_one),
    (depends_on_position, suite.batch_equals_one_by_one),
    (computes_in_input_precision, suite.half_precision_is_close),
]


def _label(item: Callable[..., object]) -> str:
    return item.__name__


@pytest.mark.parametrize(("metric", "check"), WRONG, ids=_label)
def test_the_contract_rejects_a_wrong_metric(metric: Metric, check: Check) -> None:
    """The check made for a fault finds it."""
    with pytest.raises(AssertionError):
        check(metric, CARD)


@pytest.mark.parametrize(
    "fault", [{"weakness": " "}, {"summary": "no sentence"}, {"perfect": float("inf")}, {"paper": "Someone, 2020"}, {"unit": ""}]
)
def test_the_contract_rejects_an_incomplete_card(fault: dict[str, object]) -> None:
    """A card without its facts is refused."""
    with pytest.raises(AssertionError):
        suite.card_is_complete(mean_squared_error, dataclasses.replace(CARD, **fault))  # type: ignore[arg-type]


def test_check_metric_lists_every_broken_promise() -> None:
    """One call names all faults, so that an author fixes them in one go."""
    with pytest.raises(AssertionError, match=r"breaks 2 promises:\nequal_inputs_are_perfect(.|\n)*worse_input_is_worse"):
        check_metric(flips_direction, CARD)


def test_a_right_metric_passes() -> None:
    """The suite is not so strict that nothing passes."""
    check_metric(mean_squared_error, dataclasses.replace(CARD, name="right"))
