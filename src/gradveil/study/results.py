"""What a results folder holds, as frozen records (the format is fixed in docs/results-format.md).

A number that is missing or not finite is ``None`` everywhere, so nothing downstream can print it by accident.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradveil.study.risks import MeanError, Risk

__all__ = [
    "Attacker",
    "Bar",
    "Cell",
    "Certificate",
    "Check",
    "Curve",
    "Defense",
    "Estimate",
    "Record",
    "Region",
    "Results",
    "Run",
    "Share",
    "Spread",
    "Summary",
    "Threat",
    "Timing",
    "Utility",
]


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share of records with its Wilson interval."""

    value: float
    low: float
    high: float
    count: int
    n: int


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median of a metric over records, its bootstrap interval, and the value worst for the data owner."""

    median: float
    low: float | None
    high: float | None
    worst: float | None
    n: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One group of candidates, measured."""

    identified: Share
    psnr: Spread | None = None
    ssim: Spread | None = None
    mse: Spread | None = None
    lpips: Spread | None = None
    lpips_reason: str = ""
    label_accuracy: Share | None = None
    nearest: Mapping[int, Share] = field(default_factory=dict)
    noise_fraction: Spread | None = None
    rdlv: Spread | None = None


@dataclass(frozen=True, kw_only=True)
class Region:
    """Pictures measured inside the box around what the model looks at most; ``psnr`` and ``ssim`` by group of candidates."""

    area: float
    psnr: Mapping[str, Spread]
    ssim: Mapping[str, Spread]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What the best null reaches: the height an attack has to clear."""

    null: str
    value: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """One reason to trust a number, or not to."""

    name: str
    level: str
    sentence: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Attacker:
    """One recipe in one stance."""

    recipe: str
    stance: str
    tries: int | None
    chosen: int | None
    rehearsal_psnr: float | None
    summary: Summary | None


@dataclass(frozen=True, kw_only=True)
class Record:
    """One training record under its pseudonym, with the candidate the attacker selected for it."""

    pseudonym: str
    owner: str | None
    label: str
    label_correct: bool | None
    identified: bool
    rank: int | None
    psnr: float | None
    ssim: float | None
    lpips: float | None = None


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What is proved about any attacker, or why nothing is.

    Attributes:
        epsilon: The bound; None where there is no guarantee.
        unit: Whose presence it hides: a record, or a whole client.
        sentence: All of it in words.
        assumptions: What must hold for it.
    """

    epsilon: float | None = None
    unit: str = ""
    sentence: str = ""
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What no attacker can exceed, or why nothing is certified.

    Attributes:
        identified: Largest share of records that anyone can identify; None where there is no certificate.
        psnr: For a PSNR in dB, as text, the largest share that anyone can rebuild at least so well.
        unit: Whose share the noise covers: a record, or a whole client.
        sentence: The certificate in words.
        assumptions: What must hold for it.
        matching: What an attacker who holds the list of candidates identified; None where it did not run.
        floor: The least mean error of any attacker; it needs no clipping, so it may stand where nothing else is certified.
    """

    identified: float | None = None
    psnr: Mapping[str, float]
    unit: str = ""
    sentence: str = ""
    assumptions: tuple[str, ...] = ()
    matching: Share | None = None
    floor: MeanError | None = None

    @property
    def proves_nothing(self) -> bool:
        """Whether the bound is all records."""
        return self.identified is not None and self.identified >= 0.9995


@dataclass(frozen=True, kw_only=True)
class Defense:
    """The defense of a cell: its spelling, its parts and its place on the strength ladder."""

    spelling: str
    parts: tuple[str, ...] = ()
    rung: int | None = None
    rungs: int | None = None
    random: bool = False
    acts_on: tuple[str, ...] = ()
    secure_aggregation: bool | None = None
    guarantee: Guarantee | None = None

    @property
    def is_none(self) -> bool:
        """Whether the update leaves undefended."""
        return self.spelling.strip() in {"none", "none()", ""} or self.parts == ("none",)


@dataclass(frozen=True, kw_only=True)
class Threat:
    """Who attacks and what they see."""

    knows: tuple[str, ...] = ()
    active: bool = False
    sentences: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What differs from run to run."""

    seconds: float | None = None
    peak_memory_mb: float | None = None
    defense_ms: float | None = None
    undefended_ms: float | None = None
    risk_seconds: float | None = None

    @property
    def ratio(self) -> float | None:
        """Client time for one update, relative to an undefended one."""
        if not self.defense_ms or not self.undefended_ms:
            return None
        return self.defense_ms / self.undefended_ms


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over paired seeds; no interval where there is one seed only."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 0


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How one training went: accuracy by round, and what it took."""

    seed: int | None
    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    client_seconds: float | None = None
    defended_ms: float | None = None
    undefended_ms: float | None = None

    @property
    def latency(self) -> float | None:
        """One client's round with the defense over one without, measured in turns."""
        return self.defended_ms / self.undefended_ms if self.defended_ms and self.undefended_ms else None


@dataclass(frozen=True, kw_only=True)
class Utility:
    """What trainings with a defense found, beside those without it.

    Attributes:
        accuracy: Of the trained model on records it was not trained on.
        undefended: The same without the defense.
        difference: Defended minus undefended, by paired seeds.
        pmm: Defended over undefended, by paired seeds.
        chance: Accuracy of always naming the most frequent class.
        bytes_up: From clients to the server, mean over seeds.
        bytes_down: From the server to clients.
        undefended_up: The same without the defense.
        undefended_down: The same without the defense.
        time_ratio: Time of a client's round over that without the defense.
        settings: How the federation trained.
        curves: One per seed.
        guarantee: Of the whole training; None where the folder does not say.
    """

    accuracy: Estimate
    undefended: Estimate | None = None
    difference: Estimate | None = None
    pmm: Estimate | None = None
    chance: float | None = None
    bytes_up: float | None = None
    bytes_down: float | None = None
    undefended_up: float | None = None
    undefended_down: float | None = None
    time_ratio: float | None = None
    settings: Mapping[str, Any]
    curves: tuple[Curve, ...] = ()
    guarantee: Guarantee | None = None

    @property
    def up_ratio(self) -> float | None:
        """Bytes sent by clients, relative to training without a defense."""
        return None if self.bytes_up is None or not self.undefended_up else self.bytes_up / self.undefended_up

    @property
    def total_ratio(self) -> float | None:
        """Bytes in both directions, relative to training without a defense."""
        if self.bytes_up is None or self.bytes_down is None or self.undefended_up is None or self.undefended_down is None:
            return None
        without = self.undefended_up + self.undefended_down
        return (self.bytes_up + self.bytes_down) / without if without else None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the plan's grid, measured."""

    key: str
    settings: Mapping[str, Any]
    defense: Defense
    threat: Threat
    n: int
    candidates: int | None
    selected: Summary
    plain: Summary | None
    informed: Summary | None
    best_by_truth: Summary | None
    regret_median: float | None
    regret_worst: float | None
    regret_flagged: bool
    attackers: tuple[Attacker, ...]
    nulls: Mapping[str, Summary]
    bar: Bar | None
    bar_psnr: Bar | None
    records: tuple[Record, ...]
    checks: tuple[Check, ...]
    bytes_up: float | None
    bytes_dense: float | None
    utility: Utility | None
    timing: Timing
    pictures: Path | None
    certificate: Certificate | None = None
    risk: Risk | None = None
    region: Region | None = None

    @property
    def exposed(self) -> Share:
        """What the strongest attacker identified: the choice, or who alone is ahead, as `gradveil.significance.clearly_ahead`."""
        alone = [attacker.summary.identified for attacker in self.attackers if attacker.summary is not None]
        chosen = self.selected.identified
        return max((share for share in alone if share.low > chosen.high), key=lambda share: share.value, default=chosen)

    @property
    def ensemble(self) -> str:
        """The named, frozen ensemble that attacked."""
        return str(self.settings.get("ensemble", "the ensemble of this run"))

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that take the verdict away."""
        return tuple(check for check in self.checks if check.level == "fail")

    @property
    def warnings(self) -> tuple[Check, ...]:
        """The checks that ask for care."""
        return tuple(check for check in self.checks if check.level == "warn")

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes sent, relative to the dense update."""
        return None if self.bytes_up is None or not self.bytes_dense else self.bytes_up / self.bytes_dense

    @property
    def accuracy(self) -> Estimate | None:
        """Accuracy after training with the defense, where it was measured."""
        return self.utility.accuracy if self.utility is not None else None

    @property
    def time_ratio(self) -> float | None:
        """Client time relative to no defense: of a whole local training where there was one, else of one update."""
        trained = self.utility.time_ratio if self.utility is not None else None
        return self.timing.ratio if trained is None else trained

    @property
    def sent_ratio(self) -> float | None:
        """Bytes sent relative to no defense: of whole trainings where there were some, else of one update."""
        trained = self.utility.up_ratio if self.utility is not None else None
        return self.bytes_ratio if trained is None else trained


@dataclass(frozen=True, kw_only=True)
class Run:
    """The plan, the command to run it again, provenance."""

    version: str
    title: str
    command: str
    plan: Mapping[str, Any]
    keys: tuple[str, ...]
    builtin_data: bool
    not_tested: tuple[str, ...]
    provenance: Mapping[str, Any]
    cards: Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Results:
    """A run with the cells that are done, in plan order, and what was odd about the folder."""

    run: Run
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> int:
        """How many listed cells are not done."""
        return len(self.run.keys) - len(self.cells)
