"""α, the centre of InvRE: the mean score of undefended records of a reference set, measured once and kept with its provenance.

Scores with different α cannot be compared, so one α is frozen with the package: LeNet, built-in photos. Another is measured by
`gradveil risk --calibrate`, and used by ``--alpha FILE``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gradveil
from gradveil.errors import UsageError
from gradveil.risk.exposure import Assessment
from gradveil.risk.invre import TOLERANCE

__all__ = ["Calibration", "built_in_calibration", "calibrate", "read_alpha"]

FILE = Path(__file__).with_name("calibration.json")


@dataclass(frozen=True)
class Calibration:
    """α and where it comes from.

    Attributes:
        alpha: Mean score.
        spread: Standard deviation of the scores.
        records: How many.
        data: Which.
        digest: SHA-256 of the data's content.
        model: Spelling, at its first weights unless ``weights`` are named.
        weights: File of weights, or empty.
        seed: Of weights and choice of records.
        mode: How spectra were computed.
        gap_rule: merge, clamp or strict.
        tolerance: Of rank and gaps.
        residual: complete or paper.
        version: Of gradveil.
    """

    alpha: float
    spread: float
    records: int
    data: str
    digest: str
    model: str
    weights: str
    seed: int
    mode: str
    gap_rule: str
    tolerance: float
    residual: str
    version: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def calibrate(assessment: Assessment, *, data: str, digest: str, weights: str, seed: int) -> Calibration:
    """Return the mean score of an assessment of undefended records as α.

    Raises:
        UsageError: The records were defended.
    """
    if assessment.defense != "none":
        raise UsageError(f"α is the mean score of undefended records, not of {assessment.defense}; calibrate with --defense none")
    scores = [record.score for record in assessment.records]
    mean = sum(scores) / len(scores)
    return Calibration(
        alpha=mean,
        spread=(sum((score - mean) ** 2 for score in scores) / max(1, len(scores) - 1)) ** 0.5,
        records=len(scores),
        data=data,
        digest=digest,
        model=assessment.model,
        weights=weights,
        seed=seed,
        mode="+".join(sorted({record.mode for record in assessment.records})),
        gap_rule=assessment.records[0].gap_rule,
        tolerance=TOLERANCE,
        residual="complete",
        version=gradveil.__version__,
    )


@cache
def built_in_calibration() -> Calibration:
    """Return the calibration that ships with the package."""
    return _read(FILE)


def read_alpha(text: str | None) -> float:
    """Return α from a number, a file written by ``--calibrate``, or the package."""
    if text is None:
        return built_in_calibration().alpha
    try:
        value = float(text)
    except ValueError:
        return _read(Path(text)).alpha
    if not 0 <= value < float("inf"):
        raise UsageError(f"alpha is {text}; give a number from 0 on, or a file written by gradveil risk --calibrate")
    return value


def _read(path: Path) -> Calibration:
    try:
        return Calibration(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{str(path)!r} is no calibration ({type(error).__name__}); write one with gradveil risk --calibrate"
        ) from error
