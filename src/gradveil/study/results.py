"""What an audit finds, as values: the one declaration of run.json and cells/KEY.json (docs/results-format.md).

`gradveil.audit.cell` builds a `CellResult`, the results folder keeps it as `gradveil.study.codec` writes it, and verdict, report
and command line read the same class. A number that is missing or not finite is ``None`` everywhere, so nothing downstream can
print it by accident.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradveil.study.cell import CELL_FORMAT
from gradveil.study.cell_exposure import CellExposure
from gradveil.study.codec import BESIDE, OMITTED, REASONS, decode, named
from gradveil.study.evidence import Gap, Power
from gradveil.study.headline import Contender, clusters_of, contenders, headline_share, largest, with_clusters
from gradveil.study.kept import KeptCell, KeptUtility
from gradveil.study.levels import Levels
from gradveil.study.measures import Bar, Estimate, Paired, Quality, Share, Summary
from gradveil.study.proved import Certificate, Guarantee
from gradveil.study.risks import CellRisk
from gradveil.study.training_result import Curve

__all__ = [
    "Attacker",
    "Bars",
    "CellResult",
    "Check",
    "Defense",
    "Record",
    "Region",
    "Regret",
    "Sent",
    "Threat",
    "Timing",
    "TrainingBytes",
    "Utility",
]


@dataclass(frozen=True, kw_only=True)
class Region:
    """Pictures measured inside the box around what the model looks at most, by group of candidates.

    Attributes:
        share: Share of salience that the box is made for.
        area: Mean share of the picture inside it.
    """

    share: float | None = None
    area: float
    selected: Quality | None = field(default=None, metadata=OMITTED)
    best_by_truth: Quality | None = field(default=None, metadata=OMITTED)
    plain: Quality | None = field(default=None, metadata=OMITTED)
    informed: Quality | None = field(default=None, metadata=OMITTED)
    data_mean: Quality | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True, kw_only=True)
class Bars:
    """The best null by the share identified, and by PSNR."""

    identified: Bar | None = None
    psnr: Bar | None = None


@dataclass(frozen=True, kw_only=True)
class Regret:
    """What choosing by truth would gain over the attacker's choice, in dB; ``flagged`` where that is much."""

    median: float | None = None
    worst: float | None = None
    flagged: bool = False


@dataclass(frozen=True, kw_only=True)
class Check:
    """One reason to trust a number, or not to; an unknown level is read as a warning, since doubt must not get lost."""

    name: str = ""
    level: Literal["ok", "warn", "fail"] = "warn"
    sentence: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Attacker:
    """One recipe in one stance: how often it tried, how often it was selected, and what it reached alone."""

    recipe: str = ""
    stance: str = ""
    tries: int | None = None
    chosen: int | None = None
    rehearsal_psnr: float | None = None
    summary: Summary | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """One training record under its pseudonym, with the candidate the attacker selected for it.

    Attributes:
        gap: The referee's score of what was selected for its update, minus that of the truth.
    """

    pseudonym: str = ""
    owner: str | None = None
    label: int | str | None = None
    label_correct: bool | None = None
    identified: bool = False
    rank: int | None = None
    psnr: float | None = None
    ssim: float | None = None
    mse: float | None = None
    lpips: float | None = None
    recipe: str = ""
    stance: str = ""
    regret_db: float | None = None
    gap: float | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True, kw_only=True)
class Defense:
    """The defense of a cell: its spelling, its parts, its place on the strength ladder, and what it tells of itself."""

    spelling: str = ""
    parts: tuple[str, ...] = ()
    rung: int | None = None
    rungs: int | None = None
    random: bool = False
    acts_on: tuple[str, ...] = ()
    secure_aggregation: bool | None = None
    guarantee: Guarantee | None = None
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_none(self) -> bool:
        """Whether the update leaves undefended."""
        return self.spelling.strip() in {"none", "none()", ""} or self.parts == ("none",)


@dataclass(frozen=True, kw_only=True)
class Threat:
    """Who attacks and what they see."""

    clients: int = 1
    rounds: int = 1
    knows: tuple[str, ...] = ()
    active: bool = False
    sees: str = "update"
    sentences: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes of one update, and of the same update dense."""

    up: float | None = None
    dense: float | None = None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What differs from run to run."""

    key: str = ""
    seconds: float | None = None
    attack_steps: int | None = None
    steps_per_second: float | None = None
    risk_seconds: float | None = None
    peak_memory_mb: float | None = None
    defense_ms: float | None = None
    undefended_ms: float | None = None

    @property
    def ratio(self) -> float | None:
        """Client time for one update, relative to an undefended one."""
        if not self.defense_ms or not self.undefended_ms:
            return None
        return self.defense_ms / self.undefended_ms


@dataclass(frozen=True, kw_only=True)
class TrainingBytes:
    """Bytes of a whole training, mean over seeds, with the defense and without."""

    up: float | None = None
    down: float | None = None
    undefended_up: float | None = None
    undefended_down: float | None = None


@dataclass(frozen=True, kw_only=True)
class Utility:
    """What trainings with a defense found, beside those without it.

    Attributes:
        settings: How the federation trained.
        seeds: Pairs that are done.
        trainings: Keys of the trainings with the defense, in the order of seeds.
        baseline: Keys of those without.
        accuracy: Of the trained model on records that this training did not use; weights that were given may have seen them.
        undefended: The same without the defense.
        difference: Defended minus undefended, by paired seeds.
        pmm: Defended over undefended, by paired seeds.
        chance: Accuracy of always naming the most frequent class.
        bytes: Sent in either direction.
        guarantee: Of the whole training; None where the folder does not say.
        curves: One per seed, from the trainings' own files.
        time_ratio: Time of a client's round over that without the defense, from those files.
    """

    settings: KeptUtility = field(default_factory=lambda: decode(KeptUtility, {}))
    seeds: tuple[int, ...] = ()
    trainings: tuple[str, ...] = ()
    baseline: tuple[str, ...] = ()
    accuracy: Estimate
    undefended: Estimate | None = None
    difference: Estimate | None = None
    pmm: Estimate | None = field(default=None, metadata=OMITTED)
    chance: float | None = None
    bytes: TrainingBytes = TrainingBytes()
    guarantee: Guarantee | None = None
    curves: tuple[Curve, ...] = field(default=(), metadata=BESIDE)
    time_ratio: float | None = field(default=None, metadata=BESIDE)

    @property
    def up_ratio(self) -> float | None:
        """Bytes sent by clients, relative to training without a defense."""
        return None if self.bytes.up is None or not self.bytes.undefended_up else self.bytes.up / self.bytes.undefended_up

    @property
    def total_ratio(self) -> float | None:
        """Bytes in both directions, relative to training without a defense."""
        sent = self.bytes
        if sent.up is None or sent.down is None or sent.undefended_up is None or sent.undefended_down is None:
            return None
        without = sent.undefended_up + sent.undefended_down
        return (sent.up + sent.down) / without if without else None


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """One cell of the plan's grid, measured; docs/results-format.md says what each part means.

    ``informed_by`` says whose searches ``informed`` is made of: ``own`` (the defense's own attacker's among them), ``generic``
    (only those that need no author), ``none``; empty where there was nothing to know, or the file is older. ``asked_steps`` is
    the most steps an attacker asked for, 0 in older files.
    """

    KEYS = (
        *("format", "key", "cell", "defense", "threat", "n", "candidates", "chance", "selected", "best_by_truth", "plain"),
        *("informed", "informed_gain", "informed_by", "asked_steps"),
        *("levels", "gap", "power", "duplicates", "region", "regret_db", "attackers", "nulls", "bar", "records"),
        *("checks", "bytes", "certificate", "risk", "exposure", "utility"),
    )
    format = CELL_FORMAT

    key: str = ""
    settings: KeptCell = field(default_factory=lambda: decode(KeptCell, {}), metadata=named("cell"))
    defense: Defense = Defense()
    threat: Threat = Threat()
    n: int = 0
    candidates: int | None = None
    chance: float | None = None
    selected: Summary
    best_by_truth: Summary | None = None
    plain: Summary | None = None
    informed: Summary | None = None
    informed_gain: Paired | None = field(default=None, metadata=OMITTED)
    informed_by: str = field(default="", metadata=OMITTED)
    asked_steps: int = field(default=0, metadata=OMITTED)
    levels: Levels | None = field(default=None, metadata=OMITTED)
    gap: Gap | None = field(default=None, metadata=OMITTED)
    power: Power | None = field(default=None, metadata=OMITTED)
    duplicates: int = field(default=0, metadata=OMITTED)
    region: Region | None = None
    regret: Regret = field(default=Regret(), metadata=named("regret_db"))
    attackers: tuple[Attacker, ...] = ()
    nulls: Mapping[str, Summary] = field(default_factory=dict)
    bar: Bars = Bars()
    records: tuple[Record, ...] = ()
    checks: tuple[Check, ...] = ()
    bytes: Sent = Sent()
    certificate: Certificate | None = None
    risk: CellRisk | None = None
    exposure: CellExposure | None = field(default=None, metadata=OMITTED)
    utility: Utility | None = field(default=None, metadata=OMITTED)
    unavailable: Mapping[str, str] = field(default_factory=dict, metadata=REASONS)
    timing: Timing = field(default=Timing(), metadata=BESIDE)
    pictures: Path | None = field(default=None, metadata=BESIDE)

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Take the defense's spelling from the settings where the description of the defense has none."""
        settings, defense = values.get("cell"), values.get("defense")
        asked = settings.get("defense", "") if isinstance(settings, dict) else ""
        return {**values, "defense": {"spelling": asked, **(defense if isinstance(defense, dict) else {})}}

    @property
    def identified(self) -> Share:
        """What the strongest attacker identified: the largest count that an attacker's own referee chose; see `headline`."""
        return headline_share([each.share for each in contenders(self)])

    @property
    def distinct(self) -> int | None:
        """Candidates among which a record is identified, copies counted as one."""
        return self.candidates - self.duplicates if self.candidates else None

    def told(self, share: Share) -> Share:
        """Return a share of this cell; of an older one, whose interval took records for independent, with one by clusters."""
        return with_clusters(share, self.records, clusters_of(self.records, self.settings.batch_size * self.settings.clients))

    @property
    def strongest(self) -> Contender:
        """Who identified that many."""
        return largest(contenders(self))

    @property
    def ensemble(self) -> str:
        """The named, frozen ensemble that attacked; where its steps were capped, that is part of its name."""
        name, cap = self.settings.said("ensemble") or "the ensemble of this run", self.settings.said("steps")
        return f"{name} cut off after {cap:,} steps" if cap else str(name)

    @property
    def capped(self) -> bool:
        """Whether attackers had fewer steps than they asked for; of an older file, whether there was a cap."""
        cap = self.settings.said("steps") or 0
        return bool(cap) and (not self.asked_steps or cap < self.asked_steps)

    @property
    def moved(self) -> bool:
        """Whether searches of those who know the defense went anywhere; true of an older file, which does not say."""
        return all(check.level == "ok" for check in self.checks if check.name == "informed_moved")

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
        return None if self.bytes.up is None or not self.bytes.dense else self.bytes.up / self.bytes.dense

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
