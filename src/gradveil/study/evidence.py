"""What stands behind a verdict: did searches fail or was there nothing to find, and how strong were they shown to be."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradveil.study.codec import OMITTED
from gradveil.study.measures import Bar, Share

__all__ = ["Gap", "Power", "Rung"]


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Search told from information: the informed objective at what was found, minus that at the truth, per record.

    Attributes:
        search_failed: Records for which the truth explains the update better than what was found: the search failed, and says
            nothing about the defense.
        information_gone: Records for which a wrong picture explains the update as well as the truth: evidence for the defense.
        found: Records whose picture was identified.
        median: Median gap in units of the objective at the truth; None where that is zero.
        objective: Which objective: ``likelihood`` where the noise is known, else ``residual``.
    """

    search_failed: Share
    information_gone: Share
    found: Share
    median: float | None = None
    objective: str = ""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One point of a power curve.

    Attributes:
        spelling: The defense at a weaker setting; empty for a planted leak.
        leak: Weight a of the raw update in what the attackers saw, `gradveil.audit.power.plant`; 0 for none.
        identified: What the same ensemble identified there.
        psnr: Median PSNR there.
        null: What the best null identifies there.
    """

    spelling: str = ""
    leak: float = 0.0
    identified: Share
    psnr: float | None = None
    null: Bar | None = field(default=None, metadata=OMITTED)

    @property
    def broken(self) -> bool:
        """Whether even the lower bound lies above the upper bound of the best null."""
        return self.null is not None and self.identified.low > self.null.top


@dataclass(frozen=True, kw_only=True)
class Power:
    """How strong the attackers of a cell were shown to be.

    Attributes:
        ensemble: Who attacked; a cap on steps is part of the name.
        ladder: The same defense at weaker settings, from the weakest up; empty where it has no knob.
        planted: The defense as it is, with a leak of growing weight beside the release.
        a50: Weight of the planted leak at which half of the records are found; None where no weight tried reached half.
        shown: Whether some weaker setting or planted leak was broken, so that these attackers can win here.
        reason: Why no curve was measured; empty where one was.
    """

    ensemble: str = ""
    ladder: tuple[Rung, ...] = ()
    planted: tuple[Rung, ...] = ()
    a50: float | None = None
    shown: bool = False
    reason: str = field(default="", metadata=OMITTED)
