"""The contract every metric keeps, as named checks that anyone can run on their own.

    from gradveil.testing.metrics import METRIC_CHECKS, check_metric
    check_metric(my_metric, my_card)            # raises with every broken promise at once

A check takes the metric and its card, and raises `AssertionError` with one sentence when the promise is broken. What the card
says the metric needs beside the pair is handed in: as prior, the mean of some other pictures.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradveil.metrics.base import Metric, MetricCard, Unavailable

__all__ = ["METRIC_CHECKS", "Check", "check_metric"]

Check = Callable[[Metric, MetricCard], None]

NOISE = (0.02, 0.1, 0.4)
"""Standard deviations of the noise that makes a reconstruction worse and worse."""


def check_metric(metric: Metric, card: MetricCard) -> None:
    """Run all checks and raise one `AssertionError` that lists every broken promise."""
    broken = []
    for check in METRIC_CHECKS:
        try:
            check(metric, card)
        except AssertionError as error:
            broken.append(f"{check.__name__}: {error}")
    _require(not broken, f"metric {card.name!r} breaks {len(broken)} promises:\n" + "\n".join(broken))


def card_is_complete(metric: Metric, card: MetricCard) -> None:
    """The card says what the metric is, what it costs and what is wrong with it."""
    for field in ("name", "summary", "cost", "weakness", "unit"):
        _require(bool(getattr(card, field).strip()), f"the card has no {field}")
    _require(card.summary.endswith("."), "the summary is not a sentence: it does not end with a full stop")
    finite = card.perfect is None or math.isfinite(card.perfect)
    _require(finite, "the perfect value is not finite, so it cannot be written to JSON")
    unknown = sorted(set(card.needs) - {"prior"})
    _require(not unknown, f"the card needs {unknown}, which nobody can give; a metric may need a prior")
    _require(bool(card.paper) == bool(card.url), "a paper needs a link, and a link needs a paper")
    _require(not card.url or card.url.startswith("https://"), f"the link {card.url!r} does not start with https://")
    _require(bool(metric.__doc__), "the function has no docstring")


def one_value_per_example(metric: Metric, card: MetricCard) -> None:
    """(N, ...) in, (N,) out, in double precision and finite, also for N = 1."""
    for count in (1, 4):
        original = _images(count)
        values = _handed(metric, card)(_noisy(original, 0.1), original)
        _require(tuple(values.shape) == (count,), f"{count} examples gave shape {tuple(values.shape)} instead of ({count},)")
        _require(values.dtype == torch.float64, f"values are {values.dtype} instead of torch.float64")
        _require(bool(torch.isfinite(values).all()), "a value is not finite")


def inputs_are_untouched(metric: Metric, card: MetricCard) -> None:
    """Neither input is written to, whatever its precision."""
    metric = _handed(metric, card)
    for dtype in (torch.float32, torch.float64):
        original = _images(2).to(dtype)
        reconstructed = _noisy(original, 0.1)
        before = reconstructed.clone(), original.clone()
        metric(reconstructed, original)
        _require(torch.equal(reconstructed, before[0]), "the metric writes to the reconstructions")
        _require(torch.equal(original, before[1]), "the metric writes to the originals")


def is_deterministic(metric: Metric, card: MetricCard) -> None:
    """The same inputs give the same bits, and the global generator is left alone."""
    metric, original = _handed(metric, card), _images(3)
    reconstructed = _noisy(original, 0.1)
    state = torch.get_rng_state()
    first, second = metric(reconstructed, original), metric(reconstructed, original)
    _require(torch.equal(first, second), "two calls on the same inputs differ")
    _require(torch.equal(state, torch.get_rng_state()), "the metric draws from the global generator")


def equal_inputs_are_perfect(metric: Metric, card: MetricCard) -> None:
    """Equal inputs give the declared perfect value, and nothing is better than it.

    A metric that judges the reconstruction alone need not reach the value, but must not look at the original. Where the perfect
    value differs from one original to another, equal inputs must not be beaten by noisy ones.
    """
    metric, original = _handed(metric, card), _images(3)
    values, noisy = metric(original.clone(), original), metric(_noisy(original, NOISE[0]), original)
    if not card.reference:
        blind = torch.equal(values, metric(original.clone(), original.flip(0)))
        _require(blind, "the metric looks at the original, and its card says that it judges the reconstruction alone")
    elif card.perfect is not None:
        near = bool((values - card.perfect).abs().max() <= 1e-6)
        _require(near, f"equal inputs give {values.tolist()} instead of {card.perfect}")
    for value, equal in zip(noisy.tolist(), values.tolist(), strict=True):
        limit = equal if card.perfect is None else card.perfect
        beaten = card.ordered and card.better(value, limit)
        _require(not beaten, f"a noisy image scores {value}, better than the perfect {limit}")


def worse_input_is_worse(metric: Metric, card: MetricCard) -> None:
    """More noise gives a worse value for every example, in the declared direction; unless the card warns that it may not."""
    metric, original = _handed(metric, card), _images(4)
    if not card.ordered:
        return
    levels = [metric(_noisy(original, std), original).tolist() for std in NOISE]
    for example, values in enumerate(zip(*levels, strict=True)):
        for std, left, right in zip(NOISE[1:], values, values[1:], strict=False):
            message = f"example {example}: noise of {std} scores {right}, no worse than {left} for less noise"
            _require(card.better(left, right), message)


def odd_inputs_survive(metric: Metric, card: MetricCard) -> None:
    """Constant, identical and single-pixel inputs give finite values, or are refused as unavailable."""
    black, white = torch.zeros(2, 3, 32, 32), torch.ones(2, 3, 32, 32)
    pairs = {
        "black for white": (black, white),
        "both black": (black, black.clone()),
        "both white": (white, white.clone()),
        "a constant for a picture": (torch.full_like(black, 0.5), _images(2)),
        "single pixels": (torch.zeros(2, 3, 1, 1), torch.ones(2, 3, 1, 1)),
        "equal single pixels": (torch.full((2, 1, 1, 1), 0.3), torch.full((2, 1, 1, 1), 0.3)),
        "grey 8 x 8 images": (torch.zeros(2, 1, 8, 8), torch.ones(2, 1, 8, 8)),
        "signals": (torch.zeros(2, 6, 40), torch.ones(2, 6, 40)),
        "rows of a table": (torch.zeros(2, 5), torch.ones(2, 5)),
    }
    for name, (reconstructed, original) in pairs.items():
        try:
            values = _handed(metric, card, original)(reconstructed, original)
        except Unavailable as missing:
            _require(len(missing.reason) > 10, f"{name}: refused without a reason")
            continue
        _require(tuple(values.shape) == (2,) and bool(torch.isfinite(values).all()), f"{name}: gave {values.tolist()}")


def batch_equals_one_by_one(metric: Metric, card: MetricCard) -> None:
    """An example's value does not depend on its neighbours or its position."""
    metric, original = _handed(metric, card), _images(4)
    reconstructed = torch.cat([_noisy(original[i : i + 1], std) for i, std in enumerate((0.01, 0.05, 0.2, 0.5))])
    together = metric(reconstructed, original)
    alone = torch.cat([metric(reconstructed[i : i + 1], original[i : i + 1]) for i in range(4)])
    turned = metric(reconstructed.flip(0), original.flip(0)).flip(0)
    # Convolutions may sum in another order for another batch size; no more than single-precision rounding.
    tolerance = 1e-4 * together.abs() + 1e-7
    _require(bool(((together - alone).abs() <= tolerance).all()), f"together {together.tolist()}, alone {alone.tolist()}")
    _require(bool(((together - turned).abs() <= tolerance).all()), "the values change with the order of the batch")


def half_precision_is_close(metric: Metric, card: MetricCard) -> None:
    """Half-precision inputs give nearly the values of the same numbers in double precision."""
    metric, original = _handed(metric, card), _images(3)
    reconstructed = _noisy(original, 0.1)
    for dtype in (torch.float16, torch.bfloat16):
        rounded = reconstructed.to(dtype), original.to(dtype)
        values, exact = metric(*rounded), metric(rounded[0].double(), rounded[1].double())
        close = (values - exact).abs() <= 1e-4 * exact.abs() + 1e-7
        _require(bool(close.all()), f"{dtype} gives {values.tolist()} instead of {exact.tolist()}")


METRIC_CHECKS: tuple[Check, ...] = (
    card_is_complete,
    one_value_per_example,
    inputs_are_untouched,
    is_deterministic,
    equal_inputs_are_perfect,
    worse_input_is_worse,
    odd_inputs_survive,
    batch_equals_one_by_one,
    half_precision_is_close,
)


def _require(condition: bool, message: str) -> None:
    # Raised by hand, because `assert` vanishes under python -O.
    if not condition:
        raise AssertionError(message)


def _handed(metric: Metric, card: MetricCard, originals: Tensor | None = None) -> Metric:
    """Return the metric with what its card needs: as prior, the mean of pictures of the same shape."""
    prior = _images(8).mean(0) if originals is None else originals.mean(0)
    return functools.partial(metric, **dict.fromkeys(card.needs, prior)) if card.needs else metric


def _images(count: int) -> Tensor:
    """Return smooth colour images (count, 3, 32, 32) well inside [0, 1], always the same."""
    coarse = torch.rand((count, 3, 6, 6), generator=torch.Generator().manual_seed(20))
    return 0.25 + 0.5 * functional.interpolate(coarse, size=(32, 32), mode="bilinear", align_corners=True)


def _noisy(images: Tensor, std: float) -> Tensor:
    """Return the images with noise of fixed pattern, so that more of it is worse for certain."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(21), dtype=torch.float64)
    return (images + std * noise).clamp(0.0, 1.0).to(images.dtype)
