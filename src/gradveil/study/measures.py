"""Numbers with what they need beside them: shares and medians with intervals, means over seeds, and summaries of those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradveil.significance import CONFIDENCE, exact_upper, wilson
from gradveil.study.codec import OMITTED, REASONS

__all__ = ["Bar", "Estimate", "Paired", "Quality", "Share", "Spread", "Summary"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share of records with its Wilson interval.

    Attributes:
        value: count / n.
        low: Lower end.
        high: Upper end.
        count: Records that were hit.
        n: Records in all.
        effective: How many independent records they are worth, where records share an update or an owner; None for n.
    """

    value: float
    low: float
    high: float
    count: int
    n: int = 0
    effective: float | None = field(default=None, metadata=OMITTED)

    @classmethod
    def of(cls, count: int, n: int, *, confidence: float = CONFIDENCE, effective: float | None = None) -> Share:
        """Return a share with its Wilson interval, as wide as the records are worth."""
        worth = None if effective is None or effective >= n else effective
        # All of them are all of what they are worth, and not up to rounding.
        low, high = (
            wilson(count, n, confidence)
            if worth is None
            else wilson(worth if count == n else count * worth / n, worth, confidence)
        )
        return cls(value=count / n, low=low, high=high, count=count, n=n, effective=worth)

    @property
    def upper(self) -> float:
        """The exact one-sided 95 % upper end, which a limit is compared with; `high` is the end of a two-sided interval."""
        worth = self.effective or self.n
        return exact_upper(self.value * worth, worth) if worth else 1.0

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Count the records where only their share was kept."""
        try:
            return {"count": round(values["value"] * values.get("n", 0)), **values}
        except (KeyError, TypeError, ValueError, OverflowError):
            return values


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What the best null reaches: the height an attack has to clear.

    Attributes:
        null: Its name.
        value: What it reaches; of several draws, the largest.
        high: The upper bound of a share.
        draws: How many draws it is the largest of: as many as there were attackers whose largest count it stands beside.
    """

    null: str = ""
    value: float
    high: float | None = field(default=None, metadata=OMITTED)
    draws: int = field(default=1, metadata=OMITTED)

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
class Paired:
    """Two attackers on the same records: those that one of them alone identified, and how likely so lopsided is by chance.

    Attributes:
        first: Records that the first alone identified.
        second: Records that the second alone identified.
        p: Two-sided probability by McNemar's exact test.
    """

    first: int
    second: int
    p: float


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
