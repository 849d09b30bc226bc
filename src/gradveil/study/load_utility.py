"""Read what trainings found: the utility of a cell, and the curves and times of the trainings behind it.

A training whose file is missing or damaged costs its curve and its time, nothing else: the cell holds the numbers.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from gradveil.study.fields import Fields, Malformed, read_json
from gradveil.study.results import Curve, Estimate, Guarantee, Utility

__all__ = ["load_utility", "read_curve", "read_guarantee"]

TRAINING_FORMAT = "gradveil-utility-1"
KEY = re.compile(r"[0-9a-f]{16}")


def load_utility(utility: Fields, folder: Path) -> Utility | None:
    """Return the utility of a cell, or None where none was measured.

    Args:
        utility: The part ``utility`` of a cell.
        folder: Where the trainings are kept.
    """
    accuracy = _estimate(utility.part("accuracy"))
    if accuracy is None:
        return None
    sent, keys, pairs = utility.part("bytes"), utility.texts("trainings"), utility.texts("baseline")
    curves = [_load_curve(folder, key) for key in keys]
    undefended = [_load_curve(folder, key) for key in pairs]
    return Utility(
        accuracy=accuracy,
        undefended=_estimate(utility.part("undefended")),
        difference=_estimate(utility.part("difference")),
        pmm=_estimate(utility.part("pmm")),
        chance=utility.number("chance"),
        bytes_up=sent.number("up"),
        bytes_down=sent.number("down"),
        undefended_up=sent.number("undefended_up"),
        undefended_down=sent.number("undefended_down"),
        time_ratio=1.0 if keys and keys == pairs else _time_ratio(curves, undefended),
        settings=utility.mapping("settings"),
        curves=tuple(curve for curve in curves if curve is not None),
        guarantee=read_guarantee(utility.part("guarantee")),
    )


def read_guarantee(guarantee: Fields) -> Guarantee | None:
    """Return what is proved, or None where the folder does not say."""
    if not guarantee.text("sentence"):
        return None
    return Guarantee(
        epsilon=guarantee.number("epsilon"),
        unit=guarantee.text("unit"),
        sentence=guarantee.text("sentence"),
        assumptions=guarantee.texts("assumptions"),
    )


def _estimate(part: Fields) -> Estimate | None:
    value = part.number("value")
    if value is None:
        return None
    return Estimate(value=value, low=part.number("low"), high=part.number("high"), n=part.whole("n", 0) or 0)


def _time_ratio(curves: Sequence[Curve | None], undefended: Sequence[Curve | None]) -> float | None:
    """Return client time over that without the defense: best times of all seeds where they were measured in turns.

    Other work on the machine only ever makes a time longer, so the best of several is the nearest to the truth. Where nothing was
    measured in turns, it is the time that the clients of both trainings took.
    """
    timed = [curve for curve in curves if curve is not None and curve.latency is not None]
    if timed:
        return min(c.defended_ms or 0.0 for c in timed) / min(c.undefended_ms or 1.0 for c in timed)
    pairs = [
        (a.client_seconds, b.client_seconds) for a, b in zip(curves, undefended, strict=False) if a is not None and b is not None
    ]
    ratios = [a / b for a, b in pairs if a and b]
    return statistics.median(ratios) if ratios else None


def _load_curve(folder: Path, key: str) -> Curve | None:
    if not KEY.fullmatch(key):
        return None
    try:
        found = Fields(read_json(folder / f"{key}.json"), f"{key}.json")
    except Malformed:
        return None
    if found.text("format") != TRAINING_FORMAT:
        return None
    try:
        timing = Fields(read_json(folder / f"{key}.timing.json"), f"{key}.timing.json")
    except Malformed:
        timing = Fields({}, key)
    seed, seconds = found.part("training").whole("seed"), timing.numbers("client_seconds")
    return read_curve(found, seed, seconds, timing.part("latency"))


def read_curve(training: Fields, seed: int | None, client_seconds: Sequence[float], latency: Fields) -> Curve:
    """Return the accuracy by round of a training; rounds that were not evaluated are left out."""
    looks = [(each.whole("round"), each.number("accuracy")) for each in training.parts("rounds")]
    seen = [(number, accuracy) for number, accuracy in looks if number is not None and accuracy is not None]
    return Curve(
        seed=seed,
        rounds=tuple(number for number, _ in seen),
        accuracy=tuple(accuracy for _, accuracy in seen),
        # The median round: one that the machine was busy in does not count.
        client_seconds=statistics.median(client_seconds) if client_seconds else None,
        defended_ms=latency.number("defended_ms"),
        undefended_ms=latency.number("undefended_ms"),
    )
