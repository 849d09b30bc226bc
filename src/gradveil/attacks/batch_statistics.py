"""Matching that also uses the BatchNorm statistics an upload carries (Yin et al. 2021, Hatamizadeh et al. 2023)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gradveil.attacks.base import Attack
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.errors import UsageError
from gradveil.records import Knowledge, Observation

__all__ = ["BatchStatistics", "with_statistics"]

WEIGHT = 1.0


@dataclass(frozen=True, kw_only=True)
class BatchStatistics(InvertingGradients):
    """`InvertingGradients` plus ``statistics`` times the distance of the dummies' BatchNorm statistics to those recovered.

    Not an attack of its own in the catalogue: where the threat model grants the statistics, `line_up` runs every matching recipe
    of an ensemble with them as well, under its name with ``_statistics``. So published ensembles stay as they are, and what they
    mean under a threat model without statistics too.

    Departs from the papers: squared distances in units of each layer's variance (see `statistics_distance`), where they sum
    un-squared norms; targets are exact also after several local steps, where released code assumes one. Their released gradient
    term has no gradient; this one has.

    Cost: one more forward pass per step. Known weakness: after local steps the statistics are replayed without the defense.

    Attributes:
        statistics: Weight of the distance, beside a matching loss of weight 1.
    """

    statistics: float = WEIGHT

    def __post_init__(self) -> None:
        """Refuse a weight that means nothing."""
        if not self.statistics > 0:
            raise UsageError(f"statistics is {self.statistics}; give a weight above 0, or use inverting_gradients")
        super().__post_init__()


def with_statistics(attack: Attack, observation: Observation) -> BatchStatistics | None:
    """Return a matching attack with the statistics beside the update; None where there are none, or it cannot use them."""
    if type(attack) is not InvertingGradients or Knowledge.BN_STATISTICS not in observation.threat.knows:
        return None
    assert isinstance(attack, InvertingGradients)
    settings = {field.name: getattr(attack, field.name) for field in dataclasses.fields(attack)}
    helped = BatchStatistics(**{**settings, "title": f"{attack.title or attack.card.name}_statistics"})
    return helped if helped.applies(observation) is None else None
