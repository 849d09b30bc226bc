"""What is proved about a defense, as results hold it: differential privacy, and what no attacker can exceed.

`gradveil.client.guarantees`, `gradveil.risk.certificates` and `gradveil.audit.floors` work the numbers out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gradveil.study.codec import NEEDED, OMITTED
from gradveil.study.measures import Share

__all__ = ["Certificate", "Guarantee", "MeanError", "Unit"]

Unit = Literal["record", "client", ""]
PROMISES_NOTHING = 20.0
"""From this ε on the odds about one unit may change by a factor of 500 million."""
NOTHING_PROVED = 0.9995
"""From here on a bound is printed as proving nothing."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What is proved about any attacker, or the reason why nothing is.

    Attributes:
        epsilon: The bound; None where there is no guarantee.
        delta: Probability with which it may fail.
        unit: Whose presence is hidden: one ``record``, or a whole ``client``.
        noise_multiplier: Noise over the largest norm of one unit's share.
        steps: Noisy releases counted.
        sampling_rate: Probability of a unit to be part of each.
        method: How ε was computed: ``exact``, ``rdp`` (an upper bound) or ``prv``.
        assumptions: What must hold for it, in sentences.
        reason: Why there is no guarantee; empty where there is one.
        sentence: All of it in one sentence, made from the rest where it is not given.
        summed: Clients of whom nothing but the sum is seen; 1 is a server that sees every update.
    """

    epsilon: float | None = None
    delta: float | None = None
    unit: Unit = ""
    noise_multiplier: float | None = None
    steps: int = 0
    sampling_rate: float = 1.0
    method: str = ""
    assumptions: tuple[str, ...] = ()
    reason: str = ""
    sentence: str = field(default="", metadata=NEEDED)
    summed: int = field(default=1, metadata=OMITTED)

    def __post_init__(self) -> None:
        """Say it in words."""
        object.__setattr__(self, "sentence", self.sentence or self._sentence())

    def _sentence(self) -> str:
        if self.epsilon is None:
            return f"no guarantee: {self.reason}"
        how = "exact" if self.method == "exact" else f"upper bound, {self.method}"
        sampled = f", sampled at {self.sampling_rate:g}" if self.sampling_rate < 1 else ""
        releases = "1 release" if self.steps == 1 else f"{self.steps} releases"
        told = f"ε = {self.epsilon:.3g} at δ = {self.delta:g} per {self.unit} after {releases}{sampled} ({how})"
        told += f", before who sees nothing but sums of {self.summed} clients" if self.summed > 1 else ""
        return told + ("; an ε this large promises nothing in practice" if self.epsilon > PROMISES_NOTHING else "")


@dataclass(frozen=True, kw_only=True)
class MeanError:
    """The least mean squared error that any attacker can have, or why none is known.

    Attributes:
        mse: The error per entry; None where none is known.
        low: Lower end of its interval over inputs.
        high: Upper end.
        psnr: That of the lower end, the most that is sure.
        n: Inputs behind it.
        form: Which form of the theorem.
        confidence: Of the interval.
        smoothing: Width of the prior.
        noise_std: Standard deviation of the noise on the release.
        reason: Why there is none; empty where there is one.
    """

    BRIEF = ("mse", "reason")

    mse: float | None = None
    low: float | None = None
    high: float | None = None
    psnr: float | None = None
    n: int = 0
    form: str = ""
    confidence: float | None = None
    smoothing: float | None = None
    noise_std: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What no attacker can exceed, or the reason why nothing is certified.

    Attributes:
        identified: Largest expected share of records that any attacker points out among the candidates; None where there is no
            certificate.
        psnr: For each PSNR in dB, as text, the largest share of records that any attacker rebuilds at least so well.
        advantage: How much more often any attacker, whatever it knows beforehand, can succeed with the releases than without.
        unit: Whose share is covered by the noise: one ``record``, or a whole ``client``.
        noise_multiplier: Noise over the largest norm of one unit's share.
        steps: Noisy releases counted.
        sampling_rate: Probability of a record to be part of each.
        epsilon: Of differential privacy, for the same unit.
        delta: Probability with which ε may fail.
        candidates: Records among which the attacked one was drawn, all equally likely.
        chance: What guessing reaches.
        label_known: Whether the attacker is taken to know the record's label beforehand.
        confidence: 1 for formulas; below it, the probability over Monte Carlo draws that the bounds hold.
        assumptions: What must hold, in sentences.
        reason: Why there is no certificate; empty where there is one.
        sentence: All of it in one sentence, made from the rest where it is not given.
        matching: What an attacker who holds the list of candidates identified; None where it did not run.
        mean_error: The least mean error of anyone; it needs no clipping, so it may stand where nothing else is certified.
    """

    identified: float | None = None
    psnr: Mapping[str, float] = field(default_factory=dict)
    advantage: float | None = None
    unit: Unit = ""
    noise_multiplier: float | None = None
    steps: int = 0
    sampling_rate: float = 1.0
    epsilon: float | None = None
    delta: float | None = None
    candidates: int = 0
    chance: float | None = None
    label_known: bool = False
    confidence: float = 1.0
    assumptions: tuple[str, ...] = ()
    reason: str = ""
    sentence: str = field(default="", metadata=NEEDED)
    matching: Share | None = None
    mean_error: MeanError | None = None

    def __post_init__(self) -> None:
        """Say it in words."""
        object.__setattr__(self, "sentence", self.sentence or self._sentence())

    def _sentence(self) -> str:
        if self.identified is None:
            return f"no certificate: {self.reason}"
        count = f"{self.candidates} candidate{'s' if self.candidates != 1 else ''}"
        privacy = "" if self.epsilon is None else f", ε = {self.epsilon:.3g} at δ = {self.delta:g}"
        noise = f"noise per {self.unit}{privacy}"
        if self.proves_nothing:
            return f"the bound is 100 %, so nothing is proved: too little noise for {count} ({noise})"
        return f"at most {_percent(self.identified)} of records can be identified by anyone among {count} ({noise})"

    @property
    def proves_nothing(self) -> bool:
        """Whether the bound is all records."""
        return self.identified is not None and self.identified >= NOTHING_PROVED

    @property
    def floor(self) -> MeanError | None:
        """The least mean error, where one is known."""
        return self.mean_error if self.mean_error is not None and self.mean_error.mse is not None else None


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 or share > 0.99 else f"{100 * share:.0f} %"
