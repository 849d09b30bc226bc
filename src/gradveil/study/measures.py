"""Numbers with what they need beside them: shares and medians with intervals, means over seeds, and summaries of those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradveil.study.codec import OMITTED, REASONS

__all__ = ["Bar", "Estimate", "Quality", "Share", "Spread", "Summary"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share of records with its Wilson interval."""

    value: float
    low: float
    high: float
    count: int
    n: int = 0

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Count the records where only their share was kept."""
        try:
            return {"count": round(values["value"] * values.get("n", 0)), **values}
        except (KeyError, TypeError, ValueError, OverflowError):
            return values


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What the best null reaches: the height an attack has to clear; ``high`` is the upper bound of a share."""

    null: str = ""
    value: float
    high: float | None = field(default=None, metadata=OMITTED)

    @property
    def top(self) -> float:
        """The upper bound, or the value where there is none."""
        return self.value if self.high is None else self.high


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median of a metric over records, its bootstrap interval, and the value worst for the data owner."""

    median: float
    low: float | None = None
    high: float | None = None
    worst: float | None = None
    n: int = 0


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How close one group of reconstructions comes; ``unavailable`` says of a metric that is None why it could not be had."""

    n: int = 0
    mse: Spread | None = None
    psnr: Spread | None = None
    ssim: Spread | None = None
    lpips: Spread | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict, metadata=REASONS)


@dataclass(frozen=True, kw_only=True)
class Summary(Quality):
    """One group of candidates, measured.

    Attributes:
        identified: Records whose reconstruction is nearest to them among all candidates.
        noise_fraction: Share of noise in the reconstructions.
        rdlv: Relative data leakage value of the shadow paper, which only older results hold.
        rdlv_nvflare: The same as NVFlare computes it.
        iip_1: As ``identified``; one of the nearest, by that paper's name.
        iip_3: Records among the three nearest.
        iip_5: Records among the five nearest.
        label_accuracy: Labels that were recovered; None where none were looked for.
    """

    KEYS = (
        *("n", "identified", "mse", "psnr", "ssim", "lpips", "noise_fraction", "rdlv", "rdlv_nvflare"),
        *("iip_1", "iip_3", "iip_5", "label_accuracy"),
    )

    identified: Share
    noise_fraction: Spread | None = None
    rdlv: Spread | None = field(default=None, metadata=OMITTED)
    rdlv_nvflare: Spread | None = None
    iip_1: Share | None = None
    iip_3: Share | None = None
    iip_5: Share | None = None
    label_accuracy: Share | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over paired seeds; no interval where there is one seed only.

    Attributes:
        value: The mean.
        low: Lower end of the 95 % interval, or None.
        high: Upper end, or None.
        n: Number of seeds.
        per_seed: What the mean is of.
    """

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 0
    per_seed: tuple[float, ...] = ()
