"""The metric contract: a pure function from two stacks of examples to one value per example, with a card.

A metric takes ``reconstructed`` and ``original``, both (N, ...) in [0, 1], and returns (N,) in double precision, whatever
precision came in: values are few, and a verdict must not depend on the precision an attack ran in. It never averages over the
batch, never reorders it (see `gradveil.metrics.matching`), and never clips. A metric that has no meaning for an input raises
`Unavailable` with the reason. A metric that compares with something beside the pair, such as a prior image, says so on its card
and takes it by keyword.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from gradveil.errors import UsageError
from gradveil.registry import Card, Registry

__all__ = ["METRICS", "Metric", "MetricCard", "Unavailable", "check_pair", "measure"]

Metric = Callable[..., Tensor]
"""``(reconstructed, original) -> (N,)``, with what its card needs by keyword."""


class Unavailable(UsageError):
    """A metric cannot be had here: its weights are missing, or it means nothing for this kind of input."""

    @property
    def reason(self) -> str:
        """Why, as one sentence."""
        return str(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricCard(Card):
    """What a reader needs to know about a metric.

    Attributes:
        higher_is_better: True when a larger value is a better reconstruction, which is worse for the owner of the data.
        perfect: The value of a reconstruction equal to its original; None where it differs from one original to another.
        unit: Unit of the value, ``"1"`` where it has none.
        needs: Keywords it takes beside the pair: ``prior``, one image (...) that anyone could guess, such as the data's mean.
        reference: False where the original is not looked at: the reconstruction is judged alone, and a perfect one need not
            reach the perfect value.
        ordered: False where a worse reconstruction can score better, so that it must not rank anything; the weakness says why.
    """

    higher_is_better: bool
    perfect: float | None
    unit: str = "1"
    needs: tuple[str, ...] = ()
    reference: bool = True
    ordered: bool = True

    def better(self, left: float, right: float) -> bool:
        """Tell whether ``left`` is a strictly better reconstruction than ``right``."""
        return left > right if self.higher_is_better else left < right


METRICS: Registry[Metric, MetricCard] = Registry("metric", "gradveil.metrics")


def check_pair(reconstructed: Tensor, original: Tensor) -> tuple[Tensor, Tensor]:
    """Return both stacks in double precision, or raise `UsageError` saying why they cannot be compared."""
    if reconstructed.shape != original.shape:
        raise UsageError(
            f"reconstructions have shape {tuple(reconstructed.shape)} and originals {tuple(original.shape)}; "
            "give one reconstruction per original"
        )
    if reconstructed.ndim == 0 or reconstructed.numel() == 0:
        raise UsageError(f"nothing to compare in tensors of shape {tuple(reconstructed.shape)}; give (N, ...) with N at least 1")
    for name, value in (("reconstructions", reconstructed), ("originals", original)):
        if not value.is_floating_point():
            raise UsageError(f"the {name} are {value.dtype}; divide them to floating point in [0, 1] first")
        if not bool(torch.isfinite(value).all()):
            raise UsageError(f"the {name} have {int((~torch.isfinite(value)).sum())} entries that are not finite")
    return reconstructed.double(), original.double()


def measure(
    reconstructed: Tensor,
    original: Tensor,
    names: Iterable[str] | None = None,
    context: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor | Unavailable]:
    """Return the values of several metrics, with the reason in place of those that cannot be had.

    Args:
        reconstructed: (N, ...) in [0, 1], in the order of the originals.
        original: (N, ...) in [0, 1].
        names: Registered names; all of them by default.
        context: What metrics need beside the pair, by the keyword on their cards.

    Returns:
        For each name the values (N,), or the `Unavailable` that says why there are none.
    """
    results: dict[str, Tensor | Unavailable] = {}
    for name in METRICS.names() if names is None else names:
        try:
            results[name] = METRICS.get(name)(reconstructed, original, **_needed(METRICS.card(name), context or {}))
        except Unavailable as missing:
            results[name] = missing
    return results


def _needed(card: MetricCard, context: Mapping[str, Tensor]) -> dict[str, Tensor]:
    missing = [name for name in card.needs if name not in context]
    if missing:
        raise Unavailable(f"{card.name} compares with a {missing[0]}, and none was given")
    return {name: context[name] for name in card.needs}
